"""Cases for the Triton kernels of Hedgehog's features, and their comparison with the definition."""

from __future__ import annotations

import pytest
import torch
import weighted_cases
from torch import Tensor

from longspan.ops.hedgehog import _Hedgehog, hedgehog_features, why_unsupported

# B, T, H, D, F.
SIZES = [
    (2, 37, 3, 5, 7),
    (1, 1, 2, 16, 16),
    (3, 65, 1, 64, 64),
    (1, 33, 2, 70, 100),
    (2, 65, 2, 160, 160),
    (1, 70, 1, 256, 256),
]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, whose tokens are not adjacent in memory, the weight in float32, and the gradient of the features."""
    B, T, H, D, F = size
    x = (scale * torch.randn(B, H, T + 2, D)).transpose(1, 2)[:, 1:-1].to(device, dtype)
    return x, torch.randn(H, F, D, device=device), torch.randn(B, T, H, 2 * F).to(device, dtype)


def check(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    given = inputs(size, dtype, device)
    if why_unsupported(*given[:2]) is not None:
        pytest.skip("more than the kernels take in float32")
    weighted_cases.check(_Hedgehog, hedgehog_features, given)


def check_op(call: str, dtype: torch.dtype, device: str) -> None:
    weighted_cases.check_op(_Hedgehog, call, inputs(SIZES[0], dtype, device))
