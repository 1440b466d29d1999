"""What kernels share: where programs and tensors' rows lie, blocks in and out, powers, products, plain feature maps.

In all of them p_x is where x lies, x or x_steps its steps, b_x a block of it, i_x an index and m_x a mask; capitals are
known when a kernel is compiled.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import triton
import triton.language as tl

# ops.linear and ops.features have them too; a test holds them equal.
FLOOR = tl.constexpr(-1e30)
RELU_EPSILON = tl.constexpr(1e-3)
# A normalizer below this is a sum that underflowed: as good as none, and its reciprocal would overflow.
NOTHING = tl.constexpr(1.1754943508222875e-32)
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # what float32 leaves of it
LN2 = tl.constexpr(0.6931471805599453)


class Steps(NamedTuple):
    """From row to row, from token to token and from head to head of a tensor (B, T, H, D)."""

    b: int
    t: int
    h: int


def padded(size: int, least: int = 64) -> int:
    """The block for so many columns. On Hopper, products of bfloat16 with tiles narrower than 64 come out wrong with
    Triton 3.6.
    """
    # int: a compiler may hand in a symbol, and another size is another kernel.
    return max(least, 1 << (int(size) - 1).bit_length())


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def exact_exp(x):
        return tl.exp(x)

    @triton.jit
    def whole(b_x):
        return b_x.to(tl.float32)
else:

    @triton.jit
    def exp2(x):
        """In one instruction, exact where x is whole: what is too small to be a normal number is 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def exp(x):
        return exp2(x * LOG2E)

    @triton.jit
    def exact_exp(x):
        """With what the product with log₂ e loses made good: float32 has no digit to spare."""
        high = x * LOG2E
        low = tl.fma(x, LOG2E, -high) + x * LOG2E_REST
        return exp2(high) * (1 + low * LN2)

    @triton.jit
    def whole(b_x):
        """bfloat16 as float32, two numbers at a time: left to the compiler, numbers rounded just before would each be
        rounded by itself, at the pace of 2^x.
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
def product(b_x, b_y, PRECISION: tl.constexpr):
    """x·y. "ieee": in pieces of 16 along the axis they share, or as many as there is room for. Without tensor cores a
    number is one chain of additions, on through all blocks; PyTorch's chains are short, and each rounding shows.
    """
    if PRECISION == "ieee":
        N: tl.constexpr = b_x.shape[0]
        K: tl.constexpr = b_x.shape[1]
        P: tl.constexpr = b_y.shape[1]
        PIECES: tl.constexpr = K // 16 if N * K * P <= 16 * 8192 else 8192 // (N * P)
        b_x = tl.permute(tl.reshape(b_x, (N, PIECES, K // PIECES)), (1, 0, 2))
        b_y = tl.reshape(b_y, (PIECES, K // PIECES, P))
        b_xy = tl.sum(tl.dot(b_x, b_y, input_precision="ieee"), 0)
    else:
        b_xy = tl.dot(b_x, b_y, input_precision=PRECISION)
    return b_xy


@triton.jit
def add_product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """sum + x·y."""
    if PRECISION == "ieee":
        b_sum += product(b_x, b_y, PRECISION)
    else:
        b_sum = tl.dot(b_x, b_y, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def place(stretches, HEADS: tl.constexpr, TILES: tl.constexpr = 1):
    """The head, tile of values, stretch of tokens and row of the batch that a program is for."""
    pid = tl.program_id(0)
    i_h = pid % HEADS
    i_e = (pid // HEADS) % TILES
    i_s = (pid // (HEADS * TILES)) % stretches
    return i_h, i_e, i_s, (pid // (HEADS * TILES) // stretches).to(tl.int64)


@triton.jit
def at(p_x, steps, i_b, i_t, i_h, column=0):
    """Where token i_t of one row and head begins, or a column of it."""
    return p_x + (i_b * steps.b + tl.cast(i_t, tl.int64) * steps.t + i_h.to(tl.int64) * steps.h + column)


@triton.jit
def visible(p_lengths, i_b, T):
    """How many keys of a row are not hidden."""
    if p_lengths is not None:
        T = tl.load(p_lengths + i_b).to(tl.int32)
    return T


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr = 0):
    """(ROWS,) or (ROWS, COLUMNS). tl.zeros takes no shapes made of members of a tuple."""
    if COLUMNS == 0:
        b_x = tl.full((ROWS,), 0, tl.float32)
    else:
        b_x = tl.full((ROWS, COLUMNS), 0, tl.float32)
    return b_x


@triton.jit
def _block(p_x, step, m_t, i_x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Where the (C, BLOCK) block at p_x lies, and what of it is there: the rows that m_t keeps, and of its columns, the
    i_x-th BLOCK, those among SIZE.
    """
    i_t, i_d = tl.arange(0, C), tl.arange(0, BLOCK)
    m_x = m_t[:, None]
    if SIZE % BLOCK != 0:
        m_x = m_x & (i_d < SIZE - i_x * BLOCK)[None, :]
    return p_x + i_t[:, None] * step + i_d[None, :], m_x


@triton.jit
def load_block(p_x, step, m_t, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0):
    """The rows that m_t keeps of the (C, BLOCK) block at p_x, the i_x-th of SIZE columns; zeros in the rest."""
    p_x, m_x = _block(p_x, step, m_t, i_x, SIZE, C, BLOCK)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_block(p_x, step, m_t, b_x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0):
    """As `load_block`, the other way."""
    p_x, m_x = _block(p_x, step, m_t, i_x, SIZE, C, BLOCK)
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def load_rows(p_x, step, rows, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0):
    """`load_block` of the first rows."""
    return load_block(p_x, step, tl.arange(0, C) < rows, SIZE, C, BLOCK, i_x)


@triton.jit
def load_rows_again(p_x, step, rows, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """As `load_rows`, but never merged with it: from the cache rather than from registers held for long."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BLOCK)
    _, m_x = _block(p_x, step, i_t < rows, 0, SIZE, C, BLOCK)
    return tl.load(p_x + (i_t[:, None] * step + i_d[None, :]), mask=m_x, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_rows(p_x, step, rows, b_x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0):
    """As `load_rows`, the other way."""
    store_block(p_x, step, tl.arange(0, C) < rows, b_x, SIZE, C, BLOCK, i_x)


@triton.jit
def load_inputs(p_x, step, rows, S: tl.constexpr):
    """Rows of q or k (C, BD)."""
    return load_rows(p_x, step, rows, S.D, S.C, S.BD)


@triton.jit
def load_values(p_x, step, rows, S: tl.constexpr, i_e=0):
    """Rows of v or of what is as wide, or of tile i_e of them, which begins at p_x: (C, BE)."""
    return load_rows(p_x, step, rows, S.E, S.C, S.BE, i_e)


@triton.jit
def store_inputs(p_x, step, rows, b_x, S: tl.constexpr):
    """As `load_inputs`, the other way."""
    store_rows(p_x, step, rows, b_x, S.D, S.C, S.BD)


@triton.jit
def store_values(p_x, step, rows, b_x, S: tl.constexpr, i_e=0):
    """As `load_values`, the other way."""
    store_rows(p_x, step, rows, b_x, S.E, S.C, S.BE, i_e)


@triton.jit
def load_column(p_x, step, rows, C: tl.constexpr, other: tl.constexpr):
    i_t = tl.arange(0, C)
    return tl.load(p_x + i_t * step, mask=i_t < rows, other=other)


@triton.jit
def load_tile(p_x, i_x, S: tl.constexpr, HALVES: tl.constexpr = 1):
    """The tile (BM, BE) at p_x of matrix i_x of a stack of sums, HALVES · TILES of them side by side."""
    COLUMNS: tl.constexpr = HALVES * S.BE * S.TILES
    i_m, i_e = tl.arange(0, S.BM), tl.arange(0, S.BE)
    return tl.load(p_x + i_x * (S.BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :])


@triton.jit
def store_tile(p_x, i_x, b_x, S: tl.constexpr):
    """As `load_tile`, the other way."""
    COLUMNS: tl.constexpr = S.BE * S.TILES
    i_m, i_e = tl.arange(0, S.BM), tl.arange(0, S.BE)
    p_x += i_x * (S.BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty))


@triton.jit
def plain_features(b_x, S: tl.constexpr, EXACT: tl.constexpr):
    """φ of maps that are no exponentials; of others x as it is."""
    if S.MAP == "elu":
        if EXACT:
            b_x = tl.maximum(b_x, 0) + exact_exp(tl.minimum(b_x, 0))
        else:
            b_x = tl.maximum(b_x, 0) + exp(tl.minimum(b_x, 0))
    if S.MAP == "relu":
        b_x = tl.maximum(b_x, 0) + RELU_EPSILON
    return b_x


@triton.jit
def plain_gradient(b_g, b_x, b_f, S: tl.constexpr):
    """d x from d φ(x), x and φ(x) of maps that are no exponentials; of others d φ(x) as it is."""
    if S.MAP == "elu":
        b_g *= tl.minimum(b_f, 1)
    if S.MAP == "relu":
        b_g = tl.where(b_x.to(tl.float32) > 0, b_g, 0)
    return b_g


@triton.jit
def inverse(b_den):
    """1 / den, and 0 where there is nothing to divide by."""
    m_nothing = tl.abs(b_den) < NOTHING
    return tl.where(m_nothing, 0.0, 1 / tl.where(m_nothing, 1.0, b_den))


@triton.jit
def exact_inverse(b_den):
    """As `inverse`, rounded once: a plain division is off by two ulps, and all that is multiplied by it as well."""
    m_nothing = tl.abs(b_den) < NOTHING
    return tl.where(m_nothing, 0.0, tl.div_rn(1.0, tl.where(m_nothing, 1.0, b_den)))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maximum(b_x, c=None):
    """max_{j ≤ i} x_j of each row i, and no less than c."""
    b_x = tl.associative_scan(b_x, 0, _larger)
    if c is not None:
        b_x = tl.maximum(b_x, c)
    return b_x
