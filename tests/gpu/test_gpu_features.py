"""Kernels of causal Linformer, of given features, of normalization by feature and of the join of a mixture on a GPU."""

from __future__ import annotations

from typing import Any

import feature_cases
import linformer_cases
import normalizer_cases
import pytest
import torch
from torch import nn

from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.ops import compressed, features, normalizer

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

LINFORMER = [
    *linformer_cases.CASES,
    linformer_cases.LinformerCase(T=1031, H=8, Hkv=8, D=64, E=64, R=256),
    linformer_cases.LinformerCase(T=2048, H=4, Hkv=2, D=128, E=128, R=256, state=True),
    linformer_cases.LinformerCase(T=9001, B=1, H=1, Hkv=1, D=64, E=64, R=128),
]
FEATURES = [
    *feature_cases.CASES,
    feature_cases.FeatureCase(T=1031, H=8, Hkv=8, M=256, E=128, delay=64),
    feature_cases.FeatureCase(T=2048, H=4, Hkv=2, M=128, E=64, state=True),
    feature_cases.FeatureCase(T=9001, B=1, H=2, Hkv=1, M=128, E=64),
]
NORMALIZER = [
    *normalizer_cases.CASES,
    normalizer_cases.NormalizerCase(T=2049, H=4, Hkv=2, M=64, state=True),
    normalizer_cases.NormalizerCase(T=1031, M=128, feature_map="relu", lengths=(1031, 700)),
]


@pytest.mark.parametrize("case", LINFORMER, ids=str)
def test_causal_linformer(case: linformer_cases.LinformerCase) -> None:
    linformer_cases.check(case, "cuda")


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_features(case: feature_cases.FeatureCase) -> None:
    feature_cases.check(case, "cuda")


@pytest.mark.parametrize("case", NORMALIZER, ids=str)
def test_normalizer(case: normalizer_cases.NormalizerCase) -> None:
    normalizer_cases.check(case, "cuda")


@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(2, 67, 3, 5, 7), (2, 1031, 8, 128, 128)], ids=str)
def test_the_join(sizes: tuple[int, ...], dtype: torch.dtype, sink: bool) -> None:
    feature_cases.check_merge(sizes, sink, dtype, "cuda")


MECHANISMS: dict[str, tuple[Any, Any]] = {
    "linformer": (lambda: LinformerAttention(4, 64, num_kv_heads=2, max_length=500, periodic=True), compressed),
    "hedgehog": (lambda: LinearAttention(4, 80, num_kv_heads=2, feature_map="hedgehog"), features),
    "per feature": (lambda: LinearAttention(4, 64, num_kv_heads=2, normalize="feature"), normalizer),
    "mixture": (lambda: MixtureAttention(4, 64, num_kv_heads=2, sink=True), features),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms_compile_and_run_on_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, with the gradients of an eager call, which are near those of float64."""
    build, op = MECHANISMS[name]
    mechanism: nn.Module = build().to("cuda")
    kernels = "_causal_kernels" if op is compressed else "_kernels"
    calls: list[int] = []
    real = getattr(op, kernels)
    monkeypatch.setattr(op, kernels, lambda: calls.append(1) or real())
    mask = torch.arange(1031, device="cuda") < torch.tensor([[1031], [700]], device="cuda")
    shapes = [(2, 1031, heads, mechanism.head_dim) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    d_out = torch.randn_like(inputs[0]).masked_fill(~mask[:, :, None, None], 0)

    def run(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = call(*leaves, causal=True, key_mask=mask).masked_fill(~mask[:, :, None, None], 0)
        grads = torch.autograd.grad(out, [*leaves, *mechanism.parameters()], d_out.to(dtype))
        return [x.detach().double() for x in (out, *grads)]

    eager = run(mechanism, torch.bfloat16)
    assert len(calls) == 2
    compiled = run(torch.compile(mechanism, fullgraph=True, backend="aot_eager"), torch.bfloat16)
    assert len(calls) == 4
    mechanism.double()
    truth = run(mechanism, torch.float64)
    assert len(calls) == 4
    for one, other, exact in zip(eager, compiled, truth, strict=True):
        assert float((one - exact).norm()) <= 0.02 * float(exact.norm())
        assert float((other - one).norm()) <= 0.01 * float(exact.norm())
