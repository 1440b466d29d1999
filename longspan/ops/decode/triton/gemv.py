"""What stands around a memory in one token's step: norms with the linear maps after them, and angles of positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Maps(NamedTuple):
    """Rows x, a norm's gain and shift, one map's weight (N, K) and bias and another's, what is added, the result."""

    p_x: Any
    p_gain: Any
    p_shift: Any
    p_weight: Any
    p_bias: Any
    p_other: Any
    p_other_bias: Any
    p_add: Any
    p_out: Any
    eps: float


class Widths(NamedTuple):
    """BK columns of x and BN rows of a weight in a block. NORM: 0 none, 1 layer, 2 rms."""

    K: int
    N: int
    N_OTHER: int
    BK: int
    BN: int
    NORM: int
    ACTIVATION: str


@triton.jit
def activated(b_x, W: tl.constexpr):
    if W.ACTIVATION == "gelu":
        b_x = 0.5 * b_x * (1 + tl.erf(b_x * 0.7071067811865476))
    if W.ACTIVATION == "relu":
        b_x = tl.maximum(b_x, 0)
    if W.ACTIVATION == "silu":
        b_x = b_x * tl.sigmoid(b_x)
    return b_x


@triton.jit
def finish(maps, b_y, i_b, i_n, m_y, i_out, W: tl.constexpr):
    """Stores a sum: rounded after the map, and again after what follows it, as where each is a step of its own."""
    b_y = b_y.to(maps.p_out.dtype.element_ty)
    if W.ACTIVATION != "identity":
        b_y = activated(b_y.to(tl.float32), W).to(b_y.dtype)
    if maps.p_add is not None:
        b_y = (tl.load(maps.p_add + i_b + i_n, mask=m_y, other=0.0).to(tl.float32) + b_y.to(tl.float32)).to(b_y.dtype)
    tl.store(maps.p_out + i_out, b_y, mask=m_y)


@triton.jit
def own_rows(maps, W: tl.constexpr):
    """A program's BN rows of a map's weight: where it lies, which rows, which of them there are, the result's column
    of its first row.
    """
    pid = tl.program_id(0)
    first: tl.constexpr = (W.N + W.BN - 1) // W.BN
    p_weight, rows, column = maps.p_weight, W.N, 0
    if maps.p_other is not None:
        if pid >= first:
            p_weight = maps.p_other
            rows, column, pid = W.N_OTHER, W.N, pid - first
    i_n = tl.arange(0, W.BN) + pid * W.BN
    return p_weight, i_n, i_n < rows, column


@triton.jit
def bias_of(maps, i_n, m_n, first):
    """Of the first map or of the other, either of which may have none."""
    b_bias = tl.zeros(i_n.shape, tl.float32)
    if maps.p_bias is not None:
        b_bias += tl.load(maps.p_bias + i_n, mask=m_n & first, other=0.0).to(tl.float32)
    if maps.p_other_bias is not None:
        b_bias += tl.load(maps.p_other_bias + i_n, mask=m_n & (not first), other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def gained(b_x, maps, i_k, m_k):
    """Normed x (…, BK) with the norm's gain and shift, if it has any."""
    if maps.p_gain is not None:
        b_x *= tl.load(maps.p_gain + i_k, mask=m_k, other=0.0).to(tl.float32)
    if maps.p_shift is not None:
        b_x += tl.load(maps.p_shift + i_k, mask=m_k, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def map_vector_kernel(maps, W: tl.constexpr):
    """add + activation(norm(x) Wᵀ + b) of one row x (K,)."""
    p_weight, i_n, m_n, column = own_rows(maps, W)
    i_k = tl.arange(0, W.BK)
    m_k = i_k < W.K
    # Weights first: they are on their way while x is normed.
    b_w = tl.load(p_weight + i_n[:, None] * W.K + i_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
    b_x = tl.load(maps.p_x + i_k, mask=m_k, other=0.0)
    if W.NORM > 0:
        b_n = b_x.to(tl.float32)
        if W.NORM == 1:
            b_n = tl.where(m_k, b_n - tl.sum(b_n, 0) / W.K, 0.0)
        b_n = b_n * tl.rsqrt(tl.sum(b_n * b_n, 0) / W.K + maps.eps)
        b_x = gained(b_n, maps, i_k, m_k).to(b_x.dtype)
    b_y = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    b_y += bias_of(maps, i_n, m_n, column == 0)
    finish(maps, b_y, 0, i_n, m_n, column + i_n, W)


@triton.jit(do_not_specialize=["B"])
def map_rows_kernel(maps, B, stride_x, stride_add, W: tl.constexpr, BB: tl.constexpr, PRECISION: tl.constexpr):
    """As `map_vector_kernel` for rows x (B, K), BB of them a program."""
    p_weight, i_n, m_n, column = own_rows(maps, W)
    i_b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    i_k = tl.arange(0, W.BK)
    m_b = i_b < B
    p_x = maps.p_x + i_b[:, None] * stride_x
    mean, size = tl.zeros((BB,), tl.float32), tl.zeros((BB,), tl.float32)
    if W.NORM == 1:
        for k_0 in range(0, W.K, W.BK):
            m_x = m_b[:, None] & (k_0 + i_k < W.K)[None, :]
            mean += tl.sum(tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0).to(tl.float32), 1)
        mean = mean / W.K
    if W.NORM > 0:
        for k_0 in range(0, W.K, W.BK):
            m_x = m_b[:, None] & (k_0 + i_k < W.K)[None, :]
            b_n = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_x, other=0.0).to(tl.float32)
            b_n = tl.where(m_x, b_n - mean[:, None], 0.0)
            size += tl.sum(b_n * b_n, 1)
        size = tl.rsqrt(size / W.K + maps.eps)
    b_y = tl.full((BB, W.BN), 0.0, tl.float32)
    for k_0 in range(0, W.K, W.BK):
        m_k = k_0 + i_k < W.K
        m_w = m_n[:, None] & m_k[None, :]
        b_w = tl.load(p_weight + i_n[:, None] * W.K + (k_0 + i_k)[None, :], mask=m_w, other=0.0)
        b_x = tl.load(p_x + (k_0 + i_k)[None, :], mask=m_b[:, None] & m_k[None, :], other=0.0)
        if W.NORM > 0:
            b_n = gained((b_x.to(tl.float32) - mean[:, None]) * size[:, None], maps, k_0 + i_k, m_k)
            b_x = tl.where(m_k[None, :], b_n, 0.0).to(b_x.dtype)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PRECISION)
    b_y += bias_of(maps, i_n, m_n, column == 0)[None, :]
    m_y = m_b[:, None] & m_n[None, :]
    i_out = i_b[:, None] * (W.N + W.N_OTHER) + column + i_n[None, :]
    finish(maps, b_y, i_b[:, None] * stride_add, i_n[None, :], m_y, i_out, W)


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
