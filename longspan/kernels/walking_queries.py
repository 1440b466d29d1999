"""Causal linear attention, backward: segments walked from start to end for queries; see `walking_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR
from longspan.kernels.walking_blocks import (
    add,
    exp2,
    key_features,
    load_rows,
    load_sums,
    query_slopes,
    row_references,
    settled,
    store_rows,
    walk_references,
)


@triton.jit
def _walk(
    p_q,
    p_k,
    p_v,
    p_d_out,
    p_rows,
    p_d_q,
    b_kv,
    b_z,
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
    STRIDE_V: tl.constexpr,
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """b_kv (BE, BD), b_z (C, BD), all rows alike: the sums before, at reference c. CAREFUL: each row at a reference of
    its own.
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
        b_f = settled(b_f)
        b_end = b_end.to(tl.bfloat16) if CAREFUL else b_f
        m_seen = i_t[None, :] <= i_t[:, None]
        for g in range(H // HKV):
            b_d = load_rows(p_d_out + g * stride_dh, STRIDE_D, left, E, C, BE, WHOLE)
            b_d_p = tl.dot(b_d, tl.trans(b_v))
            b_delta = tl.load(p_rows + (2 * g) * C + i_t)
            b_d_p -= b_delta[:, None]
            if CAREFUL:
                b_d_p *= exp2(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR))
            else:
                b_d_p = tl.where(m_seen, b_d_p, 0)
            b_g = tl.dot(b_d, b_kv.to(tl.bfloat16))
            b_g -= b_delta[:, None] * b_z
            if CAREFUL:
                b_g *= exp2(c - b_reference)[:, None]
            b_q = load_rows(p_q + g * stride_qh, STRIDE_Q, left, D, C, BD, WHOLE)
            b_slope = query_slopes(b_q, tl.load(p_rows + (2 * g + 1) * C + i_t), D, BD, MAP)
            b_g = add(b_g, tl.dot(b_d_p.to(tl.bfloat16), b_f)) * b_slope
            store_rows(p_d_q + g * D, H * D, left, b_g, D, C, BD, WHOLE)
        if CAREFUL:
            decay = exp2(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
        b_kv = tl.dot(tl.trans(b_v), b_end, b_kv)
        b_z = tl.dot(tl.full((C, C), 1.0, tl.bfloat16), b_end, b_z)
        p_q += C * STRIDE_Q
        p_k += C * STRIDE_K
        p_v += C * STRIDE_V
        p_d_out += C * STRIDE_D
        p_d_q += C * H * D
        p_rows += 2 * C * (H // HKV)
        left -= C
        rows -= C


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
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d q of one segment of one key head's query heads."""
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
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * STRIDE_D + i_h.to(tl.int64) * GROUP * stride_dh
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_rows += (i_x * tl.cdiv(T, C) + i_s * chunks) * (2 * C * GROUP)
    p_d_q += i_row * D
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    i_o = i_x * segments + i_s
    c_before, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED)
    b_kv = load_sums(p_kv, i_o, BD, BE)
    b_z = tl.load(p_z + i_o * BD + tl.arange(0, BD))[None, :] + tl.zeros((C, BD), tl.float32)
    for careful in tl.static_range(2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_before if careful else c
            factor = exp2(c_before - c_0)
            _walk(
                *(p_q, p_k, p_v, p_d_out, p_rows, p_d_q, b_kv * factor, b_z * factor, c_0, left, rows, steps),
                *(stride_qh, stride_dh, H, HKV, D, E, C, BD, BE, STRIDE_Q, STRIDE_K, STRIDE_V, STRIDE_D, MAP, WHOLE),
                *(careful == 1, 1 if careful else STAGES),
            )
