"""Running sums of features, and queries divided by them, in chunks of tokens.

Keys of the map "softmax" have features exp(k − β) with β their largest element, and sums are stored divided by exp(c),
c the largest β so far: c_i after token i, C before a chunk. Then

    z_i = exp(C − c_i) Z + Σ_{j ≤ i} exp(β_j − c_i) f_j

within a chunk, and β = c = 0 for the other maps. The sum over pairs is a product of matrices; that of ones and bfloat16
features is exact, exponentials are split into two bfloat16 numbers.
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
from longspan.ops.common.launch import Plan, Signature, Strides, dense, dense_rows, new_like, on_device
from longspan.ops.common.running_sums import running_sums_kernel
from longspan.ops.common.tiles import (
    FLOOR,
    inverse,
    load_rows,
    padded,
    running_maximum,
    store_rows,
    token_pointer,
    visible_length,
    zeros,
)
from longspan.ops.linear.torch import FLOOR as NO_SCALE
from longspan.ops.normalizer import CHUNK, NormalizerInputs, NormalizerProblem, NormalizerSaved

BLOCK = tl.constexpr(16)  # chunks of a step of the scan

# Heads, features, tokens of a chunk, padded features, the map, and whether keys carry log scales β.
NormalizerSizes = namedtuple("NormalizerSizes", "H HKV M C BM MAP SCALED")


def forward(x: NormalizerInputs, problem: NormalizerProblem) -> tuple[Tensor, ...]:
    """Return φ(q) / z, φ(k), z after the last token, β, z and C before each chunk."""
    q, k, lengths = dense_rows(x.q), dense_rows(x.k), dense(x.lengths)
    plan = NormalizerPlan.of((q, k, lengths), problem)
    sums, scales = _first_slot(plan.shape, q, x.z, 0.0), None
    query, f, beta = new_like(q), new_like(k), q.new_empty(0, dtype=torch.float32)
    if plan.scaled:
        scales, beta = _first_slot(plan.shape[:3], q, x.shift, NO_SCALE), beta.new_empty(k.shape[:3])
    with on_device(q):
        plan.sums(k, lengths, sums, scales, beta)
        if scales is None:
            plan.add_up(sums)
            scales = beta.new_empty(0)
        else:
            peaks, scales = scales, scales.cummax(2).values
            plan.scan(sums, peaks, scales)
        plan.divide(q, k, lengths, sums, scales, query, f)
    return query, f, sums[:, :, -1].clone(), beta, sums, scales


def backward(saved: NormalizerSaved, x: NormalizerInputs, problem: NormalizerProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and z before the first token."""
    q, k, lengths = dense_rows(x.q), dense_rows(x.k), dense(x.lengths)
    d_query, d_f = (
        new_like(y).zero_() if d is None else dense_rows(d) for d, y in ((saved.d_query, q), (saved.d_f, k))
    )
    plan = NormalizerPlan.of((q, k, lengths, d_query, d_f), problem)
    d_sums = _first_slot(plan.shape, q, saved.d_z, 0.0)
    d_q, d_k = new_like(q), new_like(k)
    with on_device(q):
        plan.queries(q, k, lengths, saved.sums, saved.scales, d_query, d_q, d_sums)
        if plan.scaled:
            plan.scan(d_sums, saved.scales, saved.scales)
        else:
            plan.add_up(d_sums)
        plan.keys(q, k, lengths, saved.sums, saved.scales, d_query, d_f, d_sums, d_k)
    return d_q, d_k, d_sums[:, :, -1].clone()


def _first_slot(shape: tuple[int, ...], like: Tensor, first: Tensor | None, value: float) -> Tensor:
    """Return a buffer (B, Hkv, chunks + 1, …) with these numbers in the first slot."""
    buffer = like.new_empty(shape, dtype=torch.float32)
    if first is None:
        buffer[:, :, 0].fill_(value)
    else:
        buffer[:, :, 0] = first
    return buffer


class NormalizerPlan(Plan):
    """Launches of the forward pass, or of the backward pass where the signature has gradients."""

    def __init__(self, device: int, key: Signature, problem: NormalizerProblem) -> None:
        super().__init__(device)
        q, k, _, *gradients = key
        assert q is not None
        assert k is not None
        (B, T, H, M), Hkv = q[0], k[0][2]
        chunks = -(-T // CHUNK)
        self.shape, self.scaled = (B, Hkv, chunks + 1, M), problem.feature_map == "softmax"
        sizes = NormalizerSizes(H, Hkv, M, CHUNK, padded(M), problem.feature_map, self.scaled)
        grid, constants = (chunks, B * Hkv), {"S": sizes, "num_warps": 4 if M <= 64 else 8}
        strides: tuple[Any, ...] = tuple(Strides.of(x) for x in (q, k, *gradients) if x is not None)
        back = {"S": sizes, "BACK": bool(gradients), "num_warps": 4}
        if self.scaled:
            self.scan = self.launch(normalizer_scan_kernel, (B * Hkv,), (chunks,), back)
        else:
            columns = {"M": M, "BM": padded(M), "BLOCK": 16, "num_warps": 4}
            self.add_up = self.launch(running_sums_kernel, (B * Hkv,), (chunks + 1,), columns)
        if gradients:
            self.queries = self.launch(normalizer_backward_queries_kernel, grid, (T, strides[:3]), constants)
            self.keys = self.launch(normalizer_backward_keys_kernel, grid, (T, strides), constants)
        else:
            self.sums = self.launch(normalizer_sums_kernel, grid, (T, strides[1]), constants)
            self.divide = self.launch(normalizer_forward_kernel, grid, (T, strides), constants)


@triton.jit
def _program(T, S: tl.constexpr):
    """Batch index, key/value head, first token and number of tokens of a program's chunk, and the slot of its sums."""
    i_b, i_h = (tl.program_id(1) // S.HKV).to(tl.int64), tl.program_id(1) % S.HKV
    i_0 = tl.program_id(0) * S.C
    slot = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) + 1) + tl.program_id(0)
    return i_b, i_h, i_0, T - i_0, slot


@triton.jit
def _key_features(b_k, rows, S: tl.constexpr):
    """f in bfloat16, 0 from the row `rows` on and beyond M features, and β (C,), FLOOR from the row `rows` on."""
    m_m, m_t = (tl.arange(0, S.BM) < S.M)[None, :], tl.arange(0, S.C) < rows
    b_f = pointwise_features(b_k.to(tl.float32), S)
    b_beta = zeros(S.C)
    if S.SCALED:
        b_beta = tl.max(tl.where(m_m, b_f, FLOOR), 1)
        b_f = exact_exp(tl.minimum(b_f - b_beta[:, None], 0.0))
        b_beta = tl.where(m_t, b_beta, FLOOR)
    return tl.where(m_t[:, None] & m_m, b_f, 0.0).to(b_k.dtype), b_beta


@triton.jit
def _query_features(b_q, S: tl.constexpr):
    """φ(q) (C, BM) in float32."""
    b_f = pointwise_features(b_q.to(tl.float32), S)
    if S.SCALED:
        b_f = tl.where((tl.arange(0, S.BM) < S.M)[None, :], b_f, FLOOR)
        b_f = exact_exp(b_f - tl.max(b_f, 1)[:, None])
        b_f = b_f / tl.sum(b_f, 1)[:, None]
    return b_f


@triton.jit
def _pairs(b_beta, b_c, S: tl.constexpr):
    """exp(β_j − c_i) for j ≤ i, else 0: (C, C) in float32, queries first."""
    i_t = tl.arange(0, S.C)
    m_seen = i_t[None, :] <= i_t[:, None]
    if S.SCALED:
        b_p = exact_exp(tl.where(m_seen, b_beta[None, :] - b_c[:, None], FLOOR))
    else:
        b_p = tl.where(m_seen, 1.0, 0.0)
    return b_p


@triton.jit
def _product(b_x, b_y, EXACT: tl.constexpr, dtype: tl.constexpr):
    """x·y of float32 numbers; x as two bfloat16 numbers unless bfloat16 represents it, y likewise if EXACT is False."""
    b_high = b_x.to(dtype)
    b_low = (b_x - b_high.to(tl.float32)).to(dtype)
    b_y_high = b_y.to(dtype)
    b_xy = tl.dot(b_low, b_y_high)
    if not EXACT:
        b_xy = tl.dot(b_high, (b_y - b_y_high.to(tl.float32)).to(dtype), b_xy)
    return tl.dot(b_high, b_y_high, b_xy)


@triton.jit
def _load_sums(p_sums, slot, S: tl.constexpr):
    i_m = tl.arange(0, S.BM)
    return tl.load(p_sums + slot * S.M + i_m, mask=i_m < S.M, other=0.0)


@triton.jit
def _store_sums(p_sums, slot, b_x, S: tl.constexpr):
    i_m = tl.arange(0, S.BM)
    tl.store(p_sums + slot * S.M + i_m, b_x, mask=i_m < S.M)


@triton.jit
def _scales(p_scales, slot, b_beta, S: tl.constexpr):
    """c of every token of a chunk (C,), and C before it."""
    b_c, c = b_beta, 0.0
    if S.SCALED:
        c = tl.load(p_scales + slot)
        b_c = running_maximum(b_beta, c)
    return b_c, c


@triton.jit
def _inverse_sums(p_sums, slot, b_f, b_pairs, b_c, c, S: tl.constexpr):
    """1 / z of every token of a chunk (C, BM), 0 where z is."""
    b_before = _load_sums(p_sums, slot, S)[None, :]
    if S.SCALED:
        b_z = _product(b_pairs, b_f.to(tl.float32), True, b_f.dtype) + exact_exp(c - b_c)[:, None] * b_before
    else:
        b_z = tl.dot(b_pairs.to(b_f.dtype), b_f) + b_before
    return inverse(b_z)


@triton.jit(do_not_specialize=["T"])
def normalizer_sums_kernel(p_k, p_lengths, p_sums, p_peaks, p_beta, T, k, S: tl.constexpr):
    """Sum the features of a chunk, at the scale of its largest β, into the slot of the next. p_beta: (B, T, Hkv)."""
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_f, b_beta = _key_features(b_k, rows, S)
    b_f = b_f.to(tl.float32)
    if S.SCALED:
        i_t = tl.arange(0, S.C)
        peak = tl.max(b_beta)
        b_f *= exact_exp(b_beta - peak)[:, None]
        tl.store(p_peaks + slot + 1, peak)
        tl.store(p_beta + (i_b * T + i_0 + i_t) * S.HKV + i_h, b_beta, mask=i_t < left)
    _store_sums(p_sums, slot + 1, tl.sum(b_f, 0), S)


@triton.jit
def _compose(a_1, b_1, a_2, b_2):
    """The maps x → a₁x + b₁ and then x → a₂x + b₂."""
    return a_1 * a_2, b_1 * a_2 + b_2


@triton.jit(do_not_specialize=["chunks"])
def normalizer_scan_kernel(p_sums, p_peaks, p_scales, chunks, S: tl.constexpr, BACK: tl.constexpr):
    """Sums before each chunk from those of the chunks, in place, for one head.

    Slot n + 1 holds the sum of chunk n at the scale p_peaks of that slot, and gets the sum of chunks up to n at
    p_scales. BACK: slot n + 1 holds that of the n-th chunk from the end at C before it, and gets the sum of chunks from
    the end to it at that scale.
    """
    i_n, i_m = tl.arange(0, BLOCK), tl.arange(0, S.BM)
    first = tl.program_id(0).to(tl.int64) * (chunks + 1)
    b_last = _load_sums(p_sums, first, S)
    for n in range(0, chunks, BLOCK):
        i_slot = n + 1 + i_n
        m_n = i_slot <= chunks
        p_tile = p_sums + (first + i_slot)[:, None] * S.M + i_m[None, :]
        m_x = m_n[:, None] & (i_m < S.M)[None, :]
        b_x = tl.load(p_tile, mask=m_x, other=0.0)
        if BACK:
            # Chunk chunks − slot: C before it, and before the chunk after it.
            b_c = tl.load(p_scales + first + chunks - i_slot, mask=m_n, other=0.0)
            b_decay = exact_exp(b_c - tl.load(p_scales + first + chunks - i_slot + 1, mask=m_n, other=0.0))
        else:
            b_c = tl.load(p_scales + first + i_slot, mask=m_n, other=0.0)
            b_decay = exact_exp(tl.load(p_scales + first + i_slot - 1, mask=m_n, other=0.0) - b_c)
            b_x *= exact_exp(tl.load(p_peaks + first + i_slot, mask=m_n, other=0.0) - b_c)[:, None]
        b_decay = tl.broadcast_to(b_decay[:, None], b_x.shape)
        b_decay, b_x = tl.associative_scan((b_decay, b_x), 0, _compose)
        b_x += b_decay * b_last[None, :]
        tl.store(p_tile, b_x, mask=m_x)
        b_last = tl.sum(tl.where((i_n == BLOCK - 1)[:, None], b_x, 0.0), 0)


@triton.jit(do_not_specialize=["T"])
def normalizer_forward_kernel(p_q, p_k, p_lengths, p_sums, p_scales, p_query, p_f, T, strides, S: tl.constexpr):
    """φ(k) of a chunk of one key/value head, and φ(q) / z of the query heads that share it."""
    q, k = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_f, b_beta = _key_features(b_k, rows, S)
    store_rows(p_f + ((i_b * T + i_0) * S.HKV + i_h) * S.M, S.HKV * S.M, left, b_f, S.M, S.C, S.BM)
    b_c, c = _scales(p_scales, slot, b_beta, S)
    b_inverse = _inverse_sums(p_sums, slot, b_f, _pairs(b_beta, b_c, S), b_c, c, S)
    for g in range(GROUP):
        b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_h * GROUP + g), q.t, left, S.M, S.C, S.BM)
        b_query = _query_features(b_q, S) * b_inverse
        i_o = ((i_b * T + i_0) * S.H + i_h * GROUP + g) * S.M
        store_rows(p_query + i_o, S.H * S.M, left, b_query, S.M, S.C, S.BM)


@triton.jit
def _query_gradient(p_q, p_d, q, d, i_b, i_0, i_q, left, b_inverse, S: tl.constexpr):
    """dq and dz of a chunk of one query head."""
    b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_q), q.t, left, S.M, S.C, S.BM)
    b_d = load_rows(token_pointer(p_d, d, i_b, i_0, i_q), d.t, left, S.M, S.C, S.BM).to(tl.float32) * b_inverse
    b_query = _query_features(b_q, S)
    b_d_q = pointwise_gradient(b_d, b_q, b_query, S)
    if S.SCALED:
        b_d_q = b_query * (b_d - tl.sum(b_d * b_query, 1)[:, None])
    return b_d_q, -b_d * (b_query * b_inverse)


@triton.jit(do_not_specialize=["T"])
def normalizer_backward_queries_kernel(
    p_q, p_k, p_lengths, p_sums, p_scales, p_d_query, p_d_q, p_d_sums, T, strides, S: tl.constexpr
):
    """dq of a chunk, and Σ exp(C − c) dz. p_d_sums: slots from the last chunk on, a chunk's sum in the next slot."""
    q, k, d = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_f, b_beta = _key_features(b_k, rows, S)
    b_c, c = _scales(p_scales, slot, b_beta, S)
    b_inverse = _inverse_sums(p_sums, slot, b_f, _pairs(b_beta, b_c, S), b_c, c, S)
    b_sum = zeros(S.BM)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        b_d_q, b_d_z = _query_gradient(p_q, p_d_query, q, d, i_b, i_0, i_q, left, b_inverse, S)
        store_rows(p_d_q + ((i_b * T + i_0) * S.H + i_q) * S.M, S.H * S.M, left, b_d_q, S.M, S.C, S.BM)
        if S.SCALED:
            b_d_z *= exact_exp(c - b_c)[:, None]
        b_sum += tl.sum(b_d_z, 0)
    last = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) + 1) + tl.num_programs(0)
    _store_sums(p_d_sums, last - tl.program_id(0), b_sum, S)


@triton.jit(do_not_specialize=["T"])
def normalizer_backward_keys_kernel(
    p_q, p_k, p_lengths, p_sums, p_scales, p_d_query, p_d_f, p_d_sums, p_d_k, T, strides, S: tl.constexpr
):
    """dk of a chunk from the gradient of its features and Σ exp(β − c) dz over the queries from each key on."""
    q, k, d, d_f = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_f, b_beta = _key_features(b_k, rows, S)
    b_c, c = _scales(p_scales, slot, b_beta, S)
    b_pairs = _pairs(b_beta, b_c, S)
    b_inverse = _inverse_sums(p_sums, slot, b_f, b_pairs, b_c, c, S)
    b_d_z = zeros(S.C, S.BM)
    for g in range(GROUP):
        b_d_z += _query_gradient(p_q, p_d_query, q, d, i_b, i_0, i_h * GROUP + g, left, b_inverse, S)[1]
    after = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) + 1) + tl.num_programs(0) - 1 - tl.program_id(0)
    b_g = load_rows(token_pointer(p_d_f, d_f, i_b, i_0, i_h), d_f.t, left, S.M, S.C, S.BM).to(tl.float32)
    b_after = _load_sums(p_d_sums, after, S)[None, :]
    b_pairs = tl.trans(b_pairs)
    if S.SCALED:
        b_g += _product(b_pairs, b_d_z, False, b_f.dtype)
        b_g += exact_exp(b_beta - tl.load(p_scales + slot + 1))[:, None] * b_after
        b_g = b_g * b_f.to(tl.float32)
    else:
        b_high = b_d_z.to(b_f.dtype)
        b_low = (b_d_z - b_high.to(tl.float32)).to(b_f.dtype)
        b_pairs = b_pairs.to(b_f.dtype)
        b_g += tl.dot(b_pairs, b_high, tl.dot(b_pairs, b_low)) + b_after
        b_g = pointwise_gradient(b_g, b_k, pointwise_features(b_k.to(tl.float32), S), S)
    b_g = tl.where((tl.arange(0, S.C) < rows)[:, None], b_g, 0.0)
    store_rows(p_d_k + ((i_b * T + i_0) * S.HKV + i_h) * S.M, S.HKV * S.M, left, b_g, S.M, S.C, S.BM)
