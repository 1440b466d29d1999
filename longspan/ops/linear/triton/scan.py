"""The scan over segments that all causal algorithms share, in both directions.

The keys of a segment are summed by one program, S_s = Σ φ(k) vᵀ and z_s = Σ φ(k). From these totals the scan computes
the sums before each segment,

    S ← S · B^(r_s − r_{s+1}) + S_s · B^(n_s − r_{s+1}),

with B^n_s the scale of a segment's total and B^r_s that of the sums before it: keys carry log scales, and sums are
stored divided by the largest so far. The backward pass scans the gradients of the totals from the last segment to the
first, dS ← dS · B^(r_s − r_{s+1}) + dS_s, and writes the gradients of the sums after each segment.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import LOG2E, exact_exp, exp2
from longspan.ops.common.launch import Launch, Plan, Signature, Strides, Workspace
from longspan.ops.common.tiles import FLOOR, padded, zeros
from longspan.ops.linear import LinearProblem
from longspan.ops.linear.triton import check_feature_map

# Compile-time constants of the scan.
# M, E: features and values of a state (B, Hkv, M, E), with one more column if NORMALIZE. BM, WIDTH: features and values
# of a total; BE: the power of two from WIDTH on. TILE: features per program. STRIDE_M, STRIDE_E: strides of a total.
# BASE: "e": scales are natural logarithms. "2": binary logarithms, rounded up where they are applied. "e2": natural
# logarithms, converted to binary ones and rounded up where they are applied.
# SCALES: values stored for each segment: the scale of its total first, its largest natural logarithm last.
# SCALED: keys carry log scales. KNOWN: the references exist already. BACK: from the last segment to the first.
ScanSizes = namedtuple(
    "ScanSizes",
    "M E BM WIDTH BE TILE STRIDE_M STRIDE_E BASE SCALES NORMALIZE SCALED KNOWN BACK",
    defaults=(1, True, True, False, False),
)


class CausalPlan(Plan):
    """What the plans of all causal algorithms share: sizes, results, the scan.

    Args:
        device: Index of the CUDA device, -1 for the CPU.
        key: Signature of the call's tensors, which begin with q, k, v.
        problem: The options.
        num_features: Number of features M; None: that of k.
    """

    def __init__(self, device: int, key: Signature, problem: LinearProblem, num_features: int | None = None) -> None:
        super().__init__(device)
        check_feature_map(problem.feature_map)
        q, k, v = key[:3]
        self.tensors = {"q": q, "k": k, "v": v}
        (self.B, self.T, self.H, self.D), (self.Hkv, self.E) = q[0], v[0][2:]
        self.M = self.D if num_features is None else num_features
        self.heads = self.B * self.Hkv
        self.final = problem.output_final_state
        self.out_shape = self.B, self.T, self.H, self.E
        self.out_like_v = v[0] == self.out_shape and v[1] == (self.T * self.H * self.E, self.H * self.E, self.E, 1)
        self.den_shape = self.B, self.T, self.H if problem.normalize else 0
        self.den_buffer = self.B * self.T * self.H, torch.float32
        self.kv_shape, self.shift_shape = (self.B, self.Hkv, self.M, self.E + problem.normalize), (self.B, self.Hkv)

    def results(
        self, q: Tensor, v: Tensor, *, den: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Allocate out, den if it is not part of a workspace, and the sums and shift after the last token if wanted."""
        dense = torch.contiguous_format
        out = torch.empty_like(v, memory_format=dense) if self.out_like_v else v.new_empty(self.out_shape)
        normalizer = q.new_empty(self.den_shape, dtype=torch.float32) if den else None
        if not self.final:
            return out, normalizer, None, None
        kv, shift = (q.new_empty(shape, dtype=torch.float32) for shape in (self.kv_shape, self.shift_shape))
        return out, normalizer, kv, shift

    def scan_launch(
        self,
        sequences: int,
        segments: int,
        sizes: ScanSizes,
        *,
        chunks: int = 1,
        last: int | None = None,
        first: int = 0,
    ) -> Launch:
        """Create the launch of a scan.

        Args:
            sequences: Number of sequences (batch index and key head), from sequence `first` on.
            segments: Segments per sequence.
            sizes: Compile-time constants.
            chunks: References per segment.
            last: Index of the reference after the last segment, by default the number of segments.
            first: The first sequence.
        """
        scalars = segments, chunks, segments if last is None else last, first
        return self.launch(linear_scan_kernel, (sequences, sizes.BM // sizes.TILE), scalars, {"S": sizes})


# Sequences from `first` on, each in segments of `run` chunks.
Part = namedtuple("Part", "first sequences segments run")
# Bytes of sums, see `is_small`.
SMALL = 1 << 26


def is_small(sums: Workspace) -> bool:
    """Whether these sums are not worth processing the sequences in parts."""
    return 4 * sums.size <= SMALL


class StatesPlan(CausalPlan):
    """Plans of algorithms that store the sums before every chunk, of all sequences or of a part at a time.

    A subclass sets `S`, whose members `BM` and `BE` are the padded sizes of the sums; `tiles`, the programs that sum
    one segment; and `programs`, how many of those a large GPU runs at once. A tiling has the members `warps`, `stages`
    and `registers`.

    Args:
        device: Index of the CUDA device, -1 for the CPU.
        key: Signature of the call's tensors, which begin with q, k, v.
        problem: The options.
        chunk: Tokens in a chunk.
        num_features: Number of features M; None: that of k.
    """

    S: Any
    tiles: int
    programs: int

    def __init__(
        self, device: int, key: Signature, problem: LinearProblem, chunk: int, num_features: int | None = None
    ) -> None:
        super().__init__(device, key, problem, num_features)
        self.chunks = -(-self.T // chunk)

    def split(self, share: float) -> list[Part]:
        """Divide the sequences into parts whose sums take about `share` times the bytes of q, k, v and out."""
        tensors = 2 * self.B * self.T * (self.H + self.Hkv) * (self.D + self.E)
        sums = Workspace(*self.stack(self.part(0, self.heads)))
        number = 1 if is_small(sums) else -(-4 * sums.size // int(share * tensors))
        size = -(-self.heads // number)
        return [self.part(first, size) for first in range(0, self.heads, size)]

    def part(self, first: int, size: int) -> Part:
        segments, run = self.segment(self.programs, size * self.tiles)
        return Part(first, min(size, self.heads - first), segments, run)

    def stack(self, part: Part) -> list[tuple[int, torch.dtype]]:
        """Totals of segments, sums of chunks from their segment's start (or end), and sums beyond each segment."""
        segments, chunks, size = part.sequences * part.segments, part.sequences * self.chunks, self.S.BM * self.S.BE
        fp32, bf16 = torch.float32, torch.bfloat16
        totals = (segments * size, fp32), (segments * self.S.BM, fp32)
        return [*totals, (chunks * size, bf16), (chunks * self.S.BM, fp32), (segments * size, bf16)]

    def segment(self, most: int, programs: int) -> tuple[int, int]:
        """Return the number of segments of each sequence and of chunks in each, for `programs` sequences and tiles."""
        run = -(-self.chunks // max(1, min(self.chunks, most // programs)))
        return -(-self.chunks // run), run

    def tiled(
        self, kernel: Any, tiling: Any, programs: int, sizes: tuple[int, ...], strided: str, **other: Any
    ) -> Launch:
        """strided: tensors whose strides follow the sizes. other: constants that differ from the plan's; 0 for those
        that the kernel does not use, so that it is not compiled again.
        """
        constants = {"S": self.S._replace(**other)}
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "maxnreg": tiling.registers}
        scalars = self.T, *sizes, *(Strides.of(self.tensors[name]) for name in strided)
        return self.launch(kernel, (programs,), scalars, {**constants, **options})

    def of_part(self, kernel: Any, tiling: Any, part: Part, programs: int, strided: str, **other: Any) -> Launch:
        """Create the launch of a kernel for one part, with `programs` programs per sequence."""
        sizes = part.segments, part.run, part.first, part.sequences
        return self.tiled(kernel, tiling, part.sequences * programs, sizes, strided, **other)

    def scan_part(self, part: Part, *, back: bool, **other: Any) -> Launch:
        """Create the scan of one part. other: constants of the scan that differ."""
        BM, BE = self.S.BM, self.S.BE
        block = padded(BE)
        sizes = ScanSizes(self.M, self.E, BM, BE, block, max(1, 512 // block), BE, 1, "2", KNOWN=True, BACK=back)
        where = {"chunks": part.run, "last": self.chunks, "first": part.first}
        return self.scan_launch(part.sequences, part.segments, sizes._replace(**other), **where)


@triton.jit
def reference(x):
    """The smallest integer n with exp(x) ≤ 2ⁿ; FLOOR stays FLOOR."""
    return tl.where(x <= FLOOR, FLOOR, tl.ceil(x * LOG2E))


@triton.jit
def _applied(c, S: tl.constexpr):
    """The scale at which sums of reference c are stored."""
    if S.BASE == "2":
        c = tl.ceil(c)
    if S.BASE == "e2":
        c = reference(c)
    return c


@triton.jit
def _power(x, S: tl.constexpr):
    return exact_exp(x) if S.BASE == "e" else exp2(x)


@triton.jit
def _ratio(c, c_next, S: tl.constexpr):
    """Factor that converts sums from one scale to the next; BACK: the inverse, for gradients of sums."""
    return _power(c_next - c if S.BACK else c - c_next, S)


@triton.jit
def _rest(c, ENTER: tl.constexpr, S: tl.constexpr):
    """Factor that converts a state at scale c to the rounded scale of stored sums (ENTER), or back."""
    exact = c * LOG2E if S.BASE == "e2" else c
    x = _ratio(exact, _applied(c, S), S) if ENTER else _ratio(_applied(c, S), exact, S)
    return tl.where(c <= FLOOR, 1.0, x)


@triton.jit(do_not_specialize=["segments", "chunks", "last", "first"])
def linear_scan_kernel(
    p_total, p_total_z, p_sums, p_scales, p_reference, p_enter, p_shift, p_leave, p_shift_out,
    segments, chunks, last, first, S: tl.constexpr
):  # fmt: skip
    """Sums before each segment (BACK: gradients of the sums after each) from the segments' own.

    p_total, p_sums: (sequences, segments, BM, WIDTH), which may be the same. p_total_z: (sequences, segments, BM), in
    place. p_scales: (sequences, segments, SCALES). p_reference: (B · Hkv, last + 1), written here unless KNOWN.
    p_enter, p_leave: (B, Hkv, M, E [+ 1]) the states on either side, or None. p_shift, p_shift_out: (B, Hkv).
    """
    SIZE: tl.constexpr = S.BM * S.WIDTH
    COLUMNS: tl.constexpr = S.E + 1 if S.NORMALIZE else S.E
    i_n, i_r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_x = first + i_n
    i_m, i_e = i_r * S.TILE + tl.arange(0, S.TILE), tl.arange(0, S.BE)
    m_m = i_m < S.M
    m_total = None
    if S.WIDTH < S.BE:
        m_total = (i_e < S.WIDTH)[None, :]
    m_kv = m_m[:, None] & (i_e < S.E)[None, :]
    i_state = (i_x * S.M + i_m) * COLUMNS
    p_reference += i_x * (last + 1)
    if S.SCALED and not S.KNOWN:
        p_scales += i_n * segments * S.SCALES
    c = tl.full((), FLOOR, tl.float32)
    if S.KNOWN and S.SCALED:
        c = tl.load(p_reference + last if S.BACK else p_reference)
    elif p_shift is not None:
        c = tl.load(p_shift + i_x)
    b_kv = zeros(S.TILE, S.BE)
    b_z = zeros(S.TILE)
    if p_enter is not None:
        b_kv = tl.load(p_enter + i_state[:, None] + i_e[None, :], mask=m_kv, other=0.0)
        if S.NORMALIZE:
            b_z = tl.load(p_enter + i_state + S.E, mask=m_m, other=0.0)
        if S.SCALED and S.BASE != "e":
            rest = _rest(c, True, S)
            b_kv *= rest
            b_z *= rest
    i_tile = i_n * segments * SIZE + i_m[:, None] * S.STRIDE_M + i_e[None, :] * S.STRIDE_E
    p_row = p_total_z + i_n * segments * S.BM + i_m
    for i in tl.range(segments, num_stages=4):
        i_s = segments - 1 - i if S.BACK else i
        b_more = tl.load(p_total + i_tile + i_s * SIZE, mask=m_total)
        tl.store(p_sums + i_tile + i_s * SIZE, b_kv.to(p_sums.dtype.element_ty), mask=m_total)
        decay, factor = 1.0, 1.0
        if S.SCALED:
            if S.BACK:
                c_next = tl.load(p_reference + i_s * chunks)
            elif S.KNOWN:
                c_next = tl.load(p_reference + tl.minimum((i_s + 1) * chunks, last))
            else:
                c_next = tl.maximum(c, tl.load(p_scales + i_s * S.SCALES + S.SCALES - 1))
                factor = _power(tl.load(p_scales + i_s * S.SCALES) - _applied(c_next, S), S)
                if i_r == 0:
                    tl.store(p_reference + i_s, c)
            decay = _ratio(_applied(c, S), _applied(c_next, S), S)
            c = c_next
        b_kv = b_kv * decay + b_more * factor
        if S.NORMALIZE:
            b_more_z = tl.load(p_row + i_s * S.BM)
            tl.store(p_row + i_s * S.BM, b_z)
            b_z = b_z * decay + b_more_z * factor
    if S.SCALED and not S.KNOWN:
        if i_r == 0:
            tl.store(p_reference + segments, c)
    if p_leave is not None:
        if S.SCALED and S.BASE != "e":
            rest = _rest(c, False, S)
            b_kv *= rest
            b_z *= rest
        tl.store(p_leave + i_state[:, None] + i_e[None, :], b_kv, mask=m_kv)
        if S.NORMALIZE:
            tl.store(p_leave + i_state + S.E, b_z, mask=m_m)
    if p_shift_out is not None:
        if i_r == 0:
            if S.BASE == "2":
                c = tl.where(c <= FLOOR, FLOOR, c / LOG2E)
            tl.store(p_shift_out + i_x, c)
