"""Causal linear attention, backward: segments walked from start to end for queries; see `walking_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import add, exp2, round_once, same_layout
from longspan.ops.common.tiles import FLOOR, inverse
from longspan.ops.linear.triton.fused_chunk_device import (
    key_features,
    load_rows,
    load_sums,
    query_slopes,
    row_references,
    segment,
    steps_in,
    store_rows,
    walk_references,
)


@triton.jit
def _walk(start, counts, stride_q, stride_d, S: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr):
    """b_kv (BE, BD), b_z (C, BD), all rows alike: the sums before, at reference c. CAREFUL: each row at a reference of
    its own.
    """
    C: tl.constexpr = S.C
    p_q, p_k, p_v, p_d_out, p_rows, p_d_q, b_kv, b_z, c = start
    left, rows, steps = counts
    i_t = tl.arange(0, S.C)
    for _ in tl.range(steps, num_stages=1 if CAREFUL else STAGES):
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S)
        b_n = tl.zeros((C,), tl.float32) + c
        if CAREFUL:
            b_n, b_reference = row_references(b_k, rows, c, S)
            c_last = tl.max(b_reference)
        b_f = key_features(b_k, b_n, rows, S)
        b_end = b_f
        if CAREFUL:
            b_end = b_f * exp2(b_n - c_last)[:, None]
        b_f = round_once(b_f)
        b_end = b_end.to(tl.bfloat16) if CAREFUL else b_f
        m_seen = i_t[None, :] <= i_t[:, None]
        for g in range(S.H // S.HKV):
            b_d = load_rows(p_d_out + g * stride_d.h, S.STRIDE_D, left, S.E, S.BE, S)
            b_d_p = tl.dot(b_d, tl.trans(b_v))
            b_delta = tl.load(p_rows + (2 * g) * S.C + i_t)
            b_d_p -= b_delta[:, None]
            if CAREFUL:
                b_d_p *= exp2(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR))
            else:
                b_d_p = tl.where(m_seen, b_d_p, 0)
            b_g = tl.dot(b_d, b_kv.to(tl.bfloat16))
            b_g -= b_delta[:, None] * b_z
            if CAREFUL:
                b_g *= exp2(c - b_reference)[:, None]
            b_q = load_rows(p_q + g * stride_q.h, S.STRIDE_Q, left, S.D, S.BD, S)
            b_slope = query_slopes(b_q, tl.load(p_rows + (2 * g + 1) * S.C + i_t), S)
            b_g = add(b_g, tl.dot(b_d_p.to(tl.bfloat16), b_f)) * b_slope
            if S.MAP == "softmax":
                # To move all of q alike moves nothing: d q adds up to 0, but for what δ, of a rounded result, is off.
                b_share = tl.sum(same_layout(b_slope, b_g), 1)
                b_g -= b_slope * (tl.sum(b_g, 1) * inverse(b_share))[:, None]
            store_rows(p_d_q + g * S.D, S.H * S.D, left, b_g, S.D, S.BD, S)
        if CAREFUL:
            decay = exp2(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
        b_kv = tl.dot(tl.trans(b_v), b_end, b_kv)
        b_z = tl.dot(tl.full((S.C, S.C), 1.0, tl.bfloat16), b_end, b_z)
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        p_d_out += S.C * S.STRIDE_D
        p_d_q += S.C * S.H * S.D
        p_rows += 2 * S.C * (S.H // S.HKV)
        left -= S.C
        rows -= S.C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def walking_backward_queries_kernel(
    p_q,
    p_k,
    p_v,
    p_lengths,
    p_kv,
    p_z,
    p_sizes,
    p_reference,
    p_d_out,
    p_rows,
    p_d_q,
    T,
    segments,
    chunks,
    stride_q,
    stride_k,
    stride_v,
    stride_d,
    S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d q of one segment of one key head's query heads."""
    C: tl.constexpr = S.C
    BD: tl.constexpr = S.BD
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment(p_lengths, T, segments, chunks, False, S)
    p_q += i_b * stride_q.b + i_0.to(tl.int64) * S.STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_q.h
    p_k += i_b * stride_k.b + i_0.to(tl.int64) * S.STRIDE_K + i_h.to(tl.int64) * stride_k.h
    p_v += i_b * stride_v.b + i_0.to(tl.int64) * S.STRIDE_V + i_h.to(tl.int64) * stride_v.h
    p_d_out += i_b * stride_d.b + i_0.to(tl.int64) * S.STRIDE_D + i_h.to(tl.int64) * GROUP * stride_d.h
    i_row = (i_b * T + i_0) * S.H + i_h * GROUP
    p_rows += (i_x * tl.cdiv(T, S.C) + i_c) * (2 * S.C * GROUP)
    p_d_q += i_row * S.D
    steps = steps_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, S)
    b_kv = load_sums(p_kv, i_o, S)
    b_z = tl.load(p_z + i_o * S.BD + tl.arange(0, S.BD))[None, :] + tl.zeros((C, BD), tl.float32)
    for careful in tl.static_range(2 if S.SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            factor = exp2(c_before - c_0)
            start = p_q, p_k, p_v, p_d_out, p_rows, p_d_q, b_kv * factor, b_z * factor, c_0
            _walk(start, (left, rows, steps), stride_q, stride_d, S, careful, STAGES)
