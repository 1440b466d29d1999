"""Causal Linformer: softmax attention of every query over its own compressed prefix, in chunks of 64 tokens.

With K̃ and Ṽ the compressed keys and values before a chunk, and A = tril(q kᵀ):

    S = q K̃ᵀ + A e,    P = softmax(σ S),    out = P Ṽ + tril(P fᵀ) v

One kernel computes the sums K̃ and Ṽ before every chunk, then all chunks run in parallel. Scores and weights of the
forward pass stay on the chip. Backward, with B = tril(dout vᵀ) and δ = Σ dout ∘ out:

    dP = dout Ṽᵀ + B f,    dS = σ P ∘ (dP − δ),    dq = dS K̃ + tril(dS eᵀ) k

The gradients of the sums after each chunk, dK̃ = Σ dSᵀ q and dṼ = Σ Pᵀ dout over later chunks, are computed as the sums
are, from the last chunk to the first. Then

    dk = e dK̃ + tril(dS eᵀ)ᵀ q,    de = k dK̃ᵀ + Aᵀ dS,    dv = f dṼ + tril(P fᵀ)ᵀ dout,    df = v dṼᵀ + Bᵀ P
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exp2, log2
from longspan.ops.common.launch import Plan, Signature, Strides, dense, dense_rows, new_like, on_device
from longspan.ops.common.tiles import load_rows, padded, store_rows, token_pointer, zeros
from longspan.ops.compressed import CHUNK, CausalInputs, CausalSaved, states_shapes

# Programs that compute sums, at least, by dividing sequences into segments; and those that compute gradients of tables.
PROGRAMS, TABLE_PROGRAMS = 512, 512

# Pipeline stages and warps of each kernel.
TILING = {
    "sums": {"STAGES": 3, "num_warps": 4},
    "read": {"STAGES": 2, "num_warps": 4},
    "queries": {"STAGES": 2, "num_warps": 4},
    "tables": {"STAGES": 2, "num_warps": 4, "BS": 128},
    "keys": {"STAGES": 2, "num_warps": 4},
}

# Heads, those of the tables, R rows, dimensions; tokens of a chunk; padded sizes; BS: rows of a tile of the sums.
CausalSizes = namedtuple("CausalSizes", "H HKV HT R D E C BR BD BE BS")


def forward(x: CausalInputs) -> tuple[Tensor, ...]:
    """Return out, the sums after the last token, lse in base 2, the sums before each chunk, and tril(P fᵀ) of each."""
    x = _dense(x)
    plan = _CausalForward.of(x)
    out, lse = x.v.new_empty(plan.out_shape), x.q.new_empty(plan.lse_shape, dtype=torch.float32)
    *states, pairs = (x.q.new_empty(shape) for shape in plan.states)
    with on_device(x.q):
        ends = plan.sums((x.e, x.f), (x.k, x.v), (x.start_k, x.start_v), states)
        plan.read(tuple(x[:5]), *states, out, lse, pairs)
    return out, *ends, lse, *states, pairs


def backward(saved: CausalSaved, x: CausalInputs) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs."""
    e, f = x.e, x.f
    x, d_out = _dense(x), dense_rows(saved.d_out)
    d_ends = dense(saved.d_end_k), dense(saved.d_end_v)
    plan = _CausalBackward.of((*x, d_out, *d_ends), e.shape[2], len(e) == 1)
    q = x.q
    weights = tuple(q.new_empty(plan.weights_shape) for _ in range(2))
    *d_states, a = (q.new_empty(shape) for shape in plan.states)
    b, d_e_pairs = torch.empty_like(a), torch.empty_like(a)
    d_q, d_k, d_v = new_like(q), new_like(x.k), new_like(x.v)
    d_tables = tuple(q.new_empty(plan.table_shape, dtype=torch.float32) for _ in range(2))
    with on_device(q):
        given = tuple(x[:5]), saved.keys, saved.values, saved.out, saved.lse, d_out
        plan.queries(*given, *weights, a, b, d_e_pairs, d_q)
        d_starts = plan.sums(weights, (q, d_out), d_ends, d_states)
        plan.tables((x.k, x.v), (a, b), weights, tuple(d_states), d_tables)
        plan.keys((x.e, x.f, q, d_out), (d_e_pairs, saved.pairs), tuple(d_states), (d_k, d_v))
    pairs = zip(d_tables, (e, f), strict=True)
    d_e, d_f = ((d if len(d) == len(y) else d.sum(0, keepdim=True)).to(y.dtype) for d, y in pairs)
    return d_q, d_k, d_v, d_e, d_f, *d_starts


def _dense(x: CausalInputs) -> CausalInputs:
    """The tensors as the kernels take them, the tables in the dtype of q, for every batch index and kv head."""
    e, f = (dense_rows(y.to(x.q.dtype)).expand(*x.k.shape[:3], -1) for y in (x.e, x.f))
    return CausalInputs(dense_rows(x.q), dense_rows(x.k), dense_rows(x.v), e, f, dense(x.start_k), dense(x.start_v))


class _CausalPlan(Plan):
    """Sizes, and the launches that sum a table and what it multiplies over tokens."""

    def __init__(self, device: int, key: Signature, *, back: bool) -> None:
        super().__init__(device)
        q, _, v, e = key[:4]
        (B, self.T, H, D), (Hkv, E), R = q[0], v[0][2:], e[0][3]
        BR, BD, BE = (padded(size) for size in (R, D, E))
        self.S = CausalSizes(H, Hkv, 0, R, D, E, CHUNK, BR, BD, BE, 64)
        self.B, self.chunks = B, -(-self.T // CHUNK)
        self.strides = tuple(Strides.of(x) for x in key[:5])
        self.out_shape, self.lse_shape = (B, self.T, H, E), (B, H, self.T)
        self.states = states_shapes(B, self.T, H, Hkv, R, D, E)
        tiles = BR // 64
        self.segments = min(-(-PROGRAMS // (2 * tiles * B * Hkv)), -(-self.chunks // 8))
        self.run = -(-self.chunks // self.segments)
        self.segments = -(-self.chunks // self.run)
        self.back = back

    def sum_launches(self, strides: tuple[Strides, ...], width: int) -> None:
        S = self.S
        scalars = self.T, self.chunks, self.run, self.segments, strides
        constants = self.constants("sums")
        constants |= {"GROUP": S.H // S.HKV if self.back else 1, "WIDTH": width, "BACK": self.back}
        grid = S.BR // constants["S"].BS * self.segments, self.B * S.HKV
        self.scan = self.both(causal_sums_kernel, grid, scalars, constants | {"TOTALS": False})
        self.totals = self.both(causal_sums_kernel, grid, scalars, constants | {"TOTALS": True})

    def constants(self, name: str) -> dict[str, Any]:
        tiling = dict(TILING[name])
        return {"S": self.S._replace(BS=min(self.S.BR, tiling.pop("BS", 64))), **tiling}

    def both(self, kernel: Any, grid: tuple[int, int], scalars: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Launch a kernel for keys and values: once if they are equally wide."""
        if self.S.D == self.S.E:
            return self.launch(kernel, (*grid, 2), scalars, constants | {"SIDE": 2})
        launches = [self.launch(kernel, grid, scalars, constants | {"SIDE": side}) for side in range(2)]

        def run(*pointers: Any) -> None:
            for launch in launches:
                launch(*pointers)

        return run

    def sums(self, xs: Any, ys: Any, starts: Any, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Write Σ x yᵀ before each chunk, after each if backward, to `states`; return the sums over all tokens."""
        S, like = self.S, states[0]
        if self.segments == 1:
            shapes = ((self.B, S.HKV, S.R, width) for width in (S.D, S.E))
            ends = tuple(like.new_empty(shape, dtype=torch.float32) for shape in shapes)
            self.scan((*xs, *ys), starts, tuple(states), ends)
            return ends
        shapes = ((self.B, S.HKV, self.segments + 1, S.R, width) for width in (S.D, S.E))
        held = tuple(like.new_empty(shape, dtype=torch.float32) for shape in shapes)
        for buffer, start in zip(held, starts, strict=True):
            if start is None:
                buffer[:, :, 0].zero_()
            else:
                buffer[:, :, 0] = start
        self.totals((*xs, *ys), (None, None), tuple(states), held)
        for buffer in held:
            torch.cumsum(buffer, 2, out=buffer)
        self.scan((*xs, *ys), held, tuple(states), held)
        return tuple(buffer[:, :, -1].contiguous() for buffer in held)


class _CausalForward(_CausalPlan):
    def __init__(self, device: int, key: Signature) -> None:
        super().__init__(device, key, back=False)
        q, k, v, e, f = self.strides
        S = self.S
        self.sum_launches((e, f, k, v), S.R)
        scale = S.D**-0.5 * math.log2(math.e)
        grid = self.chunks, self.B * S.H
        constants = self.constants("read")
        self.read = self.launch(causal_forward_kernel, grid, (self.T, scale, self.strides), constants)


class _CausalBackward(_CausalPlan):
    """heads: number of heads of the tables. shared: whether all sequences have the same tables."""

    def __init__(self, device: int, key: Signature, heads: int, shared: bool) -> None:
        super().__init__(device, key, back=True)
        S, T, d_out = self.S, self.T, Strides.of(key[7])
        q, k, v, e, f = self.strides
        rows = self.chunks * CHUNK * S.BR
        self.weights_shape = self.B, S.H, self.chunks * CHUNK, S.BR
        weights = Strides(S.H * rows, S.BR, rows)
        self.sum_launches((weights, weights, q, d_out), S.BR)
        scale = S.D**-0.5
        scalars = T, scale * math.log2(math.e), scale, self.strides, d_out
        grid = self.chunks, self.B * S.H
        self.queries = self.launch(causal_backward_queries_kernel, grid, scalars, self.constants("queries"))
        constants = self.constants("tables")
        constants["S"] = constants["S"]._replace(HT=heads)
        tiles = self.chunks * (S.BR // constants["S"].BS)
        # As few parts of a shared table's gradient as there are programs for.
        batches = max(1, min(self.B, tiles * 2 * heads * self.B // TABLE_PROGRAMS)) if shared else 1
        parts = -(-self.B // batches)
        self.table_shape = parts, T, heads, S.R
        scalars = T, self.B, (k, v)
        constants["BATCHES"] = batches
        self.tables = self.both(causal_backward_tables_kernel, (tiles, parts * heads), scalars, constants)
        grid = self.chunks, self.B * S.HKV
        self.keys = self.both(causal_backward_keys_kernel, grid, (T, (e, f, q, d_out)), self.constants("keys"))


@triton.jit
def _wide(strides):
    """Strides as int64 numbers of the program, whatever the compiler specialized."""
    return tl.cast(strides.b, tl.int64), tl.cast(strides.t, tl.int64), tl.cast(strides.h, tl.int64)


@triton.jit
def _side(first, second, SIDE: tl.constexpr):
    """The first, or the second; if SIDE is 2 the first in programs 0 of axis 2, the second in programs 1.

    A branch here instead of one around the whole program halves its shared memory.
    """
    if SIDE == 0:
        x = first
    elif SIDE == 1:
        x = second
    elif tl.program_id(2) == 0:
        x = first
    else:
        x = second
    return x


@triton.jit(do_not_specialize=["T", "chunks", "run", "segments"])
def causal_sums_kernel(
    inputs, starts, states, ends, T, chunks, run, segments, strides,
    S: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BACK: tl.constexpr, TOTALS: tl.constexpr,
    SIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of keys, or of values, before each chunk; in the backward pass of queries, or of dout, after each.

    A program computes Σ x yᵀ of BS columns of x over the chunks of one segment and one kv head.

    states: (B, Hkv, chunks, BR, ·). starts, ends: (B, Hkv, R, ·), or with more than one segment (B, Hkv, segments + 1,
    R, ·), the sums before each segment. TOTALS: write the sums over each segment to the next one's slot of `ends`.
    """
    p_e, p_f, p_k, p_v = inputs
    e, f, k, v = strides
    p_x, p_y = _side(p_e, p_f, SIDE), _side(p_k, p_v, SIDE)
    x_b, x_t, x_h = _side(_wide(e), _wide(f), SIDE)
    y_b, y_t, y_h = _side(_wide(k), _wide(v), SIDE)
    p_states, p_end = _side(states[0], states[1], SIDE), _side(ends[0], ends[1], SIDE)
    D: tl.constexpr = S.E if SIDE == 1 else S.D
    BD: tl.constexpr = S.BE if SIDE == 1 else S.BD
    TILES: tl.constexpr = S.BR // S.BS
    i_r, i_s = tl.program_id(0) % TILES * S.BS, tl.program_id(0) // TILES
    i_x = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_x // S.HKV, i_x % S.HKV
    p_x += i_b * x_b + i_h * GROUP * x_h + i_r
    p_y += i_b * y_b + i_h * GROUP * y_h
    i_t, i_n, i_d = tl.arange(0, S.C), tl.arange(0, S.BS), tl.arange(0, BD)
    m_s = (i_r + i_n < S.R)[:, None] & (i_d < D)[None, :]
    i_held = (i_r + i_n)[:, None] * D + i_d[None, :]
    slots = tl.where(segments > 1, segments + 1, 1)
    b_sum = zeros(S.BS, BD)
    if starts[0] is not None:
        p_start = _side(starts[0], starts[1], SIDE)
        b_sum += tl.load(p_start + (i_x * slots + i_s) * (S.R * D) + i_held, mask=m_s, other=0.0)
    p_states += i_x * chunks * (S.BR * BD) + (i_r + i_n)[:, None] * BD + i_d[None, :]
    first = i_s * run
    for n in tl.range(first * GROUP, tl.minimum(first + run, chunks) * GROUP, num_stages=STAGES):
        i_c, g = n // GROUP, n % GROUP
        if BACK:
            i_c = chunks - 1 - i_c
        if not TOTALS:
            if GROUP == 1:
                tl.store(p_states + tl.cast(i_c, tl.int64) * (S.BR * BD), b_sum.to(p_states.dtype.element_ty))
            else:
                if g == 0:
                    tl.store(p_states + tl.cast(i_c, tl.int64) * (S.BR * BD), b_sum.to(p_states.dtype.element_ty))
        i_0 = tl.cast(i_c, tl.int64) * S.C
        m_x = (i_t < T - i_0)[:, None]
        if WIDTH != S.BR:
            m_x = m_x & (i_r + i_n < WIDTH)[None, :]
        b_x = tl.load(p_x + i_0 * x_t + g * x_h + i_t[:, None] * x_t + i_n[None, :], mask=m_x, other=0.0)
        b_y = load_rows(p_y + i_0 * y_t + g * y_h, y_t, T - i_0, D, S.C, BD)
        b_sum = tl.dot(tl.trans(b_x), b_y, b_sum)
    if TOTALS:
        tl.store(p_end + (i_x * slots + i_s + 1) * (S.R * D) + i_held, b_sum, mask=m_s)
    else:
        if segments == 1:
            tl.store(p_end + i_x * (S.R * D) + i_held, b_sum, mask=m_s)


@triton.jit
def _load_sums(p_x, r, BLOCK: tl.constexpr, S: tl.constexpr):
    """Rows r to r + BS of the sums before a chunk, (BS, BLOCK)."""
    return tl.load(p_x + (r + tl.arange(0, S.BS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _load_table(p_x, stride, rows, r, S: tl.constexpr):
    """Columns r to r + BS of the first `rows` rows of a table, (C, BS)."""
    i_t, i_r = tl.arange(0, S.C), r + tl.arange(0, S.BS)
    m_x = (i_t < rows)[:, None]
    if S.R != S.BR:
        m_x = m_x & (i_r < S.R)[None, :]
    return tl.load(p_x + i_t[:, None] * stride + i_r[None, :], mask=m_x, other=0.0)


@triton.jit
def _scores(b_q, b_a, b_keys, b_e, r, S: tl.constexpr):
    """S (C, BS), −inf in padded columns."""
    b_s = tl.dot(b_a, b_e, tl.dot(b_q, tl.trans(b_keys)))
    if S.R != S.BR:
        b_s = tl.where((r + tl.arange(0, S.BS) < S.R)[None, :], b_s, float("-inf"))
    return b_s


@triton.jit
def _lower(b_x, dtype: tl.constexpr):
    """tril(x)."""
    i_t = tl.arange(0, b_x.shape[0])
    return tl.where(i_t[None, :] <= i_t[:, None], b_x, 0.0).to(dtype)


@triton.jit
def _store_pairs(p_x, i_b, i_h, b_x, S: tl.constexpr):
    """Store (C, C) pairs of queries and keys of a program's chunk."""
    i_t = tl.arange(0, S.C)
    i_own = (i_b * S.H + i_h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_x + i_own * (S.C * S.C) + i_t[:, None] * S.C + i_t[None, :], b_x)


@triton.jit(do_not_specialize=["T"])
def causal_forward_kernel(
    inputs, p_keys, p_values, p_out, p_lse, p_pf, T, scale, strides, S: tl.constexpr, STAGES: tl.constexpr
):
    """One chunk of one query head, over tiles of the sums. scale: that of the scores times log₂ e.

    p_pf: (B, H, chunks, C, C) tril(P fᵀ), for the backward pass.
    """
    p_q, p_k, p_v, p_e, p_f = inputs
    q, k, v, e, f = strides
    i_c, i_0, rows = tl.program_id(0), tl.program_id(0) * S.C, T - tl.program_id(0) * S.C
    i_b, i_h = (tl.program_id(1) // S.H).to(tl.int64), tl.program_id(1) % S.H
    i_kv = i_h // (S.H // S.HKV)
    i_x = (i_b * S.HKV + i_kv) * tl.num_programs(0) + i_c
    p_keys += i_x * (S.BR * S.BD)
    p_values += i_x * (S.BR * S.BE)
    p_e, p_f = token_pointer(p_e, e, i_b, i_0, i_kv), token_pointer(p_f, f, i_b, i_0, i_kv)
    dtype: tl.constexpr = p_q.dtype.element_ty
    b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_h), q.t, rows, S.D, S.C, S.BD)
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_kv), k.t, rows, S.D, S.C, S.BD)
    b_a = _lower(tl.dot(b_q, tl.trans(b_k)), dtype)
    b_out, b_w = zeros(S.C, S.BE), zeros(S.C, S.C)
    b_max = tl.full((S.C,), float("-inf"), tl.float32)
    b_sum = zeros(S.C)
    for r in tl.range(0, S.BR, S.BS, num_stages=STAGES):
        b_keys, b_values = _load_sums(p_keys, r, S.BD, S), _load_sums(p_values, r, S.BE, S)
        b_e, b_f = _load_table(p_e, e.t, rows, r, S), _load_table(p_f, f.t, rows, r, S)
        b_s = _scores(b_q, b_a, b_keys, b_e, r, S) * scale
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_decay = exp2(b_max - b_new)
        b_p = exp2(b_s - b_new[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_max = b_new
        b_p = b_p.to(dtype)
        b_out = tl.dot(b_p, b_values, b_out * b_decay[:, None])
        b_w = tl.dot(b_p, tl.trans(b_f), b_w * b_decay[:, None])
    b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_kv), v.t, rows, S.E, S.C, S.BE)
    b_inverse = (1.0 / b_sum)[:, None]
    b_w = _lower(b_w * b_inverse, dtype)
    b_out = tl.dot(b_w, b_v, b_out * b_inverse)
    _store_pairs(p_pf, i_b, i_h, b_w, S)
    p_out += ((i_b * T + i_0) * S.H + i_h) * S.E
    store_rows(p_out, S.H * S.E, rows, b_out, S.E, S.C, S.BE)
    i_t = tl.arange(0, S.C)
    tl.store(p_lse + (i_b * S.H + i_h) * T + i_0 + i_t, b_max + log2(b_sum), mask=i_t < rows)


@triton.jit(do_not_specialize=["T"])
def causal_backward_queries_kernel(
    inputs, p_keys, p_values, p_out, p_lse, p_d_out, p_d_s, p_p, p_a, p_b, p_de, p_d_q,
    T, scale, score_scale, strides, d_out, S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P, dS and dq of one chunk of one query head.

    p_d_s, p_p: (B, H, chunks · C, BR). p_a, p_b, p_de: (B, H, chunks, C, C) A, B and tril(dS eᵀ).
    """
    p_q, p_k, p_v, p_e, p_f = inputs
    q, k, v, e, f = strides
    i_c, i_0, rows = tl.program_id(0), tl.program_id(0) * S.C, T - tl.program_id(0) * S.C
    i_b, i_h = (tl.program_id(1) // S.H).to(tl.int64), tl.program_id(1) % S.H
    i_kv = i_h // (S.H // S.HKV)
    i_x = (i_b * S.HKV + i_kv) * tl.num_programs(0) + i_c
    p_keys += i_x * (S.BR * S.BD)
    p_values += i_x * (S.BR * S.BE)
    p_e, p_f = token_pointer(p_e, e, i_b, i_0, i_kv), token_pointer(p_f, f, i_b, i_0, i_kv)
    dtype: tl.constexpr = p_q.dtype.element_ty
    i_t, i_n = tl.arange(0, S.C), tl.arange(0, S.BS)
    i_w = ((i_b * S.H + i_h) * tl.num_programs(0) + i_c) * (S.C * S.BR) + i_t[:, None] * S.BR + i_n[None, :]
    p_d_s += i_w
    p_p += i_w
    i_o = (i_b * T + i_0) * S.H + i_h
    b_q = load_rows(token_pointer(p_q, q, i_b, i_0, i_h), q.t, rows, S.D, S.C, S.BD)
    b_k = load_rows(token_pointer(p_k, k, i_b, i_0, i_kv), k.t, rows, S.D, S.C, S.BD)
    b_v = load_rows(token_pointer(p_v, v, i_b, i_0, i_kv), v.t, rows, S.E, S.C, S.BE)
    b_d_out = load_rows(token_pointer(p_d_out, d_out, i_b, i_0, i_h), d_out.t, rows, S.E, S.C, S.BE)
    b_out = load_rows(p_out + i_o * S.E, S.H * S.E, rows, S.E, S.C, S.BE)
    b_delta = tl.sum(b_out.to(tl.float32) * b_d_out.to(tl.float32), 1) * score_scale
    b_lse = tl.load(p_lse + (i_b * S.H + i_h) * T + i_0 + i_t, mask=i_t < rows, other=float("inf"))
    b_a, b_b = _lower(tl.dot(b_q, tl.trans(b_k)), dtype), _lower(tl.dot(b_d_out, tl.trans(b_v)), dtype)
    _store_pairs(p_a, i_b, i_h, b_a, S)
    _store_pairs(p_b, i_b, i_h, b_b, S)
    b_d_q, b_w = zeros(S.C, S.BD), zeros(S.C, S.C)
    for r in tl.range(0, S.BR, S.BS, num_stages=STAGES):
        b_keys, b_values = _load_sums(p_keys, r, S.BD, S), _load_sums(p_values, r, S.BE, S)
        b_e, b_f = _load_table(p_e, e.t, rows, r, S), _load_table(p_f, f.t, rows, r, S)
        b_p = exp2(_scores(b_q, b_a, b_keys, b_e, r, S) * scale - b_lse[:, None])
        b_d_p = tl.dot(b_b, b_f, tl.dot(b_d_out, tl.trans(b_values)))
        b_d_s = (b_p * (b_d_p * score_scale - b_delta[:, None])).to(dtype)
        tl.store(p_p + r, b_p.to(dtype))
        tl.store(p_d_s + r, b_d_s)
        b_d_q = tl.dot(b_d_s, b_keys, b_d_q)
        b_w = tl.dot(b_d_s, tl.trans(b_e), b_w)
    b_w = _lower(b_w, dtype)
    b_d_q = tl.dot(b_w, b_k, b_d_q)
    _store_pairs(p_de, i_b, i_h, b_w, S)
    store_rows(p_d_q + i_o * S.D, S.H * S.D, rows, b_d_q, S.D, S.C, S.BD)


@triton.jit(do_not_specialize=["T", "B"])
def causal_backward_tables_kernel(
    inputs, pairs, weights, d_states, outputs, T, B, strides,
    S: tl.constexpr, SIDE: tl.constexpr, BATCHES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """de, or df, of one chunk and BS columns: Σ y Gᵀ + pᵀ w over BATCHES sequences and all heads that share a table.

    y are keys or values, G the gradients of their sums after the chunk, p the pairs A or B, w is dS or P.
    """
    p_y = _side(inputs[0], inputs[1], SIDE)
    y_b, y_t, y_h = _side(_wide(strides[0]), _wide(strides[1]), SIDE)
    p_pairs, p_w = _side(pairs[0], pairs[1], SIDE), _side(weights[0], weights[1], SIDE)
    p_sums, p_d_x = _side(d_states[0], d_states[1], SIDE), _side(outputs[0], outputs[1], SIDE)
    D: tl.constexpr = S.E if SIDE == 1 else S.D
    BD: tl.constexpr = S.BE if SIDE == 1 else S.BD
    GROUP: tl.constexpr = S.H // S.HKV
    HEADS: tl.constexpr = S.H // S.HT
    TILES: tl.constexpr = S.BR // S.BS
    chunks = tl.num_programs(0) // TILES
    i_c, i_r = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES * S.BS
    i_0, rows = i_c * S.C, T - tl.program_id(0) // TILES * S.C
    i_g, i_e = (tl.program_id(1) // S.HT).to(tl.int64), tl.program_id(1) % S.HT
    i_t, i_n, i_d = tl.arange(0, S.C), tl.arange(0, S.BS), tl.arange(0, BD)
    p_pairs += i_t[:, None] * S.C + i_t[None, :]
    p_w += i_t[:, None] * S.BR + (i_r + i_n)[None, :]
    p_sums += (i_r + i_n)[:, None] * BD + i_d[None, :]
    b_d_x = zeros(S.C, S.BS)
    first = i_g * BATCHES
    for n in tl.range(0, tl.minimum(B - first, BATCHES) * HEADS, num_stages=STAGES):
        i_b, i_q = first + n // HEADS, i_e * HEADS + n % HEADS
        i_own = (i_b * S.H + i_q) * chunks + i_c
        b_p = tl.load(p_pairs + i_own * (S.C * S.C))
        b_w = tl.load(p_w + i_own * (S.C * S.BR))
        b_d_x = tl.dot(tl.trans(b_p), b_w, b_d_x)
        i_h = i_q // GROUP
        if GROUP == 1 or i_q % GROUP == 0:
            b_y = load_rows(p_y + i_b * y_b + i_0 * y_t + i_h * y_h, y_t, rows, D, S.C, BD)
            b_g = tl.load(p_sums + ((i_b * S.HKV + i_h) * chunks + i_c) * (S.BR * BD))
            b_d_x = tl.dot(b_y, tl.trans(b_g), b_d_x)
    p_d_x += ((i_g * T + i_0) * S.HT + i_e) * S.R + i_r + i_t[:, None] * (S.HT * S.R) + i_n[None, :]
    tl.store(p_d_x, b_d_x, mask=(i_t < rows)[:, None] & (i_r + i_n < S.R)[None, :])


@triton.jit(do_not_specialize=["T"])
def causal_backward_keys_kernel(
    inputs, pairs, d_states, outputs, T, strides, S: tl.constexpr, SIDE: tl.constexpr, STAGES: tl.constexpr
):
    """dk, or dv, of one chunk and kv head: x G + pᵀ a, with a table x, pairs p of dS eᵀ or P fᵀ, and a = q or dout."""
    p_e, p_f, p_q, p_d_out = inputs
    e, f, q, d_out = strides
    p_x, p_a = _side(p_e, p_f, SIDE), _side(p_q, p_d_out, SIDE)
    x_b, x_t, x_h = _side(_wide(e), _wide(f), SIDE)
    a_b, a_t, a_h = _side(_wide(q), _wide(d_out), SIDE)
    p_pairs, p_sums = _side(pairs[0], pairs[1], SIDE), _side(d_states[0], d_states[1], SIDE)
    p_d_y = _side(outputs[0], outputs[1], SIDE)
    D: tl.constexpr = S.E if SIDE == 1 else S.D
    BD: tl.constexpr = S.BE if SIDE == 1 else S.BD
    GROUP: tl.constexpr = S.H // S.HKV
    chunks = tl.num_programs(0)
    i_c, i_0, rows = tl.program_id(0), tl.program_id(0).to(tl.int64) * S.C, T - tl.program_id(0) * S.C
    i_b, i_h = (tl.program_id(1) // S.HKV).to(tl.int64), tl.program_id(1) % S.HKV
    i_t = tl.arange(0, S.C)
    p_x += i_b * x_b + i_0 * x_t + i_h * x_h
    p_a += i_b * a_b + i_0 * a_t
    p_sums += ((i_b * S.HKV + i_h) * chunks + i_c) * (S.BR * BD)
    p_pairs += i_t[:, None] * S.C + i_t[None, :]
    b_d_y = zeros(S.C, BD)
    for r in tl.range(0, S.BR, S.BS, num_stages=STAGES):
        b_d_y = tl.dot(_load_table(p_x, x_t, rows, r, S), _load_sums(p_sums, r, BD, S), b_d_y)
    for g in range(GROUP):
        i_q = i_h * GROUP + g
        b_p = tl.load(p_pairs + ((i_b * S.H + i_q) * chunks + i_c) * (S.C * S.C))
        b_a = load_rows(p_a + i_q * a_h, a_t, rows, D, S.C, BD)
        b_d_y = tl.dot(tl.trans(b_p), b_a, b_d_y)
    store_rows(p_d_y + ((i_b * T + i_0) * S.HKV + i_h) * D, S.HKV * D, rows, b_d_y, D, S.C, BD)
