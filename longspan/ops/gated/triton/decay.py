"""Gated linear attention with at most one decay per head, by one kernel that walks along a sequence.

With G the sums of log α, S the state and dS its gradient, results and gradients have one form: rows a see columns b,
whose values c they add up, and chunks pass a state on.

    out:  rows q, columns k, values v, state S         o_i  = σ e^{G_i} Sᵀ q_i + Σ_{j ≤ i} w_ij (q_i · k_j) v_j
    dq:   rows d, columns v, values k, state Sᵀ        dq_i = σ e^{G_i} S d_i + Σ_{j ≤ i} w_ij (d_i · v_j) k_j
    dv:   rows k, columns q, values d, state dS        dv_j = β_j e^{G_C − G_j} dSᵀ k_j + Σ_{i ≥ j} w_ij (q_i · k_j) d_i
    dk:   rows v, columns d, values q, state dSᵀ       dk_j = β_j e^{G_C − G_j} dS v_j + Σ_{i ≥ j} w_ij (d_i · v_j) q_i

with w_ij = σ β_j e^{G_i − G_j} and d the gradient of out; the last two walk from the end. A sequence is divided into
segments of several chunks, about as many segments as the device runs programs at once. Where there are several, a walk
without rows computes the state at the end of each, and a scan the states between them.

dg_t = Σ_{i ≥ t} (q_i · dq_i − k_i · dk_i) + ⟨dS, S⟩ after the last of these i. Both sums contain the same pairs of a
chunk, rounded alike, so that these cancel: the walk of dq stores their weights for that of dk, which computes those of
narrow heads again. So must what chunks add to states: rows are rounded as the other walk writes
them, and read both bfloat16 halves of a state. ⟨dS, S⟩ is taken anew every few chunks.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, UNDERFLOW, add, exp2, truncate, truncated, widen
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
from longspan.ops.common.tiles import FLOOR, add_product, padded, product, zeros
from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved
from longspan.ops.gated.triton import decay_chunk
from longspan.ops.gated.triton.slices import gradients, rows_at_once
from longspan.ops.linear.triton import PRECISION

STAGES = 3  # With fewer, no chunk is loaded while another is in use.
PIECE = 8  # The fewest chunks in a piece of a segment
CHECK = 16  # Chunks from one ⟨dS, S⟩ to the next; 1 for other dtypes than bfloat16

# Values per token in p_gates, with G from the chunk's start: log₂ e^G as a sum of two numbers, the factors σ e^G,
# β e^{G_C − G} and σ β, then e^{G_C − G} and β.
GATES = tl.constexpr(7)

# Compile-time constants of a walk: key heads, query heads of each, width of rows and columns, of values, tokens in a
# chunk, padded widths, tiles of values.
# BACK: from the end, with queries as columns. READ: there are rows; else only the state is computed. DECAY, BETA: there
# are gates. FULL: every row of every chunk exists. ROWS: results times p_x are added up by row, before β if LAST_BETA,
# in which β multiplies results. CHECK: chunks after which states are stored for ⟨dS, S⟩, 0 for none.
# DOT: dtype of products. LOW: G is taken as two numbers. SPLIT: the state is read as two bfloat16 numbers.
# PAIRS: the weights of pairs are stored, or with BACK loaded.
# STRIDE_*: strides along tokens, of a state along rows' width (STATE_A) and values (STATE_V), and of the last one.
WalkSizes = namedtuple(
    "WalkSizes",
    "HKV GROUP A V C BA BV TILES BACK READ DECAY BETA FULL ROWS LAST_BETA CHECK DOT LOW SPLIT PAIRS "
    "STRIDE_A STRIDE_B STRIDE_C STRIDE_X STATE_A STATE_V LAST_A LAST_V",
)

# Compile-time constants of the scan: D, E, padded widths, values per program, the direction.
ScanSizes = namedtuple("ScanSizes", "D E BD BE TILE DECAY BACK")

# Compile-time constants of the gates' kernels: key heads, query heads of each, tokens in a chunk, tiles of D and of E,
# elements of a state in a tile of D.
GateSizes = namedtuple("GateSizes", "HKV GROUP C TILES_D TILES_E DECAY BETA CHECK TILE SPLIT", defaults=(0, 0, False))


@triton.jit(do_not_specialize=["T", "scale"])
def gated_decay_gates_kernel(p_decay, p_beta, p_gates, T, scale, g, b, S: tl.constexpr):
    """Gates of one chunk of one head. p_gates: (B, Hkv, chunks, GATES, C); beyond T nothing decays and β is 0.

    Sums are taken in float64 and stored as two numbers: differences behind a token that forgets everything keep their
    digits.
    """
    i_h, i_c, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_t = tl.arange(0, S.C)
    i_token = (i_c * S.C + i_t).to(tl.int64)
    m_t = i_token < T
    p_gates += ((i_b * S.HKV + i_h) * tl.num_programs(1) + i_c) * (GATES * S.C) + i_t
    b_beta = zeros(S.C) + 1
    b_start, b_end = b_beta, b_beta
    if S.BETA:
        b_beta = tl.load(p_beta + i_b * b.b + i_token * b.t + i_h * b.h, mask=m_t, other=0.0)
    if S.DECAY:
        b_g = tl.load(p_decay + i_b * g.b + i_token * g.t + i_h * g.h, mask=m_t, other=0.0)
        b_g = tl.maximum(b_g, UNDERFLOW).to(tl.float64)
        last = tl.sum(b_g)
        b_g = tl.cumsum(b_g, 0)
        b_log2e = tl.full((S.C,), LOG2E, tl.float64)
        b_end = exp2(((last - b_g) * b_log2e).to(tl.float32))
        b_g *= b_log2e
        b_high = b_g.to(tl.float32)
        b_start = exp2(b_high)
        tl.store(p_gates, b_high)
        tl.store(p_gates + S.C, (b_g - b_high.to(tl.float64)).to(tl.float32))
    tl.store(p_gates + 2 * S.C, b_start * scale)
    tl.store(p_gates + 3 * S.C, b_end * b_beta)
    tl.store(p_gates + 4 * S.C, b_beta * scale)
    tl.store(p_gates + 5 * S.C, b_end)
    tl.store(p_gates + 6 * S.C, b_beta)


@triton.jit
def _pointer(p_x, x, STRIDE: tl.constexpr, i_b, i_0, i_h, column=0):
    """Pointer to a token of one head; the stride along tokens is known at compile time."""
    return p_x + (i_b * x.b + i_0.to(tl.int64) * STRIDE + i_h.to(tl.int64) * x.h + column)


@triton.jit
def _load(
    p_x,
    STRIDE: tl.constexpr,
    left,
    columns,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr = 1,
):
    """The (C, BLOCK) block at p_x, of which `left` rows and `columns` columns exist; zeros elsewhere.

    WIDTH: The columns of all TILES blocks; the last blocks may have none.
    """
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, BLOCK)
    p_x += i_t[:, None] * STRIDE + i_d[None, :]
    if S.FULL and WIDTH == BLOCK * TILES:
        return tl.load(p_x)
    m_x = (i_t < left)[:, None]
    if WIDTH != BLOCK * TILES:
        m_x = m_x & (i_d < columns)[None, :]
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def _store(p_x, STRIDE: tl.constexpr, left, columns, b_x, S: tl.constexpr):
    """Store a block (C, BV)."""
    i_t, i_v = tl.arange(0, S.C), tl.arange(0, S.BV)
    p_x += i_t[:, None] * STRIDE + i_v[None, :]
    b_x = b_x.to(p_x.dtype.element_ty)
    if S.FULL and S.V == S.BV * S.TILES:
        tl.store(p_x, b_x)
    else:
        tl.store(p_x, b_x, mask=(i_t < left)[:, None] & (i_v < columns)[None, :])


@triton.jit
def _state(p_x, A: tl.constexpr, V: tl.constexpr, S: tl.constexpr):
    """Pointers to a state (BV, BA) with stride A along the rows' width and V along values."""
    return p_x + tl.arange(0, S.BV)[:, None] * V + tl.arange(0, S.BA)[None, :] * A


@triton.jit
def _differences(p_gates, S: tl.constexpr):
    """log₂ e^{G_i − G_j} of a chunk's pairs (rows, columns), of which i is the query."""
    i_t = tl.arange(0, S.C)
    b_g = tl.load(p_gates + i_t)
    b_d = b_g[None, :] - b_g[:, None] if S.BACK else b_g[:, None] - b_g[None, :]
    if S.LOW:
        b_g = tl.load(p_gates + S.C + i_t)
        b_d += b_g[None, :] - b_g[:, None] if S.BACK else b_g[:, None] - b_g[None, :]
    return b_d


@triton.jit
def _see(b_a, b_b, p_gates, scale, S: tl.constexpr, PRECISION: tl.constexpr):
    """Weights (rows, columns) of the pairs of a chunk."""
    i_t = tl.arange(0, S.C)
    b_p = product(b_a.to(S.DOT), tl.trans(b_b.to(S.DOT)), PRECISION)
    m_seen = i_t[:, None] <= i_t[None, :] if S.BACK else i_t[:, None] >= i_t[None, :]
    if S.DECAY:
        b_p *= exp2(tl.where(m_seen, _differences(p_gates, S), FLOOR))
    else:
        b_p = tl.where(m_seen, b_p, 0)
    if not S.BETA or S.LAST_BETA:
        b_p *= scale
    else:
        b_pair = tl.load(p_gates + 4 * S.C + i_t)
        b_p *= b_pair[:, None] if S.BACK else b_pair[None, :]
    return b_p.to(S.DOT)


@triton.jit
def _written(b_s, b_b, b_c, p_gates, S: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a chunk's columns."""
    b_write = tl.load(p_gates + (2 if S.BACK else 3) * S.C + tl.arange(0, S.C))
    b_b = b_b.to(tl.float32) * b_write[:, None]
    return add_product(tl.trans(b_c.to(S.DOT)), b_b.to(S.DOT), b_s, PRECISION)


@triton.jit
def _read(b_s, b_a, p_gates, S: tl.constexpr, PRECISION: tl.constexpr):
    """What a chunk's rows read from the state, transposed: (BV, C).

    SPLIT: Rows are scaled and rounded as `_written` does with them as columns, and both halves of the state are read.
    """
    b_read = tl.load(p_gates + ((5 if S.LAST_BETA else 3) if S.BACK else 2) * S.C + tl.arange(0, S.C))
    if S.SPLIT:
        b_a = tl.trans((b_a.to(tl.float32) * b_read[:, None]).to(S.DOT))
        if S.BACK:
            b_high, b_low = _halves(b_s, S)
            b_o = product(b_low, b_a, PRECISION)
        else:
            # The high half is taken after the product with the low one, so that both need not be in registers.
            b_o = product((b_s - truncated(b_s)).to(S.DOT), b_a, PRECISION)
            b_high = truncate(b_s)
        b_o = add_product(b_high, b_a, b_o, PRECISION)
    else:
        b_o = product(b_s.to(S.DOT), tl.trans(b_a.to(S.DOT)), PRECISION) * b_read[None, :]
    return b_o


@triton.jit
def _halves(b_s, S: tl.constexpr):
    """A state as the sum of two numbers for products."""
    b_high = b_s.to(S.DOT)
    return b_high, (b_s - widen(b_high)).to(S.DOT)


@triton.jit
def _put(p_out, p_x, p_rows, b_o, p_gates, x, g, left, columns, STRIDE: tl.constexpr, S: tl.constexpr):
    """Store a chunk's results, transposed (BV, C), of query head g, and if ROWS their products with x by row."""
    b_o = tl.trans(b_o)
    if S.ROWS:
        b_x = _load(p_x + g * x.h, S.STRIDE_X, left, columns, S.V, S.BV, S, S.TILES)
        tl.store(p_rows + g * S.C + tl.arange(0, S.C), tl.sum(b_o * b_x.to(tl.float32), 1))
    if S.LAST_BETA:
        b_o *= tl.load(p_gates + 6 * S.C + tl.arange(0, S.C))[:, None]
    _store(p_out + g * S.V, STRIDE, left, columns, b_o, S)


@triton.jit
def _store_check(p_checks, i_o, b_s, S: tl.constexpr):
    """Store tile i_o of the states for ⟨dS, S⟩: two halves if SPLIT."""
    p_checks += i_o * ((2 if S.SPLIT else 1) * S.BA * S.BV)
    b_high, b_low = b_s, b_s
    if S.SPLIT:
        b_high, b_low = _halves(b_s, S)
    tl.store(_state(p_checks, 1, S.BA, S), b_high.to(S.DOT))
    if S.SPLIT:
        tl.store(_state(p_checks + S.BA * S.BV, 1, S.BA, S), b_low)


@triton.jit
def _pairs(p_pairs, g, S: tl.constexpr):
    """Pointers to the weights (queries, keys) of a chunk and query head g."""
    i_t = tl.arange(0, S.C)
    return p_pairs + g * (S.C * S.C) + i_t[:, None] * S.C + i_t[None, :]


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "scale"])
def gated_decay_walk_kernel(
    p_a, p_b, p_c, p_x, p_gates, p_states, p_totals, p_out, p_rows, p_checks, p_pairs, p_last,
    T, segments, chunks, first, scale, a, b, c, x, S: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One segment, or piece of one unless READ, of one key head and its query heads, and one tile of values.

    p_states: (B, Hkv, segments, ·) the state at which a walk begins; unless READ (B, Hkv, pieces, ·), which gets the
    state at its end, and p_totals (B, Hkv, pieces) log₂ of its decay. p_rows: (tiles, B, Hkv, chunks, rows' heads, C).
    p_checks: (B, Hkv, segments, checks, tiles, halves, ·) states. p_pairs: (B, Hkv, chunks, query heads, C, C)
    weights (queries, keys). p_last: (B, Hkv, D, E) the state at the end, or None.
    """
    ROWS: tl.constexpr = 1 if S.BACK else S.GROUP
    COLUMNS: tl.constexpr = S.GROUP if S.BACK else 1
    STEP: tl.constexpr = -S.C if S.BACK else S.C
    STRIDE: tl.constexpr = S.HKV * ROWS * S.V
    pid = tl.program_id(0)
    i_h, i_v = pid % S.HKV, (pid // S.HKV) % S.TILES
    i_s = (pid // (S.HKV * S.TILES)) % segments
    i_b = (pid // (S.HKV * S.TILES) // segments).to(tl.int64)
    i_x = i_b * S.HKV + i_h
    i_segment = i_x * segments + i_s
    i_c = first + i_s * chunks
    count = tl.minimum(chunks, tl.cdiv(T - i_c * S.C, S.C))
    if S.BACK:
        i_c += count - 1
    i_0 = i_c * S.C
    left, columns = T - i_0, S.V - i_v * S.BV
    p_b = _pointer(p_b, b, S.STRIDE_B, i_b, i_0, i_h * COLUMNS)
    p_c = _pointer(p_c, c, S.STRIDE_C, i_b, i_0, i_h * COLUMNS, i_v * S.BV)
    total_chunks = tl.cdiv(T, S.C)
    p_gates += (i_x * total_chunks + i_c) * (GATES * S.C)
    p_states += i_segment * (S.BA * S.BV * S.TILES) + i_v * S.BV * S.STATE_V
    p_states = _state(p_states, S.STATE_A, S.STATE_V, S)
    if S.READ:
        p_a = _pointer(p_a, a, S.STRIDE_A, i_b, i_0, i_h * ROWS)
        p_out += ((i_b * T + i_0) * (S.HKV * ROWS) + i_h * ROWS) * S.V + i_v * S.BV
        b_s = tl.load(p_states)
    else:
        b_s = zeros(S.BV, S.BA)
    if S.ROWS:
        p_x = _pointer(p_x, x, S.STRIDE_X, i_b, i_0, i_h * ROWS, i_v * S.BV)
        programs = tl.num_programs(0) // (segments * S.TILES)
        p_rows += ((i_v.to(tl.int64) * programs + i_x) * total_chunks + i_c) * (ROWS * S.C)
    if S.PAIRS:
        p_pairs += (i_x * total_chunks + i_c) * (S.GROUP * S.C * S.C)
    if S.CHECK > 0:
        i_check = i_segment * tl.cdiv(chunks, S.CHECK) * S.TILES + i_v
    total = 0.0
    for i in tl.range(count, num_stages=STAGES):
        last = 0.0
        if S.DECAY:
            last = tl.load(p_gates + S.C - 1)
        if S.CHECK > 0 and S.BACK:
            done = count - i
            if (done % S.CHECK == 0) | (i == 0):
                _store_check(p_checks, i_check + (done - 1) // S.CHECK * S.TILES, b_s, S)
        if S.READ and not S.BACK:
            b_b = _load(p_b, S.STRIDE_B, left, S.A, S.A, S.BA, S)
            b_c = _load(p_c, S.STRIDE_C, left, columns, S.V, S.BV, S, S.TILES)
            for g in range(ROWS):
                b_a = _load(p_a + g * a.h, S.STRIDE_A, left, S.A, S.A, S.BA, S)
                b_o = _read(b_s, b_a, p_gates, S, PRECISION)
                b_p = _see(b_a, b_b, p_gates, scale, S, PRECISION)
                if S.PAIRS:
                    tl.store(_pairs(p_pairs, g, S), b_p)
                b_o = add(b_o, product(tl.trans(b_c.to(S.DOT)), tl.trans(b_p), PRECISION))
                _put(p_out, p_x, p_rows, b_o, p_gates, x, g, left, columns, STRIDE, S)
            if S.DECAY:
                b_s *= exp2(last)
            b_s = _written(b_s, b_b, b_c, p_gates, S, PRECISION)
        else:
            if S.READ:
                b_a = _load(p_a, S.STRIDE_A, left, S.A, S.A, S.BA, S)
                b_o = _read(b_s, b_a, p_gates, S, PRECISION)
            if S.DECAY:
                b_s *= exp2(last)
            for g in range(COLUMNS):
                b_b = _load(p_b + g * b.h, S.STRIDE_B, left, S.A, S.A, S.BA, S)
                b_c = _load(p_c + g * c.h, S.STRIDE_C, left, columns, S.V, S.BV, S, S.TILES)
                if S.READ:
                    if S.PAIRS:
                        b_p = tl.load(_pairs(p_pairs, g, S))
                    else:
                        b_p = tl.trans(_see(b_a, b_b, p_gates, scale, S, PRECISION))
                    b_o = add(b_o, product(tl.trans(b_c.to(S.DOT)), b_p, PRECISION))
                b_s = _written(b_s, b_b, b_c, p_gates, S, PRECISION)
            if S.READ:
                _put(p_out, p_x, p_rows, b_o, p_gates, x, 0, left, columns, STRIDE, S)
        if S.CHECK > 0 and not S.BACK:
            if ((i + 1) % S.CHECK == 0) | (i == count - 1):
                _store_check(p_checks, i_check + i // S.CHECK * S.TILES, b_s, S)
        total += last
        if S.READ:
            p_a += STEP * S.STRIDE_A
            p_out += STEP * S.HKV * ROWS * S.V
        if S.ROWS:
            p_x += STEP * S.STRIDE_X
            p_rows += STEP * ROWS
        if S.PAIRS:
            p_pairs += STEP * S.C * S.GROUP
        p_b += STEP * S.STRIDE_B
        p_c += STEP * S.STRIDE_C
        p_gates += STEP * GATES
        left -= STEP
    if not S.READ:
        tl.store(p_states, b_s)
        if i_v == 0:
            tl.store(p_totals + i_segment, total)
    elif p_last is not None:
        if i_s == (0 if S.BACK else segments - 1):
            p_last += i_x * (S.A * S.V) + i_v * S.BV * S.LAST_V
            m_s = (tl.arange(0, S.BV) < columns)[:, None] & (tl.arange(0, S.BA) < S.A)[None, :]
            tl.store(_state(p_last, S.LAST_A, S.LAST_V, S), b_s, mask=m_s)


@triton.jit(do_not_specialize=["segments", "pieces"])
def gated_decay_scan_kernel(p_pieces, p_totals, p_enter, p_states, segments, pieces, S: tl.constexpr):
    """States at which segments begin, from those at the ends of `pieces` pieces of each segment but the last (BACK: but
    the first). p_enter: (B, Hkv, D, E) the state at which the first one begins, or None.
    """
    SIZE: tl.constexpr = S.BD * S.BE
    i_x, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_e, i_d = i_tile * S.TILE + tl.arange(0, S.TILE), tl.arange(0, S.BD)
    b_s = zeros(S.TILE, S.BD)
    if p_enter is not None:
        m_s = (i_e < S.E)[:, None] & (i_d < S.D)[None, :]
        b_s = tl.load(p_enter + i_x * (S.D * S.E) + i_e[:, None] + i_d[None, :] * S.E, mask=m_s, other=0.0)
    number = (segments - 1) * pieces
    i_s = i_e[:, None] * S.BD + i_d[None, :]
    p_states += i_x * segments * SIZE + i_s
    for i in tl.range(number, num_stages=4):
        i_p = i_x * number + (number - 1 - i if S.BACK else i)
        b_more = tl.load(p_pieces + i_p * SIZE + i_s)
        if i % pieces == 0:
            tl.store(p_states + (segments - 1 - i // pieces if S.BACK else i // pieces) * SIZE, b_s)
        if S.DECAY:
            b_s *= exp2(tl.load(p_totals + i_p))
        b_s += b_more
    tl.store(p_states + (0 if S.BACK else segments - 1) * SIZE, b_s)


@triton.jit
def _inner_product(p_x, p_y, i_o, S: tl.constexpr):
    """⟨x, y⟩ of states as `_store_check` stores their tiles, from tile i_o on."""
    WIDTH: tl.constexpr = min(S.TILE, 2048)
    HALVES: tl.constexpr = 2 if S.SPLIT else 1
    b_sum = zeros(WIDTH)
    i_o = i_o * (HALVES * S.TILE) + tl.arange(0, WIDTH)
    for i_v in range(S.TILES_D):
        for i in range(0, S.TILE, WIDTH):
            i_p = i_o + i_v * HALVES * S.TILE + i
            b_x, b_y = tl.load(p_x + i_p).to(tl.float32), tl.load(p_y + i_p).to(tl.float32)
            if S.SPLIT:
                b_x += tl.load(p_x + i_p + S.TILE).to(tl.float32)
                b_y += tl.load(p_y + i_p + S.TILE).to(tl.float32)
            b_sum += b_x * b_y
    return tl.sum(b_sum)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def gated_decay_gate_gradients_kernel(
    p_queries, p_keys, p_values, p_checks, p_d_checks, p_d_decay, p_d_beta, T, segments, chunks, S: tl.constexpr
):
    """Gradients of the gates of one head's tokens from one ⟨dS, S⟩ to the next.

    p_queries, p_keys, p_values: q · dq, k · dk and v · dv / β by row, as walks store them. p_checks, p_d_checks: S and
    dS.
    """
    checks = tl.cdiv(chunks, S.CHECK)
    i_x, i_s, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i_t = tl.arange(0, S.C)
    total_chunks = tl.cdiv(T, S.C)
    first = i_s * chunks + i_g * S.CHECK
    end = tl.minimum(tl.minimum(first + S.CHECK, (i_s + 1) * chunks), total_chunks)
    programs = tl.num_programs(0).to(tl.int64)
    i_b, i_h = i_x // S.HKV, i_x % S.HKV
    after = 0.0
    if S.DECAY and first < end:
        i_o = ((i_x * segments + i_s) * checks + i_g) * S.TILES_D
        after = _inner_product(p_checks, p_d_checks, i_o, S)
    for i in range(end - first):
        i_c = end - 1 - i
        i_token = i_c * S.C + i_t
        m_t = i_token < T
        p_o = (i_b * T + i_token) * S.HKV + i_h
        if S.DECAY:
            b_d = zeros(S.C)
            for i_v in range(S.TILES_D):
                i_o = (i_v * programs + i_x) * total_chunks + i_c
                b_d -= tl.load(p_keys + i_o * S.C + i_t)
                for g in range(S.GROUP):
                    b_d += tl.load(p_queries + (i_o * S.GROUP + g) * S.C + i_t)
            tl.store(p_d_decay + p_o, tl.cumsum(b_d, 0, reverse=True) + after, mask=m_t)
            after += tl.sum(b_d)
        if S.BETA:
            b_d = zeros(S.C)
            for i_v in range(S.TILES_E):
                b_d += tl.load(p_values + ((i_v * programs + i_x) * total_chunks + i_c) * S.C + i_t)
            tl.store(p_d_beta + p_o, b_d, mask=m_t)


def forward(x: GatedInputs, problem: GatedProblem, *, zeroed: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the state after the last token, and the states for `backward`."""
    q, k, v, state = dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), dense(x.state)
    plan = _DecayForward.of((q, k, v, x.log_decay, x.beta, state), problem)
    out = v.new_empty(plan.out_shape)
    last = q.new_empty(plan.state_shape, dtype=torch.float32)
    saved = q.new_zeros(saved_size(x, problem), dtype=torch.float32) if zeroed else plan.saved.allocate(q)
    work = plan.workspace.allocate(q)
    (states,) = plan.pointers(plan.saved, saved)
    gates, totals, pieces = plan.pointers(plan.workspace, work)
    p_q, p_k, p_v, log_decay, beta = plan.addresses(q, k, v, x.log_decay, x.beta)
    p_state, p_out, p_last = plan.addresses(state, out, last)
    with on_device(q):
        plan.gates(log_decay, beta, gates)
        plan.sums(None, p_k, p_v, None, gates, pieces, totals, None, None, None, None, None)
        plan.scan(pieces, totals, p_state, states)
        plan.out(p_q, p_k, p_v, None, gates, states, None, p_out, None, None, None, p_last)
    return out, last, saved


def backward(saved: GatedSaved, x: GatedInputs, problem: GatedProblem) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, log_decay, beta and of the state before the first token."""
    q, k, v, d = dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), dense_rows(saved.d_out)
    inputs = q, k, v, x.log_decay, x.beta, x.state, d, dense(saved.d_state)
    with on_device(q):
        return gradients(_DecayBackward, inputs, saved.starts, problem, x.k.shape[0])


def saved_size(x: GatedInputs, problem: GatedProblem) -> int:
    """Return the number of float32 elements for `backward`, an upper bound: the length may be a symbol."""
    (B, T, Hkv, D), E, dtype = x.k.shape, x.v.shape[3], x.q.dtype
    chunk, least = _chunk(dtype)
    BD, BE = padded(D, least), padded(E, least)
    programs = _programs(x.q.device.index if x.q.is_cuda else -1, BD, BE, dtype)
    heads = B * Hkv
    most: int = torch.sym_min(heads * (T // chunk // 2 + 1), heads + 2 * programs)
    return most * BD * BE


class _DecayPlan(Plan):
    """A sequence has `num_chunks` chunks, in segments of `run` chunks each, as many as with `batch_size` rows."""

    def __init__(self, device: int, key: Signature, problem: GatedProblem, batch_size: int | None = None) -> None:
        super().__init__(device)
        q, k, v, log_decay, beta = key[:5]
        self.tensors = {"q": q, "k": k, "v": v, "g": log_decay, "b": beta}
        (self.B, self.T, self.H, self.D), (self.Hkv, self.E) = q[0], v[0][2:]
        self.dtype, self.scale = q[2], problem.scale
        self.bf16 = self.dtype == torch.bfloat16
        self.heads, self.group = self.B * self.Hkv, self.H // self.Hkv
        self.out_shape, self.state_shape = (self.B, self.T, self.H, self.E), (self.B, self.Hkv, self.D, self.E)
        self.chunk, least = _chunk(self.dtype)
        self.BD, self.BE = padded(self.D, least), padded(self.E, least)
        self.num_chunks = -(-self.T // self.chunk)
        self.tiles = {
            "D": self.BD // _tile(self.BD, self.BE, self.dtype),
            "E": self.BE // _tile(self.BE, self.BD, self.dtype),
        }
        programs = _programs(device, self.BD, self.BE, self.dtype)
        heads = self.heads if batch_size is None else batch_size * self.Hkv
        segments = _segments(heads, programs, self.num_chunks)
        run = -(-self.num_chunks // segments)
        # Segments that precede others are summed in pieces where these are too few for the device, which runs twice as
        # many of these small programs.
        self.pieces = max(1, min(2 * programs // (heads * max(1, segments - 1)), run // PIECE))
        self.run = -(-run // self.pieces) * self.pieces
        self.segments = -(-self.num_chunks // self.run)
        self.saved = Workspace((self.heads * self.segments * self.BD * self.BE, torch.float32))
        self.check = CHECK if self.bf16 else 1
        self.decay, self.beta = log_decay is not None, beta is not None

    @property
    def buffers(self) -> list[tuple[int, torch.dtype]]:
        """Gates of each token, decay and state of each piece."""
        tokens, pieces = self.heads * self.num_chunks * self.chunk, self.heads * (self.segments - 1) * self.pieces
        return [(size, torch.float32) for size in (tokens * GATES.value, pieces, pieces * self.BD * self.BE)]

    def gates_launch(self) -> Launch:
        sizes = GateSizes(self.Hkv, 0, self.chunk, 0, 0, self.decay, self.beta)
        strides = [Strides(0, 0, 0) if x is None else Strides.of(x) for x in (self.tensors["g"], self.tensors["b"])]
        grid, constants = (self.Hkv, self.num_chunks, self.B), {"S": sizes, "num_warps": 1}
        return self.launch(gated_decay_gates_kernel, grid, (self.T, self.scale, *strides), constants)

    def walk(
        self, names: str, *, back: bool, values: str, check: int = 0, rows: bool = False, pairs: bool = False
    ) -> Any:
        """Create the launch of a walk.

        Args:
            names: Tensors that are rows, columns, values and factors of results; "-" for none.
            back: Whether the walk is from the end.
            values: The width of values, "D" or "E".
            check: Chunks between ⟨dS, S⟩, or 0.
            rows: Whether to add up results by row.
            pairs: Whether to store, or from the end load, the weights of pairs.
        """
        V, A, BV, BA = (self.D, self.E, self.BD, self.BE) if values == "D" else (self.E, self.D, self.BE, self.BD)
        read, tile = names[0] != "-", _tile(BV, BA, self.dtype)
        given = [self.tensors[name] if name != "-" else None for name in names]
        strides = [Strides(0, 0, 0) if x is None else Strides.of(x) for x in given]
        sizes = WalkSizes(
            *(self.Hkv, self.group, A, V, self.chunk, BA, tile, BV // tile, back, read, self.decay, self.beta),
            *(self.T % self.chunk == 0, rows, self.beta and back and values == "E", check),
            *(
                tl.bfloat16 if self.bf16 else tl.float32,
                not self.bf16,
                self.bf16 and check > 0,
                pairs,
                *[x.t for x in strides],
            ),
            *((self.BD, 1, 1, self.E) if values == "D" else (1, self.BD, self.E, 1)),
        )
        walks = self.segments if read else (self.segments - 1) * self.pieces
        if not walks:
            return _nothing
        stages, warps = STAGES if self.bf16 else 1, _warps(tile * BA, self.dtype)
        constants = {"S": sizes, "PRECISION": PRECISION[self.dtype], "STAGES": stages, "num_warps": warps}
        run, first = (self.run, 0) if read else (self.run // self.pieces, self.run if back else 0)
        scalars = self.T, walks, run, first, self.scale, *strides
        return self.launch(gated_decay_walk_kernel, (self.heads * walks * sizes.TILES,), scalars, constants)

    def scan_launch(self, *, back: bool) -> Launch:
        sizes = ScanSizes(self.D, self.E, self.BD, self.BE, 16, self.decay, back)
        grid, scalars = (self.heads, self.BE // sizes.TILE), (self.segments, self.pieces)
        return self.launch(gated_decay_scan_kernel, grid, scalars, {"S": sizes})


class _DecayForward(_DecayPlan):
    def __init__(self, device: int, key: Signature, problem: GatedProblem) -> None:
        super().__init__(device, key, problem)
        self.workspace = Workspace(*self.buffers)
        self.gates = self.gates_launch()
        self.sums = self.walk("-kv-", back=False, values="E")
        self.scan = self.scan_launch(back=False)
        self.out = self.walk("qkv-", back=False, values="E")


class _DecayBackward(_DecayPlan):
    def __init__(self, device: int, key: Signature, problem: GatedProblem, batch_size: int | None = None) -> None:
        super().__init__(device, key, problem, batch_size)
        self.tensors["d"] = key[6]
        check, tokens = self.check if self.decay else 0, self.heads * self.num_chunks * self.chunk
        checks = self.heads * self.segments * -(-self.run // self.check) if self.decay else 0
        # Those of narrow heads would be as large as queries and their gradients.
        stored = 2 * self.chunk <= self.D + self.E
        pairs = tokens * self.group * self.chunk if stored else 0
        kind = self.dtype if self.bf16 else torch.float32
        rows = tokens * self.tiles["D"] if self.decay else 0
        values = tokens * self.tiles["E"] if self.beta else 0
        self.workspace = Workspace(
            *self.buffers,
            *[(size, torch.float32) for size in (self.saved.size, rows * self.group, rows, values)],
            (pairs, kind),
            *[(checks * self.BD * self.BE * (2 if self.bf16 else 1), kind)] * 2,
        )
        self.gates = self.gates_launch()
        self.sums = self.walk("-qd-", back=True, values="E")
        self.scan = self.scan_launch(back=True)
        self.queries = self.walk("dvkq", back=False, values="D", check=check, rows=self.decay, pairs=stored)
        self.keys = self.walk("vdqk", back=True, values="D", check=check, rows=self.decay, pairs=stored)
        self.values = self.walk("kqdv", back=True, values="E", rows=self.beta)
        self.gate_gradients = self.gate_gradients_launch()
        resident = _programs(device, self.BD, self.BE, self.dtype)
        self.rows_at_once = rows_at_once(self.B, self.heads * self.segments, resident, 4 * self.workspace.size, key[:7])

    def write_gradients(self, inputs: Sequence[Any], saved: Sequence[Any], grads: Sequence[Any]) -> None:
        """Write the gradients. saved: The states that the forward pass saved."""
        q, k, v, decay, beta, _, d, d_state = inputs
        d_q, d_k, d_v, d_decay, d_beta, d_start = grads
        (states,) = saved
        work = self.workspace.allocate(q)
        gates, totals, pieces, d_states, *rest = self.pointers(self.workspace, work)
        queries, keys, values, pairs, checks, d_checks = rest
        p_q, p_k, p_v, p_d, p_decay, p_beta, p_d_state = self.addresses(q, k, v, d, decay, beta, d_state)
        p_d_q, p_d_k, p_d_v, p_d_decay, p_d_beta, p_start = self.addresses(d_q, d_k, d_v, d_decay, d_beta, d_start)
        self.gates(p_decay, p_beta, gates)
        self.sums(None, p_q, p_d, None, gates, pieces, totals, None, None, None, None, None)
        self.scan(pieces, totals, p_d_state, d_states)
        self.queries(p_d, p_v, p_k, p_q, gates, states, None, p_d_q, queries, checks, pairs, None)
        self.keys(p_v, p_d, p_q, p_k, gates, d_states, None, p_d_k, keys, d_checks, pairs, p_start)
        self.values(p_k, p_q, p_d, p_v, gates, d_states, None, p_d_v, values, None, None, None)
        self.gate_gradients(queries, keys, values, checks, d_checks, p_d_decay, p_d_beta)

    def gate_gradients_launch(self) -> Any:
        if not (self.decay or self.beta):
            return _nothing
        tiles = self.tiles["D"], self.tiles["E"]
        size = self.BD * self.BE // self.tiles["D"]
        sizes = GateSizes(self.Hkv, self.group, self.chunk, *tiles, self.decay, self.beta, self.check, size, self.bf16)
        grid, scalars = (self.heads, self.segments, -(-self.run // self.check)), (self.T, self.segments, self.run)
        return self.launch(gated_decay_gate_gradients_kernel, grid, scalars, {"S": sizes, "num_warps": 4})


def _nothing(*_: Any) -> None:
    """In place of a launch that has nothing to do."""


def _chunk(dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of tokens in a chunk and the least width of a block."""
    return decay_chunk(dtype), 64 if dtype == torch.bfloat16 else 16


def _tile(values: int, width: int, dtype: torch.dtype) -> int:
    """Return the number of values in a tile, given the padded number of values and the width of rows."""
    if dtype == torch.bfloat16:
        return min(values, 128 if width <= 128 else 64)
    return min(values, max(16, 4096 // width))


def _warps(size: int, dtype: torch.dtype) -> int:
    """Return the number of warps of a walk whose state has this many elements in a tile."""
    return 4 if size <= 64 * 64 and dtype != torch.float32 else 8


def _programs(device: int, BD: int, BE: int, dtype: torch.dtype) -> int:
    """How many walks over all tiles the device runs at once; a multiprocessor has registers for eight warps."""
    tile_D, tile_E = _tile(BD, BE, dtype), _tile(BE, BD, dtype)
    each = 8 // _warps(max(tile_D * BE, tile_E * BD), dtype)
    return max(1, processors(device) * each // max(BD // tile_D, BE // tile_E))


def _segments(heads: int, programs: int, chunks: int) -> int:
    """Return the number of segments, of two chunks at least, that takes the least time.

    The device runs `programs` at once: walks take as many rounds as are needed, each as long as a segment and the start
    of a program. All segments but one are also summed, which takes about a sixth of the time.
    """

    def cost(number: int) -> float:
        rounds = -(-heads * number // programs)
        return rounds * (chunks / number + 2) + chunks * heads / programs * (1 - 1 / number) / 6

    return min(range(1, max(1, min(2 * programs // heads, chunks // 2)) + 1), key=cost)
