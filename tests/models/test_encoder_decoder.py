"""Models beyond the language model: random features redrawn once for all, encoder and decoder, classifiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, check_gradients_by_name, gradients, leaves, lengths_to_mask
from model_cases import DIM, MECHANISMS, PERFORMER, B, T, V, attentions, config, seq2seq, shaken, stream, tokens
from torch import Tensor

from longspan.models.config import AttentionConfig
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel


@pytest.mark.parametrize("execution", ["keep", "recompute", "recompute_heads", "reverse"])
def test_features_are_redrawn_once_for_each_training_forward(execution: str) -> None:
    model = LanguageModel(config(mechanism=PERFORMER, residual="double", axial_stride=2)).double()
    layers = attentions(model)
    assert len(layers) == 4
    x = tokens()

    def run(name: str) -> dict[str, Tensor]:
        model.transformer.stack.execution = name
        torch.manual_seed(5)
        model.zero_grad()
        before = [layer.mechanism.draw for layer in layers]
        model(x).square().sum().backward()
        assert [layer.mechanism.draw - draw for layer, draw in zip(layers, before, strict=True)] == [1] * 4
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = run("keep")
    check_gradients_by_name(run(execution), expected)
    model.eval()
    before = [layer.mechanism.draw for layer in layers]
    model(x).sum().backward()
    assert [layer.mechanism.draw for layer in layers] == before


def test_features_are_redrawn_at_their_interval() -> None:
    model = LanguageModel(config(depth=1, mechanism={**PERFORMER, "redraw_interval": 3}))
    (layer,) = attentions(model)
    draws = []
    for _ in range(7):
        model(tokens())
        draws.append(layer.mechanism.draw)
    assert draws == [0, 0, 1, 1, 1, 2, 2]


def test_performer_heads_in_a_split_are_redrawn_too() -> None:
    parts = [{"mechanism": "local", "num_heads": 1, "window": 3}, {**PERFORMER, "num_heads": 2}]
    model = LanguageModel(config(depth=1, mechanism={"mechanism": "split", "parts": parts}))
    (layer,) = attentions(model)
    before = layer.mechanism.parts[1].feature_map.projection.clone()
    model(tokens())
    assert not torch.equal(layer.mechanism.parts[1].feature_map.projection, before)


def test_encoder_and_decoder_redraw_once() -> None:
    model = seq2seq(mechanism=PERFORMER, cross_mechanism=PERFORMER)
    model.train()
    model(tokens(), tokens())
    assert {layer.mechanism.draw for layer in attentions(model)} == {1}


def test_a_stale_state_raises() -> None:
    model, x = LanguageModel(config(mechanism=PERFORMER)), tokens()
    _, state = model.extend(x, model.new_state(B))
    model.eval()(x)
    model.extend(x, state)
    model.train()(x)
    with pytest.raises(ValueError, match=r"written with draw 0 .* now has draw 1: start from new_state"):
        model.extend(x, state)


def sentences(lengths: list[int], size: int) -> Tensor:
    return torch.randint(1, V, (len(lengths), size)).masked_fill(~lengths_to_mask(lengths, size), 0)


CROSS: list[Any] = ["softmax", "linear", MECHANISMS["performer"], MECHANISMS["linformer"]]


@pytest.mark.parametrize("cross", CROSS, ids=["softmax", "linear", "performer", "linformer"])
@pytest.mark.parametrize("mechanism", ["softmax", "local", "linear", "performer", "linformer", "split"])
def test_more_padding_changes_no_loss_and_no_gradient(mechanism: str, cross: Any) -> None:
    model = seq2seq(cross, mechanism=MECHANISMS[mechanism])
    source, target = sentences([7, 4], 7), sentences([6, 3], 6)
    loss = model(source, target)
    longer = model(F.pad(source, (0, 3)), F.pad(target, (0, 4)))
    assert_same(longer, loss)
    check_gradients_by_name(gradients(longer, leaves(model)), gradients(loss, leaves(model)))
    masks = {"source_mask": source != 0, "target_mask": target != 0}
    garbage = model(source + 5 * (source == 0), target + 5 * (target == 0), **masks)
    assert_same(garbage, loss)


def test_padding_on_the_left_is_padding() -> None:
    model = seq2seq(mechanism=MECHANISMS["split"], token_shift=(0, 1))
    source, target = sentences([7, 4], 7), sentences([6, 3], 6)
    left = target.clone()
    left[1] = target[1].roll(3)
    assert_same(model(source, left), model(source, target))


def test_the_loss_by_hand() -> None:
    model = seq2seq()
    source, target = sentences([7, 4], 7), sentences([6, 3], 6)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for b, (s, t) in enumerate([(7, 6), (4, 3)]):
        context = model.encoder.hidden(source[b : b + 1, :s])
        logits = model.decoder(target[b : b + 1, : t - 1], context=context)[0]
        for i in range(t - 1):
            total = total - logits[i].log_softmax(0)[target[b, i + 1]]
            count += 1
    assert_same(model(source, target), total / count)
    assert model(source, target).dtype == torch.float64


@pytest.mark.parametrize("length", [1, 2])
def test_the_loss_of_nothing_is_zero(length: int) -> None:
    model = seq2seq()
    loss = model(
        sentences([7, 4], 7), torch.zeros(2, length, dtype=torch.int64) if length > 1 else sentences([1, 1], 1)
    )
    assert loss == 0
    assert all(d is None or d.isfinite().all() for d in gradients(loss, leaves(model)).values())


def test_the_decoder_is_causal_and_the_source_matters() -> None:
    model = seq2seq(mechanism=MECHANISMS["split"])
    source, target = sentences([7, 4], 7), sentences([6, 6], 6)
    context, mask = model.encode(source)

    def logits(target: Tensor, source: Tensor = source) -> Tensor:
        context, mask = model.encode(source)
        return model.decoder(target, context=context, context_mask=mask)

    other = target.clone()
    other[:, 4:] = other[:, 4:] % (V - 1) + 1
    assert torch.equal(logits(other)[:, :4], logits(target)[:, :4])
    assert not torch.allclose(logits(other)[:, 4:], logits(target)[:, 4:])
    changed = source.clone()
    changed[:, 0] = changed[:, 0] % (V - 1) + 1
    assert not torch.allclose(logits(target, changed)[:, 0], logits(target)[:, 0])
    assert mask.tolist() == (source != 0).tolist()
    # The encoder's mask reaches the decoder: without it the padding is seen.
    unmasked = model.decoder(target, context=context)
    assert_same(unmasked[:1], logits(target)[:1])
    assert not torch.allclose(unmasked[1:], logits(target)[1:])


def test_the_decoder_streams_after_its_source() -> None:
    model = seq2seq(mechanism=MECHANISMS["mixed"], token_shift=(0, 1))
    source, target = sentences([7, 4], 7), sentences([6, 6], 6)
    with torch.no_grad():
        context, mask = model.encode(source)
        expected = model.decoder(target, context=context, context_mask=mask)
        got = stream(model.decoder, target, [1, 3, 2], max_length=6, context=context, context_mask=mask)
    assert_same(got, expected)


def test_encoder_and_decoder_that_do_not_fit() -> None:
    encoder, decoder = config(causal=False), config(cross=AttentionConfig(num_heads=2))
    with pytest.raises(ValueError, match="the encoder must be bidirectional"):
        EncoderDecoder(config(), decoder)
    with pytest.raises(ValueError, match="the decoder must have causal=True and cross"):
        EncoderDecoder(encoder, config())
    with pytest.raises(ValueError, match="one dim, got 24 and 12"):
        EncoderDecoder(config(causal=False, dim=24), decoder)
    with pytest.raises(ValueError, match="tie_embeddings needs one vocab_size"):
        EncoderDecoder(replace(encoder, vocab_size=V + 1), decoder, tie_embeddings=True)
    tied = EncoderDecoder(encoder, decoder, tie_embeddings=True)
    assert tied.encoder.embedding is tied.decoder.embedding


def test_every_parameter_of_an_encoder_decoder_is_trained() -> None:
    model = seq2seq(embed_dim=5)
    found = gradients(model(sentences([7, 4], 7), sentences([6, 3], 6)), leaves(model))
    assert all(grad.any() for grad in found.values()), [name for name, grad in found.items() if not grad.any()]


# Classifier.


@pytest.mark.parametrize("mechanism", ["softmax", "local", "linear", "performer", "linformer", "split"])
def test_a_classifier_looks_at_real_tokens_only(mechanism: str) -> None:
    model = shaken(Classifier(config(mechanism=MECHANISMS[mechanism], causal=False, num_classes=4)))
    x, mask = tokens(), lengths_to_mask([T, 6], T)
    out = model(x, key_mask=mask)
    assert out.shape == (B, 4)
    separate = torch.cat([model(x[:1]), model(x[1:, :6])])
    assert_same(out, separate)
    assert_same(out[:1], model.to_classes(model.body.hidden(x[:1]).mean(1)))
    check_gradients_by_name(gradients(out, leaves(model)), gradients(separate, leaves(model)))
    found = gradients(out, leaves(model))
    assert all(grad.any() for grad in found.values()), [name for name, grad in found.items() if not grad.any()]


def test_a_classifier_of_no_tokens() -> None:
    model = shaken(Classifier(config(causal=False, num_classes=5)))
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert_same(model(empty), model.to_classes.bias.expand(2, -1))
    assert_same(model(empty, key_mask=empty.bool()), model(empty))


@pytest.mark.parametrize("input_dim", [None, DIM], ids=["as they are", "projected"])
def test_a_classifier_of_vectors_with_nan_in_the_padding(input_dim: int | None) -> None:
    model = shaken(Classifier(config(vocab_size=None, causal=False, num_classes=4, input_dim=input_dim)))
    mask = lengths_to_mask([T, 6, 0], T)
    x = torch.randn(3, T, DIM).double().masked_fill(~mask[..., None], float("nan"))
    out = model(x, key_mask=mask)
    assert_same(out[:2], torch.cat([model(x[:1]), model(x[1:2, :6])]))
    assert_same(out[2], model.to_classes.bias)
    assert all(grad.isfinite().all() for grad in gradients(out, leaves(model)).values())


def test_models_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="a language model needs vocab_size"):
        LanguageModel(config(vocab_size=None))
    with pytest.raises(ValueError, match="a classifier needs num_classes"):
        Classifier(config())
    for name, value in {"positions": "sinusoidal", "ngrams": (2,), "embed_dim": 3, "embed_dropout": 0.1}.items():
        with pytest.raises(ValueError, match=f"{name}=.* is for embeddings of tokens, .* reads vectors"):
            Classifier(config(vocab_size=None, input_dim=5, num_classes=2, **{name: value}))
