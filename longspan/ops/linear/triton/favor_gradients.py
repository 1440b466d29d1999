"""Causal FAVOR+ backward: the gradients of one chunk from the sums on both sides; see `favor_backward`.

Those of queries need the sums before a chunk and those of keys the gradients of the sums after it: apart, they need
fewer registers, and only one of the two stacks of sums is in memory at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import exp2, widen
from longspan.ops.common.tiles import (
    load_inputs,
    load_values,
    reload_rows,
    store_inputs,
    store_values,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear.triton.favor_device import (
    features,
    find_chunk,
    find_sequence,
    load_half,
    load_sums,
    pairs,
    pairs_across,
    project_both,
    reference,
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
    q_steps,
    k_steps,
    v_steps,
    d_steps,
    S: tl.constexpr,
):
    """d q of one chunk of one query head, of those whose keys are among the sequences that have sums.

    p_delta: Δ, which takes over the rounding of `out`; from here on Δ of the very sums that `out` was read from, which
    is what makes φ(q)·dφ(q) zero.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_g, i_c, i_x, i_n, i_b, i_kv = find_sequence(first, sequences, GROUP, S)
    i_h, i_0 = i_kv * GROUP + i_g, i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q, p_k = token_pointer(p_q, q_steps, i_b, i_0, i_h), token_pointer(p_k, k_steps, i_b, i_0, i_kv)
    p_v, p_d_out = token_pointer(p_v, v_steps, i_b, i_0, i_kv), token_pointer(p_d_out, d_steps, i_b, i_0, i_h)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = find_chunk(i_c, i_x, i_n, T, segments, chunks, S)
    i_o = ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    c = reference(p_reference, i_c)
    old = exp2(reference(p_reference, i_c // chunks * chunks) - c)
    b_q = load_inputs(p_q, q_steps.t, left, S)
    b_k = load_inputs(p_k, k_steps.t, rows, S)
    b_v = load_values(p_v, v_steps.t, rows, S)
    b_d = load_values(p_d_out, d_steps.t, left, S)
    b_query_offset, b_delta = tl.load(p_query_offset + i_o), tl.load(p_delta + i_o)
    b_scale = tl.load(p_scale + i_p * S.C + i_t)
    b_offset = tl.load(p_offset + i_p * S.C + i_t) + b_scale
    b_reference = tl.maximum(tl.load(p_peak + i_p * S.C + i_t), c)
    b_row = exp2(c - b_reference)
    b_a = tl.dot(b_d, tl.trans(b_v)) - b_delta[:, None]
    b_a = (b_a * pairs(b_scale, b_reference, S)).to(tl.bfloat16)
    # Times powers of two: nothing is lost.
    b_d, b_delta = (b_d * b_row[:, None]).to(tl.bfloat16), -b_delta * b_row
    b_d_q = zeros(S.C, S.BD)
    b_rest = zeros(S.C)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_half(p_high, i_f, S)
        b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_f, S)
        b_f = features(b_f, b_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
        b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S)
        b_kv, b_z = load_sums(p_before, p_before_z, i_far, p_prefix, p_prefix_z, i_near, old, i_f, S)
        b_g = tl.dot(b_d, tl.trans(b_kv), b_delta[:, None] * b_z[None, :])
        b_g = tl.dot(b_a, b_f, b_g) * b_query
        b_rest += tl.sum(b_g, 1)
        b_d_q = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_q)
    tl.store(p_delta + i_o, tl.load(p_delta + i_o) + b_rest)
    i_row = (i_b * T + i_0) * S.H + i_h
    store_inputs(p_d_q + i_row * S.D, S.H * S.D, left, b_d_q * S.D**-0.25, S)


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
    q_steps,
    k_steps,
    v_steps,
    d_steps,
    S: tl.constexpr,
):
    """d k and d v of one chunk of one of the sequences that have sums; keys are rows, and queries columns."""
    GROUP: tl.constexpr = S.H // S.HKV
    _, i_c, i_x, i_n, i_b, i_kv = find_sequence(first, sequences, 1, S)
    i_0 = i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q, p_k = token_pointer(p_q, q_steps, i_b, i_0, i_kv * GROUP), token_pointer(p_k, k_steps, i_b, i_0, i_kv)
    p_v, p_d_out = token_pointer(p_v, v_steps, i_b, i_0, i_kv), token_pointer(p_d_out, d_steps, i_b, i_0, i_kv * GROUP)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = find_chunk(i_c, i_x, i_n, T, segments, chunks, S)
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    c, c_last = reference(p_reference, i_c), reference(p_reference, i_c + 1)
    i_end = tl.minimum((i_c // chunks + 1) * chunks, tl.cdiv(T, S.C))
    new = exp2(c_last - reference(p_reference, i_end))
    b_k = load_inputs(p_k, k_steps.t, rows, S)
    b_v = load_values(p_v, v_steps.t, rows, S)
    b_scale = tl.load(p_scale + i_p * S.C + i_t)
    b_offset = tl.load(p_offset + i_p * S.C + i_t) + b_scale
    b_end = exp2(b_scale - c_last)
    b_v_end = (b_v * b_end[:, None]).to(tl.bfloat16)  # times powers of two: nothing is lost
    b_reference = tl.maximum(tl.load(p_peak + i_p * S.C + i_t), c)
    b_d_k = zeros(S.C, S.BD)
    b_d_v = zeros(S.C, S.BE)
    b_total = zeros(S.C)
    for g in range(GROUP):
        b_q = load_inputs(p_q + g * q_steps.h, q_steps.t, left, S)
        b_d = load_values(p_d_out + g * d_steps.h, d_steps.t, left, S)
        i_o = ((i_b * S.H + i_kv * GROUP + g) * tl.cdiv(T, S.C) + i_c) * S.C + i_t
        b_query_offset = tl.load(p_query_offset + i_o)
        b_a = tl.dot(b_v, tl.trans(b_d)) - tl.load(p_delta + i_o)[None, :]
        b_a = (b_a * pairs_across(b_scale, b_reference, S)).to(tl.bfloat16)
        b_p = zeros(S.C, S.C)
        for i_m in range(0, S.BM, S.TILE):
            i_f = i_m + tl.arange(0, S.TILE)
            b_high = load_half(p_high, i_f, S)
            b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_f, S)
            b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
            b_f = features(b_f, b_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
            b_p = tl.dot(b_f, tl.trans(b_query), b_p)
            b_g = zeros(S.C, S.TILE)
            if g == 0:
                b_d_kv, b_d_z = load_sums(p_after, p_after_z, i_far, p_suffix, p_suffix_z, i_near, new, i_f, S)
                b_g = tl.dot(b_v_end, tl.trans(b_d_kv), b_end[:, None] * b_d_z[None, :])
                b_d_v = tl.dot(b_f, b_d_kv, b_d_v)
            b_g = tl.dot(b_a, b_query, b_g) * widen(b_f)
            b_total += tl.sum(b_g, 1)
            b_d_k = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_k)
        if g == 0:
            b_d_v *= b_end[:, None]
        # Both loaded again, which is cheaper than to hold them for so long.
        b_d = reload_rows(p_d_out + g * d_steps.h, d_steps.t, left, S.E, S.C, S.BE)
        b_p *= pairs_across(tl.load(p_scale + i_p * S.C + i_t, eviction_policy="evict_first"), b_reference, S)
        b_d_v = tl.dot(b_p.to(tl.bfloat16), b_d, b_d_v)
    i_row = (i_b * T + i_0) * S.HKV + i_kv
    b_k = reload_rows(p_k, k_steps.t, rows, S.D, S.C, S.BD).to(tl.float32)
    b_d_k = b_d_k * S.D**-0.25 - b_k * (b_total * S.D**-0.5)[:, None]
    store_inputs(p_d_k + i_row * S.D, S.HKV * S.D, left, b_d_k, S)
    store_values(p_d_v + i_row * S.E, S.HKV * S.E, left, b_d_v, S)
