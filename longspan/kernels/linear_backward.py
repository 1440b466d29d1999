"""Causal linear attention, backward: the gradients of the sums after each segment, then segments walked both ways.

With d the gradient of out, δ_i = d_i · out_i, and S, z the sums before a chunk at its reference c:

    dφ(q_i) = (S d_i − δ_i z + Σ_{j ≤ i} (d_i · v_j − δ_i) f_j) / den_i,      dS = Σ_i φ(q_i) / den_i d_iᵀ

dS is summed from the end as the forward pass sums S from the start. What keys get follows from it on the way back, what
queries get from S on the way there. Where nothing is divided, den is 1 and δ is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    inverse,
    key_features,
    key_gradient,
    key_logits,
    load_column,
    load_rows,
    load_weight,
    query_features,
    query_gradient,
    ratio,
    reference,
    relative,
    store_rows,
    store_sums,
)
from longspan.kernels.linear_sums import row_references, walk_references


@triton.jit
def _sum_segment(
    p_q,
    p_k,
    p_weight,
    p_scale,
    p_out,
    p_den,
    p_d_out,
    p_delta,
    p_starts,
    c,
    left,
    rows,
    steps,
    values,
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
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dS (BM, BE) and d z (BM,) of one segment at the reference c of its start."""
    WHOLE_E: tl.constexpr = E % BE == 0
    i_t = tl.arange(0, C)
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    b_d_kv = tl.zeros((BM, BE), tl.float32)
    b_d_z = tl.zeros((C, BM), tl.float32)  # added up at the end, over the chunks' rows
    c_start = c
    for _ in tl.range(steps, num_stages=STAGES):
        b_row = tl.full((C,), 1.0, tl.float32)
        if CAREFUL:
            b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, D == BD, WHOLE)
            b_scale = tl.zeros((C,), tl.float32)
            if p_scale is not None:
                b_scale = load_column(p_scale, HKV, rows, C, 0.0, WHOLE).to(tl.float32)
                p_scale += C * HKV
            b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
            _, b_reference = row_references(b_f, b_scale, rows, c, C, BM, p_scale is not None, QUICK)
            b_row = ratio(c_start - b_reference, QUICK)
            tl.store(p_starts, c)
            p_starts += 1
            c = tl.max(b_reference)
        for g in range(H // HKV):
            b_q = load_rows(p_q + g * stride_qh, STRIDE_Q, left, D, C, BD, D == BD, WHOLE)
            b_d = load_rows(p_d_out + g * stride_dh, STRIDE_D, left, values, C, BE, WHOLE_E, WHOLE)
            b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
            if NORMALISE:
                b_row_g = b_row * inverse(load_column(p_den + g, H, left, C, 0.0, WHOLE))
                if TILES == 1:
                    b_out = load_rows(p_out + g * E, H * E, left, E, C, BE, WHOLE_E, WHOLE)
                    b_delta = tl.sum(b_d.to(tl.float32) * b_out.to(tl.float32), 1)
                    tl.store(p_delta + g + i_t * H, b_delta, mask=i_t < left)
                else:
                    b_delta = load_column(p_delta + g, H, left, C, 0.0, WHOLE)
                b_query *= b_row_g[:, None]
                b_d_z -= b_query * b_delta[:, None]
            else:
                b_query *= b_row[:, None]
            b_d_kv = tl.dot(tl.trans(b_query.to(DOT)), b_d.to(DOT), b_d_kv, input_precision=PRECISION)
        p_q += C * STRIDE_Q
        p_k += C * STRIDE_K
        p_d_out += C * STRIDE_D
        p_out += C * H * E
        p_den += C * H
        p_delta += C * H
        left -= C
        rows -= C
    return b_d_kv, tl.sum(b_d_z, 0)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_backward_sums_kernel(
    p_q,
    p_k,
    p_weight,
    p_scale,
    p_lengths,
    p_sizes,
    p_reference,
    p_starts,
    p_out,
    p_den,
    p_d_out,
    p_delta,
    p_d_kv,
    p_d_z,
    T,
    segments,
    chunks,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_db,
    stride_dh,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
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
    """dS of one segment, summed over the heads of a group, at the reference of the sums before it.

    p_delta: (B, T, H) δ, written here with TILES = 1, else given. p_starts: (B, Hkv, chunks) references before each
    chunk, where they rise within a segment.
    """
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
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * STRIDE_D + i_h.to(tl.int64) * GROUP * stride_dh + i_e * BE
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * HKV + i_h
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_out += i_row * E
    p_den += i_row
    p_delta += i_row
    p_starts += i_x * tl.cdiv(T, C) + i_s * chunks
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED, QUICK)
    for careful in tl.static_range(0 if QUICK else 1, 2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            b_d_kv, b_d_z = _sum_segment(
                *(p_q, p_k, p_weight, p_scale, p_out, p_den, p_d_out, p_delta, p_starts, c_0, left, rows, steps),
                *(E - i_e * BE, stride_qh, stride_dh, H, HKV, D, M, E, TILES, C, BD, BM, BE, STRIDE_Q, STRIDE_K),
                *(STRIDE_D, MAP, NORMALISE, QUICK, WHOLE, careful == 1, 1 if careful else STAGES, DOT, PRECISION),
            )
            store_sums(p_d_kv + i_e * BE, i_o, b_d_kv * ratio(c_before - c_0, QUICK), BM, BE, BE * TILES)
            if NORMALISE:
                if i_e == 0:
                    tl.store(p_d_z + i_o * BM + tl.arange(0, BM), b_d_z * ratio(c_before - c_0, QUICK))


@triton.jit(do_not_specialize=["segments"])
def causal_linear_backward_scan_kernel(
    p_d_kv,
    p_d_z,
    p_sizes,
    p_reference,
    p_shift,
    p_d_end,
    p_d_start,
    segments,
    M: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
):
    """The gradients of the sums after each segment from the segments' own dS, in place."""
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    columns = E + 1 if NORMALISE else E
    m_m = i_m < M
    m_kv = m_m[:, None] & (i_e < E)[None, :]
    i_in = i_x * (M * columns) + i_m * columns
    b_d_kv = tl.zeros((ROWS, BE), tl.float32)
    b_d_z = tl.zeros((ROWS,), tl.float32)
    i_tile = i_x * segments * (BM * BE) + i_m[:, None] * BE + i_e[None, :]
    p_row = p_d_z + i_x * segments * BM + i_m
    p_sizes += i_x * segments * 4
    p_reference += i_x * (segments + 1)
    if p_d_end is not None:
        b_d_kv = tl.load(p_d_end + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0)
        if NORMALISE:
            b_d_z = tl.load(p_d_end + i_in + E, mask=m_m, other=0.0)
        if SCALED:
            top = tl.full((), FLOOR, tl.float32)
            if p_shift is not None:
                top = tl.load(p_shift + i_x)
            for i_s in range(segments):
                top = tl.maximum(top, tl.load(p_sizes + i_s * 4 + 2))
            factor = tl.where(top <= FLOOR, 1.0, 1 / relative(top, tl.load(p_reference + segments), QUICK))
            b_d_kv *= factor
            b_d_z *= factor
    for i in tl.range(segments, num_stages=4):
        i_s = segments - 1 - i
        b_more = tl.load(p_d_kv + i_tile + i_s * (BM * BE))
        tl.store(p_d_kv + i_tile + i_s * (BM * BE), b_d_kv)
        decay = 1.0
        if SCALED:
            decay = ratio(tl.load(p_reference + i_s) - tl.load(p_reference + i_s + 1), QUICK)
        b_d_kv = b_d_kv * decay + b_more
        if NORMALISE:
            b_more_z = tl.load(p_row + i_s * BM)
            tl.store(p_row + i_s * BM, b_d_z)
            b_d_z = b_d_z * decay + b_more_z
    if p_d_start is not None:
        if SCALED:
            top = tl.load(p_shift + i_x)
            factor = tl.where(top <= FLOOR, 1.0, relative(top, tl.load(p_reference), QUICK))
            b_d_kv *= factor
            b_d_z *= factor
        tl.store(p_d_start + i_in[:, None] + i_e[None, :], b_d_kv, mask=m_kv)
        if NORMALISE:
            tl.store(p_d_start + i_in + E, b_d_z, mask=m_m)


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
    QUICK: tl.constexpr,
    KEY: tl.constexpr,
    DOT: tl.constexpr,
):
    """d q or d k from the tiles' parts of the gradient of its features, those of a key at its own reference."""
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
        b_f = key_features(b_f, tl.zeros((C,), tl.float32), reference(tl.max(b_f, 1), QUICK), M, BM, MAP, False, QUICK)
        b_g = key_gradient(b_g, b_x, b_f, b_weight, D, MAP, DOT)
    else:
        b_f = query_features(b_x, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
        b_g = query_gradient(b_g, b_x, b_f, b_weight, MAP, NORMALISE, DOT)
    store_rows(p_d_x + i_row * D, H * D, left, D, b_g, C, BD, D == BD)
