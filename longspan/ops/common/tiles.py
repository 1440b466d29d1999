"""Device helpers shared by all kernels: program and token indices, block loads and stores, products, normalizers.

Kernel arguments and variables: p_x pointer, b_x block in registers, i_x index, m_x mask; capitals are compile-time
constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As in longspan.ops.linear; a test compares them.
FLOOR = tl.constexpr(-1e30)
# A normalizer below this underflowed and counts as zero: its reciprocal would overflow.
ZERO_NORMALIZER = tl.constexpr(1.1754943508222875e-32)


def padded(size: int, least: int = 64) -> int:
    """Return the block size for this many columns: a power of two, at least `least`.

    Triton 3.6 miscompiles bfloat16 products narrower than 64 on Hopper.
    """
    # int: a compiler may pass a symbol, and another size is another kernel.
    return max(least, 1 << (int(size) - 1).bit_length())


def columns(size: int) -> tuple[int, int]:
    """Return the widths of one or two blocks for this many columns, at least 16 and powers of two; 0 for no second.

    Two where one would be padded by a third or more, the first at least 64 wide: 80 are 64 and 16, 192 are 128 and 64.
    """
    one = padded(size, 16)
    rest = padded(max(size - one // 2, 1), 16)
    return (one // 2, rest) if one >= 128 and one // 2 + rest < one else (one, 0)


@triton.jit
def product(b_x, b_y, PRECISION: tl.constexpr):
    """x·y. "ieee": the sum of products over pieces of the shared axis, of 16 or of as many as registers allow.

    Without tensor cores an element is one long sum, whose rounding errors accumulate; PyTorch also sums in pieces.
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
def program_index(blocks, HEADS: tl.constexpr, TILES: tl.constexpr = 1):
    """Head, tile of values, block of tokens and batch index of this program."""
    pid = tl.program_id(0)
    i_h = pid % HEADS
    i_e = (pid // HEADS) % TILES
    i_s = (pid // (HEADS * TILES)) % blocks
    return i_h, i_e, i_s, (pid // (HEADS * TILES) // blocks).to(tl.int64)


@triton.jit
def token_pointer(p_x, strides, i_b, i_t, i_h, column=0):
    """Pointer to token i_t of one batch index and head, or to a column of it."""
    return p_x + (i_b * strides.b + tl.cast(i_t, tl.int64) * strides.t + i_h.to(tl.int64) * strides.h + column)


@triton.jit
def visible_length(p_lengths, i_b, T):
    """Number of visible keys of a batch index."""
    if p_lengths is not None:
        T = tl.load(p_lengths + i_b).to(tl.int32)
    return T


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr = 0):
    """(ROWS,) or (ROWS, COLUMNS). tl.zeros takes no shapes made of members of a tuple."""
    return tl.full((ROWS,) if COLUMNS == 0 else (ROWS, COLUMNS), 0, tl.float32)


@triton.jit
def _block(p_x, stride, m_t, i_x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr = 1):
    """Pointers and mask of the (C, BLOCK) block at p_x: rows where m_t holds, columns i_x · BLOCK on, below SIZE.

    TILES: The number of blocks, the last of which may have no columns: 192 padded to 256 are three of 64 and one of 0.
    """
    i_t, i_d = tl.arange(0, C), tl.arange(0, BLOCK)
    m_x = m_t[:, None]
    if SIZE % BLOCK != 0 or SIZE < BLOCK * TILES:
        m_x = m_x & (i_d < SIZE - i_x * BLOCK)[None, :]
    return p_x + i_t[:, None] * stride + i_d[None, :], m_x


@triton.jit
def load_block(
    p_x, stride, m_t, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0, TILES: tl.constexpr = 1
):
    """Load the (C, BLOCK) block at p_x, the i_x-th of SIZE columns, in rows where m_t holds; zeros elsewhere."""
    p_x, m_x = _block(p_x, stride, m_t, i_x, SIZE, C, BLOCK, TILES)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_block(
    p_x, stride, m_t, b_x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0, TILES: tl.constexpr = 1
):
    """Store what `load_block` loads."""
    p_x, m_x = _block(p_x, stride, m_t, i_x, SIZE, C, BLOCK, TILES)
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def load_rows(
    p_x, stride, rows, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0, TILES: tl.constexpr = 1
):
    """`load_block` of the first `rows` rows, or of all of them without a mask if `rows` is None."""
    i_t = tl.arange(0, C)
    if rows is None and SIZE % BLOCK == 0 and SIZE >= BLOCK * TILES:
        return tl.load(p_x + (i_t[:, None] * stride + tl.arange(0, BLOCK)[None, :]))
    return load_block(p_x, stride, i_t >= 0 if rows is None else i_t < rows, SIZE, C, BLOCK, i_x, TILES)


@triton.jit
def load_columns(p_x, stride, rows, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """`load_rows` as two blocks of BLOCK and REST columns; the first twice if REST is 0."""
    b_x = load_rows(p_x, stride, rows, BLOCK if REST > 0 else SIZE, C, BLOCK)
    b_rest = b_x
    if REST > 0:
        b_rest = load_rows(p_x + BLOCK, stride, rows, SIZE - BLOCK, C, REST)
    return b_x, b_rest


@triton.jit
def store_columns(
    p_x, stride, rows, b_x, b_rest, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr
):
    """Store what `load_columns` loads."""
    store_rows(p_x, stride, rows, b_x, BLOCK if REST > 0 else SIZE, C, BLOCK)
    if REST > 0:
        store_rows(p_x + BLOCK, stride, rows, b_rest, SIZE - BLOCK, C, REST)


@triton.jit
def product_of_columns(b_x, b_x_rest, b_y, b_y_rest, REST: tl.constexpr, PRECISION: tl.constexpr):
    """x·yᵀ of what `load_columns` loads."""
    b_xy = product(b_x, tl.trans(b_y), PRECISION)
    if REST > 0:
        b_xy = add_product(b_x_rest, tl.trans(b_y_rest), b_xy, PRECISION)
    return b_xy


@triton.jit
def reload_rows(p_x, stride, rows, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """`load_rows` that the compiler does not merge with an earlier one: from the cache, which frees registers."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BLOCK)
    _, m_x = _block(p_x, stride, i_t < rows, 0, SIZE, C, BLOCK)
    return tl.load(p_x + (i_t[:, None] * stride + i_d[None, :]), mask=m_x, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_rows(
    p_x, stride, rows, b_x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, i_x=0, TILES: tl.constexpr = 1
):
    """Store what `load_rows` loads."""
    i_t = tl.arange(0, C)
    if rows is None and SIZE % BLOCK == 0 and SIZE >= BLOCK * TILES:
        p_x += i_t[:, None] * stride + tl.arange(0, BLOCK)[None, :]
        tl.store(p_x, b_x.to(p_x.dtype.element_ty))
    else:
        store_block(p_x, stride, i_t >= 0 if rows is None else i_t < rows, b_x, SIZE, C, BLOCK, i_x, TILES)


@triton.jit
def load_inputs(p_x, stride, rows, S: tl.constexpr):
    """Rows of q or k (C, BD)."""
    return load_rows(p_x, stride, rows, S.D, S.C, S.BD)


@triton.jit
def load_values(p_x, stride, rows, S: tl.constexpr, i_e=0):
    """Rows (C, BE) of v, or of a tensor as wide, or of its tile i_e, which begins at p_x."""
    return load_rows(p_x, stride, rows, S.E, S.C, S.BE, i_e)


@triton.jit
def store_inputs(p_x, stride, rows, b_x, S: tl.constexpr):
    """Store what `load_inputs` loads."""
    store_rows(p_x, stride, rows, b_x, S.D, S.C, S.BD)


@triton.jit
def store_values(p_x, stride, rows, b_x, S: tl.constexpr, i_e=0):
    """Store what `load_values` loads."""
    store_rows(p_x, stride, rows, b_x, S.E, S.C, S.BE, i_e)


@triton.jit
def load_column(p_x, stride, rows, C: tl.constexpr, other: tl.constexpr):
    """The first `rows` of C elements; `other` in the rest."""
    i_t = tl.arange(0, C)
    return tl.load(p_x + i_t * stride, mask=i_t < rows, other=other)


@triton.jit
def load_tile(p_x, i_x, S: tl.constexpr, PARTS: tl.constexpr = 1):
    """Tile (BM, BE) at p_x of matrix i_x of a stack; a matrix has PARTS · TILES of them side by side."""
    COLUMNS: tl.constexpr = PARTS * S.BE * S.TILES
    i_m, i_e = tl.arange(0, S.BM), tl.arange(0, S.BE)
    return tl.load(p_x + i_x * (S.BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :])


@triton.jit
def store_tile(p_x, i_x, b_x, S: tl.constexpr):
    """Store what `load_tile` loads."""
    COLUMNS: tl.constexpr = S.BE * S.TILES
    i_m, i_e = tl.arange(0, S.BM), tl.arange(0, S.BE)
    p_x += i_x * (S.BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty))


@triton.jit
def inverse(b_den):
    """1 / den, and 0 where den is zero or underflowed."""
    m_zero = tl.abs(b_den) < ZERO_NORMALIZER
    return tl.where(m_zero, 0.0, 1 / tl.where(m_zero, 1.0, b_den))


@triton.jit
def exact_inverse(b_den):
    """`inverse`, correctly rounded; an ordinary division is off by up to two ulps."""
    m_zero = tl.abs(b_den) < ZERO_NORMALIZER
    return tl.where(m_zero, 0.0, tl.div_rn(1.0, tl.where(m_zero, 1.0, b_den)))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maximum(b_x, c=None):
    """max_{j ≤ i} x_j for each row i, and at least c."""
    b_x = tl.associative_scan(b_x, 0, _larger)
    if c is not None:
        b_x = tl.maximum(b_x, c)
    return b_x
