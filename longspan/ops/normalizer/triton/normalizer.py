"""Running sums of features, and queries divided by them, in chunks of tokens.

Within a chunk running sums are a product with a triangle of ones, which is exact: features are bfloat16 already.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import inverse, load_rows, padded, store_rows, token_pointer, visible_length, zeros
from longspan.ops.normalizer import CHUNK, NormalizerInputs, NormalizerProblem, NormalizerSaved

# Heads, features, tokens of a chunk, padded features, the map.
NormalizerSizes = namedtuple("NormalizerSizes", "H HKV M C BM MAP")


def forward(x: NormalizerInputs, problem: NormalizerProblem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return φ(q) / z, φ(k), z after the last token, and z before each chunk."""
    q, k = dense_rows(x.q), dense_rows(x.k)
    plan = NormalizerPlan.of((q, k, x.lengths), problem)
    sums = _sums(plan, q, x.z)
    query, f = new_like(q), new_like(k)
    with on_device(q):
        plan.sums(k, x.lengths, sums)
        torch.cumsum(sums, 2, out=sums)
        plan.divide(q, k, x.lengths, sums, query, f)
    return query, f, sums[:, :, -1].clone(), sums


def backward(saved: NormalizerSaved, x: NormalizerInputs, problem: NormalizerProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and z before the first token."""
    q, k = dense_rows(x.q), dense_rows(x.k)
    d_query, d_f = (
        new_like(y).zero_() if d is None else dense_rows(d) for d, y in ((saved.d_query, q), (saved.d_f, k))
    )
    plan = NormalizerPlan.of((q, k, x.lengths, d_query, d_f), problem)
    d_sums = _sums(plan, q, saved.d_z)
    d_q, d_k = new_like(q), new_like(k)
    with on_device(q):
        plan.queries(q, k, x.lengths, saved.sums, d_query, d_q, d_sums)
        torch.cumsum(d_sums, 2, out=d_sums)
        plan.keys(q, k, x.lengths, saved.sums, d_query, d_f, d_sums, d_k)
    return d_q, d_k, d_sums[:, :, -1].clone()


def _sums(plan: NormalizerPlan, like: Tensor, first: Tensor | None) -> Tensor:
    """Return a buffer (B, Hkv, chunks + 1, M) with these sums in the first slot."""
    sums = like.new_empty(plan.shape, dtype=torch.float32)
    if first is None:
        sums[:, :, 0].zero_()
    else:
        sums[:, :, 0] = first
    return sums


class NormalizerPlan(Plan):
    """Launches of the forward pass, or of the backward pass where the signature has gradients."""

    def __init__(self, device: int, key: Signature, problem: NormalizerProblem) -> None:
        super().__init__(device)
        q, k, _, *gradients = key
        assert q is not None
        assert k is not None
        (B, T, H, M), Hkv = q[0], k[0][2]
        chunks = -(-T // CHUNK)
        self.shape = B, Hkv, chunks + 1, M
        sizes = NormalizerSizes(H, Hkv, M, CHUNK, padded(M), problem.feature_map)
        grid, constants = (chunks, B * Hkv), {"S": sizes, "num_warps": 4 if M <= 64 else 8}
        strides = tuple(Strides.of(x) for x in (q, k, *gradients) if x is not None)
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
    """φ(k) in bfloat16, 0 from the row `rows` on and beyond M features."""
    b_f = pointwise_features(b_k.to(tl.float32), S)
    m_f = (tl.arange(0, S.C) < rows)[:, None] & (tl.arange(0, S.BM) < S.M)[None, :]
    return tl.where(m_f, b_f, 0.0).to(b_k.dtype)


@triton.jit
def _load_sums(p_sums, slot, S: tl.constexpr):
    i_m = tl.arange(0, S.BM)
    return tl.load(p_sums + slot * S.M + i_m, mask=i_m < S.M, other=0.0)


@triton.jit
def _store_sums(p_sums, slot, b_x, S: tl.constexpr):
    i_m = tl.arange(0, S.BM)
    tl.store(p_sums + slot * S.M + i_m, b_x, mask=i_m < S.M)


@triton.jit
def _inverse_sums(p_sums, slot, b_f, S: tl.constexpr):
    """1 / z of every token of a chunk (C, BM), 0 where z is."""
    i_t = tl.arange(0, S.C)
    b_ones = tl.where(i_t[None, :] <= i_t[:, None], 1.0, 0.0).to(b_f.dtype)
    return inverse(tl.dot(b_ones, b_f) + _load_sums(p_sums, slot, S)[None, :])


@triton.jit(do_not_specialize=["T"])
def normalizer_sums_kernel(p_k, p_lengths, p_sums, T, k, S: tl.constexpr):
    """Sum the features of a chunk into the slot of the next one."""
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    _store_sums(p_sums, slot + 1, tl.sum(_key_features(b_k, rows, S).to(tl.float32), 0), S)


@triton.jit(do_not_specialize=["T"])
def normalizer_forward_kernel(p_q, p_k, p_lengths, p_sums, p_query, p_f, T, strides, S: tl.constexpr):
    """φ(k) of a chunk of one key/value head, and φ(q) / z of the query heads that share it."""
    q, k = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_f = _key_features(b_k, rows, S)
    store_rows(p_f + ((i_b * T + i_0) * S.HKV + i_h) * S.M, S.HKV * S.M, left, b_f, S.M, S.C, S.BM)
    b_inverse = _inverse_sums(p_sums, slot, b_f, S)
    for g in range(GROUP):
        b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_h * GROUP + g), q.t, left, S.M, S.C, S.BM)
        b_query = pointwise_features(b_q.to(tl.float32), S) * b_inverse
        i_o = ((i_b * T + i_0) * S.H + i_h * GROUP + g) * S.M
        store_rows(p_query + i_o, S.H * S.M, left, b_query, S.M, S.C, S.BM)


@triton.jit
def _query_gradient(p_q, p_d, q, d, i_b, i_0, i_q, left, b_inverse, S: tl.constexpr):
    """dq and dz of a chunk of one query head."""
    b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_q), q.t, left, S.M, S.C, S.BM)
    b_d = load_rows(token_pointer(p_d, d, i_b, i_0, i_q), d.t, left, S.M, S.C, S.BM).to(tl.float32) * b_inverse
    b_query = pointwise_features(b_q.to(tl.float32), S)
    return pointwise_gradient(b_d, b_q, b_query, S), -b_d * (b_query * b_inverse)


@triton.jit(do_not_specialize=["T"])
def normalizer_backward_queries_kernel(
    p_q, p_k, p_lengths, p_sums, p_d_query, p_d_q, p_d_sums, T, strides, S: tl.constexpr
):
    """dq of a chunk, and Σ dz. p_d_sums: slots from the last chunk to the first, a chunk's sum in the slot after it."""
    q, k, d = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_inverse = _inverse_sums(p_sums, slot, _key_features(b_k, rows, S), S)
    b_sum = zeros(S.BM)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        b_d_q, b_d_z = _query_gradient(p_q, p_d_query, q, d, i_b, i_0, i_q, left, b_inverse, S)
        store_rows(p_d_q + ((i_b * T + i_0) * S.H + i_q) * S.M, S.H * S.M, left, b_d_q, S.M, S.C, S.BM)
        b_sum += tl.sum(b_d_z, 0)
    last = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) + 1) + tl.num_programs(0)
    _store_sums(p_d_sums, last - tl.program_id(0), b_sum, S)


@triton.jit(do_not_specialize=["T"])
def normalizer_backward_keys_kernel(
    p_q, p_k, p_lengths, p_sums, p_d_query, p_d_f, p_d_sums, p_d_k, T, strides, S: tl.constexpr
):
    """dk of a chunk from the gradient of its features and Σ dz over the queries from each key on."""
    q, k, d, d_f = strides
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, left, slot = _program(T, S)
    rows = visible_length(p_lengths, i_b, T) - i_0
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_h), k.t, left, S.M, S.C, S.BM)
    b_inverse = _inverse_sums(p_sums, slot, _key_features(b_k, rows, S), S)
    b_d_z = zeros(S.C, S.BM)
    for g in range(GROUP):
        b_d_z += _query_gradient(p_q, p_d_query, q, d, i_b, i_0, i_h * GROUP + g, left, b_inverse, S)[1]
    after = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) + 1) + tl.num_programs(0) - 1 - tl.program_id(0)
    b_g = load_rows(token_pointer(p_d_f, d_f, i_b, i_0, i_h), d_f.t, left, S.M, S.C, S.BM).to(tl.float32)
    b_g += tl.cumsum(b_d_z, 0, reverse=True) + _load_sums(p_d_sums, after, S)[None, :]
    b_g = pointwise_gradient(b_g, b_k, pointwise_features(b_k.to(tl.float32), S), S)
    b_g = tl.where((tl.arange(0, S.C) < rows)[:, None], b_g, 0.0)
    store_rows(p_d_k + ((i_b * T + i_0) * S.HKV + i_h) * S.M, S.HKV * S.M, left, b_g, S.M, S.C, S.BM)
