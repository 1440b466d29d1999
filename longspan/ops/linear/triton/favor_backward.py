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

from longspan.ops.common.exp import exp2
from longspan.ops.common.tiles import (
    FLOOR,
    ZERO_NORMALIZER,
    load_column,
    load_inputs,
    load_values,
    program_index,
    token_pointer,
    zeros,
)
from longspan.ops.linear.triton.favor_device import (
    features,
    find_sequence,
    load_half,
    project_across,
    reference,
    store_sums,
)


@triton.jit(do_not_specialize=["T"])
def favor_backward_rows_kernel(p_out, p_den, p_d_out, p_query_offset, p_over_den, p_delta, T, d_steps, S: tl.constexpr):
    """Δ (B, H, chunks, C), and offsets of queries with den taken into them, so that their features are q̂."""
    i_h, _, i_c, i_b = program_index(tl.cdiv(T, S.C), S.H)
    i_0 = i_c * S.C
    left = T - i_0
    i_row = (i_b * T + i_0) * S.H + i_h
    p_d_out = token_pointer(p_d_out, d_steps, i_b, i_0, i_h)
    b_d = load_values(p_d_out, d_steps.t, left, S).to(tl.float32)
    b_out = load_values(p_out + i_row * S.E, S.H * S.E, left, S).to(tl.float32)
    b_den = load_column(p_den + i_row, S.H, left, S.C, 0.0)
    i_o = ((i_b * S.H + i_h) * tl.cdiv(T, S.C) + i_c) * S.C + tl.arange(0, S.C)
    m_nothing = b_den < ZERO_NORMALIZER
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
    q_steps,
    d_steps,
    S: tl.constexpr,
):
    """dS and dz of one segment and one tile of features, summed over the heads of a group, at its start's scale.

    p_suffix, p_suffix_z: (sequences, chunks, BM, ·) the part of them that comes after each chunk, at its end's scale.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_m, i_s, i_x, i_n, i_b, i_kv = find_sequence(first, sequences, S.BM // S.TILE, S)
    i_m *= S.TILE
    steps = tl.minimum(chunks, tl.cdiv(T, S.C) - i_s * chunks)
    i_l = (i_s * chunks + steps - 1) * S.C
    p_q = token_pointer(p_q, q_steps, i_b, i_l, i_kv * GROUP)
    p_d_out = token_pointer(p_d_out, d_steps, i_b, i_l, i_kv * GROUP)
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks + steps - 1
    i_p = i_n * tl.cdiv(T, S.C) + i_s * chunks + steps - 1
    i_q = (i_b * S.H + i_kv * GROUP) * tl.cdiv(T, S.C) + i_s * chunks + steps - 1
    p_reference += i_x
    i_t, i_f = tl.arange(0, S.C), i_m + tl.arange(0, S.TILE)
    flag = tl.load(p_flag)
    b_high = load_half(p_high, i_f, S)
    b_d_kv = zeros(S.TILE, S.BE)
    b_d_z = zeros(S.TILE)
    c_last = reference(p_reference, i_c + 1)
    left = T - i_l
    for _ in range(steps):
        store_sums(p_suffix, p_suffix_z, i_p, i_f, b_d_kv, b_d_z, S)
        c = reference(p_reference, i_c)
        decay = exp2(c - c_last)
        b_d_kv *= decay
        b_d_z *= decay
        b_back = tl.maximum(tl.load(p_peak + i_c * S.C + i_t), c) - c
        for g in range(GROUP):
            b_q = load_inputs(p_q + g * q_steps.h, q_steps.t, left, S)
            b_d = load_values(p_d_out + g * d_steps.h, d_steps.t, left, S)
            i_o = (i_q + g * tl.cdiv(T, S.C)) * S.C + i_t
            b_offset, b_delta = tl.load(p_query_offset + i_o) + b_back, tl.load(p_delta + i_o)
            b_query = project_across(b_q, b_high, p_low, flag, i_f, S)
            b_query = features(b_query, b_offset[None, :], i_f[:, None], S)
            b_d_kv = tl.dot(b_query.to(tl.bfloat16), b_d, b_d_kv)
            b_d_z -= tl.sum(b_query * b_delta[None, :], 1)
        c_last = c
        p_q -= S.C * q_steps.t
        p_d_out -= S.C * d_steps.t
        i_c -= 1
        i_p -= 1
        i_q -= 1
        left += S.C
    store_sums(p_d_total, p_d_total_z, i_n * segments + i_s, i_f, b_d_kv, b_d_z, S)
