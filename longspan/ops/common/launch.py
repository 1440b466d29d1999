"""Launches that cost the host little: what Triton finds out about arguments is kept for arguments that look alike."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

# From this version on a compiled kernel takes all arguments, constants too.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)

# A tensor, or the address of one.
Place = Tensor | int
# All that a kernel is cut and compiled for: see `looks`.
Looks = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, bool] | None, ...]


def looks(*given: Tensor | None) -> Looks:
    """Of each tensor its shape, strides and dtype, and whether it is aligned."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15 == 0) for x in given])


class Launch:
    """A kernel with its grid, numbers and constants, for tensors that look alike whenever it is called.

    The first call compiles; after it nobody looks at an argument.
    """

    def __init__(
        self, device: int, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        self.device, self.kernel, self.grid, self.numbers = device, kernel, grid, numbers
        # Kernels of a family share constants, of which each takes some.
        taken = {*kernel.arg_names, "num_warps", "num_stages", "maxnreg"}
        self.constants = {name: value for name, value in constants.items() if name in taken}
        self.ready: Any = None  # What Triton compiled.
        self.rest: tuple[Any, ...] = ()

    def __call__(self, *given: Place | None) -> None:
        """given: addresses only where `ready` is not None."""
        if self.ready is not None:
            _run(self.ready, self.grid, self.device, (*given, *self.rest))
            return
        compiled = _compiled(self.kernel, self.grid, (*given, *self.numbers), self.constants)
        if compiled is not None and _DIRECT:
            constants = [self.constants[name] for name in self.kernel.arg_names if name in self.constants]
            self.rest = *self.numbers, *constants
            self.ready = compiled


def _compiled(kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Compiled and launched. Kernels are cut for an H200; a device with less room gets fewer loads in flight, which
    changes no result and is written into the constants.
    """
    stages = "STAGES" if "STAGES" in constants else "num_stages"
    while True:
        try:
            return kernel[grid](*given, **constants)
        except OutOfResources as error:
            if constants.get(stages, 1) > 1:
                constants[stages] -= 1
                continue
            raise RuntimeError(
                f"{kernel.__name__} needs {error.required} of {error.name}, this device has {error.limit}: "
                "use bfloat16, or smaller head, feature or value dimensions"
            ) from error


def _run(compiled: Any, grid: tuple[int, ...], device: int, given: tuple[Any, ...]) -> None:
    """Triton's `compiled[grid](*given)` without what hooks need, at half of its time, where there are none."""
    runtime = triton.knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        compiled[grid](*given)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)


class Room:
    """Tensors of so many numbers each in one allocation, which costs the host as much as any: all are aligned."""

    def __init__(self, *parts: tuple[int, torch.dtype]) -> None:
        self.parts, self.offsets, end = parts, [], 0
        for number, dtype in parts:
            self.offsets.append(end)
            end += -(-number * dtype.itemsize // 256) * 256
        self.size = end // 4

    def new(self, like: Tensor, *, clean: bool = False) -> Tensor:
        """clean: zeros in between and wherever nobody writes."""
        return (like.new_zeros if clean else like.new_empty)(self.size, dtype=torch.float32)

    def places(self, room: Tensor, ready: bool) -> list[Any]:
        """ready: whether all kernels that are to be called with them are; else tensors are made, which takes longer."""
        if ready:
            first = room.data_ptr()
            return [first + offset for offset in self.offsets]
        views = zip(self.parts, self.offsets, strict=True)
        return [room[offset // 4 :].view(dtype)[:number] for (number, dtype), offset in views]


@lru_cache
def room(device: int) -> int:
    """KB of shared memory that a program may have: Hopper and large Blackwells, large Amperes, cards for desktops."""
    capability = torch.cuda.get_device_capability(device) if device >= 0 else (9, 0)
    return 227 if capability[0] in (9, 10) else 163 if capability in ((8, 0), (8, 7)) else 99


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def dense_rows(x: Tensor) -> Tensor:
    """x with its last dimension dense, as loads of whole rows need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def new_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
