"""Small functions that the older libraries define at module level, for scripts that import them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def exists(val: Any) -> bool:
    """Return whether a value is not None."""
    return val is not None


def default(val: Any, d: Any) -> Any:
    """Return a value, or d if it is None."""
    return d if val is None else val


def cast_tuple(val: Any) -> tuple[Any, ...]:
    """Return a tuple unchanged, and any other value, also a list, as a tuple of one."""
    return val if isinstance(val, tuple) else (val,)


def max_neg_value(tensor: Tensor) -> float:
    """Return the most negative finite number of the tensor's dtype."""
    return torch.finfo(tensor.dtype).min


def rotate_every_two(x: Tensor) -> Tensor:
    """Map each pair (a, b) of neighboring features to (−b, a)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([-b, a], -1).flatten(-2)


def shift(t: Tensor, amount: int, mask: Tensor | None = None) -> Tensor:
    """Move tokens (B, T, dim) later by `amount` slots, or earlier if it is negative; zeros take the free slots.

    Args:
        t: The tokens.
        amount: The number of slots.
        mask: (B, T), True for tokens to move; the others are zero-filled, unless amount is 0.
    """
    if amount == 0:
        return t
    t = t if mask is None else t.masked_fill(~mask.bool()[..., None], 0)
    amount = max(-t.shape[1], min(amount, t.shape[1]))
    return F.pad(t, (0, 0, amount, -amount))


class GELU_(nn.GELU):  # noqa: N801
    """GELU by its tanh approximation."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")
