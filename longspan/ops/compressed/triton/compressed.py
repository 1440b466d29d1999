"""Softmax attention of many queries over few keys: the keys and values of a head stay on the chip.

    P = exp2(S − lse),   D_i = Σ_e dout_ie out_ie,   dS = P ∘ (dout Vᵀ − D),   dq = dS K,   dk = dSᵀ q,   dv = Pᵀ dout

The backward pass computes Pᵀ and dSᵀ, keys first, so that the left factors of dk and dv are never stored to memory.
"""

from __future__ import annotations

import math
from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import add
from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, on_device
from longspan.ops.common.tiles import load_rows, padded, store_rows

_PROCESSORS = 132  # multiprocessors of an H200, which run two forward programs each, or one backward program


# Heads, R keys, dimensions; TOKENS, and BT = TOKENS · heads queries per tile; BR, BD, BE: padded; BS: keys per block
# of the backward pass.
CompressedSizes = namedtuple("CompressedSizes", "H HKV R D E TOKENS BT BR BS BD BE SHARED")


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D) in half precision, k (B, Hkv, R, D), v (B, Hkv, R, E) -> out (B, T, H, E), and lse in base 2."""
    inputs = tuple(dense_rows(x) for x in (q, k, v))
    plan = CompressedPlan.of(inputs, scale, k is v)
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    with on_device(q):
        plan.forward(inputs, out, lse)
    return out, lse


def backward(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, d_q: Tensor
) -> Tensor:
    """Write the gradient of q to d_q; return those of k and v side by side, (B, Hkv, R, D + E) in float32.

    If k is v, return their common gradient (B, Hkv, R, D).
    """
    inputs, d_out = tuple(dense_rows(x) for x in (q, k, v)), dense_rows(d_out)
    plan = CompressedPlan.of((*inputs, d_out, d_q), scale, k is v)
    parts = q.new_empty(plan.parts_shape, dtype=torch.float32)
    with on_device(q):
        plan.backward((*inputs, out, lse, d_out), d_q, parts)
    return parts.sum(0)


class CompressedPlan(Plan):
    """Launch of the forward pass, or of the backward pass where the signature has d_out and d_q."""

    def __init__(self, device: int, key: Signature, scale: float, shared: bool) -> None:
        super().__init__(device)
        q, k, v, *gradients = key
        (B, T, H, D), (Hkv, R), E = q[0], k[0][1:3], v[0][3]
        BR, BD, BE = (padded(size) for size in (R, D, E))
        sizes = CompressedSizes(H, Hkv, R, D, E, 64 * Hkv // H, 64, BR, min(BR, 128), BD, BE, shared)
        (q_strides, *d_strides), kv_strides = (Strides.of(x) for x in (q, *gradients)), (k[1], v[1])
        # Keys and values are (B, Hkv, R, ·), with R as their token dimension.
        strides = q_strides, *(Strides(b, r, h) for b, h, r, _ in kv_strides), *d_strides
        blocks, heads = -(-T // sizes.TOKENS), B * Hkv
        per_program = -(-blocks // max(1, (1 if gradients else 2) * _PROCESSORS // heads))
        programs = -(-blocks // per_program)
        scalars = T, per_program, scale * math.log2(math.e)
        constants = {"S": sizes, "STAGES": 3, "num_warps": 8 if gradients else 4}
        if gradients:
            self.backward = self.launch(
                compressed_backward_kernel, (programs, heads), (*scalars, scale, strides), constants
            )
            self.parts_shape = programs, B, Hkv, R, D if shared else D + E
        else:
            self.forward = self.launch(compressed_forward_kernel, (programs, heads), (*scalars, strides), constants)


@triton.jit
def _program(blocks, T, S: tl.constexpr):
    """Return a program's batch row, key/value head, first token and end token."""
    i_b = (tl.program_id(1) // S.HKV).to(tl.int64)
    i_h = (tl.program_id(1) % S.HKV).to(tl.int64)
    first = tl.program_id(0) * blocks * S.TOKENS
    return i_b, i_h, first, tl.minimum(first + blocks * S.TOKENS, T)


@triton.jit
def _offsets(t_0, T, stride_t, stride_h, SIZE: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr):
    """Return offsets and mask of a tile of queries: for each token, the query heads that share a key/value head."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_n, i_d = tl.arange(0, S.BT), tl.arange(0, BLOCK)
    m_x = (i_n < tl.minimum(T - t_0, S.TOKENS) * GROUP)[:, None]
    if SIZE != BLOCK:
        m_x = m_x & (i_d < SIZE)[None, :]
    return (i_n // GROUP * stride_t + i_n % GROUP * stride_h)[:, None] + i_d[None, :], m_x


@triton.jit
def _load(p_x, t_0, T, stride_t, stride_h, SIZE: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr):
    offsets, m_x = _offsets(t_0, T, stride_t, stride_h, SIZE, BLOCK, S)
    return tl.load(p_x + tl.cast(t_0, tl.int64) * stride_t + offsets, mask=m_x, other=0.0)


@triton.jit
def _store(p_x, t_0, T, stride_t, stride_h, b_x, SIZE: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr):
    offsets, m_x = _offsets(t_0, T, stride_t, stride_h, SIZE, BLOCK, S)
    tl.store(p_x + tl.cast(t_0, tl.int64) * stride_t + offsets, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def _lse_offsets(t_0, T, S: tl.constexpr):
    """Return offsets and mask of a tile of lse, one element per query."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_n = tl.arange(0, S.BT)
    return tl.cast(t_0, tl.int64) * GROUP + i_n, i_n < tl.minimum(T - t_0, S.TOKENS) * GROUP


@triton.jit(do_not_specialize=["T", "blocks"])
def compressed_forward_kernel(inputs, p_out, p_lse, T, blocks, scale, strides, S: tl.constexpr, STAGES: tl.constexpr):
    """Compute `blocks` tiles of queries. p_lse: (B, Hkv, T, group), base 2. scale: that of the scores times log₂ e."""
    p_q, p_k, p_v = inputs
    q, k, v = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, first, end = _program(blocks, T, S)
    p_q += i_b * q.b + i_h * GROUP * q.h
    p_out += (i_b * T * S.HKV + i_h) * GROUP * S.E
    p_lse += (i_b * S.HKV + i_h) * T * GROUP
    dtype: tl.constexpr = p_q.dtype.element_ty
    b_k = load_rows(p_k + i_b * k.b + i_h * k.h, k.t, S.R, S.D, S.BR, S.BD).to(dtype)
    b_v = load_rows(p_v + i_b * v.b + i_h * v.h, v.t, S.R, S.E, S.BR, S.BE).to(dtype)
    for t_0 in tl.range(first, end, S.TOKENS, num_stages=STAGES):
        b_q = _load(p_q, t_0, T, q.t, q.h, S.D, S.BD, S)
        b_s = tl.dot(b_q, tl.trans(b_k))
        if S.R != S.BR:
            b_s = tl.where((tl.arange(0, S.BR) < S.R)[None, :], b_s, float("-inf"))
        b_max = tl.max(b_s, 1) * scale
        b_p = tl.exp2(b_s * scale - b_max[:, None])
        b_sum = tl.sum(b_p, 1)
        b_out = tl.dot(b_p.to(b_v.dtype), b_v) * (1.0 / b_sum)[:, None]
        i_lse, m_n = _lse_offsets(t_0, T, S)
        tl.store(p_lse + i_lse, b_max + tl.log2(b_sum), mask=m_n)
        _store(p_out, t_0, T, S.H * S.E, S.E, b_out, S.E, S.BE, S)


@triton.jit
def _backward_tile(keys, queries, b_d_k, b_d_v, scale, score_scale, first, S: tl.constexpr):
    """Add a tile of queries to the gradients of BS keys, and return dSᵀ."""
    b_k, b_v = keys
    b_q, b_d_out, b_lse, b_delta = queries
    b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q)) * scale - b_lse[None, :])
    if S.R != S.BR:
        b_p = tl.where((first + tl.arange(0, S.BS) < S.R)[:, None], b_p, 0.0)
    b_d_s = (b_p * (tl.dot(b_v, tl.trans(b_d_out)) * score_scale - b_delta[None, :])).to(b_k.dtype)
    if S.SHARED:
        b_d_k = tl.dot(b_p.to(b_k.dtype), b_d_out, b_d_k)
    else:
        b_d_v = tl.dot(b_p.to(b_k.dtype), b_d_out, b_d_v)
    b_d_k = tl.dot(b_d_s, b_q, b_d_k)
    return b_d_s, b_d_k, b_d_v


@triton.jit
def _store_gradients(p_x, rows, b_d_k, b_d_v, S: tl.constexpr):
    WIDTH: tl.constexpr = S.D if S.SHARED else S.D + S.E
    store_rows(p_x, WIDTH, rows, b_d_k, S.D, S.BS, S.BD)
    if not S.SHARED:
        store_rows(p_x + S.D, WIDTH, rows, b_d_v, S.E, S.BS, S.BE)


@triton.jit(do_not_specialize=["T", "blocks"])
def compressed_backward_kernel(
    inputs, p_d_q, p_d_kv, T, blocks, scale, score_scale, strides, S: tl.constexpr, STAGES: tl.constexpr
):
    """Compute dq, and a partial sum of dk and dv per program.

    p_d_kv: (programs, B, Hkv, R, D + E), or (…, D) of shared keys and values. score_scale: without log₂ e.
    """
    p_q, p_k, p_v, p_out, p_lse, p_d_out = inputs
    q, k, v, d_out, d_q = strides
    BS: tl.constexpr = S.BS
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, first, end = _program(blocks, T, S)
    p_q += i_b * q.b + i_h * GROUP * q.h
    p_d_out += i_b * d_out.b + i_h * GROUP * d_out.h
    p_out += (i_b * T * S.HKV + i_h) * GROUP * S.E
    p_d_q += i_b * d_q.b + i_h * GROUP * d_q.h
    p_lse += (i_b * S.HKV + i_h) * T * GROUP
    p_k += i_b * k.b + i_h * k.h
    p_v += i_b * v.b + i_h * v.h
    dtype: tl.constexpr = p_q.dtype.element_ty
    b_k = load_rows(p_k, k.t, S.R, S.D, BS, BD).to(dtype)
    b_v = load_rows(p_v, v.t, S.R, S.E, BS, BE).to(dtype)
    b_d_k, b_d_v = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BE), tl.float32)
    if S.BR > S.BS:
        b_k2 = load_rows(p_k + BS * k.t, k.t, S.R - BS, S.D, BS, BD).to(dtype)
        b_v2 = load_rows(p_v + BS * v.t, v.t, S.R - BS, S.E, BS, BE).to(dtype)
        b_d_k2, b_d_v2 = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BE), tl.float32)
    for t_0 in tl.range(first, end, S.TOKENS, num_stages=STAGES):
        b_q = _load(p_q, t_0, T, q.t, q.h, S.D, BD, S)
        b_d_out = _load(p_d_out, t_0, T, d_out.t, d_out.h, S.E, BE, S)
        b_out = _load(p_out, t_0, T, S.H * S.E, S.E, S.E, BE, S)
        b_delta = tl.sum(b_out.to(tl.float32) * b_d_out.to(tl.float32), 1) * score_scale
        i_lse, m_n = _lse_offsets(t_0, T, S)
        b_lse = tl.load(p_lse + i_lse, mask=m_n, other=0.0)
        queries = b_q, b_d_out, b_lse, b_delta
        b_d_s, b_d_k, b_d_v = _backward_tile((b_k, b_v), queries, b_d_k, b_d_v, scale, score_scale, 0, S)
        b_d_q = tl.dot(tl.trans(b_d_s), b_k)
        if S.BR > S.BS:
            b_d_s, b_d_k2, b_d_v2 = _backward_tile((b_k2, b_v2), queries, b_d_k2, b_d_v2, scale, score_scale, BS, S)
            b_d_q = add(b_d_q, tl.dot(tl.trans(b_d_s), b_k2))
        _store(p_d_q, t_0, T, d_q.t, d_q.h, b_d_q, S.D, BD, S)
    WIDTH: tl.constexpr = S.D if S.SHARED else S.D + S.E
    p_d_kv += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (S.R * WIDTH)
    _store_gradients(p_d_kv, S.R, b_d_k, b_d_v, S)
    if S.BR > S.BS:
        _store_gradients(p_d_kv + BS * WIDTH, S.R - BS, b_d_k2, b_d_v2, S)
