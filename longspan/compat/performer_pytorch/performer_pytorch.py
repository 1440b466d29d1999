"""Performer and PerformerLM of performer-pytorch."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.compressed import is_plain_linear
from longspan.compat.faithful import faithful, resolve_faithful
from longspan.compat.helpers import cast_tuple, default, exists, rotate_every_two, shift
from longspan.compat.layers import Chunk, zero_fill
from longspan.compat.local_attention import LocalAttention
from longspan.compat.options import init_from
from longspan.compat.performer_pytorch import keys
from longspan.compat.performer_pytorch.attention import (
    Attention,
    CrossAttention,
    FastAttention,
    SelfAttention,
    at_positions,
)
from longspan.compat.performer_pytorch.kernels import (
    causal_linear_attention,
    causal_linear_attention_noncuda,
    gaussian_orthogonal_random_matrix,
    generalized_kernel,
    linear_attention,
    orthogonal_matrix_chunk,
    softmax_kernel,
)
from longspan.compat.performer_pytorch.layers import (
    AbsolutePositionalEmbedding,
    Always,
    AxialPositionalEmbedding,
    FeedForward,
    FixedPositionalEmbedding,
    PreLayerNorm,
    PreScaleNorm,
    PreShiftTokens,
    ReZero,
    apply_rotary_pos_emb,
    empty,
    find_modules,
    get_module_device,
    null_context,
)
from longspan.compat.performer_pytorch.options import PerformerLMOptions, PerformerOptions
from longspan.compat.performer_pytorch.projection_updater import ProjectionUpdater
from longspan.compat.performer_pytorch.reversible import ReversibleSequence, SequentialSequence
from longspan.compat.state_dict import CompatModel, KeyMapping
from longspan.models.transformer import LanguageModel, Transformer
from longspan.ops.loss import IGNORE_INDEX, cross_entropy

# Scripts that import * also get what the original imports.
__all__ = [
    "AbsolutePositionalEmbedding",
    "Always",
    "Attention",
    "AxialPositionalEmbedding",
    "Chunk",
    "CrossAttention",
    "F",
    "FastAttention",
    "FeedForward",
    "FixedPositionalEmbedding",
    "LocalAttention",
    "Performer",
    "PerformerLM",
    "PreLayerNorm",
    "PreScaleNorm",
    "PreShiftTokens",
    "ProjectionUpdater",
    "ReZero",
    "ReversibleSequence",
    "SelfAttention",
    "SequentialSequence",
    "apply_rotary_pos_emb",
    "cast_tuple",
    "causal_linear_attention",
    "causal_linear_attention_noncuda",
    "default",
    "empty",
    "exists",
    "find_modules",
    "gaussian_orthogonal_random_matrix",
    "generalized_kernel",
    "get_module_device",
    "linear_attention",
    "math",
    "nn",
    "null_context",
    "orthogonal_matrix_chunk",
    "partial",
    "rotate_every_two",
    "shift",
    "softmax_kernel",
    "torch",
]
with contextlib.suppress(ImportError):
    from einops import rearrange, repeat

    __all__ += ["rearrange", "repeat"]

_PERFORMER_POSITIONAL = (
    "dim depth heads dim_head local_attn_heads local_window_size causal ff_mult nb_features feature_redraw_interval "
    "reversible ff_chunks generalized_attention kernel_fn use_scalenorm use_rezero ff_glu ff_dropout attn_dropout "
    "cross_attend no_projection auto_check_redraw qkv_bias attn_out_bias shift_tokens"
)


class Performer(CompatModel):
    """Transformer of FAVOR+ attention for vectors, (B, T, dim) -> (B, T, dim).

    Args:
        dim_head: By default dim / heads.
        faithful: Whether to compute as the original does, defects included; see docs/migrating.md.
    """

    @init_from(PerformerOptions, _PERFORMER_POSITIONAL)
    def __init__(self, options: PerformerOptions) -> None:
        super().__init__()
        self.faithful = resolve_faithful(options.faithful)
        self.options = options = replace(options, faithful=self.faithful, kernel_fn=options.own_kernel)
        if options.use_scalenorm and options.use_rezero:
            warnings.warn("use_rezero has no effect with use_scalenorm, as in the original", stacklevel=4)
        depth, cross_attend = options.depth, options.cross_attend
        with faithful(self.faithful):
            layers = nn.ModuleList(pair for i in range(depth) for pair in _layer_pairs(options, options.local_heads[i]))
        route = ((True, False),) * len(layers)
        routes = {"mask": route, "pos_emb": route}
        if options.shift_tokens and not self.faithful:
            routes["mask"] = ((True, True),) * len(layers)  # Both layers of a pair shift tokens.
        if cross_attend:
            routes["context"] = routes["context_mask"] = ((False, False), (True, False)) * depth
            routes["pos_emb"] = ((True, False), (False, False)) * depth
            routes["mask"] = tuple(r if i % 2 == 0 else (True, False) for i, r in enumerate(routes["mask"]))
        self.net = (ReversibleSequence if options.reversible else SequentialSequence)(layers, args_route=routes)
        self.auto_check_redraw = options.auto_check_redraw
        self.proj_updater = ProjectionUpdater(self.net, options.feature_redraw_interval)
        self.record_structure()

    def fix_projection_matrices_(self) -> None:
        """Stop redrawing random features."""
        self.proj_updater.fix_projections_()

    def check_redraw_projections(self) -> None:
        """Count a training step and redraw if the interval has passed: for auto_check_redraw=False."""
        self.proj_updater.redraw_projections()

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim).

        Args:
            x: The input.
            pos_emb: The output of FixedPositionalEmbedding(dim_head, …), for rotary positions.
            mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), for cross-attention.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        if self.options.cross_attend and context is None:
            raise ValueError("this model attends to a context: pass context=, of shape (B, S, dim)")
        if not self.options.cross_attend and (context is not None or context_mask is not None):
            raise ValueError("a context was given, but this model has no cross-attention: build it with cross_attend")
        if self.auto_check_redraw:
            self.proj_updater.redraw_projections()
        if not self.faithful:
            mask, context_mask = _drop_full(mask), _drop_full(context_mask)
            x = zero_fill(x, mask)
        given = {"mask": mask, "pos_emb": pos_emb, "context": context, "context_mask": context_mask}
        return self.net(x, **{name: value for name, value in given.items() if value is not None})

    def longspan_model(self) -> Transformer:
        return Transformer(_current_options(self, self.options).config())

    def key_mappings(self) -> Iterable[KeyMapping]:
        return keys.stack_keys(self.options)

    def upgrade_key(self, key: str) -> str:
        return "proj_updater.calls_since_last_redraw" if key == "calls_since_last_redraw" else key

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The layers have two names, and some checkpoints hold them under one of the two.
        net, instance = f"{prefix}net.", f"{prefix}proj_updater.instance."
        for key in list(state_dict):
            if key.startswith(instance):
                state_dict.setdefault(net + key.removeprefix(instance), state_dict[key])
        for key in list(state_dict):
            if key.startswith(net):
                state_dict[instance + key.removeprefix(net)] = state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _layer_pairs(options: PerformerOptions, local_heads: int) -> list[nn.ModuleList]:
    """Build a layer: self-attention, cross-attention if there is any, and a feed-forward layer after each."""
    dim = options.dim
    wrap: Callable[[nn.Module], nn.Module] = partial(PreLayerNorm, dim)
    if options.use_scalenorm:
        wrap = partial(PreScaleNorm, dim)
    elif options.use_rezero:
        wrap = ReZero
    shifts = () if not options.shift_tokens else (0, 1) if options.causal else (-1, 0, 1)
    features = ("nb_features", "generalized_attention", "kernel_fn", "no_projection")
    arguments: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("heads", *features, "qkv_bias", "attn_out_bias")},
        "dim_head": options.head_dim,
        "dropout": options.attn_dropout,
    }

    def feed_forward() -> Chunk:
        layer = FeedForward(dim, mult=options.ff_mult, dropout=options.ff_dropout, glu=options.ff_glu)
        return Chunk(options.ff_chunks, layer, along_dim=1)

    local = {"local_heads": local_heads, "local_window_size": options.local_window_size}
    pair: list[nn.Module] = [SelfAttention(dim, causal=options.causal, **local, **arguments), feed_forward()]
    if shifts:
        pair = [PreShiftTokens(shifts, layer) for layer in pair]
    pairs = [pair]
    if options.cross_attend:
        pairs.append([CrossAttention(dim, **arguments), feed_forward()])
    return [nn.ModuleList(map(wrap, pair)) for pair in pairs]


class PerformerLM(CompatModel):
    """Language model of FAVOR+ attention: tokens (B, T) -> logits (B, T, num_tokens).

    Args:
        tie_embedding: An alias of tie_embed.
        faithful: Whether to compute as the original does, defects included; see docs/migrating.md.
    """

    @init_from(PerformerLMOptions)
    def __init__(self, options: PerformerLMOptions) -> None:
        super().__init__()
        self.faithful = resolve_faithful(options.faithful)
        self.options = options = replace(options, faithful=self.faithful, kernel_fn=options.own_kernel)
        self.max_seq_len = options.max_seq_len
        self.token_emb = nn.Embedding(options.num_tokens, options.dim)
        with faithful(self.faithful):
            self.pos_emb = _position_embedding(options)
            self.layer_pos_emb: nn.Module = Always(None)
            if options.rotary_position_emb:
                self.layer_pos_emb = FixedPositionalEmbedding(options.head_dim, options.max_seq_len)
            self.dropout = nn.Dropout(options.emb_dropout)
            self.performer = Performer(**options.of_performer())
        self.norm = nn.LayerNorm(options.dim)
        self.to_out = None if options.tied else nn.Linear(options.dim, options.num_tokens)
        self.record_structure()

    def fix_projection_matrices_(self) -> None:
        """Stop redrawing random features."""
        self.performer.fix_projection_matrices_()

    def check_redraw_projections(self) -> None:
        """Count a training step and redraw if the interval has passed: for auto_check_redraw=False."""
        self.performer.check_redraw_projections()

    def forward(
        self,
        x: Tensor,
        return_encodings: bool = False,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, num_tokens), or with return_encodings the final hidden states (B, T, dim).

        Args:
            x: Tokens (B, T).
            return_encodings: Whether to return hidden states.
            mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), for cross-attention.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        if x.ndim != 2 or x.is_floating_point():
            raise ValueError(f"x must be tokens (B, T), integers, got {tuple(x.shape)} {x.dtype}")
        if x.shape[1] > self.max_seq_len:
            raise ValueError(
                f"x has {x.shape[1]} tokens, more than max_seq_len ({self.max_seq_len}): shorten it, or build the "
                "model with a larger max_seq_len"
            )
        mask = mask if self.faithful else _drop_full(mask)
        hidden = self.token_emb(x)
        positions = self.pos_emb(hidden)
        if mask is not None and self.options.causal and not self.faithful:
            positions = at_positions(positions, mask)
        hidden = self.dropout(hidden + positions)
        pos_emb = self.layer_pos_emb(hidden)
        hidden = self.performer(hidden, pos_emb=pos_emb, mask=mask, context=context, context_mask=context_mask)
        hidden = self.norm(hidden)
        if return_encodings:
            return hidden
        return F.linear(hidden, self.token_emb.weight) if self.to_out is None else self.to_out(hidden)

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of labels (B, T), ignoring labels of −100."""
        arguments: dict[str, Any] = {"mask": mask, "context": context, "context_mask": context_mask}
        head = self.token_emb if self.to_out is None else self.to_out
        if self.to_out is not None and not is_plain_linear(head):
            logits = self(x, **arguments)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        # Without the logits of all tokens: for a large vocabulary they need more memory than the model.
        hidden = self(x, return_encodings=True, **arguments)
        return cross_entropy(hidden.flatten(0, 1), head.weight, getattr(head, "bias", None), labels.flatten())

    def longspan_model(self) -> LanguageModel:
        return LanguageModel(_current_options(self.performer, self.options).config())

    def key_mappings(self) -> Iterable[KeyMapping]:
        return keys.language_model_keys(self.options)

    def upgrade_key(self, key: str) -> str:
        return keys.upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        options = self.options
        if isinstance(self.pos_emb, AxialPositionalEmbedding) and "pos_emb.emb" in shapes:
            warnings.warn(
                "this checkpoint was trained without axial_position_emb, which the original ignores with "
                "rotary_position_emb: the model now has sinusoidal positions",
                stacklevel=6,
            )
            self.options = replace(options, axial_position_emb=False)
            self.pos_emb = _position_embedding(self.options).to(self.token_emb.weight.device)
            self.record_structure("pos_emb")


def _position_embedding(options: PerformerLMOptions) -> nn.Module:
    axial = options.axial_position_emb and not (options.faithful and options.rotary_position_emb)
    if axial:
        return AxialPositionalEmbedding(options.dim, options.axial_shape)
    kind = FixedPositionalEmbedding if options.rotary_position_emb else AbsolutePositionalEmbedding
    return kind(options.dim, options.max_seq_len)


def _current_options(performer: Performer, options: Any) -> Any:
    """Return the options of a model with the redraws that are set now, for a model that is not faithful."""
    if performer.faithful:
        raise ValueError("the model is faithful to the original, whose numbers no longspan model computes")
    updater = performer.proj_updater
    return replace(
        options,
        feature_redraw_interval=updater.feature_redraw_interval,
        auto_check_redraw=performer.auto_check_redraw,
    )


def _drop_full(mask: Tensor | None) -> Tensor | None:
    """Replace a mask that is all True by None, where the check needs no synchronization: scripts often pass one."""
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return mask.bool()
