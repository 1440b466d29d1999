"""One token: it is written into a memory, then its own query reads. One program for each key/value head of each row.

The memory is changed where it lies, so that a CUDA graph can hold it. Lengths are left to the caller.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1e30)  # as in ops.chunks
RELU_EPSILON = tl.constexpr(1e-3)
NOTHING = tl.constexpr(1.1754943508222875e-32)
LAST = tl.constexpr(-1e30)  # as in local_blocks


@triton.jit
def load_turned(p_x, p_cos, p_sin, i_d, D: tl.constexpr, m_x, TURN: tl.constexpr):
    """x at columns i_d, float32, turned by rotary positions: 0 none, 1 by halves, 2 interleaved; p_x may be a block."""
    b_x = tl.load(p_x + i_d, mask=m_x, other=0.0).to(tl.float32)
    if TURN > 0:
        if TURN == 1:
            m_first = i_d < D // 2
            i_other = tl.where(m_first, i_d + D // 2, i_d - D // 2)
            i_angle = tl.where(m_first, i_d, i_d - D // 2)
        else:
            m_first = i_d % 2 == 0
            i_other, i_angle = i_d ^ 1, i_d // 2
        b_other = tl.load(p_x + i_other, mask=m_x, other=0.0).to(tl.float32)
        b_cos = tl.load(p_cos + i_angle, mask=i_d < D, other=0.0)
        b_sin = tl.load(p_sin + i_angle, mask=i_d < D, other=0.0)
        b_x = b_x * b_cos + tl.where(m_first, -b_sin, b_sin) * b_other
        # Rounded as it is where rotation is a step of its own.
        b_x = b_x.to(p_x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def project(b_x, b_weight, M: tl.constexpr, BM: tl.constexpr, D: tl.constexpr):
    """w·x (BM,) of x scaled by D^−¼, the floor beyond M features."""
    b_p = tl.sum(b_weight.to(tl.float32) * (b_x * D**-0.25)[None, :], 1)
    return tl.where(tl.arange(0, BM) < M, b_p, FLOOR)


@triton.jit
def query_map(b_x, b_weight, D: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, MAP: tl.constexpr):
    """φ(q) (BM,), zeros beyond M features."""
    m_m = tl.arange(0, BM) < M
    b_f = b_x
    if MAP == "favor":
        b_f = project(b_x, b_weight, M, BM, D)
    if MAP == "elu":
        b_f = tl.maximum(b_f, 0) + tl.exp(tl.minimum(b_f, 0))
    if MAP == "relu":
        b_f = tl.maximum(b_f, 0) + RELU_EPSILON
    if MAP == "softmax" or MAP == "favor":
        b_f = tl.where(m_m, b_f, FLOOR)
        b_f = tl.exp(b_f - tl.max(b_f, 0))
        b_f = b_f / tl.sum(b_f, 0)
    return tl.where(m_m, b_f, 0.0)


@triton.jit
def linear_step_kernel(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_weight,
    p_kv,
    p_z,
    p_shift,
    p_out,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_cb,
    stride_ob,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    NORMALISE: tl.constexpr,
    TURN: tl.constexpr,
):
    """kv ← kv + φ(k)vᵀ, z ← z + φ(k), out = φ(q)·kv / φ(q)·z."""
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // HKV, i_x % HKV
    i_d, i_m = tl.arange(0, BD), tl.arange(0, BM)
    m_d, m_m = i_d < D, i_m < M
    p_angle, p_other = p_cos, p_sin
    if TURN > 0:
        p_angle, p_other = p_cos + i_b * stride_cb, p_sin + i_b * stride_cb
    b_z = tl.load(p_z + i_x * M + i_m, mask=m_m, other=0.0)
    b_weight = 0.0
    if MAP == "favor":
        m_w = m_m[:, None] & m_d[None, :]
        b_weight = tl.load(p_weight + i_m[:, None] * D + i_d[None, :], mask=m_w, other=0.0)
    p_heads = p_q + i_b * stride_qb + i_kv * G * stride_qh
    b_k = load_turned(p_k + i_b * stride_kb + i_kv * stride_kh, p_angle, p_other, i_d, D, m_d, TURN)
    b_q = load_turned(p_heads, p_angle, p_other, i_d, D, m_d, TURN)
    decay = 1.0
    if MAP == "softmax" or MAP == "favor":
        before = tl.load(p_shift + i_x)
        b_f = b_k
        if MAP == "favor":
            b_f = project(b_k, b_weight, M, BM, D) - tl.sum(b_k * b_k, 0) * (0.5 * D**-0.5)
        b_f = tl.where(m_m, b_f, FLOOR)
        shift = tl.maximum(before, tl.max(b_f, 0))
        decay = tl.exp(before - shift)
        b_f = tl.where(m_m, tl.exp(b_f - shift), 0.0)
    else:
        b_f = query_map(b_k, b_weight, D, M, BM, MAP)
    # The only query of most, before the sums are here: with them the weights would not fit in registers.
    b_q = query_map(b_q, b_weight, D, M, BM, MAP)
    # A block of fewer numbers than threads is read by several of them: all must have read what is changed now.
    tl.debug_barrier()
    b_z = b_z * decay + b_f
    tl.store(p_z + i_x * M + i_m, b_z, mask=m_m)
    if MAP == "softmax" or MAP == "favor":
        tl.store(p_shift + i_x, shift)
    for e_0 in range(0, E, BE):
        i_e = e_0 + tl.arange(0, BE)
        m_e = i_e < E
        b_v = tl.load(p_v + i_b * stride_vb + i_kv * stride_vh + i_e, mask=m_e, other=0.0).to(tl.float32)
        p_tile = p_kv + i_x * (M * E) + i_m[:, None] * E + i_e[None, :]
        m_tile = m_m[:, None] & m_e[None, :]
        b_kv = tl.load(p_tile, mask=m_tile, other=0.0) * decay + b_f[:, None] * b_v[None, :]
        tl.debug_barrier()
        tl.store(p_tile, b_kv, mask=m_tile)
        for i_g in range(G):
            if G > 1:
                b_q = load_turned(p_heads + i_g * stride_qh, p_angle, p_other, i_d, D, m_d, TURN)
                b_q = query_map(b_q, b_weight, D, M, BM, MAP)
            b_query = b_q
            if NORMALISE == "feature":
                m_none = tl.abs(b_z) < NOTHING
                b_query = tl.where(m_none, 0.0, b_query / tl.where(m_none, 1.0, b_z))
            b_out = tl.sum(b_query[:, None] * b_kv, 0)
            if NORMALISE == "query":
                den = tl.sum(b_query * b_z, 0)
                none = tl.abs(den) < NOTHING
                b_out = tl.where(none, 0.0, b_out / tl.where(none, 1.0, den))
            p_row = p_out + i_b * stride_ob + (i_kv * G + i_g) * E
            tl.store(p_row + i_e, b_out.to(p_out.dtype.element_ty), mask=m_e)


@triton.jit
def local_step_kernel(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_length,
    p_ring_k,
    p_ring_v,
    p_out,
    scale,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_cb,
    stride_ob,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    RING: tl.constexpr,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
    ALONE: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    TURN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The token takes its slot in the ring; softmax over the slots its window reaches. ALONE: keys are normalised."""
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // HKV, i_x % HKV
    i_d, i_e, i_g = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
    m_d, m_e, m_g = i_d < D, i_e < E, i_g < G
    place = tl.load(p_length + i_b)
    slot = (place % RING).to(tl.int32)
    if SIZE > 0:
        reach = tl.minimum(place - (place // SIZE - BACK) * SIZE, place)
    else:
        reach = tl.minimum(BACK, place)
    p_angle, p_other = p_cos, p_sin
    if TURN > 0:
        p_angle, p_other = p_cos + i_b * stride_cb, p_sin + i_b * stride_cb
    b_k = load_turned(p_k + i_b * stride_kb + i_kv * stride_kh, p_angle, p_other, i_d, D, m_d, TURN)
    if ALONE:
        b_k = b_k / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 0)), 1e-12)
    b_k = b_k.to(p_ring_k.dtype.element_ty)
    b_v = tl.load(p_v + i_b * stride_vb + i_kv * stride_vh + i_e, mask=m_e, other=0.0).to(p_ring_v.dtype.element_ty)
    p_keys, p_values = p_ring_k + i_x * (RING * D), p_ring_v + i_x * (RING * E)
    tl.store(p_keys + slot * D + i_d, b_k, mask=m_d)
    tl.store(p_values + slot * E + i_e, b_v, mask=m_e)

    p_heads = p_q + i_b * stride_qb + (i_kv * G + i_g)[:, None] * stride_qh
    b_q = load_turned(p_heads, p_angle, p_other, i_d[None, :], D, m_g[:, None] & m_d[None, :], TURN)  # (BG, BD)
    # The token itself comes from registers: what was stored just now need not be there yet.
    b_max = tl.sum(b_q * b_k.to(tl.float32)[None, :], 1) * scale
    if ALONE:
        b_max = tl.full((BG,), LAST, tl.float32)
    b_sum = tl.full((BG,), 1.0, tl.float32)
    b_q = b_q.to(b_k.dtype)
    b_out = tl.zeros((BG, BE), tl.float32) + b_v.to(tl.float32)[None, :]
    for s_0 in range(0, RING, BS):
        i_s = s_0 + tl.arange(0, BS)
        before = (slot - i_s + RING) % RING  # how many places before the token a slot's holder stands
        m_s = (i_s < RING) & (before > 0) & (before <= reach)
        m_k, m_v = m_s[:, None] & m_d[None, :], m_s[:, None] & m_e[None, :]
        b_keys = tl.load(p_keys + i_s[:, None] * D + i_d[None, :], mask=m_k, other=0.0)
        b_values = tl.load(p_values + i_s[:, None] * E + i_e[None, :], mask=m_v, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_keys), input_precision=PRECISION) * scale  # (BG, BS)
        b_s = tl.where(m_s[None, :], b_s, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        b_p, b_decay = tl.exp(b_s - b_top[:, None]), tl.exp(b_max - b_top)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_out = tl.dot(b_p.to(b_values.dtype), b_values, b_out * b_decay[:, None], input_precision=PRECISION)
        b_max = b_top
    p_row = p_out + i_b * stride_ob + (i_kv * G + i_g)[:, None] * E + i_e[None, :]
    b_out = b_out / b_sum[:, None]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_g[:, None] & m_e[None, :])


@triton.jit
def linformer_step_kernel(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_length,
    p_e,
    p_f,
    p_bias_k,
    p_bias_v,
    p_rows_k,
    p_rows_v,
    p_out,
    scale,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_cb,
    stride_ob,
    stride_eh,
    stride_fh,
    stride_bkh,
    stride_bvh,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    LENGTH: tl.constexpr,
    PERIODIC: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
    TURN: tl.constexpr,
):
    """K̃ ← K̃ + e kᵀ, Ṽ ← Ṽ + f vᵀ, out = softmax(q K̃ᵀ · scale) Ṽ, with the means of a periodic table and the biases."""
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // HKV, i_x % HKV
    i_d, i_e, i_g = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
    m_d, m_e, m_g = i_d < D, i_e < E, i_g < G
    place = tl.load(p_length + i_b)
    share = 1.0
    if PERIODIC:
        share = 1.0 / ((place + LENGTH) // LENGTH).to(tl.float32)
        place = place % LENGTH
    else:
        place = tl.minimum(place, LENGTH - 1)
    p_angle, p_other = p_cos, p_sin
    if TURN > 0:
        p_angle, p_other = p_cos + i_b * stride_cb, p_sin + i_b * stride_cb
    b_k = load_turned(p_k + i_b * stride_kb + i_kv * stride_kh, p_angle, p_other, i_d, D, m_d, TURN)
    b_v = tl.load(p_v + i_b * stride_vb + i_kv * stride_vh + i_e, mask=m_e, other=0.0).to(tl.float32)
    p_heads = p_q + i_b * stride_qb + (i_kv * G + i_g)[:, None] * stride_qh
    b_q = load_turned(p_heads, p_angle, p_other, i_d[None, :], D, m_g[:, None] & m_d[None, :], TURN)  # (BG, BD)
    p_e += i_kv * stride_eh + place * R
    p_f += i_kv * stride_fh + place * R
    b_max = tl.full((BG,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BG,), tl.float32)
    b_out = tl.zeros((BG, BE), tl.float32)
    for r_0 in range(0, R, BR):
        i_r = r_0 + tl.arange(0, BR)
        m_r = i_r < R
        b_e, b_f = tl.load(p_e + i_r, mask=m_r, other=0.0), tl.load(p_f + i_r, mask=m_r, other=0.0)
        p_keys = p_rows_k + (i_x * R + i_r)[:, None] * D + i_d[None, :]
        p_values = p_rows_v + (i_x * R + i_r)[:, None] * E + i_e[None, :]
        m_k, m_v = m_r[:, None] & m_d[None, :], m_r[:, None] & m_e[None, :]
        b_keys = tl.load(p_keys, mask=m_k, other=0.0) + b_e.to(tl.float32)[:, None] * b_k[None, :]
        b_values = tl.load(p_values, mask=m_v, other=0.0) + b_f.to(tl.float32)[:, None] * b_v[None, :]
        # As in `linear_step_kernel`.
        tl.debug_barrier()
        tl.store(p_keys, b_keys, mask=m_k)
        tl.store(p_values, b_values, mask=m_v)
        b_keys, b_values = b_keys * share, b_values * share
        if p_bias_k is not None:
            b_keys += tl.load(p_bias_k + i_kv * stride_bkh + i_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
        if p_bias_v is not None:
            b_values += tl.load(p_bias_v + i_kv * stride_bvh + i_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
        b_s = tl.sum(b_q[:, None, :] * b_keys[None, :, :], 2) * scale  # (BG, BR)
        b_s = tl.where(m_r[None, :], b_s, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        b_p, b_decay = tl.exp(b_s - b_top[:, None]), tl.exp(b_max - b_top)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_out = b_out * b_decay[:, None] + tl.sum(b_p[:, :, None] * b_values[None, :, :], 1)
        b_max = b_top
    p_row = p_out + i_b * stride_ob + (i_kv * G + i_g)[:, None] * E + i_e[None, :]
    b_out = b_out / b_sum[:, None]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_g[:, None] & m_e[None, :])
