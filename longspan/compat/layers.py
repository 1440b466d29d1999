"""Layers and helpers that several of the packages share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import CompatModule, KeyMapping, rename_layer
from longspan.models.config import FeedForwardConfig
from longspan.models.layers import FeedForward as _FeedForward
from longspan.models.positions import SinusoidalPositions

M = TypeVar("M", bound=nn.Module)
_ACTIVATIONS: dict[Any, Any] = {
    module: module.__name__.lower() for module in (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)
}


class FeedForward(CompatModule):
    """Compute activation(x W₁) W₂, or its gated variant with glu, as in linformer and linear-attention-transformer.

    Args:
        activation: A class of torch.nn, by default GELU.
    """

    model: _FeedForward

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: type[nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        name = _ACTIVATIONS.get(nn.GELU if activation is None else activation)
        if name is None:
            allowed = ", ".join(known.__name__ for known in _ACTIVATIONS)
            raise ValueError(f"activation must be one of torch.nn's {allowed}, as a class, got {activation!r}")
        self.model = _FeedForward(dim, FeedForwardConfig(mult=mult, dropout=dropout, activation=name, gated=glu))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim)."""
        return self.model(x)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return feed_forward_keys()


def feed_forward_keys() -> list[KeyMapping]:
    """Map the keys of a feed-forward layer whose linear layers are `w1` and `w2`."""
    return [*rename_layer("w1", "to_hidden"), *rename_layer("w2", "to_out")]


def with_children(module: M, **children: nn.Module) -> M:
    """Return a copy of a module that shares its parameters, with some child modules replaced."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **children}
    return clone


def sinusoidal_table(dim: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return the sinusoidal embeddings (length, dim) of the first positions, sines first."""
    return SinusoidalPositions(dim)(torch.arange(length, device=device))


def as_bool(mask: Tensor | None) -> Tensor | None:
    """Convert a mask to bool; None is no mask."""
    return None if mask is None else mask.bool()


def inverse_frequencies(dim: int, base: float = 10000.0) -> Tensor:
    """Return the float32 frequencies (dim / 2,) that the originals save; longspan computes its angles in float64."""
    return base ** -(torch.arange(0, dim, 2) / dim)
