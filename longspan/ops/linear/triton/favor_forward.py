"""Causal FAVOR+ forward: sizes of queries and keys, sums before each chunk, then all chunks at once.

Features are made in tiles of a few at a time, so that a program holds little of them, and never reach memory. With n_j
the logarithm of key j's largest feature, rounded up, and r_i the largest n_j that query i has seen,

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) 2^(n_j − r_i) v_j,      f_j = φ(k_j) 2^(−n_j) ≤ 1,

so no power of two here is above 1, and r_i depends on the past alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E, exp2
from longspan.ops.common.tiles import (
    FLOOR,
    inverse,
    load_inputs,
    load_values,
    program_index,
    running_maximum,
    store_values,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear.triton.favor_device import (
    column,
    features,
    find_chunk,
    find_sequence,
    load_half,
    load_sums,
    pairs,
    project,
    project_across,
    project_both,
    reference,
    store_sums,
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
    steps,
    S: tl.constexpr,
):
    """What must be known of all features of a token before the first of them is made. All are (B, H, chunks, C).

    p_offset: of queries the logarithm of the largest feature; of keys ‖k‖²/2, and for hidden ones so much that nothing
    is left of their features. p_scale, p_peak: of keys the logarithm of the largest feature, rounded up, and the
    largest of those so far in the chunk; p_largest: (B, H, chunks) the chunk's, not rounded.
    """
    i_h, _, i_s, i_b = program_index(segments, S.H)
    i_0 = i_s * chunks * S.C
    rows = visible_length(p_lengths, i_b, T) - i_0
    i_t = tl.arange(0, S.C)
    i_c = (i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_s * chunks
    p_x = token_pointer(p_x, steps, i_b, i_0, i_h)
    b_high = load_half(p_high, tl.arange(0, S.BM), S)
    flag = tl.load(p_flag)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        b_x = load_inputs(p_x, steps.t, rows, S)
        b_l = project(b_x, b_high, p_low, flag, tl.arange(0, S.BM), S)
        if S.BM != S.M:
            b_l = tl.where((tl.arange(0, S.BM) < S.M)[None, :], b_l, FLOOR)
        b_beta = tl.max(b_l, 1) * (S.D**-0.25 * LOG2E)
        i_o = i_c * S.C + i_t
        if S.KEY:
            b_x = b_x.to(tl.float32)
            b_half = tl.sum(b_x * b_x, 1) * (0.5 * S.D**-0.5 * LOG2E)
            b_beta = tl.where(i_t < rows, b_beta - b_half, FLOOR)
            b_scale = tl.ceil(b_beta)
            tl.store(p_offset + i_o, tl.where(i_t < rows, b_half, -2 * FLOOR))
            tl.store(p_scale + i_o, b_scale)
            tl.store(p_peak + i_o, running_maximum(b_scale))
            tl.store(p_largest + i_c, tl.max(b_beta))
        else:
            tl.store(p_offset + i_o, b_beta)
        p_x += S.C * steps.t
        i_c += 1
        rows -= S.C


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
    k_steps,
    v_steps,
    S: tl.constexpr,
):
    """Σ φ(k) vᵀ and Σ φ(k) of one segment and one tile of features, at the scale of the segment's end.

    p_prefix, p_prefix_z: (sequences, chunks, BM, ·) the segment's sums before each chunk, at the scale of that place.
    p_reference: (B, Hkv, chunks + 1) the references before each chunk and after the last, which are found here unless
    they are there already and p_largest is None.
    """
    i_m, i_s, i_x, i_n, i_b, i_h = find_sequence(first, sequences, S.BM // S.TILE, S)
    i_m *= S.TILE
    i_0 = i_s * chunks * S.C
    rows = visible_length(p_lengths, i_b, T) - i_0
    i_c = i_x * tl.cdiv(T, S.C)
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
    i_p = i_n * tl.cdiv(T, S.C) + i_s * chunks
    p_k, p_v = token_pointer(p_k, k_steps, i_b, i_0, i_h), token_pointer(p_v, v_steps, i_b, i_0, i_h)
    i_t, i_f = tl.arange(0, S.C), i_m + tl.arange(0, S.TILE)
    flag = tl.load(p_flag)
    b_high = load_half(p_high, i_f, S)
    b_kv = zeros(S.TILE, S.BE)
    b_z = zeros(S.TILE)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        store_sums(p_prefix, p_prefix_z, i_p, i_f, b_kv, b_z, S)
        b_k = load_inputs(p_k, k_steps.t, rows, S)
        b_v = load_values(p_v, v_steps.t, rows, S)
        b_offset = tl.load(p_offset + i_c * S.C + i_t)
        if p_largest is None:
            c_last = tl.load(p_reference + i_c + 1)
        else:
            c_last = tl.maximum(c, tl.load(p_largest + i_c))
            if i_m == 0:
                tl.store(p_reference + i_c, c)
        decay = exp2(tl.ceil(c) - tl.ceil(c_last))
        b_f = project_across(b_k, b_high, p_low, flag, i_f, S)
        b_f = features(b_f, (b_offset + tl.ceil(c_last))[None, :], i_f[:, None], S)
        b_kv = tl.dot(b_f.to(tl.bfloat16), b_v, b_kv * decay)
        b_z = b_z * decay + tl.sum(b_f, 1)
        c = c_last
        p_k += S.C * k_steps.t
        p_v += S.C * v_steps.t
        i_c += 1
        i_p += 1
        rows -= S.C
    store_sums(p_total, p_total_z, i_n * segments + i_s, i_f, b_kv, b_z, S)
    if p_largest is not None:
        if i_m == 0:
            tl.store(p_reference + i_c, c)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first"])
def favor_scan_kernel(
    p_total, p_total_z, p_reference, p_first, p_last, p_shift_out, p_sums, T, segments, chunks, first, S: tl.constexpr
):
    """The sums before each segment, from the segments' own: kv in p_sums, z in place. BACK: as gradients of sums are
    summed up, those after each segment. p_first, p_last: (B, Hkv, M, E + 1) where the walk begins and ends.
    """
    i_n = tl.program_id(0).to(tl.int64)
    i_x = first + i_n
    i_r = tl.program_id(1)
    i_m, i_e = i_r * S.TILE + tl.arange(0, S.TILE), tl.arange(0, S.BE)
    m_m = i_m < S.M
    m_kv = m_m[:, None] & (i_e < S.E)[None, :]
    i_in = (i_x * S.M + i_m) * (S.E + 1)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    if S.BACK:
        c = tl.load(p_reference + tl.cdiv(T, S.C))
    else:
        c = tl.load(p_reference)
    b_kv = zeros(S.TILE, S.BE)
    b_z = zeros(S.TILE)
    if p_first is not None:
        own = _decay(c, tl.ceil(c), S)
        b_kv = tl.load(p_first + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0) * own
        b_z = tl.load(p_first + i_in + S.E, mask=m_m, other=0.0) * own
    i_tile = i_n * segments * (S.BM * S.BE) + i_m[:, None] * S.BE + i_e[None, :]
    p_row = p_total_z + i_n * segments * S.BM + i_m
    for i in tl.range(segments, num_stages=4):
        if S.BACK:
            i_s = segments - 1 - i
        else:
            i_s = i
        b_more = tl.load(p_total + i_tile + i_s * (S.BM * S.BE))
        b_more_z = tl.load(p_row + i_s * S.BM)
        tl.store(p_sums + i_tile + i_s * (S.BM * S.BE), b_kv.to(p_sums.dtype.element_ty))
        tl.store(p_row + i_s * S.BM, b_z)
        if S.BACK:
            c_next = tl.load(p_reference + i_s * chunks)
        else:
            c_next = tl.load(p_reference + tl.minimum((i_s + 1) * chunks, tl.cdiv(T, S.C)))
        decay = _decay(tl.ceil(c), tl.ceil(c_next), S)
        b_kv = b_kv * decay + b_more
        b_z = b_z * decay + b_more_z
        c = c_next
    if p_last is not None:
        own = _decay(tl.ceil(c), c, S)
        if p_shift_out is not None:
            if i_r == 0:
                tl.store(p_shift_out + i_x, tl.where(c <= FLOOR, FLOOR, c / LOG2E))
        tl.store(p_last + i_in[:, None] + i_e[None, :], b_kv * own, mask=m_kv)
        tl.store(p_last + i_in + S.E, b_z * own, mask=m_m)


@triton.jit
def _decay(c, c_next, S: tl.constexpr):
    """What sums are multiplied by from one reference to the next; gradients of them go the other way."""
    if S.BACK:
        c = c_next - c
    else:
        c -= c_next
    return exp2(c)


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
    q_steps,
    k_steps,
    v_steps,
    S: tl.constexpr,
):
    """One chunk of one query head, of those whose keys are among the sequences that have sums."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_g, i_c, i_x, i_n, i_b, i_kv = find_sequence(first, sequences, GROUP, S)
    i_h, i_0 = i_kv * GROUP + i_g, i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q_steps, i_b, i_0, i_h)
    p_k, p_v = token_pointer(p_k, k_steps, i_b, i_0, i_kv), token_pointer(p_v, v_steps, i_b, i_0, i_kv)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = find_chunk(i_c, i_x, i_n, T, segments, chunks, S)
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    c = reference(p_reference, i_c)
    old = exp2(reference(p_reference, i_c // chunks * chunks) - c)
    b_q = load_inputs(p_q, q_steps.t, left, S)
    b_k = load_inputs(p_k, k_steps.t, rows, S)
    b_query_offset = tl.load(p_query_offset + ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t)
    b_offset = tl.load(p_offset + i_p * S.C + i_t) + tl.load(p_scale + i_p * S.C + i_t)
    b_p = zeros(S.C, S.C)
    b_out = zeros(S.C, S.BE)
    b_den = zeros(S.C, 8)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_half(p_high, i_f, S)
        b_kv, b_z = load_sums(p_before, p_before_z, i_far, p_prefix, p_prefix_z, i_near, old, i_f, S)
        b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_f, S)
        b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
        b_f = features(b_f, b_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
        b_p = tl.dot(b_query, tl.trans(b_f), b_p)
        b_out = tl.dot(b_query, b_kv, b_out)
        b_den = tl.dot(b_query, column(b_z), b_den)
    b_reference = tl.maximum(tl.load(p_peak + i_p * S.C + i_t), c)
    b_p *= pairs(tl.load(p_scale + i_p * S.C + i_t), b_reference, S)
    b_row = exp2(c - b_reference)
    b_sum = tl.sum(b_den, 1) * b_row + tl.sum(b_p, 1)
    b_v = load_values(p_v, v_steps.t, rows, S)
    b_out = tl.dot(b_p.to(tl.bfloat16), b_v, b_out * b_row[:, None]) * inverse(b_sum)[:, None]
    i_row = (i_b * T + i_0) * S.H + i_h
    tl.store(p_den + i_row + i_t * S.H, b_sum, mask=i_t < left)
    store_values(p_out + i_row * S.E, S.H * S.E, left, b_out, S)
