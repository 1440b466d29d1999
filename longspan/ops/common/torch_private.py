"""The private PyTorch APIs that longspan uses, each with a public fallback where PyTorch has one.

A release of PyTorch that removes one of them changes this file only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def functorch_active() -> bool:
    """True inside torch.func transforms (vmap, grad, jvp). Assumed True where PyTorch does not tell."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return True if active is None else active()


def current_stream(device: int) -> Any:
    """Return the handle of the current CUDA stream, without creating a `torch.cuda.Stream`."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device)


def assume_constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import the compiler, one second at every import."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """Return `function.apply` without its search for functorch transforms, of which the caller knows there are none."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)
