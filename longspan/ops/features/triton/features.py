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
from longspan.ops.common.tiles import inverse, load_rows, padded, store_rows, token_pointer, zeros
from longspan.ops.features import BLIND, CHUNK, FeatureInputs, FeatureProblem, FeatureSaved, state_sizes

_BLIND = tl.constexpr(BLIND)
# Programs that compute sums, at least; sequences are divided into segments to have as many.
PROGRAMS = 128
# Pipeline stages and warps of each kernel: for up to 128 values, for more of them, and for those in float32.
TILINGS = {
    "narrow": {
        "sums": {"STAGES": 3, "num_warps": 4},
        "read": {"STAGES": 2, "num_warps": 4},
        "queries": {"STAGES": 2, "num_warps": 4},
        "values": {"STAGES": 2, "num_warps": 4},
        "keys": {"STAGES": 2, "num_warps": 4},
    },
    "wide": {
        "sums": {"STAGES": 3, "num_warps": 4},
        "read": {"STAGES": 2, "num_warps": 4},
        "queries": {"STAGES": 1, "num_warps": 4},
        "values": {"STAGES": 2, "num_warps": 4},
        "keys": {"STAGES": 2, "num_warps": 4},
    },
    "wide, float32": {
        "sums": {"STAGES": 3, "num_warps": 4},
        "read": {"STAGES": 2, "num_warps": 8},
        "queries": {"STAGES": 1, "num_warps": 8},
        "values": {"STAGES": 2, "num_warps": 8},
        "keys": {"STAGES": 1, "num_warps": 8},
    },
}

# Heads, features, values, tokens of a chunk, rows and columns of a state in memory, columns of a block, features of a
# tile. REVERSE: rows are counted from the last token on. DOT: the dtype of products, states and dnum, float32 (of which
# products take tf32) for float16, whose range is too small for them.
FeatureSizes = namedtuple("FeatureSizes", "H HKV M E C BM SE BE BS REVERSE DOT")
DOT = {torch.bfloat16: (torch.bfloat16, tl.bfloat16), torch.float16: (torch.float32, tl.float32)}


def forward(x: FeatureInputs, problem: FeatureProblem, *, traced: bool = True) -> tuple[Tensor, ...]:
    """Return out, lse, the sums after the last key, and those before each chunk.

    traced: Whether no two results may share memory.
    """
    x = _dense(x)
    plan = _FeatureForward.of(x, problem)
    (B, T, H, _), E = x.query.shape, x.v.shape[3]
    out, lse = x.v.new_empty(B, T, H, E), x.query.new_empty(B, H, T, dtype=torch.float32)
    states, z = plan.new_states(x.v)
    with on_device(x.query):
        end = plan.sums((x.f, x.v, None), (x.kv, x.z), states, z)
        plan.read(x.query, x.f, x.v, states, z, out, lse)
    return out, lse, *plan.last(end, traced), states, z


def backward(
    saved: FeatureSaved, x: FeatureInputs, problem: FeatureProblem, *, traced: bool, d_v: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of the features, the values and the sums before the first token.

    d_v: Another gradient of the values, contiguous, to which this one is added in place.
    """
    x, d_out, d_lse = _dense(x), dense_rows(saved.d_out), dense(saved.d_lse)
    d_kv, d_z = dense(saved.d_kv), dense(saved.d_z)
    plan = _FeatureBackward.of((*x, d_out, d_lse, d_kv, d_z, d_v), problem)
    into, d_v = d_v, new_like(x.v) if d_v is None else d_v
    d_query, d_f = new_like(x.query), new_like(x.f)
    d_num, d_den = d_out.new_empty(d_out.shape, dtype=DOT[d_out.dtype][0]), torch.empty_like(saved.lse)
    states, z = plan.new_states(x.v)
    given = saved.out, saved.lse, d_out, d_lse
    with on_device(x.query):
        plan.queries(x.f, x.v, saved.states, saved.states_z, *given, d_query, d_num, d_den)
        end = plan.sums((x.query, d_num, d_den), (d_kv, d_z), states, z)
        plan.values(x.query, x.f, d_num, states, into, d_v)
        plan.keys(x.query, x.v, d_num, d_den, states, z, d_f)
    return d_query, d_f, d_v, *plan.last(end, traced)


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
        self.S = FeatureSizes(H, Hkv, M, E, CHUNK, *state_sizes(M, E), padded(E), 64, problem.reverse, DOT[v[2]][1])
        self.B, self.tokens, self.back = B, self.T - problem.delay, back
        self.chunks = -(-self.tokens // CHUNK)
        self.strides = tuple(Strides.of(x) for x in key[:3] if x is not None)
        wide = "wide" if v[2] == torch.bfloat16 else "wide, float32"
        self.tilings = TILINGS[wide if self.S.BE > 128 else "narrow"]
        tiles = self.S.BM * self.S.SE // 64**2
        self.segments = min(-(-PROGRAMS // (tiles * B * Hkv)), -(-self.chunks // 8))
        self.run = -(-self.chunks // self.segments)
        self.segments = -(-self.chunks // self.run)

    def new_states(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers for the sums of φ(k)vᵀ and of φ(k) before each chunk."""
        S = self.S
        states = v.new_empty(self.B, S.HKV, self.chunks, S.BM, S.SE, dtype=DOT[v.dtype][0])
        return states, v.new_empty(self.B, S.HKV, self.chunks, S.BM, dtype=torch.float32)

    def sum_launches(self, x: Strides, y: Strides) -> None:
        S = self.S
        constants = {"S": S, "GROUP": S.H // S.HKV if self.back else 1, "BACK": self.back, **self.tilings["sums"]}
        grid = S.BM // S.BS * (S.SE // 64) * self.segments, self.B * S.HKV
        scalars = self.tokens, self.T, self.chunks, self.run, self.segments, x, y
        held = self.segments > 1
        self.walk = self.launch(features_sums_kernel, grid, scalars, {**constants, "WALK": True, "HELD": held})
        if held:
            self.totals = self.launch(features_sums_kernel, grid, scalars, {**constants, "WALK": False, "HELD": True})

    def sums(
        self,
        inputs: tuple[Tensor, Tensor, Tensor | None],
        start: tuple[Tensor | None, Tensor | None],
        states: Tensor,
        z: Tensor,
    ) -> Tensor:
        """Write the sums before each chunk, after each if backward, to `states` and `z`.

        Returns:
            (B, Hkv, slots, M·E + M) in float32, the last of which are the sums over all tokens.
        """
        S = self.S
        slots = self.segments + 1 if self.segments > 1 else 1
        end = states.new_empty(self.B, S.HKV, slots, S.M * (S.E + 1), dtype=torch.float32)
        if self.segments > 1:
            self.totals(*inputs, *start, states, z, end)
            torch.cumsum(end, 2, out=end)
        self.walk(*inputs, *start, states, z, end)
        return end

    def last(self, end: Tensor, traced: bool) -> tuple[Tensor, Tensor]:
        """Return kv (B, Hkv, M, E) and z (B, Hkv, M) of what `sums` returns."""
        kv, z = end[:, :, -1].split([self.S.M * self.S.E, self.S.M], 2)
        kv = kv.unflatten(2, (self.S.M, self.S.E))
        return (kv.clone(memory_format=torch.contiguous_format), z.clone()) if traced else (kv, z)


class _FeatureForward(_FeaturePlan):
    def __init__(self, device: int, key: Signature, problem: FeatureProblem) -> None:
        super().__init__(device, key, problem, back=False)
        self.sum_launches(*self.strides[1:])
        grid, scalars = (self.chunks, self.B * self.S.H), (self.tokens, self.T, self.strides)
        self.read = self.launch(features_forward_kernel, grid, scalars, {"S": self.S, **self.tilings["read"]})


class _FeatureBackward(_FeaturePlan):
    def __init__(self, device: int, key: Signature, problem: FeatureProblem) -> None:
        super().__init__(device, key, problem, back=True)
        (query, f, v), d_out = self.strides, Strides.of(key[5])
        S = self.S
        width = S.H * S.E
        d_num = Strides(self.T * width, width, S.E)
        self.sum_launches(query, d_num)
        heads, kv_heads = (self.chunks, self.B * S.H), (self.chunks, self.B * S.HKV)
        sizes = self.tokens, self.T

        def tiling(name: str) -> dict[str, Any]:
            return {"S": S, **self.tilings[name]}

        self.queries = self.launch(features_backward_queries_kernel, heads, (*sizes, f, v, d_out), tiling("queries"))
        scalars = *sizes, query, f, d_num
        self.values = self.launch(features_backward_values_kernel, kv_heads, scalars, tiling("values"))
        self.keys = self.launch(features_backward_keys_kernel, kv_heads, (*sizes, query, v, d_num), tiling("keys"))


@triton.jit
def _token(i_r, length, S: tl.constexpr):
    """The token of row i_r."""
    return length - 1 - i_r if S.REVERSE else i_r


@triton.jit
def _along(stride, S: tl.constexpr):
    """The stride from one row to the next."""
    return -stride if S.REVERSE else stride


@triton.jit
def _pointer(p_x, strides, i_b, i_r, i_h, length, S: tl.constexpr):
    """Pointer to row i_r of one batch index and head."""
    return token_pointer(p_x, strides, i_b, _token(i_r, length, S), i_h)


@triton.jit
def _clear(p_x, i_b, i_h, first, end, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Zero this program's share of rows first to end of one head of x (B, length, HEADS, WIDTH)."""
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, 64)
    for i_0 in range(first + tl.program_id(0) * S.C, end, tl.num_programs(0) * S.C):
        i_r = i_0 + i_t
        p_row = p_x + ((i_b * length + _token(i_r, length, S)) * HEADS + i_h) * WIDTH
        for i in range(0, WIDTH, 64):
            m_x = (i_r < end)[:, None] & (i + i_d < WIDTH)[None, :]
            b_zero = tl.full((S.C, 64), 0, p_x.dtype.element_ty)
            tl.store(p_row[:, None] + i + i_d[None, :], b_zero, mask=m_x)


@triton.jit
def _row(p_x, stride, rows, m, S: tl.constexpr):
    """Features m to m + BS of the first `rows` tokens at p_x, (C, BS)."""
    i_t, i_m = tl.arange(0, S.C), m + tl.arange(0, S.BS)
    m_x = (i_t < rows)[:, None]
    if S.M != S.BM:
        m_x = m_x & (i_m < S.M)[None, :]
    return tl.load(p_x + i_t[:, None] * stride + i_m[None, :], mask=m_x, other=0.0).to(S.DOT)


@triton.jit
def _values(p_x, stride, rows, S: tl.constexpr):
    """The first `rows` rows of values at p_x, (C, BE)."""
    return load_rows(p_x, stride, rows, S.E, S.C, S.BE).to(S.DOT)


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
    i_e = tl.arange(0, S.BE)
    p_x += (m + tl.arange(0, S.BS))[:, None] * S.SE + i_e[None, :]
    if S.SE == S.BE:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=(i_e < S.SE)[None, :], other=0.0)
    return b_x


@triton.jit
def _inverse_den(b_lse):
    """1 / den, 0 where no key is seen."""
    return tl.where(b_lse == _BLIND, 0.0, tl.exp(-tl.where(b_lse == _BLIND, 0.0, b_lse)))


@triton.jit(do_not_specialize=["T", "length", "chunks", "run", "segments"])
def features_sums_kernel(
    p_x, p_y, p_d_den, p_start, p_start_z, p_states, p_z, p_end, T, length, chunks, run, segments, x, y,
    S: tl.constexpr, GROUP: tl.constexpr, BACK: tl.constexpr, WALK: tl.constexpr, HELD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Σ x yᵀ and Σ x before each chunk of T rows; BACK: Σ φ(q) dnumᵀ and Σ φ(q) dden after each.

    A program sums a tile of BS × 64 over one segment and key/value head. p_states: (B, Hkv, chunks, BM, SE). p_z:
    (B, Hkv, chunks, BM). p_start, p_start_z: (B, Hkv, M, E), (B, Hkv, M) or None. p_end: (B, Hkv, slots, M · E + M) the
    sums after all chunks; HELD: before each segment, and after the last. WALK: write the sums of chunks; otherwise
    those of a segment to the next one's slot of p_end.
    """
    COLUMNS: tl.constexpr = S.SE // 64
    TILES: tl.constexpr = S.BM // S.BS * COLUMNS
    WIDTH: tl.constexpr = S.M * (S.E + 1)
    i_s, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    i_m, i_e = tile // COLUMNS * S.BS, tile % COLUMNS * 64
    i_x = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_x // S.HKV, i_x % S.HKV * GROUP
    i_t, i_d, i_f = tl.arange(0, S.C), tl.arange(0, 64), i_m + tl.arange(0, S.BS)
    m_d, m_f = i_e + i_d < S.E, i_f < S.M
    m_own = i_e + 0 * i_f == 0  # The first tile of values writes z.
    m_held = m_f[:, None] & m_d[None, :]
    i_held = i_f[:, None] * S.E + i_e + i_d[None, :]
    p_end += i_x * ((segments + 1 if HELD else 1) * WIDTH)
    b_sum, b_z = zeros(S.BS, 64), zeros(S.BS)
    if HELD and WALK:
        b_sum += tl.load(p_end + i_s * WIDTH + i_held, mask=m_held, other=0.0)
        b_z += tl.load(p_end + i_s * WIDTH + S.M * S.E + i_f, mask=m_f, other=0.0)
    else:
        b_first, b_first_z = zeros(S.BS, 64), zeros(S.BS)
        if p_start is not None:
            b_first += tl.load(p_start + i_x * (S.M * S.E) + i_held, mask=m_held, other=0.0)
        if p_start_z is not None:
            b_first_z += tl.load(p_start_z + i_x * S.M + i_f, mask=m_f, other=0.0)
        if HELD:
            if i_s == 0:
                tl.store(p_end + i_held, b_first, mask=m_held)
                tl.store(p_end + S.M * S.E + i_f, b_first_z, mask=m_f & m_own)
        else:
            b_sum, b_z = b_first, b_first_z
    p_states += i_x * chunks * (S.BM * S.SE) + i_f[:, None] * S.SE + i_e + i_d[None, :]
    p_z += i_x * chunks * S.BM + i_f
    before = length - T if BACK else 0
    first = i_s * run
    for n in tl.range(first * GROUP, tl.minimum(first + run, chunks) * GROUP, num_stages=STAGES):
        i_c, g = n // GROUP, n % GROUP
        if BACK:
            i_c = chunks - 1 - i_c
        if WALK:
            if GROUP == 1 or g == 0:
                tl.store(p_states + tl.cast(i_c, tl.int64) * (S.BM * S.SE), b_sum.to(p_states.dtype.element_ty))
                tl.store(p_z + tl.cast(i_c, tl.int64) * S.BM, b_z, mask=m_own)
        i_r, rows = before + i_c * S.C, T - i_c * S.C
        p_row = _pointer(p_x, x, i_b, i_r, i_h + g, length, S)
        b_x = _row(p_row, _along(x.t, S), rows, i_m, S)
        m_y = (i_t < rows)[:, None]
        if S.E != S.SE:
            m_y = m_y & m_d[None, :]
        p_column = _pointer(p_y, y, i_b, i_r, i_h + g, length, S) + i_e
        b_y = tl.load(p_column + i_t[:, None] * _along(y.t, S) + i_d[None, :], mask=m_y, other=0.0).to(S.DOT)
        b_again = _row_again(p_row, _along(x.t, S), rows, i_m, S)
        if BACK:
            p_own = p_d_den + (i_b * S.H + i_h + g) * length + _token(i_r + i_t, length, S)
            b_again *= tl.load(p_own, mask=i_t < rows, other=0.0)[:, None]
        b_z += tl.sum(b_again, 0)
        b_sum = tl.dot(tl.trans(b_x), b_y, b_sum)
    if HELD and not WALK:
        p_end += (i_s + 1) * WIDTH
    if not (HELD and WALK):
        tl.store(p_end + i_held, b_sum, mask=m_held)
        tl.store(p_end + S.M * S.E + i_f, b_z, mask=m_f & m_own)


@triton.jit
def _program(T, HEADS: tl.constexpr, S: tl.constexpr):
    """Batch index, head, first row and number of rows from it on of a program's chunk."""
    i_b, i_h = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    i_0 = tl.program_id(0) * S.C
    return i_b, i_h, i_0, T - i_0


@triton.jit(do_not_specialize=["T", "length"])
def features_forward_kernel(
    p_query, p_f, p_v, p_states, p_z, p_out, p_lse, T, length, strides, S: tl.constexpr, STAGES: tl.constexpr
):
    """One chunk of one query head. The first length − T rows of queries see no key."""
    q, f, v = strides
    i_b, i_h, i_0, rows = _program(T, S.H, S)
    i_kv, delay = i_h // (S.H // S.HKV), length - T
    i_x = (i_b * S.HKV + i_kv) * tl.num_programs(0) + tl.program_id(0)
    p_query = _pointer(p_query, q, i_b, delay + i_0, i_h, length, S)
    p_f, p_v = _pointer(p_f, f, i_b, i_0, i_kv, length, S), _pointer(p_v, v, i_b, i_0, i_kv, length, S)
    p_states += i_x * (S.BM * S.SE)
    p_z += i_x * S.BM + tl.arange(0, S.BS)
    i_t = tl.arange(0, S.C)
    b_num, b_a, b_den = zeros(S.C, S.BE), zeros(S.C, S.C), zeros(S.C)
    for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
        b_q, b_f = _row(p_query, _along(q.t, S), rows, m, S), _row(p_f, _along(f.t, S), rows, m, S)
        b_s, b_z = _state(p_states, m, S), tl.load(p_z + m)
        b_a = tl.dot(b_q, tl.trans(b_f), b_a)
        b_num = tl.dot(b_q, b_s, b_num)
        b_den += tl.sum(_row_again(p_query, _along(q.t, S), rows, m, S) * b_z[None, :], 1)
    b_v = _values(p_v, _along(v.t, S), rows, S)
    b_a = tl.where(i_t[None, :] <= i_t[:, None], b_a, 0.0)
    b_den += tl.sum(b_a, 1)
    b_out = tl.dot(b_a.to(S.DOT), b_v, b_num) * inverse(b_den)[:, None]
    i_o = (i_b * length + _token(delay + i_0, length, S)) * S.H + i_h
    store_rows(p_out + i_o * S.E, _along(S.H * S.E, S), rows, b_out, S.E, S.C, S.BE)
    m_seen = inverse(b_den) > 0
    b_lse = tl.where(m_seen, tl.log(tl.where(m_seen, b_den, 1.0)), _BLIND)
    p_lse += (i_b * S.H + i_h) * length
    tl.store(p_lse + _token(delay + i_0 + i_t, length, S), b_lse, mask=i_t < rows)
    _clear(p_out, i_b, i_h, 0, delay, length, S.H, S.E, S)
    for i in range(i_0, delay, tl.num_programs(0) * S.C):
        tl.store(p_lse + _token(i + i_t, length, S), i_t * 0.0 + _BLIND, mask=i + i_t < delay)


@triton.jit(do_not_specialize=["T", "length"])
def features_backward_queries_kernel(
    p_f, p_v, p_states, p_z, p_out, p_lse, p_d_out, p_d_lse, p_d_query, p_d_num, p_d_den, T, length, f, v, d,
    S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dφ(q), dnum and dden of one chunk of one query head; dφ(q) of the rows that see no key."""
    i_b, i_h, i_0, rows = _program(T, S.H, S)
    i_kv, delay = i_h // (S.H // S.HKV), length - T
    i_x = (i_b * S.HKV + i_kv) * tl.num_programs(0) + tl.program_id(0)
    p_f, p_v = _pointer(p_f, f, i_b, i_0, i_kv, length, S), _pointer(p_v, v, i_b, i_0, i_kv, length, S)
    p_states += i_x * (S.BM * S.SE)
    p_z += i_x * S.BM + tl.arange(0, S.BS)
    i_t = tl.arange(0, S.C)
    i_o = (i_b * length + _token(delay + i_0, length, S)) * S.H + i_h
    i_row = (i_b * S.H + i_h) * length + _token(delay + i_0 + i_t, length, S)
    b_lse = tl.load(p_lse + i_row, mask=i_t < rows, other=_BLIND)
    b_inverse = _inverse_den(b_lse)
    p_d_out = _pointer(p_d_out, d, i_b, delay + i_0, i_h, length, S)
    b_d = load_rows(p_d_out, _along(d.t, S), rows, S.E, S.C, S.BE)
    b_out = load_rows(p_out + i_o * S.E, _along(S.H * S.E, S), rows, S.E, S.C, S.BE)
    b_d_den = -tl.sum(b_out.to(tl.float32) * b_d.to(tl.float32), 1)
    if p_d_lse is not None:
        b_d_den += tl.load(p_d_lse + i_row, mask=i_t < rows, other=0.0)
    b_d_den *= b_inverse
    tl.store(p_d_den + i_row, b_d_den, mask=i_t < rows)
    b_d = (b_d * b_inverse[:, None]).to(S.DOT)
    store_rows(p_d_num + i_o * S.E, _along(S.H * S.E, S), rows, b_d, S.E, S.C, S.BE)
    b_v = _values(p_v, _along(v.t, S), rows, S)
    b_d_a = tl.dot(b_d, tl.trans(b_v)) + b_d_den[:, None]
    b_d_a = tl.where(i_t[None, :] <= i_t[:, None], b_d_a, 0.0).to(S.DOT)
    i_m = tl.arange(0, S.BS)
    p_to = p_d_query + i_o * S.M + i_t[:, None] * _along(S.H * S.M, S) + i_m[None, :]
    for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
        b_f, b_s, b_z = _row(p_f, _along(f.t, S), rows, m, S), _state(p_states, m, S), tl.load(p_z + m)
        b_d_q = tl.dot(b_d_a, b_f, tl.dot(b_d, tl.trans(b_s))) + b_d_den[:, None] * b_z[None, :]
        m_q = (i_t < rows)[:, None] & (m + i_m < S.M)[None, :]
        tl.store(p_to + m, b_d_q.to(p_d_query.dtype.element_ty), mask=m_q)
    _clear(p_d_query, i_b, i_h, 0, delay, length, S.H, S.M, S)


@triton.jit(do_not_specialize=["T", "length"])
def features_backward_values_kernel(
    p_query, p_f, p_d_num, p_states, p_into, p_d_v, T, length, q, f, d, S: tl.constexpr, STAGES: tl.constexpr
):
    """dv of one chunk of one key/value head, tril(φ(q) φ(k)ᵀ)ᵀ dnum + φ(k) dS; 0 of the rows that no query sees.

    p_into: Another gradient to add, or None; it may be p_d_v.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, rows = _program(T, S.HKV, S)
    delay = length - T
    p_f = _pointer(p_f, f, i_b, i_0, i_h, length, S)
    p_states += ((i_b * S.HKV + i_h) * tl.num_programs(0) + tl.program_id(0)) * (S.BM * S.SE)
    i_t = tl.arange(0, S.C)
    b_d_v = zeros(S.C, S.BE)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        p_q = _pointer(p_query, q, i_b, delay + i_0, i_q, length, S)
        b_a = zeros(S.C, S.C)
        for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
            b_f = _row(p_f, _along(f.t, S), rows, m, S)
            b_a = tl.dot(b_f, tl.trans(_row(p_q, _along(q.t, S), rows, m, S)), b_a)
            if GROUP == 1:
                b_d_v = tl.dot(b_f, _state(p_states, m, S), b_d_v)
            else:
                if g == 0:
                    b_d_v = tl.dot(b_f, _state(p_states, m, S), b_d_v)
        p_d = _pointer(p_d_num, d, i_b, delay + i_0, i_q, length, S)
        b_d = _values(p_d, _along(d.t, S), rows, S)
        b_a = tl.where(i_t[:, None] <= i_t[None, :], b_a, 0.0).to(S.DOT)
        b_d_v = tl.dot(b_a, b_d, b_d_v)
    i_o = (i_b * length + _token(i_0, length, S)) * S.HKV + i_h
    if p_into is not None:
        b_d_v += load_rows(p_into + i_o * S.E, _along(S.HKV * S.E, S), rows, S.E, S.C, S.BE).to(tl.float32)
    store_rows(p_d_v + i_o * S.E, _along(S.HKV * S.E, S), rows, b_d_v, S.E, S.C, S.BE)
    if p_into is None:
        _clear(p_d_v, i_b, i_h, T, length, length, S.HKV, S.E, S)


@triton.jit(do_not_specialize=["T", "length"])
def features_backward_keys_kernel(
    p_query, p_v, p_d_num, p_d_den, p_states, p_z, p_d_f, T, length, q, v, d,
    S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dφ(k) of one chunk of one key/value head, tril(dnum vᵀ + dden)ᵀ φ(q) + v dSᵀ + dz; 0 of rows no query sees."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_0, rows = _program(T, S.HKV, S)
    delay = length - T
    i_x = (i_b * S.HKV + i_h) * tl.num_programs(0) + tl.program_id(0)
    p_states += i_x * (S.BM * S.SE)
    i_t, i_m = tl.arange(0, S.C), tl.arange(0, S.BS)
    p_z += i_x * S.BM + i_m
    i_o = (i_b * length + _token(i_0, length, S)) * S.HKV + i_h
    p_to = p_d_f + i_o * S.M + i_t[:, None] * _along(S.HKV * S.M, S) + i_m[None, :]
    b_v = _values(_pointer(p_v, v, i_b, i_0, i_h, length, S), _along(v.t, S), rows, S)
    if GROUP == 1:
        b_d_a = _pair_gradients(p_d_num, p_d_den, b_v, i_b, delay + i_0, i_h, rows, length, d, S)
        p_q = _pointer(p_query, q, i_b, delay + i_0, i_h, length, S)
        for m in tl.range(0, S.BM, S.BS, num_stages=STAGES):
            b_q, b_s, b_z = _row(p_q, _along(q.t, S), rows, m, S), _state(p_states, m, S), tl.load(p_z + m)
            b_d_f = tl.dot(b_d_a, b_q, tl.dot(b_v, tl.trans(b_s))) + b_z[None, :]
            m_f = (i_t < rows)[:, None] & (m + i_m < S.M)[None, :]
            tl.store(p_to + m, b_d_f.to(p_d_f.dtype.element_ty), mask=m_f)
    else:
        for m in range(0, S.BM, S.BS):
            b_d_f = tl.dot(b_v, tl.trans(_state(p_states, m, S))) + tl.load(p_z + m)[None, :]
            for g in range(GROUP):
                i_q = i_h * GROUP + g
                b_d_a = _pair_gradients(p_d_num, p_d_den, b_v, i_b, delay + i_0, i_q, rows, length, d, S)
                p_q = _pointer(p_query, q, i_b, delay + i_0, i_q, length, S)
                b_q = _row(p_q, _along(q.t, S), rows, m, S)
                b_d_f = tl.dot(b_d_a, b_q, b_d_f)
            m_f = (i_t < rows)[:, None] & (m + i_m < S.M)[None, :]
            tl.store(p_to + m, b_d_f.to(p_d_f.dtype.element_ty), mask=m_f)
    _clear(p_d_f, i_b, i_h, T, length, length, S.HKV, S.M, S)


@triton.jit
def _pair_gradients(p_d_num, p_d_den, b_v, i_b, i_r, i_q, rows, length, d, S: tl.constexpr):
    """tril(dnum vᵀ + dden)ᵀ of a chunk of one query head, keys first."""
    i_t = tl.arange(0, S.C)
    b_d = _values(_pointer(p_d_num, d, i_b, i_r, i_q, length, S), _along(d.t, S), rows, S)
    p_d_den += (i_b * S.H + i_q) * length + _token(i_r + i_t, length, S)
    b_d_a = tl.dot(b_v, tl.trans(b_d)) + tl.load(p_d_den, mask=i_t < rows, other=0.0)[None, :]
    return tl.where((i_t[:, None] <= i_t[None, :]) & (i_t < rows)[None, :], b_d_a, 0.0).to(S.DOT)
