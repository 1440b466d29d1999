"""Norm, rotation and division of heads in one pass over a product, and their gradients in another.

A program of the backward pass takes every P-th tile of a head and adds up its part of the weights' gradients in
registers; the caller sums the parts. Without atomic additions, results are deterministic.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, dense, on_device
from longspan.ops.common.tiles import padded, zeros
from longspan.ops.heads import TOKENS, HeadsInputs, num_parts

# All heads, those of the first part, half of their dimension, padded, tokens per tile, and which parts are rotated.
HeadsSizes = namedtuple("HeadsSizes", "H FIRST HALF BH BT TURN_FIRST TURN_SECOND")


def forward(inputs: HeadsInputs) -> tuple[Tensor, ...]:
    """Return q, k and v of the first part and those of the second, (B, T, heads, D) each."""
    tensors = tuple(dense(y) for y in inputs[:5])
    plan, D = _HeadsPlan.of(tensors, *inputs[5:], False), len(inputs.weight_q)
    sizes = (inputs.first, inputs.heads - inputs.first)
    outputs = tuple(inputs.x.new_empty(*inputs.x.shape[:2], n, D) for n in sizes for _ in range(3))
    with on_device(inputs.x):
        plan.run(*plan.addresses(*tensors, *outputs))
    return outputs


def backward(grads: Sequence[Tensor], inputs: HeadsInputs) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and parts (P, 2, D) of those of both weights, to be summed."""
    tensors = *(dense(y) for y in inputs[:5]), *(d.contiguous() for d in grads)
    plan = _HeadsPlan.of(tensors, *inputs[5:], True)
    d_x = inputs.x.new_empty(inputs.x.shape)
    parts = d_x.new_empty(plan.parts * inputs.heads, 2, len(inputs.weight_q), dtype=torch.float32)
    with on_device(d_x):
        plan.run(*plan.addresses(*tensors, d_x, parts))
    return d_x, parts


class _HeadsPlan(Plan):
    def __init__(
        self, device: int, key: Signature, heads: int, first: int, rotate_first: bool, rotate_second: bool,
        epsilon: float, back: bool,
    ) -> None:  # fmt: skip
        super().__init__(device)
        assert key[0] is not None
        assert key[1] is not None
        (B, T, _), half = key[0][0], key[1][0][0] // 2
        sizes = HeadsSizes(heads, first, half, padded(half, 16), TOKENS, rotate_first, rotate_second)
        self.parts = num_parts(B * T)
        kernel = heads_backward_kernel if back else heads_forward_kernel
        grid = heads, self.parts if back else -(-B * T // TOKENS)
        scalars = (B * T, T, self.parts, epsilon) if back else (B * T, T, epsilon)
        self.run = self.launch(kernel, grid, scalars, {"W": sizes})


@triton.jit
def _halves(p_x, i_row, stride, m_x, W: tl.constexpr):
    """Both halves (BT, BH) of a head at p_x in rows i_row, in float32."""
    i_d = tl.arange(0, W.BH)
    p_x += i_row.to(tl.int64)[:, None] * stride + i_d[None, :]
    b_a = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    return b_a, tl.load(p_x + W.HALF, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(p_x, i_row, stride, m_x, b_a, b_b, W: tl.constexpr):
    i_d = tl.arange(0, W.BH)
    p_x += i_row.to(tl.int64)[:, None] * stride + i_d[None, :]
    tl.store(p_x, b_a.to(p_x.dtype.element_ty), mask=m_x)
    tl.store(p_x + W.HALF, b_b.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def _weights(p_w, W: tl.constexpr):
    i_d = tl.arange(0, W.BH)
    b_a = tl.load(p_w + i_d, mask=i_d < W.HALF, other=0.0).to(tl.float32)
    return b_a[None, :], tl.load(p_w + W.HALF + i_d, mask=i_d < W.HALF, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _angles(p_cos, p_sin, i_t, m_x, W: tl.constexpr):
    """cos and sin (BT, BH) of the tokens' positions."""
    at = i_t[:, None] * W.HALF + tl.arange(0, W.BH)[None, :]
    return tl.load(p_cos + at, mask=m_x, other=0.0), tl.load(p_sin + at, mask=m_x, other=0.0)


@triton.jit
def _normalize(b_a, b_b, epsilon, W: tl.constexpr):
    """A head of length √D, and the factor."""
    b_r = tl.rsqrt((tl.sum(b_a * b_a, 1) + tl.sum(b_b * b_b, 1)) / (2 * W.HALF) + epsilon)[:, None]
    return b_a * b_r, b_b * b_r, b_r


@triton.jit
def _head(
    p_x, p_w, p_cos, p_sin, p_out, i_row, i_t, m_x, epsilon, OUT: tl.constexpr, TURN: tl.constexpr, W: tl.constexpr
):
    """Normalize and rotate one head of queries or keys."""
    b_a, b_b = _halves(p_x, i_row, 6 * W.H * W.HALF, m_x, W)
    b_a, b_b, _ = _normalize(b_a, b_b, epsilon, W)
    b_w_a, b_w_b = _weights(p_w, W)
    b_a, b_b = b_a * b_w_a, b_b * b_w_b
    if TURN:
        b_cos, b_sin = _angles(p_cos, p_sin, i_t, m_x, W)
        b_a, b_b = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
    _store_halves(p_out, i_row, OUT * 2 * W.HALF, m_x, b_a, b_b, W)


@triton.jit
def _divide(
    p_x, p_w_q, p_w_k, p_cos, p_sin, p_q, p_k, p_v, i_h, i_row, i_t, m_x, epsilon,
    OUT: tl.constexpr, TURN: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A tile of the head at p_x, the i_h-th of the OUT heads of its part."""
    D: tl.constexpr = 2 * W.HALF
    _head(p_x, p_w_q, p_cos, p_sin, p_q + i_h * D, i_row, i_t, m_x, epsilon, OUT, TURN, W)
    _head(p_x + W.H * D, p_w_k, p_cos, p_sin, p_k + i_h * D, i_row, i_t, m_x, epsilon, OUT, TURN, W)
    b_a, b_b = _halves(p_x + 2 * W.H * D, i_row, 3 * W.H * D, m_x, W)
    _store_halves(p_v + i_h * D, i_row, OUT * D, m_x, b_a, b_b, W)


@triton.jit(do_not_specialize=["N", "T", "epsilon"])
def heads_forward_kernel(
    p_x, p_w_q, p_w_k, p_cos, p_sin, p_q_1, p_k_1, p_v_1, p_q_2, p_k_2, p_v_2, N, T, epsilon, W: tl.constexpr
):  # fmt: skip
    """Queries, keys and values of one head in BT of N tokens."""
    i_h = tl.program_id(0)
    i_row = tl.program_id(1) * W.BT + tl.arange(0, W.BT)
    m_x = (i_row < N)[:, None] & (tl.arange(0, W.BH) < W.HALF)[None, :]
    i_t, p_x = i_row % T, p_x + i_h * (2 * W.HALF)
    if i_h < W.FIRST:
        _divide(p_x, p_w_q, p_w_k, p_cos, p_sin, p_q_1, p_k_1, p_v_1, i_h, i_row, i_t, m_x, epsilon,
                W.FIRST, W.TURN_FIRST, W)  # fmt: skip
    else:
        _divide(p_x, p_w_q, p_w_k, p_cos, p_sin, p_q_2, p_k_2, p_v_2, i_h - W.FIRST, i_row, i_t, m_x, epsilon,
                W.H - W.FIRST, W.TURN_SECOND, W)  # fmt: skip


@triton.jit
def _head_gradient(
    p_d, p_x, p_w, p_cos, p_sin, p_d_x, i_row, i_t, m_x, epsilon, b_d_w_a, b_d_w_b,
    OUT: tl.constexpr, TURN: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Store dx of one head of queries or keys, and return the sums of dw."""
    b_a, b_b = _halves(p_d, i_row, OUT * 2 * W.HALF, m_x, W)
    if TURN:
        b_cos, b_sin = _angles(p_cos, p_sin, i_t, m_x, W)
        b_a, b_b = b_a * b_cos + b_b * b_sin, b_b * b_cos - b_a * b_sin
    b_x_a, b_x_b = _halves(p_x, i_row, 6 * W.H * W.HALF, m_x, W)
    b_x_a, b_x_b, b_r = _normalize(b_x_a, b_x_b, epsilon, W)
    b_d_w_a += tl.sum(b_a * b_x_a, 0)
    b_d_w_b += tl.sum(b_b * b_x_b, 0)
    b_w_a, b_w_b = _weights(p_w, W)
    b_a, b_b = b_a * b_w_a, b_b * b_w_b
    b_dot = ((tl.sum(b_a * b_x_a, 1) + tl.sum(b_b * b_x_b, 1)) / (2 * W.HALF))[:, None]
    b_a, b_b = b_r * (b_a - b_x_a * b_dot), b_r * (b_b - b_x_b * b_dot)
    _store_halves(p_d_x, i_row, 6 * W.H * W.HALF, m_x, b_a, b_b, W)
    return b_d_w_a, b_d_w_b


@triton.jit
def _gradients(
    p_x, p_w_q, p_w_k, p_cos, p_sin, p_d_q, p_d_k, p_d_v, p_d_x, p_d_w, i_h, N, T, PARTS, epsilon,
    OUT: tl.constexpr, TURN: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Every PARTS-th tile of the head at p_x, the i_h-th of the OUT heads of its part, and its part of dw."""
    D: tl.constexpr = 2 * W.HALF
    K: tl.constexpr = W.H * D
    b_q_a, b_q_b = zeros(W.BH), zeros(W.BH)
    b_k_a, b_k_b = zeros(W.BH), zeros(W.BH)
    p_d_q, p_d_k, p_d_v = p_d_q + i_h * D, p_d_k + i_h * D, p_d_v + i_h * D
    i_d = tl.arange(0, W.BH)
    for i_0 in range(tl.program_id(1) * W.BT, N, PARTS * W.BT):
        i_row = i_0 + tl.arange(0, W.BT)
        m_x = (i_row < N)[:, None] & (i_d < W.HALF)[None, :]
        i_t = i_row % T
        b_q_a, b_q_b = _head_gradient(
            p_d_q, p_x, p_w_q, p_cos, p_sin, p_d_x, i_row, i_t, m_x, epsilon, b_q_a, b_q_b, OUT, TURN, W
        )
        b_k_a, b_k_b = _head_gradient(
            p_d_k, p_x + K, p_w_k, p_cos, p_sin, p_d_x + K, i_row, i_t, m_x, epsilon, b_k_a, b_k_b, OUT, TURN, W
        )
        b_a, b_b = _halves(p_d_v, i_row, OUT * D, m_x, W)
        _store_halves(p_d_x + 2 * K, i_row, 3 * K, m_x, b_a, b_b, W)
    m_d = i_d < W.HALF
    tl.store(p_d_w + i_d, b_q_a, mask=m_d)
    tl.store(p_d_w + W.HALF + i_d, b_q_b, mask=m_d)
    tl.store(p_d_w + D + i_d, b_k_a, mask=m_d)
    tl.store(p_d_w + D + W.HALF + i_d, b_k_b, mask=m_d)


@triton.jit(do_not_specialize=["N", "T", "PARTS", "epsilon"])
def heads_backward_kernel(
    p_x, p_w_q, p_w_k, p_cos, p_sin, p_q_1, p_k_1, p_v_1, p_q_2, p_k_2, p_v_2, p_d_x, p_d_w, N, T, PARTS, epsilon,
    W: tl.constexpr,
):  # fmt: skip
    """Gradients of every PARTS-th tile of one head, given those of its queries, keys and values."""
    i_h = tl.program_id(0)
    D: tl.constexpr = 2 * W.HALF
    p_x, p_d_x = p_x + i_h * D, p_d_x + i_h * D
    p_d_w += (tl.program_id(1) * W.H + i_h) * (2 * D)
    if i_h < W.FIRST:
        _gradients(p_x, p_w_q, p_w_k, p_cos, p_sin, p_q_1, p_k_1, p_v_1, p_d_x, p_d_w, i_h, N, T, PARTS, epsilon,
                   W.FIRST, W.TURN_FIRST, W)  # fmt: skip
    else:
        _gradients(p_x, p_w_q, p_w_k, p_cos, p_sin, p_q_2, p_k_2, p_v_2, p_d_x, p_d_w, i_h - W.FIRST, N, T, PARTS,
                   epsilon, W.H - W.FIRST, W.TURN_SECOND, W)  # fmt: skip
