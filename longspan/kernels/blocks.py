"""What the linear-attention kernels share: blocks of rows in and out, feature maps on blocks, and their derivatives.

A chunk is C tokens of one head. A key's features are f in units of its reference, as f and the log scale β of
`ops.features`; maps without a scale have no references.
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
LOG2E = tl.constexpr(1.4426950408889634)
# Features may be larger than their reference says, by 2 to this power, before references must be looked at closely.
SLACK = tl.constexpr(32.0)


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def settled(x, DOT: tl.constexpr):
        return x.to(DOT)
else:

    @triton.jit
    def exp2(x):
        """In one instruction: what is too small to be a normal number is 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def settled(x, DOT: tl.constexpr):
        """x rounded, and from then on moved rather than made again wherever it is needed."""
        x = x.to(DOT)
        if tl.bfloat16 == DOT:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
        return x


@triton.jit
def exp(x):
    return exp2(x * LOG2E)


# References are logarithms: QUICK, whole numbers to base 2, so that to go from one to another moves no digit;
# otherwise natural ones, exactly that of the largest key.


@triton.jit
def reference(x, QUICK: tl.constexpr):
    """The smallest reference n with exp(x) at most 1 in its units; FLOOR stays FLOOR."""
    if QUICK:
        return tl.where(x <= FLOOR, FLOOR, tl.ceil(x * LOG2E))
    return x


@triton.jit
def relative(x, n, QUICK: tl.constexpr):
    """exp(x) in units of reference n."""
    if QUICK:
        return exp2(x * LOG2E - n)
    return exp(x - n)


@triton.jit
def ratio(n, QUICK: tl.constexpr):
    """The factor that a difference of references stands for."""
    if QUICK:
        return exp2(n)
    return exp(n)


@triton.jit
def load_rows(
    p_x,
    stride_t,
    rows,
    columns,
    C: tl.constexpr,
    BD: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr = False,
):
    """The first rows and columns of the (C, BD) block at p_x, zeros in the rest. WHOLE: all columns are there."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    p_x += i_t[:, None] * stride_t + i_d[None, :]
    if WHOLE and WHOLE_ROWS:
        return tl.load(p_x)
    m_x = (i_t < rows)[:, None]
    if not WHOLE:
        m_x = m_x & (i_d < columns)[None, :]
    return tl.load(p_x, mask=m_x, other=0.0)


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
def store_rows(
    p_x,
    stride_t,
    rows,
    columns,
    b_x,
    C: tl.constexpr,
    BD: tl.constexpr,
    WHOLE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr = False,
):
    """As `load_rows`, the other way."""
    i_t, i_d = tl.arange(0, C), tl.arange(0, BD)
    p_x += i_t[:, None] * stride_t + i_d[None, :]
    b_x = b_x.to(p_x.dtype.element_ty)
    if WHOLE and WHOLE_ROWS:
        tl.store(p_x, b_x)
    else:
        m_x = (i_t < rows)[:, None]
        if not WHOLE:
            m_x = m_x & (i_d < columns)[None, :]
        tl.store(p_x, b_x, mask=m_x)


@triton.jit
def load_column(p_x, stride_t, rows, C: tl.constexpr, other: tl.constexpr, WHOLE_ROWS: tl.constexpr = False):
    i_t = tl.arange(0, C)
    if WHOLE_ROWS:
        return tl.load(p_x + i_t * stride_t)
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
    tl.store(p_x + i_x * (BM * COLUMNS) + i_m[:, None] * COLUMNS + i_e[None, :], b_x)


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
        b_p = tl.dot(b_x.to(tl.float32), tl.trans(b_weight), input_precision="tf32x3")
    return b_p


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
        b_f = tl.maximum(b_f, 0) + exp(tl.minimum(b_f, 0))
    if MAP == "relu":
        b_f = tl.maximum(b_f, 0) + RELU_EPSILON
    if MAP == "softmax" or MAP == "favor":
        if BM != M:
            b_f = tl.where(m_m, b_f, FLOOR)
        b_max = tl.max(b_f, 1)
        if tl.bfloat16 == DOT:
            b_f = exp2(b_f * LOG2E - (b_max * LOG2E)[:, None])
        else:
            b_f = exp(b_f - b_max[:, None])
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
        b_g = tl.dot((b_g * b_f).to(DOT), b_weight, input_precision="tf32x3")
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
def key_features(
    b_f,
    b_scale,
    b_n,
    M: tl.constexpr,
    BM: tl.constexpr,
    MAP: tl.constexpr,
    SCALED: tl.constexpr,
    QUICK: tl.constexpr,
):
    """f (C, BM), float32, in units of references n (C,), from `key_logits` and the log scales (C,) of keys with one."""
    b_n = tl.where(b_n <= FLOOR, 0, b_n)
    if MAP == "elu":
        b_f = tl.maximum(b_f, 0) + exp(tl.minimum(b_f, 0))
    if MAP == "relu":
        b_f = tl.maximum(b_f, 0) + RELU_EPSILON
    if MAP == "softmax" or MAP == "favor":
        b_f = relative(b_f, b_n[:, None], QUICK)
    elif SCALED:
        b_f = b_f * relative(b_scale, b_n, QUICK)[:, None]
    if BM != M and MAP != "identity":
        b_f = tl.where((tl.arange(0, BM) < M)[None, :], b_f, 0)
    return b_f


@triton.jit
def key_gradient(b_g, b_x, b_f, b_weight, D: tl.constexpr, MAP: tl.constexpr, DOT: tl.constexpr):
    """d k (C, BD) from d f, k and f; references are constants."""
    if MAP == "elu":
        b_g = b_g * tl.minimum(b_f, 1)
    if MAP == "relu":
        b_g = tl.where(b_x.to(tl.float32) > 0, b_g, 0)
    if MAP == "softmax":
        b_g = b_g * b_f
    if MAP == "favor":
        b_g = b_g * b_f
        b_total = tl.sum(b_g, 1) * D**-0.5
        b_g = tl.dot(b_g.to(DOT), b_weight, input_precision="tf32x3")
        b_g = b_g - b_x.to(tl.float32) * b_total[:, None]
    return b_g


@triton.jit
def inverse(b_den):
    """1 / den, and 0 where there is nothing to divide by."""
    m_nothing = tl.abs(b_den) < NOTHING
    return tl.where(m_nothing, 0.0, 1 / tl.where(m_nothing, 1.0, b_den))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maximum(b_n, c):
    """max(c, max_{j ≤ i} n_j) of each row."""
    return tl.maximum(tl.associative_scan(b_n, 0, _larger), c)
