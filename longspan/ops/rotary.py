"""Rotation of feature pairs by angles, and the decay of xPos; all angles in float32 or float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def angles(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """position / base^(2i/dim) modulo 2π for i < dim / 2: (..., dim / 2)."""
    # In float32 the product would be off by 0.004 at position 65,536, and by more further on.
    wide = torch.float32 if position.device.type == "mps" else torch.float64
    exponent = torch.arange(0, dim, 2, device=position.device, dtype=wide) / dim
    return (position[..., None].to(wide) * base**-exponent).remainder(2 * math.pi).to(dtype)


def cos_sin(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of `angles`, which every layer of a model shares."""
    if torch.compiler.is_compiling():
        # An opaque op: inductor would otherwise recompute the table inside every layer.
        return _cos_sin(position, dim, base, dtype)
    angle = angles(position, dim, base, dtype)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x (..., D) with pair i times cos + √−1 sin, both (..., D / 2); in x's dtype."""
    wide = x.to(cos.dtype)
    if interleaved:
        a, b = wide[..., ::2], wide[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return rotated.to(x.dtype)


def xpos_scale(position: Tensor, dim: int, scale_base: float, dtype: torch.dtype) -> Tensor:
    """ζ_i^(position / scale_base), ζ_i = (2i + 0.4 dim) / (1.4 dim): (..., dim / 2) (Sun et al., 2022).

    Multiplied into queries and divided out of keys it leaves ζ_i^((i − j) / scale_base): far keys fade.
    """
    zeta = (torch.arange(0, dim, 2, device=position.device, dtype=dtype) + 0.4 * dim) / (1.4 * dim)
    return zeta ** (position[..., None].to(dtype) / scale_base)


@torch.library.custom_op("longspan::rotary_cos_sin", mutates_args=())
def _cos_sin(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = angles(position, dim, base, dtype)
    return angle.cos(), angle.sin()


@_cos_sin.register_fake
def _(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = *position.shape, dim // 2
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)
