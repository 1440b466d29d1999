"""Quadratic definitions of softmax attention, full and windowed, with all scores in memory.

`visible` says which of S keys each of T queries sees: bool, broadcast to (B, H, T, S).
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """out_i = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij) over visible j, s = scale · q kᵀ + bias; zeros where none is visible.

    q: (B, T, H, D), k: (B, S, Hkv, D), v: (B, S, Hkv, E), bias: broadcast to (B, H, T, S) -> (B, T, H, E).
    """
    scores = torch.einsum("bthd,bshd->bhts", q, repeat_kv(k, q.shape[2]))
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    return softmax_over(scores if bias is None else scores + bias, v, visible)


def softmax_over(scores: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Values (B, S, Hkv, E) weighted by the softmax of scores (B, H, T, S) over visible keys: (B, T, H, E)."""
    return torch.einsum("bhts,bshe->bthe", masked_softmax(scores, visible), repeat_kv(v, scores.shape[1]))


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last dimension; zeros for rows without any."""
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | empty), float("-inf"))
    return scores.softmax(-1).masked_fill(empty, 0)


def xpos_scores(q: Tensor, k: Tensor, scale_base: float) -> Tensor:
    """Scores of queries and keys under xPos (Sun et al., 2022), by distance alone: (B, H, T, S).

    With q_i = (a, b) and k_j = (c, d) split in two, Δ = i − j and θ_p = 10000^(−2p/D):
    s_ij = Σ_p ζ_p^(Δ / scale_base) ((ac + bd)_p cos Δθ_p + (ad − bc)_p sin Δθ_p),   ζ_p = (2p + 0.4 D) / 1.4 D
    """
    D = q.shape[3]
    (a, b), (c, d) = q.chunk(2, -1), repeat_kv(k, q.shape[2]).chunk(2, -1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    pair = torch.arange(0, D, 2, dtype=dtype, device=q.device)
    i, j = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    distance = (i[:, None] - j)[..., None].to(dtype)  # (T, S, 1)
    zeta = ((pair + 0.4 * D) / (1.4 * D)) ** (distance / scale_base)
    angle = distance * 10000 ** (-pair / D)
    cos, sin = (zeta * angle.cos()).to(q.dtype), (zeta * angle.sin()).to(q.dtype)
    same = torch.einsum("bthp,bshp,tsp->bhts", a, c, cos) + torch.einsum("bthp,bshp,tsp->bhts", b, d, cos)
    crossed = torch.einsum("bthp,bshp,tsp->bhts", a, d, sin) - torch.einsum("bthp,bshp,tsp->bhts", b, c, sin)
    return same + crossed


def causal_visibility(length: int) -> Tensor:
    """j ≤ i: (length, length)."""
    return window_visibility(length, 0, length)


def window_visibility(back: int, ahead: int, length: int) -> Tensor:
    """i − back ≤ j ≤ i + ahead: (length, length). `window=W` is back = ahead = W − 1."""
    return block_visibility(1, back, ahead, length)


def block_visibility(size: int, back: int, ahead: int, length: int) -> Tensor:
    """⌊i/size⌋ − back ≤ ⌊j/size⌋ ≤ ⌊i/size⌋ + ahead: (length, length)."""
    block = torch.arange(length) // size
    i, j = block[:, None], block[None]
    return (j >= i - back) & (j <= i + ahead)


def self_as_last_resort(visible: Tensor) -> Tensor:
    """Shared queries and keys: a token sees itself only if it sees nothing else. visible: (..., T, T)."""
    own = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    others = visible & ~own
    return others | (visible & own & ~others.any(-1, keepdim=True))


def repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """(B, S, Hkv, ·) -> (B, S, H, ·): consecutive query heads share a key/value head."""
    return x.repeat_interleave(num_heads // x.shape[2], 2)
