"""The decode loop drops tokens, and a sequence does not depend on the others in its batch."""

from __future__ import annotations

import pytest
import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling
from longspan.generation import sampling as samplings
from longspan.generation.decode import DecodeLoop
from longspan.generation.generate import prefill
from longspan.generation.sampling import SeededSampler

MECHANISMS = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 5},
    "linear": {"mechanism": "linear", "feature_map": "softmax"},
    "blind spot": {"mechanism": "linear", "blind_spot": 3},
    "performer": "performer",
    "linformer": {"mechanism": "linformer", "rank": 7, "max_length": 64},
    "split": {
        "mechanism": "split",
        "parts": [
            {"mechanism": "local", "num_heads": 2, "window": 5},
            {"mechanism": "linear", "num_heads": 2},
        ],
    },
}
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.9, top_k=20, repetition_penalty=1.2, repetition_window=7),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3, 1, 3, 1, 3]]


def language_model(mechanism, dtype=torch.float32, **fields):
    attention = AttentionConfig(num_heads=4, mechanism=mechanism, rotary="halves")
    config = ModelConfig(dim=32, depth=2, causal=True, vocab_size=29, attention=attention, **fields)
    model = LanguageModel(config).to(dtype).eval()
    with torch.no_grad():
        model.to_logits.weight.mul_(4)  # logits that differ enough for a choice to matter
    return model


def decode_loop(model, session, sampling, stop=(), seeds=None):
    seeds = range(len(session.logits)) if seeds is None else seeds
    sampler = SeededSampler(sampling, session.recent, stop, seeds)
    return DecodeLoop(model, session.state, session.logits, sampler), sampler


def run(loop, sampler, number):
    """The answers of as many steps: tokens and log-probabilities."""
    answers = []
    for _ in range(number):
        loop.step()
        answers.append(sampler.answer.clone())
    return answers


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_rolling_back_is_never_having_generated(name, how, mode):
    model = language_model(MECHANISMS[name], token_shift=(0, 1))
    session = prefill(model, PROMPTS, window=7)
    with mode():
        wanted = run(*decode_loop(model, session, SAMPLINGS[how]), 20)
        for before in (0, 6):
            for number in (1, 2, 9):
                loop, sampler = decode_loop(model, session, SAMPLINGS[how])
                answers = run(loop, sampler, before)
                loop.snapshot()
                answers += run(loop, sampler, 9)
                loop.rollback(number)
                del answers[before + 9 - number :]
                assert same(answers + run(loop, sampler, 20 - len(answers)), wanted), (before, number)


@pytest.mark.parametrize("name", ["softmax", "split"])
def test_a_session_after_rolling_back_is_that_of_the_tokens_left(name):
    model = language_model(MECHANISMS[name])
    session = prefill(model, PROMPTS, window=7)
    loop, sampler = decode_loop(model, session, SAMPLINGS["sampled"])
    run(loop, sampler, 4)
    state, logits = loop.state_and_logits()
    recent = sampler.recent.clone()
    loop.snapshot()
    for number in (1, 5):
        run(loop, sampler, number)
        loop.rollback(number)
        again, same_logits = loop.state_and_logits()
        assert torch.equal(same_logits, logits)
        assert torch.equal(sampler.recent, recent)
        assert again.length.tolist() == [7, 11, 9]
        for key, x in state.tensors().items():
            assert torch.equal(again.tensors()[key], x), key


def test_rolling_back_several_times_and_across_a_block_of_random_numbers(monkeypatch):
    monkeypatch.setattr(samplings, "_BLOCK", 5)
    model = language_model("linear")
    session = prefill(model, PROMPTS)
    wanted = run(*decode_loop(model, session, Sampling()), 30)
    loop, sampler = decode_loop(model, session, Sampling())
    run(loop, sampler, 4)
    loop.snapshot()
    for generated, dropped in ((9, 7), (4, 1), (3, 3)):  # 6, 9 and 9 tokens are left
        run(loop, sampler, generated)
        loop.rollback(dropped)
    loop.rollback(0)
    loop.snapshot()
    run(loop, sampler, 2)
    loop.rollback(2)
    assert same(run(loop, sampler, 21), wanted[9:])


def test_a_dropped_stop_token_does_not_end_its_sequence():
    model = language_model("linear")
    session = prefill(model, PROMPTS)
    free = [answer[0].tolist() for answer in run(*decode_loop(model, session, Sampling()), 9)]
    stop = [int(free[4][1])]
    loop, sampler = decode_loop(model, session, Sampling(), stop)
    loop.snapshot()
    run(loop, sampler, 9)
    first = next(i for i, tokens in enumerate(free) if tokens[1] == stop[0])
    loop.rollback(9 - first)
    assert not sampler._ended[1]
    assert run(loop, sampler, 1)[0][0, 1] == -1


def test_what_cannot_be_rolled_back_is_refused():
    model = language_model("linear")
    loop, sampler = decode_loop(model, prefill(model, PROMPTS), Sampling())
    run(loop, sampler, 3)
    with pytest.raises(ValueError, match=r"can drop 0 to 0 tokens, .* got 1: call snapshot\(\) before"):
        loop.rollback(1)
    loop.snapshot()
    run(loop, sampler, 2)
    for number in (3, -1):
        with pytest.raises(ValueError, match=f"can drop 0 to 2 tokens, .* got {number}"):
            loop.rollback(number)


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_row_is_the_same_beside_any_others(name, how):
    """Bit for bit, in a batch with as many rows."""
    model = language_model(MECHANISMS[name])
    session = prefill(model, [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [9, 9, 9, 9, 9]], max_tokens=16)
    found = []
    for rows in ([0, 1, 2], [0, 0, 0], [0, 2, 1]):
        loop, sampler = decode_loop(model, session.select(rows), SAMPLINGS[how], seeds=[5, *rows[1:]])
        steps = []
        for _ in range(16):
            loop.step()
            steps.append((sampler.answer[:, 0].clone(), loop._logits[0].clone()))
        found.append(steps)
    for other in found[1:]:
        for (answer, logits), (same_answer, same_logits) in zip(found[0], other, strict=True):
            assert torch.equal(answer, same_answer)
            assert torch.equal(logits, same_logits)


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "softmax"])
def test_a_row_is_the_same_beside_longer_and_shorter_ones(name):
    model = language_model(MECHANISMS[name])
    alone, longer = prefill(model, [[3, 1, 4]] * 2, max_tokens=16), prefill(model, [[2] * 23] * 2, max_tokens=16)
    mixed = alone.select([0, 1])
    mixed.state = mixed.state.put([1], longer.state.select([1]))
    mixed.logits[1] = longer.logits[1]
    answers = [run(*decode_loop(model, one, SAMPLINGS["sampled"]), 16) for one in (alone, mixed)]
    for first, second in zip(*answers, strict=True):
        assert torch.equal(first[:, 0], second[:, 0])
