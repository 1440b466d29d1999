"""Replacement for linear-attention-transformer 0.19.1."""

from longspan.compat.linear_attention_transformer.autoregressive_wrapper import AutoregressiveWrapper
from longspan.compat.linear_attention_transformer.images import ImageLinearAttention
from longspan.compat.linear_attention_transformer.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)

__all__ = [
    "AutoregressiveWrapper",
    "ImageLinearAttention",
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSettings",
]
