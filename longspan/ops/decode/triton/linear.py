"""Decode step of linear attention: the state is read at every step and written at every SLOTS-th.

Writing the state costs as much memory traffic as reading it. A write buffer holds the features and values of the tokens
since the last write, the token at position p in slot p modulo SLOTS; queries read the state and the buffer. The step
that fills the last slot adds the buffer to the state.
"""

from __future__ import annotations

import math
from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.feature_maps import RELU_EPSILON, check_map
from longspan.ops.common.launch import on_device
from longspan.ops.common.tiles import FLOOR, ZERO_NORMALIZER, padded
from longspan.ops.decode.triton.token import (
    Inputs,
    Tensors,
    gather_rows,
    load_key,
    load_rotated,
    load_value,
    token_arguments,
)
from longspan.ops.linear.torch import FAVOR_LARGEST

_HEADS = tl.constexpr(16)  # heads per program that computes random features
_LOG_LARGEST = tl.constexpr(FAVOR_LARGEST)
_LARGEST = tl.constexpr(math.exp(FAVOR_LARGEST))


# kv (B, HKV, D, E) and z, both divided by exp(shift), lengths, and the write buffer, in which features are divided by
# exp of their own log scale.
LinearPointers = namedtuple("LinearPointers", "p_kv p_z p_shift p_length p_pending_f p_pending_v p_pending_scale")


def decode_linear(
    inputs: Inputs, state: Tensors, pending: Tensors, feature_map: str, weight: Tensor | None, normalize: str
) -> Tensor:
    """Run `ops.decode.linear_decode_step` with a write buffer."""
    (q, k, v, rotary, out), kv, slots = inputs, state[0], pending[1].shape[2]
    pointers = LinearPointers(*state, *pending)
    out = q.new_empty(*q.shape[:3], kv.shape[3]) if out is None else out
    with on_device(q):
        if weight is not None:
            features = kv.new_empty(*q.shape[:3], len(weight))  # φ(q), float32
            weight = weight.contiguous() if weight.dtype == q.dtype else weight.contiguous().float()
            _, token, sizes = token_arguments((q, k, k, rotary, features))
            sizes = sizes._replace(E=len(weight), BE=padded(len(weight), 16))
            grid = (sum(-(-len(x) * x.shape[2] // _HEADS.value) for x in (q, k)),)
            decode_favor_features_kernel[grid](token, pointers, weight, len(q), S=sizes, SLOTS=slots, num_warps=4)
            q, rotary = features, None
        _, token, sizes = token_arguments((q, k, v, rotary, out))
        if sizes.BD * sizes.BE > 32768:
            sizes = sizes._replace(BE=16384 // sizes.BD)
        constants = {"S": sizes, "SLOTS": slots, "MAP": feature_map, "NORMALIZE": normalize}
        warps = 8 if sizes.BD * sizes.BE > 4096 else 4
        decode_linear_kernel[(len(kv) * sizes.HKV,)](token, pointers, num_warps=warps, **constants)
    return out


@triton.jit
def decode_favor_features_kernel(token, state, p_weight, B, S: tl.constexpr, SLOTS: tl.constexpr):
    """Write φ(q) (B, H, E), whose scale cancels, to the output and φ(k) to the write buffer; the first programs take
    queries, the rest keys.

    S.E: number of features.
    """
    PRECISION: tl.constexpr = "ieee" if p_weight.dtype.element_ty == tl.float32 else "tf32"
    H: tl.constexpr = S.G * S.HKV
    pid = tl.program_id(0)
    keys = pid >= tl.cdiv(B * H, _HEADS)
    heads, p_x, stride_b, stride_h = H, token.p_q, token.q_b, token.q_h
    if keys:
        pid -= tl.cdiv(B * H, _HEADS)
        heads, p_x, stride_b, stride_h = S.HKV, token.p_k, token.k_b, token.k_h
    i_x = pid.to(tl.int64) * _HEADS + tl.arange(0, _HEADS)
    i_d, i_m = tl.arange(0, S.BD), tl.arange(0, S.BE)
    m_x, m_m = i_x < B * heads, i_m < S.E
    i_b = tl.minimum(i_x // heads, B - 1)
    p_x += (i_b * stride_b + (i_x % heads) * stride_h)[:, None]
    b_weight = gather_rows(p_weight, i_m, m_m, i_d, S.D)
    m_rows = m_x[:, None] & (i_d < S.D)[None, :]
    b_x = load_rotated(token, p_x, i_b[:, None], i_d[None, :], m_rows, S)  # (_HEADS, BD)
    b_p = tl.dot(b_x.to(b_weight.dtype), tl.trans(b_weight), input_precision=PRECISION) * S.D**-0.25  # (_HEADS, BE)
    b_p = tl.where(m_m[None, :], b_p, FLOOR)
    b_scale = tl.max(b_p, 1)
    b_f = tl.where(m_m[None, :], exact_exp(b_p - b_scale[:, None]), 0.0)
    m_out = m_x[:, None] & m_m[None, :]
    if keys:
        b_x *= S.D**-0.25
        b_p -= (tl.sum(b_x * b_x, 1) * 0.5)[:, None]
        b_center = tl.floor(tl.max(b_p, 1) + 0.5)
        b_f = tl.where(m_m[None, :], exact_exp(b_p - b_center[:, None]) * _LARGEST, 0.0)
        b_scale = b_center - _LOG_LARGEST
        i_slot = i_x * SLOTS + tl.load(state.p_length + i_b, mask=m_x, other=0) % SLOTS
        tl.store(state.p_pending_f + i_slot[:, None] * S.E + i_m[None, :], b_f, mask=m_out)
        tl.store(state.p_pending_scale + i_slot, b_scale, mask=m_x)
    else:
        tl.store(token.p_out + i_x[:, None] * S.E + i_m[None, :], b_f, mask=m_out)


@triton.jit
def map_features(b_x, m_x, MAP: tl.constexpr):
    """φ(x) (BD,), zeros where m_x is false; "favor": x is φ(x) already."""
    if MAP == "elu":
        b_x = tl.maximum(b_x, 0) + exact_exp(tl.minimum(b_x, 0))
    if MAP == "relu":
        b_x = tl.maximum(b_x, 0) + RELU_EPSILON
    if MAP == "softmax":
        b_x = tl.where(m_x, b_x, FLOOR)
        b_x = exact_exp(b_x - tl.max(b_x, 0))
        b_x = b_x / tl.sum(b_x, 0)
    return tl.where(m_x, b_x, 0.0)


@triton.jit
def decode_linear_kernel(
    token, state, S: tl.constexpr, SLOTS: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr
):
    """kv ← kv + φ(k)vᵀ, z ← z + φ(k), out = φ(q)·kv / φ(q)·z. One program per batch row and key/value head.

    MAP "favor": q is φ(q), and the token's slot holds φ(k).
    """
    check_map(MAP)
    SCALED: tl.constexpr = MAP == "softmax" or MAP == "favor"
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_m, i_j = tl.arange(0, S.BD), tl.arange(0, SLOTS)
    m_m = i_m < S.D
    p_pending_f, p_pending_v = state.p_pending_f + i_x * (SLOTS * S.D), state.p_pending_v + i_x * (SLOTS * S.E)
    p_pending_scale = state.p_pending_scale + i_x * SLOTS
    p_heads = token.p_q + i_b * token.q_b + i_kv * S.G * token.q_h
    # One iteration where the columns fit in registers: all loads are issued before the first is used.
    for e_0 in range(0, S.E, S.BE):
        i_e = e_0 + tl.arange(0, S.BE)
        m_e = i_e < S.E
        p_tile = state.p_kv + i_x * (S.D * S.E) + i_m[:, None] * S.E + i_e[None, :]
        m_tile = m_m[:, None] & m_e[None, :]
        b_kv = tl.load(p_tile, mask=m_tile, other=0.0)
        b_z = tl.load(state.p_z + i_x * S.D + i_m, mask=m_m, other=0.0)
        b_v = load_value(token, i_b, i_kv, i_e, S)
        slot = (tl.load(state.p_length + i_b) % SLOTS).to(tl.int32)
        m_pending, m_own = i_j < slot, i_j == slot
        b_values = gather_rows(p_pending_v, i_j, m_pending, i_e, S.E).to(tl.float32)
        if MAP == "favor":
            m_pending = i_j <= slot
        b_pending = gather_rows(p_pending_f, i_j, m_pending, i_m, S.D)
        if MAP != "favor":
            b_f = load_key(token, i_b, i_kv, i_m, S)
        b_q = load_rotated(token, p_heads, i_b, i_m, m_m, S)
        if SCALED:
            b_scale = tl.load(p_pending_scale + i_j, mask=m_pending, other=FLOOR)
        if MAP != "favor":
            if MAP == "softmax":
                b_f = tl.where(m_m, b_f, FLOOR)
                own = tl.max(b_f, 0)
                b_f = tl.where(m_m, exact_exp(b_f - own), 0.0)
                b_scale = tl.where(m_own, own, b_scale)
                tl.store(p_pending_scale + slot, own)
            else:
                b_f = map_features(b_f, m_m, MAP)
            b_q = map_features(b_q, m_m, MAP)
            b_pending = tl.where(m_own[:, None], b_f[None, :], b_pending)
            tl.store(p_pending_f + slot * S.D + i_m, b_f, mask=m_m)
        b_values = tl.where(m_own[:, None], b_v[None, :], b_values)
        tl.store(p_pending_v + slot * S.E + i_e, b_v.to(p_pending_v.dtype.element_ty), mask=m_e)
        if SCALED:
            before = tl.load(state.p_shift + i_x)
            shift = tl.maximum(before, tl.max(b_scale, 0))
            decay = exact_exp(before - shift)
            b_pending *= exact_exp(b_scale - shift)[:, None]
            b_kv *= decay
            b_z *= decay
        b_z += tl.sum(b_pending, 0)
        for i_g in range(S.G):
            if S.G > 1:
                b_q = load_rotated(token, p_heads + i_g * token.q_h, i_b, i_m, m_m, S)
                b_q = map_features(b_q, m_m, MAP)
            b_query = b_q
            if NORMALIZE == "feature":
                m_none = tl.abs(b_z) < ZERO_NORMALIZER
                b_query = tl.where(m_none, 0.0, b_query / tl.where(m_none, 1.0, b_z))
            b_seen = tl.sum(b_query[None, :] * b_pending, 1)  # (SLOTS,)
            b_out = tl.sum(b_query[:, None] * b_kv, 0) + tl.sum(b_seen[:, None] * b_values, 0)
            if NORMALIZE == "query":
                den = tl.sum(b_query * b_z, 0)
                none = tl.abs(den) < ZERO_NORMALIZER
                b_out = tl.where(none, 0.0, b_out / tl.where(none, 1.0, den))
            p_row = token.p_out + i_b * token.out_b + (i_kv * S.G + i_g) * S.E
            tl.store(p_row + i_e, b_out.to(p_row.dtype.element_ty), mask=m_e)
        if slot == SLOTS - 1:
            # Wait until all threads have read the state and written the slots.
            tl.debug_barrier()
            for j in range(SLOTS):
                b_f = tl.load(p_pending_f + j * S.D + i_m, mask=m_m, other=0.0)
                if SCALED:
                    b_f *= exact_exp(tl.load(p_pending_scale + j) - shift)
                b_v = tl.load(p_pending_v + j * S.E + i_e, mask=m_e, other=0.0).to(tl.float32)
                b_kv += b_f[:, None] * b_v[None, :]
            tl.store(p_tile, b_kv, mask=m_tile)
            if e_0 + S.BE >= S.E:
                tl.store(state.p_z + i_x * S.D + i_m, b_z, mask=m_m)
                if SCALED:
                    tl.store(state.p_shift + i_x, shift)
