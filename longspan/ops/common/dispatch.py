"""Which code runs an operation: Triton kernels on a GPU that supports them, eager PyTorch everywhere else."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.common.torch_private import assume_constant, forward_ad_level, functorch_active

# The operations that have kernels, for `longspan info`.
KERNELS = (
    "causal and bidirectional linear attention and FAVOR+, Hedgehog features, gated linear attention, its gates "
    "and L2 norms, windows, Linformer, short convolutions, decode steps"
)
LARGEST = 256
# CUDA's limit of the second and third axis of a grid.
LARGEST_AXIS = 65535
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TORCH = "torch"
# Shared memory in KB of the GPU that `longspan.explain` assumes where there is none: compute capability 9.0.
HOPPER_SHARED_MEMORY = 227


class Decision(NamedTuple):
    """What runs an operation.

    Attributes:
        operation: The operation.
        algorithm: "torch" for eager PyTorch, "sdpa" for PyTorch's own kernels, otherwise a module of Triton kernels.
        why: Why no Triton kernel runs it; None if one does.
    """

    operation: str
    algorithm: str
    why: str | None


class Recording:
    """The decisions of calls whose kernels are not launched, for `longspan.explain`.

    Args:
        hypothetical: Whether to assume a Hopper GPU with Triton instead of the device of this machine.
    """

    def __init__(self, hypothetical: bool) -> None:
        self.hypothetical = hypothetical
        self.decisions: list[Decision] = []


# Operations record their decisions here, and compute nothing on kernels, while it is set.
recording: Recording | None = None


def record(operation: str, algorithm: str, why: str | None) -> None:
    """Record a decision once; call it if `recording` is set."""
    assert recording is not None
    decision = Decision(operation, TORCH if why is not None else algorithm, why)
    if decision not in recording.decisions:
        recording.decisions.append(decision)


def unsupported_dtypes(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return a reason if q, k and v are not of one dtype that the kernels take."""
    if q.dtype == k.dtype == v.dtype and q.dtype in DTYPES:
        return None
    found = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
    return f"q, k and v are {found}; the kernels take one dtype of bfloat16, float16, float32"


def large_axis(number: int, what: str) -> str | None:
    """Return a reason if there are too many of something to be the second or third axis of a grid."""
    return None if number <= LARGEST_AXIS else f"{number} {what}; the kernels take up to {LARGEST_AXIS}"


def eager_untraced(q: Tensor) -> bool:
    """True if nothing traces the call, so that kernels can be launched without torch.library at half the overhead."""
    return (
        q.is_cuda
        and type(q) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not functorch_active()
        and forward_ad_level() < 0
    )


def unavailable(q: Tensor) -> str | None:
    """Return why no kernel runs on the device of q; None if they do."""
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}; the kernels need CUDA"
    return triton_missing(q.device)


# Not a functools cache, which torch.compile would trace into.
_found: dict[torch.device, str | None] = {}


@assume_constant
def triton_missing(device: torch.device) -> str | None:
    """Return why no kernel runs on this CUDA device; None if they do."""
    if recording is not None and recording.hypothetical:
        return None
    if device not in _found:
        _found[device] = _find_missing(device)
    return _found[device]


def insufficient_shared_memory(q: Tensor, needed: int) -> str | None:
    """Return a reason if programs need more shared memory, in KB, than the device of q has."""
    found = _shared_memory_kb(q.device)
    return None if found >= needed else f"a program needs up to {needed} KB of shared memory, this device has {found}"


@assume_constant
def _shared_memory_kb(device: torch.device) -> int:
    if recording is not None and recording.hypothetical:
        return HOPPER_SHARED_MEMORY
    from longspan.ops.common.launch import shared_memory_kb

    return shared_memory_kb(-1 if device.index is None else device.index)


def _find_missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from triton import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < (3, 4):
        return f"triton {__version__} is older than 3.4: install torch 2.8 or newer"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def why_no_triton() -> str | None:
    """Return why no operation can run on the Triton kernels; None if some can."""
    if torch.cuda.is_available() or recording is not None:
        return triton_missing(torch.device("cuda"))
    return "there is no CUDA device"
