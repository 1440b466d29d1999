"""Local attention in Triton, behind the custom ops of `ops.local`: the same arguments, the same results."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longspan.kernels.local_backward import local_backward_keys_kernel, local_backward_queries_kernel
from longspan.kernels.local_forward import local_forward_kernel


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
        small = Config(32, 32, 4, 1) if dim <= 128 else Config(16, 32, 4, 1)
        return Configs(small, small, small)
    if dim <= 64:
        return Configs(Config(64, 64, 4, 3), Config(64, 32, 4, 3), Config(64, 64, 4, 2))
    if dim <= 128:
        return Configs(Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(32, 64, 4, 2))
    return Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2))


class Arguments(NamedTuple):
    """What `ops.local` asks for, once: tensors, then the window, then numbers. See `ops.local.local_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    start: Tensor | None
    bounds: Tensor | None
    seed: Tensor | None
    size: int
    back: int
    ahead: int
    causal: bool
    alone: bool
    scale: float
    dropout: float


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """out (B, T, H, E) and the log₂-sums of its weights (B, H, T), float32."""
    call = _Call(Arguments(*args))
    q, v = call.given.q, call.given.v
    B, T, H, _ = q.shape
    out, lse = q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, H, T, dtype=torch.float32)
    call.launch(local_forward_kernel, call.configs.forward, (out, lse), (), over_keys=False)
    return out, lse


def backward(d_out: Tensor, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    call = _Call(Arguments(*args))
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in call.given[:3])
    delta, d_out = torch.empty_like(lse), _dense(d_out)
    tensors = out.contiguous(), lse, d_out, d_q, delta
    call.launch(local_backward_queries_kernel, call.configs.d_queries, tensors, (d_out,), over_keys=False)
    call.launch(
        local_backward_keys_kernel, call.configs.d_keys, (lse, d_out, delta, d_k, d_v), (d_out,), over_keys=True
    )
    return d_q, d_k, d_v


class _Call:
    """The arguments as the kernels take them, padded sizes, and launches."""

    def __init__(self, given: Arguments) -> None:
        self.given = given._replace(q=_dense(given.q), k=_dense(given.k), v=_dense(given.v))
        self.D, self.E = given.q.shape[3], given.v.shape[3]
        self.BD, self.BE = (max(16, triton.next_power_of_2(n)) for n in (self.D, self.E))
        halves = given.q.dtype != torch.float32
        self.configs = configs(max(self.BD, self.BE), halves)
        self.precision = "tf32" if halves else "ieee"

    def launch(
        self, kernel: Any, config: Config, tensors: tuple[Tensor, ...], strided: tuple[Tensor, ...], *, over_keys: bool
    ) -> None:
        """One program for each block of queries, or of keys, of each head of each row."""
        given = self.given
        q, k, v, key_mask, start, bounds, seed = given[:7]
        B, T, H, _ = q.shape
        S, Hkv = k.shape[1:3]
        stretches = triton.cdiv(S, config.keys) * Hkv if over_keys else triton.cdiv(T, config.queries) * H
        mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        # The backward pass undoes the scale of the scores too.
        factor = (given.scale,) if strided else ()
        # A window past every sequence would only overflow.
        far = 2**30 // max(given.size, 1) - 1
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            kernel[(B * stretches,)](
                *(q, k, v, mask, start, bounds, seed),
                *tensors,
                *(T, S, given.scale * math.log2(math.e), given.dropout),
                *factor,
                *(stride for x in (q, k, v, *strided) for stride in x.stride()[:3]),
                H=H,
                HKV=Hkv,
                D=self.D,
                E=self.E,
                SIZE=given.size,
                BACK=min(given.back, far),
                AHEAD=min(given.ahead, far),
                CAUSAL=given.causal,
                ALONE=given.alone,
                BT=config.queries,
                BS=config.keys,
                BD=self.BD,
                BE=self.BE,
                PRECISION=self.precision,
                num_warps=config.warps,
                num_stages=config.stages,
            )


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension dense, as loads of whole rows need it."""
    return x if x.stride(-1) == 1 else x.contiguous()
