"""What the kernels of local attention share: which keys a query sees, and blocks of scores.

Every window, exact or by blocks, causal or not, packed or after a past, is for each query one stretch of key slots, and
both ends of it rise with the query. A block of queries therefore walks from its first query's first key to its last
query's last, and no mask is ever built: a pair is seen if the key lies in the query's stretch, and between the largest
first key and the smallest last one every pair is.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The score of a query's own key where it is seen only if nothing else is: below every score, above none at all.
LAST = tl.constexpr(-1e30)
ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass every test of randomness


@triton.jit
def row_bounds(i_b, i_t, p_start, p_bounds, T, S, SIZE: tl.constexpr):
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
        if SIZE > 0:
            phase += ((start % SIZE + SIZE) % SIZE).to(tl.int32)
    return first, end, phase


@triton.jit
def keys_seen(
    i_b,
    i_t,
    p_start,
    p_bounds,
    T,
    S,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The stretch of key slots [low, high) that query i_t sees; a scalar or a block."""
    first, end, phase = row_bounds(i_b, i_t, p_start, p_bounds, T, S, SIZE)
    i_s = i_t + (S - T)
    if SIZE > 0:
        block = (i_s + phase) // SIZE * SIZE - phase
        low, high = block - BACK * SIZE, block + (AHEAD + 1) * SIZE
    else:
        low, high = i_s - BACK, i_s + (AHEAD + 1)
    if CAUSAL:
        high = tl.minimum(high, i_s + 1)
    return tl.maximum(low, first), tl.minimum(high, end)


@triton.jit
def queries_that_see(
    i_b,
    i_s,
    p_start,
    p_bounds,
    T,
    S,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The stretch of queries [low, high) that see the key of slot i_s, a scalar."""
    first, end, phase = row_bounds(i_b, i_s, p_start, p_bounds, S, S, SIZE)
    if SIZE > 0:
        block = (i_s + phase) // SIZE * SIZE - phase
        low, high = block - AHEAD * SIZE, block + (BACK + 1) * SIZE
    else:
        low, high = i_s - AHEAD, i_s + (BACK + 1)
    if CAUSAL:
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
