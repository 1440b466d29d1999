"""Short causal convolution: y_t = silu(a_t), a_t = Σ_j w_j ∘ x_{t−j} over the last few tokens, channel by channel.

With the gradient da_t = dy_t ∘ silu′(a_t),

    dx_t = Σ_j w_j ∘ da_{t+j},    dw_j = Σ_t da_t ∘ x_{t−j}.

The kernels read x and write y in one pass each way; the backward pass computes a again. Only x and w are saved.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import WeightedOp, differentiable_op, lazy_module

__all__ = ["short_convolution", "why_not_triton"]

kernels = lazy_module("longspan.ops.convolution.triton.convolution")


def short_convolution(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return silu(Σ_j w_j ∘ x_{t−j}), computed in float32; None if the kernels do not support the arguments.

    Args:
        x: (B, T, C); tokens before the first are zero.
        weight: w (size, C), of the token itself first, in any dtype.

    Returns:
        (B, T, C) in the dtype of x.
    """
    why = why_not_triton(x)
    if dispatch.recording is not None:
        dispatch.record("short convolution", "convolution", why)
    if why is not None:
        return None
    return _Convolution.run(x, weight)


class ConvolutionInputs(NamedTuple):
    """Tensors of `longspan::short_convolution`."""

    x: Tensor
    weight: Tensor


class ConvolutionSaved(NamedTuple):
    """What its backward pass takes before them."""

    d_out: Tensor


@differentiable_op("longspan::short_convolution", (ConvolutionInputs,), (ConvolutionSaved,), outputs=1, grads=2)
class _Convolution(WeightedOp):
    kernels = staticmethod(kernels)

    @staticmethod
    def fake(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(x.shape)


def why_not_triton(x: Tensor) -> str | None:
    """Return why x (B, T, C) is convolved in eager PyTorch; None if the kernels support it."""
    if (why := dispatch.unavailable(x)) is not None:
        return why
    if x.dtype not in dispatch.DTYPES:
        return f"x is {x.dtype}; the kernels take bfloat16, float16 and float32"
    return "x is empty" if x.numel() == 0 else None
