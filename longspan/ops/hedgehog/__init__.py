"""The feature map of Hedgehog (Zhang et al., 2024): φ(x) = [softmax(Wx), softmax(−Wx)], with a W for each head.

With y = Wx, p = softmax(y), n = softmax(−y), and gradients dp and dn of the features,

    dy = p ∘ (dp − p·dp) − n ∘ (dn − n·dn),    dx = Wᵀ dy,    dW = Σ dy xᵀ over tokens.

The kernels compute features in one pass; the backward pass computes them again. Only x and W are saved.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, autocast, cat, einsum, float32

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import WeightedOp, differentiable_op, lazy_module

__all__ = ["hedgehog_features", "why_not_triton"]

kernels = lazy_module("longspan.ops.hedgehog.triton.features")


def hedgehog_features(x: Tensor, weight: Tensor) -> Tensor:
    """Return [softmax(Wx), softmax(−Wx)].

    Args:
        x: Queries or keys (B, T, H, D).
        weight: W of each head (H, F, D), in any dtype.

    Returns:
        (B, T, H, 2·F) in the dtype of x, computed in float32 or wider.
    """
    why = why_not_triton(x, weight)
    if dispatch.recording is not None:
        dispatch.record("Hedgehog feature map", "hedgehog", why)
    if why is not None:
        with autocast("cuda", enabled=False):  # Exponentials of rounded logits would be inexact.
            y = einsum("bthd,hfd->bthf", x, weight.to(x.dtype))
        return cat([y.softmax(-1), (-y).softmax(-1)], -1)
    return _Hedgehog.run(x, weight)


class HedgehogInputs(NamedTuple):
    """Tensors of `longspan::hedgehog_features`."""

    x: Tensor
    weight: Tensor


class HedgehogSaved(NamedTuple):
    """What its backward pass takes before them."""

    d_features: Tensor


@differentiable_op("longspan::hedgehog_features", (HedgehogInputs,), (HedgehogSaved,), outputs=1, grads=2)
class _Hedgehog(WeightedOp):
    kernels = staticmethod(kernels)

    @staticmethod
    def fake(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:3], 2 * weight.shape[1])


def why_not_triton(x: Tensor, weight: Tensor) -> str | None:
    """Return why the features of these arguments are computed in eager PyTorch; None if the kernels support them."""
    return dispatch.unavailable(x) or why_unsupported(x, weight)


def why_unsupported(x: Tensor, weight: Tensor) -> str | None:
    """Return a reason if the kernels do not support these arguments on any device."""
    if x.dtype not in dispatch.DTYPES:
        return f"x is {x.dtype}; the kernels take bfloat16, float16 and float32"
    largest = 64 if x.dtype == float32 else dispatch.LARGEST
    if max(weight.shape[1:]) > largest:
        return (
            f"W is {weight.shape[1]} × {weight.shape[2]}; the kernels take {largest} × {largest} at most in {x.dtype}"
        )
    return "x is empty" if x.numel() == 0 else None
