"""Functions of linear-attention-transformer: attention, rotary positions and small helpers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from longspan.compat.faithful import resolve_faithful
from longspan.compat.layers import as_bool
from longspan.compat.linear_attention_transformer.options import mechanism_spec
from longspan.models.layers import mechanism_from
from longspan.ops.rotary import rotate
from longspan.protocol import Mechanism


def always(value: Any) -> Callable[..., Any]:
    """Return a function of any arguments that returns the value."""
    return partial(_first, value)


def _first(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def default(value: Any, d: Any) -> Any:
    """Return a value, or d if it is None."""
    return d if value is None else value


def safe_div(n: Tensor, d: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide n by d + eps in place."""
    return n.div_(d + eps)


def lcm(*numbers: int) -> int:
    """Return the least common multiple."""
    return math.lcm(*numbers)


def merge_dims(ind_from: int, ind_to: int, tensor: Tensor) -> Tensor:
    """Flatten the dimensions from ind_from to ind_to, both included."""
    return tensor.flatten(ind_from, ind_to)


def expand_dim(t: Tensor, dim: int, k: int, unsqueeze: bool = True) -> Tensor:
    """Expand a dimension to size k; it is inserted first unless `unsqueeze` is False."""
    t = t.unsqueeze(dim) if unsqueeze else t
    shape = [-1] * t.ndim
    shape[dim] = k
    return t.expand(shape)


def split_at_index(dim: int, index: int, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a tensor before and from an index along a dimension."""
    before = slice(None, index).indices(t.shape[dim])[1]
    return t.narrow(dim, 0, before), t.narrow(dim, before, t.shape[dim] - before)


def apply_rotory_pos_emb(q: Tensor, k: Tensor, sinu_pos: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k (…, T, D) by the angles whose sines and cosines are in sinu_pos (1, T, D), sines first."""
    sin, cos = sinu_pos[0].chunk(2, -1)
    return rotate(q, cos, sin, interleaved=True), rotate(k, cos, sin, interleaved=True)


def linear_attn(q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None) -> Tensor:
    """Return bidirectional linear attention (B, H, T, D) of q (B, H, T, D), k and v (B, H, S, D).

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        kv_mask: (B, S), True for keys to attend to.
    """
    return LinearHeads.of(q.shape[1], q.shape[3], causal=False)(q, k, v, kv_mask)


def causal_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_mask: Tensor | None = None,
    bucket_size: int | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return causal linear attention; see `linear_attn`.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        kv_mask: (B, T), True for keys to attend to.
        bucket_size: By default 64. A query attends to the buckets before its own; with 1, to all keys up to its own.
        eps: The smallest denominator, with keys whose exponentials are not scaled: 0.001 in the original. By default
            there is none, and keys of any size are safe; inside `longspan.compat.faithful()` it is 0.001.
    """
    bucket_size = 64 if bucket_size is None else max(bucket_size, 1)
    if eps is None and resolve_faithful(None):
        eps = 1e-3
    if eps is not None:
        return clamped_causal_attn(q, k, v, kv_mask, bucket_size, eps)
    return LinearHeads.of(q.shape[1], q.shape[3], causal=True, blindspot_size=bucket_size)(q, k, v, kv_mask)


@dataclass(frozen=True)
class LinearHeads:
    """Linear attention of q (B, H, T, D), k and v (B, H, S, D), with a mask (B, S)."""

    mechanism: Mechanism
    causal: bool

    @classmethod
    def of(cls, heads: int, dim_head: int, *, causal: bool, blindspot_size: int = 1) -> LinearHeads:
        spec = mechanism_spec(heads, dim_head, 0, causal=causal, blindspot_size=blindspot_size)
        return cls(mechanism_from(spec, heads, dim_head, heads), causal)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.mechanism(q, k, v, causal=self.causal, key_mask=as_bool(kv_mask)).transpose(1, 2)


def clamped_causal_attn(
    q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None, bucket_size: int, eps: float
) -> Tensor:
    """Return causal linear attention with denominators of at least eps; arguments as for `causal_linear_attn`."""
    T = q.shape[2]
    q, k = q.softmax(-1) * q.shape[-1] ** -0.5, k.exp()
    if kv_mask is not None:
        hidden = ~kv_mask.bool()[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    # (B, H, buckets, bucket_size, D)
    q, k, v = (F.pad(x, (0, 0, 0, -T % bucket_size)).unflatten(2, (-1, bucket_size)) for x in (q, k, v))
    keys, sums = k.sum(-2).cumsum(2), (k.mT @ v).cumsum(2)
    if bucket_size > 1:
        keys, sums = F.pad(keys, (0, 0, 1, -1)), F.pad(sums, (0, 0, 0, 0, 1, -1))
    denominator = (q @ keys[..., None]).clamp(min=eps)
    return (q @ sums / denominator).flatten(2, 3)[:, :, :T]
