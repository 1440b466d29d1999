"""Causal linear attention in Triton, behind the custom ops of `ops.linear`: the same arguments, the same results."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels import favor, walking
from longspan.kernels.blocks import NOTHING
from longspan.kernels.launch import Launcher, dense, dense_rows, look, on_device
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
    """One direction: tokens in a chunk, about how many programs sum segments, the kernel that sums, and the kernel that
    walks chunks; backward that one may run in parts, of d q, d k and d v.
    """

    chunk: int
    programs: int
    sums: Config
    chunks: tuple[tuple[str, Config], ...]


def directions(num_features: int, value_dim: int, halves: bool) -> tuple[Direction, Direction]:
    """Forward and backward for blocks of this many features and values; halves: products of bfloat16, not float32."""
    if not halves:
        exact = Direction(32, 1024, Config(4096, 4, 1), (("qkv", Config(4096, 4, 1)),))
        return exact, exact
    if num_features * value_dim <= 64 * 64:
        sums = Config(4096, 4, 3)
        forward = Direction(64, 1024, sums, (("", Config(4096, 4, 1, 128)),))
        return forward, forward._replace(chunks=(("qkv", Config(4096, 4, 1, 168)),))
    # All gradients at once would need more registers than there are.
    sums, four, eight = Config(16384, 4, 2), Config(16384, 4, 1), Config(16384, 8, 1)
    if num_features > 128:
        forward = Direction(64, 256, sums, (("", four),))
        return forward, forward._replace(chunks=(("q", eight), ("k", four), ("v", four)))
    forward = Direction(64, 256, sums, (("", Config(16384, 4, 1, 168)),))
    return forward, forward._replace(chunks=(("q", four), ("k", four), ("v", four)))


def causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    normalise: bool,
) -> walking.Results:
    """`longspan::causal_linear` with bucket 1."""
    return forward(q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalise)[0]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    normalise: bool,
    *,
    ends: bool = True,
    clean: bool = False,
) -> tuple[walking.Results, Tensor | None]:
    """The results of `causal_linear`, and what saves the backward pass from finding it again, if anything does.

    ends: whether the sums after the last token are asked for. clean: what is kept has the same bits every time, which
    takes a launch.
    """
    if walking.takes(q, v, log_scale, feature_map, normalise):
        return walking.forward(q, k, v, lengths, kv, shift, feature_map, ends=ends, clean=clean)
    if favor.takes(q, v, feature_map, normalise):
        assert weight is not None
        return favor.forward(q, k, v, weight, lengths, kv, shift, ends=ends, clean=clean)
    call = _Call(q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalise)
    (B, T, H, _), (Hkv, E) = q.shape, v.shape[2:]
    out = v.new_empty(B, T, H, E)
    den = q.new_empty((B, T, H if normalise else 0), dtype=torch.float32)
    kv_out = q.new_empty((B, Hkv, call.plan.M, E + normalise), dtype=torch.float32) if ends else None
    shift_out = q.new_empty((B, Hkv), dtype=torch.float32) if ends else None
    with on_device(q):
        cut = call.cut(call.plan.forward)
        sums = call.sums(cut, kv_out, shift_out)
        call.launch(
            causal_linear_forward_kernel,
            cut,
            cut.direction.chunks[0][1],
            cut.chunks * H,
            (call.q, call.k, call.v, *call.keys, *sums.before, *sums.scales, out, den),
            (call.q, call.k, call.v),
        )
    return (out, den, kv_out, shift_out), None


def kept_size(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    feature_map: str,
    normalise: bool,
) -> int:
    """How many numbers `forward` keeps."""
    if walking.takes(q, v, log_scale, feature_map, normalise):
        return walking.kept_size(q, k, v)
    if favor.takes(q, v, feature_map, normalise):
        assert weight is not None
        return favor.kept_size(q, k, weight)
    return 0


def causal_linear_backward(
    d_out: Tensor,
    d_kv: Tensor | None,
    out: Tensor | None,
    den: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    normalise: bool,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`longspan::causal_linear_backward` with bucket 1; the gradient of no kv is None.

    out: may be None where nothing is normalised. kept: by `forward`; else it is found again.
    """
    if walking.takes(q, v, log_scale, feature_map, normalise):
        assert out is not None
        if kept is None:
            kept = walking.forward(q, k, v, lengths, kv, shift, feature_map)[1]
        return walking.backward(d_out, d_kv, out, den, q, k, v, lengths, kv, shift, feature_map, kept)
    if favor.takes(q, v, feature_map, normalise):
        assert weight is not None
        assert out is not None
        if kept is None:
            kept = favor.forward(q, k, v, weight, lengths, kv, shift)[1]
        return favor.backward(d_out, d_kv, out, den, q, k, v, weight, lengths, kv, kept)
    call = _Call(q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalise)
    B, Hkv, plan = q.shape[0], v.shape[2], call.plan
    d_out, d_end = dense_rows(d_out), dense(d_kv)
    out = d_out if out is None else out.contiguous()  # None reads nothing of it.
    call.look(d_out, d_end, out, den, *d_out.stride())
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_start = None if kv is None else kv.new_empty(kv.shape)
    with on_device(q):
        cut = call.cut(plan.backward)
        sums = call.sums(cut, None, None)
        tiles = plan.tiles(plan.backward.chunks[0][1])
        X, size = B * Hkv, plan.BM * plan.BE
        d_total = den.new_empty(X * cut.segments * size)
        d_total_z, suffix_z, d_den = _views(
            q, torch.float32, X * cut.segments * plan.BM, X * cut.chunks * plan.BM, den.numel()
        )
        suffix, after = _views(q, plan.halves, X * cut.chunks * size, X * cut.segments * size)
        if normalise and plan.tiles(plan.backward.sums) > 1:
            d_den = _d_den(d_out, out, den)
        call.launch(
            causal_linear_backward_sums_kernel,
            cut,
            cut.direction.sums,
            cut.segments * Hkv,
            (
                *(call.q, call.keys[0], sums.reference, sums.peak, out, den, d_out, d_den),
                *(d_total, d_total_z, suffix, suffix_z),
            ),
            (call.q, d_out),
        )
        call.scan(causal_linear_backward_scan_kernel, cut, (d_total, d_total_z, sums.reference, d_end, d_start, after))
        d_query, d_f = d_q, d_k
        if tiles > 1:
            d_query, d_f = (x.new_empty((tiles, *x.shape[:3], plan.M), dtype=torch.float32) for x in (q, k))
        for part, config in plan.backward.chunks:
            call.launch(
                causal_linear_backward_kernel,
                cut,
                config,
                cut.chunks * Hkv,
                (
                    *(call.q, call.k, call.v, *call.keys, *sums.before, after, d_total_z, suffix, suffix_z),
                    *(*sums.scales, den, d_out, d_den, d_query, d_f, d_v),
                ),
                (call.q, call.k, call.v, d_out),
                (("QUERIES", "q" in part), ("KEYS", "k" in part), ("VALUES", "v" in part)),
            )
        if tiles > 1:
            call.finish(d_query, call.q, d_q, key=False)
            call.finish(d_f, call.k, d_k, key=True)
    return d_q, d_k, d_v, d_start


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

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.reference, self.beta, self.peak


class _Plan:
    """What calls of the same sizes share: padded sizes, cuts, the kernels' constants, and the kernels once compiled for
    this device.
    """

    def __init__(
        self,
        device: int,
        sizes: tuple[int, int, int, int],
        num_features: int | None,
        dtype: torch.dtype,
        feature_map: str,
        scaled: bool,
        normalise: bool,
    ) -> None:
        H, Hkv, D, E = sizes
        self.scaled = scaled
        halves = dtype == torch.bfloat16
        self.halves = torch.bfloat16 if halves else torch.float32
        self.M = D if num_features is None else num_features
        # Triton 3.6 miscompiles products of fewer columns on Hopper's tensor cores.
        least = 64 if halves else 16
        self.BD, self.BM, self.BE = (max(least, triton.next_power_of_2(n)) for n in (D, self.M, E))
        self.forward, self.backward = directions(self.BM, self.BE, halves)
        self.constants: dict[str, Any] = {
            "H": H,
            "HKV": Hkv,
            "D": D,
            "M": self.M,
            "E": E,
            "BD": self.BD,
            "BM": self.BM,
            "BE": self.BE,
            "MAP": feature_map,
            "SCALED": scaled,
            "NORMALISE": normalise,
            "DOT": tl.bfloat16 if halves else tl.float32,
            "PRECISION": _PRECISION[dtype],
        }
        self.launch = Launcher(self.constants)

    def tiles(self, config: Config) -> int:
        return max(1, self.BE * self.BM // config.tile)


_plan = cache(_Plan)


class _Call:
    """The arguments as the kernels take them, and launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        log_scale: Tensor | None,
        lengths: Tensor | None,
        kv: Tensor | None,
        shift: Tensor | None,
        feature_map: str,
        normalise: bool,
    ) -> None:
        self.q, self.k, self.v = dense_rows(q), dense_rows(k), dense_rows(v)
        self.log_scale = dense(log_scale)
        self.keys = dense(weight), lengths
        self.start = dense(kv), dense(shift)
        scaled = log_scale is not None or feature_map in ("softmax", "favor")
        sizes = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        M = None if weight is None else len(weight)
        self.plan = _plan(q.get_device(), sizes, M, q.dtype, feature_map, scaled, normalise)
        self.looks: tuple[Any, ...] = ()
        strides = *self.q.stride(), *self.k.stride(), *self.v.stride()
        self.look(self.q, self.k, self.v, *self.keys, self.log_scale, *self.start, *strides)

    def look(self, *given: Tensor | int | None) -> None:
        """All that callers choose; what is allocated here looks the same every time."""
        self.looks += tuple([look(x) for x in given])

    def cut(self, direction: Direction) -> _Cut:
        B, T, Hkv, _ = self.k.shape
        chunks = -(-T // direction.chunk)
        run = -(-chunks // min(chunks, -(-direction.programs // (B * Hkv))))
        return _Cut(direction, chunks, -(-chunks // run), run)

    def launch(
        self,
        kernel: Any,
        cut: _Cut,
        config: Config,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        more: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        """One program for each row of the batch, each of `programs` (stretches of tokens, heads) and each tile."""
        tiles = self.plan.tiles(config)
        strides = [stride for x in strided for stride in x.stride()[:3]]
        self.plan.launch(
            kernel,
            (self.q.shape[0] * programs * tiles, 1, 1),
            (*tensors, self.q.shape[1], cut.segments, cut.run, *strides),
            self.looks,
            (
                ("TILES", tiles),
                ("C", cut.direction.chunk),
                ("BE", self.plan.BE // tiles),
                ("num_warps", config.warps),
                ("num_stages", config.stages),
                ("maxnreg", config.registers),
                *more,
            ),
        )

    def scan(self, kernel: Any, cut: _Cut, tensors: tuple[Tensor | None, ...]) -> None:
        plan = self.plan
        rows = min(plan.BM, max(1, 512 // plan.BE))
        grid = self.k.shape[0] * self.k.shape[2], -(-plan.BM // rows), 1
        plan.launch(kernel, grid, (*tensors, cut.segments), self.looks, (("ROWS", rows),))

    def sums(self, cut: _Cut, kv_out: Tensor | None, shift_out: Tensor | None) -> _Sums:
        """The sums before each segment and the sums from there to each chunk."""
        plan, (B, T, Hkv, _) = self.plan, self.k.shape
        X, size, tokens = B * Hkv, plan.BM * plan.BE, T if plan.scaled else 0
        # By itself, because nobody needs it after the scan.
        total = self.q.new_empty(X * cut.segments * size, dtype=torch.float32)
        total_z, prefix_z, largest, reference, beta, peak = _views(
            self.q,
            torch.float32,
            X * cut.segments * plan.BM,
            X * cut.chunks * plan.BM,
            X * cut.segments,
            X * (cut.segments + 1),
            X * tokens,
            X * tokens,
        )
        prefix, before = _views(self.q, plan.halves, X * cut.chunks * size, X * cut.segments * size)
        self.launch(
            causal_linear_forward_sums_kernel,
            cut,
            cut.direction.sums,
            cut.segments * Hkv,
            (
                *(self.k, self.v, self.keys[0], self.log_scale, self.keys[1]),
                *(total, total_z, largest, prefix, prefix_z, beta, peak),
            ),
            (self.k, self.v),
        )
        ends = kv_out, shift_out, reference, before
        self.scan(causal_linear_forward_scan_kernel, cut, (total, total_z, largest, *self.start, *ends))
        return _Sums((before, total_z, prefix, prefix_z), reference, beta, peak)

    def finish(self, parts: Tensor, x: Tensor, d_x: Tensor, *, key: bool) -> None:
        """d x from the tiles' parts of the gradient of its features."""
        B, T, H, _ = x.shape
        chunk = 16
        self.plan.launch(
            causal_linear_backward_finish_kernel,
            (B * H * -(-T // chunk), 1, 1),
            (parts, x, self.keys[0], d_x, T, parts.stride(0), *x.stride()[:3]),
            (*self.looks, look(parts.stride(0))),
            (("H", H), ("TILES", len(parts)), ("C", chunk), ("KEY", key)),
        )


# bfloat16 needs no choice. One tf32 product would round float16's features once too often; float32 needs its own.
_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


def _d_den(d_out: Tensor, out: Tensor, den: Tensor) -> Tensor:
    """The gradients of den (B, T, H), where no program sees all of a row of out."""
    nothing = den.abs() < NOTHING.value
    d_den = -(d_out.to(den.dtype) * out).sum(-1) / den.masked_fill(nothing, 1)
    return d_den.masked_fill(nothing, 0)


def _views(like: Tensor, dtype: torch.dtype, *sizes: int) -> tuple[Tensor, ...]:
    """Room for so many numbers each, allocated at once and aligned."""
    sizes = tuple(-(-size // 64) * 64 for size in sizes)
    return like.new_empty(sum(sizes), dtype=dtype).split(sizes)
