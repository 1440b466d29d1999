"""Softmax attention by PyTorch's own kernels, with two rules added: a query that sees no key gives zeros, and its
gradient is finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    blind: bool = True,
    causal: bool = False,
    grouped: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q: (B, H, T, D), k: (B, Hkv, S, D), v: (B, Hkv, S, E), heads first -> (B, H, T, E).

    mask: bool, True = seen, broadcast to (B, H, T, S). bias: added to the scores, broadcast likewise.
    blind: whether there may be queries that see nothing. grouped: whether Hkv < H. Both are said, not found out:
    under torch.compile sizes may be symbols.
    """
    if mask is None and bias is None:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    assert not causal
    sees_nothing = None
    if mask is not None and blind:
        # Softmax over nothing is NaN: such a row looks at everything instead, and its answer is dropped.
        sees_nothing = ~mask.any(-1, keepdim=True)
        mask = mask | sees_nothing
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)
    return out if sees_nothing is None else torch.where(sees_nothing, 0, out)
