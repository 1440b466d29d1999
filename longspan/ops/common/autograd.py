"""Operations with hand-written backward passes, differentiable once, and one decorator that makes them.

Forward-mode gradients (torch.func.jvp) and gradients of gradients raise an error: they would silently be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.ops.common import dispatch
from longspan.ops.common.torch_private import (
    any_autocast_enabled,
    compiling_dynamic,
    direct_apply,
    forward_ad_level,
    functorch_active,
)

Backward = Callable[..., tuple[Tensor | None, ...]]
T = TypeVar("T", bound=type)

_SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", bool: "bool", int: "SymInt", float: "float"}


def once_differentiable(backward: Backward) -> Backward:
    """Make the `backward(ctx, *grad_outputs)` of an autograd function refuse to be differentiated.

    PyTorch's own `once_differentiable` refuses only if a grad_output requires gradients. That of a sum does not, and a
    gradient penalty would silently be a constant.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_outputs = refuse_forward_mode(*grad_outputs)
        if not torch.is_grad_enabled():
            return backward(ctx, *grad_outputs)  # Entering no_grad costs the host as much as a launch.
        with torch.no_grad():
            grads = backward(ctx, *grad_outputs)
        sources = [x for x in (*grad_outputs, *ctx.saved_tensors) if x is not None and x.requires_grad]
        if not sources:
            return grads
        apply: Any = _Refusing.apply
        guarded = iter(apply(*[x for x in grads if x is not None], *sources))
        return tuple(None if x is None else next(guarded) for x in grads)

    return wrapped


def recompute(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Return function(*args, **options) without storing its activations: the backward pass computes them again.

    They are stored where `torch.utils.checkpoint` does not work: inside torch.func transforms and in graphs of
    torch.compile(dynamic=True).
    """
    if functorch_active() or compiling_dynamic():
        return function(*args, **options)
    result: Tensor = checkpoint(function, *args, use_reentrant=False, **options)
    return result


def refuse_double_backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Backward pass of a backward pass: an error that says what to do."""
    raise RuntimeError(
        "gradients of gradients were requested, but longspan's kernels and chunked operations are differentiable once; "
        "the quadratic definitions in longspan.ops.*.reference can be differentiated any number of times"
    )


class _Refusing(torch.autograd.Function):
    """Return the arguments; those after the gradients only make them require gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    backward = staticmethod(refuse_double_backward)


def refuse_forward_mode(*args: Any) -> tuple[Any, ...]:
    """Return the arguments, through an identity that raises where a tensor among them carries a tangent."""
    if forward_ad_level() < 0:
        return args
    apply: Any = _NoTangent.apply
    return tuple(apply(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


class _NoTangent(torch.autograd.Function):
    """The identity, without forward-mode gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return d

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        raise RuntimeError(
            "forward-mode gradients (torch.func.jvp, jacfwd, hessian) were requested, but longspan's kernels and "
            "chunked operations have reverse-mode gradients only: use backward(), or the quadratic definitions in "
            "longspan.ops.*.reference"
        )


_AS_IT_IS = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, which would round sums over the sequence."""
    if not any_autocast_enabled():
        return _AS_IT_IS
    device_type = "cpu" if x.is_meta else x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _AS_IT_IS


def lazy_module(name: str) -> Callable[[], ModuleType]:
    """Return a function that imports a module of kernels, which need not be installed, on its first call."""
    return cache(partial(import_module, name))


def group(args: Sequence[Any], *types: Any) -> list[Any]:
    """Return the arguments of an operation as instances of these NamedTuples, whose fields they are in order."""
    found, start = [], 0
    for kind in types:
        end = start + len(kind._fields)
        found.append(kind(*args[start:end]))
        start = end
    return found


class DifferentiableOp:
    """Base class of operations; `differentiable_op` adds the attributes."""

    direct: Any
    traced: Any
    traced_backward: Any

    @classmethod
    def run(cls, *args: Any) -> Any:
        """Return the results for the caller; the first argument is a tensor, whose device decides how."""
        if dispatch.eager_untraced(args[0]):
            return cls.direct(*args)
        outputs = cls.traced(*refuse_forward_mode(*args))
        return outputs if isinstance(outputs, Tensor) else cls.visible(outputs)

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        """Return the results for the caller, by default the first output."""
        return outputs[0]


class WeightedOp(DifferentiableOp):
    """An operation of tokens x and a weight with one result, whose backward pass computes what it needs again.

    A class names the module of its kernels, and defines `fake`.
    """

    kernels: Any

    @classmethod
    def forward(cls, x: Tensor, weight: Tensor, traced: bool = True) -> Any:
        out = cls.kernels().forward(x, weight)
        return out if traced else (out,)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        d_x, d_weight = backward(*refuse_forward_mode(d_out, *ctx.saved_tensors))
        return d_x, d_weight

    @classmethod
    def backward(cls, d_out: Tensor, x: Tensor, weight: Tensor, traced: bool = True) -> tuple[Tensor, Tensor]:
        return cls.kernels().backward(d_out, x, weight)

    @staticmethod
    def backward_fake(d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), weight.new_empty(weight.shape)


def differentiable_op(
    name: str,
    arguments: tuple[type, ...],
    saved: tuple[type, ...],
    *,
    outputs: int,
    grads: int,
    leaves: tuple[int, ...] | None = None,
    differentiable: int = 1,
) -> Callable[[T], T]:
    """Decorate a `DifferentiableOp` of static functions: add the callables that run it.

    They take the arguments one by one:

    - `traced`: a `torch.library` custom op, for torch.compile, torch.func, tensor subclasses and any device. It returns
      all outputs of `forward`. Its arguments go through `refuse_forward_mode`, here and in `differentiate`.
    - `direct`: the same functions called without `torch.library`, which halves the host overhead. Only for arguments
      that `dispatch.eager_untraced` accepts. It returns what `visible` selects.

    Both raise an error when their gradients are differentiated. The class defines

    - `forward(*args, traced=True) -> tuple[Tensor, ...]`: the results, then what the backward pass needs. If traced,
      all must be tensors without uninitialized parts; otherwise an output may be None.
    - `fake(*args)`: empty tensors of the same shapes and dtypes.
    - `visible(outputs)`: the results for the caller, a tensor or a tuple. The first `differentiable` have gradients.
    - `save(ctx, args, outputs)`: save for backward.
    - `differentiate(backward, ctx, *grad_outputs)`: gradients of all arguments, by one call of `backward`.
    - `backward(*grad_outputs, *saved, *args, traced=True)` and `backward_fake`: the gradients.

    Args:
        name: Qualified name of the custom op; its backward pass is `<name>_backward`.
        arguments: Classes with annotated fields (NamedTuple, dataclass) that name the arguments.
        saved: The same for what `backward` takes before the arguments.
        outputs: Number of tensors that `forward` returns.
        grads: Number of tensors that `backward` returns.
        leaves: Indices of the arguments with gradients, by default the first `grads`.
        differentiable: Number of visible results with gradients.
    """

    def decorate(cls: T) -> T:
        op: Any = cls
        forward = torch.library.custom_op(name, op.forward, mutates_args=(), schema=_schema(arguments, outputs))
        forward.register_fake(op.fake)
        backward = torch.library.custom_op(
            f"{name}_backward", op.backward, mutates_args=(), schema=_schema((*saved, *arguments), grads)
        )
        backward.register_fake(op.backward_fake)
        backward.register_autograd(refuse_double_backward)
        forward.register_autograd(partial(op.differentiate, backward), setup_context=op.save)
        op.traced, op.traced_backward = staticmethod(forward), staticmethod(backward)
        op.direct = staticmethod(_direct(op, leaves or tuple(range(grads)), differentiable))
        return cls

    return decorate


def _direct(op: Any, leaves: tuple[int, ...], differentiable: int) -> Callable[..., Any]:
    class Direct(torch.autograd.Function):
        """PyTorch inspects each argument: only those with gradients are given one by one."""

        @staticmethod
        def forward(ctx: Any, args: tuple[Any, ...], *_: Tensor | None) -> Any:
            outputs = op.forward(*args, traced=False)
            op.save(ctx, args, outputs)
            visible = op.visible(outputs)
            if isinstance(visible, tuple):
                ctx.mark_non_differentiable(*visible[differentiable:])
            return visible

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            grads = op.differentiate(backward, ctx, *grad_outputs)
            return None, *[grads[i] for i in leaves]

    backward, apply = partial(op.backward, traced=False), direct_apply(Direct)

    def direct(*args: Any) -> Any:
        if dispatch.recording is not None:
            outputs = op.fake(*args)
            return outputs if isinstance(outputs, Tensor) else op.visible(outputs)
        if not torch.is_grad_enabled():
            return op.visible(op.forward(*args, traced=False))
        return apply(args, *[args[i] for i in leaves])

    return direct


class EagerPlan(Protocol):
    """What an eager call on a GPU does, for tensors of one signature: nothing is checked or chosen again.

    Attributes:
        forward: Returns the result for the tensors, and what `backward` needs beside them, tensors or None.
        backward: Returns the gradients of the tensors for that of the result, what it needs, and the tensors.
    """

    @property
    def forward(self) -> Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]: ...

    @property
    def backward(self) -> Callable[..., tuple[Tensor | None, ...]]: ...


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: EagerPlan, *tensors: Tensor | None) -> Any:
        result, saved = plan.forward(*tensors)
        ctx.plan = plan
        ctx.save_for_backward(*saved, *tensors)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.plan.backward(*grad_outputs, *ctx.saved_tensors)


_apply_planned = direct_apply(_Planned)


def run_planned(plan: EagerPlan, *tensors: Tensor | None) -> Tensor:
    """Run a plan, with gradients; for tensors that `dispatch.eager_untraced` accepts."""
    result: Tensor = _apply_planned(plan, *tensors) if torch.is_grad_enabled() else plan.forward(*tensors)[0]
    return result


def _schema(types: tuple[type, ...], results: int) -> str:
    """Return the schema of a custom op whose arguments are the fields of these classes, in order."""
    fields = [f"{_SCHEMA[hint]} {name}" for cls in types for name, hint in get_type_hints(cls).items()]
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"({', '.join(fields)}) -> {returned}"
