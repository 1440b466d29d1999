"""Causal linear attention, forward: sums before each chunk, then all chunks at once.

A segment is a stretch of chunks. One program walks it with the sums in registers and leaves behind what they were
before each chunk, counted from the segment's start; a short scan turns the segments' totals into the sums before each
segment. A chunk adds the two, reads them with its queries, and sees its own keys as masked products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.tiles import (
    FLOOR,
    inverse,
    load_column,
    load_inputs,
    load_tile,
    load_values,
    program_index,
    running_maximum,
    store_tile,
    store_values,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear.triton.chunk_device import (
    key_features,
    key_logits,
    load_state,
    load_weight,
    query_features,
    scales,
    store_state,
)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_forward_sums_kernel(
    p_k,
    p_v,
    p_weight,
    p_scale,
    p_lengths,
    p_kv,
    p_z,
    p_max,
    p_prefix,
    p_prefix_z,
    p_beta,
    p_peak,
    T,
    segments,
    chunks,
    k_steps,
    v_steps,
    S: tl.constexpr,
):
    """Σ φ(k) vᵀ, Σ φ(k) and max β of one segment, both sums divided by exp(max β).

    p_prefix, p_prefix_z: (B, Hkv, chunks, ·) the segment's sums before each chunk, at the scale of the largest β yet.
    p_beta, p_peak: (B, Hkv, T) each key's β and the largest so far in its segment.
    """
    i_h, i_e, i_s, i_b = program_index(segments, S.HKV, S.TILES)
    i_0 = i_s * chunks * S.C
    i_x = i_b * S.HKV + i_h
    rows = visible_length(p_lengths, i_b, T) - i_0
    p_k = token_pointer(p_k, k_steps, i_b, i_0, i_h)
    p_v = token_pointer(p_v, v_steps, i_b, i_0, i_h, i_e * S.BE)
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * S.HKV + i_h
    b_weight, b_low = load_weight(p_weight, S)
    b_kv = zeros(S.BM, S.BE)
    b_z = zeros(S.BM)
    c = tl.max(tl.full((S.C,), FLOOR, tl.float32))
    i_t = tl.arange(0, S.C)
    p_beta += i_x * T + i_0
    p_peak += i_x * T + i_0
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks
    p_prefix += i_e * S.BE
    left = T - i_0
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        store_tile(p_prefix, i_c, b_kv, S)
        if S.NORMALIZE:
            if i_e == 0:
                tl.store(p_prefix_z + i_c * S.BM + tl.arange(0, S.BM), b_z)
        b_k = load_inputs(p_k, k_steps.t, rows, S)
        b_v = load_values(p_v, v_steps.t, rows, S, i_e).to(S.DOT)
        b_f = key_logits(b_k, b_weight, b_low, S)
        b_beta = zeros(S.C)
        if S.SCALED:
            if p_scale is None:
                b_beta = tl.max(b_f, 1)
            else:
                b_beta = load_column(p_scale, S.HKV, rows, S.C, 0.0).to(tl.float32)
            b_beta = tl.where(i_t < rows, b_beta, FLOOR)
            b_peak = running_maximum(b_beta, c)
            if i_e == 0:
                tl.store(p_beta + i_t, b_beta, mask=i_t < left)
                tl.store(p_peak + i_t, b_peak, mask=i_t < left)
            c_last = tl.max(b_peak)
            decay = exact_exp(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
            if p_scale is None and tl.bfloat16 == S.DOT:
                # One exponential a number, at the scale of the sums; none is left of a hidden key.
                b_f = key_features(b_f, tl.where(i_t < rows, c, -FLOOR), S)
            else:
                b_f = key_features(b_f, b_beta, S) * exact_exp(b_beta - c)[:, None]
        else:
            b_f = key_features(b_f, b_beta, S)
            if S.NORMALIZE:
                b_f = tl.where((i_t < rows)[:, None], b_f, 0)  # elsewhere v is 0
        b_f = b_f.to(S.DOT)
        b_kv = tl.dot(tl.trans(b_f), b_v, b_kv, input_precision=S.PRECISION)
        if S.NORMALIZE:
            b_z += tl.sum(b_f.to(tl.float32), 0)
        p_k += S.C * k_steps.t
        p_v += S.C * v_steps.t
        i_c += 1
        p_beta += S.C
        p_peak += S.C
        left -= S.C
        rows -= S.C
        if p_scale is not None:
            p_scale += S.C * S.HKV
    i_o = i_x * segments + i_s
    store_tile(p_kv + i_e * S.BE, i_o, b_kv, S)
    if i_e == 0:
        if S.NORMALIZE:
            tl.store(p_z + i_o * S.BM + tl.arange(0, S.BM), b_z)
        if S.SCALED:
            tl.store(p_max + i_o, c)


@triton.jit(do_not_specialize=["segments"])
def causal_linear_forward_scan_kernel(
    p_kv, p_z, p_max, p_start, p_shift, p_kv_out, p_shift_out, p_reference, p_before, segments, S: tl.constexpr
):
    """Sums before each segment from the segments' own: kv in p_before, z in place, log scales in p_reference."""
    SIZE: tl.constexpr = S.BM * S.BE
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    b_kv, b_z = load_state(p_start, i_x, i_m, S)
    c = tl.full((), FLOOR, tl.float32)
    if p_start is not None:
        c = tl.load(p_shift + i_x)
    i_tile = i_x * segments * SIZE + i_m[:, None] * S.BE + i_e[None, :]
    p_row = p_z + i_x * segments * S.BM + i_m
    p_max += i_x * segments
    p_reference += i_x * (segments + 1)
    for i_s in tl.range(segments, num_stages=4):
        b_more = tl.load(p_kv + i_tile + i_s * SIZE)
        tl.store(p_before + i_tile + i_s * SIZE, b_kv.to(p_before.dtype.element_ty))
        factor = 1.0
        if S.SCALED:
            c_more = tl.load(p_max + i_s)
            c_last = tl.maximum(c, c_more)
            factor = exact_exp(c_more - c_last)
            b_kv *= exact_exp(c - c_last)
        b_kv += b_more * factor
        if S.NORMALIZE:
            b_more_z = tl.load(p_row + i_s * S.BM)
            tl.store(p_row + i_s * S.BM, b_z)
            if S.SCALED:
                b_z *= exact_exp(c - c_last)
            b_z += b_more_z * factor
        if S.SCALED:
            if i_r == 0:
                tl.store(p_reference + i_s, c)
            c = c_last
    if i_r == 0:
        tl.store(p_reference + segments, c)
        if p_kv_out is not None:
            tl.store(p_shift_out + i_x, c)
    store_state(p_kv_out, i_x, i_m, b_kv, b_z, S)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_forward_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_lengths,
    p_kv,
    p_z,
    p_prefix,
    p_prefix_z,
    p_reference,
    p_beta,
    p_peak,
    p_out,
    p_den,
    T,
    segments,
    chunks,
    q_steps,
    k_steps,
    v_steps,
    S: tl.constexpr,
):
    """One chunk of one query head."""
    i_h, i_e, i_c, i_b = program_index(tl.cdiv(T, S.C), S.H, S.TILES)
    i_kv = i_h // (S.H // S.HKV)
    i_0 = i_c * S.C
    i_x = i_b * S.HKV + i_kv
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q_steps, i_b, i_0, i_h)
    p_k = token_pointer(p_k, k_steps, i_b, i_0, i_kv)
    p_v = token_pointer(p_v, v_steps, i_b, i_0, i_kv, i_e * S.BE)
    b_weight, b_low = load_weight(p_weight, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    i_s, i_p = i_x * segments + i_c // chunks, i_x * tl.cdiv(T, S.C) + i_c
    b_q = load_inputs(p_q, q_steps.t, left, S)
    b_k = load_inputs(p_k, k_steps.t, rows, S)
    b_beta, b_reference, c, _, old, new, _ = scales(p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S)
    b_v = load_values(p_v, v_steps.t, rows, S, i_e).to(S.DOT)

    b_query = query_features(b_q, b_weight, b_low, S)
    b_den = zeros(S.C)
    if S.NORMALIZE:
        b_z = tl.load(p_z + i_s * S.BM + i_m) * old + tl.load(p_prefix_z + i_p * S.BM + i_m) * new
        b_den = tl.sum(b_query * b_z[None, :], 1)
    b_query = b_query.to(S.DOT)
    b_f = key_features(key_logits(b_k, b_weight, b_low, S), b_beta, S).to(S.DOT)
    b_p = tl.dot(b_query, tl.trans(b_f), input_precision=S.PRECISION)
    b_kv = load_tile(p_kv + i_e * S.BE, i_s, S)
    b_more = load_tile(p_prefix + i_e * S.BE, i_p, S)
    m_seen = (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]
    if S.SCALED:
        b_p *= exact_exp(tl.where(m_seen, b_beta[None, :] - b_reference[:, None], FLOOR))
    else:
        b_p = tl.where(m_seen, b_p, 0)
    if S.NORMALIZE:
        if S.SCALED:
            b_den *= exact_exp(c - b_reference)
        b_den += tl.sum(b_p, 1)
    b_p = b_p.to(S.DOT)
    b_kv = (b_kv.to(tl.float32) * old + b_more.to(tl.float32) * new).to(S.DOT)
    b_out = tl.dot(b_query, b_kv, input_precision=S.PRECISION)
    if S.SCALED:
        b_out *= exact_exp(c - b_reference)[:, None]
    b_out = tl.dot(b_p, b_v, b_out, input_precision=S.PRECISION)
    i_row = (i_b * T + i_0) * S.H + i_h
    if S.NORMALIZE:
        b_out *= inverse(b_den)[:, None]
        if i_e == 0:
            tl.store(p_den + i_row + i_t * S.H, b_den, mask=i_t < left)
    store_values(p_out + i_row * S.E + i_e * S.BE, S.H * S.E, left, b_out, S, i_e)
