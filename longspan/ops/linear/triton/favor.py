"""Causal FAVOR+ of bfloat16, normalized, in Triton: what `kernels.linear` calls for it, with its arguments and results.

The other kernels make all features of a chunk at once, which for the few hundred of FAVOR+ needs more registers than
there are; these make a tile of them at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
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
from longspan.ops.linear.triton.favor_backward import favor_backward_rows_kernel, favor_backward_sums_kernel
from longspan.ops.linear.triton.favor_device import Sizes
from longspan.ops.linear.triton.favor_forward import (
    favor_forward_kernel,
    favor_forward_sums_kernel,
    favor_scan_kernel,
    favor_sizes_kernel,
    favor_weight_kernel,
)
from longspan.ops.linear.triton.favor_gradients import favor_backward_keys_kernel, favor_backward_queries_kernel

LARGEST = 128

# out, den, and the sums and their shift after the last token, where they are asked for.
Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Config(NamedTuple):
    """Features in a tile, warps, loads in flight, the most registers a thread may take, None for all there are, and
    the most programs that walk segments: as many as a large GPU runs at once.
    """

    tile: int
    warps: int
    stages: int
    registers: int | None = None
    programs: int = 0


# Tokens in a chunk, and how each kernel is cut.
CHUNK = 64
SIZES = Config(0, 4, 3, None, 264)
SUMS = Config(64, 4, 3, 168, 396)
READ = Config(64, 4, 1, 168)
ROWS = Config(0, 4, 1)
QUERIES = Config(64, 4, 1)
KEYS = Config(64, 4, 1)
# Sequences are gone through part by part where the sums before all chunks of all of them, four times the size of an
# input or more, would be more bytes than this, and more than these shares of q, k, v and out: for the results, for the
# gradients of queries, and for those of keys, when there are three gradients already.
SMALL = 1 << 24
READ_SHARE, QUERIES_SHARE, KEYS_SHARE = 1.75, 1.25, 0.625


def takes(q: Tensor, v: Tensor, feature_map: str, normalize: bool) -> bool:
    """Whether these kernels are for such arguments."""
    return feature_map == "favor" and normalize and q.dtype == torch.bfloat16 and max(q.shape[3], v.shape[3]) <= LARGEST


def kept_size(q: Tensor, k: Tensor, weight: Tensor) -> int:
    """How many numbers `forward` keeps for the backward pass: four for each token and head, and the projection."""
    B, T, H, D = q.shape
    return _kept(B, T, H, k.shape[2], D, len(weight)).size


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    *,
    ends: bool = True,
    zeroed: bool = False,
) -> tuple[Results, Tensor]:
    """out (B, T, H, E), den (B, T, H), and the sums and their shift after the last token; then what is kept.

    ends, zeroed: as in `kernels.linear.forward`.
    """
    q, k, v, weight = dense_rows(q), dense_rows(k), dense_rows(v), weight.contiguous()
    kv, shift = dense(kv), dense(shift)
    plan = _forward_plan(q.get_device(), signature(q, k, v, weight, lengths, kv, shift), ends)
    out = v.new_empty(plan.out_shape)
    den = q.new_empty(plan.den_shape, dtype=torch.float32)
    kv_out = q.new_empty(plan.kv_shape, dtype=torch.float32) if ends else None
    shift_out = q.new_empty(plan.shift_shape, dtype=torch.float32) if ends else None
    kept, work = plan.kept.allocate(q, zeroed=zeroed), plan.work.allocate(q)
    high, low, flag, query_offset, offset, scale, peak, reference = plan.kept.pointers(kept, plan.compiled)
    total, total_z, prefix, prefix_z, before, largest = plan.work.pointers(work, plan.compiled)
    with on_device(q):
        plan.weight(weight, high, low, flag)
        plan.query_sizes(q, high, low, flag, None, query_offset, None, None, None)
        plan.key_sizes(k, high, low, flag, lengths, offset, scale, peak, largest)
        for sums, scan, read in plan.parts:
            sums(
                *(k, v, high, low, flag, lengths, offset, largest, shift),
                *(total, total_z, prefix, prefix_z, reference),
            )
            scan(total, total_z, reference, kv, kv_out, shift_out, before)
            read(
                *(q, k, v, high, low, flag, lengths, query_offset, offset, scale, peak, reference),
                *(before, total_z, prefix, prefix_z, out, den),
            )
    plan.compiled = plan.parts[-1][2].compiled is not None
    return (out, den, kv_out, shift_out), kept


def backward(
    d_out: Tensor,
    d_kv: Tensor | None,
    out: Tensor,
    den: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    kv: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and kv; that of no kv is None."""
    q, k, v, d_out, out = dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(d_out), out.contiguous()
    kv, d_kv = dense(kv), dense(d_kv)
    plan = _backward_plan(q.get_device(), signature(q, k, v, weight, lengths, kv, d_out, d_kv, out, den, kept))
    high, low, flag, query_offset, offset, scale, peak, reference = plan.kept.pointers(kept, plan.compiled)
    rows = plan.rows_room.allocate(q)
    offset_over_den, delta = plan.rows_room.pointers(rows, plan.compiled)
    stack = plan.query_stack.allocate(q)
    total, total_z, prefix, prefix_z, before = plan.query_stack.pointers(stack, plan.compiled)
    d_q = new_like(q)
    d_start = None if kv is None else kv.new_empty(kv.shape)
    keys = offset, scale, peak, reference
    with on_device(q):
        plan.rows(out, den, d_out, query_offset, offset_over_den, delta)
        given = q, k, v, d_out, high, low, flag, lengths, offset_over_den, delta, *keys
        for sums, scan, queries in plan.query_parts:
            sums(k, v, high, low, flag, lengths, offset, None, None, total, total_z, prefix, prefix_z, reference)
            scan(total, total_z, reference, kv, None, None, before)
            queries(*given, before, total_z, prefix, prefix_z, d_q)
        del stack, total, total_z, prefix, prefix_z, before  # What comes next takes their place.
        stack = plan.key_stack.allocate(q)
        total, total_z, suffix, suffix_z, after = plan.key_stack.pointers(stack, plan.compiled)
        d_k, d_v = new_like(k), new_like(v)
        for sums, scan, gradients in plan.key_parts:
            sums(
                *(q, d_out, high, low, flag, offset_over_den, delta, peak, reference),
                *(total, total_z, suffix, suffix_z),
            )
            scan(total, total_z, reference, d_kv, d_start, None, after)
            gradients(*given, after, total_z, suffix, suffix_z, d_k, d_v)
    plan.compiled = plan.key_parts[-1][2].compiled is not None
    return d_q, d_k, d_v, d_start


class _Part(NamedTuple):
    """Sequences of keys from the first on, each of them walked in segments of `run` chunks."""

    first: int
    sequences: int
    segments: int
    run: int


class _Plan:
    """All that calls with arguments that look alike share: sizes, room, and kernels with their numbers."""

    def __init__(self, device: int, given: Signature) -> None:
        q, k, v, weight, *_ = given
        assert q is not None
        assert k is not None
        assert v is not None
        assert weight is not None
        (self.B, self.T, self.H, D), self.Hkv, E, M = q[0], k[0][2], v[0][3], weight[0][0]
        self.device, self.chunks, self.X = device, -(-self.T // CHUNK), self.B * self.Hkv
        self.steps = {"q": Strides(*q[1][:3]), "k": Strides(*k[1][:3]), "v": Strides(*v[1][:3])}
        self.S = Sizes(self.H, self.Hkv, D, M, E, CHUNK, padded(D), padded(M), padded(E))
        self.kept = _kept(self.B, self.T, self.H, self.Hkv, D, M)
        self.compiled = False

    def cut(self, share: float) -> list[_Part]:
        """All sequences, in parts whose sums take about such a share of the bytes of q, k, v and out."""
        tensors = 2 * self.B * self.T * (self.H + self.Hkv) * (self.S.D + self.S.E)
        bytes_of_all = 4 * Workspace(*self.stack(self.part(0, self.X))).size
        number = 1 if bytes_of_all <= SMALL else -(-bytes_of_all // int(share * tensors))
        size = -(-self.X // number)
        return [self.part(first, size) for first in range(0, self.X, size)]

    def part(self, first: int, size: int) -> _Part:
        segments, run = self.walk(SUMS, size * (self.S.BM // SUMS.tile))
        return _Part(first, min(size, self.X - first), segments, run)

    def stack(self, part: _Part) -> list[tuple[int, torch.dtype]]:
        """For each segment its total, and the sums on its far side; for each chunk the sums from there to it."""
        segments, chunks, size = part.sequences * part.segments, part.sequences * self.chunks, self.S.BM * self.S.BE
        whole, half = torch.float32, torch.bfloat16
        totals = (segments * size, whole), (segments * self.S.BM, whole)
        return [*totals, (chunks * size, half), (chunks * self.S.BM, whole), (segments * size, half)]

    def walk(self, config: Config, programs: int) -> tuple[int, int]:
        """Into how many segments each sequence is cut, so many programs going through them, and their chunks."""
        run = -(-self.chunks // max(1, min(self.chunks, config.programs // programs)))
        return -(-self.chunks // run), run

    def launch(
        self, kernel: Any, config: Config, programs: int, numbers: tuple[int, ...], strided: str, **other: Any
    ) -> Launch:
        """strided: which tensors' steps follow the numbers. other: sizes that are not those of the plan; 0 for what
        the kernel does not ask for, so that it is not compiled again for nothing.
        """
        constants = {"S": self.S._replace(**{"TILE": config.tile, **other})}
        options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        given = self.T, *numbers, *(self.steps[name] for name in strided)
        return Launch(self.device, kernel, (programs, 1, 1), given, {**constants, **options})

    def of_part(self, kernel: Any, config: Config, part: _Part, programs: int, strided: str, **other: Any) -> Launch:
        """programs: for each sequence."""
        numbers = part.segments, part.run, part.first, part.sequences
        return self.launch(kernel, config, part.sequences * programs, numbers, strided, **other)

    def walking(self, kernel: Any, part: _Part, strided: str, **other: Any) -> Launch:
        return self.of_part(kernel, SUMS, part, part.segments * (self.S.BM // SUMS.tile), strided, **other)

    def scanning(self, part: _Part, *, back: bool = False) -> Launch:
        rows = max(1, 512 // self.S.BE)
        sizes = self.S._replace(H=0, HKV=0, D=0, BD=0, TILE=rows, BACK=back)
        numbers = self.T, part.segments, part.run, part.first
        grid = part.sequences, -(-self.S.BM // rows), 1
        return Launch(self.device, favor_scan_kernel, grid, numbers, {"S": sizes})


class _Forward(_Plan):
    def __init__(self, device: int, given: Signature, ends: bool) -> None:
        super().__init__(device, given)
        parts, E, M = self.cut(READ_SHARE), self.S.E, self.S.M
        self.out_shape, self.den_shape = (self.B, self.T, self.H, E), (self.B, self.T, self.H)
        self.kv_shape, self.shift_shape = (self.B, self.Hkv, M, E + 1), (self.B, self.Hkv)
        self.work = Workspace(*self.stack(parts[0]), (self.X * self.chunks, torch.float32))
        self.weight = Launch(device, favor_weight_kernel, (1, 1, 1), (), {**self.S._asdict(), "num_warps": 16})
        self.query_sizes, self.key_sizes = self.sizes("q", self.H, key=False), self.sizes("k", self.Hkv, key=True)
        programs = self.H // self.Hkv * self.chunks
        self.parts = [
            (
                self.walking(favor_forward_sums_kernel, part, "kv", H=0),
                self.scanning(part),
                self.of_part(favor_forward_kernel, READ, part, programs, "qkv"),
            )
            for part in parts
        ]

    def sizes(self, name: str, heads: int, *, key: bool) -> Launch:
        segments, run = self.walk(SIZES, self.B * heads)
        sizes = {"H": heads, "HKV": 0, "E": 0, "BE": 0, "TILE": self.S.BM, "KEY": key}
        return self.launch(favor_sizes_kernel, SIZES, self.B * heads * segments, (segments, run), name, **sizes)


class _Backward(_Plan):
    def __init__(self, device: int, given: Signature) -> None:
        super().__init__(device, given)
        d_out = given[6]
        assert d_out is not None
        self.steps["d"] = Strides(*d_out[1][:3])
        group, queries, keys = self.H // self.Hkv, self.cut(QUERIES_SHARE), self.cut(KEYS_SHARE)
        rows = self.B * self.chunks * self.H
        self.rows_room = Workspace((rows * CHUNK, torch.float32), (rows * CHUNK, torch.float32))
        self.query_stack, self.key_stack = Workspace(*self.stack(queries[0])), Workspace(*self.stack(keys[0]))
        self.rows = self.launch(favor_backward_rows_kernel, ROWS, rows, (), "d", HKV=0, D=0, M=0, BD=0, BM=0)
        self.query_parts = [
            (
                self.walking(favor_forward_sums_kernel, part, "kv", H=0),
                self.scanning(part),
                self.of_part(favor_backward_queries_kernel, QUERIES, part, group * self.chunks, "qkvd"),
            )
            for part in queries
        ]
        self.key_parts = [
            (
                self.walking(favor_backward_sums_kernel, part, "qd"),
                self.scanning(part, back=True),
                self.of_part(favor_backward_keys_kernel, KEYS, part, self.chunks, "qkvd"),
            )
            for part in keys
        ]


_forward_plan = lru_cache(maxsize=1024)(_Forward)
_backward_plan = lru_cache(maxsize=1024)(_Backward)


def _kept(B: int, T: int, H: int, Hkv: int, D: int, M: int) -> Workspace:
    """The projection in two halves and its flag; sizes of queries, and of keys; references before each chunk."""
    size, chunks = padded(D) * padded(M), (T + CHUNK - 1) // CHUNK
    halves = (size, torch.bfloat16), (size, torch.bfloat16), (1, torch.float32)
    tokens = [(B * heads * chunks * CHUNK, torch.float32) for heads in (H, Hkv, Hkv, Hkv)]
    return Workspace(*halves, *tokens, (B * Hkv * (chunks + 1), torch.float32))
