"""What the kernels of bidirectional linear attention share: where a stretch of tokens lies, and feature maps on blocks.

Keys whose features are exponentials are scaled by each feature's own maximum c, and queries get c added to their
logits: nothing overflows, and a normalizer is at least 1 wherever there is a key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E, exact_exp, exp2, widen
from longspan.ops.common.tiles import FLOOR, add_product, exact_inverse, inverse, load_tile, product, zeros


class Sizes(NamedTuple):
    """What kernels are compiled for: heads, dimensions, features, values, blocks of them (powers of two), tiles of
    values, and C tokens, or rows of the sums, at once.

    DIVIDE: each query divides. FEATURE: the sums are divided. DOT: what products are of. PROJECTION: see
    `load_projection`. QUERIES, SUMS: what the backward pass over queries makes.
    """

    H: int
    HKV: int
    D: int
    M: int
    E: int
    BD: int
    BM: int
    BE: int
    MAP: str
    EXPONENTIAL: bool
    DIVIDE: bool
    FEATURE: bool
    DOT: Any
    PRECISION: str
    TILES: int = 1
    C: int = 0
    PROJECTION: str = "none"
    QUERIES: bool = False
    SUMS: bool = False


@triton.jit
def widened(b_x, S: tl.constexpr):
    """Numbers rounded to DOT, as float32."""
    if tl.float32 != S.DOT:
        b_x = widen(b_x)
    return b_x


@triton.jit
def power(x, S: tl.constexpr):
    """The base to the power of x: 2 with products of bfloat16, e with those of float32, where each rounding shows."""
    if tl.float32 == S.DOT:
        x = exact_exp(x)
    else:
        x = exp2(x)
    return x


@triton.jit
def logarithm(x, S: tl.constexpr):
    """`power`, the other way."""
    if tl.float32 == S.DOT:
        x = tl.log(x)
    else:
        x = tl.log2(x)
    return x


@triton.jit
def reciprocal(x, S: tl.constexpr):
    """1 / x, and 0 where there is nothing to divide by."""
    if tl.float32 == S.DOT:
        x = exact_inverse(x)
    else:
        x = inverse(x)
    return x


@triton.jit
def find_stretch(
    p_offsets, p_rest, tokens, length, sequences, HEADS: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr
):
    """The head, tile of values and stretch that a program is for; the stretch's sequence, its row of the batch, its
    first token's slot in that row, and the tokens of the sequence from there on, which may be none.

    Packed sequence n has stretches from offsets[n] // length + n on: at least as many as it needs. p_rest: the largest
    rest that bfloat16 leaves of the weight, None where there is but one launch; the host does not know whether there is
    any, so that of two launches one finds no tokens.
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
        rows = tl.where((tl.load(p_rest) == 0) == (S.PROJECTION == "whole"), rows, 0)
    return i_h, i_e, i_s, i_n, i_b.to(tl.int64), i_0.to(tl.int64), rows


@triton.jit
def stretches_of(p_offsets, i_n, tokens, length):
    """The first stretch of sequence i_n, and how many it has tokens for."""
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
    """Which of C keys there are: the first `rows`, of them those that p_mask keeps."""
    i_t = tl.arange(0, S.C)
    m_t = i_t < rows
    if p_mask is not None:
        m_t = tl.load(p_mask + i_t, mask=m_t, other=0) != 0
    return m_t


@triton.jit
def load_halves(p_x, i_x, S: tl.constexpr):
    """A tile of matrix i_x of a stack of (BM, BE · TILES) at p_x, as two whose sum it is: halves of bfloat16 side by
    side, or float32 and 0.
    """
    b_low = 0
    if tl.float32 == S.DOT:
        b_high = load_tile(p_x, i_x, S)
    else:
        b_high = load_tile(p_x, i_x, S, 2)
        b_low = load_tile(p_x + S.BE * S.TILES, i_x, S, 2)
    return b_high, b_low


@triton.jit
def store_halves(p_x, i_row, b_x, S: tl.constexpr):
    """Rows i_row of sums as `load_halves` takes them."""
    i_e = tl.arange(0, S.BE)
    if tl.float32 == S.DOT:
        tl.store(p_x + i_row[:, None] * S.BE + i_e[None, :], b_x)
    else:
        p_x += i_row[:, None] * (2 * S.BE) + i_e[None, :]
        b_high = b_x.to(S.DOT)
        tl.store(p_x, b_high)
        tl.store(p_x + S.BE, (b_x - b_high.to(tl.float32)).to(S.DOT))


@triton.jit
def load_row_halves(p_x, i_row, S: tl.constexpr):
    """As `store_halves`, the other way: float32."""
    i_e = tl.arange(0, S.BE)
    if tl.float32 == S.DOT:
        b_x = tl.load(p_x + i_row[:, None] * S.BE + i_e[None, :])
    else:
        p_x += i_row[:, None] * (2 * S.BE) + i_e[None, :]
        b_x = tl.load(p_x).to(tl.float32) + tl.load(p_x + S.BE).to(tl.float32)
    return b_x


@triton.jit
def times_halves(b_high, b_low, b_x, b_g, S: tl.constexpr):
    """b_g + sums times x (C, BE) across: (BM, C). Both halves count: normalizers are subtracted from this."""
    PRECISION: tl.constexpr = S.PRECISION
    b_g = add_product(b_high, tl.trans(b_x), b_g, PRECISION)
    if tl.float32 != S.DOT:
        b_g = tl.dot(b_low, tl.trans(b_x), b_g)
    return b_g


@triton.jit
def load_projection(p_weight, S: tl.constexpr):
    """What inputs are multiplied with, (BM, BD): a weight, as two halves where it is not a number of DOT, or a unit
    matrix, whose product lies in registers as the next product wants it. 0 where there is nothing to multiply with.
    """
    b_weight, b_low = 0, 0
    i_m, i_d = tl.arange(0, S.BM), tl.arange(0, S.BD)
    if S.PROJECTION == "unit":
        b_weight = tl.where(i_m[:, None] == i_d[None, :], 1.0, 0.0).to(S.DOT)
    if S.PROJECTION == "whole" or S.PROJECTION == "halves":
        m_w = (i_m < S.M)[:, None] & (i_d < S.D)[None, :]
        b_whole = tl.load(p_weight + i_m[:, None] * S.D + i_d[None, :], mask=m_w, other=0.0)
        b_weight = b_whole.to(S.DOT)
        if S.PROJECTION == "halves":
            b_low = (b_whole - b_weight.to(tl.float32)).to(S.DOT)
    return b_weight, b_low


@triton.jit
def project(b_x, b_weight, b_low, S: tl.constexpr):
    """w·x (C, BM) with the precision of float32, which an exponent needs."""
    PRECISION: tl.constexpr = S.PRECISION
    if S.PROJECTION == "none":
        b_p = b_x.to(tl.float32)
    elif tl.float32 == S.DOT:
        b_p = product(b_x.to(tl.float32), tl.trans(b_weight), PRECISION)
    else:
        b_p = tl.dot(b_x, tl.trans(b_weight))
        if S.PROJECTION == "halves":
            b_p = tl.dot(b_x, tl.trans(b_low), b_p)
    return b_p


@triton.jit
def project_across(b_x, b_weight, b_low, S: tl.constexpr):
    """As `project`, (BM, C)."""
    PRECISION: tl.constexpr = S.PRECISION
    if S.PROJECTION == "none":
        b_p = tl.trans(b_x.to(tl.float32))
    elif tl.float32 == S.DOT:
        b_p = product(b_weight, tl.trans(b_x.to(tl.float32)), PRECISION)
    else:
        b_p = tl.dot(b_weight, tl.trans(b_x))
        if S.PROJECTION == "halves":
            b_p = tl.dot(b_low, tl.trans(b_x), b_p)
    return b_p


@triton.jit
def to_logits(b_p, S: tl.constexpr):
    """Logits to the base of `power` from projections, where features are exponentials."""
    if S.MAP == "favor":
        b_p *= S.D**-0.25
    if tl.float32 != S.DOT:
        b_p *= LOG2E
    return b_p


@triton.jit
def half_norm(b_x, S: tl.constexpr):
    """‖x‖²/2 (C,), which FAVOR+'s keys have in their logits."""
    b_x = b_x.to(tl.float32)
    b_half = tl.sum(b_x * b_x, 1) * (0.5 * S.D**-0.5)
    if tl.float32 != S.DOT:
        b_half *= LOG2E
    return b_half


@triton.jit
def query_scales(p_z, p_c, i_x, S: tl.constexpr):
    """Each feature's share of the normalizer and what its logits get added; no feature has any beyond M.

    Where the sums are divided already, a query's features are divided by their own sum.
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
