"""Rows moved by a number of slots of their own, so that each row's buckets begin at multiples of their size."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_right(x: Tensor, by: Tensor, room: int, fill: float = 0.0) -> Tensor:
    """x: (B, T, ...) with row b moved right by by[b] ≤ room slots: (B, T + room, ...), `fill` around it."""
    T = x.shape[1]
    source = torch.arange(T + room, device=x.device) - by[:, None]
    outside = (source < 0) | (source >= T)
    moved = torch.take_along_dim(x, _like(source.clamp(0, T - 1), x), 1)
    return moved.masked_fill(_like(outside, x), fill)


def shift_left(x: Tensor, by: Tensor, length: int) -> Tensor:
    """The `length` slots of each row of x (B, T, ...) that begin at by[b]: the way back."""
    return torch.take_along_dim(x, _like(torch.arange(length, device=x.device) + by[:, None], x), 1)


def _like(index: Tensor, x: Tensor) -> Tensor:
    return index.reshape(*index.shape, *[1] * (x.ndim - 2))
