"""Replacement for local-attention 1.11.2."""

from longspan.compat.local_attention.local_attention import LocalAttention
from longspan.compat.local_attention.transformer import DynamicPositionBias, LocalMHA, LocalTransformer

__all__ = ["DynamicPositionBias", "LocalAttention", "LocalMHA", "LocalTransformer"]
