"""Gradients that can be taken once: whoever asks for gradients of them is told so, and told what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = Callable[..., tuple[Tensor | None, ...]]


def once(gradients: Gradients) -> Gradients:
    """`gradients(ctx, *d_outputs)`, the backward pass of an autograd function, with results that have no gradients.

    PyTorch's own `once_differentiable` does so only where d_outputs need gradients. Those of a plain sum need none, and
    then a penalty on gradients would be a constant, silently.
    """

    @wraps(gradients)
    def found_once(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return gradients(ctx, *d_outputs)  # At once: a context costs the host as much as a launch.
        with torch.no_grad():
            found = gradients(ctx, *d_outputs)
        given = [x for x in (*d_outputs, *ctx.saved_tensors) if x is not None and x.requires_grad]
        if not given:
            return found
        apply: Any = _Refusing.apply
        there = iter(apply(*[x for x in found if x is not None], *given))
        return tuple(None if x is None else next(there) for x in found)

    return found_once


def refuse(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """In the place of gradients of gradients."""
    raise RuntimeError(
        "gradients of gradients were asked for, and longspan's kernels and chunked operations give gradients once; the "
        "definitions in longspan.ops.reference, quadratic in the length, can be differentiated any number of times"
    )


class _Refusing(torch.autograd.Function):
    """Its arguments; those after the gradients are there to need gradients themselves."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    backward = staticmethod(refuse)
