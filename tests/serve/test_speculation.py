"""Speculation: the same tokens in float64, whatever is proposed; adaptive."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from serve_cases import MECHANISMS, answers, language_model

from longspan import Sampling
from longspan.serve import Engine, Request
from longspan.serve.speculation import NgramProposer, SpeculationBudget

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0.4),
    Sampling(temperature=0.6, top_p=0.9, repetition_penalty=1.2, repetition_window=5),
]


@pytest.fixture
def always(monkeypatch):
    """Speculate whether or not it saves time."""
    monkeypatch.setattr(SpeculationBudget, "worthwhile", True)
    monkeypatch.setattr(SpeculationBudget, "add_round", lambda *_: None)
    monkeypatch.setattr("longspan.serve.speculation._MOST_NEEDED", 3)


def requests(vocab_size):
    rng = random.Random(8)
    for i in range(5):
        period = [rng.randrange(vocab_size) for _ in range(rng.choice([3, 7]))]
        prompt = (period * 9)[: rng.choice([17, 31, 33])]
        logprobs = rng.choice([None, 2])
        yield Request(prompt, rng.randrange(9, 23), sampling=SAMPLINGS[i % 3], seed=i, logprobs=logprobs, stop=[1])


def run(engine, given):
    streams = [engine.submit(request) for request in given]
    return [answers(stream.result())[0] for stream in streams]


def similar(model):
    """A model that often, but not always, proposes the right token."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0)
    return draft


@pytest.mark.parametrize(
    ("name", "draft"), [*((name, False) for name in MECHANISMS), ("softmax", True), ("split", True)]
)
def test_drafts_do_not_change_the_tokens(name, draft, always):
    model = language_model(MECHANISMS[name], vocab_size=13, dtype=torch.float64)
    speculation = similar(model) if draft else "ngram"
    given, options = list(requests(13)), {"slots": 3, "chunk": 5, "max_length": 97}
    with Engine(model, **options) as engine:
        expected = run(engine, given)
    with Engine(model, speculation=speculation, **options) as engine:
        found = run(engine, given)
        stats = engine.stats()
    for (tokens, logs, _, reason), (same_tokens, same_logs, _, same_reason) in zip(found, expected, strict=True):
        assert (tokens, reason) == (same_tokens, same_reason)
        assert logs == pytest.approx(same_logs, abs=1e-5)
    assert stats.guessed_tokens > 0
    assert 0 < stats.accepted_tokens < stats.guessed_tokens
    assert stats.steps < sum(len(tokens) for tokens, *_ in expected)


def test_drafts_of_one_stream_do_not_change_its_tokens(always):
    """One sequence is read without a mask, and few accepted tokens are followed step by step."""
    model = language_model(MECHANISMS["split"], vocab_size=13, dtype=torch.float64, token_shift=(0, 1))
    with Engine(model, slots=1) as engine:
        expected = run(engine, requests(13))
    with Engine(model, slots=1, speculation="ngram") as engine:
        found, stats = run(engine, requests(13)), engine.stats()
    assert [(tokens, reason) for tokens, _, _, reason in found] == [(x, reason) for x, _, _, reason in expected]
    assert 0 < stats.accepted_tokens < stats.guessed_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_differ_at_ties_within_rounding_only(dtype, always):
    model = language_model(vocab_size=13, dtype=dtype)
    exact = copy.deepcopy(model).double()
    given = [Request(([i, 3, 5 + i] * 9)[:23], 61, sampling=Sampling(temperature=0)) for i in range(5)]
    with Engine(model, slots=3) as engine:
        expected = run(engine, given)
    with Engine(model, slots=3, speculation="ngram") as engine:
        found = run(engine, given)
        assert engine.stats().accepted_tokens > 0
    for request, (tokens, *_), (other, *_) in zip(given, expected, found, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), None)
        if first is not None:
            before = torch.cat([request.tokens, torch.tensor(tokens[:first], dtype=torch.int64)])
            logits = exact(before[None])[0, -1]
            assert abs(logits[tokens[first]] - logits[other[first]]) < 16 * torch.finfo(dtype).eps * logits.abs().max()


def test_a_perfect_draft_is_always_right(always):
    model = language_model("linear", vocab_size=13, dtype=torch.float64)
    with Engine(model, slots=1, speculation=model) as engine:
        engine.submit(Request([1, 2, 3], 41, sampling=Sampling(temperature=0))).result()
        stats = engine.stats()
    assert stats.accepted_tokens == stats.guessed_tokens > 0
    assert stats.steps <= 10  # four draft tokens and one of its own in each


def test_sessions_after_drafts(always):
    model = language_model(vocab_size=13, dtype=torch.float64)
    greedy = Sampling(temperature=0)
    with Engine(model, slots=2, speculation="ngram") as engine:
        whole = engine.submit(Request([1, 2, 3] * 5, 60, sampling=greedy)).result()[0].tokens
        first = engine.submit(Request([1, 2, 3] * 5, 31, sampling=greedy, keep_state=True)).result()[0]
        rest = engine.submit(Request([], 29, sampling=greedy, previous_state=first.session)).result()[0]
    assert first.tokens + rest.tokens == whole


def test_random_numbers_last_over_several_blocks(always, monkeypatch):
    monkeypatch.setattr("longspan.generation.sampling._BLOCK", 19)
    model = language_model(vocab_size=13, dtype=torch.float64)
    request = Request([1, 2, 3] * 5, 100, sampling=Sampling(temperature=0.5), seed=4)
    with Engine(model, slots=2) as engine:
        expected = engine.submit(request).result()[0].tokens
    with Engine(model, slots=2, speculation="ngram") as engine:
        assert engine.submit(request).result()[0].tokens == expected
        assert engine.stats().accepted_tokens > 0


def test_ngram_proposer():
    proposer = NgramProposer([1, 2, 3, 4, 5, 1, 2, 3])
    assert proposer.propose(9) == []  # seen once before, but nothing expected has come yet
    proposer.extend([4, 5, 1])
    assert proposer.propose(9) == [2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert proposer.propose(1) == [2]
    proposer.adapt(9, 3)
    assert proposer.propose(9) == [2, 3, 4, 5, 1, 2]
    proposer.adapt(6, 0)
    assert proposer.propose(9) == []  # six must come as expected after a rejected draft, and three have
    proposer.extend([2, 3])
    assert proposer.propose(9) == []
    proposer.extend([4])
    assert proposer.propose(9) == [5, 1, 2, 3]
    proposer.adapt(4, 4)
    assert len(proposer.propose(9)) == 8
    proposer.extend([9])
    assert proposer.propose(9) == []
    sure = NgramProposer([1, 2, 3] * 9)
    for number in (16, 32, 64, 64):
        assert sure.propose(99) == ([1, 2, 3] * 22)[:number]
        sure.adapt(number, number)
    assert NgramProposer([1, 2, 3] * 3, 4).propose(2) == []
    assert NgramProposer([1, 2, 3] * 4, 4).propose(2) == [1, 2]


def test_rejected_drafts_cost_little():
    budget, seconds, lost = SpeculationBudget(), 0.0, 0.0
    for _ in range(2000):
        if budget.worthwhile:
            budget.add_round(3.0, 1, 1)  # three times as long, for one token
            seconds, lost = seconds + 3, lost + 2
        else:
            budget.add_step(1.0)
            seconds += 1
    assert 0 < lost < 0.05 * seconds


def test_accepted_drafts_are_always_tried():
    budget = SpeculationBudget()
    for _ in range(4):
        budget.add_step(1.0)
    for _ in range(100):
        assert budget.worthwhile
        budget.add_round(2.0, 5, 1)


def test_wrong_speculation():
    model = language_model(vocab_size=13)
    with pytest.raises(ValueError, match="unknown speculation 'medusa'; there is ngram"):
        Engine(model, speculation="medusa")
    with pytest.raises(ValueError, match="must be causal and have the tokens"):
        Engine(model, speculation=language_model(vocab_size=17))
