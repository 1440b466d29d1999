"""One token written into a memory and read from it at once, the memory changed where it lies; without gradients.

Lengths are the caller's to raise: a model's layers share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.ops import backend
from longspan.ops.chunks import over
from longspan.ops.features import MAPS
from longspan.ops.linear import Sums, divide
from longspan.ops.rotary import rotate, turns

# Activations that a kernel knows how to apply.
FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class Turn(NamedTuple):
    """Rotary positions that queries and keys still have to take: cos and sin (B or 1, 1, D / 2)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x: (B, 1, H, D) turned."""
        return rotate(x, self.cos[:, :, None], self.sin[:, :, None], interleaved=self.interleaved)


class Late(NamedTuple):
    """Slots of tokens that sums do not hold yet, and how many tokens came before (B,); see `kernels.late_blocks`."""

    length: Tensor
    f: Tensor
    v: Tensor
    scale: Tensor


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
    late: Late | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear attention of one token after what the sums and slots hold, which then hold it too.

    q: (B, 1, H, D), k: (B, 1, Hkv, D), v: (B, 1, Hkv, E) -> (B, 1, H, E), in `out` if given. feature_map: one of
    `features.MAPS`.
    """
    kv, z, shift = sums
    if why_plain(q, k, v, *sums) is None and max(q.shape[3], v.shape[3], z.shape[2]) <= backend.LARGEST:
        return backend.step_kernels().linear(q, k, v, turn, weight, kv, z, shift, feature_map, normalise, late, out)
    assert late is None
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
    found = query @ kv
    if normalise == "query":
        found = divide(found, (query * z[:, :, None]).sum(-1))
    return placed(found.to(given).flatten(1, 2)[:, None], out)


def placed(found: Tensor, out: Tensor | None) -> Tensor:
    """What was found, where the caller wants it."""
    return found if out is None else out.copy_(found)


def project(
    x: Tensor,
    *maps: nn.Module | Tensor,
    norm: nn.Module | None = None,
    activation: str = "identity",
    add: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """add + activation(f(norm(x))) of one token x (B, 1, dim) for each of one or two maps f, all of it one kernel.

    A map is a module, or the weight (N, dim) of one without a bias. activation: one of FUSED.
    """
    known = None if why_plain(x) is not None else _known(x, maps, norm, add)
    if known is not None:
        out = backend.step_kernels().project(x, known.weights, known.norm, activation, add)
        return out.split([len(weight) for weight, _ in known.weights], 2)
    x = x if norm is None else norm(x)
    results = []
    for f in maps:
        y = FUSED[activation](F.linear(x, f) if isinstance(f, Tensor) else f(x))
        results.append(y if add is None else add + y)
    return tuple(results)


class _Known(NamedTuple):
    """Weights and biases of maps, and a norm's kind (0 none, 1 layer, 2 rms), gain, shift and epsilon."""

    weights: list[tuple[Tensor, Tensor | None]]
    norm: tuple[int, Tensor | None, Tensor | None, float]


def _known(x: Tensor, maps: Sequence[nn.Module | Tensor], norm: nn.Module | None, add: Tensor | None) -> _Known | None:
    """What a kernel needs to take the place of these modules; None where it cannot."""
    normed: tuple[int, Tensor | None, Tensor | None, float] = (0, None, None, 0.0)
    if norm is not None:
        # What was put in the place of a module, or hangs on it, is called.
        if type(norm) is nn.LayerNorm:
            normed = 1, norm.weight, norm.bias, norm.eps
        elif type(norm) is nn.RMSNorm:
            normed = 2, norm.weight, None, torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        if normed[0] == 0 or norm.normalized_shape != (x.shape[2],) or not _bare(norm):
            return None
    weights: list[tuple[Tensor, Tensor | None]] = []
    for f in maps:
        if isinstance(f, Tensor):
            weights.append((f, None))
        elif type(f) is nn.Linear and _bare(f):
            weights.append((f.weight, f.bias))
        else:
            return None
    given = [x, add, *normed[1:3], *(tensor for pair in weights for tensor in pair)]
    alike = all(t is None or (t.dtype == x.dtype and t.stride(-1) == 1) for t in given)
    whole = all(weight.is_contiguous() for weight, _ in weights)
    return _Known(weights, normed) if alike and whole and x.shape[2] <= 8192 else None


def _bare(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)


def turns_at(length: Tensor, kind: tuple[int, float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (B, 1, D / 2) of rotary positions of a kind, (D, base), at `length` (B,)."""
    if why_plain(length.to(dtype)) is not None or dtype != torch.float32:
        return turns(length[:, None], *kind, dtype)
    return backend.step_kernels().turns(length, _frequencies(*kind, length.device))


@cache
def _frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """base^(−2i/dim) in float64, made once: a step asks for nothing else of it."""
    return base ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)


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
