"""Kernel launches with little host overhead: launch plans cached per argument signature, and workspaces."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longspan.ops.common.dispatch import LARGEST_AXIS
from longspan.ops.common.plans import Signature as Signature
from longspan.ops.common.plans import TensorSignature, cached, signature
from longspan.ops.common.plans import dense_rows as dense_rows
from longspan.ops.common.torch_private import current_device, current_stream

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Since Triton 3.5 a compiled kernel takes all arguments, compile-time constants included.
_DIRECT = _VERSION >= (3, 5)
_RUNTIME = triton.knobs.runtime

P = TypeVar("P", bound="Plan")


class Strides(NamedTuple):
    """Strides of a tensor (B, T, H, D) along batch, tokens and heads, as kernels take them."""

    b: int
    t: int
    h: int

    @classmethod
    def of(cls, x: TensorSignature) -> Strides:
        return cls(*x[1][:3])


class Launch:
    """A kernel with its grid, scalar arguments and constants, for tensors of one signature.

    The first call compiles. From then on the compiled kernel is launched without inspecting arguments, and pointers may
    be given as integers.

    Args:
        device: Index of the CUDA device, -1 for the CPU (Triton's interpreter).
        kernel: The function decorated with `triton.jit`.
        grid: Number of programs along the three axes.
        scalars: Arguments after the pointers: sizes and strides.
        constants: Compile-time constants and launch options. Those that the kernel does not take are dropped, so that
            kernels of a family can share one dictionary.
    """

    def __init__(
        self, device: int, kernel: Any, grid: tuple[int, int, int], scalars: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        self.device, self.kernel, self.grid, self.scalars = device, kernel, grid, scalars
        taken = {*kernel.arg_names, "num_warps", "num_stages", "maxnreg"}
        self.constants = {name: value for name, value in constants.items() if name in taken}
        self.compiled: Any = None
        self._run: Any = None
        self._leading: tuple[Any, ...] = ()
        self._trailing: tuple[Any, ...] = ()

    def __call__(self, *pointers: Any) -> None:
        """Launch the kernel. Integers are accepted as pointers only once `compiled` is set."""
        if self.compiled is None:
            self._first(pointers)
        elif _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls:
            self.compiled[self.grid](*pointers, *self._trailing)
        else:
            self._run(*self.grid, current_stream(self.device), *self._leading, *pointers, *self._trailing)

    def _first(self, pointers: tuple[Any, ...]) -> None:
        """Compile and launch; from then on launch at half of the host overhead of Triton's own `kernel[grid]`."""
        compiled = _compile(self.kernel, self.grid, (*pointers, *self.scalars), self.constants)
        if compiled is None or not _DIRECT:
            return
        constants = [self.constants[name] for name in self.kernel.arg_names if name in self.constants]
        self._trailing = *self.scalars, *constants
        self._run, self._leading = _launcher(compiled)
        self.compiled = compiled


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that launches a compiled kernel, and its arguments between the stream and the pointers."""
    run, metadata = compiled.run, (compiled.packed_metadata, None, None, None)
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if _VERSION != (3, 6) or scratch or not isinstance(run.launch, BuiltinFunctionType):
        return run, (compiled.function, *metadata)
    # What `run` itself calls on CUDA: a sixth of a launch's host time is spent in between.
    return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata)


def _compile(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Compile and launch.

    Kernels are tuned for an H200. On a device with less shared memory the number of pipeline stages is lowered in
    `constants`, which changes no result.
    """
    stages = "STAGES" if "STAGES" in constants else "num_stages"
    while True:
        try:
            return kernel[grid](*arguments, **constants)
        except OutOfResources as error:
            if constants.get(stages, 1) > 1:
                constants[stages] -= 1
                continue
            raise RuntimeError(
                f"{kernel.__name__} needs {error.required} of {error.name}, this device has {error.limit}: "
                "use bfloat16, or smaller head, feature or value dimensions"
            ) from error


class Workspace:
    """Several aligned buffers in one allocation.

    Args:
        *buffers: Number of elements and dtype of each buffer.
    """

    def __init__(self, *buffers: tuple[int, torch.dtype]) -> None:
        self.buffers, self.offsets, end = buffers, [], 0
        for size, dtype in buffers:
            self.offsets.append(end)
            end += -(-size * dtype.itemsize // 256) * 256
        self.size = end // 4

    def allocate(self, like: Tensor, *, zeroed: bool = False) -> Tensor:
        """Return `size` float32 elements on the device of `like`.

        Args:
            like: A tensor on the device to allocate on.
            zeroed: Fill with zeros, so that padding and unused buffers have the same bits every time.
        """
        return (like.new_zeros if zeroed else like.new_empty)(self.size, dtype=torch.float32)

    def views(self, allocation: Tensor) -> list[Tensor]:
        """Return the buffers as tensors."""
        views = zip(self.buffers, self.offsets, strict=True)
        return [allocation[offset // 4 :].view(dtype)[:size] for (size, dtype), offset in views]


class Plan:
    """Launch plan, cached per argument signature: tiling, workspaces and compiled kernels.

    A subclass computes in `__init__` all that depends on shapes, strides, dtypes and options alone, and creates its
    launches with `launch`. `Plan.of` returns the cached plan of a call.

    Args:
        device: Index of the CUDA device, -1 for the CPU.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._launches: list[Launch] = []
        self._compiled = False

    @classmethod
    def of(cls: type[P], tensors: Sequence[Tensor | None], *options: Hashable) -> P:
        """Return the plan for these tensors, the first of which names the device."""
        first = tensors[0]
        assert first is not None
        device, key = first.get_device(), signature(*tensors)
        return cached((cls, device, key, options), cls, device, key, *options)

    def launch(self, kernel: Any, grid: tuple[int, ...], scalars: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
        """Create a launch of this plan; missing axes of the grid are 1."""
        x, y, z = (*grid, 1, 1)[:3]
        assert max(y, z) <= LARGEST_AXIS, f"{kernel.__name__} has a grid of {x} × {y} × {z} programs"
        launch = Launch(self.device, kernel, (x, y, z), scalars, constants)
        self._launches.append(launch)
        return launch

    @property
    def compiled(self) -> bool:
        """True once all kernels are compiled, so that they take addresses in place of tensors."""
        if not self._compiled:
            self._compiled = all(launch.compiled is not None for launch in self._launches)
        return self._compiled

    def pointers(self, workspace: Workspace, allocation: Tensor) -> list[Any]:
        """Return the buffers as addresses if all kernels are compiled, else as tensors, which takes longer."""
        if self._compiled or self.compiled:
            first = allocation.data_ptr()
            return [first + offset for offset in workspace.offsets]
        return workspace.views(allocation)

    def addresses(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Return the tensors as addresses if all kernels are compiled: Triton looks up every tensor it is given.

        The caller holds on to the tensors until the last launch.
        """
        if self._compiled or self.compiled:
            return tuple([None if x is None else x.data_ptr() for x in tensors])
        return tensors


@lru_cache
def shared_memory_kb(device: int) -> int:
    """Shared memory per block in KB: sm_90 and sm_100 227, sm_80 and sm_87 163, others 99."""
    capability = torch.cuda.get_device_capability(device) if device >= 0 else (9, 0)
    return 227 if capability[0] in (9, 10) else 163 if capability in ((8, 0), (8, 7)) else 99


@lru_cache
def processors(device: int) -> int:
    """Number of multiprocessors; Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 4


_NO_CHANGE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of x the current one, if it is not."""
    if not x.is_cuda or x.get_device() == current_device():
        return _NO_CHANGE
    return torch.cuda.device(x.device)


def dense(x: Tensor | None) -> Tensor | None:
    """Return x contiguous."""
    return None if x is None else x.contiguous()


def new_like(x: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor like x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
