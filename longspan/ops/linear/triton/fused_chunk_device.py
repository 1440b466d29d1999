"""What the kernels that walk segments share: blocks in and out, references, feature maps on blocks, their derivatives.

A key's features are f · 2ⁿ with a whole number n, its reference: to go from one reference to another moves no digit of
f. Maps that are no exponentials have none.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from longspan.ops.common.exp import LOG2E, exp2, log2
from longspan.ops.common.feature_maps import RELU_EPSILON
from longspan.ops.common.tiles import FLOOR, ZERO_NORMALIZER, inverse, running_maximum

# Features may be larger than their reference says, by 2 to this power, before references must be looked at closely.
SLACK = tl.constexpr(32.0)


class Sizes(NamedTuple):
    """What kernels are compiled for: heads, their numbers, tokens in a chunk, padded numbers, the map, whether it is an
    exponential, whether every row of every chunk is there, and the steps from token to token of q, k, v and the
    result's gradient. 0 for what a kernel does not look at.
    """

    H: int
    HKV: int
    D: int
    E: int
    C: int
    BD: int
    BE: int
    MAP: str
    SCALED: bool
    WHOLE: bool
    STRIDE_Q: int = 0
    STRIDE_K: int = 0
    STRIDE_V: int = 0
    STRIDE_D: int = 0


class BatchStrides(NamedTuple):
    """The steps of a tensor from row to row of the batch, and from head to head."""

    b: int
    h: int


@triton.jit
def steps_in(i_s, T, chunks, S: tl.constexpr):
    """How many chunks segment i_s has: the last may have fewer than the others."""
    return tl.minimum(chunks, tl.cdiv(T - i_s * chunks * S.C, S.C))


@triton.jit
def segment(p_lengths, T, segments, chunks, BACK: tl.constexpr, S: tl.constexpr):
    """Of this program: batch, key head, that head among all, segment, the first chunk to walk, its first token, and how
    many tokens from there on there are and how many are seen. BACK: from the last chunk.
    """
    pid = tl.program_id(0)
    i_h = pid % S.HKV
    i_s = (pid // S.HKV) % segments
    i_b = (pid // S.HKV // segments).to(tl.int64)
    i_x = i_b * S.HKV + i_h
    i_c = i_s * chunks
    if BACK:
        i_c = i_c + steps_in(i_s, T, chunks, S) - 1
    i_0 = i_c * S.C
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    return i_b, i_h, i_x, i_s, i_c, i_0, left, rows


@triton.jit
def load_rows(
    p_x, STRIDE: tl.constexpr, rows, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, CUT: tl.constexpr = False
):
    """The first rows and D columns of the (C, BD) block at p_x, zeros in the rest. CUT: even where chunks are whole."""
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, BD)
    p_x += i_t[:, None] * STRIDE + i_d[None, :]
    if S.WHOLE and not CUT and D == BD:
        return tl.load(p_x)
    m_x = (i_t < rows)[:, None]
    if D != BD:
        m_x = m_x & (i_d < D)[None, :]
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_rows(p_x, STRIDE: tl.constexpr, rows, b_x, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr):
    """As `load_rows`, the other way."""
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, BD)
    p_x += i_t[:, None] * STRIDE + i_d[None, :]
    b_x = b_x.to(p_x.dtype.element_ty)
    if S.WHOLE and D == BD:
        tl.store(p_x, b_x)
    else:
        m_x = (i_t < rows)[:, None]
        if D != BD:
            m_x = m_x & (i_d < D)[None, :]
        tl.store(p_x, b_x, mask=m_x)


@triton.jit
def load_column(p_x, STRIDE: tl.constexpr, rows, S: tl.constexpr):
    i_t = tl.arange(0, S.C)
    if S.WHOLE:
        return tl.load(p_x + i_t * STRIDE)
    return tl.load(p_x + i_t * STRIDE, mask=i_t < rows, other=0.0)


@triton.jit
def load_sums(p_x, i_x, S: tl.constexpr):
    """Matrix i_x of a stack of (BE, BD) at p_x: with values first, a product takes them from where they are loaded."""
    return tl.load(p_x + i_x * (S.BD * S.BE) + tl.arange(0, S.BE)[:, None] * S.BD + tl.arange(0, S.BD)[None, :])


@triton.jit
def store_sums(p_x, i_x, b_x, S: tl.constexpr):
    """As `load_sums`, the other way."""
    tl.store(p_x + i_x * (S.BD * S.BE) + tl.arange(0, S.BE)[:, None] * S.BD + tl.arange(0, S.BD)[None, :], b_x)


@triton.jit
def scanned(S: tl.constexpr, FEATURES: tl.constexpr):
    """Of a program that goes over all segments of a head: the head, its features, and where a state has them."""
    i_x = tl.program_id(0).to(tl.int64)
    i_m = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    return i_x, i_m, i_x * (S.D * (S.E + 1)) + i_m * (S.E + 1)


@triton.jit
def load_state(p_x, i_in, i_m, S: tl.constexpr):
    """Of a state (D, E + 1) its sums (BE, FEATURES) and its last column."""
    i_e, m_m = tl.arange(0, S.BE), i_m < S.D
    m_kv = (i_e < S.E)[:, None] & m_m[None, :]
    b_kv = tl.load(p_x + i_in[None, :] + i_e[:, None], mask=m_kv, other=0.0)
    return b_kv, tl.load(p_x + i_in + S.E, mask=m_m, other=0.0)


@triton.jit
def store_state(p_x, i_in, i_m, b_kv, b_z, S: tl.constexpr):
    """As `load_state`, the other way."""
    i_e, m_m = tl.arange(0, S.BE), i_m < S.D
    m_kv = (i_e < S.E)[:, None] & m_m[None, :]
    tl.store(p_x + i_in[None, :] + i_e[:, None], b_kv, mask=m_kv)
    tl.store(p_x + i_in + S.E, b_z, mask=m_m)


@triton.jit
def in_parts(b_x, R: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """float32 x (R, BD) as bfloat16 (ROWS, BD) of which all rows add up to those of x, to 16 digits.

    Two rows do for one of x; what is more are zeros.
    """
    b_high = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    i_part = tl.arange(0, ROWS // R)[:, None, None]
    b_low = tl.where(i_part == 1, (b_x - b_high)[None, :, :], 0.0)
    b_parts = tl.where(i_part == 0, b_high[None, :, :], b_low)
    return tl.reshape(b_parts.to(tl.bfloat16), (ROWS, BD))


@triton.jit
def reference(x):
    """The smallest whole number n with exp(x) ≤ 2ⁿ; FLOOR stays FLOOR."""
    return tl.where(x <= FLOOR, FLOOR, tl.ceil(x * LOG2E))


@triton.jit
def _features(b_f, S: tl.constexpr):
    """Of maps that are no exponentials."""
    if S.MAP == "elu":
        b_f = tl.maximum(b_f, 0) + exp2(tl.minimum(b_f, 0) * LOG2E)
    if S.MAP == "relu":
        b_f = tl.maximum(b_f, 0) + RELU_EPSILON
    if S.BD != S.D and S.MAP != "identity":
        b_f = tl.where((tl.arange(0, S.BD) < S.D)[None, :], b_f, 0)
    return b_f


@triton.jit
def _logits(b_x, S: tl.constexpr):
    """x in float32, FLOOR beyond D: no feature there, and no maximum."""
    b_x = b_x.to(tl.float32)
    if S.BD != S.D:
        b_x = tl.where((tl.arange(0, S.BD) < S.D)[None, :], b_x, FLOOR)
    return b_x


@triton.jit
def query_features(b_x, S: tl.constexpr):
    """φ(q) (C, BD), float32, and the largest q of each row. A softmax's sum cancels where attention is normalized and
    is left out.
    """
    if S.MAP == "softmax":
        b_f = _logits(b_x, S)
        b_size = tl.max(b_f, 1)
        return exp2(b_f * LOG2E - (b_size * LOG2E)[:, None]), b_size
    return _features(b_x.to(tl.float32), S), tl.zeros((b_x.shape[0],), tl.float32)


@triton.jit
def share_scale(b_den, b_size, S: tl.constexpr):
    """What makes shares of queries: 1 / den, or of a softmax the binary logarithm of what divides exp(q) itself."""
    if S.MAP == "softmax":
        return tl.where(
            b_den < ZERO_NORMALIZER, float("inf"), b_size * LOG2E + log2(tl.maximum(b_den, ZERO_NORMALIZER))
        )
    return inverse(b_den)


@triton.jit
def query_shares(b_x, b_scale, S: tl.constexpr):
    """φ(q) / den (C, BD), float32."""
    if S.MAP == "softmax":
        return exp2(_logits(b_x, S) * LOG2E - b_scale[:, None])
    return _features(b_x.to(tl.float32), S) * b_scale[:, None]


@triton.jit
def query_slopes(b_x, b_scale, S: tl.constexpr):
    """What d q is of d φ(q) · den (C, BD): where attention is normalized φ(q) · d φ(q) is 0, so sizes are constants."""
    if S.MAP == "softmax":
        return query_shares(b_x, b_scale, S)
    return gradient(b_scale[:, None], b_x, _features(b_x.to(tl.float32), S), S)


@triton.jit
def key_features(b_x, b_n, rows, S: tl.constexpr):
    """f (C, BD), float32, in units of references n (C,); zeros where a key is hidden."""
    if S.MAP == "softmax":
        b_f = exp2(_logits(b_x, S) * LOG2E - tl.where(b_n <= FLOOR, 0, b_n)[:, None])
    else:
        b_f = _features(b_x.to(tl.float32), S)
    if not S.WHOLE:
        b_f = tl.where((tl.arange(0, S.C) < rows)[:, None], b_f, 0)
    return b_f


@triton.jit
def gradient(b_g, b_x, b_f, S: tl.constexpr):
    """d x (C, BD) from d f, x and f; references are constants."""
    if S.MAP == "elu":
        b_g = b_g * tl.minimum(b_f, 1)
    if S.MAP == "relu":
        b_g = tl.where(b_x.to(tl.float32) > 0, b_g, 0)
    if S.MAP == "softmax":
        b_g = b_g * b_f
    return b_g


@triton.jit
def key_sizes(b_x, rows, S: tl.constexpr, CUT: tl.constexpr = False):
    """Logarithms of features (C, BD), the largest of a row being its key's size; FLOOR where a key is hidden."""
    b_x = _logits(b_x, S)
    if CUT or not S.WHOLE:
        b_x = tl.where((tl.arange(0, S.C) < rows)[:, None], b_x, FLOOR)
    return b_x


@triton.jit
def row_references(b_x, rows, c, S: tl.constexpr):
    """Each key's reference and each row's, the largest that it sees; c: that of all before."""
    b_n = reference(tl.max(key_sizes(b_x, rows, S, True), 1))
    return b_n, running_maximum(b_n, c)


@triton.jit
def walk_references(p_reference, p_sizes, i_x, i_s, segments, S: tl.constexpr):
    """The reference of the sums before a segment, the one that does for all of it, and 1 where none does, else 0."""
    c_before, c, chosen = 0.0, 0.0, 0
    if S.SCALED:
        i_o = i_x * segments + i_s
        c_before = tl.load(p_reference + i_x * (segments + 1) + i_s)
        c = tl.maximum(c_before, tl.load(p_sizes + i_o * 4))
        chosen = (reference(tl.load(p_sizes + i_o * 4 + 2)) > c + SLACK).to(tl.int32)
    return c_before, c, chosen
