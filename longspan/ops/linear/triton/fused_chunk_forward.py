"""Causal linear attention, forward: the sums before each segment, then every segment walked chunk by chunk.

A segment is a stretch of chunks, about as many segments as the device runs programs at once. `walking_sums` sums each
segment's keys and values and turns that into the sums before each segment; here segments are walked with the sums in
registers: a chunk's queries read them, and see the chunk's own keys as masked products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import add, exp2, round_once, same_layout
from longspan.ops.common.tiles import FLOOR, inverse
from longspan.ops.linear.triton.fused_chunk_device import (
    in_parts,
    key_features,
    load_rows,
    load_sums,
    query_features,
    row_references,
    segment,
    steps_in,
    store_rows,
    walk_references,
)

# Of a chunk's rows a thread has every 16th: its share of z needs no other thread.
R = tl.constexpr(16)


@triton.jit
def _walk(start, counts, stride_q, S: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr):
    """b_kv (BE, BD), b_z (R, BD), rows that add up to z: the sums before, at reference c. CAREFUL: each row at a
    reference of its own.
    """
    C: tl.constexpr = S.C
    # With a product for z as wide as that for the keys, queries are fetched once for both. Registers run out where rows
    # may be missing, and other maps gain nothing.
    ALIKE: tl.constexpr = S.WHOLE and S.SCALED
    ROWS: tl.constexpr = S.C if ALIKE else 2 * R
    p_q, p_k, p_v, p_out, p_den, b_kv, b_z, c = start
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
        b_more_z = tl.sum(tl.reshape(b_end, (S.C // R, R, S.BD)), 0)
        b_f = round_once(b_f)
        b_end = b_end.to(tl.bfloat16) if CAREFUL else b_f
        b_parts = in_parts(b_z, R, ROWS, S.BD)
        m_seen = i_t[None, :] <= i_t[:, None]
        for g in range(S.H // S.HKV):
            b_q = load_rows(p_q + g * stride_q.h, S.STRIDE_Q, left, S.D, S.BD, S)
            b_query = query_features(b_q, S)[0].to(tl.bfloat16)
            b_p = tl.dot(b_query, tl.trans(b_f))
            b_before = tl.dot(b_query, tl.trans(b_parts))
            if CAREFUL:
                b_p *= exp2(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR))
                b_before *= exp2(c - b_reference)[:, None]
            else:
                b_p = tl.where(m_seen, b_p, 0)
            if ALIKE:
                b_p = same_layout(b_p, b_before)
            b_den = tl.sum(b_p, 1) + tl.sum(b_before, 1)
            tl.store(p_den + g + i_t * S.H, b_den, mask=i_t < left)
            b_out = tl.dot(b_query, tl.trans(b_kv.to(tl.bfloat16)))
            if CAREFUL:
                b_out *= exp2(c - b_reference)[:, None]
            b_out = add(b_out, tl.dot(b_p.to(tl.bfloat16), b_v)) * inverse(b_den)[:, None]
            store_rows(p_out + g * S.E, S.H * S.E, left, b_out, S.E, S.BE, S)
        if CAREFUL:
            decay = exp2(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
        b_kv = tl.dot(tl.trans(b_v), b_end, b_kv)
        b_z += b_more_z
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        p_out += S.C * S.H * S.E
        p_den += S.C * S.H
        left -= S.C
        rows -= S.C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def walking_forward_kernel(
    p_q,
    p_k,
    p_v,
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
    stride_q,
    stride_k,
    stride_v,
    S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One segment of one key head and its query heads. p_den: (B, T, H), at the reference of its row."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment(p_lengths, T, segments, chunks, False, S)
    p_q += i_b * stride_q.b + i_0.to(tl.int64) * S.STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_q.h
    p_k += i_b * stride_k.b + i_0.to(tl.int64) * S.STRIDE_K + i_h.to(tl.int64) * stride_k.h
    p_v += i_b * stride_v.b + i_0.to(tl.int64) * S.STRIDE_V + i_h.to(tl.int64) * stride_v.h
    i_row = (i_b * T + i_0) * S.H + i_h * GROUP
    p_out += i_row * S.E
    p_den += i_row
    steps = steps_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, S)
    b_kv = load_sums(p_kv, i_o, S)
    b_z = tl.load(p_z + i_o * S.BD + tl.arange(0, S.BD))[None, :]
    b_z = tl.where(tl.arange(0, R)[:, None] == 0, b_z, 0)
    for careful in tl.static_range(2 if S.SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            factor = exp2(c_before - c_0)
            start = p_q, p_k, p_v, p_out, p_den, b_kv * factor, b_z * factor, c_0
            _walk(start, (left, rows, steps), stride_q, S, careful, STAGES)
