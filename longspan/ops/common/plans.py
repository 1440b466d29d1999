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

# The cache is emptied when it is full.
MOST_PLANS = 8192
_plans: dict[Hashable, Any] = {}


def signature(*tensors: Tensor | None) -> Signature:
    """Return the cache key of a call with these tensors."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15 == 0) for x in tensors])


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
