"""Causal linear attention, forward: the sums before each segment, and the references that go with them.

Sums are in units of a reference. Keys are mostly of like size: then one reference, the larger of that of all before a
segment and that of its first key, does for the whole segment, and no row of it needs a factor of its own. Only where
later keys are larger by more than SLACK allows do references rise within a segment, a row's being the largest it sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    SLACK,
    key_features,
    key_logits,
    load_column,
    load_rows,
    load_weight,
    ratio,
    reference,
    relative,
    running_maximum,
    store_sums,
)


@triton.jit
def key_sizes(b_f, b_scale, rows, C: tl.constexpr, BM: tl.constexpr, GIVEN: tl.constexpr, WHOLE: tl.constexpr):
    """Logarithms of keys' sizes (C, BM), the largest of a row being that of its key; FLOOR where a key is hidden."""
    if GIVEN:
        b_f = tl.broadcast_to(b_scale[:, None], (C, BM))
    if not WHOLE:
        b_f = tl.where((tl.arange(0, C) < rows)[:, None], b_f, FLOOR)
    return b_f


@triton.jit
def _sum_segment(
    p_k,
    p_v,
    p_scale,
    b_weight,
    b_low,
    c,
    rows,
    steps,
    values,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_E: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ φ(k) vᵀ (BM, BE), Σ φ(k) (BM,), their reference, and the logarithm of the largest key.

    CAREFUL: references rise with the keys; otherwise c is one for all of them.
    """
    i_t = tl.arange(0, C)
    b_kv = tl.zeros((BM, BE), tl.float32)
    b_z = tl.zeros((C, BM), tl.float32)  # added up at the end, over the chunks' rows
    b_top = tl.full((C, BM), FLOOR, tl.float32)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, D == BD, WHOLE)
        b_v = load_rows(p_v, STRIDE_V, rows, values, C, BE, WHOLE_E, WHOLE).to(DOT)
        b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
        b_scale = tl.zeros((C,), tl.float32)
        if p_scale is not None:
            b_scale = load_column(p_scale, HKV, rows, C, 0.0, WHOLE).to(tl.float32)
            p_scale += C * HKV
        if SCALED:
            b_size = key_sizes(b_f, b_scale, rows, C, BM, p_scale is not None, WHOLE)
            b_top = tl.maximum(b_top, b_size)
            if CAREFUL:
                c_last = tl.maximum(c, reference(tl.max(tl.max(b_size, 1)), QUICK))
                decay = ratio(c - c_last, QUICK)
                b_kv *= decay
                b_z *= decay
                c = c_last
        b_f = key_features(b_f, b_scale, tl.zeros((C,), tl.float32) + c, M, BM, MAP, SCALED, QUICK)
        if not WHOLE:
            b_f = tl.where((i_t < rows)[:, None], b_f, 0)
        if NORMALISE:
            b_z += b_f
        b_kv = tl.dot(tl.trans(b_f.to(DOT)), b_v, b_kv, input_precision=PRECISION)
        p_k += C * STRIDE_K
        p_v += C * STRIDE_V
        rows -= C
    return b_kv, tl.sum(b_z, 0), c, tl.max(tl.max(b_top, 1))


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_forward_sums_kernel(
    p_k,
    p_v,
    p_weight,
    p_scale,
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
    M: tl.constexpr,
    E: tl.constexpr,
    TILES: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums of one segment's keys alone.

    p_sizes: (B, Hkv, segments, 4) the reference of the segment's first key, that of the sums, and the logarithm of the
    largest key.
    """
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = (pid // (HKV * TILES)) % segments
    i_b = (pid // (HKV * TILES) // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    rows = T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh + i_e * BE
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * HKV + i_h
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    values = E - i_e * BE
    nothing = tl.full((), FLOOR, tl.float32)
    first = nothing
    if SCALED:
        if p_scale is None:
            b_k = load_rows(p_k, STRIDE_K, tl.minimum(rows, 1), D, C, BD, D == BD, False)
            b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
            first = tl.max(tl.max(tl.where((tl.arange(0, C) == 0)[:, None], b_f, FLOOR), 1))
        else:
            first = tl.load(p_scale).to(tl.float32)
        first = reference(tl.where(rows > 0, first, FLOOR), QUICK)
    b_kv, b_z, c, top = _sum_segment(
        *(p_k, p_v, p_scale, b_weight, b_low, first if QUICK else nothing, rows, steps, values, HKV, D, M, C, BD, BM),
        *(BE, STRIDE_K, STRIDE_V, MAP, SCALED, NORMALISE, QUICK, WHOLE, E % BE == 0, not QUICK, STAGES, DOT, PRECISION),
    )
    if SCALED and QUICK:
        if reference(top, QUICK) > first + SLACK:
            b_kv, b_z, c, top = _sum_segment(
                *(p_k, p_v, p_scale, b_weight, b_low, nothing, rows, steps, values, HKV, D, M, C, BD, BM, BE, STRIDE_K),
                *(STRIDE_V, MAP, SCALED, NORMALISE, QUICK, WHOLE, E % BE == 0, True, 1, DOT, PRECISION),
            )
    i_o = (i_b * HKV + i_h) * segments + i_s
    store_sums(p_kv + i_e * BE, i_o, b_kv, BM, BE, BE * TILES)
    if i_e == 0:
        if NORMALISE:
            tl.store(p_z + i_o * BM + tl.arange(0, BM), b_z)
        if SCALED:
            tl.store(p_sizes + i_o * 4, first)
            tl.store(p_sizes + i_o * 4 + 1, c)
            tl.store(p_sizes + i_o * 4 + 2, top)


@triton.jit(do_not_specialize=["segments"])
def causal_linear_forward_scan_kernel(
    p_kv,
    p_z,
    p_sizes,
    p_start,
    p_shift,
    p_kv_out,
    p_shift_out,
    p_reference,
    segments,
    M: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
):
    """The sums before each segment from the segments' own, in place; their references in p_reference."""
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    columns = E + 1 if NORMALISE else E
    m_m = i_m < M
    m_kv = m_m[:, None] & (i_e < E)[None, :]
    i_in = i_x * (M * columns) + i_m * columns
    b_kv = tl.zeros((ROWS, BE), tl.float32)
    b_z = tl.zeros((ROWS,), tl.float32)
    c, top = tl.full((), FLOOR, tl.float32), tl.full((), FLOOR, tl.float32)
    if p_start is not None:
        b_kv = tl.load(p_start + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0)
        if NORMALISE:
            b_z = tl.load(p_start + i_in + E, mask=m_m, other=0.0)
        top = tl.load(p_shift + i_x)
        if SCALED:
            c = reference(top, QUICK)
            factor = tl.where(c <= FLOOR, 1.0, relative(top, c, QUICK))
            b_kv *= factor
            b_z *= factor
    i_tile = i_x * segments * (BM * BE) + i_m[:, None] * BE + i_e[None, :]
    p_row = p_z + i_x * segments * BM + i_m
    p_sizes += i_x * segments * 4
    p_reference += i_x * (segments + 1)
    for i_s in tl.range(segments, num_stages=4):
        b_more = tl.load(p_kv + i_tile + i_s * (BM * BE))
        tl.store(p_kv + i_tile + i_s * (BM * BE), b_kv)
        decay, factor, c_last = 1.0, 1.0, c
        if SCALED:
            c_more, more = tl.load(p_sizes + i_s * 4 + 1), tl.load(p_sizes + i_s * 4 + 2)
            top = tl.maximum(top, more)
            c_last = tl.maximum(c, reference(more, QUICK))
            decay, factor = ratio(c - c_last, QUICK), ratio(c_more - c_last, QUICK)
        b_kv = b_kv * decay + b_more * factor
        if NORMALISE:
            b_more_z = tl.load(p_row + i_s * BM)
            tl.store(p_row + i_s * BM, b_z)
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
            factor = tl.where(c <= FLOOR, 1.0, 1 / relative(top, c, QUICK))
            b_kv *= factor
            b_z *= factor
        if i_r == 0:
            tl.store(p_shift_out + i_x, top)
        tl.store(p_kv_out + i_in[:, None] + i_e[None, :], b_kv, mask=m_kv)
        if NORMALISE:
            tl.store(p_kv_out + i_in + E, b_z, mask=m_m)


@triton.jit
def walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED: tl.constexpr, QUICK: tl.constexpr):
    """The reference of the sums before a segment, the one that does for all of it, and 1 where none does, else 0."""
    c_before, c, chosen = 0.0, 0.0, 0
    if SCALED:
        i_o = i_x * segments + i_s
        c_before = tl.load(p_reference + i_x * (segments + 1) + i_s)
        c = tl.maximum(c_before, tl.load(p_sizes + i_o * 4))
        chosen = 1
        if QUICK:
            chosen = (reference(tl.load(p_sizes + i_o * 4 + 2), QUICK) > c + SLACK).to(tl.int32)
    return c_before, c, chosen


@triton.jit
def row_references(b_f, b_scale, rows, c, C: tl.constexpr, BM: tl.constexpr, GIVEN: tl.constexpr, QUICK: tl.constexpr):
    """Each key's reference and each row's, the largest that it sees; c: that of all before."""
    b_n = reference(tl.max(key_sizes(b_f, b_scale, rows, C, BM, GIVEN, False), 1), QUICK)
    return b_n, running_maximum(b_n, c)
