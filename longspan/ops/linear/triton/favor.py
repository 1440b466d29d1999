"""Causal FAVOR+ in bfloat16, normalized, with any number of features: they are computed in tiles, because a few hundred
do not fit into registers.

With n_j the binary logarithm of key j's largest feature, rounded up, and r_i the largest n_j that query i has seen,

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) 2^(n_j − r_i) v_j,      f_j = φ(k_j) 2^(−n_j) ≤ 1,

so no power of two here exceeds 1, and r_i depends on the past alone. A first kernel computes the scales of queries and
keys; then the sums before each chunk are computed by segments, `scan` adds them up, and all chunks are read in
parallel. A reference is the largest logarithm of a key's features so far; sums are divided by 2 to its power, rounded
up, so that changes of scale are exact.

Backward, with q̂ = φ(q) / den, Δ_i = d_i · out_i for the gradient d of out, S and z the sums before a chunk at scale c,
and dS and dz the gradients of those after it at the scale e of its end,

    a_ij = 2^(n_j − r_i) (d_i · v_j − Δ_i),
    dφ(q_i) den_i = Σ_{j ≤ i} a_ij f_j + 2^(c − r_i) (S d_i − Δ_i z),
    df_j = Σ_{i ≥ j} a_ij q̂_i + 2^(n_j − e) (dS v_j + dz),
    dv_j = Σ_{i ≥ j} 2^(n_j − r_i) (q̂_i · f_j) d_i + 2^(n_j − e) dSᵀ f_j.

With an epsilon ε, φ(q_i) is 2^(w·q_i − ‖q_i‖²/2 − max_m w_m·q_i) + ε, n_j is of the largest w·k_j alone, and with c_i
the largest of those so far, not rounded, every visible key weighs

    e_i = ε 2^(c_i − r_i) Σ_m φ(q_i)_m

more: num_i contains e_i Σ_{j ≤ i} v_j, dφ(q_i) den_i contains ε 2^(c_i − r_i) Σ_{j ≤ i} (d_i · v_j − Δ_i), the same for
all features, and dv_j contains Σ_{i ≥ j} e_i d_i / den_i. Sums of all chunks before, or after, have their own scan.

Gradients of queries need the sums before a chunk, those of keys the gradients of the sums after it: in two kernels they
need fewer registers, and only one of the two stacks of sums is in memory at a time.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, exp2, round_once, scaled_sum, widen
from longspan.ops.common.launch import Launch, Signature, Workspace, dense, dense_rows, new_like, on_device
from longspan.ops.common.tiles import (
    FLOOR,
    ZERO_NORMALIZER,
    inverse,
    load_column,
    load_inputs,
    load_values,
    padded,
    program_index,
    reload_rows,
    running_maximum,
    store_inputs,
    store_values,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved
from longspan.ops.linear.triton.scan import Part, StatesPlan, is_small

# Features in a tile, warps, pipeline stages, the register limit per thread, and the largest number of programs that go
# through segments: as many as a large GPU runs at once.
FavorTiling = namedtuple("FavorTiling", "tile warps stages registers programs", defaults=(None, 0))
FavorTilings = namedtuple("FavorTilings", "scales sums read delta queries keys")

CHUNK = 64
TILE = 64
# For head and value dimensions, padded, up to 64, 128 and 256. The tile of `scales` is the largest one.
TILINGS = {
    64: FavorTilings(
        scales=FavorTiling(256, 4, 3, None, 264),
        sums=FavorTiling(TILE, 4, 3, 168, 396),
        read=FavorTiling(TILE, 4, 1, 168),
        delta=FavorTiling(0, 4, 1),
        queries=FavorTiling(TILE, 4, 1),
        keys=FavorTiling(TILE, 4, 1),
    ),
    128: FavorTilings(
        scales=FavorTiling(64, 4, 3, None, 264),
        sums=FavorTiling(TILE, 4, 2, None, 264),
        read=FavorTiling(TILE, 4, 1),
        delta=FavorTiling(0, 4, 1),
        queries=FavorTiling(TILE, 4, 1),
        keys=FavorTiling(TILE, 4, 1),
    ),
    256: FavorTilings(
        scales=FavorTiling(64, 4, 2, None, 264),
        sums=FavorTiling(TILE, 8, 2, None, 132),
        read=FavorTiling(TILE, 8, 1),
        delta=FavorTiling(0, 8, 1),
        queries=FavorTiling(TILE, 8, 1),
        keys=FavorTiling(TILE, 8, 1),
    ),
}
# The sums before all chunks of all sequences are four times the size of an input or more, see `StatesPlan.split`. These
# shares of the bytes of q, k, v and out are for the results, for the gradients of queries, and for those of keys, when
# three gradients are allocated already.
READ_SHARE, QUERIES_SHARE, KEYS_SHARE = 1.75, 1.25, 0.625


# Compile-time constants: heads, dimensions, features, values, tokens in a chunk, padded dimensions, features per tile,
# 0 where a kernel does not use them. KEY: scales are those of keys. EPSILON: added to the features; 0: none. RESIDUAL:
# what rounding takes from `out` is stored.
FavorSizes = namedtuple("FavorSizes", "H HKV D M E C BD BM BE EPSILON RESIDUAL TILE KEY", defaults=(0, False))


@triton.jit
def sequence_index(pid, first, sequences, PROGRAMS: tl.constexpr, S: tl.constexpr):
    """Index of program pid among PROGRAMS per piece of a sequence; the piece; the sequence among all (B, Hkv) and
    among those in the workspace; its batch index and head. Only `sequences` sequences, from `first` on, are in the
    workspace.
    """
    i_program, pid = pid % PROGRAMS, pid // PROGRAMS
    i_piece, i_x = pid // sequences, first + pid % sequences
    i_b, i_kv = (i_x // S.HKV).to(tl.int64), i_x % S.HKV
    return i_program, i_piece, i_x.to(tl.int64), i_x.to(tl.int64) - first, i_b, i_kv


@triton.jit
def chunk_index(i_c, i_x, i_n, T, segments, chunks, S: tl.constexpr):
    """Indices of chunk i_c: of its segment in the workspace, among all chunks, and among those in the workspace."""
    return i_n * segments + i_c // chunks, i_x * tl.cdiv(T, S.C) + i_c, i_n * tl.cdiv(T, S.C) + i_c


@triton.jit
def project(b_x, b_high, p_low, flag, i_f, S: tl.constexpr):
    """w·x (C, TILE) for a tile of features in float32 precision, which an exponent needs.

    x is exact; w is the sum of two bfloat16 matrices, the second of which is zero if flag is 0.
    """
    b_l = tl.dot(b_x, tl.trans(b_high))
    if flag != 0:
        b_l = tl.dot(b_x, tl.trans(load_projection(p_low, i_f, S)), b_l)
    return b_l


@triton.jit
def project_both(b_x, b_y, b_high, p_low, flag, i_f, S: tl.constexpr):
    """`project` of x and of y, with both products in flight."""
    b_l, b_m = tl.dot(b_x, tl.trans(b_high)), tl.dot(b_y, tl.trans(b_high))
    if flag != 0:
        b_low = tl.trans(load_projection(p_low, i_f, S))
        b_l, b_m = tl.dot(b_x, b_low, b_l), tl.dot(b_y, b_low, b_m)
    return b_l, b_m


@triton.jit
def project_transposed(b_x, b_high, p_low, flag, i_f, S: tl.constexpr):
    """`project` as (TILE, C), so that features are summed over tokens without a transposition."""
    b_l = tl.dot(b_high, tl.trans(b_x))
    if flag != 0:
        b_l = tl.dot(load_projection(p_low, i_f, S), tl.trans(b_x), b_l)
    return b_l


@triton.jit
def largest_logit(b_x, b_high, p_high, p_low, flag, i_f, S: tl.constexpr):
    """The largest w·x (C,) of a tile of features. p_low: None if p_high is a projection not divided yet."""
    if p_low is None:
        b_l = tl.dot(b_x, tl.trans(b_high))
        if flag != 0:
            b_l = tl.dot(b_x, tl.trans(load_undivided(p_high, i_f, S)[1].to(tl.bfloat16)), b_l)
    else:
        b_l = project(b_x, b_high, p_low, flag, i_f, S)
    if S.BM != S.M:
        b_l = tl.where((i_f < S.M)[None, :], b_l, FLOOR)
    return tl.max(b_l, 1)


@triton.jit
def features(b_l, b_offset, i_f, S: tl.constexpr, b_more=0.0):
    """2^(w·x·D^−¼ − offset), with an epsilon + more; 0 beyond M features."""
    b_f = exp2(b_l * (S.D**-0.25 * LOG2E) - b_offset)
    if S.EPSILON > 0:
        b_f += b_more
    if S.M != S.BM:
        b_f = tl.where(i_f < S.M, b_f, 0)
    return b_f


@triton.jit
def column(b_x):
    """x (N,) as bfloat16 (N, 8) whose rows add up to it, for a product with a vector."""
    i_8 = tl.arange(0, 8)[None, :]
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_rest = tl.where(i_8 == 1, (b_x - b_high)[:, None], 0.0)
    return tl.where(i_8 == 0, b_high[:, None], b_rest).to(tl.bfloat16)


@triton.jit
def load_projection(p_x, i_f, S: tl.constexpr):
    """A tile of features of one of the projection's two matrices (BM, BD)."""
    return tl.load(p_x + i_f[:, None] * S.BD + tl.arange(0, S.BD)[None, :])


@triton.jit
def store_sums(p_kv, p_z, i_x, i_f, b_kv, b_z, S: tl.constexpr):
    """Store rows i_f of matrix i_x of a stack of (BM, BE), and of one of (BM,)."""
    p_kv += i_x * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :]
    tl.store(p_kv, b_kv.to(p_kv.dtype.element_ty))
    tl.store(p_z + i_x * S.BM + i_f, b_z)


@triton.jit
def load_sums(p_far, p_far_z, i_far, p_near, p_near_z, i_near, factor, i_f, S: tl.constexpr):
    """Load what `store_sums` stores: the sums of a chunk's segment times factor, plus the chunk's own."""
    b_far = tl.load(p_far + i_far * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :])
    b_near = tl.load(p_near + i_near * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :])
    b_kv = scaled_sum(b_far, factor, b_near)
    return b_kv, tl.load(p_far_z + i_far * S.BM + i_f) * factor + tl.load(p_near_z + i_near * S.BM + i_f)


@triton.jit
def load_reference(p_x, i_x):
    """A reference, rounded up."""
    return tl.ceil(tl.load(p_x + i_x))


@triton.jit
def query_references(p_peak, p_reference, i_p, i_c, S: tl.constexpr):
    """r_i (C,) and, with an epsilon, ε 2^(c_i − r_i), of chunk i_c of a sequence, i_p among all."""
    b_c = tl.maximum(tl.load(p_peak + i_p * S.C + tl.arange(0, S.C)), tl.load(p_reference + i_c))
    b_reference = tl.ceil(b_c)
    return b_reference, S.EPSILON * exp2(b_c - b_reference)


@triton.jit
def visible_pairs(rows, S: tl.constexpr):
    """(C, C) whether query i sees key j, of which the first `rows` are visible."""
    i_t = tl.arange(0, S.C)
    return (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]


@triton.jit
def visible_pairs_transposed(rows, S: tl.constexpr):
    """`visible_pairs` with a row for each key."""
    i_t = tl.arange(0, S.C)
    return (i_t[:, None] <= i_t[None, :]) & (i_t < rows)[:, None]


@triton.jit
def load_values_sum(p_x, i_x, i_c, T, S: tl.constexpr):
    """Row i_c (BE,) of sequence i_x of what `linear_favor_values_kernel` writes, and the last element of that row."""
    i_e = tl.arange(0, S.BE)
    p_x += (i_x * (tl.cdiv(T, S.C) + 1) + i_c) * (S.E + 1)
    return tl.load(p_x + i_e, mask=i_e < S.E, other=0.0), tl.load(p_x + S.E)


@triton.jit
def pair_scales(b_scale, b_reference, S: tl.constexpr):
    """2^(n_j − r_i) (C, C) for j ≤ i, else 0; 0 for hidden keys, whose scale is FLOOR."""
    i_t = tl.arange(0, S.C)
    return tl.where(i_t[None, :] <= i_t[:, None], exp2(b_scale[None, :] - b_reference[:, None]), 0.0)


@triton.jit
def pair_scales_transposed(b_scale, b_reference, S: tl.constexpr):
    """`pair_scales` with a row for each key."""
    i_t = tl.arange(0, S.C)
    return tl.where(i_t[:, None] <= i_t[None, :], exp2(b_scale[:, None] - b_reference[None, :]), 0.0)


@triton.jit
def linear_favor_forward_weight_kernel(
    p_weight, p_high, p_low, p_flag,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the projection (M, D) as the sum of two bfloat16 (BM, BD), and the largest element of the second.

    That is 0 for projections that longspan draws; products with the second are then skipped.
    """
    i_d = tl.arange(0, BD)[None, :]
    b_largest = zeros(TILE)
    for i in range(0, BM, TILE):
        i_m = i + tl.arange(0, TILE)[:, None]
        b_weight = tl.load(p_weight + i_m * D + i_d, mask=(i_m < M) & (i_d < D), other=0.0).to(tl.float32)
        b_high = b_weight.to(tl.bfloat16)
        b_low = (b_weight - b_high.to(tl.float32)).to(tl.bfloat16)
        tl.store(p_high + i_m * BD + i_d, b_high, mask=i_m < BM)
        tl.store(p_low + i_m * BD + i_d, b_low, mask=i_m < BM)
        b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_low.to(tl.float32)), 1))
    tl.store(p_flag, tl.max(b_largest))


@triton.jit
def load_undivided(p_x, i_f, S: tl.constexpr):
    """A tile of features of a projection (M, D), rounded to bfloat16, and what rounding takes from it."""
    i_d = tl.arange(0, S.BD)
    m_x = (i_f < S.M)[:, None] & (i_d < S.D)[None, :]
    b_x = tl.load(p_x + i_f[:, None] * S.D + i_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_high = b_x.to(tl.bfloat16)
    return b_high, b_x - b_high.to(tl.float32)


@triton.jit
def load_first(p_high, p_low, p_flag, i_f, S: tl.constexpr):
    """A tile of the first of the projection's two matrices, and a number that is not 0 if the second counts."""
    if p_low is None:
        b_high, b_low = load_undivided(p_high, i_f, S)
        flag = tl.max(tl.max(tl.abs(b_low), 1))
    else:
        b_high = load_projection(p_high, i_f, S)
        flag = tl.load(p_flag)
    return b_high, flag


@triton.jit
def scale_inputs(
    pid, p_x, p_high, p_low, p_flag, p_lengths, p_offset, p_scale, p_peak, p_largest, T, segments, chunks, x,
    S: tl.constexpr
):  # fmt: skip
    """Program pid of `linear_favor_forward_scales_kernel`. p_low: None if p_high is a projection not divided yet."""
    i_h, i_s, i_b = pid % S.H, (pid // S.H) % segments, (pid // S.H // segments).to(tl.int64)
    i_0 = i_s * chunks * S.C
    rows = visible_length(p_lengths, i_b, T) - i_0
    i_t = tl.arange(0, S.C)
    i_c = (i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_s * chunks
    p_x = token_pointer(p_x, x, i_b, i_0, i_h)
    i_f = tl.arange(0, S.TILE)
    if S.TILE == S.BM:
        b_high, flag = load_first(p_high, p_low, p_flag, i_f, S)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        b_x = load_inputs(p_x, x.t, rows, S)
        if S.TILE == S.BM:
            b_beta = largest_logit(b_x, b_high, p_high, p_low, flag, i_f, S)
        else:
            b_beta = tl.full((S.C,), FLOOR, tl.float32)
            for i_m in range(0, S.BM, S.TILE):
                b_tile, flag = load_first(p_high, p_low, p_flag, i_m + i_f, S)
                b_beta = tl.maximum(b_beta, largest_logit(b_x, b_tile, p_high, p_low, flag, i_m + i_f, S))
        b_beta *= S.D**-0.25 * LOG2E
        i_o = i_c * S.C + i_t
        if S.KEY or S.EPSILON > 0:
            b_x = b_x.to(tl.float32)
            b_half = tl.sum(b_x * b_x, 1) * (0.5 * S.D**-0.5 * LOG2E)
        if S.KEY:
            if S.EPSILON == 0:
                b_beta -= b_half
            b_beta = tl.where(i_t < rows, b_beta, FLOOR)
            tl.store(p_offset + i_o, tl.where(i_t < rows, b_half, -2 * FLOOR))
            tl.store(p_scale + i_o, tl.ceil(b_beta))
            tl.store(p_peak + i_o, running_maximum(b_beta))
            tl.store(p_largest + i_c, tl.max(b_beta))
        else:
            if S.EPSILON > 0:
                b_beta += b_half
            tl.store(p_offset + i_o, b_beta)
        p_x += S.C * x.t
        i_c += 1
        rows -= S.C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_favor_forward_scales_kernel(
    p_x, p_high, p_low, p_flag, p_lengths, p_offset, p_scale, p_peak, p_largest, T, segments, chunks, x, S: tl.constexpr
):
    """Offsets and scales of tokens, which depend on all of their features, all (B, H, chunks, C).

    p_offset: for queries the logarithm of the largest feature; for keys ‖k‖²/2, and for hidden ones a number that
    makes their features 0. p_scale: for keys the logarithm of the largest feature, rounded up. p_peak: the largest of
    those so far in the chunk, not rounded. p_largest: (B, H, chunks) the chunk's.
    """
    scale_inputs(
        tl.program_id(0), p_x, p_high, p_low, p_flag, p_lengths, p_offset, p_scale, p_peak, p_largest,
        T, segments, chunks, x, S
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def linear_favor_values_kernel(p_x, p_lengths, p_mass, p_delta, p_sums, T, x, S: tl.constexpr):
    """Σ_i e_i [x_i, −Δ_i] of one chunk and key head, in row chunks − i_c of p_sums (B · Hkv, chunks + 1, E + 1).

    Without p_mass Σ_j [x_j, 1] over the visible keys, in row i_c + 1. Row 0 is what is there before.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_kv, _, i_c, i_b = program_index(tl.cdiv(T, S.C), S.HKV)
    i_0, i_row = i_c * S.C, i_c + 1
    i_t, i_e = tl.arange(0, S.C), tl.arange(0, S.BE)
    b_sum = zeros(S.BE)
    last = 0.0
    if p_mass is None:
        rows = visible_length(p_lengths, i_b, T) - i_0
        b_sum = tl.sum(load_values(token_pointer(p_x, x, i_b, i_0, i_kv), x.t, rows, S).to(tl.float32), 0)
        last = tl.minimum(tl.maximum(rows, 0), S.C).to(tl.float32)
    else:
        i_row = tl.cdiv(T, S.C) - i_c
        for g in range(GROUP):
            i_h = i_kv * GROUP + g
            b_x = load_values(token_pointer(p_x, x, i_b, i_0, i_h), x.t, T - i_0, S).to(tl.float32)
            i_o = ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t
            b_mass = tl.load(p_mass + i_o)
            b_sum += tl.sum(b_x * b_mass[:, None], 0)
            last -= tl.sum(b_mass * tl.load(p_delta + i_o))
    p_sums += ((i_b * S.HKV + i_kv) * (tl.cdiv(T, S.C) + 1) + i_row) * (S.E + 1)
    tl.store(p_sums + i_e, b_sum, mask=i_e < S.E)
    tl.store(p_sums + S.E, last)


@triton.jit
def sum_keys(
    pid, p_k, p_v, p_high, p_low, p_flag, p_lengths, p_offset, p_largest, p_shift, p_total, p_total_z, p_prefix,
    p_prefix_z, p_reference, T, segments, chunks, first, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """Program pid of `linear_favor_forward_sums_kernel`."""
    i_m, i_s, i_x, i_n, i_b, i_h = sequence_index(pid, first, sequences, S.BM // S.TILE, S)
    i_m *= S.TILE
    i_0 = i_s * chunks * S.C
    rows = visible_length(p_lengths, i_b, T) - i_0
    i_c = i_x * tl.cdiv(T, S.C)
    p_reference += i_x  # one more than there are chunks
    if p_largest is None:
        c = tl.load(p_reference + i_c + i_s * chunks)
    else:
        c = tl.max(tl.full((256,), FLOOR, tl.float32))
        if p_shift is not None:
            c = tl.maximum(c, tl.load(p_shift + i_x) * LOG2E)
        for i in range(0, i_s * chunks, 256):
            i_earlier = i + tl.arange(0, 256)
            b_largest = tl.load(p_largest + i_c + i_earlier, mask=i_earlier < i_s * chunks, other=FLOOR)
            c = tl.maximum(c, tl.max(b_largest))
    i_c += i_s * chunks
    i_p = i_n * tl.cdiv(T, S.C) + i_s * chunks
    p_k, p_v = token_pointer(p_k, k, i_b, i_0, i_h), token_pointer(p_v, v, i_b, i_0, i_h)
    i_t, i_f = tl.arange(0, S.C), i_m + tl.arange(0, S.TILE)
    flag = tl.load(p_flag)
    b_high = load_projection(p_high, i_f, S)
    b_kv = zeros(S.TILE, S.BE)
    b_z = zeros(S.TILE)
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        store_sums(p_prefix, p_prefix_z, i_p, i_f, b_kv, b_z, S)
        b_k = load_inputs(p_k, k.t, rows, S)
        b_v = load_values(p_v, v.t, rows, S)
        b_offset = tl.load(p_offset + i_c * S.C + i_t)
        if p_largest is None:
            c_last = tl.load(p_reference + i_c + 1)
        else:
            c_last = tl.maximum(c, tl.load(p_largest + i_c))
            if i_m == 0:
                tl.store(p_reference + i_c, c)
        decay = exp2(tl.ceil(c) - tl.ceil(c_last))
        b_f = project_transposed(b_k, b_high, p_low, flag, i_f, S)
        b_f = features(b_f, (b_offset + tl.ceil(c_last))[None, :], i_f[:, None], S)
        b_kv = tl.dot(b_f.to(tl.bfloat16), b_v, b_kv * decay)
        b_z = b_z * decay + tl.sum(b_f, 1)
        c = c_last
        p_k += S.C * k.t
        p_v += S.C * v.t
        i_c += 1
        i_p += 1
        rows -= S.C
    store_sums(p_total, p_total_z, i_n * segments + i_s, i_f, b_kv, b_z, S)
    if p_largest is not None:
        if i_m == 0:
            tl.store(p_reference + i_c, c)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_favor_forward_sums_kernel(
    p_k, p_v, p_high, p_low, p_flag, p_lengths, p_offset, p_largest, p_shift, p_total, p_total_z, p_prefix,
    p_prefix_z, p_reference,
    T, segments, chunks, first, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """Σ φ(k) vᵀ and Σ φ(k) of one segment and one tile of features, at the scale of the segment's end.

    p_prefix, p_prefix_z: (sequences, chunks, BM, ·) the segment's sums before each chunk, at the scale of that chunk.
    p_reference: (B, Hkv, chunks + 1) the references before each chunk and after the last, computed here unless
    p_largest is None.
    """
    sum_keys(
        tl.program_id(0), p_k, p_v, p_high, p_low, p_flag, p_lengths, p_offset, p_largest, p_shift, p_total,
        p_total_z, p_prefix, p_prefix_z, p_reference, T, segments, chunks, first, sequences, k, v, S
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_favor_forward_kernel(
    p_q, p_k, p_v, p_high, p_low, p_flag, p_lengths, p_query_offset, p_offset, p_scale, p_peak, p_reference,
    p_before, p_before_z, p_prefix, p_prefix_z, p_values, p_out, p_den, p_residual,
    T, segments, chunks, first, sequences, q, k, v, S: tl.constexpr
):  # fmt: skip
    """One chunk of one query head, of the sequences in the workspace.

    p_residual: what rounding takes from `out`, with an epsilon, where nearly everything cancels in gradients, or where
    Δ is computed from it.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_g, i_c, i_x, i_n, i_b, i_kv = sequence_index(tl.program_id(0), first, sequences, GROUP, S)
    i_h, i_0 = i_kv * GROUP + i_g, i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    p_k, p_v = token_pointer(p_k, k, i_b, i_0, i_kv), token_pointer(p_v, v, i_b, i_0, i_kv)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = chunk_index(i_c, i_x, i_n, T, segments, chunks, S)
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    c = load_reference(p_reference, i_c)
    old = exp2(load_reference(p_reference, i_c // chunks * chunks) - c)
    b_q = load_inputs(p_q, q.t, left, S)
    b_k = load_inputs(p_k, k.t, rows, S)
    b_query_offset = tl.load(p_query_offset + ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t)
    b_offset = tl.load(p_offset + i_p * S.C + i_t) + tl.load(p_scale + i_p * S.C + i_t)
    b_p = zeros(S.C, S.C)
    b_out = zeros(S.C, S.BE)
    b_den = zeros(S.C, 8)
    b_mass = zeros(S.C)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_projection(p_high, i_f, S)
        b_kv, b_z = load_sums(p_before, p_before_z, i_far, p_prefix, p_prefix_z, i_near, old, i_f, S)
        b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_f, S)
        b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S, S.EPSILON)
        if S.EPSILON > 0:
            b_mass += tl.sum(b_query, 1)
        b_query = b_query.to(tl.bfloat16)
        b_f = features(b_f, b_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
        b_p = tl.dot(b_query, tl.trans(b_f), b_p)
        b_out = tl.dot(b_query, b_kv, b_out)
        b_den = tl.dot(b_query, column(b_z), b_den)
    b_reference, b_epsilon = query_references(p_peak, p_reference, i_p, i_c, S)
    b_p *= pair_scales(tl.load(p_scale + i_p * S.C + i_t), b_reference, S)
    b_row = exp2(c - b_reference)
    if S.RESIDUAL:
        b_p = widen(round_once(b_p))  # Weights that sum to one: gradients would contain their difference from it.
    b_sum = tl.sum(b_den, 1) * b_row
    b_out *= b_row[:, None]
    b_sum += tl.sum(b_p, 1)
    b_v = load_values(p_v, v.t, rows, S)
    if S.EPSILON > 0:
        # Not rounded with the products: the same error in all weights would be one of their mean.
        b_mass *= b_epsilon
        b_before, count = load_values_sum(p_values, i_x, i_c, T, S)
        b_seen = tl.where(visible_pairs(rows, S), 1.0, 0.0)
        b_sum += b_mass * (count + tl.sum(b_seen, 1))
        b_out += b_mass[:, None] * (tl.dot(b_seen.to(tl.bfloat16), b_v) + b_before[None, :])
    b_out = tl.dot(b_p.to(tl.bfloat16), b_v, b_out) * inverse(b_sum)[:, None]
    i_row = (i_b * T + i_0) * S.H + i_h
    tl.store(p_den + i_row + i_t * S.H, b_sum, mask=i_t < left)
    store_values(p_out + i_row * S.E, S.H * S.E, left, b_out, S)
    if S.EPSILON > 0 or S.RESIDUAL:
        b_out -= b_out.to(tl.bfloat16).to(tl.float32)
        store_values(p_residual + i_row * S.E, S.H * S.E, left, b_out, S)


@triton.jit(do_not_specialize=["T"])
def linear_favor_backward_delta_kernel(
    p_out, p_residual, p_den, p_d_out, p_query_offset, p_normalized_offset, p_delta, p_floor, T, d, S: tl.constexpr
):
    """Δ (B, H, chunks, C), and offsets of queries that include den, so that their features are q̂; p_floor: ε / den."""
    i_h, _, i_c, i_b = program_index(tl.cdiv(T, S.C), S.H)
    i_0 = i_c * S.C
    left = T - i_0
    i_row = (i_b * T + i_0) * S.H + i_h
    p_d_out = token_pointer(p_d_out, d, i_b, i_0, i_h)
    b_d = load_values(p_d_out, d.t, left, S).to(tl.float32)
    b_out = load_values(p_out + i_row * S.E, S.H * S.E, left, S).to(tl.float32)
    if S.EPSILON > 0:
        b_out += load_values(p_residual + i_row * S.E, S.H * S.E, left, S).to(tl.float32)
    b_den = load_column(p_den + i_row, S.H, left, S.C, 0.0)
    i_o = ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + tl.arange(0, S.C)
    m_zero = b_den < ZERO_NORMALIZER
    b_offset = tl.load(p_query_offset + i_o) + tl.log2(tl.where(m_zero, 1.0, b_den))
    tl.store(p_normalized_offset + i_o, tl.where(m_zero, -2 * FLOOR, b_offset))
    tl.store(p_delta + i_o, tl.sum(b_d * b_out, 1))
    if S.EPSILON > 0:
        tl.store(p_floor + i_o, S.EPSILON * inverse(b_den))


@triton.jit
def row_scales(p_rows, b_d, b_query_offset, left, S: tl.constexpr):
    """Offsets of queries that include den, so that their features are q̂, and Δ. p_rows: out, what rounding took from it
    or None, and den.
    """
    p_out, p_residual, p_den = p_rows
    b_out = load_values(p_out, S.H * S.E, left, S).to(tl.float32)
    if p_residual is not None:
        b_out += load_values(p_residual, S.H * S.E, left, S).to(tl.float32)
    b_den = load_column(p_den, S.H, left, S.C, 0.0)
    m_zero = b_den < ZERO_NORMALIZER
    b_offset = tl.where(m_zero, -2 * FLOOR, b_query_offset + tl.log2(tl.where(m_zero, 1.0, b_den)))
    return b_offset, tl.sum(b_d.to(tl.float32) * b_out, 1)


@triton.jit
def sum_queries(
    pid, p_q, p_d_out, p_high, p_low, p_flag, p_query_offset, p_delta, p_floor, p_peak, p_reference, p_d_total,
    p_d_total_z, p_suffix, p_suffix_z, p_out, p_residual, p_den, p_normalized_offset,
    T, segments, chunks, first, sequences, q, d, S: tl.constexpr
):  # fmt: skip
    """Program pid of `linear_favor_backward_sums_kernel`.

    p_out: None, or `row_scales` are computed here, and by the programs of the first tile written.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_m, i_s, i_x, i_n, i_b, i_kv = sequence_index(pid, first, sequences, S.BM // S.TILE, S)
    i_m *= S.TILE
    count = tl.minimum(chunks, tl.cdiv(T, S.C) - i_s * chunks)
    i_l = (i_s * chunks + count - 1) * S.C
    p_q = token_pointer(p_q, q, i_b, i_l, i_kv * GROUP)
    p_d_out = token_pointer(p_d_out, d, i_b, i_l, i_kv * GROUP)
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    i_p = i_n * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    i_q = (i_b * S.H + i_kv * GROUP) * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    p_reference += i_x
    i_t, i_f = tl.arange(0, S.C), i_m + tl.arange(0, S.TILE)
    flag = tl.load(p_flag)
    b_high = load_projection(p_high, i_f, S)
    b_d_kv = zeros(S.TILE, S.BE)
    b_d_z = zeros(S.TILE)
    c_last = load_reference(p_reference, i_c + 1)
    left = T - i_l
    if p_out is not None:
        i_row = (i_b * T + i_l) * S.H + i_kv * GROUP
        p_out += i_row * S.E
        p_residual += i_row * S.E
        p_den += i_row
    for _ in range(count):
        store_sums(p_suffix, p_suffix_z, i_p, i_f, b_d_kv, b_d_z, S)
        c = load_reference(p_reference, i_c)
        decay = exp2(c - c_last)
        b_d_kv *= decay
        b_d_z *= decay
        b_back = tl.maximum(tl.ceil(tl.load(p_peak + i_c * S.C + i_t)), c) - c
        for g in range(GROUP):
            b_q = load_inputs(p_q + g * q.h, q.t, left, S)
            b_d = load_values(p_d_out + g * d.h, d.t, left, S)
            i_o = (i_q + g * tl.cdiv(T, S.C)) * S.C + i_t
            b_offset = tl.load(p_query_offset + i_o)
            if p_out is None:
                b_delta = tl.load(p_delta + i_o)
            else:
                p_rows = p_out + g * S.E, p_residual + g * S.E, p_den + g
                b_offset, b_delta = row_scales(p_rows, b_d, b_offset, left, S)
                if i_m == 0:
                    tl.store(p_normalized_offset + i_o, b_offset)
                    tl.store(p_delta + i_o, b_delta)
            b_offset += b_back
            b_query = project_transposed(b_q, b_high, p_low, flag, i_f, S)
            b_floor = 0.0
            if S.EPSILON > 0:
                b_floor = (tl.load(p_floor + i_o) * exp2(-b_back))[None, :]
            b_query = features(b_query, b_offset[None, :], i_f[:, None], S, b_floor)
            b_d_kv = tl.dot(b_query.to(tl.bfloat16), b_d, b_d_kv)
            b_d_z -= tl.sum(b_query * b_delta[None, :], 1)
        c_last = c
        p_q -= S.C * q.t
        p_d_out -= S.C * d.t
        if p_out is not None:
            p_out -= S.C * S.H * S.E
            p_residual -= S.C * S.H * S.E
            p_den -= S.C * S.H
        i_c -= 1
        i_p -= 1
        i_q -= 1
        left += S.C
    store_sums(p_d_total, p_d_total_z, i_n * segments + i_s, i_f, b_d_kv, b_d_z, S)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_favor_backward_sums_kernel(
    p_q, p_d_out, p_high, p_low, p_flag, p_query_offset, p_delta, p_floor, p_peak, p_reference, p_d_total,
    p_d_total_z, p_suffix, p_suffix_z,
    T, segments, chunks, first, sequences, q, d, S: tl.constexpr
):  # fmt: skip
    """dS and dz of one segment and one tile of features, summed over the query heads of a group, at its start's scale.

    p_suffix, p_suffix_z: (sequences, chunks, BM, ·) the part that comes after each chunk, at the scale of the chunk's
    end.
    """
    sum_queries(
        tl.program_id(0), p_q, p_d_out, p_high, p_low, p_flag, p_query_offset, p_delta, p_floor, p_peak,
        p_reference, p_d_total, p_d_total_z, p_suffix, p_suffix_z, None, None, None, None,
        T, segments, chunks, first, sequences, q, d, S
    )  # fmt: skip


@triton.jit
def differentiate_queries(
    pid, p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, p_floor, p_mass,
    p_offset, p_scale, p_peak, p_reference, p_before, p_before_z, p_prefix, p_prefix_z, p_values, p_d_q, T,
    segments, chunks, first, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """Program pid of `linear_favor_backward_queries_kernel`."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_g, i_c, i_x, i_n, i_b, i_kv = sequence_index(pid, first, sequences, GROUP, S)
    i_h, i_0 = i_kv * GROUP + i_g, i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_h), token_pointer(p_k, k, i_b, i_0, i_kv)
    p_v, p_d_out = token_pointer(p_v, v, i_b, i_0, i_kv), token_pointer(p_d_out, d, i_b, i_0, i_h)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = chunk_index(i_c, i_x, i_n, T, segments, chunks, S)
    i_o = ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + i_t
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    c = load_reference(p_reference, i_c)
    old = exp2(load_reference(p_reference, i_c // chunks * chunks) - c)
    b_q = load_inputs(p_q, q.t, left, S)
    b_k = load_inputs(p_k, k.t, rows, S)
    b_v = load_values(p_v, v.t, rows, S)
    b_d = load_values(p_d_out, d.t, left, S)
    b_query_offset, b_delta = tl.load(p_query_offset + i_o), tl.load(p_delta + i_o)
    b_scale = tl.load(p_scale + i_p * S.C + i_t)
    b_offset = tl.load(p_offset + i_p * S.C + i_t) + b_scale
    b_reference, b_epsilon = query_references(p_peak, p_reference, i_p, i_c, S)
    b_row = exp2(c - b_reference)
    b_a = tl.dot(b_d, tl.trans(b_v)) - b_delta[:, None]
    b_mass = zeros(S.C)
    b_total = zeros(S.C)
    b_rest = zeros(S.C)
    if S.EPSILON > 0:
        b_before, count = load_values_sum(p_values, i_x, i_c, T, S)
        b_all = tl.sum(tl.where(visible_pairs(rows, S), b_a, 0.0), 1)
        b_all += tl.sum(b_d.to(tl.float32) * b_before[None, :], 1) - b_delta * count
        b_all *= b_epsilon
        b_floor = tl.load(p_floor + i_o)
        # Nearly everything cancels where the epsilon is most of a feature: Δ has to be that of the sums.
        b_first = (b_a * pair_scales(b_scale, b_reference, S)).to(tl.bfloat16)
        b_scaled = (b_d * b_row[:, None]).to(tl.bfloat16)
        for i_m in range(0, S.BM, S.TILE):
            i_f = i_m + tl.arange(0, S.TILE)
            b_query, b_f = project_both(b_q, b_k, load_projection(p_high, i_f, S), p_low, flag, i_f, S)
            b_f = features(b_f, b_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
            b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S, b_floor[:, None])
            b_kv, b_z = load_sums(p_before, p_before_z, i_far, p_prefix, p_prefix_z, i_near, old, i_f, S)
            b_g = tl.dot(b_scaled, tl.trans(b_kv), (-b_delta * b_row)[:, None] * b_z[None, :])
            b_g = tl.dot(b_first, b_f, b_g) + b_all[:, None]
            b_rest += tl.sum(b_g * b_query, 1)
        number = count + tl.sum(tl.where(visible_pairs(rows, S), 1.0, 0.0), 1)
        b_a -= b_rest[:, None]
        b_all -= b_rest * number * b_epsilon
        b_delta += b_rest
    b_a = (b_a * pair_scales(b_scale, b_reference, S)).to(tl.bfloat16)
    # Products with powers of two are exact.
    b_d, b_delta = (b_d * b_row[:, None]).to(tl.bfloat16), -b_delta * b_row
    b_d_q = zeros(S.C, S.BD)
    for i_m in range(0, S.BM, S.TILE):
        i_f = i_m + tl.arange(0, S.TILE)
        b_high = load_projection(p_high, i_f, S)
        b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_f, S)
        b_f = features(b_f, b_offset[:, None], i_f[None, :], S).to(tl.bfloat16)
        b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S)
        b_kv, b_z = load_sums(p_before, p_before_z, i_far, p_prefix, p_prefix_z, i_near, old, i_f, S)
        b_g = tl.dot(b_d, tl.trans(b_kv), b_delta[:, None] * b_z[None, :])
        b_g = tl.dot(b_a, b_f, b_g)
        if S.EPSILON > 0:
            m_f = (i_f < S.M)[None, :]
            b_g += b_all[:, None]
            b_rest += tl.sum(tl.where(m_f, b_g * b_floor[:, None], 0.0), 1)
            b_mass += tl.sum(tl.where(m_f, b_query + b_floor[:, None], 0.0), 1)
        b_g *= b_query
        b_total += tl.sum(b_g, 1)
        b_d_q = tl.dot(b_g.to(tl.bfloat16), b_high, b_d_q)
    if not S.RESIDUAL:
        tl.store(p_delta + i_o, tl.load(p_delta + i_o) + b_total + b_rest)
    b_d_q *= S.D**-0.25
    if S.EPSILON > 0:
        tl.store(p_mass + i_o, b_mass * b_epsilon)
        b_q = reload_rows(p_q, q.t, left, S.D, S.C, S.BD).to(tl.float32)
        b_d_q -= b_q * (b_total * S.D**-0.5)[:, None]
    i_row = (i_b * T + i_0) * S.H + i_h
    store_inputs(p_d_q + i_row * S.D, S.H * S.D, left, b_d_q, S)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_favor_backward_queries_kernel(
    p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, p_floor, p_mass, p_offset,
    p_scale, p_peak, p_reference, p_before, p_before_z, p_prefix, p_prefix_z, p_values, p_d_q,
    T, segments, chunks, first, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """dq of one chunk of one query head, of the sequences in the workspace.

    p_delta: Δ, computed from the rounded `out`; replaced by Δ of the sums that `out` was computed from, which makes
    φ(q)·dφ(q) zero. p_mass: with an epsilon, e_i / den_i is written here.
    """
    differentiate_queries(
        tl.program_id(0), p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta,
        p_floor, p_mass, p_offset, p_scale, p_peak, p_reference, p_before, p_before_z, p_prefix, p_prefix_z,
        p_values, p_d_q, T, segments, chunks, first, sequences, q, k, v, d, S
    )  # fmt: skip


@triton.jit
def differentiate_keys(
    pid, p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, p_floor, p_mass,
    p_offset, p_scale, p_peak, p_reference, p_after, p_after_z, p_suffix, p_suffix_z, p_values, p_d_k, p_d_v, T,
    segments, chunks, first, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """Program pid of `linear_favor_backward_keys_kernel`."""
    GROUP: tl.constexpr = S.H // S.HKV
    _, i_c, i_x, i_n, i_b, i_kv = sequence_index(pid, first, sequences, 1, S)
    i_0 = i_c * S.C
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_kv * GROUP), token_pointer(p_k, k, i_b, i_0, i_kv)
    p_v, p_d_out = token_pointer(p_v, v, i_b, i_0, i_kv), token_pointer(p_d_out, d, i_b, i_0, i_kv * GROUP)
    i_t = tl.arange(0, S.C)
    i_far, i_p, i_near = chunk_index(i_c, i_x, i_n, T, segments, chunks, S)
    flag = tl.load(p_flag)
    p_reference += i_x * (tl.cdiv(T, S.C) + 1)
    c, c_last = load_reference(p_reference, i_c), load_reference(p_reference, i_c + 1)
    i_end = tl.minimum((i_c // chunks + 1) * chunks, tl.cdiv(T, S.C))
    new = exp2(c_last - load_reference(p_reference, i_end))
    b_k = load_inputs(p_k, k.t, rows, S)
    b_v = load_values(p_v, v.t, rows, S)
    b_scale = tl.load(p_scale + i_p * S.C + i_t)
    b_offset = tl.load(p_offset + i_p * S.C + i_t) + b_scale
    b_end = exp2(b_scale - c_last)
    b_v_end = (b_v * b_end[:, None]).to(tl.bfloat16)  # exact: powers of two
    b_reference = tl.maximum(tl.ceil(tl.load(p_peak + i_p * S.C + i_t)), c)
    b_d_k = zeros(S.C, S.BD)
    b_d_v = zeros(S.C, S.BE)
    b_total = zeros(S.C)
    for g in range(GROUP):
        b_q = load_inputs(p_q + g * q.h, q.t, left, S)
        b_d = load_values(p_d_out + g * d.h, d.t, left, S)
        i_o = ((i_b * S.H + i_kv * GROUP + g) * tl.cdiv(T, S.C) + i_c) * S.C + i_t
        b_query_offset = tl.load(p_query_offset + i_o)
        b_a = tl.dot(b_v, tl.trans(b_d)) - tl.load(p_delta + i_o)[None, :]
        b_a = (b_a * pair_scales_transposed(b_scale, b_reference, S)).to(tl.bfloat16)
        b_p = zeros(S.C, S.C)
        for i_m in range(0, S.BM, S.TILE):
            i_f = i_m + tl.arange(0, S.TILE)
            b_high = load_projection(p_high, i_f, S)
            b_query, b_f = project_both(b_q, b_k, b_high, p_low, flag, i_f, S)
            b_floor = 0.0
            if S.EPSILON > 0:
                b_floor = tl.load(p_floor + i_o)[:, None]
            b_query = features(b_query, b_query_offset[:, None], i_f[None, :], S, b_floor).to(tl.bfloat16)
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
        # Loading both again is cheaper than holding them in registers.
        b_d = reload_rows(p_d_out + g * d.h, d.t, left, S.E, S.C, S.BE)
        b_p *= pair_scales_transposed(tl.load(p_scale + i_p * S.C + i_t, eviction_policy="evict_first"), b_reference, S)
        if S.EPSILON > 0:
            b_p += tl.where(visible_pairs_transposed(rows, S), tl.load(p_mass + i_o)[None, :], 0.0)
        b_d_v = tl.dot(b_p.to(tl.bfloat16), b_d, b_d_v)
    if S.EPSILON > 0:
        b_later, _ = load_values_sum(p_values, i_x, tl.cdiv(T, S.C) - 1 - i_c, T, S)
        b_d_v += tl.where((i_t < rows)[:, None], b_later[None, :], 0.0)
    i_row = (i_b * T + i_0) * S.HKV + i_kv
    b_k = reload_rows(p_k, k.t, rows, S.D, S.C, S.BD).to(tl.float32)
    b_d_k = b_d_k * S.D**-0.25 - b_k * (b_total * S.D**-0.5)[:, None]
    store_inputs(p_d_k + i_row * S.D, S.HKV * S.D, left, b_d_k, S)
    store_values(p_d_v + i_row * S.E, S.HKV * S.E, left, b_d_v, S)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def linear_favor_backward_keys_kernel(
    p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, p_floor, p_mass, p_offset,
    p_scale, p_peak, p_reference, p_after, p_after_z, p_suffix, p_suffix_z, p_values, p_d_k, p_d_v,
    T, segments, chunks, first, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """dk and dv of one chunk of a sequence in the workspace; keys are rows and queries columns."""
    differentiate_keys(
        tl.program_id(0), p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta,
        p_floor, p_mass, p_offset, p_scale, p_peak, p_reference, p_after, p_after_z, p_suffix, p_suffix_z,
        p_values, p_d_k, p_d_v, T, segments, chunks, first, sequences, q, k, v, d, S
    )  # fmt: skip


def forward(x: LinearInputs, problem: LinearProblem, *, zeroed: bool = True) -> tuple[Tensor | None, ...]:
    """Return out, the sums and their shift after the last token or None, den, and the workspace for `backward`.

    zeroed: Whether den is a tensor of its own and the workspace zeroed; otherwise den is None, and in the workspace.
    """
    rows = {"q": dense_rows(x.q), "k": dense_rows(x.k), "v": dense_rows(x.v)}
    x = x._replace(**rows, weight=dense(x.weight), lengths=dense(x.lengths), kv=dense(x.kv), shift=dense(x.shift))
    return forward_plan(x, problem)(x, zeroed=zeroed)


def backward(
    saved: LinearSaved, x: LinearInputs, problem: LinearProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v and of the sums and the total before, if there are any."""
    x = x._replace(q=dense_rows(x.q), k=dense_rows(x.k), v=dense_rows(x.v), lengths=dense(x.lengths), kv=dense(x.kv))
    saved = saved._replace(d_out=dense_rows(saved.d_out), d_kv=dense(saved.d_kv), out=dense(saved.out))
    return backward_plan(saved, x, problem)(saved, x)


def forward_plan(x: LinearInputs, problem: LinearProblem) -> _FavorForward:
    """Return the plan of `forward` for inputs with dense rows."""
    return _FavorForward.of((x.q, x.k, x.v, x.weight, x.lengths, x.kv, x.shift), problem)


def backward_plan(saved: LinearSaved, x: LinearInputs, problem: LinearProblem) -> _FavorBackward:
    """Return the plan of `backward` for inputs with dense rows."""
    given = x.q, x.k, x.v, x.weight, x.lengths, x.kv, saved.d_out, saved.d_kv, saved.out, saved.den, saved.starts
    return _FavorBackward.of(given, problem)


def feature_block(num_features: int) -> int:
    """Return the number of features, padded to whole tiles."""
    return -(-int(num_features) // TILE) * TILE


def saved_size(x: LinearInputs, problem: LinearProblem) -> int:
    """Return the number of float32 elements that `forward` saves: four per token and head, and the projection."""
    B, T, H, D = x.q.shape
    return saved_buffers(B, T, H, x.k.shape[2], D, len(x.weight), x.v.shape[3] if problem.epsilon else 0).size


class FavorPlan(StatesPlan):
    """What the plans of both passes share."""

    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem, CHUNK, num_features=key[3][0][0])
        blocks = padded(self.D), feature_block(self.M), padded(self.E)
        self.S = FavorSizes(self.H, self.Hkv, self.D, self.M, self.E, CHUNK, *blocks, problem.epsilon, False)
        self.tilings = TILINGS[max(self.S.BD, self.S.BE)]
        self.tiles, self.programs = self.S.BM // TILE, self.tilings.sums.programs
        residuals = self.E if problem.epsilon else 0
        self.saved = saved_buffers(self.B, self.T, self.H, self.Hkv, self.D, self.M, residuals)
        self.eager = Workspace(self.den_buffer, *self.saved.buffers)
        self.values = self.values_launch("v")

    def saved_pointers(self, saved: Tensor, den: Tensor | None) -> list[Any]:
        """Return den and the buffers of `saved`, which holds den too if it is None."""
        if den is None:
            return self.pointers(self.eager, saved)
        return [*self.addresses(den), *self.pointers(self.saved, saved)]

    def tiled(
        self, kernel: Any, tiling: Any, programs: int, sizes: tuple[int, ...], strided: str, **other: Any
    ) -> Launch:
        return super().tiled(kernel, tiling, programs, sizes, strided, **{"TILE": tiling.tile, **other})

    def values_launch(self, name: str) -> Launch | None:
        """The sums of v, or of the gradient "d", of each chunk, which only an epsilon needs."""
        if not self.S.EPSILON:
            return None
        other = {"D": 0, "M": 0, "BD": 0, "BM": 0, "EPSILON": 0.0}
        return self.tiled(linear_favor_values_kernel, self.tilings.delta, self.heads * self.chunks, (), name, **other)

    def values_scan(self, launch: Launch | None, total: Tensor | None, *pointers: Any) -> Tensor | None:
        """Return (B · Hkv, chunks + 1, E + 1), the sums of the launch's rows before each one, from `total` on."""
        if launch is None:
            return None
        x = pointers[0]
        sums = x.new_empty(self.heads, self.chunks + 1, self.E + 1, dtype=torch.float32)
        sums[:, 0] = 0 if total is None else total.flatten(0, 1)
        launch(*pointers, sums)
        return sums.cumsum_(1)

    def part_launches(
        self, parts: list[Part], kernel: Any, tiling: FavorTiling, programs: int, strided: str, *, back: bool = False
    ) -> list[tuple[Launch, Launch, Launch]]:
        """Return the launches for each part: sums of its segments, the scan, and the kernel of its chunks."""
        sums, inputs, unused = linear_favor_forward_sums_kernel, "kv", {"H": 0, "EPSILON": 0.0}
        if back:
            sums, inputs, unused = linear_favor_backward_sums_kernel, "qd", {}
        return [
            (
                self.of_part(sums, self.tilings.sums, part, part.segments * self.tiles, inputs, **unused),
                self.scan_part(part, back=back),
                self.of_part(kernel, tiling, part, programs, strided),
            )
            for part in parts
        ]

    def scan_values(self, x: LinearInputs) -> Tensor | None:
        """Σ [v, 1] over the visible keys before each chunk, with an epsilon."""
        return self.values_scan(self.values, x.total, x.v, x.lengths, None, None)


class _FavorForward(FavorPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        parts = self.split(READ_SHARE)
        self.workspace = Workspace(*self.stack(parts[0]), (self.heads * self.chunks, torch.float32))
        sizes = self.S._replace(TILE=min(padded(self.M), 16384 // self.S.BD))
        self.weight = self.launch(linear_favor_forward_weight_kernel, (1,), (), {**sizes._asdict(), "num_warps": 16})
        self.query_scales = self.scales_launch("q", self.H, key=False)
        self.key_scales = self.scales_launch("k", self.Hkv, key=True)
        programs = self.H // self.Hkv * self.chunks
        self.parts = self.part_launches(parts, linear_favor_forward_kernel, self.tilings.read, programs, "qkv")

    def __call__(self, x: LinearInputs, *, zeroed: bool = False) -> tuple[Tensor | None, ...]:
        """Launch; see `forward`."""
        out, den, kv_out, shift_out = self.results(x.q, x.v, den=zeroed)
        saved = (self.saved if zeroed else self.eager).allocate(x.q, zeroed=zeroed)
        work = self.workspace.allocate(x.q)
        p_den, *w, query_offset, offset, scale, peak, references, residual = self.saved_pointers(saved, den)
        total, total_z, prefix, prefix_z, before, largest = self.pointers(self.workspace, work)
        q, k, v, weight, lengths, kv, shift = self.addresses(x.q, x.k, x.v, x.weight, x.lengths, x.kv, x.shift)
        p_out, p_kv, p_shift = self.addresses(out, kv_out, shift_out)
        with on_device(x.q):
            self.weight(weight, *w)
            self.query_scales(q, *w, None, query_offset, None, None, None)
            self.key_scales(k, *w, lengths, offset, scale, peak, largest)
            values = self.scan_values(x)
            for sums, scan, read in self.parts:
                sums(k, v, *w, lengths, offset, largest, shift, total, total_z, prefix, prefix_z, references)
                scan(total, total_z, before, None, references, kv, None, p_kv, p_shift)
                sums_before = before, total_z, prefix, prefix_z, values
                rows = query_offset, offset, scale, peak, references
                read(q, k, v, *w, lengths, *rows, *sums_before, p_out, p_den, residual)
        return out, kv_out, shift_out, den, saved

    def scales_launch(self, name: str, heads: int, *, key: bool) -> Launch:
        tiling = self.tilings.scales
        segments, run = self.segment(tiling.programs, self.B * heads)
        tile = min(tiling.tile, self.S.BM & -self.S.BM)  # a power of two that divides BM
        other = {"H": heads, "HKV": 0, "E": 0, "BE": 0, "TILE": tile, "KEY": key}
        programs = self.B * heads * segments
        return self.tiled(linear_favor_forward_scales_kernel, tiling, programs, (segments, run), name, **other)


class _FavorBackward(FavorPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        self.tensors["d"] = key[6]
        queries, keys = self.split(QUERIES_SHARE), self.split(KEYS_SHARE)
        rows = self.B * self.chunks * self.H
        tokens, more = (rows * CHUNK, torch.float32), (rows * CHUNK if self.S.EPSILON else 0, torch.float32)
        self.query_stack, self.key_stack = Workspace(*self.stack(queries[0])), Workspace(*self.stack(keys[0]))
        # A small stack is allocated with the rows and used twice: allocations take the host time too.
        small = self.query_stack.buffers if is_small(self.query_stack) and queries == keys else ()
        self.rows = Workspace(tokens, tokens, more, more, *small)
        unused = {"HKV": 0, "D": 0, "M": 0, "BD": 0, "BM": 0}
        self.delta = self.tiled(linear_favor_backward_delta_kernel, self.tilings.delta, rows, (), "d", **unused)
        self.d_values = self.values_launch("d")
        kernel, programs = linear_favor_backward_queries_kernel, self.H // self.Hkv * self.chunks
        self.query_parts = self.part_launches(queries, kernel, self.tilings.queries, programs, "qkvd")
        kernel = linear_favor_backward_keys_kernel
        self.key_parts = self.part_launches(keys, kernel, self.tilings.keys, self.chunks, "qkvd", back=True)

    def __call__(
        self, saved: LinearSaved, x: LinearInputs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Launch; see `backward`."""
        den, *w, query_offset, offset, scale, peak, references, residual = self.saved_pointers(saved.starts, saved.den)
        rows = self.rows.allocate(x.q)
        normalized_offset, delta, floor, mass, *small = self.pointers(self.rows, rows)
        stack = None if small else self.query_stack.allocate(x.q)
        total, total_z, prefix, prefix_z, before = small or self.pointers(self.query_stack, stack)
        d_q = new_like(x.q)
        d_start = None if x.kv is None else x.kv.new_empty(x.kv.shape)
        q, k, v, lengths, kv, p_d_q = self.addresses(x.q, x.k, x.v, x.lengths, x.kv, d_q)
        out, d_out, d_kv, p_start = self.addresses(saved.out, saved.d_out, saved.d_kv, d_start)
        with on_device(x.q):
            self.delta(out, residual, den, d_out, query_offset, normalized_offset, delta, floor)
            rest = floor, mass, offset, scale, peak, references
            given = q, k, v, d_out, *w, lengths, normalized_offset, delta, *rest
            values = self.scan_values(x)
            for sums, scan, queries in self.query_parts:
                sums(k, v, *w, lengths, offset, None, None, total, total_z, prefix, prefix_z, references)
                scan(total, total_z, before, None, references, kv, None, None, None)
                queries(*given, before, total_z, prefix, prefix_z, values, p_d_q)
            del stack, total, total_z, prefix, prefix_z, before  # The next stack takes their memory.
            stack = None if small else self.key_stack.allocate(x.q)
            total, total_z, suffix, suffix_z, after = small or self.pointers(self.key_stack, stack)
            d_k, d_v = new_like(x.k), new_like(x.v)
            p_d_k, p_d_v = self.addresses(d_k, d_v)
            d_values = self.scan_values_back(saved.d_out, mass, delta)
            for sums, scan, keys in self.key_parts:
                sums(q, d_out, *w, normalized_offset, delta, floor, peak, references, total, total_z, suffix, suffix_z)
                scan(total, total_z, after, None, references, d_kv, None, p_start, None)
                keys(*given, after, total_z, suffix, suffix_z, d_values, p_d_k, p_d_v)
        d_total = None if x.total is None else d_values[:, -1].reshape(x.total.shape)
        return d_q, d_k, d_v, d_start, d_total

    def scan_values_back(self, d_out: Tensor, mass: Any, delta: Any) -> Tensor | None:
        """Σ e_i [d_i, −Δ_i] / den_i after each chunk, from the last one on, with an epsilon."""
        return self.values_scan(self.d_values, None, d_out, None, mass, delta)


def saved_buffers(B: int, T: int, H: int, Hkv: int, D: int, M: int, residuals: int) -> Workspace:
    """The projection as two matrices and the flag; scales of queries and of keys; references before each chunk; this
    number of residuals per token and head.
    """
    size, chunks = padded(D) * feature_block(M), (T + CHUNK - 1) // CHUNK
    projection = (size, torch.bfloat16), (size, torch.bfloat16), (1, torch.float32)
    tokens = [(B * heads * chunks * CHUNK, torch.float32) for heads in (H, Hkv, Hkv, Hkv)]
    references, residual = (B * Hkv * (chunks + 1), torch.float32), (B * T * H * residuals, torch.bfloat16)
    return Workspace(*projection, *tokens, references, residual)
