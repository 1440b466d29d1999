"""Gated linear attention and the delta rule with a decay per channel (GLA, KDA): decays by products with 0/1 matrices.

The decay between two tokens is 2 to the sum of log₂ α over the tokens between them. For a chunk such sums are M g, with
g (C, D) and a matrix M of zeros and ones that selects the tokens of each sum: exact, never positive, and without
differences of larger sums, whatever the gates are.

    A_ij = Σ_d a_id b_jd e^{G_id − G_jd}

is one product where gates are mild: where each half of a chunk keeps more than 2^−RANGE of every channel, the exponent
is split at the chunk's middle, and factors above 1 stay far from overflow. Chunks with other gates, or with nearly
parallel keys, for which single bfloat16 numbers do not do, are marked, and computed by a second launch in log₂ C
levels. On the level of blocks of 2h tokens, rows are in the second half of a block, columns in its first, and the
exponent is split between them: from the middle to the row, and from the column to the middle. One array of factors
serves both sides; the product of all rows and columns is masked to pairs of one block.

With m the middle of a chunk, rows are q_in = σ q e^{G − G_m} and k_in = k e^{G − G_m}, columns k_out = k e^{G_m − G},
and the state before the chunk enters as R = e^{G_m} ∘ S. With T = (I + L)⁻¹, L = β A^kk below the diagonal:

    u = β v, or u = T β v − W R, W = T β k_in, with the delta rule,      o = q_in R + A^qk u,
    S' = e^{G_C − G_m} ∘ (R + k_outᵀ u)

Levels have e^G and e^{G_C − G} as factors of rows and columns, R = S, and S' = e^{G_C} ∘ R + k_outᵀ u. For both, three
factors per chunk and channel say R = read ∘ S and S' = written ∘ (kept ∘ R + k_outᵀ u).

First what does not depend on S is computed, for all chunks at once: rows, columns, A^qk, T, W and U₀ = T β v. A second
kernel goes through the chunks of a sequence with a tile of the state's columns in registers and writes the outputs.
A^qk and T are saved. The backward pass computes the rest again, then one launch whose programs compute R and,
backwards, dR = written ∘ dS',

    du = A^qkᵀ do + k_out dR,      dS = read ∘ (kept ∘ dR + q_inᵀ do − Wᵀ du),

then y = Tᵀ du, dv = β y and the gradients of A^qk and L, and last those of q, k and g for each chunk and tile of
channels, by one product or by levels. README.md derives them.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, UNDERFLOW, exp2, same_layout
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
from longspan.ops.common.tiles import load_column, load_rows, padded, product, store_rows, token_pointer, zeros
from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved
from longspan.ops.gated.triton.delta import MILD, halves, halves_dot, store_inverse, triangular_inverse
from longspan.ops.gated.triton.slices import buffer_like, gradients, rows_at_once, store
from longspan.ops.linear.triton import PRECISION

# Gates are mild where each half of a chunk keeps more than 2^−RANGE of every channel, and factors times keys or queries
# stay below LARGE.
RANGE = tl.constexpr(54.0)
LARGE = tl.constexpr(2.0**60)
# Tokens whose decays one thread adds up.
RUN = tl.constexpr(4)
# Chunks and heads whose marks a program for strong gates reads at once.
MARKED = 8
# β of this or less counts as this in z = β y: its gradient is a quotient by β.
LEAST_BETA = tl.constexpr(1e-10)

# Compile-time constants: query and key heads, dimensions, padded D, channels and values per tile, tiles of values,
# tokens in a chunk and their binary logarithm. DELTA: the delta rule. SCALED: there is a beta. DOT: dtype of products.
# BS: channels of the state in one program of a scan; the delta rule needs all of them. FULL: no chunk is shorter.
ChannelSizes = namedtuple("ChannelSizes", "H HKV D E BD BK BE TILES C LEVELS DELTA SCALED DOT PRECISION BS FULL")


@triton.jit
def _dot(b_x, b_y, S: tl.constexpr):
    """x·y in the precision of the inputs."""
    if S.PRECISION == "ieee":
        b_xy = product(b_x.to(S.DOT), b_y.to(S.DOT), "ieee")
    else:
        b_xy = tl.dot(b_x.to(S.DOT), b_y.to(S.DOT), input_precision=S.PRECISION)
    return b_xy


@triton.jit
def _add_dot(b_x, b_y, b_sum, S: tl.constexpr):
    """sum + x·y."""
    if S.PRECISION == "ieee":
        b_sum += product(b_x.to(S.DOT), b_y.to(S.DOT), "ieee")
    else:
        b_sum = tl.dot(b_x.to(S.DOT), b_y.to(S.DOT), b_sum, input_precision=S.PRECISION)
    return b_sum


@triton.jit
def _dot_halves(b_x, b_high, b_low, b_sum, S: tl.constexpr):
    """sum + x·y, with y as `halves` returns it."""
    if tl.bfloat16 == S.DOT:
        b_x = b_x.to(tl.bfloat16)
        b_sum = tl.dot(b_x, b_low, b_sum)
        b_sum = tl.dot(b_x, b_high, b_sum)
    else:
        b_sum = _add_dot(b_x, b_high, b_sum, S)
    return b_sum


@triton.jit
def _program(i_p, chunks, HEADS: tl.constexpr):
    """Head, chunk and batch index of program i_p."""
    return i_p % HEADS, (i_p // HEADS) % chunks, (i_p // HEADS // chunks).to(tl.int64)


@triton.jit
def _left(T, i_0, S: tl.constexpr):
    """Tokens from i_0 on, or as many as a chunk has."""
    rows = T - i_0
    if S.FULL:
        rows = tl.full((), S.C, tl.int32)
    return rows


@triton.jit
def _load_tile(p_x, stride, rows, i_d, S: tl.constexpr):
    """The i_d-th BK of D channels (C, BK), at p_x; zeros where there are none."""
    return load_rows(p_x, stride, rows, S.D, S.C, S.BK, i_d, S.BD // S.BK)


@triton.jit
def _store_tile(p_x, stride, rows, b_x, i_d, S: tl.constexpr):
    """Store what `_load_tile` loads."""
    store_rows(p_x, stride, rows, b_x, S.D, S.C, S.BK, i_d, S.BD // S.BK)


@triton.jit
def _load_decay(p_decay, stride, rows, i_d, S: tl.constexpr):
    """log₂ α (C, BK) as `halves`."""
    return halves(tl.maximum(_load_tile(p_decay, stride, rows, i_d, S), UNDERFLOW) * LOG2E, S)


@triton.jit
def _decay(m_s, b_high, b_low, S: tl.constexpr):
    """α of the tokens that m_s (C, C) selects for each row, multiplied: (C, BK)."""
    return exp2(_dot_halves(tl.where(m_s, 1.0, 0.0), b_high, b_low, zeros(S.C, S.BK), S))


@triton.jit
def _from_middle(b_g, b_like, S: tl.constexpr):
    """log₂ of what each token keeps since the middle of the chunk (C, BK), positive before it. b_like: (C, C) in the
    layout of products, in which 0/1 matrices need no shared memory.
    """
    i_t, i_s = tl.arange(0, S.C)[:, None], tl.arange(0, S.C)[None, :]
    MIDDLE: tl.constexpr = S.C // 2
    b_m = tl.where((i_s >= MIDDLE) & (i_s <= i_t), 1.0, tl.where((i_s < MIDDLE) & (i_s > i_t), -1.0, 0.0))
    b_high, b_low = halves(b_g, S)
    return _dot_halves(same_layout(b_m, b_like), b_high, b_low, zeros(S.C, S.BK), S)


@triton.jit
def _store_factors(p_factors, i_y, c, b_read, b_kept, b_written, S: tl.constexpr):
    """Store what `_load_factors` loads, for BK channels from c on."""
    p_factors += i_y * (3 * S.BD) + c + tl.arange(0, S.BK)
    tl.store(p_factors, b_read)
    tl.store(p_factors + S.BD, b_kept)
    tl.store(p_factors + 2 * S.BD, b_written)


@triton.jit
def _load_factors(p_factors, i_y, i_d, S: tl.constexpr):
    """Factors (BS,) with which chunk i_y reads the state, keeps what it reads, and passes on what it keeps and adds."""
    p_factors += i_y * (3 * S.BD) + i_d * S.BS + tl.arange(0, S.BS)
    return tl.load(p_factors), tl.load(p_factors + S.BD), tl.load(p_factors + 2 * S.BD)


@triton.jit
def _between(i_t, level):
    """The tokens between a token and the middle of its block of 2 · 2^level tokens."""
    i_middle = ((i_t >> level) | 1) << level  # the first one of the second half
    m_after = i_t[None, :] >= tl.minimum(i_t + 1, i_middle)[:, None]
    return m_after & (i_t[None, :] < tl.maximum(i_t + 1, i_middle)[:, None])


@triton.jit
def _pairs(i_t, level):
    """Rows in the second half of a block of 2 · 2^level tokens and columns in its first half: numbers whose binary
    digits differ first at this level.
    """
    i_half = i_t >> level
    return (i_half[:, None] == (i_half | 1)[None, :]) & (i_half[None, :] % 2 == 0)


@triton.jit
def _square(i_x, S: tl.constexpr):
    """Offsets of matrix i_x of a stack of (C, C)."""
    i_t = tl.arange(0, S.C)
    return tl.cast(i_x, tl.int64) * (S.C * S.C) + i_t[:, None] * S.C + i_t[None, :]


@triton.jit
def _load_inverse(p_x, i_x, TRANSPOSED: tl.constexpr, S: tl.constexpr):
    """The halves of what `store_inverse` stores, or of its transpose; the diagonal is 1."""
    b_t = tl.load(p_x + _square(i_x, S))
    b_other = tl.trans(b_t)
    if TRANSPOSED:
        b_t, b_other = b_other, b_t
    if tl.bfloat16 == S.DOT:
        i_t = tl.arange(0, S.C)
        m_t = i_t[:, None] < i_t[None, :] if TRANSPOSED else i_t[:, None] > i_t[None, :]
        b_other = tl.where(m_t, b_other, 0.0)
        b_t = tl.where(m_t | (i_t[:, None] == i_t[None, :]), b_t, 0.0)
    return b_t, b_other


@triton.jit
def _mild(p_strong, i_y):
    """Whether chunk i_y is not marked; False without marks."""
    mild = False
    if p_strong is not None:
        mild = tl.load(p_strong + i_y) == 0
    return mild


@triton.jit
def _load_beta(p_beta, beta, i_b, i_0, i_h, rows, S: tl.constexpr):
    """β (C,); 0 beyond the last token."""
    if S.SCALED:
        return load_column(token_pointer(p_beta, beta, i_b, i_0, i_h), beta.t, rows, S.C, 0.0)
    return tl.where(tl.arange(0, S.C) < rows, 1.0, 0.0)


@triton.jit
def _runs(p_x, stride, rows, i_d, S: tl.constexpr):
    """Pointers and mask of BK channels of a chunk as (C / RUN, RUN, BK): a thread has all tokens of a run, and sums
    over them need no other thread.
    """
    i_t = (tl.arange(0, S.C // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :])[:, :, None]
    i_c = tl.arange(0, S.BK)[None, None, :]
    m_x = i_t < rows
    if S.D < S.BD:
        m_x = m_x & (i_c < S.D - i_d * S.BK)
    return p_x + i_t * stride + i_c, m_x


@triton.jit
def _load_runs(p_x, stride, rows, i_d, S: tl.constexpr):
    p_x, m_x = _runs(p_x, stride, rows, i_d, S)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def _store_runs(p_x, stride, rows, b_x, i_d, S: tl.constexpr):
    p_x, m_x = _runs(p_x, stride, rows, i_d, S)
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def _tokens(b_x, S: tl.constexpr):
    """Runs (C / RUN, RUN, BK) as tokens (C, BK)."""
    return tl.reshape(b_x, (S.C, S.BK))


@triton.jit
def _write(p_v, p_beta, p_w, p_u, b_t, b_t_low, i_b, i_0, i_h, T, v, beta, S: tl.constexpr):
    """−W in place of k_in, and U₀, of one chunk. b_t, b_t_low: T as `halves` returns it."""
    rows, i_row = _left(T, i_0, S), (i_b * T + i_0) * S.HKV + i_h
    b_beta = _load_beta(p_beta, beta, i_b, i_0, i_h, rows, S)[:, None]
    for i_d in range(S.BD // S.BK):
        p_row = p_w + i_row * S.D + i_d * S.BK
        b_k = _load_tile(p_row, S.HKV * S.D, rows, i_d, S)
        b_high, b_low = halves(b_k * -b_beta, S)
        b_w = halves_dot(b_t, b_t_low, b_high, b_low, zeros(S.C, S.BK), S)
        _store_tile(p_row, S.HKV * S.D, rows, b_w, i_d, S)
    for i_e in range(S.TILES):
        b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_h, i_e * S.BE), v.t, rows, S.E, S.C, S.BE, i_e)
        b_high, b_low = halves(b_v * b_beta, S)
        b_u = halves_dot(b_t, b_t_low, b_high, b_low, zeros(S.C, S.BE), S)
        store_rows(p_u + i_row * S.E + i_e * S.BE, S.HKV * S.E, rows, b_u, S.E, S.C, S.BE, i_e)


@triton.jit
def _write_mild(p_v, p_beta, p_w, p_u, b_t, i_b, i_0, i_h, T, v, beta, S: tl.constexpr, STAGES: tl.constexpr):
    """The same with single bfloat16 numbers: β belongs to the columns of T, and keys and values enter products as they
    are, in tiles of one loop, which is pipelined.
    """
    TILES: tl.constexpr = S.BD // S.BK
    rows, i_row = _left(T, i_0, S), (i_b * T + i_0) * S.HKV + i_h
    b_t = (b_t * _load_beta(p_beta, beta, i_b, i_0, i_h, rows, S)[None, :]).to(S.DOT)
    p_v = token_pointer(p_v, v, i_b, i_0, i_h)
    p_w += i_row * S.D
    p_u += i_row * S.E
    i_t, i_c = tl.arange(0, S.C)[:, None], tl.arange(0, S.BK)[None, :]
    for i in tl.range(TILES + S.TILES, num_stages=STAGES):
        key = i < TILES
        c = tl.where(key, i, i - TILES) * S.BK
        m_x = i_t < rows
        if S.D < S.BD or S.E % S.BE != 0:
            m_x = m_x & (i_c < tl.where(key, S.D, S.E) - c)
        p_x = tl.where(key, p_w, p_v) + c + i_t * tl.where(key, S.HKV * S.D, v.t) + i_c
        b_x = tl.dot(b_t, tl.load(p_x, mask=m_x, other=0.0))
        b_x = tl.where(key, -b_x, b_x).to(S.DOT)
        tl.store(tl.where(key, p_w, p_u) + c + i_t * tl.where(key, S.HKV * S.D, S.HKV * S.E) + i_c, b_x, mask=m_x)


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_channel_mild_rows_kernel(
    p_q, p_k, p_v, p_decay, p_beta, p_q_in, p_w, p_k_out, p_u, p_factors, p_pair, p_inverse, p_strong, T, chunks,
    scale, q, k, v, decay, beta, S: tl.constexpr, BACKWARD: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """What a chunk does not take from the state, for mild gates: q_in, k_out and, with the delta rule, −W and U₀.

    The forward pass also stores factors, A^qk, T and marks of chunks with other gates or nearly parallel keys, which
    the backward pass takes. One program per query head; the first of a group computes what belongs to its key head.
    """
    i_h, i_c, i_b = _program(tl.program_id(0), chunks, S.H)
    i_kv, i_0 = i_h // (S.H // S.HKV), i_c * S.C
    i_y = (i_b * S.HKV + i_kv) * chunks + i_c
    if BACKWARD:
        if not _mild(p_strong, i_y):
            return
    own = i_h % (S.H // S.HKV) == 0
    rows = _left(T, i_0, S)
    i_t, i_r = tl.arange(0, S.C), tl.arange(0, S.C // RUN)
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_h), token_pointer(p_k, k, i_b, i_0, i_kv)
    p_decay = token_pointer(p_decay, decay, i_b, i_0, i_kv)
    p_q_in += ((i_b * T + i_0) * S.H + i_h) * S.D
    i_row = ((i_b * T + i_0) * S.HKV + i_kv) * S.D
    b_pair, b_l = zeros(S.C, S.C), zeros(S.C, S.C)
    b_least, b_largest = zeros(S.BK), zeros(S.C // RUN, S.BK)
    for i_d in range(S.BD // S.BK):
        c = i_d * S.BK
        b_g = _load_runs(p_decay + c, decay.t, rows, i_d, S)
        if not BACKWARD:
            b_g = tl.maximum(b_g, UNDERFLOW)
        b_g *= LOG2E
        b_total = tl.sum(b_g, 1)
        m_first = (i_r < S.C // RUN // 2)[:, None]
        b_first = tl.sum(tl.where(m_first, b_total, 0.0), 0)
        b_x = tl.cumsum(b_g, 1) + (tl.cumsum(b_total, 0) - b_total - b_first[None, :])[:, None, :]
        if not BACKWARD:
            # From −RANGE to RANGE: what is beyond is not used.
            b_x = tl.minimum(tl.maximum(b_x, -RANGE), RANGE)
            b_second = tl.sum(tl.where(m_first, 0.0, b_total), 0)
            b_least = tl.minimum(b_least, tl.minimum(b_first, b_second))
            if own:
                b_one = tl.full((S.BK,), 1.0, tl.float32)
                _store_factors(p_factors, i_y, c, exp2(b_first), b_one, exp2(b_second), S)
        b_k = _load_runs(p_k + c, k.t, rows, i_d, S)
        b_column = b_k * exp2(-b_x)
        b_x = exp2(b_x)
        b_row = b_k * b_x
        b_q = _load_runs(p_q + c, q.t, rows, i_d, S) * (b_x * scale)
        if not BACKWARD:
            b_large = tl.maximum(tl.abs(b_column), tl.abs(b_q))
            if S.DELTA:
                b_large = tl.maximum(b_large, tl.abs(b_row))
            # The mark is that of all query heads of the group.
            if S.H > S.HKV:
                for g in range(1, tl.where(own, S.H // S.HKV, 1)):
                    b_large = tl.maximum(
                        b_large, tl.abs(_load_runs(p_q + g * q.h + c, q.t, rows, i_d, S) * (b_x * scale))
                    )
            b_largest = tl.maximum(b_largest, tl.max(b_large, 1))
        b_column, b_row, b_q = b_column.to(S.DOT), b_row.to(S.DOT), b_q.to(S.DOT)
        _store_runs(p_q_in + c, S.H * S.D, rows, b_q, i_d, S)
        if own:
            _store_runs(p_k_out + i_row + c, S.HKV * S.D, rows, b_column, i_d, S)
            if S.DELTA:
                _store_runs(p_w + i_row + c, S.HKV * S.D, rows, b_row, i_d, S)
        if not BACKWARD:
            b_column = tl.trans(_tokens(b_column, S))
            b_pair = _add_dot(_tokens(b_q, S), b_column, b_pair, S)
            if S.DELTA:
                b_l = _add_dot(_tokens(b_row, S), b_column, b_l, S)
    if BACKWARD:
        if S.DELTA:
            if own:
                tl.debug_barrier()
                b_t = tl.load(p_inverse + _square(i_y, S))
                _write_mild(p_v, p_beta, p_w, p_u, b_t, i_b, i_0, i_kv, T, v, beta, S, STAGES)
    else:
        b_pair = tl.where(i_t[:, None] >= i_t[None, :], b_pair, 0.0)
        p_pair += _square((i_b * S.H + i_h) * chunks + i_c, S)
        tl.store(p_pair, b_pair.to(p_pair.dtype.element_ty))
        if own:
            strong = (tl.min(b_least) <= -RANGE) | (tl.max(b_largest) >= LARGE)
            if S.DELTA:
                b_l = tl.where(i_t[:, None] > i_t[None, :], b_l, 0.0)
                b_l *= _load_beta(p_beta, beta, i_b, i_0, i_kv, rows, S)[:, None]
                strong = strong | (tl.max(tl.sum(b_l * b_l, 1)) > MILD)
                if not strong:
                    b_t = triangular_inverse(b_l, S, False, 8)
                    tl.store(p_inverse + _square(i_y, S), b_t.to(S.DOT))
                    tl.debug_barrier()
                    _write_mild(p_v, p_beta, p_w, p_u, b_t, i_b, i_0, i_kv, T, v, beta, S, STAGES)
            tl.store(p_strong + i_y, strong.to(tl.int32))


@triton.jit
def _marked(p_strong, i_p, programs, chunks, S: tl.constexpr):
    """Whether program i_p of `gated_channel_mild_rows_kernel` left its chunk to the kernels for any gates; True
    without marks. i_p: One or several.
    """
    marked = i_p < programs
    if p_strong is not None:
        i_h, i_c, i_b = _program(i_p, chunks, S.H)
        i_y = (i_b * S.HKV + i_h // (S.H // S.HKV)) * chunks + i_c
        marked = tl.load(p_strong + i_y, mask=marked, other=0) != 0
    return marked


@triton.jit(do_not_specialize=["T", "chunks", "scale", "programs"])
def gated_channel_rows_kernel(
    p_q, p_k, p_v, p_decay, p_beta, p_q_in, p_w, p_k_out, p_u, p_factors, p_pair, p_inverse, p_strong, T, chunks,
    scale, programs, q, k, v, decay, beta, S: tl.constexpr, BACKWARD: tl.constexpr, MARKS: tl.constexpr
):  # fmt: skip
    """The same for any gates: for the marked ones of MARKS chunks and heads, or without marks for all."""
    i_p = tl.program_id(0) * MARKS
    if tl.max(_marked(p_strong, i_p + tl.arange(0, MARKS), programs, chunks, S).to(tl.int32)) > 0:
        for i in range(MARKS):
            if _marked(p_strong, i_p + i, programs, chunks, S):
                _rows(
                    p_q, p_k, p_v, p_decay, p_beta, p_q_in, p_w, p_k_out, p_u, p_factors, p_pair, p_inverse, i_p + i,
                    T, chunks, scale, q, k, v, decay, beta, S, BACKWARD
                )  # fmt: skip


@triton.jit
def _rows(
    p_q, p_k, p_v, p_decay, p_beta, p_q_in, p_w, p_k_out, p_u, p_factors, p_pair, p_inverse, i_p, T, chunks, scale,
    q, k, v, decay, beta, S: tl.constexpr, BACKWARD: tl.constexpr
):  # fmt: skip
    i_h, i_c, i_b = _program(i_p, chunks, S.H)
    i_kv, i_0 = i_h // (S.H // S.HKV), i_c * S.C
    i_y = (i_b * S.HKV + i_kv) * chunks + i_c
    own = i_h % (S.H // S.HKV) == 0
    rows = _left(T, i_0, S)
    i_t = tl.arange(0, S.C)
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_h), token_pointer(p_k, k, i_b, i_0, i_kv)
    p_decay = token_pointer(p_decay, decay, i_b, i_0, i_kv)
    p_q_in += ((i_b * T + i_0) * S.H + i_h) * S.D
    i_row = ((i_b * T + i_0) * S.HKV + i_kv) * S.D
    b_pair, b_l, b_own = zeros(S.C, S.C), zeros(S.C, S.C), zeros(S.C)
    for i_d in range(S.BD // S.BK):
        c = i_d * S.BK
        b_q = _load_tile(p_q + c, q.t, rows, i_d, S)
        b_k = _load_tile(p_k + c, k.t, rows, i_d, S)
        b_high, b_low = _load_decay(p_decay + c, decay.t, rows, i_d, S)
        b_own += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        b_start = _decay(i_t[None, :] <= i_t[:, None], b_high, b_low, S)
        _store_tile(p_q_in + c, S.H * S.D, rows, b_q * b_start * scale, i_d, S)
        if own:
            b_end = _decay(i_t[None, :] > i_t[:, None], b_high, b_low, S)
            _store_tile(p_k_out + i_row + c, S.HKV * S.D, rows, b_k * b_end, i_d, S)
            if S.DELTA:
                _store_tile(p_w + i_row + c, S.HKV * S.D, rows, b_k * b_start, i_d, S)
            if not BACKWARD:
                b_last = tl.sum(tl.where((i_t == S.C - 1)[:, None], b_start, 0.0), 0)
                b_one = tl.full((S.BK,), 1.0, tl.float32)
                _store_factors(p_factors, i_y, c, b_one, b_last, b_one, S)
        if not BACKWARD:
            for level in range(S.LEVELS):
                b_high, b_low = _load_decay(p_decay + c, decay.t, rows, i_d, S)
                b_q = _load_tile(p_q + c, q.t, rows, i_d, S)
                b_k = _load_tile(p_k + c, k.t, rows, i_d, S)
                b_x = _decay(_between(i_t, level), b_high, b_low, S)
                b_column = (b_k * b_x).to(S.DOT)
                m_pairs = _pairs(i_t, level)
                b_pair += tl.where(m_pairs, _dot(b_q * b_x, tl.trans(b_column), S), 0.0)
                if S.DELTA:
                    b_l += tl.where(m_pairs, _dot(b_column, tl.trans(b_column), S), 0.0)
    if not BACKWARD:
        b_pair = tl.where(i_t[:, None] == i_t[None, :], b_own[:, None], b_pair) * scale
        p_pair += _square((i_b * S.H + i_h) * chunks + i_c, S)
        tl.store(p_pair, b_pair.to(p_pair.dtype.element_ty))
    if S.DELTA:
        if own:
            if BACKWARD:
                b_t, b_t_low = _load_inverse(p_inverse, i_y, False, S)
            else:
                b_l *= _load_beta(p_beta, beta, i_b, i_0, i_kv, rows, S)[:, None]
                b_t = triangular_inverse(b_l, S)
                store_inverse(p_inverse, i_y, b_t, S)
                b_t, b_t_low = halves(b_t, S)
            tl.debug_barrier()
            _write(p_v, p_beta, p_w, p_u, b_t, b_t_low, i_b, i_0, i_kv, T, v, beta, S)


@triton.jit
def _read_back(p_pair, p_d_out, d, i_b, i_0, i_c, i_h, i_e, T, chunks, S: tl.constexpr):
    """A^qkᵀ do (C, BE), added up over the query heads of key head i_h."""
    GROUP: tl.constexpr = S.H // S.HKV
    b_sum = zeros(S.C, S.BE)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        p_d = token_pointer(p_d_out, d, i_b, i_0, i_q, i_e * S.BE)
        b_d = load_rows(p_d, d.t, _left(T, i_0, S), S.E, S.C, S.BE, i_e)
        b_pair = tl.load(p_pair + _square((i_b * S.H + i_q) * chunks + i_c, S))
        b_sum = _add_dot(tl.trans(b_pair), b_d, b_sum, S)
    return b_sum


@triton.jit
def _tile(i_x, i_d, i_e, ROWS: tl.constexpr, S: tl.constexpr):
    """Offsets of the i_d-th ROWS channels and values i_e (BE) of matrix i_x of a stack of (BD, TILES · BE)."""
    COLUMNS: tl.constexpr = S.BE * S.TILES
    i_k, i_c = tl.arange(0, ROWS), tl.arange(0, S.BE)
    i_x = tl.cast(i_x, tl.int64) * (S.BD * COLUMNS) + i_d * (ROWS * COLUMNS) + i_e * S.BE
    return i_x + i_k[:, None] * COLUMNS + i_c[None, :]


@triton.jit
def _given_tile(i_x, i_d, i_e, S: tl.constexpr):
    """Offsets and mask of tile (i_d, i_e) of state i_x of (B, Hkv, D, E)."""
    i_s, i_c = i_d * S.BS + tl.arange(0, S.BS), i_e * S.BE + tl.arange(0, S.BE)
    return i_x * (S.D * S.E) + i_s[:, None] * S.E + i_c[None, :], (i_s < S.D)[:, None] & (i_c < S.E)[None, :]


@triton.jit
def _load_state(p_state, i_x, i_d, i_e, S: tl.constexpr):
    """A tile of a given state; zeros without one."""
    b_s = zeros(S.BS, S.BE)
    if p_state is not None:
        i_tile, m_tile = _given_tile(i_x, i_d, i_e, S)
        b_s = tl.load(p_state + i_tile, mask=m_tile, other=0.0)
    return b_s


@triton.jit
def _load_channels(p_x, i_row, heads, rows, i_d, S: tl.constexpr):
    """Rows (C, BS) of a chunk that begins in row i_row of a contiguous tensor (B, T, heads, D)."""
    return load_rows(p_x + i_row * S.D + i_d * S.BS, heads * S.D, rows, S.D, S.C, S.BS, i_d, S.BD // S.BS)


@triton.jit
def _states(
    p_v, p_beta, p_w, p_k_out, p_factors, p_state, p_states, p_u, i_x, i_d, i_e, T, chunks,
    v, beta, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Write the states before all chunks of sequence i_x and, with the delta rule, u in place of U₀."""
    i_b, i_h = i_x // S.HKV, i_x % S.HKV
    b_read, _, _ = _load_factors(p_factors, i_x * chunks, i_d, S)
    b_s = _load_state(p_state, i_x, i_d, i_e, S) * b_read[:, None]
    for i_c in tl.range(chunks, num_stages=STAGES):
        i_0, i_y = i_c * S.C, i_x * chunks + i_c
        rows, i_row = _left(T, i_0, S), (i_b * T + i_0) * S.HKV + i_h
        i_next = tl.minimum(i_c + 1, chunks - 1)
        _, b_kept, b_written = _load_factors(p_factors, i_y, i_d, S)
        b_read, _, _ = _load_factors(p_factors, i_x * chunks + i_next, i_d, S)
        b_u = _load_writes(p_u, p_v, p_beta, v, beta, i_b, i_0, i_h, i_e, T, S)
        b_out = _load_channels(p_k_out, i_row, S.HKV, rows, i_d, S)
        p_tile = p_states + _tile(i_y, i_d, i_e, S.BS, S)
        tl.store(p_tile, b_s.to(p_tile.dtype.element_ty))
        if S.DELTA:
            b_w = _load_channels(p_w, i_row, S.HKV, rows, i_d, S)
            b_u = _add_dot(b_w, b_s, b_u.to(tl.float32), S)
            store_rows(p_u + i_row * S.E + i_e * S.BE, S.HKV * S.E, rows, b_u, S.E, S.C, S.BE, i_e)
        b_s = _add_dot(tl.trans(b_out), b_u, b_s * b_kept[:, None], S) * (b_written * b_read)[:, None]


@triton.jit
def _load_written(p_u, i_b, i_0, i_h, i_e, T, S: tl.constexpr):
    """Rows (C, BE) of a chunk and a tile of values of a contiguous tensor (B, T, Hkv, E)."""
    p_u += ((i_b * T + i_0) * S.HKV + i_h) * S.E + i_e * S.BE
    return load_rows(p_u, S.HKV * S.E, _left(T, i_0, S), S.E, S.C, S.BE, i_e)


@triton.jit
def _load_writes(p_u, p_v, p_beta, v, beta, i_b, i_0, i_h, i_e, T, S: tl.constexpr):
    """u (C, BE) of a chunk."""
    rows = _left(T, i_0, S)
    if S.DELTA:
        b_u = _load_written(p_u, i_b, i_0, i_h, i_e, T, S)
    else:
        b_u = load_rows(token_pointer(p_v, v, i_b, i_0, i_h, i_e * S.BE), v.t, rows, S.E, S.C, S.BE, i_e)
        if S.SCALED:
            b_beta = _load_beta(p_beta, beta, i_b, i_0, i_h, rows, S)
            b_u = (b_u.to(tl.float32) * b_beta[:, None]).to(S.DOT)
    return b_u


@triton.jit(do_not_specialize=["T", "chunks"])
def gated_channel_forward_kernel(
    p_v, p_beta, p_q_in, p_w, p_k_out, p_factors, p_pair, p_state, p_u, p_out, p_after, T, chunks,
    v, beta, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Outputs of one query head and tile of values, and the state after its last chunk; p_u: U₀."""
    GROUP: tl.constexpr = S.H // S.HKV
    pid, i_e = tl.program_id(0), tl.program_id(1)
    i_b, i_h, i_kv = (pid // S.H).to(tl.int64), pid % S.H, pid % S.H // GROUP
    i_x = i_b * S.HKV + i_kv
    # What no product takes directly is loaded one chunk ahead.
    b_read, b_kept, b_written = _load_factors(p_factors, i_x * chunks, 0, S)
    b_s = _load_state(p_state, i_x, 0, i_e, S) * b_read[:, None]
    for i_c in tl.range(chunks, num_stages=STAGES):
        i_0 = i_c * S.C
        rows, i_row, i_token = _left(T, i_0, S), (i_b * T + i_0) * S.HKV + i_kv, (i_b * T + i_0) * S.H + i_h
        i_next = tl.minimum(i_c + 1, chunks - 1)
        _, b_kept, b_written = _load_factors(p_factors, i_x * chunks + i_c, 0, S)
        b_read, _, _ = _load_factors(p_factors, i_x * chunks + i_next, 0, S)
        b_written *= tl.where(i_next > i_c, b_read, 1.0)
        b_u = _load_writes(p_u, p_v, p_beta, v, beta, i_b, i_0, i_kv, i_e, T, S)
        b_k = _load_channels(p_k_out, i_row, S.HKV, rows, 0, S)
        b_q = _load_channels(p_q_in, i_token, S.H, rows, 0, S)
        b_pair = tl.load(p_pair + _square((i_b * S.H + i_h) * chunks + i_c, S))
        b_out = _dot(b_q, b_s, S)
        if S.DELTA:
            b_w = _load_channels(p_w, i_row, S.HKV, rows, 0, S)
            b_u = _add_dot(b_w, b_s, b_u.to(tl.float32), S)
        b_u = b_u.to(S.DOT)
        b_out = _add_dot(b_pair, b_u, b_out, S)
        b_s = _add_dot(tl.trans(b_k), b_u, b_s * b_kept[:, None], S) * b_written[:, None]
        store_rows(p_out + i_token * S.E + i_e * S.BE, S.H * S.E, rows, b_out, S.E, S.C, S.BE, i_e)
    if i_h % GROUP == 0:
        i_tile, m_tile = _given_tile(i_x, 0, i_e, S)
        tl.store(p_after + i_tile, b_s, mask=m_tile)


@triton.jit
def _not_zero(b_beta):
    """β, in magnitude at least LEAST_BETA."""
    return tl.where(tl.abs(b_beta) < LEAST_BETA, LEAST_BETA, b_beta)


@triton.jit
def _state_gradients(
    p_d_out, p_q_in, p_w, p_k_out, p_factors, p_pair, p_d_after, p_d_states, p_z, p_d_state, i_x, i_d, i_e, T, chunks,
    d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Write the gradients of the states after all chunks of sequence i_x and, with the delta rule, du; the
    gradient of the state before them if asked.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h = i_x // S.HKV, i_x % S.HKV
    _, _, b_written = _load_factors(p_factors, i_x * chunks + chunks - 1, i_d, S)
    b_s = _load_state(p_d_after, i_x, i_d, i_e, S) * b_written[:, None]
    for i in tl.range(chunks, num_stages=STAGES):
        i_c = chunks - 1 - i
        i_0, i_y = i_c * S.C, i_x * chunks + i_c
        rows, i_row = _left(T, i_0, S), (i_b * T + i_0) * S.HKV + i_h
        i_next = tl.maximum(i_c - 1, 0)
        b_read, b_kept, _ = _load_factors(p_factors, i_y, i_d, S)
        _, _, b_written = _load_factors(p_factors, i_x * chunks + i_next, i_d, S)
        b_read *= tl.where(i_next < i_c, b_written, 1.0)
        p_tile = p_d_states + _tile(i_y, i_d, i_e, S.BS, S)
        tl.store(p_tile, b_s.to(p_tile.dtype.element_ty))
        if S.DELTA:
            b_out = _load_channels(p_k_out, i_row, S.HKV, rows, i_d, S)
            b_z = _dot(b_out, b_s, S)
        b_s *= b_kept[:, None]
        for g in range(GROUP):
            i_q = i_h * GROUP + g
            b_d = load_rows(token_pointer(p_d_out, d, i_b, i_0, i_q, i_e * S.BE), d.t, rows, S.E, S.C, S.BE, i_e)
            b_q = _load_channels(p_q_in, (i_b * T + i_0) * S.H + i_q, S.H, rows, i_d, S)
            b_s = _add_dot(tl.trans(b_q), b_d, b_s, S)
            if S.DELTA:
                b_pair = tl.load(p_pair + _square((i_b * S.H + i_q) * chunks + i_c, S))
                b_z = _add_dot(tl.trans(b_pair), b_d, b_z, S)
        if S.DELTA:
            store_rows(p_z + i_row * S.E + i_e * S.BE, S.HKV * S.E, rows, b_z, S.E, S.C, S.BE, i_e)
            b_w = _load_channels(p_w, i_row, S.HKV, rows, i_d, S)
            b_s = _add_dot(tl.trans(b_w), b_z, b_s, S)
        b_s *= b_read[:, None]
    if p_d_state is not None:
        i_tile, m_tile = _given_tile(i_x, i_d, i_e, S)
        tl.store(p_d_state + i_tile, b_s, mask=m_tile)


@triton.jit(do_not_specialize=["T", "chunks"])
def gated_channel_backward_states_kernel(
    p_v, p_beta, p_d_out, p_q_in, p_w, p_k_out, p_factors, p_pair, p_state, p_d_after, p_states, p_u, p_d_states,
    p_z, p_d_state, T, chunks, v, beta, d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Half of the programs compute the states of a sequence and a tile, the others their gradients."""
    first = tl.num_programs(0) // 2
    i_x, i_e, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if i_x < first:
        _state_gradients(
            p_d_out, p_q_in, p_w, p_k_out, p_factors, p_pair, p_d_after, p_d_states, p_z, p_d_state, i_x, i_d, i_e,
            T, chunks, d, S, STAGES
        )  # fmt: skip
    else:
        _states(
            p_v, p_beta, p_w, p_k_out, p_factors, p_state, p_states, p_u, i_x - first, i_d, i_e, T, chunks,
            v, beta, S, STAGES
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_channel_backward_pairs_kernel(
    p_v, p_beta, p_d_out, p_k_out, p_d_states, p_u, p_z, p_pair, p_inverse, p_d_pair, p_d_l, p_d_beta, T, chunks, scale,
    v, beta, d, S: tl.constexpr
):  # fmt: skip
    """z = β y, which is dv, for one chunk, and y · v; the gradients of A^qk and, with the delta rule, that of A^kk as
    part of L.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_h, i_c, i_b = _program(tl.program_id(0), chunks, S.HKV)
    i_0, i_y = i_c * S.C, (i_b * S.HKV + i_h) * chunks + i_c
    rows, i_row = _left(T, i_0, S), (i_b * T + i_0) * S.HKV + i_h
    b_beta = _load_beta(p_beta, beta, i_b, i_0, i_h, rows, S)
    b_l, b_d_beta = zeros(S.C, S.C), zeros(S.C)
    if S.DELTA:
        b_t, b_t_low = _load_inverse(p_inverse, i_y, True, S)
        b_beta = _not_zero(b_beta)
    for i_e in range(S.TILES):
        if S.DELTA:
            b_z = _load_written(p_z, i_b, i_0, i_h, i_e, T, S)
            b_y = halves_dot(b_t, b_t_low, b_z, None, zeros(S.C, S.BE), S)
        else:
            b_out = load_rows(p_k_out + i_row * S.D, S.HKV * S.D, rows, S.D, S.C, S.BD)
            b_y = _read_back(p_pair, p_d_out, d, i_b, i_0, i_c, i_h, i_e, T, chunks, S)
            b_y = _add_dot(b_out, tl.load(p_d_states + _tile(i_y, 0, i_e, S.BD, S)), b_y, S)
        b_z = b_y * b_beta[:, None]
        store_rows(p_z + i_row * S.E + i_e * S.BE, S.HKV * S.E, rows, b_z, S.E, S.C, S.BE, i_e)
        if S.SCALED:
            b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_h, i_e * S.BE), v.t, rows, S.E, S.C, S.BE, i_e)
            b_d_beta += tl.sum(b_y * b_v.to(tl.float32), 1)
        if S.DELTA:
            b_l = _add_dot(b_z, tl.trans(_load_written(p_u, i_b, i_0, i_h, i_e, T, S)), b_l, S)
    i_t = tl.arange(0, S.C)
    if S.SCALED:
        tl.store(p_d_beta + i_row + i_t * S.HKV, b_d_beta, mask=i_t < rows)
    if S.DELTA:
        tl.store(p_d_l + _square(i_y, S), tl.where(i_t[:, None] > i_t[None, :], -b_l, 0.0).to(S.DOT))
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        b_pair = zeros(S.C, S.C)
        for i_e in range(S.TILES):
            b_u = _load_writes(p_u, p_v, p_beta, v, beta, i_b, i_0, i_h, i_e, T, S)
            b_d = load_rows(token_pointer(p_d_out, d, i_b, i_0, i_q, i_e * S.BE), d.t, rows, S.E, S.C, S.BE, i_e)
            b_pair = _add_dot(b_d, tl.trans(b_u), b_pair, S)
        b_pair = tl.where(i_t[:, None] >= i_t[None, :], b_pair * scale, 0.0)
        tl.store(p_d_pair + _square((i_b * S.H + i_q) * chunks + i_c, S), b_pair.to(S.DOT))


@triton.jit(do_not_specialize=["T", "chunks", "scale"])
def gated_channel_mild_backward_kernel(
    p_q, p_k, p_v, p_decay, p_beta, p_d_out, p_states, p_d_states, p_u, p_z, p_d_pair, p_d_l, p_strong,
    p_d_q, p_d_k, p_d_decay, p_d_beta, T, chunks, scale, q, k, v, decay, beta, d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """dq, dk and dg of one chunk with mild gates, one query head and one tile of channels, and the tile's part of dβ.

    What comes from the key head alone is added by the first query head of a group. p_d_k, p_d_decay: (B, T, H, D).
    p_d_beta: (tiles, B, T, H).
    """
    i_h, i_c, i_b = _program(tl.program_id(0), chunks, S.H)
    i_d = tl.program_id(1)
    i_kv, i_0 = i_h // (S.H // S.HKV), i_c * S.C
    i_t, i_y = tl.arange(0, S.C), (i_b * S.HKV + i_kv) * chunks + i_c
    if not _mild(p_strong, i_y):
        return
    own = (i_h % (S.H // S.HKV) == 0).to(tl.int32)
    rows, c = _left(T, i_0, S), i_d * S.BK
    i_row = ((i_b * T + i_0) * S.H + i_h) * S.D + c
    p_decay = token_pointer(p_decay, decay, i_b, i_0, i_kv, c)
    p_d_pair += _square((i_b * S.H + i_h) * chunks + i_c, S)
    p_d_out = token_pointer(p_d_out, d, i_b, i_0, i_h)
    b_d_row, b_d_column, b_d_k_row, b_d_last = zeros(S.C, S.BK), zeros(S.C, S.BK), zeros(S.C, S.BK), zeros(S.BK)
    for i_e in tl.range(S.TILES, num_stages=STAGES):
        b_s = tl.load(p_states + _tile(i_y, i_d, i_e, S.BK, S))
        b_d_s = tl.load(p_d_states + _tile(i_y, i_d, i_e, S.BK, S))
        b_d = load_rows(p_d_out + i_e * S.BE, d.t, rows, S.E, S.C, S.BE, i_e)
        b_u = _load_writes(p_u, p_v, p_beta, v, beta, i_b, i_0, i_kv, i_e, T, S)
        b_d_row = _add_dot(b_d, tl.trans(b_s), b_d_row, S)
        b_d_column = _add_dot(b_u, tl.trans(b_d_s), b_d_column, S)
        if S.DELTA:
            b_d_k_row = _add_dot(_load_written(p_z, i_b, i_0, i_kv, i_e, T, S), tl.trans(b_s), b_d_k_row, S)
        b_d_last += tl.sum(b_s.to(tl.float32) * b_d_s.to(tl.float32), 1)
    b_p = tl.load(p_d_pair)
    b_x = _from_middle(_load_tile(p_decay, decay.t, rows, i_d, S) * LOG2E, b_d_row, S)
    b_k = _load_tile(token_pointer(p_k, k, i_b, i_0, i_kv, c), k.t, rows, i_d, S)
    b_q = _load_tile(token_pointer(p_q, q, i_b, i_0, i_h, c), q.t, rows, i_d, S)
    b_x_row, b_x_column = exp2(b_x), exp2(-b_x)
    # Rounded as in the products, so that pairs cancel in dg.
    b_row, b_column = (b_q * b_x_row).to(S.DOT), (b_k * b_x_column).to(S.DOT)

    b_sum = _add_dot(b_p, b_column, b_d_row * scale, S)
    b_d_g = b_row * b_sum
    _store_tile(p_d_q + i_row, S.H * S.D, rows, b_sum * b_x_row, i_d, S)

    b_sum = b_d_column * own
    b_d_last = b_d_last * own + tl.sum(b_column * b_sum, 0)
    b_sum = _add_dot(tl.trans(b_p), b_row, b_sum, S)
    if S.DELTA:
        b_p = tl.load(p_d_l + _square(i_y, S), mask=(i_t < own * S.C)[:, None], other=0.0)
        b_row = (b_k * b_x_row).to(S.DOT)
        b_sum = _add_dot(tl.trans(b_p), b_row, b_sum, S)
    b_d_g -= b_column * b_sum
    b_d_k = b_sum * b_x_column

    if S.DELTA:
        b_sum = _add_dot(b_p, b_column, b_d_k_row * -own, S)
        b_d_k += b_sum * b_x_row
        b_sum *= b_row
        b_d_g += b_sum
        if S.SCALED:
            i_beta = i_d.to(tl.int64) * (tl.num_programs(0) // chunks) * T + (i_b * T + i_0) * S.H + i_h + i_t * S.H
            b_beta = _not_zero(_load_beta(p_beta, beta, i_b, i_0, i_kv, rows, S))
            tl.store(p_d_beta + i_beta, tl.sum(b_sum, 1) / b_beta, mask=i_t < rows)
    _store_tile(p_d_k + i_row, S.H * S.D, rows, b_d_k, i_d, S)
    b_high, b_low = halves(b_d_g, S)
    b_m = same_layout(tl.where(i_t[None, :] >= i_t[:, None], 1.0, zeros(S.C, S.C)), b_d_g)
    b_d_g = _dot_halves(b_m, b_high, b_low, zeros(S.C, S.BK), S) + b_d_last[None, :]
    _store_tile(p_d_decay + i_row, S.H * S.D, rows, b_d_g, i_d, S)


@triton.jit(do_not_specialize=["T", "chunks", "scale", "programs"])
def gated_channel_backward_kernel(
    p_q, p_k, p_v, p_decay, p_beta, p_d_out, p_states, p_d_states, p_u, p_z, p_d_pair, p_d_l, p_strong,
    p_d_q, p_d_k, p_d_decay, p_d_beta, T, chunks, scale, programs, q, k, v, decay, beta, d,
    S: tl.constexpr, MARKS: tl.constexpr
):  # fmt: skip
    """The same for any gates: for the marked ones of MARKS chunks and heads, or without marks for all."""
    i_p = tl.program_id(0) * MARKS
    if tl.max(_marked(p_strong, i_p + tl.arange(0, MARKS), programs, chunks, S).to(tl.int32)) > 0:
        for i in range(MARKS):
            if _marked(p_strong, i_p + i, programs, chunks, S):
                _gradients(
                    p_q, p_k, p_v, p_decay, p_beta, p_d_out, p_states, p_d_states, p_u, p_z, p_d_pair, p_d_l,
                    p_d_q, p_d_k, p_d_decay, p_d_beta, i_p + i, T, chunks, scale, programs, q, k, v, decay, beta, d, S
                )  # fmt: skip


@triton.jit
def _gradients(
    p_q, p_k, p_v, p_decay, p_beta, p_d_out, p_states, p_d_states, p_u, p_z, p_d_pair, p_d_l,
    p_d_q, p_d_k, p_d_decay, p_d_beta, i_p, T, chunks, scale, programs, q, k, v, decay, beta, d, S: tl.constexpr
):  # fmt: skip
    i_h, i_c, i_b = _program(i_p, chunks, S.H)
    i_d = tl.program_id(1)
    i_kv, i_0 = i_h // (S.H // S.HKV), i_c * S.C
    i_t, i_y = tl.arange(0, S.C), (i_b * S.HKV + i_kv) * chunks + i_c
    own = (i_h % (S.H // S.HKV) == 0).to(tl.int32)
    rows = _left(T, i_0, S)
    b_d_q, b_d_row, b_d_column, b_d_last = zeros(S.C, S.BK), zeros(S.C, S.BK), zeros(S.C, S.BK), zeros(S.BK)
    for i_e in range(S.TILES):
        c = i_e * S.BE
        b_s = tl.load(p_states + _tile(i_y, i_d, i_e, S.BK, S))
        b_d_s = tl.load(p_d_states + _tile(i_y, i_d, i_e, S.BK, S))
        b_d_last += tl.sum(b_s.to(tl.float32) * b_d_s.to(tl.float32), 1)
        b_d = load_rows(token_pointer(p_d_out, d, i_b, i_0, i_h, c), d.t, rows, S.E, S.C, S.BE, i_e)
        b_d_q = _add_dot(b_d, tl.trans(b_s), b_d_q, S)
        b_u = _load_writes(p_u, p_v, p_beta, v, beta, i_b, i_0, i_kv, i_e, T, S)
        b_d_column = _add_dot(b_u, tl.trans(b_d_s), b_d_column, S)
        if S.DELTA:
            p_row = p_z + ((i_b * T + i_0) * S.HKV + i_kv) * S.E + c
            b_z = load_rows(p_row, S.HKV * S.E, rows, S.E, S.C, S.BE, i_e)
            b_d_row = _add_dot(b_z, tl.trans(b_s), b_d_row, S)
    c = i_d * S.BK
    p_q, p_k = token_pointer(p_q, q, i_b, i_0, i_h, c), token_pointer(p_k, k, i_b, i_0, i_kv, c)
    p_decay = token_pointer(p_decay, decay, i_b, i_0, i_kv, c)
    p_d_pair += _square((i_b * S.H + i_h) * chunks + i_c, S)
    p_d_l += _square(i_y, S)
    b_q = _load_tile(p_q, q.t, rows, i_d, S)
    b_k = _load_tile(p_k, k.t, rows, i_d, S)
    b_high, b_low = _load_decay(p_decay, decay.t, rows, i_d, S)
    b_start = _decay(i_t[None, :] <= i_t[:, None], b_high, b_low, S)
    b_d_last *= tl.sum(tl.where((i_t == S.C - 1)[:, None], b_start, 0.0), 0) * own
    b_d_q *= b_start * scale
    b_d_row *= b_start * -own
    b_d_column *= _decay(i_t[None, :] > i_t[:, None], b_high, b_low, S) * own
    b_d_last += tl.sum(b_k * b_d_column, 0)
    m_own = i_t[:, None] == i_t[None, :]
    b_own = tl.sum(tl.load(p_d_pair, mask=m_own, other=0.0).to(tl.float32), 1)[:, None]
    b_d_column += b_own * b_q
    b_d_q += b_own * b_k
    for level in range(S.LEVELS):
        # What is loaded again comes from the cache, and frees registers.
        b_high, b_low = _load_decay(p_decay, decay.t, rows, i_d, S)
        b_x = _decay(_between(i_t, level), b_high, b_low, S)
        b_q = _load_tile(p_q, q.t, rows, i_d, S)
        b_k = _load_tile(p_k, k.t, rows, i_d, S)
        b_column = (b_k * b_x).to(S.DOT)
        m_pairs = _pairs(i_t, level)
        b_p = tl.load(p_d_pair, mask=m_pairs, other=0.0)
        b_d_q += b_x * _dot(b_p, b_column, S)
        b_sum = _dot(tl.trans(b_p), b_q * b_x, S)
        if S.DELTA:
            b_p = tl.load(p_d_l, mask=m_pairs & (i_t < own * S.C)[:, None], other=0.0)
            b_d_row += b_x * _dot(b_p, b_column, S)
            b_sum = _add_dot(tl.trans(b_p), b_column, b_sum, S)
        b_d_column += b_x * b_sum
    b_q = _load_tile(p_q, q.t, rows, i_d, S)
    b_k = _load_tile(p_k, k.t, rows, i_d, S)
    i_row = ((i_b * T + i_0) * S.H + i_h) * S.D + c
    _store_tile(p_d_q + i_row, S.H * S.D, rows, b_d_q, i_d, S)
    b_d_g = b_q * b_d_q - b_k * b_d_column
    if S.DELTA:
        if S.SCALED:
            i_beta = i_d.to(tl.int64) * (programs // chunks) * T + (i_b * T + i_0) * S.H + i_h + i_t * S.H
            b_beta = _not_zero(_load_beta(p_beta, beta, i_b, i_0, i_kv, rows, S))
            tl.store(p_d_beta + i_beta, tl.sum(b_k * b_d_row, 1) / b_beta, mask=i_t < rows)
        b_d_g += b_k * b_d_row
        b_d_column += b_d_row
    _store_tile(p_d_k + i_row, S.H * S.D, rows, b_d_column, i_d, S)
    b_d_g += tl.where((i_t == S.C - 1)[:, None], b_d_last[None, :], 0.0)
    b_d_g = tl.cumsum(b_d_g, 0, reverse=True)
    _store_tile(p_d_decay + i_row, S.H * S.D, rows, b_d_g, i_d, S)


def forward(x: GatedInputs, problem: GatedProblem, *, zeroed: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the state after the last token, and what `backward` needs."""
    q, k, v, decay, beta, state = tensors = _dense(x)
    plan = _ChannelForward.of(tensors, problem)
    out, after = v.new_empty(plan.out_shape), q.new_empty(plan.state_shape, dtype=torch.float32)
    saved, work = plan.saved.allocate(q, zeroed=zeroed), plan.workspace.allocate(q)
    marks, factors, pair, inverse = plan.pointers(plan.saved, saved)
    u, q_in, w, k_out = plan.pointers(plan.workspace, work)
    marks = marks if plan.bf16 else None
    inputs = _, _, p_v, _, p_beta = plan.addresses(q, k, v, decay, beta)
    p_state, p_out, p_after = plan.addresses(state, out, after)
    with on_device(q):
        for rows in plan.rows:
            rows(*inputs, q_in, w, k_out, u, factors, pair, inverse, marks)
        plan.read(p_v, p_beta, q_in, w, k_out, factors, pair, p_state, u, p_out, p_after)
    return out, after, saved


def backward(saved: GatedSaved, x: GatedInputs, problem: GatedProblem) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, log_decay, beta and of the state before the first token."""
    inputs = *_dense(x), dense_rows(saved.d_out), dense(saved.d_state)
    with on_device(x.q):
        return gradients(_ChannelBackward, inputs, saved.starts, problem)


def saved_size(x: GatedInputs, problem: GatedProblem) -> int:
    """Return the number of float32 elements that `forward` saves."""
    return _saved(x.q.dtype, x.q.shape, x.k.shape, problem.delta).size


class _ChannelPlan(Plan):
    backward = False

    def __init__(self, device: int, key: Signature, problem: GatedProblem) -> None:
        super().__init__(device)
        self.tensors = dict(zip(("q", "k", "v", "decay", "beta", "state", "d"), key, strict=False))
        q, k, v = self.tensors["q"], self.tensors["k"], self.tensors["v"]
        (self.B, self.T, self.H, D), (Hkv, E), dtype = q[0], v[0][2:], q[2]
        self.group, self.heads, self.scale = self.H // Hkv, self.B * Hkv, problem.scale
        self.out_shape, self.state_shape = (self.B, self.T, self.H, E), (self.B, Hkv, D, E)
        self.bf16 = dtype == torch.bfloat16
        C, tile = _tiling(dtype)
        BD, beta = padded(D, tile), self.tensors["beta"] is not None
        sizes = self.H, Hkv, D, E, BD, tile, tile, -(-E // tile), C, C.bit_length() - 1
        dot = tl.bfloat16 if self.bf16 else tl.float32
        channels = tile if self.bf16 and not problem.delta else BD
        self.sizes = ChannelSizes(*sizes, problem.delta, beta, dot, PRECISION[dtype], channels, self.T % C == 0)
        self.chunks = -(-self.T // C)
        self.kind = torch.bfloat16 if self.bf16 else torch.float32
        # float16 does not have the range of products of decays.
        self.in_place = self.kind == dtype
        self.saved = _saved(dtype, q[0], k[0], problem.delta)
        kernels = gated_channel_mild_rows_kernel, gated_channel_rows_kernel
        # Without the delta rule three programs per multiprocessor are faster than two that load ahead.
        options = {"stages": 3} if problem.delta else {"maxnreg": 168}
        self.rows = self.by_strength(kernels, (), "q k v decay beta", BACKWARD=self.backward, **options)

    @property
    def programs(self) -> int:
        return self.B * self.H * self.chunks

    @property
    def writes_buffer(self) -> tuple[int, torch.dtype]:
        """u."""
        return self.heads * self.T * self.sizes.E if self.sizes.DELTA else 0, self.kind

    @property
    def row_buffers(self) -> list[tuple[int, torch.dtype]]:
        """q_in, k_in, k_out."""
        S = self.sizes
        return [(self.B * self.T * heads * S.D, self.kind) for heads in (self.H, S.HKV if S.DELTA else 0, S.HKV)]

    @property
    def state_buffer(self) -> tuple[int, torch.dtype]:
        S = self.sizes
        return self.heads * self.chunks * S.BD * S.BE * S.TILES, self.kind

    def by_strength(
        self, kernels: tuple[Any, Any], grid: tuple[int, ...], strided: str, *, BACKWARD: bool = False, **options: Any
    ) -> list[Launch]:
        """Create the launches for mild and for other gates; where products take float32, the second alone.

        Args:
            kernels: For mild and for any gates.
            grid: Programs along the second axis; the first is that of heads and chunks.
            strided: Tensors whose strides the kernels take.
            BACKWARD: A constant of the kernels.
            options: Of the first launch.
        """
        mild, strong = kernels
        scalars, first, marks = (self.T, self.chunks, self.scale), [], 1
        if self.bf16:
            marks = MARKED
            args = (self.programs, *grid), scalars, strided
            first.append(self.channel_launch(mild, *args, BACKWARD=BACKWARD, **options))
        args = (-(-self.programs // marks), *grid), (*scalars, self.programs), strided
        return [*first, self.channel_launch(strong, *args, BACKWARD=BACKWARD, MARKS=marks)]

    def channel_launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: tuple[Any, ...],
        strided: str,
        *,
        warps: int = 4,
        stages: int = 1,
        **options: Any,
    ) -> Launch:
        """Create a launch. strided: tensors whose strides the kernel takes."""
        given = [self.tensors.get(name) for name in strided.split()]
        strides = [Strides(0, 0, 0) if x is None else Strides.of(x) for x in given]
        constants = {"S": self.sizes, "STAGES": stages, "num_warps": warps, "num_stages": stages, **options}
        return self.launch(kernel, grid, (*scalars, *strides), constants)

    def scan(self, kernel: Any, sequences: int, strided: str) -> Launch:
        """Create a launch whose programs go through all chunks of a sequence, for one tile of the state."""
        S = self.sizes
        wide = S.BS > 128
        # bfloat16 with 8 warps is miscompiled (README.md).
        warps = 8 if wide and not self.bf16 else 4
        stages = 1 if wide or not self.bf16 else 3 if S.BS == 128 or not S.DELTA else 2
        grid, scalars = (sequences, S.TILES, S.BD // S.BS), (self.T, self.chunks)
        return self.channel_launch(kernel, grid, scalars, strided, warps=warps, stages=stages)


class _ChannelForward(_ChannelPlan):
    def __init__(self, device: int, key: Signature, problem: GatedProblem) -> None:
        super().__init__(device, key, problem)
        self.workspace = Workspace(self.writes_buffer, *self.row_buffers)
        sequences, tile = self.B * self.H, self.sizes.BE
        # Tiles of half the size where programs would leave half of the multiprocessors idle; not with heads over 128.
        halves = self.bf16 and (self.sizes.BD <= 128 or not problem.delta)
        if halves and 2 * sequences * self.sizes.TILES <= processors(device):
            tile //= 2
        self.sizes = self.sizes._replace(BS=self.sizes.BD, BE=tile, TILES=-(-self.sizes.E // tile))
        self.read = self.scan(gated_channel_forward_kernel, sequences, "v beta")


class _ChannelBackward(_ChannelPlan):
    backward = True

    def __init__(self, device: int, key: Signature, problem: GatedProblem) -> None:
        super().__init__(device, key, problem)
        S = self.sizes
        square = S.C * S.C
        self.tiles = S.BD // S.BK if S.SCALED and S.DELTA else 0
        self.workspace = Workspace(
            self.state_buffer,
            self.writes_buffer,
            self.state_buffer,
            (self.programs * square, self.kind),
            (self.heads * self.chunks * square if S.DELTA else 0, self.kind),
            (self.B * self.T * self.H * self.tiles, torch.float32),
            *([] if self.in_place else self.row_buffers),
        )
        self.states = self.scan(gated_channel_backward_states_kernel, 2 * self.heads, "v beta d")
        scalars = self.T, self.chunks, self.scale
        self.pair_gradients = self.channel_launch(
            gated_channel_backward_pairs_kernel, (self.heads * self.chunks,), scalars, "v beta d"
        )
        kernels = gated_channel_mild_backward_kernel, gated_channel_backward_kernel
        self.read = self.by_strength(kernels, (S.BD // S.BK,), "q k v decay beta d")
        programs, needed = 2 * self.heads * S.TILES * (S.BD // S.BS), 4 * self.workspace.size
        if self.group > 1:
            needed += 4 * (2 * self.B * self.T * self.H * S.D)
        # Shared memory is enough for one program with wide heads.
        resident = processors(device) * (1 if self.bf16 and S.BS > 128 else 4)
        self.rows_at_once = rows_at_once(self.B, programs, resident, needed, key[:7])

    def write_gradients(self, inputs: Sequence[Any], saved: Sequence[Any], grads: Sequence[Any]) -> None:
        """Write the gradients. saved: The buffers that the forward pass filled."""
        q, k, v, decay, beta, state, d_out, d_after = inputs
        d_q, d_k, d_v, d_decay, d_beta, d_state = grads
        marks, factors, pair, inverse = saved
        marks = marks if self.bf16 else None
        # Query heads of a group have gradients of their own for what they share, in float32 because they are added up.
        d_k_heads = buffer_like(d_k, d_q.shape, k.dtype if self.group == 1 else torch.float32)
        d_decay_heads = buffer_like(d_decay, d_q.shape, decay.dtype)
        z = buffer_like(d_v, d_v.shape, self.kind if self.sizes.DELTA else v.dtype)
        work = self.workspace.allocate(q)
        states, u, d_states, d_pair, d_l, by_channel, *rows = self.pointers(self.workspace, work)
        # What the last kernel does not read is stored where it will write gradients.
        q_in, w, k_out = rows or self.addresses(d_q, d_k_heads.view(q.dtype), d_decay_heads.view(q.dtype))
        given = _, _, p_v, _, p_beta = self.addresses(q, k, v, decay, beta)
        p_state, p_d, p_d_after, p_z, p_d_state = self.addresses(state, d_out, d_after, z, d_state)
        p_d_beta, *results = self.addresses(d_beta, d_q, d_k_heads, d_decay_heads)
        for launch in self.rows:
            launch(*given, q_in, w, k_out, u, factors, pair, inverse, marks)
        of_states = p_v, p_beta, p_d, q_in, w, k_out, factors, pair, p_state, p_d_after
        self.states(*of_states, states, u, d_states, p_z, p_d_state)
        self.pair_gradients(p_v, p_beta, p_d, k_out, d_states, u, p_z, pair, inverse, d_pair, d_l, p_d_beta)
        for read in self.read:
            read(*given, p_d, states, d_states, u, p_z, d_pair, d_l, marks, *results, by_channel)
        if self.tiles:
            by_channel = self.workspace.views(work)[5]
            d_beta += by_channel.view(self.tiles, self.B, self.T, -1, self.group).sum((0, 4))
        for grad, x in ((d_k, d_k_heads), (d_decay, d_decay_heads), (d_v, z)):
            store(grad, x, self.group if x is not z else 1)


def _tiling(dtype: torch.dtype) -> tuple[int, int]:
    """Tokens in a chunk, and channels or values in a tile."""
    return (64, 64) if dtype == torch.bfloat16 else (32, 16)


def _saved(dtype: torch.dtype, q: Any, k: Any, delta: bool) -> Workspace:
    """Marks of strong gates, factors, A^qk and T of each chunk."""
    (B, T, H, D), Hkv = q, k[2]
    C, tile = _tiling(dtype)
    chunks, kind = B * -(-T // C), torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return Workspace(
        (chunks * Hkv if kind == torch.bfloat16 else 0, torch.int32),
        (chunks * Hkv * 3 * padded(D, tile), torch.float32),
        (chunks * H * C * C, kind),
        (chunks * Hkv * C * C if delta else 0, kind),
    )


def _dense(x: GatedInputs) -> tuple[Any, ...]:
    """The tensors as the kernels take them."""
    return dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), dense_rows(x.log_decay), x.beta, dense(x.state)
