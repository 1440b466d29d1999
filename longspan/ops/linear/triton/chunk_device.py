"""What the kernels of causal linear attention share: feature maps on blocks, their derivatives, scales, and states.

A chunk is C tokens of one head. A key's features are f · exp(β), as in `ops.features`; β is 0 for maps without a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.exp import exact_exp
from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.tiles import FLOOR, load_column, product, zeros


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
    NORMALIZE: bool
    DOT: Any
    PRECISION: str
    TILES: int = 1
    QUERIES: bool = False
    KEYS: bool = False
    VALUES: bool = False


@triton.jit
def load_weight(p_weight, S: tl.constexpr):
    """The projection of FAVOR+ (M, D), scaled, as two (BM, BD) blocks that add up to it; 0 for maps without one."""
    b_weight, b_low = 0, 0
    if p_weight is not None:
        i_m, i_d = tl.arange(0, S.BM), tl.arange(0, S.BD)
        m_w = (i_m < S.M)[:, None] & (i_d < S.D)[None, :]
        b_whole = tl.load(p_weight + i_m[:, None] * S.D + i_d[None, :], mask=m_w, other=0.0) * S.D**-0.25
        b_weight = b_whole.to(S.DOT)
        b_low = (b_whole - b_weight.to(tl.float32)).to(S.DOT)
    return b_weight, b_low


@triton.jit
def _project(b_x, b_weight, b_low, S: tl.constexpr):
    """w·x with the precision of float32, which an exponent needs: x is exact, w is the sum of two halves."""
    if tl.bfloat16 == S.DOT:
        b_p = tl.dot(b_x, tl.trans(b_low))
        b_p = tl.dot(b_x, tl.trans(b_weight), b_p)
    else:
        b_p = _times_weight(b_x.to(tl.float32), tl.trans(b_weight), b_x)
    return b_p


@triton.jit
def _times_weight(b_x, b_weight, b_like):
    """x·w with the precision that inputs like these need: of float32 three products of tf32 lose some."""
    if b_like.dtype == tl.float32:
        b_x = product(b_x, b_weight, "ieee")
    else:
        b_x = tl.dot(b_x, b_weight, input_precision="tf32x3")
    return b_x


@triton.jit
def query_features(b_x, b_weight, b_low, S: tl.constexpr):
    """φ(q) (C, BM), float32; zeros beyond M features. A softmax's sum cancels where attention is normalized: left
    out with bfloat16; float32 and float16 would miss how its gradient takes rounding errors with it.
    """
    m_m = (tl.arange(0, S.BM) < S.M)[None, :]
    if S.MAP == "favor":
        b_f = _project(b_x, b_weight, b_low, S)
    else:
        b_f = pointwise_features(b_x.to(tl.float32), S.MAP, True)
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
    """d q (C, BD) from d φ(q), q and φ(q). Where attention is normalized φ(q) · d φ(q) is 0: its size cancels."""
    b_g = pointwise_gradient(b_g, b_x, b_f, S.MAP)
    if S.MAP == "softmax":
        if not (S.NORMALIZE and tl.bfloat16 == S.DOT):
            b_g -= tl.sum(b_g * b_f, 1)[:, None]
        b_g = b_g * b_f
    if S.MAP == "favor":
        b_g = _times_weight((b_g * b_f).to(S.DOT), b_weight, b_x)
    return b_g


@triton.jit
def key_logits(b_x, b_weight, b_low, S: tl.constexpr):
    """Of maps that are exponentials, log φ(k) (C, BM); of the others k itself."""
    b_f = b_x.to(tl.float32)
    if S.MAP == "favor":
        b_half = tl.sum(b_f * b_f, 1) * (0.5 * S.D**-0.5)
        b_f = _project(b_x, b_weight, b_low, S) - b_half[:, None]
    if S.BM != S.M and (S.MAP == "softmax" or S.MAP == "favor"):
        b_f = tl.where((tl.arange(0, S.BM) < S.M)[None, :], b_f, FLOOR)
    return b_f


@triton.jit
def key_features(b_f, b_beta, S: tl.constexpr):
    """f (C, BM), float32, φ(k) / exp(β) from logits and β (C,). A hidden key has features too: its β is FLOOR, or its
    pairs are masked.
    """
    b_f = pointwise_features(b_f, S.MAP, True)
    if S.MAP == "softmax" or S.MAP == "favor":
        b_f = exact_exp(b_f - tl.where(b_beta == FLOOR, 0, b_beta)[:, None])
    if S.BM != S.M and S.MAP != "identity":
        b_f = tl.where((tl.arange(0, S.BM) < S.M)[None, :], b_f, 0)
    return b_f


@triton.jit
def key_gradient(b_g, b_x, b_f, b_weight, S: tl.constexpr):
    """d k (C, BD) from d f, k and f; β is a constant."""
    b_g = pointwise_gradient(b_g, b_x, b_f, S.MAP)
    if S.MAP == "softmax":
        b_g = b_g * b_f
    if S.MAP == "favor":
        b_g = b_g * b_f
        b_total = tl.sum(b_g, 1) * S.D**-0.5
        b_g = _times_weight(b_g.to(S.DOT), b_weight, b_x)
        b_g = b_g - b_x.to(tl.float32) * b_total[:, None]
    return b_g


@triton.jit
def scales(p_reference, p_beta, p_peak, i_x, i_c, T, segments, chunks, S: tl.constexpr):
    """Of chunk i_c its keys' β and the largest before each query (C,); c and the same at its end, the log scales of the
    sums before and after it; and what brings the sums before its segment and those since then to c, and the gradients
    after its segment to its end. What a kernel does not use is not loaded.
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


@triton.jit
def _rows(i_x, i_m, S: tl.constexpr):
    """Where rows i_m of head i_x begin in a state (B, Hkv, M, E), with a column more for normalizers."""
    COLUMNS: tl.constexpr = S.E + 1 if S.NORMALIZE else S.E
    return i_x * (S.M * COLUMNS) + i_m * COLUMNS


@triton.jit
def load_state(p_x, i_x, i_m, S: tl.constexpr):
    """Rows i_m of a head's sums (C, BE) and normalizers (C,) as callers have them; zeros of no state."""
    b_kv = zeros(S.C, S.BE)
    b_z = zeros(S.C)
    if p_x is not None:
        i_in, i_e = _rows(i_x, i_m, S), tl.arange(0, S.BE)
        m_m = i_m < S.M
        b_kv = tl.load(p_x + i_in[:, None] + i_e[None, :], mask=m_m[:, None] & (i_e < S.E)[None, :], other=0.0)
        if S.NORMALIZE:
            b_z = tl.load(p_x + i_in + S.E, mask=m_m, other=0.0)
    return b_kv, b_z


@triton.jit
def store_state(p_x, i_x, i_m, b_kv, b_z, S: tl.constexpr):
    """As `load_state`, the other way."""
    if p_x is not None:
        i_in, i_e = _rows(i_x, i_m, S), tl.arange(0, S.BE)
        m_m = i_m < S.M
        tl.store(p_x + i_in[:, None] + i_e[None, :], b_kv, mask=m_m[:, None] & (i_e < S.E)[None, :])
        if S.NORMALIZE:
            tl.store(p_x + i_in + S.E, b_z, mask=m_m)
