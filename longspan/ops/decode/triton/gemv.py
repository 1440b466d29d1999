"""Linear layers of a decode step, fused with the norm before and the activation and residual after them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device, shared_memory_kb
from longspan.ops.decode.torch import TokenShift
from longspan.ops.decode.triton.token import await_previous, dependent_launch

# Rows of a weight per program of a matrix–vector product, with more than 1024 rows in all and with fewer; warps.
WIDE_ROWS, ROWS, WARPS = 16, 4, 4

# Pointers to x (B, K), norm, the weights (N, K) and biases of the layers, shifted tokens and their positions, residual
# and output.
LinearLayers = namedtuple(
    "LinearLayers", "p_x p_norm_weight p_norm_bias weights biases p_recent p_length p_residual p_out eps"
)


# BK columns of x and BN rows of a weight per block. N output columns; ROWS of each layer's weight, its first output
# column and its first program. NORM: 0 none, 1 LayerNorm, 2 RMSNorm. OFFSETS of token shift, over equal parts of x, and
# the SLOTS of its ring buffer.
LayerSizes = namedtuple("LayerSizes", "K N ROWS COLUMNS PROGRAMS BK BN NORM ACTIVATION OFFSETS SLOTS")


def decode_linear_layers(
    x: Tensor,
    weights: Sequence[Sequence[Any]],
    norm: Sequence[Any],
    activation: str,
    residual: Tensor | None,
    shift: TokenShift | None,
) -> Tensor:
    """Run `ops.decode.fused_linear`; return the outputs of the layers concatenated, (B, 1, N)."""
    B, _, K = x.shape
    rows = tuple(len(weight) for weight, _ in weights)
    N = sum(rows)
    out = x.new_empty(B, 1, N)
    kind, norm_weight, norm_bias, eps = norm
    recent, length, offsets = (None, None, ()) if shift is None else shift
    both = (tuple(weight for weight, _ in weights), tuple(bias for _, bias in weights))
    layers = LinearLayers(x, norm_weight, norm_bias, *both, recent, length, residual, out, eps)
    fp32, wide, BK = x.dtype == torch.float32, N > 1024, triton.next_power_of_2(K)
    if B == 1:
        # Enough programs for every multiprocessor, each with at most 16,384 weights.
        BB, BN = 1, max(1, min(WIDE_ROWS if wide else ROWS, 16384 // BK))
    else:
        wide = wide and not fp32
        BB, BN = 16 if B <= 16 else 64 if wide else 32, 64 if wide else 32
        BK = max(16, min(BK, 32)) if fp32 else _columns(K, BB, BN, shared_memory_kb(x.get_device()))
    programs = [-(-n // BN) for n in rows]
    starts = (tuple(accumulate(numbers[:-1], initial=0)) for numbers in (rows, programs))
    sizes = LayerSizes(K, N, rows, *starts, BK, BN, kind, activation, offsets, max(offsets, default=0) + 1)
    grid = sum(programs), -(-B // BB)
    with on_device(x):
        if B == 1:
            decode_gemv_kernel[grid](layers, W=sizes, num_warps=WARPS, **dependent_launch(x))
        else:
            strides = x.stride(0), 0 if residual is None else residual.stride(0)
            constants = {
                "W": sizes,
                "BB": BB,
                "num_warps": 8 if BB == 64 else 4,
                "num_stages": 3,
                **dependent_launch(x),
            }
            decode_gemm_kernel[grid](layers, B, *strides, **constants)
    return out


@cache
def _columns(K: int, BB: int, BN: int, shared_kb: int) -> int:
    """As many columns of half precision at once as fit, so that loads do not wait for one another.

    A loop has two blocks in flight, with the instructions of Hopper for 64 rows three; about 18 KB are other data.
    """
    BK = max(16, min(triton.next_power_of_2(K), 512))
    while (1 if BK >= K else 3 if BB == 64 else 2) * (BB + BN) * BK * 2 > (shared_kb - 19) * 1024:
        BK //= 2
    return BK


@triton.jit
def activate(b_x, W: tl.constexpr):
    if W.ACTIVATION == "gelu":
        b_x = 0.5 * b_x * (1 + tl.erf(b_x * 0.7071067811865476))
    if W.ACTIVATION == "relu":
        b_x = tl.maximum(b_x, 0)
    if W.ACTIVATION == "relu2":
        b_x = tl.maximum(b_x, 0)
        b_x = b_x * b_x
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
    """Return the weight that a program multiplies, its BN rows and their mask, their bias in float32, and the layer's
    first output column.
    """
    pid = tl.program_id(0)
    COUNT: tl.constexpr = len(W.ROWS)
    p_weight, rows, column, first = layers.weights[0], W.ROWS[0], 0, 0
    for i in tl.static_range(1, COUNT):
        if pid >= W.PROGRAMS[i]:
            p_weight = layers.weights[i]
            rows, column, first = W.ROWS[i], W.COLUMNS[i], W.PROGRAMS[i]
    i_n = tl.arange(0, W.BN) + (pid - first) * W.BN
    m_n = i_n < rows
    b_bias = tl.zeros(i_n.shape, tl.float32)
    for i in tl.static_range(COUNT):
        if layers.biases[i] is not None:
            m_own = m_n & (i_n + column >= W.COLUMNS[i]) & (i_n + column < W.COLUMNS[i] + W.ROWS[i])
            b_bias += tl.load(layers.biases[i] + i_n, mask=m_own, other=0.0).to(tl.float32)
    return p_weight, i_n, m_n, b_bias, column


@triton.jit
def shift_columns(b_x, layers, position, i_b, i_k, m_x, write, W: tl.constexpr):
    """Replace parts of normalized x (…, BK) by those of earlier tokens; one program per row writes x to its slot."""
    COUNT: tl.constexpr = len(W.OFFSETS)
    if COUNT > 0:
        SIZE: tl.constexpr = W.K // COUNT
        p_rows = layers.p_recent + i_b * (W.SLOTS * W.K) + i_k
        if write:
            tl.store(p_rows + position % W.SLOTS * W.K, b_x, mask=m_x)
        for i in tl.static_range(COUNT):
            if W.OFFSETS[i] > 0:
                m_part = m_x & (i_k >= i * SIZE) & (i_k < (i + 1) * SIZE)
                b_old = tl.load(p_rows + (position + W.SLOTS - W.OFFSETS[i]) % W.SLOTS * W.K, mask=m_part, other=0.0)
                b_x = tl.where(m_part, b_old, b_x)
    return b_x


@triton.jit
def scale_normed(b_x, layers, i_k, m_k):
    """Apply the norm's weight and bias, where it has them, to normalized x (…, BK)."""
    if layers.p_norm_weight is not None:
        b_x *= tl.load(layers.p_norm_weight + i_k, mask=m_k, other=0.0).to(tl.float32)
    if layers.p_norm_bias is not None:
        b_x += tl.load(layers.p_norm_bias + i_k, mask=m_k, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def decode_gemv_kernel(layers, W: tl.constexpr, PDL: tl.constexpr):
    """residual + activation(shift(norm(x)) Wᵀ + b) of a vector x (K,)."""
    p_weight, i_n, m_n, b_bias, column = select_layer(layers, W)
    i_k = tl.arange(0, W.BK)
    m_k = i_k < W.K
    # Issue the loads of the weight before x is there.
    b_w = tl.load(p_weight + i_n[:, None] * W.K + i_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
    await_previous(PDL)
    b_x = tl.load(layers.p_x + i_k, mask=m_k, other=0.0)
    if W.NORM > 0:
        b_n = b_x.to(tl.float32)
        if W.NORM == 1:
            b_n = tl.where(m_k, b_n - tl.sum(b_n, 0) / W.K, 0.0)
        b_n = b_n * tl.rsqrt(tl.sum(b_n * b_n, 0) / W.K + layers.eps)
        b_x = scale_normed(b_n, layers, i_k, m_k).to(b_x.dtype)
    if layers.p_length is not None:
        b_x = shift_columns(b_x, layers, tl.load(layers.p_length), 0, i_k, m_k, tl.program_id(0) == 0, W)
    b_y = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], 1) + b_bias
    store_result(layers, b_y, 0, i_n, m_n, column + i_n, W)


@triton.jit(do_not_specialize=["B"])
def decode_gemm_kernel(layers, B, stride_x, stride_residual, W: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr):
    """residual + activation(shift(norm(x)) Wᵀ + b) of BB rows of x (B, K)."""
    await_previous(PDL)
    PRECISION: tl.constexpr = "ieee" if layers.p_x.dtype.element_ty == tl.float32 else "tf32"
    p_weight, i_n, m_n, b_bias, column = select_layer(layers, W)
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
    # Sums of float32 products would lose digits in one long chain.
    SPAN: tl.constexpr = 8 * W.BK if layers.p_x.dtype.element_ty == tl.float32 else W.K
    for start in range(0, W.K, SPAN):
        b_part = tl.full((BB, W.BN), 0.0, tl.float32)
        for k_0 in range(start, min(start + SPAN, W.K), W.BK):
            m_k = k_0 + i_k < W.K
            m_w = m_n[:, None] & m_k[None, :]
            b_w = tl.load(p_weight + i_n[:, None] * W.K + (k_0 + i_k)[None, :], mask=m_w, other=0.0)
            m_x = m_b[:, None] & m_k[None, :]
            b_x = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0)
            if W.NORM > 0:
                b_n = scale_normed((b_x.to(tl.float32) - b_mean[:, None]) * b_rstd[:, None], layers, k_0 + i_k, m_k)
                b_x = tl.where(m_k[None, :], b_n, 0.0).to(b_x.dtype)
            if layers.p_length is not None:
                position = tl.load(layers.p_length + i_b, mask=m_b, other=0)[:, None]
                b_x = shift_columns(
                    b_x, layers, position, i_b[:, None], (k_0 + i_k)[None, :], m_x, tl.program_id(0) == 0, W
                )
            b_part = tl.dot(b_x, tl.trans(b_w), b_part, input_precision=PRECISION)
        b_y += b_part
    b_y += b_bias[None, :]
    m_y = m_b[:, None] & m_n[None, :]
    i_out = i_b[:, None] * W.N + column + i_n[None, :]
    store_result(layers, b_y, i_b[:, None] * stride_residual, i_n[None, :], m_y, i_out, W)
