"""Decode step of Linformer: softmax over compressed keys and values, which a write buffer updates.

They are read at every step and written at every SLOTS-th, as the state of `decode.triton.linear` is.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.decode.triton.token import (
    Inputs,
    Tensors,
    block_rows,
    dot_warps,
    gather_rows,
    load_key,
    load_queries,
    load_value,
    online_softmax,
    store_output,
    token_arguments,
)

# Compressed keys (B, HKV, R, D) and values in float32; pending k and v; copies in the dtype of k, which queries read
# (for float32 the same memory); projections (LENGTH, R) and biases (R,) with head strides, 0 where heads share them.
CompressedPointers = namedtuple(
    "CompressedPointers",
    "p_sum_k p_sum_v p_length p_pending_k p_pending_v p_cast_k p_cast_v "
    "p_e p_f p_bias_k p_bias_v e_h f_h bias_k_h bias_v_h",
)


# R compressed keys, BR per block, of LENGTH positions, after which PERIODIC projections wrap around.
ProjectionSizes = namedtuple("ProjectionSizes", "R BR LENGTH SLOTS PERIODIC")


def decode_compressed(
    inputs: Inputs, length: Tensor, state: Tensors, pending: Tensors, tables: Tensors, biases: Tensors, periodic: bool
) -> Tensor:
    """Run `ops.decode.compressed_decode_step` with a write buffer."""
    (out, token, sizes), R = token_arguments(inputs), state[0].shape[2]
    # Tables are (1 or Hkv, LENGTH, R), biases None, (R, 1) or (Hkv, R, 1).
    head_strides = [table.stride(0) if len(table) > 1 else 0 for table in tables]
    head_strides += [0 if bias is None or bias.ndim == 2 else bias.stride(0) for bias in biases]
    pointers = CompressedPointers(*state, length, *pending, *tables, *biases, *head_strides)
    block = block_rows(sizes, R, pending[0].dtype.itemsize == 2)
    constants = {"S": sizes, "P": ProjectionSizes(R, block, tables[0].shape[1], pending[0].shape[2], periodic)}
    grid, warps = (len(out) * sizes.HKV,), 4 if min(sizes.BD, sizes.BE) >= 64 else 2
    with on_device(out):
        scale = sizes.D**-0.5
        decode_compressed_kernel[grid](token, pointers, scale, num_warps=dot_warps(sizes.BG), **constants)
        decode_compressed_flush_kernel[grid](pointers, num_warps=warps, **constants)
    return out


@triton.jit
def table_rows(position, P: tl.constexpr):
    """Return the projected position of each pending token, the last of which is at `position`."""
    i_p = position - position % P.SLOTS + tl.arange(0, P.SLOTS)
    if P.PERIODIC:
        i_p = i_p % P.LENGTH
    else:
        i_p = tl.minimum(i_p, P.LENGTH - 1)
    return i_p


@triton.jit
def decode_compressed_kernel(token, state, scale, S: tl.constexpr, P: tl.constexpr):
    """K̃ ← K̃ + e kᵀ, Ṽ ← Ṽ + f vᵀ, out = softmax(q K̃ᵀ · scale) Ṽ, with biases, and means where P is periodic.

    Write the token to the buffer only; `decode_compressed_flush_kernel`, launched next, updates K̃ and Ṽ.
    """
    PRECISION: tl.constexpr = "ieee" if state.p_pending_k.dtype.element_ty == tl.float32 else "tf32"
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e, i_g, i_j = tl.arange(0, S.BD), tl.arange(0, S.BE), tl.arange(0, S.BG), tl.arange(0, P.SLOTS)
    position = tl.load(state.p_length + i_b)
    slot = (position % P.SLOTS).to(tl.int32)
    m_pending, m_own = i_j < slot, i_j == slot
    i_p = table_rows(position, P)
    share = 1.0
    if P.PERIODIC:
        share = 1.0 / ((position + P.LENGTH) // P.LENGTH).to(tl.float32)
    p_e, p_f = state.p_e + i_kv * state.e_h, state.p_f + i_kv * state.f_h
    p_pending_k, p_pending_v = state.p_pending_k + i_x * (P.SLOTS * S.D), state.p_pending_v + i_x * (P.SLOTS * S.E)
    b_k, b_v = load_key(token, i_b, i_kv, i_d, S), load_value(token, i_b, i_kv, i_e, S)
    b_q = load_queries(token, i_b, i_kv, i_g, i_d, S)
    b_pending_k = gather_rows(p_pending_k, i_j, m_pending, i_d, S.D)
    b_pending_v = gather_rows(p_pending_v, i_j, m_pending, i_e, S.E)
    b_k, b_v = b_k.to(b_pending_k.dtype), b_v.to(b_pending_v.dtype)
    b_pending_k = tl.where(m_own[:, None], b_k[None, :], b_pending_k)
    b_pending_v = tl.where(m_own[:, None], b_v[None, :], b_pending_v)
    tl.store(p_pending_k + slot * S.D + i_d, b_k, mask=i_d < S.D)
    tl.store(p_pending_v + slot * S.E + i_e, b_v, mask=i_e < S.E)
    b_total = tl.sum(b_q, 1)
    b_q = b_q.to(b_k.dtype)
    b_pending_s = tl.dot(b_q, tl.trans(b_pending_k), input_precision=PRECISION)  # (BG, SLOTS)
    b_max = tl.full((S.BG,), float("-inf"), tl.float32)
    b_sum, b_bias_out = tl.full((S.BG,), 0.0, tl.float32), tl.full((S.BG,), 0.0, tl.float32)
    b_out, b_pending_p = tl.full((S.BG, S.BE), 0.0, tl.float32), tl.full((S.BG, P.SLOTS), 0.0, tl.float32)
    for r_0 in range(0, P.R, P.BR):
        i_r = r_0 + tl.arange(0, P.BR)
        m_r = i_r < P.R
        b_keys = gather_rows(state.p_cast_k, i_x * P.R + i_r, m_r, i_d, S.D)
        b_values = gather_rows(state.p_cast_v, i_x * P.R + i_r, m_r, i_e, S.E)
        m_p = i_j <= slot
        b_e, b_f = gather_rows(p_e, i_p, m_p, i_r, P.R), gather_rows(p_f, i_p, m_p, i_r, P.R)
        b_s = tl.dot(b_q, tl.trans(b_keys), input_precision=PRECISION)  # (BG, BR)
        b_s = tl.dot(b_pending_s, b_e.to(tl.float32), b_s, input_precision=PRECISION) * share
        if state.p_bias_k is not None:
            b_bias = tl.load(state.p_bias_k + i_kv * state.bias_k_h + i_r, mask=m_r, other=0.0).to(tl.float32)
            b_s += b_total[:, None] * b_bias[None, :]
        b_p, b_decay, b_max, b_sum = online_softmax(tl.where(m_r[None, :], b_s * scale, float("-inf")), b_max, b_sum)
        if state.p_bias_v is not None:
            b_bias = tl.load(state.p_bias_v + i_kv * state.bias_v_h + i_r, mask=m_r, other=0.0).to(tl.float32)
            b_bias_out = b_bias_out * b_decay + tl.sum(b_p * b_bias[None, :], 1)
        b_p = b_p.to(b_values.dtype)
        b_out = tl.dot(b_p, b_values, b_out * b_decay[:, None], input_precision=PRECISION)
        b_f = tl.trans(b_f.to(b_p.dtype))
        b_pending_p = tl.dot(b_p, b_f, b_pending_p * b_decay[:, None], input_precision=PRECISION)
    b_out = tl.dot(b_pending_p, b_pending_v.to(tl.float32), b_out, input_precision=PRECISION)
    store_output(token, (b_out * share + b_bias_out[:, None]) / b_sum[:, None], i_b, i_kv, i_g, i_e, S)


@triton.jit
def decode_compressed_flush_kernel(state, S: tl.constexpr, P: tl.constexpr):
    """Add the write buffer to K̃ and Ṽ where the token has filled the last slot; otherwise do nothing."""
    i_x = tl.program_id(0).to(tl.int64)
    i_kv = i_x % S.HKV
    position = tl.load(state.p_length + i_x // S.HKV)
    if position % P.SLOTS == P.SLOTS - 1:
        i_p = table_rows(position, P)
        p_e, p_f = state.p_e + i_kv * state.e_h, state.p_f + i_kv * state.f_h
        flush_slots(state.p_sum_k, state.p_cast_k, state.p_pending_k, p_e, i_x, i_p, S.D, S.BD, P)
        flush_slots(state.p_sum_v, state.p_cast_v, state.p_pending_v, p_f, i_x, i_p, S.E, S.BE, P)


@triton.jit
def flush_slots(p_sum, p_cast, p_pending, p_table, i_x, i_p, D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr):
    """X̃ (R, D) ← X̃ + Σ_j e_j x_jᵀ over the slots x (SLOTS, D), e the projection at positions i_p."""
    i_d, i_j = tl.arange(0, BD), tl.arange(0, P.SLOTS)
    b_x = gather_rows(p_pending, i_x * P.SLOTS + i_j, i_j < P.SLOTS, i_d, D)
    for r_0 in range(0, P.R, P.BR):
        i_r = r_0 + tl.arange(0, P.BR)
        m_r = i_r < P.R
        m_sum = m_r[:, None] & (i_d < D)[None, :]
        i_sum = (i_x * P.R + i_r)[:, None] * D + i_d[None, :]
        b_sum = tl.load(p_sum + i_sum, mask=m_sum, other=0.0)
        b_e = gather_rows(p_table, i_p, i_j < P.SLOTS, i_r, P.R)
        # Products of half-precision numbers are exact in float32; others need float32 operands.
        if b_e.dtype == b_x.dtype and b_e.dtype != tl.float32:
            b_sum = tl.dot(tl.trans(b_e), b_x, b_sum)
        else:
            b_sum = tl.dot(tl.trans(b_e).to(tl.float32), b_x.to(tl.float32), b_sum, input_precision="ieee")
        # Threads may hold copies of an element: all must have read it.
        tl.debug_barrier()
        tl.store(p_sum + i_sum, b_sum, mask=m_sum)
        if p_cast.dtype.element_ty != tl.float32:
            tl.store(p_cast + i_sum, b_sum.to(p_cast.dtype.element_ty), mask=m_sum)
