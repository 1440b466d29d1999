"""Sampling of the next token from logits in one kernel, with the bookkeeping of the decode loop."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device

MAX_VOCABULARY = 65536  # one program holds all logits of a batch row


# V logits, WINDOW recent tokens, STOPS stop tokens; BV, BW: padded. The rest: which options are in use.
SampleSizes = namedtuple("SampleSizes", "V WINDOW STOPS BV BW APPEND GREEDY TOP_K TOP_P MIN_P PENALTY")


def decode_sample(logits: Tensor, *buffers: Tensor, append: bool, sampling: Any) -> None:
    """Run `ops.decode.sample`."""
    (B, V), (recent, _, uniform, _, stop, *_) = logits.shape, buffers
    x, padded = sampling, [triton.next_power_of_2(size) for size in (V, recent.shape[1])]
    used = x.temperature == 0, x.top_k is not None and x.top_k < V, x.top_p is not None, x.min_p is not None
    sizes = SampleSizes(V, recent.shape[1], len(stop), *padded, append, *used, x.repetition_penalty != 1)
    settings = float(x.temperature), x.top_k or 0, float(x.top_p or 0), float(x.min_p or 0), float(x.repetition_penalty)
    warps = 1 if V <= 1024 else 4 if V <= 8192 else 16
    with on_device(logits):
        decode_sample_kernel[(B,)]((logits, *buffers), B, uniform.shape[1], settings, S=sizes, num_warps=warps)


# As above, where each row has options of its own.
SlotSampleSizes = namedtuple("SlotSampleSizes", "V WINDOW BV BW APPEND")


def decode_slot_sample(logits: Tensor, *buffers: Tensor, append: bool) -> None:
    """Run `ops.decode.sample_slots`."""
    (B, V), (recent, _, uniform, *_) = logits.shape, buffers
    sizes = SlotSampleSizes(
        V, recent.shape[1], *(triton.next_power_of_2(size) for size in (V, recent.shape[1])), append
    )
    warps = 1 if V <= 1024 else 4 if V <= 8192 else 16
    with on_device(logits):
        decode_slot_sample_kernel[(B,)]((logits, *buffers), uniform.shape[1], S=sizes, num_warps=warps)


@triton.jit
def kth_largest(b_x, k):
    """Return the k-th largest of b_x (float32) by bisection on its bits."""
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
    """Set to 0 the probabilities of tokens outside the nucleus: ordered by probability, then by token, those before
    them add up to top_p.
    """
    b_bits = b_p.to(tl.int32, bitcast=True)  # ordered as the probabilities, which are not negative
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
def decode_sample_kernel(pointers, B, block, settings, S: tl.constexpr):
    """Sample one batch row's token. APPEND: append its last token to the recent ones first."""
    p_logits, p_recent, p_token, p_uniform, p_index, p_stop, p_ended, p_answer = pointers
    temperature, top_k, top_p, min_p, penalty = settings
    BV: tl.constexpr = S.BV
    i_b = tl.program_id(0).to(tl.int64)
    i_v, i_w = tl.arange(0, BV), tl.arange(0, S.BW)
    m_v = i_v < S.V
    p_recent += i_b * S.WINDOW
    if S.APPEND:
        last = tl.load(p_token + i_b)
        b_recent = tl.load(p_recent + i_w + 1, mask=i_w < S.WINDOW - 1, other=-1)
        b_recent = tl.where(i_w == S.WINDOW - 1, last, b_recent)
        tl.debug_barrier()
        tl.store(p_recent + i_w, b_recent, mask=i_w < S.WINDOW)
        tl.debug_barrier()
    b_x = tl.load(p_logits + i_b * S.V + i_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if S.PENALTY:
        b_seen = tl.zeros((BV,), tl.int1)
        for i in range(S.WINDOW):
            b_seen = b_seen | (i_v == tl.load(p_recent + i))
        b_x = tl.where(b_seen, tl.where(b_x > 0, b_x / penalty, b_x * penalty), b_x)
    log = tl.max(tl.zeros((BV,), tl.float32), 0)
    if S.GREEDY:
        token = tl.min(tl.where(b_x == tl.max(b_x, 0), i_v, BV), 0)
    else:
        b_x = b_x / temperature
        if S.TOP_K:
            b_x = tl.where(b_x < kth_largest(b_x, top_k), float("-inf"), b_x)
        b_p = tl.exp(b_x - tl.max(b_x, 0))
        b_p = b_p / tl.sum(b_p, 0)
        if S.MIN_P:
            b_p = tl.where(b_p >= min_p * tl.max(b_p, 0), b_p, 0.0)
        if S.TOP_P:
            b_p = nucleus(b_p, top_p)
        if S.MIN_P or S.TOP_P:
            b_p = b_p / tl.sum(b_p, 0)
        b_sum = tl.cumsum(b_p.to(tl.float64), 0)
        total = tl.max(b_sum, 0)
        i_draw = tl.load(p_index + i_b)
        tl.store(p_index + i_b, i_draw + 1)
        # Stay below the total: a product that rounds up to it would select a token of probability 0.
        below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        target = tl.minimum(tl.load(p_uniform + i_b * block + i_draw) * total, below)
        token = tl.sum(((b_sum <= target) & m_v).to(tl.int32), 0)
        log = tl.log(tl.sum(tl.where(i_v == token, b_p, 0.0), 0))
    # Comparisons with NaN logits are false; the result must still be a valid token.
    token = tl.minimum(token, S.V - 1).to(tl.int64)
    answer = token
    if S.STOPS > 0:
        ended = tl.load(p_ended + i_b) != 0
        for i in range(S.STOPS):
            ended = ended | (tl.load(p_stop + i) == token)
        tl.store(p_ended + i_b, ended)
        answer = tl.where(ended, -1, token)
    tl.store(p_token + i_b, token)
    tl.store(p_answer + i_b, answer.to(tl.float64))
    tl.store(p_answer + B + i_b, log.to(tl.float64))


@triton.jit
def draw_token(b_x, p_options, uniform, V: tl.constexpr, BV: tl.constexpr):
    """Draw a token from the logits b_x of a row with the options temperature, top_k, min_p and top_p."""
    i_v = tl.arange(0, BV)
    temperature, top_k = tl.load(p_options), tl.load(p_options + 1).to(tl.int32)
    min_p, top_p = tl.load(p_options + 2), tl.load(p_options + 3)
    b_x = b_x / temperature
    if top_k < V:
        b_x = tl.where(b_x < kth_largest(b_x, top_k), float("-inf"), b_x)
    b_p = tl.exp(b_x - tl.max(b_x, 0))
    b_p = b_p / tl.sum(b_p, 0)
    if min_p > 0:
        b_p = tl.where(b_p >= min_p * tl.max(b_p, 0), b_p, 0.0)
    if top_p <= 1:
        b_p = nucleus(b_p, top_p)
    if (min_p > 0) | (top_p <= 1):
        b_p = b_p / tl.sum(b_p, 0)
    b_sum = tl.cumsum(b_p.to(tl.float64), 0)
    total = tl.max(b_sum, 0)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(uniform * total, below)
    return tl.sum(((b_sum <= target) & (i_v < V)).to(tl.int32), 0)


@triton.jit
def decode_slot_sample_kernel(pointers, block, S: tl.constexpr):
    """Sample one row's token by its own options. APPEND: append its last token to the recent ones first."""
    p_logits, p_recent, p_token, p_uniform, p_index, p_options = pointers
    BV: tl.constexpr = S.BV
    i_b = tl.program_id(0).to(tl.int64)
    i_v, i_w = tl.arange(0, BV), tl.arange(0, S.BW)
    p_recent += i_b * S.WINDOW
    p_options += i_b * 6
    if S.APPEND:
        last = tl.load(p_token + i_b)
        b_recent = tl.load(p_recent + i_w + 1, mask=i_w < S.WINDOW - 1, other=-1)
        b_recent = tl.where(i_w == S.WINDOW - 1, last, b_recent)
        tl.debug_barrier()
        tl.store(p_recent + i_w, b_recent, mask=i_w < S.WINDOW)
        tl.debug_barrier()
    b_x = tl.load(p_logits + i_b * S.V + i_v, mask=i_v < S.V, other=float("-inf")).to(tl.float32)
    penalty = tl.load(p_options + 4)
    if penalty != 1:
        b_seen = tl.zeros((BV,), tl.int1)
        for i in range(S.WINDOW - tl.load(p_options + 5).to(tl.int32), S.WINDOW):
            b_seen = b_seen | (i_v == tl.load(p_recent + i))
        b_x = tl.where(b_seen, tl.where(b_x > 0, b_x / penalty, b_x * penalty), b_x)
    i_draw = tl.load(p_index + i_b)
    tl.store(p_index + i_b, (i_draw + 1) % block)
    if tl.load(p_options) == 0:
        token = tl.min(tl.where(b_x == tl.max(b_x, 0), i_v, BV), 0)
    else:
        token = draw_token(b_x, p_options, tl.load(p_uniform + i_b * block + i_draw), S.V, BV)
    # Comparisons with NaN logits are false; the result must still be a valid token.
    tl.store(p_token + i_b, tl.minimum(token, S.V - 1).to(tl.int64))
