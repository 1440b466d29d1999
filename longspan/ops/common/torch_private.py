"""The private PyTorch APIs that longspan uses, each with a public fallback where PyTorch has one.

A release of PyTorch that removes one of them changes this file only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

F = TypeVar("F", bound=Callable[..., Any])


def functorch_active() -> bool:
    """True inside torch.func transforms (vmap, grad, jvp). Assumed True where PyTorch does not report it."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return True if active is None else active()


# Returns the level of forward-mode differentiation (torch.func.jvp, jacfwd, hessian, forward_ad.dual_level), −1 outside
# of it; 0 where PyTorch does not report it. A partial, so that it costs every operation no Python frame.
forward_ad_level: Callable[[], int] = partial(getattr, torch.autograd.forward_ad, "_current_level", 0)


# Returns whether autocast is enabled for some type of device.
any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def in_backward() -> bool:
    """True inside a backward pass, where a forward pass is a recomputation (`torch.utils.checkpoint`)."""
    return torch._C._current_graph_task_id() != -1


def _current_stream(device: int) -> Any:
    return torch.cuda.current_stream(device).cuda_stream


# Returns the handle of the current CUDA stream of a device, without creating a `torch.cuda.Stream`.
current_stream: Callable[[int], Any] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


# Returns the index of the current CUDA device, without asking whether CUDA is initialized.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def assume_constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import the compiler, one second at every import."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant
def compiling_dynamic() -> bool:
    """True in code traced by torch.compile(dynamic=True), which makes every float an input of the graph."""
    return torch.compiler.is_compiling() and not torch._dynamo.config.assume_static_by_default


@assume_constant
def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, which in PyTorch 2.10 and 2.11 is True in code traced by torch.compile too."""
    return torch.compiler.is_exporting()


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """Return `function.apply` without its search for functorch transforms, which the caller has ruled out."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def register_pytree(
    cls: type, flatten: Callable[[Any], tuple[dict[str, Any], Any]], unflatten: Callable[[dict[str, Any], Any], Any]
) -> None:
    """Make a class a node of pytrees, which torch.export takes and returns.

    Args:
        cls: The class.
        flatten: Returns the children of an object by name, and what else there is, which must be hashable.
        unflatten: Returns the object of children and the rest.
    """

    def children(value: Any) -> tuple[list[Any], Any]:
        named, rest = flatten(value)
        return list(named.values()), (tuple(named), rest)

    def children_with_keys(value: Any) -> tuple[list[Any], Any]:
        named, rest = flatten(value)
        return [(_pytree.GetAttrKey(name), child) for name, child in named.items()], (tuple(named), rest)

    def rebuild(values: Any, context: Any) -> Any:
        names, rest = context
        return unflatten(dict(zip(names, values, strict=True)), rest)

    _pytree.register_pytree_node(cls, children, rebuild, flatten_with_keys_fn=children_with_keys)
