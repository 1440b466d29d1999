"""Bidirectional linear attention: one pass over keys and one over queries forward, the reverse backward.

Forward, with c_m the largest logit of feature m over the keys (exponential maps), so that nothing overflows and a
normalizer is at least 1 wherever there is a key:

    sums:    kv_me = Σ_j φ(k_j)_m v_je,  z_m = Σ_j φ(k_j)_m,  both divided by exp(c_m), for blocks of keys
    combine: the blocks' sums at a common scale; normalized per feature, kv / z
    read:    out_i = φ(q_i)·kv / φ(q_i)·z, with c added to the logits of queries

Backward, with normalized features p_im = φ(q_i)_m / den_i and Δ_i = Σ_m p_im (d_i · kv_m) = d_i · out_i:

    queries: dφ(q_i)_m = (d_i · kv_m − Δ_i z_m) / den_i,   dkv_m = Σ_i p_im d_i,   dz_m = − Σ_i p_im Δ_i
    keys:    dφ(k_j)_m = v_j · dkv_m + dz_m,               dv_j = φ(k_j)·dkv

Features are (BM, C) in most kernels: all features of a token are in registers, and sums over tokens are sums of rows.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, exact_exp, exp2, widen
from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.launch import (
    Launch,
    Plan,
    Signature,
    Strides,
    Workspace,
    dense,
    dense_rows,
    new_like,
    on_device,
)
from longspan.ops.common.tiles import (
    FLOOR,
    ZERO_NORMALIZER,
    add_product,
    exact_inverse,
    inverse,
    load_block,
    load_tile,
    padded,
    product,
    store_block,
    store_tile,
    token_pointer,
    zeros,
)
from longspan.ops.linear import BidirectionalInputs, BidirectionalProblem, BidirectionalSaved
from longspan.ops.linear.triton import PRECISION, check_feature_map

EXPONENTIAL_MAPS = ("softmax", "favor")


# One kernel: tokens in a chunk, the largest number of elements in a program's tile of the sums, the approximate
# number of programs, warps, pipeline stages, and the register limit per thread.
BidirectionalTiling = namedtuple("BidirectionalTiling", "chunk tile programs warps stages registers", defaults=(None,))

# The four kernels that go through tokens. joint: one launch computes both dq and dkv.
BidirectionalTilings = namedtuple("BidirectionalTilings", "sums read queries keys joint", defaults=(True,))


def tilings(num_features: int, value_dim: int, bf16: bool, wide: bool) -> BidirectionalTilings:
    """Return the tilings for these padded dimensions. wide: a projection of more than 64 columns, which takes the
    shared memory of pipeline stages.
    """
    if not bf16:
        exact = BidirectionalTiling(32, 4096, 1024, 4, 1)
        return BidirectionalTilings(exact, exact, exact, exact)
    if num_features * value_dim <= 64 * 64 and not wide:
        small = BidirectionalTiling(64, 4096, 528, 4, 3)
        return BidirectionalTilings(small._replace(registers=128), small, small, small)
    large = BidirectionalTiling(64, 16384, 132, 8, 3)
    if num_features > 128:
        read = large._replace(programs=264, stages=2, registers=128)
        found = BidirectionalTilings(large, read, large, large, joint=False)
    else:
        # Features are not transposed when reading: eight warps would need 128 tokens.
        read = large._replace(programs=528, warps=4, stages=2)
        found = BidirectionalTilings(large, read, large._replace(programs=264), large._replace(programs=528))
    if num_features * value_dim > large.tile or wide:
        tiled = large._replace(programs=264, stages=1)
        return found._replace(queries=tiled, keys=tiled, joint=False)
    return found


# Compile-time constants: heads, dimensions, features, values, their padded sizes, tiles of values, tokens in a chunk.
# DIVIDE: each query divides. FEATURE: the sums are divided. DOT: the dtype of products. PROJECTION: see
# `load_projection`. QUERIES, SUMS: what the backward pass over queries computes.
BidirectionalSizes = namedtuple(
    "BidirectionalSizes",
    "H HKV D M E BD BM BE MAP EXPONENTIAL DIVIDE FEATURE DOT PRECISION TILES C PROJECTION QUERIES SUMS",
    defaults=(1, 0, "none", False, False),
)


@triton.jit
def widened(b_x, S: tl.constexpr):
    """Elements of dtype DOT as float32."""
    return widen(b_x) if tl.float32 != S.DOT else b_x


@triton.jit
def power(x, S: tl.constexpr):
    """2^x for bfloat16 products, e^x for float32, where the rounding of a change of base would show."""
    return exact_exp(x) if tl.float32 == S.DOT else exp2(x)


@triton.jit
def logarithm(x, S: tl.constexpr):
    """Inverse of `power`."""
    return tl.log(x) if tl.float32 == S.DOT else tl.log2(x)


@triton.jit
def reciprocal(x, S: tl.constexpr):
    """1 / x, and 0 where x is zero or underflowed."""
    return exact_inverse(x) if tl.float32 == S.DOT else inverse(x)


@triton.jit
def block_index(
    p_offsets, p_rest, tokens, length, sequences, HEADS: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr
):
    """Head, tile of values and block of tokens of this program; the block's sequence, its batch index, the slot of its
    first token, and the number of tokens of the sequence from there on, which may be 0.

    Packed sequence n has blocks from offsets[n] // length + n on: at least as many as it needs. p_rest: the largest
    error of rounding the weight to bfloat16, None if there is only one launch. The host does not know whether it is 0:
    of two launches, one gets no tokens.
    """
    pid = tl.program_id(0)
    i_h = pid % HEADS
    i_e = (pid // HEADS) % TILES
    i_s = pid // (HEADS * TILES)
    if p_offsets is None:
        each = tl.cdiv(tokens, length)
        i_n = i_s // each
        i_b = i_n
        i_0 = (i_s % each) * length
        rows = tokens - i_0
    else:
        i_n = i_s * 0
        above = i_n + sequences
        while above - i_n > 1:
            middle = (i_n + above) // 2
            before = tl.load(p_offsets + middle) // length + middle <= i_s
            i_n = tl.where(before, middle, i_n)
            above = tl.where(before, above, middle)
        start = tl.load(p_offsets + i_n)
        i_b = i_s * 0
        i_0 = start + (i_s - start // length - i_n) * length
        rows = tl.load(p_offsets + i_n + 1) - i_0
    if p_rest is not None:
        rows = tl.where((tl.load(p_rest) == 0) == (S.PROJECTION == "exact"), rows, 0)
    return i_h, i_e, i_s, i_n, i_b.to(tl.int64), i_0.to(tl.int64), rows


@triton.jit
def blocks_of(p_offsets, i_n, tokens, length):
    """The first block of sequence i_n, and the number of blocks that it fills."""
    if p_offsets is None:
        number = tl.cdiv(tokens, length)
        first = i_n * number
    else:
        start = tl.load(p_offsets + i_n)
        first = start // length + i_n
        number = tl.cdiv(tl.load(p_offsets + i_n + 1) - start, length)
    return first, number


@triton.jit
def visible_rows(p_mask, rows, S: tl.constexpr):
    """Mask of C keys: of the first `rows`, those that p_mask shows."""
    i_t = tl.arange(0, S.C)
    m_t = i_t < rows
    if p_mask is not None:
        m_t = tl.load(p_mask + i_t, mask=m_t, other=0) != 0
    return m_t


@triton.jit
def load_sums(p_x, i_x, S: tl.constexpr):
    """A tile of matrix i_x of a stack of (BM, BE · TILES) at p_x, as two blocks that add up to it: two bfloat16
    matrices side by side, or float32 and 0.
    """
    b_low = 0
    if tl.float32 == S.DOT:
        b_high = load_tile(p_x, i_x, S)
    else:
        b_high = load_tile(p_x, i_x, S, 2)
        b_low = load_tile(p_x + S.BE * S.TILES, i_x, S, 2)
    return b_high, b_low


@triton.jit
def store_sums(p_x, i_row, b_x, S: tl.constexpr):
    """Store rows i_row of sums as `load_sums` loads them."""
    i_e = tl.arange(0, S.BE)
    if tl.float32 == S.DOT:
        tl.store(p_x + i_row[:, None] * S.BE + i_e[None, :], b_x)
    else:
        p_x += i_row[:, None] * (2 * S.BE) + i_e[None, :]
        b_high = b_x.to(S.DOT)
        tl.store(p_x, b_high)
        tl.store(p_x + S.BE, (b_x - b_high.to(tl.float32)).to(S.DOT))


@triton.jit
def load_sum_rows(p_x, i_row, S: tl.constexpr):
    """Load what `store_sums` stores, in float32."""
    i_e = tl.arange(0, S.BE)
    if tl.float32 == S.DOT:
        b_x = tl.load(p_x + i_row[:, None] * S.BE + i_e[None, :])
    else:
        p_x += i_row[:, None] * (2 * S.BE) + i_e[None, :]
        b_x = tl.load(p_x).to(tl.float32) + tl.load(p_x + S.BE).to(tl.float32)
    return b_x


@triton.jit
def times_sums(b_high, b_low, b_x, b_g, S: tl.constexpr):
    """b_g + sums times x (C, BE), transposed: (BM, C). Both blocks are needed: normalizers are subtracted from this."""
    PRECISION: tl.constexpr = S.PRECISION
    b_g = add_product(b_high, tl.trans(b_x), b_g, PRECISION)
    if tl.float32 != S.DOT:
        b_g = tl.dot(b_low, tl.trans(b_x), b_g)
    return b_g


@triton.jit
def load_projection(p_weight, S: tl.constexpr):
    """What inputs are multiplied by, (BM, BD): a weight, as two blocks if it is not exact in DOT ("split"), or an
    identity matrix, whose product has the register layout of the next product. 0 if there is none.
    """
    b_weight, b_low = 0, 0
    i_m, i_d = tl.arange(0, S.BM), tl.arange(0, S.BD)
    if S.PROJECTION == "identity":
        b_weight = tl.where(i_m[:, None] == i_d[None, :], 1.0, 0.0).to(S.DOT)
    if S.PROJECTION == "exact" or S.PROJECTION == "split":
        m_w = (i_m < S.M)[:, None] & (i_d < S.D)[None, :]
        b_exact = tl.load(p_weight + i_m[:, None] * S.D + i_d[None, :], mask=m_w, other=0.0)
        b_weight = b_exact.to(S.DOT)
        if S.PROJECTION == "split":
            b_low = (b_exact - b_weight.to(tl.float32)).to(S.DOT)
    return b_weight, b_low


@triton.jit
def project(b_x, b_weight, b_low, S: tl.constexpr):
    """w·x (C, BM) in float32 precision, which an exponent needs."""
    PRECISION: tl.constexpr = S.PRECISION
    if S.PROJECTION == "none":
        b_p = b_x.to(tl.float32)
    elif tl.float32 == S.DOT:
        b_p = product(b_x.to(tl.float32), tl.trans(b_weight), PRECISION)
    else:
        b_p = tl.dot(b_x, tl.trans(b_weight))
        if S.PROJECTION == "split":
            b_p = tl.dot(b_x, tl.trans(b_low), b_p)
    return b_p


@triton.jit
def project_transposed(b_x, b_weight, b_low, S: tl.constexpr):
    """`project` as (BM, C)."""
    PRECISION: tl.constexpr = S.PRECISION
    if S.PROJECTION == "none":
        b_p = tl.trans(b_x.to(tl.float32))
    elif tl.float32 == S.DOT:
        b_p = product(b_weight, tl.trans(b_x.to(tl.float32)), PRECISION)
    else:
        b_p = tl.dot(b_weight, tl.trans(b_x))
        if S.PROJECTION == "split":
            b_p = tl.dot(b_low, tl.trans(b_x), b_p)
    return b_p


@triton.jit
def to_logits(b_p, S: tl.constexpr):
    """Logits to the base of `power` from projections, for exponential maps."""
    if S.MAP == "favor":
        b_p *= S.D**-0.25
    if tl.float32 != S.DOT:
        b_p *= LOG2E
    return b_p


@triton.jit
def half_norm(b_x, S: tl.constexpr):
    """‖x‖²/2 (C,), which is subtracted from the logits of FAVOR+ keys."""
    b_x = b_x.to(tl.float32)
    b_half = tl.sum(b_x * b_x, 1) * (0.5 * S.D**-0.5)
    if tl.float32 != S.DOT:
        b_half *= LOG2E
    return b_half


@triton.jit
def query_scales(p_z, p_c, i_x, S: tl.constexpr):
    """Each feature's share of the normalizer, and what is added to its logits; FLOOR beyond M features.

    If the sums are divided, a query's features are divided by their own sum.
    """
    i_m = tl.arange(0, S.BM)
    if S.FEATURE:
        b_z = tl.where(i_m < S.M, 1.0, 0.0)
        b_c = tl.where(i_m < S.M, 0.0, FLOOR)
    else:
        b_z = tl.load(p_z + i_x * S.BM + i_m, mask=i_m < S.M, other=0.0)
        b_c = zeros(S.BM)
        if S.EXPONENTIAL:
            b_c = tl.load(p_c + i_x * S.BM + i_m, mask=i_m < S.M, other=FLOOR)
    return b_z, b_c


@triton.jit
def linear_bidirectional_forward_weight_kernel(
    p_weight, p_high, p_rest, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    """Round a weight (M, D) to bfloat16, and write the largest rounding error."""
    i_m, i_d = tl.arange(0, BM), tl.arange(0, BD)
    i_w, m_w = i_m[:, None] * D + i_d[None, :], (i_m < M)[:, None] & (i_d < D)[None, :]
    b_weight = tl.load(p_weight + i_w, mask=m_w, other=0.0).to(tl.float32)
    b_high = b_weight.to(tl.bfloat16)
    tl.store(p_high + i_w, b_high, mask=m_w)
    tl.store(p_rest, tl.max(tl.max(tl.abs(b_weight - b_high.to(tl.float32)), 1)))


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_bidirectional_forward_sums_kernel(
    p_weight, p_rest, p_k, p_v, p_mask, p_offsets, p_kv, p_z, p_c, tokens, length, sequences, k, v, S: tl.constexpr
):
    """kv, z and c of one block. Features are (BM, C): a feature's maximum and sum are those of a row."""
    PRECISION: tl.constexpr = S.PRECISION
    found = block_index(p_offsets, p_rest, tokens, length, sequences, S.HKV, S.TILES, S)
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
        b_v = load_block(p_v, v.t, m_t, S.E, S.C, S.BE, i_e, S.TILES).to(S.DOT)
        b_f = project_transposed(b_k, b_weight, b_low, S)
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
            # Before the first visible key c is FLOOR, like the logits of hidden keys.
            b_f = power(b_f - tl.where(b_c == FLOOR, 0, b_c)[:, None], S)
        else:
            b_f = tl.where(m_t[None, :], pointwise_features(b_f, S, False), 0)
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
def linear_bidirectional_forward_combine_kernel(
    p_part, p_part_z, p_part_c, p_offsets, p_kv, p_z, p_c, tokens, length, S: tl.constexpr
):
    """Add up the sums of all blocks of one sequence: some rows of one head."""
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // S.HKV, i_x % S.HKV
    i_m, i_e = tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    first, number = blocks_of(p_offsets, i_n, tokens, length)
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
    store_sums(p_kv, i_x * S.BM + i_m, b_kv, S)
    tl.store(p_z + i_x * S.BM + i_m, b_z)
    tl.store(p_c + i_x * S.BM + i_m, b_c)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_bidirectional_forward_kernel(
    p_weight, p_rest, p_q, p_offsets, p_kv, p_z, p_c, p_out, p_scale, tokens, length, sequences, q, S: tl.constexpr
):
    """One block of one head's queries.

    p_scale: (B, T, H) what the backward pass normalizes features with: the logarithm of an exponential map's
    normalizer, the inverse of other maps' normalizers.
    """
    TRANSPOSED: tl.constexpr = S.BM > 128  # Features are (BM, C), so that many of them fit into registers.
    TOKENS: tl.constexpr = 1 if TRANSPOSED else 0
    FEATURES: tl.constexpr = 0 if TRANSPOSED else 1
    PRECISION: tl.constexpr = S.PRECISION
    found = block_index(p_offsets, p_rest, tokens, length, sequences, S.H, S.TILES, S)
    i_h, i_e, i_s, i_n, i_b, i_0, rows = found
    if rows <= 0:
        return
    i_x = i_n.to(tl.int64) * S.HKV + i_h // (S.H // S.HKV)
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    i_row = (i_b * tokens + i_0) * S.H + i_h
    b_weight, b_low = load_projection(p_weight, S)
    b_kv, _ = load_sums(p_kv + i_e * S.BE, i_x, S)
    b_z, b_c = query_scales(p_z, p_c, i_x, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = i_t < rows
        b_q = load_block(p_q, q.t, m_t, S.D, S.C, S.BD)
        if TRANSPOSED:
            b_f = project_transposed(b_q, b_weight, b_low, S)
        else:
            b_f = project(b_q, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_f = to_logits(b_f, S) + tl.expand_dims(b_c, TOKENS)
            b_top = tl.max(b_f, FEATURES)
            b_f = power(b_f - tl.expand_dims(b_top, FEATURES), S)
        else:
            b_f = pointwise_features(b_f, S, False)
            if S.BM != S.M:
                b_f = tl.where(tl.expand_dims(i_m < S.M, TOKENS), b_f, 0)
        if TRANSPOSED:
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
        if TRANSPOSED:
            b_out = tl.trans(b_out)
        store_block(p_out + i_row * S.E + i_e * S.BE, S.H * S.E, m_t, b_out, S.E, S.C, S.BE, i_e, S.TILES)
        p_q += S.C * q.t
        i_row += S.C * S.H
        rows -= S.C


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_bidirectional_backward_queries_kernel(
    p_weight, p_rest, p_q, p_d_out, p_offsets, p_kv, p_z, p_c, p_scale, p_d_q, p_d_kv, p_d_z,
    tokens, length, sequences, q, d_out, S: tl.constexpr
):  # fmt: skip
    """For one block of one head's queries, dq and its part of dz (QUERIES), and its part of dkv (SUMS).

    Both in one launch if dkv is one tile; otherwise dq goes through all tiles, and each tile of dkv has its own
    program.
    """
    PRECISION: tl.constexpr = S.PRECISION
    TILES: tl.constexpr = 1 if S.QUERIES else S.TILES
    found = block_index(p_offsets, p_rest, tokens, length, sequences, S.H, TILES, S)
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
        b_kv, b_kv_low = load_sums(p_kv, i_x, S)
    b_d_kv = zeros(S.BM, S.BE)
    b_d_z = zeros(S.BM)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = i_t < rows
        b_q = load_block(p_q, q.t, m_t, S.D, S.C, S.BD)
        b_d_out = load_block(p_d_out, d_out.t, m_t, S.E, S.C, S.BE, i_e, S.TILES).to(S.DOT)
        b_x = project_transposed(b_q, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_scale = tl.load(p_scale + i_row + i_t * S.H, mask=m_t, other=-FLOOR)
            b_p = power(to_logits(b_x, S) + b_c[:, None] - b_scale[None, :], S)
            if tl.float32 == S.DOT:
                # The rounding of one logarithm affects all features of a query by more than float32 allows.
                b_p *= reciprocal(tl.sum(b_p * b_z[:, None], 0), S)[None, :]
        else:
            b_f = pointwise_features(b_x, S, False)
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
                    b_kv, b_kv_low = load_sums(p_kv + i * S.BE, i_x, S)
                    b_d_out = load_block(p_d_out + i * S.BE, d_out.t, m_t, S.E, S.C, S.BE, i, S.TILES).to(S.DOT)
                b_g = times_sums(b_kv, b_kv_low, b_d_out, b_g, S)
            if S.DIVIDE:
                b_delta = tl.sum(b_p * b_g, 0)
                b_g -= b_z[:, None] * b_delta[None, :]
                if tl.float32 == S.DOT:
                    # Correct for rounding: this sum should be 0, and normalized features should sum to 1.
                    b_rest = tl.sum(b_p * b_g, 0)
                    b_g -= b_z[:, None] * b_rest[None, :]
                    b_delta += b_rest
                # Rounded as in d_kv: the two cancel in the gradients of keys.
                b_d_z -= tl.sum(widened(b_rounded, S) * b_delta[None, :], 1)
            if S.EXPONENTIAL:
                b_g *= b_p
                if S.MAP == "favor":
                    b_g = product(tl.trans(b_weight), b_g.to(S.DOT), PRECISION) * S.D**-0.25
            else:
                if S.DIVIDE:
                    b_g *= b_scale[None, :]
                b_g = pointwise_gradient(b_g, b_x, b_f, S)
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
def linear_bidirectional_backward_combine_kernel(
    p_part, p_part_z, p_offsets, p_kv, p_z, p_d_kv, p_d_z, tokens, length, S: tl.constexpr
):
    """Some rows of dkv and dz of one key head and sequence, over its blocks of queries and its query heads."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_x = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_x // S.HKV, i_x % S.HKV
    i_m, i_e = tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    first, number = blocks_of(p_offsets, i_n, tokens, length)
    i_first = first.to(tl.int64) * S.H + i_h * GROUP
    b_d_kv = zeros(S.C, S.BE)
    b_d_z = zeros(S.C)
    for i in tl.range(number * GROUP, num_stages=3):
        i_part = (i_first + i // GROUP * S.H + i % GROUP) * S.BM + i_m
        b_d_kv += tl.load(p_part + i_part[:, None] * S.BE + i_e[None, :])
        if S.DIVIDE and not S.FEATURE:
            b_d_z += tl.load(p_part_z + i_part)
    if S.FEATURE:
        # kv is Σ φ(k) v / z.
        b_kv = load_sum_rows(p_kv, i_x * S.BM + i_m, S)
        b_inverse = reciprocal(tl.load(p_z + i_x * S.BM + i_m), S)
        b_d_kv *= b_inverse[:, None]
        if tl.float32 == S.DOT:
            b_kv -= tl.load(p_kv + i_x * (S.BM * S.BE) + i_e)[None, :]  # as from the values, see the next kernel
        b_d_z = -tl.sum(b_d_kv * b_kv, 1)
    store_sums(p_d_kv, i_x * S.BM + i_m, b_d_kv, S)
    tl.store(p_d_z + i_x * S.BM + i_m, b_d_z)


@triton.jit(do_not_specialize=["tokens", "length", "sequences"])
def linear_bidirectional_backward_keys_kernel(
    p_weight, p_rest, p_k, p_v, p_mask, p_offsets, p_kv, p_c, p_d_kv, p_d_z, p_d_k, p_d_v,
    tokens, length, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """dk and dv of one block of one head's keys."""
    PRECISION: tl.constexpr = S.PRECISION
    i_h, _, _, i_n, i_b, i_0, rows = block_index(p_offsets, p_rest, tokens, length, sequences, S.HKV, 1, S)
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
        b_d_kv, b_d_kv_low = load_sums(p_d_kv, i_x, S)
    for _ in range(tl.cdiv(tl.minimum(rows, length), S.C)):
        m_t = visible_rows(p_mask, rows, S)
        m_exists = i_t < rows
        b_k = load_block(p_k, k.t, m_t, S.D, S.C, S.BD)
        b_x = project_transposed(b_k, b_weight, b_low, S)
        if S.EXPONENTIAL:
            b_f = to_logits(b_x, S) - b_c[:, None]
            if S.MAP == "favor":
                b_f -= half_norm(b_k, S)[None, :]
            b_f = power(tl.where(m_t[None, :], b_f, FLOOR), S)
        else:
            b_f = tl.where(m_t[None, :], pointwise_features(b_x, S, False), 0)
        b_rounded = b_f.to(S.DOT)
        b_g = zeros(S.BM, S.C)
        for i in range(S.TILES):
            p_tile = p_d_v + i_row * S.E + i * S.BE
            b_v = load_block(p_v + i * S.BE, v.t, m_t, S.E, S.C, S.BE, i, S.TILES).to(S.DOT)
            if S.TILES > 1:
                b_d_kv, b_d_kv_low = load_sums(p_d_kv + i * S.BE, i_x, S)
            if S.FEATURE and tl.float32 == S.DOT:
                # A feature's mean is subtracted from its values. One feature's mean is subtracted from both first: with
                # few keys they are nearly equal, and the difference would consist of rounding errors.
                b_v -= tl.load(p_kv + i_x * (S.BM * S.BE * S.TILES) + i * S.BE + tl.arange(0, S.BE))[None, :]
            b_g = times_sums(b_d_kv, b_d_kv_low, b_v, b_g, S)
            b_d_v = product(tl.trans(b_d_kv), b_rounded, PRECISION)
            store_block(p_tile, S.HKV * S.E, m_exists, tl.trans(b_d_v), S.E, S.C, S.BE, i, S.TILES)
        b_g += b_d_z[:, None]
        if S.EXPONENTIAL:
            b_g *= b_f
            if S.MAP == "favor":
                b_total = tl.sum(b_g, 0) * S.D**-0.5
                b_g = product(tl.trans(b_weight), b_g.to(S.DOT), PRECISION) * S.D**-0.25
                b_g -= tl.trans(b_k.to(tl.float32)) * b_total[None, :]
        else:
            b_g = tl.where(m_t[None, :], pointwise_gradient(b_g, b_x, b_f, S), 0)
        store_block(p_d_k + i_row * S.D, S.HKV * S.D, m_exists, tl.trans(b_g), S.D, S.C, S.BD)
        p_k += S.C * k.t
        p_v += S.C * v.t
        if p_mask is not None:
            p_mask += S.C
        i_row += S.C * S.HKV
        rows -= S.C


def forward(x: BidirectionalInputs, problem: BidirectionalProblem, *, zeroed: bool = True) -> tuple[Tensor, Tensor]:
    """Return out (B, T, H, E), and the workspace for `backward`."""
    tensors = dense_inputs(x)
    q, k, v, weight, key_mask, offsets, key_offsets = tensors
    plan = _BidirectionalForward.of(tensors, problem)
    out, saved, work = v.new_empty(plan.out_shape), plan.saved.allocate(q, zeroed=zeroed), plan.workspace.allocate(q)
    scale, kv, z, c, rounded, rest = plan.pointers(plan.saved, saved)
    parts, parts_z, parts_c = plan.pointers(plan.workspace, work)
    weights = plan.weights(weight, rounded, rest)
    with on_device(q):
        if plan.round is not None:
            plan.round(weight, rounded, rest)
        for sums, w in zip(plan.sums, weights, strict=True):
            sums(*w, k, v, key_mask, key_offsets, parts, parts_z, parts_c)
        plan.combine(parts, parts_z, parts_c, key_offsets, kv, z, c)
        for read, w in zip(plan.read, weights, strict=True):
            read(*w, q, offsets, kv, z, c, out, scale)
    return out, saved


def backward(
    saved: BidirectionalSaved, x: BidirectionalInputs, problem: BidirectionalProblem
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    tensors, d_out = dense_inputs(x), dense_rows(saved.d_out)
    q, k, v, weight, key_mask, offsets, key_offsets = tensors
    plan = _BidirectionalBackward.of((*tensors, d_out, saved.saved), problem)
    d_q, d_k, d_v, work = new_like(q), new_like(k), new_like(v), plan.workspace.allocate(q)
    scale, kv, z, c, rounded, rest = plan.pointers(plan.saved, saved.saved)
    d_kv, d_z, parts, parts_z = plan.pointers(plan.workspace, work)
    weights = plan.weights(weight, rounded, rest)
    with on_device(q):
        for launches in plan.queries:
            for queries, w in zip(launches, weights, strict=True):
                queries(*w, q, d_out, offsets, kv, z, c, scale, d_q, parts, parts_z)
        plan.combine(parts, parts_z, offsets, kv, z, d_kv, d_z)
        for keys, w in zip(plan.keys, weights, strict=True):
            keys(*w, k, v, key_mask, key_offsets, kv, c, d_kv, d_z, d_k, d_v)
    return d_q, d_k, d_v


def saved_size(x: BidirectionalInputs, problem: BidirectionalProblem) -> int:
    """Return the number of float32 elements that `forward` saves."""
    N = x.k.shape[0] if x.key_offsets is None else len(x.key_offsets) - 1
    M = None if x.weight is None else len(x.weight)
    rows = x.q.shape[0] * x.q.shape[1] * x.q.shape[2] if _divides(problem) else 0
    return _saved(rows, N * x.k.shape[2], x.q.shape[3], M, x.v.shape[3], x.q.dtype == torch.bfloat16).size


def _divides(problem: BidirectionalProblem) -> bool:
    """True if each query divides: by its normalizer or, if the sums are divided, by the sum of its features."""
    exponential = problem.feature_map in EXPONENTIAL_MAPS
    return problem.normalize == "query" or (problem.normalize == "feature" and exponential)


# Tokens and heads of q or k, in blocks of `length` tokens; packed, of `sequences` sequences.
_Blocks = namedtuple("_Blocks", "tiling tokens heads length number sequences")


class _BidirectionalPlan(Plan):
    def __init__(self, device: int, key: Signature, problem: BidirectionalProblem) -> None:
        super().__init__(device)
        check_feature_map(problem.feature_map)
        q, k, v, weight, _, offsets, key_offsets, *_ = key
        (B, T, H, D), (Hkv, E), dtype = q[0], v[0][2:], q[2]
        bf16, M = dtype == torch.bfloat16, None if weight is None else weight[0][0]
        BD, self.BM, self.BE = (padded(size, 64 if bf16 else 16) for size in (D, D if M is None else M, E))
        self.tilings = tilings(self.BM, self.BE, bf16, M is not None and BD > 64)
        self.out_shape, self.Hkv = (B, T, H, E), Hkv
        self.tensors, self.offsets = {"q": q, "k": k, "v": v}, {"q": offsets, "k": key_offsets}
        self.sizes = BidirectionalSizes(
            *(H, Hkv, D, D if M is None else M, E, BD, self.BM, self.BE, problem.feature_map),
            EXPONENTIAL=problem.feature_map in EXPONENTIAL_MAPS,
            DIVIDE=_divides(problem),
            FEATURE=problem.normalize == "feature",
            DOT=tl.bfloat16 if bf16 else tl.float32,
            PRECISION=PRECISION[dtype],
        )
        # For a weight that may or may not be exact in bfloat16 each kernel is launched twice, and one does nothing.
        self.projections = ["identity" if bf16 and D <= 128 else "none"] if weight is None else ["exact"]
        self.rounded = weight is not None and bf16 and weight[2] != torch.bfloat16
        if self.rounded:
            self.projections.append("split")
        self.N = B if key_offsets is None else key_offsets[0][0] - 1
        rows = B * T * H if self.sizes.DIVIDE else 0
        self.saved = _saved(rows, self.N * Hkv, D, M, E, bf16)

    def weights(self, weight: Tensor | None, rounded: Any, rest: Any) -> list[tuple[Any, Any]]:
        """Return for each projection the weight, and the largest error of rounding it to bfloat16."""
        return [(rounded, rest), (weight, rest)] if self.rounded else [(weight, None)]

    def blocks(self, tiling: BidirectionalTiling, name: str) -> _Blocks:
        """Divide q or k into blocks; a packed sequence may need one more than its share."""
        (B, T, heads, _), offsets = self.tensors[name][0], self.offsets[name]
        wanted = max(1, tiling.programs // (B * heads))
        length = -(-T // (wanted * tiling.chunk)) * tiling.chunk
        sequences = 0 if offsets is None else offsets[0][0] - 1
        number = B * -(-T // length) if offsets is None else T // length + sequences
        return _Blocks(tiling, T, heads, length, number, sequences)

    def tiles(self, tiling: BidirectionalTiling) -> int:
        return max(1, self.BM * self.BE // tiling.tile)

    def parts(self, blocks: _Blocks, vectors: int) -> list[tuple[int, torch.dtype]]:
        """Return the buffers for the sums of each block and head: a matrix, and this number of vectors."""
        number = blocks.number * blocks.heads * self.BM
        return [(number * self.BE, torch.float32), *[(number, torch.float32)] * vectors]

    def launches(self, kernel: Any, blocks: _Blocks, strided: str, *, all_tiles: bool, **other: Any) -> list[Launch]:
        """One launch per projection, with one program per block and head and, unless one computes all tiles, per tile.

        other: constants that differ from the plan's; 0 for those that the kernel does not use, so that it is not
        compiled again.
        """
        tiling, tiles = blocks.tiling, self.tiles(blocks.tiling)
        strides = [Strides.of(self.tensors[name]) for name in strided]
        scalars = blocks.tokens, blocks.length, blocks.sequences, *strides
        grid = (blocks.number * blocks.heads * (1 if all_tiles else tiles),)
        sizes = self.sizes._replace(TILES=tiles, C=tiling.chunk, BE=self.BE // tiles, **other)
        options = {"num_warps": tiling.warps, "maxnreg": tiling.registers}
        found = []
        for projection in self.projections:
            # The second block of a weight takes the shared memory of a pipeline stage.
            stages = tiling.stages - 1 if projection == "split" and tiling.stages > 1 else tiling.stages
            own = {**options, "num_stages": stages, "S": sizes._replace(PROJECTION=projection)}
            found.append(self.launch(kernel, grid, scalars, own))
        return found

    def combining(self, kernel: Any, blocks: _Blocks, **other: Any) -> Launch:
        """One program per sequence, key head and some rows of the sums. other: as in `launches`."""
        rows = min(self.BM, max(1, 512 // self.BE))
        sizes = self.sizes._replace(C=rows, D=0, M=0, E=0, BD=0, MAP="", PRECISION="", **other)
        return self.launch(kernel, (self.N * self.Hkv, self.BM // rows), (blocks.tokens, blocks.length), {"S": sizes})


class _BidirectionalForward(_BidirectionalPlan):
    def __init__(self, device: int, key: Signature, problem: BidirectionalProblem) -> None:
        super().__init__(device, key, problem)
        keys = self.blocks(self.tilings.sums, "k")
        self.workspace = Workspace(*self.parts(keys, 2))
        self.round = None
        if self.rounded:
            constants = {**self.sizes._asdict(), "num_warps": 8}
            self.round = self.launch(linear_bidirectional_forward_weight_kernel, (1,), (), constants)
        unused = {"H": 0, "DIVIDE": 0, "FEATURE": 0}
        self.sums = self.launches(linear_bidirectional_forward_sums_kernel, keys, "kv", all_tiles=False, **unused)
        self.combine = self.combining(linear_bidirectional_forward_combine_kernel, keys, H=0, DIVIDE=0)
        queries = self.blocks(self.tilings.read, "q")
        self.read = self.launches(linear_bidirectional_forward_kernel, queries, "q", all_tiles=False)


class _BidirectionalBackward(_BidirectionalPlan):
    def __init__(self, device: int, key: Signature, problem: BidirectionalProblem) -> None:
        super().__init__(device, key, problem)
        self.tensors["d"] = key[7]
        queries = self.blocks(self.tilings.queries, "q")
        self.workspace = Workspace(*self.saved.buffers[1:3], *self.parts(queries, 1))
        # Tiles of dkv have programs of their own; dq needs all of them in one.
        joint = self.tilings.joint and self.tiles(queries.tiling) == 1
        kernel = linear_bidirectional_backward_queries_kernel
        self.queries = [
            self.launches(kernel, queries, "qd", all_tiles=with_queries, QUERIES=with_queries, SUMS=with_sums)
            for with_queries, with_sums in (((True, True),) if joint else ((True, False), (False, True)))
        ]
        self.combine = self.combining(linear_bidirectional_backward_combine_kernel, queries, EXPONENTIAL=0)
        keys, unused = self.blocks(self.tilings.keys, "k"), {"H": 0, "DIVIDE": 0}
        self.keys = self.launches(linear_bidirectional_backward_keys_kernel, keys, "kv", all_tiles=True, **unused)


def _saved(rows: int, heads: int, D: int, M: int | None, E: int, bf16: bool) -> Workspace:
    """Each query's normalizer; the sums as `linear_bidirectional_forward_combine_kernel` writes them, a matrix (BM, BE)
    of float32 or two of bfloat16 side by side, and two vectors (BM,); the projection rounded to bfloat16.
    """
    BM, BE = (padded(size, 64 if bf16 else 16) for size in (D if M is None else M, E))
    kv = (heads * BM * 2 * BE, torch.bfloat16) if bf16 else (heads * BM * BE, torch.float32)
    projection = (0 if M is None or not bf16 else M * D, torch.bfloat16), (1, torch.float32)
    return Workspace((rows, torch.float32), kv, *[(heads * BM, torch.float32)] * 2, *projection)


def dense_inputs(x: BidirectionalInputs) -> tuple[Any, ...]:
    """The tensors as the kernels take them."""
    mask = None if x.key_mask is None else x.key_mask.contiguous().view(torch.uint8)
    rest = dense(x.weight), mask, dense(x.offsets), dense(x.key_offsets)
    return dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), *rest
