"""Causal linear attention, backward: gradients of the sums after each chunk, then all chunks at once.

With d the gradient of num (of num and den, where divided) and S the sums before a chunk, all at log scale c₀:

    dφ(q_i) = exp(c₀ − c_i) S d_i + Σ_{j ≤ i} exp(β_j − c_i) (d_i · v_j) f_j,      dS = Σ_i exp(c₀ − c_i) φ(q_i) d_iᵀ

dS is summed from the end as the forward pass sums S from the start: within segments, then between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    exact_exp,
    inverse,
    load_column,
    load_rows,
    load_weight,
    query_features,
    store_sums,
)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_backward_sums_kernel(
    p_q,
    p_weight,
    p_reference,
    p_peak,
    p_out,
    p_den,
    p_d_out,
    p_d_den,
    p_d_kv,
    p_d_z,
    p_suffix,
    p_suffix_z,
    T,
    segments,
    chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_db,
    stride_dt,
    stride_dh,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    TILES: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dS of one segment at the scale of its start, summed over the heads of a group.

    p_suffix, p_suffix_z: (B, Hkv, chunks, ·) the part of dS that comes after each chunk, at the scale of its end.
    p_d_den: (B, T, H) gradients of den, written here with TILES = 1, else given.
    """
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_kv = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = (pid // (HKV * TILES)) % segments
    i_b = (pid // (HKV * TILES) // segments).to(tl.int64)
    i_0 = i_s * chunks * C
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, C))
    i_l = i_0 + (steps - 1) * C
    i_x = i_b * HKV + i_kv
    i_row = i_b * T + i_l
    p_q += i_b * stride_qb + i_l.to(tl.int64) * stride_qt + i_kv.to(tl.int64) * GROUP * stride_qh
    p_d_out += i_b * stride_db + i_l.to(tl.int64) * stride_dt + i_kv.to(tl.int64) * GROUP * stride_dh + i_e * BE
    p_out += (i_row * H + i_kv * GROUP) * E
    p_den += i_row * H + i_kv * GROUP
    p_d_den += i_row * H + i_kv * GROUP
    p_peak += i_x * T + i_l
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    i_t, i_m = tl.arange(0, C), tl.arange(0, BM)
    b_d_kv = tl.zeros((BM, BE), tl.float32)
    b_d_z = tl.zeros((BM,), tl.float32)
    c_start = 0.0
    if SCALED:
        c_start = tl.load(p_reference + i_x * (segments + 1) + i_s)
    i_c = i_x * tl.cdiv(T, C) + i_s * chunks + steps - 1
    p_suffix += i_e * BE
    left = T - i_l
    for i in range(steps):
        store_sums(p_suffix, i_c, b_d_kv, BM, BE, BE * TILES)
        if NORMALISE:
            if i_e == 0:
                tl.store(p_suffix_z + i_c * BM + i_m, b_d_z)
        b_row = tl.full((C,), 1.0, tl.float32)
        if SCALED:
            c_last = tl.maximum(tl.load(p_peak + tl.minimum(left, C) - 1), c_start)
            c_before = tl.maximum(tl.load(p_peak - 1, mask=i < steps - 1, other=FLOOR), c_start)
            b_row = exact_exp(c_before - tl.maximum(load_column(p_peak, 1, left, C, 1e30), c_start))
            decay = exact_exp(c_before - c_last)
            b_d_kv *= decay
            b_d_z *= decay
        for g in range(GROUP):
            b_q = load_rows(p_q + g * stride_qh, stride_qt, left, D, C, BD, D == BD)
            b_d = load_rows(p_d_out + g * stride_dh, stride_dt, left, E - i_e * BE, C, BE, E % BE == 0)
            b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
            b_weight_row = b_row
            if NORMALISE:
                b_inverse = inverse(load_column(p_den + g, H, left, C, 0.0))
                b_weight_row = b_row * b_inverse
                if TILES == 1:
                    b_out = load_rows(p_out + g * E, H * E, left, E, C, BE, E % BE == 0).to(tl.float32)
                    b_d_den = -tl.sum(b_d.to(tl.float32) * b_out, 1) * b_inverse
                    tl.store(p_d_den + g + i_t * H, b_d_den, mask=i_t < left)
                else:
                    b_d_den = load_column(p_d_den + g, H, left, C, 0.0)
                b_d_z += tl.sum(b_query * (b_d_den * b_row)[:, None], 0)
            b_query = (b_query * b_weight_row[:, None]).to(DOT)
            b_d_kv = tl.dot(tl.trans(b_query), b_d.to(DOT), b_d_kv, input_precision=PRECISION)
        i_c -= 1
        p_q -= C * stride_qt
        p_d_out -= C * stride_dt
        p_out -= C * H * E
        p_den -= C * H
        p_d_den -= C * H
        p_peak -= C
        left += C
    i_o = i_x * segments + i_s
    store_sums(p_d_kv + i_e * BE, i_o, b_d_kv, BM, BE, BE * TILES)
    if NORMALISE:
        if i_e == 0:
            tl.store(p_d_z + i_o * BM + i_m, b_d_z)


@triton.jit(do_not_specialize=["segments"])
def causal_linear_backward_scan_kernel(
    p_d_kv,
    p_d_z,
    p_reference,
    p_d_end,
    p_d_start,
    p_after,
    segments,
    M: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Gradients of the sums after each segment from the segments' own dS: those of kv in p_after, of z in place."""
    i_x = tl.program_id(0).to(tl.int64)
    i_r = tl.program_id(1)
    i_m, i_e = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    columns = E + 1 if NORMALISE else E
    m_m = i_m < M
    m_kv = m_m[:, None] & (i_e < E)[None, :]
    i_in = i_x * (M * columns) + i_m * columns
    b_d_kv = tl.zeros((ROWS, BE), tl.float32)
    b_d_z = tl.zeros((ROWS,), tl.float32)
    if p_d_end is not None:
        b_d_kv = tl.load(p_d_end + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0)
        if NORMALISE:
            b_d_z = tl.load(p_d_end + i_in + E, mask=m_m, other=0.0)
    i_tile = i_x * segments * (BM * BE) + i_m[:, None] * BE + i_e[None, :]
    p_row = p_d_z + i_x * segments * BM + i_m
    p_reference += i_x * (segments + 1)
    for i in tl.range(segments, num_stages=4):
        i_s = segments - 1 - i
        b_more = tl.load(p_d_kv + i_tile + i_s * (BM * BE))
        tl.store(p_after + i_tile + i_s * (BM * BE), b_d_kv.to(p_after.dtype.element_ty))
        decay = 1.0
        if SCALED:
            decay = exact_exp(tl.load(p_reference + i_s) - tl.load(p_reference + i_s + 1))
        b_d_kv = b_d_kv * decay + b_more
        if NORMALISE:
            b_more_z = tl.load(p_row + i_s * BM)
            tl.store(p_row + i_s * BM, b_d_z)
            b_d_z = b_d_z * decay + b_more_z
    if p_d_start is not None:
        tl.store(p_d_start + i_in[:, None] + i_e[None, :], b_d_kv, mask=m_kv)
        if NORMALISE:
            tl.store(p_d_start + i_in + E, b_d_z, mask=m_m)
