"""Autopadder: in the original it pads inputs to a multiple of the window; here any length works."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.linear_attention_transformer.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
)

__all__ = ["Autopadder", "find_module", "pad_to_multiple"]

M = TypeVar("M", bound=nn.Module)


def find_module(nn_module: nn.Module, type: type[M]) -> M | None:
    """Return the first submodule of a type, or None."""
    return next((module for module in nn_module.modules() if isinstance(module, type)), None)


def pad_to_multiple(tensor: Tensor, multiple: int, dim: int = -1, pad_left: bool = False) -> tuple[Tensor, int]:
    """Pad a dimension, counted from the end (−1 is the last), with zeros to a multiple.

    Returns:
        The tensor, and the number of zeros along the dimension.
    """
    padding = -tensor.shape[dim] % multiple
    if not padding:
        return tensor, 0
    sides = (padding, 0) if pad_left else (0, padding)
    return F.pad(tensor, (0, 0) * (-1 - dim) + sides), padding


class Autopadder(nn.Module):
    """Apply a model to inputs of any length.

    Args:
        net: The model.
        pad_left: Align windows with the end of the sequence instead of its start. It is for bidirectional models; a
            causal model always counts positions from its first token, unless it is faithful.
    """

    def __init__(self, net: LinearAttentionTransformer | LinearAttentionTransformerLM, pad_left: bool = False) -> None:
        super().__init__()
        if not isinstance(net, LinearAttentionTransformer | LinearAttentionTransformerLM):
            raise ValueError(
                f"net must be a LinearAttentionTransformer or LinearAttentionTransformerLM, got {type(net).__name__}"
            )
        self.net, self.pad_left = net, pad_left
        transformer = find_module(net, LinearAttentionTransformer)
        self.pad_to = 1 if transformer is None else max(transformer.pad_to_multiple, 1)
        self.pad_dim = -1 if isinstance(net, LinearAttentionTransformerLM) else -2

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply the model; see its forward."""
        length, padding = x.shape[1], 0
        if self.pad_left or self.net.faithful:
            x, padding = pad_to_multiple(x, self.pad_to, self.pad_dim, self.pad_left)
        if padding:
            mask = torch.ones(len(x), length, dtype=torch.bool, device=x.device) if input_mask is None else input_mask
            input_mask = F.pad(mask.bool(), (padding, 0) if self.pad_left else (0, padding))
        out = self.net(x, input_mask=input_mask, context=context, context_mask=context_mask)
        return out[:, padding:] if self.pad_left else out[:, :length]
