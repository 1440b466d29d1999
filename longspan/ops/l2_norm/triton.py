"""L2 norm of queries and keys in one launch, and its gradient in another."""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import padded, program_index, token_pointer
from longspan.ops.decode.torch import KEY_EPSILON

ELEMENTS = 4096  # of a program
_EPSILON = tl.constexpr(KEY_EPSILON)

# Heads, their dimension, padded, and tokens per program.
L2NormSizes = namedtuple("L2NormSizes", "H HKV D BD BT")


def forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, T, H, D) and k (B, S, Hkv, D) of length 1, and the factors of their rows."""
    q, k = dense_rows(q), dense_rows(k)
    plan = _L2NormPlan.of((q, k), False)
    q_out, k_out = new_like(q), new_like(k)
    scale = q.new_empty((q.numel() + k.numel()) // q.shape[3], dtype=torch.float32)
    with on_device(q):
        plan.norm(*plan.addresses(q, k, q_out, k_out, scale))
    return q_out, k_out, scale


def backward(d_q: Tensor, d_k: Tensor, scale: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the inputs, given those of the results, the factors and the results q and k."""
    d_q, d_k, q, k = dense_rows(d_q), dense_rows(d_k), q.contiguous(), k.contiguous()
    plan = _L2NormPlan.of((d_q, d_k), True)
    q_out, k_out = new_like(q), new_like(k)
    with on_device(q):
        plan.norm(*plan.addresses(d_q, d_k, scale, q, k, q_out, k_out))
    return q_out, k_out


class _L2NormPlan(Plan):
    def __init__(self, device: int, key: Signature, back: bool) -> None:
        super().__init__(device)
        q, k = key
        assert q is not None
        assert k is not None
        (B, T, H, D), (S, Hkv) = q[0], k[0][1:3]
        BD = padded(D, 16)
        sizes = L2NormSizes(H, Hkv, D, BD, max(1, ELEMENTS // BD))
        kernel = l2_norm_backward_kernel if back else l2_norm_forward_kernel
        grid = (B * (H + Hkv) * -(-max(T, S) // sizes.BT),)
        self.norm = self.launch(kernel, grid, (T, S, B, Strides.of(q), Strides.of(k)), {"W": sizes})


@triton.jit
def _rows(p_x, x, i_b, i_h, i_t, T, HEADS: tl.constexpr, W: tl.constexpr):
    """Pointers to rows of x and to the same ones of a contiguous tensor, their mask, and their indices."""
    i_d = tl.arange(0, W.BD)[None, :]
    i_row = (i_b * T + i_t) * HEADS + i_h
    m_x = (i_t < T)[:, None] & (i_d < W.D)
    return (
        token_pointer(p_x, x, i_b, 0, i_h) + i_t.to(tl.int64)[:, None] * x.t + i_d,
        i_row[:, None] * W.D + i_d,
        m_x,
        i_row,
    )


@triton.jit
def _normalize(p_x, p_out, p_scale, x, i_b, i_h, i_t, T, HEADS: tl.constexpr, W: tl.constexpr):
    p_x, i_out, m_x, i_row = _rows(p_x, x, i_b, i_h, i_t, T, HEADS, W)
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) + _EPSILON)
    tl.store(p_out + i_out, (b_x * b_scale[:, None]).to(p_out.dtype.element_ty), mask=m_x)
    tl.store(p_scale + i_row, b_scale, mask=i_t < T)


@triton.jit(do_not_specialize=["T", "S", "B"])
def l2_norm_forward_kernel(p_q, p_k, p_q_out, p_k_out, p_scale, T, S, B, q, k, W: tl.constexpr):
    """Some tokens of one head of q or k."""
    i_h, _, i_block, i_b = program_index(tl.cdiv(tl.maximum(T, S), W.BT), W.H + W.HKV)
    i_t = i_block * W.BT + tl.arange(0, W.BT)
    if i_h < W.H:
        _normalize(p_q, p_q_out, p_scale, q, i_b, i_h, i_t, T, W.H, W)
    else:
        p_scale += tl.cast(B, tl.int64) * T * W.H
        _normalize(p_k, p_k_out, p_scale, k, i_b, i_h - W.H, i_t, S, W.HKV, W)


@triton.jit
def _gradient(p_d, p_scale, p_y, p_out, d, i_b, i_h, i_t, T, HEADS: tl.constexpr, W: tl.constexpr):
    p_d, i_y, m_x, i_row = _rows(p_d, d, i_b, i_h, i_t, T, HEADS, W)
    b_d = tl.load(p_d, mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(p_y + i_y, mask=m_x, other=0.0).to(tl.float32)
    b_scale = tl.load(p_scale + i_row, mask=i_t < T, other=0.0)[:, None]
    b_d -= b_y * tl.sum(b_y * b_d, 1)[:, None]
    tl.store(p_out + i_y, (b_d * b_scale).to(p_out.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["T", "S", "B"])
def l2_norm_backward_kernel(p_d_q, p_d_k, p_scale, p_q, p_k, p_q_out, p_k_out, T, S, B, d_q, d_k, W: tl.constexpr):
    """Some tokens of one head of q or k. p_q, p_k: The normalized ones."""
    i_h, _, i_block, i_b = program_index(tl.cdiv(tl.maximum(T, S), W.BT), W.H + W.HKV)
    i_t = i_block * W.BT + tl.arange(0, W.BT)
    if i_h < W.H:
        _gradient(p_d_q, p_scale, p_q, p_q_out, d_q, i_b, i_h, i_t, T, W.H, W)
    else:
        p_scale += tl.cast(B, tl.int64) * T * W.H
        _gradient(p_d_k, p_scale, p_k, p_k_out, d_k, i_b, i_h - W.H, i_t, S, W.HKV, W)
