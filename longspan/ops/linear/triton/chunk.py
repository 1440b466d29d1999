"""Causal linear attention in Triton, behind the custom ops of `ops.linear`: the same arguments, the same results."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import (
    Launch,
    Signature,
    Strides,
    Workspace,
    dense,
    dense_rows,
    new_like,
    on_device,
    signature,
)
from longspan.ops.common.tiles import ZERO_NORMALIZER
from longspan.ops.linear.triton import favor
from longspan.ops.linear.triton import fused_chunk as walking
from longspan.ops.linear.triton.chunk_backward import (
    causal_linear_backward_scan_kernel,
    causal_linear_backward_sums_kernel,
)
from longspan.ops.linear.triton.chunk_backward_chunks import (
    causal_linear_backward_finish_kernel,
    causal_linear_backward_kernel,
)
from longspan.ops.linear.triton.chunk_device import Sizes
from longspan.ops.linear.triton.chunk_forward import (
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
    normalize: bool,
    *,
    ends: bool = True,
    zeroed: bool = False,
) -> tuple[walking.Results, Tensor | None]:
    """out, den, kv and shift of `longspan::causal_linear`, and what saves the backward pass from finding it again, if
    anything does.

    ends: whether the sums after the last token are asked for. zeroed: what is kept has the same bits every time, which
    takes a launch.
    """
    if walking.takes(q, v, log_scale, feature_map, normalize):
        return walking.forward(q, k, v, lengths, kv, shift, feature_map, ends=ends, zeroed=zeroed)
    if favor.takes(q, v, feature_map, normalize):
        assert weight is not None
        return favor.forward(q, k, v, weight, lengths, kv, shift, ends=ends, zeroed=zeroed)
    tensors = _dense(q, k, v, weight, log_scale, lengths, kv, shift)
    plan = _forward_plan(q.get_device(), signature(*tensors), feature_map, normalize, ends)
    out, den = v.new_empty(plan.out_shape), q.new_empty(plan.den_shape, dtype=torch.float32)
    kv_out = q.new_empty(plan.kv_shape, dtype=torch.float32) if ends else None
    shift_out = q.new_empty(plan.shift_shape, dtype=torch.float32) if ends else None
    room = plan.room.allocate(q)
    places = plan.room.pointers(room, plan.compiled)
    with on_device(q):
        before, scales = plan.sum(tensors, _Work(*places), kv_out, shift_out)
        plan.read(*before, *scales, out, den)
    plan.compiled = plan.read.compiled is not None
    return (out, den, kv_out, shift_out), None


def kept_size(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    feature_map: str,
    normalize: bool,
) -> int:
    """How many numbers `forward` keeps."""
    if walking.takes(q, v, log_scale, feature_map, normalize):
        return walking.kept_size(q, k, v)
    if favor.takes(q, v, feature_map, normalize):
        assert weight is not None
        return favor.kept_size(q, k, weight)
    return 0


def backward(
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
    normalize: bool,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`longspan::causal_linear_backward` with bucket 1; the gradient of no kv is None.

    out: may be None where nothing is normalized. kept: by `forward`; else it is found again.
    """
    if walking.takes(q, v, log_scale, feature_map, normalize):
        assert out is not None
        if kept is None:
            kept = walking.forward(q, k, v, lengths, kv, shift, feature_map)[1]
        return walking.backward(d_out, d_kv, out, den, q, k, v, lengths, kv, shift, feature_map, kept)
    if favor.takes(q, v, feature_map, normalize):
        assert weight is not None
        assert out is not None
        if kept is None:
            kept = favor.forward(q, k, v, weight, lengths, kv, shift)[1]
        return favor.backward(d_out, d_kv, out, den, q, k, v, weight, lengths, kv, kept)
    tensors = _dense(q, k, v, weight, log_scale, lengths, kv, shift)
    d_out, d_end = dense_rows(d_out), dense(d_kv)
    out = d_out if out is None else out.contiguous()  # None reads nothing of it.
    plan = _backward_plan(q.get_device(), signature(*tensors, d_out, d_end, out, den), feature_map, normalize)
    d_q, d_k, d_v = new_like(q), new_like(k), new_like(v)
    d_start = None if kv is None else new_like(kv)
    room = plan.room.allocate(q)
    places = plan.room.pointers(room, plan.compiled)
    d_z, suffix_z, d_den, suffix, after, d_query, d_f = places[len(_Work._fields) :]
    work, (q, k, _, weight, *_) = _Work(*places[: len(_Work._fields)]), tensors
    if plan.finish:
        d_den = _d_den(d_out, out, den) if normalize else d_den
    else:
        d_query, d_f = d_q, d_k
    with on_device(q):
        before, scales = plan.sum(tensors, work, None, None)
        # From here on nobody needs the segments' sums: theirs is the room for their gradients.
        d_total = work.total
        plan.d_sums(q, weight, work.reference, work.peak, out, den, d_out, d_den, d_total, d_z, suffix, suffix_z)
        plan.d_scan(d_total, d_z, work.reference, d_end, d_start, after)
        for launch in plan.chunks:
            launch(*before, after, d_z, suffix, suffix_z, *scales, den, d_out, d_den, d_query, d_f, d_v)
        for launch, part, x, d_x in zip(plan.finish, (d_query, d_f), (q, k), (d_q, d_k), strict=False):
            launch(part, x, weight, d_x)
    plan.compiled = plan.chunks[-1].compiled is not None
    return d_q, d_k, d_v, d_start


class _Work(NamedTuple):
    """What `causal_linear_forward_sums_kernel` and the scan after it leave behind, as they describe it: tensors, or
    where they are.
    """

    total: Any
    z: Any
    prefix_z: Any
    largest: Any
    reference: Any
    beta: Any
    peak: Any
    prefix: Any
    before: Any


class _Plan:
    """All that calls with arguments that look alike share: how they are cut, room, and kernels with their numbers.

    A sequence is cut into chunks, and those into segments of `run` chunks each.
    """

    def __init__(self, device: int, given: Signature, feature_map: str, normalize: bool, backward: bool) -> None:
        q, k, v, weight, log_scale, *_ = given
        assert q is not None
        assert k is not None
        assert v is not None
        (self.B, self.T, H, D), (Hkv, E), dtype = q[0], v[0][2:], q[2]
        halves, M = dtype == torch.bfloat16, D if weight is None else weight[0][0]
        # Triton 3.6 miscompiles products of fewer columns on Hopper's tensor cores.
        least = 64 if halves else 16
        BD, BM, BE = (max(least, triton.next_power_of_2(n)) for n in (D, M, E))
        self.direction = directions(BM, BE, halves)[backward]
        chunks = -(-self.T // self.direction.chunk)
        self.heads = self.B * Hkv
        self.run = -(-chunks // min(chunks, -(-self.direction.programs // self.heads)))
        self.segments = -(-chunks // self.run)
        self.num_chunks = chunks
        scaled = log_scale is not None or feature_map in ("softmax", "favor")
        dot = tl.bfloat16 if halves else tl.float32
        sizes = H, Hkv, D, M, E, BD, BM, BE, self.direction.chunk
        self.sizes = Sizes(*sizes, feature_map, scaled, normalize, dot, _PRECISION[dtype])
        self.device, self.rows = device, {"q": q, "k": k, "v": v}
        self.whole, self.half = torch.float32, torch.bfloat16 if halves else torch.float32
        self.sums = self.launch(causal_linear_forward_sums_kernel, self.direction.sums, "kv", self.segments * Hkv, H=0)
        self.scan = self.scanning(causal_linear_forward_scan_kernel)
        self.compiled = False

    def parts(self) -> list[tuple[int, torch.dtype]]:
        """The room of `_Work`."""
        segments, tokens = self.heads * self.segments, self.heads * self.T if self.sizes.SCALED else 0
        z, prefix_z, prefix, before = self.stacks()
        total = before[0], self.whole
        scales = [(number, self.whole) for number in (segments, segments + self.heads, tokens, tokens)]
        return [total, z, prefix_z, *scales, prefix, before]

    def stacks(self) -> list[tuple[int, torch.dtype]]:
        """A vector for each segment and each chunk, then a matrix for each chunk and each segment."""
        segments, chunks, size = self.heads * self.segments, self.heads * self.num_chunks, self.sizes.BM * self.sizes.BE
        vectors = [(number * self.sizes.BM, self.whole) for number in (segments, chunks)]
        return [*vectors, (chunks * size, self.half), (segments * size, self.half)]

    def tiles(self, config: Config) -> int:
        return max(1, self.sizes.BE * self.sizes.BM // config.tile)

    def launch(self, kernel: Any, config: Config, strided: str, programs: int, **more: Any) -> Launch:
        """One program for each row of the batch, each of `programs` (stretches of tokens, heads) and each tile.

        strided: whose strides the kernel takes. more: sizes of this kernel; 0 for one that it does not look at, so that
        it is compiled once.
        """
        tiles = self.tiles(config)
        sizes = self.sizes._replace(TILES=tiles, BE=self.sizes.BE // tiles, **more)
        numbers = self.T, self.segments, self.run, *[Strides(*self.rows[name][1][:3]) for name in strided]
        options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        return Launch(self.device, kernel, (self.B * programs * tiles, 1, 1), numbers, {"S": sizes, **options})

    def scanning(self, kernel: Any) -> Launch:
        BM, BE = self.sizes.BM, self.sizes.BE
        rows = min(BM, max(1, 512 // BE))
        sizes = self.sizes._replace(C=rows, H=0, HKV=0, D=0, BD=0, MAP="", PRECISION="")
        return Launch(self.device, kernel, (self.heads, -(-BM // rows), 1), (self.segments,), {"S": sizes})

    def sum(self, tensors: tuple[Any, ...], work: _Work, kv_out: Tensor | None, shift_out: Tensor | None) -> Any:
        """The sums before each segment and the sums from there to each chunk; what kernels of chunks begin with."""
        q, k, v, weight, log_scale, lengths, kv, shift = tensors
        total, z, prefix_z, largest, reference, beta, peak, prefix, before = work
        self.sums(k, v, weight, log_scale, lengths, total, z, largest, prefix, prefix_z, beta, peak)
        self.scan(total, z, largest, kv, shift, kv_out, shift_out, reference, before)
        return [q, k, v, weight, lengths, before, z, prefix, prefix_z], [reference, beta, peak]


class _Forward(_Plan):
    def __init__(self, device: int, given: Signature, feature_map: str, normalize: bool, ends: bool) -> None:
        """ends: whether there are sums to be returned, for which the scan is compiled."""
        super().__init__(device, given, feature_map, normalize, False)
        (H, Hkv, _, M, E, *_), (B, T) = self.sizes, (self.B, self.T)
        self.out_shape, self.den_shape = (B, T, H, E), (B, T, H if normalize else 0)
        self.kv_shape, self.shift_shape = (B, Hkv, M, E + normalize), (B, Hkv)
        self.room = Workspace(*self.parts())
        config = self.direction.chunks[0][1]
        self.read = self.launch(causal_linear_forward_kernel, config, "qkv", self.num_chunks * H)


class _Backward(_Plan):
    def __init__(self, device: int, given: Signature, feature_map: str, normalize: bool) -> None:
        super().__init__(device, given, feature_map, normalize, True)
        d_out = given[8]
        assert d_out is not None
        self.rows["d"] = d_out
        (H, Hkv, _, M, *_), tokens, direction = self.sizes, self.B * self.T, self.direction
        self.d_sums = self.launch(causal_linear_backward_sums_kernel, direction.sums, "qd", self.segments * Hkv)
        self.d_scan = self.scanning(causal_linear_backward_scan_kernel)
        kernel, programs = causal_linear_backward_kernel, self.num_chunks * Hkv
        self.chunks = [
            self.launch(kernel, config, "qkvd", programs, QUERIES="q" in part, KEYS="k" in part, VALUES="v" in part)
            for part, config in direction.chunks
        ]
        tiles = self.tiles(direction.chunks[0][1])
        # With tiles no program sees all of a row: their parts of the features' gradients are added up at the end.
        self.finish = [self.finishing("q", H, tiles), self.finishing("k", Hkv, tiles)] if tiles > 1 else []
        d_features = [(tiles * tokens * heads * M if tiles > 1 else 0, self.whole) for heads in (H, Hkv)]
        d_den = tokens * H if normalize and tiles == 1 else 0, self.whole
        z, suffix_z, suffix, after = self.stacks()
        self.room = Workspace(*self.parts(), z, suffix_z, d_den, suffix, after, *d_features)

    def finishing(self, name: str, heads: int, tiles: int) -> Launch:
        """d x from the tiles' parts of the gradient of its features."""
        chunk = 16
        sizes = self.sizes._replace(H=heads, HKV=0, E=0, BE=0, SCALED=False, TILES=tiles, C=chunk, KEYS=name == "k")
        numbers = self.T, self.B * self.T * heads * self.sizes.M, Strides(*self.rows[name][1][:3])
        grid = self.B * heads * -(-self.T // chunk), 1, 1
        return Launch(self.device, causal_linear_backward_finish_kernel, grid, numbers, {"S": sizes})


_forward_plan = lru_cache(maxsize=1024)(_Forward)
_backward_plan = lru_cache(maxsize=1024)(_Backward)


# bfloat16 needs no choice. One tf32 product would round float16's features once too often; float32 needs its own.
_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


def _d_den(d_out: Tensor, out: Tensor, den: Tensor) -> Tensor:
    """The gradients of den (B, T, H), where no program sees all of a row of out."""
    nothing = den.abs() < ZERO_NORMALIZER.value
    d_den = -(d_out.to(den.dtype) * out).sum(-1) / den.masked_fill(nothing, 1)
    return d_den.masked_fill(nothing, 0)


def _dense(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as the kernels take them."""
    return dense_rows(q), dense_rows(k), dense_rows(v), *[dense(x) for x in others]
