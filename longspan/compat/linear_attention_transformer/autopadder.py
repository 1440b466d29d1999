"""Lengths that need not divide: here none do, and only where the padding goes is left to say."""

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
    """A model for any length.

    pad_left: windows are counted so that the last ends with the sequence, not so that the first begins with it. For
    models that look both ways; a causal one counts from its first token.
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
        """As the model's own forward."""
        missing = -x.shape[1] % max(self.pad_to, 1)
        if missing and self.pad_left:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if input_mask is None else input_mask
            input_mask = F.pad(mask.bool(), (missing, 0), value=False)
            x = F.pad(x, (missing, 0) if x.ndim == 2 else (0, 0, missing, 0))
        else:
            missing = 0
        return self.net(x, input_mask=input_mask, context=context, context_mask=context_mask)[:, missing:]
