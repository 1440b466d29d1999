"""One token's step of memories that are read in every step, but written only in every LATE-th.

A memory of sums is as much to write as to read. What came since the last time waits in slots, the token of position p
in slot p modulo LATE; queries see the sums and the slots. With the last slot the slots are added to the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.step_blocks import FLOOR, NOTHING, load_turned, query_map


@triton.jit
def favor_features_kernel(
    p_q,
    p_k,
    p_cos,
    p_sin,
    p_weight,
    p_length,
    p_query,
    p_late_f,
    p_late_scale,
    B,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_cb,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    LATE: tl.constexpr,
    BX: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    TURN: tl.constexpr,
    SHARES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """φ(q) (B, H, M) to p_query, keys' features to their slots: BX heads a program, first those of queries.

    SHARES: a query's features add up to one; otherwise what they add up to cancels.
    """
    pid = tl.program_id(0)
    keys = pid >= tl.cdiv(B * H, BX)
    heads, p_x, stride_b, stride_h = H, p_q, stride_qb, stride_qh
    if keys:
        pid -= tl.cdiv(B * H, BX)
        heads, p_x, stride_b, stride_h = HKV, p_k, stride_kb, stride_kh
    i_x = pid.to(tl.int64) * BX + tl.arange(0, BX)
    i_b, i_d, i_m = i_x // heads, tl.arange(0, BD), tl.arange(0, BM)
    m_x, m_m = i_x < B * heads, i_m < M
    m_rows = m_x[:, None] & (i_d < D)[None, :]
    p_angle, p_other = p_cos, p_sin
    if TURN > 0:
        i_b = tl.minimum(i_b, B - 1)
        p_angle, p_other = p_cos + i_b[:, None] * stride_cb, p_sin + i_b[:, None] * stride_cb
    p_x += (i_b * stride_b + (i_x % heads) * stride_h)[:, None]
    m_w = m_m[:, None] & (i_d < D)[None, :]
    b_weight = tl.load(p_weight + i_m[:, None] * D + i_d[None, :], mask=m_w, other=0.0)
    b_x = load_turned(p_x, p_angle, p_other, i_d[None, :], D, m_rows, TURN)  # (BX, BD)
    b_p = tl.dot(b_x.to(b_weight.dtype), tl.trans(b_weight), input_precision=PRECISION) * D**-0.25  # (BX, BM)
    b_p = tl.where(m_m[None, :], b_p, FLOOR)
    b_scale = tl.max(b_p, 1)
    b_f = tl.where(m_m[None, :], tl.exp(b_p - b_scale[:, None]), 0.0)
    m_out = m_x[:, None] & m_m[None, :]
    if keys:
        b_scale -= tl.sum(b_x * b_x, 1) * (0.5 * D**-0.5)
        i_slot = i_x * LATE + tl.load(p_length + i_b, mask=m_x, other=0) % LATE
        tl.store(p_late_f + i_slot[:, None] * M + i_m[None, :], b_f, mask=m_out)
        tl.store(p_late_scale + i_slot, b_scale, mask=m_x)
    else:
        if SHARES:
            b_f = b_f / tl.sum(b_f, 1)[:, None]
        tl.store(p_query + i_x[:, None] * M + i_m[None, :], b_f, mask=m_out)


@triton.jit
def linear_late_kernel(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_length,
    p_kv,
    p_z,
    p_shift,
    p_late_f,
    p_late_v,
    p_late_scale,
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
    LATE: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    NORMALISE: tl.constexpr,
    TURN: tl.constexpr,
):
    """As `linear_step_kernel`. Slots: features f (M,), each divided by exp of its own scale, and v (E,).

    MAP "favor": p_q has the queries' features, and the own slot those of the key.
    """
    SCALED: tl.constexpr = MAP == "softmax" or MAP == "favor"
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // HKV, i_x % HKV
    i_d, i_m, i_e, i_j = tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BE), tl.arange(0, LATE)
    m_d, m_m, m_e = i_d < D, i_m < M, i_e < E
    # Everything is on its way before anything is waited for.
    p_tile = p_kv + i_x * (M * E) + i_m[:, None] * E + i_e[None, :]
    m_tile = m_m[:, None] & m_e[None, :]
    b_kv = tl.load(p_tile, mask=m_tile, other=0.0)
    b_z = tl.load(p_z + i_x * M + i_m, mask=m_m, other=0.0)
    b_v = tl.load(p_v + i_b * stride_vb + i_kv * stride_vh + i_e, mask=m_e, other=0.0).to(tl.float32)
    slot = (tl.load(p_length + i_b) % LATE).to(tl.int32)
    m_late, m_own = i_j < slot, i_j == slot
    p_late_f += i_x * (LATE * M)
    p_late_v += i_x * (LATE * E)
    p_late_scale += i_x * LATE
    p_slots = p_late_v + i_j[:, None] * E + i_e[None, :]
    b_values = tl.load(p_slots, mask=m_late[:, None] & m_e[None, :], other=0.0).to(tl.float32)
    p_slots = p_late_f + i_j[:, None] * M + i_m[None, :]
    p_heads = p_q + i_b * stride_qb + i_kv * G * stride_qh
    decay = 1.0
    if MAP == "favor":
        m_late = i_j <= slot
        b_late = tl.load(p_slots, mask=m_late[:, None] & m_m[None, :], other=0.0)
        b_q = tl.load(p_heads + i_m, mask=m_m, other=0.0)
        b_scale = tl.load(p_late_scale + i_j, mask=m_late, other=FLOOR)
    else:
        p_angle, p_other = p_cos, p_sin
        if TURN > 0:
            p_angle, p_other = p_cos + i_b * stride_cb, p_sin + i_b * stride_cb
        b_late = tl.load(p_slots, mask=m_late[:, None] & m_m[None, :], other=0.0)
        b_k = load_turned(p_k + i_b * stride_kb + i_kv * stride_kh, p_angle, p_other, i_d, D, m_d, TURN)
        b_q = load_turned(p_heads, p_angle, p_other, i_d, D, m_d, TURN)
        if MAP == "softmax":
            b_scale = tl.load(p_late_scale + i_j, mask=m_late, other=FLOOR)
            b_f = tl.where(m_m, b_k, FLOOR)
            own = tl.max(b_f, 0)
            b_f = tl.where(m_m, tl.exp(b_f - own), 0.0)
            b_scale = tl.where(m_own, own, b_scale)
            tl.store(p_late_scale + slot, own)
        else:
            b_f = query_map(b_k, 0.0, D, M, BM, MAP)
        b_q = query_map(b_q, 0.0, D, M, BM, MAP)
        b_late = tl.where(m_own[:, None], b_f[None, :], b_late)
        tl.store(p_late_f + slot * M + i_m, b_f, mask=m_m)
    b_values = tl.where(m_own[:, None], b_v[None, :], b_values)
    tl.store(p_late_v + slot * E + i_e, b_v.to(p_late_v.dtype.element_ty), mask=m_e)
    if SCALED:
        before = tl.load(p_shift + i_x)
        shift = tl.maximum(before, tl.max(b_scale, 0))
        decay = tl.exp(before - shift)
        b_late *= tl.exp(b_scale - shift)[:, None]
    b_kv *= decay
    b_z = b_z * decay + tl.sum(b_late, 0)
    for i_g in range(G):
        if G > 1:
            if MAP == "favor":
                b_q = tl.load(p_heads + i_g * stride_qh + i_m, mask=m_m, other=0.0)
            else:
                b_q = load_turned(p_heads + i_g * stride_qh, p_angle, p_other, i_d, D, m_d, TURN)
                b_q = query_map(b_q, 0.0, D, M, BM, MAP)
        b_query = b_q
        if NORMALISE == "feature":
            m_none = tl.abs(b_z) < NOTHING
            b_query = tl.where(m_none, 0.0, b_query / tl.where(m_none, 1.0, b_z))
        b_seen = tl.sum(b_query[None, :] * b_late, 1)  # (LATE,)
        b_out = tl.sum(b_query[:, None] * b_kv, 0) + tl.sum(b_seen[:, None] * b_values, 0)
        if NORMALISE == "query":
            den = tl.sum(b_query * b_z, 0)
            none = tl.abs(den) < NOTHING
            b_out = tl.where(none, 0.0, b_out / tl.where(none, 1.0, den))
        p_row = p_out + i_b * stride_ob + (i_kv * G + i_g) * E
        tl.store(p_row + i_e, b_out.to(p_out.dtype.element_ty), mask=m_e)
    if slot == LATE - 1:
        # All threads have read what is changed now, and all slots are there.
        tl.debug_barrier()
        for j in range(LATE):
            b_f = tl.load(p_late_f + j * M + i_m, mask=m_m, other=0.0)
            if SCALED:
                b_f *= tl.exp(tl.load(p_late_scale + j) - shift)
            b_v = tl.load(p_late_v + j * E + i_e, mask=m_e, other=0.0).to(tl.float32)
            b_kv += b_f[:, None] * b_v[None, :]
        tl.store(p_tile, b_kv, mask=m_tile)
        tl.store(p_z + i_x * M + i_m, b_z, mask=m_m)
        if SCALED:
            tl.store(p_shift + i_x, shift)


@triton.jit
def linformer_late_kernel(
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
    p_late_k,
    p_late_v,
    p_short_k,
    p_short_v,
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
    LATE: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
    TURN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `linformer_step_kernel`; `linformer_add_kernel` comes after it. Slots: k (D,) and v (E,). p_short: the rows as
    they are read, in the dtype of k; in float32 the rows themselves.
    """
    i_x = tl.program_id(0).to(tl.int64)
    i_b, i_kv = i_x // HKV, i_x % HKV
    i_d, i_e, i_g, i_j = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG), tl.arange(0, LATE)
    m_d, m_e, m_g = i_d < D, i_e < E, i_g < G
    place = tl.load(p_length + i_b)
    slot = (place % LATE).to(tl.int32)
    m_late, m_own = i_j < slot, i_j == slot
    # What the slots' tokens are compressed by.
    i_at = place - slot + i_j
    share = 1.0
    if PERIODIC:
        share = 1.0 / ((place + LENGTH) // LENGTH).to(tl.float32)
        i_at = i_at % LENGTH
    else:
        i_at = tl.minimum(i_at, LENGTH - 1)
    p_e += i_kv * stride_eh
    p_f += i_kv * stride_fh
    p_late_k += i_x * (LATE * D)
    p_late_v += i_x * (LATE * E)
    p_angle, p_other = p_cos, p_sin
    if TURN > 0:
        p_angle, p_other = p_cos + i_b * stride_cb, p_sin + i_b * stride_cb
    b_k = load_turned(p_k + i_b * stride_kb + i_kv * stride_kh, p_angle, p_other, i_d, D, m_d, TURN)
    b_v = tl.load(p_v + i_b * stride_vb + i_kv * stride_vh + i_e, mask=m_e, other=0.0).to(tl.float32)
    p_heads = p_q + i_b * stride_qb + (i_kv * G + i_g)[:, None] * stride_qh
    b_q = load_turned(p_heads, p_angle, p_other, i_d[None, :], D, m_g[:, None] & m_d[None, :], TURN)  # (BG, BD)
    m_late_k, m_late_v = m_late[:, None] & m_d[None, :], m_late[:, None] & m_e[None, :]
    b_late_k = tl.load(p_late_k + i_j[:, None] * D + i_d[None, :], mask=m_late_k, other=0.0)
    b_late_v = tl.load(p_late_v + i_j[:, None] * E + i_e[None, :], mask=m_late_v, other=0.0)
    b_k, b_v = b_k.to(b_late_k.dtype), b_v.to(b_late_v.dtype)
    b_late_k = tl.where(m_own[:, None], b_k[None, :], b_late_k)
    b_late_v = tl.where(m_own[:, None], b_v[None, :], b_late_v)
    tl.store(p_late_k + slot * D + i_d, b_k, mask=m_d)
    tl.store(p_late_v + slot * E + i_e, b_v, mask=m_e)
    b_whole = tl.sum(b_q, 1)
    b_q = b_q.to(b_k.dtype)
    b_near = tl.dot(b_q, tl.trans(b_late_k), input_precision=PRECISION)  # (BG, LATE)
    b_max = tl.full((BG,), float("-inf"), tl.float32)
    b_sum, b_constant = tl.zeros((BG,), tl.float32), tl.zeros((BG,), tl.float32)
    b_out, b_seen = tl.zeros((BG, BE), tl.float32), tl.zeros((BG, LATE), tl.float32)
    for r_0 in range(0, R, BR):
        i_r = r_0 + tl.arange(0, BR)
        m_r = i_r < R
        m_k, m_v = m_r[:, None] & m_d[None, :], m_r[:, None] & m_e[None, :]
        b_keys = tl.load(p_short_k + (i_x * R + i_r)[:, None] * D + i_d[None, :], mask=m_k, other=0.0)
        b_values = tl.load(p_short_v + (i_x * R + i_r)[:, None] * E + i_e[None, :], mask=m_v, other=0.0)
        m_table = (i_j <= slot)[:, None] & m_r[None, :]
        b_e = tl.load(p_e + i_at[:, None] * R + i_r[None, :], mask=m_table, other=0.0)
        b_f = tl.load(p_f + i_at[:, None] * R + i_r[None, :], mask=m_table, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_keys), input_precision=PRECISION)  # (BG, BR)
        b_s = tl.dot(b_near, b_e.to(tl.float32), b_s, input_precision=PRECISION) * share
        if p_bias_k is not None:
            b_bias = tl.load(p_bias_k + i_kv * stride_bkh + i_r, mask=m_r, other=0.0).to(tl.float32)
            b_s += b_whole[:, None] * b_bias[None, :]
        b_s = tl.where(m_r[None, :], b_s * scale, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, 1))
        b_p, b_decay = tl.exp(b_s - b_top[:, None]), tl.exp(b_max - b_top)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        if p_bias_v is not None:
            b_bias = tl.load(p_bias_v + i_kv * stride_bvh + i_r, mask=m_r, other=0.0).to(tl.float32)
            b_constant = b_constant * b_decay + tl.sum(b_p * b_bias[None, :], 1)
        b_p = b_p.to(b_values.dtype)
        b_out = tl.dot(b_p, b_values, b_out * b_decay[:, None], input_precision=PRECISION)
        b_f = tl.trans(b_f.to(b_p.dtype))
        b_seen = tl.dot(b_p, b_f, b_seen * b_decay[:, None], input_precision=PRECISION)
        b_max = b_top
    b_out = tl.dot(b_seen, b_late_v.to(tl.float32), b_out, input_precision=PRECISION)
    b_out = (b_out * share + b_constant[:, None]) / b_sum[:, None]
    p_row = p_out + i_b * stride_ob + (i_kv * G + i_g)[:, None] * E + i_e[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_g[:, None] & m_e[None, :])


@triton.jit
def linformer_add_kernel(
    p_length,
    p_e,
    p_f,
    p_rows_k,
    p_rows_v,
    p_late_k,
    p_late_v,
    p_short_k,
    p_short_v,
    stride_eh,
    stride_fh,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    LENGTH: tl.constexpr,
    PERIODIC: tl.constexpr,
    LATE: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
):
    """Slots are added to the rows where a token has just taken the last of them; nothing happens elsewhere."""
    i_x = tl.program_id(0).to(tl.int64)
    i_kv = i_x % HKV
    place = tl.load(p_length + i_x // HKV)
    if place % LATE == LATE - 1:
        i_at = place - (LATE - 1) + tl.arange(0, LATE)
        if PERIODIC:
            i_at = i_at % LENGTH
        else:
            i_at = tl.minimum(i_at, LENGTH - 1)
        add_slots(p_rows_k, p_short_k, p_late_k, p_e + i_kv * stride_eh, i_x, i_at, D, R, LATE, BD, BR)
        add_slots(p_rows_v, p_short_v, p_late_v, p_f + i_kv * stride_fh, i_x, i_at, E, R, LATE, BE, BR)


@triton.jit
def add_slots(
    p_rows,
    p_short,
    p_late,
    p_table,
    i_x,
    i_at,
    D: tl.constexpr,
    R: tl.constexpr,
    LATE: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """rows (R, D) ← rows + Σ e_j x_jᵀ over all slots x (LATE, D), compressed by the table's rows at i_at."""
    i_d, i_j = tl.arange(0, BD), tl.arange(0, LATE)
    m_d = i_d < D
    b_x = tl.load(p_late + (i_x * LATE + i_j)[:, None] * D + i_d[None, :], mask=m_d[None, :], other=0.0)
    for r_0 in range(0, R, BR):
        i_r = r_0 + tl.arange(0, BR)
        m_r = i_r < R
        m_rows = m_r[:, None] & m_d[None, :]
        i_rows = (i_x * R + i_r)[:, None] * D + i_d[None, :]
        b_rows = tl.load(p_rows + i_rows, mask=m_rows, other=0.0)
        b_e = tl.load(p_table + i_at[:, None] * R + i_r[None, :], mask=m_r[None, :], other=0.0)
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
