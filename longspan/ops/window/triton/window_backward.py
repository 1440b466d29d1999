"""Local attention, backward: weights made again from the kept log-sums, block by block, in two passes.

    P = exp2(S − lse),   D_i = Σ_e dout_ie out_ie,   dS = P ∘ (dout Vᵀ − D),   dq = dS K,   dk = dSᵀ q,   dv = Pᵀ dout

One pass walks the keys of each query for dq (and leaves D behind), the other the queries of each key for dk and dv: no
program adds to what another wrote, so that the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.tiles import add_product, load_rows, product, program_index, store_rows, token_pointer, zeros
from longspan.ops.window.triton.window_device import (
    LAST,
    find_queries,
    is_between,
    kept,
    keys_seen,
    load_log,
    queries_that_see,
    weights,
)


@triton.jit(do_not_specialize=["T", "S"])
def local_backward_queries_kernel(
    p_q,
    p_k,
    p_v,
    p_mask,
    p_start,
    p_bounds,
    p_seed,
    p_out,
    p_lse,
    p_d_out,
    p_d_q,
    p_delta,
    T,
    S,
    scale,
    rate,
    factor,
    q,
    k,
    v,
    d_out,
    W: tl.constexpr,
):
    """dq of BT queries of one head, and D. factor: the scale of the scores."""
    PRECISION: tl.constexpr = W.PRECISION
    i_b, i_h, i_0, i_t, low, high, begin, end, inner, outer = find_queries(p_start, p_bounds, T, S, W)
    i_kv = i_h // (W.H // W.HKV)
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    p_d_out = token_pointer(p_d_out, d_out, i_b, i_0, i_h)

    i_row = (i_b * T + i_0) * W.H + i_h
    b_d_out = load_rows(p_d_out, d_out.t, T - i_0, W.E, W.BT, W.BE)
    b_out = load_rows(p_out + i_row * W.E, W.H * W.E, T - i_0, W.E, W.BT, W.BE)
    b_delta = tl.sum(b_d_out.to(tl.float32) * b_out.to(tl.float32), 1)
    i_lse = (i_b * W.H + i_h) * T + i_t
    b_lse, b_rest = load_log(p_lse, i_lse, i_t < T, W)
    b_q = load_rows(p_q, q.t, T - i_0, W.D, W.BT, W.BD)
    b_d_q = zeros(W.BT, W.BD)
    b_left = zeros(W.BT)
    b_mean = zeros(W.BT, W.BD)
    for s_0 in range(begin, end, W.BS):
        i_s = s_0 + tl.arange(0, W.BS)
        b_k = load_rows(token_pointer(p_k, k, i_b, s_0, i_kv), k.t, S - s_0, W.D, W.BS, W.BD)
        b_v = load_rows(token_pointer(p_v, v, i_b, s_0, i_kv), v.t, S - s_0, W.E, W.BS, W.BE)
        b_s = product(b_q, tl.trans(b_k), PRECISION) * scale
        b_d_p = product(b_d_out, tl.trans(b_v), PRECISION)
        if W.ALONE:
            b_s = tl.where((i_t + (S - T))[:, None] == i_s[None, :], float("-inf"), b_s)
        if p_mask is not None:
            b_s = tl.where((tl.load(p_mask + i_b * S + i_s, mask=i_s < S, other=0) != 0)[None, :], b_s, float("-inf"))
        if (s_0 < inner) | (s_0 + W.BS > outer):
            b_s = tl.where(is_between(i_s[None, :], low[:, None], high[:, None]), b_s, float("-inf"))
        b_p = weights(b_s, b_lse[:, None], b_rest[:, None], W)
        if p_seed is not None:
            m_kept = kept(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[:, None], i_s[None, :], rate)
            b_d_p = tl.where(m_kept, b_d_p / (1 - rate), 0.0)
        b_d_s = b_p * (b_d_p - b_delta[:, None])
        b_d_q = add_product(b_d_s.to(b_k.dtype), b_k, b_d_q, PRECISION)
        if W.PRECISION == "ieee":
            b_left += tl.sum(b_d_s, 1)
            b_mean = add_product(b_p, b_k, b_mean, PRECISION)
    if W.PRECISION == "ieee":
        # Σ dS is 0. What is left of it is D's rounding, which shows where few keys are seen, and most where one is.
        b_d_q -= b_left[:, None] * b_mean
        b_delta += b_left
    tl.store(p_delta + i_lse, b_delta, mask=i_t < T)
    store_rows(p_d_q + i_row * W.D, W.H * W.D, T - i_0, b_d_q * factor, W.D, W.BT, W.BD)


@triton.jit(do_not_specialize=["T", "S"])
def local_backward_keys_kernel(
    p_q,
    p_k,
    p_v,
    p_mask,
    p_start,
    p_bounds,
    p_seed,
    p_lse,
    p_d_out,
    p_delta,
    p_d_k,
    p_d_v,
    T,
    S,
    scale,
    rate,
    factor,
    q,
    k,
    v,
    d_out,
    W: tl.constexpr,
):
    """dk and dv of BS keys of one key head, from all the query heads that share it."""
    G: tl.constexpr = W.H // W.HKV
    PRECISION: tl.constexpr = W.PRECISION
    i_kv, _, i_block, i_b = program_index(tl.cdiv(S, W.BS), W.HKV)
    s_0 = i_block * W.BS
    p_k = token_pointer(p_k, k, i_b, s_0, i_kv)
    p_v = token_pointer(p_v, v, i_b, s_0, i_kv)
    i_s = s_0 + tl.arange(0, W.BS)
    last = tl.minimum(s_0 + W.BS, S) - 1
    begin, _ = queries_that_see(i_b, s_0, p_start, p_bounds, T, S, W)
    _, end = queries_that_see(i_b, last, p_start, p_bounds, T, S, W)

    b_k = load_rows(p_k, k.t, S - s_0, W.D, W.BS, W.BD)
    b_v = load_rows(p_v, v.t, S - s_0, W.E, W.BS, W.BE)
    b_d_k = zeros(W.BS, W.BD)
    b_d_v = zeros(W.BS, W.BE)
    m_key = i_s < S
    if p_mask is not None:
        m_key = tl.load(p_mask + i_b * S + i_s, mask=m_key, other=0) != 0
    for i_g in range(G):
        i_h = i_kv * G + i_g
        i_row = (i_b * W.H + i_h) * T
        for t_0 in range(begin, end, W.BT):
            i_t = t_0 + tl.arange(0, W.BT)
            b_q = load_rows(token_pointer(p_q, q, i_b, t_0, i_h), q.t, T - t_0, W.D, W.BT, W.BD)
            b_d_out = load_rows(token_pointer(p_d_out, d_out, i_b, t_0, i_h), d_out.t, T - t_0, W.E, W.BT, W.BE)
            b_lse, b_rest = load_log(p_lse, i_row + i_t, i_t < T, W)
            b_delta = tl.load(p_delta + i_row + i_t, mask=i_t < T, other=0.0)
            low, high = keys_seen(i_b, i_t, p_start, p_bounds, T, S, W)
            b_s = product(b_k, tl.trans(b_q), PRECISION) * scale
            m_own = (i_t + (S - T))[None, :] == i_s[:, None]
            if W.ALONE:
                b_s = tl.where(m_own, LAST, b_s)
            if p_mask is not None:
                b_s = tl.where(m_key[:, None], b_s, float("-inf"))
            t_last = tl.minimum(t_0 + W.BT, T) - 1
            _, outer = keys_seen(i_b, t_0, p_start, p_bounds, T, S, W)
            inner, _ = keys_seen(i_b, t_last, p_start, p_bounds, T, S, W)
            if (s_0 < inner) | (s_0 + W.BS > outer):
                b_s = tl.where(is_between(i_s[:, None], low[None, :], high[None, :]), b_s, float("-inf"))
            b_p = weights(b_s, b_lse[None, :], b_rest[None, :], W)
            b_d_p = product(b_v, tl.trans(b_d_out), PRECISION)
            b_dropped = b_p
            if p_seed is not None:
                m_kept = kept(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[None, :], i_s[:, None], rate)
                b_dropped = tl.where(m_kept, b_p / (1 - rate), 0.0)
                b_d_p = tl.where(m_kept, b_d_p / (1 - rate), 0.0)
            b_d_v = add_product(b_dropped.to(b_d_out.dtype), b_d_out, b_d_v, PRECISION)
            b_d_s = b_p * (b_d_p - b_delta[None, :])
            if W.ALONE:
                b_d_s = tl.where(m_own, 0.0, b_d_s)
            b_d_k = add_product(b_d_s.to(b_q.dtype), b_q, b_d_k, PRECISION)
    i_row = (i_b * S + s_0) * W.HKV + i_kv
    store_rows(p_d_k + i_row * W.D, W.HKV * W.D, S - s_0, b_d_k * factor, W.D, W.BS, W.BD)
    store_rows(p_d_v + i_row * W.E, W.HKV * W.E, S - s_0, b_d_v, W.E, W.BS, W.BE)
