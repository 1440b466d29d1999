"""The delta rule with no decay or one per head (DeltaNet, Gated DeltaNet): triangular inverses, states in registers.

With G_i = Σ_{s ≤ i} log α_s from the chunk's first token on, S the state before the chunk and T = (I + L)⁻¹ Diag(β),
L_ij = β_i k_i · k_j e^{G_i − G_j} for j < i, a chunk writes

    u = T x,   x = v − e^G ∘ (k S),        o = e^G ∘ (q S) + tril(q kᵀ ∘ e^{G_i − G_j}) u,
    S' = e^{G_C} S + kᵀ (e^{G_C − G} ∘ u).

A first kernel computes T and the matrix of o's last product of all chunks at once. A second goes through the chunks of
a sequence with a tile of the state's columns in registers and writes the outputs; no state goes to memory. Factors of
rows stand beside results of products, in float32: q, k and v enter products as they are.

States and what depends on them are transposed: (k S)ᵀ = Sᵀ kᵀ, xᵀ, uᵀ = xᵀ Tᵀ and S'ᵀ = Sᵀ + uᵀ k are results of one
product and first operands of the next, which tensor cores read from the registers they wrote. The chain from one state
to the next does not pass through shared memory.

bfloat16 numbers enter products in two halves where keys are nearly parallel: the first kernel marks chunks in which a
row of L has a large sum of squares. A segment without such a chunk is computed with single bfloat16 numbers.

Where sequences times tiles are fewer than multiprocessors, a sequence is divided into segments. A segment maps the
state before it to P S + Δ: Δ is what it makes of a zero state, P of D columns that begin as the identity and into which
no value is written. A scan over the segments' maps gives the state before each. ‖P‖ of a chunk is at most
Π α max(1, |1 − β k·k|): where that is negligible over the last chunks of a segment, P is 0 and Δ begins with these.

Backward, with dS' the gradient of the state after a chunk and z = Tᵀ du, which is dv:

    du = tril(q kᵀ ∘ e^{G_i − G_j})ᵀ do + e^{G_C − G} ∘ (k dS'),
    dS = e^{G_C} dS' + qᵀ (e^G ∘ do) − kᵀ (e^G ∘ z),        d(k kᵀ) = −tril(z uᵀ ∘ e^{G_i − G_j}, −1).

One launch computes the states before all chunks and, backwards, the gradients of those after them; from both, a program
per chunk computes the gradients of the inputs.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, UNDERFLOW, exact_exp2, exp2, log2, same_layout, widen
from longspan.ops.common.launch import (
    Launch,
    Plan,
    Signature,
    Strides,
    Workspace,
    dense,
    dense_rows,
    on_device,
    processors,
)
from longspan.ops.common.tiles import FLOOR, padded, product, token_pointer, zeros
from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved
from longspan.ops.gated.triton.slices import buffer_like, gradients, rows_at_once, store

# β of this or less counts as this: what such a token writes is lost beside anything else.
LEAST_BETA = tl.constexpr(1e-30)
# log₂ ‖P‖ of chunks that forget everything before them: what is left, 2e-28 of it, is lost beside anything else.
FORGOTTEN = tl.constexpr(-92.0)
# Chunks of a segment that are searched for those that forget everything before them.
SEARCHED = tl.constexpr(256)
# Columns of the states of segments per program of the scan: its steps follow each other, and few are faster.
SCAN_WIDTH = tl.constexpr(32)
# A chunk is mild if no row of L has a larger sum of squares: single bfloat16 numbers then do in its products. At twice
# this the gradients of β and of log α are as inaccurate as they may be.
MILD = tl.constexpr(2.0)
# Chunks whose marks a program reads at once.
MARKS = tl.constexpr(128)
# Chunks in a program that computes something for marked ones: most programs find none.
SHARE = tl.constexpr(16)
# Precision of products: bfloat16 has no choice.
PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}

# Compile-time constants: query and key heads, dimensions, padded D, values per tile, their number, tokens in a chunk.
# GATED: there is a decay. SCALED: there is a beta. DOT: the dtype of products. FULL: every row of every chunk exists.
# STRIDE_*: strides along tokens of q, k, v, beta, the gradient of out and u; 0 if a kernel does not use them.
DeltaSizes = namedtuple(
    "DeltaSizes",
    "H HKV D E BD BE TILES C GATED SCALED DOT PRECISION FULL STRIDE_Q STRIDE_K STRIDE_V STRIDE_BETA STRIDE_D STRIDE_U",
    defaults=(0, 0, 0, 0, 0, 0),
)


@triton.jit
def dot(b_x, b_y, S: tl.constexpr):
    """x·y in the precision of the inputs."""
    if S.PRECISION == "ieee":
        return product(b_x, b_y, "ieee")
    return tl.dot(b_x.to(S.DOT), b_y.to(S.DOT), input_precision=S.PRECISION)


@triton.jit
def add_dot(b_x, b_y, b_sum, S: tl.constexpr):
    """sum + x·y."""
    if S.PRECISION == "ieee":
        return b_sum + product(b_x, b_y, "ieee")
    return tl.dot(b_x.to(S.DOT), b_y.to(S.DOT), b_sum, input_precision=S.PRECISION)


@triton.jit
def halves(b_x, S: tl.constexpr):
    """x as two bfloat16 numbers that add up to it, to 16 bits; itself and nothing where products take float32."""
    if tl.bfloat16 == S.DOT:
        b_high = b_x.to(tl.bfloat16)
        b_low = (b_x - widen(b_high)).to(tl.bfloat16)
    else:
        b_high, b_low = b_x, b_x
    return b_high, b_low


@triton.jit
def halves_dot(b_x_high, b_x_low, b_high, b_low, b_sum, S: tl.constexpr):
    """sum + x·y, with both as `halves` returns them; b_low None: y is exact."""
    if tl.bfloat16 == S.DOT:
        b_sum = tl.dot(b_x_low, b_high, b_sum)
        if b_low is not None:
            b_sum = tl.dot(b_x_high, b_low, b_sum)
        b_sum = tl.dot(b_x_high, b_high, b_sum)
    else:
        b_sum = add_dot(b_x_high, b_high, b_sum, S)
    return b_sum


@triton.jit
def exact_dot(b_x, b_y, S: tl.constexpr):
    """x·y of float32 blocks to 16 bits at least."""
    b_x_high, b_x_low = halves(b_x, S)
    b_high, b_low = halves(b_y, S)
    return halves_dot(b_x_high, b_x_low, b_high, b_low, zeros(b_x.shape[0], b_y.shape[1]), S)


@triton.jit
def power(b_x, S: tl.constexpr):
    """2^x of x ≤ 0."""
    return exp2(b_x) if tl.bfloat16 == S.DOT else exact_exp2(b_x)


@triton.jit
def triangular_inverse(b_l, S: tl.constexpr, EXACT: tl.constexpr = True, BLOCK: tl.constexpr = 16):
    """(I + L)⁻¹ (C, C) of a strictly lower triangular L in float32.

    Blocks of BLOCK rows by substitution, all at once; then pairs of blocks are merged, [[X, 0], [−Y L X, Y]]. Powers of
    L would be exact too, but where keys are nearly parallel they are larger than their sum by many orders.
    """
    C: tl.constexpr = S.C
    N: tl.constexpr = C // BLOCK
    i_n, i_r = tl.arange(0, N), tl.arange(0, BLOCK)
    m_own = (i_n[:, None] == i_n[None, :])[:, None, :, None]
    b_blocks = tl.sum(tl.where(m_own, tl.reshape(b_l, (N, BLOCK, N, BLOCK)), 0.0), 2)
    b_blocks = tl.permute(b_blocks, (0, 2, 1))  # (block, column, row)
    b_t = tl.where((i_r[:, None] == i_r[None, :])[None, :, :], 1.0, tl.zeros((N, BLOCK, BLOCK), tl.float32))
    for i in tl.static_range(1, BLOCK):
        b_row = tl.sum(tl.where((i_r == i)[None, None, :], b_blocks, 0.0), 2)
        b_sum = tl.sum(b_row[:, :, None] * b_t, 1)
        b_t = tl.where((i_r == i)[None, :, None], b_t - b_sum[:, None, :], b_t)
    b_t = same_layout(tl.reshape(tl.where(m_own, b_t[:, :, None, :], 0.0), (C, C)), b_l)
    if C > BLOCK:
        b_t = _merged(b_t, b_l, BLOCK, EXACT, S)
    if C > 2 * BLOCK:
        b_t = _merged(b_t, b_l, 2 * BLOCK, EXACT, S)
    if C > 4 * BLOCK:
        b_t = _merged(b_t, b_l, 4 * BLOCK, EXACT, S)
    if C > 8 * BLOCK:
        b_t = _merged(b_t, b_l, 8 * BLOCK, EXACT, S)
    return b_t


@triton.jit
def _merged(b_t, b_l, WIDTH: tl.constexpr, EXACT: tl.constexpr, S: tl.constexpr):
    """Inverses of blocks of 2 · WIDTH rows from those of blocks of WIDTH."""
    b_l = tl.where(_below(tl.arange(0, S.C), WIDTH), b_l, 0.0)
    if EXACT:
        b_x = exact_dot(b_t, exact_dot(b_l, b_t, S), S)
    else:
        b_x = dot(b_t, dot(b_l, b_t, S), S)
    return b_t - b_x


@triton.jit
def _below(i_t, WIDTH: tl.constexpr):
    """Mask of blocks of WIDTH rows and columns below the diagonal, in blocks of twice the width."""
    i_n = i_t // WIDTH
    return (i_n[:, None] == i_n[None, :] + 1) & (i_n[None, :] % 2 == 0)


@triton.jit
def running_sums(b_g):
    """log₂ e^G as two float32 numbers each: after a token that forgets everything one would have too few digits."""
    b_sum = tl.cumsum(b_g.to(tl.float64), 0) * tl.full(b_g.shape, LOG2E, tl.float64)
    b_high = b_sum.to(tl.float32)
    return b_high, (b_sum - b_high.to(tl.float64)).to(tl.float32)


@triton.jit
def between(b_high, b_low, S: tl.constexpr):
    """e^{G_i − G_j} (C, C) for j ≤ i, zeros elsewhere."""
    i_t = tl.arange(0, S.C)
    m_t = i_t[:, None] >= i_t[None, :]
    if S.GATED:
        b_x = b_high[:, None] - b_high[None, :]
        if tl.bfloat16 != S.DOT:
            b_x += b_low[:, None] - b_low[None, :]
        b_x = power(tl.where(m_t, b_x, FLOOR), S)
    else:
        b_x = tl.where(m_t, 1.0, zeros(S.C, S.C))
    return b_x


@triton.jit
def load_sums(p_sums, i_x, S: tl.constexpr):
    """log₂ e^G (C,) of chunk i_x as `running_sums` returns it; in bfloat16 the first number is enough."""
    b_high = zeros(S.C)
    b_low = b_high
    if S.GATED:
        p_sums += i_x * (4 * S.C) + tl.arange(0, S.C)
        b_high = tl.load(p_sums)
        if tl.bfloat16 != S.DOT:
            b_low = tl.load(p_sums + S.C)
    return b_high, b_low


@triton.jit
def load_factors(p_sums, i_x, S: tl.constexpr):
    """e^{G_i} and e^{G_C − G_i} (C,), and e^{G_C}."""
    b_start = tl.full((S.C,), 1.0, tl.float32)
    b_end, last = b_start, 1.0
    if S.GATED:
        p_sums += i_x * (4 * S.C) + 2 * S.C
        i_t = tl.arange(0, S.C)
        b_start, b_end, last = tl.load(p_sums + i_t), tl.load(p_sums + S.C + i_t), tl.load(p_sums + S.C - 1)
    return b_start, b_end, last


@triton.jit
def pointer(p_x, x, STRIDE: tl.constexpr, i_b, i_t, i_h):
    """`token_pointer` with the stride along tokens known at compile time."""
    return p_x + (i_b * x.b + tl.cast(i_t, tl.int64) * STRIDE + i_h.to(tl.int64) * x.h)


@triton.jit
def _rows(p_x, STRIDE: tl.constexpr, rows, i_x, SIZE: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Pointers and mask of the (C, WIDTH) block at p_x, the i_x-th of SIZE columns."""
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, WIDTH)
    m_x = (i_t < rows)[:, None]
    if SIZE % WIDTH != 0:
        m_x = m_x & (i_d < SIZE - i_x * WIDTH)[None, :]
    return p_x + i_x * WIDTH + i_t[:, None] * STRIDE + i_d[None, :], m_x


@triton.jit
def load_rows(
    p_x,
    STRIDE: tl.constexpr,
    rows,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    i_x=0,
    AGAIN: tl.constexpr = False,
):
    """Load the first rows of the (C, WIDTH) block at p_x, the i_x-th of SIZE columns; zeros elsewhere.

    AGAIN: The compiler does not merge the load with an earlier one, which frees registers.
    """
    POLICY: tl.constexpr = "evict_first" if AGAIN else ""
    p_x, m_x = _rows(p_x, STRIDE, rows, i_x, SIZE, WIDTH, S)
    if S.FULL and SIZE % WIDTH == 0:
        return tl.load(p_x, eviction_policy=POLICY)
    return tl.load(p_x, mask=m_x, other=0.0, eviction_policy=POLICY)


@triton.jit
def store_rows(p_x, STRIDE: tl.constexpr, rows, b_x, SIZE: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, i_x=0):
    """Store what `load_rows` loads."""
    p_x, m_x = _rows(p_x, STRIDE, rows, i_x, SIZE, WIDTH, S)
    b_x = b_x.to(p_x.dtype.element_ty)
    if S.FULL and SIZE % WIDTH == 0:
        tl.store(p_x, b_x)
    else:
        tl.store(p_x, b_x, mask=m_x)


@triton.jit
def load_columns(p_x, STRIDE: tl.constexpr, rows, i_e, S: tl.constexpr):
    """Tile i_e of the rows at p_x, transposed: (BE, C)."""
    i_t, i_c = tl.arange(0, S.C), tl.arange(0, S.BE)
    p_x += i_e * S.BE + i_t[None, :] * STRIDE + i_c[:, None]
    if S.FULL and S.E % S.BE == 0:
        return tl.load(p_x)
    return tl.load(p_x, mask=(i_t < rows)[None, :] & (i_c < S.E - i_e * S.BE)[:, None], other=0.0)


@triton.jit
def store_columns(p_x, STRIDE: tl.constexpr, rows, b_x, i_e, S: tl.constexpr):
    """Store xᵀ (BE, C) as tile i_e of the rows at p_x."""
    store_rows(p_x, STRIDE, rows, tl.trans(b_x.to(p_x.dtype.element_ty)), S.E, S.BE, S, i_e)


@triton.jit
def load_beta(p_beta, rows, S: tl.constexpr):
    """β (C,); 0 beyond the last token."""
    i_t = tl.arange(0, S.C)
    b_beta = tl.where(i_t < rows, 1.0, 0.0)
    if S.SCALED:
        if S.FULL:
            b_beta = tl.load(p_beta + i_t * S.STRIDE_BETA)
        else:
            b_beta = tl.load(p_beta + i_t * S.STRIDE_BETA, mask=i_t < rows, other=0.0)
        # Not 0: the gradient is z / β · u / β.
        b_beta = tl.where(tl.abs(b_beta) < LEAST_BETA, LEAST_BETA, b_beta)
    return b_beta


@triton.jit
def _square(i_x, S: tl.constexpr):
    """Offsets of matrix i_x of a stack of (C, C)."""
    i_t = tl.arange(0, S.C)
    return tl.cast(i_x, tl.int64) * (S.C * S.C) + i_t[:, None] * S.C + i_t[None, :]


@triton.jit
def store_inverse(p_x, i_x, b_t, S: tl.constexpr):
    """Store a triangular matrix; of bfloat16 halves the low one lies transposed above the diagonal.

    On the diagonal there is the high one alone: T's is β.
    """
    if tl.bfloat16 == S.DOT:
        i_t = tl.arange(0, S.C)
        b_high, b_low = halves(b_t, S)
        b_t = tl.where(i_t[:, None] < i_t[None, :], tl.trans(b_low), b_high)
    tl.store(p_x + _square(i_x, S), b_t)


@triton.jit
def load_inverse(p_x, p_sums, i_x, TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, S: tl.constexpr):
    """The halves of what `store_inverse` stores, or of its transpose; not EXACT: of a mild chunk's, the same twice."""
    b_t = tl.load(p_x + _square(i_x, S))
    b_other = tl.trans(b_t)
    if TRANSPOSED:
        b_t, b_other = b_other, b_t
    if EXACT and tl.bfloat16 == S.DOT:
        i_t = tl.arange(0, S.C)
        m_t = i_t[:, None] < i_t[None, :] if TRANSPOSED else i_t[:, None] > i_t[None, :]
        m_diagonal = i_t[:, None] == i_t[None, :]
        b_low = tl.load(diagonal_pointer(p_sums, i_x, S)).to(tl.bfloat16)
        b_other = tl.where(m_diagonal, b_low[:, None], tl.where(m_t, b_other, 0.0))
        b_t = tl.where(m_t | m_diagonal, b_t, 0.0)
    return b_t, b_other


@triton.jit
def diagonal_pointer(p_sums, i_x, S: tl.constexpr):
    """Pointers to the low halves (C,) of the diagonal of T, which is β; other dtypes have those of G there."""
    return p_sums + i_x * (4 * S.C) + S.C + tl.arange(0, S.C)


@triton.jit
def store_pair(p_pairs, i_x, b_q, b_k, b_between, scale, LOW: tl.constexpr, S: tl.constexpr):
    """Store A^qk of chunk i_x: for bfloat16 its high or its low halves, apart; else itself."""
    b_pair = dot(b_q, tl.trans(b_k), S) * b_between * scale
    if tl.bfloat16 == S.DOT:
        b_high, b_low = halves(b_pair, S)
        tl.store(p_pairs + _square(2 * i_x + (1 if LOW else 0), S), b_low if LOW else b_high)
    else:
        tl.store(p_pairs + _square(i_x, S), b_pair)


@triton.jit
def load_pair(p_pairs, p_strong, i_x, EXACT: tl.constexpr, S: tl.constexpr):
    """A^qk as `halves` returns it; not EXACT: the high half, twice. Mild chunks have no low half."""
    if tl.bfloat16 == S.DOT:
        b_high = tl.load(p_pairs + _square(2 * i_x, S))
        b_low = b_high
        if EXACT:
            m_t = (tl.arange(0, S.C) < tl.load(p_strong) * S.C)[:, None]
            b_low = tl.load(p_pairs + _square(2 * i_x + 1, S), mask=m_t, other=0.0)
    else:
        b_high = tl.load(p_pairs + _square(i_x, S))
        b_low = b_high
    return b_high, b_low


@triton.jit
def any_strong(p_strong, i_c, count, S: tl.constexpr):
    """Whether one of `count` chunks from i_c on is marked; True without marks."""
    strong = 1
    if tl.bfloat16 == S.DOT:
        b_any = tl.zeros((MARKS,), tl.int32)
        for i in range(0, count, MARKS):
            i_n = i + tl.arange(0, MARKS)
            b_any |= tl.load(p_strong + i_c + i_n, mask=i_n < count, other=0)
        strong = tl.max(b_any)
    return strong > 0


@triton.jit
def product_of(b_x, b_high, b_low, b_sum, EXACT: tl.constexpr, S: tl.constexpr):
    """sum + x·y, x in float32, with all halves, or with the high ones alone; b_low None: y is exact."""
    if EXACT:
        b_x_high, b_x_low = halves(b_x, S)
        b_sum = halves_dot(b_x_high, b_x_low, b_high, b_low, b_sum, S)
    else:
        b_sum = add_dot(b_x, b_high, b_sum, S)
    return b_sum


@triton.jit
def tile_offsets(i_x, i_e, S: tl.constexpr):
    """Offsets of tile i_e (BE, BD) of matrix i_x of a stack of Sᵀ (TILES · BE, BD)."""
    i_x = tl.cast(i_x, tl.int64) * S.TILES + i_e
    return i_x * (S.BE * S.BD) + tl.arange(0, S.BE)[:, None] * S.BD + tl.arange(0, S.BD)[None, :]


@triton.jit
def state_offsets(i_x, i_e, S: tl.constexpr):
    """Offsets and mask of tile i_e (BE, BD) of state i_x of (B, Hkv, D, E)."""
    i_d, i_c = tl.arange(0, S.BD), i_e * S.BE + tl.arange(0, S.BE)
    return i_x * (S.D * S.E) + i_d[None, :] * S.E + i_c[:, None], (i_d < S.D)[None, :] & (i_c < S.E)[:, None]


@triton.jit
def _segment(pid, segments, S: tl.constexpr):
    """Query head, key head, tile of values, segment and batch index of a program."""
    i_h = pid % S.H
    i_e = (pid // S.H) % S.TILES
    i_s = (pid // (S.H * S.TILES)) % segments
    return i_h, i_h // (S.H // S.HKV), i_e, i_s, (pid // (S.H * S.TILES) // segments).to(tl.int64)


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_delta_inverse_kernel(
    p_q, p_k, p_decay, p_beta, p_inverse, p_sums, p_norms, p_strong, p_pairs, T, chunks, scale,
    q, k, decay, beta, S: tl.constexpr
):  # fmt: skip
    """T (C, C), G and its powers (4, C) of one chunk, and A^qk (C, C) of its query heads.

    p_norms: Upper bounds of log₂ ‖P‖ of all chunks, if there are segments. p_strong: Marks of chunks that are not mild,
    whose T and low halves of A^qk another kernel computes. Mild ones have no low halves: those of T are zeros.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    pid = tl.program_id(0)
    i_h, i_c = pid % S.HKV, (pid // S.HKV) % chunks
    i_b = (pid // S.HKV // chunks).to(tl.int64)
    i_x = (i_b * S.HKV + i_h) * chunks + i_c
    i_0 = i_c * S.C
    rows = T - i_0
    i_t = tl.arange(0, S.C)
    p_q = pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h * GROUP)
    p_k = pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
    b_q = load_rows(p_q, S.STRIDE_Q, rows, S.D, S.BD, S)
    b_beta = load_beta(pointer(p_beta, beta, S.STRIDE_BETA, i_b, i_0, i_h) if S.SCALED else p_k, rows, S)
    b_high, b_low = zeros(S.C), zeros(S.C)
    if S.GATED:
        b_g = tl.load(token_pointer(p_decay, decay, i_b, i_0, i_h) + i_t * decay.t, mask=i_t < rows, other=0.0)
        b_high, b_low = running_sums(tl.maximum(b_g, UNDERFLOW))
        m_last = i_t == S.C - 1
        b_end = tl.sum(tl.where(m_last, b_high, 0.0)) - b_high + (tl.sum(tl.where(m_last, b_low, 0.0)) - b_low)
        p_g = p_sums + i_x * (4 * S.C) + i_t
        tl.store(p_g, b_high)
        if tl.bfloat16 != S.DOT:
            tl.store(p_g + S.C, b_low)
        tl.store(p_g + 2 * S.C, power(b_high, S))
        tl.store(p_g + 3 * S.C, power(tl.minimum(b_end, 0.0), S))
    b_l = dot(b_k, tl.trans(b_k), S)
    if S.GATED:
        if p_norms is not None:
            b_own = tl.sum(tl.where(i_t[:, None] == i_t[None, :], b_l, 0.0), 1)
            b_own = log2(tl.maximum(tl.abs(1.0 - b_own * b_beta), 1.0))
            tl.store(p_norms + i_x, tl.sum(b_own) + tl.sum(tl.where(i_t == S.C - 1, b_high, 0.0)))
    b_between = same_layout(between(b_high, b_low, S), b_l)
    for i in range(GROUP):
        store_pair(p_pairs, ((i_b * S.HKV + i_h) * GROUP + i) * chunks + i_c, b_q, b_k, b_between, scale, False, S)
        if i + 1 < GROUP:
            b_q = load_rows(p_q + (i + 1) * q.h, S.STRIDE_Q, rows, S.D, S.BD, S)
    b_l = tl.where(i_t[:, None] > i_t[None, :], b_l * b_between * b_beta[:, None], 0.0)
    if tl.bfloat16 == S.DOT:
        strong = tl.max(tl.sum(b_l * b_l, 1)) > MILD
        tl.store(p_strong + i_x, strong.to(tl.int32))
        if not strong:
            b_t = triangular_inverse(b_l, S, False, 8) * b_beta[None, :]
            tl.store(p_inverse + _square(i_x, S), b_t.to(S.DOT))
            tl.store(diagonal_pointer(p_sums, i_x, S), zeros(S.C))
    else:
        store_inverse(p_inverse, i_x, triangular_inverse(b_l, S) * b_beta[None, :], S)


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_delta_exact_inverse_kernel(
    p_q, p_k, p_beta, p_inverse, p_sums, p_strong, p_pairs, T, chunks, scale, q, k, beta, S: tl.constexpr
):
    """T and the low halves of A^qk of the marked ones among SHARE chunks."""
    GROUP: tl.constexpr = S.H // S.HKV
    shares = tl.cdiv(chunks, SHARE)
    pid = tl.program_id(0)
    i_h, i_first = pid % S.HKV, (pid // S.HKV) % shares * SHARE
    i_b = (pid // S.HKV // shares).to(tl.int64)
    i_t = tl.arange(0, S.C)
    end = tl.minimum(i_first + SHARE, chunks)
    if not any_strong(p_strong, (i_b * S.HKV + i_h) * chunks + i_first, end - i_first, S):
        return
    for i_c in range(i_first, end):
        i_x = (i_b * S.HKV + i_h) * chunks + i_c
        if tl.load(p_strong + i_x) > 0:
            i_0 = i_c * S.C
            rows = T - i_0
            b_k = load_rows(pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h), S.STRIDE_K, rows, S.D, S.BD, S)
            b_beta = load_beta(pointer(p_beta, beta, S.STRIDE_BETA, i_b, i_0, i_h) if S.SCALED else p_k, rows, S)
            b_high, b_low = load_sums(p_sums, i_x, S)
            b_between = between(b_high, b_low, S)
            for i in range(GROUP):
                i_q = i_h * GROUP + i
                b_q = load_rows(pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_q), S.STRIDE_Q, rows, S.D, S.BD, S)
                store_pair(p_pairs, (i_b * S.H + i_q) * chunks + i_c, b_q, b_k, b_between, scale, True, S)
            b_l = dot(b_k, tl.trans(b_k), S)
            b_l = tl.where(i_t[:, None] > i_t[None, :], b_l * b_between * b_beta[:, None], 0.0)
            store_inverse(p_inverse, i_x, triangular_inverse(b_l, S) * b_beta[None, :], S)
            tl.store(diagonal_pointer(p_sums, i_x, S), widen(halves(b_beta, S)[1]))


@triton.jit
def _writes(b_x, b_v, b_t, b_t_low, b_start, EXACT: tl.constexpr, S: tl.constexpr):
    """uᵀ (BE, C) of a chunk. b_x: (k S)ᵀ. b_v: vᵀ. b_t, b_t_low: Tᵀ.

    Where keys are nearly parallel and β is near 2, T's entries alternate around ±2 and those of β x are nearly equal:
    u is far smaller than the terms that add up to it, and a product of bfloat16 numbers would leave it few digits.
    """
    b_x = b_v.to(tl.float32) - b_x * b_start[None, :]
    return product_of(b_x, b_t, b_t_low, zeros(S.BE, S.C), EXACT, S)


@triton.jit
def _states(
    b_s, p_k, p_v, p_inverse, p_sums, p_states, p_u, T, i_b, i_h, i_e, i_x, i_0, i_c, count, values,
    k, v, S: tl.constexpr, STORE: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The state after `count` chunks, starting with chunk i_c of sequence i_x; STORE: write those before each, and u.

    values: 1, or 0 if no values are written: the columns then show what the chunks make of those they begin as.
    """
    p_k = pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    p_v = pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_h)
    rows = T - i_0
    for i in tl.range(count, num_stages=STAGES):
        b_start, b_end, last = load_factors(p_sums, i_c + i, S)
        b_t, b_t_low = load_inverse(p_inverse, p_sums, i_c + i, True, EXACT, S)
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S, i_e)
        if STORE:
            p_tile = p_states + tile_offsets(i_x + i, i_e, S)
            tl.store(p_tile, b_s.to(p_tile.dtype.element_ty))
        if EXACT:
            b_u = _writes(
                dot(b_s, tl.trans(b_k), S), tl.trans(b_v).to(tl.float32) * values, b_t, b_t_low, b_start, EXACT, S
            )
        else:
            b_u = dot(tl.trans(b_v), b_t, S) * values
            b_u = add_dot(dot(b_s, tl.trans(b_k), S) * -b_start[None, :], b_t, b_u, S)
        if STORE:
            store_columns(p_u, S.STRIDE_U, rows, b_u, i_e, S)
            p_u += S.C * S.STRIDE_U
        b_s = product_of(b_u * b_end[None, :], b_k, None, b_s * last, EXACT, S)
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        rows -= S.C
    return b_s


@triton.jit
def _remembered(p_norms, count, BACK: tl.constexpr, S: tl.constexpr):
    """Of `count` chunks from p_norms on, how many of the last ones the state after them depends on; all if it also
    depends on the state before them. BACK: of the first ones, for the gradient of the state before them.
    """
    number = count
    if S.GATED:
        i_n = tl.arange(0, SEARCHED)
        b_norm = tl.load(p_norms + (i_n if BACK else count - 1 - i_n), mask=i_n < count, other=0.0)
        number = tl.sum(tl.where(tl.cumsum(b_norm, 0) <= FORGOTTEN, 0, 1)) + 1
        number = tl.where(number > SEARCHED, count, tl.minimum(number, count))
    return number


@triton.jit(do_not_specialize=["T", "segments", "run", "chunks"])
def gated_delta_maps_kernel(
    p_k, p_v, p_inverse, p_sums, p_norms, p_strong, p_state, p_maps, p_totals, T, segments, run, chunks,
    k, v, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """P or Δ of one segment, for one tile of columns.

    Δ of the first segment is the state after it, and needs no P. Neither is needed for the last one. p_maps: Pᵀ (B · H,
    segments, BD, BD). p_totals: Δᵀ (B · H, segments, TILES · BE, BD).
    """
    TILES: tl.constexpr = S.TILES + S.BD // S.BE
    pid = tl.program_id(0)
    i_h, i_p, i_s = pid % S.H, (pid // S.H) % TILES, (pid // (S.H * TILES)) % segments
    i_b = (pid // (S.H * TILES) // segments).to(tl.int64)
    i_kv, i_x = i_h // (S.H // S.HKV), i_b * S.H + i_h
    i_y, i_c = i_b * S.HKV + i_kv, i_s * run
    needed = (i_s < segments - 1) & ((i_p < S.TILES) | (i_s > 0))
    count = _remembered(p_norms + i_y * chunks + i_c, tl.where(needed, run, 0), False, S)
    if i_p < S.TILES:
        b_s = _given_state(p_state, tl.where((i_s == 0) & (count == run), i_y, -1), i_p, S)
        p_tile = p_totals + ((i_x * segments + i_s) * S.TILES + i_p) * (S.BE * S.BD)
    else:
        i_d, i_column = tl.arange(0, S.BD), (i_p - S.TILES) * S.BE + tl.arange(0, S.BE)
        count = tl.where(count == run, run, 0)
        b_s = tl.where((i_column[:, None] == i_d[None, :]) & (count > 0), 1.0, zeros(S.BE, S.BD))
        p_tile = p_maps + (i_x * segments + i_s) * (S.BD * S.BD) + (i_p - S.TILES) * (S.BE * S.BD)
    values = (i_p < S.TILES).to(tl.int32)
    i_c += tl.where(count > 0, run - count, 0)
    if any_strong(p_strong, i_y * chunks + i_c, count, S):
        b_s = _states(
            b_s, p_k, p_v, p_inverse, p_sums, p_totals, p_v, T, i_b, i_kv, i_p * values, i_x,
            i_c * S.C, i_y * chunks + i_c, count, values, k, v, S, False, True, STAGES
        )  # fmt: skip
    else:
        b_s = _states(
            b_s, p_k, p_v, p_inverse, p_sums, p_totals, p_v, T, i_b, i_kv, i_p * values, i_x,
            i_c * S.C, i_y * chunks + i_c, count, values, k, v, S, False, False, STAGES
        )  # fmt: skip
    tl.store(p_tile + tile_offsets(0, 0, S), b_s)


@triton.jit(do_not_specialize=["segments", "run", "chunks"])
def gated_delta_scan_kernel(
    p_norms, p_maps, p_totals, segments, run, chunks, S: tl.constexpr, BACK: tl.constexpr, STAGES: tl.constexpr
):
    """The state after each segment but the last, in place of its Δ; BACK: gradients of the states before each segment
    but the first.
    """
    D: tl.constexpr = S.BD
    N: tl.constexpr = min(S.BD, 128)
    SIZE: tl.constexpr = S.BE * S.TILES * D
    i_x, i_e = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_d, i_c = tl.arange(0, N), i_e * SCAN_WIDTH + tl.arange(0, SCAN_WIDTH)
    i_tile, i_map = i_d[:, None] + i_c[None, :] * D, i_d[:, None] * D + i_d[None, :]
    if S.GATED:
        # Where all maps are zero, each Δ is the state already.
        i_y = i_x // S.H * S.HKV + i_x % S.H // (S.H // S.HKV)
        kept = 0
        for i in range(1, segments - 1):
            kept += (_remembered(p_norms + i_y * chunks + i * run, run, False, S) == run).to(tl.int32)
        if kept == 0:
            return
    step = -1 if BACK else 1
    i_first = i_x * segments + (segments - 1 if BACK else 0)
    b_last = tl.load(p_totals + i_first * SIZE + i_tile)
    for i in tl.range(1, segments - 1, num_stages=STAGES):
        i_s = i_first + step * i
        p_map, p_own = p_maps + i_s * (D * D), p_totals + i_s * SIZE
        for row in tl.static_range(0, D, N):
            b_s = tl.load(p_own + row + i_tile)
            for column in tl.static_range(0, D, N):
                if D > N:
                    b_last = tl.load(p_own - step * SIZE + column + i_tile)
                if BACK:
                    b_map = tl.load(p_map + row * D + column + i_map)
                else:
                    b_map = tl.trans(tl.load(p_map + column * D + row + i_map))
                if S.PRECISION == "ieee":
                    b_s += product(b_map, b_last, "ieee")
                else:
                    b_s = tl.dot(b_map, b_last, b_s, input_precision="tf32x3")
            tl.store(p_own + row + i_tile, b_s)
            if D == N:
                b_last = b_s
        if D > N:
            tl.debug_barrier()


@triton.jit
def _given_state(p_state, i_state, i_e, S: tl.constexpr):
    """Tile (BE, BD) of a state of (B, Hkv, D, E); zeros if there is none or the index is negative."""
    b_s = zeros(S.BE, S.BD)
    if p_state is not None:
        i_tile, m_tile = state_offsets(tl.maximum(i_state, 0), i_e, S)
        b_s = tl.where(i_state >= 0, tl.load(p_state + i_tile, mask=m_tile, other=0.0), 0.0)
    return b_s


@triton.jit
def _first_state(p_state, p_totals, i_state, i_x, i_s, segments, i_e, BACK: tl.constexpr, S: tl.constexpr):
    """The state before a segment; BACK: the gradient of the state after it."""
    if i_s == (segments - 1 if BACK else 0):
        b_s = _given_state(p_state, i_state, i_e, S)
    else:
        b_s = tl.load(p_totals + tile_offsets(i_x * segments + (i_s + 1 if BACK else i_s - 1), i_e, S))
    return b_s


@triton.jit
def _outputs(
    b_s, p_q, p_k, p_v, p_inverse, p_sums, p_strong, p_pairs, p_out, rows, scale, i_e, i_x, i_y, count,
    S: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Write the outputs of `count` chunks; returns the state after them."""
    for i in tl.range(count, num_stages=STAGES):
        b_start, b_end, last = load_factors(p_sums, i_y + i, S)
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S, i_e)
        b_q = load_rows(p_q, S.STRIDE_Q, rows, S.D, S.BD, S)
        b_t, b_t_low = load_inverse(p_inverse, p_sums, i_y + i, True, EXACT, S)
        b_pair, b_pair_low = load_pair(p_pairs, p_strong + i_y + i, i_x + i, EXACT, S)
        b_x = dot(b_s, tl.trans(b_k), S)
        b_out = dot(b_s, tl.trans(b_q), S) * (b_start * scale)[None, :]
        if EXACT:
            b_u = _writes(b_x, tl.trans(b_v), b_t, b_t_low, b_start, EXACT, S)
        else:
            b_u = dot(tl.trans(b_v), b_t, S)
            b_u = add_dot(b_x * -b_start[None, :], b_t, b_u, S)
        b_s = product_of(b_u * b_end[None, :], b_k, None, b_s * last, EXACT, S)
        b_out = product_of(b_u, tl.trans(b_pair), tl.trans(b_pair_low), b_out, EXACT, S)
        store_columns(p_out, S.H * S.E, rows, b_out, i_e, S)
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        p_out += S.C * S.H * S.E
        rows -= S.C
    return b_s


@triton.jit(do_not_specialize=["T", "segments", "run", "chunks", "scale"])
def gated_delta_forward_kernel(
    p_q, p_k, p_v, p_inverse, p_sums, p_strong, p_pairs, p_state, p_totals, p_out, p_after,
    T, segments, run, chunks, scale, q, k, v, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Outputs of one segment, for one tile of values, and the state after the last segment."""
    i_h, i_kv, i_e, i_s, i_b = _segment(tl.program_id(0), segments, S)
    i_y, i_0 = i_b * S.HKV + i_kv, i_s * run * S.C
    b_s = _first_state(p_state, p_totals, i_y, i_b * S.H + i_h, i_s, segments, i_e, False, S)
    p_q = pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h)
    p_k = pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_kv)
    p_v = pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_kv)
    p_out += (i_b * T + i_0) * (S.H * S.E) + i_h * S.E
    rows = T - i_0
    i_y, i_x = i_y * chunks + i_s * run, (i_b * S.H + i_h) * chunks + i_s * run
    count = tl.minimum(run, chunks - i_s * run)
    if any_strong(p_strong, i_y, count, S):
        b_s = _outputs(
            b_s, p_q, p_k, p_v, p_inverse, p_sums, p_strong, p_pairs, p_out, rows, scale, i_e, i_x, i_y, count,
            S, True, STAGES
        )  # fmt: skip
    else:
        b_s = _outputs(
            b_s, p_q, p_k, p_v, p_inverse, p_sums, p_strong, p_pairs, p_out, rows, scale, i_e, i_x, i_y, count,
            S, False, STAGES
        )  # fmt: skip
    if (i_s == segments - 1) & (i_h % (S.H // S.HKV) == 0):
        i_state, m_state = state_offsets(i_b * S.HKV + i_kv, i_e, S)
        tl.store(p_after + i_state, b_s, mask=m_state)


@triton.jit
def _state_gradients(
    b_s, p_q, p_k, p_inverse, p_sums, p_d_out, p_states, p_z, T, scale, i_b, i_h, i_kv, i_e, i_x, i_0,
    i_c, count, q, k, d, S: tl.constexpr, STORE: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The gradient of the state before `count` chunks, the last of which is chunk i_c and begins at token i_0, from
    that of the state after them. STORE: write that after each chunk, and z.
    """
    p_q = pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h)
    p_k = pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_kv)
    p_d_out = pointer(p_d_out, d, S.STRIDE_D, i_b, i_0, i_h)
    p_z += (i_b * T + i_0) * (S.H * S.E) + i_h * S.E
    rows = T - i_0
    for i in tl.range(count, num_stages=STAGES):
        b_start, b_end, last = load_factors(p_sums, i_c - i, S)
        b_high, b_low = load_sums(p_sums, i_c - i, S)
        b_q = load_rows(p_q, S.STRIDE_Q, rows, S.D, S.BD, S)
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        if STORE:
            p_tile = p_states + tile_offsets(i_x - i, i_e, S)
            tl.store(p_tile, b_s.to(p_tile.dtype.element_ty))
        b_pair = dot(b_q, tl.trans(b_k), S) * (between(b_high, b_low, S) * scale)
        b_d = load_columns(p_d_out, S.STRIDE_D, rows, i_e, S)
        b_u = dot(b_s, tl.trans(b_k), S) * b_end[None, :]
        if EXACT and tl.bfloat16 == S.DOT:
            b_pair, b_pair_low = halves(b_pair, S)
            b_u = add_dot(b_d, b_pair_low, b_u, S)
        b_u = add_dot(b_d, b_pair, b_u, S)
        b_s = add_dot(b_d.to(tl.float32) * (b_start * scale)[None, :], b_q, b_s * last, S)
        b_t, b_t_low = load_inverse(p_inverse, p_sums, i_c - i, False, EXACT, S)
        b_z = product_of(b_u, b_t, b_t_low, zeros(S.BE, S.C), EXACT, S)
        if STORE:
            store_columns(p_z, S.H * S.E, rows, b_z, i_e, S)
        b_s = product_of(b_z * -b_start[None, :], b_k, None, b_s, EXACT, S)
        p_q -= S.C * S.STRIDE_Q
        p_k -= S.C * S.STRIDE_K
        p_d_out -= S.C * S.STRIDE_D
        p_z -= S.C * S.H * S.E
        rows += S.C
    return b_s


@triton.jit(do_not_specialize=["T", "segments", "run", "chunks", "scale", "first"])
def gated_delta_backward_states_kernel(
    p_q, p_k, p_v, p_inverse, p_sums, p_norms, p_strong, p_state, p_totals, p_d_out, p_d_after, p_d_totals,
    p_states, p_d_states, p_u, p_z, p_d_state, T, segments, run, chunks, scale, first,
    q, k, v, d, S: tl.constexpr, STORE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Gradients of the states after the chunks of one segment, from program `first` on; before it, the states before
    the chunks and u.

    STORE: Write the gradients and z, and that of the first state; otherwise only the gradient of the state before the
    segment, to p_d_totals, as if nothing followed the segment.
    """
    pid = tl.program_id(0)
    i_h, i_kv, i_e, i_s, i_b = _segment(pid % (tl.num_programs(0) - first), segments, S)
    i_y, i_x = i_b * S.HKV + i_kv, i_b * S.H + i_h
    i_first = i_s * run
    i_c = i_y * chunks + i_first
    count = tl.minimum(run, chunks - i_first)
    if pid < first:
        b_s = _first_state(p_state, p_totals, i_y, i_x, i_s, segments, i_e, False, S)
        i_u = (i_b * T + i_first * S.C) * S.STRIDE_U + i_h * (S.STRIDE_U // S.H)
        if any_strong(p_strong, i_c, count, S):
            _states(
                b_s, p_k, p_v, p_inverse, p_sums, p_states, p_u + i_u, T, i_b, i_kv, i_e,
                i_x * chunks + i_first, i_first * S.C, i_c, count, 1, k, v, S, True, True, STAGES
            )  # fmt: skip
        else:
            _states(
                b_s, p_k, p_v, p_inverse, p_sums, p_states, p_u + i_u, T, i_b, i_kv, i_e,
                i_x * chunks + i_first, i_first * S.C, i_c, count, 1, k, v, S, True, False, STAGES
            )  # fmt: skip
    else:
        # One query head of a group carries the gradient of the state that they share.
        i_state = tl.where(i_h % (S.H // S.HKV) == 0, i_y, -1)
        if STORE:
            b_s = _first_state(p_d_after, p_d_totals, i_state, i_x, i_s, segments, i_e, True, S)
        else:
            number = _remembered(p_norms + i_y * chunks + i_first, tl.where(i_s > 0, count, 0), True, S)
            b_s = _given_state(p_d_after, tl.where((i_s == segments - 1) & (number == count), i_state, -1), i_e, S)
            count = number
        i_last = i_first + tl.maximum(count, 1) - 1
        i_y = i_y * chunks + i_last
        if any_strong(p_strong, i_c, count, S):
            b_s = _state_gradients(
                b_s, p_q, p_k, p_inverse, p_sums, p_d_out, p_d_states, p_z, T, scale, i_b, i_h, i_kv,
                i_e, i_x * chunks + i_last, i_last * S.C, i_y, count, q, k, d, S, STORE, True, STAGES
            )  # fmt: skip
        else:
            b_s = _state_gradients(
                b_s, p_q, p_k, p_inverse, p_sums, p_d_out, p_d_states, p_z, T, scale, i_b, i_h, i_kv,
                i_e, i_x * chunks + i_last, i_last * S.C, i_y, count, q, k, d, S, STORE, False, STAGES
            )  # fmt: skip
        if not STORE:
            tl.store(p_d_totals + tile_offsets(i_x * segments + i_s, i_e, S), b_s)
        elif i_s == 0:
            i_tile, m_tile = state_offsets(i_x, i_e, S)
            tl.store(p_d_state + i_tile, b_s, mask=m_tile)


@triton.jit
def _inner_product(p_x, p_y, i_x, S: tl.constexpr):
    """Σ x ∘ y of matrices i_x of two stacks of (TILES · BE, BD), a few rows at a time."""
    SIZE: tl.constexpr = S.BE * S.TILES * S.BD
    WIDTH: tl.constexpr = 1024
    i_d = tl.cast(i_x, tl.int64) * SIZE + tl.arange(0, WIDTH)
    b_sum = tl.zeros((WIDTH,), tl.float32)
    for i in range(SIZE // WIDTH):
        b_sum += tl.load(p_x + i_d + i * WIDTH).to(tl.float32) * tl.load(p_y + i_d + i * WIDTH).to(tl.float32)
    return tl.sum(b_sum)


@triton.jit
def _row_products(p_x, STRIDE: tl.constexpr, rows, b_y, S: tl.constexpr):
    """x_i · y_i (C,) of a chunk's rows."""
    return tl.sum(load_rows(p_x, STRIDE, rows, S.D, S.BD, S, 0, True).to(tl.float32) * b_y, 1)


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_delta_backward_kernel(
    p_q, p_k, p_beta, p_sums, p_strong, p_d_out, p_states, p_d_states, p_u,
    p_d_q, p_d_k, p_d_v, p_d_decay, p_d_beta, T, chunks, scale, q, k, beta, d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Gradients of the inputs of one chunk of one query head.

    p_d_v: z, which is replaced by dv. p_u: may be p_d_k, which replaces it.
    """
    pid = tl.program_id(0)
    i_h, i_c = pid % S.H, (pid // S.H) % chunks
    i_b = (pid // S.H // chunks).to(tl.int64)
    i_kv = i_h // (S.H // S.HKV)
    i_y, i_x = (i_b * S.HKV + i_kv) * chunks + i_c, (i_b * S.H + i_h) * chunks + i_c
    i_0 = i_c * S.C
    rows = T - i_0
    i_t = tl.arange(0, S.C)
    i_token = (i_b * T + i_0) * S.H + i_h
    p_k = pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_kv)
    p_q = pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h)
    p_d_out = pointer(p_d_out, d, S.STRIDE_D, i_b, i_0, i_h)
    p_d_v += i_token * S.E
    p_u += i_token * (S.STRIDE_U // S.H)
    b_beta = load_beta(pointer(p_beta, beta, S.STRIDE_BETA, i_b, i_0, i_kv) if S.SCALED else p_k, rows, S)
    b_start, b_end, last = load_factors(p_sums, i_y, S)
    b_high, b_low = load_sums(p_sums, i_y, S)
    b_inverse = zeros(S.C)
    if S.SCALED:
        if tl.bfloat16 == S.DOT:  # As it is on the diagonal of T.
            b_beta = widen(b_beta.to(tl.bfloat16)) + tl.load(diagonal_pointer(p_sums, i_y, S))
        b_inverse = 1.0 / b_beta
    b_d_pair, b_d_l, b_d_beta = zeros(S.C, S.C), zeros(S.C, S.C), zeros(S.C)
    for i_e in tl.range(S.TILES, num_stages=STAGES):
        b_u = load_rows(p_u, S.STRIDE_U, rows, S.E, S.BE, S, i_e)
        b_z = load_rows(p_d_v, S.H * S.E, rows, S.E, S.BE, S, i_e)
        b_d = load_rows(p_d_out, S.STRIDE_D, rows, S.E, S.BE, S, i_e)
        b_d_pair = add_dot(b_d, tl.trans(b_u), b_d_pair, S)
        b_d_l = add_dot(b_z, tl.trans(b_u), b_d_l, S)
        if S.SCALED:
            b_z = b_z.to(tl.float32) * b_inverse[:, None]
            b_d_beta += tl.sum(b_z * (b_u.to(tl.float32) * b_inverse[:, None]), 1)
    if S.SCALED:
        tl.store(p_d_beta + i_token + i_t * S.H, b_d_beta, mask=i_t < rows)
    b_between = between(b_high, b_low, S)
    b_pair, b_pair_low = halves(b_d_pair * b_between * scale, S)
    b_l = tl.where(i_t[:, None] > i_t[None, :], b_d_l * -b_between, 0.0).to(S.DOT)
    b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
    b_d_q = dot(b_pair, b_k, S)
    if tl.bfloat16 == S.DOT:
        if tl.load(p_strong + i_y) > 0:
            b_d_q = add_dot(b_pair_low, b_k, b_d_q, S)
    for i_e in tl.range(S.TILES, num_stages=STAGES):
        b_s = tl.load(p_states + tile_offsets(i_x, i_e, S))
        b_d = load_rows(p_d_out, S.STRIDE_D, rows, S.E, S.BE, S, i_e, True).to(tl.float32)
        b_d_q = add_dot(b_d * (b_start * scale)[:, None], b_s, b_d_q, S)
    store_rows(p_d_q + i_token * S.D, S.H * S.D, rows, b_d_q, S.D, S.BD, S)
    b_d_sum = zeros(S.C)
    if S.GATED:
        b_d_sum += _row_products(p_q, S.STRIDE_Q, rows, b_d_q, S)
    # Parts of dk whose products with k are needed: one after the other, or each from zero, which keeps more digits.
    b_d_k = dot(b_l, b_k, S)
    for i_e in tl.range(S.TILES, num_stages=STAGES):
        b_s = tl.load(p_states + tile_offsets(i_x, i_e, S), eviction_policy="evict_first")
        b_z = load_rows(p_d_v, S.H * S.E, rows, S.E, S.BE, S, i_e, True).to(tl.float32)
        b_d_k = add_dot(b_z * -b_start[:, None], b_s, b_d_k, S)
    b_rows = _row_products(p_k, S.STRIDE_K, rows, b_d_k, S)
    b_before, b_sum = b_rows, b_d_k
    if tl.bfloat16 != S.DOT:
        b_before, b_d_k = zeros(S.C), zeros(S.C, S.BD)
    b_d_k = add_dot(tl.trans(b_l), b_k, b_d_k, S)
    b_d_k = add_dot(tl.trans(b_pair), load_rows(p_q, S.STRIDE_Q, rows, S.D, S.BD, S), b_d_k, S)
    b_columns = _row_products(p_k, S.STRIDE_K, rows, b_d_k, S)
    b_pairs = b_columns - b_before
    if tl.bfloat16 != S.DOT:
        b_sum += b_d_k
        b_columns, b_d_k = zeros(S.C), zeros(S.C, S.BD)
    for i_e in tl.range(S.TILES, num_stages=STAGES):
        b_u = load_rows(p_u, S.STRIDE_U, rows, S.E, S.BE, S, i_e, True)
        b_d_s = tl.load(p_d_states + tile_offsets(i_x, i_e, S))
        b_d_k = add_dot(b_u.to(tl.float32) * b_end[:, None], b_d_s, b_d_k, S)
    if S.GATED:
        b_ends = _row_products(p_k, S.STRIDE_K, rows, b_d_k, S) - b_columns
        end = tl.sum(b_ends) + last * _inner_product(p_states, p_d_states, i_x, S)
        b_d_sum += b_rows - b_pairs - b_ends + tl.where(i_t == S.C - 1, end, 0.0)
        tl.store(p_d_decay + i_token + i_t * S.H, tl.cumsum(b_d_sum, 0, reverse=True), mask=i_t < rows)
    if tl.bfloat16 != S.DOT:
        b_d_k += b_sum
    tl.debug_barrier()
    store_rows(p_d_k + i_token * S.D, S.H * S.D, rows, b_d_k, S.D, S.BD, S)


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_delta_backward_decay_kernel(
    p_q, p_k, p_v, p_inverse, p_sums, p_strong, p_d_out, p_states, p_d_states, p_d_decay, T, chunks, scale,
    q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """The gradient of log α of the marked ones among SHARE chunks of one query head, with u and z in float32.

    Where keys are nearly parallel it is a small difference of products with u and z, which are bfloat16 in memory.
    """
    shares = tl.cdiv(chunks, SHARE)
    pid = tl.program_id(0)
    i_h, i_first = pid % S.H, (pid // S.H) % shares * SHARE
    i_b = (pid // S.H // shares).to(tl.int64)
    i_kv = i_h // (S.H // S.HKV)
    i_y, i_x = (i_b * S.HKV + i_kv) * chunks, (i_b * S.H + i_h) * chunks
    end = tl.minimum(i_first + SHARE, chunks)
    if not any_strong(p_strong, i_y + i_first, end - i_first, S):
        return
    for i_c in range(i_first, end):
        if tl.load(p_strong + i_y + i_c) > 0:
            i_0 = i_c * S.C
            rows = T - i_0
            b_d_sum = _decay_gradient(
                pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h), pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_kv),
                pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_kv), pointer(p_d_out, d, S.STRIDE_D, i_b, i_0, i_h),
                p_inverse, p_sums, p_states, p_d_states, rows, scale, i_y + i_c, i_x + i_c, S
            )  # fmt: skip
            i_t = tl.arange(0, S.C)
            p_o = p_d_decay + (i_b * T + i_0) * S.H + i_h + i_t * S.H
            tl.store(p_o, tl.cumsum(b_d_sum, 0, reverse=True), mask=i_t < rows)


@triton.jit
def _decay_gradient(
    p_q, p_k, p_v, p_d_out, p_inverse, p_sums, p_states, p_d_states, rows, scale, i_y, i_x, S: tl.constexpr
):  # fmt: skip
    """The gradient of G (C,) of one chunk, from the states: o_i · do_i − v_i · dv_i, and at the end ⟨dS', S'⟩."""
    i_t = tl.arange(0, S.C)
    b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
    b_q = load_rows(p_q, S.STRIDE_Q, rows, S.D, S.BD, S)
    b_start, b_end, last = load_factors(p_sums, i_y, S)
    b_high, b_low = load_sums(p_sums, i_y, S)
    b_pair, b_pair_low = halves(dot(b_q, tl.trans(b_k), S) * (between(b_high, b_low, S) * scale), S)
    b_d_sum, b_ends = zeros(S.C), zeros(S.C)
    for i_e in tl.range(S.TILES, num_stages=1):
        b_d_s = tl.load(p_d_states + tile_offsets(i_x, i_e, S))
        b_d_u = dot(b_d_s, tl.trans(b_k), S) * b_end[None, :]
        b_s = tl.load(p_states + tile_offsets(i_x, i_e, S))
        b_d = load_columns(p_d_out, S.STRIDE_D, rows, i_e, S)
        b_v = load_columns(p_v, S.STRIDE_V, rows, i_e, S)
        b_t, b_t_low = load_inverse(p_inverse, p_sums, i_y, True, True, S)
        b_u = _writes(dot(b_s, tl.trans(b_k), S), b_v, b_t, b_t_low, b_start, True, S)
        b_ends += tl.sum(b_u * b_d_u, 0)
        b_out = dot(b_s, tl.trans(b_q), S) * (b_start * scale)[None, :]
        b_out = product_of(b_u, tl.trans(b_pair), tl.trans(b_pair_low), b_out, True, S)
        b_d_sum += tl.sum(b_d.to(tl.float32) * b_out, 0)
        b_d_u = add_dot(b_d, b_pair, add_dot(b_d, b_pair_low, b_d_u, S), S)
        b_t, b_t_low = load_inverse(p_inverse, p_sums, i_y, False, True, S)
        b_z = product_of(b_d_u, b_t, b_t_low, zeros(S.BE, S.C), True, S)
        b_d_sum -= tl.sum(b_v.to(tl.float32) * b_z, 0)
    end = tl.sum(b_ends) + last * _inner_product(p_states, p_d_states, i_x, S)
    return b_d_sum + tl.where(i_t == S.C - 1, end, 0.0)


def forward(x: GatedInputs, problem: GatedProblem, *, zeroed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the state after the last token, and what `backward` needs."""
    q, k, v, decay, beta, state = _dense(x)
    plan = _DeltaForward.of((q, k, v, decay, beta, state), problem)
    out, after = v.new_empty(plan.out_shape), v.new_empty(plan.state_shape, dtype=torch.float32)
    saved = q.new_zeros(saved_size(x, problem), dtype=torch.float32) if zeroed else plan.saved.allocate(q)
    work = plan.workspace.allocate(q)
    inverse, sums, norms, strong, maps, totals = plan.pointers(plan.saved, saved)
    norms = norms if plan.segments > 1 else None
    (pairs,) = plan.pointers(plan.workspace, work)
    p_q, p_k, p_v, p_decay, p_beta, p_state = plan.addresses(q, k, v, decay, beta, state)
    p_out, p_after = plan.addresses(out, after)
    with on_device(q):
        plan.inverse(p_q, p_k, p_decay, p_beta, inverse, sums, norms, strong, pairs)
        if plan.bf16:
            plan.exact_inverse(p_q, p_k, p_beta, inverse, sums, strong, pairs)
        if plan.segments > 1:
            plan.maps(p_k, p_v, inverse, sums, norms, strong, p_state, maps, totals)
            plan.scan(norms, maps, totals)
        plan.read(p_q, p_k, p_v, inverse, sums, strong, pairs, p_state, totals, p_out, p_after)
    return out, after, saved


def backward(saved: GatedSaved, x: GatedInputs, problem: GatedProblem) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, log_decay, beta and of the state before the first token, if there are any."""
    inputs = *_dense(x), dense_rows(saved.d_out), dense(saved.d_state)
    with on_device(x.q):
        return gradients(_DeltaBackward, inputs, saved.starts, problem, 1)


def saved_size(x: GatedInputs, problem: GatedProblem) -> int:
    """Return the number of float32 elements that `forward` saves, an upper bound: the length may be a symbol."""
    (B, _, H, D), E, dtype = x.q.shape, x.v.shape[3], x.q.dtype
    tiles = _tiling(dtype, D, E)[3]
    return _saved(dtype, x.q.shape, x.v.shape, B * H + processors(x.q.get_device()) // tiles).size


class _DeltaPlan(Plan):
    def __init__(self, device: int, key: Signature, problem: GatedProblem, most: int | None = None) -> None:
        """most: Segments at most, by default as many as fill the device."""
        super().__init__(device)
        self.tensors = dict(zip(("q", "k", "v", "decay", "beta", "state"), key, strict=False))
        q, v = self.tensors["q"], self.tensors["v"]
        (self.B, self.T, self.H, D), (Hkv, E) = q[0], v[0][2:]
        self.group, self.scale = self.H // Hkv, problem.scale
        self.out_shape, self.state_shape = (self.B, self.T, self.H, E), (self.B, Hkv, D, E)
        C, BD, BE, tiles = _tiling(q[2], D, E)
        self.bf16 = q[2] == torch.bfloat16
        gated, scaled = self.tensors["decay"] is not None, self.tensors["beta"] is not None
        dot = tl.bfloat16 if self.bf16 else tl.float32
        full = self.T % C == 0
        sizes = self.H, Hkv, D, E, BD, BE, tiles, C, gated, scaled, dot, PRECISION[q[2]], full
        self.sizes = DeltaSizes(*sizes)
        self.chunks = -(-self.T // C)
        # None of fewer than four chunks.
        most = processors(device) // (self.B * self.H * tiles) if most is None else most
        segments = max(1, min(most, self.chunks // 4))
        self.run = -(-self.chunks // segments)
        self.segments = -(-self.chunks // self.run)
        self.saved = _saved(q[2], q[0], v[0], self.B * self.H * self.segments if self.segments > 1 else 0)

    def delta_launch(
        self, kernel: Any, programs: int, scalars: tuple[Any, ...], strided: str, warps: int, stages: int, **more: Any
    ) -> Launch:
        """Create a launch. strided: tensors whose strides the kernel takes."""
        none = Strides(0, 0, 0)
        strides = {name: none if (x := self.tensors[name]) is None else Strides.of(x) for name in strided.split()}
        sizes = self.sizes._replace(**{f"STRIDE_{name.upper()}": x.t for name, x in strides.items() if name != "decay"})
        constants = {"S": sizes, "STAGES": stages, "num_warps": warps, **more}
        return self.launch(kernel, (programs,), (*scalars, *strides.values()), constants)

    def scan_launch(self, *, back: bool) -> Launch:
        # A wider P is in blocks, and a step loads what the one before stored: nothing may be loaded ahead.
        constants = {"S": self.sizes, "BACK": back, "STAGES": 2 if self.sizes.BD <= 128 else 1, "num_warps": 8}
        grid = self.B * self.H, self.sizes.TILES * self.sizes.BE // SCAN_WIDTH.value
        return self.launch(gated_delta_scan_kernel, grid, (self.segments, self.run, self.chunks), constants)

    @property
    def segmentation(self) -> tuple[int, int, int, int]:
        return self.T, self.segments, self.run, self.chunks


class _DeltaForward(_DeltaPlan):
    def __init__(self, device: int, key: Signature, problem: GatedProblem) -> None:
        super().__init__(device, key, problem)
        S, X = self.sizes, self.B * self.H
        warps, stages = 4, 1 if not self.bf16 else 3 if S.BD <= 128 else 2
        kind = torch.bfloat16 if self.bf16 else torch.float32
        self.workspace = Workspace((X * self.chunks * S.C * S.C * (2 if self.bf16 else 1), kind))
        scalars = self.T, self.chunks, self.scale
        heads = self.B * S.HKV
        self.inverse = self.delta_launch(
            gated_delta_inverse_kernel, heads * self.chunks, scalars, "q k decay beta", 4, 1
        )
        if self.bf16:
            programs = heads * -(-self.chunks // SHARE.value)
            self.exact_inverse = self.delta_launch(
                gated_delta_exact_inverse_kernel, programs, scalars, "q k beta", 4, 1
            )
        if self.segments > 1:
            programs = X * (S.TILES + S.BD // S.BE) * self.segments
            self.maps = self.delta_launch(gated_delta_maps_kernel, programs, self.segmentation, "k v", warps, stages)
            self.scan = self.scan_launch(back=False)
        scalars = *self.segmentation, self.scale
        programs = X * S.TILES * self.segments
        self.read = self.delta_launch(gated_delta_forward_kernel, programs, scalars, "q k v", warps, stages)


class _DeltaBackward(_DeltaPlan):
    def __init__(self, device: int, key: Signature, problem: GatedProblem, most: int | None = None) -> None:
        super().__init__(device, key, problem, most)
        self.tensors["d"] = key[6]
        S, X = self.sizes, self.B * self.H
        kind = torch.bfloat16 if self.bf16 else torch.float32
        size = X * S.BD * S.BE * S.TILES
        totals = size * self.segments if self.segments > 1 else 0
        # Where it is large enough, u lies where the gradient of k will; float16 does not have the range of u.
        self.shared = self.group == 1 and S.E <= S.D and self.tensors["q"][2] != torch.float16
        writes = 0 if self.shared else X * self.T * S.E
        buffers = (size * self.chunks, kind), (size * self.chunks, kind), (totals, torch.float32)
        self.workspace = Workspace(*buffers, (writes, kind))
        self.sizes = S = S._replace(STRIDE_U=self.H * (S.D if self.shared else S.E))
        if self.segments > 1:
            self.totals = self.states_launch(store=False)
            self.scan = self.scan_launch(back=True)
        self.states = self.states_launch(store=True)
        scalars = self.T, self.chunks, self.scale
        stages = 3 if S.BD <= 128 else 1
        self.read = self.delta_launch(gated_delta_backward_kernel, X * self.chunks, scalars, "q k beta d", 4, stages)
        if self.bf16 and S.GATED:
            programs = X * -(-self.chunks // SHARE.value)
            self.decay = self.delta_launch(
                gated_delta_backward_decay_kernel, programs, scalars, "q k v d", 4 if S.BD <= 128 else 8, 1
            )
        needed = 4 * (self.workspace.size + X * self.T * ((S.D + S.E) if self.group > 1 else 0))
        # Shared memory is enough for one program with wide heads.
        resident = processors(device) * (1 if self.bf16 and S.BD > 128 else 4)
        self.rows_at_once = self.B
        if self.segments == 1:
            self.rows_at_once = rows_at_once(self.B, self.states.grid[0], resident, needed, key[:7])

    def write_gradients(self, inputs: Sequence[Any], saved: Sequence[Any], grads: Sequence[Any]) -> None:
        """Write the gradients. saved: The buffers that the forward pass filled."""
        q, k, v, decay, beta, state, d_out, d_after = inputs
        d_q, d_k, d_v, d_decay, d_beta, d_state = grads
        inverse, sums, norms, strong, maps, totals = saved
        # Query heads of a group have gradients of their own for what they share, in float32 because they are added up.
        kind, heads = q.dtype if self.group == 1 else torch.float32, d_q.shape[:3]
        d_k_heads = buffer_like(d_k, d_q.shape, kind)
        # z lies here first, which float16 does not have the range for.
        d_v_heads = buffer_like(d_v, d_out.shape, torch.float32 if kind == torch.float16 else kind)
        d_decay_heads, d_beta_heads = (
            None if y is None else buffer_like(y, (*heads, *y.shape[3:]), torch.float32) for y in (d_decay, d_beta)
        )
        shape = self.B, self.H, *self.state_shape[2:]
        d_state_heads = (
            q.new_empty(shape, dtype=torch.float32) if state is None else buffer_like(d_state, shape, state.dtype)
        )
        work = self.workspace.allocate(q)
        states, d_states, d_totals, u = self.pointers(self.workspace, work)
        p_q, p_k, p_v, p_beta, p_state, p_d, p_d_after = self.addresses(q, k, v, beta, state, d_out, d_after)
        p_d_q, p_d_k, p_d_v, p_d_state = self.addresses(d_q, d_k_heads, d_v_heads, d_state_heads)
        p_d_decay, p_d_beta = self.addresses(d_decay_heads, d_beta_heads)
        u = p_d_k if self.shared else u
        written = d_totals, states, d_states, u, p_d_v, p_d_state
        given = p_q, p_k, p_v, inverse, sums, norms, strong, p_state, totals, p_d, p_d_after, *written
        if self.segments > 1:
            self.totals(*given)
            self.scan(norms, maps, d_totals)
        self.states(*given)
        of_inputs = p_q, p_k, p_beta, sums, strong, p_d, states, d_states, u
        self.read(*of_inputs, p_d_q, p_d_k, p_d_v, p_d_decay, p_d_beta)
        if self.bf16 and d_decay is not None:
            self.decay(p_q, p_k, p_v, inverse, sums, strong, p_d, states, d_states, p_d_decay)
        del work  # Freed before the sums of groups.
        for grad, x in ((d_k, d_k_heads), (d_v, d_v_heads), (d_decay, d_decay_heads), (d_beta, d_beta_heads)):
            if grad is not None:
                store(grad, x, self.group)
        if state is not None:
            store(d_state, d_state_heads, self.group, 1)

    def states_launch(self, *, store: bool) -> Launch:
        """Create a launch that computes gradients of states and, if they are stored, in other programs the states."""
        S = self.sizes
        warps, stages = (4, 2) if self.bf16 and S.BD <= 128 else (8, 1) if self.bf16 else (4, 1)
        if store and self.bf16 and S.BD <= 128 and S.TILES % 2 == 0:
            # Twice the values and warps: what does not depend on values is loaded and computed once.
            self.sizes, warps, stages = S._replace(BE=2 * S.BE, TILES=S.TILES // 2), 8, 3
        programs = self.B * self.H * self.sizes.TILES * self.segments
        first = programs if store else 0
        scalars = *self.segmentation, self.scale, first
        launch = self.delta_launch(
            *(gated_delta_backward_states_kernel, programs + first, scalars, "q k v d", warps, stages), STORE=store
        )
        self.sizes = S
        return launch


def _tiling(dtype: torch.dtype, D: int, E: int) -> tuple[int, int, int, int]:
    """Tokens in a chunk, padded D, values in a tile, number of tiles."""
    C, BE = (64, 64) if dtype == torch.bfloat16 else (32, 32)
    return C, padded(D, BE), BE, -(-E // BE)


def _saved(dtype: torch.dtype, q: Any, v: Any, segments: int) -> Workspace:
    """T, G and ‖P‖ of each chunk; P and Δ of each segment."""
    (B, T, _, D), (Hkv, E) = q, v[2:]
    C, BD, BE, tiles = _tiling(dtype, D, E)
    chunks = B * Hkv * -(-T // C)
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return Workspace(
        (chunks * C * C, kind),
        (chunks * C * 4, torch.float32),
        (chunks, torch.float32),
        (chunks, torch.int32),
        (segments * BD * BD, torch.float32),
        (segments * BD * BE * tiles, torch.float32),
    )


def _dense(x: GatedInputs) -> tuple[Any, ...]:
    """The tensors as the kernels take them."""
    return dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), x.log_decay, x.beta, dense(x.state)
