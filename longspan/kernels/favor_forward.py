"""Causal FAVOR+ forward: sizes of queries and keys, sums before each chunk, then all chunks at once.

Features are made in tiles of a few at a time, so that a program holds little of them, and never reach memory. With n_j
the logarithm of key j's largest feature, rounded up, and r_i the largest n_j that query i has seen,

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) 2^(n_j − r_i) v_j,      f_j = φ(k_j) 2^(−n_j) ≤ 1,

so no power of two here is above 1, and r_i depends on the past alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR, inverse, load_rows, store_rows
from longspan.kernels.favor_blocks import (
    LOG2E,
    column,
    features,
    load_tile,
    pairs,
    power,
    project,
    project_across,
    project_both,
    reference,
    running_maximum,
    scaled_sum,
    store_tile,
)


@triton.jit
def favor_weight_kernel(
    p_weight, p_high, p_low, p_flag, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    """The projection (M, D) as the sum of two (BM, BD) of bfloat16, and the largest number in the second.

    That is 0 for projections as longspan draws them, and products with the second are then left out.
    """
    i_m, i_d = tl.arange(0, BM)[:, None], tl.arange(0, BD)[None, :]
    b_weight = tl.load(p_weight + i_m * D + i_d, mask=(i_m < M) & (i_d < D), other=0.0).to(tl.float32)
    b_high = b_weight.to(tl.bfloat16)
    b_low = (b_weight - b_high.to(tl.float32)).to(tl.bfloat16)
    tl.store(p_high + i_m * BD + i_d, b_high)
    tl.store(p_low + i_m * BD + i_d, b_low)
    tl.store(p_flag, tl.max(tl.abs(b_low.to(tl.float32))))


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def favor_sizes_kernel(
    p_x,
    p_high,
    p_low,
    p_flag,
    p_lengths,
    p_offset,
    p_scale,
    p_peak,
    p_largest,
    T,
    segments,
    chunks,
    stride_b,
    stride_t,
    stride_h,
    H: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    KEY: tl.constexpr,
):
    """What must be known of all features of a token before the first of them is made. All are (B, H, chunks, C).

    p_offset: of queries the logarithm of the largest feature; of keys ‖k‖²/2, and for hidden ones so much that nothing
    is left of their features. p_scale, p_peak: of keys the logarithm of the largest feature, rounded up, and the
    largest of those so far in the chunk; p_largest: (B, H, chunks) the chunk's, not rounded.
    """
    pid = tl.program_id(0)
    i_h = pid % H
    i_s = (pid // H) % segments
    i_b = (pid // H // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    rows = T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    i_t = tl.arange(0, C)
    i_c = (i_b * H + i_h) * tl.cdiv(T, C) + i_s * chunks
    p_x += i_b * stride_b + i_0.to(tl.int64) * stride_t + i_h.to(tl.int64) * stride_h
    b_high = load_tile(p_high, 0, 0, 0, BD, BM)
    flag = tl.load(p_flag)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, C))):
        b_x = load_rows(p_x, stride_t, rows, D, C, BD, D == BD)
        b_l = project(b_x, b_high, p_low, flag, 0, BD, BM)
        if BM != M:
            b_l = tl.where((tl.arange(0, BM) < M)[None, :], b_l, FLOOR)
        b_beta = tl.max(b_l, 1) * (D**-0.25 * LOG2E)
        i_o = i_c * C + i_t
        if KEY:
            b_x = b_x.to(tl.float32)
            b_half = tl.sum(b_x * b_x, 1) * (0.5 * D**-0.5 * LOG2E)
            b_beta = tl.where(i_t < rows, b_beta - b_half, FLOOR)
            b_scale = tl.ceil(b_beta)
            tl.store(p_offset + i_o, tl.where(i_t < rows, b_half, -2 * FLOOR))
            tl.store(p_scale + i_o, b_scale)
            tl.store(p_peak + i_o, running_maximum(b_scale))
            tl.store(p_largest + i_c, tl.max(b_beta))
        else:
            tl.store(p_offset + i_o, b_beta)
        p_x += C * stride_t
        i_c += 1
        rows -= C


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def favor_forward_sums_kernel(
    p_k,
    p_v,
    p_high,
    p_low,
    p_flag,
    p_lengths,
    p_offset,
    p_largest,
    p_shift,
    p_total,
    p_total_z,
    p_prefix,
    p_prefix_z,
    p_reference,
    T,
    segments,
    chunks,
    first,
    sequences,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Σ φ(k) vᵀ and Σ φ(k) of one segment and one tile of features, at the scale of the segment's end.

    Of all (B, Hkv) sequences only some, from the first on, are gone through, and only they have sums.
    p_prefix, p_prefix_z: (sequences, chunks, BM, ·) the segment's sums before each chunk, at the scale of that place.
    p_reference: (B, Hkv, chunks + 1) the references before each chunk and after the last, which are found here unless
    they are there already and p_largest is None.
    """
    pid = tl.program_id(0)
    TILES: tl.constexpr = BM // TILE
    i_m = pid % TILES * TILE
    i_s = pid // TILES // sequences
    i_x = first + pid // TILES % sequences
    i_b, i_h = (i_x // HKV).to(tl.int64), i_x % HKV
    i_x = i_x.to(tl.int64)
    i_n = i_x - first
    i_0 = i_s * chunks * C
    rows = T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    i_c = i_x * tl.cdiv(T, C)
    p_reference += i_x  # of which there is one more than of chunks
    if p_largest is None:
        c = tl.load(p_reference + i_c + i_s * chunks)
    else:
        c = tl.max(tl.full((256,), FLOOR, tl.float32))
        if p_shift is not None:
            c = tl.maximum(c, tl.load(p_shift + i_x) * LOG2E)
        for i in range(0, i_s * chunks, 256):
            i_earlier = i + tl.arange(0, 256)
            b_largest = tl.load(p_largest + i_c + i_earlier, mask=i_earlier < i_s * chunks, other=FLOOR)
            c = tl.maximum(c, tl.max(b_largest))
    i_c += i_s * chunks
    i_p = i_n * tl.cdiv(T, C) + i_s * chunks
    p_k += i_b * stride_kb + i_0.to(tl.int64) * stride_kt + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * stride_vt + i_h.to(tl.int64) * stride_vh
    i_t, i_f = tl.arange(0, C), i_m + tl.arange(0, TILE)
    flag = tl.load(p_flag)
    b_high = load_tile(p_high, 0, i_m, 0, BD, TILE)
    b_kv = tl.zeros((TILE, BE), tl.float32)
    b_z = tl.zeros((TILE,), tl.float32)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, C))):
        store_tile(p_prefix, i_p, i_m, b_kv, BM, BE, TILE)
        tl.store(p_prefix_z + i_p * BM + i_f, b_z)
        b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
        b_v = load_rows(p_v, stride_vt, rows, E, C, BE, E == BE)
        b_offset = tl.load(p_offset + i_c * C + i_t)
        if p_largest is None:
            c_last = tl.load(p_reference + i_c + 1)
        else:
            c_last = tl.maximum(c, tl.load(p_largest + i_c))
            if i_m == 0:
                tl.store(p_reference + i_c, c)
        decay = power(tl.ceil(c) - tl.ceil(c_last))
        b_f = project_across(b_k, b_high, p_low, flag, i_m, BD, TILE)
        b_f = features(b_f, (b_offset + tl.ceil(c_last))[None, :], (i_f < M)[:, None], D, M == BM)
        b_kv = tl.dot(b_f.to(tl.bfloat16), b_v, b_kv * decay)
        b_z = b_z * decay + tl.sum(b_f, 1)
        c = c_last
        p_k += C * stride_kt
        p_v += C * stride_vt
        i_c += 1
        i_p += 1
        rows -= C
    i_o = i_n * segments + i_s
    store_tile(p_total, i_o, i_m, b_kv, BM, BE, TILE)
    tl.store(p_total_z + i_o * BM + i_f, b_z)
    if p_largest is not None:
        if i_m == 0:
            tl.store(p_reference + i_c, c)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first"])
def favor_forward_scan_kernel(
    p_total,
    p_total_z,
    p_reference,
    p_start,
    p_kv_out,
    p_shift_out,
    p_before,
    T,
    segments,
    chunks,
    first,
    M: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sums before each segment, from the segments' own: kv in p_before, z in place."""
    i_n = tl.program_id(0).to(tl.int64)
    i_x = first + i_n
    i_r = tl.program_id(1)
    i_m, i_e = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    m_m = i_m < M
    m_kv = m_m[:, None] & (i_e < E)[None, :]
    i_in = (i_x * M + i_m) * (E + 1)
    p_reference += i_x * (tl.cdiv(T, C) + 1)
    c = tl.load(p_reference)
    b_kv = tl.zeros((ROWS, BE), tl.float32)
    b_z = tl.zeros((ROWS,), tl.float32)
    if p_start is not None:
        own = power(c - tl.ceil(c))
        b_kv = tl.load(p_start + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0) * own
        b_z = tl.load(p_start + i_in + E, mask=m_m, other=0.0) * own
    i_tile = i_n * segments * (BM * BE) + i_m[:, None] * BE + i_e[None, :]
    p_row = p_total_z + i_n * segments * BM + i_m
    for i_s in tl.range(segments, num_stages=4):
        b_more = tl.load(p_total + i_tile + i_s * (BM * BE))
        b_more_z = tl.load(p_row + i_s * BM)
        tl.store(p_before + i_tile + i_s * (BM * BE), b_kv.to(p_before.dtype.element_ty))
        tl.store(p_row + i_s * BM, b_z)
        c_last = tl.load(p_reference + tl.minimum((i_s + 1) * chunks, tl.cdiv(T, C)))
        decay = power(tl.ceil(c) - tl.ceil(c_last))
        b_kv = b_kv * decay + b_more
        b_z = b_z * decay + b_more_z
        c = c_last
    if p_kv_out is not None:
        own = power(tl.ceil(c) - c)
        if i_r == 0:
            tl.store(p_shift_out + i_x, tl.where(c <= FLOOR, FLOOR, c / LOG2E))
        tl.store(p_kv_out + i_in[:, None] + i_e[None, :], b_kv * own, mask=m_kv)
        tl.store(p_kv_out + i_in + E, b_z * own, mask=m_m)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def favor_forward_kernel(
    p_q,
    p_k,
    p_v,
    p_high,
    p_low,
    p_flag,
    p_lengths,
    p_query_offset,
    p_offset,
    p_scale,
    p_peak,
    p_reference,
    p_before,
    p_before_z,
    p_prefix,
    p_prefix_z,
    p_out,
    p_den,
    T,
    segments,
    chunks,
    first,
    sequences,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One chunk of one query head, of those whose keys are among the sequences that have sums."""
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_c = pid // GROUP // sequences
    i_x = first + pid // GROUP % sequences
    i_b, i_kv = (i_x // HKV).to(tl.int64), i_x % HKV
    i_h = i_kv * GROUP + pid % GROUP
    i_x = i_x.to(tl.int64)
    i_n = i_x - first
    i_0 = i_c * C
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * stride_qt + i_h.to(tl.int64) * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * stride_kt + i_kv.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * stride_vt + i_kv.to(tl.int64) * stride_vh
    i_t = tl.arange(0, C)
    i_s, i_p = i_n * segments + i_c // chunks, i_x * tl.cdiv(T, C) + i_c
    i_sums = i_n * tl.cdiv(T, C) + i_c
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, C) + 1)
    c = reference(p_reference, i_c)
    old = power(reference(p_reference, i_c // chunks * chunks) - c)
    b_q = load_rows(p_q, stride_qt, left, D, C, BD, D == BD)
    b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
    b_query_offset = tl.load(p_query_offset + ((i_b * H + i_h) * tl.cdiv(T, C) + i_c) * C + i_t)
    b_offset = tl.load(p_offset + i_p * C + i_t) + tl.load(p_scale + i_p * C + i_t)
    b_p = tl.zeros((C, C), tl.float32)
    b_out = tl.zeros((C, BE), tl.float32)
    b_den = tl.zeros((C, 8), tl.float32)
    for i_m in range(0, BM, TILE):
        b_high = load_tile(p_high, 0, i_m, 0, BD, TILE)
        b_old = load_tile(p_before, i_s, i_m, BM, BE, TILE)
        b_kv = scaled_sum(b_old, old, load_tile(p_prefix, i_sums, i_m, BM, BE, TILE))
        i_f = i_m + tl.arange(0, TILE)
        b_z = tl.load(p_before_z + i_s * BM + i_f) * old + tl.load(p_prefix_z + i_sums * BM + i_f)
        b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_m, BD, TILE)
        b_query = features(b_query, b_query_offset[:, None], (i_f < M)[None, :], D, M == BM).to(tl.bfloat16)
        b_f = features(b_f, b_offset[:, None], (i_f < M)[None, :], D, M == BM).to(tl.bfloat16)
        b_p = tl.dot(b_query, tl.trans(b_f), b_p)
        b_out = tl.dot(b_query, b_kv, b_out)
        b_den = tl.dot(b_query, column(b_z), b_den)
    b_reference = tl.maximum(tl.load(p_peak + i_p * C + i_t), c)
    b_p *= pairs(tl.load(p_scale + i_p * C + i_t), b_reference, C)
    b_row = power(c - b_reference)
    b_sum = tl.sum(b_den, 1) * b_row + tl.sum(b_p, 1)
    b_v = load_rows(p_v, stride_vt, rows, E, C, BE, E == BE)
    b_out = tl.dot(b_p.to(tl.bfloat16), b_v, b_out * b_row[:, None]) * inverse(b_sum)[:, None]
    i_row = (i_b * T + i_0) * H + i_h
    tl.store(p_den + i_row + i_t * H, b_sum, mask=i_t < left)
    store_rows(p_out + i_row * E, H * E, left, E, b_out, C, BE, E == BE)
