"""Collectives with gradients that run beside other work: they are started, and waited for later.

The backward pass mirrors the forward pass: waiting starts the collective of the gradients, and what started the forward
collective waits for it. Autograd runs the latest operations first, so the work in between overlaps there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.ops.common.autograd import once_differentiable

_gather_into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_to_all: Any = dist.all_to_all_single


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x of every rank (P, …), without gradients."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.numel())
    if x.numel():
        _gather_into(out, x.flatten().contiguous(), group=group)
    return out.view(ranks, *x.shape)


def start_gather(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to gather x, of one size on all ranks; return a function that waits and returns x of every rank (P, …).

    The gradient of a rank's x is the sum over the ranks, by reduce-scatter.
    """
    ranks = dist.get_world_size(group)

    def forward(x: Tensor) -> tuple[Tensor, Any]:
        out = x.new_empty(ranks * x.numel())
        return out, _gather_into(out, x, group=group, async_op=True) if x.numel() else None

    def backward(grad: Tensor) -> tuple[Tensor, Any]:
        out = grad.new_empty(grad.numel() // ranks)
        return out, _scatter_sum(out, grad, group=group, async_op=True) if grad.numel() else None

    wait = _start(x.flatten(), forward, backward)
    return lambda: wait().view(ranks, *x.shape)


def start_all_to_all(parts: list[Tensor], sizes: list[int], group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start to send parts[r] to rank r; return a function that waits and returns what each rank sent, flat.

    Args:
        parts: What each rank gets, of any shape.
        sizes: The number of elements that each rank sends here.
        group: The ranks.
    """
    mine = [part.numel() for part in parts]

    def forward(x: Tensor) -> tuple[Tensor, Any]:
        out = x.new_empty(sum(sizes))
        return out, _all_to_all(out, x, sizes, mine, group=group, async_op=True)

    def backward(grad: Tensor) -> tuple[Tensor, Any]:
        out = grad.new_empty(sum(mine))
        return out, _all_to_all(out, grad, mine, sizes, group=group, async_op=True)

    wait = _start(torch.cat([part.flatten() for part in parts]), forward, backward)
    return lambda: list(wait().split(sizes))


Launch = Callable[[Tensor], tuple[Tensor, Any]]


class _Flight:
    """A collective in flight. It holds its input and its output until they are waited for."""

    def __init__(self, forward: Launch, backward: Launch) -> None:
        self.forward, self.backward = forward, backward
        self.held: tuple[Tensor, Tensor, Any] | None = None

    def launch(self, function: Launch, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, work = function(x)
        self.held = x, out, work
        return out

    def land(self) -> Tensor:
        assert self.held is not None
        _, out, work = self.held
        if work is not None:
            work.wait()
        self.held = None
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.launch(flight.forward, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        return ctx.flight.land(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.land()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        (grad,) = grads
        assert grad is not None
        ctx.flight.launch(ctx.flight.backward, grad)
        return grad, None


def _start(x: Tensor, forward: Launch, backward: Launch) -> Callable[[], Tensor]:
    start: Any = _Start.apply
    wait: Any = _Wait.apply
    flight = _Flight(forward, backward)
    out = start(x, flight)
    return lambda: wait(out, flight)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return grads[0], None


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks. Gradients are those of one rank's x, given equal gradients of the sum."""
    reduced: Any = _AllReduce.apply
    return reduced(x, group)
