"""Causal linear attention, backward: the gradients of one chunk, from the sums on both sides; see `linear_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    exact_exp,
    inverse,
    key_features,
    key_gradient,
    key_logits,
    load_column,
    load_rows,
    load_rows_again,
    load_sums,
    load_weight,
    query_features,
    query_gradient,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_backward_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_lengths,
    p_kv,
    p_z,
    p_prefix,
    p_prefix_z,
    p_d_kv,
    p_d_z,
    p_suffix,
    p_suffix_z,
    p_reference,
    p_beta,
    p_peak,
    p_den,
    p_d_out,
    p_d_den,
    p_d_q,
    p_d_k,
    p_d_v,
    T,
    segments,
    chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_db,
    stride_dt,
    stride_dh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    TILES: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d q (QUERIES), d k (KEYS) and d v (VALUES) of one chunk of one key head and its query heads.

    All at once reads each input once; one at a time needs fewer registers, and what others need is not computed.

    With TILES > 1 p_d_q, p_d_k: (TILES, B, T, ·, M) get a tile's part of the gradients of features.
    """
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    # For derivatives features are made a second time, unless they cost more than the registers that would hold them.
    AGAIN: tl.constexpr = MAP != "favor" and (MAP != "softmax" or BM > 64)
    i_kv = pid % HKV
    i_e = (pid // HKV) % TILES
    i_c = (pid // (HKV * TILES)) % tl.cdiv(T, C)
    i_b = (pid // (HKV * TILES) // tl.cdiv(T, C)).to(tl.int64)
    B = tl.num_programs(0) // (HKV * TILES) // tl.cdiv(T, C)
    i_0 = i_c * C
    i_x = i_b * HKV + i_kv
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * stride_qt + i_kv.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * stride_kt + i_kv.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * stride_vt + i_kv.to(tl.int64) * stride_vh + i_e * BE
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * stride_dt + i_kv.to(tl.int64) * GROUP * stride_dh + i_e * BE
    i_row = i_b * T + i_0
    width: tl.constexpr = D if TILES == 1 else M
    i_part = (i_e * B + i_b) * T + i_0
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    i_t, i_m = tl.arange(0, C), tl.arange(0, BM)
    i_s, i_p = i_x * segments + i_c // chunks, i_x * tl.cdiv(T, C) + i_c
    b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
    b_v = load_rows(p_v, stride_vt, rows, E - i_e * BE, C, BE, E % BE == 0).to(DOT)
    b_beta = tl.zeros((C,), tl.float32)
    old, new, after, c = 1.0, 1.0, 1.0, 0.0
    if SCALED:
        p_peak += i_x * T + i_0
        p_reference += i_x * (segments + 1) + i_c // chunks
        b_beta = load_column(p_beta + i_x * T + i_0, 1, left, C, FLOOR)
        b_reference = load_column(p_peak, 1, left, C, 1e30)
        c_old = tl.load(p_reference)
        c_new = tl.load(p_peak - 1, mask=i_c % chunks > 0, other=FLOOR)
        c_last = tl.load(p_peak + tl.minimum(left, C) - 1)
        after = tl.load(p_reference + 1)
        c = tl.maximum(c_old, c_new)
        c_last = tl.maximum(c_last, c)
        old, new, after = exact_exp(c_old - c), exact_exp(c_new - c), exact_exp(c_last - after)
        b_reference = tl.maximum(b_reference, c)
    b_z = tl.zeros((BM,), tl.float32)
    if NORMALISE:
        if i_e == 0:
            b_z = tl.load(p_z + i_s * BM + i_m) * old + tl.load(p_prefix_z + i_p * BM + i_m) * new

    b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
    b_f = key_features(b_f, b_beta, M, BM, MAP).to(DOT)
    b_d_f = tl.zeros((C, BM), tl.float32)
    b_d_v = tl.zeros((C, BE), tl.float32)
    m_seen = (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]
    for g in range(GROUP):
        b_q = load_rows(p_q + g * stride_qh, stride_qt, left, D, C, BD, D == BD)
        b_d = load_rows(p_d_out + g * stride_dh, stride_dt, left, E - i_e * BE, C, BE, E % BE == 0).to(DOT)
        b_factor = tl.full((C,), 1.0, tl.float32)
        b_d_den = tl.zeros((C,), tl.float32)
        if NORMALISE:
            i_g = i_row * H + i_kv * GROUP + g
            b_factor = inverse(load_column(p_den + i_g, H, left, C, 0.0))
            if i_e == 0:
                b_d_den = load_column(p_d_den + i_g, H, left, C, 0.0)
        b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT).to(DOT)
        b_p = tl.dot(b_query, tl.trans(b_f), input_precision=PRECISION)
        b_d_p = tl.dot(b_d, tl.trans(b_v), input_precision=PRECISION)
        b_kv = load_sums(p_kv + i_e * BE, i_s, BM, BE, BE * TILES)
        b_more = load_sums(p_prefix + i_e * BE, i_p, BM, BE, BE * TILES)
        if NORMALISE:
            b_p *= b_factor[:, None]
            b_d_p = b_d_p * b_factor[:, None] + b_d_den[:, None]
        if SCALED:
            b_pair = exact_exp(tl.where(m_seen, b_beta[None, :] - b_reference[:, None], FLOOR))
            b_p *= b_pair
            b_d_p *= b_pair
        else:
            b_p = tl.where(m_seen, b_p, 0)
            b_d_p = tl.where(m_seen, b_d_p, 0)
        b_p, b_d_p = b_p.to(DOT), b_d_p.to(DOT)
        b_kv = (b_kv.to(tl.float32) * old + b_more.to(tl.float32) * new).to(DOT)
        b_d_query = tl.dot(b_d, tl.trans(b_kv), input_precision=PRECISION)
        if NORMALISE:
            b_d_query = b_d_query * b_factor[:, None] + b_d_den[:, None] * b_z[None, :]
        if SCALED:
            b_d_query *= exact_exp(c - b_reference)[:, None]
        b_d_query = tl.dot(b_d_p, b_f, b_d_query, input_precision=PRECISION)
        i_o = (i_part * H + i_kv * GROUP + g) * width
        if not QUERIES:
            pass
        elif TILES == 1:
            b_again = b_query.to(tl.float32)
            if AGAIN:
                b_q = load_rows_again(p_q + g * stride_qh, stride_qt, left, D, C, BD, D == BD)
                b_again = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
            b_d_query = query_gradient(b_d_query, b_q, b_again, b_weight, MAP, NORMALISE, DOT)
            store_rows(p_d_q + i_o, H * D, left, D, b_d_query, C, BD, D == BD)
        else:
            store_rows(p_d_q + i_o, H * M, left, M, b_d_query, C, BM, M == BM)
        if VALUES:
            b_d_v = tl.dot(tl.trans(b_p), b_d, b_d_v, input_precision=PRECISION)
        if KEYS:
            b_d_f = tl.dot(tl.trans(b_d_p), b_query, b_d_f, input_precision=PRECISION)

    b_d_kv = load_sums(p_d_kv + i_e * BE, i_s, BM, BE, BE * TILES)
    b_more = load_sums(p_suffix + i_e * BE, i_p, BM, BE, BE * TILES)
    b_d_kv = (b_d_kv.to(tl.float32) * after + b_more.to(tl.float32)).to(DOT)
    b_end = (i_t < rows).to(tl.float32)
    if SCALED:
        b_end = exact_exp(b_beta - c_last)
    if VALUES:
        b_d_v = tl.dot((b_f * b_end[:, None]).to(DOT), b_d_kv, b_d_v, input_precision=PRECISION)
        store_rows(p_d_v + (i_row * HKV + i_kv) * E + i_e * BE, HKV * E, left, E - i_e * BE, b_d_v, C, BE, E % BE == 0)
    b_d_f = tl.dot((b_v * b_end[:, None]).to(DOT), tl.trans(b_d_kv), b_d_f, input_precision=PRECISION)
    if NORMALISE:
        if i_e == 0:
            b_d_z = tl.load(p_d_z + i_s * BM + i_m) * after + tl.load(p_suffix_z + i_p * BM + i_m)
            b_d_f += b_end[:, None] * b_d_z[None, :]
    i_o = (i_part * HKV + i_kv) * width
    if not KEYS:
        pass
    elif TILES == 1:
        b_again = b_f.to(tl.float32)
        if AGAIN:
            b_k = load_rows_again(p_k, stride_kt, rows, D, C, BD, D == BD)
            b_again = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
            b_again = key_features(b_again, b_beta, M, BM, MAP)
        b_d_f = key_gradient(b_d_f, b_k, b_again, b_weight, D, MAP, DOT)
        store_rows(p_d_k + i_o, HKV * D, left, D, b_d_f, C, BD, D == BD)
    else:
        store_rows(p_d_k + i_o, HKV * M, left, M, b_d_f, C, BM, M == BM)


@triton.jit(do_not_specialize=["T"])
def causal_linear_backward_finish_kernel(
    p_part,
    p_x,
    p_weight,
    p_d_x,
    T,
    stride_part,
    stride_xb,
    stride_xt,
    stride_xh,
    H: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TILES: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    MAP: tl.constexpr,
    NORMALISE: tl.constexpr,
    KEY: tl.constexpr,
    DOT: tl.constexpr,
):
    """d q or d k from the tiles' parts of the gradient of its features."""
    pid = tl.program_id(0)
    i_h = pid % H
    i_0 = (pid // H) % tl.cdiv(T, C) * C
    i_b = (pid // H // tl.cdiv(T, C)).to(tl.int64)
    left = T - i_0
    p_x += i_b * stride_xb + i_0.to(tl.int64) * stride_xt + i_h.to(tl.int64) * stride_xh
    i_row = (i_b * T + i_0) * H + i_h
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    b_x = load_rows(p_x, stride_xt, left, D, C, BD, D == BD)
    b_g = tl.zeros((C, BM), tl.float32)
    for i_e in range(TILES):
        b_g += load_rows(p_part + i_e * stride_part + i_row * M, H * M, left, M, C, BM, M == BM)
    if KEY:
        b_f = key_logits(b_x, b_weight, b_low, D, M, BM, MAP, DOT)
        b_f = key_features(b_f, tl.max(b_f, 1), M, BM, MAP)
        b_g = key_gradient(b_g, b_x, b_f, b_weight, D, MAP, DOT)
    else:
        b_f = query_features(b_x, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
        b_g = query_gradient(b_g, b_x, b_f, b_weight, MAP, NORMALISE, DOT)
    store_rows(p_d_x + i_row * D, H * D, left, D, b_g, C, BD, D == BD)
