"""The sum of a residual and a branch, its RMS norm and the token shift of that, in one pass.

With s = x + y and r = 1 / √(s·s / D + ε), n = w ∘ r s; shifted, the second half of the features of token t are those of
token t − 1, or zero at the first. With the gradients ds and dn, shifted back, and g = w ∘ dn,

    dx = dy = ds + r (g − s r² (g·s) / D),    dw = Σ dn ∘ r s.

s is rounded before it is normalized, as it is where it is stored. Only s and w are saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, lazy_module, refuse_forward_mode

_kernels = lazy_module("longspan.ops.residual_norm.triton")

LARGEST = 4096  # features
PARTS = 512  # programs of the backward pass, at most
ELEMENTS = 2048  # of a tile


def tokens_per_tile(dim: int) -> int:
    """Return the number of tokens of a tile, a power of two."""
    return max(1, ELEMENTS // (1 << (dim - 1).bit_length()))


def num_parts(tokens: int, dim: int) -> int:
    """Return the number of programs of the backward pass, each with a part of the weight's gradient."""
    return min(PARTS, -(-tokens // tokens_per_tile(dim)))


def residual_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float, shift: bool) -> tuple[Tensor, Tensor]:
    """Return s = x + y, and its norm; the arguments are those that `why_not_triton` accepts.

    Args:
        x: (B, T, dim).
        y: (B, T, dim).
        weight: (dim,), of the norm.
        epsilon: ε.
        shift: Whether the second half of the features are those of the token before.

    Returns:
        Two tensors (B, T, dim) in the dtype of x.
    """
    total, normed = _ResidualNorm.traced(*refuse_forward_mode(x, y, weight, epsilon, shift))
    return total, normed


def residual_norm_torch(x: Tensor, y: Tensor, weight: Tensor, epsilon: float, shift: bool) -> tuple[Tensor, Tensor]:
    """Compute `residual_norm` in eager PyTorch, in float32 or wider: the definition."""
    total = x + y
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.to(wide.dtype)
    if shift:
        own, earlier = normed.chunk(2, -1)
        normed = torch.cat([own, F.pad(earlier, (0, 0, 1, -1))], -1)
    return total, normed.to(x.dtype)


def why_not_triton(x: Tensor, y: Tensor, dim: int, shift: tuple[int, ...]) -> str | None:
    """Return why no kernel adds and normalizes these tensors, with these offsets of tokens; None if one does."""
    if (why := dispatch.unavailable(x)) is not None:
        return why
    if x.dtype != y.dtype or x.dtype not in dispatch.DTYPES:
        return f"the residual and the branch are {x.dtype} and {y.dtype}; the kernels take one dtype"
    if x.shape != y.shape or dim > LARGEST or dim % 2:
        return f"the width {dim} is odd, or over {LARGEST}"
    if shift not in ((), (0, 1)):
        return f"token_shift is {shift}; the kernels take (0, 1)"
    return None if x.numel() else "an empty tensor"


class ResidualNormInputs(NamedTuple):
    """Arguments of `longspan::residual_norm`."""

    x: Tensor
    y: Tensor
    weight: Tensor
    epsilon: float
    shift: bool


class ResidualNormSaved(NamedTuple):
    """What its backward pass takes beside the weight and the options; total: s."""

    d_total: Tensor
    d_normed: Tensor
    total: Tensor


@differentiable_op(
    "longspan::residual_norm",
    (ResidualNormInputs,),
    (ResidualNormSaved,),
    outputs=2,
    grads=2,
    leaves=(0, 1, 2),
    differentiable=2,
)
class _ResidualNorm(DifferentiableOp):
    @staticmethod
    def forward(x: Tensor, y: Tensor, weight: Tensor, epsilon: float, shift: bool, traced: bool = True) -> Any:
        return _kernels().forward(x, y, weight, epsilon, shift)

    @staticmethod
    def fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[0], inputs[2])
        ctx.options = inputs[3:]

    @staticmethod
    def differentiate(backward: Any, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        # Of x and y only the shape matters, which is that of s.
        given = refuse_forward_mode(*grads, total, total, total, weight)
        d_x, parts = backward(*given, *ctx.options)
        # The sum is outside of the op, for a compiler to fuse.
        return d_x, d_x, parts.sum(0).to(weight.dtype), None, None

    @staticmethod
    def backward(
        d_total: Tensor, d_normed: Tensor, total: Tensor, x: Tensor, y: Tensor, weight: Tensor, epsilon: float,
        shift: bool, traced: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return _kernels().backward(d_total, d_normed, total, weight, epsilon, shift)

    @staticmethod
    def backward_fake(d_total: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        B, T, dim = d_total.shape
        parts = d_total.new_empty(num_parts(B * T, dim), dim, dtype=torch.float32)
        return d_total.new_empty(d_total.shape), parts
