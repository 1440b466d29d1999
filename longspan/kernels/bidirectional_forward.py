"""Bidirectional linear attention, forward: sums over stretches of keys, one short pass that adds them up, a read-out.

sums:    kv_me = Σ_j φ(k_j)_m v_je,  z_m = Σ_j φ(k_j)_m,  both divided by exp(c_m), c_m the largest logit of feature m
combine: the stretches' sums at their common scale; normalised by feature, kv / z
read:    out_i = φ(q_i)·kv / φ(q_i)·z
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
    logarithm,
    plain_features,
    power,
    project,
    project_across,
    query_scales,
    reciprocal,
    rows_to_take,
    store_block,
    store_halves,
    store_sums,
    stretches_of,
    to_logits,
    visible_rows,
    widened,
)
from longspan.kernels.blocks import FLOOR, NOTHING, add_product, product


@triton.jit
def bidirectional_weight_kernel(
    p_weight, p_high, p_rest, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    """A weight (M, D) rounded to bfloat16, and the largest of what that leaves."""
    i_m, i_d = tl.arange(0, BM), tl.arange(0, BD)
    i_w, m_w = i_m[:, None] * D + i_d[None, :], (i_m < M)[:, None] & (i_d < D)[None, :]
    b_weight = tl.load(p_weight + i_w, mask=m_w, other=0.0).to(tl.float32)
    b_high = b_weight.to(tl.bfloat16)
    tl.store(p_high + i_w, b_high, mask=m_w)
    tl.store(p_rest, tl.max(tl.max(tl.abs(b_weight - b_high.to(tl.float32)), 1)))


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def bidirectional_sums_kernel(
    p_weight,
    p_rest,
    p_k,
    p_v,
    p_mask,
    p_offsets,
    p_kv,
    p_z,
    p_c,
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
    PROJECTION: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """kv, z and c of one stretch. Features lie across, (BM, C): a feature's maximum and sum are those of a row."""
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = pid // (HKV * TILES)
    i_n, i_b, i_0, rows = find_stretch(p_offsets, i_s, tokens, length, sequences)
    rows = rows_to_take(p_rest, rows, PROJECTION)
    if rows <= 0:
        return
    p_k += i_b * stride_kb + i_0 * stride_kt + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0 * stride_vt + i_h.to(tl.int64) * stride_vh + i_e * BE
    if p_mask is not None:
        p_mask += i_b * tokens + i_0
    b_weight, b_low = load_projection(p_weight, D, M, BD, BM, PROJECTION, DOT)
    b_kv = tl.zeros((BM, BE), tl.float32)
    b_z = tl.zeros((BM,), tl.float32)
    b_c = tl.full((BM,), FLOOR, tl.float32)
    for _ in range(tl.cdiv(tl.minimum(rows, length), C)):
        m_t = visible_rows(p_mask, rows, C)
        b_k = load_block(p_k, stride_kt, m_t, D, C, BD, D == BD)
        b_v = load_block(p_v, stride_vt, m_t, E - i_e * BE, C, BE, E % BE == 0).to(DOT)
        b_f = project_across(b_k, b_weight, b_low, PROJECTION, DOT, PRECISION)
        if EXPONENTIAL:
            b_f = to_logits(b_f, D, MAP, DOT)
            if MAP == "favor":
                b_f -= half_norm(b_k, D, DOT)[None, :]
            b_f = tl.where(m_t[None, :], b_f, FLOOR)
            b_new = tl.maximum(b_c, tl.max(b_f, 1))
            b_decay = power(b_c - b_new, DOT)
            b_kv *= b_decay[:, None]
            b_z *= b_decay
            b_c = b_new
            # Where no key was visible yet, c is FLOOR like the keys that are not.
            b_f = power(b_f - tl.where(b_c == FLOOR, 0, b_c)[:, None], DOT)
        else:
            b_f = tl.where(m_t[None, :], plain_features(b_f, MAP), 0)
        b_f = b_f.to(DOT)
        b_z += tl.sum(widened(b_f, DOT), 1)
        b_kv = add_product(b_f, b_v, b_kv, PRECISION)
        p_k += C * stride_kt
        p_v += C * stride_vt
        if p_mask is not None:
            p_mask += C
        rows -= C
    i_o = i_s.to(tl.int64) * HKV + i_h
    i_m = tl.arange(0, BM)
    store_sums(p_kv + i_e * BE, i_o, b_kv, BM, BE, BE * TILES)
    if i_e == 0:
        tl.store(p_z + i_o * BM + i_m, b_z)
        tl.store(p_c + i_o * BM + i_m, b_c)


@triton.jit(do_not_specialize=["tokens", "length"])
def bidirectional_combine_kernel(
    p_part,
    p_part_z,
    p_part_c,
    p_offsets,
    p_kv,
    p_z,
    p_c,
    tokens,
    length,
    HKV: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    FEATURE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Some rows of one head's sums over one sequence, from those of its stretches."""
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // HKV, i_x % HKV
    i_m, i_e = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    first, number = stretches_of(p_offsets, i_n, tokens, length)
    i_part = (first.to(tl.int64) * HKV + i_h) * BM + i_m
    b_c = tl.full((ROWS,), FLOOR, tl.float32)
    if EXPONENTIAL:
        i_more = i_part
        for _ in range(number):
            b_c = tl.maximum(b_c, tl.load(p_part_c + i_more))
            i_more += HKV * BM
    b_kv = tl.zeros((ROWS, BE), tl.float32)
    b_z = tl.zeros((ROWS,), tl.float32)
    for _ in tl.range(number, num_stages=3):
        b_more = tl.load(p_part + i_part[:, None] * BE + i_e[None, :])
        b_more_z = tl.load(p_part_z + i_part)
        if EXPONENTIAL:
            b_factor = power(tl.load(p_part_c + i_part) - b_c, DOT)
            b_more *= b_factor[:, None]
            b_more_z *= b_factor
        b_kv += b_more
        b_z += b_more_z
        i_part += HKV * BM
    if FEATURE:
        b_kv *= reciprocal(b_z, DOT)[:, None]
    store_halves(p_kv, i_x * BM + i_m, b_kv, BE, DOT)
    tl.store(p_z + i_x * BM + i_m, b_z)
    tl.store(p_c + i_x * BM + i_m, b_c)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def bidirectional_read_kernel(
    p_weight,
    p_rest,
    p_q,
    p_offsets,
    p_kv,
    p_z,
    p_c,
    p_out,
    p_scale,
    tokens,
    length,
    sequences,
    stride_qb,
    stride_qt,
    stride_qh,
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
    ACROSS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One stretch of one head's queries.

    p_scale: (B, T, H) what the backward pass makes normalised features with: the logarithm of an exponential's
    normaliser, of other maps its inverse. ACROSS: features lie (BM, C), so that many of them fit into registers.
    """
    TOKENS: tl.constexpr = 1 if ACROSS else 0
    FEATURES: tl.constexpr = 0 if ACROSS else 1
    pid = tl.program_id(0)
    i_h = pid % H
    i_e = (pid // H) % TILES
    i_s = pid // (H * TILES)
    i_n, i_b, i_0, rows = find_stretch(p_offsets, i_s, tokens, length, sequences)
    rows = rows_to_take(p_rest, rows, PROJECTION)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * HKV + i_h // (H // HKV)
    p_q += i_b * stride_qb + i_0 * stride_qt + i_h.to(tl.int64) * stride_qh
    i_row = (i_b * tokens + i_0) * H + i_h
    b_weight, b_low = load_projection(p_weight, D, M, BD, BM, PROJECTION, DOT)
    b_kv, _ = load_halves(p_kv + i_e * BE, i_x, BM, BE, BE * TILES, DOT)
    b_z, b_c = query_scales(p_z, p_c, i_x, M, BM, EXPONENTIAL, FEATURE)
    i_t, i_m = tl.arange(0, C), tl.arange(0, BM)
    for _ in range(tl.cdiv(tl.minimum(rows, length), C)):
        m_t = i_t < rows
        b_q = load_block(p_q, stride_qt, m_t, D, C, BD, D == BD)
        if ACROSS:
            b_f = project_across(b_q, b_weight, b_low, PROJECTION, DOT, PRECISION)
        else:
            b_f = project(b_q, b_weight, b_low, PROJECTION, DOT, PRECISION)
        if EXPONENTIAL:
            b_f = to_logits(b_f, D, MAP, DOT) + tl.expand_dims(b_c, TOKENS)
            b_top = tl.max(b_f, FEATURES)
            b_f = power(b_f - tl.expand_dims(b_top, FEATURES), DOT)
        else:
            b_f = plain_features(b_f, MAP)
            if BM != M:
                b_f = tl.where(tl.expand_dims(i_m < M, TOKENS), b_f, 0)
        if ACROSS:
            b_out = product(tl.trans(b_kv), b_f.to(DOT), PRECISION)
        else:
            b_out = product(b_f.to(DOT), b_kv, PRECISION)
        if DIVIDE:
            b_den = tl.sum(b_f * tl.expand_dims(b_z, TOKENS), FEATURES)
            b_inverse = reciprocal(b_den, DOT)
            b_out *= tl.expand_dims(b_inverse, FEATURES)
            if i_e == 0:
                b_scale = b_inverse
                if EXPONENTIAL:
                    m_none = b_den < NOTHING
                    b_scale = tl.where(m_none, -FLOOR, b_top + logarithm(tl.where(m_none, 1.0, b_den), DOT))
                tl.store(p_scale + i_row + i_t * H, b_scale, mask=m_t)
        if ACROSS:
            b_out = tl.trans(b_out)
        store_block(p_out + i_row * E + i_e * BE, H * E, m_t, E - i_e * BE, b_out, C, BE, E % BE == 0)
        p_q += C * stride_qt
        i_row += C * H
        rows -= C
