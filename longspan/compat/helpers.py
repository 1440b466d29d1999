"""Small functions that the older libraries define at module level, for scripts that import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def exists(val: Any) -> bool:
    """Return whether a value is not None."""
    return val is not None


def default(val: Any, d: Any) -> Any:
    """Return a value, or d if it is None."""
    return d if val is None else val


def max_neg_value(tensor: Tensor) -> float:
    """Return the most negative finite number of the tensor's dtype."""
    return torch.finfo(tensor.dtype).min


def rotate_every_two(x: Tensor) -> Tensor:
    """Map each pair (a, b) of neighboring features to (−b, a)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([-b, a], -1).flatten(-2)


class GELU_(nn.GELU):  # noqa: N801
    """GELU by its tanh approximation."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")
