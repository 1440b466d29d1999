"""Layers and helpers that several of the packages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import KeyMapping, rename_layer
from longspan.models.positions import SinusoidalPositions


class PreNorm(nn.Module):
    """Compute fn(norm(x)); further arguments are those of fn."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Map x (B, T, dim)."""
        return self.fn(self.norm(x), **kwargs)


class Chunk(nn.Module):
    """Apply fn to one chunk of x after another, to save memory.

    Args:
        chunks: The number of chunks.
        fn: The layer.
        along_dim: The dimension of x that is divided.
    """

    def __init__(self, chunks: int, fn: nn.Module, along_dim: int = -1) -> None:
        super().__init__()
        self.dim, self.chunks, self.fn = along_dim, chunks, fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Map x; every chunk gets the same further arguments."""
        if self.chunks == 1:
            return self.fn(x, **kwargs)
        return torch.cat([self.fn(chunk, **kwargs) for chunk in x.chunk(self.chunks, self.dim)], self.dim)


class FeedForward(nn.Module):
    """Compute activation(x W₁) W₂, or its gated variant with glu, as in linformer and linear-attention-transformer.

    Args:
        activation: A class of modules, by default torch.nn.GELU.
    """

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        # A module is callable too, but not without an input.
        made = callable(activation) and not isinstance(activation, nn.Module)
        act = nn.GELU() if activation is None else activation() if made else None
        if not isinstance(act, nn.Module):
            raise ValueError(f"activation must be a class of modules, such as torch.nn.ReLU, got {activation!r}")
        self.glu = glu
        self.w1 = nn.Linear(dim, dim * mult * (2 if glu else 1))
        self.act = act
        self.dropout = nn.Dropout(dropout)
        self.w2 = nn.Linear(dim * mult, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim)."""
        if self.glu:
            hidden, gate = self.w1(x).chunk(2, -1)
            hidden = self.act(hidden) * gate
        else:
            hidden = self.act(self.w1(x))
        return self.w2(self.dropout(hidden))


def initialize_layers(layers: Sequence[tuple[nn.Module, nn.Linear]]) -> None:
    """Draw weights as longspan's models do: of order 1/√fan-in, output projections divided by √(number of layers).

    Args:
        layers: The layers of a model, each with its output projection.
    """
    for layer, output in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if isinstance(module.bias, nn.Parameter):
                    nn.init.zeros_(module.bias)
        with torch.no_grad():
            output.weight.mul_(len(layers) ** -0.5)


def feed_forward_keys() -> list[KeyMapping]:
    """Map the keys of a feed-forward layer whose linear layers are `w1` and `w2`."""
    return [*rename_layer("w1", "to_hidden"), *rename_layer("w2", "to_out")]


def sinusoidal_table(dim: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return the sinusoidal embeddings (length, dim) of the first positions, sines first."""
    return SinusoidalPositions(dim)(torch.arange(length, device=device))


def as_bool(mask: Tensor | None) -> Tensor | None:
    """Convert a mask to bool; None is no mask."""
    return None if mask is None else mask.bool()


def inverse_frequencies(dim: int, base: float = 10000.0) -> Tensor:
    """Return the float32 frequencies (dim / 2,) that the originals save; longspan computes its angles in float64."""
    return base ** -(torch.arange(0, dim, 2) / dim)


def zero_fill(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set tokens of x (B, T, dim) outside a mask (B, T) to zero: NaN there would reach the gradients of the weights."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
