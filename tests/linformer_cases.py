"""Cases for the Triton kernels of causal Linformer, and their comparison with the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from helpers import within_tolerance
from torch import Tensor

from longspan.ops.compressed import CausalInputs, causal_linformer


class LinformerCase(NamedTuple):
    """Sizes; heads and batches of the tables; whether there is a state before, and gradients of the one after."""

    T: int = 131
    B: int = 2
    H: int = 2
    Hkv: int = 2
    D: int = 16
    E: int = 16
    R: int = 70
    tables: tuple[int, int] = (1, 1)
    state: bool = False
    magnitude: float = 1.0

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in self._asdict().items()).replace(" ", "")


CASES = [
    LinformerCase(),
    LinformerCase(T=64, B=1, H=1, Hkv=1, R=64),
    LinformerCase(T=1, H=4, Hkv=2, E=24, R=3, state=True),
    LinformerCase(T=65, H=4, Hkv=2, D=5, E=7, R=40, tables=(2, 1), state=True),
    LinformerCase(T=130, H=4, Hkv=2, tables=(1, 2), state=True),
    LinformerCase(T=579, B=1, H=2, Hkv=1, R=64, state=True),
    LinformerCase(T=70, B=1, H=1, Hkv=1, D=80, E=128, R=200),
    LinformerCase(T=99, B=1, H=1, Hkv=1, magnitude=30.0),
]


def arguments(case: LinformerCase, device: str) -> tuple[list[Tensor], CausalInputs]:
    """Return the gradients of the results, and the inputs, whose tokens are not adjacent in memory."""
    B, T, H, Hkv, D, E, R = case.B, case.T, case.H, case.Hkv, case.D, case.E, case.R
    rows, heads = case.tables

    def half(heads: int, dim: int) -> Tensor:
        x = case.magnitude * torch.randn(B, heads, T + 2, dim)
        return x.transpose(1, 2)[:, 1:-1].bfloat16().to(device)

    # In bfloat16 the tables are exact: what is compared is the rounding of the operation.
    e, f = ((torch.randn(rows, T, heads, R) * T**-0.5).bfloat16().float().to(device) for _ in range(2))
    starts = [torch.randn(B, Hkv, R, dim, device=device) if case.state else None for dim in (D, E)]
    d_ends = [torch.randn(B, Hkv, R, dim, device=device) for dim in (D, E)] if case.state else []
    return [half(H, E), *d_ends], CausalInputs(half(H, D), half(Hkv, D), half(Hkv, E), e, f, *starts)


def by_products(x: CausalInputs, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return leaves and results of the equations by matrix products in this dtype; states stay float32 at least."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [y.to(dtype if i < 5 else wide).detach().requires_grad_() for i, y in enumerate(x) if y is not None]
    q, k, v, e, f, *starts = leaves
    group = q.shape[2] // k.shape[2]
    e, f = (y.expand(*k.shape[:3], -1) for y in (e, f))
    ends = [torch.einsum("bthr,bthd->bhrd", a.to(wide), b.to(wide)) for a, b in ((e, k), (f, v))]
    ends = [end + start for end, start in zip(ends, starts, strict=True)] if starts else ends
    K, V, E, F = (y.repeat_interleave(group, 2).transpose(1, 2) for y in (k, v, e, f))
    Q = q.transpose(1, 2)
    read = [y.repeat_interleave(group, 1).to(dtype) for y in starts]
    scores = (Q @ K.mT).tril() @ E + (Q @ read[0].mT if read else 0)
    p = (scores * q.shape[3] ** -0.5).softmax(-1)
    out = (p @ F.mT).tril() @ V + (p @ read[1] if read else 0)
    return leaves, [out.transpose(1, 2), *ends]


def results(case: LinformerCase, given: tuple[list[Tensor], CausalInputs], dtype: torch.dtype | None) -> list[Tensor]:
    """Return the results and gradients of the equations in this dtype, or of the kernels."""
    d, x = given
    if dtype is None:
        leaves = [y.detach().requires_grad_() for y in x if y is not None]
        found = list(causal_linformer(*leaves))
    else:
        leaves, found = by_products(x, dtype)
    wanted = found if case.state else found[:1]
    grads = torch.autograd.grad(wanted, leaves, [y.to(z.dtype) for y, z in zip(d, wanted, strict=True)])
    return [y.detach() for y in (*found, *grads)]


def check(case: LinformerCase, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in bfloat16, plus an ulp of the largest value."""
    names = "out", "k", "v", "d_q", "d_k", "d_v", "d_e", "d_f", "d_start_k", "d_start_v"

    def errors() -> dict[str, tuple[float, float, float]]:
        given = arguments(case, device)
        ours, eager, truth = (results(case, given, dtype) for dtype in (None, torch.bfloat16, torch.float64))
        found = {}
        for name, own, near, exact in zip(names, ours, eager, truth, strict=False):
            assert own.shape == exact.shape
            assert own.isfinite().all()
            error, allowed = (float((y.double() - exact).abs().max()) for y in (own, near))
            found[name] = error, allowed, torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
        return found

    within_tolerance(errors() for _ in range(3))
