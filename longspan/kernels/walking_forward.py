"""Causal linear attention, forward: the sums before each segment, then every segment walked chunk by chunk.

A segment is a stretch of chunks, about as many segments as the device runs programs at once. `walking_sums` sums each
segment's keys and values and turns that into the sums before each segment; here segments are walked with the sums in
registers: a chunk's queries read them, and see the chunk's own keys as masked products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR, inverse
from longspan.kernels.walking_blocks import (
    add,
    exp2,
    in_halves,
    key_features,
    load_rows,
    load_sums,
    query_features,
    row_references,
    settled,
    store_rows,
    walk_references,
)

# Of a chunk's rows a thread has every 16th: its share of z needs no other thread.
R = tl.constexpr(16)


@triton.jit
def _walk(
    p_q,
    p_k,
    p_v,
    p_out,
    p_den,
    b_kv,
    b_z,
    c,
    left,
    rows,
    steps,
    stride_qh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    MAP: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """b_kv (BE, BD), b_z (R, BD), rows that add up to z: the sums before, at reference c. CAREFUL: each row at a
    reference of its own.
    """
    i_t = tl.arange(0, C)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, WHOLE)
        b_v = load_rows(p_v, STRIDE_V, rows, E, C, BE, WHOLE)
        b_n = tl.zeros((C,), tl.float32) + c
        if CAREFUL:
            b_n, b_reference = row_references(b_k, rows, c, D, C, BD)
            c_last = tl.max(b_reference)
        b_f = key_features(b_k, b_n, rows, D, C, BD, MAP, WHOLE)
        b_end = b_f
        if CAREFUL:
            b_end = b_f * exp2(b_n - c_last)[:, None]
        b_more_z = tl.sum(tl.reshape(b_end, (C // R, R, BD)), 0)
        b_f = settled(b_f)
        b_end = b_end.to(tl.bfloat16) if CAREFUL else b_f
        b_half_z = in_halves(b_z, R, BD)
        m_seen = i_t[None, :] <= i_t[:, None]
        for g in range(H // HKV):
            b_q = load_rows(p_q + g * stride_qh, STRIDE_Q, left, D, C, BD, WHOLE)
            b_query = query_features(b_q, D, BD, MAP)[0].to(tl.bfloat16)
            b_p = tl.dot(b_query, tl.trans(b_f))
            b_before = tl.dot(b_query, tl.trans(b_half_z))
            if CAREFUL:
                b_p *= exp2(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR))
                b_before *= exp2(c - b_reference)[:, None]
            else:
                b_p = tl.where(m_seen, b_p, 0)
            b_den = tl.sum(b_p, 1) + tl.sum(b_before, 1)
            b_out = tl.dot(b_query, tl.trans(b_kv.to(tl.bfloat16)))
            if CAREFUL:
                b_out *= exp2(c - b_reference)[:, None]
            b_out = add(b_out, tl.dot(b_p.to(tl.bfloat16), b_v)) * inverse(b_den)[:, None]
            tl.store(p_den + g + i_t * H, b_den, mask=i_t < left)
            store_rows(p_out + g * E, H * E, left, b_out, E, C, BE, WHOLE)
        if CAREFUL:
            decay = exp2(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
        b_kv = tl.dot(tl.trans(b_v), b_end, b_kv)
        b_z += b_more_z
        p_q += C * STRIDE_Q
        p_k += C * STRIDE_K
        p_v += C * STRIDE_V
        p_out += C * H * E
        p_den += C * H
        left -= C
        rows -= C


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
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One segment of one key head and its query heads. p_den: (B, T, H), at the reference of its row."""
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
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_out += i_row * E
    p_den += i_row
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED)
    b_kv = load_sums(p_kv, i_o, BD, BE)
    b_z = tl.load(p_z + i_o * BD + tl.arange(0, BD))[None, :]
    b_z = tl.where(tl.arange(0, R)[:, None] == 0, b_z, 0)
    for careful in tl.static_range(2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            factor = exp2(c_before - c_0)
            _walk(
                *(p_q, p_k, p_v, p_out, p_den, b_kv * factor, b_z * factor, c_0, left, rows, steps, stride_qh),
                *(H, HKV, D, E, C, BD, BE, STRIDE_Q, STRIDE_K, STRIDE_V, MAP, WHOLE, careful == 1),
                1 if careful else STAGES,
            )
