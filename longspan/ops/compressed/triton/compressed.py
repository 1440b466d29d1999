"""Softmax attention of many queries over few keys in Triton, behind `ops.rows`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longspan.ops.common.launch import Launch, Signature, dense_rows, on_device, signature
from longspan.ops.common.tiles import padded
from longspan.ops.compressed.triton.compressed_device import Sizes, Steps, rows_backward_kernel, rows_forward_kernel

# Multiprocessors of a large device: forward each runs two programs, backward one.
_PROCESSORS = 132


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D), halves, k (B, Hkv, R, D), v (B, Hkv, R, E) -> (B, T, H, E), and what the backward pass needs."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    plan = _forward_plan(q.get_device(), signature(q, k, v), scale, k is v)
    out, lse = q.new_empty(plan.out_shape), q.new_empty(plan.lse_shape, dtype=torch.float32)
    with on_device(q):
        plan.read(q, k, v, out, lse)
    return out, lse


def backward(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, d_q: Tensor
) -> Tensor:
    """The gradient of q into d_q, and that of the keys, with that of the values beside: (B, Hkv, R, D + E) in float32.

    Where k is v it is one of both: (B, Hkv, R, D).
    """
    q, k, v, d_out, shared = dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(d_out), k is v
    plan = _backward_plan(q.get_device(), signature(q, k, v, d_out, d_q), scale, shared)
    parts = q.new_empty(plan.parts_shape, dtype=torch.float32)
    with on_device(q):
        plan.differentiate(q, k, v, out, lse, d_out, d_q, parts)
    return parts.sum(0)


class _Plan:
    """All that calls with arguments that look alike share: how they are cut, and a kernel with its numbers."""

    def __init__(self, device: int, given: Signature, scale: float, shared: bool) -> None:
        q, k, v, *rest = given
        assert q is not None
        assert k is not None
        assert v is not None
        (self.B, self.T, self.H, D), (self.Hkv, R), E = q[0], k[0][1:3], v[0][3]
        self.device, self.scale = device, scale
        BR, BD, BE = (padded(size) for size in (R, D, E))
        self.sizes = Sizes(self.H, self.Hkv, R, D, E, 64 * self.Hkv // self.H, 64, BR, min(BR, 128), BD, BE, shared)
        self.steps = Steps(*(step for x in (q, k, v, *rest) if x is not None for step in x[1][:3]))

    def launch(self, kernel: Any, programs: int, warps: int, stages: int, *more: float) -> Launch:
        """programs: as many, about, of all heads together. more: numbers of this kernel."""
        heads, blocks = self.B * self.Hkv, -(-self.T // self.sizes.TOKENS)
        each = -(-blocks // max(1, programs // heads))
        self.programs = -(-blocks // each)
        numbers = self.T, each, self.scale * math.log2(math.e), *more, self.steps
        constants = {"S": self.sizes, "STAGES": stages, "num_warps": warps}
        return Launch(self.device, kernel, (self.programs, heads, 1), numbers, constants)


class _Forward(_Plan):
    def __init__(self, device: int, given: Signature, scale: float, shared: bool) -> None:
        super().__init__(device, given, scale, shared)
        self.out_shape, self.lse_shape = (self.B, self.T, self.H, self.sizes.E), (self.B, self.T, self.H)
        self.read = self.launch(rows_forward_kernel, 2 * _PROCESSORS, 4, 3)


class _Backward(_Plan):
    def __init__(self, device: int, given: Signature, scale: float, shared: bool) -> None:
        super().__init__(device, given, scale, shared)
        self.differentiate = self.launch(rows_backward_kernel, _PROCESSORS, 8, 3, self.scale)
        S = self.sizes
        self.parts_shape = self.programs, self.B, self.Hkv, S.R, S.D if shared else S.D + S.E


_forward_plan = lru_cache(maxsize=1024)(_Forward)
_backward_plan = lru_cache(maxsize=1024)(_Backward)
