"""Causal linear attention, backward: gradients of the sums after each chunk, then all chunks at once.

With d the gradient of num (of num and den, where divided) and S the sums before a chunk, all at log scale c₀:

    dφ(q_i) = exp(c₀ − c_i) S d_i + Σ_{j ≤ i} exp(β_j − c_i) (d_i · v_j) f_j,      dS = Σ_i exp(c₀ − c_i) φ(q_i) d_iᵀ

dS is summed from the end as the forward pass sums S from the start: within segments, then between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.tiles import (
    FLOOR,
    inverse,
    load_column,
    load_inputs,
    load_values,
    program_index,
    store_tile,
    token_pointer,
    zeros,
)
from longspan.ops.linear.triton.chunk_device import load_state, load_weight, query_features, store_state


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
    q_steps,
    d_steps,
    S: tl.constexpr,
):
    """dS of one segment at the scale of its start, summed over the heads of a group.

    p_suffix, p_suffix_z: (B, Hkv, chunks, ·) the part of dS that comes after each chunk, at the scale of its end.
    p_d_den: (B, T, H) gradients of den, written here with TILES = 1, else given.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_kv, i_e, i_s, i_b = program_index(segments, S.HKV, S.TILES)
    i_0 = i_s * chunks * S.C
    steps = tl.minimum(chunks, tl.cdiv(T - i_0, S.C))
    i_l = i_0 + (steps - 1) * S.C
    i_x = i_b * S.HKV + i_kv
    i_row = i_b * T + i_l
    p_q = token_pointer(p_q, q_steps, i_b, i_l, i_kv * GROUP)
    p_d_out = token_pointer(p_d_out, d_steps, i_b, i_l, i_kv * GROUP, i_e * S.BE)
    p_out += (i_row * S.H + i_kv * GROUP) * S.E
    p_den += i_row * S.H + i_kv * GROUP
    p_d_den += i_row * S.H + i_kv * GROUP
    p_peak += i_x * T + i_l
    b_weight, b_low = load_weight(p_weight, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    b_d_kv = zeros(S.BM, S.BE)
    b_d_z = zeros(S.BM)
    c_start = 0.0
    if S.SCALED:
        c_start = tl.load(p_reference + i_x * (segments + 1) + i_s)
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks + steps - 1
    p_suffix += i_e * S.BE
    left = T - i_l
    for i in range(steps):
        store_tile(p_suffix, i_c, b_d_kv, S)
        if S.NORMALIZE:
            if i_e == 0:
                tl.store(p_suffix_z + i_c * S.BM + i_m, b_d_z)
        b_row = tl.full((S.C,), 1.0, tl.float32)
        if S.SCALED:
            c_last = tl.maximum(tl.load(p_peak + tl.minimum(left, S.C) - 1), c_start)
            c_before = tl.maximum(tl.load(p_peak - 1, mask=i < steps - 1, other=FLOOR), c_start)
            b_row = exact_exp(c_before - tl.maximum(load_column(p_peak, 1, left, S.C, 1e30), c_start))
            decay = exact_exp(c_before - c_last)
            b_d_kv *= decay
            b_d_z *= decay
        for g in range(GROUP):
            b_q = load_inputs(p_q + g * q_steps.h, q_steps.t, left, S)
            b_d = load_values(p_d_out + g * d_steps.h, d_steps.t, left, S, i_e)
            b_query = query_features(b_q, b_weight, b_low, S)
            b_weight_row = b_row
            if S.NORMALIZE:
                b_inverse = inverse(load_column(p_den + g, S.H, left, S.C, 0.0))
                b_weight_row = b_row * b_inverse
                if S.TILES == 1:
                    b_out = load_values(p_out + g * S.E, S.H * S.E, left, S).to(tl.float32)
                    b_d_den = -tl.sum(b_d.to(tl.float32) * b_out, 1) * b_inverse
                    tl.store(p_d_den + g + i_t * S.H, b_d_den, mask=i_t < left)
                else:
                    b_d_den = load_column(p_d_den + g, S.H, left, S.C, 0.0)
                b_d_z += tl.sum(b_query * (b_d_den * b_row)[:, None], 0)
            b_query = (b_query * b_weight_row[:, None]).to(S.DOT)
            b_d_kv = tl.dot(tl.trans(b_query), b_d.to(S.DOT), b_d_kv, input_precision=S.PRECISION)
        i_c -= 1
        p_q -= S.C * q_steps.t
        p_d_out -= S.C * d_steps.t
        p_out -= S.C * S.H * S.E
        p_den -= S.C * S.H
        p_d_den -= S.C * S.H
        p_peak -= S.C
        left += S.C
    i_o = i_x * segments + i_s
    store_tile(p_d_kv + i_e * S.BE, i_o, b_d_kv, S)
    if S.NORMALIZE:
        if i_e == 0:
            tl.store(p_d_z + i_o * S.BM + i_m, b_d_z)


@triton.jit(do_not_specialize=["segments"])
def causal_linear_backward_scan_kernel(
    p_d_kv, p_d_z, p_reference, p_d_end, p_d_start, p_after, segments, S: tl.constexpr
):
    """Gradients of the sums after each segment from the segments' own dS: those of kv in p_after, of z in place."""
    SIZE: tl.constexpr = S.BM * S.BE
    i_x = tl.program_id(0).to(tl.int64)
    i_m, i_e = tl.program_id(1) * S.C + tl.arange(0, S.C), tl.arange(0, S.BE)
    b_d_kv, b_d_z = load_state(p_d_end, i_x, i_m, S)
    i_tile = i_x * segments * SIZE + i_m[:, None] * S.BE + i_e[None, :]
    p_row = p_d_z + i_x * segments * S.BM + i_m
    p_reference += i_x * (segments + 1)
    for i in tl.range(segments, num_stages=4):
        i_s = segments - 1 - i
        b_more = tl.load(p_d_kv + i_tile + i_s * SIZE)
        tl.store(p_after + i_tile + i_s * SIZE, b_d_kv.to(p_after.dtype.element_ty))
        decay = 1.0
        if S.SCALED:
            decay = exact_exp(tl.load(p_reference + i_s) - tl.load(p_reference + i_s + 1))
        b_d_kv = b_d_kv * decay + b_more
        if S.NORMALIZE:
            b_more_z = tl.load(p_row + i_s * S.BM)
            tl.store(p_row + i_s * S.BM, b_d_z)
            b_d_z = b_d_z * decay + b_more_z
    store_state(p_d_start, i_x, i_m, b_d_kv, b_d_z, S)
