"""Small layers of performer-pytorch: norms, token shift, feed-forward layers, positions, and its helpers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat import layers
from longspan.compat.faithful import resolve_faithful
from longspan.compat.helpers import shift
from longspan.compat.layers import sinusoidal_table
from longspan.ops.rotary import rotate

M = TypeVar("M", bound=nn.Module)


def empty(tensor: Tensor) -> bool:
    """Return whether a tensor has no elements."""
    return tensor.numel() == 0


@contextmanager
def null_context() -> Iterator[None]:
    """Do nothing, as `contextlib.nullcontext`."""
    yield


def get_module_device(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(module.parameters()).device


def find_modules(nn_module: nn.Module, type: type[M]) -> list[M]:
    """Return all modules of a type in a module, which may be one itself."""
    return [module for module in nn_module.modules() if isinstance(module, type)]


class Always(nn.Module):
    """Return a constant, whatever the arguments."""

    def __init__(self, val: Any) -> None:
        super().__init__()
        self.val = val

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the constant."""
        return self.val


class PreShiftTokens(nn.Module):
    """Replace equal parts of the features by those of neighboring tokens before a layer.

    Args:
        shifts: For each part, how many slots later a token's features go.
        fn: The layer.
    """

    def __init__(self, shifts: Sequence[int], fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.shifts = tuple(shifts)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Shift x (B, T, dim), without the tokens that `mask` hides, and call the layer with all arguments."""
        parts = list(x.split(x.shape[-1] // len(self.shifts), -1))
        for i, amount in enumerate(self.shifts):
            parts[i] = shift(parts[i], amount, kwargs.get("mask"))
        return self.fn(torch.cat(parts, -1), **kwargs)


class ReZero(nn.Module):
    """Multiply a layer's output by a learned scalar, which starts at 0.001."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(1e-3))
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Call the layer with all arguments."""
        return self.fn(x, **kwargs) * self.g


class PreScaleNorm(nn.Module):
    """Divide x by its norm, multiply it by a learned scalar, and call a layer."""

    def __init__(self, dim: int, fn: nn.Module, eps: float = 1e-5) -> None:
        super().__init__()
        self.fn = fn
        self.g = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Call the layer with all arguments."""
        return self.fn(F.normalize(x, dim=-1, eps=self.eps) * self.g, **kwargs)


class PreLayerNorm(nn.Module):
    """Apply a layer norm and call a layer."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Call the layer with all arguments."""
        return self.fn(self.norm(x), **kwargs)


class FeedForward(layers.FeedForward):
    """Compute act(x W₁) W₂, or its gated variant with glu."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim). mask: Not used; a token shift around the layer passes it on."""
        return super().forward(x)


class AbsolutePositionalEmbedding(nn.Module):
    """A learned vector for each position: (T, dim) for x (B, T, …)."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(max_seq_len, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors of the positions of x."""
        return self.emb(torch.arange(x.shape[1], device=x.device))


class FixedPositionalEmbedding(nn.Module):
    """Sinusoidal positions (1, T, dim) for x (B, T, …).

    Loading a state dict keeps this table, which is more accurate than the original's, unless the module is faithful.
    """

    emb: Tensor

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.faithful = resolve_faithful(None)
        table = sinusoidal_table(dim, max_seq_len)
        if self.faithful:
            angle = torch.arange(max_seq_len)[:, None] * (1 / 10000 ** (torch.arange(0, dim, 2) / dim))
            table = torch.cat([angle.sin(), angle.cos()], -1)
        self.register_buffer("emb", table)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings of the positions of x, in its dtype."""
        return self.emb[None, : x.shape[1]].to(x)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}emb")
        if not self.faithful and given is not None and given.shape == self.emb.shape:
            state_dict = {**state_dict, f"{prefix}emb": self.emb.detach()}
        super()._load_from_state_dict(state_dict, prefix, *args)


class AxialPositionalEmbedding(nn.Module):
    """A grid of positions in row-major order, each the sum of one learned vector per axis: (B, T, dim) for x (B, T, …).

    Args:
        dim: The width of the vectors.
        axial_shape: The size of each axis.
        axial_dims: Widths that sum up to dim, if the vectors of the axes are concatenated and not added.
    """

    def __init__(self, dim: int, axial_shape: Sequence[int], axial_dims: Sequence[int] | None = None) -> None:
        super().__init__()
        self.dim, self.shape, self.max_seq_len = dim, tuple(axial_shape), math.prod(axial_shape)
        self.summed = axial_dims is None
        widths = [dim] * len(self.shape) if axial_dims is None else list(axial_dims)
        if len(widths) != len(self.shape) or (not self.summed and sum(widths) != dim):
            raise ValueError(
                f"axial_dims must be {len(self.shape)} numbers, one for each axis, with the sum {dim}, got {axial_dims}"
            )
        self.weights = nn.ParameterList(
            torch.randn(1, *(size if axis == i else 1 for axis, size in enumerate(self.shape)), width)
            for i, width in enumerate(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors of the positions of x."""
        if x.shape[1] > self.max_seq_len:
            raise ValueError(
                f"x has {x.shape[1]} tokens, more than the {self.max_seq_len} positions of the grid {self.shape}"
            )
        grids = [weight.expand(1, *self.shape, -1).flatten(1, -2)[:, : x.shape[1]] for weight in self.weights]
        table = sum(grids[1:], grids[0]) if self.summed else torch.cat(grids, -1)
        return table.expand(len(x), -1, -1).to(x)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, sinu_pos: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighboring features of q and k (B, H, T, D).

    Args:
        q: Queries.
        k: Keys.
        sinu_pos: The output of FixedPositionalEmbedding(D, …): sines and cosines (1 or B, T, D).
    """
    sin, cos = sinu_pos[:, None].chunk(2, -1)
    return rotate(q, cos, sin, interleaved=True), rotate(k, cos, sin, interleaved=True)
