"""The cache of launch plans and its keys. It does not import Triton: operations look their plans up before that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

# Shape, strides, dtype and 16-byte alignment of a tensor: all that a kernel is compiled for.
TensorSignature = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
Signature = tuple[TensorSignature | None, ...]

C = TypeVar("C")

# Offsets of 32 bits; the most tokens in a block.
OFFSETS, BLOCK = 2**31, 256
# The cache is emptied when it is full.
MOST_PLANS = 8192
_plans: dict[Hashable, Any] = {}


def signature(*tensors: Tensor | None) -> Signature:
    """Return the cache key of a call with these tensors."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15 == 0) for x in tensors])


def dense_rows(x: Tensor) -> Tensor:
    """Return x (B, T, H, D) with strides that kernels take.

    The last is 1, and offsets in 32 bits do not overflow: those inside a block of tokens, and from head to head of a
    group. Kernels compute all others in 64 bits.
    """
    _, t, h, d = x.stride()
    return x if d == 1 and BLOCK * t + x.shape[2] * h < OFFSETS else x.contiguous()


def cached(key: Hashable, make: Callable[..., C], *args: Any) -> C:
    """Return what `make` returned for this key before; otherwise call it with these arguments."""
    found: C | None = _plans.get(key)
    if found is None:
        found = make(*args)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = found
    return found


def clear() -> None:
    """Forget all plans."""
    _plans.clear()
