"""Causal FAVOR+ backward: gradients of the sums after each chunk; `favor_gradients` has those of all chunks at once.

With q̂ = φ(q) / den, which needs no other division, Δ_i = d_i · out_i for the gradient d of out, S and z the sums before
a chunk at the scale of c, dS and dz the gradients of those after it at the scale of its end e, and sizes as in
`favor_forward`,

    a_ij = 2^(n_j − r_i) (d_i · v_j − Δ_i),
    dφ(q_i) den_i = Σ_{j ≤ i} a_ij f_j + 2^(c − r_i) (S d_i − Δ_i z),
    df_j = Σ_{i ≥ j} a_ij q̂_i + 2^(n_j − e) (dS v_j + dz),
    dv_j = Σ_{i ≥ j} 2^(n_j − r_i) (q̂_i · f_j) d_i + 2^(n_j − e) dSᵀ f_j.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import FLOOR, NOTHING, load_column, load_rows
from longspan.kernels.favor_blocks import features, load_tile, power, project_across, reference, store_tile


@triton.jit(do_not_specialize=["T"])
def favor_backward_rows_kernel(
    p_out,
    p_den,
    p_d_out,
    p_query_offset,
    p_over_den,
    p_delta,
    T,
    stride_db,
    stride_dt,
    stride_dh,
    H: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BE: tl.constexpr,
):
    """Δ (B, H, chunks, C), and offsets of queries with den taken into them, so that their features are q̂."""
    pid = tl.program_id(0)
    i_h = pid % H
    i_0 = (pid // H) % tl.cdiv(T, C) * C
    i_b = (pid // H // tl.cdiv(T, C)).to(tl.int64)
    left = T - i_0
    i_row = (i_b * T + i_0) * H + i_h
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * stride_dt + i_h.to(tl.int64) * stride_dh
    b_d = load_rows(p_d_out, stride_dt, left, E, C, BE, E == BE).to(tl.float32)
    b_out = load_rows(p_out + i_row * E, H * E, left, E, C, BE, E == BE).to(tl.float32)
    b_den = load_column(p_den + i_row, H, left, C, 0.0)
    i_o = ((i_b * H + i_h) * tl.cdiv(T, C) + i_0 // C) * C + tl.arange(0, C)
    m_nothing = b_den < NOTHING
    b_offset = tl.load(p_query_offset + i_o) + tl.log2(tl.where(m_nothing, 1.0, b_den))
    tl.store(p_over_den + i_o, tl.where(m_nothing, -2 * FLOOR, b_offset))
    tl.store(p_delta + i_o, tl.sum(b_d * b_out, 1))


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first", "sequences"])
def favor_backward_sums_kernel(
    p_q,
    p_d_out,
    p_high,
    p_low,
    p_flag,
    p_query_offset,
    p_delta,
    p_peak,
    p_reference,
    p_d_total,
    p_d_total_z,
    p_suffix,
    p_suffix_z,
    T,
    segments,
    chunks,
    first,
    sequences,
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
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    TILE: tl.constexpr,
):
    """dS and dz of one segment and one tile of features, summed over the heads of a group, at its start's scale.

    Of all (B, Hkv) sequences only some, from the first on, are gone through, and only they have sums.
    p_suffix, p_suffix_z: (sequences, chunks, BM, ·) the part of them that comes after each chunk, at its end's scale.
    """
    pid = tl.program_id(0)
    TILES: tl.constexpr = BM // TILE
    GROUP: tl.constexpr = H // HKV
    i_m = pid % TILES * TILE
    i_s = pid // TILES // sequences
    i_x = first + pid // TILES % sequences
    i_b, i_kv = (i_x // HKV).to(tl.int64), i_x % HKV
    i_x = i_x.to(tl.int64)
    i_n = i_x - first
    steps = tl.minimum(chunks, tl.cdiv(T, C) - i_s * chunks)
    i_l = (i_s * chunks + steps - 1) * C
    p_q += i_b * stride_qb + i_l.to(tl.int64) * stride_qt + i_kv.to(tl.int64) * GROUP * stride_qh
    p_d_out += i_b * stride_db + i_l.to(tl.int64) * stride_dt + i_kv.to(tl.int64) * GROUP * stride_dh
    i_c = i_x * tl.cdiv(T, C) + i_s * chunks + steps - 1
    i_p = i_n * tl.cdiv(T, C) + i_s * chunks + steps - 1
    i_q = (i_b * H + i_kv * GROUP) * tl.cdiv(T, C) + i_s * chunks + steps - 1
    p_reference += i_x
    i_t, i_f = tl.arange(0, C), i_m + tl.arange(0, TILE)
    flag = tl.load(p_flag)
    b_high = load_tile(p_high, 0, i_m, 0, BD, TILE)
    b_d_kv = tl.zeros((TILE, BE), tl.float32)
    b_d_z = tl.zeros((TILE,), tl.float32)
    c_last = reference(p_reference, i_c + 1)
    left = T - i_l
    for _ in range(steps):
        store_tile(p_suffix, i_p, i_m, b_d_kv, BM, BE, TILE)
        tl.store(p_suffix_z + i_p * BM + i_f, b_d_z)
        c = reference(p_reference, i_c)
        decay = power(c - c_last)
        b_d_kv *= decay
        b_d_z *= decay
        b_back = tl.maximum(tl.load(p_peak + i_c * C + i_t), c) - c
        for g in range(GROUP):
            b_q = load_rows(p_q + g * stride_qh, stride_qt, left, D, C, BD, D == BD)
            b_d = load_rows(p_d_out + g * stride_dh, stride_dt, left, E, C, BE, E == BE)
            i_o = (i_q + g * tl.cdiv(T, C)) * C + i_t
            b_offset, b_delta = tl.load(p_query_offset + i_o) + b_back, tl.load(p_delta + i_o)
            b_query = project_across(b_q, b_high, p_low, flag, i_m, BD, TILE)
            b_query = features(b_query, b_offset[None, :], (i_f < M)[:, None], D, M == BM)
            b_d_kv = tl.dot(b_query.to(tl.bfloat16), b_d, b_d_kv)
            b_d_z -= tl.sum(b_query * b_delta[None, :], 1)
        c_last = c
        p_q -= C * stride_qt
        p_d_out -= C * stride_dt
        i_c -= 1
        i_p -= 1
        i_q -= 1
        left += C
    i_o = i_n * segments + i_s
    store_tile(p_d_total, i_o, i_m, b_d_kv, BM, BE, TILE)
    tl.store(p_d_total_z + i_o * BM + i_f, b_d_z)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "first"])
def favor_backward_scan_kernel(
    p_d_total,
    p_d_total_z,
    p_reference,
    p_d_end,
    p_d_start,
    p_after,
    T,
    segments,
    chunks,
    first,
    M: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of the sums after each segment, from the segments' own: those of kv in p_after, of z in place."""
    i_n = tl.program_id(0).to(tl.int64)
    i_x = first + i_n
    i_r = tl.program_id(1)
    i_m, i_e = i_r * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    m_m = i_m < M
    m_kv = m_m[:, None] & (i_e < E)[None, :]
    i_in = (i_x * M + i_m) * (E + 1)
    p_reference += i_x * (tl.cdiv(T, C) + 1)
    c = tl.load(p_reference + tl.cdiv(T, C))
    b_d_kv = tl.zeros((ROWS, BE), tl.float32)
    b_d_z = tl.zeros((ROWS,), tl.float32)
    if p_d_end is not None:
        own = power(tl.ceil(c) - c)
        b_d_kv = tl.load(p_d_end + i_in[:, None] + i_e[None, :], mask=m_kv, other=0.0) * own
        b_d_z = tl.load(p_d_end + i_in + E, mask=m_m, other=0.0) * own
    i_tile = i_n * segments * (BM * BE) + i_m[:, None] * BE + i_e[None, :]
    p_row = p_d_total_z + i_n * segments * BM + i_m
    for i in tl.range(segments, num_stages=4):
        i_s = segments - 1 - i
        b_more = tl.load(p_d_total + i_tile + i_s * (BM * BE))
        b_more_z = tl.load(p_row + i_s * BM)
        tl.store(p_after + i_tile + i_s * (BM * BE), b_d_kv.to(p_after.dtype.element_ty))
        tl.store(p_row + i_s * BM, b_d_z)
        c_first = tl.load(p_reference + i_s * chunks)
        decay = power(tl.ceil(c_first) - tl.ceil(c))
        b_d_kv = b_d_kv * decay + b_more
        b_d_z = b_d_z * decay + b_more_z
        c = c_first
    if p_d_start is not None:
        own = power(c - tl.ceil(c))
        tl.store(p_d_start + i_in[:, None] + i_e[None, :], b_d_kv * own, mask=m_kv)
        tl.store(p_d_start + i_in + E, b_d_z * own, mask=m_m)
