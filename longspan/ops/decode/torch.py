"""Decode steps in eager PyTorch, in place and without gradients. On a CPU most of a small step is the cost of calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.ops.linear.torch import FAVOR_LARGEST, MAPS, is_zero, safe_divide, smallest_normalizer
from longspan.ops.softmax import attend

# The activations that the Triton kernel implements.
FUSED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
KEY_EPSILON = 1e-6  # beside the squared length that divides the queries and keys of the delta rule


class TokenShift(NamedTuple):
    """Token shift of a decode step: equal parts of the features come from earlier tokens.

    Attributes:
        recent: (B, max(offsets) + 1, dim) ring buffer, the token at position p in slot p modulo its size; zeros where
            there is none. The step writes its token.
        length: (B,) position of the token.
        offsets: How many tokens back each part comes from.
    """

    recent: Tensor
    length: Tensor
    offsets: tuple[int, ...]

    def shift(self, x: Tensor) -> Tensor:
        """Shift one token x (B, 1, dim), and write it to its slot."""
        slots, size = self.recent.shape[1], x.shape[2] // len(self.offsets)
        rows = torch.arange(len(x), device=x.device)
        self.recent[rows, self.length % slots] = x[:, 0]
        parts = list(x.split(size, 2))
        for i, offset in enumerate(self.offsets):
            parts[i] = self.recent[rows, (self.length - offset) % slots, None, i * size : (i + 1) * size]
        return torch.cat(parts, 2)

    @staticmethod
    def ring(recent: Tensor, length: Tensor) -> Tensor:
        """Return the ring buffer of the last tokens (B, max(offsets), dim), oldest first."""
        slots = recent.shape[1] + 1
        slot = (length[:, None] - torch.arange(slots, 0, -1, device=length.device)) % slots  # oldest token first
        padded = F.pad(recent, (0, 0, 1, 0))
        return torch.empty_like(padded).scatter_(1, slot[..., None].expand_as(padded), padded)

    @staticmethod
    def latest(ring: Tensor, length: Tensor) -> Tensor:
        """Return the last tokens, oldest first: the inverse of `ring`."""
        slots = ring.shape[1]
        slot = (length[:, None] - torch.arange(slots - 1, 0, -1, device=length.device)) % slots
        return ring.gather(1, slot[..., None].expand(-1, -1, ring.shape[2]))


class GateActivation(NamedTuple):
    """How raw gates (B, 1, Hkv, G) become log α and β.

    Attributes:
        decay: "none": α = 1. "fixed": α = 1 − 2^(−5−h) in head h. "time_step": log α = −exp(A_log) softplus(gate +
            bias). "sigmoid": log α = log σ(gate + bias) / 16.
        write: "one": β = 1. "time_step": β = softplus(gate + bias). "sigmoid": β = strength · σ(first gate).
        A_log: (Hkv,).
        bias: (Hkv, 1 or D); its width is that of log α.
        strength: The largest β.
    """

    decay: str
    write: str = "one"
    A_log: Tensor | None = None
    bias: Tensor | None = None
    strength: float = 1.0


def linear_step(
    q: Tensor, k: Tensor, v: Tensor, state: Sequence[Tensor], feature_map: str, weight: Tensor | None, normalize: str
) -> Tensor:
    """Add one token to the state of linear attention and read it, in the dtype of the state: (B, H, E).

    q: (B, H, D), k: (B, Hkv, D), v: (B, Hkv, E).
    """
    kv, z, shift = state
    B, Hkv, M, E = kv.shape
    if q.dtype != kv.dtype:
        q, k, v = q.to(kv.dtype), k.to(kv.dtype), v.to(kv.dtype)
    weight = None if weight is None else weight.to(kv.dtype)
    query, f, new_shift = _features(q, k, shift, feature_map, weight)
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
    query, memory = query.reshape(B * Hkv, -1, M), kv.view(B * Hkv, M, E)
    out = torch.bmm(query, memory)  # one batch dimension: `matmul` costs more around it
    if normalize == "query":
        denominator = torch.bmm(query, column.view(B * Hkv, M, 1))
        out.div_(denominator)
        # On a CPU one comparison shows that no normalizer is zero; NaN is compared element by element.
        if kv.is_cuda or not float(torch.linalg.vector_norm(denominator, -math.inf)) >= smallest_normalizer(kv.dtype):
            out.masked_fill_(is_zero(denominator), 0)
    return out.view(B, -1, E)


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


def gated_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    kv: Tensor,
    *,
    delta: bool,
    scale: float,
) -> Tensor:
    """Decay the memory kv (B, Hkv, D, E), write one token and read it: (B, H, E) in the dtype of the memory.

    q: (B, H, D). k: (B, Hkv, D). v: (B, Hkv, E). log_decay: (B, Hkv, 1 or D). beta: (B, Hkv).
    """
    (B, Hkv, D, E), dtype = kv.shape, kv.dtype
    if v.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    # One batch dimension: `bmm` costs less than `matmul` around it.
    heads, memory = B * Hkv, kv.view(B * Hkv, D, E)
    key, u = k.reshape(heads, 1, D), v.reshape(heads, 1, E)
    if log_decay is not None:
        memory.mul_(log_decay.exp().reshape(heads, -1, 1))
    if delta:
        u = u - torch.bmm(key, memory)
    u = u if beta is None else beta.reshape(heads, 1, 1) * u
    memory.addcmul_(key.transpose(1, 2), u)
    return torch.bmm((q * scale).reshape(heads, -1, D), memory).view(B, -1, E)


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
    x: Tensor,
    layers: Sequence[nn.Module | Tensor],
    norm: nn.Module | None,
    activation: str,
    residual: Tensor | None,
    shift: TokenShift | None = None,
) -> tuple[Tensor, ...]:
    """Apply norm, token shift, layers, activation and residual as separate operations."""
    x = x if norm is None else _normalize(x, norm)
    x = x if shift is None else shift.shift(x)
    results = []
    for layer in layers:
        if isinstance(layer, Tensor):
            y = F.linear(x, layer)
        elif type(layer) is nn.Linear and has_no_hooks(layer):
            y = F.linear(x, *_parameters(layer))  # around a small product, calling the module costs a quarter of it
        else:
            y = layer(x)
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


def module_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that equals a module, without the cost of calling it where it is PyTorch's own."""
    if not has_no_hooks(module):
        return module
    if type(module) is nn.Linear:
        linear, weight, bias = F.linear, module.weight, module.bias
        return lambda x: linear(x, weight, bias)
    if type(module) is nn.LayerNorm:
        layer_norm, scale, offset = torch.layer_norm, module.weight, module.bias
        dims, eps = module.normalized_shape, module.eps
        return lambda x: layer_norm(x, dims, scale, offset, eps)
    if type(module) is nn.RMSNorm:
        rms_norm, weight, shape, epsilon = torch.rms_norm, module.weight, module.normalized_shape, module.eps
        return lambda x: rms_norm(x, shape, weight, epsilon)
    return module


def has_no_hooks(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)
