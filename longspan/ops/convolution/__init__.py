"""Short causal convolution: y_t = silu(a_t), a_t = Σ_j w_j ∘ x_{t−j} over the last few tokens, channel by channel.

With the gradient da_t = dy_t ∘ silu′(a_t),

    dx_t = Σ_j w_j ∘ da_{t+j},    dw_j = Σ_t da_t ∘ x_{t−j}.

The kernels read x and write y in one pass each way; the backward pass computes a again. Only x and w are saved.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, refuse_forward_mode

__all__ = ["short_convolution", "why_not_triton"]


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
    if dispatch.eager_untraced(x):
        return _Convolution.direct(x, weight)
    return _Convolution.traced(*refuse_forward_mode(x, weight))


class ConvolutionInputs(NamedTuple):
    """Tensors of `longspan::short_convolution`."""

    x: Tensor
    weight: Tensor


class ConvolutionSaved(NamedTuple):
    """What its backward pass takes before them."""

    d_out: Tensor


@differentiable_op("longspan::short_convolution", (ConvolutionInputs,), (ConvolutionSaved,), outputs=1, grads=2)
class _Convolution(DifferentiableOp):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, traced: bool = True) -> Any:
        out = kernels().forward(x, weight)
        return out if traced else (out,)

    @staticmethod
    def fake(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        d_x, d_weight = backward(*refuse_forward_mode(d_out, *ctx.saved_tensors))
        return d_x, d_weight

    @staticmethod
    def backward(d_out: Tensor, x: Tensor, weight: Tensor, traced: bool = True) -> tuple[Tensor, Tensor]:
        return kernels().backward(d_out, x, weight)

    @staticmethod
    def backward_fake(d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), weight.new_empty(weight.shape)


def kernels() -> ModuleType:
    """Import the Triton kernels on first use."""
    return importlib.import_module("longspan.ops.convolution.triton.convolution")


def why_not_triton(x: Tensor) -> str | None:
    """Return why x (B, T, C) is convolved in eager PyTorch; None if the kernels support it."""
    if (why := dispatch.unavailable(x)) is not None:
        return why
    if x.dtype not in dispatch.DTYPES:
        return f"x is {x.dtype}; the kernels take bfloat16, float16 and float32"
    return "x is empty" if x.numel() == 0 else None
