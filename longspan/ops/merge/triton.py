"""Join a window and a memory: blocks of tokens of one head, forward and backward.

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

# Heads, dimensions, tokens per block, padded dimensions.
MergeSizes = namedtuple("MergeSizes", "H D E BT BD BE")


def forward(x: MergeInputs) -> Tensor:
    """Return the mean (B, T, H, E)."""
    x = _dense(x)
    plan = MergePlan.of(x)
    out = x.q.new_empty(x.window.shape)
    with on_device(x.q):
        plan.forward(*x, out)
    return out


def backward(saved: MergeSaved, x: MergeInputs) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs; an empty one for a value that is not given."""
    x, d_out = _dense(x), dense_rows(saved.d_out)
    plan = MergePlan.of((*x, d_out))
    B, T, H = x.window_lse.shape
    d_window, d_memory, d_q = new_like(x.window), new_like(x.memory), new_like(x.q)
    d_lse = [x.window_lse.new_empty(B, H, T, dtype=torch.float32) for _ in range(2)]
    scores = len(x.weight)
    parts = x.q.new_empty(plan.parts * B, H, scores * (x.q.shape[3] + 1) + plan.value_dim, dtype=torch.float32)
    with on_device(x.q):
        plan.backward(*x, saved.out, d_out, d_window, d_lse[0], d_memory, d_lse[1], d_q, parts)
    total = parts.sum(0)
    sizes = [scores * x.q.shape[3], scores, plan.value_dim]
    d_weight, d_bias, d_value = total.split(sizes, 1)
    d_weight = d_weight.unflatten(1, (scores, -1)).transpose(0, 1).to(x.weight.dtype, copy=True)
    d_bias, d_value = d_bias.t().to(x.bias.dtype, copy=True), d_value.to((x.bias if x.value is None else x.value).dtype)
    lse = [d.transpose(1, 2).to(y.dtype) for d, y in zip(d_lse, (x.window_lse, x.memory_lse), strict=True)]
    d_value = x.weight.new_empty(0) if x.value is None else d_value.clone()
    return d_window, lse[0], d_memory, lse[1], d_q, d_weight.contiguous(), d_bias.contiguous(), d_value


def _dense(x: MergeInputs) -> MergeInputs:
    value = None if x.value is None else x.value.contiguous()
    window, memory, q = dense_rows(x.window), dense_rows(x.memory), dense_rows(x.q)
    return MergeInputs(window, x.window_lse, memory, x.memory_lse, q, x.weight.contiguous(), x.bias.contiguous(), value)


class MergePlan(Plan):
    """The launch of the forward pass, or of the backward pass where the signature has the gradient of the result."""

    def __init__(self, device: int, key: Signature) -> None:
        super().__init__(device)
        window, window_lse, memory, memory_lse, q, _, _, value, *rest = key
        (B, T, H, D), E = q[0], window[0][3]
        sizes = MergeSizes(H, D, E, TOKENS, padded(D, 16), padded(E, 16))
        blocks = -(-T // TOKENS)
        self.parts = min(blocks, -(-PROGRAMS // (B * H)))
        self.value_dim = 0 if value is None else E
        strides = tuple(Strides.of(x) for x in (window, window_lse, memory, memory_lse, q, *rest))
        constants = {"S": sizes, "num_warps": 4}
        if rest:
            self.backward = self.launch(
                merge_backward_kernel, (self.parts, B * H), (T, strides), constants | {"SINK": value is not None}
            )
        else:
            constants |= {"SINK": value is not None}
            self.forward = self.launch(merge_forward_kernel, (blocks, B * H), (T, strides), constants)


@triton.jit
def _load_lse(p_x, strides, i_b, i_0, i_h, rows, S: tl.constexpr):
    i_t = tl.arange(0, S.BT)
    p_x = token_pointer(p_x, strides, i_b, i_0, i_h) + i_t * strides.t
    return tl.load(p_x, mask=i_t < rows, other=_BLIND).to(tl.float32)


@triton.jit
def _score(p_weight, p_bias, b_q, i_s, i_h, S: tl.constexpr):
    """w·q + b of score i_s (BT,), and w (BD,)."""
    i_d = tl.arange(0, S.BD)
    b_w = tl.load(p_weight + (i_s * S.H + i_h) * S.D + i_d, mask=i_d < S.D, other=0.0).to(tl.float32)
    return tl.sum(b_q * b_w[None, :], 1) + tl.load(p_bias + i_s * S.H + i_h).to(tl.float32), b_w


@triton.jit
def _weights(b_window, b_memory, b_sink, SINK: tl.constexpr):
    """The softmax over the parts, zero in all where no part is seen."""
    b_max = tl.maximum(b_window, b_memory)
    if SINK:
        b_max = tl.maximum(b_max, b_sink)
    b_w = exact_exp(b_window - b_max)
    b_m = tl.where(b_memory == _BLIND, 0.0, exact_exp(b_memory - b_max))
    b_w = tl.where(b_window == _BLIND, 0.0, b_w)
    b_sum = b_w + b_m
    b_s = b_w * 0.0
    if SINK:
        b_s = tl.where(b_sink == _BLIND, 0.0, exact_exp(b_sink - b_max))
        b_sum += b_s
    b_inverse = tl.where(b_sum > 0, 1.0 / tl.where(b_sum > 0, b_sum, 1.0), 0.0)
    return b_w * b_inverse, b_m * b_inverse, b_s * b_inverse


@triton.jit
def _parts(
    p_window, p_window_lse, p_memory, p_memory_lse, p_q, p_weight, p_bias, strides, i_b, i_0, i_h, rows,
    S: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """A block's outputs (BT, BE), queries, weights (BT,) of window, memory and sink, and the scores' vectors (BD,)."""
    window, window_lse, memory, memory_lse, q = strides
    b_window = load_rows(token_pointer(p_window, window, i_b, i_0, i_h), window.t, rows, S.E, S.BT, S.BE)
    b_memory = load_rows(token_pointer(p_memory, memory, i_b, i_0, i_h), memory.t, rows, S.E, S.BT, S.BE)
    b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_h), q.t, rows, S.D, S.BT, S.BD).to(tl.float32)
    b_l = _load_lse(p_window_lse, window_lse, i_b, i_0, i_h, rows, S)
    b_m = _load_lse(p_memory_lse, memory_lse, i_b, i_0, i_h, rows, S)
    b_score, b_w = _score(p_weight, p_bias, b_q, 0, i_h, S)
    b_t, b_w_sink = b_score, b_w
    if SINK:
        b_t, b_w_sink = _score(p_weight, p_bias, b_q, 1, i_h, S)
        b_t = tl.where(b_m == _BLIND, _BLIND, b_t)
    b_m = tl.where(b_m == _BLIND, _BLIND, b_m + b_score)
    shares = _weights(b_l, b_m, b_t, SINK)
    return b_window.to(tl.float32), b_memory.to(tl.float32), b_q, shares, b_w, b_w_sink


@triton.jit(do_not_specialize=["T"])
def merge_forward_kernel(
    p_window, p_window_lse, p_memory, p_memory_lse, p_q, p_weight, p_bias, p_value, p_out, T, strides,
    S: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head."""
    i_b, i_h, i_0 = (tl.program_id(1) // S.H).to(tl.int64), tl.program_id(1) % S.H, tl.program_id(0) * S.BT
    rows = T - i_0
    b_window, b_memory, _, shares, _, _ = _parts(
        p_window, p_window_lse, p_memory, p_memory_lse, p_q, p_weight, p_bias, strides, i_b, i_0, i_h, rows, S, SINK
    )
    b_out = shares[0][:, None] * b_window + shares[1][:, None] * b_memory
    if SINK:
        i_e = tl.arange(0, S.BE)
        b_value = tl.load(p_value + i_h * S.E + i_e, mask=i_e < S.E, other=0.0).to(tl.float32)
        b_out += shares[2][:, None] * b_value[None, :]
    store_rows(p_out + ((i_b * T + i_0) * S.H + i_h) * S.E, S.H * S.E, rows, b_out, S.E, S.BT, S.BE)


@triton.jit(do_not_specialize=["T"])
def merge_backward_kernel(
    p_window, p_window_lse, p_memory, p_memory_lse, p_q, p_weight, p_bias, p_value, p_out, p_d_out,
    p_d_window, p_d_window_lse, p_d_memory, p_d_memory_lse, p_d_q, p_parts, T, strides,
    S: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Every P-th block of one head. p_parts: (P · B, H, ·), the gradients of weights, biases and value side by side."""
    window, window_lse, memory, memory_lse, q, d = strides
    SCORES: tl.constexpr = 2 if SINK else 1
    WIDTH: tl.constexpr = SCORES * (S.D + 1) + (S.E if SINK else 0)
    i_b, i_h = (tl.program_id(1) // S.H).to(tl.int64), tl.program_id(1) % S.H
    i_t, i_d, i_e = tl.arange(0, S.BT), tl.arange(0, S.BD), tl.arange(0, S.BE)
    b_d_w, b_d_w_sink, b_d_value = zeros(S.BD), zeros(S.BD), zeros(S.BE)
    b_d_bias, b_d_bias_sink = zeros(S.BT), zeros(S.BT)
    b_value = zeros(S.BE)
    if SINK:
        b_value = tl.load(p_value + i_h * S.E + i_e, mask=i_e < S.E, other=0.0).to(tl.float32)
    for i_0 in range(tl.program_id(0) * S.BT, T, tl.num_programs(0) * S.BT):
        rows = T - i_0
        b_window, b_memory, b_q, shares, b_w, b_w_sink = _parts(
            p_window, p_window_lse, p_memory, p_memory_lse, p_q, p_weight, p_bias,
            (window, window_lse, memory, memory_lse, q), i_b, i_0, i_h, rows, S, SINK,
        )  # fmt: skip
        i_o, i_row = (i_b * T + i_0) * S.H + i_h, (i_b * S.H + i_h) * T + i_0 + i_t
        b_d = load_rows(token_pointer(p_d_out, d, i_b, i_0, i_h), d.t, rows, S.E, S.BT, S.BE).to(tl.float32)
        b_out = shares[0][:, None] * b_window + shares[1][:, None] * b_memory
        if SINK:
            b_out += shares[2][:, None] * b_value[None, :]
        b_delta = tl.sum(b_d * b_out, 1)
        store_rows(p_d_window + i_o * S.E, S.H * S.E, rows, shares[0][:, None] * b_d, S.E, S.BT, S.BE)
        store_rows(p_d_memory + i_o * S.E, S.H * S.E, rows, shares[1][:, None] * b_d, S.E, S.BT, S.BE)
        b_d_l = shares[0] * (tl.sum(b_d * b_window, 1) - b_delta)
        b_d_s = shares[1] * (tl.sum(b_d * b_memory, 1) - b_delta)
        tl.store(p_d_window_lse + i_row, b_d_l, mask=i_t < rows)
        tl.store(p_d_memory_lse + i_row, b_d_s, mask=i_t < rows)
        b_d_q = b_d_s[:, None] * b_w[None, :]
        b_d_w += tl.sum(b_d_s[:, None] * b_q, 0)
        b_d_bias += b_d_s
        if SINK:
            b_d_t = shares[2] * (tl.sum(b_d * b_value[None, :], 1) - b_delta)
            b_d_q += b_d_t[:, None] * b_w_sink[None, :]
            b_d_w_sink += tl.sum(b_d_t[:, None] * b_q, 0)
            b_d_bias_sink += b_d_t
            b_d_value += tl.sum(shares[2][:, None] * b_d, 0)
        store_rows(p_d_q + i_o * S.D, S.H * S.D, rows, b_d_q, S.D, S.BT, S.BD)
    p_parts += ((tl.program_id(0) * (tl.num_programs(1) // S.H) + i_b) * S.H + i_h) * WIDTH
    tl.store(p_parts + i_d, b_d_w, mask=i_d < S.D)
    tl.store(p_parts + SCORES * S.D, tl.sum(b_d_bias))
    if SINK:
        tl.store(p_parts + S.D + i_d, b_d_w_sink, mask=i_d < S.D)
        tl.store(p_parts + SCORES * S.D + 1, tl.sum(b_d_bias_sink))
        tl.store(p_parts + SCORES * (S.D + 1) + i_e, b_d_value, mask=i_e < S.E)
