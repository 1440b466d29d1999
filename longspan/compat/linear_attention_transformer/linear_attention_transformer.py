"""The models of linear-attention-transformer, and the layers that people take out of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longspan.compat.linear_attention_transformer.keys import layer_entries, stack_entries
from longspan.compat.linear_attention_transformer.options import (
    LinformerContextSettings,
    LinformerSettings,
    Options,
)
from longspan.compat.linear_attention_transformer.options import (
    heads as mechanism_of,
)
from longspan.compat.state_dict import CompatModule, KeyMapping, constant, rename, rename_layer, reshape
from longspan.layout import TokenLayout
from longspan.models.config import AttentionConfig, FeedForwardConfig
from longspan.models.layers import Attention, mechanism_from
from longspan.models.layers import FeedForward as _FeedForward
from longspan.models.positions import AxialPositions, LearnedPositions, SinusoidalPositions
from longspan.models.transformer import LanguageModel, Transformer

__all__ = [
    "FeedForward",
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSettings",
    "SelfAttention",
    "causal_linear_attn",
    "linear_attn",
]


class _Model(CompatModule):
    """What both models share: a checkpoint's shapes may show that some of the options had no effect."""

    kind: ClassVar[type[Transformer] | type[LanguageModel]]

    def __init__(self, options: Options, fields: dict[str, Any]) -> None:
        super().__init__()
        self.asked = self.options = options
        self.fields, self.max_seq_len = fields, options.max_seq_len
        if idle := options.idle():
            warnings.warn(f"without effect here, as in the original: {'; '.join(idle)}", stacklevel=3)
        self.model = self.kind(options.config(**fields))

    @property
    def pad_to_multiple(self) -> int:
        """What lengths had to divide by in the original; here they need not."""
        return self.options.pad_to_multiple

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        self.options, without = self.options.settled(shapes, self.asked)
        if without:
            warnings.warn(
                f"this checkpoint was trained without {', '.join(without)}, which the original ignored in the layer "
                "after self-attention: the model is built anew to its shapes (make the optimizer after loading)",
                stacklevel=5,
            )
        config, like = self.options.config(**self.fields), next(self.model.parameters())
        if config != self.model.config:
            self.model = self.kind(config).to(like.device, like.dtype).train(self.training)


class LinearAttentionTransformer(_Model):
    """Vectors in, vectors out: (B, T, dim) -> (B, T, dim). bucket_size has no effect, as in the original."""

    kind = Transformer
    model: Transformer

    def __init__(
        self,
        dim: int,
        depth: int,
        max_seq_len: int,
        heads: int = 8,
        dim_head: int | None = None,
        bucket_size: int = 64,
        causal: bool = False,
        ff_chunks: int = 1,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_layer_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        reversible: bool = False,
        blindspot_size: int = 1,
        n_local_attn_heads: int | Sequence[int] = 0,
        local_attn_window_size: int = 128,
        receives_context: bool = False,
        attend_axially: bool = False,
        pkm_layers: int | Sequence[int] = (),
        pkm_num_keys: int = 128,
        linformer_settings: LinformerSettings | None = None,
        context_linformer_settings: LinformerContextSettings | None = None,
        shift_tokens: bool = False,
    ) -> None:
        if bucket_size != 64:
            warnings.warn("without effect, as in the original: bucket_size (give blindspot_size)", stacklevel=2)
        super().__init__(
            Options(
                dim=dim,
                depth=depth,
                max_seq_len=max_seq_len,
                heads=heads,
                dim_head=dim_head,
                causal=causal,
                ff_chunks=ff_chunks,
                ff_glu=ff_glu,
                ff_dropout=ff_dropout,
                attn_layer_dropout=attn_layer_dropout,
                attn_dropout=attn_dropout,
                reversible=reversible,
                blindspot_size=blindspot_size,
                n_local_attn_heads=n_local_attn_heads,
                local_attn_window_size=local_attn_window_size,
                receives_context=receives_context,
                attend_axially=attend_axially,
                pkm_layers=pkm_layers,
                pkm_num_keys=pkm_num_keys,
                linformer_settings=linformer_settings,
                context_linformer_settings=context_linformer_settings,
                shift_tokens=shift_tokens,
            ),
            {"final_norm": False},
        )

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """x: (B, T, dim). input_mask, context_mask: (B, T), (B, S), True for real tokens. context: (B, S, dim)."""
        return self.model(x, key_mask=_bool(input_mask), context=context, context_mask=_bool(context_mask))

    def key_mappings(self) -> Iterable[KeyMapping]:
        return stack_entries(self.model, reversible=self.options.reversible)


class LinearAttentionTransformerLM(_Model):
    """Tokens in, logits out: (B, T) -> (B, T, num_tokens); with return_embeddings vectors (B, T, dim)."""

    kind = LanguageModel
    model: LanguageModel

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        depth: int,
        max_seq_len: int,
        heads: int = 8,
        dim_head: int | None = 64,
        causal: bool = False,
        emb_dim: int | None = None,
        reversible: bool = False,
        ff_chunks: int = 1,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_layer_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        blindspot_size: int = 1,
        n_local_attn_heads: int | Sequence[int] = 0,
        local_attn_window_size: int = 128,
        return_embeddings: bool = False,
        receives_context: bool = False,
        pkm_layers: int | Sequence[int] = (),
        pkm_num_keys: int = 128,
        attend_axially: bool = False,
        linformer_settings: LinformerSettings | None = None,
        context_linformer_settings: LinformerContextSettings | None = None,
        use_axial_pos_emb: bool = True,
        use_rotary_emb: bool = False,
        shift_tokens: bool = False,
    ) -> None:
        narrow = emb_dim is not None and emb_dim != dim
        grid = (-(-max_seq_len // local_attn_window_size), local_attn_window_size)
        positions = "sinusoidal" if use_rotary_emb else "axial" if use_axial_pos_emb else "learned"
        fields = {
            "vocab_size": num_tokens,
            "embed_dim": emb_dim if narrow else None,
            "positions": positions,
            "max_length": max_seq_len,
            "axial_shape": grid if positions == "axial" else None,
            # Vectors are normalized last: after they are narrowed, if they are.
            "narrow_norm": narrow and not return_embeddings,
            "final_norm": not narrow or return_embeddings,
            # Embeddings returned need no weights to make logits of.
            "tie_embeddings": return_embeddings,
        }
        super().__init__(
            Options(
                dim=dim,
                depth=depth,
                max_seq_len=max_seq_len,
                heads=heads,
                dim_head=dim_head,
                causal=causal,
                ff_chunks=ff_chunks,
                ff_glu=ff_glu,
                ff_dropout=ff_dropout,
                attn_layer_dropout=attn_layer_dropout,
                attn_dropout=attn_dropout,
                reversible=reversible,
                blindspot_size=blindspot_size,
                n_local_attn_heads=n_local_attn_heads,
                local_attn_window_size=local_attn_window_size,
                receives_context=receives_context,
                attend_axially=attend_axially,
                pkm_layers=pkm_layers,
                pkm_num_keys=pkm_num_keys,
                linformer_settings=linformer_settings,
                context_linformer_settings=context_linformer_settings,
                shift_tokens=shift_tokens,
                rotary=use_rotary_emb,
            ),
            fields,
        )
        self.return_embeddings = return_embeddings

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """x: (B, T). input_mask, context_mask: (B, T), (B, S), True for real tokens. context: (B, S, dim)."""
        call = self.model.hidden if self.return_embeddings else self.model
        return call(x, key_mask=_bool(input_mask), context=context, context_mask=_bool(context_mask))

    def key_mappings(self) -> Iterable[KeyMapping]:
        model, inner = self.model, "transformer."
        yield rename("token_emb.weight", "embedding.weight")
        yield from self._positions()
        if model.to_dim is not None:
            inner = "transformer.fn."
            yield from rename_layer("transformer.project_in", "to_dim")
            yield from rename_layer("transformer.project_out", "from_dim")
        for entry in stack_entries(model.transformer, reversible=self.options.reversible):
            yield entry.with_prefix(inner, "transformer.")
        norm = "transformer.norm" if model.narrow_norm is None else "narrow_norm"
        yield from rename_layer("norm", norm)
        if not self.return_embeddings:
            yield from rename_layer("out", "to_logits")

    def upgrade_key(self, key: str) -> str:
        return key.replace("pos_emb.weights_", "pos_emb.weights.")

    def _positions(self) -> Iterator[KeyMapping]:
        positions = self.model.positions
        if isinstance(positions, LearnedPositions):
            yield rename("pos_emb.emb.weight", "positions.table")
        elif isinstance(positions, AxialPositions):
            rows, columns = positions.shape
            for i, shape in enumerate([(1, rows, 1, -1), (1, 1, columns, -1)]):
                yield reshape(f"pos_emb.weights.{i}", f"positions.tables.{i}", shape)
        else:
            yield constant("pos_emb.emb", lambda: self._sinusoids(self.model.embedding.embedding_dim))
            yield constant("layer_pos_emb.emb", lambda: self._sinusoids(self.options.head_dim))

    def _sinusoids(self, width: int) -> Tensor:
        weight = self.model.embedding.weight
        position = torch.arange(self.max_seq_len, device=weight.device)[None]
        return SinusoidalPositions(width)(position)[0].to(weight.dtype)


class SelfAttention(CompatModule):
    """Local heads and then linear ones, with their projections: (B, T, dim) -> (B, T, dim)."""

    model: Attention

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = False,
        dim_head: int | None = None,
        blindspot_size: int = 1,
        n_local_attn_heads: int = 0,
        local_attn_window_size: int = 128,
        receives_context: bool = False,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if causal and receives_context:
            raise ValueError("causal and receives_context exclude each other: a context is seen whole")
        head_dim = dim // heads if dim_head is None else dim_head
        mechanism = mechanism_of(
            heads,
            head_dim,
            n_local_attn_heads,
            causal=causal,
            blindspot_size=blindspot_size,
            window=local_attn_window_size,
            dropout=attn_dropout,
        )
        config = AttentionConfig(num_heads=heads, mechanism=mechanism, head_dim=dim_head, dropout=dropout)
        self.model = Attention(dim, config, causal=causal, cross=receives_context)

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """As the models' forward."""
        rows = TokenLayout.of(x, causal=self.model.causal, key_mask=_bool(input_mask))
        if not self.model.cross:
            return self.model(x, rows)
        context_rows = None if context is None else TokenLayout.of(context, causal=False, key_mask=_bool(context_mask))
        return self.model(x, rows, context, context_rows=context_rows)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return layer_entries(self.model)


class FeedForward(CompatModule):
    """activation(x W₁) W₂, or gated; activation: a class of torch.nn, GELU unless given."""

    model: _FeedForward

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: type[nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        name: Any = "gelu" if activation is None else activation.__name__.lower()
        self.model = _FeedForward(dim, FeedForwardConfig(mult=mult, dropout=dropout, activation=name, gated=glu))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return layer_entries(self.model)


def linear_attn(q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None) -> Tensor:
    """q: (B, H, T, D), k, v: (B, H, S, D), kv_mask: (B, S) -> (B, H, T, D); every query sees every key."""
    return _attend(q, k, v, kv_mask, causal=False)


def causal_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None, bucket_size: int | None = None
) -> Tensor:
    """As `linear_attn`; a query sees what is before it, or whole buckets before its own if they hold more than one."""
    return _attend(q, k, v, kv_mask, causal=True, blindspot_size=64 if bucket_size is None else bucket_size)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, **how: int) -> Tensor:
    number, head_dim = q.shape[1], q.shape[3]
    mechanism = mechanism_from(mechanism_of(number, head_dim, 0, causal=causal, **how), number, head_dim, number)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return mechanism(q, k, v, causal=causal, key_mask=_bool(mask)).transpose(1, 2)


def _bool(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.bool()
