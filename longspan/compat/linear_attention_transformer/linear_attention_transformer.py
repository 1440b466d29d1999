"""Models and layers of linear-attention-transformer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.containers import ReversibleSequence, SequentialSequence
from longspan.compat.faithful import resolve_faithful
from longspan.compat.helpers import GELU_, cast_tuple, exists, max_neg_value, rotate_every_two, shift
from longspan.compat.layers import Chunk, FeedForward, PreNorm, as_bool, zero_fill
from longspan.compat.linear_attention_transformer.functions import (
    always,
    apply_rotory_pos_emb,
    causal_linear_attn,
    default,
    expand_dim,
    lcm,
    linear_attn,
    merge_dims,
    safe_div,
    split_at_index,
)
from longspan.compat.linear_attention_transformer.keys import stack_keys
from longspan.compat.linear_attention_transformer.layers import (
    PKM,
    AbsolutePositionalEmbedding,
    AlignedRows,
    AxialPositionalEmbedding,
    FixedPositionalEmbedding,
    FoldAxially,
    LinformerSelfAttention,
    PreShiftTokens,
    ProjectInOut,
    SelfAttention,
    sinusoids,
)
from longspan.compat.linear_attention_transformer.options import (
    LanguageModelOptions,
    LinformerContextSettings,
    LinformerSettings,
    ModelOptions,
    TransformerOptions,
)
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModel, KeyMapping, rename, rename_layer, with_prefix
from longspan.models.checkpoint import Model
from longspan.models.transformer import LanguageModel, Transformer

__all__ = [
    "GELU_",
    "PKM",
    "AbsolutePositionalEmbedding",
    "AxialPositionalEmbedding",
    "Chunk",
    "FeedForward",
    "FixedPositionalEmbedding",
    "FoldAxially",
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSelfAttention",
    "LinformerSettings",
    "PreNorm",
    "PreShiftTokens",
    "ProjectInOut",
    "ReversibleSequence",
    "SelfAttention",
    "SequentialSequence",
    "always",
    "apply_rotory_pos_emb",
    "cast_tuple",
    "causal_linear_attn",
    "default",
    "exists",
    "expand_dim",
    "lcm",
    "linear_attn",
    "max_neg_value",
    "merge_dims",
    "rotate_every_two",
    "safe_div",
    "shift",
    "split_at_index",
]

GELU = nn.GELU
_TRANSFORMER_POSITIONAL = (
    "dim depth max_seq_len heads dim_head bucket_size causal ff_chunks ff_glu ff_dropout attn_layer_dropout "
    "attn_dropout reversible blindspot_size n_local_attn_heads local_attn_window_size receives_context attend_axially "
    "pkm_layers pkm_num_keys linformer_settings context_linformer_settings shift_tokens"
)
_LM_POSITIONAL = (
    "num_tokens dim depth max_seq_len heads dim_head causal emb_dim reversible ff_chunks ff_glu ff_dropout "
    "attn_layer_dropout attn_dropout blindspot_size n_local_attn_heads local_attn_window_size return_embeddings "
    "receives_context pkm_layers pkm_num_keys attend_axially linformer_settings context_linformer_settings "
    "use_axial_pos_emb use_rotary_emb shift_tokens"
)


class LinearAttentionTransformer(CompatModel):
    """Transformer of local and linear attention for vectors, (B, T, dim) -> (B, T, dim).

    bucket_size has no effect, as in the original. faithful: Compute as the original does, where it is corrected here;
    see `longspan.compat.faithful`.
    """

    @init_from(TransformerOptions, _TRANSFORMER_POSITIONAL)
    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        self._build(_resolved(options))

    @classmethod
    def _from_options(cls, options: ModelOptions) -> LinearAttentionTransformer:
        """Build the transformer of a language model."""
        model = cls.__new__(cls)
        CompatModel.__init__(model)
        model._build(options)
        return model

    def _build(self, options: Any) -> None:
        self.requested = self.options = options
        self.max_seq_len, self.pad_to_multiple = options.max_seq_len, options.pad_to_multiple
        self.causal, self.faithful = options.causal, bool(options.faithful)
        pairs: Any = nn.ModuleList(
            nn.ModuleList([PreNorm(options.dim, layer) for layer in pair])
            for i in range(options.depth)
            for pair in self._layer(i)
        )
        self.layers: Any = (ReversibleSequence if options.reversible else SequentialSequence)(pairs, self._routes())
        self._initialize()
        self.record_structure()

    def _layer(self, i: int) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the pairs of an attention and a feed-forward layer of layer i."""
        o = self.options
        attention: dict[str, Any] = {"dim_head": o.dim_head, "dropout": o.attn_layer_dropout, "faithful": o.faithful}
        pair: list[nn.Module] = [self._self_attention(i, attention), self._feed_forward(i)]
        if o.shift_tokens:
            pair = [PreShiftTokens(o.shifts, layer, faithful=o.faithful) for layer in pair]
        yield pair[0], pair[1]
        if o.attend_axially:
            heads = SelfAttention(o.dim, o.heads, o.causal, **{**attention, "dim_head": None})
            yield FoldAxially(o.local_attn_window_size, heads), self._side_feed_forward()
        if o.receives_context:
            settings = o.context_settings
            if settings is None:
                cross: nn.Module = SelfAttention(o.dim, o.heads, receives_context=True, **attention)
            else:
                cross = self._linformer(settings.seq_len, settings.k)
            yield cross, self._side_feed_forward()

    def _self_attention(self, i: int, attention: Mapping[str, Any]) -> nn.Module:
        o = self.options
        if o.settings is not None:
            return self._linformer(o.max_seq_len, o.settings.k)
        return SelfAttention(
            o.dim,
            o.heads,
            o.causal,
            blindspot_size=o.blindspot_size,
            n_local_attn_heads=o.local_heads[i],
            local_attn_window_size=o.local_attn_window_size,
            attn_dropout=o.attn_dropout,
            **attention,
        )

    def _linformer(self, length: int, k: int) -> nn.Module:
        o = self.options
        return LinformerSelfAttention(
            o.dim,
            length,
            k=k,
            heads=o.heads,
            dim_head=o.dim_head,
            dropout=o.attn_dropout,
            layer_dropout=o.attn_layer_dropout,
            faithful=o.faithful,
        )

    def _feed_forward(self, i: int) -> nn.Module:
        """Build the layer after self-attention."""
        o = self.options
        if i in o.memory_layers:
            return PKM(o.dim, num_keys=o.num_keys)
        gated, dropout = o.own_feed_forward
        return Chunk(o.ff_chunks, FeedForward(o.dim, glu=gated, dropout=dropout), along_dim=1)

    def _side_feed_forward(self) -> nn.Module:
        o = self.options
        return Chunk(o.ff_chunks, FeedForward(o.dim, glu=o.ff_glu, dropout=o.ff_dropout), along_dim=1)

    def _routes(self) -> dict[str, tuple[tuple[bool, bool], ...]]:
        o = self.options
        # Token shift before a feed-forward layer needs the mask of padding.
        own = True, o.shift_tokens and not o.faithful
        axial, cross = [(True, False)] * o.attend_axially, [(True, False)] * o.receives_context
        nothing = (False, False)
        of_layer = {"input_mask": (own, *axial, *cross), "pos_emb": ((True, False), *axial, *cross)}
        if o.receives_context:
            of_layer |= dict.fromkeys(("context", "context_mask"), (nothing, *[nothing] * len(axial), *cross))
        return {name: tuple(routes) * o.depth for name, routes in of_layer.items()}

    def _initialize(self) -> None:
        """Draw weights of order 1/√fan-in; output projections are divided by the square root of the branches."""
        branches = self.branches()
        for branch in branches:
            for name, module in branch.named_modules():
                if not isinstance(module, nn.Linear) or name.endswith("to_queries"):
                    continue
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
                if name.endswith((".to_out", ".w2")):
                    with torch.no_grad():
                        module.weight.mul_(len(branches) ** -0.5)

    def branches(self) -> list[Any]:
        """Return the attention and feed-forward layers in order, with their norms."""
        if isinstance(self.layers, ReversibleSequence):
            return [half.net for block in list[Any](self.layers.blocks) for half in (block.f, block.g)]
        return [layer for pair in self.layers.layers for layer in pair]

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
    ) -> Tensor:
        """Apply the model.

        Args:
            x: Vectors (B, T, dim).
            input_mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), with receives_context.
            context_mask: (B, S), True for tokens of the context to attend to.
            pos_emb: (1, T, dim_head) from `FixedPositionalEmbedding`, for rotary positions.
        """
        self._check(x, input_mask, context, context_mask)
        mask, rows = as_bool(input_mask), None
        if mask is not None and not self.faithful:
            x = zero_fill(x, mask)
            if self.causal and x.shape[1]:
                rows = AlignedRows(mask)
                x, mask = rows.align(x), rows.mask
        given = {"input_mask": mask, "context": context, "context_mask": as_bool(context_mask), "pos_emb": pos_emb}
        out = self.layers(x, **{name: value for name, value in given.items() if value is not None})
        return out if rows is None else rows.restore(out)

    def _check(self, x: Tensor, input_mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> None:
        if self.options.receives_context and context is None:
            raise ValueError("this model attends to a context: pass context=, of shape (B, S, dim)")
        if not self.options.receives_context and (context is not None or context_mask is not None):
            raise ValueError(
                "a context was given, but this model has no cross-attention: build it with receives_context=True"
            )
        for name, mask, tokens in (("input_mask", input_mask, x), ("context_mask", context_mask, context)):
            if mask is not None and tokens is not None and mask.shape != tokens.shape[:2]:
                raise ValueError(f"{name} must be {tuple(tokens.shape[:2])}, got {tuple(mask.shape)}")

    def longspan_model(self) -> Model:
        """Build a longspan model of the same architecture; see `CompatModel`."""
        self.options.check_convertible()
        return Transformer(self.options.config())

    def key_mappings(self) -> Iterable[KeyMapping]:
        """Map the keys to those of the longspan model."""
        return stack_keys(self.branches(), reversible=self.options.reversible)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        """Adapt the model; warn of the options that the checkpoint was trained without."""
        if ignored := self.adapt(shapes):
            warnings.warn(
                f"this checkpoint was trained without {', '.join(ignored)}, which the original ignored in the layer "
                "after self-attention: the model was rebuilt with its shapes (create the optimizer after loading)",
                stacklevel=5,
            )

    def adapt(self, shapes: Mapping[str, torch.Size]) -> list[str]:
        """Rebuild feed-forward layers with the shapes of a checkpoint; return the options that it ignored.

        See `ModelOptions.adapt`.
        """
        before, unaltered = self.options, not self.altered()
        self.options, ignored = self.options.adapt(shapes, self.requested)
        if self.options == before:
            return ignored
        for i, branch in enumerate(self.branches()[1 :: 2 * self.options.branch_pairs]):
            holder = branch.fn if isinstance(getattr(branch, "fn", None), PreShiftTokens) else branch
            old = getattr(holder, "fn", None)
            if not isinstance(old, PKM | Chunk):
                continue
            parameter, new = next(old.parameters()), self._feed_forward(i)
            if [p.shape for p in new.parameters()] != [p.shape for p in old.parameters()]:
                holder.fn = new.to(parameter.device, parameter.dtype).train(old.training)
        if unaltered:
            self.record_structure()
        return ignored


class LinearAttentionTransformerLM(CompatModel):
    """Language model of local and linear attention: tokens (B, T) -> logits (B, T, num_tokens).

    With return_embeddings it returns hidden states (B, T, dim). faithful: Compute as the original does, where it is
    corrected here; see `longspan.compat.faithful`.
    """

    @init_from(LanguageModelOptions, _LM_POSITIONAL)
    def __init__(self, options: LanguageModelOptions) -> None:
        super().__init__()
        options = _resolved(options)
        dim = options.dim if options.emb_dim is None else options.emb_dim
        self.max_seq_len, self.return_embeddings = options.max_seq_len, options.return_embeddings
        self.causal, self.faithful = options.causal, bool(options.faithful)
        self.token_emb = nn.Embedding(options.num_tokens, dim)
        nn.init.normal_(self.token_emb.weight, std=0.02)
        self.layer_pos_emb: Any = always(None)
        if options.use_rotary_emb:
            self.pos_emb: nn.Module = FixedPositionalEmbedding(dim, options.max_seq_len)
            self.layer_pos_emb = FixedPositionalEmbedding(options.head_dim, options.max_seq_len)
        elif options.use_axial_pos_emb:
            self.pos_emb = AxialPositionalEmbedding(dim, options.axial_shape)
        else:
            self.pos_emb = AbsolutePositionalEmbedding(dim, options.max_seq_len)
        inner = LinearAttentionTransformer._from_options(options)
        self.transformer: nn.Module = inner
        out_dim = dim
        if dim != options.dim:
            self.transformer = ProjectInOut(inner, dim, options.dim, project_out=not options.return_embeddings)
            out_dim = options.dim if options.return_embeddings else dim
        self.norm = nn.LayerNorm(out_dim)
        self.out = nn.Identity() if options.return_embeddings else nn.Linear(dim, options.num_tokens)
        self.record_structure()

    @property
    def inner(self) -> LinearAttentionTransformer:
        """The transformer between the embeddings and the output."""
        inner = self.get_submodule(self._inner_name)
        assert isinstance(inner, LinearAttentionTransformer)
        return inner

    @property
    def options(self) -> LanguageModelOptions:
        """The arguments of the constructor."""
        return self.inner.options

    @property
    def pad_to_multiple(self) -> int:
        """The number of which lengths had to be a multiple in the original; here any length works."""
        return self.inner.pad_to_multiple

    @property
    def _inner_name(self) -> str:
        return "transformer.fn" if isinstance(self.transformer, ProjectInOut) else "transformer"

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply the model.

        Args:
            x: Tokens (B, T).
            input_mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), with receives_context.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        if x.ndim != 2 or x.is_floating_point():
            raise ValueError(f"tokens must be (B, T) integers, got {tuple(x.shape)} {x.dtype}")
        mask, rows, length = as_bool(input_mask), None, x.shape[1]
        if mask is not None and self.causal and not self.faithful and length:
            rows = AlignedRows(mask)
            x, mask = rows.align(x), rows.mask
            if length > self.max_seq_len:  # padding has no position
                longest = max(self.max_seq_len, int(mask.sum(1).max()))
                x, mask = x[:, :longest], mask[:, :longest]
        given = {"input_mask": mask, "context": context, "context_mask": context_mask}
        x = self.token_emb(x)
        x = x + self.pos_emb(x).to(x.dtype)
        given["pos_emb"] = self.layer_pos_emb(x)
        x = self.transformer(x, **{name: value for name, value in given.items() if value is not None})
        out = self.out(self.norm(x))
        return out if rows is None else rows.restore(F.pad(out, (0, 0, 0, length - out.shape[1])))

    def longspan_model(self) -> Model:
        """Build a longspan model of the same architecture; see `CompatModel`."""
        self.options.check_convertible()
        for name in ("pos_emb", "layer_pos_emb"):
            emb = getattr(getattr(self, name), "emb", None)
            if isinstance(emb, Tensor):
                exact = sinusoids(emb.shape[1], len(emb), emb.device)
                if not torch.allclose(emb.float(), exact, atol=0.02):
                    raise ValueError(f"{name}.emb holds other values than the sines and cosines of positions")
        return LanguageModel(self.options.config())

    def key_mappings(self) -> Iterable[KeyMapping]:
        """Map the keys to those of the longspan model."""
        yield rename("token_emb.weight", "embedding.weight")
        if isinstance(self.pos_emb, AbsolutePositionalEmbedding):
            yield rename("pos_emb.emb.weight", "positions.table")
        elif isinstance(self.pos_emb, AxialPositionalEmbedding):
            yield from (rename(f"pos_emb.weights.{i}", f"positions.tables.{i}") for i in range(2))
        yield from with_prefix(self.inner.key_mappings(), f"{self._inner_name}.", "transformer.")
        narrow = False
        if isinstance(self.transformer, ProjectInOut):
            narrow = not self.return_embeddings
            yield from rename_layer("transformer.project_in", "to_dim")
            if narrow:
                yield from rename_layer("transformer.project_out", "from_dim")
            else:  # hidden states are not projected back: the longspan model does not use it
                dim, wide = self.token_emb.embedding_dim, self.options.dim
                shapes = [(dim, wide), (dim,)]
                new = ("from_dim.weight", "from_dim.bias")
                like = self.token_emb.weight
                yield KeyMapping((), new, lambda _: [like.new_zeros(shape) for shape in shapes])
        yield from rename_layer("norm", "narrow_norm" if narrow else "transformer.norm")
        if not self.return_embeddings:
            yield from rename_layer("out", "to_logits")

    def upgrade_key(self, key: str) -> str:
        """Return the current key for a key from another release of the original."""
        return key.replace("pos_emb.weights_", "pos_emb.weights.")

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        """Adapt `inner`, which warns when it is loaded itself, and remember the new structure."""
        if not self.altered():
            inside = f"{self._inner_name}."
            self.inner.adapt(
                {key.removeprefix(inside): shape for key, shape in shapes.items() if key.startswith(inside)}
            )
            self.record_structure()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.return_embeddings:  # saved before version 0.2, and not used
            for name in ("weight", "bias"):
                state_dict.pop(f"{prefix}transformer.project_out.{name}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _resolved(options: Any) -> Any:
    """Check options and warn of those without effect; return them with the choice of `faithful`."""
    options = replace(options, faithful=resolve_faithful(options.faithful))
    options.check()
    if unused := options.unused_arguments():
        warnings.warn(f"without effect, as in the original: {'; '.join(unused)}", stacklevel=5)
    return options
