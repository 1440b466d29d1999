"""Bidirectional linear attention in Triton, behind the custom ops of `ops.bidirectional`: the same arguments."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longspan.kernels.bidirectional_backward import (
    bidirectional_backward_combine_kernel,
    bidirectional_backward_keys_kernel,
    bidirectional_backward_queries_kernel,
)
from longspan.kernels.bidirectional_forward import (
    bidirectional_combine_kernel,
    bidirectional_read_kernel,
    bidirectional_sums_kernel,
    bidirectional_weight_kernel,
)
from longspan.kernels.launch import Argument, Launcher, dense_rows, look, on_device


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
    """Those of the four kernels that go through tokens; at_once: whether one launch makes both d q and d kv."""

    sums: Config
    read: Config
    queries: Config
    keys: Config
    at_once: bool = True


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
        found = Configs(large, read, large, large, at_once=False)
    else:
        # In the read-out features do not lie across: eight warps would need 128 tokens.
        read = large._replace(programs=528, warps=4, stages=2)
        found = Configs(large, read, large._replace(programs=264), large._replace(programs=528))
    if num_features * value_dim > large.tile or wide:
        tiled = large._replace(programs=264, stages=1)
        return found._replace(queries=tiled, keys=tiled, at_once=False)
    return found


class Result(NamedTuple):
    """out (B, T, H, E), and what the backward pass starts from: each query's normaliser, and the sums with both
    scales, as `bidirectional_combine_kernel` leaves them, N sequences each.
    """

    out: Tensor
    scale: Tensor  # (B, T, H)
    kv: Tensor  # (N, Hkv, BM, BE) float32, or (N, Hkv, BM, 2 BE) as two halves of bfloat16
    z: Tensor  # (N, Hkv, BM)
    c: Tensor  # (N, Hkv, BM)


def new_result(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, key_offsets: Tensor | None, divided: bool
) -> Result:
    """Room for the results."""
    N = k.shape[0] if key_offsets is None else len(key_offsets) - 1
    D, E, halves = k.shape[3], v.shape[3], q.dtype == torch.bfloat16
    BM, BE = _padded(D if weight is None else len(weight), halves), _padded(E, halves)
    scale = q.new_empty((*q.shape[:2], q.shape[2] if divided else 0), dtype=torch.float32)
    kv = q.new_empty((N, k.shape[2], BM, 2 * BE if halves else BE), dtype=torch.bfloat16 if halves else torch.float32)
    z, c = (kv.new_empty(kv.shape[:3], dtype=torch.float32) for _ in range(2))
    return Result(v.new_empty(*q.shape[:3], E), scale, kv, z, c)


def is_divided(feature_map: str, normalise: str) -> bool:
    """Whether each query divides: by its normaliser or, with sums divided already, by the sum of its features."""
    return normalise == "query" or (normalise == "feature" and feature_map in _EXPONENTIAL)


def bidirectional_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    key_mask: Tensor | None,
    offsets: Tensor | None,
    key_offsets: Tensor | None,
    feature_map: str,
    normalise: str,
) -> Result:
    """`longspan::bidirectional_linear`."""
    call = _Call(q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalise)
    result = new_result(q, k, v, weight, key_offsets, is_divided(feature_map, normalise))
    with on_device(q):
        cut = call.keys_cut(call.configs.sums)
        parts, parts_z, parts_c = call.parts(cut, 2)
        call.launch(
            bidirectional_sums_kernel,
            cut,
            (call.k, call.v, call.key_mask, call.key_offsets, parts, parts_z, parts_c),
            (call.k, call.v),
        )
        sums = parts, parts_z, parts_c, call.key_offsets, result.kv, result.z, result.c
        call.combine(bidirectional_combine_kernel, cut, sums)
        call.launch(
            bidirectional_read_kernel,
            call.queries_cut(call.configs.read),
            (call.q, call.offsets, result.kv, result.z, result.c, result.out, result.scale),
            (call.q,),
        )
    return result


def bidirectional_linear_backward(
    d_out: Tensor,
    scale: Tensor,
    kv: Tensor,
    z: Tensor,
    c: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    key_mask: Tensor | None,
    offsets: Tensor | None,
    key_offsets: Tensor | None,
    feature_map: str,
    normalise: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`longspan::bidirectional_linear_backward`."""
    call = _Call(q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalise)
    d_out = dense_rows(d_out)
    call.look(d_out, *d_out.stride())
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_kv, d_z = torch.empty_like(kv), torch.empty_like(z)
    with on_device(q):
        cut = call.queries_cut(call.configs.queries)
        parts, parts_z = call.parts(cut, 1)
        # Tiles of d kv are programs of their own; d q needs all of them in one.
        at_once = call.configs.at_once and call.tiles(cut.config) == 1
        for queries, sums in ((True, True),) if at_once else ((True, False), (False, True)):
            call.launch(
                bidirectional_backward_queries_kernel,
                cut,
                (call.q, d_out, call.offsets, kv, z, c, scale, d_q, parts, parts_z),
                (call.q, d_out),
                (("QUERIES", queries), ("SUMS", sums)),
                one_program=queries,
            )
        ends = parts, parts_z, call.offsets, kv, z, d_kv, d_z
        call.combine(bidirectional_backward_combine_kernel, cut, ends)
        call.launch(
            bidirectional_backward_keys_kernel,
            call.keys_cut(call.configs.keys),
            (call.k, call.v, call.key_mask, call.key_offsets, kv, c, d_kv, d_z, d_k, d_v),
            (call.k, call.v),
            one_program=True,
        )
    return d_q, d_k, d_v


class _Cut(NamedTuple):
    """Rows of so many tokens, and heads, in stretches of `length` tokens each."""

    config: Config
    tokens: int
    heads: int
    length: int
    stretches: int


_EXPONENTIAL = ("softmax", "favor")
# bfloat16 needs no choice. One tf32 product would round float16's features once too often; float32 needs its own.
_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


class _Plan(NamedTuple):
    """What calls of the same sizes share."""

    configs: Configs
    launch: Launcher


@cache
def _plan(
    device: int,
    sizes: tuple[int, int, int, int],
    num_features: int | None,
    dtype: torch.dtype,
    feature_map: str,
    normalise: str,
) -> _Plan:
    H, Hkv, D, E = sizes
    halves = dtype == torch.bfloat16
    M = D if num_features is None else num_features
    BD, BM, BE = (_padded(n, halves) for n in (D, M, E))
    constants = {
        "H": H,
        "HKV": Hkv,
        "D": D,
        "M": M,
        "E": E,
        "BD": BD,
        "BM": BM,
        "BE": BE,
        "MAP": feature_map,
        "EXPONENTIAL": feature_map in _EXPONENTIAL,
        "DIVIDE": is_divided(feature_map, normalise),
        "FEATURE": normalise == "feature",
        "ACROSS": BM > 128,
        "DOT": tl.bfloat16 if halves else tl.float32,
        "PRECISION": _PRECISION[dtype],
    }
    return _Plan(configs(BM, BE, halves, num_features is not None and BD > 64), Launcher(constants))


class _Call:
    """The arguments as the kernels take them, and launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        key_mask: Tensor | None,
        offsets: Tensor | None,
        key_offsets: Tensor | None,
        feature_map: str,
        normalise: str,
    ) -> None:
        self.q, self.k, self.v = dense_rows(q), dense_rows(k), dense_rows(v)
        self.key_mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        self.offsets, self.key_offsets = offsets, key_offsets
        sizes = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        M = None if weight is None else len(weight)
        self.configs, self._launch = _plan(q.get_device(), sizes, M, q.dtype, feature_map, normalise)
        self.BM, self.BE = self._launch.constants["BM"], self._launch.constants["BE"]
        self.looks: tuple[Any, ...] = ()
        strides = *self.q.stride(), *self.k.stride(), *self.v.stride()
        self.look(self.q, self.k, self.v, weight, self.key_mask, offsets, key_offsets, *strides)
        with on_device(q):
            self.projections, self.rest = self._projections(weight)

    def _projections(self, weight: Tensor | None) -> tuple[list[tuple[str, Tensor | None]], Tensor | None]:
        """What inputs are multiplied with, as `load_projection` has it. For a weight that may or may not be exact in
        bfloat16 two, of which the kernels take one.
        """
        halves = self.q.dtype == torch.bfloat16
        if weight is None:
            return [("unit" if halves and self.q.shape[3] <= 128 else "none", None)], None
        weight = weight.contiguous()
        if not halves or weight.dtype == torch.bfloat16:
            return [("whole", weight)], None
        high, rest = torch.empty_like(weight, dtype=torch.bfloat16), weight.new_empty(1, dtype=torch.float32)
        self._launch(bidirectional_weight_kernel, (1, 1, 1), (weight, high, rest), self.looks, (("num_warps", 8),))
        return [("whole", high), ("halves", weight)], rest

    def look(self, *given: Argument) -> None:
        """All that callers choose; what is allocated here looks the same every time."""
        self.looks += tuple([look(x) for x in given])

    def queries_cut(self, config: Config) -> _Cut:
        return _cut(config, self.q, self.offsets)

    def keys_cut(self, config: Config) -> _Cut:
        return _cut(config, self.k, self.key_offsets)

    def tiles(self, config: Config) -> int:
        return max(1, self.BM * self.BE // config.tile)

    def parts(self, cut: _Cut, vectors: int) -> tuple[Tensor, ...]:
        """Room for the sums of each stretch and head, and for so many vectors beside them."""
        number = cut.stretches * cut.heads * self.BM
        kv = self.q.new_empty(number * self.BE, dtype=torch.float32)
        return kv, *self.q.new_empty((vectors, number), dtype=torch.float32).unbind()

    def launch(
        self,
        kernel: Any,
        cut: _Cut,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        more: tuple[tuple[str, Any], ...] = (),
        *,
        one_program: bool = False,
    ) -> None:
        """A program for each stretch and head and, unless one goes through all of them, each tile of the sums."""
        config, tiles = cut.config, self.tiles(cut.config)
        offsets = self.offsets if strided[0] is self.q else self.key_offsets
        sequences = 0 if offsets is None else len(offsets) - 1
        strides = [stride for x in strided for stride in x.stride()[:3]]
        for projection, weight in self.projections:
            # A second half of the weight takes the room of a load in flight.
            stages = config.stages - 1 if projection == "halves" and config.stages > 1 else config.stages
            self._launch(
                kernel,
                (cut.stretches * cut.heads * (1 if one_program else tiles), 1, 1),
                (weight, self.rest, *tensors, cut.tokens, cut.length, sequences, *strides),
                self.looks,
                (
                    ("TILES", tiles),
                    ("C", config.chunk),
                    ("BE", self.BE // tiles),
                    ("PROJECTION", projection),
                    ("num_warps", config.warps),
                    ("num_stages", stages),
                    ("maxnreg", config.registers),
                    *more,
                ),
            )

    def combine(self, kernel: Any, cut: _Cut, tensors: tuple[Tensor | None, ...]) -> None:
        """Programs for some rows each of every sequence's and key head's sums."""
        kv = tensors[4] if kernel is bidirectional_combine_kernel else tensors[3]
        assert kv is not None
        rows = min(self.BM, max(1, 512 // self.BE))
        grid = kv.shape[0] * kv.shape[1], self.BM // rows, 1
        self._launch(kernel, grid, (*tensors, cut.tokens, cut.length), self.looks, (("ROWS", rows),))


def _cut(config: Config, x: Tensor, offsets: Tensor | None) -> _Cut:
    """x (B, T, heads, ·) in stretches; packed, each sequence may need one more than its share."""
    B, T, heads, _ = x.shape
    wanted = max(1, config.programs // (B * heads))
    length = -(-T // (wanted * config.chunk)) * config.chunk
    stretches = B * -(-T // length) if offsets is None else T // length + len(offsets) - 1
    return _Cut(config, T, heads, length, stretches)


def _padded(n: int, halves: bool) -> int:
    # Products of bfloat16 with tiles narrower than 64 come out wrong on Hopper with Triton 3.6.
    # int: a compiler may hand in a symbol, and another size is another kernel.
    return max(64 if halves else 16, 1 << (int(n) - 1).bit_length())
