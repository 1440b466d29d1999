"""Decode step of a mixture: softmax over a window and a linear memory of the tokens that left it, in one launch.

The token whose slot of the ring buffer the new one takes leaves the window. Its features are added to the memory, which
is one more key of the softmax: see `longspan.mechanisms.mixture`.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.launch import on_device
from longspan.ops.decode.triton.linear import map_features
from longspan.ops.decode.triton.token import (
    Inputs,
    Tensors,
    await_previous,
    dependent_launch,
    gather_rows,
    load_key,
    load_rotated,
    load_value,
    token_arguments,
)
from longspan.ops.decode.triton.window import Ring, reach_of, seen_slots

# kv (B, HKV, M, E) and z (B, HKV, M); the feature weights of queries (H, D, D) and keys (HKV, D, D) or None; the weight
# (H, D) and bias (H,) of the memory's score; those of the sink and its value (H, E), or None.
MixturePointers = namedtuple(
    "MixturePointers",
    "p_kv p_z p_query_weight p_key_weight p_mix_weight p_mix_bias p_sink_weight p_sink_bias p_sink_value",
)


def decode_mixture(
    inputs: Inputs, length: Tensor, ring: Tensors, memory: tuple[Tensor | None, ...], feature_map: str, scale: float
) -> Tensor:
    """Run `ops.decode.mixture_decode_step`."""
    (out, token, sizes), slots = token_arguments(inputs), ring[0].shape[2]
    block = min(triton.next_power_of_2(slots), 8192 // max(sizes.BD, sizes.BE))
    constants = {"S": sizes, "R": Ring(slots, block, 0, slots - 1, False), "MAP": feature_map}
    with on_device(out):
        grid = (len(out) * sizes.HKV,)
        arguments = token, length, *ring, MixturePointers(*memory), scale
        decode_mixture_kernel[grid](*arguments, num_warps=8, **constants, **dependent_launch(out))
    return out


@triton.jit
def hedgehog_halves(b_x, p_weight, i_d, S: tl.constexpr):
    """softmax(Wx) and softmax(−Wx) (BD,)."""
    m_f = i_d < S.D
    b_w = gather_rows(p_weight, i_d, m_f, i_d, S.D).to(tl.float32)
    b_y = tl.sum(b_w * b_x[None, :], 1)
    b_p = exact_exp(b_y - tl.max(tl.where(m_f, b_y, float("-inf")), 0))
    b_n = exact_exp(tl.min(tl.where(m_f, b_y, float("inf")), 0) - b_y)
    b_p, b_n = tl.where(m_f, b_p, 0.0), tl.where(m_f, b_n, 0.0)
    return b_p / tl.sum(b_p, 0), b_n / tl.sum(b_n, 0)


@triton.jit
def learned_score(b_q, p_weight, p_bias, i_h, i_d, S: tl.constexpr):
    """weight·q + bias of a head."""
    b_weight = tl.load(p_weight + i_h * S.D + i_d, mask=i_d < S.D, other=0.0).to(tl.float32)
    return tl.sum(b_q * b_weight, 0) + tl.load(p_bias + i_h).to(tl.float32)


@triton.jit
def decode_mixture_kernel(
    token,
    p_length,
    p_ring_k,
    p_ring_v,
    memory,
    scale,
    S: tl.constexpr,
    R: tl.constexpr,
    MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per batch row and key/value head. Everything is read before the barrier, and written after it."""
    PAIR: tl.constexpr = MAP == "hedgehog"
    M: tl.constexpr = 2 * S.D if PAIR else S.D
    await_previous(PDL)
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    m_d, m_e = i_d < S.D, i_e < S.E
    p_keys, p_values = p_ring_k + i_x * (R.SLOTS * S.D), p_ring_v + i_x * (R.SLOTS * S.E)
    position = tl.load(p_length + i_b)
    slot, reach = reach_of(position, R)
    leaves = position >= R.SLOTS  # otherwise the slot holds zeros
    p_kv = memory.p_kv + i_x * (M * S.E) + i_d[:, None] * S.E + i_e[None, :]
    p_z, m_kv = memory.p_z + i_x * M + i_d, m_d[:, None] & m_e[None, :]
    b_kv = tl.load(p_kv, mask=m_kv, other=0.0)
    b_z = tl.load(p_z, mask=m_d, other=0.0)
    b_k = load_key(token, i_b, i_kv, i_d, S).to(p_keys.dtype.element_ty)
    b_v = load_value(token, i_b, i_kv, i_e, S).to(p_values.dtype.element_ty)
    b_left_k = tl.load(p_keys + slot * S.D + i_d, mask=m_d, other=0.0).to(tl.float32)
    b_left_v = tl.load(p_values + slot * S.E + i_e, mask=m_e, other=0.0).to(tl.float32)
    if PAIR:
        b_kv_n = tl.load(p_kv + S.D * S.E, mask=m_kv, other=0.0)
        b_z_n = tl.load(p_z + S.D, mask=m_d, other=0.0)
        b_f, b_f_n = hedgehog_halves(b_left_k, memory.p_key_weight + i_kv * (S.D * S.D), i_d, S)
        b_f_n = tl.where(leaves, b_f_n, 0.0)
        b_kv_n += b_f_n[:, None] * b_left_v[None, :]
        b_z_n += b_f_n
    else:
        b_f = map_features(b_left_k, m_d, MAP)
    b_f = tl.where(leaves, b_f, 0.0)
    b_kv += b_f[:, None] * b_left_v[None, :]
    b_z += b_f
    for i_g in range(S.G):
        i_h = i_kv * S.G + i_g
        b_q = load_rotated(token, token.p_q + i_b * token.q_b + i_h * token.q_h, i_b, i_d, m_d, S)
        if PAIR:
            b_f, b_f_n = hedgehog_halves(b_q, memory.p_query_weight + i_h * (S.D * S.D), i_d, S)
            b_read = tl.sum(b_f[:, None] * b_kv + b_f_n[:, None] * b_kv_n, 0)
            mass = tl.sum(b_f * b_z + b_f_n * b_z_n, 0)
        else:
            b_f = map_features(b_q, m_d, MAP)
            b_read, mass = tl.sum(b_f[:, None] * b_kv, 0), tl.sum(b_f * b_z, 0)
        score = learned_score(b_q, memory.p_mix_weight, memory.p_mix_bias, i_h, i_d, S)
        known = (mass > 0) & leaves
        mass = tl.where(known, mass, 1.0)
        score = tl.where(known, score + tl.log(mass), float("-inf"))
        b_read /= mass
        if memory.p_sink_weight is not None:
            sink = learned_score(b_q, memory.p_sink_weight, memory.p_sink_bias, i_h, i_d, S)
            b_sink = tl.load(memory.p_sink_value + i_h * S.E + i_e, mask=m_e, other=0.0).to(tl.float32)
            top = tl.maximum(tl.where(known, score, sink), sink)
            first, second = tl.exp(tl.where(known, score, sink) - top), tl.exp(sink - top)
            b_read = (first * b_read + second * b_sink) / (first + second)
            score = tl.where(known, top + tl.log(first + second), float("-inf"))
        # The token itself is taken from registers, and is stored later.
        b_q *= scale
        own = tl.sum(b_q * b_k.to(tl.float32), 0)
        largest = tl.maximum(own, score)
        weight, seen = tl.exp(own - largest), tl.exp(score - largest)
        total = weight + seen
        b_out = weight * b_v.to(tl.float32) + seen * b_read
        for s_0 in range(0, R.SLOTS, R.BS):
            i_s, m_s = seen_slots(s_0, slot, reach, R)
            b_keys = gather_rows(p_keys, i_s, m_s, i_d, S.D).to(tl.float32)
            b_values = gather_rows(p_values, i_s, m_s, i_e, S.E).to(tl.float32)
            b_s = tl.where(m_s, tl.sum(b_keys * b_q[None, :], 1), float("-inf"))
            top = tl.maximum(largest, tl.max(b_s, 0))
            b_p, decay = tl.exp(b_s - top), tl.exp(largest - top)
            total = total * decay + tl.sum(b_p, 0)
            b_out = b_out * decay + tl.sum(b_p[:, None] * b_values, 0)
            largest = top
        p_out = token.p_out + i_b * token.out_b + i_h * S.E + i_e
        tl.store(p_out, (b_out / total).to(p_out.dtype.element_ty), mask=m_e)
    tl.debug_barrier()
    tl.store(p_keys + slot * S.D + i_d, b_k, mask=m_d)
    tl.store(p_values + slot * S.E + i_e, b_v, mask=m_e)
    tl.store(p_kv, b_kv, mask=m_kv)
    tl.store(p_z, b_z, mask=m_d)
    if PAIR:
        tl.store(p_kv + S.D * S.E, b_kv_n, mask=m_kv)
        tl.store(p_z + S.D, b_z_n, mask=m_d)
