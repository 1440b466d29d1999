"""Sum, norm and token shift in one pass over whole tokens, and their gradients in another.

A program of the backward pass takes every P-th tile and adds up its part of the weight's gradient in registers; the
caller sums the parts. Without atomic additions, results are deterministic.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, new_like, on_device
from longspan.ops.common.tiles import padded, zeros
from longspan.ops.residual_norm import num_parts, tokens_per_tile

# Features, padded, those that are not shifted, and tokens per tile.
ResidualNormSizes = namedtuple("ResidualNormSizes", "D BD OWN BT")


def forward(x: Tensor, y: Tensor, weight: Tensor, epsilon: float, shift: bool) -> tuple[Tensor, Tensor]:
    """Return x + y (B, T, D) and its norm."""
    x, y, weight = x.contiguous(), y.contiguous(), weight.contiguous()
    plan = _ResidualNormPlan.of((x, y, weight), epsilon, shift, False)
    total, normed = new_like(x), new_like(x)
    with on_device(x):
        plan.run(*plan.addresses(x, y, weight, total, normed))
    return total, normed


def backward(
    d_total: Tensor, d_normed: Tensor, total: Tensor, weight: Tensor, epsilon: float, shift: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and y, and parts (P, D) of that of the weight, to be summed."""
    d_total, d_normed, total, weight = (a.contiguous() for a in (d_total, d_normed, total, weight))
    plan = _ResidualNormPlan.of((d_total, d_normed, total, weight), epsilon, shift, True)
    d_x = new_like(total)
    parts = total.new_empty(plan.parts, len(weight), dtype=torch.float32)
    with on_device(total):
        plan.run(*plan.addresses(d_total, d_normed, total, weight, d_x, parts))
    return d_x, parts


class _ResidualNormPlan(Plan):
    def __init__(self, device: int, key: Signature, epsilon: float, shift: bool, back: bool) -> None:
        super().__init__(device)
        assert key[0] is not None
        B, T, D = key[0][0]
        BT = tokens_per_tile(D)
        sizes = ResidualNormSizes(D, padded(D, 16), D // 2 if shift else D, BT)
        self.parts = num_parts(B * T, D)
        if back:
            scalars = B * T, T, self.parts, epsilon
            self.run = self.launch(residual_norm_backward_kernel, (self.parts,), scalars, {"W": sizes})
        else:
            grid = (-(-B * T // BT),)
            self.run = self.launch(residual_norm_forward_kernel, grid, (B * T, T, epsilon), {"W": sizes})


@triton.jit
def _shifted(i_row, T, N, W: tl.constexpr):
    """Where the features of tokens i_row are after the shift: offsets (BT, BD), and their mask."""
    i_d = tl.arange(0, W.BD)[None, :]
    m_x = (i_row < N)[:, None] & (i_d < W.D)
    later = tl.where(i_d < W.OWN, 0, 1)
    m_there = m_x & ((i_row % T < T - 1)[:, None] | (i_d < W.OWN))
    return (i_row.to(tl.int64)[:, None] + later) * W.D + i_d, m_there


@triton.jit
def _tile(p_x, i_row, N, W: tl.constexpr):
    """Tokens i_row (BT, BD), in float32."""
    i_d = tl.arange(0, W.BD)[None, :]
    return tl.load(
        p_x + i_row.to(tl.int64)[:, None] * W.D + i_d, mask=(i_row < N)[:, None] & (i_d < W.D), other=0.0
    ).to(tl.float32)


@triton.jit
def _store_tile(p_x, i_row, N, b_x, W: tl.constexpr):
    i_d = tl.arange(0, W.BD)[None, :]
    p_x += i_row.to(tl.int64)[:, None] * W.D + i_d
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=(i_row < N)[:, None] & (i_d < W.D))


@triton.jit(do_not_specialize=["N", "T", "epsilon"])
def residual_norm_forward_kernel(p_x, p_y, p_w, p_total, p_normed, N, T, epsilon, W: tl.constexpr):
    """BT of N tokens."""
    i_row, i_d = tl.program_id(0) * W.BT + tl.arange(0, W.BT), tl.arange(0, W.BD)
    b_s = (_tile(p_x, i_row, N, W) + _tile(p_y, i_row, N, W)).to(p_total.dtype.element_ty)
    _store_tile(p_total, i_row, N, b_s, W)
    b_s = b_s.to(tl.float32)
    b_s *= tl.rsqrt(tl.sum(b_s * b_s, 1) / W.D + epsilon)[:, None]
    b_s *= tl.load(p_w + i_d, mask=i_d < W.D, other=0.0).to(tl.float32)[None, :]
    i_there, m_there = _shifted(i_row, T, N, W)
    tl.store(p_normed + i_there, b_s.to(p_normed.dtype.element_ty), mask=m_there)
    if W.OWN < W.D:
        # The first token of a sequence has none before it.
        m_first = ((i_row % T == 0) & (i_row < N))[:, None] & ((i_d >= W.OWN) & (i_d < W.D))[None, :]
        p_first = p_normed + i_row.to(tl.int64)[:, None] * W.D + i_d[None, :]
        tl.store(p_first, zeros(W.BT, W.BD).to(p_normed.dtype.element_ty), mask=m_first)


@triton.jit(do_not_specialize=["N", "T", "PARTS", "epsilon"])
def residual_norm_backward_kernel(
    p_d_total, p_d_normed, p_total, p_w, p_d_x, p_d_w, N, T, PARTS, epsilon, W: tl.constexpr
):  # fmt: skip
    """Every PARTS-th tile."""
    i_d = tl.arange(0, W.BD)
    b_w = tl.load(p_w + i_d, mask=i_d < W.D, other=0.0).to(tl.float32)[None, :]
    b_d_w = zeros(W.BT, W.BD)
    for i_0 in range(tl.program_id(0) * W.BT, N, PARTS * W.BT):
        i_row = i_0 + tl.arange(0, W.BT)
        i_there, m_there = _shifted(i_row, T, N, W)
        b_g = tl.load(p_d_normed + i_there, mask=m_there, other=0.0).to(tl.float32)
        b_s = _tile(p_total, i_row, N, W)
        b_r = tl.rsqrt(tl.sum(b_s * b_s, 1) / W.D + epsilon)[:, None]
        b_s *= b_r
        b_d_w += b_g * b_s
        b_g *= b_w
        b_g = b_r * (b_g - b_s * (tl.sum(b_g * b_s, 1) / W.D)[:, None])
        _store_tile(p_d_x, i_row, N, b_g + _tile(p_d_total, i_row, N, W), W)
    tl.store(p_d_w + tl.program_id(0) * W.D + i_d, tl.sum(b_d_w, 0), mask=i_d < W.D)
