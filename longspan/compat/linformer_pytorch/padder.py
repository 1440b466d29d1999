"""The padder of linformer-pytorch, which has nothing left to pad."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from longspan.compat.linformer_pytorch.linformer_pytorch import Linformer, LinformerLM

__all__ = ["Padder"]


class Padder(nn.Module):
    """Sequences of up to input_size tokens through a net. The nets take them as they are: no padding is attended to."""

    def __init__(self, net: Linformer | LinformerLM) -> None:
        super().__init__()
        if not isinstance(net, Linformer | LinformerLM):
            raise ValueError(f"Padder takes a Linformer or a LinformerLM, got a {type(net).__name__}")
        self.net = net

    def forward(self, tensor: Tensor, **how: Any) -> Tensor:
        """tensor: (B, n, channels), or (B, n) tokens. how: what the net takes."""
        return self.net(tensor, **how)
