"""Bidirectional linear attention in Triton, behind the custom ops of `ops.bidirectional`: the same arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
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
from longspan.ops.common.tiles import padded
from longspan.ops.linear.triton.bidirectional_backward import (
    bidirectional_backward_combine_kernel,
    bidirectional_backward_keys_kernel,
    bidirectional_backward_queries_kernel,
)
from longspan.ops.linear.triton.bidirectional_device import Sizes
from longspan.ops.linear.triton.bidirectional_forward import (
    bidirectional_combine_kernel,
    bidirectional_read_kernel,
    bidirectional_sums_kernel,
    bidirectional_weight_kernel,
)


class Config(NamedTuple):
    """How one kernel is cut: tokens in a block, the most numbers in a program's tile of the sums, about how many
    programs, warps, loads in flight, and the most registers a thread may take, None for all there are.
    """

    chunk: int
    tile: int
    programs: int
    warps: int
    stages: int
    registers: int | None = None


class Configs(NamedTuple):
    """Those of the four kernels that go through tokens; eager_untraced: whether one launch makes both d q and d kv."""

    sums: Config
    read: Config
    queries: Config
    keys: Config
    eager_untraced: bool = True


def configs(num_features: int, value_dim: int, halves: bool, wide: bool) -> Configs:
    """For blocks of this many features and values; halves: products of bfloat16, not float32; wide: a projection of
    more than 64 columns takes the room of loads in flight.
    """
    if not halves:
        exact = Config(32, 4096, 1024, 4, 1)
        return Configs(exact, exact, exact, exact)
    if num_features * value_dim <= 64 * 64 and not wide:
        small = Config(64, 4096, 528, 4, 3)
        return Configs(small._replace(registers=128), small, small, small)
    large = Config(64, 16384, 132, 8, 3)
    if num_features > 128:
        read = large._replace(programs=264, stages=2, registers=128)
        found = Configs(large, read, large, large, eager_untraced=False)
    else:
        # In the read-out features do not lie across: eight warps would need 128 tokens.
        read = large._replace(programs=528, warps=4, stages=2)
        found = Configs(large, read, large._replace(programs=264), large._replace(programs=528))
    if num_features * value_dim > large.tile or wide:
        tiled = large._replace(programs=264, stages=1)
        return found._replace(queries=tiled, keys=tiled, eager_untraced=False)
    return found


def is_divided(feature_map: str, normalize: str) -> bool:
    """Whether each query divides: by its normalizer or, with sums divided already, by the sum of its features."""
    return normalize == "query" or (normalize == "feature" and feature_map in _EXPONENTIAL)


def kept_size(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, key_offsets: Tensor | None, feature_map: str, normalize: str
) -> int:
    """How many numbers `forward` keeps for the backward pass."""
    N = k.shape[0] if key_offsets is None else len(key_offsets) - 1
    M = None if weight is None else len(weight)
    rows = q.shape[0] * q.shape[1] * q.shape[2] if is_divided(feature_map, normalize) else 0
    return _kept(rows, N * k.shape[2], q.shape[3], M, v.shape[3], q.dtype == torch.bfloat16).size


def forward(*args: Any, zeroed: bool = False) -> tuple[Tensor, Tensor]:
    """`longspan::bidirectional_linear`: out (B, T, H, E), and what is kept for the backward pass.

    zeroed: what is kept has the same bits every time, which takes a launch.
    """
    given, rest = _given(*args)
    q, k, v, weight, key_mask, offsets, key_offsets = given
    plan = _forward_plan(q.get_device(), signature(*given), *rest)
    out, kept, work = v.new_empty(plan.out_shape), plan.kept.allocate(q, zeroed=zeroed), plan.work.allocate(q)
    scale, kv, z, c, high, rest = plan.kept.pointers(kept, plan.compiled)
    parts, parts_z, parts_c = plan.work.pointers(work, plan.compiled)
    with on_device(q):
        if plan.halve is not None:
            plan.halve(weight, high, rest)
        weights = plan.weights(weight, high, rest)
        for sums, w in zip(plan.sums, weights, strict=True):
            sums(*w, k, v, key_mask, key_offsets, parts, parts_z, parts_c)
        plan.combine(parts, parts_z, parts_c, key_offsets, kv, z, c)
        for read, w in zip(plan.read, weights, strict=True):
            read(*w, q, offsets, kv, z, c, out, scale)
    plan.compiled = plan.read[-1].compiled is not None
    return out, kept


def backward(d_out: Tensor, kept: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`longspan::bidirectional_linear_backward`: the gradients of q, k and v."""
    given, rest = _given(*args)
    q, k, v, weight, key_mask, offsets, key_offsets = given
    d_out = dense_rows(d_out)
    plan = _backward_plan(q.get_device(), signature(*given, d_out, kept), *rest)
    d_q, d_k, d_v, work = new_like(q), new_like(k), new_like(v), plan.work.allocate(q)
    scale, kv, z, c, high, rest = plan.kept.pointers(kept, plan.compiled)
    d_kv, d_z, parts, parts_z = plan.work.pointers(work, plan.compiled)
    weights = plan.weights(weight, high, rest)
    with on_device(q):
        for launches in plan.queries:
            for queries, w in zip(launches, weights, strict=True):
                queries(*w, q, d_out, offsets, kv, z, c, scale, d_q, parts, parts_z)
        plan.combine(parts, parts_z, offsets, kv, z, d_kv, d_z)
        for keys, w in zip(plan.keys, weights, strict=True):
            keys(*w, k, v, key_mask, key_offsets, kv, c, d_kv, d_z, d_k, d_v)
    plan.compiled = plan.keys[-1].compiled is not None
    return d_q, d_k, d_v


class _Cut(NamedTuple):
    """Rows of so many tokens, and heads, in stretches of `length` tokens each; packed, of so many sequences."""

    config: Config
    tokens: int
    heads: int
    length: int
    stretches: int
    sequences: int


_EXPONENTIAL = ("softmax", "favor")
# bfloat16 needs no choice. One tf32 product would round float16's features once too often; float32 needs its own.
_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


class _Plan:
    """All that calls with arguments that look alike share: how they are cut, room, and kernels with their numbers."""

    def __init__(self, device: int, given: Signature, feature_map: str, normalize: str) -> None:
        q, k, v, weight, _, offsets, key_offsets, *_ = given
        assert q is not None
        assert k is not None
        assert v is not None
        (B, T, H, D), (Hkv, E), dtype = q[0], v[0][2:], q[2]
        halves, M = dtype == torch.bfloat16, None if weight is None else weight[0][0]
        BD, self.BM, self.BE = (padded(size, 64 if halves else 16) for size in (D, D if M is None else M, E))
        self.configs = configs(self.BM, self.BE, halves, M is not None and BD > 64)
        self.device, self.out_shape, self.Hkv = device, (B, T, H, E), Hkv
        self.rows = {"q": q, "k": k, "v": v}
        self.offsets = {"q": offsets, "k": key_offsets}
        self.sizes = Sizes(
            *(H, Hkv, D, D if M is None else M, E, BD, self.BM, self.BE, feature_map),
            EXPONENTIAL=feature_map in _EXPONENTIAL,
            DIVIDE=is_divided(feature_map, normalize),
            FEATURE=normalize == "feature",
            DOT=tl.bfloat16 if halves else tl.float32,
            PRECISION=_PRECISION[dtype],
        )
        # What inputs are multiplied with, as `load_projection` has it. For a weight that may or may not be exact in
        # bfloat16 two, of which the kernels take one.
        self.projections = ["unit" if halves and D <= 128 else "none"] if weight is None else ["whole"]
        self.halved = weight is not None and halves and weight[2] != torch.bfloat16
        if self.halved:
            self.projections.append("halves")
        self.N = B if key_offsets is None else key_offsets[0][0] - 1
        rows = B * T * H if self.sizes.DIVIDE else 0
        self.kept = _kept(rows, self.N * Hkv, D, M, E, halves)
        self.compiled = False

    def weights(self, weight: Tensor | None, high: Any, rest: Any) -> list[tuple[Any, Any]]:
        """For each projection, and how far it is from being exact."""
        return [(high, rest), (weight, rest)] if self.halved else [(weight, None)]

    def cut(self, config: Config, name: str) -> _Cut:
        """q or k in stretches; packed, each sequence may need one more than its share."""
        (B, T, heads, _), offsets = self.rows[name][0], self.offsets[name]
        wanted = max(1, config.programs // (B * heads))
        length = -(-T // (wanted * config.chunk)) * config.chunk
        sequences = 0 if offsets is None else offsets[0][0] - 1
        stretches = B * -(-T // length) if offsets is None else T // length + sequences
        return _Cut(config, T, heads, length, stretches, sequences)

    def tiles(self, config: Config) -> int:
        return max(1, self.BM * self.BE // config.tile)

    def parts(self, cut: _Cut, vectors: int) -> list[tuple[int, torch.dtype]]:
        """Workspace for the sums of each stretch and head, and for so many vectors beside them."""
        number = cut.stretches * cut.heads * self.BM
        return [(number * self.BE, torch.float32), *[(number, torch.float32)] * vectors]

    def launches(self, kernel: Any, cut: _Cut, strided: str, *, one_program: bool, **more: Any) -> list[Launch]:
        """For each projection. A program for each stretch and head and, unless one goes through all, each tile.

        more: sizes of this kernel; 0 for those that it does not look at, so that it is compiled once.
        """
        config, tiles = cut.config, self.tiles(cut.config)
        numbers = cut.tokens, cut.length, cut.sequences, *[Strides(*self.rows[name][1][:3]) for name in strided]
        grid = cut.stretches * cut.heads * (1 if one_program else tiles), 1, 1
        sizes = self.sizes._replace(TILES=tiles, C=config.chunk, BE=self.BE // tiles, **more)
        options = {"num_warps": config.warps, "maxnreg": config.registers}
        found = []
        for projection in self.projections:
            # A second half of the weight takes the room of a load in flight.
            stages = config.stages - 1 if projection == "halves" and config.stages > 1 else config.stages
            own = {**options, "num_stages": stages, "S": sizes._replace(PROJECTION=projection)}
            found.append(Launch(self.device, kernel, grid, numbers, own))
        return found

    def combining(self, kernel: Any, cut: _Cut, **more: Any) -> Launch:
        """Programs for some rows each of every sequence's and key head's sums; more: as of `launches`."""
        rows = min(self.BM, max(1, 512 // self.BE))
        grid = self.N * self.Hkv, self.BM // rows, 1
        sizes = self.sizes._replace(C=rows, D=0, M=0, E=0, BD=0, MAP="", PRECISION="", **more)
        return Launch(self.device, kernel, grid, (cut.tokens, cut.length), {"S": sizes})


class _Forward(_Plan):
    def __init__(self, device: int, given: Signature, feature_map: str, normalize: str) -> None:
        super().__init__(device, given, feature_map, normalize)
        cut = self.cut(self.configs.sums, "k")
        self.work = Workspace(*self.parts(cut, 2))
        halve = Launch(device, bidirectional_weight_kernel, (1, 1, 1), (), {**self.sizes._asdict(), "num_warps": 8})
        self.halve = halve if self.halved else None
        self.sums = self.launches(bidirectional_sums_kernel, cut, "kv", one_program=False, H=0, DIVIDE=0, FEATURE=0)
        self.combine = self.combining(bidirectional_combine_kernel, cut, H=0, DIVIDE=0)
        read = self.cut(self.configs.read, "q")
        self.read = self.launches(bidirectional_read_kernel, read, "q", one_program=False)


class _Backward(_Plan):
    def __init__(self, device: int, given: Signature, feature_map: str, normalize: str) -> None:
        super().__init__(device, given, feature_map, normalize)
        d_out = given[7]
        assert d_out is not None
        self.rows["d"] = d_out
        cut = self.cut(self.configs.queries, "q")
        self.work = Workspace(*self.kept.buffers[1:3], *self.parts(cut, 1))
        # Tiles of d kv are programs of their own; d q needs all of them in one.
        eager_untraced = self.configs.eager_untraced and self.tiles(cut.config) == 1
        kernel = bidirectional_backward_queries_kernel
        self.queries = [
            self.launches(kernel, cut, "qd", one_program=queries, QUERIES=queries, SUMS=sums)
            for queries, sums in (((True, True),) if eager_untraced else ((True, False), (False, True)))
        ]
        self.combine = self.combining(bidirectional_backward_combine_kernel, cut, EXPONENTIAL=0)
        keys = self.cut(self.configs.keys, "k")
        self.keys = self.launches(bidirectional_backward_keys_kernel, keys, "kv", one_program=True, H=0, DIVIDE=0)


_forward_plan = lru_cache(maxsize=1024)(_Forward)
_backward_plan = lru_cache(maxsize=1024)(_Backward)


def _kept(rows: int, heads: int, D: int, M: int | None, E: int, halves: bool) -> Workspace:
    """Each query's normalizer; the sums with both scales, as `bidirectional_combine_kernel` leaves them, a matrix
    (BM, BE) of float32 or two halves of bfloat16 side by side, and two vectors (BM,); and the projection's larger half.
    """
    whole, half = torch.float32, torch.bfloat16
    BM, BE = (padded(size, 64 if halves else 16) for size in (D if M is None else M, E))
    kv = (heads * BM * 2 * BE, half) if halves else (heads * BM * BE, whole)
    projection = (0 if M is None or not halves else M * D, half), (1, whole)
    return Workspace((rows, whole), kv, (heads * BM, whole), (heads * BM, whole), *projection)


def _given(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    key_mask: Tensor | None,
    offsets: Tensor | None,
    key_offsets: Tensor | None,
    *rest: str,
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The tensors as the kernels take them, and the rest: the feature map, and how it is normalized."""
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    return (dense_rows(q), dense_rows(k), dense_rows(v), dense(weight), mask, offsets, key_offsets), rest
