"""Bidirectional linear attention, forward: sums over stretches of keys, one short pass that adds them up, a read-out.

sums:    kv_me = Σ_j φ(k_j)_m v_je,  z_m = Σ_j φ(k_j)_m,  both divided by exp(c_m), c_m the largest logit of feature m
combine: the stretches' sums at their common scale; normalized by feature, kv / z
read:    out_i = φ(q_i)·kv / φ(q_i)·z
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.feature_maps import pointwise_features
from longspan.ops.common.tiles import (
    FLOOR,
    ZERO_NORMALIZER,
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
    logarithm,
    power,
    project,
    project_across,
    query_scales,
    reciprocal,
    store_halves,
    stretches_of,
    to_logits,
    visible_rows,
    widened,
)


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
    p_weight, p_rest, p_k, p_v, p_mask, p_offsets, p_kv, p_z, p_c, tokens, length, sequences, k, v, S: tl.constexpr
):
    """kv, z and c of one stretch. Features lie across, (BM, C): a feature's maximum and sum are those of a row."""
    PRECISION: tl.constexpr = S.PRECISION
    found = find_stretch(p_offsets, p_rest, tokens, length, sequences, S.HKV, S.TILES, S)
    i_h, i_e, i_s, i_n, i_b, i_0, rows = found
    if rows <= 0:
        return
    p_k = token_pointer(p_k, k, i_b, i_0, i_h)
    p_v = token_pointer(p_v, v, i_b, i_0, i_h, i_e * S.BE)
    if p_mask is not None:
        p_mask += i_b * tokens + i_0
    b_weight, b_low = load_projection(p_weight, S)
    b_kv = zeros(S.BM, S.BE)
    b_z = zeros(S.BM)
    b_c = tl.full((S.BM,), FLOOR, tl.float32)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = visible_rows(p_mask, rows, S)
        b_k = load_block(p_k, k.t, m_t, S.D, S.C, S.BD)
        b_v = load_block(p_v, v.t, m_t, S.E, S.C, S.BE, i_e).to(S.DOT)
        b_f = project_across(b_k, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_f = to_logits(b_f, S)
            if S.MAP == "favor":
                b_f -= half_norm(b_k, S)[None, :]
            b_f = tl.where(m_t[None, :], b_f, FLOOR)
            b_new = tl.maximum(b_c, tl.max(b_f, 1))
            b_decay = power(b_c - b_new, S)
            b_kv *= b_decay[:, None]
            b_z *= b_decay
            b_c = b_new
            # Where no key was visible yet, c is FLOOR like the keys that are not.
            b_f = power(b_f - tl.where(b_c == FLOOR, 0, b_c)[:, None], S)
        else:
            b_f = tl.where(m_t[None, :], pointwise_features(b_f, S.MAP, False), 0)
        b_f = b_f.to(S.DOT)
        b_z += tl.sum(widened(b_f, S), 1)
        b_kv = add_product(b_f, b_v, b_kv, PRECISION)
        p_k += S.C * k.t
        p_v += S.C * v.t
        if p_mask is not None:
            p_mask += S.C
        rows -= S.C
    i_o = i_s.to(tl.int64) * S.HKV + i_h
    i_m = tl.arange(0, S.BM)
    store_tile(p_kv + i_e * S.BE, i_o, b_kv, S)
    if i_e == 0:
        tl.store(p_z + i_o * S.BM + i_m, b_z)
        tl.store(p_c + i_o * S.BM + i_m, b_c)


@triton.jit(do_not_specialize=["tokens", "length"])
def bidirectional_combine_kernel(
    p_part, p_part_z, p_part_c, p_offsets, p_kv, p_z, p_c, tokens, length, S: tl.constexpr
):
    """Some rows of one head's sums over one sequence, from those of its stretches."""
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // S.HKV, i_x % S.HKV
    i_m, i_e = tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    first, number = stretches_of(p_offsets, i_n, tokens, length)
    i_part = (first.to(tl.int64) * S.HKV + i_h) * S.BM + i_m
    b_c = tl.full((S.C,), FLOOR, tl.float32)
    if S.EXPONENTIAL:
        i_more = i_part
        for _ in range(number):
            b_c = tl.maximum(b_c, tl.load(p_part_c + i_more))
            i_more += S.HKV * S.BM
    b_kv = zeros(S.C, S.BE)
    b_z = zeros(S.C)
    for _ in tl.range(number, num_stages=3):
        b_more = tl.load(p_part + i_part[:, None] * S.BE + i_e[None, :])
        b_more_z = tl.load(p_part_z + i_part)
        if S.EXPONENTIAL:
            b_factor = power(tl.load(p_part_c + i_part) - b_c, S)
            b_more *= b_factor[:, None]
            b_more_z *= b_factor
        b_kv += b_more
        b_z += b_more_z
        i_part += S.HKV * S.BM
    if S.FEATURE:
        b_kv *= reciprocal(b_z, S)[:, None]
    store_halves(p_kv, i_x * S.BM + i_m, b_kv, S)
    tl.store(p_z + i_x * S.BM + i_m, b_z)
    tl.store(p_c + i_x * S.BM + i_m, b_c)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def bidirectional_read_kernel(
    p_weight, p_rest, p_q, p_offsets, p_kv, p_z, p_c, p_out, p_scale, tokens, length, sequences, q, S: tl.constexpr
):
    """One stretch of one head's queries.

    p_scale: (B, T, H) what the backward pass makes normalized features with: the logarithm of an exponential's
    normalizer, of other maps its inverse.
    """
    ACROSS: tl.constexpr = S.BM > 128  # Features lie (BM, C), so that many of them fit into registers.
    TOKENS: tl.constexpr = 1 if ACROSS else 0
    FEATURES: tl.constexpr = 0 if ACROSS else 1
    PRECISION: tl.constexpr = S.PRECISION
    found = find_stretch(p_offsets, p_rest, tokens, length, sequences, S.H, S.TILES, S)
    i_h, i_e, i_s, i_n, i_b, i_0, rows = found
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h // (S.H // S.HKV)
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    i_row = (i_b * tokens + i_0) * S.H + i_h
    b_weight, b_low = load_projection(p_weight, S)
    b_kv, _ = load_halves(p_kv + i_e * S.BE, i_x, S)
    b_z, b_c = query_scales(p_z, p_c, i_x, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = i_t < rows
        b_q = load_block(p_q, q.t, m_t, S.D, S.C, S.BD)
        if ACROSS:
            b_f = project_across(b_q, b_weight, b_low, S)
        else:
            b_f = project(b_q, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_f = to_logits(b_f, S) + tl.expand_dims(b_c, TOKENS)
            b_top = tl.max(b_f, FEATURES)
            b_f = power(b_f - tl.expand_dims(b_top, FEATURES), S)
        else:
            b_f = pointwise_features(b_f, S.MAP, False)
            if S.BM != S.M:
                b_f = tl.where(tl.expand_dims(i_m < S.M, TOKENS), b_f, 0)
        if ACROSS:
            b_out = product(tl.trans(b_kv), b_f.to(S.DOT), PRECISION)
        else:
            b_out = product(b_f.to(S.DOT), b_kv, PRECISION)
        if S.DIVIDE:
            b_den = tl.sum(b_f * tl.expand_dims(b_z, TOKENS), FEATURES)
            b_inverse = reciprocal(b_den, S)
            b_out *= tl.expand_dims(b_inverse, FEATURES)
            if i_e == 0:
                b_scale = b_inverse
                if S.EXPONENTIAL:
                    m_none = b_den < ZERO_NORMALIZER
                    b_scale = tl.where(m_none, -FLOOR, b_top + logarithm(tl.where(m_none, 1.0, b_den), S))
                tl.store(p_scale + i_row + i_t * S.H, b_scale, mask=m_t)
        if ACROSS:
            b_out = tl.trans(b_out)
        store_block(p_out + i_row * S.E + i_e * S.BE, S.H * S.E, m_t, b_out, S.E, S.C, S.BE, i_e)
        p_q += S.C * q.t
        i_row += S.C * S.H
        rows -= S.C
