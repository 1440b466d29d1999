"""The quadratic definitions, and the only truth: what the fast paths must equal, written to be read and not to be fast.

Everything here follows the equations one by one, with (T, S) matrices in full and no stabilizing beyond softmax's own.
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
    k = of_query_heads(k, q.shape[2])
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    return softmax_over(scores if bias is None else scores + bias, v, visible)


def softmax_over(scores: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Values v (B, S, Hkv, E) weighted by softmax of scores (B, H, T, S) over what is visible: (B, T, H, E)."""
    return torch.einsum("bhts,bshe->bthe", masked_softmax(scores, visible), of_query_heads(v, scores.shape[1]))


def xpos_scores(q: Tensor, k: Tensor, scale_base: float) -> Tensor:
    """Products of queries and keys under xPos (Sun et al., 2022), by distance alone: (B, H, T, S).

    With q_i = (a, b) and k_j = (c, d) in halves, Δ = i − j and θ_p = 10000^(−2p/D):
    s_ij = Σ_p ζ_p^(Δ / scale_base) ((ac + bd)_p cos Δθ_p + (ad − bc)_p sin Δθ_p),   ζ_p = (2p + 0.4 D) / 1.4 D
    """
    D = q.shape[3]
    (a, b), (c, d) = q.chunk(2, -1), of_query_heads(k, q.shape[2]).chunk(2, -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    pair = torch.arange(0, D, 2, dtype=wide, device=q.device)
    i, j = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    apart = (i[:, None] - j)[..., None].to(wide)  # (T, S, 1)
    size = ((pair + 0.4 * D) / (1.4 * D)) ** (apart / scale_base)
    angle = apart * 10000 ** (-pair / D)
    along, across = (size * angle.cos()).to(q.dtype), (size * angle.sin()).to(q.dtype)
    same = torch.einsum("bthp,bshp,tsp->bhts", a, c, along) + torch.einsum("bthp,bshp,tsp->bhts", b, d, along)
    crossed = torch.einsum("bthp,bshp,tsp->bhts", a, d, across) - torch.einsum("bthp,bshp,tsp->bhts", b, c, across)
    return same + crossed


def linear_attention(query: Tensor, key: Tensor, v: Tensor, visible: Tensor, normalize: str = "query") -> Tensor:
    """out_i = Σ_j w_ij v_j over visible j, from features alone.

    query: φ(q) (B, T, H, M), key: φ(k) (B, S, Hkv, M), v: (B, S, Hkv, E) -> (B, T, H, E).
    normalize: "none": w_ij = Σ_m φ(q_i)_m φ(k_j)_m. "query": that, divided by its sum over visible j.
    "feature": w_ij = Σ_m φ(q_i)_m φ(k_j)_m / Σ_{j' visible to i} φ(k_j')_m. A zero divisor gives zero.
    """
    key, v = (of_query_heads(x, query.shape[2]) for x in (key, v))
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
    """FAVOR+ (Choromanski et al., 2021) with performer-pytorch's epsilon, each row as if nothing it cannot see existed.

        φ(q_i)_m = exp(w_m·q_i − ‖q_i‖²/2 − max_m w_m·q_i) + ε
        φ_i(k_j)_m = exp(w_m·k_j − ‖k_j‖²/2 − max_{j visible to i, m} w_m·k_j) + ε,      q, k scaled by D^−¼

    The maxima are constants to gradients. weight: (M, D). Without epsilon they cancel.
    """
    k, v = (of_query_heads(x, q.shape[2]) for x in (k, v))
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
    """exp(w·x − ‖x‖²/2) of x (..., D) scaled by D^−¼: (..., M), unscaled and therefore unsafe for large x."""
    x = x * x.shape[-1] ** -0.25
    return (x @ weight.T - x.square().sum(-1, keepdim=True) / 2).exp()


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

    e, f: (S, Hkv or 1, R). visible: (B, T, S). key_bias, value_bias: broadcast to (R, D) and (R, E).
    period: n_t is the number of periods begun at the last visible token; None: 1.
    stride: row r holds tokens r·stride to (r + 1)·stride and is left out while none of them is visible; None: every row
    holds every token. Nothing visible gives zeros, whatever the biases.
    """
    B, T, H, D = q.shape
    S, Hkv = k.shape[1:3]
    R = e.shape[2]
    e, f = e.expand(S, Hkv, R), f.expand(S, Hkv, R)
    position, row = torch.arange(S, device=q.device), torch.arange(R, device=q.device)
    holds = torch.ones(S, R, dtype=torch.bool, device=q.device)
    if stride is not None:
        holds = position[:, None] // stride == row
    outs = []
    for t in range(T):
        seen = visible[:, t]  # (B, S)
        reached = (seen * (position + 1)).amax(1)
        begun = torch.ones_like(reached) if period is None else (-(-reached // period)).clamp(min=1)
        weight = seen.to(q.dtype) / begun[:, None]
        rows_k = torch.einsum("bs,shr,bshd->bhrd", weight, e, k)
        rows_v = torch.einsum("bs,shr,bshd->bhrd", weight, f, v)
        rows_k = rows_k if key_bias is None else rows_k + key_bias
        rows_v = rows_v if value_bias is None else rows_v + value_bias
        live = (seen[:, :, None] & holds).any(1)  # (B, R)
        one = softmax_attention(q[:, t : t + 1], rows_k.transpose(1, 2), rows_v.transpose(1, 2), live[:, None, None])
        outs.append(one)
    return torch.cat(outs, 1)


def table_rows(table: Tensor, length: int) -> Tensor:
    """e_i of a table (heads, max_length, R), repeated as often as needed: (length, heads, R)."""
    return table[:, torch.arange(length, device=table.device) % table.shape[1]].transpose(0, 1)


def convolution_rows(x: Tensor, kernel: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A strided convolution as rows: e_i one-hot of ⌊i/s⌋ (S, 1, R), and W_{i mod s} x_i (B, S, Hkv, D).

    kernel: (s, D, D) or (Hkv, s, D, D), W_a mapping a token a places into its stretch. Tokens after row R are in none.
    """
    kernel = kernel if kernel.ndim == 4 else kernel[None]
    s, S = kernel.shape[1], x.shape[1]
    e = torch.zeros(S, 1, rank, dtype=x.dtype, device=x.device)
    for i in range(min(S, rank * s)):
        e[i, 0, i // s] = 1
    return e, torch.stack([(x[:, i, :, None] @ kernel[:, i % s])[:, :, 0] for i in range(S)], 1)


def causal_visibility(length: int, device: torch.device | None = None) -> Tensor:
    """j ≤ i: (length, length)."""
    i, j = _positions(length, device)
    return j <= i


def window_visibility(back: int, ahead: int, length: int, device: torch.device | None = None) -> Tensor:
    """i − back ≤ j ≤ i + ahead: (length, length). `window=W` is back = ahead = W − 1."""
    i, j = _positions(length, device)
    return (j >= i - back) & (j <= i + ahead)


def block_visibility(size: int, back: int, ahead: int, length: int, device: torch.device | None = None) -> Tensor:
    """⌊i/size⌋ − back ≤ ⌊j/size⌋ ≤ ⌊i/size⌋ + ahead: (length, length)."""
    i, j = _positions(length, device)
    return (j // size >= i // size - back) & (j // size <= i // size + ahead)


def self_as_last_resort(visible: Tensor) -> Tensor:
    """Shared queries and keys: a token sees itself only if it sees nothing else. visible: (..., T, T)."""
    itself = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    others = visible & ~itself
    return others | (visible & itself & ~others.any(-1, keepdim=True))


def blind_spot_visibility(bucket: int, first_bucket: str, length: int, device: torch.device | None = None) -> Tensor:
    """⌊j/bucket⌋ < ⌊i/bucket⌋; the first bucket sees nothing ("zero") or j ≤ i ("causal"). 1 is j ≤ i."""
    i, j = _positions(length, device)
    if bucket == 1:
        return j <= i
    before = j // bucket < i // bucket
    return before | ((i < bucket) & (j <= i)) if first_bucket == "causal" else before


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the last dimension's visible entries; rows without any are zero."""
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | blind), float("-inf"))
    return scores.softmax(-1).masked_fill(blind, 0)


def of_query_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, S, Hkv, ·) -> (B, S, H, ·): consecutive query heads share a key/value head."""
    return x.repeat_interleave(num_heads // x.shape[2], 2)


def _positions(length: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    position = torch.arange(length, device=device)
    return position[:, None], position[None]


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0, 1 / torch.where(x == 0, 1, x))
