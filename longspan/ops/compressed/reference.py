"""Quadratic definition of Linformer, bidirectional and causal: every query with its own compressed keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.window.reference import softmax_attention


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    visible: Tensor,
    *,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    period: int | None = None,
    stride: int | None = None,
) -> Tensor:
    """out_t = softmax(q_t K̃_tᵀ / √D) Ṽ_t,   K̃_t = b + (1/n_t) Σ_{i visible to t} e_i k_iᵀ,   Ṽ_t likewise of f and v.

    A query that sees no key returns zeros, whatever the biases.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, S, Hkv, D).
        v: Values (B, S, Hkv, E).
        e: Projection of keys (S, Hkv or 1, R).
        f: Projection of values (S, Hkv or 1, R).
        visible: Keys that each query sees (B, T, S).
        key_bias: b of K̃, broadcast to (R, D).
        value_bias: b of Ṽ, broadcast to (R, E).
        period: n_t is the number of periods begun at the last visible token; None: n_t = 1.
        stride: Compressed key r covers tokens r·stride to (r + 1)·stride and is hidden while none of them is visible;
            None: every compressed key covers every token.
    """
    S, Hkv, R = *k.shape[1:3], e.shape[2]
    e, f = e.expand(S, Hkv, R), f.expand(S, Hkv, R)
    position = torch.arange(S, device=q.device)
    covers = torch.ones(S, R, dtype=torch.bool, device=q.device)
    if stride is not None:
        covers = position[:, None] // stride == torch.arange(R, device=q.device)
    outs = []
    for t in range(q.shape[1]):
        seen = visible[:, t]  # (B, S)
        end = (seen * (position + 1)).amax(1)
        periods = torch.ones_like(end) if period is None else (-(-end // period)).clamp(min=1)
        weight = seen.to(q.dtype) / periods[:, None]
        keys = torch.einsum("bs,shr,bshd->bhrd", weight, e, k)
        values = torch.einsum("bs,shr,bshd->bhrd", weight, f, v)
        keys = keys if key_bias is None else keys + key_bias
        values = values if value_bias is None else values + value_bias
        live = (seen[:, :, None] & covers).any(1)[:, None, None]  # (B, 1, 1, R)
        outs.append(softmax_attention(q[:, t : t + 1], keys.transpose(1, 2), values.transpose(1, 2), live))
    return torch.cat(outs, 1)


def table_projection(table: Tensor, length: int) -> Tensor:
    """e_i of a table (heads, max_length, R), repeated as often as needed: (length, heads, R)."""
    return table[:, torch.arange(length, device=table.device) % table.shape[1]].transpose(0, 1)


def convolution_projection(x: Tensor, kernel: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A strided convolution as a projection: e_i one-hot of ⌊i/s⌋ (S, 1, R), and W_{i mod s} x_i (B, S, Hkv, D).

    kernel: (s, D, D) or (Hkv, s, D, D), W_a for the a-th token of a stride. Tokens from R·s on are dropped.
    """
    kernel = kernel if kernel.ndim == 4 else kernel[None]
    s, S = kernel.shape[1], x.shape[1]
    e = torch.zeros(S, 1, rank, dtype=x.dtype, device=x.device)
    for i in range(min(S, rank * s)):
        e[i, 0, i // s] = 1
    return e, torch.stack([(x[:, i, :, None] @ kernel[:, i % s])[:, :, 0] for i in range(S)], 1)
