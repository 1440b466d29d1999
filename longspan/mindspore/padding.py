"""Rows with padding: filled before anything is computed from it, and behind the tokens where these are counted."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops


def checked(mask: Tensor, x: Tensor) -> Tensor:
    """mask (B, n), True = keep, as booleans, for x (B, n, …)."""
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be (batch, n) = {x.shape[:2]}, True = keep, got {mask.shape}")
    return mask.astype(ms.bool_)


def filled(x: Tensor, mask: Tensor) -> Tensor:
    """x (B, n, D) with hidden tokens zero: filled, not multiplied, for padding may hold NaN."""
    return ops.where(mask.expand_dims(-1), x, ops.zeros_like(x))


def first(mask: Tensor) -> Tensor:
    """(B,) the slot of each row's first token."""
    return ops.argmax(mask.astype(ms.int32), 1)


def shifted(x: Tensor, by: Tensor) -> Tensor:
    """x (B, n, …) with each row's slot s holding what stood in slot s + by, round the end: by `first`, and back."""
    B, n = x.shape[:2]
    slot = (ops.arange(n) + by.expand_dims(-1)) % n + ops.arange(B).expand_dims(-1) * n  # (B, n)
    rows = ops.gather(x.reshape((B * n, -1)), slot.reshape((-1,)), 0)
    return rows.reshape(x.shape)
