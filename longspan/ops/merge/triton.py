"""Join a window and memories: blocks of tokens of one head, forward and backward.

A program of the backward pass takes every P-th block of its head, and adds up its part of the gradients of the learned
scores in registers; the parts are summed afterwards. Without atomic additions, results are deterministic.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import load_rows, padded, store_rows, token_pointer, zeros
from longspan.ops.merge import MergeInputs, MergeSaved
from longspan.ops.window.torch import BLIND

TOKENS, PROGRAMS = 32, 2048  # tokens of a block; programs of the backward pass, at least
_BLIND = tl.constexpr(BLIND)
LN2 = tl.constexpr(0.6931471805599453)

# Heads, dimensions, numbers of a log-sum-exp of the window, tokens per block, padded dimensions. LATER: there are two
# memories. SINK: and a sink.
MergeSizes = namedtuple("MergeSizes", "H D E P BT BD BE LATER SINK")


def forward(x: MergeInputs) -> Tensor:
    """Return the mean (B, T, H, E)."""
    x = _dense(x)
    plan = MergePlan.of(x)
    out = x.q.new_empty(x.window.shape)
    with on_device(x.q):
        plan.forward(*x, out)
    return out


def backward(saved: MergeSaved, x: MergeInputs, *, traced: bool = True) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs; for one that is not given None, or if traced an empty one."""
    x, d_out = _dense(x), dense_rows(saved.d_out)
    plan = MergePlan.of((*x, d_out))
    (B, _, H, D), scores, E = x.q.shape, len(x.weight), plan.value_dim
    grads = [None if y is None else new_like(y) for y in x[:7]]
    sizes = [scores * H * D, scores * H, H * E]
    parts = x.q.new_empty(plan.parts * B, sum(sizes), dtype=torch.float32)
    with on_device(x.q):
        plan.backward(*x, d_out, *grads, parts)
    learned = parts.sum(0).split(sizes)
    shapes = (scores, H, D), (scores, H), (H, E)
    for y, grad, shape in zip(x[7:], learned, shapes, strict=True):
        grads.append(None if y is None else grad.view(shape).to(y.dtype, copy=traced))
    if traced:  # torch.library takes no None.
        return tuple([x.q.new_empty(0) if y is None else y for y in grads])
    return tuple(grads)


def _dense(x: MergeInputs) -> MergeInputs:
    rows = {name: dense_rows(y) for name in ("window", "memory", "later", "q") if (y := getattr(x, name)) is not None}
    return MergeInputs(*(None if y is None else y.contiguous() for y in x._replace(**dict.fromkeys(rows))))._replace(
        **rows
    )


class MergePlan(Plan):
    """The launch of the forward pass, or of the backward pass where the signature has the gradient of the result."""

    def __init__(self, device: int, key: Signature) -> None:
        super().__init__(device)
        window, window_lse, memory, _, later, _, q, _, _, value, *rest = key
        assert window is not None
        assert window_lse is not None
        assert memory is not None
        assert q is not None
        (B, T, H, D), E = q[0], window[0][3]
        options = later is not None, value is not None
        S = MergeSizes(H, D, E, window_lse[0][3], TOKENS, padded(D, 16), padded(E, 16), *options)
        blocks = -(-T // TOKENS)
        self.parts = min(blocks, -(-PROGRAMS // (B * H)))
        self.value_dim = 0 if value is None else E
        strides = tuple(Strides.of(memory if x is None else x) for x in (window, memory, later, q, *rest))
        constants = {"S": S, "num_warps": 4 if max(S.BD, S.BE) <= 128 else 8}
        if rest:
            self.backward = self.launch(merge_backward_kernel, (self.parts, B * H), (T, strides), constants)
        else:
            self.forward = self.launch(merge_forward_kernel, (blocks, B * H), (T, strides), constants)


@triton.jit
def _score(p_weight, p_bias, b_q, i_s, i_h, S: tl.constexpr):
    """w·q + b of score i_s (BT,), and w (BD,)."""
    i_d = tl.arange(0, S.BD)
    b_w = tl.load(p_weight + (i_s * S.H + i_h) * S.D + i_d, mask=i_d < S.D, other=0.0).to(tl.float32)
    return tl.sum(b_q * b_w[None, :], 1) + tl.load(p_bias + i_s * S.H + i_h).to(tl.float32), b_w


@triton.jit
def _load_lse(p_x, i_row, m_t, b_score):
    """The log-sum-exp of a memory plus its learned score (BT,)."""
    b_x = tl.load(p_x + i_row, mask=m_t, other=_BLIND).to(tl.float32)
    return tl.where(b_x == _BLIND, _BLIND, b_x + b_score)


@triton.jit
def _power(b_x, b_max):
    return tl.where(b_x == _BLIND, 0.0, exact_exp(b_x - b_max))


@triton.jit
def _weights(b_window, b_memory, b_later, b_sink, S: tl.constexpr):
    """The softmax over window, memory, second memory and sinks, zero in all where no part is seen."""
    b_max = tl.maximum(b_window, tl.maximum(b_memory, b_later))
    if S.SINK:
        b_sink = tl.where((b_memory == _BLIND) & (b_later == _BLIND), _BLIND, b_sink)
        b_max = tl.maximum(b_max, b_sink)
    b_w, b_m, b_l = _power(b_window, b_max), _power(b_memory, b_max), b_window * 0.0
    if S.LATER:
        b_l = _power(b_later, b_max)
    b_sum = b_w + b_m + b_l
    b_s = b_sum * 0.0
    if S.SINK:
        b_s = _power(b_sink, b_max)
        if S.LATER:
            b_s = tl.where((b_memory == _BLIND) | (b_later == _BLIND), b_s, 2 * b_s)
        b_sum += b_s
    b_inverse = tl.where(b_sum > 0, 1.0 / tl.where(b_sum > 0, b_sum, 1.0), 0.0)
    return b_w * b_inverse, b_m * b_inverse, b_l * b_inverse, b_s * b_inverse


@triton.jit
def _load(p_x, strides, i_b, i_0, i_h, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr):
    return load_rows(token_pointer(p_x, strides, i_b, i_0, i_h), strides.t, rows, SIZE, S.BT, BLOCK).to(tl.float32)


@triton.jit
def _parts(inputs, strides, i_b, i_0, i_h, T, S: tl.constexpr):
    """A block's outputs (BT, BE), weights (BT,) of window, memories and sink, queries, and the scores' vectors."""
    p_window, p_window_lse, p_memory, p_memory_lse, p_later, p_later_lse, p_q, p_weight, p_bias = inputs
    window, memory, later, q = strides
    rows, i_t = T - i_0, tl.arange(0, S.BT)
    m_t, i_row = i_t < rows, (i_b * S.H + i_h) * T + i_0 + i_t
    b_window = _load(p_window, window, i_b, i_0, i_h, rows, S.E, S.BE, S)
    b_memory = _load(p_memory, memory, i_b, i_0, i_h, rows, S.E, S.BE, S)
    b_q = _load(p_q, q, i_b, i_0, i_h, rows, S.D, S.BD, S)
    b_score, b_w = _score(p_weight, p_bias, b_q, 0, i_h, S)
    b_t, b_w_sink = b_score, b_w
    if S.SINK:
        b_t, b_w_sink = _score(p_weight, p_bias, b_q, 1, i_h, S)
    b_lse = tl.load(p_window_lse + i_row * S.P, mask=m_t, other=float("inf"))
    b_seen = tl.abs(b_lse) < float("inf")
    if S.P == 2:
        b_lse += tl.load(p_window_lse + i_row * S.P + 1, mask=m_t & b_seen, other=0.0)
    b_lse = tl.where(b_seen, b_lse * LN2, _BLIND)
    b_m = _load_lse(p_memory_lse, i_row, m_t, b_score)
    b_later, b_l = b_memory, b_m * 0.0 + _BLIND
    if S.LATER:
        b_later = _load(p_later, later, i_b, i_0, i_h, rows, S.E, S.BE, S)
        b_l = _load_lse(p_later_lse, i_row, m_t, b_score)
    shares = _weights(b_lse, b_m, b_l, b_t, S)
    return (b_window, b_memory, b_later), shares, b_q, b_w, b_w_sink


@triton.jit
def _load_value(p_value, i_h, S: tl.constexpr):
    """The value of a sink (BE,); zeros without one."""
    i_e = tl.arange(0, S.BE)
    b_value = zeros(S.BE)
    if S.SINK:
        b_value += tl.load(p_value + i_h * S.E + i_e, mask=i_e < S.E, other=0.0).to(tl.float32)
    return b_value


@triton.jit
def _mean(outputs, shares, b_value, S: tl.constexpr):
    b_out = shares[0][:, None] * outputs[0] + shares[1][:, None] * outputs[1]
    if S.LATER:
        b_out += shares[2][:, None] * outputs[2]
    if S.SINK:
        b_out += shares[3][:, None] * b_value[None, :]
    return b_out


@triton.jit(do_not_specialize=["T"])
def merge_forward_kernel(
    p_window, p_window_lse, p_memory, p_memory_lse, p_later, p_later_lse, p_q, p_weight, p_bias, p_value, p_out,
    T, strides, S: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head."""
    i_b, i_h, i_0 = (tl.program_id(1) // S.H).to(tl.int64), tl.program_id(1) % S.H, tl.program_id(0) * S.BT
    inputs = p_window, p_window_lse, p_memory, p_memory_lse, p_later, p_later_lse, p_q, p_weight, p_bias
    outputs, shares, _, _, _ = _parts(inputs, strides, i_b, i_0, i_h, T, S)
    b_out = _mean(outputs, shares, _load_value(p_value, i_h, S), S)
    store_rows(p_out + ((i_b * T + i_0) * S.H + i_h) * S.E, S.H * S.E, T - i_0, b_out, S.E, S.BT, S.BE)


@triton.jit
def _store_part(p_d, b_d, share, i_o, rows, S: tl.constexpr):
    """Store the gradient of a part's output."""
    store_rows(p_d + i_o * S.E, S.H * S.E, rows, share[:, None] * b_d, S.E, S.BT, S.BE)


@triton.jit(do_not_specialize=["T"])
def merge_backward_kernel(
    p_window, p_window_lse, p_memory, p_memory_lse, p_later, p_later_lse, p_q, p_weight, p_bias, p_value, p_d_out,
    p_d_window, p_d_window_lse, p_d_memory, p_d_memory_lse, p_d_later, p_d_later_lse, p_d_q, p_parts,
    T, strides, S: tl.constexpr,
):  # fmt: skip
    """Every P-th block of one head. p_parts: (P · B, ·), the gradients of weights, biases and values side by side."""
    window, memory, later, q, d = strides
    SCORES: tl.constexpr = 2 if S.SINK else 1
    WIDTH: tl.constexpr = S.H * (SCORES * (S.D + 1) + (S.E if S.SINK else 0))
    i_b, i_h = (tl.program_id(1) // S.H).to(tl.int64), tl.program_id(1) % S.H
    i_t, i_d, i_e = tl.arange(0, S.BT), tl.arange(0, S.BD), tl.arange(0, S.BE)
    inputs = p_window, p_window_lse, p_memory, p_memory_lse, p_later, p_later_lse, p_q, p_weight, p_bias
    b_d_w, b_d_w_sink, b_d_value = zeros(S.BD), zeros(S.BD), zeros(S.BE)
    b_d_bias, b_d_bias_sink = zeros(S.BT), zeros(S.BT)
    b_value = _load_value(p_value, i_h, S)
    for i_0 in range(tl.program_id(0) * S.BT, T, tl.num_programs(0) * S.BT):
        rows = T - i_0
        outputs, shares, b_q, b_w, b_w_sink = _parts(inputs, (window, memory, later, q), i_b, i_0, i_h, T, S)
        i_o, i_row = (i_b * T + i_0) * S.H + i_h, (i_b * S.H + i_h) * T + i_0 + i_t
        b_d = _load(p_d_out, d, i_b, i_0, i_h, rows, S.E, S.BE, S)
        b_delta = tl.sum(b_d * _mean(outputs, shares, b_value, S), 1)
        _store_part(p_d_window, b_d, shares[0], i_o, rows, S)
        _store_part(p_d_memory, b_d, shares[1], i_o, rows, S)
        b_d_l = shares[0] * (tl.sum(b_d * outputs[0], 1) - b_delta)
        b_d_s = shares[1] * (tl.sum(b_d * outputs[1], 1) - b_delta)
        tl.store(p_d_window_lse + i_row * S.P, b_d_l * LN2, mask=i_t < rows)
        if S.P == 2:
            tl.store(p_d_window_lse + i_row * S.P + 1, b_d_l * LN2, mask=i_t < rows)
        tl.store(p_d_memory_lse + i_row, b_d_s, mask=i_t < rows)
        if S.LATER:
            _store_part(p_d_later, b_d, shares[2], i_o, rows, S)
            b_d_l = shares[2] * (tl.sum(b_d * outputs[2], 1) - b_delta)
            tl.store(p_d_later_lse + i_row, b_d_l, mask=i_t < rows)
            b_d_s += b_d_l
        b_d_q = b_d_s[:, None] * b_w[None, :]
        b_d_w += tl.sum(b_d_s[:, None] * b_q, 0)
        b_d_bias += b_d_s
        if S.SINK:
            b_d_t = shares[3] * (tl.sum(b_d * b_value[None, :], 1) - b_delta)
            b_d_q += b_d_t[:, None] * b_w_sink[None, :]
            b_d_w_sink += tl.sum(b_d_t[:, None] * b_q, 0)
            b_d_bias_sink += b_d_t
            b_d_value += tl.sum(shares[3][:, None] * b_d, 0)
        store_rows(p_d_q + i_o * S.D, S.H * S.D, rows, b_d_q, S.D, S.BT, S.BD)
    p_parts += (tl.program_id(0) * (tl.num_programs(1) // S.H) + i_b) * WIDTH
    tl.store(p_parts + i_h * S.D + i_d, b_d_w, mask=i_d < S.D)
    tl.store(p_parts + SCORES * S.H * S.D + i_h, tl.sum(b_d_bias))
    if S.SINK:
        tl.store(p_parts + (S.H + i_h) * S.D + i_d, b_d_w_sink, mask=i_d < S.D)
        tl.store(p_parts + SCORES * S.H * S.D + S.H + i_h, tl.sum(b_d_bias_sink))
        tl.store(p_parts + SCORES * S.H * (S.D + 1) + i_h * S.E + i_e, b_d_value, mask=i_e < S.E)
