"""Bidirectional and cross linear attention on the GPU kernels, features never whole in memory.

    out_i = φ(q_i)·Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j),  or with each feature's weights over the keys summing to one

Two passes over the data forward, keys and then queries, and two backward, queries and then keys; between them travel
sums of M·(E + 1) numbers a head. Elsewhere, and for maps of a user's own, `mechanisms.linear` does the same in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import once_differentiable, refuse_double_backward


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
    normalize: str = "query",
) -> Tensor:
    """Linear attention of every query to every key: (B, T, H, E) in q's dtype.

    q: (B, T, H, D), k: (B, S, Hkv, D), v: (B, S, Hkv, E). feature_map: one of `features.MAPS`, with its weight.
    key_mask: (B, S) True = keep; what hidden slots hold does not matter. normalize: "query", "feature" or "none".
    offsets, key_offsets: (N + 1,) int32, where sequences packed in one row begin. A query without keys returns zeros.

    The arguments must pass `dispatch.why_not_triton_bidirectional`. With bfloat16 inputs a weight that bfloat16
    represents exactly takes one product, any other takes two.
    """
    given = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalize
    if not dispatch.eager_untraced(q):
        return _bidirectional_linear(*given)[0]
    if torch.is_grad_enabled():
        return _apply(*given)
    return dispatch.bidirectional_kernels().forward(*given)[0]


class _Kernels(torch.autograd.Function):
    """`longspan::bidirectional_linear`, called directly where nobody watches operations go by."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        results = dispatch.bidirectional_kernels().forward(*given)
        _save(ctx, given, results)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        grads = dispatch.bidirectional_kernels().backward(d_out, *ctx.saved_tensors, *ctx.rest)
        return *grads, *[None] * 6


# `Function.apply` looks for transforms of functorch first, as `dispatch.eager_untraced` has done.
_apply: Any = super(torch.autograd.Function, _Kernels).apply


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
    normalize: str,
) -> tuple[Tensor, Tensor]:
    """The result, and what the backward pass starts from."""
    given = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalize
    return dispatch.bidirectional_kernels().forward(*given, zeroed=True)


@_bidirectional_linear.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, weight, _key_mask, _offsets, key_offsets, feature_map, normalize = args
    size = dispatch.bidirectional_kernels().kept_size(q, k, v, weight, key_offsets, feature_map, normalize)
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("longspan::bidirectional_linear_backward", mutates_args=())
def _bidirectional_linear_backward(
    d_out: Tensor,
    kept: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    key_mask: Tensor | None,
    offsets: Tensor | None,
    key_offsets: Tensor | None,
    feature_map: str,
    normalize: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    given = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalize
    return dispatch.bidirectional_kernels().backward(d_out, kept, *given)


@_bidirectional_linear_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = args[2:5]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_bidirectional_linear_backward.register_autograd(refuse_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.rest = inputs[7:]


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _bidirectional_linear_backward(d_out, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * 6


_bidirectional_linear.register_autograd(_differentiate, setup_context=_save)
