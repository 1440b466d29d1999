"""Linear layers with FP8 products: values, gradients, scales, and which layers of a model compute them."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import needs_float8
from torch import Tensor

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.ops.float8 import FLOAT8, Float8Linear, float8_linear, quantize
from longspan.train.float8 import convert_to_float8_training, why_not_float8

N, OUT, IN = 37, 48, 80


def rounded(x: Tensor) -> Tensor:
    """What FP8 numbers with a scale for each row hold of x, by PyTorch's own rounding of x / max · 448."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(FLOAT8).double() * scale


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), atol=0.01 * expected.abs().max().item(), rtol=0)


@needs_float8
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch.compile
@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_gradients_are_those_of_rounded_matrices(compiled: bool) -> None:
    # Rows and columns of very different sizes: one scale for a matrix would round most of them to zero.
    x = (torch.randn(N, IN) * torch.logspace(-7, 7, N)[:, None]).bfloat16().requires_grad_()
    weight = (torch.randn(OUT, IN) * torch.logspace(-3, 3, OUT)[:, None]).requires_grad_()
    grad = (torch.randn(N, OUT) * torch.logspace(5, -5, N)[:, None]).bfloat16()
    function = torch.compile(float8_linear, fullgraph=True, backend="aot_eager") if compiled else float8_linear
    out = function(x, weight)
    assert out.dtype == torch.bfloat16
    exact = rounded(x.detach()) @ rounded(weight.detach()).T
    size = exact.abs().amax(1, keepdim=True)
    close(out / size, exact / size)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), grad)
    exact = rounded(grad) @ rounded(weight.detach().T.contiguous()).T
    close(d_x / exact.abs().amax(1, keepdim=True), exact / exact.abs().amax(1, keepdim=True))
    exact = grad.double().T @ x.detach().double()
    close(d_weight, exact)
    assert (d_x.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)


@needs_float8
def test_batches_biases_and_extreme_rows() -> None:
    x, weight, bias = torch.randn(2, 3, IN), torch.randn(OUT, IN), torch.randn(OUT)
    out = float8_linear(x, weight, bias)
    assert out.shape == (2, 3, OUT)
    torch.testing.assert_close(out - float8_linear(x, weight), bias.bfloat16().expand_as(out), atol=0.2, rtol=0)
    x[0, 0], x[0, 1], x[0, 2], x[1, 0, 3] = 0.0, 1e30, 1e-30, float("nan")
    out = float8_linear(x, weight)
    assert not out[0, 0].any()
    assert out[0].isfinite().all()
    assert out[1, 0].isnan().all()
    assert out[1, 1:].isfinite().all()
    numbers, scale = quantize(torch.tensor([[3.0, -6.0, 0.0]]))
    assert numbers.dtype == FLOAT8
    assert torch.equal(numbers.float() * scale, torch.tensor([[3.0, -6.0, 0.0]]))


@needs_float8
def test_layers_of_a_model_are_converted() -> None:
    attention = AttentionConfig(num_heads=2, mechanism="decay", out_gate="silu", value_gates=True)
    config = ModelConfig(dim=16, depth=2, causal=True, vocab_size=13, attention=attention, ngrams=(2,), ngram_buckets=7)
    model = LanguageModel(config)
    before, expected = model.state_dict(), model(torch.arange(11)[None])
    other = copy.deepcopy(model)
    assert convert_to_float8_training(other) == 12  # not the logits, nor gates of heads
    names = {name.rpartition(".")[2] for name, layer in other.named_modules() if isinstance(layer, Float8Linear)}
    assert names == {"to_q", "to_kv", "to_out", "to_out_gate", "to_hidden"}
    assert other.state_dict().keys() == before.keys()
    with torch.autocast("cpu", torch.bfloat16):
        found = other(torch.arange(11)[None])
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.1
    assert torch.equal(other.eval()(torch.arange(11)[None]), model.eval()(torch.arange(11)[None]))
    narrow = LanguageModel(ModelConfig(dim=10, depth=1, vocab_size=13, attention=AttentionConfig(num_heads=2)))
    with pytest.raises(ValueError, match="widths are multiples of 16, and this model has none: use --precision bf16"):
        convert_to_float8_training(narrow)


def test_devices_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_float8(torch.device("cpu")) == "cpu has none"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, reason in (((8, 0), "NVIDIA A100 has compute capability 8.0"), ((8, 9), None), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert why_not_float8(torch.device("cuda")) == reason
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert why_not_float8(torch.device("cuda")) == "this build of PyTorch has none"
