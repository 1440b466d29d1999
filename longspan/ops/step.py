"""One token written into a memory and read from it at once, the memory changed where it lies; without gradients.

Lengths are the caller's to raise: a model's layers share one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.ops import backend
from longspan.ops.chunks import over
from longspan.ops.features import MAPS
from longspan.ops.linear import Sums, divide
from longspan.ops.rotary import rotate


class Turn(NamedTuple):
    """Rotary positions that queries and keys still have to take: cos and sin (B or 1, 1, D / 2)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x: (B, 1, H, D) turned."""
        return rotate(x, self.cos[:, :, None], self.sin[:, :, None], interleaved=self.interleaved)


def turned(turn: Turn | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Each x (B, 1, heads, D) as it is, or turned, all in one go."""
    if turn is None:
        return xs
    return turn(torch.cat(xs, 2)).split([x.shape[2] for x in xs], 2)


def linear_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sums,
    *,
    feature_map: str,
    weight: Tensor | None,
    normalise: str,
    turn: Turn | None,
) -> Tensor:
    """Linear attention of one token after what the sums hold, which then hold it too.

    q: (B, 1, H, D), k: (B, 1, Hkv, D), v: (B, 1, Hkv, E) -> (B, 1, H, E). feature_map: one of `features.MAPS`.
    """
    kv, z, shift = sums
    if why_plain(q, k, v, *sums) is None and max(q.shape[3], v.shape[3], z.shape[2]) <= backend.LARGEST:
        return backend.step_kernels().linear(q, k, v, turn, weight, kv, z, shift, feature_map, normalise)
    q, k = turned(turn, q, k)
    given, features, dtype = q.dtype, MAPS[feature_map], kv.dtype
    weight = None if weight is None else weight.to(dtype)
    f, scale = features.key(k.to(dtype), weight)
    f = f[:, 0]  # (B, Hkv, M)
    if scale is not None:
        largest = torch.maximum(shift, scale[:, 0])
        decay = (shift - largest).exp()[..., None]
        f = f * (scale[:, 0] - largest).exp()[..., None]
        kv.mul_(decay[..., None])
        z.mul_(decay)
        shift.copy_(largest)
    kv.addcmul_(f[..., None], v[:, 0, :, None].to(dtype))
    z.add_(f)
    query = features.query(q.to(dtype), weight)[0][:, 0].unflatten(1, (kv.shape[1], -1))  # (B, Hkv, G, M)
    if normalise == "feature":
        query = query / query.sum(-1, keepdim=True) if feature_map == "favor" else query
        query = over(query, z[:, :, None])
    out = query @ kv
    if normalise == "query":
        out = divide(out, (query * z[:, :, None]).sum(-1))
    return out.to(given).flatten(1, 2)[:, None]


def add_norm(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + y of one token each (B, 1, dim), and its layer norm."""
    if why_plain(x, y) is None and x.dtype == y.dtype and x.shape[2] <= 8192 and x.stride(2) == y.stride(2) == 1:
        return backend.step_kernels().add_norm(x, y, norm.weight, norm.bias, norm.eps)
    total = x + y
    return total, norm(total)


def why_plain(*tensors: Tensor) -> str | None:
    """Why a step of these tensors (q, k, v, then the memory) runs in plain PyTorch; None where the kernels take it."""
    q = tensors[0]
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}; the kernels need CUDA"
    missing = backend.why_no_kernels()
    if missing is not None:
        return missing
    if any(x.dtype not in backend.DTYPES for x in tensors):
        return "a tensor is neither bfloat16, float16 nor float32"
    if any(not x.is_contiguous() for x in tensors[3:]):
        return "the memory is not contiguous"
    return None if q.numel() else "an empty tensor"
