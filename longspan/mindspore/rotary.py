"""Rotary positions and xPos, with angles and scales in float32 for inputs of any dtype."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops


class Rotary(nn.Cell):
    """Rotate pair i of the features by position · theta^(−2i/D); feature i pairs with i + D / 2.

    scale_base: For xPos (Sun et al., 2022), which also multiplies queries by ζ_i^(position / scale_base) and divides
    keys by it, ζ_i = (2i + 0.4 D) / (1.4 D), so that products decay with distance. None for no xPos.
    """

    def __init__(self, dim: int, scale_base: float | None = None, theta: float = 10000.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions rotate pairs of features: dim must be even, got {dim}")
        if scale_base is not None and scale_base <= 0:
            raise ValueError(f"xpos_scale_base must be positive, got {scale_base}; omit it for half the window")
        pair = np.arange(0, dim, 2)
        # Constants, not parameters, so that a model cast to float16 keeps float32 angles.
        self.inv_freq = Tensor((1.0 / theta ** (pair / dim)).astype(np.float32))
        self.log_zeta = Tensor(np.log((pair + 0.4 * dim) / (1.4 * dim)).astype(np.float32))
        self.scale_base = scale_base

    def construct(self, x: Tensor, position: Tensor, exponent: float) -> Tensor:
        """Rotate x (..., L, D) to position (L,). exponent: 1 for queries, −1 for keys."""
        position = position.astype(self.inv_freq.dtype).expand_dims(-1)
        angle = position * self.inv_freq  # (L, D / 2)
        cos, sin = ops.cos(angle), ops.sin(angle)
        if self.scale_base is not None:
            scale = ops.exp(position * self.log_zeta * (exponent / self.scale_base))
            cos, sin = cos * scale, sin * scale
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return ops.cat((a * cos - b * sin, b * cos + a * sin), -1)
