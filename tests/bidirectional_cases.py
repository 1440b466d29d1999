"""Cases for the Triton kernels of bidirectional linear attention, and their comparison with eager PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from helpers import case_id, random_heads
from torch import Tensor

from longspan.layout import Packing
from longspan.mechanisms.feature_maps import Favor
from longspan.mechanisms.linear import LinearAttention
from longspan.ops.linear import (
    BidirectionalInputs,
    BidirectionalProblem,
    BidirectionalSaved,
    _kernels,
    bidirectional_algorithm,
)

NAMES = ["out", "d_q", "d_k", "d_v"]


@dataclass(frozen=True)
class Case:
    """Sizes are distinct primes where nothing else matters.

    mask: keys at random, none at all in the first row; hidden slots hold NaN. packed: lengths of queries and of keys.
    weight, exact: the projection's dtype, and whether it is of numbers that bfloat16 holds.
    """

    B: int = 2
    T: int = 17
    S: int = 37
    H: int = 3
    Hkv: int = 3
    D: int = 5
    E: int = 7
    feature_map: str = "softmax"
    normalize: str = "query"
    num_features: int | None = None
    mask: bool = False
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    size: float = 1.0
    strided: bool = False
    weight: torch.dtype = torch.float32
    exact: bool = False
    epsilon: float = 0.0
    algorithm: str | None = None

    __str__ = case_id


@dataclass(frozen=True)
class Given:
    d_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None
    key_mask: Tensor | None
    packing: Packing | None
    key_packing: Packing | None


def arguments(case: Case, dtype: torch.dtype, device: str) -> Given:
    B, T, S = case.B, case.T, case.S
    packings: list[Packing | None] = [None, None]
    if case.packed is not None:
        packings = [Packing.from_lengths(lengths, device) for lengths in case.packed]
        B, T, S = 1, sum(case.packed[0]), sum(case.packed[1])

    def inputs(tokens: int, heads: int, dim: int) -> Tensor:
        return random_heads((B, tokens, heads, dim), case.strided, dtype, device)

    q, k = inputs(T, case.H, case.D) * case.size, inputs(S, case.Hkv, case.D) * case.size
    v, d_out = inputs(S, case.Hkv, case.E), inputs(T, case.H, case.E)
    if case.feature_map == "identity" and case.normalize != "none":
        q, k = q.abs(), k.abs()  # Features of either sign have normalizers near 0, and nothing near them is exact.
    weight = None
    if case.num_features:
        weight = torch.randn(case.num_features, case.D)
        weight = (weight.bfloat16() if case.exact else weight).to(device, case.weight)
    key_mask = None
    if case.mask:
        key_mask = torch.rand(B, S) < 0.7
        key_mask[0] = False
        key_mask = key_mask.to(device)
        k, v = (x.masked_fill(~key_mask[:, :, None, None], float("nan")) for x in (k, v))
    return Given(d_out, q, k, v, weight, key_mask, *packings)


def mechanism(case: Case, given: Given) -> LinearAttention:
    feature_map: str | Favor = case.feature_map
    if given.weight is not None:
        feature_map = Favor(case.D, len(given.weight), row_norms="sampled", epsilon=case.epsilon)
        feature_map.projection = given.weight.cpu()
    return LinearAttention(
        case.H, case.D, num_kv_heads=case.Hkv, value_dim=case.E, feature_map=feature_map, normalize=case.normalize
    )


def by_torch(case: Case, given: Given, dtype: torch.dtype) -> list[Tensor]:
    """out and gradients of eager PyTorch, on the CPU, with inputs in this dtype."""

    def there(packing: Packing | None) -> Packing | None:
        return None if packing is None else Packing(packing.offsets.cpu(), packing.max_length)

    x = [t.cpu().to(dtype).requires_grad_() for t in (given.q, given.k, given.v)]
    out = mechanism(case, given)(
        *x,
        key_mask=None if given.key_mask is None else given.key_mask.cpu(),
        packing=there(given.packing),
        key_packing=there(given.key_packing),
    )
    return [out, *torch.autograd.grad(out, x, given.d_out.cpu().to(dtype))]


def by_kernels(case: Case, given: Given) -> list[Tensor]:
    offsets = [None if packing is None else packing.offsets for packing in (given.packing, given.key_packing)]
    x = BidirectionalInputs(given.q, given.k, given.v, given.weight, given.key_mask, *offsets)
    algorithm = case.algorithm or bidirectional_algorithm(x.q, x.weight, case.feature_map, case.epsilon)
    problem = BidirectionalProblem(case.feature_map, case.normalize, algorithm, case.epsilon)
    kernels = _kernels(problem.algorithm)
    out, saved = kernels.forward(x, problem)
    return [out, *kernels.backward(BidirectionalSaved(given.d_out, out, saved), x, problem)]


def check(case: Case, given: Given, dtype: torch.dtype) -> None:
    """No further from the float64 truth than twice eager PyTorch in the same dtype, plus an ulp of the largest."""
    truth = by_torch(case, given, torch.float64)
    eager = by_torch(case, given, dtype)
    found = by_kernels(case, given)
    for name, exact, near, ours in zip(NAMES, truth, eager, found, strict=True):
        assert ours.shape == exact.shape, name
        assert ours.dtype == near.dtype, name
        near, ours = near.double(), ours.cpu().double()
        allowed = 2 * (near - exact).abs().max().item() + exact.abs().max().item() * torch.finfo(dtype).eps
        error = (ours - exact).abs().max().item()
        assert error <= allowed, f"{name}: {error:.3g} from the truth, {allowed:.3g} allowed"
