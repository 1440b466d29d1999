"""Local attention for MindSpore: cells with the arguments and defaults of local-attention, without torch."""

from __future__ import annotations

from longspan.mindspore.layers import DynamicPositionBias, LocalMHA
from longspan.mindspore.local_attention import LocalAttention
from longspan.mindspore.transformer import LocalTransformer

__all__ = ["DynamicPositionBias", "LocalAttention", "LocalMHA", "LocalTransformer"]
