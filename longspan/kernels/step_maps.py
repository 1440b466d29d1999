"""What stands around a memory in one token's step: norms with the linear maps after them, and angles of positions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(b_x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        b_x = 0.5 * b_x * (1 + tl.erf(b_x * 0.7071067811865476))
    if ACTIVATION == "relu":
        b_x = tl.maximum(b_x, 0)
    if ACTIVATION == "silu":
        b_x = b_x * tl.sigmoid(b_x)
    return b_x


@triton.jit
def finished(b_y, p_add, m_y, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """A sum as it is stored: rounded after the map, and again after what follows it, as where each is a step of its
    own.
    """
    b_y = b_y.to(dtype)
    if ACTIVATION != "identity":
        b_y = activated(b_y.to(tl.float32), ACTIVATION).to(dtype)
    if p_add is not None:
        b_y = (tl.load(p_add, mask=m_y, other=0.0).to(tl.float32) + b_y.to(tl.float32)).to(dtype)
    return b_y


@triton.jit
def bias_of(p_bias, p_other_bias, i_n, m_n, first):
    """Of the first map or of the other, either of which may have none."""
    b_bias = tl.zeros(i_n.shape, tl.float32)
    if p_bias is not None:
        b_bias += tl.load(p_bias + i_n, mask=m_n & first, other=0.0).to(tl.float32)
    if p_other_bias is not None:
        b_bias += tl.load(p_other_bias + i_n, mask=m_n & (not first), other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def map_vector_kernel(
    p_x,
    p_weight,
    p_bias,
    p_other,
    p_other_bias,
    p_gain,
    p_shift,
    p_add,
    p_out,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    N_OTHER: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
):
    """add + activation(norm(x) Wᵀ + b) of one row x (K,); a program has BN rows of W (N, K), or of another W."""
    pid = tl.program_id(0)
    first: tl.constexpr = (N + BN - 1) // BN
    i_k, i_n = tl.arange(0, BK), tl.arange(0, BN)
    m_k = i_k < K
    rows, column = N, 0
    if p_other is not None:
        if pid >= first:
            p_weight = p_other
            rows, column, pid = N_OTHER, N, pid - first
    i_n += pid * BN
    m_n = i_n < rows
    # Weights first: they are on their way while x is normed.
    b_w = tl.load(p_weight + i_n[:, None] * K + i_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
    b_x = tl.load(p_x + i_k, mask=m_k, other=0.0)
    if NORM > 0:
        b_n = b_x.to(tl.float32)
        if NORM == 1:
            b_n = tl.where(m_k, b_n - tl.sum(b_n, 0) / K, 0.0)
        b_n = b_n * tl.rsqrt(tl.sum(b_n * b_n, 0) / K + eps)
        if p_gain is not None:
            b_n *= tl.load(p_gain + i_k, mask=m_k, other=0.0).to(tl.float32)
        if p_shift is not None:
            b_n += tl.load(p_shift + i_k, mask=m_k, other=0.0).to(tl.float32)
        b_x = b_n.to(b_x.dtype)
    b_y = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    b_y += bias_of(p_bias, p_other_bias, i_n, m_n, column == 0)
    if p_add is not None:
        p_add += i_n
    b_y = finished(b_y, p_add, m_n, p_out.dtype.element_ty, ACTIVATION)
    tl.store(p_out + column + i_n, b_y, mask=m_n)


@triton.jit(do_not_specialize=["B"])
def map_rows_kernel(
    p_x,
    p_weight,
    p_bias,
    p_other,
    p_other_bias,
    p_gain,
    p_shift,
    p_add,
    p_out,
    eps,
    B,
    stride_x,
    stride_add,
    K: tl.constexpr,
    N: tl.constexpr,
    N_OTHER: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BB: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `map_vector_kernel` for rows x (B, K): each program BB of them and BN rows of W."""
    pid = tl.program_id(0)
    first: tl.constexpr = (N + BN - 1) // BN
    i_b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    i_k, i_n = tl.arange(0, BK), tl.arange(0, BN)
    m_b = i_b < B
    rows, column = N, 0
    if p_other is not None:
        if pid >= first:
            p_weight = p_other
            rows, column, pid = N_OTHER, N, pid - first
    i_n += pid * BN
    m_n = i_n < rows
    p_x += i_b[:, None] * stride_x
    mean, size = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    if NORM == 1:
        for k_0 in range(0, K, BK):
            m_x = m_b[:, None] & (k_0 + i_k < K)[None, :]
            mean += tl.sum(tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0).to(tl.float32), 1)
        mean = mean / K
    if NORM > 0:
        for k_0 in range(0, K, BK):
            m_x = m_b[:, None] & (k_0 + i_k < K)[None, :]
            b_n = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0).to(tl.float32)
            b_n = tl.where(m_x, b_n - mean[:, None], 0.0)
            size += tl.sum(b_n * b_n, 1)
        size = tl.rsqrt(size / K + eps)
    b_y = tl.zeros((BB, BN), tl.float32)
    for k_0 in range(0, K, BK):
        m_k = k_0 + i_k < K
        b_w = tl.load(p_weight + i_n[:, None] * K + (k_0 + i_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_b[:, None] & m_k[None, :], other=0.0)
        if NORM > 0:
            b_n = (b_x.to(tl.float32) - mean[:, None]) * size[:, None]
            if p_gain is not None:
                b_n *= tl.load(p_gain + k_0 + i_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
            if p_shift is not None:
                b_n += tl.load(p_shift + k_0 + i_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
            b_x = tl.where(m_k[None, :], b_n, 0.0).to(b_x.dtype)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PRECISION)
    b_y += bias_of(p_bias, p_other_bias, i_n, m_n, column == 0)[None, :]
    m_y = m_b[:, None] & m_n[None, :]
    if p_add is not None:
        p_add += i_b[:, None] * stride_add + i_n[None, :]
    b_y = finished(b_y, p_add, m_y, p_out.dtype.element_ty, ACTIVATION)
    tl.store(p_out + i_b[:, None] * (N + N_OTHER) + column + i_n[None, :], b_y, mask=m_y)


@triton.jit
def turns_kernel(p_length, p_frequency, p_cos, p_sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """cos and sin (HALF,) of one row's position, its angles made in float64 as in `ops.rotary`."""
    i_b = tl.program_id(0)
    i_d = tl.arange(0, BLOCK)
    m_d = i_d < HALF
    b_angle = tl.load(p_length + i_b).to(tl.float64) * tl.load(p_frequency + i_d, mask=m_d, other=0.0)
    whole: tl.constexpr = 6.283185307179586
    b_angle = (b_angle - tl.floor(b_angle / whole) * whole).to(tl.float32)
    tl.store(p_cos + i_b * HALF + i_d, tl.cos(b_angle), mask=m_d)
    tl.store(p_sin + i_b * HALF + i_d, tl.sin(b_angle), mask=m_d)
