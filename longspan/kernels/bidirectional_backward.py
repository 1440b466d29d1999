"""Bidirectional linear attention, backward: one pass over queries, one that adds up, one pass over keys.

With normalised features p_im = φ(q_i)_m / den_i and Δ_i = Σ_m p_im (d out_i · kv_m), which is d out_i · out_i:

    queries: d φ(q_i)_m = (d out_i · kv_m − Δ_i z_m) / den_i,   d kv_m = Σ_i p_im d out_i,   d z_m = − Σ_i p_im Δ_i
    keys:    d φ(k_j)_m = v_j · d kv_m + d z_m,                 d v_j = φ(k_j)·d kv

Features lie across, (BM, C): of a token all are in hand at once, and their sums over tokens are sums of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.bidirectional_blocks import (
    find_stretch,
    half_norm,
    load_block,
    load_halves,
    load_projection,
    load_row_halves,
    plain_features,
    plain_gradient,
    power,
    project_across,
    query_scales,
    reciprocal,
    rows_to_take,
    store_block,
    store_halves,
    store_sums,
    stretches_of,
    times_halves,
    to_logits,
    visible_rows,
    widened,
)
from longspan.kernels.blocks import FLOOR, add_product, product


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
    stride_qb,
    stride_qt,
    stride_qh,
    stride_db,
    stride_dt,
    stride_dh,
    H: tl.constexpr,
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
    EXPONENTIAL: tl.constexpr,
    DIVIDE: tl.constexpr,
    FEATURE: tl.constexpr,
    PROJECTION: tl.constexpr,
    QUERIES: tl.constexpr,
    SUMS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one stretch of one head's queries d q and its part of d z (QUERIES), and its part of d kv (SUMS).

    Both at once where d kv is one tile; else d q goes through all tiles, and each tile of d kv is a program's.
    """
    pid = tl.program_id(0)
    i_h = pid % H
    i_e, i_s = 0, pid // H
    if not QUERIES:
        i_e, i_s = (pid // H) % TILES, pid // (H * TILES)
    i_n, i_b, i_0, rows = find_stretch(p_offsets, i_s, tokens, length, sequences)
    rows = rows_to_take(p_rest, rows, PROJECTION)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * HKV + i_h // (H // HKV)
    p_q += i_b * stride_qb + i_0 * stride_qt + i_h.to(tl.int64) * stride_qh
    p_d_out += i_b * stride_db + i_0 * stride_dt + i_h.to(tl.int64) * stride_dh + i_e * BE
    i_row = (i_b * tokens + i_0) * H + i_h
    b_weight, b_low = load_projection(p_weight, D, M, BD, BM, PROJECTION, DOT)
    b_z, b_c = query_scales(p_z, p_c, i_x, M, BM, EXPONENTIAL, FEATURE)
    if TILES == 1:
        b_kv, b_kv_low = load_halves(p_kv, i_x, BM, BE, BE, DOT)
    b_d_kv = tl.zeros((BM, BE), tl.float32)
    b_d_z = tl.zeros((BM,), tl.float32)
    i_t, i_m = tl.arange(0, C), tl.arange(0, BM)
    for _ in range(tl.cdiv(tl.minimum(rows, length), C)):
        m_t = i_t < rows
        b_q = load_block(p_q, stride_qt, m_t, D, C, BD, D == BD)
        b_d_out = load_block(p_d_out, stride_dt, m_t, E - i_e * BE, C, BE, E % BE == 0).to(DOT)
        b_x = project_across(b_q, b_weight, b_low, PROJECTION, DOT, PRECISION)
        if EXPONENTIAL:
            b_scale = tl.load(p_scale + i_row + i_t * H, mask=m_t, other=-FLOOR)
            b_p = power(to_logits(b_x, D, MAP, DOT) + b_c[:, None] - b_scale[None, :], DOT)
            if tl.float32 == DOT:
                # The rounding of one logarithm is in all of a query's features: more than float32 allows.
                b_p *= reciprocal(tl.sum(b_p * b_z[:, None], 0), DOT)[None, :]
        else:
            b_f = plain_features(b_x, MAP)
            if BM != M:
                b_f = tl.where((i_m < M)[:, None], b_f, 0)
            b_p = b_f
            if DIVIDE:
                b_scale = tl.load(p_scale + i_row + i_t * H, mask=m_t, other=0.0)
                b_p = b_f * b_scale[None, :]
        b_rounded = b_p.to(DOT)
        if SUMS:
            b_d_kv = add_product(b_rounded, b_d_out, b_d_kv, PRECISION)
        if QUERIES:
            b_g = tl.zeros((BM, C), tl.float32)
            for i in range(TILES):
                if TILES > 1:
                    b_kv, b_kv_low = load_halves(p_kv + i * BE, i_x, BM, BE, BE * TILES, DOT)
                    b_d_out = load_block(p_d_out + i * BE, stride_dt, m_t, E - i * BE, C, BE, E % BE == 0).to(DOT)
                b_g = times_halves(b_kv, b_kv_low, b_d_out, b_g, DOT, PRECISION)
            if DIVIDE:
                b_delta = tl.sum(b_p * b_g, 0)
                b_g -= b_z[:, None] * b_delta[None, :]
                if tl.float32 == DOT:
                    # What rounding left of the sum that is now 0, and of normalised features' sum beside 1.
                    b_rest = tl.sum(b_p * b_g, 0)
                    b_g -= b_z[:, None] * b_rest[None, :]
                    b_delta += b_rest
                # Rounded as in d kv: in the gradients of keys the two cancel.
                b_d_z -= tl.sum(widened(b_rounded, DOT) * b_delta[None, :], 1)
            if EXPONENTIAL:
                b_g *= b_p
                if MAP == "favor":
                    b_g = product(tl.trans(b_weight), b_g.to(DOT), PRECISION) * D**-0.25
            else:
                if DIVIDE:
                    b_g *= b_scale[None, :]
                b_g = plain_gradient(b_g, b_x, b_f, MAP)
            store_block(p_d_q + i_row * D, H * D, m_t, D, tl.trans(b_g), C, BD, D == BD)
        p_q += C * stride_qt
        p_d_out += C * stride_dt
        i_row += C * H
        rows -= C
    i_o = i_s.to(tl.int64) * H + i_h
    if SUMS:
        store_sums(p_d_kv + i_e * BE, i_o, b_d_kv, BM, BE, BE * TILES)
    if QUERIES and DIVIDE and not FEATURE:
        tl.store(p_d_z + i_o * BM + i_m, b_d_z)


@triton.jit(do_not_specialize=["tokens", "length"])
def bidirectional_backward_combine_kernel(
    p_part,
    p_part_z,
    p_offsets,
    p_kv,
    p_z,
    p_d_kv,
    p_d_z,
    tokens,
    length,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    DIVIDE: tl.constexpr,
    FEATURE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Some rows of d kv and d z of one key head and sequence, over its stretches of queries and its query heads."""
    GROUP: tl.constexpr = H // HKV
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // HKV, i_x % HKV
    i_m, i_e = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    first, number = stretches_of(p_offsets, i_n, tokens, length)
    i_first = first.to(tl.int64) * H + i_h * GROUP
    b_d_kv = tl.zeros((ROWS, BE), tl.float32)
    b_d_z = tl.zeros((ROWS,), tl.float32)
    for i in tl.range(number * GROUP, num_stages=3):
        i_part = (i_first + i // GROUP * H + i % GROUP) * BM + i_m
        b_d_kv += tl.load(p_part + i_part[:, None] * BE + i_e[None, :])
        if DIVIDE and not FEATURE:
            b_d_z += tl.load(p_part_z + i_part)
    if FEATURE:
        # kv is Σ φ(k) v / z already.
        b_kv = load_row_halves(p_kv, i_x * BM + i_m, BE, DOT)
        b_inverse = reciprocal(tl.load(p_z + i_x * BM + i_m), DOT)
        b_d_kv *= b_inverse[:, None]
        if tl.float32 == DOT:
            b_kv -= tl.load(p_kv + i_x * (BM * BE) + i_e)[None, :]  # from values too, see the next kernel
        b_d_z = -tl.sum(b_d_kv * b_kv, 1)
    store_halves(p_d_kv, i_x * BM + i_m, b_d_kv, BE, DOT)
    tl.store(p_d_z + i_x * BM + i_m, b_d_z)


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
    TILES: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    FEATURE: tl.constexpr,
    PROJECTION: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d k and d v of one stretch of one head's keys."""
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_s = pid // HKV
    i_n, i_b, i_0, rows = find_stretch(p_offsets, i_s, tokens, length, sequences)
    rows = rows_to_take(p_rest, rows, PROJECTION)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * HKV + i_h
    p_k += i_b * stride_kb + i_0 * stride_kt + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0 * stride_vt + i_h.to(tl.int64) * stride_vh
    i_row = (i_b * tokens + i_0) * HKV + i_h
    if p_mask is not None:
        p_mask += i_b * tokens + i_0
    b_weight, b_low = load_projection(p_weight, D, M, BD, BM, PROJECTION, DOT)
    i_t, i_m = tl.arange(0, C), tl.arange(0, BM)
    b_d_z = tl.load(p_d_z + i_x * BM + i_m)
    b_c = tl.load(p_c + i_x * BM + i_m)
    b_c = tl.where(b_c == FLOOR, 0, b_c)
    if TILES == 1:
        b_d_kv, b_d_kv_low = load_halves(p_d_kv, i_x, BM, BE, BE, DOT)
    for _ in range(tl.cdiv(tl.minimum(rows, length), C)):
        m_t = visible_rows(p_mask, rows, C)
        m_there = i_t < rows
        b_k = load_block(p_k, stride_kt, m_t, D, C, BD, D == BD)
        b_x = project_across(b_k, b_weight, b_low, PROJECTION, DOT, PRECISION)
        if EXPONENTIAL:
            b_f = to_logits(b_x, D, MAP, DOT) - b_c[:, None]
            if MAP == "favor":
                b_f -= half_norm(b_k, D, DOT)[None, :]
            b_f = power(tl.where(m_t[None, :], b_f, FLOOR), DOT)
        else:
            b_f = tl.where(m_t[None, :], plain_features(b_x, MAP), 0)
        b_rounded = b_f.to(DOT)
        b_g = tl.zeros((BM, C), tl.float32)
        for i in range(TILES):
            p_tile = p_d_v + i_row * E + i * BE
            b_v = load_block(p_v + i * BE, stride_vt, m_t, E - i * BE, C, BE, E % BE == 0).to(DOT)
            if TILES > 1:
                b_d_kv, b_d_kv_low = load_halves(p_d_kv + i * BE, i_x, BM, BE, BE * TILES, DOT)
            if FEATURE and tl.float32 == DOT:
                # Each feature's mean is subtracted from its values, and one mean from both first: of few keys they are
                # nearly alike, of one key the same, and float32 would keep what rounding left of either.
                b_v -= tl.load(p_kv + i_x * (BM * BE * TILES) + i * BE + tl.arange(0, BE))[None, :]
            b_g = times_halves(b_d_kv, b_d_kv_low, b_v, b_g, DOT, PRECISION)
            b_d_v = product(tl.trans(b_d_kv), b_rounded, PRECISION)
            store_block(p_tile, HKV * E, m_there, E - i * BE, tl.trans(b_d_v), C, BE, E % BE == 0)
        b_g += b_d_z[:, None]
        if EXPONENTIAL:
            b_g *= b_f
            if MAP == "favor":
                b_total = tl.sum(b_g, 0) * D**-0.5
                b_g = product(tl.trans(b_weight), b_g.to(DOT), PRECISION) * D**-0.25
                b_g -= tl.trans(b_k.to(tl.float32)) * b_total[None, :]
        else:
            b_g = tl.where(m_t[None, :], plain_gradient(b_g, b_x, b_f, MAP), 0)
        store_block(p_d_k + i_row * D, HKV * D, m_there, D, tl.trans(b_g), C, BD, D == BD)
        p_k += C * stride_kt
        p_v += C * stride_vt
        if p_mask is not None:
            p_mask += C
        i_row += C * HKV
        rows -= C
