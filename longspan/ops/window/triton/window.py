"""Local attention in Triton, behind the custom ops of `ops.local`: the same arguments, the same results."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common.launch import Launch, Signature, Strides, dense_rows, new_like, on_device, signature
from longspan.ops.common.tiles import padded
from longspan.ops.window.triton.window_backward import local_backward_keys_kernel, local_backward_queries_kernel
from longspan.ops.window.triton.window_device import Sizes
from longspan.ops.window.triton.window_forward import local_forward_kernel


class Config(NamedTuple):
    """How one kernel is cut: queries and keys in a block, warps, loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


class Configs(NamedTuple):
    """The forward kernel, and the two of the backward pass."""

    forward: Config
    d_queries: Config
    d_keys: Config


def configs(dim: int, halves: bool) -> Configs:
    """For heads of this many numbers, padded; halves: products of bfloat16 or float16, not float32."""
    if not halves:
        small = Config(32, 32, 4 if dim <= 64 else 8, 1) if dim <= 128 else Config(16, 32, 8, 1)
        return Configs(small, small, small)
    if dim <= 64:
        return Configs(Config(64, 64, 4, 3), Config(64, 32, 4, 3), Config(64, 64, 4, 2))
    if dim <= 128:
        return Configs(Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(32, 64, 4, 2))
    return Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2))


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """out (B, T, H, E) and the log₂-sums of its weights (B, H, T, 1), as two numbers of float32 (·, 2)."""
    tensors, rest = _given(*args)
    q = tensors[0]
    plan = _forward_plan(q.get_device(), signature(*tensors), rest)
    out, lse = q.new_empty(plan.out_shape), q.new_empty(plan.lse_shape, dtype=torch.float32)
    with on_device(q):
        plan.read(*tensors, out, lse)
    return out, lse


def backward(d_out: Tensor, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    tensors, rest = _given(*args)
    q, k, v = tensors[:3]
    d_out, out = dense_rows(d_out), out.contiguous()
    plan = _backward_plan(q.get_device(), signature(*tensors, d_out, out, lse), rest)
    d_q, d_k, d_v, delta = new_like(q), new_like(k), new_like(v), torch.empty_like(lse)
    with on_device(q):
        plan.queries(*tensors, out, lse, d_out, d_q, delta)
        plan.keys(*tensors, lse, d_out, delta, d_k, d_v)
    return d_q, d_k, d_v


def _given(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    start: Tensor | None,
    bounds: Tensor | None,
    seed: Tensor | None,
    *rest: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors as the kernels take them, and the rest: the window, the scale of the scores, and dropout."""
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    return (dense_rows(q), dense_rows(k), dense_rows(v), mask, start, bounds, seed), rest


class _Plan:
    """All that calls with arguments that look alike share: how they are cut, and kernels with their numbers."""

    def __init__(self, device: int, given: Signature, rest: tuple[Any, ...]) -> None:
        q, k, v, *_ = given
        assert q is not None
        assert k is not None
        assert v is not None
        size, back, ahead, causal, alone, self.scale, self.dropout = rest
        (self.B, self.T, self.H, D), (self.S, self.Hkv), E = q[0], k[0][1:3], v[0][3]
        self.device, self.steps = device, [Strides(*x[1][:3]) for x in (q, k, v)]
        BD, BE = (padded(dim, 16) for dim in (D, E))
        halves = q[2] != torch.float32
        self.configs = configs(max(BD, BE), halves)
        self.out_shape, self.lse_shape = (self.B, self.T, self.H, E), (self.B, self.H, self.T, 1 if halves else 2)
        # A window past every sequence would only overflow.
        far = 2**30 // max(size, 1) - 1
        window = size, min(back, far), min(ahead, far), causal, alone
        self.sizes = Sizes(self.H, self.Hkv, D, E, *window, 0, 0, BD, BE, "tf32" if halves else "ieee")

    def launch(self, kernel: Any, config: Config, programs: int, more: tuple[Any, ...] = ()) -> Launch:
        """more: numbers of this kernel, before all steps."""
        sizes = self.sizes._replace(BT=config.queries, BS=config.keys)
        constants = {"W": sizes, "num_warps": config.warps, "num_stages": config.stages}
        numbers = self.T, self.S, self.scale * math.log2(math.e), self.dropout, *more, *self.steps
        return Launch(self.device, kernel, (self.B * programs, 1, 1), numbers, constants)


class _Forward(_Plan):
    def __init__(self, device: int, given: Signature, rest: tuple[Any, ...]) -> None:
        super().__init__(device, given, rest)
        config = self.configs.forward
        self.read = self.launch(local_forward_kernel, config, -(-self.T // config.queries) * self.H)


class _Backward(_Plan):
    def __init__(self, device: int, given: Signature, rest: tuple[Any, ...]) -> None:
        super().__init__(device, given, rest)
        d_out = given[7]
        assert d_out is not None
        self.steps.append(Strides(*d_out[1][:3]))
        queries, keys = self.configs.d_queries, self.configs.d_keys
        # The backward pass undoes the scale of the scores too.
        scale = (self.scale,)
        blocks = -(-self.T // queries.queries) * self.H, -(-self.S // keys.keys) * self.Hkv
        self.queries = self.launch(local_backward_queries_kernel, queries, blocks[0], scale)
        self.keys = self.launch(local_backward_keys_kernel, keys, blocks[1], scale)


_forward_plan = lru_cache(maxsize=1024)(_Forward)
_backward_plan = lru_cache(maxsize=1024)(_Backward)
