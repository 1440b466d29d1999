"""Causal FAVOR+ of `favor` in five launches instead of thirteen, for eager calls with short sequences and no state.

There launches take longer on the host than the device computes. What does not depend on one another is one launch,
whose programs divide the work; and the last program that sums a segment of a sequence's keys, or queries, also does the
scan over segments. Δ comes from `out` and from what rounding took from it, so that sums of queries need no other kernel
before them:

    forward:  scales of queries and of keys, the projection divided;  sums of keys;  the results;
    backward: sums of keys and of queries;  gradients of queries and of keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exp2
from longspan.ops.common.launch import Launch, Signature, Strides, Workspace, new_like, on_device
from longspan.ops.common.plans import signature
from longspan.ops.common.tiles import FLOOR, zeros
from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved
from longspan.ops.linear.triton.favor import (
    CHUNK,
    FavorPlan,
    differentiate_keys,
    differentiate_queries,
    linear_favor_forward_kernel,
    load_reference,
    load_undivided,
    saved_buffers,
    scale_inputs,
    sequence_index,
    sum_keys,
    sum_queries,
)
from longspan.ops.linear.triton.scan import is_small

# The most segments that one program scans, and chunks whose references one load reads.
MOST_SEGMENTS, MOST_CHUNKS = 8, 256


@triton.jit(do_not_specialize=["T", "segments", "chunks", "key_segments", "key_chunks", "programs"])
def linear_favor_short_forward_scales_kernel(
    p_q, p_k, p_weight, p_high, p_low, p_flag, p_lengths, p_query_offset, p_offset, p_scale, p_peak, p_largest, p_done,
    T, segments, chunks, key_segments, key_chunks, programs, q, k, S: tl.constexpr, KEYS: tl.constexpr,
    COUNTS: tl.constexpr
):  # fmt: skip
    """`linear_favor_forward_scales_kernel` of queries, of keys (KEYS), and `linear_favor_forward_weight_kernel` by the
    last program, which also sets the counts of finished programs to 0.
    """
    pid = tl.program_id(0)
    if pid < programs:
        scale_inputs(
            pid, p_q, p_weight, None, None, None, p_query_offset, None, None, None, T, segments, chunks, q, S
        )  # fmt: skip
    elif pid < tl.num_programs(0) - 1:
        scale_inputs(
            pid - programs, p_k, p_weight, None, None, p_lengths, p_offset, p_scale, p_peak, p_largest,
            T, key_segments, key_chunks, k, KEYS
        )  # fmt: skip
    else:
        TILE: tl.constexpr = 64
        i_d = tl.arange(0, S.BD)[None, :]
        b_largest = zeros(TILE)
        for i in range(0, S.BM, TILE):
            i_f = i + tl.arange(0, TILE)
            b_high, b_low = load_undivided(p_weight, i_f, S)
            b_low = b_low.to(tl.bfloat16)
            tl.store(p_high + i_f[:, None] * S.BD + i_d, b_high)
            tl.store(p_low + i_f[:, None] * S.BD + i_d, b_low)
            b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_low.to(tl.float32)), 1))
        tl.store(p_flag, tl.max(b_largest))
        for i in range(0, COUNTS, 256):
            i_o = i + tl.arange(0, 256)
            tl.store(p_done + i_o, tl.zeros((256,), tl.int32), mask=i_o < COUNTS)


@triton.jit
def scan_last(
    pid, p_total, p_total_z, p_sums, p_done, p_largest, p_reference, T, segments, chunks, sequences, S: tl.constexpr,
    BACK: tl.constexpr
):  # fmt: skip
    """`linear_scan_kernel` for the sequence and tile of program pid, if it is the last of those that sum its segments.

    p_done: (sequences, tiles) how many have summed theirs; 0 again afterwards. p_largest: None if the references are in
    p_reference already.
    """
    TILES: tl.constexpr = S.BM // S.TILE
    i_m, _, i_x, i_n, _, _ = sequence_index(pid, 0, sequences, TILES, S)
    p_done += i_n * TILES + i_m
    # What all threads of a program have stored comes before its count, and what the last program loads after its own.
    tl.debug_barrier()
    done = tl.atomic_add(p_done, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if done == segments - 1:
        i_f, i_e = i_m * S.TILE + tl.arange(0, S.TILE), tl.arange(0, S.BE)
        last = tl.cdiv(T, S.C)
        p_reference += i_x * (last + 1)
        b_kv = zeros(S.TILE, S.BE)
        b_z = zeros(S.TILE)
        c = tl.full((), FLOOR, tl.float32)
        if BACK:
            c = load_reference(p_reference, last)
        for i in range(segments):
            i_s = segments - 1 - i if BACK else i
            i_o = i_n * segments + i_s
            i_kv = i_o * (S.BM * S.BE) + i_f[:, None] * S.BE + i_e[None, :]
            # Other programs have stored these: not from the first cache.
            b_more = tl.load(p_total + i_kv, cache_modifier=".cg")
            b_more_z = tl.load(p_total_z + i_o * S.BM + i_f, cache_modifier=".cg")
            tl.debug_barrier()  # Several threads load an element that one of them overwrites.
            tl.store(p_sums + i_kv, b_kv.to(p_sums.dtype.element_ty))
            tl.store(p_total_z + i_o * S.BM + i_f, b_z)
            if BACK:
                c_next = load_reference(p_reference, i_s * chunks)
                decay = exp2(c_next - c)
            else:
                if p_largest is None:
                    c_next = load_reference(p_reference, tl.minimum((i_s + 1) * chunks, last))
                else:
                    i_c = i_s * chunks + tl.arange(0, 256)
                    m_c = i_c < tl.minimum((i_s + 1) * chunks, last)
                    b_largest = tl.load(p_largest + i_x * last + i_c, mask=m_c, other=FLOOR)
                    c_next = tl.maximum(c, tl.ceil(tl.max(b_largest)))
                decay = exp2(c - c_next)
            b_kv = b_kv * decay + b_more
            b_z = b_z * decay + b_more_z
            c = c_next
        tl.store(p_done, 0)


@triton.jit(do_not_specialize=["T", "segments", "chunks", "sequences"])
def linear_favor_short_forward_sums_kernel(
    p_k, p_v, p_high, p_low, p_flag, p_lengths, p_offset, p_largest, p_total, p_total_z, p_prefix, p_prefix_z,
    p_reference, p_sums, p_done, T, segments, chunks, sequences, k, v, S: tl.constexpr
):  # fmt: skip
    """`linear_favor_forward_sums_kernel`, and the scan, which writes p_sums and p_total_z."""
    pid = tl.program_id(0)
    sum_keys(
        pid, p_k, p_v, p_high, p_low, p_flag, p_lengths, p_offset, p_largest, None, p_total, p_total_z, p_prefix,
        p_prefix_z, p_reference, T, segments, chunks, 0, sequences, k, v, S
    )  # fmt: skip
    scan_last(
        pid, p_total, p_total_z, p_sums, p_done, p_largest, p_reference, T, segments, chunks, sequences, S, False
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "segments", "chunks", "sequences"])
def linear_favor_short_backward_sums_kernel(
    p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_offset, p_peak, p_reference,
    p_out, p_residual, p_den, p_normalized_offset, p_delta,
    p_total, p_total_z, p_prefix, p_prefix_z, p_before, p_d_total, p_d_total_z, p_suffix, p_suffix_z, p_after, p_done,
    T, segments, chunks, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """`linear_favor_forward_sums_kernel` by one half of the programs, `linear_favor_backward_sums_kernel` by the other,
    and their scans. Δ and the offsets of queries that include den are written here.
    """
    half = tl.num_programs(0) // 2
    pid = tl.program_id(0)
    counts = sequences * (S.BM // S.TILE)
    if pid < half:
        sum_queries(
            pid, p_q, p_d_out, p_high, p_low, p_flag, p_query_offset, p_delta, None, p_peak, p_reference, p_d_total,
            p_d_total_z, p_suffix, p_suffix_z, p_out, p_residual, p_den, p_normalized_offset,
            T, segments, chunks, 0, sequences, q, d, S
        )  # fmt: skip
        scan_last(
            pid, p_d_total, p_d_total_z, p_after, p_done + 2 * counts, None, p_reference, T, segments, chunks,
            sequences, S, True
        )  # fmt: skip
    else:
        sum_keys(
            pid - half, p_k, p_v, p_high, p_low, p_flag, p_lengths, p_offset, None, None, p_total, p_total_z, p_prefix,
            p_prefix_z, p_reference, T, segments, chunks, 0, sequences, k, v, S
        )  # fmt: skip
        scan_last(
            pid - half, p_total, p_total_z, p_before, p_done + counts, None, p_reference, T, segments, chunks,
            sequences, S, False
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "segments", "chunks", "sequences"])
def linear_favor_short_backward_kernel(
    p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, p_offset, p_scale, p_peak,
    p_reference, p_before, p_before_z, p_prefix, p_prefix_z, p_after, p_after_z, p_suffix, p_suffix_z,
    p_d_q, p_d_k, p_d_v, T, segments, chunks, sequences, q, k, v, d, S: tl.constexpr
):  # fmt: skip
    """`linear_favor_backward_keys_kernel` by the first programs, `linear_favor_backward_queries_kernel` by the rest."""
    keys = sequences * tl.cdiv(T, S.C)
    pid = tl.program_id(0)
    if pid < keys:
        differentiate_keys(
            pid, p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, None, None,
            p_offset, p_scale, p_peak, p_reference, p_after, p_after_z, p_suffix, p_suffix_z, None, p_d_k, p_d_v,
            T, segments, chunks, 0, sequences, q, k, v, d, S
        )  # fmt: skip
    else:
        differentiate_queries(
            pid - keys, p_q, p_k, p_v, p_d_out, p_high, p_low, p_flag, p_lengths, p_query_offset, p_delta, None, None,
            p_offset, p_scale, p_peak, p_reference, p_before, p_before_z, p_prefix, p_prefix_z, None, p_d_q,
            T, segments, chunks, 0, sequences, q, k, v, d, S
        )  # fmt: skip


def takes(x: LinearInputs, problem: LinearProblem) -> bool:
    """Whether the sequences are short enough: sums of keys and of queries are in memory at once, one program scans."""
    plan = FavorPlan(x.q.get_device(), signature(*_tensors(x)), problem)
    part = plan.part(0, plan.heads)
    few = part.segments <= MOST_SEGMENTS and plan.chunks <= MOST_CHUNKS
    return few and is_small(Workspace(*plan.stack(part))) and not problem.epsilon


def forward_plan(x: LinearInputs, problem: LinearProblem) -> _FavorShortForward:
    """Return the plan of the forward pass for inputs with dense rows and no state."""
    return _FavorShortForward.of(_tensors(x), problem)


def backward_plan(saved: LinearSaved, x: LinearInputs, problem: LinearProblem) -> _FavorShortBackward:
    """Return the plan of the backward pass for inputs with dense rows and no state."""
    return _FavorShortBackward.of((*_tensors(x), saved.d_out, saved.out, saved.starts), problem)


def _tensors(x: LinearInputs) -> tuple[Tensor | None, ...]:
    return x.q, x.k, x.v, x.weight, x.lengths


class _FavorShortPlan(FavorPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        self.S = self.S._replace(RESIDUAL=True)
        self.whole = self.part(0, self.heads)
        self.counts = 3 * self.heads * self.tiles  # of programs that have finished: one in `forward`, two in `backward`
        saved = saved_buffers(self.B, self.T, self.H, self.Hkv, self.D, self.M, self.E)
        self.eager = Workspace(self.den_buffer, *saved.buffers, (self.counts, torch.int32))

    def of_whole(self, kernel: Any, tiling: Any, programs: int, strided: str) -> Launch:
        """Create a launch over all sequences."""
        sizes = self.whole.segments, self.whole.run, self.heads
        return self.tiled(kernel, tiling, self.heads * programs, sizes, strided)


class _FavorShortForward(_FavorShortPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        self.workspace = Workspace(*self.stack(self.whole), (self.heads * self.chunks, torch.float32))
        self.scales = self.scales_launch()
        programs = self.whole.segments * self.tiles
        self.sums = self.of_whole(linear_favor_short_forward_sums_kernel, self.tilings.sums, programs, "kv")
        programs = self.H // self.Hkv * self.chunks
        self.read = self.of_part(linear_favor_forward_kernel, self.tilings.read, self.whole, programs, "qkv")

    def __call__(self, x: LinearInputs) -> tuple[Tensor | None, ...]:
        """Launch, and return what `favor.forward` does."""
        q, k, v, weight, lengths = _tensors(x)
        out, *_ = self.results(q, v, den=False)
        saved, work = self.eager.allocate(q), self.workspace.allocate(q)
        den, *w, query_offset, offset, scale, peak, references, residual, done = self.pointers(self.eager, saved)
        total, total_z, prefix, prefix_z, before, largest = self.pointers(self.workspace, work)
        p_q, p_k, p_v, p_weight, p_lengths, p_out = self.addresses(q, k, v, weight, lengths, out)
        rows = query_offset, offset, scale, peak
        with on_device(q):
            self.scales(p_q, p_k, p_weight, *w, p_lengths, *rows, largest, done)
            sums = total, total_z, prefix, prefix_z, references, before
            self.sums(p_k, p_v, *w, p_lengths, offset, largest, *sums, done)
            sums = before, total_z, prefix, prefix_z, None
            self.read(p_q, p_k, p_v, *w, p_lengths, *rows, references, *sums, p_out, den, residual)
        return out, None, None, None, saved

    def scales_launch(self) -> Launch:
        tiling = self.tilings.scales
        tile = min(tiling.tile, self.S.BM & -self.S.BM)  # a power of two that divides BM
        queries, keys = (self.segment(tiling.programs // 2, self.B * heads) for heads in (self.H, self.Hkv))
        sizes = self.S._replace(HKV=0, E=0, BE=0, TILE=tile, RESIDUAL=False)
        constants = {
            "S": sizes,
            "KEYS": sizes._replace(H=self.Hkv, KEY=True),
            "COUNTS": self.counts,
            "num_warps": tiling.warps,
        }
        constants["num_stages"] = tiling.stages
        programs = self.B * self.H * queries[0]
        strides = [Strides.of(self.tensors[name]) for name in "qk"]
        grid = programs + self.heads * keys[0] + 1
        scalars = self.T, *queries, *keys, programs, *strides
        return self.launch(linear_favor_short_forward_scales_kernel, (grid,), scalars, constants)


class _FavorShortBackward(_FavorShortPlan):
    def __init__(self, device: int, key: Signature, problem: LinearProblem) -> None:
        super().__init__(device, key, problem)
        self.tensors["d"] = key[5]
        tokens = self.B * self.chunks * self.H * CHUNK, torch.float32
        stack = self.stack(self.whole)
        self.workspace = Workspace(tokens, tokens, *stack, *stack)
        programs = 2 * self.whole.segments * self.tiles
        self.sums = self.of_whole(linear_favor_short_backward_sums_kernel, self.tilings.sums, programs, "qkvd")
        programs = (self.H // self.Hkv + 1) * self.chunks
        self.both = self.of_whole(linear_favor_short_backward_kernel, self.tilings.queries, programs, "qkvd")

    def __call__(self, saved: LinearSaved, x: LinearInputs) -> tuple[Tensor, ...]:
        """Launch, and return the gradients of q, k and v."""
        q, k, v, _, lengths = _tensors(x)
        d_q, d_k, d_v = new_like(q), new_like(k), new_like(v)
        work = self.workspace.allocate(q)
        den, *w, query_offset, offset, scale, peak, references, residual, done = self.pointers(self.eager, saved.starts)
        normalized, delta, *stacks = self.pointers(self.workspace, work)
        total, total_z, prefix, prefix_z, before, d_total, d_total_z, suffix, suffix_z, after = stacks
        p_q, p_k, p_v, p_lengths, p_d = self.addresses(q, k, v, lengths, saved.d_out)
        p_out, p_d_q, p_d_k, p_d_v = self.addresses(saved.out, d_q, d_k, d_v)
        inputs = p_q, p_k, p_v, p_d, *w, p_lengths
        with on_device(q):
            rows = query_offset, offset, peak, references, p_out, residual, den, normalized, delta
            self.sums(*inputs, *rows, *stacks, done)
            rows = normalized, delta, offset, scale, peak, references
            sums = before, total_z, prefix, prefix_z, after, d_total_z, suffix, suffix_z
            self.both(*inputs, *rows, *sums, p_d_q, p_d_k, p_d_v)
        return d_q, d_k, d_v
