"""Causal linear attention of bfloat16, normalized, in Triton: what `kernels.linear` calls for it.

The other kernels keep the sums before every chunk in memory, and give each pair of tokens a factor of its own; these
walk segments with the sums in registers and need neither.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common.launch import (
    Launch,
    Signature,
    Workspace,
    dense,
    dense_rows,
    new_like,
    on_device,
    shared_memory_kb,
    signature,
)
from longspan.ops.common.tiles import padded
from longspan.ops.linear.triton.fused_chunk_backward import walking_backward_scan_kernel, walking_backward_sums_kernel
from longspan.ops.linear.triton.fused_chunk_device import BatchStrides, Sizes
from longspan.ops.linear.triton.fused_chunk_forward import walking_forward_kernel
from longspan.ops.linear.triton.fused_chunk_keys import walking_backward_keys_kernel
from longspan.ops.linear.triton.fused_chunk_queries import walking_backward_queries_kernel
from longspan.ops.linear.triton.fused_chunk_sums import walking_forward_scan_kernel, walking_forward_sums_kernel

LARGEST = 128
CHUNK = 64
STAGES = 3  # With fewer no chunk is loaded while another is in use.
FEATURES = 16  # of a program that adds up segments
MAPS = ("softmax", "elu", "relu", "identity")

# out, den, and the sums and their shift after the last token, where they are asked for.
Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Config(NamedTuple):
    """Programs that a multiprocessor runs at once, and warps of each."""

    resident: int
    warps: int


def config(head_dim: int, value_dim: int) -> Config:
    """For blocks of these sizes."""
    return Config(2, 4) if head_dim * value_dim <= 64 * 64 else Config(1, 8)


def takes(q: Tensor, v: Tensor, log_scale: Tensor | None, feature_map: str, normalize: bool) -> bool:
    """Whether these kernels are for such arguments."""
    if not normalize or feature_map not in MAPS or log_scale is not None or q.dtype != torch.bfloat16:
        return False
    size = max(q.shape[3], v.shape[3])
    return size <= 64 or (size <= LARGEST and shared_memory_kb(q.get_device()) >= 163)


def kept_size(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many numbers `forward` keeps for the backward pass: the sums before each segment, whatever the length."""
    device = q.device.index if q.is_cuda else -1
    return _kept(device, k.shape[0] * k.shape[2], padded(q.shape[3]), padded(v.shape[3])).size


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    *,
    ends: bool = True,
    zeroed: bool = False,
) -> tuple[Results, Tensor]:
    """The results of `causal_linear`, and what is kept. ends, zeroed: as in `kernels.linear.forward`."""
    q, k, v, kv, shift = dense_rows(q), dense_rows(k), dense_rows(v), dense(kv), dense(shift)
    plan = _forward_plan(q.get_device(), signature(q, k, v, lengths, kv, shift), feature_map, ends)
    out = v.new_empty(plan.out_shape)
    den = q.new_empty(plan.den_shape, dtype=torch.float32)
    kv_out = q.new_empty(plan.kv_shape, dtype=torch.float32) if ends else None
    shift_out = q.new_empty(plan.shift_shape, dtype=torch.float32) if ends else None
    kept = plan.kept.allocate(q, zeroed=zeroed)
    sums, z, sizes, reference = plan.kept.pointers(kept, plan.compiled)
    with on_device(q):
        plan.sums(k, v, lengths, sums, z, sizes)
        plan.scan(sums, z, sizes, kv, shift, kv_out, shift_out, reference)
        plan.read(q, k, v, lengths, sums, z, sizes, reference, out, den)
    plan.compiled = plan.read.compiled is not None
    return (out, den, kv_out, shift_out), kept


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
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The results of `causal_linear_backward`. kept: by `forward`."""
    q, k, v, shift = dense_rows(q), dense_rows(k), dense_rows(v), dense(shift)
    d_out, d_kv, out = dense_rows(d_out), dense(d_kv), out.contiguous()
    plan = _backward_plan(q.get_device(), signature(q, k, v, lengths, shift, d_kv, d_out, out, den, kept), feature_map)
    d_q, d_k, d_v = new_like(q), new_like(k), new_like(v)
    d_start = None if kv is None else kv.new_empty(kv.shape)
    work = plan.work.allocate(q)
    sums, z, sizes, reference = plan.kept.pointers(kept, plan.compiled)
    d_total, d_z, starts, rows = plan.work.pointers(work, plan.compiled)
    with on_device(q):
        plan.sums(q, k, lengths, sizes, reference, starts, out, den, d_out, rows, d_total, d_z)
        plan.scan(d_total, d_z, sizes, reference, shift, d_kv, d_start)
        plan.queries(q, k, v, lengths, sums, z, sizes, reference, d_out, rows, d_q)
        plan.keys(q, k, v, lengths, d_total, d_z, sizes, reference, starts, d_out, rows, d_k, d_v)
    plan.compiled = plan.keys.compiled is not None
    return d_q, d_k, d_v, d_start


class _Plan:
    """All that calls with arguments that look alike share: how they are cut, room, and kernels with their numbers."""

    def __init__(self, device: int, given: Signature, feature_map: str) -> None:
        q, k, v, lengths, *_ = given
        assert q is not None
        assert k is not None
        assert v is not None
        (self.B, self.T, self.H, self.D), (self.Hkv, self.E) = q[0], v[0][2:]
        self.device, self.BD, self.BE = device, padded(self.D), padded(self.E)
        self.heads = self.B * self.Hkv
        chunks = -(-self.T // CHUNK)
        # As many segments as fill the device, but none of a single chunk.
        segments = max(1, min(_programs(device, self.BD, self.BE) // self.heads, chunks // 2))
        self.run = -(-chunks // segments)
        self.segments = -(-chunks // self.run)
        self.kept = _kept(device, self.heads, self.BD, self.BE)
        # Of each tensor whose rows callers may lay out as they like.
        self.strides = {"Q": q[1], "K": k[1], "V": v[1]}
        whole = lengths is None and self.T % CHUNK == 0
        sizes = self.H, self.Hkv, self.D, self.E, CHUNK, self.BD, self.BE
        self.sizes = Sizes(*sizes, feature_map, feature_map == "softmax", whole)
        self.compiled = False

    def walking(self, kernel: Any, strided: str) -> Launch:
        """strided: which tensors' strides the kernel takes."""
        steps: dict[str, Any] = {f"STRIDE_{name}": self.strides[name][1] for name in strided}
        if "Q" not in strided:
            steps["H"] = 0
        numbers = (
            self.T,
            self.segments,
            self.run,
            *[BatchStrides(self.strides[x][0], self.strides[x][2]) for x in strided],
        )
        constants = {"S": self.sizes._replace(**steps), "STAGES": STAGES, "num_warps": config(self.BD, self.BE).warps}
        return Launch(self.device, kernel, (self.heads * self.segments, 1, 1), numbers, constants)

    def scanning(self, kernel: Any) -> Launch:
        sizes = self.sizes._replace(H=0, HKV=0, C=0, MAP="", WHOLE=False)
        grid = self.heads, self.BD // FEATURES, 1
        return Launch(self.device, kernel, grid, (self.segments,), {"S": sizes, "FEATURES": FEATURES})


class _Forward(_Plan):
    def __init__(self, device: int, given: Signature, feature_map: str, ends: bool) -> None:
        super().__init__(device, given, feature_map)
        self.out_shape, self.den_shape = (self.B, self.T, self.H, self.E), (self.B, self.T, self.H)
        self.kv_shape, self.shift_shape = (self.B, self.Hkv, self.D, self.E + 1), (self.B, self.Hkv)
        self.sums = self.walking(walking_forward_sums_kernel, "KV")
        self.scan = self.scanning(walking_forward_scan_kernel)
        self.read = self.walking(walking_forward_kernel, "QKV")


class _Backward(_Plan):
    def __init__(self, device: int, given: Signature, feature_map: str) -> None:
        super().__init__(device, given, feature_map)
        d_out = given[6]
        assert d_out is not None
        self.strides["D"] = d_out[1]
        X = self.heads * self.segments
        rows = X * self.run * 2 * CHUNK * (self.H // self.Hkv)
        sizes = X * self.BD * self.BE, X * self.BD, X * self.run, rows
        self.work = Workspace(*[(size, torch.float32) for size in sizes])
        self.sums = self.walking(walking_backward_sums_kernel, "QKD")
        self.scan = self.scanning(walking_backward_scan_kernel)
        self.queries = self.walking(walking_backward_queries_kernel, "QKVD")
        self.keys = self.walking(walking_backward_keys_kernel, "QKVD")


_forward_plan = lru_cache(maxsize=1024)(_Forward)
_backward_plan = lru_cache(maxsize=1024)(_Backward)


def _programs(device: int, BD: int, BE: int) -> int:
    """How many the device runs at once. The interpreter runs one after the other."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 4
    return processors * config(BD, BE).resident


def _kept(device: int, heads: int, BD: int, BE: int) -> Workspace:
    """For each segment its sums, z and sizes, and for each and each head a reference.

    However long the heads are, they have no more segments than this: a compiler does not know their length.
    """
    X = heads + _programs(device, BD, BE)
    return Workspace(*[(size, torch.float32) for size in (X * BD * BE, X * BD, X * 4, X + heads)])
