"""Positional encodings: added to embeddings (learned, sinusoidal, axial), applied to queries and keys (rotary), or
added to the scores of local attention (dynamic bias). Angles are computed in float32 whatever the model's dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import TokenLayout
from longspan.ops.rotary import angles, cos_sin, rotate


class AbsolutePositions(nn.Module, ABC):
    """A vector for each position, added to the embeddings.

    Attributes:
        reach: Number of positions; None if unlimited.
    """

    reach: int | None = None

    @abstractmethod
    def forward(self, position: Tensor) -> Tensor:
        """Return the vectors (B or 1, T, dim) of positions (B or 1, T) int64."""

    def check(self, longest: int) -> None:
        """Raise ValueError if there are fewer than `longest` positions."""
        if self.reach is not None and longest > self.reach:
            raise ValueError(
                f"{longest} tokens are more than the {self.reach} positions of this model ({type(self).__name__}); "
                "shorten the input, build the model with a larger max_length, or use rotary or sinusoidal positions"
            )


class LearnedPositions(AbsolutePositions):
    """One learned vector for each of max_length positions."""

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        self.reach = max_length
        self.table = nn.Parameter(torch.randn(max_length, dim) * 0.02)

    def forward(self, position: Tensor) -> Tensor:
        return self.table[position]


class SinusoidalPositions(AbsolutePositions):
    """sin and cos of position / base^(2i/dim), sines first; unlimited."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"sinusoidal positions need an even dim, got {dim}")
        self.dim, self.base = dim, base

    def forward(self, position: Tensor) -> Tensor:
        angle = angles(position, self.dim, self.base, torch.float32)
        return torch.cat([angle.sin(), angle.cos()], -1)


class AxialPositions(AbsolutePositions):
    """A grid of positions, each the sum of one vector per coordinate: two tables of 1,024 cover a million positions.

    Args:
        dim: Width of the vectors.
        shape: The grid, in row-major order.
    """

    def __init__(self, dim: int, shape: Sequence[int]) -> None:
        super().__init__()
        if not shape or min(shape) < 1:
            raise ValueError(f"an axial shape is one or more positive numbers, got {tuple(shape)}")
        self.shape, self.reach = tuple(shape), math.prod(shape)
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(size, dim) * 0.02) for size in shape)

    def forward(self, position: Tensor) -> Tensor:
        total: Tensor | None = None
        for axis in reversed(range(len(self.shape))):
            # The first coordinate is not taken modulo its size: positions outside the grid must not wrap around.
            row = self.tables[axis][position % self.shape[axis] if axis else position]
            total = row if total is None else total + row
            position = position // self.shape[axis]
        assert total is not None
        return total


class Rotary(nn.Module):
    """Rotary embedding: rotates pairs of features of queries and keys by position · base^(−2i/R) (Su et al., 2021).

    Args:
        rotary_dim: R, even: the first R features of a head are rotated, the others stay.
        base: Of the frequencies.
        interleaved: Whether pairs are neighbors (0, 1), (2, 3), …; otherwise feature i pairs with i + R / 2.
    """

    def __init__(self, rotary_dim: int, base: float = 10000.0, *, interleaved: bool = False) -> None:
        super().__init__()
        if rotary_dim % 2:
            raise ValueError(f"rotary_dim, which is head_dim unless given, must be even, got {rotary_dim}")
        self.rotary_dim, self.base, self.interleaved = rotary_dim, base, interleaved

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x (B, T, H, D) to positions (B or 1, T)."""
        return self.at(x, TokenLayout(position, position))

    def at(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Rotate x (B, T, H, D) to the positions of a layout, with its cached cos and sin if it has them."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cached = layout.rotary.get(self.kind)
        if cached is None or cached[0].dtype != dtype:
            cached = cos_sin(layout.position, *self.kind, dtype)
        cos, sin = cached
        return rotate(x, cos[:, :, None], sin[:, :, None], interleaved=self.interleaved)

    @property
    def kind(self) -> tuple[int, float]:
        """What the angles depend on besides positions: (rotary_dim, base)."""
        return self.rotary_dim, self.base


def with_rotary(layout: TokenLayout, kinds: Iterable[tuple[int, float]], dtype: torch.dtype) -> TokenLayout:
    """Return a layout with the cos and sin of these kinds of rotary embedding, (rotary_dim, base)."""
    rotary = {kind: cos_sin(layout.position, *kind, dtype) for kind in kinds}
    return replace(layout, rotary=rotary) if rotary else layout


class DynamicPositionBias(nn.Module):
    """A bias for the scores of local attention, a small network of the distance |i − j|: (n,) -> (H, n)."""

    def __init__(self, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, num_heads)])

    def forward(self, distance: Tensor) -> Tensor:
        first, second, last = self.layers
        x = distance.abs().to(next(self.parameters()).dtype)[:, None]
        return last(F.silu(second(F.silu(first(x))))).T
