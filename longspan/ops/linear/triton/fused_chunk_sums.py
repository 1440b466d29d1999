"""Causal linear attention that walks segments, forward: the sums before each segment, and their references.

Sums are in units of 2 to their reference. Keys are mostly of like size: then one reference, the larger of that of all
before a segment and that of its first key, does for the whole segment, and no row of it needs a factor of its own. Only
where later keys are larger by more than SLACK allows do references rise within a segment, a row's being the largest it
sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E, exp2
from longspan.ops.common.tiles import FLOOR
from longspan.ops.linear.triton.fused_chunk_device import (
    SLACK,
    key_features,
    key_sizes,
    load_rows,
    load_state,
    reference,
    scanned,
    segment,
    steps_in,
    store_state,
    store_sums,
)


@triton.jit
def _sum_segment(p_k, p_v, c, rows, steps, S: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr):
    """Σ v φ(k)ᵀ (BE, BD), Σ φ(k) (BD,), their reference, and the logarithm of the largest key.

    CAREFUL: references rise with the keys; otherwise c is one for all of them.
    """
    BE: tl.constexpr = S.BE
    BD: tl.constexpr = S.BD
    C: tl.constexpr = S.C
    b_kv = tl.zeros((BE, BD), tl.float32)
    b_z = tl.zeros((C, BD), tl.float32)  # added up at the end, over the chunks' rows
    b_top = tl.full((S.C, S.BD), FLOOR, tl.float32)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S)
        if S.SCALED:
            b_size = key_sizes(b_k, rows, S)
            b_top = tl.maximum(b_top, b_size)
            if CAREFUL:
                c_last = tl.maximum(c, reference(tl.max(tl.max(b_size, 1))))
                decay = exp2(c - c_last)
                b_kv *= decay
                b_z *= decay
                c = c_last
        b_f = key_features(b_k, tl.zeros((C,), tl.float32) + c, rows, S)
        b_z += b_f
        b_kv = tl.dot(tl.trans(b_v), b_f.to(tl.bfloat16), b_kv)
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        rows -= S.C
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
    stride_k,
    stride_v,
    S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums of one segment's keys alone.

    p_sizes: (B, Hkv, segments, 4) the reference of the segment's first key, that of the sums, and the logarithm of the
    largest key.
    """
    i_b, i_h, _, i_s, _, i_0, _, rows = segment(p_lengths, T, segments, chunks, False, S)
    p_k += i_b * stride_k.b + i_0.to(tl.int64) * S.STRIDE_K + i_h.to(tl.int64) * stride_k.h
    p_v += i_b * stride_v.b + i_0.to(tl.int64) * S.STRIDE_V + i_h.to(tl.int64) * stride_v.h
    steps = steps_in(i_s, T, chunks, S)
    first = tl.full((), FLOOR, tl.float32)
    if S.SCALED:
        one = tl.minimum(rows, 1)
        b_size = key_sizes(load_rows(p_k, S.STRIDE_K, one, S.D, S.BD, S, True), one, S, True)
        first = reference(tl.max(tl.max(b_size, 1)))
    b_kv, b_z, c, top = _sum_segment(p_k, p_v, first, rows, steps, S, False, STAGES)
    if S.SCALED:
        if reference(top) > first + SLACK:
            nothing = tl.full((), FLOOR, tl.float32)
            b_kv, b_z, c, top = _sum_segment(p_k, p_v, nothing, rows, steps, S, True, 1)
    i_o = (i_b * S.HKV + i_h) * segments + i_s
    store_sums(p_kv, i_o, b_kv, S)
    tl.store(p_z + i_o * S.BD + tl.arange(0, S.BD), b_z)
    if S.SCALED:
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
    S: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """The sums before each segment from the segments' own, in place; their references in p_reference."""
    BE: tl.constexpr = S.BE
    i_x, i_m, i_in = scanned(S, FEATURES)
    b_kv = tl.zeros((BE, FEATURES), tl.float32)
    b_z = tl.zeros((FEATURES,), tl.float32)
    c, top = tl.full((), FLOOR, tl.float32), tl.full((), FLOOR, tl.float32)
    if p_start is not None:
        b_kv, b_z = load_state(p_start, i_in, i_m, S)
        top = tl.load(p_shift + i_x)
        if S.SCALED:
            c = reference(top)
            factor = tl.where(c <= FLOOR, 1.0, exp2(top * LOG2E - c))
            b_kv *= factor
            b_z *= factor
    i_tile = i_x * segments * (S.BD * S.BE) + tl.arange(0, S.BE)[:, None] * S.BD + i_m[None, :]
    p_row = p_z + i_x * segments * S.BD + i_m
    p_sizes += i_x * segments * 4
    p_reference += i_x * (segments + 1)
    for i_s in tl.range(segments, num_stages=4):
        b_more, b_more_z = tl.load(p_kv + i_tile + i_s * (S.BD * S.BE)), tl.load(p_row + i_s * S.BD)
        tl.store(p_kv + i_tile + i_s * (S.BD * S.BE), b_kv)
        tl.store(p_row + i_s * S.BD, b_z)
        decay, factor, c_last = 1.0, 1.0, c
        if S.SCALED:
            c_more, more = tl.load(p_sizes + i_s * 4 + 1), tl.load(p_sizes + i_s * 4 + 2)
            top = tl.maximum(top, more)
            c_last = tl.maximum(c, reference(more))
            decay, factor = exp2(c - c_last), exp2(c_more - c_last)
        b_kv = b_kv * decay + b_more * factor
        b_z = b_z * decay + b_more_z * factor
        if S.SCALED:
            if tl.program_id(1) == 0:
                tl.store(p_reference + i_s, c)
            c = c_last
    if S.SCALED:
        if tl.program_id(1) == 0:
            tl.store(p_reference + segments, c)
    if p_kv_out is not None:
        if S.SCALED:
            factor = tl.where(c <= FLOOR, 1.0, 1 / exp2(top * LOG2E - c))
            b_kv *= factor
            b_z *= factor
        if tl.program_id(1) == 0:
            tl.store(p_shift_out + i_x, top)
        store_state(p_kv_out, i_in, i_m, b_kv, b_z, S)
