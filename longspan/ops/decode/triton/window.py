"""One token's step of memories that are rows of keys and values: a ring of a window's, and Linformer's compressed ones.

Compressed rows are read in every step, but written only in every LATE-th, as the sums of `step_linear` are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longspan.ops.decode.triton.decode_device import (
    load_block,
    load_key,
    load_queries,
    load_value,
    store_answers,
    weighed,
)
from longspan.ops.window.triton.window_device import LAST


@triton.jit
def local_step_kernel(
    token,
    p_length,
    p_ring_k,
    p_ring_v,
    scale,
    S: tl.constexpr,
    RING: tl.constexpr,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    ALONE: tl.constexpr,
    BS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The token takes its slot in the ring; softmax over the slots its window reaches. ALONE: keys are normalized."""
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e, i_g = tl.arange(0, S.BD), tl.arange(0, S.BE), tl.arange(0, S.BG)
    place = tl.load(p_length + i_b)
    slot = (place % RING).to(tl.int32)
    if SIZE > 0:
        reach = tl.minimum(place - (place // SIZE - BACK) * SIZE, place)
    else:
        reach = tl.minimum(BACK, place)
    b_k = load_key(token, i_b, i_kv, i_d, S)
    if ALONE:
        b_k = b_k / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 0)), 1e-12)
    b_k = b_k.to(p_ring_k.dtype.element_ty)
    b_v = load_value(token, i_b, i_kv, i_e, S).to(p_ring_v.dtype.element_ty)
    p_keys, p_values = p_ring_k + i_x * (RING * S.D), p_ring_v + i_x * (RING * S.E)
    tl.store(p_keys + slot * S.D + i_d, b_k, mask=i_d < S.D)
    tl.store(p_values + slot * S.E + i_e, b_v, mask=i_e < S.E)
    b_q = load_queries(token, i_b, i_kv, i_g, i_d, S)
    # The token itself comes from registers: what was stored just now need not be there yet.
    b_max = tl.sum(b_q * b_k.to(tl.float32)[None, :], 1) * scale
    if ALONE:
        b_max = tl.full((S.BG,), LAST, tl.float32)
    b_sum = tl.full((S.BG,), 1.0, tl.float32)
    b_q = b_q.to(b_k.dtype)
    b_out = tl.full((S.BG, S.BE), 0.0, tl.float32) + b_v.to(tl.float32)[None, :]
    for s_0 in range(0, RING, BS):
        i_s = s_0 + tl.arange(0, BS)
        before = (slot - i_s + RING) % RING  # how many places before the token a slot's holder stands
        m_s = (i_s < RING) & (before > 0) & (before <= reach)
        b_keys = load_block(p_keys, i_s, m_s, i_d, S.D)
        b_values = load_block(p_values, i_s, m_s, i_e, S.E)
        b_s = tl.dot(b_q, tl.trans(b_keys), input_precision=PRECISION) * scale  # (BG, BS)
        b_p, b_decay, b_max, b_sum = weighed(tl.where(m_s[None, :], b_s, float("-inf")), b_max, b_sum)
        b_out = tl.dot(b_p.to(b_values.dtype), b_values, b_out * b_decay[:, None], input_precision=PRECISION)
    store_answers(token, b_out / b_sum[:, None], i_b, i_kv, i_g, i_e, S)


class Rows(NamedTuple):
    """Sums of k (B, HKV, R, D) and v; slots of k and v; the rows as they are read, in the dtype of k (in float32 the
    rows themselves). Tables (LENGTH, R) compress the tokens; steps from head to head, 0 for what is one for all.
    """

    p_rows_k: Any
    p_rows_v: Any
    p_length: Any
    p_late_k: Any
    p_late_v: Any
    p_short_k: Any
    p_short_v: Any
    p_e: Any
    p_f: Any
    p_bias_k: Any
    p_bias_v: Any
    e_h: int
    f_h: int
    bias_k_h: int
    bias_v_h: int


class Table(NamedTuple):
    """How tokens are compressed to R rows, BR at a time. PERIODIC: the table begins again after LENGTH tokens."""

    R: int
    BR: int
    LENGTH: int
    LATE: int
    PERIODIC: bool


@triton.jit
def places(place, T: tl.constexpr):
    """The slots' tokens' rows in the table, where the token at `place` came last."""
    i_at = place - place % T.LATE + tl.arange(0, T.LATE)
    if T.PERIODIC:
        i_at = i_at % T.LENGTH
    else:
        i_at = tl.minimum(i_at, T.LENGTH - 1)
    return i_at


@triton.jit
def linformer_step_kernel(token, rows, scale, S: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr):
    """K̃ ← K̃ + e kᵀ, Ṽ ← Ṽ + f vᵀ, out = softmax(q K̃ᵀ · scale) Ṽ, with the means of a periodic table and the biases.

    The rows themselves are left to `linformer_add_kernel`, which comes after.
    """
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e, i_g, i_j = tl.arange(0, S.BD), tl.arange(0, S.BE), tl.arange(0, S.BG), tl.arange(0, T.LATE)
    place = tl.load(rows.p_length + i_b)
    slot = (place % T.LATE).to(tl.int32)
    m_late, m_own = i_j < slot, i_j == slot
    i_at = places(place, T)
    share = 1.0
    if T.PERIODIC:
        share = 1.0 / ((place + T.LENGTH) // T.LENGTH).to(tl.float32)
    p_e, p_f = rows.p_e + i_kv * rows.e_h, rows.p_f + i_kv * rows.f_h
    p_late_k, p_late_v = rows.p_late_k + i_x * (T.LATE * S.D), rows.p_late_v + i_x * (T.LATE * S.E)
    b_k, b_v = load_key(token, i_b, i_kv, i_d, S), load_value(token, i_b, i_kv, i_e, S)
    b_q = load_queries(token, i_b, i_kv, i_g, i_d, S)
    b_late_k, b_late_v = load_block(p_late_k, i_j, m_late, i_d, S.D), load_block(p_late_v, i_j, m_late, i_e, S.E)
    b_k, b_v = b_k.to(b_late_k.dtype), b_v.to(b_late_v.dtype)
    b_late_k = tl.where(m_own[:, None], b_k[None, :], b_late_k)
    b_late_v = tl.where(m_own[:, None], b_v[None, :], b_late_v)
    tl.store(p_late_k + slot * S.D + i_d, b_k, mask=i_d < S.D)
    tl.store(p_late_v + slot * S.E + i_e, b_v, mask=i_e < S.E)
    b_whole = tl.sum(b_q, 1)
    b_q = b_q.to(b_k.dtype)
    b_near = tl.dot(b_q, tl.trans(b_late_k), input_precision=PRECISION)  # (BG, LATE)
    b_max = tl.full((S.BG,), float("-inf"), tl.float32)
    b_sum, b_constant = tl.full((S.BG,), 0.0, tl.float32), tl.full((S.BG,), 0.0, tl.float32)
    b_out, b_seen = tl.full((S.BG, S.BE), 0.0, tl.float32), tl.full((S.BG, T.LATE), 0.0, tl.float32)
    for r_0 in range(0, T.R, T.BR):
        i_r = r_0 + tl.arange(0, T.BR)
        m_r = i_r < T.R
        b_keys = load_block(rows.p_short_k, i_x * T.R + i_r, m_r, i_d, S.D)
        b_values = load_block(rows.p_short_v, i_x * T.R + i_r, m_r, i_e, S.E)
        m_at = i_j <= slot
        b_e, b_f = load_block(p_e, i_at, m_at, i_r, T.R), load_block(p_f, i_at, m_at, i_r, T.R)
        b_s = tl.dot(b_q, tl.trans(b_keys), input_precision=PRECISION)  # (BG, BR)
        b_s = tl.dot(b_near, b_e.to(tl.float32), b_s, input_precision=PRECISION) * share
        if rows.p_bias_k is not None:
            b_bias = tl.load(rows.p_bias_k + i_kv * rows.bias_k_h + i_r, mask=m_r, other=0.0).to(tl.float32)
            b_s += b_whole[:, None] * b_bias[None, :]
        b_p, b_decay, b_max, b_sum = weighed(tl.where(m_r[None, :], b_s * scale, float("-inf")), b_max, b_sum)
        if rows.p_bias_v is not None:
            b_bias = tl.load(rows.p_bias_v + i_kv * rows.bias_v_h + i_r, mask=m_r, other=0.0).to(tl.float32)
            b_constant = b_constant * b_decay + tl.sum(b_p * b_bias[None, :], 1)
        b_p = b_p.to(b_values.dtype)
        b_out = tl.dot(b_p, b_values, b_out * b_decay[:, None], input_precision=PRECISION)
        b_f = tl.trans(b_f.to(b_p.dtype))
        b_seen = tl.dot(b_p, b_f, b_seen * b_decay[:, None], input_precision=PRECISION)
    b_out = tl.dot(b_seen, b_late_v.to(tl.float32), b_out, input_precision=PRECISION)
    store_answers(token, (b_out * share + b_constant[:, None]) / b_sum[:, None], i_b, i_kv, i_g, i_e, S)


@triton.jit
def linformer_add_kernel(rows, S: tl.constexpr, T: tl.constexpr):
    """Slots are added to the rows where a token has just taken the last of them; nothing happens elsewhere."""
    i_x = tl.program_id(0).to(tl.int64)
    i_kv = i_x % S.HKV
    place = tl.load(rows.p_length + i_x // S.HKV)
    if place % T.LATE == T.LATE - 1:
        i_at = places(place, T)
        add_slots(rows.p_rows_k, rows.p_short_k, rows.p_late_k, rows.p_e + i_kv * rows.e_h, i_x, i_at, S.D, S.BD, T)
        add_slots(rows.p_rows_v, rows.p_short_v, rows.p_late_v, rows.p_f + i_kv * rows.f_h, i_x, i_at, S.E, S.BE, T)


@triton.jit
def add_slots(p_rows, p_short, p_late, p_table, i_x, i_at, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr):
    """rows (R, D) ← rows + Σ e_j x_jᵀ over all slots x (LATE, D), compressed by the table's rows at i_at."""
    i_d, i_j = tl.arange(0, BD), tl.arange(0, T.LATE)
    b_x = load_block(p_late, i_x * T.LATE + i_j, i_j < T.LATE, i_d, D)
    for r_0 in range(0, T.R, T.BR):
        i_r = r_0 + tl.arange(0, T.BR)
        m_r = i_r < T.R
        m_rows = m_r[:, None] & (i_d < D)[None, :]
        i_rows = (i_x * T.R + i_r)[:, None] * D + i_d[None, :]
        b_rows = tl.load(p_rows + i_rows, mask=m_rows, other=0.0)
        b_e = load_block(p_table, i_at, i_j < T.LATE, i_r, T.R)
        # Products of halves are exact in float32; any other must be made in it.
        if b_e.dtype == b_x.dtype and b_e.dtype != tl.float32:
            b_rows = tl.dot(tl.trans(b_e), b_x, b_rows)
        else:
            b_rows = tl.dot(tl.trans(b_e).to(tl.float32), b_x.to(tl.float32), b_rows, input_precision="ieee")
        # Threads may share a row, which all must have read.
        tl.debug_barrier()
        tl.store(p_rows + i_rows, b_rows, mask=m_rows)
        if p_short.dtype.element_ty != tl.float32:
            tl.store(p_short + i_rows, b_rows.to(p_short.dtype.element_ty), mask=m_rows)
