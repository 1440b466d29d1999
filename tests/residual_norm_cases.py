"""Cases for the kernels that add, normalize and shift tokens, and their comparison with the definition."""

from __future__ import annotations

from typing import Any

import torch
from gate_cases import _errors
from helpers import within_tolerance
from torch import Tensor

from longspan.ops.residual_norm import _ResidualNorm, residual_norm_torch

# B, T, dim, and whether tokens are shifted.
CASES: list[tuple[int, int, int, bool]] = [
    (2, 37, 24, True),
    (3, 5, 66, False),
    (2, 1, 10, True),
    (1, 9, 514, True),
    (2, 3, 1536, True),
]
EPSILON = 1e-6


def inputs(case: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return x, y, the weight in float32, and the gradients of both results."""
    B, T, dim, _ = case
    x, y, d_total, d_normed = (torch.randn(B, dim, T).transpose(1, 2).to(device, dtype) for _ in range(4))
    return [x, y, torch.randn(dim, device=device), d_total, d_normed]


def check(case: Any, dtype: torch.dtype, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""
    x, y, weight, *grads = inputs(case, dtype, device)

    def by_torch(kind: torch.dtype) -> list[Tensor]:
        leaves = [a.detach().cpu().to(kind).requires_grad_() for a in (x, y, weight)]
        outputs = residual_norm_torch(leaves[0], leaves[1], leaves[2], EPSILON, case[3])
        found = torch.autograd.grad(outputs, leaves, [a.cpu().to(kind) for a in grads])
        return [*(a.detach() for a in outputs), *found]

    leaves = [a.detach().requires_grad_() for a in (x, y, weight)]
    outputs = _ResidualNorm.traced(*leaves, EPSILON, case[3])
    assert all(a.dtype == dtype and a.is_contiguous() for a in outputs)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, grads)]
    names = ["total", "normed", "d_x", "d_y", "d_weight"]
    within_tolerance([_errors(names, found, by_torch(dtype), by_torch(torch.float64), dtype)])
