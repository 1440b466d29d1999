"""Causal linear attention, backward: segments walked from end to start for keys and values; see `linear_backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    inverse,
    key_features,
    key_gradient,
    key_logits,
    load_column,
    load_rows,
    load_sums,
    load_weight,
    query_features,
    ratio,
    reference,
    relative,
    settled,
    store_rows,
)
from longspan.kernels.linear_sums import row_references, walk_references


@triton.jit
def _load_queries(
    p_q,
    p_den,
    p_d_out,
    b_weight,
    b_low,
    left,
    values,
    H: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    NORMALISE: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_E: tl.constexpr,
    DOT: tl.constexpr,
):
    """φ(q) / den (C, BM) and d (C, BE) of one query head."""
    b_q = load_rows(p_q, STRIDE_Q, left, D, C, BD, D == BD, WHOLE)
    b_d = load_rows(p_d_out, STRIDE_D, left, values, C, BE, WHOLE_E, WHOLE).to(DOT)
    b_query = query_features(b_q, b_weight, b_low, M, BM, MAP, NORMALISE, DOT)
    if NORMALISE:
        b_query *= inverse(load_column(p_den, H, left, C, 0.0, WHOLE))[:, None]
    return settled(b_query, DOT), b_d


@triton.jit
def _walk_keys(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_scale,
    p_starts,
    p_den,
    p_d_out,
    p_delta,
    p_d_k,
    p_d_v,
    b_d_kv,
    b_d_z,
    c,
    left,
    rows,
    steps,
    values,
    first_tile,
    stride_qh,
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
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    STRIDE_D: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    NORMALISE: tl.constexpr,
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """b_d_kv, b_d_z: at the reference c of all keys; CAREFUL: at that of the segment's end, which is c."""
    GROUP: tl.constexpr = H // HKV
    WHOLE_E: tl.constexpr = E % BE == 0
    WIDTH: tl.constexpr = D if TILES == 1 else M
    i_t = tl.arange(0, C)
    b_weight, b_low = load_weight(p_weight, D, M, BD, BM, DOT)
    for _ in tl.range(steps, num_stages=STAGES):
        b_k = load_rows(p_k, STRIDE_K, rows, D, C, BD, D == BD, WHOLE)
        b_v = load_rows(p_v, STRIDE_V, rows, values, C, BE, WHOLE_E, WHOLE).to(DOT)
        b_scale = tl.zeros((C,), tl.float32)
        if p_scale is not None:
            b_scale = load_column(p_scale, HKV, rows, C, 0.0, WHOLE).to(tl.float32)
            p_scale -= C * HKV
        b_f = key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT)
        b_n = tl.zeros((C,), tl.float32) + c
        if CAREFUL:
            c_start = tl.load(p_starts)
            p_starts -= 1
            b_n, b_reference = row_references(b_f, b_scale, rows, c_start, C, BM, p_scale is not None, QUICK)
            c_last = tl.max(b_reference)
            # What came after was summed at the reference of its own start, which is that of this chunk's end.
            b_end = ratio(b_n - c_last, QUICK)
        b_f = key_features(b_f, b_scale, b_n, M, BM, MAP, SCALED, QUICK)
        if not WHOLE:
            b_f = tl.where((i_t < rows)[:, None], b_f, 0)
        b_features = b_f
        b_f = settled(b_f, DOT)
        m_seen = i_t[:, None] <= i_t[None, :]
        b_half = b_d_kv.to(DOT)
        if CAREFUL:
            b_pair = ratio(tl.where(m_seen, b_n[:, None] - b_reference[None, :], FLOOR), QUICK)
        # First values, then keys: both at once would need more registers.
        b_query, b_d = _load_queries(
            *(p_q, p_den, p_d_out, b_weight, b_low, left, values, H, D, M, C, BD, BM, BE, STRIDE_Q, STRIDE_D, MAP),
            *(NORMALISE, WHOLE, WHOLE_E, DOT),
        )
        if VALUES:
            b_d_v = tl.dot(b_f, b_half, input_precision=PRECISION)
            if CAREFUL:
                b_d_v *= b_end[:, None]
            for g in range(GROUP):
                if GROUP > 1:
                    b_query, b_d = _load_queries(
                        *(p_q + g * stride_qh, p_den + g, p_d_out + g * stride_dh, b_weight, b_low, left, values, H, D),
                        *(M, C, BD, BM, BE, STRIDE_Q, STRIDE_D, MAP, NORMALISE, WHOLE, WHOLE_E, DOT),
                    )
                b_p = tl.dot(b_f, tl.trans(b_query), input_precision=PRECISION)
                b_p = b_p * b_pair if CAREFUL else tl.where(m_seen, b_p, 0)
                b_d_v = tl.dot(b_p.to(DOT), b_d, b_d_v, input_precision=PRECISION)
            b_d_v = b_d_v.to(p_d_v.dtype.element_ty)
        if KEYS:
            b_g = tl.dot(b_v, tl.trans(b_half), input_precision=PRECISION)
            if NORMALISE:
                if first_tile:
                    b_g += b_d_z[None, :]
            if CAREFUL:
                b_g *= b_end[:, None]
        if CAREFUL:
            decay = ratio(c_start - c_last, QUICK)
            b_d_kv *= decay
            b_d_z *= decay
        for g in range(GROUP):
            if GROUP > 1:
                b_query, b_d = _load_queries(
                    *(p_q + g * stride_qh, p_den + g, p_d_out + g * stride_dh, b_weight, b_low, left, values, H, D, M),
                    *(C, BD, BM, BE, STRIDE_Q, STRIDE_D, MAP, NORMALISE, WHOLE, WHOLE_E, DOT),
                )
            b_delta = tl.zeros((C,), tl.float32)
            if NORMALISE:
                if first_tile:
                    b_delta = load_column(p_delta + g, H, left, C, 0.0, WHOLE)
            if KEYS:
                b_d_p = tl.dot(b_v, tl.trans(b_d), input_precision=PRECISION)
                if NORMALISE:
                    b_d_p -= b_delta[None, :]
                b_d_p = b_d_p * b_pair if CAREFUL else tl.where(m_seen, b_d_p, 0)
                b_g = tl.dot(b_d_p.to(DOT), b_query, b_g, input_precision=PRECISION)
            b_row = b_query
            if CAREFUL:
                b_row = (b_query * ratio(c_start - b_reference, QUICK)[:, None]).to(DOT)
            b_d_kv = tl.dot(tl.trans(b_row), b_d, b_d_kv, input_precision=PRECISION)
            if NORMALISE and KEYS:
                b_d_z -= tl.sum(b_row * b_delta[:, None], 0)
        if VALUES:
            store_rows(p_d_v, HKV * E, left, values, b_d_v, C, BE, WHOLE_E, WHOLE)
        if KEYS:
            if SCALED and MAP == "identity":
                b_g *= relative(b_scale, b_n, QUICK)[:, None]
            if TILES == 1:
                b_g = key_gradient(b_g, b_k, b_features, b_weight, D, MAP, DOT)
                store_rows(p_d_k, HKV * D, left, D, b_g, C, BD, D == BD, WHOLE)
            else:
                if SCALED and MAP != "identity":
                    b_own = reference(tl.max(key_logits(b_k, b_weight, b_low, D, M, BM, MAP, DOT), 1), QUICK)
                    b_g *= ratio(b_own - b_n, QUICK)[:, None]
                store_rows(p_d_k, HKV * M, left, M, b_g, C, BM, M == BM, WHOLE)
        p_q -= C * STRIDE_Q
        p_k -= C * STRIDE_K
        p_v -= C * STRIDE_V
        p_d_out -= C * STRIDE_D
        p_d_k -= C * HKV * WIDTH
        p_d_v -= C * HKV * E
        p_den -= C * H
        p_delta -= C * H
        left += C
        rows += C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def causal_linear_backward_keys_kernel(
    p_q,
    p_k,
    p_v,
    p_weight,
    p_scale,
    p_lengths,
    p_d_kv,
    p_d_z,
    p_sizes,
    p_reference,
    p_starts,
    p_den,
    p_d_out,
    p_delta,
    p_d_k,
    p_d_v,
    T,
    segments,
    chunks,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_db,
    stride_dh,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    STRIDE_D: tl.constexpr,
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
    QUICK: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d k (KEYS) and d v (VALUES) of one segment of one key head: at once, or with fewer registers one at a time.

    With TILES > 1 p_d_k: (TILES, B, T, Hkv, M) gets a tile's part of the gradients of features at a key's own
    reference.
    """
    pid = tl.program_id(0)
    GROUP: tl.constexpr = H // HKV
    i_h = pid % HKV
    i_e = (pid // HKV) % TILES
    i_s = (pid // (HKV * TILES)) % segments
    i_b = (pid // (HKV * TILES) // segments).to(tl.int64)
    B = tl.num_programs(0) // (HKV * TILES) // segments
    i_x = i_b * HKV + i_h
    steps = tl.minimum(chunks, tl.cdiv(T - i_s * chunks * C, C))
    i_c = i_s * chunks + steps - 1
    i_0 = i_c * C
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    p_q += i_b * stride_qb + i_0.to(tl.int64) * STRIDE_Q + i_h.to(tl.int64) * GROUP * stride_qh
    p_k += i_b * stride_kb + i_0.to(tl.int64) * STRIDE_K + i_h.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_0.to(tl.int64) * STRIDE_V + i_h.to(tl.int64) * stride_vh + i_e * BE
    p_d_out += i_b * stride_db + i_0.to(tl.int64) * STRIDE_D + i_h.to(tl.int64) * GROUP * stride_dh + i_e * BE
    if p_scale is not None:
        p_scale += (i_b * T + i_0) * HKV + i_h
    i_row = (i_b * T + i_0) * H + i_h * GROUP
    p_den += i_row
    p_delta += i_row
    i_row = (i_b * T + i_0) * HKV + i_h
    p_d_k += (i_row + i_e.to(tl.int64) * B * T * HKV) * (D if TILES == 1 else M)
    p_d_v += i_row * E + i_e * BE
    p_starts += i_x * tl.cdiv(T, C) + i_c
    i_o = i_x * segments + i_s
    _, c, chosen = walk_references(p_reference, p_sizes, i_x, i_s, segments, SCALED, QUICK)
    c_after = c
    if SCALED:
        c_after = tl.load(p_reference + i_x * (segments + 1) + i_s + 1)
    b_d_kv = load_sums(p_d_kv + i_e * BE, i_o, BM, BE, BE * TILES)
    b_d_z = tl.zeros((BM,), tl.float32)
    if NORMALISE:
        b_d_z += tl.load(p_d_z + i_o * BM + tl.arange(0, BM))
    for careful in tl.static_range(0 if QUICK else 1, 2 if SCALED else 1):
        if chosen == careful:
            c_0 = c_after if careful else c
            factor = ratio(c_0 - c_after, QUICK)
            _walk_keys(
                *(p_q, p_k, p_v, p_weight, p_scale, p_starts, p_den, p_d_out, p_delta, p_d_k, p_d_v, b_d_kv * factor),
                *(b_d_z * factor, c_0, left, rows, steps, E - i_e * BE, i_e == 0, stride_qh, stride_dh, H, HKV, D, M),
                *(E, TILES, C, BD, BM, BE, STRIDE_Q, STRIDE_K, STRIDE_V, STRIDE_D, MAP, SCALED, NORMALISE, QUICK),
                *(WHOLE, KEYS, VALUES, careful == 1, 1 if careful else STAGES, DOT, PRECISION),
            )
