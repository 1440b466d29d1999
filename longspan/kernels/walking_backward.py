"""Causal linear attention, backward: the gradients of the sums after each segment, then segments walked both ways.

With d the gradient of out, δ_i = d_i · out_i, and S, z the sums before a chunk at its reference:

    dφ(q_i) = (S d_i − δ_i z + Σ_{j ≤ i} (d_i · v_j − δ_i) f_j) / den_i,      dS = Σ_i φ(q_i) / den_i d_iᵀ

dS is summed from the end as the forward pass sums S from the start. What keys get follows from it on the way back, what
queries get from S on the way there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR, inverse
from longspan.kernels.walking_blocks import (
    LOG2E,
    exp2,
    load_column,
    load_rows,
    query_features,
    row_references,
    share_scale,
    store_sums,
    walk_references,
)


@triton.jit
def _sum_segment(
    p_q,
    p_k,
    p_out,
    p_den,
    p_d_out,
    p_rows,
    p_starts,
    c,
    left,
    rows,
    steps,
    stride_qh,
    stride_dh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dS (BE, BD) and d z (BD,) of one segment at the reference c of its start."""
    i_t = tl.arange(0, C)
    b_d_kv = tl.zeros((BE, BD), tl.float32)
    b_d_z = tl.zeros((C, BD), tl.float32)  # added up at the end, over the chunks' rows
    c_start = c
    for _ in tl.range(steps, num_stages=STAGES):
        if CAREFUL:
            b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, WHOLE)
            _, b_reference = row_references(b_k, rows, c, D, C, BD)
            b_row = exp2(c_start - b_reference)
            tl.store(p_starts, c)
            p_starts += 1
            c = tl.max(b_reference)
        for g in range(H // HKV):
            b_q = load_rows(p_q + g * stride_qh, STRIDE_Q, left, D, C, BD, WHOLE)
            b_d = load_rows(p_d_out + g * stride_dh, STRIDE_D, left, E, C, BE, WHOLE)
            b_query, b_size = query_features(b_q, D, BD, MAP)
            b_den = load_column(p_den + g, H, left, C, WHOLE)
            b_query *= inverse(b_den)[:, None]
            b_out = load_rows(p_out + g * E, H * E, left, E, C, BE, WHOLE)
            b_delta = tl.sum(b_d.to(tl.float32) * b_out.to(tl.float32), 1)
            tl.store(p_rows + (2 * g) * C + i_t, b_delta)
            tl.store(p_rows + (2 * g + 1) * C + i_t, share_scale(b_den, b_size, MAP))
            if CAREFUL:
                b_query *= b_row[:, None]
            b_d_z -= b_query * b_delta[:, None]
            b_d_kv = tl.dot(tl.trans(b_d), b_query.to(tl.bfloat16), b_d_kv)
        p_q += C * STRIDE_Q
        p_k += C * STRIDE_K
        p_d_out += C * STRIDE_D
        p_out += C * H * E
        p_den += C * H
        p_rows += 2 * C * (H // HKV)
        left -= C
        rows -= C
    return b_d_kv, tl.sum(b_d_z, 0)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def walking_backward_sums_kernel(
    p_q,
    p_k,
    p_lengths,
    p_sizes,
    p_reference,
    p_starts,
    p_out,
    p_den,
    p_d_out,
    p_rows,
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
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dS of one segment, summed over the heads of a group, at the reference of the sums before it.

    p_rows: (B, Hkv, chunks, group, 2, C) gets δ and what makes shares of queries. p_starts: (B, Hkv, chunks) gets the
    references before each chunk, where they rise within a segment.
    """
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_h = pid % HKV
    i_s = (pid // HKV) % segments
    i_b = (pid // HKV // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    i_x = i_b * HKV + i_h
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * STRIDE_D + i_h.to(tl.int64) * GROUP * stride_dh
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_out += i_row * E
    p_den += i_row
    i_c = i_x * tl.cdiv(T, C) + i_s * chunks
    p_rows += i_c * (2 * C * GROUP)
    p_starts += i_c
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED)
    for careful in tl.static_range(2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            b_d_kv, b_d_z = _sum_segment(
                *(p_q, p_k, p_out, p_den, p_d_out, p_rows, p_starts, c_0, left, rows, steps, stride_qh, stride_dh),
                *(H, HKV, D, E, C, BD, BE, STRIDE_Q, STRIDE_K, STRIDE_D, MAP, WHOLE, careful == 1),
                1 if careful else STAGES,
            )
            store_sums(p_d_kv, i_o, b_d_kv * exp2(c_before - c_0), BD, BE)
            tl.store(p_d_z + i_o * BD + tl.arange(0, BD), b_d_z * exp2(c_before - c_0))


@triton.jit(do_not_specialize=["segments"])
def walking_backward_scan_kernel(
    p_d_kv,
    p_d_z,
    p_sizes,
    p_reference,
    p_shift,
    p_d_end,
    p_d_start,
    segments,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    FEATURES: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The gradients of the sums after each segment from the segments' own dS, in place."""
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * FEATURES + tl.arange(0, FEATURES), tl.arange(0, BE)
    m_m = i_m < D
    m_kv = (i_e < E)[:, None] & m_m[None, :]
    i_in = i_x * (D * (E + 1)) + i_m * (E + 1)
    b_d_kv = tl.zeros((BE, FEATURES), tl.float32)
    b_d_z = tl.zeros((FEATURES,), tl.float32)
    i_tile = i_x * segments * (BD * BE) + i_e[:, None] * BD + i_m[None, :]
    p_row = p_d_z + i_x * segments * BD + i_m
    p_sizes += i_x * segments * 4
    p_reference += i_x * (segments + 1)
    if p_d_end is not None:
        b_d_kv = tl.load(p_d_end + i_in[None, :] + i_e[:, None], mask=m_kv, other=0.0)
        b_d_z = tl.load(p_d_end + i_in + E, mask=m_m, other=0.0)
        if SCALED:
            top = tl.full((), FLOOR, tl.float32)
            if p_shift is not None:
                top = tl.load(p_shift + i_x)
            for i_s in range(segments):
                top = tl.maximum(top, tl.load(p_sizes + i_s * 4 + 2))
            factor = tl.where(top <= FLOOR, 1.0, 1 / exp2(top * LOG2E - tl.load(p_reference + segments)))
            b_d_kv *= factor
            b_d_z *= factor
    for i in tl.range(segments, num_stages=4):
        i_s = segments - 1 - i
        b_more, b_more_z = tl.load(p_d_kv + i_tile + i_s * (BD * BE)), tl.load(p_row + i_s * BD)
        tl.store(p_d_kv + i_tile + i_s * (BD * BE), b_d_kv)
        tl.store(p_row + i_s * BD, b_d_z)
        decay = 1.0
        if SCALED:
            decay = exp2(tl.load(p_reference + i_s) - tl.load(p_reference + i_s + 1))
        b_d_kv = b_d_kv * decay + b_more
        b_d_z = b_d_z * decay + b_more_z
    if p_d_start is not None:
        if SCALED:
            top = tl.load(p_shift + i_x)
            factor = tl.where(top <= FLOOR, 1.0, exp2(top * LOG2E - tl.load(p_reference)))
            b_d_kv *= factor
            b_d_z *= factor
        tl.store(p_d_start + i_in[None, :] + i_e[:, None], b_d_kv, mask=m_kv)
        tl.store(p_d_start + i_in + E, b_d_z, mask=m_m)
