"""The kernels around gated memories, L2 norms and the activation of gates, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate_cases import KINDS, NORMS, check_gates, check_norm

from longspan import build_mechanism
from longspan.mechanisms import gated
from longspan.ops import l2_norm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
kinds = pytest.mark.parametrize(("name", "options"), KINDS, ids=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*NORMS, (2, 1031, 1031, 8, 2, 128)], ids=str)
def test_norm(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norm(size, dtype, "cuda")


def test_traced_norm() -> None:
    check_norm(NORMS[0], torch.bfloat16, "cuda", "traced")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_gates(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for D, masked in ((5, True), (64, False), (128, True), (256, False)):
        check_gates(name, options, dtype, "cuda", D=D, masked=masked, T=1031)


def called(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    causal: bool,
    dtype: torch.dtype,
    compiled: bool,
) -> None:
    """Assert that results and gradients of a mechanism with a mask are no further from those of float64 than twice what
    they are with eager norms and gates, plus an ulp.
    """
    torch.manual_seed(0)
    mechanism = build_mechanism(name, 2, 64, **options)
    gates = torch.randn(2, 261, 2, mechanism.num_gates).to(dtype)
    q, k, v, d_out = torch.randn(2, 261, 8, 64).to(dtype).split(2, 2)
    mask = torch.arange(261) < torch.tensor([[261], [130]])
    results = []
    for device, kind, kernels in (("cpu", torch.float64, False), ("cuda", dtype, False), ("cuda", dtype, True)):
        own = mechanism.to(device, torch.float64 if kind == torch.float64 else torch.float32)
        leaves = [*(x.to(device, kind).requires_grad_() for x in (q, k, v, gates)), *own.parameters()]
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(l2_norm, "why_not_triton", lambda *_: "switched off")
                patch.setattr(gated, "why_not_activated", lambda *_: "switched off")
            call = torch.compile(own, fullgraph=True) if compiled and kernels else own
            out = call(*leaves[:3], gates=leaves[3], causal=causal, key_mask=mask.to(device))
            results.append([out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out))])
    for i, (exact, eager, ours) in enumerate(zip(*results, strict=True)):
        allowed = 2 * (eager.cpu().double() - exact).abs().max() + exact.abs().max() * torch.finfo(dtype).eps
        assert (ours.cpu().double() - exact).abs().max() <= allowed, i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@kinds
def test_mechanisms(
    name: str, options: dict[str, Any], causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    called(monkeypatch, name, options, causal, dtype, False)


@kinds
def test_compiled_mechanisms(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called(monkeypatch, name, options, True, torch.bfloat16, True)
