"""Decode step of windowed attention: keys and values of the window in a ring buffer."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.decode.triton.token import (
    Inputs,
    Tensors,
    await_previous,
    block_rows,
    dependent_launch,
    dot_warps,
    gather_rows,
    load_key,
    load_queries,
    load_rotated,
    load_value,
    online_softmax,
    store_output,
    token_arguments,
)
from longspan.ops.window import Window
from longspan.ops.window.triton.window import LAST_RESORT

# SLOTS of the ring, BS per block, and the window: BLOCK, BACK and SHARED_QK as in `ops.window.Window`.
Ring = namedtuple("Ring", "SLOTS BS BLOCK BACK SHARED_QK")


def decode_window(inputs: Inputs, length: Tensor, ring: Tensors, window: Window, scale: float) -> Tensor:
    """Run `ops.decode.window_decode_step`."""
    (out, token, sizes), slots = token_arguments(inputs), ring[0].shape[2]
    block, warps = block_rows(sizes, slots, ring[0].dtype.itemsize == 2), dot_warps(sizes.BG)
    if sizes.G == 1:
        # All keys at once, if they fit in registers: no load waits for another.
        block, warps = min(triton.next_power_of_2(slots), 16384 // max(sizes.BD, sizes.BE)), 8
    constants = {"S": sizes, "R": Ring(slots, block, window.block_size, window.back, window.shared_qk)}
    with on_device(out):
        grid = (len(out) * sizes.HKV,)
        kernel = decode_window_kernel if sizes.G > 1 else decode_window_head_kernel
        kernel[grid](token, length, *ring, scale, num_warps=warps, **constants, **dependent_launch(out))
    return out


@triton.jit
def reach_of(position, R: tl.constexpr):
    """The slot of the token at a position, and how many tokens before it its window has."""
    if R.BLOCK > 0:
        reach = tl.minimum(position - (position // R.BLOCK - R.BACK) * R.BLOCK, position)
    else:
        reach = tl.minimum(R.BACK, position)
    return (position % R.SLOTS).to(tl.int32), reach


@triton.jit
def seen_slots(s_0, slot, reach, R: tl.constexpr):
    """BS slots from s_0 on, and whether they hold a token of the window before the one in `slot`."""
    i_s = s_0 + tl.arange(0, R.BS)
    before = (slot - i_s + R.SLOTS) % R.SLOTS  # distance from the token to the slot's
    return i_s, (i_s < R.SLOTS) & (before > 0) & (before <= reach)


@triton.jit
def write_token(token, p_keys, p_values, slot, i_b, i_kv, i_d, i_e, S: tl.constexpr, R: tl.constexpr):
    """Write the token's key and value to its slot, and return them as they are stored."""
    b_k = load_key(token, i_b, i_kv, i_d, S)
    if R.SHARED_QK:
        b_k = b_k / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 0)), 1e-12)
    b_k = b_k.to(p_keys.dtype.element_ty)
    b_v = load_value(token, i_b, i_kv, i_e, S).to(p_values.dtype.element_ty)
    tl.store(p_keys + slot * S.D + i_d, b_k, mask=i_d < S.D)
    tl.store(p_values + slot * S.E + i_e, b_v, mask=i_e < S.E)
    return b_k, b_v


@triton.jit
def decode_window_head_kernel(
    token, p_length, p_ring_k, p_ring_v, scale, S: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr
):
    """`decode_window_kernel` for one query head per key/value head, without products of matrices."""
    await_previous(PDL)
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    p_keys, p_values = p_ring_k + i_x * (R.SLOTS * S.D), p_ring_v + i_x * (R.SLOTS * S.E)
    slot, reach = reach_of(tl.load(p_length + i_b), R)
    b_q = load_rotated(token, token.p_q + i_b * token.q_b + i_kv * token.q_h, i_b, i_d, i_d < S.D, S)
    b_k, b_v = write_token(token, p_keys, p_values, slot, i_b, i_kv, i_d, i_e, S, R)
    # Take the token itself from registers: its store may not be visible to all threads yet.
    largest = tl.sum(b_q * b_k.to(tl.float32), 0) * scale
    if R.SHARED_QK:
        largest = largest * 0 + LAST_RESORT
    total = 1.0
    b_out = b_v.to(tl.float32)
    for s_0 in range(0, R.SLOTS, R.BS):
        i_s, m_s = seen_slots(s_0, slot, reach, R)
        b_keys = gather_rows(p_keys, i_s, m_s, i_d, S.D)
        b_values = gather_rows(p_values, i_s, m_s, i_e, S.E)
        b_s = tl.where(m_s, tl.sum(b_keys.to(tl.float32) * b_q[None, :], 1) * scale, float("-inf"))
        top = tl.maximum(largest, tl.max(b_s, 0))
        b_p, decay = tl.exp(b_s - top), tl.exp(largest - top)
        total = total * decay + tl.sum(b_p, 0)
        b_out = b_out * decay + tl.sum(b_p[:, None] * b_values.to(tl.float32), 0)
        largest = top
    p_out = token.p_out + i_b * token.out_b + i_kv * S.E + i_e
    tl.store(p_out, (b_out / total).to(p_out.dtype.element_ty), mask=i_e < S.E)


@triton.jit
def decode_window_kernel(
    token, p_length, p_ring_k, p_ring_v, scale, S: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr
):
    """Write the token to its slot of the ring; softmax over the slots in its window. One program per key/value head."""
    PRECISION: tl.constexpr = "ieee" if p_ring_k.dtype.element_ty == tl.float32 else "tf32"
    await_previous(PDL)
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e, i_g = tl.arange(0, S.BD), tl.arange(0, S.BE), tl.arange(0, S.BG)
    p_keys, p_values = p_ring_k + i_x * (R.SLOTS * S.D), p_ring_v + i_x * (R.SLOTS * S.E)
    slot, reach = reach_of(tl.load(p_length + i_b), R)
    b_k, b_v = write_token(token, p_keys, p_values, slot, i_b, i_kv, i_d, i_e, S, R)
    b_q = load_queries(token, i_b, i_kv, i_g, i_d, S)
    # Take the token itself from registers: its store may not be visible to all threads yet.
    b_max = tl.sum(b_q * b_k.to(tl.float32)[None, :], 1) * scale
    if R.SHARED_QK:
        b_max = tl.full((S.BG,), LAST_RESORT, tl.float32)
    b_sum = tl.full((S.BG,), 1.0, tl.float32)
    b_q = b_q.to(b_k.dtype)
    b_out = tl.full((S.BG, S.BE), 0.0, tl.float32) + b_v.to(tl.float32)[None, :]
    for s_0 in range(0, R.SLOTS, R.BS):
        i_s, m_s = seen_slots(s_0, slot, reach, R)
        b_keys = gather_rows(p_keys, i_s, m_s, i_d, S.D)
        b_values = gather_rows(p_values, i_s, m_s, i_e, S.E)
        b_s = tl.dot(b_q, tl.trans(b_keys), input_precision=PRECISION) * scale  # (BG, R.BS)
        b_p, b_decay, b_max, b_sum = online_softmax(tl.where(m_s[None, :], b_s, float("-inf")), b_max, b_sum)
        b_out = tl.dot(b_p.to(b_values.dtype), b_values, b_out * b_decay[:, None], input_precision=PRECISION)
    store_output(token, b_out / b_sum[:, None], i_b, i_kv, i_g, i_e, S)
