"""What the FAVOR+ kernels share: where their numbers lie, tiles of features, tiles of sums, powers of two.

Logarithms are to the base two. A reference is the largest logarithm of a key's features yet; sums are divided by two to
its power, rounded up, so that every change of scale is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E, exp2, scaled_sum


class Sizes(NamedTuple):
    """What kernels are compiled for: heads, dimensions, features, values, tokens in a chunk, blocks of dimensions,
    features and values (powers of two), and features, or rows of the sums, at once; 0 where a kernel does not ask.

    KEY: sizes are those of keys. BACK: the scan goes from the last segment to the first.
    """

    H: int
    HKV: int
    D: int
    M: int
    E: int
    C: int
    BD: int
    BM: int
    BE: int
    TILE: int = 0
    KEY: bool = False
    BACK: bool = False


@triton.jit
def find_sequence(first, sequences, EACH: tl.constexpr, S: tl.constexpr):
    """Which of EACH programs for a piece of a sequence this is; which piece, of which sequence among all (B, Hkv) and
    among those that have sums, its row and its head. Only so many sequences, from the first on, are gone through, and
    only they have sums.
    """
    i_each, pid = tl.program_id(0) % EACH, tl.program_id(0) // EACH
    i_piece, i_x = pid // sequences, first + pid % sequences
    i_b, i_kv = (i_x // S.HKV).to(tl.int64), i_x % S.HKV
    return i_each, i_piece, i_x.to(tl.int64), i_x.to(tl.int64) - first, i_b, i_kv


@triton.jit
def find_chunk(i_c, i_x, i_n, T, segments, chunks, S: tl.constexpr):
    """Which of all segments, among the sequences that have sums, has chunk i_c; which of all chunks it is, and which
    among those sequences.
    """
    return i_n * segments + i_c // chunks, i_x * tl.cdiv(T, S.C) + i_c, i_n * tl.cdiv(T, S.C) + i_c


@triton.jit
def project(b_x, b_high, p_low, flag, i_f, S: tl.constexpr):
    """w·x (C, TILE) of a tile of features, with the precision of float32, which an exponent needs.

    x is exact and w the sum of two halves, of which the second is all zeros where flag is 0.
    """
    b_l = tl.dot(b_x, tl.trans(b_high))
    if flag != 0:
        b_l = tl.dot(b_x, tl.trans(load_half(p_low, i_f, S)), b_l)
    return b_l


@triton.jit
def project_both(b_x, b_y, b_high, p_low, flag, i_f, S: tl.constexpr):
    """`project` of x and of y, their products under way together."""
    b_l, b_m = tl.dot(b_x, tl.trans(b_high)), tl.dot(b_y, tl.trans(b_high))
    if flag != 0:
        b_low = tl.trans(load_half(p_low, i_f, S))
        b_l, b_m = tl.dot(b_x, b_low, b_l), tl.dot(b_y, b_low, b_m)
    return b_l, b_m


@triton.jit
def project_across(b_x, b_high, p_low, flag, i_f, S: tl.constexpr):
    """As `project`, (TILE, C): so features need not be turned round to be summed over tokens."""
    b_l = tl.dot(b_high, tl.trans(b_x))
    if flag != 0:
        b_l = tl.dot(load_half(p_low, i_f, S), tl.trans(b_x), b_l)
    return b_l


@triton.jit
def features(b_l, b_offset, i_f, S: tl.constexpr):
    """2^(w·x·D^−¼ − offset), and 0 where there is no feature."""
    b_f = exp2(b_l * (S.D**-0.25 * LOG2E) - b_offset)
    if S.M != S.BM:
        b_f = tl.where(i_f < S.M, b_f, 0)
    return b_f


@triton.jit
def column(b_x):
    """x (N,) as a matrix (N, 8) of bfloat16 whose rows add up to it: what a product with a vector takes."""
    i_8 = tl.arange(0, 8)[None, :]
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_rest = tl.where(i_8 == 1, (b_x - b_high)[:, None], 0.0)
    return tl.where(i_8 == 0, b_high[:, None], b_rest).to(tl.bfloat16)


@triton.jit
def load_half(p_x, i_f, S: tl.constexpr):
    """A tile of a half of the projection (BM, BD)."""
    return tl.load(p_x + i_f[:, None] * S.BD + tl.arange(0, S.BD)[None, :])


@triton.jit
def store_sums(p_kv, p_z, i_x, i_f, b_kv, b_z, S: tl.constexpr):
    """Rows i_f of matrix i_x of a stack of (BM, BE), and of one of (BM,)."""
    p_kv += i_x * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :]
    tl.store(p_kv, b_kv.to(p_kv.dtype.element_ty))
    tl.store(p_z + i_x * S.BM + i_f, b_z)


@triton.jit
def load_sums(p_far, p_far_z, i_far, p_near, p_near_z, i_near, factor, i_f, S: tl.constexpr):
    """As `store_sums`, the other way: those of a chunk's segment times factor and its own, added up."""
    b_far = tl.load(p_far + i_far * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :])
    b_near = tl.load(p_near + i_near * (S.BM * S.BE) + i_f[:, None] * S.BE + tl.arange(0, S.BE)[None, :])
    b_kv = scaled_sum(b_far, factor, b_near)
    return b_kv, tl.load(p_far_z + i_far * S.BM + i_f) * factor + tl.load(p_near_z + i_near * S.BM + i_f)


@triton.jit
def reference(p_x, i_x):
    return tl.ceil(tl.load(p_x + i_x))


@triton.jit
def pairs(b_scale, b_reference, S: tl.constexpr):
    """2^(n_j − r_i) (C, C) for j ≤ i, else 0; 0 for hidden keys too, whose scale is FLOOR."""
    i_t = tl.arange(0, S.C)
    return tl.where(i_t[None, :] <= i_t[:, None], exp2(b_scale[None, :] - b_reference[:, None]), 0.0)


@triton.jit
def pairs_across(b_scale, b_reference, S: tl.constexpr):
    """As `pairs`, with a row for each key."""
    i_t = tl.arange(0, S.C)
    return tl.where(i_t[:, None] <= i_t[None, :], exp2(b_scale[:, None] - b_reference[None, :]), 0.0)
