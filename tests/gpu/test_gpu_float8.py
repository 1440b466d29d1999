"""FP8 products and joint projections of compiled models on a GPU."""

from __future__ import annotations

import pytest
import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.ops.float8 import float8_linear
from longspan.train.float8 import convert_to_float8_training, why_not_float8

# PyTorch 2.11 warns of autograd functions that it traces, and of norms that it compiles without its own kernel.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated", "ignore:Mismatch dtype between input and weight"
)


def requires_float8() -> None:
    reason = why_not_float8(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_gradients_are_close_to_those_of_float64(compiled: bool) -> None:
    requires_float8()
    x = torch.randn(3, 37, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2048, 512, device="cuda", requires_grad=True)
    grad = torch.randn(3, 37, 2048, device="cuda", dtype=torch.bfloat16)
    out = (torch.compile(float8_linear, fullgraph=True) if compiled else float8_linear)(x, weight)
    found = out, *torch.autograd.grad(out, (x, weight), grad)
    exact = x.double() @ weight.double().T
    expected = exact, *torch.autograd.grad(exact, (x, weight), grad.double())
    for got, want, limit in zip(found, expected, (0.05, 0.05, 0.005), strict=True):
        assert (got.double() - want).norm() < limit * want.norm()


def model(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=4, mechanism="linear", qk_norm=True, out_norm=True, out_gate="silu")
    given = {"ngrams": (2, 3), "token_shift": (0, 1), "norm": "rms", "causal": True, **options}
    return LanguageModel(ModelConfig(dim=256, depth=2, vocab_size=61, attention=attention, **given)).cuda()


@pytest.mark.parametrize(("options", "float8"), [({}, False), ({"residual_in_fp32": False}, False), ({}, True)])
def test_compiled_steps_are_those_of_eager_float32(options: dict, float8: bool) -> None:
    """Projections are one product there, and the residual stream may be bfloat16."""
    tokens = torch.randint(61, (3, 130), device="cuda")
    expected = model(**options)
    loss = expected.loss(tokens)
    loss.backward()
    found = model(**options)
    if float8:
        requires_float8()
        convert_to_float8_training(found)
    with torch.autocast("cuda", torch.bfloat16):
        got = torch.compile(found.loss, dynamic=False)(tokens)
    got.backward()
    torch.testing.assert_close(got.float(), loss, atol=0, rtol=0.02)
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.cosine_similarity(one.grad.flatten(), other.grad.flatten(), 0) > 0.9, name
