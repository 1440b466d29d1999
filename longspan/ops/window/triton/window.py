"""Windowed softmax attention in tiles (FlashAttention with a window), forward and backward.

For every window, exact or in blocks, causal or not, packed or with a past, the keys that a query sees are one range,
and both ends of it rise with the query. A tile of queries therefore iterates from its first query's first key to its
last query's last key, and masks pairs only outside the range that all its queries see.

    P = exp2(S − lse),   D_i = Σ_e dout_ie out_ie,   dS = P ∘ (dout Vᵀ − D),   dq = dS K,   dk = dSᵀ q,   dv = Pᵀ dout

The gradient of the log-sum-exp is subtracted from D, since ∂lse_i/∂S_ij = P_ij. The backward pass recomputes P from
the saved lse. One kernel iterates over the keys of each query for dq and D, which it stores beside lse, a second over
the queries of each key for dk and dv, a third over batch rows and blocks for the gradient of a bias: without atomic
additions, results are deterministic.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, exact_exp2
from longspan.ops.common.launch import Launch, Plan, Signature, Strides, dense, dense_rows, new_like, on_device
from longspan.ops.common.tiles import (
    add_product,
    columns,
    load_block,
    load_columns,
    product_of_columns,
    program_index,
    store_columns,
    token_pointer,
    zeros,
)
from longspan.ops.window import TENSORS, Window, WindowProblem, WindowSaved

# With shared queries and keys, the score of a query's own key: below every other score, above −∞.
LAST_RESORT = tl.constexpr(-1e30)
ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass BigCrush


# Heads, dimensions, window, queries (BT) and keys (BS) per tile.
# BD, RD, BE, RE: the widths of a tile's blocks, see `columns`. Values named _rest are those of the second block.
# P, K, FIRST: rows and columns of the bias of a head, and the number of its blocks before a query's own; 0 without.
# EVEN: tiles divide queries and keys. Loads have no masks then, which take many registers, and begin at whole tiles.
# BY_DISTANCE: and whether a query sees a key depends on the distance alone.
# SQ, SK, SV, SD: strides along tokens of q, k, v and the gradient, which are offsets in load instructions.
WindowSizes = namedtuple(
    "WindowSizes",
    "H HKV D E BLOCK BACK AHEAD CAUSAL SHARED_QK BD RD BE RE P K FIRST PRECISION BT BS EVEN BY_DISTANCE SQ SK SV SD",
)
PROGRAMS = 1024  # least number of programs that compute the gradient of a bias, where there are as many blocks


# Queries and keys per tile, warps, pipeline stages.
Tiling = namedtuple("Tiling", "queries keys warps stages")


def tilings(dim: int, half_precision: bool, even: bool) -> tuple[Tiling, Tiling, Tiling]:
    """Return the tilings of the forward kernel, of that for dq and of that for dk and dv.

    Args:
        dim: The padded dimension of a head.
        half_precision: Whether the inputs are bfloat16 or float16.
        even: Whether 64 divides the numbers of queries and keys, so that loads take no masks and fewer registers.
    """
    if not half_precision:
        small = Tiling(32, 32, 4 if dim <= 64 else 8, 1) if dim <= 128 else Tiling(16, 32, 8, 1)
        return small, small, small
    if dim <= 64:
        d_queries, d_keys = (
            (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3)) if even else (Tiling(64, 32, 4, 3), Tiling(64, 64, 4, 2))
        )
        return Tiling(64, 64, 4, 3), d_queries, d_keys
    if dim <= 128:
        return Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64 if even else 32, 64, 4, 2)
    return Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2)


def forward(problem: WindowProblem) -> tuple[Tensor, Tensor]:
    """Return out (B, T, H, E) and lse (B, H, T, 1) in base 2; for float32 (B, H, T, 2), with its rounding error."""
    inputs = _inputs(problem)
    return WindowPlan.of(inputs, *problem.options).attend(*inputs)


def backward(saved: WindowSaved, problem: WindowProblem) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and bias."""
    inputs, d_out, out, lse = _inputs(problem), dense_rows(saved.d_out), saved.out.contiguous(), saved.lse
    d_lse = None if saved.d_lse is None else saved.d_lse[..., 0].contiguous()
    plan = WindowPlan.of((*inputs, d_out, out, lse, d_lse), *problem.options)
    return plan.differentiate(d_out, d_lse, out, lse, *inputs)


def _inputs(problem: WindowProblem) -> tuple[Any, ...]:
    """Return the tensors as kernels take them: q, k, v, mask, start, bounds, seed, bias."""
    q, k, v, mask, *rest, bias = problem.tensors
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    return dense_rows(q), dense_rows(k), dense_rows(v), mask, *map(dense, rest), dense(bias)


class WindowPlan(Plan):
    """Launches of the forward pass, or of the backward pass where the signature has d_out."""

    def __init__(self, device: int, key: Signature, *options: Any) -> None:
        super().__init__(device)
        *given, scale, dropout, bias_grad = options
        block_size, back, ahead, causal, shared_qk = given
        q, k, v, _, start, bounds, *_ = key
        (B, T, H, D), (S, Hkv), E = q[0], k[0][1:3], v[0][3]
        BD, RD = columns(D)
        BE, RE = columns(E)
        half_precision = q[2] != torch.float32
        limit = 2**30 // max(block_size, 1) - 1  # keeps key indices in int32
        window = block_size, min(back, limit), min(ahead, limit), causal, shared_qk
        bias = key[TENSORS - 1]
        table = (0, 0, 0) if bias is None else (*bias[0][1:], Window(*given).blocks(bias[0][1])[0])
        widths, precision = (BD, RD, BE, RE), "tf32" if half_precision else "ieee"
        tokens = [x[1][1] for x in (q, k, v, *key[TENSORS : TENSORS + 1])]  # strides
        tokens += [0] * (4 - len(tokens))
        sizes = WindowSizes(H, Hkv, D, E, *window, *widths, *table, precision, 0, 0, False, False, *tokens)
        by_distance = block_size == 0 and start is None and bounds is None
        scores = T, S, scale * math.log2(math.e), dropout
        self.out_shape, self.lse_shape = (B, T, H, E), (B, H, T, 1 if half_precision else 2)
        self.pairs = B, H, T, 2

        def launch(kernel: Any, tiling: Tiling, blocks: int, *scalars: Any) -> Launch:
            even = T % tiling.queries == 0 and S % tiling.keys == 0
            tiles = {"BT": tiling.queries, "BS": tiling.keys, "EVEN": even, "BY_DISTANCE": even and by_distance}
            constants = {"W": sizes._replace(**tiles)}
            constants |= {"num_warps": tiling.warps, "num_stages": tiling.stages}
            return self.launch(kernel, (B * blocks,), (*scores, *scalars), constants)

        first, d_queries, d_keys = tilings(max(BD + RD, BE + RE), half_precision, T % 64 == 0 and S % 64 == 0)
        strides = tuple(Strides.of(x) for x in (q, k, v, *key[TENSORS : TENSORS + 1]))
        if len(key) == TENSORS:
            self.forward = launch(window_forward_kernel, first, -(-T // first.queries) * H, strides)
        else:
            blocks = -(-T // d_queries.queries) * H, -(-S // d_keys.keys) * Hkv
            self.d_queries = launch(window_backward_queries_kernel, d_queries, blocks[0], scale, strides)
            self.d_keys = launch(window_backward_keys_kernel, d_keys, blocks[1], scale, strides)
        self.bias_parts = 0
        if bias_grad and len(key) > TENSORS:
            P, K, _ = table
            tiles = H * -(-P // d_queries.queries) * -(-K // d_queries.keys)
            self.bias_parts = min(-(-PROGRAMS // tiles), B * (S // P + 2))
            constants = {"W": sizes._replace(BT=d_queries.queries, BS=d_queries.keys)}
            constants |= {"num_warps": d_queries.warps, "num_stages": 2}
            scalars = (*scores, B, self.bias_parts, strides)
            self.d_bias = self.launch(window_backward_bias_kernel, (tiles * self.bias_parts,), scalars, constants)

    def attend(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Launch; see `forward`. inputs: as `_inputs` returns them."""
        q = inputs[0]
        out, lse = q.new_empty(self.out_shape), q.new_empty(self.lse_shape, dtype=torch.float32)
        with on_device(q):
            self.forward(self.addresses(*inputs), *self.addresses(out, lse))
        return out, lse

    def differentiate(
        self, d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Launch; see `backward`."""
        d_q, d_k, d_v, pairs = new_like(inputs[0]), new_like(inputs[1]), new_like(inputs[2]), lse.new_empty(self.pairs)
        p_out, p_lse, p_d, p_d_lse, p_pairs = self.addresses(out, lse, d_out, d_lse, pairs)
        p_inputs, (p_d_q, p_d_k, p_d_v) = self.addresses(*inputs), self.addresses(d_q, d_k, d_v)
        with on_device(out):
            self.d_queries(p_inputs, p_out, p_lse, p_d, p_d_lse, p_d_q, p_pairs)
            self.d_keys(p_inputs, p_lse, p_d, p_pairs, p_d_k, p_d_v)
            if not self.bias_parts:
                return d_q, d_k, d_v, None
            bias = inputs[-1]
            parts = pairs.new_empty(self.bias_parts, *bias.shape)
            self.d_bias(p_inputs, p_lse, p_d, p_pairs, *self.addresses(parts))
        return d_q, d_k, d_v, parts.sum(0).to(bias.dtype)


@triton.jit
def sequence_bounds(i_b, i_t, p_start, p_bounds, T, S, W: tl.constexpr):
    """Return the first and end key index of the sequence of token i_t, and the offset that aligns its blocks.

    p_bounds: (2, T) first and end of packed sequences. p_start: (B,) position of key 0; keys at negative positions are
    hidden.
    """
    first, end, phase = i_t * 0, i_t * 0 + S, i_t * 0
    if p_bounds is not None:
        i_in = tl.minimum(i_t, T - 1)
        first, end = tl.load(p_bounds + i_in), tl.load(p_bounds + T + i_in)
        phase = -first
    if p_start is not None:
        start = tl.load(p_start + i_b)
        first += tl.maximum(-start, 0).to(tl.int32)
        if W.BLOCK > 0:
            phase += ((start % W.BLOCK + W.BLOCK) % W.BLOCK).to(tl.int32)
    return first, end, phase


@triton.jit
def window_range(i_s, phase, BACK: tl.constexpr, AHEAD: tl.constexpr, W: tl.constexpr):
    """Return the range from BACK before i_s to AHEAD after it, in keys or in blocks."""
    if W.BLOCK > 0:
        block = (i_s + phase) // W.BLOCK * W.BLOCK - phase
        low, high = block - BACK * W.BLOCK, block + (AHEAD + 1) * W.BLOCK
    else:
        low, high = i_s - BACK, i_s + (AHEAD + 1)
    return low, high


@triton.jit
def visible_keys(i_b, i_t, p_start, p_bounds, T, S, W: tl.constexpr):
    """Return the range [low, high) of keys that query i_t sees; i_t is a scalar or a block."""
    first, end, phase = sequence_bounds(i_b, i_t, p_start, p_bounds, T, S, W)
    i_s = i_t + (S - T)
    low, high = window_range(i_s, phase, W.BACK, W.AHEAD, W)
    if W.CAUSAL:
        high = tl.minimum(high, i_s + 1)
    return tl.maximum(low, first), tl.minimum(high, end)


@triton.jit
def program_queries(p_start, p_bounds, T, S, W: tl.constexpr):
    """Return a program's batch row, head, first query, queries (BT,) and the range of keys of each.

    Then the range of keys of all its queries together, [begin, end), and that which every query sees, [inner, outer).
    """
    i_h, _, i_block, i_b = program_index(tl.cdiv(T, W.BT), W.H)
    i_0 = i_block * W.BT
    i_t = i_0 + tl.arange(0, W.BT)
    low, high = visible_keys(i_b, i_t, p_start, p_bounds, T, S, W)
    last = tl.minimum(i_0 + W.BT, T) - 1
    begin, outer = visible_keys(i_b, i_0, p_start, p_bounds, T, S, W)
    inner, end = visible_keys(i_b, last, p_start, p_bounds, T, S, W)
    if W.EVEN:
        begin = begin // W.BS * W.BS
    return i_b, i_h, i_0, i_t, low, high, begin, end, inner, outer


@triton.jit
def visible_queries(i_b, i_s, p_start, p_bounds, T, S, W: tl.constexpr):
    """Return the range [low, high) of queries that see key i_s, a scalar."""
    first, end, phase = sequence_bounds(i_b, i_s, p_start, p_bounds, S, S, W)
    low, high = window_range(i_s, phase, W.AHEAD, W.BACK, W)
    if W.CAUSAL:
        low = tl.maximum(low, i_s)
    offset = S - T
    return tl.maximum(low - offset, 0), tl.minimum(high, end) - offset


@triton.jit
def dropout_mask(p_seed, i_x, i_t, i_s, dropout):
    """Return which weights dropout keeps; depends on seed, head and positions, not on the tiling."""
    r, _, _, _ = tl.philox(tl.load(p_seed), i_t, i_s, i_x, 0, n_rounds=ROUNDS)
    return tl.uint_to_uniform_float(r) >= dropout


@triton.jit
def bias_phase(i_b, p_start, W: tl.constexpr):
    """Return the offset that aligns key indices with the blocks of the bias."""
    phase = (i_b * 0).to(tl.int32)
    if p_start is not None:
        phase += ((tl.load(p_start + i_b) % W.P + W.P) % W.P).to(tl.int32)
    return phase


@triton.jit
def add_bias(b_s, p_bias, i_h, i_q, i_s, phase, W: tl.constexpr):
    """Add the bias to scores in base 2. i_q, i_s: key indices of queries and keys, one of them a row, one a column."""
    if p_bias is not None:
        i_p = i_q + phase
        i_column = i_s + phase - (i_p // W.P - W.FIRST) * W.P
        p_bias += (i_h * W.P + i_p % W.P) * W.K + i_column
        b_s += tl.load(p_bias, mask=(i_column >= 0) & (i_column < W.K), other=0.0).to(tl.float32) * LOG2E
    return b_s


@triton.jit
def load_tokens(
    p_x,
    x,
    STRIDE: tl.constexpr,
    i_b,
    i_0,
    i_h,
    end,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    W: tl.constexpr,
):
    """`load_columns` of tokens i_0 on of one batch row and head, zeros from `end` on. x: strides, the second STRIDE."""
    p_x = token_pointer(p_x, x, i_b, 0, i_h) + tl.cast(i_0, tl.int64) * STRIDE
    return load_columns(p_x, STRIDE, None if W.EVEN else end - i_0, SIZE, C, BLOCK, REST)


@triton.jit
def load_between(p_x, stride, i_0, end, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """`load_columns` of rows i_0 on at p_x, zeros before row 0 and from `end` on."""
    i_t = i_0 + tl.arange(0, C)
    m_t = (i_t >= 0) & (i_t < end)
    b_x = load_block(p_x, stride, m_t, BLOCK if REST > 0 else SIZE, C, BLOCK)
    b_rest = b_x
    if REST > 0:
        b_rest = load_block(p_x + BLOCK, stride, m_t, SIZE - BLOCK, C, REST)
    return b_x, b_rest


@triton.jit
def is_between(i, low, high):
    """low ≤ i < high in one comparison."""
    return (i - low).to(tl.uint32) < tl.maximum(high - low, 0).to(tl.uint32)


@triton.jit
def tile_at_edge(i_b, t_0, s_0, p_start, p_bounds, T, S, W: tl.constexpr):
    """Whether a query of the tile from t_0 on does not see all keys of that from s_0 on."""
    if W.BY_DISTANCE:
        inner = t_0 + (S - T) + (W.BT - 1 - W.BACK)
        outer = t_0 + (S - T) + (1 if W.CAUSAL else W.AHEAD + 1)
    else:
        _, outer = visible_keys(i_b, t_0, p_start, p_bounds, T, S, W)
        inner, _ = visible_keys(i_b, tl.minimum(t_0 + W.BT, T) - 1, p_start, p_bounds, T, S, W)
    return (s_0 < inner) | (s_0 + W.BS > outer)


@triton.jit
def hide(b_s, distance, i_s, low, high, W: tl.constexpr):
    """Return scores with −∞ for keys i_s that queries do not see. distance: from a key to the query's own.

    low, high: the range of keys that a query sees.
    """
    if W.BY_DISTANCE:
        AHEAD: tl.constexpr = 0 if W.CAUSAL else W.AHEAD
        m_s = (distance + AHEAD).to(tl.uint32) < tl.cast(W.BACK + AHEAD + 1, tl.uint32)
    else:
        m_s = is_between(i_s, low, high)
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def exp2_negative(b_x, W: tl.constexpr):
    """2^x of x ≤ 0, to one ulp in float32."""
    return exact_exp2(b_x) if W.PRECISION == "ieee" else tl.exp2(b_x)


@triton.jit
def store_lse(p_lse, i_row, m_row, b_max, b_log, W: tl.constexpr):
    """Store lse = max + log, ∞ for queries that see no key. "ieee": and the rounding error of the sum beside it."""
    m_blind = b_max == float("-inf")
    b_lse = tl.where(m_blind, float("inf"), b_max + b_log)
    if W.PRECISION == "ieee":
        b_rest = tl.where(m_blind, 0.0, (b_max - b_lse) + b_log)
        tl.store(p_lse + 2 * i_row, b_lse, mask=m_row)
        tl.store(p_lse + 2 * i_row + 1, b_rest, mask=m_row)
    else:
        tl.store(p_lse + i_row, b_lse, mask=m_row)


@triton.jit
def load_lse(p_lse, i_row, m_row, W: tl.constexpr):
    """Load what `store_lse` stored: lse and its rounding error."""
    if W.PRECISION == "ieee":
        b_lse = tl.load(p_lse + 2 * i_row, mask=m_row, other=float("inf"))
        b_rest = tl.load(p_lse + 2 * i_row + 1, mask=m_row, other=0.0)
    else:
        b_lse = tl.load(p_lse + i_row, mask=m_row, other=float("inf"))
        b_rest = b_lse  # unused
    return b_lse, b_rest


@triton.jit
def load_pairs(p_pairs, p_lse, i_row, t_0, T, W: tl.constexpr):
    """Load lse, its rounding error and D − dlse of queries t_0 on; i_row is the first one of the head.

    Triton loads a vector of fewer elements than threads many times over, a block of pairs once.
    """
    i_t = tl.arange(0, W.BT)
    p_pairs += 2 * (i_row + t_0) + (2 * i_t[:, None] + tl.arange(0, 2)[None, :])
    if W.EVEN:
        b_lse, b_delta = tl.split(tl.load(p_pairs))
    else:
        b_lse, b_delta = tl.split(tl.load(p_pairs, mask=(i_t < T - t_0)[:, None], other=0.0))
        b_lse = tl.where(i_t < T - t_0, b_lse, float("inf"))
    b_rest = b_lse  # unused
    if W.PRECISION == "ieee":
        b_rest = tl.load(p_lse + 2 * (i_row + t_0 + i_t) + 1, mask=i_t < T - t_0, other=0.0)
    return b_lse, b_rest, b_delta


@triton.jit
def relative_to(b_s, b_lse, b_rest, W: tl.constexpr):
    """Return s − lse, the logarithms of the softmax weights of scores s. Before masks: one instruction with a scale."""
    b_s -= b_lse
    if W.PRECISION == "ieee":
        b_s -= b_rest
    return b_s


@triton.jit(do_not_specialize=["T", "S"])
def window_forward_kernel(inputs, p_out, p_lse, T, S, scale, dropout, strides, W: tl.constexpr):
    """Compute BT queries of one head. scale: that of the scores times log₂ e. p_lse: base 2, see `store_lse`."""
    PRECISION: tl.constexpr = W.PRECISION
    p_q, p_k, p_v, p_mask, p_start, p_bounds, p_seed, p_bias = inputs
    q, k, v = strides
    i_b, i_h, i_0, i_t, low, high, begin, end, inner, outer = program_queries(p_start, p_bounds, T, S, W)
    i_kv = i_h // (W.H // W.HKV)
    phase = bias_phase(i_b, p_start, W) if p_bias is not None else 0

    b_q, b_q_rest = load_tokens(p_q, q, W.SQ, i_b, i_0, i_h, T, W.D, W.BT, W.BD, W.RD, W)
    b_max = tl.full((W.BT,), float("-inf"), tl.float32)
    b_sum = zeros(W.BT)
    b_out = zeros(W.BT, W.BE)
    b_out_rest = zeros(W.BT, W.RE if W.RE > 0 else 16)
    for s_0 in range(begin, end, W.BS):
        i_s = s_0 + tl.arange(0, W.BS)
        b_k, b_k_rest = load_tokens(p_k, k, W.SK, i_b, s_0, i_kv, S, W.D, W.BS, W.BD, W.RD, W)
        b_v, b_v_rest = load_tokens(p_v, v, W.SV, i_b, s_0, i_kv, S, W.E, W.BS, W.BE, W.RE, W)
        b_s = product_of_columns(b_q, b_q_rest, b_k, b_k_rest, W.RD, PRECISION) * scale
        b_s = add_bias(b_s, p_bias, i_h, (i_t + (S - T))[:, None], i_s[None, :], phase, W)
        if W.SHARED_QK:
            b_s = tl.where((i_t + (S - T))[:, None] == i_s[None, :], LAST_RESORT, b_s)
        if p_mask is not None:
            b_s = tl.where((tl.load(p_mask + i_b * S + i_s, mask=i_s < S, other=0) != 0)[None, :], b_s, float("-inf"))
        if (s_0 < inner) | (s_0 + W.BS > outer):
            distance = (i_t + (S - T))[:, None] - i_s[None, :]
            b_s = hide(b_s, distance, i_s[None, :], low[:, None], high[:, None], W)
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_p = exp2_negative(b_s - b_base[:, None], W)
        b_decay = exp2_negative(b_max - b_base, W)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_out *= b_decay[:, None]
        if W.RE > 0:
            b_out_rest *= b_decay[:, None]
        if p_seed is not None:
            m_kept = dropout_mask(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[:, None], i_s[None, :], dropout)
            b_p = tl.where(m_kept, b_p / (1 - dropout), 0.0)
        b_p = b_p.to(b_v.dtype)
        b_out = add_product(b_p, b_v, b_out, PRECISION)
        if W.RE > 0:
            b_out_rest = add_product(b_p, b_v_rest, b_out_rest, PRECISION)
        b_max = b_top
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)
    # Approximate division is off by two ulps for all of a row, and the backward pass takes differences of outputs.
    b_scale = tl.div_rn(1.0, b_sum)[:, None]
    # One Newton step: the hardware's logarithm is not correctly rounded, which would show in the recomputed weights.
    b_log = tl.log2(b_sum)
    b_log += (b_sum * exp2_negative(-b_log, W) - 1) * LOG2E
    store_lse(p_lse, (i_b * W.H + i_h) * T + i_t, i_t < T, b_max, b_log, W)
    p_out += ((i_b * T + i_0) * W.H + i_h) * W.E
    rows = None if W.EVEN else T - i_0
    store_columns(p_out, W.H * W.E, rows, b_out * b_scale, b_out_rest * b_scale, W.E, W.BT, W.BE, W.RE)


@triton.jit(do_not_specialize=["T", "S"])
def window_backward_queries_kernel(
    inputs, p_out, p_lse, p_d_out, p_d_lse, p_d_q, p_pairs, T, S, scale, dropout, score_scale, strides, W: tl.constexpr
):
    """Compute dq of BT queries of one head, and pairs of lse and D − dlse. score_scale: without log₂ e."""
    PRECISION: tl.constexpr = W.PRECISION
    p_q, p_k, p_v, p_mask, p_start, p_bounds, p_seed, p_bias = inputs
    q, k, v, d_out = strides
    i_b, i_h, i_0, i_t, low, high, begin, end, inner, outer = program_queries(p_start, p_bounds, T, S, W)
    i_kv = i_h // (W.H // W.HKV)
    phase = bias_phase(i_b, p_start, W) if p_bias is not None else 0

    i_row, rows = (i_b * T + i_0) * W.H + i_h, None if W.EVEN else T - i_0
    b_d_out, b_d_out_rest = load_tokens(p_d_out, d_out, W.SD, i_b, i_0, i_h, T, W.E, W.BT, W.BE, W.RE, W)
    b_out, b_out_rest = load_columns(p_out + i_row * W.E, W.H * W.E, rows, W.E, W.BT, W.BE, W.RE)
    b_delta = tl.sum(b_d_out.to(tl.float32) * b_out.to(tl.float32), 1)
    if W.RE > 0:
        b_delta += tl.sum(b_d_out_rest.to(tl.float32) * b_out_rest.to(tl.float32), 1)
    i_lse = (i_b * W.H + i_h) * T + i_t
    b_lse, b_rest = load_lse(p_lse, i_lse, i_t < T, W)
    b_error = zeros(W.BT)
    if p_d_lse is not None:
        b_error -= tl.load(p_d_lse + i_lse, mask=i_t < T, other=0.0) * LOG2E
        b_delta += b_error
    tl.store(p_pairs + 2 * i_lse, b_lse, mask=i_t < T)
    if W.PRECISION != "ieee":
        tl.store(p_pairs + 2 * i_lse + 1, b_delta, mask=i_t < T)
    b_q, b_q_rest = load_tokens(p_q, q, W.SQ, i_b, i_0, i_h, T, W.D, W.BT, W.BD, W.RD, W)
    b_d_q, b_d_q_rest = zeros(W.BT, W.BD), zeros(W.BT, W.RD if W.RD > 0 else 16)
    b_mean, b_mean_rest = zeros(W.BT, W.BD), zeros(W.BT, W.RD if W.RD > 0 else 16)
    for s_0 in range(begin, end, W.BS):
        i_s = s_0 + tl.arange(0, W.BS)
        b_k, b_k_rest = load_tokens(p_k, k, W.SK, i_b, s_0, i_kv, S, W.D, W.BS, W.BD, W.RD, W)
        b_v, b_v_rest = load_tokens(p_v, v, W.SV, i_b, s_0, i_kv, S, W.E, W.BS, W.BE, W.RE, W)
        b_s = product_of_columns(b_q, b_q_rest, b_k, b_k_rest, W.RD, PRECISION) * scale
        b_s = add_bias(b_s, p_bias, i_h, (i_t + (S - T))[:, None], i_s[None, :], phase, W)
        b_s = relative_to(b_s, b_lse[:, None], b_rest[:, None], W)
        b_d_p = product_of_columns(b_d_out, b_d_out_rest, b_v, b_v_rest, W.RE, PRECISION)
        if W.SHARED_QK:
            b_s = tl.where((i_t + (S - T))[:, None] == i_s[None, :], float("-inf"), b_s)
        if p_mask is not None:
            b_s = tl.where((tl.load(p_mask + i_b * S + i_s, mask=i_s < S, other=0) != 0)[None, :], b_s, float("-inf"))
        if (s_0 < inner) | (s_0 + W.BS > outer):
            distance = (i_t + (S - T))[:, None] - i_s[None, :]
            b_s = hide(b_s, distance, i_s[None, :], low[:, None], high[:, None], W)
        b_p = exp2_negative(b_s, W)
        if p_seed is not None:
            m_kept = dropout_mask(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[:, None], i_s[None, :], dropout)
            b_d_p = tl.where(m_kept, b_d_p / (1 - dropout), 0.0)
        b_d_s = b_p * (b_d_p - b_delta[:, None])
        b_rounded = b_d_s.to(b_k.dtype)
        b_d_q = add_product(b_rounded, b_k, b_d_q, PRECISION)
        if W.RD > 0:
            b_d_q_rest = add_product(b_rounded, b_k_rest, b_d_q_rest, PRECISION)
        if W.PRECISION == "ieee":
            b_error += tl.sum(b_d_s, 1)
            b_mean = add_product(b_p, b_k, b_mean, PRECISION)
            if W.RD > 0:
                b_mean_rest = add_product(b_p, b_k_rest, b_mean_rest, PRECISION)
    if W.PRECISION == "ieee":
        # Σ_j dS_ij is dlse_i but for the rounding error of D, which matters where few keys are visible.
        b_d_q -= b_error[:, None] * b_mean
        b_d_q_rest -= b_error[:, None] * b_mean_rest
        tl.store(p_pairs + 2 * i_lse + 1, b_delta + b_error, mask=i_t < T)
    b_d_q, b_d_q_rest = b_d_q * score_scale, b_d_q_rest * score_scale
    store_columns(p_d_q + i_row * W.D, W.H * W.D, rows, b_d_q, b_d_q_rest, W.D, W.BT, W.BD, W.RD)


@triton.jit(do_not_specialize=["T", "S"])
def window_backward_keys_kernel(
    inputs, p_lse, p_d_out, p_pairs, p_d_k, p_d_v, T, S, scale, dropout, score_scale, strides, W: tl.constexpr
):
    """Compute dk and dv of BS keys of one key/value head, summed over the query heads that share it."""
    G: tl.constexpr = W.H // W.HKV
    PRECISION: tl.constexpr = W.PRECISION
    p_q, p_k, p_v, p_mask, p_start, p_bounds, p_seed, p_bias = inputs
    q, k, v, d_out = strides
    i_kv, _, i_block, i_b = program_index(tl.cdiv(S, W.BS), W.HKV)
    s_0 = i_block * W.BS
    i_s = s_0 + tl.arange(0, W.BS)
    phase = bias_phase(i_b, p_start, W) if p_bias is not None else 0
    last = tl.minimum(s_0 + W.BS, S) - 1
    begin, _ = visible_queries(i_b, s_0, p_start, p_bounds, T, S, W)
    _, end = visible_queries(i_b, last, p_start, p_bounds, T, S, W)
    if W.EVEN:
        begin = begin // W.BT * W.BT

    b_k, b_k_rest = load_tokens(p_k, k, W.SK, i_b, s_0, i_kv, S, W.D, W.BS, W.BD, W.RD, W)
    b_v, b_v_rest = load_tokens(p_v, v, W.SV, i_b, s_0, i_kv, S, W.E, W.BS, W.BE, W.RE, W)
    b_d_k, b_d_k_rest = zeros(W.BS, W.BD), zeros(W.BS, W.RD if W.RD > 0 else 16)
    b_d_v, b_d_v_rest = zeros(W.BS, W.BE), zeros(W.BS, W.RE if W.RE > 0 else 16)
    m_key = i_s < S
    if p_mask is not None:
        m_key = tl.load(p_mask + i_b * S + i_s, mask=m_key, other=0) != 0
    for i_g in range(G):
        i_h = i_kv * G + i_g
        i_row = (i_b * W.H + i_h) * T
        for t_0 in range(begin, end, W.BT):
            i_t = t_0 + tl.arange(0, W.BT)
            b_q, b_q_rest = load_tokens(p_q, q, W.SQ, i_b, t_0, i_h, T, W.D, W.BT, W.BD, W.RD, W)
            b_d_out, b_d_out_rest = load_tokens(p_d_out, d_out, W.SD, i_b, t_0, i_h, T, W.E, W.BT, W.BE, W.RE, W)
            b_lse, b_rest, b_delta = load_pairs(p_pairs, p_lse, i_row, t_0, T, W)
            low, high = visible_keys(i_b, i_t, p_start, p_bounds, T, S, W)
            b_s = product_of_columns(b_k, b_k_rest, b_q, b_q_rest, W.RD, PRECISION) * scale
            b_s = add_bias(b_s, p_bias, i_h, (i_t + (S - T))[None, :], i_s[:, None], phase, W)
            b_s = relative_to(b_s, b_lse[None, :], b_rest[None, :], W)
            m_own = (i_t + (S - T))[None, :] == i_s[:, None]
            if W.SHARED_QK:
                b_s = tl.where(m_own, (LAST_RESORT.value - b_lse)[None, :], b_s)
            if p_mask is not None:
                b_s = tl.where(m_key[:, None], b_s, float("-inf"))
            if tile_at_edge(i_b, t_0, s_0, p_start, p_bounds, T, S, W):
                distance = i_t[None, :] - (i_s - (S - T))[:, None]
                b_s = hide(b_s, distance, i_s[:, None], low[None, :], high[None, :], W)
            b_p = exp2_negative(b_s, W)
            b_d_p = product_of_columns(b_v, b_v_rest, b_d_out, b_d_out_rest, W.RE, PRECISION)
            b_dropped = b_p
            if p_seed is not None:
                m_kept = dropout_mask(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[None, :], i_s[:, None], dropout)
                b_dropped = tl.where(m_kept, b_p / (1 - dropout), 0.0)
                b_d_p = tl.where(m_kept, b_d_p / (1 - dropout), 0.0)
            b_dropped = b_dropped.to(b_d_out.dtype)
            b_d_v = add_product(b_dropped, b_d_out, b_d_v, PRECISION)
            if W.RE > 0:
                b_d_v_rest = add_product(b_dropped, b_d_out_rest, b_d_v_rest, PRECISION)
            b_d_s = b_p * (b_d_p - b_delta[None, :])
            if W.SHARED_QK:
                b_d_s = tl.where(m_own, 0.0, b_d_s)
            b_d_s = b_d_s.to(b_q.dtype)
            b_d_k = add_product(b_d_s, b_q, b_d_k, PRECISION)
            if W.RD > 0:
                b_d_k_rest = add_product(b_d_s, b_q_rest, b_d_k_rest, PRECISION)
    i_row, rows = (i_b * S + s_0) * W.HKV + i_kv, None if W.EVEN else S - s_0
    b_d_k, b_d_k_rest = b_d_k * score_scale, b_d_k_rest * score_scale
    store_columns(p_d_k + i_row * W.D, W.HKV * W.D, rows, b_d_k, b_d_k_rest, W.D, W.BS, W.BD, W.RD)
    store_columns(p_d_v + i_row * W.E, W.HKV * W.E, rows, b_d_v, b_d_v_rest, W.E, W.BS, W.BE, W.RE)


@triton.jit(do_not_specialize=["T", "S", "B", "parts"])
def window_backward_bias_kernel(
    inputs, p_lse, p_d_out, p_pairs, p_d_bias, T, S, scale, dropout, B, parts, strides, W: tl.constexpr
):
    """Compute BT × BS entries of the gradient of the bias of one head, Σ dS over every `parts`-th block of a batch row.

    p_d_bias: (parts, H, P, K).
    """
    PRECISION: tl.constexpr = W.PRECISION
    p_q, p_k, p_v, p_mask, p_start, p_bounds, p_seed, p_bias = inputs
    q, k, v, d_out = strides
    i_h, i_column, i_row, i_part = program_index(tl.cdiv(W.P, W.BT), W.H, (W.K + W.BS - 1) // W.BS)
    i_kv = i_h // (W.H // W.HKV)
    r_0, c_0 = i_row * W.BT, i_column * W.BS
    i_r, i_c = r_0 + tl.arange(0, W.BT), c_0 + tl.arange(0, W.BS)
    blocks = (S + W.P - 1) // W.P + 1
    # Distances from the queries of the tile to its keys: none of them may be in the window.
    nearest, farthest = c_0 - r_0 - W.BT + 1 - W.FIRST * W.P, c_0 + W.BS - 1 - r_0 - W.FIRST * W.P
    hidden = nearest > 0 if W.CAUSAL else nearest > W.P + W.K
    if W.BLOCK == 0:
        hidden = hidden | (nearest > W.AHEAD) | (farthest < -W.BACK)
    end = tl.where(hidden, 0, B * blocks)

    b_d_bias = zeros(W.BT, W.BS)
    for i_x in range(i_part.to(tl.int32), end, parts):
        i_b, i_block = (i_x // blocks).to(tl.int64), i_x % blocks
        phase = bias_phase(i_b, p_start, W)
        t_0 = i_block * W.P + r_0 - phase - (S - T)
        s_0 = (i_block - W.FIRST) * W.P + c_0 - phase
        i_t, i_s = t_0 + tl.arange(0, W.BT), s_0 + tl.arange(0, W.BS)
        m_t = (i_t >= 0) & (i_t < T) & (i_r < W.P)
        b_q, b_q_rest = load_between(token_pointer(p_q, q, i_b, t_0, i_h), q.t, t_0, T, W.D, W.BT, W.BD, W.RD)
        b_k, b_k_rest = load_between(token_pointer(p_k, k, i_b, s_0, i_kv), k.t, s_0, S, W.D, W.BS, W.BD, W.RD)
        b_v, b_v_rest = load_between(token_pointer(p_v, v, i_b, s_0, i_kv), v.t, s_0, S, W.E, W.BS, W.BE, W.RE)
        p_d = token_pointer(p_d_out, d_out, i_b, t_0, i_h)
        b_d_out, b_d_out_rest = load_between(p_d, d_out.t, t_0, T, W.E, W.BT, W.BE, W.RE)
        i_lse = (i_b * W.H + i_h) * T + i_t
        b_lse, b_rest = load_lse(p_lse, i_lse, m_t, W)
        b_delta = tl.load(p_pairs + 2 * i_lse + 1, mask=m_t, other=0.0)
        b_s = product_of_columns(b_q, b_q_rest, b_k, b_k_rest, W.RD, PRECISION) * scale
        b_s = add_bias(b_s, p_bias, i_h, (i_t + (S - T))[:, None], i_s[None, :], phase, W)
        b_d_p = product_of_columns(b_d_out, b_d_out_rest, b_v, b_v_rest, W.RE, PRECISION)
        low, high = visible_keys(i_b, i_t, p_start, p_bounds, T, S, W)
        m_s = is_between(i_s[None, :], low[:, None], high[:, None]) & m_t[:, None]
        if p_mask is not None:
            m_key = tl.load(p_mask + i_b * S + i_s, mask=(i_s >= 0) & (i_s < S), other=0) != 0
            m_s = m_s & m_key[None, :]
        if W.SHARED_QK:
            m_s = m_s & ((i_t + (S - T))[:, None] != i_s[None, :])
        b_s = relative_to(b_s, b_lse[:, None], b_rest[:, None], W)
        b_p = exp2_negative(tl.where(m_s, b_s, float("-inf")), W)
        if p_seed is not None:
            m_kept = dropout_mask(p_seed, i_b.to(tl.int32) * W.H + i_h, i_t[:, None], i_s[None, :], dropout)
            b_d_p = tl.where(m_kept, b_d_p / (1 - dropout), 0.0)
        b_d_bias += b_p * (b_d_p - b_delta[:, None])
    p_d_bias += ((i_part * W.H + i_h) * W.P + i_r[:, None]) * W.K + i_c[None, :]
    tl.store(p_d_bias, b_d_bias, mask=(i_r < W.P)[:, None] & (i_c < W.K)[None, :])
