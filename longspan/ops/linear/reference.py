"""The quadratic definitions of linear attention and FAVOR+, which all other code must equal.

They follow the equations one by one, with (T, S) matrices in full and without stabilization.
`visible`: bool, broadcast to (B, H, T, S), which of S keys each of T queries sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.window.reference import repeat_kv


def linear_attention(query: Tensor, key: Tensor, v: Tensor, visible: Tensor, normalize: str = "query") -> Tensor:
    """out_i = Σ_j w_ij v_j over visible j, from features.

    Args:
        query: φ(q) (B, T, H, M).
        key: φ(k) (B, S, Hkv, M).
        v: Values (B, S, Hkv, E).
        visible: Which keys a query sees.
        normalize: "none": w_ij = Σ_m φ(q_i)_m φ(k_j)_m. "query": that, divided by its sum over visible j. "feature":
            w_ij = Σ_m φ(q_i)_m φ(k_j)_m / Σ_{j' visible to i} φ(k_j')_m. A zero divisor gives zero.

    Returns:
        (B, T, H, E).
    """
    key, v = (repeat_kv(x, query.shape[2]) for x in (key, v))
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    seen = visible.expand(shape).to(query.dtype)
    if normalize == "feature":
        z = torch.einsum("bhts,bshm->bthm", seen, key)
        query = query * _inverse(z)
    weights = torch.einsum("bthm,bshm->bhts", query, key) * seen
    if normalize == "query":
        weights = weights * _inverse(weights.sum(-1, keepdim=True))
    return torch.einsum("bhts,bshe->bthe", weights, v)


def favor_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, visible: Tensor, *, epsilon: float = 0.0
) -> Tensor:
    """FAVOR+ (Choromanski et al., 2021) with performer-pytorch's epsilon; a row depends on visible keys alone.

        φ(q_i)_m = exp(w_m·q_i − ‖q_i‖²/2 − max_m w_m·q_i) + ε
        φ_i(k_j)_m = exp(w_m·k_j − ‖k_j‖²/2 − max_{j visible to i, m} w_m·k_j) + ε,      q, k scaled by D^−¼

    The maxima are constants to gradients. weight: (M, D). Without epsilon they cancel.
    """
    k, v = (repeat_kv(x, q.shape[2]) for x in (k, v))
    q, k = q * q.shape[3] ** -0.25, k * k.shape[3] ** -0.25
    wq, wk = q @ weight.T, k @ weight.T  # (B, T, H, M), (B, S, H, M)
    query = (wq - q.square().sum(-1, keepdim=True) / 2 - wq.detach().amax(-1, keepdim=True)).exp() + epsilon
    seen = visible.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    largest = wk.detach().amax(-1).transpose(1, 2)[:, :, None].masked_fill(~seen, float("-inf")).amax(-1)  # (B, H, T)
    largest = largest.masked_fill(~seen.any(-1), 0)
    exponent = (wk - k.square().sum(-1, keepdim=True) / 2).transpose(1, 2)  # (B, H, S, M)
    key = (exponent[:, :, None] - largest[..., None, None]).exp() + epsilon  # (B, H, T, S, M)
    weights = torch.einsum("bthm,bhtsm->bhts", query, key) * seen
    weights = weights * _inverse(weights.sum(-1, keepdim=True))
    return torch.einsum("bhts,bshe->bthe", weights, v)


def favor_features(x: Tensor, weight: Tensor) -> Tensor:
    """exp(w·x − ‖x‖²/2) of x (..., D) scaled by D^−¼: (..., M), not stabilized, so that large x overflow."""
    x = x * x.shape[-1] ** -0.25
    return (x @ weight.T - x.square().sum(-1, keepdim=True) / 2).exp()


def blind_spot_visibility(bucket: int, first_bucket: str, length: int) -> Tensor:
    """⌊j/bucket⌋ < ⌊i/bucket⌋; the first bucket sees nothing ("zero") or j ≤ i ("causal"). 1 is j ≤ i."""
    position = torch.arange(length)
    i, j = position[:, None], position[None]
    if bucket == 1:
        return j <= i
    before = j // bucket < i // bucket
    return before | ((i < bucket) & (j <= i)) if first_bucket == "causal" else before


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0, 1 / torch.where(x == 0, 1, x))
