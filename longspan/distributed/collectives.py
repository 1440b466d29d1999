"""Collectives with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.ops.common.autograd import once_differentiable

_gather_into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x of every rank (P, …), without gradients."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.numel())
    if x.numel():
        _gather_into(out, x.flatten().contiguous(), group=group)
    return out.view(ranks, *x.shape)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,) = grads
        assert grad is not None
        if dist.get_backend(ctx.group) == "gloo":  # has no reduce_scatter
            total = grad.contiguous()
            dist.all_reduce(total, group=ctx.group)
            return total[dist.get_rank(ctx.group)], None
        out = torch.empty_like(grad[0])
        _scatter_sum(out, grad.contiguous(), group=ctx.group)
        return out, None


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x of every rank (P, …); the gradient of a rank's x is the sum over the ranks."""
    gathered: Any = _AllGather.apply
    return gathered(x, group)


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
