"""Shifts of each batch row by its own number of tokens, so that the buckets of all rows are aligned."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.layout import expand_like


def shift_right(x: Tensor, by: Tensor, padding: int, fill: float = 0.0) -> Tensor:
    """Move row b of x (B, T, ...) right by by[b] ≤ padding tokens: (B, T + padding, ...), with `fill` around it."""
    T = x.shape[1]
    source = torch.arange(T + padding, device=x.device) - by[:, None]
    outside = (source < 0) | (source >= T)
    moved = torch.take_along_dim(x, expand_like(source.clamp(0, T - 1), x), 1)
    return moved.masked_fill(expand_like(outside, x), fill)


def shift_left(x: Tensor, by: Tensor, length: int) -> Tensor:
    """Undo `shift_right`: return the `length` tokens of each row of x (B, T, ...) from by[b] on."""
    return torch.take_along_dim(x, expand_like(torch.arange(length, device=x.device) + by[:, None], x), 1)
