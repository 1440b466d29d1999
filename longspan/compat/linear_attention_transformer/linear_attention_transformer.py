"""Models and layers of linear-attention-transformer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from longspan.compat.layers import FeedForward, as_bool
from longspan.compat.linear_attention_transformer.keys import language_model_keys, layer_keys, stack_keys
from longspan.compat.linear_attention_transformer.options import (
    LanguageModelOptions,
    LinformerContextSettings,
    LinformerSettings,
    ModelOptions,
    TransformerOptions,
    mechanism_spec,
)
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModule, KeyMapping
from longspan.models.config import AttentionConfig
from longspan.models.layers import Attention, mechanism_from
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


class _Model(CompatModule):
    model_class: ClassVar[type[Transformer] | type[LanguageModel]]
    model: Any
    return_embeddings = False

    def _build(self, options: ModelOptions) -> None:
        super().__init__()
        self.requested: Any = options
        self.options: Any = options
        self.max_seq_len = options.max_seq_len
        if unused := options.unused_arguments():
            warnings.warn(f"without effect, as in the original: {'; '.join(unused)}", stacklevel=4)
        self.model = self.model_class(options.config())

    @property
    def pad_to_multiple(self) -> int:
        """The number of which lengths had to be a multiple in the original; here any length works."""
        return self.options.pad_to_multiple

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply the model.

        Args:
            x: Vectors (B, T, dim), or tokens (B, T) of a language model.
            input_mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), with receives_context.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        function = self.model.hidden if self.return_embeddings else self.model
        return function(x, key_mask=as_bool(input_mask), context=context, context_mask=as_bool(context_mask))

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        self.options, ignored = self.options.adapt(shapes, self.requested)
        if ignored:
            warnings.warn(
                f"this checkpoint was trained without {', '.join(ignored)}, which the original ignored in the layer "
                "after self-attention: the model was rebuilt with its shapes (create the optimizer after loading)",
                stacklevel=5,
            )
        config, parameter = self.options.config(), next(self.model.parameters())
        if config != self.model.config:
            self.model = self.model_class(config).to(parameter.device, parameter.dtype).train(self.training)


class LinearAttentionTransformer(_Model):
    """Transformer of local and linear attention for vectors, (B, T, dim) -> (B, T, dim).

    bucket_size has no effect, as in the original.
    """

    model_class = Transformer
    model: Transformer

    @init_from(TransformerOptions, _TRANSFORMER_POSITIONAL)
    def __init__(self, options: TransformerOptions) -> None:
        self._build(options)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return stack_keys(self.model, reversible=self.options.reversible)


class LinearAttentionTransformerLM(_Model):
    """Language model of local and linear attention: tokens (B, T) -> logits (B, T, num_tokens).

    With return_embeddings it returns hidden states (B, T, dim).
    """

    model_class = LanguageModel
    model: LanguageModel

    @init_from(LanguageModelOptions, _LM_POSITIONAL)
    def __init__(self, options: LanguageModelOptions) -> None:
        self._build(options)
        self.return_embeddings = options.return_embeddings

    def key_mappings(self) -> Iterable[KeyMapping]:
        return language_model_keys(self.model, self.options)

    def upgrade_key(self, key: str) -> str:
        return key.replace("pos_emb.weights_", "pos_emb.weights.")


class SelfAttention(CompatModule):
    """Local and linear attention heads with projections, (B, T, dim) -> (B, T, dim)."""

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
            raise ValueError("causal and receives_context exclude each other: attention to a context is not causal")
        mechanism = mechanism_spec(
            heads,
            dim // heads if dim_head is None else dim_head,
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
        """Attend to x (B, T, dim), or to a context (B, S, dim) with receives_context. Masks: True for tokens to use."""
        if not self.model.cross:
            return self.model(x, key_mask=as_bool(input_mask))
        return self.model(x, key_mask=as_bool(input_mask), context=context, context_mask=as_bool(context_mask))

    def key_mappings(self) -> Iterable[KeyMapping]:
        return layer_keys(self.model)


def linear_attn(q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None) -> Tensor:
    """Return bidirectional linear attention (B, H, T, D) of q (B, H, T, D), k and v (B, H, S, D).

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        kv_mask: (B, S), True for keys to attend to.
    """
    return _attend(q, k, v, kv_mask, causal=False)


def causal_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None, bucket_size: int | None = None
) -> Tensor:
    """Return causal linear attention; see `linear_attn`.

    bucket_size: By default 64. A query attends to the buckets before its own; with 1, to all keys up to its own.
    """
    return _attend(q, k, v, kv_mask, causal=True, blindspot_size=64 if bucket_size is None else bucket_size)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, blindspot_size: int = 1) -> Tensor:
    num_heads, head_dim = q.shape[1], q.shape[3]
    spec = mechanism_spec(num_heads, head_dim, 0, causal=causal, blindspot_size=blindspot_size)
    mechanism = mechanism_from(spec, num_heads, head_dim, num_heads)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return mechanism(q, k, v, causal=causal, key_mask=as_bool(mask)).transpose(1, 2)
