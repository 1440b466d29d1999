"""Two residual streams whose activations are rebuilt from the result rather than kept.

The backward pass walks the branches from the last to the first: it undoes each addition, runs the branch again with
the random numbers and autocast of the first time, and takes its gradients. Parameters are inputs of the function, so
they get their gradients whether or not x needs one, and the context's gradient is summed here and handed on once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def run_reversible(
    branches: Sequence[Any], x: Tensor, layout: Any, context: Tensor | None, context_layout: Any
) -> list[Tensor]:
    """Two streams that both start as x (B, T, dim), after all branches."""
    unique = list(dict.fromkeys(p for branch in branches for p in branch.parameters() if p.requires_grad))
    first, second = _Reversible.apply(  # type: ignore[no-untyped-call]
        branches, layout, context_layout, unique, x, context, *unique
    )
    return [first, second]


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branches: Sequence[Any],
        layout: Any,
        context_layout: Any,
        unique: list[nn.Parameter],
        x: Tensor,
        context: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.branches, ctx.layout, ctx.context_layout, ctx.unique = branches, layout, context_layout, unique
        ctx.autocast = _autocast_state(x.device.type)
        ctx.random = []
        streams = [x, x]
        for i, branch in enumerate(branches):
            ctx.random.append(_random_state(x))
            y = branch(streams[1 - i % 2], layout, context, context_layout)
            streams[i % 2] = streams[i % 2] + (y if branch.weight is None else y * branch.weight)
        ctx.save_for_backward(*(stream.detach() for stream in streams), context)
        return streams[0].clone(), streams[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, context = ctx.saved_tensors
        streams, d_streams = list(saved), list(grads)
        d_parameters: dict[int, Tensor] = {}
        d_context = None
        device = streams[0].device
        wants_context = context is not None and ctx.needs_input_grad[5]
        for i in reversed(range(len(ctx.branches))):
            branch, mine, other = ctx.branches[i], i % 2, 1 - i % 2
            with torch.enable_grad(), _replay(ctx.random[i], ctx.autocast, device):
                x = streams[other].detach().requires_grad_()
                c = None if context is None else context.detach().requires_grad_(wants_context)
                y = branch(x, ctx.layout, c, ctx.context_layout)
                y = y if branch.weight is None else y * branch.weight
            inputs = [x, *([c] if wants_context else [])]
            parameters = [p for p in dict.fromkeys(branch.parameters()) if p.requires_grad]
            found = torch.autograd.grad(y, [*inputs, *parameters], d_streams[mine].to(y.dtype), allow_unused=True)
            streams[mine] = streams[mine] - y.detach()
            if found[0] is not None:
                d_streams[other] = d_streams[other] + found[0]
            if wants_context and found[1] is not None:
                d_context = found[1] if d_context is None else d_context + found[1]
            for p, g in zip(parameters, found[len(inputs) :], strict=True):
                if g is not None:
                    d_parameters[id(p)] = d_parameters[id(p)] + g if id(p) in d_parameters else g
        d_x = d_streams[0] + d_streams[1] if ctx.needs_input_grad[4] else None
        return None, None, None, None, d_x, d_context, *(d_parameters.get(id(p)) for p in ctx.unique)


def _random_state(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


def _autocast_state(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextmanager
def _replay(
    random: tuple[Tensor, Tensor | None], autocast: tuple[str, bool, torch.dtype], device: torch.device
) -> Iterator[None]:
    kind, enabled, dtype = autocast
    with ExitStack() as stack:
        # The one device: forking the generators of all of them would wait for each.
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1], device)
        yield
