"""Causal linear attention with given features, in chunks: sums before every chunk in memory, all chunks in parallel.

Kernels go through the features in tiles of BS, so that a program holds only results and pairs inside a chunk.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, Strides, dense, dense_rows, new_like, on_device
from longspan.ops.common.running_sums import running_sums_kernel
from longspan.ops.common.tiles import inverse, load_rows, padded, store_rows, token_pointer, zeros
from longspan.ops.features import BLIND, CHUNK, FeatureInputs, FeatureProblem, FeatureSaved

_BLIND = tl.constexpr(BLIND)
# Programs that compute sums, at least; sequences are divided into segments to have as many.
PROGRAMS = 512
# Pipeline stages and warps of each kernel.
TILING = {
    "sums": {"STAGES": 3, "num_warps": 4},
    "read": {"STAGES": 2, "num_warps": 4},
    "queries": {"STAGES": 2, "num_warps": 4},
    "values": {"STAGES": 2, "num_warps": 4},
    "keys": {"STAGES": 2, "num_warps": 4},
}

# Heads, features, values, tokens of a chunk, padded sizes, features of a tile.
FeatureSizes = namedtuple("FeatureSizes", "H HKV M E C BM BE BS")


def forward(x: FeatureInputs, problem: FeatureProblem) -> tuple[Tensor, ...]:
    """Return out, lse, the sums after the last key, and those before each chunk."""
    x, W = _dense(x), problem.delay
    plan = _FeatureForward.of(x, problem)
    (B, T, H, _), E = x.query.shape, x.v.shape[3]
    out, lse = x.v.new_empty(B, T, H, E), x.query.new_empty(B, H, T, dtype=torch.float32)
    out[:, :W].zero_()
    lse[:, :, :W].fill_(BLIND)
    states, z = plan.new_states(x.v, x.z)
    with on_device(x.query):
        end = plan.sums((x.f, x.v), x.kv, states)
        plan.normalizer(x.f, None, z)
        plan.add_up(z)
        plan.read(x.query[:, W:], x.f, x.v, states, z, out[:, W:], lse[:, :, W:])
    return out, lse, end, z[:, :, -1, : plan.S.M].clone(), states, z


def backward(saved: FeatureSaved, x: FeatureInputs, problem: FeatureProblem) -> tuple[Tensor, ...]:
    """Return the gradients of the features, the values and the sums before the first token."""
    x, W, d_out = _dense(x), problem.delay, dense_rows(saved.d_out)
    d_lse, d_kv = dense(saved.d_lse), dense(saved.d_kv)
    plan = _FeatureBackward.of((*x[:3], d_out, d_lse, d_kv), problem)
    T = x.query.shape[1]
    d_query, d_f, d_v = new_like(x.query), new_like(x.f), new_like(x.v)
    d_query[:, :W].zero_()
    d_f[:, T - W :].zero_()
    d_v[:, T - W :].zero_()
    query, d_num, d_den = x.query[:, W:], new_like(d_out)[:, W:], torch.empty_like(saved.lse)[:, :, W:]
    states, z = plan.new_states(x.v, saved.d_z)
    given = saved.out[:, W:], saved.lse[:, :, W:], d_out[:, W:], None if d_lse is None else d_lse[:, :, W:]
    with on_device(x.query):
        plan.queries(x.f, x.v, saved.states, saved.states_z, *given, d_query[:, W:], d_num, d_den)
        d_start = plan.sums((query, d_num), d_kv, states)
        plan.normalizer(query, d_den, z)
        plan.add_up(z)
        plan.values(query, x.f, d_num, states, d_v)
        plan.keys(query, x.v, d_num, d_den, states, z, d_f)
    return d_query, d_f, d_v, d_start, z[:, :, -1, : plan.S.M].clone()


def _dense(x: FeatureInputs) -> FeatureInputs:
    return FeatureInputs(dense_rows(x.query), dense_rows(x.f), dense_rows(x.v), dense(x.kv), dense(x.z))


class _FeaturePlan(Plan):
    """Sizes, and the launches that sum features over tokens. Row n of the queries sees the first n + 1 keys."""

    def __init__(self, device: int, key: Signature, problem: FeatureProblem, *, back: bool) -> None:
        super().__init__(device)
        query, _, v = key[:3]
        assert query is not None
        assert v is not None
        (B, self.T, H, M), (Hkv, E) = query[0], v[0][2:]
        self.S = FeatureSizes(H, Hkv, M, E, CHUNK, padded(M), padded(E), 64)
        self.B, self.tokens, self.back = B, self.T - problem.delay, back
        self.chunks = -(-self.tokens // CHUNK)
        self.strides = tuple(Strides.of(x) for x in key[:3] if x is not None)
        tiles = self.S.BM * self.S.BE // 64**2
        self.segments = min(-(-PROGRAMS // (tiles * B * Hkv)), -(-self.chunks // 8))
        self.run = -(-self.chunks // self.segments)
        self.segments = -(-self.chunks // self.run)

    def new_states(self, v: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return buffers for the sums of φ(k)vᵀ and of φ(k) before each chunk, the latter with its first slot."""
        S = self.S
        states = v.new_empty(self.B, S.HKV, self.chunks, S.BM, S.BE)
        z = v.new_empty(self.B, S.HKV, self.chunks + 1, S.BM, dtype=torch.float32)
        z[:, :, 0].zero_()
        if first is not None:
            z[:, :, 0, : S.M] = first
        return states, z

    def sum_launches(self, x: Strides, y: Strides) -> None:
        S = self.S
        group = S.H // S.HKV if self.back else 1
        constants = {"S": S, "GROUP": group, "BACK": self.back}
        grid = S.BM // S.BS * (S.BE // 64) * self.segments, self.B * S.HKV
        scalars = self.tokens, self.chunks, self.run, self.segments, x, y
        self.scan = self.launch(features_sums_kernel, grid, scalars, constants | TILING["sums"] | {"TOTALS": False})
        self.totals = self.launch(features_sums_kernel, grid, scalars, constants | TILING["sums"] | {"TOTALS": True})
        grid = self.chunks, self.B * S.HKV
        scalars = self.tokens, self.T, x
        self.normalizer = self.launch(features_normalizer_kernel, grid, scalars, constants | {"num_warps": 4})
        sizes = {"M": S.BM, "BM": S.BM, "BLOCK": 16, "num_warps": 4}
        self.add_up = self.launch(running_sums_kernel, (self.B * S.HKV,), (self.chunks + 1,), sizes)

    def sums(self, inputs: tuple[Tensor, Tensor], start: Tensor | None, states: Tensor) -> Tensor:
        """Write the sums before each chunk, after each if backward, to `states`; return those over all tokens."""
        S = self.S
        if self.segments == 1:
            end = states.new_empty(self.B, S.HKV, S.M, S.E, dtype=torch.float32)
            self.scan(*inputs, start, states, end)
            return end
        held = states.new_empty(self.B, S.HKV, self.segments + 1, S.M, S.E, dtype=torch.float32)
        if start is None:
            held[:, :, 0].zero_()
        else:
            held[:, :, 0] = start
        self.totals(*inputs, None, states, held)
        torch.cumsum(held, 2, out=held)
        self.scan(*inputs, held, states, held)
        return held[:, :, -1].contiguous()


class _FeatureForward(_FeaturePlan):
    def __init__(self, device: int, key: Signature, problem: FeatureProblem) -> None:
        super().__init__(device, key, problem, back=False)
        self.sum_launches(*self.strides[1:])
        grid, scalars = (self.chunks, self.B * self.S.H), (self.tokens, self.T, self.strides)
        self.read = self.launch(features_forward_kernel, grid, scalars, {"S": self.S, **TILING["read"]})


class _FeatureBackward(_FeaturePlan):
    def __init__(self, device: int, key: Signature, problem: FeatureProblem) -> None:
        super().__init__(device, key, problem, back=True)
        (query, f, v), d_out = self.strides, Strides.of(key[3])
        S = self.S
        width = S.H * S.E
        d_num = Strides(self.T * width, width, S.E)
        self.sum_launches(query, d_num)
        heads, kv_heads = (self.chunks, self.B * S.H), (self.chunks, self.B * S.HKV)
        sizes = self.tokens, self.T

        def tiling(name: str) -> dict[str, Any]:
            return {"S": S, **TILING[name]}

        self.queries = self.launch(features_backward_queries_kernel, heads, (*sizes, f, v, d_out), tiling("queries"))
        scalars = *sizes, query, f, d_num
        self.values = self.launch(features_backward_values_kernel, kv_heads, scalars, tiling("values"))
        self.keys = self.launch(features_backward_keys_kernel, kv_heads, (*sizes, query, v, d_num), tiling("keys"))


@triton.jit
def _row(p_x, stride, rows, m, S: tl.constexpr):
    """Features m to m + BS of the first `rows` tokens at p_x, (C, BS)."""
    i_t, i_m = tl.arange(0, S.C), m + tl.arange(0, S.BS)
    m_x = (i_t < rows)[:, None]
    if S.M != S.BM:
        m_x = m_x & (i_m < S.M)[None, :]
    return tl.load(p_x + i_t[:, None] * stride + i_m[None, :], mask=m_x, other=0.0)


@triton.jit
def _row_again(p_x, stride, rows, m, S: tl.constexpr):
    """`_row` as a load of its own, for sums in registers.

    If a pipelined tile were read by a product and by a sum, Triton 3.6 would give it one buffer instead of two, and
    overwrite it for the next iteration while the product still reads it.
    """
    i_t, i_m = tl.arange(0, S.C), m + tl.arange(0, S.BS)
    m_x = (i_t < rows)[:, None] & (i_m < S.M)[None, :]
    p_x += i_t[:, None] * stride + i_m[None, :]
    return tl.load(p_x, mask=m_x, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _state(p_x, m, S: tl.constexpr):
    """Rows m to m + BS of a state, (BS, BE)."""
    return tl.load(p_x + (m + tl.arange(0, S.BS))[:, None] * S.BE + tl.arange(0, S.BE)[None, :])


@triton.jit
def _inverse_den(b_lse):
    """1 / den, 0 where no key is seen."""
    return tl.where(b_lse == _BLIND, 0.0, tl.exp(-tl.where(b_lse == _BLIND, 0.0, b_lse)))


@triton.jit(do_not_specialize=["T", "chunks", "run", "segments"])
def features_sums_kernel(
    p_x, p_y, p_start, p_states, p_end, T, chunks, run, segments, x, y,
    S: tl.constexpr, GROUP: tl.constexpr, BACK: tl.constexpr, TOTALS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ x yᵀ before each chunk of T tokens; BACK: Σ φ(q) dnumᵀ after each.

    A program sums a tile of BS × 64 over one segment and key/value head. p_states: (B, Hkv, chunks, BM, BE). p_start,
    p_end: (B, Hkv, M, E), or with more than one segment (B, Hkv, segments + 1, M, E), the sums before each segment.
    TOTALS: write a segment's sums to the next one's slot of p_end.
    """
    COLUMNS: tl.constexpr = S.BE // 64
    TILES: tl.constexpr = S.BM // S.BS * COLUMNS
    i_s, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    i_m, i_e = tile // COLUMNS * S.BS, tile % COLUMNS * 64
    i_x = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_x // S.HKV, i_x % S.HKV
    p_x += i_b * x.b + i_h * GROUP * x.h
    p_y += i_b * y.b + i_h * GROUP * y.h + i_e
    i_t, i_n, i_d = tl.arange(0, S.C), tl.arange(0, S.BS), tl.arange(0, 64)
    m_d = i_e + i_d < S.E
    m_held = (i_m + i_n < S.M)[:, None] & m_d[None, :]
    i_held = (i_m + i_n)[:, None] * S.E + i_e + i_d[None, :]
    slots = tl.where(segments > 1, segments + 1, 1)
    b_sum = zeros(S.BS, 64)
    if p_start is not None:
        b_sum += tl.load(p_start + (i_x * slots + i_s) * (S.M * S.E) + i_held, mask=m_held, other=0.0)
    p_states += i_x * chunks * (S.BM * S.BE) + (i_m + i_n)[:, None] * S.BE + i_e + i_d[None, :]
    first = i_s * run
    for n in tl.range(first * GROUP, tl.minimum(first + run, chunks) * GROUP, num_stages=STAGES):
        i_c, g = n // GROUP, n % GROUP
        if BACK:
            i_c = chunks - 1 - i_c
        if not TOTALS:
            if GROUP == 1 or g == 0:
                tl.store(p_states + tl.cast(i_c, tl.int64) * (S.BM * S.BE), b_sum.to(p_states.dtype.element_ty))
        i_0 = tl.cast(i_c, tl.int64) * S.C
        rows = T - i_c * S.C
        b_x = _row(p_x + i_0 * x.t + g * x.h, x.t, rows, i_m, S)
        m_y = (i_t < rows)[:, None]
        if S.E != S.BE:
            m_y = m_y & m_d[None, :]
        b_y = tl.load(p_y + i_0 * y.t + g * y.h + i_t[:, None] * y.t + i_d[None, :], mask=m_y, other=0.0)
        b_sum = tl.dot(tl.trans(b_x), b_y, b_sum)
    end = i_x * slots + i_s + 1 if TOTALS else i_x
    if TOTALS or segments == 1:
        tl.store(p_end + end * (S.M * S.E) + i_held, b_sum, mask=m_held)


@triton.jit(do_not_specialize=["T", "length"])
def features_normalizer_kernel(
    p_x, p_d_den, p_z, T, length, x, S: tl.constexpr, GROUP: tl.constexpr, BACK: tl.constexpr
):
    """Σ x of one chunk and key/value head into the slot after it; BACK: Σ φ(q) dden, slots from the last chunk on.

    p_z: (B, Hkv, chunks + 1, BM). p_d_den: rows of `length` tokens.
    """
    i_b, i_h, i_0, rows = _program(T, S.HKV, S)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BM)
    m_x = (i_t < rows)[:, None] & (i_m < S.M)[None, :]
    b_z = zeros(S.BM)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        p_tile = token_pointer(p_x, x, i_b, i_0, i_q) + i_t[:, None] * x.t + i_m[None, :]
        b_x = tl.load(p_tile, mask=m_x, other=0.0).to(tl.float32)
        if BACK:
            p_own = p_d_den + (i_b * S.H + i_q) * length + i_0 + i_t
            b_x *= tl.load(p_own, mask=i_t < rows, other=0.0)[:, None]
        b_z += tl.sum(b_x, 0)
    slot = tl.program_id(0) + 1
    if BACK:
        slot = tl.num_programs(0) - tl.program_id(0)
    tl.store(p_z + (tl.program_id(1).to(tl.int64) * (tl.num_programs(0) + 1) + slot) * S.BM + i_m, b_z)


@triton.jit
def _program(T, HEADS: tl.constexpr, S: tl.constexpr):
    """Batch index, head, first token and number of tokens from it on of a program's chunk."""
    i_b, i_h = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    i_0 = tl.program_id(0) * S.C
    return i_b, i_h, i_0, T - i_0


@triton.jit(do_not_specialize=["T", "length"])
def features_forward_kernel(
    p_query, p_f, p_v, p_states, p_z, p_out, p_lse, T, length, strides, S: tl.constexpr, STAGES: tl.constexpr
):
    """One chunk of one query head. p_out, p_lse: rows of `length` tokens."""
    q, f, v = strides
    i_b, i_h, i_0, rows = _program(T, S.H, S)
    i_kv = i_h // (S.H // S.HKV)
    i_x = (i_b * S.HKV + i_kv) * tl.num_programs(0) + tl.program_id(0)
    i_z = i_x + i_b * S.HKV + i_kv
    p_query, p_f = token_pointer(p_query, q, i_b, i_0, i_h), token_pointer(p_f, f, i_b, i_0, i_kv)
    p_states += i_x * (S.BM * S.BE)
    p_z += i_z * S.BM + tl.arange(0, S.BS)
    i_t = tl.arange(0, S.C)
    b_num, b_a, b_den = zeros(S.C, S.BE), zeros(S.C, S.C), zeros(S.C)
    for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
        b_q, b_f = _row(p_query, q.t, rows, m, S), _row(p_f, f.t, rows, m, S)
        b_s, b_z = _state(p_states, m, S), tl.load(p_z + m)
        b_a = tl.dot(b_q, tl.trans(b_f), b_a)
        b_num = tl.dot(b_q, b_s, b_num)
        b_den += tl.sum(_row_again(p_query, q.t, rows, m, S) * b_z[None, :], 1)
    b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_kv), v.t, rows, S.E, S.C, S.BE)
    b_a = tl.where(i_t[None, :] <= i_t[:, None], b_a, 0.0)
    b_den += tl.sum(b_a, 1)
    b_out = tl.dot(b_a.to(b_v.dtype), b_v, b_num) * inverse(b_den)[:, None]
    store_rows(p_out + ((i_b * length + i_0) * S.H + i_h) * S.E, S.H * S.E, rows, b_out, S.E, S.C, S.BE)
    m_seen = inverse(b_den) > 0
    b_lse = tl.where(m_seen, tl.log(tl.where(m_seen, b_den, 1.0)), _BLIND)
    tl.store(p_lse + (i_b * S.H + i_h) * length + i_0 + i_t, b_lse, mask=i_t < rows)


@triton.jit(do_not_specialize=["T", "length"])
def features_backward_queries_kernel(
    p_f, p_v, p_states, p_z, p_out, p_lse, p_d_out, p_d_lse, p_d_query, p_d_num, p_d_den, T, length, f, v, d,
    S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dφ(q), dnum and dden of one chunk of one query head. Rows of `length` tokens, as in the forward kernel."""
    i_b, i_h, i_0, rows = _program(T, S.H, S)
    i_kv = i_h // (S.H // S.HKV)
    i_x = (i_b * S.HKV + i_kv) * tl.num_programs(0) + tl.program_id(0)
    i_z = i_x + i_b * S.HKV + i_kv
    p_f = token_pointer(p_f, f, i_b, i_0, i_kv)
    p_states += i_x * (S.BM * S.BE)
    p_z += i_z * S.BM + tl.arange(0, S.BS)
    i_t = tl.arange(0, S.C)
    i_o, i_row = (i_b * length + i_0) * S.H + i_h, (i_b * S.H + i_h) * length + i_0 + i_t
    b_lse = tl.load(p_lse + i_row, mask=i_t < rows, other=_BLIND)
    b_inverse = _inverse_den(b_lse)
    b_d = load_rows(token_pointer(p_d_out, d, i_b, i_0, i_h), d.t, rows, S.E, S.C, S.BE)
    b_out = load_rows(p_out + i_o * S.E, S.H * S.E, rows, S.E, S.C, S.BE)
    b_d_den = -tl.sum(b_out.to(tl.float32) * b_d.to(tl.float32), 1)
    if p_d_lse is not None:
        b_d_den += tl.load(p_d_lse + i_row, mask=i_t < rows, other=0.0)
    b_d_den *= b_inverse
    tl.store(p_d_den + i_row, b_d_den, mask=i_t < rows)
    b_d = (b_d * b_inverse[:, None]).to(b_d.dtype)
    store_rows(p_d_num + i_o * S.E, S.H * S.E, rows, b_d, S.E, S.C, S.BE)
    b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_kv), v.t, rows, S.E, S.C, S.BE)
    b_d_a = tl.dot(b_d, tl.trans(b_v)) + b_d_den[:, None]
    b_d_a = tl.where(i_t[None, :] <= i_t[:, None], b_d_a, 0.0).to(b_d.dtype)
    i_m = tl.arange(0, S.BS)
    p_d_query += i_o * S.M + i_t[:, None] * (S.H * S.M) + i_m[None, :]
    for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
        b_f, b_s, b_z = _row(p_f, f.t, rows, m, S), _state(p_states, m, S), tl.load(p_z + m)
        b_d_q = tl.dot(b_d_a, b_f, tl.dot(b_d, tl.trans(b_s))) + b_d_den[:, None] * b_z[None, :]
        m_q = (i_t < rows)[:, None] & (m + i_m < S.M)[None, :]
        tl.store(p_d_query + m, b_d_q.to(p_d_query.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=["T", "length"])
def features_backward_values_kernel(
    p_query, p_f, p_d_num, p_states, p_d_v, T, length, q, f, d, S: tl.constexpr, STAGES: tl.constexpr
):
    """dv of one chunk of one key/value head: tril(φ(q) φ(k)ᵀ)ᵀ dnum + φ(k) dS."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, rows = _program(T, S.HKV, S)
    p_f = token_pointer(p_f, f, i_b, i_0, i_h)
    p_states += ((i_b * S.HKV + i_h) * tl.num_programs(0) + tl.program_id(0)) * (S.BM * S.BE)
    i_t = tl.arange(0, S.C)
    b_d_v = zeros(S.C, S.BE)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        p_q = token_pointer(p_query, q, i_b, i_0, i_q)
        b_a = zeros(S.C, S.C)
        for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
            b_f = _row(p_f, f.t, rows, m, S)
            b_a = tl.dot(b_f, tl.trans(_row(p_q, q.t, rows, m, S)), b_a)
            if GROUP == 1:
                b_d_v = tl.dot(b_f, _state(p_states, m, S), b_d_v)
            else:
                if g == 0:
                    b_d_v = tl.dot(b_f, _state(p_states, m, S), b_d_v)
        b_d = load_rows(token_pointer(p_d_num, d, i_b, i_0, i_q), d.t, rows, S.E, S.C, S.BE)
        b_a = tl.where(i_t[:, None] <= i_t[None, :], b_a, 0.0).to(b_d.dtype)
        b_d_v = tl.dot(b_a, b_d, b_d_v)
    store_rows(p_d_v + ((i_b * length + i_0) * S.HKV + i_h) * S.E, S.HKV * S.E, rows, b_d_v, S.E, S.C, S.BE)


@triton.jit(do_not_specialize=["T", "length"])
def features_backward_keys_kernel(
    p_query, p_v, p_d_num, p_d_den, p_states, p_z, p_d_f, T, length, q, v, d,
    S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dφ(k) of one chunk of one key/value head: tril(dnum vᵀ + dden)ᵀ φ(q) + v dSᵀ + dz."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, rows = _program(T, S.HKV, S)
    i_x = (i_b * S.HKV + i_h) * tl.num_programs(0) + tl.program_id(0)
    p_states += i_x * (S.BM * S.BE)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BS)
    # Sums after the chunk are in slots from the last chunk on.
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    p_z += ((i_b * S.HKV + i_h) * (tl.num_programs(0) + 1) + slot) * S.BM + i_m
    p_d_f += ((i_b * length + i_0) * S.HKV + i_h) * S.M + i_t[:, None] * (S.HKV * S.M) + i_m[None, :]
    b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_h), v.t, rows, S.E, S.C, S.BE)
    if GROUP == 1:
        b_d_a = _pair_gradients(p_d_num, p_d_den, b_v, i_b, i_0, i_h, rows, length, d, S)
        p_q = token_pointer(p_query, q, i_b, i_0, i_h)
        for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
            b_q, b_s, b_z = _row(p_q, q.t, rows, m, S), _state(p_states, m, S), tl.load(p_z + m)
            b_d_f = tl.dot(b_d_a, b_q, tl.dot(b_v, tl.trans(b_s))) + b_z[None, :]
            m_f = (i_t < rows)[:, None] & (m + i_m < S.M)[None, :]
            tl.store(p_d_f + m, b_d_f.to(p_d_f.dtype.element_ty), mask=m_f)
    else:
        for m in range(0, S.BM, S.BS):
            b_d_f = tl.dot(b_v, tl.trans(_state(p_states, m, S))) + tl.load(p_z + m)[None, :]
            for g in range(GROUP):
                i_q = i_h * GROUP + g
                b_d_a = _pair_gradients(p_d_num, p_d_den, b_v, i_b, i_0, i_q, rows, length, d, S)
                b_q = _row(token_pointer(p_query, q, i_b, i_0, i_q), q.t, rows, m, S)
                b_d_f = tl.dot(b_d_a, b_q, b_d_f)
            m_f = (i_t < rows)[:, None] & (m + i_m < S.M)[None, :]
            tl.store(p_d_f + m, b_d_f.to(p_d_f.dtype.element_ty), mask=m_f)


@triton.jit
def _pair_gradients(p_d_num, p_d_den, b_v, i_b, i_0, i_q, rows, length, d, S: tl.constexpr):
    """tril(dnum vᵀ + dden)ᵀ of a chunk of one query head, keys first."""
    i_t = tl.arange(0, S.C)
    i_row = (i_b * S.H + i_q) * length + i_0
    b_d = load_rows(token_pointer(p_d_num, d, i_b, i_0, i_q), d.t, rows, S.E, S.C, S.BE)
    b_d_den = tl.load(p_d_den + i_row + i_t, mask=i_t < rows, other=0.0)
    b_d_a = tl.dot(b_v, tl.trans(b_d)) + b_d_den[None, :]
    return tl.where((i_t[:, None] <= i_t[None, :]) & (i_t < rows)[None, :], b_d_a, 0.0).to(b_v.dtype)
