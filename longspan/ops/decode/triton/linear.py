"""One token's step of linear attention: sums are read in every step, but written only in every LATE-th.

Sums are as much to write as to read. What came since the last time waits in slots, the token of position p in slot p
modulo LATE; queries see the sums and the slots. With the last slot the slots are added to the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.feature_maps import RELU_EPSILON
from longspan.ops.common.tiles import FLOOR, ZERO_NORMALIZER
from longspan.ops.decode.triton.decode_device import load_block, load_key, load_turned, load_value


class Sums(NamedTuple):
    """kv (B, HKV, D, E) and z, divided by exp(shift); slots of features, each divided by exp of its own, and v."""

    p_kv: Any
    p_z: Any
    p_shift: Any
    p_length: Any
    p_late_f: Any
    p_late_v: Any
    p_late_scale: Any


@triton.jit
def favor_features_kernel(
    token,
    p_weight,
    p_length,
    p_query,
    p_late_f,
    p_late_scale,
    B,
    S: tl.constexpr,
    M: tl.constexpr,
    LATE: tl.constexpr,
    BX: tl.constexpr,
    BM: tl.constexpr,
    SHARES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """φ(q) (B, H, M) to p_query, keys' features to their slots: BX heads a program, first those of queries.

    SHARES: a query's features add up to one; otherwise what they add up to cancels.
    """
    H: tl.constexpr = S.G * S.HKV
    pid = tl.program_id(0)
    keys = pid >= tl.cdiv(B * H, BX)
    heads, p_x, stride_b, stride_h = H, token.p_q, token.q_b, token.q_h
    if keys:
        pid -= tl.cdiv(B * H, BX)
        heads, p_x, stride_b, stride_h = S.HKV, token.p_k, token.k_b, token.k_h
    i_x = pid.to(tl.int64) * BX + tl.arange(0, BX)
    i_d, i_m = tl.arange(0, S.BD), tl.arange(0, BM)
    m_x, m_m = i_x < B * heads, i_m < M
    i_b = tl.minimum(i_x // heads, B - 1)
    p_x += (i_b * stride_b + (i_x % heads) * stride_h)[:, None]
    b_weight = load_block(p_weight, i_m, m_m, i_d, S.D)
    m_rows = m_x[:, None] & (i_d < S.D)[None, :]
    b_x = load_turned(token, p_x, i_b[:, None], i_d[None, :], m_rows, S)  # (BX, BD)
    b_p = tl.dot(b_x.to(b_weight.dtype), tl.trans(b_weight), input_precision=PRECISION) * S.D**-0.25  # (BX, BM)
    b_p = tl.where(m_m[None, :], b_p, FLOOR)
    b_scale = tl.max(b_p, 1)
    b_f = tl.where(m_m[None, :], tl.exp(b_p - b_scale[:, None]), 0.0)
    m_out = m_x[:, None] & m_m[None, :]
    if keys:
        b_scale -= tl.sum(b_x * b_x, 1) * (0.5 * S.D**-0.5)
        i_slot = i_x * LATE + tl.load(p_length + i_b, mask=m_x, other=0) % LATE
        tl.store(p_late_f + i_slot[:, None] * M + i_m[None, :], b_f, mask=m_out)
        tl.store(p_late_scale + i_slot, b_scale, mask=m_x)
    else:
        if SHARES:
            b_f = b_f / tl.sum(b_f, 1)[:, None]
        tl.store(p_query + i_x[:, None] * M + i_m[None, :], b_f, mask=m_out)


@triton.jit
def features(b_x, m_x, MAP: tl.constexpr):
    """φ(q) (BD,), zeros where m_x is not; those of "favor" are there already."""
    if MAP == "elu":
        b_x = tl.maximum(b_x, 0) + tl.exp(tl.minimum(b_x, 0))
    if MAP == "relu":
        b_x = tl.maximum(b_x, 0) + RELU_EPSILON
    if MAP == "softmax":
        b_x = tl.where(m_x, b_x, FLOOR)
        b_x = tl.exp(b_x - tl.max(b_x, 0))
        b_x = b_x / tl.sum(b_x, 0)
    return tl.where(m_x, b_x, 0.0)


@triton.jit
def linear_step_kernel(token, sums, S: tl.constexpr, LATE: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr):
    """kv ← kv + φ(k)vᵀ, z ← z + φ(k), out = φ(q)·kv / φ(q)·z. One program for each key/value head of each row.

    MAP "favor": the token's q is its features, and the own slot has those of the key.
    """
    SCALED: tl.constexpr = MAP == "softmax" or MAP == "favor"
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_m, i_j = tl.arange(0, S.BD), tl.arange(0, LATE)
    m_m = i_m < S.D
    p_late_f, p_late_v = sums.p_late_f + i_x * (LATE * S.D), sums.p_late_v + i_x * (LATE * S.E)
    p_late_scale = sums.p_late_scale + i_x * LATE
    p_heads = token.p_q + i_b * token.q_b + i_kv * S.G * token.q_h
    # Columns as many as fit: then this is done once, and everything is on its way before anything is waited for.
    for e_0 in range(0, S.E, S.BE):
        i_e = e_0 + tl.arange(0, S.BE)
        m_e = i_e < S.E
        p_tile = sums.p_kv + i_x * (S.D * S.E) + i_m[:, None] * S.E + i_e[None, :]
        m_tile = m_m[:, None] & m_e[None, :]
        b_kv = tl.load(p_tile, mask=m_tile, other=0.0)
        b_z = tl.load(sums.p_z + i_x * S.D + i_m, mask=m_m, other=0.0)
        b_v = load_value(token, i_b, i_kv, i_e, S)
        slot = (tl.load(sums.p_length + i_b) % LATE).to(tl.int32)
        m_late, m_own = i_j < slot, i_j == slot
        b_values = load_block(p_late_v, i_j, m_late, i_e, S.E).to(tl.float32)
        if MAP == "favor":
            m_late = i_j <= slot
        b_late = load_block(p_late_f, i_j, m_late, i_m, S.D)
        if MAP != "favor":
            b_f = load_key(token, i_b, i_kv, i_m, S)
        b_q = load_turned(token, p_heads, i_b, i_m, m_m, S)
        if SCALED:
            b_scale = tl.load(p_late_scale + i_j, mask=m_late, other=FLOOR)
        if MAP != "favor":
            if MAP == "softmax":
                b_f = tl.where(m_m, b_f, FLOOR)
                own = tl.max(b_f, 0)
                b_f = tl.where(m_m, tl.exp(b_f - own), 0.0)
                b_scale = tl.where(m_own, own, b_scale)
                tl.store(p_late_scale + slot, own)
            else:
                b_f = features(b_f, m_m, MAP)
            b_q = features(b_q, m_m, MAP)
            b_late = tl.where(m_own[:, None], b_f[None, :], b_late)
            tl.store(p_late_f + slot * S.D + i_m, b_f, mask=m_m)
        b_values = tl.where(m_own[:, None], b_v[None, :], b_values)
        tl.store(p_late_v + slot * S.E + i_e, b_v.to(p_late_v.dtype.element_ty), mask=m_e)
        if SCALED:
            before = tl.load(sums.p_shift + i_x)
            shift = tl.maximum(before, tl.max(b_scale, 0))
            decay = tl.exp(before - shift)
            b_late *= tl.exp(b_scale - shift)[:, None]
            b_kv *= decay
            b_z *= decay
        b_z += tl.sum(b_late, 0)
        for i_g in range(S.G):
            if S.G > 1:
                b_q = load_turned(token, p_heads + i_g * token.q_h, i_b, i_m, m_m, S)
                b_q = features(b_q, m_m, MAP)
            b_query = b_q
            if NORMALIZE == "feature":
                m_none = tl.abs(b_z) < ZERO_NORMALIZER
                b_query = tl.where(m_none, 0.0, b_query / tl.where(m_none, 1.0, b_z))
            b_seen = tl.sum(b_query[None, :] * b_late, 1)  # (LATE,)
            b_out = tl.sum(b_query[:, None] * b_kv, 0) + tl.sum(b_seen[:, None] * b_values, 0)
            if NORMALIZE == "query":
                den = tl.sum(b_query * b_z, 0)
                none = tl.abs(den) < ZERO_NORMALIZER
                b_out = tl.where(none, 0.0, b_out / tl.where(none, 1.0, den))
            p_row = token.p_out + i_b * token.out_b + (i_kv * S.G + i_g) * S.E
            tl.store(p_row + i_e, b_out.to(p_row.dtype.element_ty), mask=m_e)
        if slot == LATE - 1:
            # All threads have read what is changed now, and all slots are there.
            tl.debug_barrier()
            for j in range(LATE):
                b_f = tl.load(p_late_f + j * S.D + i_m, mask=m_m, other=0.0)
                if SCALED:
                    b_f *= tl.exp(tl.load(p_late_scale + j) - shift)
                b_v = tl.load(p_late_v + j * S.E + i_e, mask=m_e, other=0.0).to(tl.float32)
                b_kv += b_f[:, None] * b_v[None, :]
            tl.store(p_tile, b_kv, mask=m_tile)
            if e_0 + S.BE >= S.E:
                tl.store(sums.p_z + i_x * S.D + i_m, b_z, mask=m_m)
                if SCALED:
                    tl.store(sums.p_shift + i_x, shift)
