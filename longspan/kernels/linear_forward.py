"""Causal linear attention, forward: sums before each chunk, then all chunks at once.

A segment is a stretch of chunks. One program walks it with the sums in registers and leaves behind what they were
before each chunk, counted from the segment's start; a short scan turns the segments' totals into the sums before each
segment. A chunk adds the two, reads them with its queries, and sees its own keys as masked products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    exact_exp,
    inverse,
    key_features,
    key_logits,
    load_column,
    load_rows,
    load_sums,
    load_weight,
    query_features,
    running_maximum,
    store_rows,
    store_sums,
)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_forward_sums_kernel(
    p_k,
    p_v,
    p_weight,
    p_scale,
    p_lengths,
    p_kv,
    p_z,
    p_max,
    p_prefix,
    p_prefix_z,
    p_beta,
    p_peak,
    T,
    segments,
    chunks,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
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
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ φ(k) vᵀ, Σ φ(k) and max β of one segment, both sums divided by exp(max β).

    p_prefix, p_prefix_z: (B, Hkv, chunks, ·) the segment's sums before each chunk, at the scale of the largest β yet.
    p_beta, p_peak: (B, Hkv, T) each key's β and the largest so far in its segment.
    """
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = (pid // (HKV * TILES)) % segments
    i_b = (pid // (HKV * TILES) // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    length = T
    if p_lengths is not None:
        length = tl.load(p_lengths + i_b).to(tl.int32)
    p_k += i_b * stride_kb + i_0.to(tl.int64) * stride_kt + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * stride_vt + i_h.to(tl.int64) * stride_vh + i_e * BE
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * HKV + i_h
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    b_kv = tl.zeros((BM, BE), tl.float32)
    b_z = tl.zeros((BM,), tl.float32)
    c = tl.max(tl.full((C,), FLOOR, tl.float32))
    i_t = tl.arange(0, C)
    p_beta += (i_b * HKV + i_h) * T + i_0
    p_peak += (i_b * HKV + i_h) * T + i_0
    i_c = (i_b * HKV + i_h) * tl.cdiv(T, C) + i_s * chunks
    p_prefix += i_e * BE
    left, rows = T - i_0, length - i_0
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, C))):
        store_sums(p_prefix, i_c, b_kv, BM, BE, BE * TILES)
        if NORMALISE:
            if i_e == 0:
                tl.store(p_prefix_z + i_c * BM + tl.arange(0, BM), b_z)
        b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
        b_v = load_rows(p_v, stride_vt, rows, E - i_e * BE, C, BE, E % BE == 0).to(DOT)
        b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
        b_beta = tl.zeros((C,), tl.float32)
        if SCALED:
            if p_scale is None:
                b_beta = tl.max(b_f, 1)
            else:
                b_beta = load_column(p_scale, HKV, rows, C, 0.0).to(tl.float32)
            b_beta = tl.where(i_t < rows, b_beta, FLOOR)
        if SCALED:
            b_peak = running_maximum(b_beta, c)
            if i_e == 0:
                tl.store(p_beta + i_t, b_beta, mask=i_t < left)
                tl.store(p_peak + i_t, b_peak, mask=i_t < left)
            c_last = tl.max(b_peak)
            decay = exact_exp(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
            if p_scale is None and tl.bfloat16 == DOT:
                # One exponential a number, at the scale of the sums; none is left of a hidden key.
                b_f = key_features(b_f, tl.where(i_t < rows, c, -FLOOR), M, BM, MAP)
            else:
                b_f = key_features(b_f, b_beta, M, BM, MAP) * exact_exp(b_beta - c)[:, None]
        else:
            b_f = key_features(b_f, b_beta, M, BM, MAP)
            if NORMALISE:
                b_f = tl.where((i_t < rows)[:, None], b_f, 0)  # elsewhere v is 0
        b_f = b_f.to(DOT)
        b_kv = tl.dot(tl.trans(b_f), b_v, b_kv, input_precision=PRECISION)
        if NORMALISE:
            b_z += tl.sum(b_f.to(tl.float32), 0)
        p_k += C * stride_kt
        p_v += C * stride_vt
        i_c += 1
        p_beta += C
        p_peak += C
        left -= C
        rows -= C
        if p_scale is not None:
            p_scale += C * HKV
    i_o = (i_b * HKV + i_h) * segments + i_s
    store_sums(p_kv + i_e * BE, i_o, b_kv, BM, BE, BE * TILES)
    if i_e == 0:
        if NORMALISE:
            tl.store(p_z + i_o * BM + tl.arange(0, BM), b_z)
        if SCALED:
            tl.store(p_max + i_o, c)


@triton.jit(do_not_specialize=["segments"])
def causal_linear_forward_scan_kernel(
    p_kv,
    p_z,
    p_max,
    p_start,
    p_shift,
    p_kv_out,
    p_shift_out,
    p_reference,
    p_before,
    segments,
    M: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Sums before each segment from the segments' own: kv in p_before, z in place, log scales in p_reference."""
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    columns = E + 1 if NORMALISE else E
    m_m = i_m < M
    m_kv = m_m[:, None] & (i_e < E)[None, :]
    i_in = i_x * (M * columns) + i_m * columns
    b_kv = tl.zeros((ROWS, BE), tl.float32)
    b_z = tl.zeros((ROWS,), tl.float32)
    c = tl.full((), FLOOR, tl.float32)
    if p_start is not None:
        b_kv = tl.load(p_start + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0)
        if NORMALISE:
            b_z = tl.load(p_start + i_in + E, mask=m_m, other=0.0)
        c = tl.load(p_shift + i_x)
    i_tile = i_x * segments * (BM * BE) + i_m[:, None] * BE + i_e[None, :]
    p_row = p_z + i_x * segments * BM + i_m
    p_max += i_x * segments
    p_reference += i_x * (segments + 1)
    for i_s in tl.range(segments, num_stages=4):
        b_more = tl.load(p_kv + i_tile + i_s * (BM * BE))
        tl.store(p_before + i_tile + i_s * (BM * BE), b_kv.to(p_before.dtype.element_ty))
        factor = 1.0
        if SCALED:
            c_more = tl.load(p_max + i_s)
            c_last = tl.maximum(c, c_more)
            factor = exact_exp(c_more - c_last)
            b_kv *= exact_exp(c - c_last)
        b_kv += b_more * factor
        if NORMALISE:
            b_more_z = tl.load(p_row + i_s * BM)
            tl.store(p_row + i_s * BM, b_z)
            if SCALED:
                b_z *= exact_exp(c - c_last)
            b_z += b_more_z * factor
        if SCALED:
            if i_r == 0:
                tl.store(p_reference + i_s, c)
            c = c_last
    if i_r == 0:
        tl.store(p_reference + segments, c)
    if p_kv_out is not None:
        if i_r == 0:
            tl.store(p_shift_out + i_x, c)
        tl.store(p_kv_out + i_in[:, None] + i_e[None, :], b_kv, mask=m_kv)
        if NORMALISE:
            tl.store(p_kv_out + i_in + E, b_z, mask=m_m)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_forward_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_lengths,
    p_kv,
    p_z,
    p_prefix,
    p_prefix_z,
    p_reference,
    p_beta,
    p_peak,
    p_out,
    p_den,
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
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of one query head."""
    pid = tl.program_id(0)
    i_h = pid % H
    i_e = (pid // H) % TILES
    i_c = (pid // (H * TILES)) % tl.cdiv(T, C)
    i_b = (pid // (H * TILES) // tl.cdiv(T, C)).to(tl.int64)
    i_kv = i_h // (H // HKV)
    i_0 = i_c * C
    i_x = i_b * HKV + i_kv
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * stride_qt + i_h.to(tl.int64) * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * stride_kt + i_kv.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * stride_vt + i_kv.to(tl.int64) * stride_vh + i_e * BE
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    i_t, i_m = tl.arange(0, C), tl.arange(0, BM)
    i_s, i_p = i_x * segments + i_c // chunks, i_x * tl.cdiv(T, C) + i_c
    b_q = load_rows(p_q, stride_qt, left, D, C, BD, D == BD)
    b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
    b_beta = tl.zeros((C,), tl.float32)
    old, new, c = 1.0, 1.0, 0.0
    if SCALED:
        p_peak += i_x * T + i_0
        b_beta = load_column(p_beta + i_x * T + i_0, 1, left, C, FLOOR)
        b_reference = load_column(p_peak, 1, left, C, 1e30)
        c_old = tl.load(p_reference + i_x * (segments + 1) + i_c // chunks)
        c_new = tl.load(p_peak - 1, mask=i_c % chunks > 0, other=FLOOR)
        c = tl.maximum(c_old, c_new)
        old, new = exact_exp(c_old - c), exact_exp(c_new - c)
        b_reference = tl.maximum(b_reference, c)
    b_v = load_rows(p_v, stride_vt, rows, E - i_e * BE, C, BE, E % BE == 0).to(DOT)

    b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
    b_den = tl.zeros((C,), tl.float32)
    if NORMALISE:
        b_z = tl.load(p_z + i_s * BM + i_m) * old + tl.load(p_prefix_z + i_p * BM + i_m) * new
        b_den = tl.sum(b_query * b_z[None, :], 1)
    b_query = b_query.to(DOT)
    b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
    b_f = key_features(b_f, b_beta, M, BM, MAP).to(DOT)
    b_p = tl.dot(b_query, tl.trans(b_f), input_precision=PRECISION)
    b_kv = load_sums(p_kv + i_e * BE, i_s, BM, BE, BE * TILES)
    b_more = load_sums(p_prefix + i_e * BE, i_p, BM, BE, BE * TILES)
    m_seen = (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]
    if SCALED:
        b_p *= exact_exp(tl.where(m_seen, b_beta[None, :] - b_reference[:, None], FLOOR))
    else:
        b_p = tl.where(m_seen, b_p, 0)
    if NORMALISE:
        if SCALED:
            b_den *= exact_exp(c - b_reference)
        b_den += tl.sum(b_p, 1)
    b_p = b_p.to(DOT)
    b_kv = (b_kv.to(tl.float32) * old + b_more.to(tl.float32) * new).to(DOT)
    b_out = tl.dot(b_query, b_kv, input_precision=PRECISION)
    if SCALED:
        b_out *= exact_exp(c - b_reference)[:, None]
    b_out = tl.dot(b_p, b_v, b_out, input_precision=PRECISION)
    i_row = (i_b * T + i_0) * H + i_h
    if NORMALISE:
        b_out *= inverse(b_den)[:, None]
        if i_e == 0:
            tl.store(p_den + i_row + i_t * H, b_den, mask=i_t < left)
    store_rows(p_out + i_row * E + i_e * BE, H * E, left, E - i_e * BE, b_out, C, BE, E % BE == 0)
