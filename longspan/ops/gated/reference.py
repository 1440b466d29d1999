"""Gated linear attention and the gated delta rule, token by token: all other code must equal these recurrences."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    delta: bool = False,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(α_t) S_{t−1} + k_t u_tᵀ, o_t = S_tᵀ q_t, with α = exp(log_decay).

    u_t = β_t v_t, or by the delta rule u_t = β_t (v_t − (Diag(α_t) S_{t−1})ᵀ k_t), which is
    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, T, Hkv, D).
        v: Values (B, T, Hkv, E).
        log_decay: (B, T, Hkv, 1 or D); None for no decay.
        beta: (B, T, Hkv); None for 1.
        delta: Whether to follow the delta rule.
        state: (B, Hkv, D, E) before the first token; zeros unless given.

    Returns:
        The outputs (B, T, H, E), and the state after the last token.
    """
    B, T, Hkv, D = k.shape
    S = k.new_zeros(B, Hkv, D, v.shape[3]) if state is None else state
    out = []
    for t in range(T):
        if log_decay is not None:
            S = log_decay[:, t].exp()[..., None] * S
        u = v[:, t] - torch.einsum("bhde,bhd->bhe", S, k[:, t]) if delta else v[:, t]
        u = u if beta is None else beta[:, t, :, None] * u
        S = S + k[:, t, :, :, None] * u[:, :, None]
        heads = S.repeat_interleave(q.shape[2] // Hkv, 1)
        out.append(torch.einsum("bhde,bhd->bhe", heads, q[:, t]))
    return torch.stack(out, 1), S
