"""Causal linear attention of bfloat16, normalised, in Triton: what `kernels.linear` calls for it.

The other kernels keep the sums before every chunk in memory, and give each pair of tokens a factor of its own; these
walk segments with the sums in registers and need neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longspan.kernels.launch import dense_rows, on_device
from longspan.kernels.walking_backward import walking_backward_scan_kernel, walking_backward_sums_kernel
from longspan.kernels.walking_forward import walking_forward_kernel
from longspan.kernels.walking_keys import walking_backward_keys_kernel
from longspan.kernels.walking_queries import walking_backward_queries_kernel
from longspan.kernels.walking_sums import walking_forward_scan_kernel, walking_forward_sums_kernel

LARGEST = 128
CHUNK = 64
MAPS = ("softmax", "elu", "relu", "identity")


class Config(NamedTuple):
    """How one kernel is compiled: warps, and chunks in flight and in use."""

    warps: int
    stages: int


class Configs(NamedTuple):
    """Programs that a multiprocessor runs at once, and each kernel's own; that of keys and values may run in parts, of
    d k and d v.
    """

    resident: int
    forward_sums: Config
    forward: Config
    backward_sums: Config
    queries: Config
    keys: tuple[tuple[str, Config], ...]


def configs(head_dim: int, value_dim: int) -> Configs:
    """For blocks of these sizes."""
    if head_dim * value_dim <= 64 * 64:
        one = Config(4, 3)
        return Configs(2, one, one, one, one, (("kv", one),))
    # All gradients of keys at once would need more registers than there are.
    two, three = Config(8, 2), Config(8, 3)
    return Configs(1, three, three, three, three, (("k", two), ("v", two)))


class Sums(NamedTuple):
    """The sums before each segment, as the kernels that make them describe it."""

    kv: Tensor
    z: Tensor
    sizes: Tensor
    reference: Tensor


def takes(q: Tensor, v: Tensor, log_scale: Tensor | None, feature_map: str, normalise: bool) -> bool:
    """Whether these kernels are for such arguments."""
    small = q.shape[3] <= LARGEST and v.shape[3] <= LARGEST
    return normalise and feature_map in MAPS and log_scale is None and q.dtype == torch.bfloat16 and small


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Sums]:
    """The results of `causal_linear`, and what saves the backward pass from summing keys again."""
    q, k, v, kv, shift = _dense(q, k, v, kv, shift)
    plan = _plan(_look(q, k, v, lengths, kv, shift), feature_map)
    out = v.new_empty(plan.out_shape)
    den = q.new_empty(plan.out_shape[:3], dtype=torch.float32)
    kv_out = q.new_empty(plan.kv_shape, dtype=torch.float32)
    shift_out = q.new_empty(plan.kv_shape[:2], dtype=torch.float32)
    with on_device(q):
        sums = plan.sums(k, v, lengths, kv, shift, kv_out, shift_out)
        plan.launch(walking_forward_kernel, (q, k, v, lengths, *sums, out, den))
    return (out, den, kv_out, shift_out), sums


def backward(
    d_out: Tensor,
    d_kv: Tensor | None,
    out: Tensor,
    den: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    sums: Sums | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The results of `causal_linear_backward`. sums: those of `forward`, where they were kept."""
    q, k, v, kv, shift = _dense(q, k, v, kv, shift)
    d_out, d_kv, out = dense_rows(d_out), None if d_kv is None else d_kv.contiguous(), out.contiguous()
    plan = _plan(_look(q, k, v, lengths, kv, shift, d_out, d_kv, out, den), feature_map)
    d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_start = None if kv is None else kv.new_empty(kv.shape)
    with on_device(q):
        if sums is None:
            sums = plan.sums(k, v, lengths, kv, shift, None, None)
        d_total, d_z, starts, delta = _views(q, *plan.backward_sizes)
        scales = sums.sizes, sums.reference
        plan.launch(
            walking_backward_sums_kernel,
            (q, k, lengths, *scales, starts, out, den, d_out, delta, d_total, d_z),
        )
        plan.launch(walking_backward_scan_kernel, (d_total, d_z, *scales, shift, d_kv, d_start))
        plan.launch(walking_backward_queries_kernel, (q, k, v, lengths, *sums, den, d_out, delta, d_q))
        for part, _ in plan.configs.keys:
            plan.launch(
                walking_backward_keys_kernel,
                (q, k, v, lengths, d_total, d_z, *scales, starts, den, d_out, delta, d_k, d_v),
                part,
            )
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

    def __init__(self, look: _Look, feature_map: str) -> None:
        q, k, v, lengths, *_ = look.given
        assert q is not None
        assert k is not None
        assert v is not None
        (B, T, H, D), (Hkv, E) = q[0], v[0][2:]
        # Triton 3.6 miscompiles products of fewer columns on Hopper's tensor cores.
        BD, BE = (max(64, triton.next_power_of_2(size)) for size in (D, E))
        self.BD, self.BE = BD, BE
        self.configs, self.T, self.heads = configs(BD, BE), T, B * Hkv
        chunks = -(-T // CHUNK)
        # As many segments as fill the device, but none of a single chunk. The interpreter runs one after the other.
        processors = torch.cuda.get_device_properties(look.device).multi_processor_count if look.device >= 0 else 4
        segments = max(1, min(processors * self.configs.resident // self.heads, chunks // 2))
        self.run = -(-chunks // segments)
        self.segments = -(-chunks // self.run)
        self.out_shape, self.kv_shape = (B, T, H, E), (B, Hkv, D, E + 1)
        X = self.heads * self.segments
        self.forward_sizes = X * BD * BE, X * BD, X * 4, X + self.heads
        self.backward_sizes = X * BD * BE, X * BD, X * self.run, B * T * H
        # Of each tensor whose rows callers may lay out as they like.
        named = zip("QKVD", (q, k, v, look.given[6] if len(look.given) > 6 else None), strict=True)
        self.strides = {name: x[1] for name, x in named if x is not None}
        self.constants: dict[str, Any] = {
            "H": H,
            "HKV": Hkv,
            "D": D,
            "E": E,
            "C": CHUNK,
            "BD": BD,
            "BE": BE,
            "MAP": feature_map,
            "SCALED": feature_map == "softmax",
            "WHOLE": lengths is None and T % CHUNK == 0,
        }
        self.ready: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def sums(
        self,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None,
        kv: Tensor | None,
        shift: Tensor | None,
        kv_out: Tensor | None,
        shift_out: Tensor | None,
    ) -> Sums:
        """The sums before each segment, and those after the last in kv_out and shift_out."""
        found = Sums(*_views(k, *self.forward_sizes))
        self.launch(walking_forward_sums_kernel, (k, v, lengths, *found[:3]))
        ends = kv, shift, kv_out, shift_out
        part = "" if kv_out is None else "ends"
        self.launch(walking_forward_scan_kernel, (*found[:3], *ends, found.reference), part)
        return found

    def launch(self, kernel: Any, tensors: tuple[Tensor | None, ...], part: str = "") -> None:
        """Triton looks at every argument of a launch; what it made of them is kept."""
        found = self.ready.get((kernel.__name__, part))
        if found is not None:
            run, rest = found
            run(*tensors, *rest)
            return
        grid, numbers, more = self._cut(kernel, part)
        options = {**{name: x for name, x in self.constants.items() if name in kernel.arg_names}, **more}
        compiled = kernel[grid](*tensors, *numbers, **options)
        if compiled is not None and _DIRECT:
            constants = [options[name] for name in kernel.arg_names if name in options]
            self.ready[kernel.__name__, part] = compiled[grid], (*numbers, *constants)

    def _cut(self, kernel: Any, part: str) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, Any]]:
        """The grid of a kernel, its numbers, and constants and options of its own."""
        if kernel in (walking_forward_scan_kernel, walking_backward_scan_kernel):
            rows = 512 // self.BE
            return (self.heads, self.BD // rows, 1), (self.segments,), {"ROWS": rows}
        config, names = {
            walking_forward_sums_kernel: (self.configs.forward_sums, "KV"),
            walking_forward_kernel: (self.configs.forward, "QKV"),
            walking_backward_sums_kernel: (self.configs.backward_sums, "QKD"),
            walking_backward_queries_kernel: (self.configs.queries, "QKVD"),
            walking_backward_keys_kernel: (dict(self.configs.keys).get(part), "QKVD"),
        }[kernel]
        assert config is not None
        more = {f"STRIDE_{name}": self.strides[name][1] for name in names}
        more |= {"STAGES": config.stages, "num_warps": config.warps}
        if kernel is walking_backward_keys_kernel:
            more |= {"KEYS": "k" in part, "VALUES": "v" in part}
        strides = [self.strides[name][i] for name in names for i in (0, 2)]
        return (self.heads * self.segments, 1, 1), (self.T, self.segments, self.run, *strides), more


_plan = lru_cache(maxsize=1024)(_Plan)
# From this version on a compiled kernel takes all arguments, constants too.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)


def _views(like: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Room for so many float32 numbers each, allocated at once and aligned."""
    sizes = tuple([-(-size // 64) * 64 for size in sizes])
    return like.new_empty(sum(sizes), dtype=torch.float32).split(sizes)


def _dense(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """q, k and v with dense rows, the others dense."""
    return dense_rows(q), dense_rows(k), dense_rows(v), *[None if x is None else x.contiguous() for x in others]
