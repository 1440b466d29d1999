"""Linear layers of a decode step, fused with the norm before and the activation and residual after them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device

# Pointers to x (B, K), norm, weight (N, K) and bias of one or two layers, residual and output.
LinearLayers = namedtuple(
    "LinearLayers",
    "p_x p_norm_weight p_norm_bias p_weight p_bias p_weight_2 p_bias_2 p_residual p_out eps",
)


# BK columns of x and BN rows of a weight per block. NORM: 0 none, 1 LayerNorm, 2 RMSNorm.
LayerSizes = namedtuple("LayerSizes", "K N N_2 BK BN NORM ACTIVATION")


def decode_linear_layers(
    x: Tensor, weights: Sequence[Sequence[Any]], norm: Sequence[Any], activation: str, residual: Tensor | None
) -> Tensor:
    """Run `ops.decode.fused_linear` for one or two layers; return their outputs concatenated, (B, 1, N)."""
    B, _, K = x.shape
    (weight, bias), (weight_2, bias_2) = weights[0], weights[1] if len(weights) > 1 else (None, None)
    N, N_2 = len(weight), 0 if weight_2 is None else len(weight_2)
    out = x.new_empty(B, 1, N + N_2)
    kind, norm_weight, norm_bias, eps = norm
    layers = LinearLayers(x, norm_weight, norm_bias, weight, bias, weight_2, bias_2, residual, out, eps)
    fp32, wide, BK = x.dtype == torch.float32, N + N_2 > 1024, triton.next_power_of_2(K)
    if B == 1:
        # Enough programs for every multiprocessor, each with at most 16,384 weights.
        BB, BN = 1, max(1, min(16 if wide else 4, 16384 // BK))
    else:
        # As many columns at once as fit, so that loads do not wait for one another.
        wide = wide and not fp32
        BB, BN, BK = 16 if B <= 16 else 64 if wide else 32, 64 if wide else 32, max(16, min(BK, 32 if fp32 else 512))
    sizes = LayerSizes(K, N, N_2, BK, BN, kind, activation)
    grid = -(-N // BN) + -(-N_2 // BN), -(-B // BB)
    with on_device(x):
        if B == 1:
            decode_gemv_kernel[grid](layers, W=sizes, num_warps=4)
        else:
            strides = x.stride(0), 0 if residual is None else residual.stride(0)
            constants = {"W": sizes, "BB": BB, "num_warps": 8 if BB == 64 else 4, "num_stages": 3}
            decode_gemm_kernel[grid](layers, B, *strides, **constants)
    return out


@triton.jit
def activate(b_x, W: tl.constexpr):
    if W.ACTIVATION == "gelu":
        b_x = 0.5 * b_x * (1 + tl.erf(b_x * 0.7071067811865476))
    if W.ACTIVATION == "relu":
        b_x = tl.maximum(b_x, 0)
    if W.ACTIVATION == "silu":
        b_x = b_x * tl.sigmoid(b_x)
    return b_x


@triton.jit
def store_result(layers, b_y, i_b, i_n, m_y, i_out, W: tl.constexpr):
    """Apply activation and residual and store; round after each, as separate operations would."""
    b_y = b_y.to(layers.p_out.dtype.element_ty)
    if W.ACTIVATION != "identity":
        b_y = activate(b_y.to(tl.float32), W).to(b_y.dtype)
    if layers.p_residual is not None:
        b_residual = tl.load(layers.p_residual + i_b + i_n, mask=m_y, other=0.0).to(tl.float32)
        b_y = (b_residual + b_y.to(tl.float32)).to(b_y.dtype)
    tl.store(layers.p_out + i_out, b_y, mask=m_y)


@triton.jit
def select_layer(layers, W: tl.constexpr):
    """Return the weight that a program multiplies, its BN rows, their mask, and the layer's first output column."""
    pid = tl.program_id(0)
    first: tl.constexpr = (W.N + W.BN - 1) // W.BN
    p_weight, rows, column = layers.p_weight, W.N, 0
    if layers.p_weight_2 is not None:
        if pid >= first:
            p_weight = layers.p_weight_2
            rows, column, pid = W.N_2, W.N, pid - first
    i_n = tl.arange(0, W.BN) + pid * W.BN
    return p_weight, i_n, i_n < rows, column


@triton.jit
def load_bias(layers, i_n, m_n, first):
    """Load the bias of the first layer or of the second; either may have none."""
    b_bias = tl.zeros(i_n.shape, tl.float32)
    if layers.p_bias is not None:
        b_bias += tl.load(layers.p_bias + i_n, mask=m_n & first, other=0.0).to(tl.float32)
    if layers.p_bias_2 is not None:
        b_bias += tl.load(layers.p_bias_2 + i_n, mask=m_n & (not first), other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def scale_normed(b_x, layers, i_k, m_k):
    """Apply the norm's weight and bias, where it has them, to normalized x (…, BK)."""
    if layers.p_norm_weight is not None:
        b_x *= tl.load(layers.p_norm_weight + i_k, mask=m_k, other=0.0).to(tl.float32)
    if layers.p_norm_bias is not None:
        b_x += tl.load(layers.p_norm_bias + i_k, mask=m_k, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def decode_gemv_kernel(layers, W: tl.constexpr):
    """residual + activation(norm(x) Wᵀ + b) of a vector x (K,)."""
    p_weight, i_n, m_n, column = select_layer(layers, W)
    i_k = tl.arange(0, W.BK)
    m_k = i_k < W.K
    # Issue the loads of the weight before the norm needs x.
    b_w = tl.load(p_weight + i_n[:, None] * W.K + i_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
    b_x = tl.load(layers.p_x + i_k, mask=m_k, other=0.0)
    if W.NORM > 0:
        b_n = b_x.to(tl.float32)
        if W.NORM == 1:
            b_n = tl.where(m_k, b_n - tl.sum(b_n, 0) / W.K, 0.0)
        b_n = b_n * tl.rsqrt(tl.sum(b_n * b_n, 0) / W.K + layers.eps)
        b_x = scale_normed(b_n, layers, i_k, m_k).to(b_x.dtype)
    b_y = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    b_y += load_bias(layers, i_n, m_n, column == 0)
    store_result(layers, b_y, 0, i_n, m_n, column + i_n, W)


@triton.jit(do_not_specialize=["B"])
def decode_gemm_kernel(layers, B, stride_x, stride_residual, W: tl.constexpr, BB: tl.constexpr):
    """residual + activation(norm(x) Wᵀ + b) of BB rows of x (B, K)."""
    PRECISION: tl.constexpr = "ieee" if layers.p_x.dtype.element_ty == tl.float32 else "tf32"
    p_weight, i_n, m_n, column = select_layer(layers, W)
    i_b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    i_k = tl.arange(0, W.BK)
    m_b = i_b < B
    p_x = layers.p_x + i_b[:, None] * stride_x
    b_mean, b_rstd = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    if W.NORM == 1:
        for k_0 in range(0, W.K, W.BK):
            m_x = m_b[:, None] & (k_0 + i_k < W.K)[None, :]
            b_mean += tl.sum(tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0).to(tl.float32), 1)
        b_mean = b_mean / W.K
    if W.NORM > 0:
        for k_0 in range(0, W.K, W.BK):
            m_x = m_b[:, None] & (k_0 + i_k < W.K)[None, :]
            b_n = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0).to(tl.float32)
            b_n = tl.where(m_x, b_n - b_mean[:, None], 0.0)
            b_rstd += tl.sum(b_n * b_n, 1)
        b_rstd = tl.rsqrt(b_rstd / W.K + layers.eps)
    b_y = tl.full((BB, W.BN), 0.0, tl.float32)
    for k_0 in range(0, W.K, W.BK):
        m_k = k_0 + i_k < W.K
        m_w = m_n[:, None] & m_k[None, :]
        b_w = tl.load(p_weight + i_n[:, None] * W.K + (k_0 + i_k)[None, :], mask=m_w, other=0.0)
        b_x = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_b[:, None] & m_k[None, :], other=0.0)
        if W.NORM > 0:
            b_n = scale_normed((b_x.to(tl.float32) - b_mean[:, None]) * b_rstd[:, None], layers, k_0 + i_k, m_k)
            b_x = tl.where(m_k[None, :], b_n, 0.0).to(b_x.dtype)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PRECISION)
    b_y += load_bias(layers, i_n, m_n, column == 0)[None, :]
    m_y = m_b[:, None] & m_n[None, :]
    i_out = i_b[:, None] * (W.N + W.N_2) + column + i_n[None, :]
    store_result(layers, b_y, i_b[:, None] * stride_residual, i_n[None, :], m_y, i_out, W)
