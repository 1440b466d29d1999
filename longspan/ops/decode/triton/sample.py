"""The next token of each row from its logits, in one kernel: what `loop.Sampling` says, and the loop does with it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kth_largest(b_x, k):
    """The k-th largest of b_x (float32), found bit by bit."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_order = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.int64)
    low, high = tl.min(b_order, 0), tl.max(b_order, 0)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        enough = tl.sum((b_order >= middle).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return tl.max(tl.where(b_order == low, b_x, float("-inf")), 0)


@triton.jit
def nucleus(b_p, top_p):
    """b_p, and 0 for tokens before which, by likelihood and then by number, others reach top_p already."""
    b_bits = b_p.to(tl.int32, bitcast=True)  # in the order of the numbers, none of which is negative
    low, high = tl.min(b_bits, 0), tl.max(b_bits, 0)
    for _ in range(31):
        middle = low + (high - low) // 2
        few = tl.sum(tl.where(b_bits > middle, b_p, 0.0), 0) < top_p
        low, high = tl.where(few, low, tl.minimum(middle + 1, high)), tl.where(few, middle, high)
    above = tl.sum(tl.where(b_bits > high, b_p, 0.0), 0)
    b_ties = tl.where(b_bits == high, b_p, 0.0)
    b_before = tl.cumsum(b_ties, 0) - b_ties
    return tl.where((b_bits > high) | ((b_bits == high) & (above + b_before < top_p)), b_p, 0.0)


@triton.jit
def choose_kernel(
    p_logits,
    p_recent,
    p_token,
    p_drawn,
    p_index,
    p_stop,
    p_ended,
    p_answer,
    B,
    block,
    temperature,
    top_k,
    top_p,
    min_p,
    penalty,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    STOPS: tl.constexpr,
    BV: tl.constexpr,
    BW: tl.constexpr,
    JOINS: tl.constexpr,
    GREEDY: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    PENALTY: tl.constexpr,
):
    """One row. JOINS: its last token is one of the recent ones from now on. The next takes its place."""
    i_b = tl.program_id(0).to(tl.int64)
    i_v, i_w = tl.arange(0, BV), tl.arange(0, BW)
    m_v = i_v < V
    p_recent += i_b * WINDOW
    if JOINS:
        last = tl.load(p_token + i_b)
        b_recent = tl.load(p_recent + i_w + 1, mask=i_w < WINDOW - 1, other=-1)
        b_recent = tl.where(i_w == WINDOW - 1, last, b_recent)
        tl.debug_barrier()
        tl.store(p_recent + i_w, b_recent, mask=i_w < WINDOW)
        tl.debug_barrier()
    b_x = tl.load(p_logits + i_b * V + i_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if PENALTY:
        b_seen = tl.zeros((BV,), tl.int1)
        for i in range(WINDOW):
            b_seen = b_seen | (i_v == tl.load(p_recent + i))
        b_x = tl.where(b_seen, tl.where(b_x > 0, b_x / penalty, b_x * penalty), b_x)
    log = tl.max(tl.zeros((BV,), tl.float32), 0)
    if GREEDY:
        token = tl.min(tl.where(b_x == tl.max(b_x, 0), i_v, BV), 0)
    else:
        b_x = b_x / temperature
        if TOP_K:
            b_x = tl.where(b_x < kth_largest(b_x, top_k), float("-inf"), b_x)
        b_p = tl.exp(b_x - tl.max(b_x, 0))
        b_p = b_p / tl.sum(b_p, 0)
        if MIN_P:
            b_p = tl.where(b_p >= min_p * tl.max(b_p, 0), b_p, 0.0)
        if TOP_P:
            b_p = nucleus(b_p, top_p)
        if MIN_P or TOP_P:
            b_p = b_p / tl.sum(b_p, 0)
        b_sum = tl.cumsum(b_p.to(tl.float64), 0)
        total = tl.max(b_sum, 0)
        at = tl.load(p_index + i_b)
        tl.store(p_index + i_b, at + 1)
        # A number that rounds up to the total would fall past the last token that can be had.
        below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        target = tl.minimum(tl.load(p_drawn + i_b * block + at) * total, below)
        token = tl.sum(((b_sum <= target) & m_v).to(tl.int32), 0)
        log = tl.log(tl.sum(tl.where(i_v == token, b_p, 0.0), 0))
    # Among numbers that compare with nothing there is none to choose, but what is chosen must be a token.
    token = tl.minimum(token, V - 1).to(tl.int64)
    said = token
    if STOPS > 0:
        ended = tl.load(p_ended + i_b) != 0
        for i in range(STOPS):
            ended = ended | (tl.load(p_stop + i) == token)
        tl.store(p_ended + i_b, ended)
        said = tl.where(ended, -1, token)
    tl.store(p_token + i_b, token)
    tl.store(p_answer + i_b, said.to(tl.float64))
    tl.store(p_answer + B + i_b, log.to(tl.float64))
