"""Causal linear attention, backward: segments walked from start to end for queries; see `linear_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    inverse,
    key_features,
    key_logits,
    load_column,
    load_rows,
    load_sums,
    load_weight,
    query_features,
    query_gradient,
    ratio,
    settled,
    store_rows,
)
from longspan.kernels.linear_sums import row_references, walk_references


@triton.jit
def _walk_queries(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_scale,
    p_den,
    p_d_out,
    p_delta,
    p_d_q,
    b_kv,
    b_z,
    c,
    left,
    rows,
    steps,
    values,
    first_tile,
    stride_qh,
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
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    WHOLE_E: tl.constexpr = E % BE == 0
    WIDTH: tl.constexpr = D if TILES == 1 else M
    i_t = tl.arange(0, C)
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, D == BD, WHOLE)
        b_v = load_rows(p_v, STRIDE_V, rows, values, C, BE, WHOLE_E, WHOLE).to(DOT)
        b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
        b_scale = tl.zeros((C,), tl.float32)
        if p_scale is not None:
            b_scale = load_column(p_scale, HKV, rows, C, 0.0, WHOLE).to(tl.float32)
            p_scale += C * HKV
        b_n = tl.zeros((C,), tl.float32) + c
        if CAREFUL:
            b_n, b_reference = row_references(b_f, b_scale, rows, c, C, BM, p_scale is not None, QUICK)
            c_last = tl.max(b_reference)
        b_f = key_features(b_f, b_scale, b_n, M, BM, MAP, SCALED, QUICK)
        if not WHOLE:
            b_f = tl.where((i_t < rows)[:, None], b_f, 0)
        b_end = b_f
        if CAREFUL:
            b_end = b_f * ratio(b_n - c_last, QUICK)[:, None]
        if NORMALISE:
            b_more_z = tl.sum(b_end, 0)
        b_f = settled(b_f, DOT)
        b_end = b_end.to(DOT) if CAREFUL else b_f
        m_seen = i_t[None, :] <= i_t[:, None]
        for g in range(H // HKV):
            b_d = load_rows(p_d_out + g * stride_dh, STRIDE_D, left, values, C, BE, WHOLE_E, WHOLE).to(DOT)
            b_d_p = tl.dot(b_d, tl.trans(b_v), input_precision=PRECISION)
            b_delta = tl.zeros((C,), tl.float32)
            if NORMALISE:
                if first_tile:
                    b_delta = load_column(p_delta + g, H, left, C, 0.0, WHOLE)
                b_d_p -= b_delta[:, None]
            if CAREFUL:
                b_d_p *= ratio(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR), QUICK)
            else:
                b_d_p = tl.where(m_seen, b_d_p, 0)
            b_d_p = b_d_p.to(DOT)
            b_g = tl.dot(b_d, tl.trans(b_kv.to(DOT)), input_precision=PRECISION)
            if NORMALISE:
                b_g -= b_delta[:, None] * b_z[None, :]
            if CAREFUL:
                b_g *= ratio(c - b_reference, QUICK)[:, None]
            b_g = tl.dot(b_d_p, b_f, b_g, input_precision=PRECISION)
            if NORMALISE:
                b_g *= inverse(load_column(p_den + g, H, left, C, 0.0, WHOLE))[:, None]
            if TILES == 1:
                b_q = load_rows(p_q + g * stride_qh, STRIDE_Q, left, D, C, BD, D == BD, WHOLE)
                b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
                b_g = query_gradient(b_g, b_q, b_query, b_weight, MAP, NORMALISE, DOT)
                store_rows(p_d_q + g * D, H * D, left, D, b_g, C, BD, D == BD, WHOLE)
            else:
                store_rows(p_d_q + g * M, H * M, left, M, b_g, C, BM, M == BM, WHOLE)
        if CAREFUL:
            decay = ratio(c - c_last, QUICK)
            b_kv *= decay
            b_z *= decay
            c = c_last
        b_kv = tl.dot(tl.trans(b_end), b_v, b_kv, input_precision=PRECISION)
        if NORMALISE:
            b_z += b_more_z
        p_q += C * STRIDE_Q
        p_k += C * STRIDE_K
        p_v += C * STRIDE_V
        p_d_out += C * STRIDE_D
        p_d_q += C * H * WIDTH
        p_den += C * H
        p_delta += C * H
        left -= C
        rows -= C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_backward_queries_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_scale,
    p_lengths,
    p_kv,
    p_z,
    p_sizes,
    p_reference,
    p_den,
    p_d_out,
    p_delta,
    p_d_q,
    T,
    segments,
    chunks,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_db,
    stride_dh,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    STRIDE_D: tl.constexpr,
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
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d q of one segment of one key head's query heads.

    With TILES > 1 p_d_q: (TILES, B, T, H, M) gets a tile's part of the gradients of features.
    """
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_h = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = (pid // (HKV * TILES)) % segments
    i_b = (pid // (HKV * TILES) // segments).to(tl.int64)
    B = tl.num_programs(0) // (HKV * TILES) // segments
    i_0 = i_s * chunks * C
    i_x = i_b * HKV + i_h
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh + i_e * BE
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * STRIDE_D + i_h.to(tl.int64) * GROUP * stride_dh + i_e * BE
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * HKV + i_h
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_den += i_row
    p_delta += i_row
    p_d_q += (i_row + i_e.to(tl.int64) * B * T * H) * (D if TILES == 1 else M)
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED, QUICK)
    b_kv = load_sums(p_kv + i_e * BE, i_o, BM, BE, BE * TILES)
    b_z = tl.zeros((BM,), tl.float32)
    if NORMALISE:
        b_z += tl.load(p_z + i_o * BM + tl.arange(0, BM))
    for careful in tl.static_range(0 if QUICK else 1, 2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            factor = ratio(c_before - c_0, QUICK)
            _walk_queries(
                *(p_q, p_k, p_v, p_weight, p_scale, p_den, p_d_out, p_delta, p_d_q, b_kv * factor, b_z * factor, c_0),
                *(left, rows, steps, E - i_e * BE, i_e == 0, stride_qh, stride_dh, H, HKV, D, M, E, TILES, C, BD, BM),
                *(BE, STRIDE_Q, STRIDE_K, STRIDE_V, STRIDE_D, MAP, SCALED, NORMALISE, QUICK, WHOLE, careful == 1),
                *(1 if careful else STAGES, DOT, PRECISION),
            )
