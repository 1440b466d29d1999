"""Autopadder: in the original it pads inputs to a multiple of the window; here any length works."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.linear_attention_transformer.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
)

__all__ = ["Autopadder"]


class Autopadder(nn.Module):
    """Apply a model to inputs of any length.

    Args:
        net: The model.
        pad_left: Align windows with the end of the sequence instead of its start. It is for bidirectional models; a
            causal model always counts positions from its first token.
    """

    def __init__(self, net: LinearAttentionTransformer | LinearAttentionTransformerLM, pad_left: bool = False) -> None:
        super().__init__()
        if not isinstance(net, LinearAttentionTransformer | LinearAttentionTransformerLM):
            raise ValueError(
                f"net must be a LinearAttentionTransformer or LinearAttentionTransformerLM, got {type(net).__name__}"
            )
        self.net, self.pad_left, self.pad_to = net, pad_left, net.pad_to_multiple

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply the model; see its forward."""
        padding = -x.shape[1] % max(self.pad_to, 1) if self.pad_left else 0
        if padding:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if input_mask is None else input_mask
            input_mask = F.pad(mask.bool(), (padding, 0), value=False)
            x = F.pad(x, (padding, 0) if x.ndim == 2 else (0, 0, padding, 0))
        return self.net(x, input_mask=input_mask, context=context, context_mask=context_mask)[:, padding:]
