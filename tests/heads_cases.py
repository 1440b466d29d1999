"""Cases for the kernels that norm, rotate and divide heads, and their comparison with the definition."""

from __future__ import annotations

from typing import Any

import torch
from gate_cases import _errors
from helpers import within_tolerance
from torch import Tensor

from longspan.ops.heads import _DivideHeads, divide_heads_torch

# B, T, heads of each part, D, and whether each part is rotated.
CASES: list[tuple[int, int, tuple[int, ...], int, tuple[bool, ...]]] = [
    (2, 37, (2, 3), 10, (True, False)),
    (3, 65, (1, 1), 64, (False, True)),
    (2, 33, (3,), 22, (True,)),
    (1, 1, (2,), 16, (False,)),
    (1, 67, (1, 2), 6, (True, True)),
    (2, 5, (1, 2), 34, (False, False)),
]
EPSILON = 1e-6


def inputs(case: Any, dtype: torch.dtype, device: str) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
    """Return x, both weights and the gradients of all outputs, and cos and sin."""
    B, T, sizes, D, rotated = case
    x = torch.randn(B, T, 3 * sum(sizes) * D).to(device, dtype)
    weights = [torch.randn(D, device=device) for _ in range(2)]
    grads = [torch.randn(B, n, T, D).transpose(1, 2).to(device, dtype) for n in sizes for _ in range(3)]
    angle = torch.rand(T, D // 2, device=device) * 7
    return [x, *weights, *grads], (angle.cos(), angle.sin()) if any(rotated) else None


def check(case: Any, dtype: torch.dtype, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""
    _, _, sizes, D, rotated = case
    (x, weight_q, weight_k, *grads), turns = inputs(case, dtype, device)

    def by_torch(kind: torch.dtype) -> list[Tensor]:
        leaves = [a.detach().cpu().to(kind).requires_grad_() for a in (x, weight_q, weight_k)]
        cos_sin = None if turns is None else (turns[0].cpu().to(kind), turns[1].cpu().to(kind))
        parts = divide_heads_torch(leaves[0], (leaves[1], leaves[2]), sizes, rotated, cos_sin, EPSILON)
        outputs = [a for part in parts for a in part]
        found = torch.autograd.grad(outputs, leaves, [a.cpu().to(kind) for a in grads])
        return [*(a.detach() for a in outputs), *found]

    leaves = [a.detach().requires_grad_() for a in (x, weight_q, weight_k)]
    flags = (*rotated, False)[:2]
    cos, sin = (None, None) if turns is None else turns
    outputs = _DivideHeads.traced(*leaves, cos, sin, sum(sizes), sizes[0], *flags, EPSILON)[: 3 * len(sizes)]
    assert all(a.dtype == dtype and a.is_contiguous() for a in outputs)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, grads)]
    names = [f"{name} {i}" for i in range(len(sizes)) for name in "qkv"] + ["d_x", "d_weight_q", "d_weight_k"]
    within_tolerance([_errors(names, found, by_torch(dtype), by_torch(torch.float64), dtype)])
