"""Cases for the kernels around gated memories, L2 norms and the activation of gates, and their comparison with eager
PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from helpers import within_tolerance
from torch import Tensor

from longspan import build_mechanism
from longspan.mechanisms.gated import GatedMechanism
from longspan.ops.gates import _ActivateGates
from longspan.ops.l2_norm import _L2Norm, l2_normalize_torch

# B, T, S, H, Hkv, D.
NORMS = [(2, 17, 19, 3, 1, 5), (1, 1, 1, 2, 2, 16), (2, 65, 65, 3, 3, 64), (1, 33, 70, 2, 1, 100), (1, 7, 7, 1, 1, 256)]
KINDS = [
    ("decay", {"gate": "head"}),
    ("decay", {"gate": "channel"}),
    ("delta", {"gate": "none"}),
    ("delta", {"gate": "head"}),
    ("delta", {"gate": "channel", "negative_eigenvalues": True}),
]
Errors = dict[str, tuple[float, float, float]]


def rows(size: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """q and k as views of one projection, or of others where their shapes differ, and the gradients of the results.

    Some rows are zeros.
    """
    B, T, S, H, Hkv, D = size
    if (S, Hkv) == (T, H):
        q, k, _ = torch.randn(B, T, 3 * H * D).to(device, dtype).unflatten(2, (3 * H, D)).split(H, 2)
    else:
        q = torch.randn(B, H, T + 2, D).to(device, dtype).transpose(1, 2)[:, 1:-1]
        k = torch.randn(B, S, Hkv, D + 3).to(device, dtype)[..., :D]
    q[:, ::7] = 0
    k[:, ::5, -1] = 0
    return [
        q,
        k,
        torch.randn(B, H, T, D).to(device, dtype).transpose(1, 2),
        torch.randn(B, S, Hkv, D).to(device, dtype),
    ]


def check_norm(size: tuple[int, ...], dtype: torch.dtype, device: str, call: str = "direct") -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""
    q, k, d_q, d_k = rows(size, dtype, device)

    def by_torch(kind: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().cpu().to(kind).requires_grad_() for x in (q, k)]
        results = [l2_normalize_torch(x).to(kind) for x in leaves]
        grads = torch.autograd.grad(results, leaves, [d_q.cpu().to(kind), d_k.cpu().to(kind)])
        return [*(x.detach() for x in results), *grads]

    leaves = [x.detach().requires_grad_() for x in (q, k)]
    results = getattr(_L2Norm, call)(*leaves)[:2]
    found = [*results, *torch.autograd.grad(results, leaves, [d_q, d_k])]
    assert all(x.dtype == dtype and x.isfinite().all() for x in found)
    assert not results[0][:, ::7].any()
    assert not results[1][:, ::5, -1].any()
    within_tolerance([_errors(["q", "k", "d_q", "d_k"], found, by_torch(dtype), by_torch(torch.float64), dtype)])


def raw_gates(mechanism: GatedMechanism, T: int, dtype: torch.dtype, device: str, scale: float = 3.0) -> list[Tensor]:
    """Gates that are not adjacent in memory, and a mask."""
    gates = (scale * torch.randn(2, T, mechanism.num_kv_heads, mechanism.num_gates + 2)).to(device, dtype)
    return [gates[..., :-2], (torch.rand(2, T) < 0.8).to(device)]


def activated(mechanism: GatedMechanism, gates: Tensor, visible: Tensor | None, call: str = "direct") -> list[Tensor]:
    """log α and β by the kernels, those that there are."""
    how = mechanism._gate_activation()
    found = getattr(_ActivateGates, call)(gates, how.A_log, how.bias, visible, how.decay, how.write, how.strength)
    return [x for x in found if x.numel()]


def check_gates(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    *,
    D: int = 5,
    masked: bool = True,
    T: int = 261,
) -> None:
    """`within_tolerance` of log α, β and the gradients of raw gates and parameters, in four draws at most."""
    mechanism = build_mechanism(name, 3, D, **options)
    assert isinstance(mechanism, GatedMechanism)
    within_tolerance(_draw(mechanism, D, masked, T, dtype, device) for _ in range(4))


def _draw(mechanism: GatedMechanism, D: int, masked: bool, T: int, dtype: torch.dtype, device: str) -> Errors:
    gates, visible = raw_gates(mechanism, T, dtype, device)
    given: list[Tensor] = []

    def results(kind: torch.dtype, where: str, kernels: bool) -> list[Tensor]:
        own = mechanism.to(where, torch.float64 if kind == torch.float64 else torch.float32)
        leaves = [gates.detach().to(where, kind).requires_grad_(), *own.parameters()]
        mask = visible.to(where) if masked else None
        if kernels:
            found = activated(own, leaves[0], mask)
        else:
            keys = torch.empty(2, T, 3, D, dtype=kind, device=where)
            found = [x for x in own._visible_gates(leaves[0], keys, mask) if x is not None]
        if not given:
            given.extend(torch.randn(x.shape) for x in found)
        grads = torch.autograd.grad(found, leaves, [d.to(x) for d, x in zip(given, found, strict=True)])
        return [x.detach().cpu() for x in (*found, *grads)]

    truth, near = results(torch.float64, "cpu", False), results(dtype, "cpu", False)
    found = results(dtype, device, True)
    assert [x.dtype for x in found] == [x.dtype for x in near]
    return _errors([f"result {i}" for i in range(len(found))], found, near, truth, dtype)


def _errors(
    names: list[str], found: list[Tensor], near: list[Tensor], truth: list[Tensor], dtype: torch.dtype
) -> Errors:
    """Largest errors of the kernels and of eager PyTorch, and an ulp of the largest value, for each result."""
    result = {}
    for name, ours, eager, exact in zip(names, found, near, truth, strict=True):
        assert ours.shape == exact.shape, name
        own, plain = ((x.detach().cpu().double() - exact).abs().max().item() for x in (ours, eager))
        kind = dtype if ours.dtype == dtype else torch.float32
        result[name] = own, plain, exact.abs().max().item() * torch.finfo(kind).eps
    return result
