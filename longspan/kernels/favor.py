"""Causal FAVOR+ of bfloat16, normalised, in Triton: what `kernels.linear` calls for it, with its arguments and results.

The other kernels make all features of a chunk at once, which for the few hundred of FAVOR+ needs more registers than
there are; these make a tile of them at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longspan.kernels.favor_backward import (
    favor_backward_rows_kernel,
    favor_backward_scan_kernel,
    favor_backward_sums_kernel,
)
from longspan.kernels.favor_forward import (
    favor_forward_kernel,
    favor_forward_scan_kernel,
    favor_forward_sums_kernel,
    favor_sizes_kernel,
    favor_weight_kernel,
)
from longspan.kernels.favor_gradients import favor_backward_keys_kernel, favor_backward_queries_kernel
from longspan.kernels.launch import Argument, Launcher, dense_rows, look, on_device

LARGEST = 128


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


def takes(q: Tensor, v: Tensor, feature_map: str, normalise: bool) -> bool:
    """Whether these kernels are for such arguments."""
    return feature_map == "favor" and normalise and q.dtype == torch.bfloat16 and max(q.shape[3], v.shape[3]) <= LARGEST


def causal_favor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B, T, H, E), den (B, T, H), and the sums and their shift after the last token."""
    call = _Call(q, k, v, weight, lengths, kv, shift)
    (B, T, H, _), (Hkv, E) = q.shape, v.shape[2:]
    out = v.new_empty(B, T, H, E)
    den = q.new_empty((B, T, H), dtype=torch.float32)
    kv_out = q.new_empty((B, Hkv, len(weight), E + 1), dtype=torch.float32)
    shift_out = q.new_empty((B, Hkv), dtype=torch.float32)
    with on_device(q):
        query_offset = call.query_sizes()
        keys = call.key_sizes()
        sums = call.sums(keys, kv_out, shift_out)
        call.launch(
            favor_forward_kernel,
            READ,
            B * call.chunks * H,
            (
                *(call.q, call.k, call.v, *call.weight, lengths, query_offset, *keys.scales),
                *(sums.reference, *sums.before, out, den),
            ),
            (call.q, call.k, call.v),
        )
    return out, den, kv_out, shift_out


def causal_favor_backward(
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
    shift: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and kv; that of no kv is None."""
    call = _Call(q, k, v, weight, lengths, kv, shift)
    d_out, out, d_end = dense_rows(d_out), out.contiguous(), None if d_kv is None else d_kv.contiguous()
    call.look(d_out, out, den, d_end, *d_out.stride())
    (B, T, H, _), Hkv = q.shape, v.shape[2]
    X, size = B * Hkv, call.BM * call.BE
    d_q = q.new_empty(q.shape)
    d_start = None if kv is None else kv.new_empty(kv.shape)
    with on_device(q):
        query_offset = call.query_sizes()
        keys = call.key_sizes()
        delta = torch.empty_like(query_offset)
        call.launch(
            favor_backward_rows_kernel,
            ROWS,
            B * call.chunks * H,
            (out, den, d_out, query_offset, delta),
            (d_out,),
            lengths=(T,),
        )
        sums = call.sums(keys, None, None)
        strided = call.q, call.k, call.v, d_out
        given = *strided, *call.weight, lengths, query_offset, delta, *keys.scales, sums.reference
        call.launch(favor_backward_queries_kernel, QUERIES, B * call.chunks * H, (*given, *sums.before, d_q), strided)
        reference = sums.reference
        del sums  # Its place is taken by what comes next.
        d_total, d_total_z, suffix_z = call.numbers(
            X * call.segments * size, X * call.segments * call.BM, X * call.chunks * call.BM
        )
        suffix, after = call.halves(X * call.chunks * size, X * call.segments * size)
        call.launch(
            favor_backward_sums_kernel,
            SUMS,
            X * call.segments * (call.BM // SUMS.tile),
            (
                *(call.q, d_out, *call.weight, query_offset, delta, keys.peak, reference),
                *(d_total, d_total_z, suffix, suffix_z),
            ),
            (call.q, d_out),
        )
        call.scan(favor_backward_scan_kernel, (d_total, d_total_z, reference, d_end, d_start, after))
        d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
        ends = after, d_total_z, suffix, suffix_z, d_k, d_v
        call.launch(favor_backward_keys_kernel, KEYS, X * call.chunks, (*given, *ends), strided)
    return d_q, d_k, d_v, d_start


class _Keys(NamedTuple):
    """What `favor_sizes_kernel` finds out about keys."""

    offset: Tensor
    scale: Tensor
    peak: Tensor
    largest: Tensor

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.offset, self.scale, self.peak


class _Sums(NamedTuple):
    """What `favor_forward_sums_kernel` and the scan after it leave behind, as they describe it."""

    reference: Tensor
    before: tuple[Tensor, ...]


@cache
def _launcher(device: int, H: int, Hkv: int, D: int, M: int, E: int) -> Launcher:
    # Products with tiles narrower than 64 come out wrong on Hopper with Triton 3.6.
    BD, BM, BE = (max(64, triton.next_power_of_2(size)) for size in (D, M, E))
    return Launcher({"H": H, "HKV": Hkv, "D": D, "M": M, "E": E, "BD": BD, "BM": BM, "BE": BE})


# A number for each look of arguments, which every launch compares faster than the look itself.
_numbers: dict[tuple[Any, ...], int] = {}


class _Call:
    """The arguments as the kernels take them, the sequence cut into chunks and those into segments, and launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        lengths: Tensor | None,
        kv: Tensor | None,
        shift: Tensor | None,
    ) -> None:
        B, T, Hkv, _ = k.shape
        self.lengths = lengths
        self.q, self.k, self.v = dense_rows(q), dense_rows(k), dense_rows(v)
        self.start = [x if x is None else x.contiguous() for x in (kv, shift)]
        self.launcher = _launcher(q.get_device(), q.shape[2], Hkv, q.shape[3], len(weight), v.shape[3])
        self.BM, self.BE = self.launcher.constants["BM"], self.launcher.constants["BE"]
        self.looked: tuple[Any, ...] = ()
        weight = weight.contiguous()
        strides = *self.q.stride(), *self.k.stride(), *self.v.stride()
        self.look(self.q, self.k, self.v, weight, lengths, *self.start, *strides)
        self.chunks = -(-T // CHUNK)
        self.segments, self.run = self.walk(SUMS, B * Hkv * (self.BM // SUMS.tile))
        size = self.BM * self.launcher.constants["BD"]
        high, low = self.halves(size, size)
        self.weight = high, low, q.new_empty(1, dtype=torch.float32)
        with on_device(q):
            self.launcher(favor_weight_kernel, (1, 1, 1), (weight, *self.weight), self.looks, (("num_warps", 16),))

    def look(self, *given: Argument) -> None:
        """All that callers choose; what is allocated here looks the same every time."""
        self.looked += tuple([look(x) for x in given])
        self.looks = (_numbers.setdefault(self.looked, len(_numbers)),)

    def numbers(self, *sizes: int) -> tuple[Tensor, ...]:
        """Room for so many float32 each, allocated at once and aligned."""
        return _views(self.q, torch.float32, sizes)

    def halves(self, *sizes: int) -> tuple[Tensor, ...]:
        return _views(self.q, torch.bfloat16, sizes)

    def walk(self, config: Config, sequences: int) -> tuple[int, int]:
        """Into how many segments each sequence is cut, and how many chunks those have."""
        run = -(-self.chunks // max(1, min(self.chunks, config.programs // sequences)))
        return -(-self.chunks // run), run

    def launch(
        self,
        kernel: Any,
        config: Config,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        more: tuple[tuple[str, Any], ...] = (),
        *,
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        """lengths: tokens, and where it is not that of the sums the cut into segments."""
        strides = [stride for x in strided for stride in x.stride()[:3]]
        if lengths is None:
            lengths = self.q.shape[1], self.segments, self.run
        options: tuple[tuple[str, Any], ...] = (("C", CHUNK), ("num_warps", config.warps))
        options += (("num_stages", config.stages), ("maxnreg", config.registers))
        if "TILE" in kernel.arg_names:
            options += (("TILE", config.tile),)
        self.launcher(kernel, (programs, 1, 1), (*tensors, *lengths, *strides), self.looks, (*options, *more))

    def scan(self, kernel: Any, tensors: tuple[Tensor | None, ...]) -> None:
        rows = max(1, 512 // self.BE)
        grid = self.k.shape[0] * self.k.shape[2], -(-self.BM // rows), 1
        given = *tensors, self.q.shape[1], self.segments, self.run
        self.launcher(kernel, grid, given, self.looks, (("C", CHUNK), ("ROWS", rows)))

    def query_sizes(self) -> Tensor:
        (B, _, H, _) = self.q.shape
        (offset,) = self.numbers(B * H * self.chunks * CHUNK)
        self._sizes(self.q, None, (offset, None, None, None), key=False)
        return offset

    def key_sizes(self) -> _Keys:
        X = self.k.shape[0] * self.k.shape[2] * self.chunks
        keys = _Keys(*self.numbers(*[X * CHUNK] * 3, X))
        self._sizes(self.k, self.lengths, keys, key=True)
        return keys

    def _sizes(self, x: Tensor, lengths: Tensor | None, into: tuple[Tensor | None, ...], *, key: bool) -> None:
        B, T, H, _ = x.shape
        segments, run = self.walk(SIZES, B * H)
        self.launch(
            favor_sizes_kernel,
            SIZES,
            B * H * segments,
            (x, *self.weight, lengths, *into),
            (x,),
            (("KEY", key), ("H", H)),
            lengths=(T, segments, run),
        )

    def sums(self, keys: _Keys, kv_out: Tensor | None, shift_out: Tensor | None) -> _Sums:
        """The sums before each segment and the sums from there to each chunk."""
        (B, _, Hkv, _), BM = self.k.shape, self.BM
        X, size = B * Hkv, BM * self.BE
        # By itself, because nobody needs it after the scan.
        (total,) = self.numbers(X * self.segments * size)
        total_z, prefix_z, reference = self.numbers(X * self.segments * BM, X * self.chunks * BM, X * (self.chunks + 1))
        prefix, before = self.halves(X * self.chunks * size, X * self.segments * size)
        self.launch(
            favor_forward_sums_kernel,
            SUMS,
            X * self.segments * (BM // SUMS.tile),
            (
                *(self.k, self.v, *self.weight, self.lengths, keys.offset, keys.largest, self.start[1]),
                *(total, total_z, prefix, prefix_z, reference),
            ),
            (self.k, self.v),
        )
        ends = self.start[0], kv_out, shift_out, before
        self.scan(favor_forward_scan_kernel, (total, total_z, reference, *ends))
        return _Sums(reference, (before, total_z, prefix, prefix_z))


def _views(like: Tensor, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    sizes = tuple(-(-size // 64) * 64 for size in sizes)
    return like.new_empty(sum(sizes), dtype=dtype).split(sizes)
