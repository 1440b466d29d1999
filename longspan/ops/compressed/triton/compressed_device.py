"""Softmax attention of many queries over few keys, forward and backward: all keys of a head stay on the chip.

Backward, keys are rows: their gradients, summed over all queries that a program sees, are products whose left sides
never leave the registers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.exp import add


class Sizes(NamedTuple):
    """What kernels are compiled for: heads, keys, their numbers, tokens and queries in a block; padded."""

    H: int
    HKV: int
    R: int
    D: int
    E: int
    TOKENS: int
    BT: int
    BR: int
    BS: int
    BD: int
    BE: int
    SHARED: bool


class Steps(NamedTuple):
    """From row to row, token to token, head to head of q, the result's gradient, q's; rows, heads, keys of k, v."""

    qb: int
    qt: int
    qh: int
    kb: int
    kh: int
    kr: int
    vb: int
    vh: int
    vr: int
    ob: int | None = None
    ot: int | None = None
    oh: int | None = None
    gb: int | None = None
    gt: int | None = None
    gh: int | None = None


@triton.jit
def _program(blocks, T, S: tl.constexpr):
    """Row and key/value head of this program, and its first token and the one after its last."""
    i_b = (tl.program_id(1) // S.HKV).to(tl.int64)
    i_h = (tl.program_id(1) % S.HKV).to(tl.int64)
    first = tl.program_id(0) * blocks * S.TOKENS
    return i_b, i_h, first, tl.minimum(first + blocks * S.TOKENS, T)


@triton.jit
def _places(t_0, T, step_t, step_h, NUMBERS: tl.constexpr, B: tl.constexpr, S: tl.constexpr):
    """Where the queries of a block lie, token by token all heads that share keys, and which are there."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_n, i_d = tl.arange(0, S.BT), tl.arange(0, B)
    m_x = (i_n < tl.minimum(T - t_0, S.TOKENS) * GROUP)[:, None]
    if NUMBERS != B:
        m_x = m_x & (i_d < NUMBERS)[None, :]
    return (i_n // GROUP * step_t + i_n % GROUP * step_h)[:, None] + i_d[None, :], m_x


@triton.jit
def _load(p_x, t_0, T, step_t, step_h, NUMBERS: tl.constexpr, B: tl.constexpr, S: tl.constexpr):
    places, m_x = _places(t_0, T, step_t, step_h, NUMBERS, B, S)
    return tl.load(p_x + tl.cast(t_0, tl.int64) * step_t + places, mask=m_x, other=0.0)


@triton.jit
def _store(p_x, t_0, T, step_t, step_h, b_x, NUMBERS: tl.constexpr, B: tl.constexpr, S: tl.constexpr):
    places, m_x = _places(t_0, T, step_t, step_h, NUMBERS, B, S)
    tl.store(p_x + tl.cast(t_0, tl.int64) * step_t + places, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def _rows(t_0, T, S: tl.constexpr):
    """The same of one number a query."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_n = tl.arange(0, S.BT)
    return tl.cast(t_0, tl.int64) * GROUP + i_n, i_n < tl.minimum(T - t_0, S.TOKENS) * GROUP


@triton.jit
def _keys(
    p_x, step, first, DTYPE: tl.constexpr, NUMBERS: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr
):
    i_r = first + tl.arange(0, ROWS)
    m_x = (i_r < S.R)[:, None] & (tl.arange(0, B) < NUMBERS)[None, :]
    return tl.load(p_x + i_r[:, None] * step + tl.arange(0, B)[None, :], mask=m_x, other=0.0).to(DTYPE)


@triton.jit(do_not_specialize=["T", "blocks"])
def rows_forward_kernel(p_q, p_k, p_v, p_out, p_lse, T, blocks, scale, steps, S: tl.constexpr, STAGES: tl.constexpr):
    """p_lse: (B, Hkv, T, group), log₂ of the sums of weights. scale: of scores, times log₂e."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, first, end = _program(blocks, T, S)
    p_q += i_b * steps.qb + i_h * GROUP * steps.qh
    p_out += (i_b * T * S.HKV + i_h) * GROUP * S.E
    p_lse += (i_b * S.HKV + i_h) * T * GROUP
    dtype: tl.constexpr = p_q.dtype.element_ty
    b_k = _keys(p_k + i_b * steps.kb + i_h * steps.kh, steps.kr, 0, dtype, S.D, S.BD, S.BR, S)
    b_v = _keys(p_v + i_b * steps.vb + i_h * steps.vh, steps.vr, 0, dtype, S.E, S.BE, S.BR, S)
    for t_0 in tl.range(first, end, S.TOKENS, num_stages=STAGES):
        b_q = _load(p_q, t_0, T, steps.qt, steps.qh, S.D, S.BD, S)
        b_s = tl.dot(b_q, tl.trans(b_k))
        if S.R != S.BR:
            b_s = tl.where((tl.arange(0, S.BR) < S.R)[None, :], b_s, float("-inf"))
        b_max = tl.max(b_s, 1) * scale
        b_p = tl.exp2(b_s * scale - b_max[:, None])
        b_sum = tl.sum(b_p, 1)
        b_out = tl.dot(b_p.to(b_v.dtype), b_v) * (1.0 / b_sum)[:, None]
        places, m_n = _rows(t_0, T, S)
        tl.store(p_lse + places, b_max + tl.log2(b_sum), mask=m_n)
        _store(p_out, t_0, T, S.H * S.E, S.E, b_out, S.E, S.BE, S)


@triton.jit
def _half(keys, queries, b_dk, b_dv, scale, unscale, first, S: tl.constexpr):
    """Of half of the keys their gradients, added up, and dS, transposed."""
    b_k, b_v = keys
    b_q, b_d, b_lse, b_delta = queries
    b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q)) * scale - b_lse[None, :])
    if S.R != S.BR:
        b_p = tl.where((first + tl.arange(0, S.BS) < S.R)[:, None], b_p, 0.0)
    b_ds = (b_p * (tl.dot(b_v, tl.trans(b_d)) * unscale - b_delta[None, :])).to(b_k.dtype)
    if S.SHARED:
        b_dk = tl.dot(b_p.to(b_k.dtype), b_d, b_dk)
    else:
        b_dv = tl.dot(b_p.to(b_k.dtype), b_d, b_dv)
    b_dk = tl.dot(b_ds, b_q, b_dk)
    return b_ds, b_dk, b_dv


@triton.jit
def _keep(p_x, b_dk, b_dv, first, S: tl.constexpr):
    i_r = first + tl.arange(0, S.BS)
    WIDTH: tl.constexpr = S.D if S.SHARED else S.D + S.E
    i_d = tl.arange(0, S.BD)
    p_x += i_r[:, None] * WIDTH
    tl.store(p_x + i_d[None, :], b_dk, mask=(i_r < S.R)[:, None] & (i_d < S.D)[None, :])
    if not S.SHARED:
        i_e = tl.arange(0, S.BE)
        tl.store(p_x + S.D + i_e[None, :], b_dv, mask=(i_r < S.R)[:, None] & (i_e < S.E)[None, :])


@triton.jit(do_not_specialize=["T", "blocks"])
def rows_backward_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_d,
    p_dq,
    p_dkv,
    T,
    blocks,
    scale,
    unscale,
    steps,
    S: tl.constexpr,
    STAGES: tl.constexpr,
):
    """p_dkv: (programs, B, Hkv, R, D + E), or D where keys are values: each program's share. unscale: scale without
    log₂e.
    """
    BS: tl.constexpr = S.BS
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, first, end = _program(blocks, T, S)
    p_q += i_b * steps.qb + i_h * GROUP * steps.qh
    p_d += i_b * steps.ob + i_h * GROUP * steps.oh
    p_out += (i_b * T * S.HKV + i_h) * GROUP * S.E
    p_dq += i_b * steps.gb + i_h * GROUP * steps.gh
    p_lse += (i_b * S.HKV + i_h) * T * GROUP
    p_k += i_b * steps.kb + i_h * steps.kh
    p_v += i_b * steps.vb + i_h * steps.vh
    dtype: tl.constexpr = p_q.dtype.element_ty
    b_k, b_v = _keys(p_k, steps.kr, 0, dtype, S.D, BD, BS, S), _keys(p_v, steps.vr, 0, dtype, S.E, BE, BS, S)
    b_dk, b_dv = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BE), tl.float32)
    if S.BR > S.BS:
        b_k2 = _keys(p_k, steps.kr, BS, dtype, S.D, BD, BS, S)
        b_v2 = _keys(p_v, steps.vr, BS, dtype, S.E, BE, BS, S)
        b_dk2, b_dv2 = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BE), tl.float32)
    for t_0 in tl.range(first, end, S.TOKENS, num_stages=STAGES):
        b_q = _load(p_q, t_0, T, steps.qt, steps.qh, S.D, BD, S)
        b_d = _load(p_d, t_0, T, steps.ot, steps.oh, S.E, BE, S)
        b_out = _load(p_out, t_0, T, S.H * S.E, S.E, S.E, BE, S)
        b_delta = tl.sum(b_out.to(tl.float32) * b_d.to(tl.float32), 1) * unscale
        places, m_n = _rows(t_0, T, S)
        b_lse = tl.load(p_lse + places, mask=m_n, other=0.0)
        queries = b_q, b_d, b_lse, b_delta
        b_ds, b_dk, b_dv = _half((b_k, b_v), queries, b_dk, b_dv, scale, unscale, 0, S)
        b_dq = tl.dot(tl.trans(b_ds), b_k)
        if S.BR > S.BS:
            b_ds, b_dk2, b_dv2 = _half((b_k2, b_v2), queries, b_dk2, b_dv2, scale, unscale, BS, S)
            b_dq = add(b_dq, tl.dot(tl.trans(b_ds), b_k2))
        _store(p_dq, t_0, T, steps.gt, steps.gh, b_dq, S.D, BD, S)
    WIDTH: tl.constexpr = S.D if S.SHARED else S.D + S.E
    p_dkv += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (S.R * WIDTH)
    _keep(p_dkv, b_dk, b_dv, 0, S)
    if S.BR > S.BS:
        _keep(p_dkv, b_dk2, b_dv2, BS, S)
