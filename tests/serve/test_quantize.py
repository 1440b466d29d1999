"""int8 weights, and states of fewer bits: close to exact, and each row for itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serve_cases import MECHANISMS, answers, language_model
from torch import nn

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.serve import Engine, Request
from longspan.serve.quantize import Int8Linear, bits_per_token, quantize_weights


@pytest.mark.parametrize("bias", [True, False])
def test_int8_layers_are_close(bias):
    linear, x = nn.Linear(37, 29, bias=bias), torch.randn(5, 3, 37)
    x[1] *= 1e4  # rows of very different size do not disturb one another
    quantized = Int8Linear(linear)
    with torch.no_grad():
        expected, found = linear(x), quantized(x)
    error = (expected - found).abs().amax(-1) / expected.abs().amax(-1)
    assert error.max() < 0.02
    assert quantized.weight.dtype == torch.int8


def test_int8_rows_do_not_depend_on_the_others():
    quantized = Int8Linear(nn.Linear(37, 29))
    x, y = torch.randn(7, 37), 1e3 * torch.randn(7, 37)
    y[4] = x[2]
    y[5] = float("inf")
    with torch.no_grad():
        assert torch.equal(quantized(x)[2], quantized(y)[4])
        assert torch.equal(quantized(torch.zeros(2, 37))[0], quantized(torch.zeros(2, 37))[1])


@pytest.mark.parametrize("name", MECHANISMS)
def test_bits_of_quantized_models(name):
    model = language_model(MECHANISMS[name])
    tokens = torch.randint(256, (67,))
    exact = bits_per_token(model, tokens)
    with torch.no_grad():
        logits = model(tokens[None])[0, :-1].double()
    assert exact == pytest.approx(float(nn.functional.cross_entropy(logits, tokens[1:])) / torch.log(torch.tensor(2.0)))
    quantized = quantize_weights(model)
    assert bits_per_token(quantized, tokens) == pytest.approx(exact, rel=0.02)
    assert bits_per_token(quantized, tokens) != exact
    assert any(type(layer) is nn.Linear for layer in model.modules())  # The model itself is unchanged.
    if name not in ("delta", "decay"):
        for kind, tolerance in (("bfloat16", 0.01), ("int8", 0.02)):
            assert bits_per_token(model, tokens, chunk=5, state_dtype=kind) == pytest.approx(exact, rel=tolerance)


def test_bits_of_a_quantized_model_with_convolutions():
    attention = AttentionConfig(num_heads=4, mechanism="delta", conv_size=4, out_norm=True, out_gate="silu")
    model = LanguageModel(ModelConfig(dim=32, depth=2, causal=True, vocab_size=256, attention=attention)).eval()
    tokens = torch.randint(256, (67,))
    assert bits_per_token(quantize_weights(model), tokens) == pytest.approx(bits_per_token(model, tokens), rel=0.02)


def test_the_loss_of_a_trained_model_is_below_half_a_percent():
    torch.manual_seed(0)
    model = language_model()
    text = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for start in torch.randint(len(text) - 65, (61, 7)):
        batch = torch.stack([text[i : i + 65] for i in start])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    exact, quantized = bits_per_token(model.eval(), text[:1009]), quantize_weights(model)
    assert exact < 5  # It has learned something: 8 bits are a guess.
    for kind in ("exact", "bfloat16", "int8"):
        assert bits_per_token(quantized, text[:1009], state_dtype=kind) == pytest.approx(exact, rel=0.005)


def test_the_engine_serves_quantized_models():
    model = quantize_weights(language_model())
    given = [Request(bytes(range(i, 40 + i)), 9, seed=i, logprobs=1) for i in range(7)]
    with Engine(model, slots=5, chunk=7) as engine:
        streams = [engine.submit(request) for request in given]
        together = [answers(stream.result()) for stream in streams]
    with Engine(model, slots=5, chunk=7, cache_bytes=0) as engine:
        assert [answers(engine.submit(request).result()) for request in given] == together


def test_int8_weights_need_a_cpu():
    with pytest.raises(ValueError, match="int8 weights are for a CPU, and this model is on meta"):
        quantize_weights(language_model().to("meta"))
