"""What a decode step does to heads before the mechanism, convolution and norms, and after it, norm and gates."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.common.tiles import padded
from longspan.ops.decode.triton.token import await_previous, dependent_launch

# D columns per program of N; the first Q blocks are queries, the next K keys. SIZE of the convolution, 0 for none.
HeadSizes = namedtuple("HeadSizes", "N D BD Q K SIZE NORM")

# H heads of E values; ACTIVATION of the gates.
OutputSizes = namedtuple("OutputSizes", "H E BE ACTIVATION")


def decode_heads(
    q: Tensor,
    kv: Tensor,
    heads: tuple[int, int, int],
    convolution: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Run `ops.decode.fused_heads`."""
    (Q, K, D), B, N = heads, len(q), q.shape[2] + kv.shape[2]
    out = q.new_empty(B, 1, N)
    weight, recent = (None, None) if convolution is None else convolution
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    sizes = HeadSizes(N, D, padded(D, 16), Q, K, 0 if weight is None else len(weight), norms is not None)
    with on_device(q):
        grid, strides = (-(-N // D), B), (q.stride(0), kv.stride(0))
        arguments = q, kv, weight, recent, q_norm, k_norm, out, *strides, eps
        decode_heads_kernel[grid](*arguments, W=sizes, num_warps=1, **dependent_launch(q))
    return out


@triton.jit
def decode_heads_kernel(
    p_q, p_kv, p_conv, p_recent, p_q_norm, p_k_norm, p_out, stride_q, stride_kv, eps,
    W: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One head of queries, keys or values: silu(Σ_j w_j ∘ x_{t−j}), then the RMS norm of queries and keys.

    p_recent: (B, SIZE − 1, N) the tokens before this one, oldest first; this one takes the place of the oldest.
    """
    await_previous(PDL)
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_d = tl.arange(0, W.BD)
    i_n = i_h * W.D + i_d
    m_n = (i_d < W.D) & (i_n < W.N)
    dtype = p_out.dtype.element_ty
    p_x = p_q + i_b * stride_q
    if i_h >= W.Q:
        p_x = p_kv + i_b * stride_kv - W.Q * W.D
    b_x = tl.load(p_x + i_n, mask=m_n, other=0.0)
    if W.SIZE > 0:
        p_recent += i_b * ((W.SIZE - 1) * W.N) + i_n
        b_y = b_x.to(tl.float32) * tl.load(p_conv + i_n, mask=m_n, other=0.0).to(tl.float32)
        for slot in tl.static_range(W.SIZE - 1):
            b_old = tl.load(p_recent + slot * W.N, mask=m_n, other=0.0)
            b_weight = tl.load(p_conv + (W.SIZE - 1 - slot) * W.N + i_n, mask=m_n, other=0.0)
            b_y += b_old.to(tl.float32) * b_weight.to(tl.float32)
            if slot > 0:
                tl.store(p_recent + (slot - 1) * W.N, b_old, mask=m_n)
        tl.store(p_recent + (W.SIZE - 2) * W.N, b_x, mask=m_n)
        b_y = b_y.to(dtype).to(tl.float32)  # Round as separate operations would.
        b_x = (b_y * tl.sigmoid(b_y)).to(dtype)
    if W.NORM:
        if i_h < W.Q + W.K:
            p_norm = p_q_norm
            if i_h >= W.Q:
                p_norm = p_k_norm
            b_y = b_x.to(tl.float32)
            b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) / W.D + eps)
            b_x = (b_y * tl.load(p_norm + i_d, mask=m_n, other=0.0).to(tl.float32)).to(dtype)
    tl.store(p_out + i_b * W.N + i_n, b_x, mask=m_n)


def decode_output(
    x: Tensor, norm: tuple[Tensor, float] | None, gates: Tensor | None, activation: str, head_gates: Tensor | None
) -> Tensor:
    """Run `ops.decode.gate_heads`."""
    B, _, H, E = x.shape
    out = x.new_empty(B, 1, H * E)
    weight, eps = (None, 0.0) if norm is None else norm
    strides = [0 if y is None else y.stride(0) for y in (x, gates, head_gates)]
    sizes = OutputSizes(H, E, padded(E, 16), activation)
    with on_device(x):
        arguments = x, weight, gates, head_gates, out, *strides, eps
        decode_output_kernel[(H, B)](*arguments, W=sizes, num_warps=1, **dependent_launch(x))
    return out


@triton.jit
def decode_output_kernel(
    p_x, p_norm, p_gates, p_head_gates, p_out, stride, stride_gates, stride_heads, eps,
    W: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """norm(x) ∘ activation(gate) · σ(head gate) of one head; rounded after each, as separate operations would."""
    await_previous(PDL)
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_e = tl.arange(0, W.BE)
    m_e, i_n = i_e < W.E, i_h * W.E + i_e
    dtype = p_out.dtype.element_ty
    b_x = tl.load(p_x + i_b * stride + i_n, mask=m_e, other=0.0).to(tl.float32)
    if p_norm is not None:
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) / W.E + eps)
        b_x = (b_x * tl.load(p_norm + i_e, mask=m_e, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if p_gates is not None:
        b_raw = tl.load(p_gates + i_b * stride_gates + i_n, mask=m_e, other=0.0).to(tl.float32)
        b_gate = tl.sigmoid(b_raw)
        if W.ACTIVATION == "silu":
            b_gate *= b_raw
        b_x = (b_x * b_gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if p_head_gates is not None:
        gate = tl.sigmoid(tl.load(p_head_gates + i_b * stride_heads + i_h).to(tl.float32))
        b_x *= gate.to(dtype).to(tl.float32)
    tl.store(p_out + i_b * (W.H * W.E) + i_n, b_x.to(dtype), mask=m_e)
