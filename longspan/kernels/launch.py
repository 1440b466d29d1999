"""Launches without Triton's look at every argument: what it found is kept for arguments that look alike."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

# From this version on a compiled kernel takes all arguments, constants too.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)

Argument = Tensor | int | None


class Launcher:
    """Kernels that share constants, once compiled for one device."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants = constants
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        given: tuple[Argument, ...],
        looks: tuple[Any, ...],
        more: tuple[tuple[str, Any], ...],
    ) -> None:
        """looks: those of all arguments that callers choose. more: constants and options of this launch."""
        key = kernel, looks, more, tuple([x is None for x in given])
        found = self.compiled.get(key)
        if found is not None:
            compiled, constants = found
            compiled[grid](*given, *constants)
            return
        options = {**{name: self.constants[name] for name in kernel.arg_names if name in self.constants}, **dict(more)}
        compiled = kernel[grid](*given, **options)
        if compiled is not None and _DIRECT:
            self.compiled[key] = compiled, tuple(options[name] for name in kernel.arg_names if name in options)


def look(x: Argument) -> Any:
    """What a compiled kernel depends on: of a tensor its dtype and alignment, of a number its size and factors."""
    if isinstance(x, int):
        return x == 1, x % 16 == 0, x < 2**31
    return x if x is None else (x.dtype, x.data_ptr() % 16 == 0)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def dense_rows(x: Tensor) -> Tensor:
    """x with its last dimension dense, as loads of whole rows need it."""
    return x if x.stride(-1) == 1 else x.contiguous()
