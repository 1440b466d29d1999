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
    growth: float = 0.0  # of the keys from the first to the last token

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in self._asdict().items()).replace(" ", "")


CASES = [
    NormalizerCase(),
    NormalizerCase(T=1, state=True),
    NormalizerCase(T=65, H=4, Hkv=2, M=70, feature_map="relu", lengths=(65, 33), state=True),
    NormalizerCase(T=64, H=3, Hkv=1, M=200, feature_map="identity", state=True),
    NormalizerCase(T=193, B=1, M=5, lengths=(150,)),
    NormalizerCase(T=193, feature_map="softmax"),
    NormalizerCase(T=65, H=4, Hkv=2, M=70, feature_map="softmax", lengths=(65, 33), state=True),
    NormalizerCase(T=64 * 18 + 1, B=1, H=1, Hkv=1, M=5, feature_map="softmax", state=True, growth=60.0),
]


def arguments(case: NormalizerCase, device: str) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Return the gradients of the results, q, k and z, whose tokens are not adjacent in memory, and the shift of z."""

    def half(heads: int) -> Tensor:
        x = torch.randn(case.B, heads, case.T + 2, case.M).transpose(1, 2)[:, 1:-1].bfloat16()
        return (x.abs() if case.feature_map == "identity" else x).to(device)

    growth = torch.linspace(0, case.growth, case.T, device=device)[:, None, None]
    q, k = half(case.H), (half(case.Hkv) + growth).bfloat16()
    z = [torch.rand(case.B, case.Hkv, case.M, device=device)] * case.state
    scaled = case.state and case.feature_map == "softmax"
    d_z = torch.randn(case.B, case.Hkv, case.M, device=device)
    shift = torch.randn(case.B, case.Hkv, device=device) if scaled else None
    return [half(case.H), half(case.Hkv), d_z], [q, k, *z], shift


def by_torch(case: NormalizerCase, leaves: list[Tensor], shift: Tensor | None) -> list[Tensor]:
    """The definition in the dtype of the leaves, sums in float32 at least."""
    q, k, *z = leaves
    wide = torch.promote_types(q.dtype, torch.float32)
    maps = {"elu": lambda x: F.elu(x) + 1, "relu": lambda x: F.relu(x) + 1e-3, "identity": lambda x: x}
    hidden = torch.zeros(case.B, case.T, 1, 1, dtype=torch.bool, device=k.device)
    if case.lengths is not None:
        ends = torch.tensor(case.lengths, device=k.device)[:, None]
        hidden = (torch.arange(case.T, device=k.device) >= ends)[:, :, None, None]
    if case.feature_map == "softmax":
        # β and the largest so far are constants: results do not depend on them but by their scale.
        beta = k.detach().amax(-1, keepdim=True)
        first = torch.full_like(beta[:, :1], -1e30, dtype=wide)
        first = first if shift is None else shift.to(wide)[:, None, :, None]
        so_far = torch.cat([first, beta.to(wide).masked_fill(hidden, -1e30)], 1).cummax(1).values
        query, f = q.softmax(-1), (k - beta).exp().masked_fill(hidden, 0)
        sums = k.to(wide).masked_fill(hidden, -1e30).exp().cumsum(1)
        sums = (sums + (z[0][:, None] * first.exp() if z else 0)) * (-so_far[:, 1:]).exp()
    else:
        phi = maps[case.feature_map]
        query, f = phi(q), phi(k).masked_fill(hidden, 0)
        sums = f.to(wide).cumsum(1) + (z[0][:, None] if z else 0)
    return [query / sums.repeat_interleave(case.H // case.Hkv, 2).to(q.dtype), f, sums[:, -1]]


def check(case: NormalizerCase, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in bfloat16, plus an ulp of the largest value."""

    def results(given: tuple[list[Tensor], list[Tensor], Tensor | None], dtype: torch.dtype | None) -> list[Tensor]:
        d, x, shift = given
        leaves = [(y.double() if dtype == torch.float64 else y).detach().requires_grad_() for y in x]
        lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
        if dtype is None:
            before = {"z": leaves[2], "shift": shift} if case.state else {}
            options = {"feature_map": case.feature_map, "lengths": lengths, **before}
            *found, beta = normalized_features(*leaves[:2], **options)
            assert (beta is None) == (case.feature_map != "softmax")
        else:
            found = by_torch(case, leaves, shift)
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
