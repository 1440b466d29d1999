"""Gradients of gradients where there are none: an error that says what to do, never a constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.ops.common.autograd import once


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    @once
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * d, None


def cube(x: Tensor) -> Tensor:
    apply: Any = Cube.apply
    return apply(x, 3)


def test_gradients_are_taken_once() -> None:
    x = torch.randn(5, requires_grad=True)
    (d,) = torch.autograd.grad(cube(x).sum(), x)
    torch.testing.assert_close(d, 3 * x.detach() ** 2)
    assert not d.requires_grad


@pytest.mark.parametrize("constant", [True, False], ids=["the gradient of a sum", "of a square"])
def test_a_penalty_on_gradients_is_refused(constant: bool) -> None:
    x = torch.randn(5, requires_grad=True)
    y = cube(x)
    (d,) = torch.autograd.grad(y.sum() if constant else y.square().sum(), x, create_graph=True)
    # With another term beside it a constant would go unnoticed.
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* longspan\.ops\.reference"):
        (d.square().sum() + x.sum()).backward()


def test_nothing_is_refused_that_is_not_asked_for() -> None:
    x, w = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    (d,) = torch.autograd.grad((cube(x) + w * x).sum(), w, create_graph=True)
    d.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(5))
