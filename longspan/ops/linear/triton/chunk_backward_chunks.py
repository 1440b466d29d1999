"""Causal linear attention, backward: the gradients of one chunk, from the sums on both sides; see `linear_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.tiles import (
    FLOOR,
    inverse,
    load_column,
    load_inputs,
    load_rows,
    load_tile,
    load_values,
    program_index,
    reload_rows,
    store_inputs,
    store_rows,
    store_values,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear.triton.chunk_device import (
    key_features,
    key_gradient,
    key_logits,
    load_weight,
    query_features,
    query_gradient,
    scales,
)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_backward_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_lengths,
    p_kv,
    p_z,
    p_prefix,
    p_prefix_z,
    p_d_kv,
    p_d_z,
    p_suffix,
    p_suffix_z,
    p_reference,
    p_beta,
    p_peak,
    p_den,
    p_d_out,
    p_d_den,
    p_d_q,
    p_d_k,
    p_d_v,
    T,
    segments,
    chunks,
    q_steps,
    k_steps,
    v_steps,
    d_steps,
    S: tl.constexpr,
):
    """d q (QUERIES), d k (KEYS) and d v (VALUES) of one chunk of one key head and its query heads.

    All at once reads each input once; one at a time needs fewer registers, and what others need is not computed.

    With TILES > 1 p_d_q, p_d_k: (TILES, B, T, ·, M) get a tile's part of the gradients of features.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    # For derivatives features are made a second time, unless they cost more than the registers that would hold them.
    AGAIN: tl.constexpr = S.MAP != "favor" and (S.MAP != "softmax" or S.BM > 64)
    i_kv, i_e, i_c, i_b = program_index(tl.cdiv(T, S.C), S.HKV, S.TILES)
    B = tl.num_programs(0) // (S.HKV * S.TILES) // tl.cdiv(T, S.C)
    i_0 = i_c * S.C
    i_x = i_b * S.HKV + i_kv
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q_steps, i_b, i_0, i_kv * GROUP)
    p_k = token_pointer(p_k, k_steps, i_b, i_0, i_kv)
    p_v = token_pointer(p_v, v_steps, i_b, i_0, i_kv, i_e * S.BE)
    p_d_out = token_pointer(p_d_out, d_steps, i_b, i_0, i_kv * GROUP, i_e * S.BE)
    i_row = i_b * T + i_0
    width: tl.constexpr = S.D if S.TILES == 1 else S.M
    i_part = (i_e * B + i_b) * T + i_0
    b_weight, b_low = load_weight(p_weight, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    i_s, i_p = i_x * segments + i_c // chunks, i_x * tl.cdiv(T, S.C) + i_c
    b_k = load_inputs(p_k, k_steps.t, rows, S)
    b_v = load_values(p_v, v_steps.t, rows, S, i_e).to(S.DOT)
    b_beta, b_reference, c, c_last, old, new, after = scales(
        p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S
    )
    b_z = zeros(S.BM)
    if S.NORMALIZE:
        if i_e == 0:
            b_z = tl.load(p_z + i_s * S.BM + i_m) * old + tl.load(p_prefix_z + i_p * S.BM + i_m) * new

    b_f = key_features(key_logits(b_k, b_weight, b_low, S), b_beta, S).to(S.DOT)
    b_d_f = zeros(S.C, S.BM)
    b_d_v = zeros(S.C, S.BE)
    m_seen = (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]
    for g in range(GROUP):
        b_q = load_inputs(p_q + g * q_steps.h, q_steps.t, left, S)
        b_d = load_values(p_d_out + g * d_steps.h, d_steps.t, left, S, i_e).to(S.DOT)
        b_factor = tl.full((S.C,), 1.0, tl.float32)
        b_d_den = zeros(S.C)
        if S.NORMALIZE:
            i_g = i_row * S.H + i_kv * GROUP + g
            b_factor = inverse(load_column(p_den + i_g, S.H, left, S.C, 0.0))
            if i_e == 0:
                b_d_den = load_column(p_d_den + i_g, S.H, left, S.C, 0.0)
        b_query = query_features(b_q, b_weight, b_low, S).to(S.DOT)
        b_p = tl.dot(b_query, tl.trans(b_f), input_precision=S.PRECISION)
        b_d_p = tl.dot(b_d, tl.trans(b_v), input_precision=S.PRECISION)
        b_kv = load_tile(p_kv + i_e * S.BE, i_s, S)
        b_more = load_tile(p_prefix + i_e * S.BE, i_p, S)
        if S.NORMALIZE:
            b_p *= b_factor[:, None]
            b_d_p = b_d_p * b_factor[:, None] + b_d_den[:, None]
        if S.SCALED:
            b_pair = exact_exp(tl.where(m_seen, b_beta[None, :] - b_reference[:, None], FLOOR))
            b_p *= b_pair
            b_d_p *= b_pair
        else:
            b_p = tl.where(m_seen, b_p, 0)
            b_d_p = tl.where(m_seen, b_d_p, 0)
        b_p, b_d_p = b_p.to(S.DOT), b_d_p.to(S.DOT)
        b_kv = (b_kv.to(tl.float32) * old + b_more.to(tl.float32) * new).to(S.DOT)
        b_d_query = tl.dot(b_d, tl.trans(b_kv), input_precision=S.PRECISION)
        if S.NORMALIZE:
            b_d_query = b_d_query * b_factor[:, None] + b_d_den[:, None] * b_z[None, :]
        if S.SCALED:
            b_d_query *= exact_exp(c - b_reference)[:, None]
        b_d_query = tl.dot(b_d_p, b_f, b_d_query, input_precision=S.PRECISION)
        i_o = (i_part * S.H + i_kv * GROUP + g) * width
        if S.QUERIES and S.TILES == 1:
            b_again = b_query.to(tl.float32)
            if AGAIN:
                b_q = reload_rows(p_q + g * q_steps.h, q_steps.t, left, S.D, S.C, S.BD)
                b_again = query_features(b_q, b_weight, b_low, S)
            b_d_query = query_gradient(b_d_query, b_q, b_again, b_weight, S)
            store_inputs(p_d_q + i_o, S.H * S.D, left, b_d_query, S)
        elif S.QUERIES:
            store_rows(p_d_q + i_o, S.H * S.M, left, b_d_query, S.M, S.C, S.BM)
        if S.VALUES:
            b_d_v = tl.dot(tl.trans(b_p), b_d, b_d_v, input_precision=S.PRECISION)
        if S.KEYS:
            b_d_f = tl.dot(tl.trans(b_d_p), b_query, b_d_f, input_precision=S.PRECISION)

    b_d_kv = load_tile(p_d_kv + i_e * S.BE, i_s, S)
    b_more = load_tile(p_suffix + i_e * S.BE, i_p, S)
    b_d_kv = (b_d_kv.to(tl.float32) * after + b_more.to(tl.float32)).to(S.DOT)
    b_end = (i_t < rows).to(tl.float32)
    if S.SCALED:
        b_end = exact_exp(b_beta - c_last)
    if S.VALUES:
        b_d_v = tl.dot((b_f * b_end[:, None]).to(S.DOT), b_d_kv, b_d_v, input_precision=S.PRECISION)
        store_values(p_d_v + (i_row * S.HKV + i_kv) * S.E + i_e * S.BE, S.HKV * S.E, left, b_d_v, S, i_e)
    b_d_f = tl.dot((b_v * b_end[:, None]).to(S.DOT), tl.trans(b_d_kv), b_d_f, input_precision=S.PRECISION)
    if S.NORMALIZE:
        if i_e == 0:
            b_d_z = tl.load(p_d_z + i_s * S.BM + i_m) * after + tl.load(p_suffix_z + i_p * S.BM + i_m)
            b_d_f += b_end[:, None] * b_d_z[None, :]
    i_o = (i_part * S.HKV + i_kv) * width
    if S.KEYS and S.TILES == 1:
        b_again = b_f.to(tl.float32)
        if AGAIN:
            b_k = reload_rows(p_k, k_steps.t, rows, S.D, S.C, S.BD)
            b_again = key_features(key_logits(b_k, b_weight, b_low, S), b_beta, S)
        b_d_f = key_gradient(b_d_f, b_k, b_again, b_weight, S)
        store_inputs(p_d_k + i_o, S.HKV * S.D, left, b_d_f, S)
    elif S.KEYS:
        store_rows(p_d_k + i_o, S.HKV * S.M, left, b_d_f, S.M, S.C, S.BM)


@triton.jit(do_not_specialize=["T"])
def causal_linear_backward_finish_kernel(p_part, p_x, p_weight, p_d_x, T, stride_part, steps, S: tl.constexpr):
    """d q or d k from the tiles' parts of the gradient of its features."""
    i_h, _, i_c, i_b = program_index(tl.cdiv(T, S.C), S.H, 1)
    i_0 = i_c * S.C
    left = T - i_0
    i_row = (i_b * T + i_0) * S.H + i_h
    b_weight, b_low = load_weight(p_weight, S)
    b_x = load_inputs(token_pointer(p_x, steps, i_b, i_0, i_h), steps.t, left, S)
    b_g = zeros(S.C, S.BM)
    for i_e in range(S.TILES):
        p_tile = p_part + i_e * stride_part + i_row * S.M
        b_g += load_rows(p_tile, S.H * S.M, left, S.M, S.C, S.BM)
    if S.KEYS:
        b_f = key_logits(b_x, b_weight, b_low, S)
        b_f = key_features(b_f, tl.max(b_f, 1), S)
        b_g = key_gradient(b_g, b_x, b_f, b_weight, S)
    else:
        b_f = query_features(b_x, b_weight, b_low, S)
        b_g = query_gradient(b_g, b_x, b_f, b_weight, S)
    store_inputs(p_d_x + i_row * S.D, S.H * S.D, left, b_g, S)
