"""What the kernels of causal linear attention share: where a program's tokens and sums lie, and how they are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longspan.kernels.blocks import (
    FLOOR,
    exact_exp,
    key_features,
    key_logits,
    load_column,
    load_rows,
    load_sums,
    load_weight,
    query_features,
    store_rows,
    store_sums,
)


class Sizes(NamedTuple):
    """What kernels are compiled for: heads, dimensions, features, values, blocks of them (powers of two), and C tokens,
    or rows of the sums, at once, by tiles of BE values.

    SCALED: keys have log scales β. DOT: what products are of. QUERIES, KEYS, VALUES: whose gradients are made.
    """

    H: int
    HKV: int
    D: int
    M: int
    E: int
    BD: int
    BM: int
    BE: int
    C: int
    MAP: str
    SCALED: bool
    NORMALISE: bool
    DOT: Any
    PRECISION: str
    TILES: int = 1
    QUERIES: bool = False
    KEYS: bool = False
    VALUES: bool = False


class Steps(NamedTuple):
    """From row to row, from token to token and from head to head of a tensor (B, T, H, D)."""

    b: int
    t: int
    h: int


@triton.jit
def place(stretches, HEADS: tl.constexpr, TILES: tl.constexpr):
    """The head, tile of values, stretch of tokens and row of the batch that a program is for."""
    pid = tl.program_id(0)
    i_h = pid % HEADS
    i_e = (pid // HEADS) % TILES
    i_s = (pid // (HEADS * TILES)) % stretches
    return i_h, i_e, i_s, (pid // (HEADS * TILES) // stretches).to(tl.int64)


@triton.jit
def at(p_x, steps, i_b, i_t, i_h, column):
    return p_x + (i_b * steps.b + i_t.to(tl.int64) * steps.t + i_h.to(tl.int64) * steps.h + column)


@triton.jit
def load_inputs(p_x, stride_t, rows, S: tl.constexpr):
    """Rows of q or k (C, BD)."""
    return load_rows(p_x, stride_t, rows, S.D, S.C, S.BD, S.D == S.BD)


@triton.jit
def load_values(p_x, stride_t, rows, i_e, S: tl.constexpr):
    """Rows of a tile of v or of what is as wide (C, BE)."""
    return load_rows(p_x, stride_t, rows, S.E - i_e * S.BE, S.C, S.BE, S.E % S.BE == 0)


@triton.jit
def store_values(p_x, stride_t, rows, i_e, b_x, S: tl.constexpr):
    store_rows(p_x + i_e * S.BE, stride_t, rows, S.E - i_e * S.BE, b_x, S.C, S.BE, S.E % S.BE == 0)


@triton.jit
def load_tile(p_x, i_x, i_e, S: tl.constexpr):
    """One tile (BM, BE) of matrix i_x of a stack of sums."""
    return load_sums(p_x + i_e * S.BE, i_x, S.BM, S.BE, S.BE * S.TILES)


@triton.jit
def store_tile(p_x, i_x, b_x, S: tl.constexpr):
    store_sums(p_x, i_x, b_x, S.BM, S.BE, S.BE * S.TILES)


@triton.jit
def projection(p_weight, S: tl.constexpr):
    return load_weight(p_weight, S.D, S.M, S.BD, S.BM, S.DOT)


@triton.jit
def of_queries(b_q, b_weight, b_low, S: tl.constexpr):
    """φ(q) (C, BM), float32."""
    MAP: tl.constexpr = S.MAP
    return query_features(b_q, b_weight, b_low, S.M, S.BM, MAP, S.NORMALISE, S.DOT)


@triton.jit
def of_keys(b_k, b_weight, b_low, b_beta, S: tl.constexpr):
    """f (C, BM), float32: φ(k) / exp(β)."""
    MAP: tl.constexpr = S.MAP
    b_f = key_logits(b_k, b_weight, b_low, S.D, S.M, S.BM, MAP, S.DOT)
    return key_features(b_f, b_beta, S.M, S.BM, MAP)


@triton.jit
def scales(p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S: tl.constexpr):
    """Of chunk i_c its keys' β and the largest before each query (C,); c and the same at its end, the log scales of the
    sums before and after it; and what brings the sums before its segment and those since then to c, and the gradients
    after its segment to its end. What a kernel does not use is not loaded.
    """
    b_beta = tl.full((S.C,), 0.0, tl.float32)
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


@triton.jit
def _rows(i_x, i_m, S: tl.constexpr):
    """Where rows i_m of head i_x begin in a state (B, Hkv, M, E), with a column more for normalisers."""
    COLUMNS: tl.constexpr = S.E + 1 if S.NORMALISE else S.E
    return i_x * (S.M * COLUMNS) + i_m * COLUMNS


@triton.jit
def load_state(p_x, i_x, i_m, S: tl.constexpr):
    """Rows i_m of a head's sums (C, BE) and normalisers (C,) as callers have them; zeros of no state."""
    b_kv = tl.full((S.C, S.BE), 0.0, tl.float32)
    b_z = tl.full((S.C,), 0.0, tl.float32)
    if p_x is not None:
        i_in, i_e = _rows(i_x, i_m, S), tl.arange(0, S.BE)
        m_m = i_m < S.M
        b_kv = tl.load(p_x + i_in[:, None] + i_e[None, :], mask=m_m[:, None] & (i_e < S.E)[None, :], other=0.0)
        if S.NORMALISE:
            b_z = tl.load(p_x + i_in + S.E, mask=m_m, other=0.0)
    return b_kv, b_z


@triton.jit
def store_state(p_x, i_x, i_m, b_kv, b_z, S: tl.constexpr):
    """As `load_state`, the other way."""
    if p_x is not None:
        i_in, i_e = _rows(i_x, i_m, S), tl.arange(0, S.BE)
        m_m = i_m < S.M
        tl.store(p_x + i_in[:, None] + i_e[None, :], b_kv, mask=m_m[:, None] & (i_e < S.E)[None, :])
        if S.NORMALISE:
            tl.store(p_x + i_in + S.E, b_z, mask=m_m)
