"""Causal linear attention in Triton, behind the custom ops of `ops.linear`: the same arguments, the same results."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.blocks import NOTHING
from longspan.kernels.linear_backward import causal_linear_backward_scan_kernel, causal_linear_backward_sums_kernel
from longspan.kernels.linear_backward_chunks import causal_linear_backward_finish_kernel, causal_linear_backward_kernel
from longspan.kernels.linear_forward import (
    causal_linear_forward_kernel,
    causal_linear_forward_scan_kernel,
    causal_linear_forward_sums_kernel,
)


class Config(NamedTuple):
    """How one kernel is cut: the most numbers in a program's tile of the sums, warps, loads in flight, and the most
    registers a thread may take, None for all there are.
    """

    tile: int
    warps: int
    stages: int
    registers: int | None = None


class Direction(NamedTuple):
    """One direction: tokens in a chunk, about how many programs sum segments, and its two kernels."""

    chunk: int
    programs: int
    sums: Config
    chunks: Config


def directions(num_features: int, value_dim: int, halves: bool) -> tuple[Direction, Direction]:
    """Forward and backward for blocks of this many features and values; halves: products of bfloat16, not float32."""
    if not halves:
        exact = Direction(32, 1024, Config(4096, 4, 1), Config(4096, 4, 1))
        return exact, exact
    if num_features * value_dim <= 64 * 64:
        sums = Config(4096, 4, 3)
        return Direction(64, 1024, sums, Config(4096, 4, 1, 128)), Direction(64, 1024, sums, Config(4096, 4, 1, 168))
    sums = Config(16384, 4, 2)
    if num_features > 128:
        return Direction(64, 256, sums, Config(16384, 4, 1)), Direction(64, 256, sums, Config(16384, 8, 1))
    return Direction(64, 256, sums, Config(16384, 4, 1, 168)), Direction(64, 256, sums, Config(16384, 4, 1))


def causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor,
    shift: Tensor,
    feature_map: str,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`longspan::causal_linear` with bucket 1."""
    call = _Call(q, k, v, weight, log_scale, lengths, feature_map, normalise)
    B, T, H, _ = q.shape
    out = v.new_empty(B, T, H, v.shape[3])
    den = kv.new_empty(B, T, H if normalise else 0)
    with call.device():
        cut = call.cut(call.forward)
        sums = call.sums(cut, kv, shift)
        call.launch(
            causal_linear_forward_kernel,
            cut,
            cut.direction.chunks,
            (cut.chunks, H),
            (call.q, call.k, call.v, *call.keys, *sums.before, *sums.scales, out, den),
            (call.q, call.k, call.v),
            H=H,
        )
    return out, den, sums.kv_out, sums.shift_out


def causal_linear_backward(
    d_out: Tensor,
    d_kv: Tensor,
    out: Tensor,
    den: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor,
    shift: Tensor,
    feature_map: str,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`longspan::causal_linear_backward` with bucket 1."""
    call = _Call(q, k, v, weight, log_scale, lengths, feature_map, normalise)
    B, T, H, _ = q.shape
    Hkv, E = v.shape[2:]
    d_out, d_kv, out = _rows(d_out), d_kv.contiguous(), out.contiguous()
    new = kv.new_empty
    with call.device():
        cut = call.cut(call.backward)
        sums = call.sums(cut, kv, shift)
        tiles = call.tiles(call.backward.chunks)
        d_den = new(den.shape)
        if normalise and call.tiles(call.backward.sums) > 1:
            d_den = _d_den(d_out, out, den)
        d_sums = call.segment_sums(cut)
        call.launch(
            causal_linear_backward_sums_kernel,
            cut,
            cut.direction.sums,
            (cut.segments, Hkv),
            (call.q, *call.keys[:2], sums.reference, sums.peak, out, den, d_out, d_den, *d_sums),
            (call.q, d_out),
            H=H,
        )
        d_start = torch.empty_like(d_kv)
        after = torch.empty_like(d_sums[0], dtype=d_sums[2].dtype)
        call.scan(causal_linear_backward_scan_kernel, cut, (*d_sums[:2], sums.reference, d_kv, d_start, after))
        d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        d_query, d_f = d_q, d_k
        if tiles > 1:
            d_query, d_f = new(tiles, B, T, H, call.M), new(tiles, B, T, Hkv, call.M)
        call.launch(
            causal_linear_backward_kernel,
            cut,
            cut.direction.chunks,
            (cut.chunks, Hkv),
            (
                *(call.q, call.k, call.v, *call.keys, *sums.before, after, *d_sums[1:], *sums.scales),
                *(den, d_out, d_den, d_query, d_f, d_v),
            ),
            (call.q, call.k, call.v, d_out),
            H=H,
        )
        if tiles > 1:
            call.finish(d_query, call.q, d_q, key=False)
            call.finish(d_f, call.k, d_k, key=True)
    return _laid_out_as(q, d_q), _laid_out_as(k, d_k), _laid_out_as(v, d_v), d_start


class _Cut(NamedTuple):
    """A sequence cut into chunks, and those into segments of `run` chunks each."""

    direction: Direction
    chunks: int
    segments: int
    run: int


class _Sums(NamedTuple):
    """What `forward_sums` and the scan after it leave behind, as those kernels describe it."""

    before: tuple[Tensor, ...]
    reference: Tensor
    beta: Tensor
    peak: Tensor
    kv_out: Tensor
    shift_out: Tensor

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.reference, self.beta, self.peak


class _Call:
    """The arguments as the kernels take them, padded sizes, and launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        log_scale: Tensor | None,
        lengths: Tensor | None,
        feature_map: str,
        normalise: bool,
    ) -> None:
        self.q, self.k, self.v = _rows(q), _rows(k), _rows(v)
        self.map, self.normalise = feature_map, normalise
        self.scaled = log_scale is not None or feature_map in ("softmax", "favor")
        halves = q.dtype == torch.bfloat16
        self.dot, self.precision = tl.bfloat16 if halves else tl.float32, _PRECISION[q.dtype]
        self.D, self.M = q.shape[3], q.shape[3] if weight is None else len(weight)
        low = None
        if weight is not None:
            weight = weight.float() * self.D**-0.25
            if halves:
                high = weight.bfloat16()
                weight, low = high, (weight - high).bfloat16()
        log_scale = None if log_scale is None else log_scale.contiguous()
        self.log_scale = log_scale
        self.keys = weight, low, lengths
        self.BD, self.BM, self.BE = (_block(n) for n in (self.D, self.M, v.shape[3]))
        self.forward, self.backward = directions(self.BM, self.BE, halves)

    def device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.q.device) if self.q.is_cuda else contextlib.nullcontext()

    def tiles(self, config: Config) -> int:
        return max(1, self.BE * self.BM // config.tile)

    def cut(self, direction: Direction) -> _Cut:
        B, T, Hkv, _ = self.k.shape
        chunks = triton.cdiv(T, direction.chunk)
        run = triton.cdiv(chunks, min(chunks, triton.cdiv(direction.programs, B * Hkv)))
        return _Cut(direction, chunks, triton.cdiv(chunks, run), run)

    def launch(
        self,
        kernel: Any,
        cut: _Cut,
        config: Config,
        programs: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        **sizes: int,
    ) -> None:
        """One program for each row of the batch, each of `programs` (stretches of tokens, heads) and each tile."""
        tiles = self.tiles(config)
        kernel[(self.q.shape[0] * programs[0] * tiles * programs[1],)](
            *tensors,
            self.q.shape[1],
            cut.segments,
            cut.run,
            *(stride for x in strided for stride in x.stride()[:3]),
            HKV=self.k.shape[2],
            D=self.D,
            M=self.M,
            E=self.v.shape[3],
            TILES=tiles,
            C=cut.direction.chunk,
            BD=self.BD,
            BM=self.BM,
            BE=self.BE // tiles,
            MAP=self.map,
            SCALED=self.scaled,
            NORMALISE=self.normalise,
            DOT=self.dot,
            PRECISION=self.precision,
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.registers,
            **sizes,
        )

    def scan(self, kernel: Any, cut: _Cut, tensors: tuple[Tensor, ...]) -> None:
        B, _, Hkv, E = self.v.shape
        rows = min(self.BM, max(1, 512 // self.BE))
        kernel[(B * Hkv, triton.cdiv(self.BM, rows))](
            *tensors,
            cut.segments,
            M=self.M,
            E=E,
            BM=self.BM,
            BE=self.BE,
            ROWS=rows,
            SCALED=self.scaled,
            NORMALISE=self.normalise,
        )

    def segment_sums(self, cut: _Cut) -> tuple[Tensor, ...]:
        """Room for sums of segments, kv and z, and for the parts of them beside each chunk, kv and z."""
        X, size = self.k.shape[0] * self.k.shape[2], (self.BM, self.BE)
        new = partial(self.q.new_empty, dtype=torch.float32)
        halves = torch.bfloat16 if self.dot == tl.bfloat16 else torch.float32
        return (
            new((X, cut.segments, *size)),
            new((X, cut.segments, self.BM)),
            new((X, cut.chunks, *size), dtype=halves),
            new((X, cut.chunks, self.BM)),
        )

    def sums(self, cut: _Cut, kv: Tensor, shift: Tensor) -> _Sums:
        """The sums before each segment and the sums from there to each chunk."""
        kv, shift = kv.contiguous(), shift.contiguous()
        X, tokens = shift.numel(), self.k.shape[1] if self.scaled else 0
        new = kv.new_empty
        total, total_z, prefix, prefix_z = self.segment_sums(cut)
        before = torch.empty_like(total, dtype=prefix.dtype)
        found = _Sums(
            before=(before, total_z, prefix, prefix_z),
            reference=new(X, cut.segments + 1),
            beta=new(X, tokens),
            peak=new(X, tokens),
            kv_out=torch.empty_like(kv),
            shift_out=torch.empty_like(shift),
        )
        largest = new(X, cut.segments)
        weight, low, lengths = self.keys
        self.launch(
            causal_linear_forward_sums_kernel,
            cut,
            cut.direction.sums,
            (cut.segments, self.k.shape[2]),
            (
                *(self.k, self.v, weight, low, self.log_scale, lengths),
                *(total, total_z, largest, prefix, prefix_z, found.beta, found.peak),
            ),
            (self.k, self.v),
        )
        ends = found.kv_out, found.shift_out, found.reference, before
        self.scan(causal_linear_forward_scan_kernel, cut, (total, total_z, largest, kv, shift, *ends))
        return found

    def finish(self, parts: Tensor, x: Tensor, d_x: Tensor, *, key: bool) -> None:
        """d x from the tiles' parts of the gradient of its features."""
        B, T, H, D = x.shape
        chunk = 16
        causal_linear_backward_finish_kernel[(B * H * triton.cdiv(T, chunk),)](
            *(parts, x, *self.keys[:2], d_x, T, parts.stride(0), *x.stride()[:3]),
            H=H,
            D=D,
            M=self.M,
            TILES=len(parts),
            C=chunk,
            BD=self.BD,
            BM=self.BM,
            MAP=self.map,
            KEY=key,
            DOT=self.dot,
        )


# bfloat16 needs no choice. One tf32 product would round float16's features once too often; float32 needs its own.
_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


def _d_den(d_out: Tensor, out: Tensor, den: Tensor) -> Tensor:
    """The gradients of den (B, T, H), where no program sees all of a row of out."""
    nothing = den.abs() < NOTHING.value
    d_den = -(d_out.to(den.dtype) * out).sum(-1) / den.masked_fill(nothing, 1)
    return d_den.masked_fill(nothing, 0)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension dense, as loads of whole rows need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid_out_as(x: Tensor, d_x: Tensor) -> Tensor:
    """d_x with the strides of `empty_like(x)`, which is what a compiler was told."""
    return d_x if x.is_contiguous() else torch.empty_like(x).copy_(d_x)
