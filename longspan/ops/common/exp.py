"""Exponentials, logarithms and conversions in inline PTX, with equivalents for Triton's interpreter."""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # log₂ e minus its value in float32
UNDERFLOW = tl.constexpr(-110.0)  # exp of this is 0 in float32

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log2(x):
        return tl.log2(x)

    @triton.jit
    def widen(b_x):
        return b_x.to(tl.float32)

    @triton.jit
    def round_once(b_x):
        return b_x.to(tl.bfloat16)

    @triton.jit
    def truncated(b_x):
        return (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)

    @triton.jit
    def truncate(b_x):
        return truncated(b_x).to(tl.bfloat16)

    @triton.jit
    def same_layout(b_x, b_y):
        return b_x

    @triton.jit
    def scaled_sum(b_x, factor, b_y):
        return (b_x.to(tl.float32) * factor + b_y.to(tl.float32)).to(tl.bfloat16)
else:

    @triton.jit
    def exp2(x):
        """2^x in one instruction, exact for integers x; results below the smallest normal number are 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def exp(x):
        return exp2(x * LOG2E)

    @triton.jit
    def log2(x):
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def widen(b_x):
        """bfloat16 as float32, two elements at a time. The compiler would fold the conversion into a preceding
        rounding and round element by element.
        """
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [b_x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )

    @triton.jit
    def round_once(b_x):
        """Round to bfloat16 and keep the result in registers: the compiler moves it instead of recomputing it."""
        b_x = b_x.to(tl.bfloat16)
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=tl.bfloat16, is_pure=False, pack=2)

    @triton.jit
    def truncated(b_x):
        """float32 with the upper 16 bits of x, which are a bfloat16."""
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xffff0000;", "=r,r", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def truncate(b_x):
        """`truncated` as bfloat16, two elements at a time; computed where it is written, not earlier."""
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [b_x], dtype=tl.bfloat16, is_pure=False, pack=2
        )

    @triton.jit
    def same_layout(b_x, b_y):
        """Return x; forces x and y into the same register layout."""
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [b_x, b_y], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def scaled_sum(b_x, factor, b_y):
        """x · factor + y in bfloat16, two elements at a time; rounded once if factor is a power of two."""
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [b_x, factor.to(tl.bfloat16), b_y],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def exact_exp(x):
    """exp(x) of x ≤ 0 with an error of one ulp, as in PyTorch; that of `exp` grows with x."""
    x = tl.where(x < UNDERFLOW, UNDERFLOW, x)  # NaN stays NaN
    n = tl.floor(x * LOG2E + 0.5)
    return _power(n, tl.fma(x, LOG2E, -n) + x * LOG2E_REST)


@triton.jit
def exact_exp2(x):
    """2^x of x ≤ 0 with an error of one ulp; that of `exp2` is up to four."""
    x = tl.where(x < UNDERFLOW * LOG2E, UNDERFLOW * LOG2E, x)
    n = tl.floor(x + 0.5)
    return _power(n, x - n)


@triton.jit
def _power(n, r):
    """2^(n + r), n an integer and r from −½ to ½: a minimax polynomial of r, times 2ⁿ."""
    y = tl.fma(r, 1.54697319723078e-4, 1.3400432165225804e-3)
    y = tl.fma(r, y, 9.618025602985998e-3)
    y = tl.fma(r, y, 5.550327214209406e-2)
    y = tl.fma(r, y, 2.402265121359483e-1)
    y = tl.fma(r, y, 6.931472067106204e-1)
    return tl.fma(r, y, 1.0) * exp2(n)


@triton.jit
def add(b_x, b_y):
    """x + y of two products as an FMA, so that Triton does not chain the products through one accumulator."""
    return tl.fma(b_y, 1.0, b_x)
