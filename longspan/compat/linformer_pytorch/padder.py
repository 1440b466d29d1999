"""Padder of linformer-pytorch, which has nothing to do: the models take inputs of any length."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from longspan.compat.linformer_pytorch.linformer_pytorch import Linformer, LinformerLM

__all__ = ["Padder"]


class Padder(nn.Module):
    """Apply a model to inputs of up to input_size tokens, without padding."""

    def __init__(self, net: Linformer | LinformerLM) -> None:
        super().__init__()
        if not isinstance(net, Linformer | LinformerLM):
            raise ValueError(f"Padder takes a Linformer or a LinformerLM, got a {type(net).__name__}")
        self.net = net

    def forward(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        """Apply the model to tensor, with the keyword arguments of its forward."""
        return self.net(tensor, **kwargs)
