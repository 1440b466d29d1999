"""Bidirectional and cross linear attention on the GPU kernels, features never whole in memory.

    out_i = φ(q_i)·Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j),  or with each feature's weights over the keys summing to one

Two passes over the data forward, keys and then queries, and two backward, queries and then keys; between them travel
sums of M·(E + 1) numbers a head. Elsewhere, and for maps of a user's own, `mechanisms.linear` does the same in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.ops import backend

# out, and what the backward pass starts from: each query's normaliser, the sums, and their two scales.
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def bidirectional_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    weight: Tensor | None = None,
    key_mask: Tensor | None = None,
    offsets: Tensor | None = None,
    key_offsets: Tensor | None = None,
    normalise: str = "query",
) -> Tensor:
    """Linear attention of every query to every key: (B, T, H, E) in q's dtype.

    q: (B, T, H, D), k: (B, S, Hkv, D), v: (B, S, Hkv, E). feature_map: one of `features.MAPS`, with its weight.
    key_mask: (B, S) True = keep; what hidden slots hold does not matter. normalise: "query", "feature" or "none".
    offsets, key_offsets: (N + 1,) int32, where sequences packed in one row begin. A query without keys returns zeros.

    For arguments that `backend.why_plain_bidirectional` has nothing against. With bfloat16 inputs a weight of numbers
    that bfloat16 holds takes one product, any other takes two.
    """
    given = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalise
    if backend.at_once(q):
        apply: Any = _Kernels.apply
        return apply(*given)
    return _bidirectional_linear(*given)[0]


class _Kernels(torch.autograd.Function):
    """`longspan::bidirectional_linear`, called directly where nobody watches operations go by."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        results = backend.bidirectional_kernels().bidirectional_linear(*given)
        *tensors, ctx.feature_map, ctx.normalise = given
        ctx.save_for_backward(*results[1:], *tensors)
        return results[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        kernels = backend.bidirectional_kernels()
        grads = kernels.bidirectional_linear_backward(d_out, *ctx.saved_tensors, ctx.feature_map, ctx.normalise)
        return *grads, None, None, None, None, None, None


@torch.library.custom_op("longspan::bidirectional_linear", mutates_args=())
def _bidirectional_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    key_mask: Tensor | None,
    offsets: Tensor | None,
    key_offsets: Tensor | None,
    feature_map: str,
    normalise: str,
) -> Results:
    given = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalise
    return tuple(backend.bidirectional_kernels().bidirectional_linear(*given))


@_bidirectional_linear.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    key_mask: Tensor | None,
    offsets: Tensor | None,
    key_offsets: Tensor | None,
    feature_map: str,
    normalise: str,
) -> Results:
    kernels = backend.bidirectional_kernels()
    divided = kernels.is_divided(feature_map, normalise)
    return tuple(kernels.new_result(q, k, v, weight, key_offsets, divided))


@torch.library.custom_op("longspan::bidirectional_linear_backward", mutates_args=())
def _bidirectional_linear_backward(
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
    """The gradients of q, k and v."""
    found = scale, kv, z, c
    given = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalise
    return backend.bidirectional_kernels().bidirectional_linear_backward(d_out, *found, *given)


@_bidirectional_linear_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = args[5:8]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, ctx.feature_map, ctx.normalise = inputs
    ctx.save_for_backward(*output[1:], *tensors)


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = _bidirectional_linear_backward(d_out, *ctx.saved_tensors, ctx.feature_map, ctx.normalise)
    return *grads, None, None, None, None, None, None


_bidirectional_linear.register_autograd(_differentiate, setup_context=_save)
