"""Cases for the Triton kernels of short convolutions, and their comparison with the definition."""

from __future__ import annotations

import torch
import weighted_cases
from torch import Tensor
from torch.nn import functional as F

from longspan.ops.convolution import _Convolution

# B, T, C, size.
SIZES = [(2, 37, 67, 4), (3, 1, 5, 3), (1, 33, 65, 2), (5, 3, 64, 7)]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight in float32, and the gradient of the output, not contiguous."""
    B, T, C, width = size
    x, d_out = torch.randn(B, T, C).to(device, dtype), torch.randn(B, C, T).transpose(1, 2).to(device, dtype)
    return x, torch.randn(width, C, device=device), d_out


def definition(x: Tensor, weight: Tensor) -> Tensor:
    shifted = [F.pad(x, (0, 0, j, 0))[:, : x.shape[1]] for j in range(len(weight))]
    return F.silu(torch.stack([a * w for a, w in zip(shifted, weight, strict=True)]).sum(0))


def check(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    weighted_cases.check(_Convolution, definition, inputs(size, dtype, device))


def check_op(call: str, dtype: torch.dtype, device: str) -> None:
    weighted_cases.check_op(_Convolution, call, inputs(SIZES[0], dtype, device))
