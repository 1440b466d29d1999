"""Decode steps in eager PyTorch, in place and without gradients. On a CPU most of a small step is the cost of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.ops.linear.torch import FAVOR_LARGEST, MAPS, is_zero, safe_divide
from longspan.ops.softmax import attend

# The activations that the Triton kernel implements.
FUSED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def linear_step(
    q: Tensor, k: Tensor, v: Tensor, state: Sequence[Tensor], feature_map: str, weight: Tensor | None, normalize: str
) -> Tensor:
    """Add one token to the state of linear attention and read it, in the dtype of the state: (B, 1, H, E)."""
    kv, z, shift = state
    B, Hkv, M, E = kv.shape
    if q.dtype != kv.dtype:
        q, k, v = q.to(kv.dtype), k.to(kv.dtype), v.to(kv.dtype)
    weight = None if weight is None else weight.to(kv.dtype)
    query, f, new_shift = _features(q.squeeze(1), k.squeeze(1), shift, feature_map, weight)
    # On a CPU, skip the rescaling unless the maximum is new; on a GPU the comparison would synchronize.
    if new_shift is not None and (kv.is_cuda or not torch.equal(new_shift, shift)):
        decay = (shift - new_shift).exp_().unsqueeze(-1)
        kv.mul_(decay.unsqueeze(-1))
        z.mul_(decay)
        shift.copy_(new_shift)
    f, column = f.view(B, Hkv, M, 1), z.unsqueeze(-1)
    kv.addcmul_(f, v.view(B, Hkv, 1, E))
    column.add_(f)
    query = query.view(B, Hkv, -1, M)  # (B, Hkv, G, M)
    if normalize == "feature":
        query = query / query.sum(-1, keepdim=True) if feature_map == "favor" else query
        query = safe_divide(query, z.unsqueeze(2))
    out = query @ kv
    if normalize == "query":
        denominator = query @ column
        out.div_(denominator).masked_fill_(is_zero(denominator), 0)
    return out.view(B, 1, -1, E)


def _features(
    q: Tensor, k: Tensor, shift: Tensor, feature_map: str, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return φ(q) (B, H, M), φ(k) / exp(new shift) (B, Hkv, M), and the new shift (B, Hkv).

    q: (B, H, D), k: (B, Hkv, D). shift: (B, Hkv), the log scale of the state. The new shift is None for bounded maps.
    """
    if weight is None:
        (query, _), (f, scale) = MAPS[feature_map].query(q, None), MAPS[feature_map].key(k, None)
        if scale is None:
            return query, f, None
        new_shift = torch.maximum(shift, scale)
        return query, f * (scale - new_shift).exp_().unsqueeze(-1), new_shift
    # FAVOR+ of queries and keys in one tensor, for half the calls. Queries are divided by their own maximum.
    heads = q.shape[1], k.shape[1]
    x = torch.cat([q, k], 1).mul_(q.shape[2] ** -0.25)
    projected, square = F.linear(x, weight), (x * x).sum(-1)
    maximum = projected.amax(-1)  # (B, H + Hkv)
    (_, key_max), (_, square) = maximum.split_with_sizes(heads, 1), square.split_with_sizes(heads, 1)
    largest = torch.sub(key_max, square, alpha=0.5)
    new_shift = torch.maximum(shift, largest.round().sub_(FAVOR_LARGEST))
    query, f = projected.sub_(maximum.unsqueeze(-1)).exp_().split_with_sizes(heads, 1)
    f.mul_(largest.sub_(new_shift).exp_().unsqueeze(-1))
    return query, f, new_shift


def compressed_step(
    q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], position: int
) -> Tensor:
    """Add the token at `position` of one sequence to compressed keys and values (1, Hkv, R, ·), and attend to them."""
    max_length = tables[0].shape[1]
    for compressed, table, x in zip(state, tables, (k, v), strict=True):
        compressed.addcmul_(table.select(1, position % max_length).unsqueeze(2), x.transpose(1, 2))
    # A projection that wraps around makes means over its periods.
    periods = position // max_length + 1
    scale, grouped = q.shape[3] ** -0.5 / periods, q.shape[2] > k.shape[2]
    out = attend(q.transpose(1, 2), *state, None, grouped=grouped, scale=scale).transpose(1, 2)
    return out if periods == 1 else out / periods


def linear_layers(
    x: Tensor, layers: Sequence[nn.Module | Tensor], norm: nn.Module | None, activation: str, residual: Tensor | None
) -> tuple[Tensor, ...]:
    """Apply norm, layers, activation and residual as separate operations."""
    x = x if norm is None else _normalize(x, norm)
    results = []
    for layer in layers:
        if isinstance(layer, Tensor):
            y = F.linear(x, layer)
        else:
            # Around a small product, calling the module costs a quarter of it.
            y = F.linear(x, *_parameters(layer)) if type(layer) is nn.Linear and has_no_hooks(layer) else layer(x)
        y = y if activation == "identity" else FUSED_ACTIVATIONS[activation](y)
        results.append(y if residual is None else residual + y)
    return tuple(results)


def _normalize(x: Tensor, norm: nn.Module) -> Tensor:
    if type(norm) is nn.LayerNorm and has_no_hooks(norm):
        return torch.layer_norm(x, norm.normalized_shape, *_parameters(norm), norm.eps)
    return norm(x)


def _parameters(module: nn.Module) -> tuple[Any, Any]:
    """Return weight and bias; reading the dictionary is three times as fast as reading attributes."""
    own = module._parameters
    return (own["weight"], own["bias"]) if len(own) == 2 else (module.weight, module.bias)


def has_no_hooks(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)
