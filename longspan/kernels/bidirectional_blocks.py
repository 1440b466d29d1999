"""What the kernels of bidirectional linear attention share: where a stretch of tokens lies, and feature maps on blocks.

Keys whose features are exponentials are scaled by each feature's own maximum c, and
queries get c added to their logits: nothing overflows, and a normaliser is at
least 1 wherever there is a key.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR, RELU_EPSILON, add_product, exact_inverse, exp, inverse, product

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # what float32 leaves of it
LN2 = tl.constexpr(0.6931471805599453)

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _exp2(x):
        return tl.exp2(x)

    @triton.jit
    def _exp(x):
        return tl.exp(x)

    @triton.jit
    def _widened(b_x):
        return b_x.to(tl.float32)
else:

    @triton.jit
    def _exp2(x):
        """In one instruction: what is too small to be a normal number is 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _exp(x):
        """With what the product with log₂ e loses made good."""
        b_high = x * LOG2E
        b_low = tl.fma(x, LOG2E, -b_high) + x * LOG2E_REST
        return _exp2(b_high) * (1 + b_low * LN2)

    @triton.jit
    def _widened(b_x):
        """Two numbers at a time: left to the compiler, each would be rounded by itself, at the pace of 2^x."""
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [b_x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def widened(b_x, DOT: tl.constexpr):
    """Numbers rounded to DOT, as float32."""
    if tl.float32 != DOT:
        b_x = _widened(b_x)
    return b_x


@triton.jit
def power(x, DOT: tl.constexpr):
    """The base to the power of x: 2 with products of bfloat16, e with those of float32, where each rounding shows."""
    if tl.float32 == DOT:
        x = _exp(x)
    else:
        x = _exp2(x)
    return x


@triton.jit
def logarithm(x, DOT: tl.constexpr):
    """`power`, the other way."""
    if tl.float32 == DOT:
        x = tl.log(x)
    else:
        x = tl.log2(x)
    return x


@triton.jit
def reciprocal(x, DOT: tl.constexpr):
    """1 / x, and 0 where there is nothing to divide by."""
    if tl.float32 == DOT:
        x = exact_inverse(x)
    else:
        x = inverse(x)
    return x


@triton.jit
def find_stretch(p_offsets, i_s, tokens, length, sequences):
    """The sequence of stretch i_s, its row of the batch, its first token's slot in that row, and the tokens of the
    sequence from there on, which may be none.

    Packed sequence n has stretches from offsets[n] // length + n on: at least as many as it needs.
    """
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
    return i_n, i_b.to(tl.int64), i_0.to(tl.int64), rows


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
def load_block(p_x, stride_t, m_t, columns, C: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """The rows of the (C, BD) block at p_x that m_t keeps, zeros in the rest. WHOLE: all columns are there."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    m_x = m_t[:, None]
    if not WHOLE:
        m_x = m_x & (i_d < columns)[None, :]
    return tl.load(p_x + i_t[:, None] * stride_t + i_d[None, :], mask=m_x, other=0.0)


@triton.jit
def store_block(p_x, stride_t, m_t, columns, b_x, C: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """As `load_block`, the other way."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    m_x = m_t[:, None]
    if not WHOLE:
        m_x = m_x & (i_d < columns)[None, :]
    tl.store(p_x + i_t[:, None] * stride_t + i_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def visible_rows(p_mask, rows, C: tl.constexpr):
    """Which of C keys there are: the first `rows`, of them those that p_mask keeps."""
    i_t = tl.arange(0, C)
    m_t = i_t < rows
    if p_mask is not None:
        m_t = tl.load(p_mask + i_t, mask=m_t, other=0) != 0
    return m_t


@triton.jit
def load_sums(p_x, i_x, BM: tl.constexpr, BE: tl.constexpr, COLUMNS: tl.constexpr):
    """The first BE columns of matrix i_x of a stack of (BM, COLUMNS) at p_x."""
    i_m, i_e = tl.arange(0, BM), tl.arange(0, BE)
    return tl.load(p_x + i_x * (BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :])


@triton.jit
def load_halves(p_x, i_x, BM: tl.constexpr, BE: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr):
    """As `load_sums` of (BM, COLUMNS) whose sum they are: two halves of bfloat16 side by side, or float32 and 0."""
    b_low = 0
    if tl.float32 == DOT:
        b_high = load_sums(p_x, i_x, BM, BE, COLUMNS)
    else:
        b_high = load_sums(p_x, i_x, BM, BE, 2 * COLUMNS)
        b_low = load_sums(p_x + COLUMNS, i_x, BM, BE, 2 * COLUMNS)
    return b_high, b_low


@triton.jit
def store_halves(p_x, i_row, b_x, BE: tl.constexpr, DOT: tl.constexpr):
    """Rows i_row of sums as `load_halves` takes them."""
    i_e = tl.arange(0, BE)
    if tl.float32 == DOT:
        tl.store(p_x + i_row[:, None] * BE + i_e[None, :], b_x)
    else:
        p_x += i_row[:, None] * (2 * BE) + i_e[None, :]
        b_high = b_x.to(DOT)
        tl.store(p_x, b_high)
        tl.store(p_x + BE, (b_x - b_high.to(tl.float32)).to(DOT))


@triton.jit
def load_row_halves(p_x, i_row, BE: tl.constexpr, DOT: tl.constexpr):
    """As `store_halves`, the other way: float32."""
    i_e = tl.arange(0, BE)
    if tl.float32 == DOT:
        b_x = tl.load(p_x + i_row[:, None] * BE + i_e[None, :])
    else:
        p_x += i_row[:, None] * (2 * BE) + i_e[None, :]
        b_x = tl.load(p_x).to(tl.float32) + tl.load(p_x + BE).to(tl.float32)
    return b_x


@triton.jit
def times_halves(b_high, b_low, b_x, b_g, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """b_g + sums times x (C, BE) across: (BM, C). Both halves count: normalisers are subtracted from this."""
    b_g = add_product(b_high, tl.trans(b_x), b_g, PRECISION)
    if tl.float32 != DOT:
        b_g = tl.dot(b_low, tl.trans(b_x), b_g)
    return b_g


@triton.jit
def store_sums(p_x, i_x, b_x, BM: tl.constexpr, BE: tl.constexpr, COLUMNS: tl.constexpr):
    """As `load_sums`, the other way."""
    i_m, i_e = tl.arange(0, BM), tl.arange(0, BE)
    tl.store(p_x + i_x * (BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :], b_x)


@triton.jit
def load_projection(
    p_weight,
    D: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    PROJECTION: tl.constexpr,
    DOT: tl.constexpr,
):
    """What inputs are multiplied with, (BM, BD): a weight, as two halves where it is not a number of DOT, or a unit
    matrix, whose product lies in registers as the next product wants it. 0 where there is nothing to multiply with.
    """
    b_weight, b_low = 0, 0
    i_m, i_d = tl.arange(0, BM), tl.arange(0, BD)
    if PROJECTION == "unit":
        b_weight = tl.where(i_m[:, None] == i_d[None, :], 1.0, 0.0).to(DOT)
    if PROJECTION == "whole" or PROJECTION == "halves":
        m_w = (i_m < M)[:, None] & (i_d < D)[None, :]
        b_whole = tl.load(p_weight + i_m[:, None] * D + i_d[None, :], mask=m_w, other=0.0)
        b_weight = b_whole.to(DOT)
        if PROJECTION == "halves":
            b_low = (b_whole - b_weight.to(tl.float32)).to(DOT)
    return b_weight, b_low


@triton.jit
def rows_to_take(p_rest, rows, PROJECTION: tl.constexpr):
    """rows, or none where another launch takes them: whether a weight is exact in bfloat16 the host does not know.

    p_rest: the largest rest that bfloat16 leaves of the weight; None where there is but one launch.
    """
    if p_rest is not None:
        rows = tl.where((tl.load(p_rest) == 0) == (PROJECTION == "whole"), rows, 0)
    return rows


@triton.jit
def project(b_x, b_weight, b_low, PROJECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """w·x (C, BM) with the precision of float32, which an exponent needs."""
    if PROJECTION == "none":
        b_p = b_x.to(tl.float32)
    elif tl.float32 == DOT:
        b_p = product(b_x.to(tl.float32), tl.trans(b_weight), PRECISION)
    else:
        b_p = tl.dot(b_x, tl.trans(b_weight))
        if PROJECTION == "halves":
            b_p = tl.dot(b_x, tl.trans(b_low), b_p)
    return b_p


@triton.jit
def project_across(b_x, b_weight, b_low, PROJECTION: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """As `project`, (BM, C)."""
    if PROJECTION == "none":
        b_p = tl.trans(b_x.to(tl.float32))
    elif tl.float32 == DOT:
        b_p = product(b_weight, tl.trans(b_x.to(tl.float32)), PRECISION)
    else:
        b_p = tl.dot(b_weight, tl.trans(b_x))
        if PROJECTION == "halves":
            b_p = tl.dot(b_low, tl.trans(b_x), b_p)
    return b_p


@triton.jit
def to_logits(b_p, D: tl.constexpr, MAP: tl.constexpr, DOT: tl.constexpr):
    """Logits to the base of `power` from projections, where features are exponentials."""
    if MAP == "favor":
        b_p *= D**-0.25
    if tl.float32 != DOT:
        b_p *= LOG2E
    return b_p


@triton.jit
def half_norm(b_x, D: tl.constexpr, DOT: tl.constexpr):
    """‖x‖²/2 (C,), which FAVOR+'s keys have in their logits."""
    b_x = b_x.to(tl.float32)
    b_half = tl.sum(b_x * b_x, 1) * (0.5 * D**-0.5)
    if tl.float32 != DOT:
        b_half *= LOG2E
    return b_half


@triton.jit
def plain_features(b_x, MAP: tl.constexpr):
    """φ of maps that are no exponentials."""
    if MAP == "elu":
        b_x = tl.maximum(b_x, 0) + exp(tl.minimum(b_x, 0))
    if MAP == "relu":
        b_x = tl.maximum(b_x, 0) + RELU_EPSILON
    return b_x


@triton.jit
def plain_gradient(b_g, b_x, b_f, MAP: tl.constexpr):
    """d x from d φ(x), x and φ(x) of maps that are no exponentials."""
    if MAP == "elu":
        b_g *= tl.minimum(b_f, 1)
    if MAP == "relu":
        b_g = tl.where(b_x > 0, b_g, 0)
    return b_g


@triton.jit
def query_scales(p_z, p_c, i_x, M: tl.constexpr, BM: tl.constexpr, EXPONENTIAL: tl.constexpr, FEATURE: tl.constexpr):
    """Each feature's share of the normaliser and what its logits get added; no feature has any beyond M.

    Where the sums are divided already, a query's features are divided by their own sum.
    """
    i_m = tl.arange(0, BM)
    if FEATURE:
        b_z = tl.where(i_m < M, 1.0, 0.0)
        b_c = tl.where(i_m < M, 0.0, FLOOR)
    else:
        b_z = tl.load(p_z + i_x * BM + i_m, mask=i_m < M, other=0.0)
        b_c = tl.zeros((BM,), tl.float32)
        if EXPONENTIAL:
            b_c = tl.load(p_c + i_x * BM + i_m, mask=i_m < M, other=FLOOR)
    return b_z, b_c
