"""Local attention, forward: softmax over a stretch of keys, block by block, without its scores in memory."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E
from longspan.ops.common.tiles import add_product, load_rows, product, store_rows, token_pointer, zeros
from longspan.ops.window.triton.window_device import LAST, find_queries, is_between, kept, power, store_log


@triton.jit(do_not_specialize=["T", "S"])
def local_forward_kernel(
    p_q, p_k, p_v, p_mask, p_start, p_bounds, p_seed, p_out, p_lse, T, S, scale, rate, q, k, v, W: tl.constexpr
):
    """BT queries of one head. scale: that of the scores times log₂e. lse: log₂ of the sum, see `store_log`."""
    PRECISION: tl.constexpr = W.PRECISION
    i_b, i_h, i_0, i_t, low, high, begin, end, inner, outer = find_queries(p_start, p_bounds, T, S, W)
    i_kv = i_h // (W.H // W.HKV)
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)

    b_q = load_rows(p_q, q.t, T - i_0, W.D, W.BT, W.BD)
    b_max = tl.full((W.BT,), float("-inf"), tl.float32)
    b_sum = zeros(W.BT)
    b_out = zeros(W.BT, W.BE)
    for s_0 in range(begin, end, W.BS):
        i_s = s_0 + tl.arange(0, W.BS)
        b_k = load_rows(token_pointer(p_k, k, i_b, s_0, i_kv), k.t, S - s_0, W.D, W.BS, W.BD)
        b_v = load_rows(token_pointer(p_v, v, i_b, s_0, i_kv), v.t, S - s_0, W.E, W.BS, W.BE)
        b_s = product(b_q, tl.trans(b_k), PRECISION) * scale
        if W.ALONE:
            b_s = tl.where((i_t + (S - T))[:, None] == i_s[None, :], LAST, b_s)
        if p_mask is not None:
            b_s = tl.where((tl.load(p_mask + i_b * S + i_s, mask=i_s < S, other=0) != 0)[None, :], b_s, float("-inf"))
        if (s_0 < inner) | (s_0 + W.BS > outer):
            b_s = tl.where(is_between(i_s[None, :], low[:, None], high[:, None]), b_s, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_p = power(b_s - b_base[:, None], W)
        b_decay = power(b_max - b_base, W)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_out *= b_decay[:, None]
        if p_seed is not None:
            m_kept = kept(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[:, None], i_s[None, :], rate)
            b_p = tl.where(m_kept, b_p / (1 - rate), 0.0)
        b_out = add_product(b_p.to(b_v.dtype), b_v, b_out, PRECISION)
        b_max = b_top
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)
    # A plain division is off by two ulps, the same in all of a row, and the backward pass takes differences.
    b_out *= tl.div_rn(1.0, b_sum)[:, None]
    # The hardware's logarithm is off by more than a rounding, which weights made from it would show: one Newton step.
    b_log = tl.log2(b_sum)
    b_log += (b_sum * power(-b_log, W) - 1) * LOG2E
    store_log(p_lse, (i_b * W.H + i_h) * T + i_t, i_t < T, b_max, b_log, W)
    store_rows(p_out + ((i_b * T + i_0) * W.H + i_h) * W.E, W.H * W.E, T - i_0, b_out, W.E, W.BT, W.BE)
