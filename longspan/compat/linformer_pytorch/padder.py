"""Padder of linformer-pytorch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.linformer_pytorch.linformer_pytorch import Linformer, LinformerLM

__all__ = ["Padder"]


class Padder(nn.Module):
    """Apply a model to inputs of up to input_size tokens.

    The models take any length, so that there is nothing to pad, except for a model built with faithful=True: its input
    is padded with zeros, which it attends to.
    """

    def __init__(self, net: Linformer | LinformerLM) -> None:
        super().__init__()
        if not isinstance(net, Linformer | LinformerLM):
            raise ValueError(f"Padder takes a Linformer or a LinformerLM, got a {type(net).__name__}")
        self.net = net

    def forward(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        """Apply the model to tensor, with the keyword arguments of its forward."""
        missing = self.net.input_size - tensor.shape[1]
        if not self.net.faithful or missing <= 0:
            return self.net(tensor, **kwargs)
        padding = (0, missing) if tensor.ndim == 2 else (0, 0, 0, missing)
        return self.net(F.pad(tensor, padding), **kwargs)[:, : tensor.shape[1]]
