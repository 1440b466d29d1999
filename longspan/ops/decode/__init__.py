"""One token written into a memory and read from it at once, the memory changed where it lies; without gradients.

Lengths are the caller's to raise: a model's layers share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.ops.common import dispatch
from longspan.ops.linear import Sums
from longspan.ops.linear.feature_maps import MAPS
from longspan.ops.linear.torch_chunk import is_nothing, over
from longspan.ops.rotary import rotate
from longspan.ops.softmax import attend

# Activations that a kernel knows how to apply.
FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class CosSin(NamedTuple):
    """Rotary positions that queries and keys still have to take: cos and sin (B or 1, 1, D / 2).

    wide: [cos, cos] and [−sin, sin] (B or 1, 1, 1, D), with which a rotation by halves is three operations.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    wide: tuple[Tensor, Tensor] | None = None

    def paired(self, interleaved: bool) -> CosSin:
        """The same angles for pairs that are neighbors, or halves."""
        return self if interleaved == self.interleaved else self._replace(interleaved=interleaved)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (B, 1, H, D) turned."""
        if self.wide is None or self.interleaved or x.dtype != self.cos.dtype:
            return rotate(x, self.cos[:, :, None], self.sin[:, :, None], interleaved=self.interleaved)
        return torch.addcmul(x * self.wide[0], x.roll(x.shape[3] // 2, 3), self.wide[1])


class Late(NamedTuple):
    """Slots of tokens that sums do not hold yet, and how many tokens came before (B,); see `kernels.step_linear`."""

    length: Tensor
    f: Tensor
    v: Tensor
    scale: Tensor


def apply_rotary(turn: CosSin | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Each x (B, 1, heads, D) as it is, or turned, all in one go."""
    if turn is None:
        return xs
    return turn(torch.cat(xs, 2)).split_with_sizes([x.shape[2] for x in xs], 2)


def linear_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sums,
    *,
    feature_map: str,
    weight: Tensor | None,
    normalize: str,
    turn: CosSin | None,
    late: Late | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear attention of one token after what the sums and slots hold, which then hold it too.

    q: (B, 1, H, D), k: (B, 1, Hkv, D), v: (B, 1, Hkv, E) -> (B, 1, H, E), in `out` if given. feature_map: one of
    `features.MAPS`.
    """
    kv, z, shift = sums
    if late is not None:
        return dispatch.step_kernels().linear(q, k, v, turn, weight, kv, z, shift, feature_map, normalize, late, out)
    q, k = apply_rotary(turn, q, k)
    given, dtype = q.dtype, kv.dtype
    if given != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    weight = None if weight is None else weight.to(dtype)
    # On a CPU the calls are most of what a small step costs, views among them.
    query, f, largest = _features(q.squeeze(1), k.squeeze(1), shift, feature_map, weight)
    # After many keys the largest is seldom a new one; a GPU would be waited for to know.
    if largest is not None and (kv.is_cuda or not torch.equal(largest, shift)):
        decay = (shift - largest).exp_().unsqueeze(-1)
        kv.mul_(decay.unsqueeze(-1))
        z.mul_(decay)
        shift.copy_(largest)
    B, Hkv, M, E = kv.shape
    f, column = f.view(B, Hkv, M, 1), z.unsqueeze(-1)
    kv.addcmul_(f, v.view(B, Hkv, 1, E))
    column.add_(f)
    query = query.view(B, Hkv, -1, M)  # (B, Hkv, G, M)
    if normalize == "feature":
        query = query / query.sum(-1, keepdim=True) if feature_map == "favor" else query
        query = over(query, z.unsqueeze(2))
    found = query @ kv
    if normalize == "query":
        den = query @ column
        found.div_(den).masked_fill_(is_nothing(den), 0)
    found = found.view(B, 1, -1, E)
    return placed(found if found.dtype == given else found.to(given), out)


def _features(
    q: Tensor, k: Tensor, shift: Tensor, feature_map: str, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ(q) (B, H, M), φ(k) / exp(largest) (B, Hkv, M), and largest (B, Hkv), the log scale of sums that hold this key.

    q: (B, H, D), k: (B, Hkv, D). shift: (B, Hkv), the log scale so far. largest: None for maps that keep to 0.
    """
    if weight is None:
        (query, _), (f, scale) = MAPS[feature_map].query(q, None), MAPS[feature_map].key(k, None)
        if scale is None:
            return query, f, None
        largest = torch.maximum(shift, scale)
        return query, f * (scale - largest).exp_().unsqueeze(-1), largest
    # Queries and keys at once: half the calls. A query's own largest is divided out, of keys the largest so far.
    heads = q.shape[1], k.shape[1]
    x = torch.cat([q, k], 1).mul_(q.shape[2] ** -0.25)
    projected, square = F.linear(x, weight), (x * x).sum(-1)
    top = projected.amax(-1)  # (B, H + Hkv)
    (_, size), (_, square) = top.split_with_sizes(heads, 1), square.split_with_sizes(heads, 1)
    largest = torch.maximum(shift, size.sub_(square, alpha=0.5))
    torch.add(largest, square, alpha=0.5, out=size)
    query, f = projected.sub_(top.unsqueeze(-1)).exp_().split_with_sizes(heads, 1)
    return query, f, largest


def compressed_decode_step(
    q: Tensor, k: Tensor, v: Tensor, rows_k: Tensor, rows_v: Tensor, e: Tensor, f: Tensor, periods: int
) -> Tensor:
    """Attention of one token of one sequence over compressed rows (1, Hkv, R, ·), which then hold it too.

    e, f: (1 or Hkv, R), what compresses it. periods: by how many the rows, sums, are divided to be means.
    """
    for rows, weights, x in ((rows_k, e, k), (rows_v, f, v)):
        rows.addcmul_(weights.unsqueeze(2), x.transpose(1, 2))
    scale, grouped = q.shape[3] ** -0.5 / periods, q.shape[2] > k.shape[2]
    out = attend(q.transpose(1, 2), rows_k, rows_v, None, grouped=grouped, scale=scale).transpose(1, 2)
    return out if periods == 1 else out / periods


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
    known = None if why_not_triton(x) is not None else _known(x, maps, norm, add)
    if known is not None:
        out = dispatch.step_kernels().project(x, known.weights, known.norm, activation, add)
        return out.split([len(weight) for weight, _ in known.weights], 2)
    x = x if norm is None else _normed(x, norm)
    results = []
    for f in maps:
        if isinstance(f, Tensor):
            y = F.linear(x, f)
        else:
            # Around a small product a module's own call is worth a quarter of it.
            y = F.linear(x, *_own(f)) if type(f) is nn.Linear and _bare(f) else f(x)
        y = y if activation == "identity" else FUSED[activation](y)
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


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    if type(norm) is nn.LayerNorm and _bare(norm):
        return torch.layer_norm(x, norm.normalized_shape, *_own(norm), norm.eps)
    return norm(x)


def _own(module: nn.Module) -> tuple[Any, Any]:
    """Weight and bias, as attributes found three times as slowly; for a module from which none was taken away."""
    own = module._parameters
    return (own["weight"], own["bias"]) if len(own) == 2 else (module.weight, module.bias)


def _bare(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)


def cos_sin_at(length: Tensor, kind: tuple[int, float], dtype: torch.dtype) -> CosSin:
    """Rotary positions of a kind, (D, base), at `length` (B,), by halves."""
    if not length.is_cuda or dtype != torch.float32 or dispatch.why_no_triton() is not None:
        angle = (length[:, None, None] * _frequencies(*kind, length.device)).remainder_(2 * math.pi).to(dtype)
        cos, sin = angle.cos(), angle.sin()
        return CosSin(cos, sin, False, (torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]))
    cos, sin = dispatch.step_kernels().turns(length, _frequencies(*kind, length.device))
    return CosSin(cos, sin, False)


class RotaryCache(dict[tuple[int, float], CosSin]):
    """`cos_sin_at` of each kind that is asked for, made once for all layers."""

    def __init__(self, length: Tensor, dtype: torch.dtype) -> None:
        self._length, self._dtype = length, dtype

    def __missing__(self, kind: tuple[int, float]) -> CosSin:
        self[kind] = cos_sin_at(self._length, kind, self._dtype)
        return self[kind]


@cache
def _frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """base^(−2i/dim) in float64, made once: a step asks for nothing else of it."""
    with torch.inference_mode(False):  # It outlives the loop that asks first.
        return base ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)


def why_not_triton(*tensors: Tensor) -> str | None:
    """Why a step of these tensors (q, k, v, then the memory) runs in plain PyTorch; None where the kernels take it."""
    q = tensors[0]
    if not q.is_cuda:
        return "the tensors are on no GPU; the kernels need CUDA"  # no device in it: asked for every product of a step
    missing = dispatch.why_no_triton()
    if missing is not None:
        return missing
    if any(x.dtype not in dispatch.DTYPES for x in tensors):
        return "a tensor is neither bfloat16, float16 nor float32"
    if any(not x.is_contiguous() for x in tensors[3:]):
        return "the memory is not contiguous"
    return None if q.numel() else "an empty tensor"
