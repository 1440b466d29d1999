"""Rotary position embeddings, and the decay of xPos. Angles are computed in float64 and rounded once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, lazy_module, refuse_forward_mode
from longspan.ops.common.torch_private import is_exporting

_kernels = lazy_module("longspan.ops.rotary.triton")


def angles(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return position / base^(2i/dim) modulo 2π for i < dim / 2: (..., dim / 2)."""
    # In float32 the product would be off by 0.004 at position 65,536, and by more at later ones.
    exact = torch.float32 if position.device.type == "mps" else torch.float64
    exponent = torch.arange(0, dim, 2, device=position.device, dtype=exact) / dim
    return (position[..., None].to(exact) * base**-exponent).remainder(2 * math.pi).to(dtype)


def cos_sin(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of `angles`, which all layers of a model share."""
    if torch.compiler.is_compiling() and not is_exporting():
        # An opaque op: inductor would otherwise recompute the table inside every layer.
        return _cos_sin(position, dim, base, dtype)
    angle = angles(position, dim, base, dtype)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Multiply pair i of the first R features of x (..., D), as a complex number, by cos_i + √−1 sin_i.

    Args:
        x: (..., D).
        cos: (..., R / 2), where R ≤ D; other features are returned unchanged (partial rotary embedding).
        sin: (..., R / 2).
        interleaved: Pairs are (2i, 2i + 1); otherwise (i, i + R / 2).

    Returns:
        (..., D) in the dtype of x, computed in the dtype of cos.
    """
    if _takes_kernel(x, cos, interleaved):
        return Rotate.direct(x, cos[0, :, 0], sin[0, :, 0])
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = rotate(x[..., :rotary_dim], cos, sin, interleaved=interleaved)
        return torch.cat([rotated, x[..., rotary_dim:]], -1)
    y = x.to(cos.dtype)
    if interleaved:
        a, b = y[..., ::2], y[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = y.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return rotated.to(x.dtype)


def _takes_kernel(x: Tensor, cos: Tensor, interleaved: bool) -> bool:
    """Whether x (B, T, H, D) and angles that all rows share are rotated in one launch, where no gradient is needed."""
    if torch.is_grad_enabled() and x.requires_grad:  # eager PyTorch can differentiate twice, and compilers fuse it
        return False
    shared = not interleaved and x.ndim == cos.ndim == 4 and cos.shape[0] == cos.shape[2] == 1
    fits = shared and x.shape[1] == cos.shape[1] and x.shape[3] >= 2 * cos.shape[3]
    kinds = x.dtype in dispatch.DTYPES and cos.dtype == torch.float32 and x.numel() > 0
    return fits and kinds and dispatch.eager_untraced(x) and dispatch.unavailable(x) is None


def xpos_scale(position: Tensor, dim: int, scale_base: float, dtype: torch.dtype) -> Tensor:
    """Return ζ_i^(position / scale_base), ζ_i = (2i + 0.4 dim) / (1.4 dim): (..., dim / 2) (Sun et al., 2022).

    Queries are multiplied by it and keys divided, which leaves ζ_i^((i − j) / scale_base): scores decay with distance.
    """
    zeta = (torch.arange(0, dim, 2, device=position.device, dtype=dtype) + 0.4 * dim) / (1.4 * dim)
    # The bound is for keys far after a bidirectional query, whose scores would overflow.
    return (zeta ** (position[..., None].to(dtype) / scale_base)).clamp(max=2.0**58)


@torch.library.custom_op("longspan::rotary_cos_sin", mutates_args=())
def _cos_sin(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = angles(position, dim, base, dtype)
    return angle.cos(), angle.sin()


@_cos_sin.register_fake
def _(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = *position.shape, dim // 2
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)


class RotateInputs(NamedTuple):
    """Arguments of `longspan::rotate`: x (B, T, H, D), cos and sin (T, R/2), R ≤ D."""

    x: Tensor
    cos: Tensor
    sin: Tensor


class RotateSaved(NamedTuple):
    """What its backward pass takes beside them."""

    d_out: Tensor


@differentiable_op("longspan::rotate", (RotateInputs,), (RotateSaved,), outputs=1, grads=1)
class Rotate(DifferentiableOp):
    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, traced: bool = True) -> Tensor:
        return _kernels().rotate(x, cos, sin, back=False)

    @staticmethod
    def fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def visible(outputs: Any) -> Any:
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The gradient of x needs only its shape, which is that of d_out.
        return backward(*refuse_forward_mode(d_out, d_out, cos, sin)), None, None

    @staticmethod
    def backward(d_out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, traced: bool = True) -> Tensor:
        return _kernels().rotate(d_out, cos, sin, back=True)

    @staticmethod
    def backward_fake(d_out: Tensor, *_: Tensor) -> Tensor:
        return d_out.new_empty(d_out.shape)
