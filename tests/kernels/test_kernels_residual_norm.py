"""The kernels that add, normalize and shift tokens, under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import interpreted
from residual_norm_cases import CASES, EPSILON, check, inputs
from torch._dynamo.testing import CompileCounterWithBackend

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.models.residual import ResidualBranch
from longspan.ops import residual_norm
from longspan.ops.residual_norm import _ResidualNorm, why_not_triton


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Any, dtype: torch.dtype) -> None:
    check(case, dtype, "cpu")


@interpreted
def test_programs_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_norm, "PARTS", 2)
    monkeypatch.setattr(residual_norm, "ELEMENTS", 32)
    check((3, 23, 14, True), torch.float32, "cpu")


@interpreted
def test_the_first_token_has_none_before_it() -> None:
    """Its shifted half is zero, even if it is not finite itself."""
    x = torch.ones(2, 3, 8)
    x[:, 0] = torch.nan
    normed = _ResidualNorm.traced(x, x, torch.ones(8), EPSILON, True)[1]
    assert not normed[:, 0, 4:].any()
    assert normed[:, 1, 4:].isnan().all()
    assert normed[:, 2].isfinite().all()


@interpreted
def test_a_proper_operator() -> None:
    x, y, weight, *_ = inputs(CASES[0], torch.float32, "cpu")
    leaves = [a.detach().requires_grad_() for a in (x, y, weight)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.longspan.residual_norm.default, (*leaves, EPSILON, True), test_utils=tests)


@interpreted
def test_gradients_of_gradients_are_refused() -> None:
    x, y, weight, *_ = inputs(CASES[0], torch.float32, "cpu")
    out = _ResidualNorm.traced(x.requires_grad_(), y, weight, EPSILON, True)[1]
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(grad.sum(), x)


@interpreted
@pytest.mark.parametrize("shift", [(), (0, 1), (0, 2)], ids=str)
def test_compiled_models(shift: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for a GPU: the op runs before every branch but the first, unless it does not know the shift."""
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    options: dict[str, Any] = {"norm": "rms", "token_shift": shift, "zero_init_residual": False}
    model = LanguageModel(ModelConfig(dim=12, depth=2, causal=True, vocab_size=13, attention=attention, **options))
    tokens = torch.randint(13, (2, 37))
    expected = model.loss(tokens)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    monkeypatch.setattr("longspan.models.layers.compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    monkeypatch.setattr("longspan.models.residual.compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    monkeypatch.setattr(residual_norm, "why_not_triton", lambda x, y, dim, shift: "no" if shift == (0, 2) else None)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(model.loss, fullgraph=True, backend=graphs)(tokens)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
    nodes = [str(node.target) for node in graphs.graphs[0].graph.nodes]
    assert sum("residual_norm" in name for name in nodes) == (0 if shift == (0, 2) else 3)


@interpreted
def test_hooks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    model = LanguageModel(ModelConfig(dim=12, depth=1, causal=True, vocab_size=13, norm="rms", attention=attention))
    branches = [module for module in model.modules() if isinstance(module, ResidualBranch)]
    branches[1].register_forward_hook(lambda module, given, out: out * 1.5)
    tokens = torch.randint(13, (2, 11))
    expected = model(tokens)
    monkeypatch.setattr("longspan.models.residual.compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    monkeypatch.setattr(residual_norm, "why_not_triton", lambda *_: None)
    torch._dynamo.reset()
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 4, 8)
    assert "CUDA" in str(why_not_triton(x, x, 8, ()))
    monkeypatch.setattr("longspan.ops.common.dispatch.unavailable", lambda _: None)
    assert why_not_triton(x, x, 8, (0, 1)) is None
    assert "one dtype" in str(why_not_triton(x, x.half(), 8, ()))
    assert "one dtype" in str(why_not_triton(x.double(), x.double(), 8, ()))
    assert "odd, or over 4096" in str(why_not_triton(x[..., :7], x[..., :7], 7, ()))
    assert "(0, 2)" in str(why_not_triton(x, x, 8, (0, 2)))
    assert "empty" in str(why_not_triton(x[:0], x[:0], 8, ()))
