"""[softmax(Wx), softmax(−Wx)] of a tile of tokens and one head at a time, forward and backward.

A program of the backward pass takes every P-th tile of its head, and adds up its part of dW in registers; the parts are
summed afterwards. Without atomic additions, results are deterministic.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exact_exp, exp
from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import add_product, padded, product, zeros

# Heads, dimensions, padded dimensions, tokens per tile. PRECISION: of products, in float32 but for "bfloat16", where W
# is the sum of two numbers, and of one in the backward pass.
HedgehogSizes = namedtuple("HedgehogSizes", "H D F BD BF BT PRECISION")
PARTS = 64  # programs of a head in the backward pass


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return the features (B, T, H, 2·F)."""
    x, weight = dense_rows(x), weight.contiguous()
    plan = HedgehogPlan.of((x, weight))
    out = x.new_empty(*x.shape[:3], 2 * weight.shape[1])
    with on_device(x):
        plan.forward(x, weight, out)
    return out


def backward(d_features: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight."""
    x, weight, d_features = dense_rows(x), weight.contiguous(), dense_rows(d_features)
    plan = HedgehogPlan.of((x, weight, d_features))
    d_x = new_like(x)
    parts = x.new_empty(plan.parts, *weight.shape, dtype=torch.float32)
    with on_device(x):
        plan.backward(x, weight, d_features, d_x, parts)
    return d_x, parts.sum(0).to(weight.dtype)


class HedgehogPlan(Plan):
    """The launch of the forward pass, or of the backward pass where the signature has the gradient of the features."""

    def __init__(self, device: int, key: Signature, *options: Any) -> None:
        super().__init__(device)
        x, weight, *rest = key
        assert x is not None
        assert weight is not None
        (B, T, H, D), F = x[0], weight[0][1]
        exact, half = x[2] == torch.float32, x[2] == torch.bfloat16
        BD, BF = (padded(size, 64 if half else 16) for size in (D, F))
        BT = 32 if exact or (not half and max(BD, BF) > 64) else 64
        sizes = HedgehogSizes(H, D, F, BD, BF, BT, "ieee" if exact else "bfloat16" if half else "tf32")
        tiles = -(-B * T // BT)
        self.parts = min(PARTS, tiles)
        wide = bool(rest) or max(BD, BF) > 64
        constants = {"S": sizes, "num_warps": 8 if wide else 4, "num_stages": 1 if exact else 2}
        if rest:
            assert rest[0] is not None
            strides = Strides.of(x), Strides.of(rest[0])
            self.backward = self.launch(
                hedgehog_backward_kernel, (self.parts * H,), (B * T, T, self.parts, strides), constants
            )
        else:
            self.forward = self.launch(hedgehog_forward_kernel, (tiles * H,), (B * T, T, Strides.of(x)), constants)


@triton.jit
def rows(p_x, strides, i_row, i_h, T):
    """Pointers to tokens i_row (BT,), counted over all sequences, of one head."""
    i_b, i_t = (i_row // T).to(tl.int64), (i_row % T).to(tl.int64)
    return p_x + (i_b * strides.b + i_t * strides.t + i_h * strides.h)


@triton.jit
def load_weight(p_w, i_h, S: tl.constexpr):
    """W of one head, transposed: two (BD, BF) blocks that add up to it, the second 0 but in bfloat16."""
    PRECISION: tl.constexpr = S.PRECISION
    i_d, i_f = tl.arange(0, S.BD), tl.arange(0, S.BF)
    p_w += i_h * (S.F * S.D) + i_f[None, :] * S.D + i_d[:, None]
    b_w = tl.load(p_w, mask=(i_f < S.F)[None, :] & (i_d < S.D)[:, None], other=0.0).to(tl.float32)
    b_low = b_w
    if PRECISION == "bfloat16":
        b_low = (b_w - b_w.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        b_w = b_w.to(tl.bfloat16)
    return b_w, b_low


@triton.jit
def _load(p_x, m_x, S: tl.constexpr):
    """A tile of x in the dtype of products."""
    PRECISION: tl.constexpr = S.PRECISION
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if PRECISION != "bfloat16":
        b_x = b_x.to(tl.float32)
    return b_x


@triton.jit
def _times(b_x, b_w, b_low, S: tl.constexpr):
    """x·w, in bfloat16 the sum of the products with both parts of w."""
    PRECISION: tl.constexpr = S.PRECISION
    if PRECISION == "bfloat16":
        b_y = tl.dot(b_x, b_w, tl.dot(b_x, b_low))
    else:
        b_y = product(b_x, b_w, PRECISION)
    return b_y


@triton.jit
def both_softmaxes(b_x, b_w, b_low, S: tl.constexpr):
    """softmax(y) and softmax(−y) of y = x Wᵀ (BT, BF); zeros in padded columns."""
    PRECISION: tl.constexpr = S.PRECISION
    m_f = (tl.arange(0, S.BF) < S.F)[None, :]
    b_y = _times(b_x, b_w, b_low, S)
    b_high = b_y - tl.max(tl.where(m_f, b_y, float("-inf")), 1)[:, None]
    b_low = tl.min(tl.where(m_f, b_y, float("inf")), 1)[:, None] - b_y
    if PRECISION == "ieee":
        b_p, b_n = exact_exp(tl.minimum(b_high, 0)), exact_exp(tl.minimum(b_low, 0))
    else:
        b_p, b_n = exp(tl.minimum(b_high, 0)), exp(tl.minimum(b_low, 0))
    b_p, b_n = tl.where(m_f, b_p, 0.0), tl.where(m_f, b_n, 0.0)
    return b_p * tl.div_rn(1.0, tl.sum(b_p, 1))[:, None], b_n * tl.div_rn(1.0, tl.sum(b_n, 1))[:, None]


@triton.jit(do_not_specialize=["N", "T"])
def hedgehog_forward_kernel(p_x, p_w, p_out, N, T, strides, S: tl.constexpr):
    """Compute the features of BT of N tokens of one head."""
    i_h = (tl.program_id(0) % S.H).to(tl.int64)
    i_row = tl.program_id(0) // S.H * S.BT + tl.arange(0, S.BT)
    i_d, i_f = tl.arange(0, S.BD), tl.arange(0, S.BF)
    m_x = (i_row < N)[:, None] & (i_d < S.D)[None, :]
    b_x = _load(rows(p_x, strides, i_row, i_h, T)[:, None] + i_d[None, :], m_x, S)
    b_w, b_low = load_weight(p_w, i_h, S)
    b_p, b_n = both_softmaxes(b_x, b_w, b_low, S)
    p_out += ((i_row.to(tl.int64) * S.H + i_h) * (2 * S.F))[:, None] + i_f[None, :]
    m_out = (i_row < N)[:, None] & (i_f < S.F)[None, :]
    tl.store(p_out, b_p.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_out + S.F, b_n.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["N", "T", "PARTS"])
def hedgehog_backward_kernel(p_x, p_w, p_d_f, p_d_x, p_d_w, N, T, PARTS, strides, S: tl.constexpr):
    """Compute dx of every PARTS-th tile of one head, and its part of dW."""
    PRECISION: tl.constexpr = S.PRECISION
    x, d_f = strides
    i_h, i_part = (tl.program_id(0) % S.H).to(tl.int64), tl.program_id(0) // S.H
    i_d, i_f = tl.arange(0, S.BD), tl.arange(0, S.BF)
    b_w, b_low = load_weight(p_w, i_h, S)
    b_d_w = zeros(S.BD, S.BF)
    for first in range(i_part * S.BT, N, PARTS * S.BT):
        i_row = first + tl.arange(0, S.BT)
        m_x = (i_row < N)[:, None] & (i_d < S.D)[None, :]
        m_f = (i_row < N)[:, None] & (i_f < S.F)[None, :]
        b_x = _load(rows(p_x, x, i_row, i_h, T)[:, None] + i_d[None, :], m_x, S)
        b_p, b_n = both_softmaxes(b_x, b_w, b_low, S)
        p_f = rows(p_d_f, d_f, i_row, i_h, T)[:, None] + i_f[None, :]
        b_d_p = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
        b_d_n = tl.load(p_f + S.F, mask=m_f, other=0.0).to(tl.float32)
        b_d_y = b_p * (b_d_p - tl.sum(b_p * b_d_p, 1)[:, None]) - b_n * (b_d_n - tl.sum(b_n * b_d_n, 1)[:, None])
        if PRECISION == "bfloat16":
            b_d_y = b_d_y.to(b_x.dtype)
            b_d_x = tl.dot(b_d_y, tl.trans(b_w))
            b_d_w = tl.dot(tl.trans(b_x), b_d_y, b_d_w)
        else:
            b_d_x = product(b_d_y, tl.trans(b_w), PRECISION)
            b_d_w = add_product(tl.trans(b_x), b_d_y, b_d_w, PRECISION)
        p_to = p_d_x + ((i_row.to(tl.int64) * S.H + i_h) * S.D)[:, None] + i_d[None, :]
        tl.store(p_to, b_d_x.to(p_d_x.dtype.element_ty), mask=m_x)
    p_to = p_d_w + (i_part * S.H + i_h) * (S.F * S.D) + i_f[None, :] * S.D + i_d[:, None]
    tl.store(p_to, b_d_w, mask=(i_f < S.F)[None, :] & (i_d < S.D)[:, None])
