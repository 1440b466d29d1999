"""silu(Σ_j w_j ∘ x_{t−j}) of a tile of tokens and channels at a time, forward and backward.

A program of the backward pass takes every P-th tile of its channels, and adds up its part of dw in registers; the parts
are summed afterwards. Without atomic additions, results are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, new_like, on_device

PARTS = 128  # programs of a block of channels in the backward pass
BT, BC = 32, 64  # tokens and channels of a tile


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return y (B, T, C)."""
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    plan = ConvolutionPlan.of((x, weight))
    with on_device(x):
        plan.forward(x, weight, out)
    return out


def backward(d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight."""
    d_out, x, weight = d_out.contiguous(), x.contiguous(), weight.contiguous()
    plan = ConvolutionPlan.of((x, weight, d_out))
    d_x = new_like(x)
    parts = x.new_empty(plan.parts, *weight.shape, dtype=torch.float32)
    with on_device(x):
        plan.backward(x, weight, d_out, d_x, parts)
    return d_x, parts.sum(0).to(weight.dtype)


class ConvolutionPlan(Plan):
    """The launch of the forward pass, or of the backward pass where the signature has the gradient of y."""

    def __init__(self, device: int, key: Signature, *options: Any) -> None:
        super().__init__(device)
        x, weight, *rest = key
        assert x is not None
        assert weight is not None
        (B, T, C), size = x[0], weight[0][0]
        tiles, blocks = -(-B * T // BT), -(-C // BC)
        constants = {"C": C, "SIZE": size, "BS": triton.next_power_of_2(size), "BT": BT, "BC": BC}
        self.parts = min(PARTS, tiles)
        if rest:
            grid = self.parts, blocks
            self.backward = self.launch(convolution_backward_kernel, grid, (B * T, T, self.parts), constants)
        else:
            self.forward = self.launch(convolution_forward_kernel, (tiles, blocks), (B * T, T), constants)


@triton.jit
def load_token(p_x, i_row, i_t, i_c, j: tl.constexpr, T, N, C: tl.constexpr):
    """Row i_row − j (BT, BC) of N rows of C numbers, in float32; zeros where token i_t − j is not in the sequence."""
    mask = (i_row < N) & (i_t >= j) & (i_t - j < T)
    p_x += (i_row - j).to(tl.int64)[:, None] * C + i_c[None, :]
    return tl.load(p_x, mask=mask[:, None] & (i_c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def convolve(p_x, p_w, i_row, i_t, i_c, T, N, C: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """Σ_j w_j ∘ x_{t−j} (BT, BC)."""
    b_a = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(SIZE):
        b_w = tl.load(p_w + j * C + i_c, mask=i_c < C, other=0.0).to(tl.float32)
        b_a += b_w[None, :] * load_token(p_x, i_row, i_t, i_c, j, T, N, C)
    return b_a


@triton.jit(do_not_specialize=["N", "T"])
def convolution_forward_kernel(
    p_x, p_w, p_out, N, T, C: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """Compute BC channels of BT of N tokens."""
    i_row, i_c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    b_a = convolve(p_x, p_w, i_row, i_row % T, i_c, T, N, C, SIZE, BT, BC)
    p_out += i_row.to(tl.int64)[:, None] * C + i_c[None, :]
    mask = (i_row < N)[:, None] & (i_c < C)[None, :]
    tl.store(p_out, (b_a * tl.sigmoid(b_a)).to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "T", "PARTS"])
def convolution_backward_kernel(
    p_x, p_w, p_d_out, p_d_x, p_d_w, N, T, PARTS,
    C: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute dx of BC channels of every PARTS-th tile, and their part of dw."""
    i_c, i_j = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BS)
    b_d_w = tl.zeros((BS, BC), tl.float32)
    for first in range(tl.program_id(0) * BT, N, PARTS * BT):
        i_row = first + tl.arange(0, BT)
        i_t = i_row % T
        b_d_x = tl.zeros((BT, BC), tl.float32)
        for i in tl.static_range(SIZE):
            # Token t + i, whose output depends on token t.
            b_a = convolve(p_x, p_w, i_row + i, i_t + i, i_c, T, N, C, SIZE, BT, BC)
            b_s = tl.sigmoid(b_a)
            b_d_a = load_token(p_d_out, i_row + i, i_t + i, i_c, 0, T, N, C) * b_s * (1 + b_a * (1 - b_s))
            b_d_x += tl.load(p_w + i * C + i_c, mask=i_c < C, other=0.0).to(tl.float32)[None, :] * b_d_a
            if i == 0:
                for j in tl.static_range(SIZE):
                    b_part = tl.sum(b_d_a * load_token(p_x, i_row, i_t, i_c, j, T, N, C), 0)
                    b_d_w += tl.where(i_j[:, None] == j, b_part[None, :], 0.0)
        p_to = p_d_x + i_row.to(tl.int64)[:, None] * C + i_c[None, :]
        tl.store(p_to, b_d_x.to(p_d_x.dtype.element_ty), mask=(i_row < N)[:, None] & (i_c < C)[None, :])
    p_to = p_d_w + (tl.program_id(0) * SIZE + i_j)[:, None] * C + i_c[None, :]
    tl.store(p_to, b_d_w, mask=(i_j < SIZE)[:, None] & (i_c < C)[None, :])
