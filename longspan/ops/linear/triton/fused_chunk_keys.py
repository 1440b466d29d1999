"""Causal linear attention, backward: segments walked from end to start for keys and values; see `walking_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import add, exp2, round_once
from longspan.ops.common.tiles import FLOOR
from longspan.ops.linear.triton.fused_chunk_device import (
    gradient,
    key_features,
    load_rows,
    load_sums,
    query_shares,
    row_references,
    segment,
    steps_in,
    store_rows,
    walk_references,
)


@triton.jit
def _load_queries(p_q, p_rows, p_d_out, left, S: tl.constexpr):
    """φ(q) / den (C, BD) and d (C, BE) of one query head."""
    b_q = load_rows(p_q, S.STRIDE_Q, left, S.D, S.BD, S)
    b_d = load_rows(p_d_out, S.STRIDE_D, left, S.E, S.BE, S)
    b_query = query_shares(b_q, tl.load(p_rows + S.C + tl.arange(0, S.C)), S)
    return round_once(b_query), b_d


@triton.jit
def _walk(start, counts, stride_q, stride_d, S: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr):
    """b_d_kv (BE, BD), b_d_z (C, BD), all rows alike: the gradients of the sums after, at the reference c of all keys;
    CAREFUL: of the segment's end.
    """
    C: tl.constexpr = S.C
    p_q, p_k, p_v, p_starts, p_d_out, p_rows, p_d_k, p_d_v, b_d_kv, b_d_z, c = start
    left, rows, steps = counts
    GROUP: tl.constexpr = S.H // S.HKV
    i_t = tl.arange(0, S.C)
    for _ in tl.range(steps, num_stages=1 if CAREFUL else STAGES):
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S)
        b_n = tl.zeros((C,), tl.float32) + c
        m_seen = i_t[:, None] <= i_t[None, :]
        if CAREFUL:
            c_start = tl.load(p_starts)
            p_starts -= 1
            b_n, b_reference = row_references(b_k, rows, c_start, S)
            c_last = tl.max(b_reference)
            # What came after was summed at the reference of its own start, which is that of this chunk's end.
            b_end = exp2(b_n - c_last)
            b_pair = exp2(tl.where(m_seen, b_n[:, None] - b_reference[None, :], FLOOR))
        b_features = key_features(b_k, b_n, rows, S)
        b_f = round_once(b_features)
        b_half = b_d_kv.to(tl.bfloat16)
        # First values, then keys: both at once would need more registers.
        b_query, b_d = _load_queries(p_q, p_rows, p_d_out, left, S)
        b_d_v = tl.dot(b_f, tl.trans(b_half))
        if CAREFUL:
            b_d_v *= b_end[:, None]
        for g in range(GROUP):
            if GROUP > 1:
                b_query, b_d = _load_queries(
                    p_q + g * stride_q.h, p_rows + 2 * g * S.C, p_d_out + g * stride_d.h, left, S
                )
            b_p = tl.dot(b_f, tl.trans(b_query))
            b_p = b_p * b_pair if CAREFUL else tl.where(m_seen, b_p, 0)
            b_d_v = add(b_d_v, tl.dot(b_p.to(tl.bfloat16), b_d))
        store_rows(p_d_v, S.HKV * S.E, left, b_d_v, S.E, S.BE, S)
        b_g = tl.dot(b_v, b_half)
        b_g += b_d_z
        if CAREFUL:
            b_g *= b_end[:, None]
            decay = exp2(c_start - c_last)
            b_d_kv *= decay
            b_d_z *= decay
        for g in range(GROUP):
            if GROUP > 1:
                b_query, b_d = _load_queries(
                    p_q + g * stride_q.h, p_rows + 2 * g * S.C, p_d_out + g * stride_d.h, left, S
                )
            b_delta = tl.load(p_rows + 2 * g * S.C + i_t)
            b_d_p = tl.dot(b_v, tl.trans(b_d))
            b_d_p -= b_delta[None, :]
            b_d_p = b_d_p * b_pair if CAREFUL else tl.where(m_seen, b_d_p, 0)
            b_g = add(b_g, tl.dot(b_d_p.to(tl.bfloat16), b_query))
            b_row = b_query
            if CAREFUL:
                b_row = (b_query * exp2(c_start - b_reference)[:, None]).to(tl.bfloat16)
            b_d_kv = tl.dot(tl.trans(b_d), b_row, b_d_kv)
            b_minus = tl.zeros((C, C), tl.float32) - b_delta[None, :]
            b_d_z = tl.dot(b_minus.to(tl.bfloat16), b_row, b_d_z)
        b_g = gradient(b_g, b_k, b_features, S)
        store_rows(p_d_k, S.HKV * S.D, left, b_g, S.D, S.BD, S)
        p_q -= S.C * S.STRIDE_Q
        p_k -= S.C * S.STRIDE_K
        p_v -= S.C * S.STRIDE_V
        p_d_out -= S.C * S.STRIDE_D
        p_d_k -= S.C * S.HKV * S.D
        p_d_v -= S.C * S.HKV * S.E
        p_rows -= 2 * S.C * GROUP
        left += S.C
        rows += S.C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def walking_backward_keys_kernel(
    p_q,
    p_k,
    p_v,
    p_lengths,
    p_d_kv,
    p_d_z,
    p_sizes,
    p_reference,
    p_starts,
    p_d_out,
    p_rows,
    p_d_k,
    p_d_v,
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
    """d k and d v of one segment of one key head."""
    C: tl.constexpr = S.C
    BD: tl.constexpr = S.BD
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment(p_lengths, T, segments, chunks, True, S)
    p_q += i_b * stride_q.b + i_0.to(tl.int64) * S.STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_q.h
    p_k += i_b * stride_k.b + i_0.to(tl.int64) * S.STRIDE_K + i_h.to(tl.int64) * stride_k.h
    p_v += i_b * stride_v.b + i_0.to(tl.int64) * S.STRIDE_V + i_h.to(tl.int64) * stride_v.h
    p_d_out += i_b * stride_d.b + i_0.to(tl.int64) * S.STRIDE_D + i_h.to(tl.int64) * GROUP * stride_d.h
    i_row = (i_b * T + i_0) * S.HKV + i_h
    p_d_k += i_row * S.D
    p_d_v += i_row * S.E
    p_starts += i_x * tl.cdiv(T, S.C) + i_c
    p_rows += (i_x * tl.cdiv(T, S.C) + i_c) * (2 * S.C * GROUP)
    steps = steps_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    _, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, S)
    c_after = c
    if S.SCALED:
        c_after = tl.load(p_reference + i_x * (segments + 1) + i_s + 1)
    b_d_kv = load_sums(p_d_kv, i_o, S)
    b_d_z = tl.load(p_d_z + i_o * S.BD + tl.arange(0, S.BD))[None, :] + tl.zeros((C, BD), tl.float32)
    for careful in tl.static_range(2 if S.SCALED else 1):
        if chosen == careful:
            c_0 = c_after if careful else c
            factor = exp2(c_0 - c_after)
            start = p_q, p_k, p_v, p_starts, p_d_out, p_rows, p_d_k, p_d_v, b_d_kv * factor, b_d_z * factor, c_0
            _walk(start, (left, rows, steps), stride_q, stride_d, S, careful, STAGES)
