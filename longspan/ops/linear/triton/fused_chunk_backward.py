"""Causal linear attention, backward: the gradients of the sums after each segment, then segments walked both ways.

With d the gradient of out, δ_i = d_i · out_i, and S, z the sums before a chunk at its reference:

    dφ(q_i) = (S d_i − δ_i z + Σ_{j ≤ i} (d_i · v_j − δ_i) f_j) / den_i,      dS = Σ_i φ(q_i) / den_i d_iᵀ

dS is summed from the end as the forward pass sums S from the start. What keys get follows from it on the way back, what
queries get from S on the way there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E, exp2
from longspan.ops.common.tiles import FLOOR, inverse
from longspan.ops.linear.triton.fused_chunk_device import (
    load_column,
    load_rows,
    load_state,
    query_features,
    row_references,
    scanned,
    segment,
    share_scale,
    steps_in,
    store_state,
    store_sums,
    walk_references,
)


@triton.jit
def _sum_segment(start, counts, stride_q, stride_d, S: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr):
    """dS (BE, BD) and d z (BD,) of one segment at the reference c of its start."""
    BE: tl.constexpr = S.BE
    BD: tl.constexpr = S.BD
    C: tl.constexpr = S.C
    p_q, p_k, p_out, p_den, p_d_out, p_rows, p_starts, c = start
    left, rows, steps = counts
    i_t = tl.arange(0, S.C)
    b_d_kv = tl.zeros((BE, BD), tl.float32)
    b_d_z = tl.zeros((C, BD), tl.float32)  # added up at the end, over the chunks' rows
    c_start = c
    for _ in tl.range(steps, num_stages=1 if CAREFUL else STAGES):
        if CAREFUL:
            b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
            _, b_reference = row_references(b_k, rows, c, S)
            b_row = exp2(c_start - b_reference)
            tl.store(p_starts, c)
            p_starts += 1
            c = tl.max(b_reference)
        for g in range(S.H // S.HKV):
            b_q = load_rows(p_q + g * stride_q.h, S.STRIDE_Q, left, S.D, S.BD, S)
            b_d = load_rows(p_d_out + g * stride_d.h, S.STRIDE_D, left, S.E, S.BE, S)
            b_query, b_size = query_features(b_q, S)
            b_den = load_column(p_den + g, S.H, left, S)
            b_query *= inverse(b_den)[:, None]
            b_out = load_rows(p_out + g * S.E, S.H * S.E, left, S.E, S.BE, S)
            b_delta = tl.sum(b_d.to(tl.float32) * b_out.to(tl.float32), 1)
            tl.store(p_rows + (2 * g) * S.C + i_t, b_delta)
            tl.store(p_rows + (2 * g + 1) * S.C + i_t, share_scale(b_den, b_size, S))
            if CAREFUL:
                b_query *= b_row[:, None]
            b_d_z -= b_query * b_delta[:, None]
            b_d_kv = tl.dot(tl.trans(b_d), b_query.to(tl.bfloat16), b_d_kv)
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_d_out += S.C * S.STRIDE_D
        p_out += S.C * S.H * S.E
        p_den += S.C * S.H
        p_rows += 2 * S.C * (S.H // S.HKV)
        left -= S.C
        rows -= S.C
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
    stride_q,
    stride_k,
    stride_d,
    S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dS of one segment, summed over the heads of a group, at the reference of the sums before it.

    p_rows: (B, Hkv, chunks, group, 2, C) gets δ and what makes shares of queries. p_starts: (B, Hkv, chunks) gets the
    references before each chunk, where they rise within a segment.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment(p_lengths, T, segments, chunks, False, S)
    p_q += i_b * stride_q.b + i_0.to(tl.int64) * S.STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_q.h
    p_k += i_b * stride_k.b + i_0.to(tl.int64) * S.STRIDE_K + i_h.to(tl.int64) * stride_k.h
    p_d_out += i_b * stride_d.b + i_0.to(tl.int64) * S.STRIDE_D + i_h.to(tl.int64) * GROUP * stride_d.h
    i_row = (i_b * T + i_0) * S.H + i_h * GROUP
    p_out += i_row * S.E
    p_den += i_row
    p_rows += (i_x * tl.cdiv(T, S.C) + i_c) * (2 * S.C * GROUP)
    p_starts += i_x * tl.cdiv(T, S.C) + i_c
    steps = steps_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, S)
    for careful in tl.static_range(2 if S.SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            start = p_q, p_k, p_out, p_den, p_d_out, p_rows, p_starts, c_0
            b_d_kv, b_d_z = _sum_segment(start, (left, rows, steps), stride_q, stride_d, S, careful, STAGES)
            store_sums(p_d_kv, i_o, b_d_kv * exp2(c_before - c_0), S)
            tl.store(p_d_z + i_o * S.BD + tl.arange(0, S.BD), b_d_z * exp2(c_before - c_0))


@triton.jit(do_not_specialize=["segments"])
def walking_backward_scan_kernel(
    p_d_kv, p_d_z, p_sizes, p_reference, p_shift, p_d_end, p_d_start, segments, S: tl.constexpr, FEATURES: tl.constexpr
):
    """The gradients of the sums after each segment from the segments' own dS, in place."""
    BE: tl.constexpr = S.BE
    i_x, i_m, i_in = scanned(S, FEATURES)
    b_d_kv = tl.zeros((BE, FEATURES), tl.float32)
    b_d_z = tl.zeros((FEATURES,), tl.float32)
    i_tile = i_x * segments * (S.BD * S.BE) + tl.arange(0, S.BE)[:, None] * S.BD + i_m[None, :]
    p_row = p_d_z + i_x * segments * S.BD + i_m
    p_sizes += i_x * segments * 4
    p_reference += i_x * (segments + 1)
    if p_d_end is not None:
        b_d_kv, b_d_z = load_state(p_d_end, i_in, i_m, S)
        if S.SCALED:
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
        b_more, b_more_z = tl.load(p_d_kv + i_tile + i_s * (S.BD * S.BE)), tl.load(p_row + i_s * S.BD)
        tl.store(p_d_kv + i_tile + i_s * (S.BD * S.BE), b_d_kv)
        tl.store(p_row + i_s * S.BD, b_d_z)
        decay = 1.0
        if S.SCALED:
            decay = exp2(tl.load(p_reference + i_s) - tl.load(p_reference + i_s + 1))
        b_d_kv = b_d_kv * decay + b_more
        b_d_z = b_d_z * decay + b_more_z
    if p_d_start is not None:
        if S.SCALED:
            top = tl.load(p_shift + i_x)
            factor = tl.where(top <= FLOOR, 1.0, exp2(top * LOG2E - tl.load(p_reference)))
            b_d_kv *= factor
            b_d_z *= factor
        store_state(p_d_start, i_in, i_m, b_d_kv, b_d_z, S)
