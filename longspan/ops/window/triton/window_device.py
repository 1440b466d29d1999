"""What the kernels of local attention share: which keys a query sees, and blocks of scores.

Every window, exact or by blocks, causal or not, packed or after a past, is for each query one stretch of key slots, and
both ends of it rise with the query. A block of queries therefore walks from its first query's first key to its last
query's last, and no mask is ever built: a pair is seen if the key lies in the query's stretch, and between the largest
first key and the smallest last one every pair is.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.exp import LN2
from longspan.ops.common.tiles import program_index

# The score of a query's own key where it is seen only if nothing else is: below every score, above none at all.
LAST = tl.constexpr(-1e30)
ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass every test of randomness


class Sizes(NamedTuple):
    """What kernels are compiled for: heads, their numbers, the window, queries and keys in a block, padded numbers."""

    H: int
    HKV: int
    D: int
    E: int
    SIZE: int
    BACK: int
    AHEAD: int
    CAUSAL: bool
    ALONE: bool
    BT: int
    BS: int
    BD: int
    BE: int
    PRECISION: str


@triton.jit
def row_bounds(i_b, i_t, p_start, p_bounds, T, S, W: tl.constexpr):
    """Where the sequence of token i_t begins and ends, in key slots, and what brings its blocks to multiples of SIZE.

    p_bounds: (2, T), of packed sequences. p_start: (B,), the position of key 0; keys before position 0 are hidden.
    """
    first, end, phase = i_t * 0, i_t * 0 + S, i_t * 0
    if p_bounds is not None:
        i_in = tl.minimum(i_t, T - 1)
        first, end = tl.load(p_bounds + i_in), tl.load(p_bounds + T + i_in)
        phase = -first
    if p_start is not None:
        start = tl.load(p_start + i_b)
        first += tl.maximum(-start, 0).to(tl.int32)
        if W.SIZE > 0:
            phase += ((start % W.SIZE + W.SIZE) % W.SIZE).to(tl.int32)
    return first, end, phase


@triton.jit
def _window(i_s, phase, BACK: tl.constexpr, AHEAD: tl.constexpr, W: tl.constexpr):
    """The slots from BACK before i_s to AHEAD after it, or from as many blocks before its own to as many after it."""
    if W.SIZE > 0:
        block = (i_s + phase) // W.SIZE * W.SIZE - phase
        low, high = block - BACK * W.SIZE, block + (AHEAD + 1) * W.SIZE
    else:
        low, high = i_s - BACK, i_s + (AHEAD + 1)
    return low, high


@triton.jit
def keys_seen(i_b, i_t, p_start, p_bounds, T, S, W: tl.constexpr):
    """The stretch of key slots [low, high) that query i_t sees; a scalar or a block."""
    first, end, phase = row_bounds(i_b, i_t, p_start, p_bounds, T, S, W)
    i_s = i_t + (S - T)
    low, high = _window(i_s, phase, W.BACK, W.AHEAD, W)
    if W.CAUSAL:
        high = tl.minimum(high, i_s + 1)
    return tl.maximum(low, first), tl.minimum(high, end)


@triton.jit
def find_queries(p_start, p_bounds, T, S, W: tl.constexpr):
    """The BT queries that a program is for: row of the batch, head, the first of them, all of them, and the stretch of
    keys that each sees; then where the first stretch begins and the last ends, and between which keys all see all.
    """
    i_h, _, i_block, i_b = program_index(tl.cdiv(T, W.BT), W.H)
    i_0 = i_block * W.BT
    i_t = i_0 + tl.arange(0, W.BT)
    low, high = keys_seen(i_b, i_t, p_start, p_bounds, T, S, W)
    last = tl.minimum(i_0 + W.BT, T) - 1
    begin, outer = keys_seen(i_b, i_0, p_start, p_bounds, T, S, W)
    inner, end = keys_seen(i_b, last, p_start, p_bounds, T, S, W)
    return i_b, i_h, i_0, i_t, low, high, begin, end, inner, outer


@triton.jit
def queries_that_see(i_b, i_s, p_start, p_bounds, T, S, W: tl.constexpr):
    """The stretch of queries [low, high) that see the key of slot i_s, a scalar."""
    first, end, phase = row_bounds(i_b, i_s, p_start, p_bounds, S, S, W)
    low, high = _window(i_s, phase, W.AHEAD, W.BACK, W)
    if W.CAUSAL:
        low = tl.maximum(low, i_s)
    offset = S - T
    return tl.maximum(low - offset, 0), tl.minimum(high, end) - offset


@triton.jit
def kept(p_seed, i_x, i_t, i_s, rate):
    """Which pairs dropout leaves: the same for the same seed, head and places, whatever the blocks are."""
    r, _, _, _ = tl.philox(tl.load(p_seed), i_t, i_s, i_x, 0, n_rounds=ROUNDS)
    return tl.uint_to_uniform_float(r) >= rate


@triton.jit
def is_between(i, low, high):
    """low ≤ i < high in one comparison."""
    return (i - low).to(tl.uint32) < tl.maximum(high - low, 0).to(tl.uint32)


@triton.jit
def power(b_x, W: tl.constexpr):
    """2^x of x ≤ 0. "ieee": to the last digit, from a series; the hardware's is off by two."""
    if W.PRECISION == "ieee":
        b_x = tl.where(b_x < -150.0, -150.0, b_x)  # What is less than that is 0, and what is no number stays so.
        b_whole = tl.floor(b_x + 0.5)
        b_y = (b_x - b_whole) * LN2
        b_series = b_y * (1 / 5040) + 1 / 720
        b_series = b_series * b_y + 1 / 120
        b_series = b_series * b_y + 1 / 24
        b_series = b_series * b_y + 1 / 6
        b_series = b_series * b_y + 0.5
        b_series = b_series * b_y + 1.0
        b_x = (b_series * b_y + 1.0) * tl.exp2(b_whole)
    else:
        b_x = tl.exp2(b_x)
    return b_x


@triton.jit
def store_log(p_log, i_row, m_row, b_max, b_log, W: tl.constexpr):
    """max + log; ∞ for max = −∞, where nothing is seen. "ieee": and what rounding leaves of the sum beside it."""
    m_blind = b_max == float("-inf")
    b_sum = tl.where(m_blind, float("inf"), b_max + b_log)
    if W.PRECISION == "ieee":
        b_rest = tl.where(m_blind, 0.0, (b_max - b_sum) + b_log)
        tl.store(p_log + 2 * i_row, b_sum, mask=m_row)
        tl.store(p_log + 2 * i_row + 1, b_rest, mask=m_row)
    else:
        tl.store(p_log + i_row, b_sum, mask=m_row)


@triton.jit
def load_log(p_log, i_row, m_row, W: tl.constexpr):
    """As `store_log` left it, and what `weights` takes beside it."""
    if W.PRECISION == "ieee":
        b_sum = tl.load(p_log + 2 * i_row, mask=m_row, other=float("inf"))
        b_rest = tl.load(p_log + 2 * i_row + 1, mask=m_row, other=0.0)
    else:
        b_sum = tl.load(p_log + i_row, mask=m_row, other=float("inf"))
        b_rest = b_sum  # not read
    return b_sum, b_rest


@triton.jit
def weights(b_s, b_log, b_rest, W: tl.constexpr):
    """2^(s − log), the weights of scores s, from `load_log`."""
    b_s -= b_log
    if W.PRECISION == "ieee":
        b_s -= b_rest
    return power(b_s, W)
