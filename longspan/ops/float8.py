"""Linear layers whose products are FP8 (Micikevicius et al., 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FLOAT8, MAX_FLOAT8 = torch.float8_e4m3fn, 448.0
MULTIPLE = 16  # of both widths of a layer


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b with products of FP8 numbers, summed in float32.

    Each row of x, each row of W, and in the backward pass each row of the gradient and each column of W are divided by
    their largest magnitude and rounded to e4m3: with a scale for every row, the range of e5m2 is not needed. The
    gradient of W, a sum over all tokens, is a product in the dtype of x.

    Args:
        x: (..., dim).
        weight: (N, dim), in any dtype; N and dim are multiples of 16.
        bias: (N,).

    Returns:
        (..., N) in bfloat16.
    """
    rows: Tensor = _Float8Product.apply(x.flatten(0, -2).to(torch.bfloat16), weight)  # type: ignore[no-untyped-call]
    out = rows.view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias.to(out.dtype)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _product(grad, weight.mT), (grad.mT @ x).to(weight.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ in bfloat16."""
    (a, scale_a), (b, scale_b) = quantize(x), quantize(weight)
    return torch._scaled_mm(a, b.mT, scale_a, scale_b.mT, out_dtype=torch.bfloat16, use_fast_accum=True)


class Float8Linear(nn.Linear):
    """A linear layer whose products are FP8 while it is trained; see `float8_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.bias) if self.training else super().forward(x)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of x (N, dim) as FP8 numbers, contiguous, and their scales (N, 1): x ≈ numbers · scales."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / MAX_FLOAT8
    return (x.float() / scale).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(FLOAT8).contiguous(), scale
