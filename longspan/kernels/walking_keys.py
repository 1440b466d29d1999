"""Causal linear attention, backward: segments walked from end to start for keys and values; see `walking_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR
from longspan.kernels.walking_blocks import (
    add,
    exp2,
    gradient,
    key_features,
    load_rows,
    load_sums,
    query_shares,
    row_references,
    settled,
    store_rows,
    walk_references,
)


@triton.jit
def _load_queries(
    p_q,
    p_rows,
    p_d_out,
    left,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """φ(q) / den (C, BD) and d (C, BE) of one query head."""
    b_q = load_rows(p_q, STRIDE_Q, left, D, C, BD, WHOLE)
    b_d = load_rows(p_d_out, STRIDE_D, left, E, C, BE, WHOLE)
    b_query = query_shares(b_q, tl.load(p_rows + C + tl.arange(0, C)), D, BD, MAP)
    return settled(b_query), b_d


@triton.jit
def _walk(
    p_q,
    p_k,
    p_v,
    p_starts,
    p_d_out,
    p_rows,
    p_d_k,
    p_d_v,
    b_d_kv,
    b_d_z,
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
    """b_d_kv (BE, BD), b_d_z (C, BD), all rows alike: the gradients of the sums after, at the reference c of all keys;
    CAREFUL: of the segment's end.
    """
    GROUP: tl.constexpr = H // HKV
    i_t = tl.arange(0, C)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, WHOLE)
        b_v = load_rows(p_v, STRIDE_V, rows, E, C, BE, WHOLE)
        b_n = tl.zeros((C,), tl.float32) + c
        m_seen = i_t[:, None] <= i_t[None, :]
        if CAREFUL:
            c_start = tl.load(p_starts)
            p_starts -= 1
            b_n, b_reference = row_references(b_k, rows, c_start, D, C, BD)
            c_last = tl.max(b_reference)
            # What came after was summed at the reference of its own start, which is that of this chunk's end.
            b_end = exp2(b_n - c_last)
            b_pair = exp2(tl.where(m_seen, b_n[:, None] - b_reference[None, :], FLOOR))
        b_features = key_features(b_k, b_n, rows, D, C, BD, MAP, WHOLE)
        b_f = settled(b_features)
        b_half = b_d_kv.to(tl.bfloat16)
        # First values, then keys: both at once would need more registers.
        b_query, b_d = _load_queries(*(p_q, p_rows, p_d_out, left, D, E, C, BD, BE, STRIDE_Q, STRIDE_D, MAP, WHOLE))
        b_d_v = tl.dot(b_f, tl.trans(b_half))
        if CAREFUL:
            b_d_v *= b_end[:, None]
        for g in range(GROUP):
            if GROUP > 1:
                b_query, b_d = _load_queries(
                    *(p_q + g * stride_qh, p_rows + 2 * g * C, p_d_out + g * stride_dh, left, D, E, C, BD, BE),
                    *(STRIDE_Q, STRIDE_D, MAP, WHOLE),
                )
            b_p = tl.dot(b_f, tl.trans(b_query))
            b_p = b_p * b_pair if CAREFUL else tl.where(m_seen, b_p, 0)
            b_d_v = add(b_d_v, tl.dot(b_p.to(tl.bfloat16), b_d))
        store_rows(p_d_v, HKV * E, left, b_d_v, E, C, BE, WHOLE)
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
                    *(p_q + g * stride_qh, p_rows + 2 * g * C, p_d_out + g * stride_dh, left, D, E, C, BD, BE),
                    *(STRIDE_Q, STRIDE_D, MAP, WHOLE),
                )
            b_delta = tl.load(p_rows + 2 * g * C + i_t)
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
        b_g = gradient(b_g, b_k, b_features, MAP)
        store_rows(p_d_k, HKV * D, left, b_g, D, C, BD, WHOLE)
        p_q -= C * STRIDE_Q
        p_k -= C * STRIDE_K
        p_v -= C * STRIDE_V
        p_d_out -= C * STRIDE_D
        p_d_k -= C * HKV * D
        p_d_v -= C * HKV * E
        p_rows -= 2 * C * GROUP
        left += C
        rows += C


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
    """d k and d v of one segment of one key head."""
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_h = pid % HKV
    i_s = (pid // HKV) % segments
    i_b = (pid // HKV // segments).to(tl.int64)
    i_x = i_b * HKV + i_h
    steps = tl.minimum(chunks, tl.cdiv(T - i_s * chunks * C, C))
    i_c = i_s * chunks + steps - 1
    i_0 = i_c * C
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * STRIDE_D + i_h.to(tl.int64) * GROUP * stride_dh
    i_row = (i_b * T + i_0) * HKV + i_h
    p_d_k += i_row * D
    p_d_v += i_row * E
    p_starts += i_x * tl.cdiv(T, C) + i_c
    p_rows += (i_x * tl.cdiv(T, C) + i_c) * (2 * C * GROUP)
    i_o = i_x * segments + i_s
    _, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED)
    c_after = c
    if SCALED:
        c_after = tl.load(p_reference + i_x * (segments + 1) + i_s + 1)
    b_d_kv = load_sums(p_d_kv, i_o, BD, BE)
    b_d_z = tl.load(p_d_z + i_o * BD + tl.arange(0, BD))[None, :] + tl.zeros((C, BD), tl.float32)
    for careful in tl.static_range(2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_after if careful else c
            factor = exp2(c_0 - c_after)
            _walk(
                *(p_q, p_k, p_v, p_starts, p_d_out, p_rows, p_d_k, p_d_v, b_d_kv * factor, b_d_z * factor, c_0),
                *(left, rows, steps, stride_qh, stride_dh, H, HKV, D, E, C, BD, BE, STRIDE_Q, STRIDE_K, STRIDE_V),
                *(STRIDE_D, MAP, WHOLE, careful == 1, 1 if careful else STAGES),
            )
