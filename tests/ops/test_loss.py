"""`LanguageModel.loss`: cross-entropy in chunks, and training under torch.compile."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspan import AttentionConfig, LanguageModel, ModelConfig, Packing
from longspan.ops import loss as ops

B, T, V = 2, 29, 37


def model(mechanism: object = "linear", **options: object) -> LanguageModel:
    attention = AttentionConfig(num_heads=2, rotary="halves", mechanism=mechanism)
    return LanguageModel(
        ModelConfig(dim=16, depth=2, causal=True, vocab_size=V, attention=attention, **options)
    ).double()


def tokens(batch: int = B) -> Tensor:
    return torch.randint(V, (batch, T))


def expected(lm: LanguageModel, x: Tensor, labels: Tensor, **how: object) -> Tensor:
    return F.cross_entropy(lm(x, **how).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("logits", [7 * V, 2**25], ids=["chunks", "at once"])
def test_it_is_the_cross_entropy_of_the_logits(logits: int, tie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MAX_LOGITS", logits)
    lm, x = model(tie_embeddings=tie, embed_dim=12), tokens()
    labels = torch.randint(V, (B, T)).masked_fill(torch.rand(B, T) < 0.3, -100)
    found, exact = lm.loss(x, labels), expected(lm, x, labels)
    torch.testing.assert_close(found, exact)
    gradients = [torch.autograd.grad(loss, list(lm.parameters())) for loss in (found, exact)]
    for (name, _), got, wanted in zip(lm.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(lm.loss(x, labels), exact)


def test_labels_are_the_next_tokens() -> None:
    lm, x = model(), tokens()
    torch.testing.assert_close(lm.loss(x), F.cross_entropy(lm(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()))


def test_int32_tokens_and_labels() -> None:
    lm, x = model(), tokens()
    torch.testing.assert_close(lm.loss(x.int()), lm.loss(x))
    torch.testing.assert_close(lm.loss(x, x.flip(1).int()), lm.loss(x, x.flip(1)))


def test_padding_is_no_label() -> None:
    lm, x = model(), tokens(1)
    alone = lm.loss(x[:, :20])
    mask = torch.arange(T)[None] < 20
    torch.testing.assert_close(lm.loss(x, key_mask=mask), alone)
    left = torch.cat([x[:, 20:], x[:, :20]], 1)
    torch.testing.assert_close(lm.loss(left, key_mask=torch.arange(T)[None] >= T - 20), alone)


def test_packed_sequences_do_not_predict_one_another() -> None:
    lm, x = model(), tokens(1)
    lengths = [11, 0, 1, 17]
    pieces = [piece for piece in x[0].split(lengths) if len(piece) > 1]
    total = sum(lm.loss(piece[None]) * (len(piece) - 1) for piece in pieces)
    found = lm.loss(x, packing=Packing.from_lengths(lengths))
    torch.testing.assert_close(found, total / sum(len(piece) - 1 for piece in pieces))


def test_no_labels_give_zero() -> None:
    lm = model()
    loss = lm.loss(tokens(), torch.full((B, T), -100))
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in lm.parameters())


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must be integers of the tokens' shape \(2, 29\), got \(2, 28\)"):
        model().loss(tokens(), torch.zeros(B, T - 1, dtype=torch.int64))


def test_sums_are_float32_in_half_precision() -> None:
    lm, x = model().bfloat16(), tokens()
    assert lm.loss(x).dtype == torch.float32


@pytest.mark.parametrize(
    "mechanism",
    ["linear", {"mechanism": "local", "window": 7}, {"mechanism": "linformer", "rank": 5, "max_length": 64}],
    ids=["linear", "local", "linformer"],
)
def test_training_compiles(mechanism: object) -> None:
    torch._dynamo.reset()
    lm, x = model(mechanism), tokens()
    loss = torch.compile(lm.loss, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(loss, lm.loss(x))
    found, exact = (torch.autograd.grad(one, list(lm.parameters())) for one in (loss, lm.loss(x)))
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_compiled_model_redraws_without_compiling_again() -> None:
    torch._dynamo.reset()
    lm = model({"mechanism": "performer", "num_features": 5, "redraw_interval": 3})
    mechanism = lm.transformer.stack.branches[0].layer.mechanism
    projection = mechanism.feature_map.projection
    compiled, x = torch.compile(lm.loss, fullgraph=True, backend="aot_eager"), tokens()
    counts, draws = [], []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(7):
            compiled(x).backward()
            counts.append(mechanism.counts.tolist())
            draws.append(projection.clone())
    assert counts == [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert [torch.equal(a, b) for a, b in pairwise(draws)] == [True, False, True, True, False, True]
    assert mechanism.draw == 2
    torch.testing.assert_close(compiled(x), lm.eval().loss(x))


def test_a_copy_redraws_on_its_own() -> None:
    torch._dynamo.reset()
    lm = model({"mechanism": "performer", "num_features": 5, "redraw_interval": 1})
    twin = copy.deepcopy(lm)
    before = [one.transformer.stack.branches[0].layer.mechanism.feature_map.projection.clone() for one in (lm, twin)]
    torch.compile(twin.loss, fullgraph=True, backend="aot_eager")(tokens())
    after = [one.transformer.stack.branches[0].layer.mechanism.feature_map.projection for one in (lm, twin)]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
