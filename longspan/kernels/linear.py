"""Causal linear attention in Triton, behind the custom ops of `ops.linear`: the same arguments, the same results."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels import favor
from longspan.kernels.launch import dense_rows, on_device
from longspan.kernels.linear_backward import (
    causal_linear_backward_finish_kernel,
    causal_linear_backward_scan_kernel,
    causal_linear_backward_sums_kernel,
)
from longspan.kernels.linear_backward_keys import causal_linear_backward_keys_kernel
from longspan.kernels.linear_backward_queries import causal_linear_backward_queries_kernel
from longspan.kernels.linear_forward import causal_linear_forward_kernel
from longspan.kernels.linear_sums import causal_linear_forward_scan_kernel, causal_linear_forward_sums_kernel


class Config(NamedTuple):
    """How one kernel is compiled: warps, chunks in flight and in use, the most numbers in a program's tile of the
    sums, and the most registers a thread may take, None for all there are.
    """

    warps: int
    stages: int
    tile: int
    registers: int | None = None


class Configs(NamedTuple):
    """Tokens in a chunk, programs that a multiprocessor runs at once, and each kernel's own; that of keys and values
    may run in parts, of d k and d v.
    """

    chunk: int
    resident: int
    forward_sums: Config
    forward: Config
    backward_sums: Config
    queries: Config
    keys: tuple[tuple[str, Config], ...]


def configs(num_features: int, value_dim: int, halves: bool) -> Configs:
    """For blocks of this many features and values; halves: products of bfloat16, not float32."""
    if not halves:
        one = Config(4, 1, 4096)
        return Configs(32, 2, one, one, one, one, (("kv", one),))
    if num_features * value_dim <= 64 * 64:
        one = Config(4, 3, 4096)
        return Configs(64, 2, one, one, one, one, (("kv", one),))
    # All gradients of keys at once would need more registers than there are.
    two, three = Config(8, 2, 16384), Config(8, 3, 16384)
    if max(num_features, value_dim) <= 128:
        return Configs(64, 1, three, three, three, two, (("k", two), ("v", two)))
    return Configs(64, 1, two, two, two, two, (("k", two), ("v", two)))


class Sums(NamedTuple):
    """The sums before each segment, as the kernels that make them describe it."""

    kv: Tensor
    z: Tensor
    sizes: Tensor
    reference: Tensor


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Sums | None]:
    """The results of `causal_linear`, and what saves the backward pass from summing keys again."""
    if favor.takes(q, v, feature_map, normalise):
        assert weight is not None
        return favor.causal_favor(q, k, v, weight, lengths, kv, shift), None
    q, k, v, weight, log_scale, kv, shift = _dense(q, k, v, weight, log_scale, kv, shift)
    plan = _plan(_look(q, k, v, weight, log_scale, lengths, kv, shift), feature_map, normalise)
    out = v.new_empty(plan.out_shape)
    den = q.new_empty(plan.den_shape, dtype=torch.float32)
    kv_out = q.new_empty(plan.kv_shape, dtype=torch.float32)
    shift_out = q.new_empty(plan.kv_shape[:2], dtype=torch.float32)
    with on_device(q):
        sums = plan.sums(k, v, weight, log_scale, lengths, kv, shift, kv_out, shift_out)
        plan.launch(causal_linear_forward_kernel, (q, k, v, weight, log_scale, lengths, *sums, out, den))
    return (out, den, kv_out, shift_out), sums


def causal_linear_backward(
    d_out: Tensor,
    d_kv: Tensor | None,
    out: Tensor,
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
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`longspan::causal_linear_backward` with bucket 1; the gradient of no kv is None. sums: those of `forward`."""
    if favor.takes(q, v, feature_map, normalise):
        assert weight is not None
        return favor.causal_favor_backward(d_out, d_kv, out, den, q, k, v, weight, lengths, kv, shift)
    q, k, v, weight, log_scale, kv, shift = _dense(q, k, v, weight, log_scale, kv, shift)
    d_out, d_kv, out = dense_rows(d_out), None if d_kv is None else d_kv.contiguous(), out.contiguous()
    plan = _plan(_look(q, k, v, weight, log_scale, lengths, kv, shift, d_out, d_kv, out, den), feature_map, normalise)
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_start = None if kv is None else kv.new_empty(kv.shape)
    keys = weight, log_scale, lengths
    with on_device(q):
        if sums is None:
            sums = plan.sums(k, v, *keys, kv, shift, None, None)
        d_total, d_z, starts, delta = _views(q, *plan.backward_sizes)
        if normalise and plan.tiles(plan.configs.backward_sums) > 1:
            delta = (d_out.to(torch.float32) * out).sum(-1)
        scales = sums.sizes, sums.reference
        plan.launch(
            causal_linear_backward_sums_kernel,
            (q, k, *keys, *scales, starts, out, den, d_out, delta, d_total, d_z),
        )
        plan.launch(causal_linear_backward_scan_kernel, (d_total, d_z, *scales, shift, d_kv, d_start))
        d_query, d_key = plan.parts(plan.configs.queries, d_q), plan.parts(plan.configs.keys[0][1], d_k)
        plan.launch(causal_linear_backward_queries_kernel, (q, k, v, *keys, *sums, den, d_out, delta, d_query))
        for part, _ in plan.configs.keys:
            plan.launch(
                causal_linear_backward_keys_kernel,
                (q, k, v, *keys, d_total, d_z, *scales, starts, den, d_out, delta, d_key, d_v),
                part,
            )
        if d_query is not d_q:
            plan.launch(causal_linear_backward_finish_kernel, (d_query, q, weight, d_q), "q")
        if d_key is not d_k:
            plan.launch(causal_linear_backward_finish_kernel, (d_key, k, weight, d_k), "k")
    return d_q, d_k, d_v, d_start


class _Look(NamedTuple):
    """What a plan depends on: of a tensor its shape, strides, dtype and whether it is aligned."""

    device: int
    given: tuple[tuple[Any, ...] | None, ...]


def _look(*given: Tensor | None) -> _Look:
    looks = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in given]
    assert given[0] is not None
    return _Look(given[0].get_device(), tuple(looks))


class _Plan:
    """All that calls with arguments that look alike share: how they are cut, numbers and constants for each kernel, and
    the kernels once compiled.
    """

    def __init__(self, look: _Look, feature_map: str, normalise: bool) -> None:
        q, k, v, weight, log_scale, lengths, *_ = look.given
        assert q is not None
        assert k is not None
        assert v is not None
        (B, T, H, D), (Hkv, E), dtype = q[0], v[0][2:], q[2]
        halves = dtype == torch.bfloat16
        scaled = log_scale is not None or feature_map in ("softmax", "favor")
        self.B, self.T, self.H, self.Hkv = B, T, H, Hkv
        self.M = M = D if weight is None else weight[0][0]
        # Triton 3.6 miscompiles products of fewer columns on tensor cores.
        least = 64 if halves else 16
        BD, BM, BE = (max(least, triton.next_power_of_2(size)) for size in (D, M, E))
        self.BM, self.BE = BM, BE
        self.configs = configs(BM, BE, halves)
        chunk = self.configs.chunk
        chunks = -(-T // chunk)
        # As many segments as fill the device, but none of a single chunk. The interpreter runs one after the other.
        processors = torch.cuda.get_device_properties(look.device).multi_processor_count if look.device >= 0 else 4
        segments = max(1, min(processors * self.configs.resident // (B * Hkv), chunks // 2))
        self.run = -(-chunks // segments)
        self.segments = -(-chunks // self.run)
        self.out_shape, self.den_shape = (B, T, H, E), (B, T, H if normalise else 0)
        self.kv_shape = B, Hkv, M, E + normalise
        X = B * Hkv * self.segments
        self.forward_sizes = X * BM * BE, X * BM, X * 4, X + B * Hkv
        self.backward_sizes = X * BM * BE, X * BM, X * self.run, B * T * H
        # b and h, and t, of each tensor whose rows callers may lay out as they like.
        named = zip("QKVD", (q, k, v, look.given[8] if len(look.given) > 8 else None), strict=True)
        self.strides = {name: x[1] for name, x in named if x is not None}
        self.constants: dict[str, Any] = {
            "H": H,
            "HKV": Hkv,
            "D": D,
            "M": M,
            "E": E,
            "BD": BD,
            "BM": BM,
            "BE": BE,
            "C": chunk,
            "MAP": feature_map,
            "SCALED": scaled,
            "NORMALISE": normalise,
            # Where nothing is divided, rows are what their references make them.
            "QUICK": not scaled or (halves and normalise),
            "WHOLE": lengths is None and T % chunk == 0,
            "DOT": tl.bfloat16 if halves else tl.float32,
            "PRECISION": _PRECISION[dtype],
        }
        self.ready: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def tiles(self, config: Config) -> int:
        return max(1, self.BE * self.BM // config.tile)

    def parts(self, config: Config, d_x: Tensor) -> Tensor:
        """Where tiles put their parts of a gradient of features, or the gradient itself where one tile is all."""
        tiles = self.tiles(config)
        return d_x if tiles == 1 else d_x.new_empty((tiles, *d_x.shape[:3], self.M), dtype=torch.float32)

    def sums(
        self,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        log_scale: Tensor | None,
        lengths: Tensor | None,
        kv: Tensor | None,
        shift: Tensor | None,
        kv_out: Tensor | None,
        shift_out: Tensor | None,
    ) -> Sums:
        """The sums before each segment, and those after the last in kv_out and shift_out."""
        found = Sums(*_views(k, *self.forward_sizes))
        self.launch(causal_linear_forward_sums_kernel, (k, v, weight, log_scale, lengths, *found[:3]))
        ends = kv, shift, kv_out, shift_out
        self.launch(causal_linear_forward_scan_kernel, (*found[:3], *ends, found.reference), kv_out is None)
        return found

    def launch(self, kernel: Any, tensors: tuple[Tensor | None, ...], part: str | bool = "") -> None:
        """Triton looks at every argument of a launch; what it made of them is kept."""
        found = self.ready.get((kernel.__name__, part))
        if found is not None:
            run, rest = found
            run(*tensors, *rest)
            return
        grid, numbers, more = self._cut(kernel, tensors, part)
        options = {**{name: x for name, x in self.constants.items() if name in kernel.arg_names}, **more}
        compiled = kernel[grid](*tensors, *numbers, **options)
        if compiled is not None and _DIRECT:
            constants = [options[name] for name in kernel.arg_names if name in options]
            self.ready[kernel.__name__, part] = compiled[grid], (*numbers, *constants)

    def _cut(
        self, kernel: Any, tensors: tuple[Tensor | None, ...], part: str | bool
    ) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, Any]]:
        """The grid of a kernel, its numbers, and constants and options of its own."""
        heads = self.B * self.Hkv
        if kernel in (causal_linear_forward_scan_kernel, causal_linear_backward_scan_kernel):
            rows = min(self.BM, max(1, 512 // self.BE))
            return (heads, -(-self.BM // rows), 1), (self.segments,), {"ROWS": rows}
        if kernel is causal_linear_backward_finish_kernel:
            parts, x = tensors[:2]
            assert parts is not None
            assert x is not None
            numbers = self.T, parts.stride(0), *x.stride()[:3]
            more = {"H": x.shape[2], "TILES": len(parts), "C": 16, "KEY": part == "k"}
            return (self.B * x.shape[2] * -(-self.T // 16), 1, 1), numbers, more
        config, names = {
            causal_linear_forward_sums_kernel: (self.configs.forward_sums, "KV"),
            causal_linear_forward_kernel: (self.configs.forward, "QKV"),
            causal_linear_backward_sums_kernel: (self.configs.backward_sums, "QKD"),
            causal_linear_backward_queries_kernel: (self.configs.queries, "QKVD"),
            causal_linear_backward_keys_kernel: (dict(self.configs.keys).get(str(part)), "QKVD"),
        }[kernel]
        assert config is not None
        tiles, strides = self.tiles(config), [self.strides[name] for name in names]
        more = {f"STRIDE_{name}": self.strides[name][1] for name in names} | {
            "TILES": tiles,
            "BE": self.BE // tiles,
            "STAGES": config.stages,
            "num_warps": config.warps,
            "maxnreg": config.registers,
        }
        if kernel is causal_linear_backward_keys_kernel:
            more |= {"KEYS": "k" in str(part), "VALUES": "v" in str(part)}
        numbers = self.T, self.segments, self.run, *[x[i] for x in strides for i in (0, 2)]
        return (heads * self.segments * tiles, 1, 1), numbers, more


_plan = lru_cache(maxsize=1024)(_Plan)
# From this version on a compiled kernel takes all arguments, constants too.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)
# bfloat16 needs no choice. One tf32 product would round float16's features once too often; float32 needs its own.
_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


def _views(like: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Room for so many float32 numbers each, allocated at once and aligned."""
    sizes = tuple([-(-size // 64) * 64 for size in sizes])
    return like.new_empty(sum(sizes), dtype=torch.float32).split(sizes)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor | None,
) -> tuple[Any, ...]:
    """q, k and v with dense rows, the others dense."""
    return dense_rows(q), dense_rows(k), dense_rows(v), *[None if x is None else x.contiguous() for x in others]
