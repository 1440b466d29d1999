"""Causal linear attention, forward: the sums before each segment, then every segment walked chunk by chunk.

A segment is a stretch of chunks, about as many segments as the device runs programs at once. `linear_sums` sums each
segment's keys and values and turns that into the sums before each segment; here segments are walked with the sums in
registers: a chunk's queries read them, and see the chunk's own keys as masked products.
"""

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
    ratio,
    settled,
    store_rows,
)
from longspan.kernels.linear_sums import row_references, walk_references


@triton.jit
def _walk_forward(
    p_q,
    p_k,
    p_v,
    p_scale,
    p_out,
    p_den,
    b_weight,
    b_low,
    b_kv,
    b_z,
    c,
    left,
    rows,
    steps,
    values,
    stride_qh,
    first_tile,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
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
    GROUP: tl.constexpr = H // HKV
    WHOLE_E: tl.constexpr = E % BE == 0
    i_t = tl.arange(0, C)
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
        for g in range(GROUP):
            b_q = load_rows(p_q + g * stride_qh, STRIDE_Q, left, D, C, BD, D == BD, WHOLE)
            b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
            b_den = tl.zeros((C,), tl.float32)
            if NORMALISE:
                b_den = tl.sum(b_query * b_z[None, :], 1)
            b_query = b_query.to(DOT)
            b_p = tl.dot(b_query, tl.trans(b_f), input_precision=PRECISION)
            if CAREFUL:
                b_p *= ratio(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR), QUICK)
            else:
                b_p = tl.where(m_seen, b_p, 0)
            if NORMALISE:
                if CAREFUL:
                    b_den *= ratio(c - b_reference, QUICK)
                b_den += tl.sum(b_p, 1)
            b_p = b_p.to(DOT)
            b_out = tl.dot(b_query, b_kv.to(DOT), input_precision=PRECISION)
            if CAREFUL:
                b_out *= ratio(c - b_reference, QUICK)[:, None]
            b_out = tl.dot(b_p, b_v, b_out, input_precision=PRECISION)
            if NORMALISE:
                b_out *= inverse(b_den)[:, None]
                if first_tile:
                    tl.store(p_den + g + i_t * H, b_den, mask=i_t < left)
            store_rows(p_out + g * E, H * E, left, values, b_out, C, BE, WHOLE_E, WHOLE)
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
        p_out += C * H * E
        p_den += C * H
        left -= C
        rows -= C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_forward_kernel(
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
    p_out,
    p_den,
    T,
    segments,
    chunks,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
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
    """One segment of one key head and its query heads. p_den: (B, T, H), at the reference of its row."""
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_h = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = (pid // (HKV * TILES)) % segments
    i_b = (pid // (HKV * TILES) // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    i_x = i_b * HKV + i_h
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh + i_e * BE
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * HKV + i_h
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_out += i_row * E + i_e * BE
    p_den += i_row
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
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
            _walk_forward(
                *(p_q, p_k, p_v, p_scale, p_out, p_den, b_weight, b_low, b_kv * factor, b_z * factor, c_0, left, rows),
                *(steps, E - i_e * BE, stride_qh, i_e == 0, H, HKV, D, M, E, C, BD, BM, BE, STRIDE_Q, STRIDE_K),
                *(STRIDE_V, MAP, SCALED, NORMALISE, QUICK, WHOLE, careful == 1, 1 if careful else STAGES, DOT),
                PRECISION,
            )
