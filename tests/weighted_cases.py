"""The comparison of the kernels of an operation of x and a weight, `WeightedOp`, with its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Given = tuple[Tensor, Tensor, Tensor]  # x, the weight, and the gradient of the result


def gradients(call: Callable[[Tensor, Tensor], Tensor], given: Given) -> list[Tensor]:
    """The result and the gradients of x and the weight."""
    x, weight, d_out = given
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = call(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), d_out)]


def by_kernels(op: Any, given: Given) -> list[Tensor]:
    x, weight, d_out = given
    return [op.kernels().forward(x, weight), *op.kernels().backward(d_out, x, weight)]


def check(op: Any, definition: Callable[[Tensor, Tensor], Tensor], given: Given) -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""
    dtype = given[0].dtype
    truth, eager = (gradients(definition, tuple(x.cpu().to(kind) for x in given)) for kind in (torch.float64, dtype))
    found = by_kernels(op, given)
    assert [x.dtype for x in found] == [dtype, dtype, torch.float32]
    for name, ours, near, exact in zip(("out", "d_x", "d_weight"), found, eager, truth, strict=True):
        ulp = exact.abs().max().item() * torch.finfo(dtype).eps
        allowed = 2 * (near.double() - exact).abs().max().item() + ulp
        error = (ours.cpu().double() - exact).abs().max().item()
        assert error <= allowed, f"{name}: {error:.3g} from the truth, {allowed:.3g} allowed"


def check_op(op: Any, call: str, given: Given) -> None:
    """Assert that the op returns what the kernels return, gradients too."""
    for ours, theirs in zip(gradients(getattr(op, call), given), by_kernels(op, given), strict=True):
        assert torch.equal(ours, theirs)
