"""Bidirectional linear attention, backward: one pass over queries, one that adds up, one pass over keys.

With normalized features p_im = φ(q_i)_m / den_i and Δ_i = Σ_m p_im (d out_i · kv_m), which is d out_i · out_i:

    queries: d φ(q_i)_m = (d out_i · kv_m − Δ_i z_m) / den_i,   d kv_m = Σ_i p_im d out_i,   d z_m = − Σ_i p_im Δ_i
    keys:    d φ(k_j)_m = v_j · d kv_m + d z_m,                 d v_j = φ(k_j)·d kv

Features lie across, (BM, C): of a token all are in hand at once, and their sums over tokens are sums of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.tiles import (
    FLOOR,
    add_product,
    load_block,
    product,
    store_block,
    store_tile,
    token_pointer,
    zeros,
)
from longspan.ops.linear.triton.bidirectional_device import (
    find_stretch,
    half_norm,
    load_halves,
    load_projection,
    load_row_halves,
    power,
    project_across,
    query_scales,
    reciprocal,
    store_halves,
    stretches_of,
    times_halves,
    to_logits,
    visible_rows,
    widened,
)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def bidirectional_backward_queries_kernel(
    p_weight,
    p_rest,
    p_q,
    p_d_out,
    p_offsets,
    p_kv,
    p_z,
    p_c,
    p_scale,
    p_d_q,
    p_d_kv,
    p_d_z,
    tokens,
    length,
    sequences,
    q,
    d_out,
    S: tl.constexpr,
):
    """Of one stretch of one head's queries d q and its part of d z (QUERIES), and its part of d kv (SUMS).

    Both at once where d kv is one tile; else d q goes through all tiles, and each tile of d kv is a program's.
    """
    PRECISION: tl.constexpr = S.PRECISION
    TILES: tl.constexpr = 1 if S.QUERIES else S.TILES
    found = find_stretch(p_offsets, p_rest, tokens, length, sequences, S.H, TILES, S)
    i_h, i_e, i_s, i_n, i_b, i_0, rows = found
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h // (S.H // S.HKV)
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    p_d_out = token_pointer(p_d_out, d_out, i_b, i_0, i_h, i_e * S.BE)
    i_row = (i_b * tokens + i_0) * S.H + i_h
    b_weight, b_low = load_projection(p_weight, S)
    b_z, b_c = query_scales(p_z, p_c, i_x, S)
    if S.TILES == 1:
        b_kv, b_kv_low = load_halves(p_kv, i_x, S)
    b_d_kv = zeros(S.BM, S.BE)
    b_d_z = zeros(S.BM)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = i_t < rows
        b_q = load_block(p_q, q.t, m_t, S.D, S.C, S.BD)
        b_d_out = load_block(p_d_out, d_out.t, m_t, S.E, S.C, S.BE, i_e).to(S.DOT)
        b_x = project_across(b_q, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_scale = tl.load(p_scale + i_row + i_t * S.H, mask=m_t, other=-FLOOR)
            b_p = power(to_logits(b_x, S) + b_c[:, None] - b_scale[None, :], S)
            if tl.float32 == S.DOT:
                # The rounding of one logarithm is in all of a query's features: more than float32 allows.
                b_p *= reciprocal(tl.sum(b_p * b_z[:, None], 0), S)[None, :]
        else:
            b_f = pointwise_features(b_x, S.MAP, False)
            if S.BM != S.M:
                b_f = tl.where((i_m < S.M)[:, None], b_f, 0)
            b_p = b_f
            if S.DIVIDE:
                b_scale = tl.load(p_scale + i_row + i_t * S.H, mask=m_t, other=0.0)
                b_p = b_f * b_scale[None, :]
        b_rounded = b_p.to(S.DOT)
        if S.SUMS:
            b_d_kv = add_product(b_rounded, b_d_out, b_d_kv, PRECISION)
        if S.QUERIES:
            b_g = zeros(S.BM, S.C)
            for i in range(S.TILES):
                if S.TILES > 1:
                    b_kv, b_kv_low = load_halves(p_kv + i * S.BE, i_x, S)
                    b_d_out = load_block(p_d_out + i * S.BE, d_out.t, m_t, S.E, S.C, S.BE, i).to(S.DOT)
                b_g = times_halves(b_kv, b_kv_low, b_d_out, b_g, S)
            if S.DIVIDE:
                b_delta = tl.sum(b_p * b_g, 0)
                b_g -= b_z[:, None] * b_delta[None, :]
                if tl.float32 == S.DOT:
                    # What rounding left of the sum that is now 0, and of normalized features' sum beside 1.
                    b_rest = tl.sum(b_p * b_g, 0)
                    b_g -= b_z[:, None] * b_rest[None, :]
                    b_delta += b_rest
                # Rounded as in d kv: in the gradients of keys the two cancel.
                b_d_z -= tl.sum(widened(b_rounded, S) * b_delta[None, :], 1)
            if S.EXPONENTIAL:
                b_g *= b_p
                if S.MAP == "favor":
                    b_g = product(tl.trans(b_weight), b_g.to(S.DOT), PRECISION) * S.D**-0.25
            else:
                if S.DIVIDE:
                    b_g *= b_scale[None, :]
                b_g = pointwise_gradient(b_g, b_x, b_f, S.MAP)
            store_block(p_d_q + i_row * S.D, S.H * S.D, m_t, tl.trans(b_g), S.D, S.C, S.BD)
        p_q += S.C * q.t
        p_d_out += S.C * d_out.t
        i_row += S.C * S.H
        rows -= S.C
    i_o = i_s.to(tl.int64) * S.H + i_h
    if S.SUMS:
        store_tile(p_d_kv + i_e * S.BE, i_o, b_d_kv, S)
    if S.QUERIES and S.DIVIDE and not S.FEATURE:
        tl.store(p_d_z + i_o * S.BM + i_m, b_d_z)


@triton.jit(do_not_specialize=["tokens", "length"])
def bidirectional_backward_combine_kernel(
    p_part, p_part_z, p_offsets, p_kv, p_z, p_d_kv, p_d_z, tokens, length, S: tl.constexpr
):
    """Some rows of d kv and d z of one key head and sequence, over its stretches of queries and its query heads."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // S.HKV, i_x % S.HKV
    i_m, i_e = tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    first, number = stretches_of(p_offsets, i_n, tokens, length)
    i_first = first.to(tl.int64) * S.H + i_h * GROUP
    b_d_kv = zeros(S.C, S.BE)
    b_d_z = zeros(S.C)
    for i in tl.range(number * GROUP, num_stages=3):
        i_part = (i_first + i // GROUP * S.H + i % GROUP) * S.BM + i_m
        b_d_kv += tl.load(p_part + i_part[:, None] * S.BE + i_e[None, :])
        if S.DIVIDE and not S.FEATURE:
            b_d_z += tl.load(p_part_z + i_part)
    if S.FEATURE:
        # kv is Σ φ(k) v / z already.
        b_kv = load_row_halves(p_kv, i_x * S.BM + i_m, S)
        b_inverse = reciprocal(tl.load(p_z + i_x * S.BM + i_m), S)
        b_d_kv *= b_inverse[:, None]
        if tl.float32 == S.DOT:
            b_kv -= tl.load(p_kv + i_x * (S.BM * S.BE) + i_e)[None, :]  # from values too, see the next kernel
        b_d_z = -tl.sum(b_d_kv * b_kv, 1)
    store_halves(p_d_kv, i_x * S.BM + i_m, b_d_kv, S)
    tl.store(p_d_z + i_x * S.BM + i_m, b_d_z)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def bidirectional_backward_keys_kernel(
    p_weight,
    p_rest,
    p_k,
    p_v,
    p_mask,
    p_offsets,
    p_kv,
    p_c,
    p_d_kv,
    p_d_z,
    p_d_k,
    p_d_v,
    tokens,
    length,
    sequences,
    k,
    v,
    S: tl.constexpr,
):
    """d k and d v of one stretch of one head's keys."""
    PRECISION: tl.constexpr = S.PRECISION
    i_h, _, _, i_n, i_b, i_0, rows = find_stretch(p_offsets, p_rest, tokens, length, sequences, S.HKV, 1, S)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h
    p_k = token_pointer(p_k, k, i_b, i_0, i_h)
    p_v = token_pointer(p_v, v, i_b, i_0, i_h)
    i_row = (i_b * tokens + i_0) * S.HKV + i_h
    if p_mask is not None:
        p_mask += i_b * tokens + i_0
    b_weight, b_low = load_projection(p_weight, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    b_d_z = tl.load(p_d_z + i_x * S.BM + i_m)
    b_c = tl.load(p_c + i_x * S.BM + i_m)
    b_c = tl.where(b_c == FLOOR, 0, b_c)
    if S.TILES == 1:
        b_d_kv, b_d_kv_low = load_halves(p_d_kv, i_x, S)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = visible_rows(p_mask, rows, S)
        m_there = i_t < rows
        b_k = load_block(p_k, k.t, m_t, S.D, S.C, S.BD)
        b_x = project_across(b_k, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_f = to_logits(b_x, S) - b_c[:, None]
            if S.MAP == "favor":
                b_f -= half_norm(b_k, S)[None, :]
            b_f = power(tl.where(m_t[None, :], b_f, FLOOR), S)
        else:
            b_f = tl.where(m_t[None, :], pointwise_features(b_x, S.MAP, False), 0)
        b_rounded = b_f.to(S.DOT)
        b_g = zeros(S.BM, S.C)
        for i in range(S.TILES):
            p_tile = p_d_v + i_row * S.E + i * S.BE
            b_v = load_block(p_v + i * S.BE, v.t, m_t, S.E, S.C, S.BE, i).to(S.DOT)
            if S.TILES > 1:
                b_d_kv, b_d_kv_low = load_halves(p_d_kv + i * S.BE, i_x, S)
            if S.FEATURE and tl.float32 == S.DOT:
                # Each feature's mean is subtracted from its values, and one mean from both first: of few keys they are
                # nearly alike, of one key the same, and float32 would keep what rounding left of either.
                b_v -= tl.load(p_kv + i_x * (S.BM * S.BE * S.TILES) + i * S.BE + tl.arange(0, S.BE))[None, :]
            b_g = times_halves(b_d_kv, b_d_kv_low, b_v, b_g, S)
            b_d_v = product(tl.trans(b_d_kv), b_rounded, PRECISION)
            store_block(p_tile, S.HKV * S.E, m_there, tl.trans(b_d_v), S.E, S.C, S.BE, i)
        b_g += b_d_z[:, None]
        if S.EXPONENTIAL:
            b_g *= b_f
            if S.MAP == "favor":
                b_total = tl.sum(b_g, 0) * S.D**-0.5
                b_g = product(tl.trans(b_weight), b_g.to(S.DOT), PRECISION) * S.D**-0.25
                b_g -= tl.trans(b_k.to(tl.float32)) * b_total[None, :]
        else:
            b_g = tl.where(m_t[None, :], pointwise_gradient(b_g, b_x, b_f, S.MAP), 0)
        store_block(p_d_k + i_row * S.D, S.HKV * S.D, m_there, tl.trans(b_g), S.D, S.C, S.BD)
        p_k += S.C * k.t
        p_v += S.C * v.t
        if p_mask is not None:
            p_mask += S.C
        i_row += S.C * S.HKV
        rows -= S.C
