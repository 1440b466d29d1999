"""Causal linear attention with states in memory: any dtype, map and width that `fused_chunk` and `favor` do not take.

A sequence is divided into segments of several chunks. One program sums the keys of a segment with the sums in
registers and writes what they were before each chunk, counted from the segment's start; `scan` computes the sums before
each segment from the segments' totals. Then all chunks run in parallel: each adds the two, reads them with its queries,
and sees its own keys as masked products. A key's features are f · exp(β); β is 0 for maps without a scale.

Backward, with d the gradient of num (of num and den, if divided) and S the sums before a chunk, all at log scale c₀:

    dφ(q_i) = exp(c₀ − c_i) S d_i + Σ_{j ≤ i} exp(β_j − c_i) (d_i · v_j) f_j,      dS = Σ_i exp(c₀ − c_i) φ(q_i) d_iᵀ

dS is summed from the end as the forward pass sums S from the start: within segments, then between them.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.launch import Launch, Signature, Strides, Workspace, dense, dense_rows, new_like, on_device
from longspan.ops.common.tiles import (
    FLOOR,
    inverse,
    load_column,
    load_inputs,
    load_rows,
    load_tile,
    load_values,
    padded,
    product,
    program_index,
    reload_rows,
    running_maximum,
    store_inputs,
    store_rows,
    store_tile,
    store_values,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved
from longspan.ops.linear.torch import safe_divide
from longspan.ops.linear.triton import PRECISION
from longspan.ops.linear.triton.scan import CausalPlan, ScanSizes

# One kernel: the largest number of elements in a program's tile of the sums, warps, pipeline stages, and the register
# limit per thread.
ChunkTiling = namedtuple("ChunkTiling", "tile warps stages registers", defaults=(None,))

# One pass: tokens in a chunk, the approximate number of programs that sum segments, the tiling of the kernel that sums,
# and one pair for each launch of the kernel that computes chunks: its gradients (letters of "qkv") and its tiling.
PassTiling = namedtuple("PassTiling", "chunk programs sums chunks")


def tilings(num_features: int, value_dim: int, bf16: bool) -> tuple[PassTiling, PassTiling]:
    """Return the tilings of the forward and the backward pass for these padded dimensions."""
    if not bf16:
        exact = PassTiling(32, 1024, ChunkTiling(4096, 4, 1), (("qkv", ChunkTiling(4096, 4, 1)),))
        return exact, exact
    if num_features * value_dim <= 64 * 64:
        sums = ChunkTiling(4096, 4, 3)
        forward = PassTiling(64, 1024, sums, (("", ChunkTiling(4096, 4, 1, 128)),))
        return forward, forward._replace(chunks=(("qkv", ChunkTiling(4096, 4, 1, 168)),))
    # All gradients in one launch would need more registers than there are.
    four, eight = ChunkTiling(16384, 4, 1), ChunkTiling(16384, 8, 1)
    if num_features > 128:  # With 4 warps all kernels spill; the one for keys is faster nevertheless.
        forward = PassTiling(64, 256, ChunkTiling(16384, 8, 2), (("", eight),))
        return forward, forward._replace(chunks=(("q", eight), ("k", four), ("v", eight)))
    forward = PassTiling(64, 256, ChunkTiling(16384, 4, 2), (("", four._replace(registers=168)),))
    return forward, forward._replace(chunks=(("q", four), ("k", four), ("v", four)))


# Compile-time constants: heads, dimensions, features, values, their padded sizes, tokens in a chunk, the map; 0 where a
# kernel does not use a size.
# SCALED: keys carry log scales β. DOT: the dtype of products. TILES: tiles of BE values. QUERIES, KEYS, VALUES: which
# gradients are computed.
ChunkSizes = namedtuple(
    "ChunkSizes",
    "H HKV D M E BD BM BE C MAP SCALED NORMALIZE DOT PRECISION TILES QUERIES KEYS VALUES",
    defaults=(1, False, False, False),
)


@triton.jit
def load_weight(p_weight, S: tl.constexpr):
    """The projection (M, D), scaled, as two (BM, BD) blocks that add up to it; 0 for maps without one."""
    b_weight, b_low = 0, 0
    if p_weight is not None:
        i_m, i_d = tl.arange(0, S.BM), tl.arange(0, S.BD)
        m_w = (i_m < S.M)[:, None] & (i_d < S.D)[None, :]
        b_exact = tl.load(p_weight + i_m[:, None] * S.D + i_d[None, :], mask=m_w, other=0.0) * S.D**-0.25
        b_weight = b_exact.to(S.DOT)
        b_low = (b_exact - b_weight.to(tl.float32)).to(S.DOT)
    return b_weight, b_low


@triton.jit
def _project(b_x, b_weight, b_low, S: tl.constexpr):
    """w·x in float32 precision, which an exponent needs: x is exact, w the sum of two blocks."""
    if tl.bfloat16 == S.DOT:
        b_p = tl.dot(b_x, tl.trans(b_low))
        b_p = tl.dot(b_x, tl.trans(b_weight), b_p)
    else:
        b_p = _times_weight(b_x.to(tl.float32), tl.trans(b_weight), b_x)
    return b_p


@triton.jit
def _times_weight(b_x, b_weight, b_like):
    """x·w in the precision that inputs like b_like need: three tf32 products lose bits of float32."""
    if b_like.dtype == tl.float32:
        b_x = product(b_x, b_weight, "ieee")
    else:
        b_x = tl.dot(b_x, b_weight, input_precision="tf32x3")
    return b_x


@triton.jit
def query_features(b_x, b_weight, b_low, S: tl.constexpr):
    """φ(q) (C, BM) in float32; zeros beyond M features.

    The sum that divides a softmax cancels in normalized attention. It is omitted for bfloat16; for float32 and float16
    its gradient is needed to cancel rounding errors.
    """
    m_m = (tl.arange(0, S.BM) < S.M)[None, :]
    if S.MAP == "favor":
        b_f = _project(b_x, b_weight, b_low, S)
    else:
        b_f = pointwise_features(b_x.to(tl.float32), S, True)
    if S.MAP == "softmax" or S.MAP == "favor":
        if S.BM != S.M:
            b_f = tl.where(m_m, b_f, FLOOR)
        b_f = exact_exp(b_f - tl.max(b_f, 1)[:, None])
    if S.MAP == "softmax" and not (S.NORMALIZE and tl.bfloat16 == S.DOT):
        b_f = b_f / tl.sum(b_f, 1)[:, None]
    if S.BM != S.M and S.MAP != "identity":
        b_f = tl.where(m_m, b_f, 0)
    return b_f


@triton.jit
def query_gradient(b_g, b_x, b_f, b_weight, S: tl.constexpr):
    """dq (C, BD) from dφ(q), q and φ(q). In normalized attention φ(q) · dφ(q) = 0: its scale cancels."""
    b_g = pointwise_gradient(b_g, b_x, b_f, S)
    if S.MAP == "softmax":
        if not (S.NORMALIZE and tl.bfloat16 == S.DOT):
            b_g -= tl.sum(b_g * b_f, 1)[:, None]
        b_g = b_g * b_f
    if S.MAP == "favor":
        b_g = _times_weight((b_g * b_f).to(S.DOT), b_weight, b_x)
    return b_g


@triton.jit
def key_logits(b_x, b_weight, b_low, S: tl.constexpr):
    """log φ(k) (C, BM) of exponential maps; k itself for the others."""
    b_f = b_x.to(tl.float32)
    if S.MAP == "favor":
        b_half = tl.sum(b_f * b_f, 1) * (0.5 * S.D**-0.5)
        b_f = _project(b_x, b_weight, b_low, S) - b_half[:, None]
    if S.BM != S.M and (S.MAP == "softmax" or S.MAP == "favor"):
        b_f = tl.where((tl.arange(0, S.BM) < S.M)[None, :], b_f, FLOOR)
    return b_f


@triton.jit
def key_features(b_f, b_beta, S: tl.constexpr):
    """f = φ(k) / exp(β) (C, BM) in float32 from logits and β (C,). Hidden keys have features too: their β is FLOOR, or
    their pairs are masked.
    """
    b_f = pointwise_features(b_f, S, True)
    if S.MAP == "softmax" or S.MAP == "favor":
        b_f = exact_exp(b_f - tl.where(b_beta == FLOOR, 0, b_beta)[:, None])
    if S.BM != S.M and S.MAP != "identity":
        b_f = tl.where((tl.arange(0, S.BM) < S.M)[None, :], b_f, 0)
    return b_f


@triton.jit
def key_gradient(b_g, b_x, b_f, b_weight, S: tl.constexpr):
    """dk (C, BD) from df, k and f; β is a constant."""
    b_g = pointwise_gradient(b_g, b_x, b_f, S)
    if S.MAP == "softmax":
        b_g = b_g * b_f
    if S.MAP == "favor":
        b_g = b_g * b_f
        b_total = tl.sum(b_g, 1) * S.D**-0.5
        b_g = _times_weight(b_g.to(S.DOT), b_weight, b_x)
        b_g = b_g - b_x.to(tl.float32) * b_total[:, None]
    return b_g


@triton.jit
def chunk_scales(p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S: tl.constexpr):
    """Scales of chunk i_c: β of its keys and the largest before each query (C,); the log scales c and c_last of the
    sums before and after it; factors that bring the sums before its segment and those since then to c, and the
    gradients after its segment to c_last. What a kernel does not use is not loaded.
    """
    b_beta = zeros(S.C)
    b_reference = b_beta
    old, new, after, c, c_last = 1.0, 1.0, 1.0, 0.0, 0.0
    if S.SCALED:
        i_0 = i_c * S.C
        left = T - i_0
        p_peak += i_x * T + i_0
        p_reference += i_x * (segments + 1) + i_c // chunks
        b_beta = load_column(p_beta + i_x * T + i_0, 1, left, S.C, FLOOR)
        b_reference = load_column(p_peak, 1, left, S.C, 1e30)
        c_old = tl.load(p_reference)
        c_new = tl.load(p_peak - 1, mask=i_c % chunks > 0, other=FLOOR)
        c_last = tl.load(p_peak + tl.minimum(left, S.C) - 1)
        after = tl.load(p_reference + 1)
        c = tl.maximum(c_old, c_new)
        c_last = tl.maximum(c_last, c)
        old, new, after = exact_exp(c_old - c), exact_exp(c_new - c), exact_exp(c_last - after)
        b_reference = tl.maximum(b_reference, c)
    return b_beta, b_reference, c, c_last, old, new, after


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_chunk_forward_sums_kernel(
    p_k, p_v, p_weight, p_log_scale, p_lengths, p_kv, p_z, p_max, p_prefix, p_prefix_z, p_beta, p_peak,
    T, segments, chunks, k, v, S: tl.constexpr
):  # fmt: skip
    """Σ φ(k) vᵀ, Σ φ(k) and max β of one segment, both sums divided by exp(max β).

    p_prefix, p_prefix_z: (B, Hkv, chunks, ·) the segment's sums before each chunk, at the scale of the largest β so
    far. p_beta, p_peak: (B, Hkv, T) each key's β and the largest so far in its segment.
    """
    i_h, i_e, i_s, i_b = program_index(segments, S.HKV, S.TILES)
    i_0 = i_s * chunks * S.C
    i_x = i_b * S.HKV + i_h
    rows = visible_length(p_lengths, i_b, T) - i_0
    p_k = token_pointer(p_k, k, i_b, i_0, i_h)
    p_v = token_pointer(p_v, v, i_b, i_0, i_h, i_e * S.BE)
    if p_log_scale is not None:
        p_log_scale += (i_b * T + i_0) * S.HKV + i_h
    b_weight, b_low = load_weight(p_weight, S)
    b_kv = zeros(S.BM, S.BE)
    b_z = zeros(S.BM)
    c = tl.max(tl.full((S.C,), FLOOR, tl.float32))
    i_t = tl.arange(0, S.C)
    p_beta += i_x * T + i_0
    p_peak += i_x * T + i_0
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks
    p_prefix += i_e * S.BE
    left = T - i_0
    for _ in range(tl.minimum(chunks, tl.cdiv(T - i_0, S.C))):
        store_tile(p_prefix, i_c, b_kv, S)
        if S.NORMALIZE:
            if i_e == 0:
                tl.store(p_prefix_z + i_c * S.BM + tl.arange(0, S.BM), b_z)
        b_k = load_inputs(p_k, k.t, rows, S)
        b_v = load_values(p_v, v.t, rows, S, i_e).to(S.DOT)
        b_f = key_logits(b_k, b_weight, b_low, S)
        b_beta = zeros(S.C)
        if S.SCALED:
            if p_log_scale is None:
                b_beta = tl.max(b_f, 1)
            else:
                b_beta = load_column(p_log_scale, S.HKV, rows, S.C, 0.0).to(tl.float32)
            b_beta = tl.where(i_t < rows, b_beta, FLOOR)
            b_peak = running_maximum(b_beta, c)
            if i_e == 0:
                tl.store(p_beta + i_t, b_beta, mask=i_t < left)
                tl.store(p_peak + i_t, b_peak, mask=i_t < left)
            c_last = tl.max(b_peak)
            decay = exact_exp(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
            if p_log_scale is None and tl.bfloat16 == S.DOT:
                # One exponential per feature, at the scale of the sums; 0 for hidden keys.
                b_f = key_features(b_f, tl.where(i_t < rows, c, -FLOOR), S)
            else:
                b_f = key_features(b_f, b_beta, S) * exact_exp(b_beta - c)[:, None]
        else:
            b_f = key_features(b_f, b_beta, S)
            if S.NORMALIZE:
                b_f = tl.where((i_t < rows)[:, None], b_f, 0)  # without z, v = 0 hides a key
        b_f = b_f.to(S.DOT)
        b_kv = tl.dot(tl.trans(b_f), b_v, b_kv, input_precision=S.PRECISION)
        if S.NORMALIZE:
            b_z += tl.sum(b_f.to(tl.float32), 0)
        p_k += S.C * k.t
        p_v += S.C * v.t
        i_c += 1
        p_beta += S.C
        p_peak += S.C
        left -= S.C
        rows -= S.C
        if p_log_scale is not None:
            p_log_scale += S.C * S.HKV
    i_o = i_x * segments + i_s
    store_tile(p_kv + i_e * S.BE, i_o, b_kv, S)
    if i_e == 0:
        if S.NORMALIZE:
            tl.store(p_z + i_o * S.BM + tl.arange(0, S.BM), b_z)
        if S.SCALED:
            tl.store(p_max + i_o, c)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_chunk_forward_kernel(
    p_q, p_k, p_v, p_weight, p_lengths, p_kv, p_z, p_prefix, p_prefix_z, p_reference, p_beta, p_peak, p_out, p_den,
    T, segments, chunks, q, k, v, S: tl.constexpr
):  # fmt: skip
    """One chunk of one query head."""
    i_h, i_e, i_c, i_b = program_index(tl.cdiv(T, S.C), S.H, S.TILES)
    i_kv = i_h // (S.H // S.HKV)
    i_0 = i_c * S.C
    i_x = i_b * S.HKV + i_kv
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q, i_b, i_0, i_h)
    p_k = token_pointer(p_k, k, i_b, i_0, i_kv)
    p_v = token_pointer(p_v, v, i_b, i_0, i_kv, i_e * S.BE)
    b_weight, b_low = load_weight(p_weight, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    i_s, i_p = i_x * segments + i_c // chunks, i_x * tl.cdiv(T, S.C) + i_c
    b_q = load_inputs(p_q, q.t, left, S)
    b_k = load_inputs(p_k, k.t, rows, S)
    b_beta, b_reference, c, _, old, new, _ = chunk_scales(p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S)
    b_v = load_values(p_v, v.t, rows, S, i_e).to(S.DOT)

    b_query = query_features(b_q, b_weight, b_low, S)
    b_den = zeros(S.C)
    if S.NORMALIZE:
        b_z = tl.load(p_z + i_s * S.BM + i_m) * old + tl.load(p_prefix_z + i_p * S.BM + i_m) * new
        b_den = tl.sum(b_query * b_z[None, :], 1)
    b_query = b_query.to(S.DOT)
    b_f = key_features(key_logits(b_k, b_weight, b_low, S), b_beta, S).to(S.DOT)
    b_p = tl.dot(b_query, tl.trans(b_f), input_precision=S.PRECISION)
    b_kv = load_tile(p_kv + i_e * S.BE, i_s, S)
    b_more = load_tile(p_prefix + i_e * S.BE, i_p, S)
    m_seen = (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]
    if S.SCALED:
        b_p *= exact_exp(tl.where(m_seen, b_beta[None, :] - b_reference[:, None], FLOOR))
    else:
        b_p = tl.where(m_seen, b_p, 0)
    if S.NORMALIZE:
        if S.SCALED:
            b_den *= exact_exp(c - b_reference)
        b_den += tl.sum(b_p, 1)
    b_p = b_p.to(S.DOT)
    b_kv = (b_kv.to(tl.float32) * old + b_more.to(tl.float32) * new).to(S.DOT)
    b_out = tl.dot(b_query, b_kv, input_precision=S.PRECISION)
    if S.SCALED:
        b_out *= exact_exp(c - b_reference)[:, None]
    b_out = tl.dot(b_p, b_v, b_out, input_precision=S.PRECISION)
    i_row = (i_b * T + i_0) * S.H + i_h
    if S.NORMALIZE:
        b_out *= inverse(b_den)[:, None]
        if i_e == 0:
            tl.store(p_den + i_row + i_t * S.H, b_den, mask=i_t < left)
    store_values(p_out + i_row * S.E + i_e * S.BE, S.H * S.E, left, b_out, S, i_e)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_chunk_backward_sums_kernel(
    p_q, p_weight, p_reference, p_peak, p_out, p_den, p_d_out, p_d_den, p_d_kv, p_d_z, p_suffix, p_suffix_z,
    T, segments, chunks, q, d, S: tl.constexpr
):  # fmt: skip
    """dS of one segment at the scale of its start, summed over the query heads of a group.

    p_suffix, p_suffix_z: (B, Hkv, chunks, ·) the part of dS that comes after each chunk, at the scale of its end.
    p_d_den: (B, T, H) gradients of den, computed here if TILES = 1, else given.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_kv, i_e, i_s, i_b = program_index(segments, S.HKV, S.TILES)
    i_0 = i_s * chunks * S.C
    count = tl.minimum(chunks, tl.cdiv(T - i_0, S.C))
    i_l = i_0 + (count - 1) * S.C
    i_x = i_b * S.HKV + i_kv
    i_row = i_b * T + i_l
    p_q = token_pointer(p_q, q, i_b, i_l, i_kv * GROUP)
    p_d_out = token_pointer(p_d_out, d, i_b, i_l, i_kv * GROUP, i_e * S.BE)
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
    i_c = i_x * tl.cdiv(T, S.C) + i_s * chunks + count - 1
    p_suffix += i_e * S.BE
    left = T - i_l
    for i in range(count):
        store_tile(p_suffix, i_c, b_d_kv, S)
        if S.NORMALIZE:
            if i_e == 0:
                tl.store(p_suffix_z + i_c * S.BM + i_m, b_d_z)
        b_row = tl.full((S.C,), 1.0, tl.float32)
        if S.SCALED:
            c_last = tl.maximum(tl.load(p_peak + tl.minimum(left, S.C) - 1), c_start)
            c_before = tl.maximum(tl.load(p_peak - 1, mask=i < count - 1, other=FLOOR), c_start)
            b_row = exact_exp(c_before - tl.maximum(load_column(p_peak, 1, left, S.C, 1e30), c_start))
            decay = exact_exp(c_before - c_last)
            b_d_kv *= decay
            b_d_z *= decay
        for g in range(GROUP):
            b_q = load_inputs(p_q + g * q.h, q.t, left, S)
            b_d = load_values(p_d_out + g * d.h, d.t, left, S, i_e)
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
        p_q -= S.C * q.t
        p_d_out -= S.C * d.t
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


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_chunk_backward_kernel(
    p_q, p_k, p_v, p_weight, p_lengths, p_kv, p_z, p_prefix, p_prefix_z, p_d_kv, p_d_z, p_suffix, p_suffix_z,
    p_reference, p_beta, p_peak, p_den, p_d_out, p_d_den, p_d_q, p_d_k, p_d_v,
    T, segments, chunks, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """dq (QUERIES), dk (KEYS) and dv (VALUES) of one chunk of one key head and its query heads.

    All in one launch read each input once; one per launch needs fewer registers and computes only what it needs.
    With TILES > 1 p_d_q, p_d_k: (TILES, B, T, ·, M) get a tile's part of the gradients of features.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    # Features are recomputed for derivatives, unless they cost more than the registers that would hold them.
    RECOMPUTE: tl.constexpr = S.MAP != "favor" and (S.MAP != "softmax" or S.BM > 64)
    i_kv, i_e, i_c, i_b = program_index(tl.cdiv(T, S.C), S.HKV, S.TILES)
    B = tl.num_programs(0) // (S.HKV * S.TILES) // tl.cdiv(T, S.C)
    i_0 = i_c * S.C
    i_x = i_b * S.HKV + i_kv
    left, rows = T - i_0, visible_length(p_lengths, i_b, T) - i_0
    p_q = token_pointer(p_q, q, i_b, i_0, i_kv * GROUP)
    p_k = token_pointer(p_k, k, i_b, i_0, i_kv)
    p_v = token_pointer(p_v, v, i_b, i_0, i_kv, i_e * S.BE)
    p_d_out = token_pointer(p_d_out, d, i_b, i_0, i_kv * GROUP, i_e * S.BE)
    i_row = i_b * T + i_0
    width: tl.constexpr = S.D if S.TILES == 1 else S.M
    i_part = (i_e * B + i_b) * T + i_0
    b_weight, b_low = load_weight(p_weight, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    i_s, i_p = i_x * segments + i_c // chunks, i_x * tl.cdiv(T, S.C) + i_c
    b_k = load_inputs(p_k, k.t, rows, S)
    b_v = load_values(p_v, v.t, rows, S, i_e).to(S.DOT)
    b_beta, b_reference, c, c_last, old, new, after = chunk_scales(
        p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S
    )
    b_z = zeros(S.BM)
    if S.NORMALIZE:
        if i_e == 0:
            b_z = tl.load(p_z + i_s * S.BM + i_m) * old + tl.load(p_prefix_z + i_p * S.BM + i_m) * new

    b_f = key_features(key_logits(b_k, b_weight, b_low, S), b_beta, S).to(S.DOT)
    b_d_f = zeros(S.C, S.BM)
    b_d_v = zeros(S.C, S.BE)
    m_seen = (i_t[None, :] <= i_t[:, None]) & (i_t < rows)[None, :]
    for g in range(GROUP):
        b_q = load_inputs(p_q + g * q.h, q.t, left, S)
        b_d = load_values(p_d_out + g * d.h, d.t, left, S, i_e).to(S.DOT)
        b_factor = tl.full((S.C,), 1.0, tl.float32)
        b_d_den = zeros(S.C)
        if S.NORMALIZE:
            i_g = i_row * S.H + i_kv * GROUP + g
            b_factor = inverse(load_column(p_den + i_g, S.H, left, S.C, 0.0))
            if i_e == 0:
                b_d_den = load_column(p_d_den + i_g, S.H, left, S.C, 0.0)
        b_query = query_features(b_q, b_weight, b_low, S).to(S.DOT)
        b_p = tl.dot(b_query, tl.trans(b_f), input_precision=S.PRECISION)
        b_d_p = tl.dot(b_d, tl.trans(b_v), input_precision=S.PRECISION)
        b_kv = load_tile(p_kv + i_e * S.BE, i_s, S)
        b_more = load_tile(p_prefix + i_e * S.BE, i_p, S)
        if S.NORMALIZE:
            b_p *= b_factor[:, None]
            b_d_p = b_d_p * b_factor[:, None] + b_d_den[:, None]
        if S.SCALED:
            b_pair = exact_exp(tl.where(m_seen, b_beta[None, :] - b_reference[:, None], FLOOR))
            b_p *= b_pair
            b_d_p *= b_pair
        else:
            b_p = tl.where(m_seen, b_p, 0)
            b_d_p = tl.where(m_seen, b_d_p, 0)
        b_p, b_d_p = b_p.to(S.DOT), b_d_p.to(S.DOT)
        b_kv = (b_kv.to(tl.float32) * old + b_more.to(tl.float32) * new).to(S.DOT)
        b_d_query = tl.dot(b_d, tl.trans(b_kv), input_precision=S.PRECISION)
        if S.NORMALIZE:
            b_d_query = b_d_query * b_factor[:, None] + b_d_den[:, None] * b_z[None, :]
        if S.SCALED:
            b_d_query *= exact_exp(c - b_reference)[:, None]
        b_d_query = tl.dot(b_d_p, b_f, b_d_query, input_precision=S.PRECISION)
        i_o = (i_part * S.H + i_kv * GROUP + g) * width
        if S.QUERIES and S.TILES == 1:
            b_features = b_query.to(tl.float32)
            if RECOMPUTE:
                b_q = reload_rows(p_q + g * q.h, q.t, left, S.D, S.C, S.BD)
                b_features = query_features(b_q, b_weight, b_low, S)
            b_d_query = query_gradient(b_d_query, b_q, b_features, b_weight, S)
            store_inputs(p_d_q + i_o, S.H * S.D, left, b_d_query, S)
        elif S.QUERIES:
            store_rows(p_d_q + i_o, S.H * S.M, left, b_d_query, S.M, S.C, S.BM)
        if S.VALUES:
            b_d_v = tl.dot(tl.trans(b_p), b_d, b_d_v, input_precision=S.PRECISION)
        if S.KEYS:
            b_d_f = tl.dot(tl.trans(b_d_p), b_query, b_d_f, input_precision=S.PRECISION)

    b_d_kv = load_tile(p_d_kv + i_e * S.BE, i_s, S)
    b_more = load_tile(p_suffix + i_e * S.BE, i_p, S)
    b_d_kv = (b_d_kv.to(tl.float32) * after + b_more.to(tl.float32)).to(S.DOT)
    b_end = (i_t < rows).to(tl.float32)
    if S.SCALED:
        b_end = exact_exp(b_beta - c_last)
    if S.VALUES:
        b_d_v = tl.dot((b_f * b_end[:, None]).to(S.DOT), b_d_kv, b_d_v, input_precision=S.PRECISION)
        store_values(p_d_v + (i_row * S.HKV + i_kv) * S.E + i_e * S.BE, S.HKV * S.E, left, b_d_v, S, i_e)
    b_d_f = tl.dot((b_v * b_end[:, None]).to(S.DOT), tl.trans(b_d_kv), b_d_f, input_precision=S.PRECISION)
    if S.NORMALIZE:
        if i_e == 0:
            b_d_z = tl.load(p_d_z + i_s * S.BM + i_m) * after + tl.load(p_suffix_z + i_p * S.BM + i_m)
            b_d_f += b_end[:, None] * b_d_z[None, :]
    i_o = (i_part * S.HKV + i_kv) * width
    if S.KEYS and S.TILES == 1:
        b_features = b_f.to(tl.float32)
        if RECOMPUTE:
            b_k = reload_rows(p_k, k.t, rows, S.D, S.C, S.BD)
            b_features = key_features(key_logits(b_k, b_weight, b_low, S), b_beta, S)
        b_d_f = key_gradient(b_d_f, b_k, b_features, b_weight, S)
        store_inputs(p_d_k + i_o, S.HKV * S.D, left, b_d_f, S)
    elif S.KEYS:
        store_rows(p_d_k + i_o, S.HKV * S.M, left, b_d_f, S.M, S.C, S.BM)


@triton.jit(do_not_specialize=["T"])
def linear_chunk_backward_features_kernel(p_part, p_x, p_weight, p_d_x, T, stride_part, x, S: tl.constexpr):
    """dq or dk from the tiles' parts of the gradient of its features."""
    i_h, _, i_c, i_b = program_index(tl.cdiv(T, S.C), S.H, 1)
    i_0 = i_c * S.C
    left = T - i_0
    i_row = (i_b * T + i_0) * S.H + i_h
    b_weight, b_low = load_weight(p_weight, S)
    b_x = load_inputs(token_pointer(p_x, x, i_b, i_0, i_h), x.t, left, S)
    b_g = zeros(S.C, S.BM)
    for i_e in range(S.TILES):
        p_tile = p_part + i_e * stride_part + i_row * S.M
        b_g += load_rows(p_tile, S.H * S.M, left, S.M, S.C, S.BM)
    if S.KEYS:
        b_f = key_logits(b_x, b_weight, b_low, S)
        b_f = key_features(b_f, tl.max(b_f, 1), S)
        b_g = key_gradient(b_g, b_x, b_f, b_weight, S)
    else:
        b_f = query_features(b_x, b_weight, b_low, S)
        b_g = query_gradient(b_g, b_x, b_f, b_weight, S)
    store_inputs(p_d_x + i_row * S.D, S.H * S.D, left, b_g, S)


def forward(x: LinearInputs, problem: LinearProblem, *, zeroed: bool = True) -> tuple[Tensor | None, ...]:
    """Return out, the sums and their shift after the last token or None, den, and None: nothing else is saved."""
    tensors = _dense(x)
    plan = _ChunkForward.of(tensors, problem)
    out, den, kv_out, shift_out = plan.results(x.q, x.v)
    work = plan.workspace.allocate(x.q)
    with on_device(x.q):
        sums, scales = plan.sum(tensors, _Sums(*plan.pointers(plan.workspace, work)), kv_out, shift_out)
        plan.read(*sums, *scales, out, den)
    return out, kv_out, shift_out, den, None


def backward(
    saved: LinearSaved, x: LinearInputs, problem: LinearProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and of the sums before, if there are any."""
    tensors, d_out, d_end, den = _dense(x), dense_rows(saved.d_out), dense(saved.d_kv), saved.den
    out = d_out if saved.out is None else saved.out.contiguous()  # Not read without a normalizer.
    plan = _ChunkBackward.of((*tensors, d_out, d_end, out, den), problem)
    q, k, weight = tensors[0], tensors[1], tensors[3]
    d_q, d_k, d_v = new_like(q), new_like(k), new_like(x.v)
    d_start = None if x.kv is None else new_like(x.kv)
    work = plan.workspace.allocate(q)
    pointers = plan.pointers(plan.workspace, work)
    d_z, suffix_z, d_den, suffix, after, d_query, d_f = pointers[len(_Sums._fields) :]
    own = _Sums(*pointers[: len(_Sums._fields)])
    if plan.features:
        d_den = safe_divide(-(d_out.to(den.dtype) * out).sum(-1), den) if problem.normalize else d_den
    else:
        d_query, d_f = d_q, d_k
    with on_device(q):
        sums, scales = plan.sum(tensors, own, None, None)
        d_total = own.total  # The totals are not needed any more.
        plan.d_sums(q, weight, own.references, own.peak, out, den, d_out, d_den, d_total, d_z, suffix, suffix_z)
        plan.d_scan(d_total, d_z, after, None, own.references, d_end, None, d_start, None)
        for launch in plan.chunks:
            launch(*sums, after, d_z, suffix, suffix_z, *scales, den, d_out, d_den, d_query, d_f, d_v)
        for launch, part, y, d_y in zip(plan.features, (d_query, d_f), (q, k), (d_q, d_k), strict=False):
            launch(part, y, weight, d_y)
    return d_q, d_k, d_v, d_start


def saved_size(x: LinearInputs, problem: LinearProblem) -> int:
    """Return 0: the backward pass sums segments again."""
    return 0


# Pointers to what `linear_chunk_forward_sums_kernel` and the scan write.
_Sums = namedtuple("_Sums", "total z prefix_z largest references beta peak prefix before")


class _ChunkPlan(CausalPlan):
    """A sequence has `num_chunks` chunks, in segments of `run` chunks each."""

    def __init__(self, device: int, key: Signature, problem: LinearProblem, *, backward: bool) -> None:
        weight, log_scale = key[3:5]
        super().__init__(device, key, problem, None if weight is None else weight[0][0])
        dtype = self.tensors["q"][2]
        bf16 = dtype == torch.bfloat16
        BD, BM, BE = (padded(size, 64 if bf16 else 16) for size in (self.D, self.M, self.E))
        self.tiling = tilings(BM, BE, bf16)[backward]
        # A tile of values is a power of two wide, their number need not be one: 160 values are three tiles of 64.
        tile = min(BE, self.tiling.sums.tile // BM)
        BE = -(-self.E // tile) * tile
        self.num_chunks = -(-self.T // self.tiling.chunk)
        self.run = -(-self.num_chunks // min(self.num_chunks, -(-self.tiling.programs // self.heads)))
        self.segments = -(-self.num_chunks // self.run)
        scaled = log_scale is not None or problem.feature_map in ("softmax", "favor")
        dot = tl.bfloat16 if bf16 else tl.float32
        sizes = self.H, self.Hkv, self.D, self.M, self.E, BD, BM, BE, self.tiling.chunk
        self.sizes = ChunkSizes(*sizes, problem.feature_map, scaled, problem.normalize, dot, PRECISION[dtype])
        self.stored = torch.bfloat16 if bf16 else torch.float32
        programs = self.segments * self.Hkv
        self.sums = self.chunk_launch(linear_chunk_forward_sums_kernel, self.tiling.sums, "kv", programs, H=0)
        self.scan = self.scan_segments(back=False)

    def buffers(self) -> list[tuple[int, torch.dtype]]:
        """The buffers of `_Sums`."""
        segments, tokens = self.heads * self.segments, self.heads * self.T if self.sizes.SCALED else 0
        z, prefix_z, prefix, before = self.stacks()
        scales = [(size, torch.float32) for size in (segments, segments + self.heads, tokens, tokens)]
        return [(before[0], torch.float32), z, prefix_z, *scales, prefix, before]

    def stacks(self) -> list[tuple[int, torch.dtype]]:
        """A vector for each segment and each chunk, then a matrix for each chunk and each segment."""
        segments, chunks, size = self.heads * self.segments, self.heads * self.num_chunks, self.sizes.BM * self.sizes.BE
        vectors = [(number * self.sizes.BM, torch.float32) for number in (segments, chunks)]
        return [*vectors, (chunks * size, self.stored), (segments * size, self.stored)]

    def tiles(self, tiling: ChunkTiling) -> int:
        return max(1, self.sizes.BE * self.sizes.BM // tiling.tile)

    def chunk_launch(self, kernel: Any, tiling: ChunkTiling, strided: str, programs: int, **other: Any) -> Launch:
        """One program per batch index, block of tokens and head (`programs`), and tile.

        strided: tensors whose strides the kernel takes. other: constants that differ from the plan's; 0 for those that
        the kernel does not use, so that it is not compiled again.
        """
        tiles = self.tiles(tiling)
        sizes = self.sizes._replace(TILES=tiles, BE=self.sizes.BE // tiles, **other)
        scalars = self.T, self.segments, self.run, *[Strides.of(self.tensors[name]) for name in strided]
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "maxnreg": tiling.registers}
        return self.launch(kernel, (self.B * programs * tiles,), scalars, {"S": sizes, **options})

    def scan_segments(self, *, back: bool) -> Launch:
        S = self.sizes
        BE = padded(S.BE, 16)
        sizes = ScanSizes(S.M, S.E, S.BM, S.BE, BE, min(S.BM, max(1, 512 // BE)), S.BE, 1, "e")
        sizes = sizes._replace(NORMALIZE=S.NORMALIZE, SCALED=S.SCALED, KNOWN=back, BACK=back)
        return self.scan_launch(self.heads, self.segments, sizes)

    def sum(self, tensors: tuple[Any, ...], own: _Sums, kv_out: Tensor | None, shift_out: Tensor | None) -> Any:
        """Launch the sums and the scan; return the first and the last pointers of the kernels of chunks."""
        q, k, v, weight, log_scale, lengths, kv, shift = tensors
        total, z, prefix_z, largest, references, beta, peak, prefix, before = own
        self.sums(k, v, weight, log_scale, lengths, total, z, largest, prefix, prefix_z, beta, peak)
        self.scan(total, z, before, largest, references, kv, shift, kv_out, shift_out)
        return [q, k, v, weight, lengths, before, z, prefix, prefix_z], [references, beta, peak]


class _ChunkForward(_ChunkPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem, backward=False)
        self.workspace = Workspace(*self.buffers())
        tiling, programs = self.tiling.chunks[0][1], self.num_chunks * self.H
        self.read = self.chunk_launch(linear_chunk_forward_kernel, tiling, "qkv", programs)


class _ChunkBackward(_ChunkPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem, backward=True)
        self.tensors["d"] = key[8]
        H, Hkv, tokens, tiling = self.H, self.Hkv, self.B * self.T, self.tiling
        self.d_sums = self.chunk_launch(linear_chunk_backward_sums_kernel, tiling.sums, "qd", self.segments * Hkv)
        self.d_scan = self.scan_segments(back=True)
        self.chunks = [
            self.chunk_launch(
                *(linear_chunk_backward_kernel, own, "qkvd", self.num_chunks * Hkv),
                QUERIES="q" in part,
                KEYS="k" in part,
                VALUES="v" in part,
            )
            for part, own in tiling.chunks
        ]
        tiles = self.tiles(tiling.chunks[0][1])
        # With tiles no program sees all values of a token: the tiles' gradients of features are added up at the end.
        self.features = (
            [self.features_launch("q", H, tiles), self.features_launch("k", Hkv, tiles)] if tiles > 1 else []
        )
        d_features = [(tiles * tokens * heads * self.M if tiles > 1 else 0, torch.float32) for heads in (H, Hkv)]
        d_den = tokens * H if problem.normalize and tiles == 1 else 0, torch.float32
        z, suffix_z, suffix, after = self.stacks()
        self.workspace = Workspace(*self.buffers(), z, suffix_z, d_den, suffix, after, *d_features)

    def features_launch(self, name: str, heads: int, tiles: int) -> Launch:
        chunk = 16
        sizes = self.sizes._replace(H=heads, HKV=0, E=0, BE=0, SCALED=False, TILES=tiles, C=chunk, KEYS=name == "k")
        scalars = self.T, self.B * self.T * heads * self.M, Strides.of(self.tensors[name])
        grid = (self.B * heads * -(-self.T // chunk),)
        return self.launch(linear_chunk_backward_features_kernel, grid, scalars, {"S": sizes})


def _dense(x: LinearInputs) -> tuple[Any, ...]:
    """The tensors as the kernels take them."""
    return dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), *[dense(other) for other in x[3:8]]
