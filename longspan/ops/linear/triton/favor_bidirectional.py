"""Bidirectional FAVOR+ in bfloat16 with any number of features, which are computed in tiles.

The passes are those of `bidirectional`, with c_m the largest logit of feature m over the keys. A tile of features has
its own programs where sums over tokens are computed. Where tokens read sums, a program goes through the tiles as an
attention kernel goes through keys: features are the keys, w_m and the sums kv_m their keys and values, and the largest
logit of a query is a running one.

Backward, Δ_i = d_i · out_i is computed from the result and what rounding took from it; the pass over queries adds
Σ_m p_im dφ(q_i)_m, which would be 0 without rounding, to the Δ that gradients of the sums are computed with.

An epsilon ε is added to the features of keys relative to C, the largest w·k of all keys and features, and to those of
queries relative to their own largest w·q. c_m is of w·k alone then. The sums are brought to the scale C; a query's
result is that of its exponentials plus ε times the sum of all rows, and ε Σ_m φ(q)_m times Σ_j v_j and the number of
keys. These are apart from the sums, whose differences between features would be lost beside them: the gradient of a
query is made of those differences alone where the epsilon is most of a feature.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, exp2, widen
from longspan.ops.common.launch import (
    Launch,
    Plan,
    Signature,
    Strides,
    Workspace,
    dense_rows,
    new_like,
    on_device,
)
from longspan.ops.common.tiles import (
    FLOOR,
    ZERO_NORMALIZER,
    inverse,
    load_block,
    padded,
    store_block,
    token_pointer,
    zeros,
)
from longspan.ops.linear import BidirectionalInputs, BidirectionalProblem, BidirectionalSaved
from longspan.ops.linear.triton.bidirectional import (
    BidirectionalSizes,
    block_index,
    blocks_of,
    dense_inputs,
    linear_bidirectional_backward_combine_kernel,
    linear_bidirectional_forward_combine_kernel,
    load_sum_rows,
    store_sums,
    visible_rows,
)
from longspan.ops.linear.triton.favor import (
    TILE,
    feature_block,
    linear_favor_forward_weight_kernel,
    load_projection,
    project,
    project_transposed,
)

# One kernel: tokens in a chunk, features in a tile at most, the approximate number of programs (0: one per chunk),
# warps, pipeline stages, and the register limit per thread.
TiledTiling = namedtuple("TiledTiling", "chunk tile programs warps stages registers", defaults=(None,))
TiledTilings = namedtuple("TiledTilings", "sums read queries d_sums keys")

# For head and value dimensions, padded, up to 64, 128 and 256.
TILINGS = {
    64: TiledTilings(
        sums=TiledTiling(64, 128, 264, 4, 3),
        read=TiledTiling(128, 64, 0, 8, 2),
        queries=TiledTiling(64, 64, 0, 4, 2),
        d_sums=TiledTiling(64, 128, 264, 4, 3),
        keys=TiledTiling(64, 64, 0, 4, 2),
    ),
    128: TiledTilings(
        sums=TiledTiling(64, 128, 264, 8, 3),
        read=TiledTiling(128, 64, 0, 8, 2),
        queries=TiledTiling(64, 64, 0, 4, 1),
        d_sums=TiledTiling(64, 128, 264, 8, 3),
        keys=TiledTiling(64, 64, 0, 4, 1),
    ),
    256: TiledTilings(
        sums=TiledTiling(64, 64, 132, 8, 2),
        read=TiledTiling(64, 64, 0, 8, 1),
        queries=TiledTiling(64, 64, 0, 8, 1),
        d_sums=TiledTiling(64, 64, 132, 8, 2),
        keys=TiledTiling(64, 64, 0, 8, 1),
    ),
}

# Compile-time constants, as in `BidirectionalSizes`; BM: all features, padded to whole tiles. TILE: features in a tile.
# EPSILON: added to the features; 0: none.
TiledSizes = namedtuple("TiledSizes", "H HKV D M E BD BM BE FEATURE EPSILON DOT C TILE", defaults=(tl.bfloat16, 0, 0))


@triton.jit
def logits(b_p, S: tl.constexpr):
    """Binary logarithms of features from projections; those of keys still contain ‖k‖²/2."""
    return b_p * (S.D**-0.25 * LOG2E)


@triton.jit
def half_norm(b_x, S: tl.constexpr):
    """‖x‖²/2 (C,), in units of ln 2."""
    b_x = b_x.to(tl.float32)
    return tl.sum(b_x * b_x, 1) * (0.5 * S.D**-0.5 * LOG2E)


@triton.jit
def load_scales(p_z, p_c, i_x, i_f, S: tl.constexpr):
    """Each feature's share of the normalizer, and what is added to its logits; FLOOR beyond M features."""
    m_f = i_f < S.M
    b_z, b_c = tl.where(m_f, 1.0, 0.0), tl.where(m_f, 0.0, FLOOR)
    if not S.FEATURE:
        b_z = tl.load(p_z + i_x * S.BM + i_f, mask=m_f, other=0.0)
        if S.EPSILON == 0:
            b_c = tl.load(p_c + i_x * S.BM + i_f, mask=m_f, other=FLOOR)
    return b_z, b_c


@triton.jit
def load_sums(p_x, i_x, i_f, S: tl.constexpr):
    """Rows i_f of matrix i_x of a stack of (BM, 2 BE): two bfloat16 blocks (TILE, BE) that add up to the sums."""
    p_x += i_x * (S.BM * 2 * S.BE) + i_f[:, None] * (2 * S.BE) + tl.arange(0, S.BE)[None, :]
    return tl.load(p_x), tl.load(p_x + S.BE)


@triton.jit
def load_values_sum(p_values, i_x, S: tl.constexpr):
    """ε Σ_j v_j (BE,) over the keys of a head, and ε times their number."""
    p_values += i_x * (S.BE + 1)
    return tl.load(p_values + tl.arange(0, S.BE)), tl.load(p_values + S.BE)


@triton.jit
def query_gradients(b_l, b_d, b_scale, b_delta, b_all, p_kv, p_z, p_c, i_x, i_f, S: tl.constexpr):
    """Normalized exponentials p (C, TILE) from logits, and dφ(q) den = d · kv − Δ z, plus `all` with an epsilon."""
    b_kv, b_kv_low = load_sums(p_kv, i_x, i_f, S)
    b_z, b_c = load_scales(p_z, p_c, i_x, i_f, S)
    b_g = tl.dot(b_d, tl.trans(b_kv), -b_delta[:, None] * b_z[None, :])
    b_g = tl.dot(b_d, tl.trans(b_kv_low), b_g)
    if S.EPSILON > 0:
        b_g = tl.where((i_f < S.M)[None, :], b_g + b_all[:, None], 0.0)
    return exp2(b_l + b_c[None, :] - b_scale[:, None]), b_g


@triton.jit
def store_part(p_kv, p_z, i_o, i_f, b_kv, b_z, S: tl.constexpr):
    """Store rows i_f of the sums of one block and head."""
    tl.store(p_kv + i_o * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :], b_kv)
    tl.store(p_z + i_o * S.BM + i_f, b_z)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_favor_bidirectional_forward_sums_kernel(
    p_high, p_low, p_flag, p_k, p_v, p_mask, p_offsets, p_kv, p_z, p_c, p_total,
    tokens, length, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """kv, z and c of one block and one tile of features. p_total: with an epsilon, Σ [v, 1] of each block."""
    found = block_index(p_offsets, None, tokens, length, sequences, S.HKV, S.BM // S.TILE, S)
    i_h, i_m, i_s, i_n, i_b, i_0, rows = found
    if rows <= 0:
        return
    p_k, p_v = token_pointer(p_k, k, i_b, i_0, i_h), token_pointer(p_v, v, i_b, i_0, i_h)
    if p_mask is not None:
        p_mask += i_b * tokens + i_0
    i_f = i_m * S.TILE + tl.arange(0, S.TILE)
    b_high, flag = load_projection(p_high, i_f, S), tl.load(p_flag)
    b_kv = zeros(S.TILE, S.BE)
    b_z = zeros(S.TILE)
    b_c = tl.full((S.TILE,), FLOOR, tl.float32)
    b_total = zeros(S.BE)
    count = 0.0
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = visible_rows(p_mask, rows, S)
        b_k = load_block(p_k, k.t, m_t, S.D, S.C, S.BD)
        b_v = load_block(p_v, v.t, m_t, S.E, S.C, S.BE)
        b_l = logits(project_transposed(b_k, b_high, p_low, flag, i_f, S), S)
        if S.EPSILON == 0:
            b_l -= half_norm(b_k, S)[None, :]
        b_l = tl.where(m_t[None, :], b_l, FLOOR)
        b_new = tl.maximum(b_c, tl.max(b_l, 1))
        if S.EPSILON > 0:
            b_l -= half_norm(b_k, S)[None, :]
            b_total += tl.sum(b_v.to(tl.float32), 0)
            count += tl.sum(m_t.to(tl.float32))
        b_decay = exp2(b_c - b_new)
        b_c = b_new
        # Before the first visible key c is FLOOR, like the logits of hidden keys.
        b_f = exp2(b_l - tl.where(b_c == FLOOR, 0, b_c)[:, None]).to(tl.bfloat16)
        b_z = b_z * b_decay + tl.sum(widen(b_f), 1)
        b_kv = tl.dot(b_f, b_v, b_kv * b_decay[:, None])
        p_k += S.C * k.t
        p_v += S.C * v.t
        if p_mask is not None:
            p_mask += S.C
        rows -= S.C
    i_o = i_s.to(tl.int64) * S.HKV + i_h
    store_part(p_kv, p_z, i_o, i_f, b_kv, b_z, S)
    tl.store(p_c + i_o * S.BM + i_f, b_c)
    if S.EPSILON > 0:
        if i_m == 0:
            tl.store(p_total + i_o * (S.BE + 1) + tl.arange(0, S.BE), b_total)
            tl.store(p_total + i_o * (S.BE + 1) + S.BE, count)


@triton.jit(do_not_specialize=["tokens", "length"])
def linear_favor_bidirectional_forward_epsilon_kernel(
    p_total, p_offsets, p_kv, p_z, p_c, p_top, p_values, tokens, length, S: tl.constexpr
):
    """Bring some rows of one head's sums to the scale C, and write C to p_top (sequences · Hkv).

    p_values: (sequences · Hkv, BE + 1) gets ε Σ_j v_j and ε times the number of keys.
    """
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // S.HKV, i_x % S.HKV
    i_m, i_e = tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    b_top = tl.full((S.TILE,), FLOOR, tl.float32)
    for i in range(0, S.BM, S.TILE):
        i_f = i + tl.arange(0, S.TILE)
        b_top = tl.maximum(b_top, tl.load(p_c + i_x * S.BM + i_f, mask=i_f < S.M, other=FLOOR))
    top = tl.max(b_top)
    b_total = zeros(S.BE)
    count = 0.0
    first, number = blocks_of(p_offsets, i_n, tokens, length)
    p_total += (first.to(tl.int64) * S.HKV + i_h) * (S.BE + 1)
    for _ in range(number):
        b_total += tl.load(p_total + i_e)
        count += tl.load(p_total + S.BE)
        p_total += S.HKV * (S.BE + 1)
    m_m = i_m < S.M
    b_factor = tl.where(m_m, exp2(tl.load(p_c + i_x * S.BM + i_m, mask=m_m, other=FLOOR) - top), 0.0)
    store_sums(p_kv, i_x * S.BM + i_m, load_sum_rows(p_kv, i_x * S.BM + i_m, S) * b_factor[:, None], S)
    p_z += i_x * S.BM + i_m
    tl.store(p_z, tl.load(p_z) * b_factor)
    if tl.program_id(1) == 0:
        tl.store(p_top + i_x, top)
        tl.store(p_values + i_x * (S.BE + 1) + i_e, S.EPSILON * b_total)
        tl.store(p_values + i_x * (S.BE + 1) + S.BE, S.EPSILON * count)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_favor_bidirectional_forward_kernel(
    p_high, p_low, p_flag, p_q, p_offsets, p_kv, p_z, p_c, p_values, p_out, p_residual, p_scale, p_floor,
    tokens, length, sequences, q, S: tl.constexpr
):  # fmt: skip
    """One chunk of one head's queries.

    p_residual: what rounding takes from `out`. p_scale: (B, T, H) the logarithm of each normalizer. p_floor: (B, T, H)
    the epsilon divided by it.
    """
    i_h, _, _, i_n, i_b, i_0, rows = block_index(p_offsets, None, tokens, length, sequences, S.H, 1, S)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h // (S.H // S.HKV)
    i_row = (i_b * tokens + i_0) * S.H + i_h
    i_t = tl.arange(0, S.C)
    m_t = i_t < rows
    b_q = load_block(token_pointer(p_q, q, i_b, i_0, i_h), q.t, m_t, S.D, S.C, S.BD)
    flag = tl.load(p_flag)
    b_top = tl.full((S.C,), 2 * FLOOR, tl.float32)
    b_den = zeros(S.C)
    b_out = zeros(S.C, S.BE)
    b_rows = zeros(S.BE)
    mass = 0.0
    b_mass = zeros(S.C)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_projection(p_high, i_f, S)
        b_kv, b_kv_low = load_sums(p_kv, i_x, i_f, S)
        b_z, b_c = load_scales(p_z, p_c, i_x, i_f, S)
        b_f = logits(project(b_q, b_high, p_low, flag, i_f, S), S) + b_c[None, :]
        b_new = tl.maximum(b_top, tl.max(b_f, 1))
        b_decay = exp2(b_top - b_new)
        b_top = b_new
        b_f = exp2(b_f - b_top[:, None])
        b_den = b_den * b_decay + tl.sum(b_f * b_z[None, :], 1)
        b_out = tl.dot(b_f.to(tl.bfloat16), b_kv, b_out * b_decay[:, None])
        if S.EPSILON > 0:
            b_out = tl.dot(b_f.to(tl.bfloat16), b_kv_low, b_out)
            b_rows += tl.sum(b_kv.to(tl.float32) + b_kv_low.to(tl.float32), 0)
            mass += tl.sum(b_z)
            b_mass = b_mass * b_decay + tl.sum(b_f, 1)
    if S.EPSILON > 0:
        b_half = half_norm(b_q, S)
        b_row = exp2(-b_half)
        b_top += b_half
        b_mass = b_mass * b_row + S.EPSILON * S.M
        b_values, count = load_values_sum(p_values, i_x, S)
        b_out = b_out * b_row[:, None] + S.EPSILON * b_rows[None, :] + b_mass[:, None] * b_values[None, :]
        b_den = b_den * b_row + S.EPSILON * mass + b_mass * count
        tl.store(p_floor + i_row + i_t * S.H, S.EPSILON * inverse(b_den), mask=m_t)
    b_out *= inverse(b_den)[:, None]
    m_none = b_den < ZERO_NORMALIZER
    b_scale = tl.where(m_none, -2 * FLOOR, b_top + tl.log2(tl.where(m_none, 1.0, b_den)))
    tl.store(p_scale + i_row + i_t * S.H, b_scale, mask=m_t)
    store_block(p_out + i_row * S.E, S.H * S.E, m_t, b_out, S.E, S.C, S.BE)
    b_out -= b_out.to(tl.bfloat16).to(tl.float32)
    store_block(p_residual + i_row * S.E, S.H * S.E, m_t, b_out, S.E, S.C, S.BE)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_favor_bidirectional_backward_queries_kernel(
    p_high, p_low, p_flag, p_q, p_out, p_residual, p_d_out, p_offsets, p_kv, p_z, p_c, p_values, p_scale, p_floor,
    p_d_q, p_delta, tokens, length, sequences, q, d_out, S: tl.constexpr
):  # fmt: skip
    """dq and Δ (B, T, H) of one chunk of one head's queries."""
    i_h, _, _, i_n, i_b, i_0, rows = block_index(p_offsets, None, tokens, length, sequences, S.H, 1, S)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h // (S.H // S.HKV)
    i_row = (i_b * tokens + i_0) * S.H + i_h
    i_t = tl.arange(0, S.C)
    m_t = i_t < rows
    b_q = load_block(token_pointer(p_q, q, i_b, i_0, i_h), q.t, m_t, S.D, S.C, S.BD)
    b_d = load_block(token_pointer(p_d_out, d_out, i_b, i_0, i_h), d_out.t, m_t, S.E, S.C, S.BE)
    b_out = load_block(p_out + i_row * S.E, S.H * S.E, m_t, S.E, S.C, S.BE).to(tl.float32)
    b_out += load_block(p_residual + i_row * S.E, S.H * S.E, m_t, S.E, S.C, S.BE).to(tl.float32)
    b_delta = tl.sum(b_out * b_d.to(tl.float32), 1)
    b_scale = tl.load(p_scale + i_row + i_t * S.H, mask=m_t, other=-2 * FLOOR)
    flag = tl.load(p_flag)
    b_total = zeros(S.C)
    b_rest = zeros(S.C)
    b_all = zeros(S.C)
    if S.EPSILON > 0:
        b_values, count = load_values_sum(p_values, i_x, S)
        b_all = tl.sum(b_d.to(tl.float32) * b_values[None, :], 1) - b_delta * count
        b_floor = tl.load(p_floor + i_row + i_t * S.H, mask=m_t, other=0.0)
        # Nearly everything cancels where the epsilon is most of a feature: Δ has to be that of the sums.
        for i_m in range(0, S.BM, S.TILE):
            i_f = i_m + tl.arange(0, S.TILE)
            b_p = logits(project(b_q, load_projection(p_high, i_f, S), p_low, flag, i_f, S), S)
            b_p, b_g = query_gradients(b_p, b_d, b_scale, b_delta, b_all, p_kv, p_z, p_c, i_x, i_f, S)
            b_rest += tl.sum(b_g * (b_p + b_floor[:, None]), 1)
        b_all -= b_rest * count
        b_delta += b_rest
        b_rest = zeros(S.C)
    b_d_q = zeros(S.C, S.BD)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_projection(p_high, i_f, S)
        b_p = logits(project(b_q, b_high, p_low, flag, i_f, S), S)
        b_p, b_g = query_gradients(b_p, b_d, b_scale, b_delta, b_all, p_kv, p_z, p_c, i_x, i_f, S)
        if S.EPSILON > 0:
            b_rest += tl.sum(b_g, 1) * b_floor
        b_g *= b_p
        b_total += tl.sum(b_g, 1)
        b_d_q = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_q)
    tl.store(p_delta + i_row + i_t * S.H, b_delta + b_total + b_rest, mask=m_t)
    b_d_q *= S.D**-0.25
    if S.EPSILON > 0:
        b_d_q -= b_q.to(tl.float32) * (b_total * S.D**-0.5)[:, None]
    store_block(p_d_q + i_row * S.D, S.H * S.D, m_t, b_d_q, S.D, S.C, S.BD)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_favor_bidirectional_backward_sums_kernel(
    p_high, p_low, p_flag, p_q, p_d_out, p_offsets, p_c, p_scale, p_floor, p_delta, p_d_kv, p_d_z,
    tokens, length, sequences, q, d_out, S: tl.constexpr
):  # fmt: skip
    """One block's part of dkv and dz, for one query head and one tile of features."""
    found = block_index(p_offsets, None, tokens, length, sequences, S.H, S.BM // S.TILE, S)
    i_h, i_m, i_s, i_n, i_b, i_0, rows = found
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h // (S.H // S.HKV)
    p_q, p_d_out = token_pointer(p_q, q, i_b, i_0, i_h), token_pointer(p_d_out, d_out, i_b, i_0, i_h)
    i_row = (i_b * tokens + i_0) * S.H + i_h
    i_t, i_f = tl.arange(0, S.C), i_m * S.TILE + tl.arange(0, S.TILE)
    b_high, flag = load_projection(p_high, i_f, S), tl.load(p_flag)
    _, b_c = load_scales(p_c, p_c, i_x, i_f, S)
    b_d_kv = zeros(S.TILE, S.BE)
    b_d_z = zeros(S.TILE)
    b_values = zeros(S.BE)
    rest = 0.0
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = i_t < rows
        b_q = load_block(p_q, q.t, m_t, S.D, S.C, S.BD)
        b_d = load_block(p_d_out, d_out.t, m_t, S.E, S.C, S.BE)
        b_scale = tl.load(p_scale + i_row + i_t * S.H, mask=m_t, other=-2 * FLOOR)
        b_delta = tl.load(p_delta + i_row + i_t * S.H, mask=m_t, other=0.0)
        b_p = logits(project_transposed(b_q, b_high, p_low, flag, i_f, S), S) + b_c[:, None]
        b_p = exp2(b_p - b_scale[None, :])
        if S.EPSILON > 0:
            # Apart from the exponentials, which would be rounded with it.
            b_floor = tl.load(p_floor + i_row + i_t * S.H, mask=m_t, other=0.0)
            b_values += tl.sum(b_floor[:, None] * b_d.to(tl.float32), 0)
            rest -= tl.sum(b_floor * b_delta)
        b_p = b_p.to(tl.bfloat16)
        b_d_kv = tl.dot(b_p, b_d, b_d_kv)
        # Rounded as in d_kv: the two cancel in the gradients of keys.
        b_d_z -= tl.sum(widen(b_p) * b_delta[None, :], 1)
        p_q += S.C * q.t
        p_d_out += S.C * d_out.t
        i_row += S.C * S.H
        rows -= S.C
    if S.EPSILON > 0:
        m_f = i_f < S.M
        b_d_kv += tl.where(m_f[:, None], b_values[None, :], 0.0)
        b_d_z += tl.where(m_f, rest, 0.0)
    store_part(p_d_kv, p_d_z, i_s.to(tl.int64) * S.H + i_h, i_f, b_d_kv, b_d_z, S)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_favor_bidirectional_backward_keys_kernel(
    p_high, p_low, p_flag, p_k, p_v, p_mask, p_offsets, p_c, p_d_kv, p_d_z, p_d_k, p_d_v,
    tokens, length, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """dk and dv of one chunk of one head's keys. p_c: with an epsilon, C."""
    i_h, _, _, i_n, i_b, i_0, rows = block_index(p_offsets, None, tokens, length, sequences, S.HKV, 1, S)
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h
    i_row = (i_b * tokens + i_0) * S.HKV + i_h
    if p_mask is not None:
        p_mask += i_b * tokens + i_0
    m_t, m_exists = visible_rows(p_mask, rows, S), tl.arange(0, S.C) < rows
    b_k = load_block(token_pointer(p_k, k, i_b, i_0, i_h), k.t, m_t, S.D, S.C, S.BD)
    b_v = load_block(token_pointer(p_v, v, i_b, i_0, i_h), v.t, m_t, S.E, S.C, S.BE)
    b_half = half_norm(b_k, S)
    if S.EPSILON > 0:
        b_half += tl.load(p_c + i_x)
    b_half = tl.where(m_t, b_half, -2 * FLOOR)
    flag = tl.load(p_flag)
    b_total = zeros(S.C)
    b_d_k = zeros(S.C, S.BD)
    b_d_v = zeros(S.C, S.BE)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_projection(p_high, i_f, S)
        b_d_kv, b_d_kv_low = load_sums(p_d_kv, i_x, i_f, S)
        b_d_z = tl.load(p_d_z + i_x * S.BM + i_f)
        b_f = logits(project(b_k, b_high, p_low, flag, i_f, S), S)
        if S.EPSILON == 0:
            b_c = tl.load(p_c + i_x * S.BM + i_f)
            b_f -= tl.where(b_c == FLOOR, 0, b_c)[None, :]
        b_f = exp2(b_f - b_half[:, None])
        b_weight = b_f
        if S.EPSILON > 0:
            b_weight = tl.where(m_t[:, None], b_f + S.EPSILON, 0.0)
        b_d_v = tl.dot(b_weight.to(tl.bfloat16), b_d_kv, b_d_v)
        b_g = tl.dot(b_v, tl.trans(b_d_kv), tl.broadcast_to(b_d_z[None, :], (S.C, S.TILE)))
        b_g = tl.dot(b_v, tl.trans(b_d_kv_low), b_g) * b_f
        b_total += tl.sum(b_g, 1)
        b_d_k = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_k)
    b_d_k = b_d_k * S.D**-0.25 - b_k.to(tl.float32) * (b_total * S.D**-0.5)[:, None]
    store_block(p_d_k + i_row * S.D, S.HKV * S.D, m_exists, b_d_k, S.D, S.C, S.BD)
    store_block(p_d_v + i_row * S.E, S.HKV * S.E, m_exists, b_d_v, S.E, S.C, S.BE)


def forward(x: BidirectionalInputs, problem: BidirectionalProblem, *, zeroed: bool = True) -> tuple[Tensor, Tensor]:
    """Return out (B, T, H, E), and the workspace for `backward`."""
    tensors = dense_inputs(x)
    q, k, v, weight, key_mask, offsets, key_offsets = tensors
    plan = _TiledForward.of(tensors, problem)
    out, saved, work = v.new_empty(plan.out_shape), plan.saved.allocate(q, zeroed=zeroed), plan.workspace.allocate(q)
    *w, scale, kv, z, c, residual, floor, top, values = plan.pointers(plan.saved, saved)
    parts, parts_z, parts_c, parts_total = plan.pointers(plan.workspace, work)
    with on_device(q):
        plan.weight(weight, *w)
        plan.sums(*w, k, v, key_mask, key_offsets, parts, parts_z, parts_c, parts_total)
        plan.combine(parts, parts_z, parts_c, key_offsets, kv, z, c)
        if plan.epsilon is not None:
            plan.epsilon(parts_total, key_offsets, kv, z, c, top, values)
        plan.read(*w, q, offsets, kv, z, c, values, out, residual, scale, floor)
    return out, saved


def backward(
    saved: BidirectionalSaved, x: BidirectionalInputs, problem: BidirectionalProblem
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    assert saved.out is not None
    tensors, d_out, out = dense_inputs(x), dense_rows(saved.d_out), saved.out.contiguous()
    q, k, v, _, key_mask, offsets, key_offsets = tensors
    plan = _TiledBackward.of((*tensors, d_out, out, saved.saved), problem)
    d_q, d_k, d_v, work = new_like(q), new_like(k), new_like(v), plan.workspace.allocate(q)
    *w, scale, kv, z, c, residual, floor, top, values = plan.pointers(plan.saved, saved.saved)
    delta, d_kv, d_z, parts, parts_z = plan.pointers(plan.workspace, work)
    with on_device(q):
        plan.queries(*w, q, out, residual, d_out, offsets, kv, z, c, values, scale, floor, d_q, delta)
        plan.d_sums(*w, q, d_out, offsets, c, scale, floor, delta, parts, parts_z)
        plan.combine(parts, parts_z, offsets, kv, z, d_kv, d_z)
        plan.keys(*w, k, v, key_mask, key_offsets, top if problem.epsilon else c, d_kv, d_z, d_k, d_v)
    return d_q, d_k, d_v


def saved_size(x: BidirectionalInputs, problem: BidirectionalProblem) -> int:
    """Return the number of float32 elements that `forward` saves."""
    assert x.weight is not None
    N = x.k.shape[0] if x.key_offsets is None else len(x.key_offsets) - 1
    B, T, H, D = x.q.shape
    return _saved(B * T * H, N * x.k.shape[2], D, len(x.weight), x.v.shape[3], problem.epsilon).size


# Tokens and heads of q or k, in blocks of `length` tokens; packed, of `sequences` sequences.
_Blocks = namedtuple("_Blocks", "tiling tokens heads length number sequences")


class _TiledPlan(Plan):
    def __init__(self, device: int, key: Signature, problem: BidirectionalProblem) -> None:
        super().__init__(device)
        q, k, v, weight, _, offsets, key_offsets, *_ = key
        (B, T, H, D), (Hkv, E), M = q[0], v[0][2:], weight[0][0]
        self.out_shape, self.N = (B, T, H, E), B if key_offsets is None else key_offsets[0][0] - 1
        self.tensors, self.offsets = {"q": q, "k": k, "v": v}, {"q": offsets, "k": key_offsets}
        blocks = padded(D), feature_block(M), padded(E)
        self.S = TiledSizes(H, Hkv, D, M, E, *blocks, problem.normalize == "feature", problem.epsilon)
        self.tilings = TILINGS[max(self.S.BD, self.S.BE)]
        self.saved = _saved(B * T * H, self.N * Hkv, D, M, E, problem.epsilon)

    def blocks(self, tiling: TiledTiling, name: str) -> _Blocks:
        """Divide q or k into blocks; a packed sequence may need one more than its share."""
        (B, T, heads, _), offsets = self.tensors[name][0], self.offsets[name]
        length = tiling.chunk
        if tiling.programs:
            wanted = max(1, tiling.programs // (B * heads * (self.S.BM // self.tile(tiling))))
            length *= -(-T // (wanted * tiling.chunk))
        sequences = 0 if offsets is None else offsets[0][0] - 1
        number = B * -(-T // length) if offsets is None else T // length + sequences
        return _Blocks(tiling, T, heads, length, number, sequences)

    def tile(self, tiling: TiledTiling) -> int:
        """Return the features per tile: a power of two that divides BM."""
        return min(tiling.tile, self.S.BM & -self.S.BM)

    def parts(self, blocks: _Blocks, vectors: int) -> list[tuple[int, torch.dtype]]:
        """Return the buffers for the sums of each block and head: a matrix, and this number of vectors."""
        number = blocks.number * blocks.heads * self.S.BM
        return [(number * self.S.BE, torch.float32), *[(number, torch.float32)] * vectors]

    def tiled(self, kernel: Any, blocks: _Blocks, strided: str, *, sums: bool, **other: Any) -> Launch:
        """One program per block and head and, for sums over tokens, per tile of features.

        other: constants that differ from the plan's; 0 for those that the kernel does not use, so that it is not
        compiled again.
        """
        tiling, tile = blocks.tiling, self.tile(blocks.tiling)
        strides = [Strides.of(self.tensors[name]) for name in strided]
        scalars = blocks.tokens, blocks.length, blocks.sequences, *strides
        grid = (blocks.number * blocks.heads * (self.S.BM // tile if sums else 1),)
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "maxnreg": tiling.registers}
        sizes = self.S._replace(C=tiling.chunk, TILE=tile, **other)
        return self.launch(kernel, grid, scalars, {**options, "S": sizes})

    def combining(self, kernel: Any, blocks: _Blocks, **other: Any) -> Launch:
        """One program per sequence, key head and some rows of the sums. other: as in `tiled`."""
        S = self.S
        sizes = BidirectionalSizes(S.H, S.HKV, 0, 0, 0, 0, S.BM, S.BE, "", True, True, S.FEATURE, S.DOT, "")
        return self.of_rows(kernel, blocks, sizes._replace(**other))

    def of_rows(self, kernel: Any, blocks: _Blocks, sizes: Any) -> Launch:
        rows = max(1, 512 // self.S.BE)
        grid, scalars = (self.N * self.S.HKV, self.S.BM // rows), (blocks.tokens, blocks.length)
        return self.launch(kernel, grid, scalars, {"S": sizes._replace(C=rows)})


class _TiledForward(_TiledPlan):
    def __init__(self, device: int, key: Signature, problem: BidirectionalProblem) -> None:
        super().__init__(device, key, problem)
        keys = self.blocks(self.tilings.sums, "k")
        totals = keys.number * keys.heads * (self.S.BE + 1) if self.S.EPSILON else 0
        self.workspace = Workspace(*self.parts(keys, 2), (totals, torch.float32))
        sizes = self.S._replace(TILE=min(padded(self.S.M), 16384 // self.S.BD))
        self.weight = self.launch(linear_favor_forward_weight_kernel, (1,), (), {**sizes._asdict(), "num_warps": 16})
        kernel = linear_favor_bidirectional_forward_sums_kernel
        self.sums = self.tiled(kernel, keys, "kv", sums=True, H=0, M=0, FEATURE=False)
        self.combine = self.combining(linear_bidirectional_forward_combine_kernel, keys, H=0, DIVIDE=0)
        self.epsilon = None
        if self.S.EPSILON:
            sizes = self.S._replace(TILE=TILE, H=0, D=0, E=0, BD=0)
            self.epsilon = self.of_rows(linear_favor_bidirectional_forward_epsilon_kernel, keys, sizes)
        queries = self.blocks(self.tilings.read, "q")
        self.read = self.tiled(linear_favor_bidirectional_forward_kernel, queries, "q", sums=False)


class _TiledBackward(_TiledPlan):
    def __init__(self, device: int, key: Signature, problem: BidirectionalProblem) -> None:
        super().__init__(device, key, problem)
        self.tensors["d"] = key[7]
        queries, d_sums = self.blocks(self.tilings.queries, "q"), self.blocks(self.tilings.d_sums, "q")
        rows, (kv, z) = self.saved.buffers[3], self.saved.buffers[4:6]
        self.workspace = Workspace(rows, kv, z, *self.parts(d_sums, 1))
        kernel = linear_favor_bidirectional_backward_queries_kernel
        self.queries = self.tiled(kernel, queries, "qd", sums=False)
        self.d_sums = self.tiled(linear_favor_bidirectional_backward_sums_kernel, d_sums, "qd", sums=True)
        self.combine = self.combining(linear_bidirectional_backward_combine_kernel, d_sums, EXPONENTIAL=0)
        kernel, keys = linear_favor_bidirectional_backward_keys_kernel, self.blocks(self.tilings.keys, "k")
        self.keys = self.tiled(kernel, keys, "kv", sums=False, H=0, M=0, FEATURE=False)


def _saved(rows: int, heads: int, D: int, M: int, E: int, epsilon: float) -> Workspace:
    """The projection as two matrices and the flag; each query's normalizer; the sums as two bfloat16 matrices (BM, BE)
    side by side; z and c (BM,); what rounding takes from the result; with an epsilon, that divided by each query's
    normalizer, C, and epsilon times the sum of values and the number of keys.
    """
    BD, BM, BE = padded(D), feature_block(M), padded(E)
    projection = (BD * BM, torch.bfloat16), (BD * BM, torch.bfloat16), (1, torch.float32)
    vectors = [(heads * BM, torch.float32)] * 2
    more = [(size if epsilon else 0, torch.float32) for size in (rows, heads, heads * (BE + 1))]
    sums, residual = (heads * BM * 2 * BE, torch.bfloat16), (rows * E, torch.bfloat16)
    return Workspace(*projection, (rows, torch.float32), sums, *vectors, residual, *more)
