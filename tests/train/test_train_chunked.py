"""Training in pieces of the sequence gives the losses and gradients of the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training import trained, write_corpus

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.mechanisms.performer import random_feature_mechanisms
from longspan.train.chunked import chunked_loss, chunked_losses
from longspan.train.config import resolve
from longspan.train.objectives import Objective
from longspan.train.setup import check_model, is_compiled, is_packed

V, T = 11, 67
MECHANISMS: list[dict[str, Any]] = [
    {"mechanism": "softmax"},
    {"mechanism": "local", "window": 5},
    {"mechanism": "local", "window": 4, "look_back": 1},
    {"mechanism": "linear"},
    {"mechanism": "linear", "feature_map": "softmax", "normalize": "feature"},
    {"mechanism": "performer"},
    {"mechanism": "linformer", "rank": 4, "max_length": 128},
    {"mechanism": "decay"},
    {"mechanism": "decay", "gate": "channel"},
    {"mechanism": "delta"},
    {
        "mechanism": "split",
        "parts": [{"mechanism": "local", "num_heads": 2, "window": 5}, {"mechanism": "delta", "num_heads": 2}],
    },
]


def build(mechanism: Any = "linear", **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=4, mechanism=mechanism, **options.pop("attention", {}))
    return LanguageModel(
        ModelConfig(dim=16, depth=2, causal=True, vocab_size=V, attention=attention, **options)
    ).double()


def assert_equal_gradients(model: LanguageModel, loss: torch.Tensor, expected: torch.Tensor) -> None:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    wanted = torch.autograd.grad(expected, list(parameters.values()), allow_unused=True)
    assert abs(float((loss - expected).detach())) < 1e-9
    for name, x, y in zip(parameters, found, wanted, strict=True):
        assert (x is None) == (y is None), name
        assert x is None or float((x - y).abs().max()) < 1e-9, name


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: "-".join(map(str, m.values()))[:40])
def test_pieces_have_the_loss_and_gradients_of_the_whole(mechanism: dict[str, Any]) -> None:
    rotary = "halves" if mechanism["mechanism"] in ("softmax", "local") else "none"
    model = build(mechanism, token_shift=(0, 1), attention={"conv_size": 4, "rotary": rotary})
    tokens = torch.randint(V, (2, T))
    short = tokens[:, :3]
    assert_equal_gradients(model, chunked_loss(model, short, chunk_length=1)[0], model.loss(short))
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :9] = mask[1, 50:] = False
    for length, how in ((13, {}), (64, {}), (13, {"key_mask": mask})):
        loss, state = chunked_loss(model, tokens, chunk_length=length, **how)
        assert_equal_gradients(model, loss, model.loss(tokens, **how))
        assert state.length.tolist() == ([T, T] if not how else mask.sum(1).tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "double"},
        {"residual": "hyper"},
        {"positions": "learned", "max_length": T},
        {"embed_dim": 8, "tie_embeddings": True},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_pieces_of_other_models(options: dict[str, Any]) -> None:
    model, tokens = build(**options), torch.randint(V, (2, T))
    labels = torch.randint(V, (2, T)).masked_fill(torch.rand(2, T) < 0.3, -100)
    for length in (7, T, T + 1):
        loss, _ = chunked_loss(model, tokens, labels, chunk_length=length)
        assert_equal_gradients(model, loss, model.loss(tokens, labels))


def test_gradients_flow_through_a_given_state() -> None:
    model, tokens = build("delta"), torch.randint(V, (2, T))
    labels = torch.randint(V, (2, T))
    _, state = model.extend(tokens[:, :23], model.new_state(2))
    first = model.loss(tokens[:, :23], labels[:, :23])
    second, _ = chunked_loss(model, tokens[:, 23:], labels[:, 23:], chunk_length=7, state=state)
    assert_equal_gradients(model, (23 * first + (T - 23) * second) / T, model.loss(tokens, labels))


def test_pieces_are_recomputed_from_the_last_to_the_first() -> None:
    model, tokens, seen = build(), torch.randint(V, (1, 65)), []
    extend = model.extend_hidden

    def record(x: torch.Tensor, state: Any, **how: Any) -> Any:
        seen.append((int(state.length), x.shape[1]))
        return extend(x, state, **how)

    model.extend_hidden = record  # type: ignore[method-assign]
    loss, _ = chunked_loss(model, tokens, chunk_length=16)
    pieces = [(0, 16), (16, 16), (32, 16), (48, 16), (64, 1)]
    assert seen == pieces
    loss.backward()
    assert seen[5:] == pieces[::-1]


def test_dropout_is_repeated_and_features_are_redrawn_once() -> None:
    model, tokens = build("linear", embed_dropout=0.4).train(), torch.randint(V, (1, T))
    inputs = model.embedding.weight

    def loss(scale: float) -> torch.Tensor:
        torch.manual_seed(5)
        with torch.no_grad():
            inputs[3, 2] += scale
        found = chunked_loss(model, tokens, chunk_length=17)[0]
        with torch.no_grad():
            inputs[3, 2] -= scale
        return found

    found = torch.autograd.grad(loss(0.0), inputs)[0][3, 2]
    difference = (loss(1e-6) - loss(-1e-6)).detach() / 2e-6
    assert float(found) == pytest.approx(float(difference), rel=1e-5)
    models = [build({"mechanism": "performer", "redraw_interval": 2}).train() for _ in range(2)]
    for _ in range(5):
        models[0].loss(tokens)
        chunked_loss(models[1], tokens, chunk_length=17)[0].backward()
    draws = [[mechanism.draw for mechanism in random_feature_mechanisms(model)] for model in models]
    assert draws[0] == draws[1]
    assert min(draws[0]) > 0


def test_losses_of_the_tokens() -> None:
    model, tokens, labels = build("decay").eval(), torch.randint(V, (2, T)), torch.randint(V, (2, T))
    losses = chunked_losses(model, tokens, labels, chunk_length=16)
    assert abs(float(losses.mean()) - float(model.loss(tokens, labels).detach())) < 1e-6  # computed in float32
    assert losses.shape == (2, T)


def test_a_run_in_pieces_has_the_losses_of_the_whole(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text")
    settings: dict[str, Any] = {"steps": 3, "eval_every": 3, "packing": "off"}
    whole = trained(corpus, tmp_path / "whole", **settings)
    pieces = trained(corpus, tmp_path / "pieces", **settings, chunk_length=17)
    for one, other in zip(whole, pieces, strict=True):
        for name in {"loss", "eval_loss"} & set(one):
            assert other[name] == pytest.approx(one[name], rel=2e-6)


@pytest.mark.slow
def test_a_run_carries_states_through_pieces(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text")
    losses = []
    for length in (17, None):
        records = trained(corpus, tmp_path / f"run{length}", steps=3, carry_state=True, chunk_length=length)
        losses.append([record["loss"] for record in records if "loss" in record])
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


def test_the_objective_runs_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    extend = LanguageModel.extend_hidden

    def record(self: LanguageModel, tokens: torch.Tensor, *args: Any, **how: Any) -> Any:
        lengths.append(tokens.shape[1])
        return extend(self, tokens, *args, **how)

    monkeypatch.setattr(LanguageModel, "extend_hidden", record)
    tokens = torch.randint(V, (2, 61))
    Objective(build(), 61, chunk_length=29)(tokens, tokens)
    assert lengths == [29, 29, 3]


def test_what_cannot_be_combined_is_refused() -> None:
    base = {"data": ["x"], "out": "y", "chunk_length": 7}
    for changes, message in (
        ({"objective": "masked"}, "--chunk-length cannot be combined with --objective masked"),
        ({"packing": "on"}, "cannot be combined with --packing on"),
        ({"compile": "on"}, "cannot be combined with --compile on"),
        ({"chunk_length": 0}, "--chunk-length must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve({**base, **changes})
    settings = resolve({**base, "model.execution": "recompute"})
    with pytest.raises(ValueError, match=r"use --model\.execution keep with it"):
        check_model(settings.train, settings.complete(256, 0))
    assert not is_packed(settings.train, None)  # type: ignore[arg-type]
    assert not is_compiled(settings.train, False, torch.device("cuda"))
    with pytest.raises(ValueError, match="chunk_length must be at least 1, got 0"):
        chunked_loss(build(), torch.zeros(1, 3, dtype=torch.int64), chunk_length=0)
    config = ModelConfig(dim=16, depth=1, vocab_size=V, attention=AttentionConfig(num_heads=4))
    with pytest.raises(ValueError, match="only a causal model"):
        chunked_loss(LanguageModel(config), torch.zeros(1, 3, dtype=torch.int64), chunk_length=2)


MEMORY = """
import re, sys, torch
from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.train.chunked import chunked_loss
torch.set_num_threads(1)
attention = AttentionConfig(num_heads=2, mechanism="linear")
model = LanguageModel(ModelConfig(dim=16, depth=2, causal=True, vocab_size=11, attention=attention))
for length in (8, 64):
    tokens = torch.randint(11, (1, 2048 * length))
    (chunked_loss(model, tokens, chunk_length=2048)[0] if sys.argv[1] == "pieces" else model.loss(tokens)).backward()
    # Unlike ru_maxrss, without the memory of the process that started this one.
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_memory_does_not_grow_with_the_sequence() -> None:
    growth = {}
    for how in ("pieces", "whole"):
        done = subprocess.run([sys.executable, "-c", MEMORY, how], capture_output=True, text=True, check=True)
        few, many = map(float, done.stdout.split())
        growth[how] = many - few
    assert growth["whole"] > 100  # MiB, for 8 times the tokens
    assert growth["pieces"] < 0.15 * growth["whole"], growth
