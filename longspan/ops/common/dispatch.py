"""Which code runs an operation: Triton kernels on a GPU that supports them, eager PyTorch everywhere else."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from longspan.ops.common.torch_private import assume_constant, functorch_active

# What there are kernels for, as `longspan info` says it.
KERNELS = "causal and bidirectional linear attention and FAVOR+, windows, Linformer, decode steps"
LARGEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    kv: Tensor | None,
    feature_map: str,
    bucket: int,
) -> str | None:
    """Why causal linear attention of these arguments runs in plain PyTorch; None where the kernels take them."""
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}; the kernels need CUDA"
    why = triton_missing(q.device) or why_unsupported(q, k, v, weight, log_scale, kv, feature_map, bucket)
    if why is not None or weight is None:
        return why
    return insufficient_shared_memory(
        q, 227 if q.dtype != torch.bfloat16 else 163 if max(q.shape[3], v.shape[3]) > 64 else 99
    )


def why_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    kv: Tensor | None,
    feature_map: str,
    bucket: int,
) -> str | None:
    """What about the arguments themselves the kernels do not do; None where there is nothing."""
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype or dtype not in DTYPES or (kv is not None and kv.dtype != torch.float32):
        found = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v, q if kv is None else kv))
        return f"q, k, v and the sums are {found}; the kernels take one dtype of bfloat16, float16, float32"
    sizes = q.shape[3], q.shape[3] if weight is None else len(weight), v.shape[3]
    if max(sizes) > LARGEST:
        return f"head, feature or value dimension ({', '.join(map(str, sizes))}) is over {LARGEST}"
    if bucket > 1:
        return f"a blind spot ({bucket})"
    if q.shape[1] == 1:
        return "a single token"
    if log_scale is not None and feature_map != "identity":
        return f"log scales given beside the feature map {feature_map!r}"
    if (weight is not None and not weight.numel()) or not q.numel() or not v.numel():
        return "an empty tensor"
    if weight is not None:
        D, M, E = sizes
        # A part of it stays on the chip as long as a program runs.
        room = 32768 if dtype == torch.bfloat16 and max(D, E) <= 128 else 16384
        return _too_large(D, M, room)
    return None


def why_not_triton_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, epsilon: float = 0.0
) -> str | None:
    """Why bidirectional linear attention of these arguments runs in plain PyTorch; None where the kernels take them."""
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}; the kernels need CUDA"
    why = triton_missing(q.device) or why_unsupported_bidirectional(q, k, v, weight, epsilon)
    wide = q.dtype == torch.bfloat16 and max(q.shape[3], v.shape[3]) > 64
    return why or (
        insufficient_shared_memory(q, 163 if weight is None else 227) if wide or weight is not None else None
    )


def why_unsupported_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, epsilon: float = 0.0
) -> str | None:
    """What about the arguments themselves the kernels do not do; None where there is nothing."""
    if epsilon:
        return f"an epsilon ({epsilon}) added to the features"
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in DTYPES:
        found = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        return f"q, k and v are {found}; the kernels take one dtype of bfloat16, float16, float32"
    D, M, E = q.shape[3], q.shape[3] if weight is None else weight.shape[0], v.shape[3]
    if max(D, M, E) > LARGEST:
        return f"head, feature or value dimension ({D}, {M}, {E}) is over {LARGEST}"
    if weight is not None:
        # It stays on the chip as long as a program runs, padded to powers of two: whole, in two halves, or in float32.
        room = 8192 if q.dtype != torch.bfloat16 else 32768 if weight.dtype == torch.bfloat16 else 16384
        if (why := _too_large(D, M, room)) is not None:
            return why
    if not q.numel() or not v.numel():
        return "an empty tensor"
    return None


def _too_large(D: int, M: int, room: int) -> str | None:
    """Whether a projection, padded to powers of two, is."""
    if room < 1 << ((int(D) - 1).bit_length() + (int(M) - 1).bit_length()):
        return f"a projection of {M} × {D} numbers, padded, is over {room}"
    return None


def eager_untraced(q: Tensor) -> bool:
    """True if nothing traces the call, so that kernels can be launched without torch.library at half the overhead."""
    return (
        q.is_cuda
        and type(q) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not functorch_active()
    )


def bidirectional_kernels() -> ModuleType:
    """The kernels' module, imported on first use."""
    from longspan.ops.linear.triton import bidirectional

    return bidirectional


def linear_kernels() -> ModuleType:
    """The kernels' module, imported on first use."""
    from longspan.ops.linear.triton import chunk as linear

    return linear


# Kept here and not by functools: a compiler looks through that to what it cannot follow.
_found: dict[torch.device, str | None] = {}


@assume_constant
def triton_missing(device: torch.device) -> str | None:
    if device not in _found:
        _found[device] = _look(device)
    return _found[device]


def insufficient_shared_memory(q: Tensor, needed: int) -> str | None:
    """Whether programs need more shared memory, in KB, than they have there."""
    found = _shared_memory_kb(q.device)
    return None if found >= needed else f"a program needs up to {needed} KB of shared memory, this device has {found}"


@assume_constant
def _shared_memory_kb(device: torch.device) -> int:
    from longspan.ops.common.launch import shared_memory_kb

    return shared_memory_kb(device.index)


def _look(device: torch.device) -> str | None:
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
    """Why no operation here can run on the Triton kernels; None where some can."""
    return triton_missing(torch.device("cuda")) if torch.cuda.is_available() else "there is no CUDA device"
