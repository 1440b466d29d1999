"""The decode loop on a CPU: threads, inference mode, autocast."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import casts_without_gradients_are_used_again

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling, stream
from longspan.generation import decode as loops
from longspan.generation import generate as generation
from longspan.generation.generate import prefill


def language_model(mechanism="linear"):
    attention = AttentionConfig(num_heads=3, head_dim=5, mechanism=mechanism)
    config = ModelConfig(dim=13, depth=2, causal=True, vocab_size=29, attention=attention)
    return LanguageModel(config).double()


@pytest.fixture
def threads(monkeypatch):
    """Two PyTorch threads during the test. Python threads that other tests left running do not count."""
    count, left = threading.active_count, threading.active_count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - left)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def threads_in_steps(model, number=2):
    """The number of threads at each step but the first, which samples from the prompt's logits."""
    seen = []
    handle = model.embedding.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    session = prefill(model, [3, 1, 4])
    seen.clear()
    list(stream(model, session, number + 1, sampling=Sampling(temperature=0)))
    handle.remove()
    return seen


def test_a_small_step_runs_in_one_thread_and_restores_the_number(threads):
    assert threads_in_steps(language_model()) == [1, 1]
    assert torch.get_num_threads() == threads


def test_a_large_step_runs_in_all_threads(threads, monkeypatch):
    monkeypatch.setattr(loops, "_SMALL", 100)
    assert threads_in_steps(language_model()) == [2, 2]


def test_a_state_that_grows_becomes_large(threads, monkeypatch):
    model = language_model("softmax")
    session = prefill(model, [3, 1, 4])
    held = sum(x.numel() for x in session.state.tensors().values())
    products = sum(x.weight.numel() for x in model.modules() if isinstance(x, torch.nn.Linear))
    monkeypatch.setattr(loops, "_SMALL", products + held)
    monkeypatch.setattr(loops, "_RECOUNT", 97)
    seen = threads_in_steps(model, 200)
    assert seen[0] == 1
    assert seen[-1] == 2


def test_a_process_with_other_threads_keeps_their_number(threads):
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert threads_in_steps(language_model()) == [2, 2]
    finally:
        done.set()
        other.join()


def test_the_number_of_threads_is_restored_after_an_error(threads):
    model = language_model()
    session = prefill(model, [3, 1, 4])
    steps = stream(model, session, sampling=Sampling(temperature=0))
    next(steps)
    model.embedding.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("now")))
    with pytest.raises(KeyError):
        next(steps)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("mechanism", ["linear", "softmax", "local"])
def test_gradients_flow_through_tokens_after_a_session(mechanism):
    model = language_model(mechanism)
    steps = stream(model, prefill(model, [3, 1, 4, 1]), sampling=Sampling(temperature=0))
    generated = [next(steps)[0][0] for _ in range(3)]
    session = steps.session
    assert not any(x.is_inference() for x in (session.logits, session.recent, *session.state.tensors().values()))
    logits, _ = model.extend(torch.tensor([[7, 2]]), session.state)
    logits.sum().backward()
    full = model(torch.tensor([[3, 1, 4, 1, *generated, 7, 2]]))[:, -2:]
    torch.testing.assert_close(logits, full, rtol=0, atol=1e-9)
    assert model.embedding.weight.grad is not None


@pytest.mark.skipif(casts_without_gradients_are_used_again(), reason="autocast of this PyTorch loses gradients")
def test_training_under_autocast_after_generating_there():
    model = language_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        generation.generate(model, [3, 1, 4], 3)
        loss = model(torch.tensor([[1, 5, 9]])).float().square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
