"""Cases for the Triton kernels of normalization by feature, and their comparison with the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from helpers import within_tolerance
from torch import Tensor
from torch.nn import functional as F

from longspan.ops.normalizer import normalized_features


class NormalizerCase(NamedTuple):
    """Sizes, map, lengths of the rows, and whether there is a state before."""

    T: int = 131
    B: int = 2
    H: int = 2
    Hkv: int = 2
    M: int = 16
    feature_map: str = "elu"
    lengths: tuple[int, ...] | None = None
    state: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in self._asdict().items()).replace(" ", "")


CASES = [
    NormalizerCase(),
    NormalizerCase(T=1, state=True),
    NormalizerCase(T=65, H=4, Hkv=2, M=70, feature_map="relu", lengths=(65, 33), state=True),
    NormalizerCase(T=64, H=3, Hkv=1, M=200, feature_map="identity", state=True),
    NormalizerCase(T=193, B=1, M=5, lengths=(150,)),
]


def arguments(case: NormalizerCase, device: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of the results, and q, k, z, whose tokens are not adjacent in memory."""

    def half(heads: int) -> Tensor:
        x = torch.randn(case.B, heads, case.T + 2, case.M).transpose(1, 2)[:, 1:-1].bfloat16()
        return (x.abs() if case.feature_map == "identity" else x).to(device)

    z = torch.rand(case.B, case.Hkv, case.M, device=device) if case.state else None
    d_z = torch.randn(case.B, case.Hkv, case.M, device=device)
    return [half(case.H), half(case.Hkv), d_z], [half(case.H), half(case.Hkv), z]


def by_torch(case: NormalizerCase, leaves: list[Tensor]) -> list[Tensor]:
    """The definition in the dtype of the leaves, sums in float32 at least."""
    q, k, *z = leaves
    wide = torch.promote_types(q.dtype, torch.float32)
    maps = {"elu": lambda x: F.elu(x) + 1, "relu": lambda x: F.relu(x) + 1e-3, "identity": lambda x: x}
    phi = maps[case.feature_map]
    f = phi(k)
    if case.lengths is not None:
        hidden = torch.arange(case.T, device=k.device) >= torch.tensor(case.lengths, device=k.device)[:, None]
        f = f.masked_fill(hidden[:, :, None, None], 0)
    sums = f.to(wide).cumsum(1) + (z[0][:, None] if z else 0)
    return [phi(q) / sums.repeat_interleave(case.H // case.Hkv, 2).to(q.dtype), f, sums[:, -1]]


def check(case: NormalizerCase, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in bfloat16, plus an ulp of the largest value."""

    def results(given: tuple[list[Tensor], list[Tensor | None]], dtype: torch.dtype | None) -> list[Tensor]:
        d, x = given
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        kinds = (dtype or torch.bfloat16, dtype or torch.bfloat16, wide)
        leaves = [y.to(kind).detach().requires_grad_() for y, kind in zip(x, kinds, strict=True) if y is not None]
        lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
        if dtype is None:
            found = list(normalized_features(*leaves, feature_map=case.feature_map, lengths=lengths))
        else:
            found = by_torch(case, leaves)
        grads = torch.autograd.grad(found, leaves, [y.to(z.dtype) for y, z in zip(d, found, strict=True)])
        return [y.detach() for y in (*found, *grads)]

    def errors() -> dict[str, tuple[float, float, float]]:
        given = arguments(case, device)
        ours, eager, truth = (results(given, dtype) for dtype in (None, torch.bfloat16, torch.float64))
        found = {}
        for name, own, near, exact in zip(("query", "f", "z", "d_q", "d_k", "d_z"), ours, eager, truth, strict=False):
            assert own.isfinite().all()
            error, allowed = (float((y.double() - exact).abs().max()) for y in (own, near))
            found[name] = error, allowed, torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
        return found

    within_tolerance(errors() for _ in range(3))
