"""Causal FAVOR+ backward: the gradients of one chunk from the sums on both sides; see `favor_backward`.

Those of queries need the sums before a chunk and those of keys the gradients of the sums after it: apart, they need
fewer registers, and only one of the two stacks of sums is in memory at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import load_rows, load_rows_again, store_rows
from longspan.kernels.favor_blocks import (
    features,
    load_tile,
    pairs,
    pairs_across,
    power,
    project_both,
    reference,
    scaled_sum,
    whole,
)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def favor_backward_queries_kernel(
    p_q,
    p_k,
    p_v,
    p_d_out,
    p_high,
    p_low,
    p_flag,
    p_lengths,
    p_query_offset,
    p_delta,
    p_offset,
    p_scale,
    p_peak,
    p_reference,
    p_before,
    p_before_z,
    p_prefix,
    p_prefix_z,
    p_d_q,
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
    stride_db,
    stride_dt,
    stride_dh,
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
    """d q of one chunk of one query head, of those whose keys are among the sequences that have sums.

    p_delta: Δ, which takes over the rounding of `out`; from here on Δ of the very sums that `out` was read from, which
    is what makes φ(q)·dφ(q) zero.
    """
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
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * stride_dt + i_h.to(tl.int64) * stride_dh
    i_t = tl.arange(0, C)
    i_s, i_p = i_n * segments + i_c // chunks, i_x * tl.cdiv(T, C) + i_c
    i_sums = i_n * tl.cdiv(T, C) + i_c
    i_o = ((i_b * H + i_h) * tl.cdiv(T, C) + i_c) * C + i_t
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, C) + 1)
    c = reference(p_reference, i_c)
    old = power(reference(p_reference, i_c // chunks * chunks) - c)
    b_q = load_rows(p_q, stride_qt, left, D, C, BD, D == BD)
    b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
    b_v = load_rows(p_v, stride_vt, rows, E, C, BE, E == BE)
    b_d = load_rows(p_d_out, stride_dt, left, E, C, BE, E == BE)
    b_query_offset, b_delta = tl.load(p_query_offset + i_o), tl.load(p_delta + i_o)
    b_scale = tl.load(p_scale + i_p * C + i_t)
    b_offset = tl.load(p_offset + i_p * C + i_t) + b_scale
    b_reference = tl.maximum(tl.load(p_peak + i_p * C + i_t), c)
    b_row = power(c - b_reference)
    b_a = tl.dot(b_d, tl.trans(b_v)) - b_delta[:, None]
    b_a = (b_a * pairs(b_scale, b_reference, C)).to(tl.bfloat16)
    # Times powers of two: nothing is lost.
    b_d, b_delta = (b_d * b_row[:, None]).to(tl.bfloat16), -b_delta * b_row
    b_d_q = tl.zeros((C, BD), tl.float32)
    b_rest = tl.zeros((C,), tl.float32)
    for i_m in range(0, BM, TILE):
        i_f = i_m + tl.arange(0, TILE)
        b_high = load_tile(p_high, 0, i_m, 0, BD, TILE)
        b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_m, BD, TILE)
        b_f = features(b_f, b_offset[:, None], (i_f < M)[None, :], D, M == BM).to(tl.bfloat16)
        b_query = features(b_query, b_query_offset[:, None], (i_f < M)[None, :], D, M == BM)
        b_old = load_tile(p_before, i_s, i_m, BM, BE, TILE)
        b_kv = scaled_sum(b_old, old, load_tile(p_prefix, i_sums, i_m, BM, BE, TILE))
        b_z = tl.load(p_before_z + i_s * BM + i_f) * old + tl.load(p_prefix_z + i_sums * BM + i_f)
        b_g = tl.dot(b_d, tl.trans(b_kv), b_delta[:, None] * b_z[None, :])
        b_g = tl.dot(b_a, b_f, b_g) * b_query
        b_rest += tl.sum(b_g, 1)
        b_d_q = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_q)
    tl.store(p_delta + i_o, tl.load(p_delta + i_o) + b_rest)
    i_row = (i_b * T + i_0) * H + i_h
    store_rows(p_d_q + i_row * D, H * D, left, D, b_d_q * D**-0.25, C, BD, D == BD)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def favor_backward_keys_kernel(
    p_q,
    p_k,
    p_v,
    p_d_out,
    p_high,
    p_low,
    p_flag,
    p_lengths,
    p_query_offset,
    p_delta,
    p_offset,
    p_scale,
    p_peak,
    p_reference,
    p_after,
    p_after_z,
    p_suffix,
    p_suffix_z,
    p_d_k,
    p_d_v,
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
    stride_db,
    stride_dt,
    stride_dh,
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
    """d k and d v of one chunk of one of the sequences that have sums; keys are rows, and queries columns."""
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_c = pid // sequences
    i_x = first + pid % sequences
    i_b, i_kv = (i_x // HKV).to(tl.int64), i_x % HKV
    i_x = i_x.to(tl.int64)
    i_n = i_x - first
    i_0 = i_c * C
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * stride_qt + i_kv.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * stride_kt + i_kv.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * stride_vt + i_kv.to(tl.int64) * stride_vh
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * stride_dt + i_kv.to(tl.int64) * GROUP * stride_dh
    i_t = tl.arange(0, C)
    i_s, i_p = i_n * segments + i_c // chunks, i_x * tl.cdiv(T, C) + i_c
    i_sums = i_n * tl.cdiv(T, C) + i_c
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, C) + 1)
    c, c_last = reference(p_reference, i_c), reference(p_reference, i_c + 1)
    i_end = tl.minimum((i_c // chunks + 1) * chunks, tl.cdiv(T, C))
    new = power(c_last - reference(p_reference, i_end))
    b_k = load_rows(p_k, stride_kt, rows, D, C, BD, D == BD)
    b_v = load_rows(p_v, stride_vt, rows, E, C, BE, E == BE)
    p_scale += i_p * C
    b_scale = tl.load(p_scale + i_t)
    b_offset = tl.load(p_offset + i_p * C + i_t) + b_scale
    b_end = power(b_scale - c_last)
    b_v_end = (b_v * b_end[:, None]).to(tl.bfloat16)  # times powers of two: nothing is lost
    b_reference = tl.maximum(tl.load(p_peak + i_p * C + i_t), c)
    b_d_k = tl.zeros((C, BD), tl.float32)
    b_d_v = tl.zeros((C, BE), tl.float32)
    b_total = tl.zeros((C,), tl.float32)
    for g in range(GROUP):
        b_q = load_rows(p_q + g * stride_qh, stride_qt, left, D, C, BD, D == BD)
        b_d = load_rows(p_d_out + g * stride_dh, stride_dt, left, E, C, BE, E == BE)
        i_o = ((i_b * H + i_kv * GROUP + g) * tl.cdiv(T, C) + i_c) * C + i_t
        b_query_offset = tl.load(p_query_offset + i_o)
        b_a = tl.dot(b_v, tl.trans(b_d)) - tl.load(p_delta + i_o)[None, :]
        b_a = (b_a * pairs_across(b_scale, b_reference, C)).to(tl.bfloat16)
        b_p = tl.zeros((C, C), tl.float32)
        for i_m in range(0, BM, TILE):
            i_f = i_m + tl.arange(0, TILE)
            b_high = load_tile(p_high, 0, i_m, 0, BD, TILE)
            b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_m, BD, TILE)
            b_query = features(b_query, b_query_offset[:, None], (i_f < M)[None, :], D, M == BM).to(tl.bfloat16)
            b_f = features(b_f, b_offset[:, None], (i_f < M)[None, :], D, M == BM).to(tl.bfloat16)
            b_p = tl.dot(b_f, tl.trans(b_query), b_p)
            b_g = tl.zeros((C, TILE), tl.float32)
            if g == 0:
                b_new = load_tile(p_after, i_s, i_m, BM, BE, TILE)
                b_d_kv = scaled_sum(b_new, new, load_tile(p_suffix, i_sums, i_m, BM, BE, TILE))
                b_d_z = tl.load(p_after_z + i_s * BM + i_f) * new + tl.load(p_suffix_z + i_sums * BM + i_f)
                b_g = tl.dot(b_v_end, tl.trans(b_d_kv), b_end[:, None] * b_d_z[None, :])
                b_d_v = tl.dot(b_f, b_d_kv, b_d_v)
            b_g = tl.dot(b_a, b_query, b_g) * whole(b_f)
            b_total += tl.sum(b_g, 1)
            b_d_k = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_k)
        if g == 0:
            b_d_v *= b_end[:, None]
        # Both loaded again, which is cheaper than to hold them for so long.
        b_d = load_rows_again(p_d_out + g * stride_dh, stride_dt, left, E, C, BE, E == BE)
        b_p *= pairs_across(tl.load(p_scale + i_t, eviction_policy="evict_first"), b_reference, C)
        b_d_v = tl.dot(b_p.to(tl.bfloat16), b_d, b_d_v)
    i_row = (i_b * T + i_0) * HKV + i_kv
    b_k = load_rows_again(p_k, stride_kt, rows, D, C, BD, D == BD).to(tl.float32)
    b_d_k = b_d_k * D**-0.25 - b_k * (b_total * D**-0.5)[:, None]
    store_rows(p_d_k + i_row * D, HKV * D, left, D, b_d_k, C, BD, D == BD)
    store_rows(p_d_v + i_row * E, HKV * E, left, E, b_d_v, C, BE, E == BE)
