"""The kernels that norm, rotate and divide heads, under Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heads_cases import CASES, EPSILON, check, inputs
from interpreter import interpreted
from torch._dynamo.testing import CompileCounterWithBackend

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.models.layers import Attention
from longspan.ops import heads
from longspan.ops.common import dispatch
from longspan.ops.heads import _DivideHeads, divide_heads, divide_heads_torch, why_not_triton


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Any, dtype: torch.dtype) -> None:
    check(case, dtype, "cpu")


@interpreted
def test_programs_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "PARTS", 2)
    check((3, 61, (1, 2), 8, (True, False)), torch.float32, "cpu")


@interpreted
def test_a_proper_operator() -> None:
    (x, *weights), turns = inputs(CASES[0], torch.float32, "cpu")
    assert turns is not None
    leaves = [a.detach().requires_grad_() for a in (x, *weights[:2])]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = *leaves, *turns, 5, 2, True, False, EPSILON
    torch.library.opcheck(torch.ops.longspan.divide_heads.default, arguments, test_utils=tests)


@interpreted
def test_gradients_of_gradients_are_refused() -> None:
    (x, weight_q, weight_k, *_), _ = inputs(CASES[4], torch.float32, "cpu")
    out = _DivideHeads.traced(x.requires_grad_(), weight_q, weight_k, None, None, 3, 1, False, False, EPSILON)[0]
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(grad.sum(), x)


def test_zeros_stay_zeros() -> None:
    """Also in the gradient: r = 1 / √ε there, and g·x = 0."""
    x, weight = torch.zeros(1, 3, 12, requires_grad=True), torch.ones(4)
    parts = divide_heads_torch(x, (weight, weight), (1,), (False,), None, 1e-12)
    assert all(not a.any() for a in parts[0])
    assert torch.autograd.grad(parts[0][0].sum(), x)[0].isfinite().all()


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, angles = torch.zeros(1, 4, 48), (torch.ones(8), torch.ones(8)), (torch.ones(4, 4), torch.ones(4, 4))

    def why(given: torch.Tensor = x, sizes: Any = (2,), turns: Any = angles, scales: Any = weights) -> str | None:
        return why_not_triton(given, scales, sizes, (True,) * len(sizes), turns)

    assert "CUDA" in str(why())
    assert divide_heads(x, weights, (2,), (True,), angles, 1e-6) is None
    monkeypatch.setattr("longspan.ops.common.dispatch.unavailable", lambda _: None)
    assert why() is None
    assert why(sizes=(1, 1)) is None
    assert "float64" in str(why(x.double()))
    assert "3 parts" in str(why(sizes=(1, 1, 1)))
    assert "odd, or over 256" in str(why(scales=(torch.ones(7), torch.ones(7))))
    assert "different numbers" in str(why(x[..., :40]))
    assert "positions of their own" in str(why(turns=None))
    assert "positions of their own" in str(why(turns=(torch.ones(4, 2), torch.ones(4, 2))))
    assert "empty" in str(why(x[:0]))


LAYERS: list[dict[str, Any]] = [
    {"mechanism": "split", "parts": ("local", "linear"), "rotary": ["halves", "none"], "out_gate": "silu"},
    {"mechanism": "split", "parts": ("delta", "local"), "rotary": ["none", "halves"]},
    {"mechanism": "linear", "rotary": "none"},
    {"mechanism": "softmax", "rotary": "halves", "out_norm": True, "out_gate": "sigmoid"},
]


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as for a GPU, with these kernels and no others."""
    names = {name: getattr(dispatch, name) for name in ("recording", "DTYPES", "LARGEST", "LARGEST_AXIS", "large_axis")}
    monkeypatch.setattr(heads, "dispatch", SimpleNamespace(unavailable=lambda _: None, **names))
    monkeypatch.setattr("longspan.models.layers.compiled_for_gpu", lambda x: torch.compiler.is_compiling())


@interpreted
@pytest.mark.parametrize("options", LAYERS, ids=lambda options: str(options["mechanism"]))
def test_compiled_layers(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for a GPU: the op runs in every layer, and outputs and gradients are those of eager PyTorch."""
    more: dict[str, dict[str, Any]] = {"local": {"window": 7}, "delta": {"gate": "head"}}
    mechanism, own = options["mechanism"], {k: v for k, v in options.items() if k not in ("mechanism", "parts")}
    if "parts" in options:
        parts = [
            {"mechanism": name, "num_heads": i + 1, **more.get(name, {})} for i, name in enumerate(options["parts"])
        ]
        mechanism = {"mechanism": "split", "parts": parts}
    attention = AttentionConfig(num_heads=3, mechanism=mechanism, qk_norm=True, **own)
    config = ModelConfig(dim=24, depth=2, causal=True, vocab_size=13, attention=attention)
    model, tokens = LanguageModel(config), torch.randint(13, (2, 37))
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.normal_(parameter, 1.0)
    expected = model.loss(tokens)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    pretend(monkeypatch)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(model.loss, fullgraph=True, backend=graphs)(tokens)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)
    assert sum("divide_heads" in str(node.target) for node in graphs.graphs[0].graph.nodes) == 2


def check_without_kernel(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for a GPU, outputs are those of eager PyTorch, and the op does not run."""
    tokens = torch.randint(13, (2, 11))
    expected = model(tokens)
    pretend(monkeypatch)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    out = torch.compile(model, fullgraph=True, backend=graphs)(tokens)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert not any("divide_heads" in str(node.target) for node in graphs.graphs[0].graph.nodes)


@pytest.mark.parametrize(
    "options",
    [
        {"conv_size": 3},
        {"rotary": "interleaved"},
        {"rotary": "halves", "rotary_dim": 4},
        {"qk_norm": False},
        {"qkv_bias": True},
        {"num_kv_heads": 1},
        {"num_qk_heads": 1},
        {"value_embedding": True},
    ],
    ids=str,
)
def test_layers_that_the_kernel_does_not_know(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionConfig(
        **{"num_heads": 2, "mechanism": "softmax", "qk_norm": True, "rotary": "halves", **options}
    )
    model = LanguageModel(ModelConfig(dim=16, depth=1, causal=True, vocab_size=13, attention=attention))
    check_without_kernel(model, monkeypatch)


@pytest.mark.parametrize("name", ["mechanism", "rotary.0", "q_norm"])
def test_hooks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"mechanism": "local", "num_heads": 1, "window": 5}, {"mechanism": "linear", "num_heads": 1}]
    attention = AttentionConfig(
        num_heads=2, mechanism={"mechanism": "split", "parts": parts}, qk_norm=True, rotary=("halves", "none")
    )
    model = LanguageModel(ModelConfig(dim=16, depth=1, causal=True, vocab_size=13, attention=attention))
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    layer.get_submodule(name).register_forward_hook(lambda module, given, out: out * 1.5)
    check_without_kernel(model, monkeypatch)
