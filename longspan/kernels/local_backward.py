"""Local attention, backward: weights made again from the kept log-sums, block by block, in two passes.

    P = exp2(S − lse),   D_i = Σ_e dout_ie out_ie,   dS = P ∘ (dout Vᵀ − D),   dq = dS K,   dk = dSᵀ q,   dv = Pᵀ dout

One pass walks the keys of each query for dq (and leaves D behind), the other the queries of each key for dk and dv: no
program adds to what another wrote, so that the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import add_product, load_rows, product, store_rows
from longspan.kernels.local_blocks import LAST, is_between, kept, keys_seen, load_log, queries_that_see, weights


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
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALONE: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of BT queries of one head, and D. factor: the scale of the scores."""
    pid = tl.program_id(0)
    i_h = pid % H
    i_0 = (pid // H) % tl.cdiv(T, BT) * BT
    i_b = (pid // H // tl.cdiv(T, BT)).to(tl.int64)
    i_kv = i_h // (H // HKV)
    p_q += i_b * stride_qb + i_0.to(tl.int64) * stride_qt + i_h.to(tl.int64) * stride_qh
    p_d_out += i_b * stride_ob + i_0.to(tl.int64) * stride_ot + i_h.to(tl.int64) * stride_oh
    p_k += i_b * stride_kb + i_kv.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_kv.to(tl.int64) * stride_vh
    i_t = i_0 + tl.arange(0, BT)
    low, high = keys_seen(i_b, i_t, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)
    last = tl.minimum(i_0 + BT, T) - 1
    begin, outer = keys_seen(i_b, i_0, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)
    inner, end = keys_seen(i_b, last, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)

    i_row = (i_b * T + i_0) * H + i_h
    b_d_out = load_rows(p_d_out, stride_ot, T - i_0, E, BT, BE, E == BE)
    b_out = load_rows(p_out + i_row * E, H * E, T - i_0, E, BT, BE, E == BE)
    b_delta = tl.sum(b_d_out.to(tl.float32) * b_out.to(tl.float32), 1)
    i_lse = (i_b * H + i_h) * T + i_t
    b_lse, b_rest = load_log(p_lse, i_lse, i_t < T, PRECISION)
    b_q = load_rows(p_q, stride_qt, T - i_0, D, BT, BD, D == BD)
    b_d_q = tl.zeros((BT, BD), tl.float32)
    b_left = tl.zeros((BT,), tl.float32)
    b_mean = tl.zeros((BT, BD), tl.float32)
    for s_0 in range(begin, end, BS):
        i_s = s_0 + tl.arange(0, BS)
        b_k = load_rows(p_k + tl.cast(s_0, tl.int64) * stride_kt, stride_kt, S - s_0, D, BS, BD, D == BD)
        b_v = load_rows(p_v + tl.cast(s_0, tl.int64) * stride_vt, stride_vt, S - s_0, E, BS, BE, E == BE)
        b_s = product(b_q, tl.trans(b_k), PRECISION) * scale
        b_d_p = product(b_d_out, tl.trans(b_v), PRECISION)
        if ALONE:
            b_s = tl.where((i_t + (S - T))[:, None] == i_s[None, :], float("-inf"), b_s)
        if p_mask is not None:
            b_s = tl.where((tl.load(p_mask + i_b * S + i_s, mask=i_s < S, other=0) != 0)[None, :], b_s, float("-inf"))
        if (s_0 < inner) | (s_0 + BS > outer):
            b_s = tl.where(is_between(i_s[None, :], low[:, None], high[:, None]), b_s, float("-inf"))
        b_p = weights(b_s, b_lse[:, None], b_rest[:, None], PRECISION)
        if p_seed is not None:
            m_kept = kept(p_seed, i_b.to(tl.int32) * H + i_h, i_t[:, None], i_s[None, :], rate)
            b_d_p = tl.where(m_kept, b_d_p / (1 - rate), 0.0)
        b_d_s = b_p * (b_d_p - b_delta[:, None])
        b_d_q = add_product(b_d_s.to(b_k.dtype), b_k, b_d_q, PRECISION)
        if PRECISION == "ieee":
            b_left += tl.sum(b_d_s, 1)
            b_mean = add_product(b_p, b_k, b_mean, PRECISION)
    if PRECISION == "ieee":
        # Σ dS is 0. What is left of it is D's rounding, which shows where few keys are seen, and most where one is.
        b_d_q -= b_left[:, None] * b_mean
        b_delta += b_left
    tl.store(p_delta + i_lse, b_delta, mask=i_t < T)
    store_rows(p_d_q + i_row * D, H * D, T - i_0, D, b_d_q * factor, BT, BD, D == BD)


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
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALONE: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of BS keys of one key head, from all the query heads that share it."""
    G: tl.constexpr = H // HKV
    pid = tl.program_id(0)
    i_kv = pid % HKV
    s_0 = (pid // HKV) % tl.cdiv(S, BS) * BS
    i_b = (pid // HKV // tl.cdiv(S, BS)).to(tl.int64)
    p_k += i_b * stride_kb + s_0.to(tl.int64) * stride_kt + i_kv.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + s_0.to(tl.int64) * stride_vt + i_kv.to(tl.int64) * stride_vh
    p_q += i_b * stride_qb
    p_d_out += i_b * stride_ob
    i_s = s_0 + tl.arange(0, BS)
    last = tl.minimum(s_0 + BS, S) - 1
    begin, _ = queries_that_see(i_b, s_0, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)
    _, end = queries_that_see(i_b, last, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)

    b_k = load_rows(p_k, stride_kt, S - s_0, D, BS, BD, D == BD)
    b_v = load_rows(p_v, stride_vt, S - s_0, E, BS, BE, E == BE)
    b_d_k = tl.zeros((BS, BD), tl.float32)
    b_d_v = tl.zeros((BS, BE), tl.float32)
    m_key = i_s < S
    if p_mask is not None:
        m_key = tl.load(p_mask + i_b * S + i_s, mask=m_key, other=0) != 0
    for i_g in range(G):
        i_h = i_kv * G + i_g
        i_row = (i_b * H + i_h) * T
        for t_0 in range(begin, end, BT):
            i_t = t_0 + tl.arange(0, BT)
            there = tl.cast(t_0, tl.int64)
            b_q = load_rows(p_q + there * stride_qt + i_h * stride_qh, stride_qt, T - t_0, D, BT, BD, D == BD)
            b_d_out = load_rows(p_d_out + there * stride_ot + i_h * stride_oh, stride_ot, T - t_0, E, BT, BE, E == BE)
            b_lse, b_rest = load_log(p_lse, i_row + i_t, i_t < T, PRECISION)
            b_delta = tl.load(p_delta + i_row + i_t, mask=i_t < T, other=0.0)
            low, high = keys_seen(i_b, i_t, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)
            b_s = product(b_k, tl.trans(b_q), PRECISION) * scale
            m_own = (i_t + (S - T))[None, :] == i_s[:, None]
            if ALONE:
                b_s = tl.where(m_own, LAST, b_s)
            if p_mask is not None:
                b_s = tl.where(m_key[:, None], b_s, float("-inf"))
            t_last = tl.minimum(t_0 + BT, T) - 1
            _, outer = keys_seen(i_b, t_0, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)
            inner, _ = keys_seen(i_b, t_last, p_start, p_bounds, T, S, SIZE, BACK, AHEAD, CAUSAL)
            if (s_0 < inner) | (s_0 + BS > outer):
                b_s = tl.where(is_between(i_s[:, None], low[None, :], high[None, :]), b_s, float("-inf"))
            b_p = weights(b_s, b_lse[None, :], b_rest[None, :], PRECISION)
            b_d_p = product(b_v, tl.trans(b_d_out), PRECISION)
            b_dropped = b_p
            if p_seed is not None:
                m_kept = kept(p_seed, i_b.to(tl.int32) * H + i_h, i_t[None, :], i_s[:, None], rate)
                b_dropped = tl.where(m_kept, b_p / (1 - rate), 0.0)
                b_d_p = tl.where(m_kept, b_d_p / (1 - rate), 0.0)
            b_d_v = add_product(b_dropped.to(b_d_out.dtype), b_d_out, b_d_v, PRECISION)
            b_d_s = b_p * (b_d_p - b_delta[None, :])
            if ALONE:
                b_d_s = tl.where(m_own, 0.0, b_d_s)
            b_d_k = add_product(b_d_s.to(b_q.dtype), b_q, b_d_k, PRECISION)
    i_row = (i_b * S + s_0) * HKV + i_kv
    store_rows(p_d_k + i_row * D, HKV * D, S - s_0, D, b_d_k * factor, BS, BD, D == BD)
    store_rows(p_d_v + i_row * E, HKV * E, S - s_0, E, b_d_v, BS, BE, E == BE)
