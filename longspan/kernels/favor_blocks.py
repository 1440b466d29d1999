"""What the FAVOR+ kernels share: tiles of features, tiles of sums, powers of two.

Logarithms are to the base two. A reference is the largest logarithm of a key's features yet; sums are divided by two to
its power, rounded up, so that every change of scale is exact.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def power(x):
        return tl.exp2(tl.maximum(x, -200.0))

    @triton.jit
    def scaled_sum(b_x, factor, b_y):
        return (b_x.to(tl.float32) * factor + b_y.to(tl.float32)).to(tl.bfloat16)

    @triton.jit
    def whole(b_x):
        return b_x.to(tl.float32)
else:

    @triton.jit
    def power(x):
        """2^x in one instruction, exact where x is whole: what is too small to be a normal number is 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def scaled_sum(b_x, factor, b_y):
        """x · factor + y, two numbers at a time, with one rounding where factor is a power of two."""
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [b_x, factor.to(tl.bfloat16), b_y],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )

    @triton.jit
    def whole(b_x):
        """x of bfloat16 as float32, two numbers at a time: else each would be rounded by itself, at the pace of 2^x."""
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [b_x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def project(b_x, b_high, p_low, flag, i_m, BD: tl.constexpr, TILE: tl.constexpr):
    """w·x (C, TILE) of the tile of features from i_m on, with the precision of float32, which an exponent needs.

    x is exact and w the sum of two halves, of which the second is all zeros where flag is 0.
    """
    b_l = tl.dot(b_x, tl.trans(b_high))
    if flag != 0:
        b_l = tl.dot(b_x, tl.trans(load_tile(p_low, 0, i_m, 0, BD, TILE)), b_l)
    return b_l


@triton.jit
def project_both(b_x, b_y, b_high, p_low, flag, i_m, BD: tl.constexpr, TILE: tl.constexpr):
    """`project` of x and of y, their products under way together."""
    b_l, b_m = tl.dot(b_x, tl.trans(b_high)), tl.dot(b_y, tl.trans(b_high))
    if flag != 0:
        b_low = tl.trans(load_tile(p_low, 0, i_m, 0, BD, TILE))
        b_l, b_m = tl.dot(b_x, b_low, b_l), tl.dot(b_y, b_low, b_m)
    return b_l, b_m


@triton.jit
def project_across(b_x, b_high, p_low, flag, i_m, BD: tl.constexpr, TILE: tl.constexpr):
    """As `project`, (TILE, C): so features need not be turned round to be summed over tokens."""
    b_l = tl.dot(b_high, tl.trans(b_x))
    if flag != 0:
        b_l = tl.dot(load_tile(p_low, 0, i_m, 0, BD, TILE), tl.trans(b_x), b_l)
    return b_l


@triton.jit
def features(b_l, b_offset, m_real, D: tl.constexpr, WHOLE: tl.constexpr):
    """2^(w·x·D^−¼ − offset), and 0 where there is no feature. WHOLE: there is one everywhere."""
    b_f = power(b_l * (D**-0.25 * LOG2E) - b_offset)
    if not WHOLE:
        b_f = tl.where(m_real, b_f, 0)
    return b_f


@triton.jit
def column(b_x):
    """x (N,) as a matrix (N, 8) of bfloat16 whose rows add up to it: what a product with a vector takes."""
    i_8 = tl.arange(0, 8)[None, :]
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_rest = tl.where(i_8 == 1, (b_x - b_high)[:, None], 0.0)
    return tl.where(i_8 == 0, b_high[:, None], b_rest).to(tl.bfloat16)


@triton.jit
def load_tile(p_x, i_x, i_m, BM: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr):
    """Rows i_m, … of matrix i_x of a stack of (BM, BE)."""
    i_r, i_e = i_m + tl.arange(0, TILE), tl.arange(0, BE)
    return tl.load(p_x + i_x * (BM * BE) + i_r[:, None] * BE + i_e[None, :])


@triton.jit
def store_tile(p_x, i_x, i_m, b_x, BM: tl.constexpr, BE: tl.constexpr, TILE: tl.constexpr):
    """As `load_tile`, the other way."""
    i_r, i_e = i_m + tl.arange(0, TILE), tl.arange(0, BE)
    p_x += i_x * (BM * BE) + i_r[:, None] * BE + i_e[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty))


@triton.jit
def reference(p_x, i_x):
    return tl.ceil(tl.load(p_x + i_x))


@triton.jit
def pairs(b_scale, b_reference, C: tl.constexpr):
    """2^(n_j − r_i) (C, C) for j ≤ i, else 0; 0 for hidden keys too, whose scale is FLOOR."""
    i_t = tl.arange(0, C)
    return tl.where(i_t[None, :] <= i_t[:, None], power(b_scale[None, :] - b_reference[:, None]), 0.0)


@triton.jit
def pairs_across(b_scale, b_reference, C: tl.constexpr):
    """As `pairs`, with a row for each key."""
    i_t = tl.arange(0, C)
    return tl.where(i_t[:, None] <= i_t[None, :], power(b_scale[:, None] - b_reference[None, :]), 0.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maximum(b_x):
    return tl.associative_scan(b_x, 0, _larger)
