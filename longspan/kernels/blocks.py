"""What the linear-attention kernels share: blocks of rows in and out, feature maps on blocks, and their derivatives.

A chunk is C tokens of one head. A key's features are f · exp(β), as in `ops.features`; β is 0 for maps without a scale.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# ops.linear and ops.features have them too; a test holds them equal.
FLOOR = tl.constexpr(-1e30)
RELU_EPSILON = tl.constexpr(1e-3)
# A normaliser below this is a sum that underflowed: as good as none, and its reciprocal would overflow.
NOTHING = tl.constexpr(1.1754943508222875e-32)


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def exact_exp(x):
        return tl.exp(x)
else:

    @triton.jit
    def exp(x):
        """In two instructions: what is too small to be a normal number is 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def exact_exp(x):
        """With what the product with log₂ e loses made good: float32 has no digit to spare."""
        high = x * 1.4426950408889634
        low = tl.fma(x, 1.4426950408889634, -high) + x * 1.9259629911266175e-08
        return exp(x) * (1 + low * 0.6931471805599453)


@triton.jit
def product(b_x, b_y, PRECISION: tl.constexpr):
    """x·y. "ieee": in pieces of 16 along the axis they share, or as many as there is room for. Without tensor cores a
    number is one chain of additions, on through all blocks; PyTorch's chains are short, and each rounding shows.
    """
    if PRECISION == "ieee":
        N: tl.constexpr = b_x.shape[0]
        K: tl.constexpr = b_x.shape[1]
        P: tl.constexpr = b_y.shape[1]
        PIECES: tl.constexpr = K // 16 if N * K * P <= 16 * 8192 else 8192 // (N * P)
        b_x = tl.permute(tl.reshape(b_x, (N, PIECES, K // PIECES)), (1, 0, 2))
        b_y = tl.reshape(b_y, (PIECES, K // PIECES, P))
        b_xy = tl.sum(tl.dot(b_x, b_y, input_precision="ieee"), 0)
    else:
        b_xy = tl.dot(b_x, b_y, input_precision=PRECISION)
    return b_xy


@triton.jit
def add_product(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """sum + x·y."""
    if PRECISION == "ieee":
        b_sum += product(b_x, b_y, PRECISION)
    else:
        b_sum = tl.dot(b_x, b_y, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def load_rows(p_x, stride_t, rows, columns, C: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """The first rows and columns of the (C, BD) block at p_x, zeros in the rest. WHOLE: all columns are there."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    m_x = (i_t < rows)[:, None]
    if not WHOLE:
        m_x = m_x & (i_d < columns)[None, :]
    return tl.load(p_x + i_t[:, None] * stride_t + i_d[None, :], mask=m_x, other=0.0)


@triton.jit
def load_rows_again(p_x, stride_t, rows, columns, C: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """As `load_rows`, but never merged with it: from the cache rather than from registers held for long."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    m_x = (i_t < rows)[:, None]
    if not WHOLE:
        m_x = m_x & (i_d < columns)[None, :]
    p_x += i_t[:, None] * stride_t + i_d[None, :]
    return tl.load(p_x, mask=m_x, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_rows(p_x, stride_t, rows, columns, b_x, C: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """As `load_rows`, the other way."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    m_x = (i_t < rows)[:, None]
    if not WHOLE:
        m_x = m_x & (i_d < columns)[None, :]
    tl.store(p_x + i_t[:, None] * stride_t + i_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def load_column(p_x, stride_t, rows, C: tl.constexpr, other: tl.constexpr):
    i_t = tl.arange(0, C)
    return tl.load(p_x + i_t * stride_t, mask=i_t < rows, other=other)


@triton.jit
def load_sums(p_x, i_x, BM: tl.constexpr, BE: tl.constexpr, COLUMNS: tl.constexpr):
    """The first BE columns of matrix i_x of a stack of (BM, COLUMNS) at p_x."""
    i_m, i_e = tl.arange(0, BM), tl.arange(0, BE)
    return tl.load(p_x + i_x * (BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :])


@triton.jit
def store_sums(p_x, i_x, b_x, BM: tl.constexpr, BE: tl.constexpr, COLUMNS: tl.constexpr):
    """As `load_sums`, the other way."""
    i_m, i_e = tl.arange(0, BM), tl.arange(0, BE)
    p_x += i_x * (BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty))


@triton.jit
def load_weight(p_weight, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr):
    """The projection of FAVOR+ (M, D), scaled, as two (BM, BD) blocks that add up to it; 0 for maps without one."""
    b_weight, b_low = 0, 0
    if p_weight is not None:
        i_m, i_d = tl.arange(0, BM), tl.arange(0, BD)
        m_w = (i_m < M)[:, None] & (i_d < D)[None, :]
        b_whole = tl.load(p_weight + i_m[:, None] * D + i_d[None, :], mask=m_w, other=0.0) * D**-0.25
        b_weight = b_whole.to(DOT)
        b_low = (b_whole - b_weight.to(tl.float32)).to(DOT)
    return b_weight, b_low


@triton.jit
def _project(b_x, b_weight, b_low, DOT: tl.constexpr):
    """w·x with the precision of float32, which an exponent needs: x is exact, w is the sum of two halves."""
    if tl.bfloat16 == DOT:
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
def query_features(
    b_x,
    b_weight,
    b_low,
    M: tl.constexpr,
    BM: tl.constexpr,
    MAP: tl.constexpr,
    NORMALISE: tl.constexpr,
    DOT: tl.constexpr,
):
    """φ(q) (C, BM), float32; zeros beyond M features. A softmax's sum cancels where attention is normalised: left
    out with bfloat16; float32 and float16 would miss how its gradient takes rounding errors with it.
    """
    m_m = (tl.arange(0, BM) < M)[None, :]
    if MAP == "favor":
        b_f = _project(b_x, b_weight, b_low, DOT)
    else:
        b_f = b_x.to(tl.float32)
    if MAP == "elu":
        b_f = tl.maximum(b_f, 0) + exact_exp(tl.minimum(b_f, 0))
    if MAP == "relu":
        b_f = tl.maximum(b_f, 0) + RELU_EPSILON
    if MAP == "softmax" or MAP == "favor":
        if BM != M:
            b_f = tl.where(m_m, b_f, FLOOR)
        b_f = exact_exp(b_f - tl.max(b_f, 1)[:, None])
    if MAP == "softmax" and not (NORMALISE and tl.bfloat16 == DOT):
        b_f = b_f / tl.sum(b_f, 1)[:, None]
    if BM != M and MAP != "identity":
        b_f = tl.where(m_m, b_f, 0)
    return b_f


@triton.jit
def query_gradient(b_g, b_x, b_f, b_weight, MAP: tl.constexpr, NORMALISE: tl.constexpr, DOT: tl.constexpr):
    """d q (C, BD) from d φ(q), q and φ(q). Where attention is normalised φ(q) · d φ(q) is 0: its size cancels."""
    if MAP == "elu":
        b_g = b_g * tl.minimum(b_f, 1)
    if MAP == "relu":
        b_g = tl.where(b_x.to(tl.float32) > 0, b_g, 0)
    if MAP == "softmax":
        if not (NORMALISE and tl.bfloat16 == DOT):
            b_g -= tl.sum(b_g * b_f, 1)[:, None]
        b_g = b_g * b_f
    if MAP == "favor":
        b_g = _times_weight((b_g * b_f).to(DOT), b_weight, b_x)
    return b_g


@triton.jit
def key_logits(
    b_x, b_weight, b_low, D: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, MAP: tl.constexpr, DOT: tl.constexpr
):
    """Of maps that are exponentials, log φ(k) (C, BM); of the others k itself."""
    b_f = b_x.to(tl.float32)
    if MAP == "favor":
        b_half = tl.sum(b_f * b_f, 1) * (0.5 * D**-0.5)
        b_f = _project(b_x, b_weight, b_low, DOT) - b_half[:, None]
    if BM != M and (MAP == "softmax" or MAP == "favor"):
        b_f = tl.where((tl.arange(0, BM) < M)[None, :], b_f, FLOOR)
    return b_f


@triton.jit
def key_features(b_f, b_beta, M: tl.constexpr, BM: tl.constexpr, MAP: tl.constexpr):
    """f (C, BM) from logits and β (C,). A hidden key has features too: its β is FLOOR, or its pairs are masked."""
    if MAP == "elu":
        b_f = tl.maximum(b_f, 0) + exact_exp(tl.minimum(b_f, 0))
    if MAP == "relu":
        b_f = tl.maximum(b_f, 0) + RELU_EPSILON
    if MAP == "softmax" or MAP == "favor":
        b_f = exact_exp(b_f - tl.where(b_beta == FLOOR, 0, b_beta)[:, None])
    if BM != M and MAP != "identity":
        b_f = tl.where((tl.arange(0, BM) < M)[None, :], b_f, 0)
    return b_f


@triton.jit
def key_gradient(b_g, b_x, b_f, b_weight, D: tl.constexpr, MAP: tl.constexpr, DOT: tl.constexpr):
    """d k (C, BD) from d f, k and f; β is a constant."""
    if MAP == "elu":
        b_g = b_g * tl.minimum(b_f, 1)
    if MAP == "relu":
        b_g = tl.where(b_x.to(tl.float32) > 0, b_g, 0)
    if MAP == "softmax":
        b_g = b_g * b_f
    if MAP == "favor":
        b_g = b_g * b_f
        b_total = tl.sum(b_g, 1) * D**-0.5
        b_g = _times_weight(b_g.to(DOT), b_weight, b_x)
        b_g = b_g - b_x.to(tl.float32) * b_total[:, None]
    return b_g


@triton.jit
def inverse(b_den):
    """1 / den, and 0 where there is nothing to divide by."""
    m_nothing = tl.abs(b_den) < NOTHING
    return tl.where(m_nothing, 0.0, 1 / tl.where(m_nothing, 1.0, b_den))


@triton.jit
def exact_inverse(b_den):
    """As `inverse`, rounded once: a plain division is off by two ulps, and all that is multiplied by it as well."""
    m_nothing = tl.abs(b_den) < NOTHING
    return tl.where(m_nothing, 0.0, tl.div_rn(1.0, tl.where(m_nothing, 1.0, b_den)))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maximum(b_beta, c):
    """max(c, max_{j ≤ i} β_j) of each row."""
    return tl.maximum(tl.associative_scan(b_beta, 0, _larger), c)
