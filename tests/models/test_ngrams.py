"""Hashed n-gram and value embeddings, capped logits and output projections that begin at zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same

from longspan import Attention, AttentionConfig, LanguageModel, ModelConfig, Packing, Sampling, generate, load, save
from longspan.generation.session import Session
from longspan.layout import TokenLayout
from longspan.models.attention_maps import attention_map
from longspan.models.config import LegacyConfig
from longspan.models.ngrams import NgramEmbedding
from longspan.ops.loss import cap_logits, cross_entropy
from longspan.train.chunked import chunked_loss

V, T, BUCKETS = 13, 29, 97
F64 = torch.float64
SPLIT = {
    "mechanism": "split",
    "parts": [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "delta", "num_heads": 1}],
}


def build(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=2, mechanism=SPLIT, value_embedding=True)
    given: dict[str, Any] = {"ngrams": (2, 4), "ngram_buckets": BUCKETS, "logit_softcap": 1.5, "token_shift": (0, 1)}
    given |= {"depth": 2, **options}
    config = ModelConfig(**{"dim": 10, "causal": True, "vocab_size": V, "attention": attention} | given)
    model = LanguageModel(config).to(F64).eval()
    for parameter in model.parameters():  # Small tables and logits would hide mistakes.
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_pieces_padding_and_packing_equal_the_whole() -> None:
    model, tokens = build(), torch.randint(V, (2, T))
    expected, state, outs = model(tokens), model.new_state(2, dtype=F64), []
    for start, stop in ((0, 5), (5, 6), (6, 8), (8, 8), (8, T)):
        out, state = model.extend(tokens[:, start:stop], state)
        outs.append(out)
    assert_same(torch.cat(outs, 1), expected)
    for left, right in ((7, 0), (0, 4), (3, 2)):
        mask = torch.zeros(2, T, dtype=torch.bool)
        mask[:, left : T - right] = True
        own = tokens[:, left : T - right]
        assert_same(model(tokens, key_mask=mask)[:, left : T - right], model(own))
        got, after = model.extend(tokens, model.new_state(2, dtype=F64), key_mask=mask)
        assert_same(got[:, left : T - right], model(own))
        assert_same(model.extend(tokens[:, :3], after)[0], model(torch.cat([own, tokens[:, :3]], 1))[:, -3:])
    packed = model(tokens[:1], packing=Packing.from_lengths([7, 1, 21]))
    assert_same(packed, torch.cat([model(part) for part in tokens[:1].split([7, 1, 21], 1)], 1))
    assert_same(chunked_loss(model, tokens, chunk_length=7)[0], model.loss(tokens))


def test_states_merge_and_rows_can_be_chosen() -> None:
    model, tokens = build(depth=1, token_shift=()), torch.randint(V, (3, T))
    whole = model.extend(tokens, model.new_state(3, dtype=F64))[1]
    assert whole.recent is not None
    assert whole.recent[..., 0].tolist() == (tokens[:, -3:] + 1).tolist()
    merged = model.extend(tokens[:, :28], model.new_state(3, dtype=F64))[1]
    last = model.extend(tokens[:, 28:], model.new_state(3, start=28, transition=True, dtype=F64))[1]
    assert torch.equal(merged.merge(last).recent, whole.recent)
    chosen = model.extend(tokens[[2, 0], :4], whole.select([2, 0]))[0]
    assert_same(chosen, model(torch.cat([tokens, tokens[:, :4]], 1))[[2, 0], -4:])


def test_generation_sessions_and_checkpoints(tmp_path: Any) -> None:
    model, tokens = build(), torch.randint(V, (1, 9))
    result = generate(model, tokens, 11, sampling=Sampling(temperature=0))
    for _ in range(11):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert list(result.tokens[0]) == tokens[0, 9:].tolist()
    logits, state = model.extend(tokens, model.new_state(1, dtype=F64))
    Session(state, logits[:, -1], tokens, model).save(tmp_path / "session")
    again = Session.load(tmp_path / "session", model).extend(model, [5, 7])
    assert_same(again.logits, model(torch.cat([tokens, torch.tensor([[5, 7]])], 1))[:, -1])
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").eval()(tokens), model(tokens))


@pytest.mark.parametrize("rows", [1, 2])
def test_steps_of_the_decode_loop_equal_the_whole(rows: int) -> None:
    """By `decode_function` and by `decode_step`: greedy tokens, which repeat, would hide a difference."""
    model, tokens = build(), torch.randint(V, (rows, T))
    expected, stack = model(tokens), model.transformer.stack
    with torch.inference_mode():
        state = model.extend(tokens[:, :5], model.new_state(rows, max_length=T, dtype=F64))[1]
        state = stack.share_length(stack.decode_state(state, F64))
        step = model.decode_function(state)
        assert (step is None) == (rows > 1)
        for i in range(5, T):
            assert_same(
                model.decode_step(tokens[:, i], state)[0] if step is None else step(tokens[:, i]), expected[:, i]
            )


def test_the_embedding_of_a_token_depends_on_its_ngrams_alone() -> None:
    torch.manual_seed(0)
    layer, tokens = NgramEmbedding(5, (2, 4), 65_537), torch.randint(V, (2, T))
    layout = TokenLayout.of(tokens, causal=True)
    out = layer(layer.encode(tokens, layout), layout)
    for size, other in ((2, 4), (4, 2)):
        with torch.no_grad():  # the table of the other length silent
            layer.tables[layer.sizes.index(other)].weight.zero_()
            alone = layer(layer.encode(tokens, layout), layout)
            torch.nn.init.normal_(layer.tables[layer.sizes.index(other)].weight)
        rows: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
        for row, vectors in zip(tokens.tolist(), alone.tolist(), strict=True):
            padded = [-1] * (size - 1) + row
            for i, vector in enumerate(vectors):
                rows.setdefault(tuple(padded[i : i + size]), set()).add(tuple(vector))
        assert all(len(found) == 1 for found in rows.values())  # one row for each n-gram,
        assert len({next(iter(found)) for found in rows.values()}) == len(rows)  # and another for each other one
    assert out.shape == (2, T, 5)


def test_values_are_those_of_the_projection_and_of_the_token() -> None:
    model, tokens = build(depth=1, ngrams=()), torch.randint(V, (2, T))
    (_, layer), x = model.transformer.stack.attention_layers()[0], torch.randn(2, T, 10, dtype=F64)
    layout = TokenLayout.of(tokens, causal=True)
    embedded = layer.project(x, replace(layout, tokens=tokens))[2]
    table, layer.value_embedding = layer.value_embedding, None
    assert table is not None
    assert_same(embedded, layer.project(x, layout)[2] + table(tokens).unflatten(2, (2, -1)))
    layer.value_embedding = table
    weights = attention_map(layer, x, [3, 17])
    layer.value_embedding = None
    assert_same(attention_map(layer, x, [3, 17]), weights)
    layer.value_embedding = table
    with pytest.raises(ValueError, match="value_embedding embeds tokens, and the layer got vectors alone"):
        layer.project(x, layout)
    with pytest.raises(ValueError, match="build a LanguageModel, or set vocab_size"):
        Attention(10, AttentionConfig(num_heads=2, value_embedding=True))


def test_a_layer_that_is_computed_at_once_has_no_value_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    linformer = {"mechanism": "linformer", "rank": 3, "max_length": T}
    attention = AttentionConfig(num_heads=2, mechanism=linformer, value_embedding=True, qkv_bias=False)
    model, tokens = build(causal=False, attention=attention), torch.randint(V, (2, T))
    found = model(tokens)
    monkeypatch.setattr(Attention, "_attend_layer", lambda *_: None)
    assert_same(found, model(tokens))


def test_capped_logits_have_one_loss_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build(), torch.randint(V, (2, T))
    plain = build(logit_softcap=None)
    logits = model(tokens)
    assert plain(tokens).abs().max() > 1.5 > logits.abs().max()
    assert_same(logits, 1.5 * torch.tanh(plain(tokens) / 1.5))
    assert cap_logits(logits, None) is logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert_same(model.loss(tokens), expected)
    monkeypatch.setattr("longspan.ops.loss.MAX_LOGITS", 7 * V)  # many chunks
    assert_same(model.loss(tokens), expected)
    hidden, weight = torch.randn(31, 10, dtype=F64, requires_grad=True), torch.randn(V, 10, dtype=F64)
    labels = torch.randint(V, (31,))
    many = torch.autograd.grad(cross_entropy(hidden, weight, None, labels, 2.0), hidden)[0]
    whole = F.cross_entropy(2 * torch.tanh(hidden @ weight.T / 2), labels)
    assert_same(many, torch.autograd.grad(whole, hidden)[0])


def test_output_projections_begin_at_zero() -> None:
    config = ModelConfig(dim=10, depth=2, causal=True, vocab_size=V, attention=AttentionConfig(num_heads=2))
    values = {**config.to_dict(), "zero_init_residual": True}
    plain, zero = LanguageModel(config), LanguageModel(ModelConfig.from_dict(values))
    for model, some in ((plain, True), (zero, False)):
        weights = [x for name, x in model.named_parameters() if name.endswith("to_out.weight")]
        assert len(weights) == 4
        assert all(bool(x.any()) == some for x in weights)
    tokens = torch.randint(V, (2, 7))
    assert torch.equal(zero(tokens), zero.logits(zero.transformer.normalize(zero.embedding(tokens))))


def test_layers_that_begin_at_zero_are_trained() -> None:
    """ReZero's weight is zero: with a projection that is zero too, no gradient would reach either."""
    for position in ("pre", "post", "rezero"):
        torch.manual_seed(0)
        given: dict[str, Any] = {"attention": AttentionConfig(num_heads=2), "norm_position": position}
        model = LanguageModel(ModelConfig(dim=10, depth=2, vocab_size=V, zero_init_residual=True, **given))
        model.loss(torch.randint(V, (2, 7))).backward()
        for branch in model.transformer.stack.branches:
            assert any(x.grad is not None and bool(x.grad.any()) for x in branch.parameters()), position


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngrams": (1, 2)}, r"ngrams must be different lengths of at least 2, such as 2,3, got \(1, 2\)"),
        (
            {"attention": AttentionConfig(value_embedding=True), "legacy": LegacyConfig(axial_stride=3)},
            "value_embedding cannot be combined with axial_stride",
        ),
        ({"cross": AttentionConfig(value_embedding=True)}, "value_embedding is for self-attention"),
        ({"ngrams": (3, 3)}, "ngrams must be different lengths"),
        ({"ngram_buckets": 0}, "ngram_buckets must be a positive integer, got 0"),
        ({"logit_softcap": 0.0}, "logit_softcap must be above 0, or None for no limit, got 0.0"),
    ],
)
def test_wrong_options_are_answered(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)
