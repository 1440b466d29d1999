"""Causal linear attention with the state in registers: bfloat16, normalized, maps without a projection.

A sequence is divided into segments of several chunks, about as many segments as the device runs programs at once. One
kernel sums each segment's keys and values, `scan` computes the sums before each segment from these, and a third kernel
processes the chunks of a segment in order, with the sums in registers: a chunk's queries read them, and see the chunk's
own keys as masked products. For a short sequence without a state the third kernel is the only one: each of its programs
sums the keys before its segment itself.

A key's features are f · 2ⁿ with an integer n, its reference: changing a reference changes no digit of f. Pointwise maps
have none. Keys mostly have similar scales: then one reference, the larger of that of the sums before a segment and that
of its first key, serves the segment, and no row needs a factor of its own. Where later keys exceed it by more than 2 to
the power of SLACK, references rise within a segment, and a row's is the largest that it sees (PER_ROW).

Backward, with d the gradient of out, δ_i = d_i · out_i, and S, z the sums before a chunk at its reference:

    dφ(q_i) = (S d_i − δ_i z + Σ_{j ≤ i} (d_i · v_j − δ_i) f_j) / den_i,      dS = Σ_i φ(q_i) / den_i d_iᵀ

dS is summed from the end as the forward pass sums S from the start. Gradients of queries go through a segment forwards
with S in registers, those of keys and values backwards with dS. For a short sequence, S is that of the forward pass,
and the programs for keys and values sum the queries after their segment themselves.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, add, exp2, log2, round_once, same_layout, widen
from longspan.ops.common.feature_maps import pointwise_features, pointwise_gradient
from longspan.ops.common.launch import (
    Launch,
    Signature,
    Strides,
    Workspace,
    dense,
    dense_rows,
    new_like,
    on_device,
    processors,
)
from longspan.ops.common.tiles import FLOOR, ZERO_NORMALIZER, inverse, padded, running_maximum, zeros
from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved
from longspan.ops.linear.triton import FUSED_CHUNK
from longspan.ops.linear.triton.scan import CausalPlan, ScanSizes, reference

CHUNK = FUSED_CHUNK
STAGES = 3  # With fewer, no chunk is loaded while another is in use.
FEATURES = 16  # per program of the scan
SHORT = 4  # Chunks of a sequence that one program computes as fast as three launches with more programs.
EXTRA = 30  # Chunks that a program sums beside its own sooner than the host launches two more kernels.

# Features may exceed their reference by 2 to this power before references must rise per row.
SLACK = tl.constexpr(32.0)
# Values per segment in p_scales.
SCALES = tl.constexpr(3)
# A thread holds every 16th row of a chunk: its share of z needs no other thread.
R = tl.constexpr(16)


# Compile-time constants: heads, dimensions, tokens in a chunk, padded dimensions, the map.
# SCALED: keys carry log scales. FULL: every row of every chunk exists and is visible. BUCKET: tokens in a bucket of a
# blind spot, a divisor of C; 1 is none. If it is a multiple of C, a segment is a bucket, whose queries see the sums
# before it only. STRIDE_*: strides along tokens of q, k, v and the gradient of out; 0 if a kernel does not use them.
FusedChunkSizes = namedtuple(
    "FusedChunkSizes",
    "H HKV D E C BD BE MAP SCALED FULL BUCKET STRIDE_Q STRIDE_K STRIDE_V STRIDE_D",
    defaults=(0, 0, 0, 0),
)


@triton.jit
def chunks_in(i_s, T, chunks, S: tl.constexpr):
    """Number of chunks of segment i_s; the last segment may have fewer."""
    return tl.minimum(chunks, tl.cdiv(T - i_s * chunks * S.C, S.C))


@triton.jit
def _pointer(p_x, x, STRIDE: tl.constexpr, i_b, i_0, i_h):
    """`token_pointer` with the stride along tokens known at compile time."""
    return p_x + (i_b * x.b + i_0.to(tl.int64) * STRIDE + i_h.to(tl.int64) * x.h)


@triton.jit
def segment_index(pid, p_lengths, T, segments, chunks, BACK: tl.constexpr, S: tl.constexpr):
    """Indices of program pid: batch, key head, sequence (batch and head), segment, first chunk, its first token; and
    the numbers of tokens and of visible keys from there on. BACK: start with the segment's last chunk.
    """
    i_h = pid % S.HKV
    i_s = (pid // S.HKV) % segments
    i_b = (pid // S.HKV // segments).to(tl.int64)
    i_x = i_b * S.HKV + i_h
    i_c = i_s * chunks
    if BACK:
        i_c = i_c + chunks_in(i_s, T, chunks, S) - 1
    i_0 = i_c * S.C
    left, rows = T - i_0, T - i_0
    if p_lengths is not None:
        rows = tl.load(p_lengths + i_b).to(tl.int32) - i_0
    return i_b, i_h, i_x, i_s, i_c, i_0, left, rows


@triton.jit
def load_rows(
    p_x, STRIDE: tl.constexpr, rows, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr = False
):
    """Load the first rows and D columns of the (C, BD) block at p_x; zeros elsewhere. MASKED: even in full chunks."""
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, BD)
    p_x += i_t[:, None] * STRIDE + i_d[None, :]
    if S.FULL and not MASKED and D == BD:
        return tl.load(p_x)
    m_x = (i_t < rows)[:, None]
    if D != BD:
        m_x = m_x & (i_d < D)[None, :]
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def store_rows(p_x, STRIDE: tl.constexpr, rows, b_x, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr):
    """Store what `load_rows` loads."""
    i_t, i_d = tl.arange(0, S.C), tl.arange(0, BD)
    p_x += i_t[:, None] * STRIDE + i_d[None, :]
    b_x = b_x.to(p_x.dtype.element_ty)
    if S.FULL and D == BD:
        tl.store(p_x, b_x)
    else:
        m_x = (i_t < rows)[:, None]
        if D != BD:
            m_x = m_x & (i_d < D)[None, :]
        tl.store(p_x, b_x, mask=m_x)


@triton.jit
def load_column(p_x, STRIDE: tl.constexpr, rows, S: tl.constexpr):
    """The first `rows` of C elements; zeros in the rest."""
    i_t = tl.arange(0, S.C)
    if S.FULL:
        return tl.load(p_x + i_t * STRIDE)
    return tl.load(p_x + i_t * STRIDE, mask=i_t < rows, other=0.0)


@triton.jit
def load_sums(p_x, i_x, S: tl.constexpr):
    """Matrix i_x of a stack of (BE, BD) at p_x: values first, so that products take it without a transposition."""
    return tl.load(p_x + i_x * (S.BD * S.BE) + tl.arange(0, S.BE)[:, None] * S.BD + tl.arange(0, S.BD)[None, :])


@triton.jit
def store_sums(p_x, i_x, b_x, S: tl.constexpr):
    """Store what `load_sums` loads."""
    tl.store(p_x + i_x * (S.BD * S.BE) + tl.arange(0, S.BE)[:, None] * S.BD + tl.arange(0, S.BD)[None, :], b_x)


@triton.jit
def load_state(p_kv, p_z, i_x, S: tl.constexpr):
    """Matrix i_x of a stack of (BE, BD), and vector i_x of one of (BD,) as a row; zeros if there are none."""
    if p_kv is None:
        b_kv, b_z = zeros(S.BE, S.BD), zeros(1, S.BD)
    else:
        b_kv, b_z = load_sums(p_kv, i_x, S), tl.load(p_z + i_x * S.BD + tl.arange(0, S.BD))[None, :]
    return b_kv, b_z


@triton.jit
def split_bfloat16(b_x, R: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """float32 x (R, BD) as bfloat16 (ROWS, BD) whose rows add up to those of x, to 16 bits.

    Two rows represent one of x; further rows are zeros.
    """
    b_high = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    i_half = tl.arange(0, ROWS // R)[:, None, None]
    b_low = tl.where(i_half == 1, (b_x - b_high)[None, :, :], 0.0)
    b_split = tl.where(i_half == 0, b_high[None, :, :], b_low)
    return tl.reshape(b_split.to(tl.bfloat16), (ROWS, BD))


@triton.jit
def partial_sums(b_x, S: tl.constexpr):
    """Σ of every Rth row of x (C, BD) as (R, BD), which needs no other thread."""
    return tl.sum(tl.reshape(b_x, (S.C // R, R, S.BD)), 0)


@triton.jit
def first_row(b_z):
    """A row (1, BD) as the first of R rows; the others are zeros."""
    return tl.where(tl.arange(0, R)[:, None] == 0, b_z, 0)


@triton.jit
def total_rows(b_z, S: tl.constexpr):
    """The sum of the rows of z (R, BD), to 16 bits, in each of C rows."""
    return tl.dot(tl.full((S.C, 2 * R), 1.0, tl.bfloat16), split_bfloat16(b_z, R, 2 * R, S.BD))


@triton.jit
def _logits(b_x, S: tl.constexpr):
    """x in float32, FLOOR beyond D: no feature and no maximum there."""
    b_x = b_x.to(tl.float32)
    if S.BD != S.D:
        b_x = tl.where((tl.arange(0, S.BD) < S.D)[None, :], b_x, FLOOR)
    return b_x


@triton.jit
def _pointwise(b_x, S: tl.constexpr):
    """φ(x) (C, BD) of pointwise maps in float32; zeros beyond D."""
    b_f = pointwise_features(b_x.to(tl.float32), S)
    if S.BD != S.D and S.MAP != "identity":
        b_f = tl.where((tl.arange(0, S.BD) < S.D)[None, :], b_f, 0)
    return b_f


@triton.jit
def _gradient(b_g, b_x, b_f, S: tl.constexpr):
    """dx (C, BD) from df, x and f; references are constants."""
    b_g = pointwise_gradient(b_g, b_x, b_f, S)
    if S.MAP == "softmax":
        b_g = b_g * b_f
    return b_g


@triton.jit
def query_features(b_x, S: tl.constexpr):
    """φ(q) (C, BD) in float32, and the largest q of each row. The sum that divides a softmax is omitted: it cancels in
    normalized attention.
    """
    if S.MAP == "softmax":
        b_f = _logits(b_x, S)
        b_largest = tl.max(b_f, 1)
        return exp2(b_f * LOG2E - (b_largest * LOG2E)[:, None]), b_largest
    return _pointwise(b_x, S), tl.zeros((b_x.shape[0],), tl.float32)


@triton.jit
def query_scale(b_den, b_largest, S: tl.constexpr):
    """What `normalized_queries` takes: 1 / den, or for softmax log₂ of what exp(q) is divided by."""
    if S.MAP == "softmax":
        return tl.where(
            b_den < ZERO_NORMALIZER, float("inf"), b_largest * LOG2E + log2(tl.maximum(b_den, ZERO_NORMALIZER))
        )
    return inverse(b_den)


@triton.jit
def normalized_queries(b_x, b_scale, S: tl.constexpr):
    """φ(q) / den (C, BD) in float32."""
    if S.MAP == "softmax":
        return exp2(_logits(b_x, S) * LOG2E - b_scale[:, None])
    return _pointwise(b_x, S) * b_scale[:, None]


@triton.jit
def query_slopes(b_x, b_scale, S: tl.constexpr):
    """dq divided by dφ(q) · den (C, BD). In normalized attention φ(q) · dφ(q) = 0, so the scale is a constant."""
    if S.MAP == "softmax":
        return normalized_queries(b_x, b_scale, S)
    return _gradient(b_scale[:, None], b_x, _pointwise(b_x, S), S)


@triton.jit
def key_features(b_x, b_n, rows, S: tl.constexpr):
    """f (C, BD) in float32, in units of 2 to the references n (C,); zeros for hidden keys."""
    if S.MAP == "softmax":
        b_f = exp2(_logits(b_x, S) * LOG2E - tl.where(b_n <= FLOOR, 0, b_n)[:, None])
    else:
        b_f = _pointwise(b_x, S)
    if not S.FULL:
        b_f = tl.where((tl.arange(0, S.C) < rows)[:, None], b_f, 0)
    return b_f


@triton.jit
def key_logits(b_x, rows, S: tl.constexpr, MASKED: tl.constexpr = False):
    """Logarithms of features (C, BD); the largest of a row is its key's log scale. FLOOR for hidden keys."""
    b_x = _logits(b_x, S)
    if MASKED or not S.FULL:
        b_x = tl.where((tl.arange(0, S.C) < rows)[:, None], b_x, FLOOR)
    return b_x


@triton.jit
def sees(i_query, i_key, S: tl.constexpr):
    """Which queries of a chunk see which of its keys."""
    return i_key <= i_query if S.BUCKET == 1 else i_key // S.BUCKET < i_query // S.BUCKET


@triton.jit
def row_references(b_x, rows, c, S: tl.constexpr):
    """Reference of each key, of each row: the largest that it sees, and after the chunk. c: that before the chunk."""
    i_t = tl.arange(0, S.C)
    b_n = reference(tl.max(key_logits(b_x, rows, S, True), 1))
    if S.BUCKET == 1:
        b_reference = running_maximum(b_n, c)
    else:
        b_reference = tl.max(tl.where(sees(i_t[:, None], i_t[None, :], S), b_n[None, :], c), 1)
        b_reference = tl.maximum(b_reference, c)
    return b_n, b_reference, tl.maximum(tl.max(b_n), c)


@triton.jit
def segment_references(p_reference, p_scales, i_x, i_s, segments, S: tl.constexpr, READS: tl.constexpr = True):
    """Reference of the sums before a segment, the one for the segment, and 1 if references must rise per row.

    READS: for queries, which may not see the segment's keys.
    """
    c_before, c, use_per_row = 0.0, 0.0, 0
    if S.SCALED:
        i_o = i_x * segments + i_s
        c_before = reference(tl.load(p_reference + i_x * (segments + 1) + i_s))
        c = tl.maximum(c_before, tl.load(p_scales + i_o * SCALES + 1))
        use_per_row = (reference(tl.load(p_scales + i_o * SCALES + 2)) > c + SLACK).to(tl.int32)
        if READS and S.BUCKET > S.C:
            c, use_per_row = c_before, 0
    return c_before, c, use_per_row


@triton.jit
def _sum_keys(p_k, p_v, c, rows, count, S: tl.constexpr, PER_ROW: tl.constexpr, STAGES: tl.constexpr):
    """Σ v φ(k)ᵀ (BE, BD) and Σ φ(k) (BD,) of a segment, their reference, and the logarithm of the largest feature.

    PER_ROW: the reference rises with the keys; otherwise c serves all of them.
    """
    BE: tl.constexpr = S.BE
    BD: tl.constexpr = S.BD
    C: tl.constexpr = S.C
    b_kv = tl.zeros((BE, BD), tl.float32)
    b_z = tl.zeros((C, BD), tl.float32)  # added up at the end, over the chunks' rows
    b_top = tl.full((S.C, S.BD), FLOOR, tl.float32)
    for _ in tl.range(count, num_stages=STAGES):
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S)
        if S.SCALED:
            b_largest = key_logits(b_k, rows, S)
            b_top = tl.maximum(b_top, b_largest)
            if PER_ROW:
                c_last = tl.maximum(c, reference(tl.max(tl.max(b_largest, 1))))
                decay = exp2(c - c_last)
                b_kv *= decay
                b_z *= decay
                c = c_last
        b_f = key_features(b_k, tl.zeros((C,), tl.float32) + c, rows, S)
        b_z += b_f
        b_kv = tl.dot(tl.trans(b_v), b_f.to(tl.bfloat16), b_kv)
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        rows -= S.C
    return b_kv, tl.sum(b_z, 0), c, tl.max(tl.max(b_top, 1))


@triton.jit
def _first_reference(p_k, rows, S: tl.constexpr):
    """Reference of the first key; FLOOR if it is hidden."""
    one = tl.minimum(rows, 1)
    b_largest = key_logits(load_rows(p_k, S.STRIDE_K, one, S.D, S.BD, S, True), one, S, True)
    return reference(tl.max(tl.max(b_largest, 1)))


@triton.jit
def _sum_run(p_k, p_v, rows, count, S: tl.constexpr, STAGES: tl.constexpr):
    """`_sum_keys` of some chunks, with the reference of the first key before the largest logarithm."""
    first = tl.full((), FLOOR, tl.float32)
    if S.SCALED:
        first = _first_reference(p_k, rows, S)
    b_kv, b_z, c, top = _sum_keys(p_k, p_v, first, rows, count, S, False, STAGES)
    if S.SCALED:
        if reference(top) > first + SLACK:
            nothing = tl.full((), FLOOR, tl.float32)
            b_kv, b_z, c, top = _sum_keys(p_k, p_v, nothing, rows, count, S, True, 1)
    return b_kv, b_z, c, first, top


@triton.jit
def _sum_earlier(p_k, p_v, i_c, rows, S: tl.constexpr, STAGES: tl.constexpr):
    """Sums of all keys before chunk i_c, at which p_k and p_v are, their reference, and the logarithm of the largest
    feature.
    """
    i_0 = i_c * S.C
    p_k -= i_0.to(tl.int64) * S.STRIDE_K
    p_v -= i_0.to(tl.int64) * S.STRIDE_V
    b_kv, b_z, c, _, top = _sum_run(p_k, p_v, rows + i_0, i_c, S, STAGES)
    if S.SCALED:
        factor = tl.where(top <= FLOOR, 1.0, exp2(c - reference(top)))
        b_kv *= factor
        b_z *= factor
    return b_kv, b_z, top


@triton.jit
def _largest_logit(p_k, rows, count, S: tl.constexpr):
    """Logarithm of the largest feature of a segment's keys."""
    b_top = tl.full((S.C, S.BD), FLOOR, tl.float32)
    for _ in tl.range(count, num_stages=2):
        b_top = tl.maximum(b_top, key_logits(load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S), rows, S))
        p_k += S.C * S.STRIDE_K
        rows -= S.C
    return tl.max(tl.max(b_top, 1))


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_fused_chunk_forward_sums_kernel(
    p_k, p_v, p_lengths, p_kv, p_z, p_scales, T, segments, chunks, k, v, S: tl.constexpr, STAGES: tl.constexpr
):
    """Sums of one segment's keys.

    p_scales: (B, Hkv, segments, SCALES) the reference of the sums, that of the first key, the largest natural
    logarithm.
    """
    i_b, i_h, _, i_s, _, i_0, _, rows = segment_index(tl.program_id(0), p_lengths, T, segments, chunks, False, S)
    p_k = _pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    p_v = _pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_h)
    b_kv, b_z, c, first, top = _sum_run(p_k, p_v, rows, chunks_in(i_s, T, chunks, S), S, STAGES)
    i_o = (i_b * S.HKV + i_h) * segments + i_s
    store_sums(p_kv, i_o, b_kv, S)
    tl.store(p_z + i_o * S.BD + tl.arange(0, S.BD), b_z)
    if S.SCALED:
        tl.store(p_scales + i_o * SCALES, c)
        tl.store(p_scales + i_o * SCALES + 1, first)
        tl.store(p_scales + i_o * SCALES + 2, top)


@triton.jit
def _load_keys(p_k, p_v, c, rows, S: tl.constexpr, PER_ROW: tl.constexpr):
    """A chunk's values, the features of its keys at their references and at that of the chunk's end, these references,
    that of each row, and that of the chunk's end. All references are c unless PER_ROW.
    """
    C: tl.constexpr = S.C
    b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
    b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S)
    b_n = tl.zeros((C,), tl.float32) + c
    b_reference, c_last = b_n, c
    if PER_ROW:
        b_n, b_reference, c_last = row_references(b_k, rows, c, S)
    b_f = key_features(b_k, b_n, rows, S)
    b_end = b_f
    if PER_ROW:
        b_end = b_f * exp2(b_n - c_last)[:, None]
    return b_v, b_f, b_end, b_n, b_reference, c_last


@triton.jit
def _read_segment(start, counts, q, S: tl.constexpr, PER_ROW: tl.constexpr, STAGES: tl.constexpr):
    """One segment. b_kv (BE, BD), b_z (R, BD), whose rows add up to z: the sums before it at reference c.

    PER_ROW: each row at its own reference.
    """
    # A product for z as wide as that for the keys lets queries be fetched once for both. With masked rows it would need
    # too many registers, and other maps gain nothing.
    WIDE: tl.constexpr = S.FULL and S.SCALED
    ROWS: tl.constexpr = S.C if WIDE else 2 * R
    p_q, p_k, p_v, p_out, p_den, b_kv, b_z, c = start
    left, rows, count = counts
    i_t = tl.arange(0, S.C)
    for _ in tl.range(count, num_stages=1 if PER_ROW else STAGES):
        if S.BUCKET <= S.C:
            b_v, b_f, b_end, b_n, b_reference, c_last = _load_keys(p_k, p_v, c, rows, S, PER_ROW)
            b_more_z = partial_sums(b_end, S)
            b_f = round_once(b_f)
            b_end = b_end.to(tl.bfloat16) if PER_ROW else b_f
        b_split = split_bfloat16(b_z, R, ROWS, S.BD)
        m_seen = sees(i_t[:, None], i_t[None, :], S)
        for g in range(S.H // S.HKV):
            b_q = load_rows(p_q + g * q.h, S.STRIDE_Q, left, S.D, S.BD, S)
            b_query = query_features(b_q, S)[0].to(tl.bfloat16)
            if S.BUCKET <= S.C:
                b_p = tl.dot(b_query, tl.trans(b_f))
            b_before = tl.dot(b_query, tl.trans(b_split))
            b_den = zeros(S.C)
            if S.BUCKET <= S.C:
                if PER_ROW:
                    b_p *= exp2(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR))
                    b_before *= exp2(c - b_reference)[:, None]
                else:
                    b_p = tl.where(m_seen, b_p, 0)
                if WIDE:
                    b_p = same_layout(b_p, b_before)
                b_den = tl.sum(b_p, 1)
            b_den += tl.sum(b_before, 1)
            tl.store(p_den + g + i_t * S.H, b_den, mask=i_t < left)
            b_out = tl.dot(b_query, tl.trans(b_kv.to(tl.bfloat16)))
            if PER_ROW:
                b_out *= exp2(c - b_reference)[:, None]
            if S.BUCKET <= S.C:
                b_out = add(b_out, tl.dot(b_p.to(tl.bfloat16), b_v))
            b_out *= inverse(b_den)[:, None]
            store_rows(p_out + g * S.E, S.H * S.E, left, b_out, S.E, S.BE, S)
        if PER_ROW:
            decay = exp2(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
        if S.BUCKET <= S.C:
            b_kv = tl.dot(tl.trans(b_v), b_end, b_kv)
            b_z += b_more_z
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        p_out += S.C * S.H * S.E
        p_den += S.C * S.H
        left -= S.C
        rows -= S.C


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_fused_chunk_forward_kernel(
    p_q, p_k, p_v, p_lengths, p_kv, p_z, p_scales, p_reference, p_out, p_den,
    T, segments, chunks, q, k, v, S: tl.constexpr, SUM: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One segment of one key head and its query heads. p_den: (B, T, H), at the reference of its row.

    p_kv, p_z: None for a sequence of one segment; then the scales and references are computed here. SUM: the sums
    before the segment are computed here and stored.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment_index(tl.program_id(0), p_lengths, T, segments, chunks, False, S)
    p_q = _pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h * GROUP)
    p_k = _pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    p_v = _pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_h)
    i_row = (i_b * T + i_0) * S.H + i_h * GROUP
    p_out += i_row * S.E
    p_den += i_row
    count = chunks_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    before = tl.full((), FLOOR, tl.float32)
    if SUM:
        b_kv, b_z, before = _sum_earlier(p_k, p_v, i_c, rows, S, STAGES)
        store_sums(p_kv, i_o, b_kv, S)
        tl.store(p_z + i_o * S.BD + tl.arange(0, S.BD), b_z)
        b_z = b_z[None, :]
    else:
        b_kv, b_z = load_state(p_kv, p_z, i_o, S)
    if (p_kv is None or SUM) and S.SCALED:
        c_before, first, top = reference(before), _first_reference(p_k, rows, S), _largest_logit(p_k, rows, count, S)
        tl.store(p_scales + i_o * SCALES + 1, first)
        tl.store(p_scales + i_o * SCALES + 2, top)
        p_reference += i_x * (segments + 1) + i_s
        tl.store(p_reference, before)
        if i_s == segments - 1:
            tl.store(p_reference + 1, tl.maximum(before, top))
        c = tl.maximum(c_before, first)
        use_per_row = (reference(top) > c + SLACK).to(tl.int32)
        if S.BUCKET > S.C:
            c, use_per_row = c_before, 0
    else:
        c_before, c, use_per_row = segment_references(p_reference, p_scales, i_x, i_s, segments, S)
    b_z = first_row(b_z)
    for per_row in tl.static_range(2 if S.SCALED and S.BUCKET <= S.C else 1):
        if use_per_row == per_row:
            c_0 = c_before if per_row else c
            factor = exp2(c_before - c_0)
            start = p_q, p_k, p_v, p_out, p_den, b_kv * factor, b_z * factor, c_0
            _read_segment(start, (left, rows, count), q, S, per_row, STAGES)


@triton.jit
def _sum_queries(start, counts, q, d, S: tl.constexpr, PER_ROW: tl.constexpr, STAGES: tl.constexpr):
    """dS (BE, BD) and dz (BD,) of one segment at the reference c of its start."""
    BE: tl.constexpr = S.BE
    BD: tl.constexpr = S.BD
    C: tl.constexpr = S.C
    p_q, p_k, p_out, p_den, p_d_out, p_queries, p_starts, c = start
    left, rows, count = counts
    i_t = tl.arange(0, S.C)
    b_d_kv = tl.zeros((BE, BD), tl.float32)
    b_d_z = tl.zeros((C, BD), tl.float32)  # added up at the end, over the chunks' rows
    c_start = c
    for _ in tl.range(count, num_stages=1 if PER_ROW else STAGES):
        if PER_ROW:
            b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
            _, b_reference, c_last = row_references(b_k, rows, c, S)
            b_row = exp2(c_start - b_reference)
            if p_starts is not None:
                tl.store(p_starts, c)
                p_starts += 1
            c = c_last
        for g in range(S.H // S.HKV):
            b_q = load_rows(p_q + g * q.h, S.STRIDE_Q, left, S.D, S.BD, S)
            b_d = load_rows(p_d_out + g * d.h, S.STRIDE_D, left, S.E, S.BE, S)
            b_query, b_largest = query_features(b_q, S)
            b_den = load_column(p_den + g, S.H, left, S)
            b_query *= inverse(b_den)[:, None]
            b_out = load_rows(p_out + g * S.E, S.H * S.E, left, S.E, S.BE, S)
            b_delta = tl.sum(b_d.to(tl.float32) * b_out.to(tl.float32), 1)
            if p_queries is not None:
                tl.store(p_queries + (2 * g) * S.C + i_t, b_delta)
                tl.store(p_queries + (2 * g + 1) * S.C + i_t, query_scale(b_den, b_largest, S))
            if PER_ROW:
                b_query *= b_row[:, None]
            b_d_z -= b_query * b_delta[:, None]
            b_d_kv = tl.dot(tl.trans(b_d), b_query.to(tl.bfloat16), b_d_kv)
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_d_out += S.C * S.STRIDE_D
        p_out += S.C * S.H * S.E
        p_den += S.C * S.H
        if p_queries is not None:
            p_queries += 2 * S.C * (S.H // S.HKV)
        left -= S.C
        rows -= S.C
    return b_d_kv, tl.sum(b_d_z, 0)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_fused_chunk_backward_sums_kernel(
    p_q, p_k, p_lengths, p_scales, p_reference, p_starts, p_out, p_den, p_d_out, p_queries, p_d_kv, p_d_z,
    T, segments, chunks, q, k, d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """dS of one segment, summed over the query heads of a group, at the reference of the sums before it.

    p_queries: (B, Hkv, chunks, group, 2, C) gets δ and what `normalized_queries` takes. p_starts: (B, Hkv, chunks)
    gets the references before each chunk, where they rise within a segment.
    """
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment_index(tl.program_id(0), p_lengths, T, segments, chunks, False, S)
    p_q = _pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h * GROUP)
    p_k = _pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    p_d_out = _pointer(p_d_out, d, S.STRIDE_D, i_b, i_0, i_h * GROUP)
    i_row = (i_b * T + i_0) * S.H + i_h * GROUP
    p_out += i_row * S.E
    p_den += i_row
    p_queries += (i_x * tl.cdiv(T, S.C) + i_c) * (2 * S.C * GROUP)
    p_starts += i_x * tl.cdiv(T, S.C) + i_c
    count = chunks_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    c_before, c, use_per_row = segment_references(p_reference, p_scales, i_x, i_s, segments, S)
    for per_row in tl.static_range(2 if S.SCALED and S.BUCKET <= S.C else 1):
        if use_per_row == per_row:
            c_0 = c_before if per_row else c
            start = p_q, p_k, p_out, p_den, p_d_out, p_queries, p_starts, c_0
            b_d_kv, b_d_z = _sum_queries(start, (left, rows, count), q, d, S, per_row, STAGES)
            store_sums(p_d_kv, i_o, b_d_kv * exp2(c_before - c_0), S)
            tl.store(p_d_z + i_o * S.BD + tl.arange(0, S.BD), b_d_z * exp2(c_before - c_0))


@triton.jit
def _row_scales(p_out, p_den, b_q, b_d, left, S: tl.constexpr):
    """δ (C,) of one query head, and what `normalized_queries` takes."""
    b_out = load_rows(p_out, S.H * S.E, left, S.E, S.BE, S)
    b_largest = zeros(S.C)
    if S.MAP == "softmax":
        b_largest = tl.max(_logits(b_q, S), 1)
    b_scale = query_scale(load_column(p_den, S.H, left, S), b_largest, S)
    return tl.sum(b_d.to(tl.float32) * b_out.to(tl.float32), 1), b_scale


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _differentiate_queries(start, counts, q, d, S: tl.constexpr, PER_ROW: tl.constexpr, STAGES: tl.constexpr):
    """dq of one segment. b_kv (BE, BD), b_z (R, BD), whose rows add up to z: the sums before it at reference c.

    PER_ROW: each row at its own reference.
    """
    p_q, p_k, p_v, p_out, p_den, p_d_out, p_queries, p_starts, p_d_q, b_kv, b_z, c = start
    left, rows, count = counts
    i_t = tl.arange(0, S.C)
    for _ in tl.range(count, num_stages=1 if PER_ROW else STAGES):
        if S.BUCKET <= S.C:
            b_v, b_f, b_end, b_n, b_reference, c_last = _load_keys(p_k, p_v, c, rows, S, PER_ROW)
            b_more_z = partial_sums(b_end, S)
            b_f = round_once(b_f)
            b_end = b_end.to(tl.bfloat16) if PER_ROW else b_f
        if p_out is not None and PER_ROW:
            tl.store(p_starts, c)
            p_starts += 1
        m_seen = sees(i_t[:, None], i_t[None, :], S)
        for g in range(S.H // S.HKV):
            b_d = load_rows(p_d_out + g * d.h, S.STRIDE_D, left, S.E, S.BE, S)
            if S.BUCKET <= S.C:
                b_d_p = tl.dot(b_d, tl.trans(b_v))
            b_q = load_rows(p_q + g * q.h, S.STRIDE_Q, left, S.D, S.BD, S)
            if p_out is None:
                b_delta = tl.load(p_queries + (2 * g) * S.C + i_t)
                b_scale = tl.load(p_queries + (2 * g + 1) * S.C + i_t)
            else:
                b_delta, b_scale = _row_scales(p_out + g * S.E, p_den + g, b_q, b_d, left, S)
                if p_queries is not None:
                    tl.store(p_queries + (2 * g) * S.C + i_t, b_delta)
                    tl.store(p_queries + (2 * g + 1) * S.C + i_t, b_scale)
            if S.BUCKET <= S.C:
                b_d_p -= b_delta[:, None]
                if PER_ROW:
                    b_d_p *= exp2(tl.where(m_seen, b_n[None, :] - b_reference[:, None], FLOOR))
                else:
                    b_d_p = tl.where(m_seen, b_d_p, 0)
            b_g = tl.dot(b_d, b_kv.to(tl.bfloat16))
            b_g -= b_delta[:, None] * total_rows(b_z, S)
            if PER_ROW:
                b_g *= exp2(c - b_reference)[:, None]
            b_slope = query_slopes(b_q, b_scale, S)
            if S.BUCKET <= S.C:
                b_g = add(b_g, tl.dot(b_d_p.to(tl.bfloat16), b_f))
            b_g *= b_slope
            if S.MAP == "softmax":
                # A constant added to q changes nothing, so dq sums to 0: remove what the rounding of δ adds.
                b_total, b_rest = tl.reduce((same_layout(b_slope, b_g), b_g), 1, _add_pairs)
                b_g -= b_slope * (b_rest * inverse(b_total))[:, None]
            store_rows(p_d_q + g * S.D, S.H * S.D, left, b_g, S.D, S.BD, S)
        if PER_ROW:
            decay = exp2(c - c_last)
            b_kv *= decay
            b_z *= decay
            c = c_last
        if S.BUCKET <= S.C:
            b_kv = tl.dot(tl.trans(b_v), b_end, b_kv)
            b_z += b_more_z
        p_q += S.C * S.STRIDE_Q
        p_k += S.C * S.STRIDE_K
        p_v += S.C * S.STRIDE_V
        p_d_out += S.C * S.STRIDE_D
        if p_out is not None:
            p_out += S.C * S.H * S.E
            p_den += S.C * S.H
        p_d_q += S.C * S.H * S.D
        if p_queries is not None:
            p_queries += 2 * S.C * (S.H // S.HKV)
        left -= S.C
        rows -= S.C


@triton.jit
def _queries_segment(
    pid, p_q, p_k, p_v, p_lengths, p_kv, p_z, p_scales, p_reference, p_starts, p_out, p_den, p_d_out, p_queries, p_d_q,
    T, segments, chunks, q, k, v, d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Segment pid of `linear_fused_chunk_backward_queries_kernel`."""
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment_index(pid, p_lengths, T, segments, chunks, False, S)
    p_q = _pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h * GROUP)
    p_k = _pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    p_v = _pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_h)
    p_d_out = _pointer(p_d_out, d, S.STRIDE_D, i_b, i_0, i_h * GROUP)
    i_row = (i_b * T + i_0) * S.H + i_h * GROUP
    if p_out is not None:
        p_out += i_row * S.E
        p_den += i_row
    if p_queries is not None:
        p_queries += (i_x * tl.cdiv(T, S.C) + i_c) * (2 * S.C * GROUP)
        p_starts += i_x * tl.cdiv(T, S.C) + i_c
    p_d_q += i_row * S.D
    count = chunks_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    c_before, c, use_per_row = segment_references(p_reference, p_scales, i_x, i_s, segments, S)
    b_kv, b_z = load_state(p_kv, p_z, i_o, S)
    b_z = first_row(b_z)
    for per_row in tl.static_range(2 if S.SCALED and S.BUCKET <= S.C else 1):
        if use_per_row == per_row:
            c_0 = c_before if per_row else c
            factor = exp2(c_before - c_0)
            start = (
                p_q, p_k, p_v, p_out, p_den, p_d_out, p_queries, p_starts, p_d_q, b_kv * factor, b_z * factor, c_0
            )  # fmt: skip
            _differentiate_queries(start, (left, rows, count), q, d, S, per_row, STAGES)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_fused_chunk_backward_queries_kernel(
    p_q, p_k, p_v, p_lengths, p_kv, p_z, p_scales, p_reference, p_starts, p_out, p_den, p_d_out, p_queries, p_d_q,
    T, segments, chunks, q, k, v, d, S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """dq of one segment of one key head's query heads.

    p_kv, p_z: None for a sequence of one segment. Then p_out and p_den are given, and what
    `linear_fused_chunk_backward_sums_kernel` writes to p_queries and p_starts is written here.
    """
    _queries_segment(
        tl.program_id(0), p_q, p_k, p_v, p_lengths, p_kv, p_z, p_scales, p_reference, p_starts, p_out, p_den, p_d_out,
        p_queries, p_d_q, T, segments, chunks, q, k, v, d, S, STAGES
    )  # fmt: skip


@triton.jit
def _load_queries(p_q, p_queries, p_out, p_den, p_d_out, g, q, d, left, S: tl.constexpr):
    """φ(q) / den (C, BD) and d (C, BE) of query head g, and δ (C,) if it is computed here: without p_queries."""
    b_q = load_rows(p_q + g * q.h, S.STRIDE_Q, left, S.D, S.BD, S)
    b_d = load_rows(p_d_out + g * d.h, S.STRIDE_D, left, S.E, S.BE, S)
    b_delta = zeros(S.C)
    if p_queries is None:
        b_delta, b_scale = _row_scales(p_out + g * S.E, p_den + g, b_q, b_d, left, S)
    else:
        b_scale = tl.load(p_queries + (2 * g + 1) * S.C + tl.arange(0, S.C))
    return round_once(normalized_queries(b_q, b_scale, S)), b_d, b_delta


@triton.jit
def _differentiate_keys(start, counts, q, d, S: tl.constexpr, PER_ROW: tl.constexpr, STAGES: tl.constexpr):
    """dk and dv of one segment. b_d_kv (BE, BD), b_d_z: the gradients of the sums after it, at the reference c of all
    keys; PER_ROW: at that of the segment's end. b_d_z is (R, BD), whose rows add up to dz, or (C, BD) with equal rows,
    which with large states spills fewer registers.
    """
    C: tl.constexpr = S.C
    p_q, p_k, p_v, p_starts, p_out, p_den, p_d_out, p_queries, p_d_k, p_d_v, b_d_kv, b_d_z, c = start
    left, rows, count = counts
    GROUP: tl.constexpr = S.H // S.HKV
    i_t = tl.arange(0, S.C)
    for _ in tl.range(count, num_stages=1 if PER_ROW else STAGES):
        b_k = load_rows(p_k, S.STRIDE_K, rows, S.D, S.BD, S)
        b_v = load_rows(p_v, S.STRIDE_V, rows, S.E, S.BE, S)
        b_n = tl.zeros((C,), tl.float32) + c
        m_seen = sees(i_t[None, :], i_t[:, None], S)
        if PER_ROW and S.BUCKET > S.C:
            b_n = reference(tl.max(key_logits(b_k, rows, S, True), 1))
            b_end = exp2(b_n - c)
        elif PER_ROW:
            c_start = tl.load(p_starts)
            p_starts -= 1
            b_n, b_reference, c_last = row_references(b_k, rows, c_start, S)
            # The gradients after the chunk are at the reference of its end.
            b_end = exp2(b_n - c_last)
            b_pair = exp2(tl.where(m_seen, b_n[:, None] - b_reference[None, :], FLOOR))
        b_features = key_features(b_k, b_n, rows, S)
        b_f = round_once(b_features)
        b_rounded = b_d_kv.to(tl.bfloat16)
        # Values first, then keys: computing both in one loop would need more registers.
        if S.BUCKET <= S.C:
            b_query, b_d, b_delta = _load_queries(p_q, p_queries, p_out, p_den, p_d_out, 0, q, d, left, S)
        b_d_v = tl.dot(b_f, tl.trans(b_rounded))
        if PER_ROW:
            b_d_v *= b_end[:, None]
        if S.BUCKET <= S.C:
            for g in range(GROUP):
                if GROUP > 1:
                    b_query, b_d, b_delta = _load_queries(p_q, p_queries, p_out, p_den, p_d_out, g, q, d, left, S)
                b_p = tl.dot(b_f, tl.trans(b_query))
                b_p = b_p * b_pair if PER_ROW else tl.where(m_seen, b_p, 0)
                b_d_v = add(b_d_v, tl.dot(b_p.to(tl.bfloat16), b_d))
        store_rows(p_d_v, S.HKV * S.E, left, b_d_v, S.E, S.BE, S)
        b_g = tl.dot(b_v, b_rounded)
        b_g += total_rows(b_d_z, S) if b_d_z.shape[0] == R else b_d_z
        if PER_ROW:
            b_g *= b_end[:, None]
        if PER_ROW and S.BUCKET <= S.C:
            decay = exp2(c_start - c_last)
            b_d_kv *= decay
            b_d_z *= decay
        if S.BUCKET <= S.C:
            for g in range(GROUP):
                if GROUP > 1:
                    b_query, b_d, b_delta = _load_queries(p_q, p_queries, p_out, p_den, p_d_out, g, q, d, left, S)
                if p_queries is not None:
                    b_delta = tl.load(p_queries + 2 * g * S.C + i_t)
                b_d_p = tl.dot(b_v, tl.trans(b_d))
                b_d_p -= b_delta[None, :]
                b_d_p = b_d_p * b_pair if PER_ROW else tl.where(m_seen, b_d_p, 0)
                b_g = add(b_g, tl.dot(b_d_p.to(tl.bfloat16), b_query))
                b_row = b_query
                if PER_ROW:
                    b_row = (b_query * exp2(c_start - b_reference)[:, None]).to(tl.bfloat16)
                b_d_kv = tl.dot(tl.trans(b_d), b_row, b_d_kv)
                if b_d_z.shape[0] == R:
                    b_d_z -= partial_sums(widen(b_row) * b_delta[:, None], S)
                else:
                    b_minus = tl.zeros((C, C), tl.float32) - b_delta[None, :]
                    b_d_z = tl.dot(b_minus.to(tl.bfloat16), b_row, b_d_z)
        b_g = _gradient(b_g, b_k, b_features, S)
        store_rows(p_d_k, S.HKV * S.D, left, b_g, S.D, S.BD, S)
        p_q -= S.C * S.STRIDE_Q
        p_k -= S.C * S.STRIDE_K
        p_v -= S.C * S.STRIDE_V
        p_d_out -= S.C * S.STRIDE_D
        p_d_k -= S.C * S.HKV * S.D
        p_d_v -= S.C * S.HKV * S.E
        if p_queries is None:
            p_out -= S.C * S.H * S.E
            p_den -= S.C * S.H
        if p_queries is not None:
            p_queries -= 2 * S.C * GROUP
        left += S.C
        rows += S.C


@triton.jit
def _sum_later(
    p_q, p_k, p_out, p_den, p_d_out, p_scales, p_reference, i_x, i_s, left, rows, T, segments, chunks, q, d,
    S: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """dS (BE, BD) and dz (BD,) of all queries after segment i_s, at whose last chunk the pointers are, at the reference
    of the sums before them.
    """
    p_q += S.C * S.STRIDE_Q
    p_k += S.C * S.STRIDE_K
    p_d_out += S.C * S.STRIDE_D
    p_out += S.C * S.H * S.E
    p_den += S.C * S.H
    left -= S.C
    rows -= S.C
    if not S.SCALED:
        start = p_q, p_k, p_out, p_den, p_d_out, None, None, tl.full((), 0, tl.float32)
        count = tl.cdiv(T, S.C) - (i_s + 1) * chunks
        b_d_kv, b_d_z = _sum_queries(start, (left, rows, count), q, d, S, False, STAGES)
    else:
        b_d_kv, b_d_z = zeros(S.BE, S.BD), zeros(S.BD)
        c_last = tl.full((), 0, tl.float32)
        for i in range(segments - 1 - i_s):
            i_later = segments - 1 - i
            tokens = (i_later - i_s - 1) * chunks * S.C
            c_before, c, use_per_row = segment_references(p_reference, p_scales, i_x, i_later, segments, S)
            factor = exp2(c_before - c_last) if i > 0 else 0.0
            b_d_kv *= factor
            b_d_z *= factor
            for per_row in tl.static_range(2 if S.BUCKET <= S.C else 1):
                if use_per_row == per_row:
                    c_0 = c_before if per_row else c
                    start = (
                        p_q + tokens * S.STRIDE_Q, p_k + tokens * S.STRIDE_K, p_out + tokens * S.H * S.E,
                        p_den + tokens * S.H, p_d_out + tokens * S.STRIDE_D, None, None, c_0
                    )  # fmt: skip
                    counts = left - tokens, rows - tokens, chunks_in(i_later, T, chunks, S)
                    b_more, b_more_z = _sum_queries(start, counts, q, d, S, per_row, STAGES)
                    b_d_kv += b_more * exp2(c_before - c_0)
                    b_d_z += b_more_z * exp2(c_before - c_0)
            c_last = c_before
    return b_d_kv, b_d_z


@triton.jit
def _keys_segment(
    pid, p_q, p_k, p_v, p_lengths, p_d_kv, p_d_z, p_scales, p_reference, p_starts, p_out, p_den, p_d_out, p_queries,
    p_d_k, p_d_v, T, segments, chunks, q, k, v, d, S: tl.constexpr, SUM: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Segment pid of `linear_fused_chunk_backward_keys_kernel`. SUM: dS after the segment is computed here."""
    C: tl.constexpr = S.C
    BD: tl.constexpr = S.BD
    GROUP: tl.constexpr = S.H // S.HKV
    i_b, i_h, i_x, i_s, i_c, i_0, left, rows = segment_index(pid, p_lengths, T, segments, chunks, True, S)
    p_q = _pointer(p_q, q, S.STRIDE_Q, i_b, i_0, i_h * GROUP)
    p_k = _pointer(p_k, k, S.STRIDE_K, i_b, i_0, i_h)
    p_v = _pointer(p_v, v, S.STRIDE_V, i_b, i_0, i_h)
    p_d_out = _pointer(p_d_out, d, S.STRIDE_D, i_b, i_0, i_h * GROUP)
    i_row = (i_b * T + i_0) * S.HKV + i_h
    p_d_k += i_row * S.D
    p_d_v += i_row * S.E
    if p_out is not None:
        p_out += i_row * GROUP * S.E
        p_den += i_row * GROUP
    if p_queries is not None:
        p_starts += i_x * tl.cdiv(T, S.C) + i_c
        p_queries += (i_x * tl.cdiv(T, S.C) + i_c) * (2 * S.C * GROUP)
    count = chunks_in(i_s, T, chunks, S)
    i_o = i_x * segments + i_s
    _, c, use_per_row = segment_references(p_reference, p_scales, i_x, i_s, segments, S, False)
    c_after = c
    if S.SCALED:
        c_after = reference(tl.load(p_reference + i_x * (segments + 1) + i_s + 1))
    if SUM:
        b_d_kv, b_d_z = _sum_later(
            p_q, p_k, p_out, p_den, p_d_out, p_scales, p_reference, i_x, i_s, left, rows, T, segments, chunks, q, d,
            S, STAGES
        )  # fmt: skip
        b_d_z = b_d_z[None, :]
    else:
        b_d_kv, b_d_z = load_state(p_d_kv, p_d_z, i_o, S)
    if S.BD * S.BE <= 64 * 64:
        b_d_z = first_row(b_d_z)
    else:
        b_d_z += tl.zeros((C, BD), tl.float32)
    for per_row in tl.static_range(2 if S.SCALED else 1):
        if use_per_row == per_row:
            c_0 = c_after if per_row else c
            factor = exp2(c_0 - c_after)
            start = (
                p_q, p_k, p_v, p_starts, p_out, p_den, p_d_out, p_queries, p_d_k, p_d_v, b_d_kv * factor,
                b_d_z * factor, c_0
            )  # fmt: skip
            _differentiate_keys(start, (left, rows, count), q, d, S, per_row, STAGES)


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_fused_chunk_backward_keys_kernel(
    p_q, p_k, p_v, p_lengths, p_d_kv, p_d_z, p_scales, p_reference, p_starts, p_out, p_den, p_d_out, p_queries, p_d_k,
    p_d_v, T, segments, chunks, q, k, v, d, S: tl.constexpr, SUM: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """dk and dv of one segment of one key head. SUM: dS after the segment is computed here, from p_out and p_den."""
    _keys_segment(
        tl.program_id(0), p_q, p_k, p_v, p_lengths, p_d_kv, p_d_z, p_scales, p_reference, p_starts, p_out, p_den,
        p_d_out, p_queries, p_d_k, p_d_v, T, segments, chunks, q, k, v, d, S, SUM, STAGES
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "segments", "chunks"])
def linear_fused_chunk_backward_kernel(
    p_q, p_k, p_v, p_lengths, p_kv, p_z, p_out, p_den, p_d_out, p_d_q, p_d_k, p_d_v,
    T, segments, chunks, q, k, v, d, S: tl.constexpr, SUM: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """dk and dv of one segment of one key head, by the first half of the programs, or dq, by the other half. Pointwise
    maps only.

    p_kv, p_z: None for a sequence of one segment. SUM: dS after a segment is computed here.
    """
    half = tl.num_programs(0) // 2
    pid = tl.program_id(0)
    if pid < half:
        _keys_segment(
            pid, p_q, p_k, p_v, p_lengths, None, None, None, None, None, p_out, p_den, p_d_out, None, p_d_k, p_d_v,
            T, segments, chunks, q, k, v, d, S, SUM, STAGES
        )  # fmt: skip
    else:
        _queries_segment(
            pid - half, p_q, p_k, p_v, p_lengths, p_kv, p_z, None, None, None, p_out, p_den, p_d_out, None, p_d_q,
            T, segments, chunks, q, k, v, d, S, STAGES
        )  # fmt: skip


def forward(x: LinearInputs, problem: LinearProblem, *, zeroed: bool = True) -> tuple[Tensor | None, ...]:
    """Return out, the sums and their shift after the last token or None, den, and the workspace for `backward`.

    zeroed: Whether den is a tensor of its own and the workspace zeroed; otherwise den is None, and in the workspace.
    """
    x = x._replace(q=dense_rows(x.q), k=dense_rows(x.k), v=dense_rows(x.v), lengths=dense(x.lengths))
    x = x._replace(kv=dense(x.kv), shift=dense(x.shift))
    return forward_plan(x, problem)(x, zeroed=zeroed)


def backward(
    saved: LinearSaved, x: LinearInputs, problem: LinearProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and of the sums before, if there are any."""
    x = x._replace(q=dense_rows(x.q), k=dense_rows(x.k), v=dense_rows(x.v), lengths=dense(x.lengths))
    saved = saved._replace(d_out=dense_rows(saved.d_out), d_kv=dense(saved.d_kv), out=dense(saved.out))
    return backward_plan(saved, x, problem)(saved, x)


def forward_plan(x: LinearInputs, problem: LinearProblem) -> _FusedChunkForward:
    """Return the plan of `forward` for inputs with dense rows."""
    return _FusedChunkForward.of((x.q, x.k, x.v, x.lengths, x.kv, x.shift), problem)


def backward_plan(saved: LinearSaved, x: LinearInputs, problem: LinearProblem) -> _FusedChunkBackward:
    """Return the plan of `backward` for inputs with dense rows."""
    given = x.q, x.k, x.v, x.lengths, saved.d_out, saved.d_kv, saved.out, saved.den, saved.starts, x.kv
    return _FusedChunkBackward.of(given, problem)


def saved_size(x: LinearInputs, problem: LinearProblem) -> int:
    """Return the number of float32 elements that `forward` saves; it does not depend on the length without a bucket."""
    device = x.q.device.index if x.q.is_cuda else -1
    buckets = -(-int(x.k.shape[1]) // problem.bucket) if problem.bucket > CHUNK else 0
    return _saved(device, x.k.shape[0] * x.k.shape[2], padded(x.q.shape[3]), padded(x.v.shape[3]), buckets).size


class _FusedChunkPlan(CausalPlan):
    """`one`: no state before or after, and no launches for sums: a segment's program sums the keys before, and the
    queries after it, itself. `large`: the state needs the registers of a whole multiprocessor.
    """

    def __init__(self, device: int, key: Signature, problem: LinearProblem, *, stateless: bool) -> None:
        super().__init__(device, key, problem)
        self.BD, self.BE = padded(self.D), padded(self.E)
        chunks = -(-self.T // CHUNK)
        by_bucket, scaled = problem.bucket > CHUNK, problem.feature_map == "softmax"
        self.large, programs = self.BD * self.BE > 64 * 64, _resident_programs(device, self.BD, self.BE)
        # As many segments as fill the device, but none of a single chunk.
        segments = max(1, min(programs // self.heads, chunks // 2))
        run = problem.bucket // CHUNK if by_bucket else None
        at_once = self._run_at_once(chunks, segments, programs, run, scaled=scaled)
        self.one = at_once is not None and stateless and not self.final
        self.run = (at_once if self.one else run) or -(-chunks // segments)
        self.segments = -(-chunks // self.run)
        self.saved = _saved(device, self.heads, self.BD, self.BE, self.segments if by_bucket else 0)
        # What is written: a sequence of one segment has no sums, and pointwise maps no references.
        alone = self.one and self.segments == 1
        self.written = self.saved.buffers[: 4 if not alone else 2 if scaled else 0]
        self.eager = Workspace(self.den_buffer, *self.written)
        full = key[3] is None and self.T % CHUNK == 0
        sizes = self.H, self.Hkv, self.D, self.E, CHUNK, self.BD, self.BE
        self.sizes = FusedChunkSizes(*sizes, problem.feature_map, scaled, full, problem.bucket)

    def _run_at_once(self, chunks: int, segments: int, programs: int, run: int | None, *, scaled: bool) -> int | None:
        """Return the number of chunks of a segment if one launch computes all of them, None where several are faster.

        segments: how many there are with several launches. programs: how many run at once. run: what a blind spot
        demands.
        """
        # Segments for half of these programs: fewer sum less of the sequence several times.
        few = run or -(-chunks // min(segments, max(2, programs // 2 // self.heads)))
        if not self.large and chunks - few <= EXTRA and -(-chunks // few) * self.heads <= max(programs, self.heads):
            return few
        if run is None:
            # Two segments gain less than two launches cost, unless each has many keys to go through twice.
            short = chunks <= SHORT or segments <= (1 if scaled and chunks > 2 * SHORT else 2)
            return chunks if short else None
        return run if run >= chunks else None

    def saved_pointers(self, saved: Tensor, den: Tensor | None) -> list[Any]:
        """Return den, scales, references, sums and z, None for what is not written; without den `saved` holds it."""
        if den is None:
            pointers = self.pointers(self.eager, saved)
        else:
            pointers = [*self.addresses(den), *self.pointers(self.saved, saved)[: len(self.written)]]
        return pointers + [None] * (4 - len(self.written))

    def segments_launch(self, kernel: Any, strided: str, halves: int = 1) -> Launch:
        """Create a launch of one program per segment, or two. strided: tensors whose strides the kernel takes."""
        constant: dict[str, Any] = {f"STRIDE_{name.upper()}": self.tensors[name][1][1] for name in strided}
        if "q" not in strided:
            constant["H"] = 0
        scalars = self.T, self.segments, self.run, *[Strides.of(self.tensors[name]) for name in strided]
        warps = 8 if self.large else 4
        constants = {"S": self.sizes._replace(**constant), "STAGES": STAGES, "num_warps": warps}
        constants["SUM"] = self.one and self.segments > 1
        return self.launch(kernel, (self.heads * self.segments * halves,), scalars, constants)

    def scan_segments(self, *, back: bool) -> Launch:
        sizes = ScanSizes(self.D, self.E, self.BD, self.BE, self.BE, FEATURES, 1, self.BD, "e2", SCALES.value)
        sizes = sizes._replace(SCALED=self.sizes.SCALED, KNOWN=back, BACK=back)
        return self.scan_launch(self.heads, self.segments, sizes)


class _FusedChunkForward(_FusedChunkPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem, stateless=key[4] is None)
        if not self.one:
            self.sums = self.segments_launch(linear_fused_chunk_forward_sums_kernel, "kv")
            self.scan = self.scan_segments(back=False)
        self.read = self.segments_launch(linear_fused_chunk_forward_kernel, "qkv")

    def __call__(self, x: LinearInputs, *, zeroed: bool = False) -> tuple[Tensor | None, ...]:
        """Launch; see `forward`."""
        q, k, v, lengths = x.q, x.k, x.v, x.lengths
        out, den, kv_out, shift_out = self.results(q, v, den=zeroed)
        saved = self.saved.allocate(q, zeroed=True) if zeroed else self.eager.allocate(q)
        p_den, scales, references, sums, z = self.saved_pointers(saved, den)
        p_q, p_k, p_v, p_lengths, p_out = self.addresses(q, k, v, lengths, out)
        with on_device(q):
            if not self.one:
                self.sums(p_k, p_v, p_lengths, sums, z, scales)
                self.scan(sums, z, sums, scales, references, x.kv, x.shift, kv_out, shift_out)
            self.read(p_q, p_k, p_v, p_lengths, sums, z, scales, references, p_out, p_den)
        return out, kv_out, shift_out, den, saved


class _FusedChunkBackward(_FusedChunkPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem, stateless=key[9] is None)
        self.tensors["d"] = key[4]
        self.both = None
        if self.one and not self.sizes.SCALED and not self.large:
            self.both = self.segments_launch(linear_fused_chunk_backward_kernel, "qkvd", 2)
            return
        X = self.heads * self.segments
        queries = X * self.run * 2 * CHUNK * (self.H // self.Hkv)
        sums = 0 if self.one else X * self.BD
        sizes = X * self.run, queries, sums * self.BE, sums
        self.workspace = Workspace(*[(size, torch.float32) for size in sizes])
        if not self.one:
            self.sums = self.segments_launch(linear_fused_chunk_backward_sums_kernel, "qkd")
            self.scan = self.scan_segments(back=True)
        self.queries = self.segments_launch(linear_fused_chunk_backward_queries_kernel, "qkvd")
        self.keys = self.segments_launch(linear_fused_chunk_backward_keys_kernel, "qkvd")

    def __call__(self, saved: LinearSaved, x: LinearInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Launch; see `backward`."""
        q, k, v, lengths = x.q, x.k, x.v, x.lengths
        d_q, d_k, d_v = new_like(q), new_like(k), new_like(v)
        d_start = None if x.kv is None else x.kv.new_empty(x.kv.shape)
        p_den, scales, references, sums, z = self.saved_pointers(saved.starts, saved.den)
        inputs = p_q, p_k, _, p_lengths = self.addresses(q, k, v, lengths)
        p_out, p_d, p_d_q, p_d_k, p_d_v = self.addresses(saved.out, saved.d_out, d_q, d_k, d_v)
        if self.both is not None:
            with on_device(q):
                self.both(*inputs, sums, z, p_out, p_den, p_d, p_d_q, p_d_k, p_d_v)
            return d_q, d_k, d_v, d_start
        work = self.workspace.allocate(q)
        starts, queries, d_sums, d_z = self.pointers(self.workspace, work)
        with on_device(q):
            rows = p_out, p_den
            if not self.one:
                rows = None, None
                self.sums(p_q, p_k, p_lengths, scales, references, starts, p_out, p_den, p_d, queries, d_sums, d_z)
                self.scan(d_sums, d_z, d_sums, None, references, saved.d_kv, None, d_start, None)
            self.queries(*inputs, sums, z, scales, references, starts, *rows, p_d, queries, p_d_q)
            if self.one:
                d_sums, d_z = None, None
            self.keys(*inputs, d_sums, d_z, scales, references, starts, *rows, p_d, queries, p_d_k, p_d_v)
        return d_q, d_k, d_v, d_start


def _resident_programs(device: int, BD: int, BE: int) -> int:
    """How many programs the device runs at once: two per multiprocessor, or one with a large state."""
    return processors(device) * (2 if BD * BE <= 64 * 64 else 1)


def _saved(device: int, heads: int, BD: int, BE: int, buckets: int) -> Workspace:
    """Scales of each segment, references of each segment and head, sums and z of each segment.

    The size is an upper bound for any length: under torch.compile the length is not known. buckets: the number of
    segments where each is a bucket of a blind spot, otherwise 0.
    """
    X = heads * buckets or heads + _resident_programs(device, BD, BE)
    return Workspace(*[(size, torch.float32) for size in (X * SCALES.value, X + heads, X * BD * BE, X * BD)])
