"""Causal linear attention of wide heads: bfloat16, normalized, maps without a projection, features and values in tiles.

A state of more than 128 × 128 does not fit into the registers of one program. One kernel sums the keys of a segment for
a tile of features and writes what the sums were before each chunk, `scan` adds up the segments, and then all chunks are
computed in parallel. Every product with a state goes through one of its sides in tiles and holds the other in
registers, as one or two blocks whose widths are powers of two: 192 columns are 128 and 64.

For the map "softmax", n_j is the binary logarithm of key j's largest feature, rounded up, and r_i the largest n_j that
query i has seen, as in `favor`:

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) 2^(n_j − r_i) v_j,      f_j = φ(k_j) 2^(−n_j) ≤ 1.

Pointwise maps have no scales. Backward, with q̂ = φ(q) / den, d the gradient of out, Δ_i = d_i · out_i, S and z the sums
before a chunk at scale c, and dS and dz the gradients of those after it at the scale e of its end,

    a_ij = 2^(n_j − r_i) (d_i · v_j − Δ_i),
    dφ(q_i) den_i = Σ_{j ≤ i} a_ij f_j + 2^(c − r_i) (S d_i − Δ_i z),
    df_j = Σ_{i ≥ j} a_ij q̂_i + 2^(n_j − e) (dS v_j + dz),
    dv_j = Σ_{i ≥ j} 2^(n_j − r_i) (q̂_i · f_j) d_i + 2^(n_j − e) dSᵀ f_j.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, exp2, log2, scaled_sum, widen
from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.launch import Launch, Signature, Workspace, dense, dense_rows, new_like, on_device
from longspan.ops.common.tiles import (
    FLOOR,
    ZERO_NORMALIZER,
    columns,
    inverse,
    load_column,
    load_columns,
    load_rows,
    program_index,
    reload_rows,
    running_maximum,
    store_columns,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved
from longspan.ops.linear.triton.favor import (
    chunk_index,
    load_reference,
    pair_scales,
    pair_scales_transposed,
    sequence_index,
    visible_pairs,
    visible_pairs_transposed,
)
from longspan.ops.linear.triton.scan import Part, StatesPlan

CHUNK = 64
TILE = 64
# Warps, pipeline stages and the register limit per thread.
TiledChunkTiling = namedtuple("TiledChunkTiling", "warps stages registers", defaults=(None,))
TiledChunkTilings = namedtuple("TiledChunkTilings", "scales sums read queries keys")
# By the larger one of the padded dimensions, up to 192 and up to 256. Gradients of queries with 8 warps and more than
# one stage are wrong on an H200 with Triton 3.6.
TILINGS = {
    192: TiledChunkTilings(
        scales=TiledChunkTiling(4, 1),
        sums=TiledChunkTiling(4, 3),
        read=TiledChunkTiling(4, 2),
        queries=TiledChunkTiling(8, 1),
        keys=TiledChunkTiling(4, 2),
    ),
    256: TiledChunkTilings(
        scales=TiledChunkTiling(4, 1),
        sums=TiledChunkTiling(4, 3),
        read=TiledChunkTiling(4, 2),
        queries=TiledChunkTiling(8, 1),
        keys=TiledChunkTiling(4, 2),
    ),
}
# Programs that sum segments: as many as a large GPU runs at once.
PROGRAMS = 660
# As in `favor`, the shares of the bytes of q, k, v and out that the sums of a part may take. The sums of heads of 256
# are as large as these tensors: peak memory of both passes is then 1.5 times inputs, outputs and gradients.
READ_SHARE, QUERIES_SHARE, KEYS_SHARE = 1.75, 1.25, 1.1

# Compile-time constants: heads, dimensions, tokens in a chunk; features and values padded; the blocks D1 + D2 = BM and
# E1 + E2 = BE, the second of which may be 0; features and values per program that sums; the width of other tiles; the
# map. SCALED: keys carry log scales.
TiledChunkSizes = namedtuple("TiledChunkSizes", "H HKV D E C BM BE D1 D2 E1 E2 TM TV TILE MAP SCALED NORMALIZE")


@triton.jit
def query_features(b_x, b_scale, first, S: tl.constexpr):
    """φ(q) in float32 of the features from `first` on. b_scale: for softmax the binary logarithm of what exp(q) is
    divided by, else a factor.
    """
    b_x = b_x.to(tl.float32)
    if S.MAP == "softmax":
        b_f = exp2(b_x * LOG2E - b_scale[:, None])
    else:
        b_f = pointwise_features(b_x, S) * b_scale[:, None]
    return _existing(b_f, first, S)


@triton.jit
def query_slopes(b_x, b_scale, first, S: tl.constexpr):
    """dq divided by dφ(q) · den, of normalized queries."""
    if S.MAP == "softmax":
        b_f = query_features(b_x, b_scale, first, S)
    else:
        b_x = b_x.to(tl.float32)
        b_f = pointwise_gradient(
            b_scale[:, None] + zeros(b_x.shape[0], b_x.shape[1]), b_x, pointwise_features(b_x, S), S
        )
    return b_f


@triton.jit
def key_features(b_x, b_scale, rows, first, S: tl.constexpr):
    """f in float32 of the features from `first` on, in units of 2 to the scales; zeros for hidden keys."""
    m_t = tl.arange(0, S.C) < rows
    b_x = b_x.to(tl.float32)
    if S.MAP == "softmax":
        b_f = exp2(b_x * LOG2E - tl.where(m_t, b_scale, -2 * FLOOR)[:, None])
    else:
        b_f = tl.where(m_t[:, None], pointwise_features(b_x, S), 0)
    return _existing(b_f, first, S)


@triton.jit
def _existing(b_f, first, S: tl.constexpr):
    """Features, zeros beyond D of them."""
    if S.BM != S.D:
        b_f = tl.where((first + tl.arange(0, b_f.shape[1]) < S.D)[None, :], b_f, 0)
    return b_f


@triton.jit
def largest_logit(p_x, stride, rows, S: tl.constexpr):
    """The binary logarithm of a token's largest feature (C,), of the map "softmax"."""
    b_largest = tl.full((S.C,), FLOOR, tl.float32)
    TILES: tl.constexpr = S.BM // S.TILE
    for i in tl.static_range(TILES):  # all loads at once
        b_x = load_rows(p_x + i * S.TILE, stride, rows, S.D, S.C, S.TILE, i).to(tl.float32)
        if S.BM != S.D:
            b_x = tl.where((i * S.TILE + tl.arange(0, S.TILE) < S.D)[None, :], b_x, FLOOR)
        b_largest = tl.maximum(b_largest, tl.max(b_x, 1))
    return b_largest * LOG2E


@triton.jit
def _tile(FIRST: tl.constexpr, SIZE: tl.constexpr):
    return FIRST + tl.arange(0, SIZE)


@triton.jit
def load_sums(p_far, i_far, p_near, i_near, factor, i_m, i_e, S: tl.constexpr):
    """Rows i_m and columns i_e of the sums of a chunk's segment, if there are any, times factor, plus the chunk's."""
    i_x = i_m[:, None] * S.BE + i_e[None, :]
    b_x = tl.load(p_near + i_near * (S.BM * S.BE) + i_x)
    if p_far is not None:
        b_x = scaled_sum(tl.load(p_far + i_far * (S.BM * S.BE) + i_x), factor, b_x)
    return b_x


@triton.jit
def load_z(p_far, i_far, p_near, i_near, factor, i_m, S: tl.constexpr):
    """`load_sums` of z, in float32; zeros without a normalizer."""
    b_z = zeros(i_m.shape[0])
    if S.NORMALIZE:
        b_z = tl.load(p_near + i_near * S.BM + i_m)
        if p_far is not None:
            b_z += tl.load(p_far + i_far * S.BM + i_m) * factor
    return b_z


@triton.jit
def store_sums(p_kv, p_z, i_x, i_m, i_e, i_v, b_kv, b_z, S: tl.constexpr):
    """Store rows i_m and columns i_e, the tile i_v, of matrix i_x of a stack of (BM, BE), and with the first tile rows
    i_m of one of (BM,).
    """
    p_kv += i_x * (S.BM * S.BE) + i_m[:, None] * S.BE + i_e[None, :]
    # Not to stay in the L2 cache, which holds the inputs of the other tiles' programs.
    tl.store(p_kv, b_kv.to(p_kv.dtype.element_ty), cache_modifier=".cs")
    if S.NORMALIZE:
        if i_v == 0:
            tl.store(p_z + i_x * S.BM + i_m, b_z)


@triton.jit
def sums_index(first, sequences, S: tl.constexpr):
    """Tile of features, tile of values, then as `sequence_index`, of a program that sums."""
    TILES: tl.constexpr = S.BE // S.TV
    i_tile, i_s, i_x, i_n, i_b, i_h = sequence_index(tl.program_id(0), first, sequences, S.BM // S.TM * TILES, S)
    return i_tile // TILES, i_tile % TILES, i_s, i_x, i_n, i_b, i_h


@triton.jit(do_not_specialize=["T"])
def linear_tiled_chunk_forward_scales_kernel(p_k, p_lengths, p_scale, p_peak, p_largest, T, k, S: tl.constexpr):
    """Scales of keys (B, Hkv, chunks, C), FLOOR for hidden ones; the largest so far in the chunk, not rounded; and
    the chunk's, (B, Hkv, chunks).
    """
    i_h, _, i_c, i_b = program_index(tl.cdiv(T, S.C), S.HKV)
    rows = visible_length(p_lengths, i_b, T) - i_c * S.C
    i_t = tl.arange(0, S.C)
    b_scale = largest_logit(token_pointer(p_k, k, i_b, i_c * S.C, i_h), k.t, rows, S)
    b_scale = tl.where(i_t < rows, b_scale, FLOOR)
    i_o = (i_b * S.HKV + i_h) * tl.cdiv(T, S.C) + i_c
    tl.store(p_scale + i_o * S.C + i_t, tl.ceil(b_scale))
    tl.store(p_peak + i_o * S.C + i_t, running_maximum(b_scale))
    tl.store(p_largest + i_o, tl.max(b_scale))


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_tiled_chunk_forward_sums_kernel(
    p_k, p_v, p_lengths, p_largest, p_shift, p_total, p_total_z, p_prefix, p_prefix_z, p_reference,
    T, segments, chunks, first, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """Σ φ(k) vᵀ and Σ φ(k) of one segment, for one tile of features and of values, at the scale of the segment's end.

    p_prefix, p_prefix_z: (sequences, chunks, BM, ·) the segment's sums before each chunk, at the scale of that chunk.
    p_reference: (B, Hkv, chunks + 1) the references before each chunk and after the last, computed here unless
    p_largest is None.
    """
    i_m, i_v, i_s, i_x, i_n, i_b, i_h = sums_index(first, sequences, S)
    first_feature, first_value = i_m * S.TM, i_v * S.TV
    i_0 = i_s * chunks * S.C
    rows = visible_length(p_lengths, i_b, T) - i_0
    i_c = i_x * tl.cdiv(T, S.C)
    c = tl.full((), FLOOR, tl.float32)
    if S.SCALED:
        p_reference += i_x  # one more than there are chunks
        if p_largest is None:
            c = tl.load(p_reference + i_c + i_s * chunks)
        else:
            if p_shift is not None:
                c = tl.maximum(c, tl.load(p_shift + i_x) * LOG2E)
            for i in range(0, i_s * chunks, 256):
                i_earlier = i + tl.arange(0, 256)
                b_largest = tl.load(p_largest + i_c + i_earlier, mask=i_earlier < i_s * chunks, other=FLOOR)
                c = tl.maximum(c, tl.max(b_largest))
    i_c += i_s * chunks
    i_p = i_n * tl.cdiv(T, S.C) + i_s * chunks
    p_k = token_pointer(p_k, k, i_b, i_0, i_h, first_feature)
    p_v = token_pointer(p_v, v, i_b, i_0, i_h, first_value)
    i_f, i_e = first_feature + tl.arange(0, S.TM), first_value + tl.arange(0, S.TV)
    b_kv = zeros(S.TM, S.TV)
    b_z = zeros(S.TM)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        store_sums(p_prefix, p_prefix_z, i_p, i_f, i_e, i_v, b_kv, b_z, S)
        b_k = load_rows(p_k, k.t, rows, S.D, S.C, S.TM, i_m)
        b_v = load_rows(p_v, v.t, rows, S.E, S.C, S.TV, i_v)
        b_scale = zeros(S.C)
        if S.SCALED:
            if p_largest is None:
                c_last = tl.load(p_reference + i_c + 1)
            else:
                c_last = tl.maximum(c, tl.load(p_largest + i_c))
                if i_m + i_v == 0:
                    tl.store(p_reference + i_c, c)
            decay = exp2(tl.ceil(c) - tl.ceil(c_last))
            b_kv *= decay
            b_z *= decay
            b_scale += tl.ceil(c_last)
            c = c_last
        b_f = key_features(b_k, b_scale, rows, first_feature, S)
        if S.NORMALIZE:
            if i_v == 0:
                b_z += tl.sum(b_f, 0)
        b_kv = tl.dot(tl.trans(b_f.to(tl.bfloat16)), b_v, b_kv)
        p_k += S.C * k.t
        p_v += S.C * v.t
        i_c += 1
        i_p += 1
        rows -= S.C
    store_sums(p_total, p_total_z, i_n * segments + i_s, i_f, i_e, i_v, b_kv, b_z, S)
    if S.SCALED:
        if p_largest is not None:
            if i_m + i_v == 0:
                tl.store(p_reference + i_c, c)


@triton.jit
def chunk_scales(p_scale, p_peak, p_reference, i_x, i_p, i_c, chunks, T, S: tl.constexpr, BACK: tl.constexpr = False):
    """Scales of a chunk: n_j and r_i (C,); those of the sums before it and after it; and the factor that brings the
    sums before its segment to the first (BACK: the gradients of those after its segment to the second).
    """
    b_scale, b_reference = zeros(S.C), zeros(S.C)
    c, c_last, factor = 0.0, 0.0, tl.full((), 1.0, tl.float32)
    if S.SCALED:
        p_reference += i_x * (tl.cdiv(T, S.C) + 1)
        c, c_last = load_reference(p_reference, i_c), load_reference(p_reference, i_c + 1)
        b_scale = tl.load(p_scale + i_p * S.C + tl.arange(0, S.C))
        b_reference = tl.maximum(tl.ceil(tl.load(p_peak + i_p * S.C + tl.arange(0, S.C))), c)
        if BACK:
            i_end = tl.minimum((i_c // chunks + 1) * chunks, tl.cdiv(T, S.C))
            factor = exp2(c_last - load_reference(p_reference, i_end))
        else:
            factor = exp2(load_reference(p_reference, i_c // chunks * chunks) - c)
    return b_scale, b_reference, c, c_last, factor


@triton.jit
def scale_pairs(b_x, b_scale, b_reference, rows, S: tl.constexpr):
    """x (C, C) times 2^(n_j − r_i) for visible keys j ≤ i, else 0."""
    if S.SCALED:
        return b_x * pair_scales(b_scale, b_reference, S)
    return tl.where(visible_pairs(rows, S), b_x, 0)


@triton.jit
def scale_pairs_transposed(b_x, b_scale, b_reference, rows, S: tl.constexpr):
    """`scale_pairs` with a row for each key."""
    if S.SCALED:
        return b_x * pair_scales_transposed(b_scale, b_reference, S)
    return tl.where(visible_pairs_transposed(rows, S), b_x, 0)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_tiled_chunk_forward_kernel(
    p_q, p_k, p_v, p_lengths, p_offset, p_scale, p_peak, p_reference, p_before, p_before_z, p_prefix, p_prefix_z,
    p_out, p_den,
    T, segments, chunks, first, sequences, q, k, v, S: tl.constexpr
):  # fmt: skip
    """One chunk of one query head, of the sequences in the workspace. p_offset: (B, H, chunks, C) the binary logarithm
    of each query's largest feature, for softmax.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_g, i_c, i_x, i_n, i_b, i_kv = sequence_index(tl.program_id(0), first, sequences, GROUP, S)
    i_h, i_0 = i_kv * GROUP + i_g, i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    p_k, p_v = token_pointer(p_k, k, i_b, i_0, i_kv), token_pointer(p_v, v, i_b, i_0, i_kv)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = chunk_index(i_c, i_x, i_n, T, segments, chunks, S)
    b_scale, b_reference, c, _, old = chunk_scales(p_scale, p_peak, p_reference, i_x, i_p, i_c, chunks, T, S)
    b_offset = tl.full((S.C,), 1.0, tl.float32)
    if S.MAP == "softmax":
        b_offset = largest_logit(p_q, q.t, left, S)
        tl.store(p_offset + ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t, b_offset)
    b_p = zeros(S.C, S.C)
    b_out = zeros(S.C, S.E1)
    b_rest = b_out
    if S.E2 > 0:
        b_rest = zeros(S.C, S.E2)
    b_den = zeros(S.C)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_q = load_rows(p_q + i_m, q.t, left, S.D, S.C, S.TILE, i_m // S.TILE)
        b_k = load_rows(p_k + i_m, k.t, rows, S.D, S.C, S.TILE, i_m // S.TILE)
        b_query = query_features(b_q, b_offset, i_m, S).to(tl.bfloat16)
        b_f = key_features(b_k, b_scale, rows, i_m, S).to(tl.bfloat16)
        if S.NORMALIZE:
            b_z = load_z(p_before_z, i_far, p_prefix_z, i_near, old, i_f, S)
            b_den += tl.sum(widen(b_query) * b_z[None, :], 1)
        b_p = tl.dot(b_query, tl.trans(b_f), b_p)
        b_kv = load_sums(p_before, i_far, p_prefix, i_near, old, i_f, tl.arange(0, S.E1), S)
        b_out = tl.dot(b_query, b_kv, b_out)
        if S.E2 > 0:
            b_kv = load_sums(p_before, i_far, p_prefix, i_near, old, i_f, _tile(S.E1, S.E2), S)
            b_rest = tl.dot(b_query, b_kv, b_rest)
    b_p = scale_pairs(b_p, b_scale, b_reference, rows, S)
    if S.SCALED:
        b_row = exp2(c - b_reference)
        b_den *= b_row
        b_out *= b_row[:, None]
        if S.E2 > 0:
            b_rest *= b_row[:, None]
    b_v, b_v_rest = load_columns(p_v, v.t, rows, S.E, S.C, S.E1, S.E2)
    b_rounded = b_p.to(tl.bfloat16)
    b_out = tl.dot(b_rounded, b_v, b_out)
    if S.E2 > 0:
        b_rest = tl.dot(b_rounded, b_v_rest, b_rest)
    i_row = (i_b * T + i_0) * S.H + i_h
    if S.NORMALIZE:
        b_den += tl.sum(b_p, 1)
        tl.store(p_den + i_row + i_t * S.H, b_den, mask=i_t < left)
        b_den = inverse(b_den)
        b_out *= b_den[:, None]
        if S.E2 > 0:
            b_rest *= b_den[:, None]
    store_columns(p_out + i_row * S.E, S.H * S.E, left, b_out, b_rest, S.E, S.C, S.E1, S.E2)


@triton.jit
def _read_gradient(b_g, b_a, b_slope, b_delta, b_row, b_f, b_z, S: tl.constexpr):
    """dφ(q) den times the slopes of a block of features, from g = S d."""
    if S.NORMALIZE:
        b_g -= b_delta[:, None] * b_z[None, :]
    if S.SCALED:
        b_g *= b_row[:, None]
    return tl.dot(b_a, b_f, b_g) * b_slope


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_tiled_chunk_backward_queries_kernel(
    p_q, p_k, p_v, p_lengths, p_offset, p_scale, p_peak, p_reference, p_before, p_before_z, p_prefix, p_prefix_z,
    p_out, p_den, p_d_out, p_delta, p_normalized, p_d_q,
    T, segments, chunks, first, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """dq of one chunk of one query head, of the sequences in the workspace.

    p_delta, p_normalized: (B, H, chunks, C) get Δ and what makes φ(q) to q̂, for the other kernels.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_g, i_c, i_x, i_n, i_b, i_kv = sequence_index(tl.program_id(0), first, sequences, GROUP, S)
    i_h, i_0 = i_kv * GROUP + i_g, i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_h), token_pointer(p_k, k, i_b, i_0, i_kv)
    p_v, p_d_out = token_pointer(p_v, v, i_b, i_0, i_kv), token_pointer(p_d_out, d, i_b, i_0, i_h)
    i_row = (i_b * T + i_0) * S.H + i_h
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = chunk_index(i_c, i_x, i_n, T, segments, chunks, S)
    i_o = ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t
    b_scale, b_reference, c, _, old = chunk_scales(p_scale, p_peak, p_reference, i_x, i_p, i_c, chunks, T, S)
    b_normal = tl.full((S.C,), 1.0, tl.float32)
    if S.NORMALIZE:
        p_out += i_row * S.E
        b_den = load_column(p_den + i_row, S.H, left, S.C, 0.0)
        if S.MAP == "softmax":
            m_zero = b_den < ZERO_NORMALIZER
            b_normal = tl.load(p_offset + i_o) + log2(tl.where(m_zero, 1.0, b_den))
            b_normal = tl.where(m_zero, -2 * FLOOR, b_normal)
        else:
            b_normal = inverse(b_den)
        tl.store(p_normalized + i_o, b_normal)
    b_a = zeros(S.C, S.C)
    b_delta = zeros(S.C)
    b_g = zeros(S.C, S.D1)
    b_rest = b_g
    if S.D2 > 0:
        b_rest = zeros(S.C, S.D2)
    for i in range(0, S.BE, S.TILE):
        i_e = i + tl.arange(0, S.TILE)
        b_d = load_rows(p_d_out + i, d.t, left, S.E, S.C, S.TILE, i // S.TILE)
        b_v = load_rows(p_v + i, v.t, rows, S.E, S.C, S.TILE, i // S.TILE)
        if S.NORMALIZE:
            b_out = load_rows(p_out + i, S.H * S.E, left, S.E, S.C, S.TILE, i // S.TILE)
            b_delta += tl.sum(b_d.to(tl.float32) * b_out.to(tl.float32), 1)
        b_a = tl.dot(b_d, tl.trans(b_v), b_a)
        b_kv = load_sums(p_before, i_far, p_prefix, i_near, old, tl.arange(0, S.D1), i_e, S)
        b_g = tl.dot(b_d, tl.trans(b_kv), b_g)
        if S.D2 > 0:
            b_kv = load_sums(p_before, i_far, p_prefix, i_near, old, _tile(S.D1, S.D2), i_e, S)
            b_rest = tl.dot(b_d, tl.trans(b_kv), b_rest)
    b_a = scale_pairs(b_a - b_delta[:, None], b_scale, b_reference, rows, S).to(tl.bfloat16)
    b_row = exp2(c - b_reference)
    b_k, b_k_rest = load_columns(p_k, k.t, rows, S.D, S.C, S.D1, S.D2)
    b_q, b_q_rest = load_columns(p_q, q.t, left, S.D, S.C, S.D1, S.D2)
    b_slope = query_slopes(b_q, b_normal, 0, S)
    b_f = key_features(b_k, b_scale, rows, 0, S).to(tl.bfloat16)
    b_z = load_z(p_before_z, i_far, p_prefix_z, i_near, old, tl.arange(0, S.D1), S)
    b_g = _read_gradient(b_g, b_a, b_slope, b_delta, b_row, b_f, b_z, S)
    b_sum, b_total = tl.sum(b_slope, 1), tl.sum(b_g, 1)
    if S.D2 > 0:
        b_slope = query_slopes(b_q_rest, b_normal, S.D1, S)
        b_f = key_features(b_k_rest, b_scale, rows, S.D1, S).to(tl.bfloat16)
        b_z = load_z(p_before_z, i_far, p_prefix_z, i_near, old, _tile(S.D1, S.D2), S)
        b_rest = _read_gradient(b_rest, b_a, b_slope, b_delta, b_row, b_f, b_z, S)
        b_sum += tl.sum(b_slope, 1)
        b_total += tl.sum(b_rest, 1)
    if S.MAP == "softmax":
        # A constant added to q changes nothing, so dq sums to 0: remove what the rounding of `out` adds to Δ.
        b_delta += b_total
        b_total *= inverse(b_sum)
        b_q = reload_rows(p_q, q.t, left, S.D1 if S.D2 > 0 else S.D, S.C, S.D1)
        b_g -= query_slopes(b_q, b_normal, 0, S) * b_total[:, None]
        if S.D2 > 0:
            b_rest -= b_slope * b_total[:, None]
    if S.NORMALIZE:
        tl.store(p_delta + i_o, b_delta)
    store_columns(p_d_q + i_row * S.D, S.H * S.D, left, b_g, b_rest, S.D, S.C, S.D1, S.D2)


@triton.jit
def load_normal(p_normalized, i_o, S: tl.constexpr):
    """What makes φ(q) to q̂, see `query_features`."""
    b_normal = tl.full((S.C,), 1.0, tl.float32)
    if S.NORMALIZE:
        b_normal = tl.load(p_normalized + i_o)
    return b_normal


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_tiled_chunk_backward_sums_kernel(
    p_q, p_d_out, p_normalized, p_delta, p_peak, p_reference, p_d_total, p_d_total_z, p_suffix, p_suffix_z,
    T, segments, chunks, first, sequences, q, d, S: tl.constexpr
):  # fmt: skip
    """dS and dz of one segment, for one tile of features and of values, at its start's scale, summed over a group.

    p_suffix, p_suffix_z: (sequences, chunks, BM, ·) the part that comes after each chunk, at the scale of the chunk's
    end.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_m, i_v, i_s, i_x, i_n, i_b, i_kv = sums_index(first, sequences, S)
    first_feature, first_value = i_m * S.TM, i_v * S.TV
    count = tl.minimum(chunks, tl.cdiv(T, S.C) - i_s * chunks)
    i_l = (i_s * chunks + count - 1) * S.C
    p_q = token_pointer(p_q, q, i_b, i_l, i_kv * GROUP, first_feature)
    p_d_out = token_pointer(p_d_out, d, i_b, i_l, i_kv * GROUP, first_value)
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    i_p = i_n * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    i_q = (i_b * S.H + i_kv * GROUP) * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    i_t = tl.arange(0, S.C)
    i_f, i_e = first_feature + tl.arange(0, S.TM), first_value + tl.arange(0, S.TV)
    b_d_kv = zeros(S.TM, S.TV)
    b_d_z = zeros(S.TM)
    c_last = 0.0
    if S.SCALED:
        p_reference += i_x
        c_last = load_reference(p_reference, i_c + 1)
    left = T - i_l
    for _ in range(count):
        store_sums(p_suffix, p_suffix_z, i_p, i_f, i_e, i_v, b_d_kv, b_d_z, S)
        b_back = zeros(S.C)
        if S.SCALED:
            c = load_reference(p_reference, i_c)
            decay = exp2(c - c_last)
            b_d_kv *= decay
            b_d_z *= decay
            b_back = tl.maximum(tl.ceil(tl.load(p_peak + i_c * S.C + i_t)), c) - c
            c_last = c
        for g in range(GROUP):
            i_o = (i_q + g * tl.cdiv(T, S.C)) * S.C + i_t
            b_q = load_rows(p_q + g * q.h, q.t, left, S.D, S.C, S.TM, i_m)
            b_d = load_rows(p_d_out + g * d.h, d.t, left, S.E, S.C, S.TV, i_v)
            b_query = query_features(b_q, load_normal(p_normalized, i_o, S) + b_back, first_feature, S)
            if S.NORMALIZE:
                if i_v == 0:
                    b_d_z -= tl.sum(b_query * tl.load(p_delta + i_o)[:, None], 0)
            b_d_kv = tl.dot(tl.trans(b_query.to(tl.bfloat16)), b_d, b_d_kv)
        p_q -= S.C * q.t
        p_d_out -= S.C * d.t
        i_c -= 1
        i_p -= 1
        i_q -= 1
        left += S.C
    store_sums(p_d_total, p_d_total_z, i_n * segments + i_s, i_f, i_e, i_v, b_d_kv, b_d_z, S)


@triton.jit
def _key_gradient(b_g, b_x, b_f, S: tl.constexpr):
    """dk from df, k and f; scales are constants."""
    if S.MAP == "softmax":
        b_g = b_g * b_f
    else:
        b_g = pointwise_gradient(b_g, b_x, b_f, S)
    return b_g


@triton.jit
def _differentiate_keys(inputs, states, scales, rows_of, index, p_d_k, T, q, k, v, d, S: tl.constexpr):
    """dk of one chunk."""
    GROUP: tl.constexpr = S.H // S.HKV
    p_q, p_k, p_v, p_d_out = inputs
    p_after, p_after_z, p_suffix, p_suffix_z, i_far, i_near = states
    b_scale, b_reference, c_last, new = scales
    p_delta, p_normalized, i_q = rows_of
    left, rows = index
    i_t = tl.arange(0, S.C)
    b_end = tl.where(i_t < rows, exp2(b_scale - c_last), 0)
    b_g = zeros(S.C, S.D1)
    b_rest = b_g
    if S.D2 > 0:
        b_rest = zeros(S.C, S.D2)
    for g in range(GROUP):
        i_o = i_q + g * tl.cdiv(T, S.C) * S.C + i_t
        b_a = zeros(S.C, S.C)
        for i in range(0, S.BE, S.TILE):
            i_e = i + tl.arange(0, S.TILE)
            b_v = load_rows(p_v + i, v.t, rows, S.E, S.C, S.TILE, i // S.TILE)
            b_d = load_rows(p_d_out + g * d.h + i, d.t, left, S.E, S.C, S.TILE, i // S.TILE)
            b_a = tl.dot(b_v, tl.trans(b_d), b_a)
            if g == 0:
                b_d_kv = load_sums(p_after, i_far, p_suffix, i_near, new, tl.arange(0, S.D1), i_e, S)
                b_g = tl.dot(b_v, tl.trans(b_d_kv), b_g)
                if S.D2 > 0:
                    b_d_kv = load_sums(p_after, i_far, p_suffix, i_near, new, _tile(S.D1, S.D2), i_e, S)
                    b_rest = tl.dot(b_v, tl.trans(b_d_kv), b_rest)
        if g == 0:
            b_d_z = load_z(p_after_z, i_far, p_suffix_z, i_near, new, tl.arange(0, S.D1), S)
            b_g = (b_g + b_d_z[None, :]) * b_end[:, None]
            if S.D2 > 0:
                b_d_z = load_z(p_after_z, i_far, p_suffix_z, i_near, new, _tile(S.D1, S.D2), S)
                b_rest = (b_rest + b_d_z[None, :]) * b_end[:, None]
        if S.NORMALIZE:
            b_a -= tl.load(p_delta + i_o)[None, :]
        b_a = scale_pairs_transposed(b_a, b_scale, b_reference, rows, S).to(tl.bfloat16)
        b_normal = load_normal(p_normalized, i_o, S)
        b_q, b_q_rest = load_columns(p_q + g * q.h, q.t, left, S.D, S.C, S.D1, S.D2)
        b_g = tl.dot(b_a, query_features(b_q, b_normal, 0, S).to(tl.bfloat16), b_g)
        if S.D2 > 0:
            b_rest = tl.dot(b_a, query_features(b_q_rest, b_normal, S.D1, S).to(tl.bfloat16), b_rest)
    b_k, b_k_rest = load_columns(p_k, k.t, rows, S.D, S.C, S.D1, S.D2)
    b_g = _key_gradient(b_g, b_k, key_features(b_k, b_scale, rows, 0, S), S)
    if S.D2 > 0:
        b_rest = _key_gradient(b_rest, b_k_rest, key_features(b_k_rest, b_scale, rows, S.D1, S), S)
    store_columns(p_d_k, S.HKV * S.D, left, b_g, b_rest, S.D, S.C, S.D1, S.D2)


@triton.jit
def _differentiate_values(inputs, states, scales, rows_of, index, p_d_v, T, q, k, d, S: tl.constexpr):
    """dv of one chunk."""
    GROUP: tl.constexpr = S.H // S.HKV
    p_q, p_k, _, p_d_out = inputs
    p_after, _, p_suffix, _, i_far, i_near = states
    b_scale, b_reference, c_last, new = scales
    _, p_normalized, i_q = rows_of
    left, rows = index
    i_t = tl.arange(0, S.C)
    b_d_v = zeros(S.C, S.E1)
    b_rest = b_d_v
    if S.E2 > 0:
        b_rest = zeros(S.C, S.E2)
    for g in range(GROUP):
        i_o = i_q + g * tl.cdiv(T, S.C) * S.C + i_t
        b_normal = load_normal(p_normalized, i_o, S)
        b_p = zeros(S.C, S.C)
        for i_m in range(0, S.BM, S.TILE):
            i_f = i_m + tl.arange(0, S.TILE)
            b_k = load_rows(p_k + i_m, k.t, rows, S.D, S.C, S.TILE, i_m // S.TILE)
            b_q = load_rows(p_q + g * q.h + i_m, q.t, left, S.D, S.C, S.TILE, i_m // S.TILE)
            b_f = key_features(b_k, b_scale, rows, i_m, S).to(tl.bfloat16)
            b_query = query_features(b_q, b_normal, i_m, S).to(tl.bfloat16)
            b_p = tl.dot(b_f, tl.trans(b_query), b_p)
            if g == 0:
                b_d_kv = load_sums(p_after, i_far, p_suffix, i_near, new, i_f, tl.arange(0, S.E1), S)
                b_d_v = tl.dot(b_f, b_d_kv, b_d_v)
                if S.E2 > 0:
                    b_d_kv = load_sums(p_after, i_far, p_suffix, i_near, new, i_f, _tile(S.E1, S.E2), S)
                    b_rest = tl.dot(b_f, b_d_kv, b_rest)
        if S.SCALED:
            if g == 0:
                b_end = exp2(b_scale - c_last)[:, None]
                b_d_v *= b_end
                if S.E2 > 0:
                    b_rest *= b_end
        b_p = scale_pairs_transposed(b_p, b_scale, b_reference, rows, S).to(tl.bfloat16)
        b_d, b_d_rest = load_columns(p_d_out + g * d.h, d.t, left, S.E, S.C, S.E1, S.E2)
        b_d_v = tl.dot(b_p, b_d, b_d_v)
        if S.E2 > 0:
            b_rest = tl.dot(b_p, b_d_rest, b_rest)
    store_columns(p_d_v, S.HKV * S.E, left, b_d_v, b_rest, S.E, S.C, S.E1, S.E2)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_tiled_chunk_backward_keys_kernel(
    p_q, p_k, p_v, p_lengths, p_scale, p_peak, p_reference, p_after, p_after_z, p_suffix, p_suffix_z, p_d_out,
    p_delta, p_normalized, p_d_k, p_d_v,
    T, segments, chunks, first, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """dk or dv of one chunk of a sequence in the workspace; keys are rows and queries columns.

    One program would need too many registers for both; two that run at the same time read the same memory once.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_program, i_c, i_x, i_n, i_b, i_kv = sequence_index(tl.program_id(0), first, sequences, 2, S)
    i_0 = i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_kv * GROUP), token_pointer(p_k, k, i_b, i_0, i_kv)
    p_v, p_d_out = token_pointer(p_v, v, i_b, i_0, i_kv), token_pointer(p_d_out, d, i_b, i_0, i_kv * GROUP)
    i_far, i_p, i_near = chunk_index(i_c, i_x, i_n, T, segments, chunks, S)
    b_scale, b_reference, _, c_last, new = chunk_scales(p_scale, p_peak, p_reference, i_x, i_p, i_c, chunks, T, S, True)
    i_q = ((i_b * S.H + i_kv * GROUP) * tl.cdiv(T, S.C) + i_c) * S.C
    i_row = (i_b * T + i_0) * S.HKV + i_kv
    inputs, states = (p_q, p_k, p_v, p_d_out), (p_after, p_after_z, p_suffix, p_suffix_z, i_far, i_near)
    scales, rows_of, index = (b_scale, b_reference, c_last, new), (p_delta, p_normalized, i_q), (left, rows)
    if i_program == 0:
        _differentiate_keys(inputs, states, scales, rows_of, index, p_d_k + i_row * S.D, T, q, k, v, d, S)
    else:
        _differentiate_values(inputs, states, scales, rows_of, index, p_d_v + i_row * S.E, T, q, k, d, S)


def forward(x: LinearInputs, problem: LinearProblem, *, zeroed: bool = True) -> tuple[Tensor | None, ...]:
    """Return out, the sums and their shift after the last token or None, den, and the workspace for `backward`.

    zeroed: Whether den is a tensor of its own and the workspace zeroed; otherwise den is None, and in the workspace.
    """
    x = x._replace(q=dense_rows(x.q), k=dense_rows(x.k), v=dense_rows(x.v), lengths=dense(x.lengths))
    x = x._replace(kv=dense(x.kv), shift=dense(x.shift))
    return forward_plan(x, problem)(x, zeroed=zeroed)


def backward(
    saved: LinearSaved, x: LinearInputs, problem: LinearProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and of the sums before, if there are any."""
    x = x._replace(q=dense_rows(x.q), k=dense_rows(x.k), v=dense_rows(x.v), lengths=dense(x.lengths), kv=dense(x.kv))
    saved = saved._replace(d_out=dense_rows(saved.d_out), d_kv=dense(saved.d_kv), out=dense(saved.out))
    return backward_plan(saved, x, problem)(saved, x)


def forward_plan(x: LinearInputs, problem: LinearProblem) -> _TiledChunkForward:
    """Return the plan of `forward` for inputs with dense rows."""
    return _TiledChunkForward.of((x.q, x.k, x.v, x.lengths, x.kv, x.shift), problem)


def backward_plan(saved: LinearSaved, x: LinearInputs, problem: LinearProblem) -> _TiledChunkBackward:
    """Return the plan of `backward` for inputs with dense rows."""
    given = x.q, x.k, x.v, x.lengths, x.kv, saved.d_out, saved.d_kv, saved.out, saved.den, saved.starts
    return _TiledChunkBackward.of(given, problem)


def saved_size(x: LinearInputs, problem: LinearProblem) -> int:
    """Return the number of float32 elements that `forward` saves: three per token and head with the map "softmax"."""
    B, T, H, _ = x.q.shape
    return _saved(B, T, H, x.k.shape[2], problem.feature_map == "softmax").size


class _TiledChunkPlan(StatesPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem, CHUNK)
        (D1, D2), (E1, E2) = _blocks(self.D), _blocks(self.E)
        scaled = problem.feature_map == "softmax"
        sizes = self.H, self.Hkv, self.D, self.E, CHUNK, D1 + D2, E1 + E2, D1, D2, E1, E2, TILE, TILE, TILE
        self.S = TiledChunkSizes(*sizes, problem.feature_map, scaled, problem.normalize)
        self.tilings = TILINGS[192 if max(self.S.BM, self.S.BE) <= 192 else 256]
        self.tiles, self.programs = self.S.BM // self.S.TM * (self.S.BE // self.S.TV), PROGRAMS
        self.saved = _saved(self.B, self.T, self.H, self.Hkv, scaled)
        self.eager = Workspace(self.den_buffer, *self.saved.buffers)

    def saved_pointers(self, saved: Tensor, den: Tensor | None) -> list[Any]:
        """Return den and the buffers of `saved`, which holds den too if it is None."""
        if den is None:
            return self.pointers(self.eager, saved)
        return [*self.addresses(den), *self.pointers(self.saved, saved)]

    def sums_launches(self, part: Part, *, back: bool, states: bool) -> tuple[Launch, Launch | None]:
        """Return the sums of a part's segments and their scan; None where one segment needs none.

        states: Whether there are sums before the first segment or after the last one, or gradients of them.
        """
        kernel, inputs, unused = linear_tiled_chunk_forward_sums_kernel, "kv", {"H": 0}
        if back:
            kernel, inputs, unused = linear_tiled_chunk_backward_sums_kernel, "qd", {}
        sums = self.of_part(kernel, self.tilings.sums, part, part.segments * self.tiles, inputs, **unused)
        if part.segments == 1 and not states:
            return sums, None
        return sums, self.scan_part(
            part, back=back, SCALED=self.S.SCALED, NORMALIZE=self.S.NORMALIZE, BASE="2" if self.S.SCALED else "e"
        )


class _TiledChunkForward(_TiledChunkPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        parts = self.split(READ_SHARE)
        self.workspace = Workspace(*self.stack(parts[0]), (self.heads * self.chunks, torch.float32))
        if self.S.SCALED:
            other = {"H": 0, "E": 0, "BE": 0, "E1": 0, "E2": 0}
            kernel, programs = linear_tiled_chunk_forward_scales_kernel, self.heads * self.chunks
            self.scales = self.tiled(kernel, self.tilings.scales, programs, (), "k", **other)
        kernel, programs = linear_tiled_chunk_forward_kernel, self.H // self.Hkv * self.chunks
        read = [self.of_part(kernel, self.tilings.read, part, programs, "qkv") for part in parts]
        states = key[4] is not None or self.final
        self.parts = [
            (*self.sums_launches(part, back=False, states=states), own) for part, own in zip(parts, read, strict=True)
        ]

    def __call__(self, x: LinearInputs, *, zeroed: bool = False) -> tuple[Tensor | None, ...]:
        """Launch; see `forward`."""
        out, den, kv_out, shift_out = self.results(x.q, x.v, den=zeroed)
        saved = (self.saved if zeroed else self.eager).allocate(x.q, zeroed=zeroed)
        work = self.workspace.allocate(x.q)
        p_den, offset, scale, peak, references = self.saved_pointers(saved, den)
        total, total_z, prefix, prefix_z, before, largest = self.pointers(self.workspace, work)
        q, k, v, lengths, kv, shift = self.addresses(x.q, x.k, x.v, x.lengths, x.kv, x.shift)
        p_out, p_kv, p_shift = self.addresses(out, kv_out, shift_out)
        with on_device(x.q):
            if self.S.SCALED:
                self.scales(k, lengths, scale, peak, largest)
            for sums, scan, read in self.parts:
                sums(k, v, lengths, largest, shift, total, total_z, prefix, prefix_z, references)
                far = None, None
                if scan is not None:
                    scan(total, total_z, before, None, references, kv, None if self.S.SCALED else shift, p_kv, p_shift)
                    far = before, total_z
                states = *far, prefix, prefix_z
                read(q, k, v, lengths, offset, scale, peak, references, *states, p_out, p_den)
        return out, kv_out, shift_out, den, saved


class _TiledChunkBackward(_TiledChunkPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        self.tensors["d"] = key[5]
        queries, keys = self.split(QUERIES_SHARE), self.split(KEYS_SHARE)
        tokens = self.B * self.chunks * self.H * CHUNK, torch.float32
        self.rows = Workspace(tokens, tokens)
        self.query_stack, self.key_stack = Workspace(*self.stack(queries[0])), Workspace(*self.stack(keys[0]))
        kernel, programs = linear_tiled_chunk_backward_queries_kernel, self.H // self.Hkv * self.chunks
        own = [self.of_part(kernel, self.tilings.queries, part, programs, "qkvd") for part in queries]
        self.query_parts = [
            (*self.sums_launches(part, back=False, states=key[4] is not None), launch)
            for part, launch in zip(queries, own, strict=True)
        ]
        self.key_parts = [
            (
                *self.sums_launches(part, back=True, states=key[4] is not None or key[6] is not None),
                self.of_part(linear_tiled_chunk_backward_keys_kernel, self.tilings.keys, part, 2 * self.chunks, "qkvd"),
            )
            for part in keys
        ]

    def __call__(self, saved: LinearSaved, x: LinearInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Launch; see `backward`."""
        den, offset, *scales = self.saved_pointers(saved.starts, saved.den)
        peak, references = scales[1:]
        rows = self.rows.allocate(x.q)
        delta, normalized = self.pointers(self.rows, rows)
        stack = self.query_stack.allocate(x.q)
        total, total_z, prefix, prefix_z, before = self.pointers(self.query_stack, stack)
        d_q = new_like(x.q)
        d_start = None if x.kv is None else x.kv.new_empty(x.kv.shape)
        q, k, v, lengths, kv, p_d_q = self.addresses(x.q, x.k, x.v, x.lengths, x.kv, d_q)
        out, d_out, d_kv, p_start = self.addresses(saved.out, saved.d_out, saved.d_kv, d_start)
        with on_device(x.q):
            for sums, scan, queries in self.query_parts:
                sums(k, v, lengths, None, None, total, total_z, prefix, prefix_z, references)
                far = None, None
                if scan is not None:
                    scan(total, total_z, before, None, references, kv, None, None, None)
                    far = before, total_z
                states = *far, prefix, prefix_z
                given = out, den, d_out, delta, normalized
                queries(q, k, v, lengths, offset, *scales, *states, *given, p_d_q)
            del stack, total, total_z, prefix, prefix_z, before, far, states  # The next stack takes their memory.
            stack = self.key_stack.allocate(x.q)
            total, total_z, suffix, suffix_z, after = self.pointers(self.key_stack, stack)
            d_k, d_v = new_like(x.k), new_like(x.v)
            p_d_k, p_d_v = self.addresses(d_k, d_v)
            for sums, scan, keys in self.key_parts:
                sums(q, d_out, normalized, delta, peak, references, total, total_z, suffix, suffix_z)
                far = None, None
                if scan is not None:
                    scan(total, total_z, after, None, references, d_kv, None, p_start, None)
                    far = after, total_z
                keys(q, k, v, lengths, *scales, *far, suffix, suffix_z, d_out, delta, normalized, p_d_k, p_d_v)
        return d_q, d_k, d_v, d_start


def _blocks(size: int) -> tuple[int, int]:
    """Return the widths of one or two blocks of at least a tile for this many columns; 0 for no second."""
    first, rest = columns(max(size, TILE))
    return first, max(rest, TILE) if rest else 0


def _saved(B: int, T: int, H: int, Hkv: int, scaled: bool) -> Workspace:
    """Offsets of queries, scales of keys and the largest so far, and references before each chunk; empty for maps
    without scales.
    """
    chunks = (T + CHUNK - 1) // CHUNK if scaled else 0
    tokens = [(B * heads * chunks * CHUNK, torch.float32) for heads in (H, Hkv, Hkv)]
    return Workspace(*tokens, (B * Hkv * (chunks + 1) if scaled else 0, torch.float32))
