"""Causal linear attention that walks segments, forward: the sums before each segment, and their references.

Sums are in units of 2 to their reference. Keys are mostly of like size: then one reference, the larger of that of all
before a segment and that of its first key, does for the whole segment, and no row of it needs a factor of its own. Only
where later keys are larger by more than SLACK allows do references rise within a segment, a row's being the largest it
sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR
from longspan.kernels.walking_blocks import (
    LOG2E,
    SLACK,
    exp2,
    key_features,
    key_sizes,
    load_rows,
    reference,
    store_sums,
)


@triton.jit
def _sum_segment(
    p_k,
    p_v,
    c,
    rows,
    steps,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ v φ(k)ᵀ (BE, BD), Σ φ(k) (BD,), their reference, and the logarithm of the largest key.

    CAREFUL: references rise with the keys; otherwise c is one for all of them.
    """
    b_kv = tl.zeros((BE, BD), tl.float32)
    b_z = tl.zeros((C, BD), tl.float32)  # added up at the end, over the chunks' rows
    b_top = tl.full((C, BD), FLOOR, tl.float32)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, WHOLE)
        b_v = load_rows(p_v, STRIDE_V, rows, E, C, BE, WHOLE)
        if SCALED:
            b_size = key_sizes(b_k, rows, D, C, BD, WHOLE)
            b_top = tl.maximum(b_top, b_size)
            if CAREFUL:
                c_last = tl.maximum(c, reference(tl.max(tl.max(b_size, 1))))
                decay = exp2(c - c_last)
                b_kv *= decay
                b_z *= decay
                c = c_last
        b_f = key_features(b_k, tl.zeros((C,), tl.float32) + c, rows, D, C, BD, MAP, WHOLE)
        b_z += b_f
        b_kv = tl.dot(tl.trans(b_v), b_f.to(tl.bfloat16), b_kv)
        p_k += C * STRIDE_K
        p_v += C * STRIDE_V
        rows -= C
    return b_kv, tl.sum(b_z, 0), c, tl.max(tl.max(b_top, 1))


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def walking_forward_sums_kernel(
    p_k,
    p_v,
    p_lengths,
    p_kv,
    p_z,
    p_sizes,
    T,
    segments,
    chunks,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
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
    """The sums of one segment's keys alone.

    p_sizes: (B, Hkv, segments, 4) the reference of the segment's first key, that of the sums, and the logarithm of the
    largest key.
    """
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_s = (pid // HKV) % segments
    i_b = (pid // HKV // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    rows = T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    first = tl.full((), FLOOR, tl.float32)
    if SCALED:
        one = tl.minimum(rows, 1)
        b_size = key_sizes(load_rows(p_k, STRIDE_K, one, D, C, BD, False), one, D, C, BD, False)
        first = reference(tl.max(tl.max(b_size, 1)))
    b_kv, b_z, c, top = _sum_segment(
        *(p_k, p_v, first, rows, steps, D, E, C, BD, BE, STRIDE_K, STRIDE_V, MAP, SCALED, WHOLE, False, STAGES)
    )
    if SCALED:
        if reference(top) > first + SLACK:
            nothing = tl.full((), FLOOR, tl.float32)
            b_kv, b_z, c, top = _sum_segment(
                *(p_k, p_v, nothing, rows, steps, D, E, C, BD, BE, STRIDE_K, STRIDE_V, MAP, SCALED, WHOLE, True, 1)
            )
    i_o = (i_b * HKV + i_h) * segments + i_s
    store_sums(p_kv, i_o, b_kv, BD, BE)
    tl.store(p_z + i_o * BD + tl.arange(0, BD), b_z)
    if SCALED:
        tl.store(p_sizes + i_o * 4, first)
        tl.store(p_sizes + i_o * 4 + 1, c)
        tl.store(p_sizes + i_o * 4 + 2, top)


@triton.jit(do_not_specialize=["segments"])
def walking_forward_scan_kernel(
    p_kv,
    p_z,
    p_sizes,
    p_start,
    p_shift,
    p_kv_out,
    p_shift_out,
    p_reference,
    segments,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    FEATURES: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The sums before each segment from the segments' own, in place; their references in p_reference."""
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * FEATURES + tl.arange(0, FEATURES), tl.arange(0, BE)
    m_m = i_m < D
    m_kv = (i_e < E)[:, None] & m_m[None, :]
    i_in = i_x * (D * (E + 1)) + i_m * (E + 1)
    b_kv = tl.zeros((BE, FEATURES), tl.float32)
    b_z = tl.zeros((FEATURES,), tl.float32)
    c, top = tl.full((), FLOOR, tl.float32), tl.full((), FLOOR, tl.float32)
    if p_start is not None:
        b_kv = tl.load(p_start + i_in[None, :] + i_e[:, None], mask=m_kv, other=0.0)
        b_z = tl.load(p_start + i_in + E, mask=m_m, other=0.0)
        top = tl.load(p_shift + i_x)
        if SCALED:
            c = reference(top)
            factor = tl.where(c <= FLOOR, 1.0, exp2(top * LOG2E - c))
            b_kv *= factor
            b_z *= factor
    i_tile = i_x * segments * (BD * BE) + i_e[:, None] * BD + i_m[None, :]
    p_row = p_z + i_x * segments * BD + i_m
    p_sizes += i_x * segments * 4
    p_reference += i_x * (segments + 1)
    for i_s in tl.range(segments, num_stages=4):
        b_more, b_more_z = tl.load(p_kv + i_tile + i_s * (BD * BE)), tl.load(p_row + i_s * BD)
        tl.store(p_kv + i_tile + i_s * (BD * BE), b_kv)
        tl.store(p_row + i_s * BD, b_z)
        decay, factor, c_last = 1.0, 1.0, c
        if SCALED:
            c_more, more = tl.load(p_sizes + i_s * 4 + 1), tl.load(p_sizes + i_s * 4 + 2)
            top = tl.maximum(top, more)
            c_last = tl.maximum(c, reference(more))
            decay, factor = exp2(c - c_last), exp2(c_more - c_last)
        b_kv = b_kv * decay + b_more * factor
        b_z = b_z * decay + b_more_z * factor
        if SCALED:
            if i_r == 0:
                tl.store(p_reference + i_s, c)
            c = c_last
    if SCALED:
        if i_r == 0:
            tl.store(p_reference + segments, c)
    if p_kv_out is not None:
        if SCALED:
            factor = tl.where(c <= FLOOR, 1.0, 1 / exp2(top * LOG2E - c))
            b_kv *= factor
            b_z *= factor
        if i_r == 0:
            tl.store(p_shift_out + i_x, top)
        tl.store(p_kv_out + i_in[None, :] + i_e[:, None], b_kv, mask=m_kv)
        tl.store(p_kv_out + i_in + E, b_z, mask=m_m)
