"""Synthetic tasks: their sequences and labels, and `longspan eval --task`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from training import longspan

from longspan import list_mechanisms
from longspan.models.config import ModelConfig
from longspan.train.synthetic.evaluation import (
    NUM_SCORED,
    TrialConfig,
    TrialProgress,
    mechanism_for,
    model_for,
    run_trial,
)
from longspan.train.synthetic.tasks import (
    DEPTHS,
    TASKS,
    Copy,
    Examples,
    ListOps,
    Needle,
    Parity,
    Recall,
    SelectiveCopy,
    SyntheticTask,
    accuracy_by_depth,
    in_score_split,
)

CPU = torch.device("cpu")
SHORT = {"copy": 22, "selective-copy": 59, "mqar": 79, "needle": 29, "parity": 61, "listops": 53}


def examples(task: SyntheticTask, number: int, side: str = "train", seed: int = 3) -> Examples:
    return task.examples(side, seed, 5, number)


def rows(found: Examples) -> list[tuple[int, ...]]:
    return [tuple(row) for row in found.tokens.tolist()]


@pytest.mark.parametrize("name", TASKS)
def test_streams_depend_on_the_seed(name: str) -> None:
    task = TASKS[name](SHORT[name])
    first = task.examples("train", 3, 5, 17)
    again = task.examples("train", 3, 5, 17)
    for a, b in zip(vars(first).values(), vars(again).values(), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert len(first.tokens) == len(first.labels) == 17
    for other in (task.examples("train", 4, 5, 17), task.examples("train", 3, 6, 17)):
        assert not set(rows(first)) & set(rows(other))
    assert int(first.tokens.min()) >= 0
    assert int(first.tokens.max()) < task.vocab_size
    assert first.tokens.shape[1] <= task.length


def test_no_sequence_is_in_both_splits() -> None:
    """Two symbols give 256 sequences, all of which are drawn; each is always in the same split."""
    task = Copy(4)
    sides = {side: set() for side in ("train", "score")}
    for side, held in sides.items():
        for seed in range(3):
            held.update(row for index in range(8) for row in rows(task.examples(side, seed, index, 256)))
    assert not sides["train"] & sides["score"]
    assert len(sides["train"] | sides["score"]) == 256
    assert min(len(held) for held in sides.values()) > 64


@pytest.mark.parametrize("name", TASKS)
def test_the_split_depends_on_the_content(name: str) -> None:
    task = TASKS[name](SHORT[name])
    found = {side: examples(task, 41, side).tokens for side in ("train", "score")}
    for side, tokens in found.items():
        whole = F.pad(tokens, (0, task.length - tokens.shape[1])) if name == "listops" else tokens
        assert (in_score_split(whole.numpy(), task.length) == (side == "score")).all()


def test_copy() -> None:
    found = examples(Copy(22), 31)
    assert found.tokens.shape == (31, 22)
    for tokens, labels in zip(found.tokens.tolist(), found.labels.tolist(), strict=True):
        mark = tokens.index(0)
        assert mark == 11
        assert tokens.count(0) == 1
        assert labels[:mark] == [-100] * mark
        assert labels[mark:] == tokens[:mark]
        assert tokens[mark + 1 :] == labels[mark:-1]
    said = Counter(found.tokens[:, :11].flatten().tolist())
    assert set(said) == set(range(1, 17))


def test_recall() -> None:
    task = Recall(79)
    found = examples(task, 37)
    assert task.pairs == 4
    distances = []
    for tokens, labels in zip(found.tokens.tolist(), found.labels.tolist(), strict=True):
        held = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
        assert len(held) == 4, "keys are distinct"
        assert all(1 <= key <= 64 < value <= 128 for key, value in held.items())
        asked = {i: label for i, label in enumerate(labels) if label != -100}
        assert min(asked) >= 8
        assert sorted(tokens[i] for i in asked) == sorted(held), "every key is queried once"
        assert all(held[tokens[i]] == label for i, label in asked.items())
        assert all(tokens[i] == 0 for i in range(8, 79) if i not in asked), "answers are not shown"
        distances += [i - 8 for i in asked]
    # Short distances are more frequent: with uniform positions half of them would be past the middle.
    assert sum(d < 36 for d in distances) > 0.6 * len(distances)
    assert max(distances) > 50
    orders = {tuple(t for t in row[8:] if t) == tuple(row[0:8:2]) for row in found.tokens.tolist()}
    assert False in orders


def test_recall_of_a_large_vocabulary() -> None:
    """The sizes of the paper: 8192 tokens, of which 4095 are keys."""
    task = Recall(1024, pairs=64, vocabulary=8192)
    found = examples(task, 67)
    assert (task.vocab_size, task.keys) == (8192, 4095)
    keys, values = found.tokens[:, 0:128:2], found.tokens[:, 1:128:2]
    assert all(len(set(row)) == 64 for row in keys.tolist())
    assert 1 <= int(keys.min()) < 200 < 3900 < int(keys.max()) <= 4095
    assert 4096 <= int(values.min()) < 4300 < 7900 < int(values.max()) <= 8191
    assert ((found.labels != -100).sum(1) == 64).all()
    with pytest.raises(ValueError, match=r"mqar of 64 tokens and 64 keys can have 1 to 16 pairs, got 17"):
        Recall(64, pairs=17)
    with pytest.raises(ValueError, match=r"mqar of 64 tokens and 5 keys can have 1 to 5 pairs, got 6"):
        Recall(64, pairs=6, vocabulary=11)


def test_selective_copy() -> None:
    found = examples(SelectiveCopy(59), 41)
    for tokens, labels in zip(found.tokens.tolist(), found.labels.tolist(), strict=True):
        symbols = [token for token in tokens if 1 <= token <= 16]
        assert len(symbols) == 14
        assert tokens[45:] == [17] * 14
        assert 17 not in tokens[:45]
        assert labels == [-100] * 45 + symbols
    gaps = {tuple(i for i, token in enumerate(row) if 1 <= token <= 16) for row in found.tokens.tolist()}
    assert len(gaps) == 41, "positions are random"
    assert int((examples(SelectiveCopy(1024), 3).labels != -100).sum(1).max()) == 16


def test_parity() -> None:
    found = examples(Parity(61, first=7), 43)
    for tokens, labels in zip(found.tokens.tolist(), found.labels.tolist(), strict=True):
        assert labels[:6] == [-100] * 6
        assert labels[6:] == [sum(tokens[: i + 1]) % 2 for i in range(6, 61)]
    assert 0.4 < float(found.tokens.double().mean()) < 0.6
    with pytest.raises(ValueError, match=r"the first label of parity is at bit 1 to 61, got 62"):
        Parity(61, first=62)


def test_recall_has_at_most_64_pairs() -> None:
    found = examples(Recall(2053), 2)
    assert int((found.labels != -100).sum(1).max()) == 64


def test_needle() -> None:
    found = examples(Needle(29), 300)
    assert found.depth is not None
    places = []
    for tokens, labels, depth in zip(found.tokens.tolist(), found.labels.tolist(), found.depth.tolist(), strict=True):
        assert (tokens.count(0), tokens.count(1), tokens[-1]) == (1, 1, 1)
        place = tokens.index(0)
        assert depth == pytest.approx(place / 26)
        assert labels == [-100] * 28 + [tokens[place + 1]]
        assert 2 <= labels[-1] <= 17
        places.append(place)
    assert set(places) == set(range(27)), "every position occurs"


def value_of(words: list[str]) -> tuple[int, int]:
    """Return the value of an expression and the depth of its brackets, computed with a stack."""
    stack: list[list[Any]] = []
    deepest = 0
    done: list[int] = []
    for place, word in enumerate(words):
        assert not done, f"words after the end at {place}"
        if word.startswith("["):
            stack.append([word[1:]])
            deepest = max(deepest, len(stack))
        elif word.isdigit():
            stack[-1].append(int(word))
        else:
            assert word == "]"
            name, *arguments = stack.pop()
            assert 2 <= len(arguments) <= 10
            value = {
                "MIN": lambda a: sorted(a)[0],
                "MAX": lambda a: sorted(a)[-1],
                "MED": lambda a: int(median(a)),
                "SM": lambda a: int(str(sum(a))[-1]),
            }[name](arguments)
            stack[-1].append(value) if stack else done.append(value)
    assert not stack
    return done[0], deepest


VOCABULARY = ["", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]"]


@pytest.mark.parametrize("length", [2000, 53])
def test_listops(length: int) -> None:
    found = examples(ListOps(length), 120)
    assert found.key_mask is not None
    seen: Counter[str] = Counter()
    deepest = 0
    for tokens, kept, label in zip(found.tokens, found.key_mask, found.labels.tolist(), strict=True):
        number = int(kept.sum())
        assert length / 4 <= number <= length
        assert kept[:number].all()
        assert not tokens[number:].any()
        words = [VOCABULARY[token] for token in tokens[:number].tolist()]
        value, depth = value_of(words)
        assert value == label
        seen.update(words)
        deepest = max(deepest, depth)
    assert set(seen) == set(VOCABULARY) - {""}
    assert seen["]"] == sum(seen[word] for word in VOCABULARY[11:15])
    assert deepest <= 9, "nine levels of operations, digits on the tenth"
    assert deepest == 9 or length < 2000
    classes = Counter(found.labels.tolist())
    assert set(classes) == set(range(10))
    assert max(classes.values()) < 0.4 * 120


def test_listops_medians_and_sums() -> None:
    assert value_of(["[MED", "4", "9", "]"])[0] == 6
    assert value_of(["[SM", "7", "8", "[MAX", "4", "6", "]", "]"])[0] == 1
    even = re.compile(r"\[MED \d \d \d \d \]")
    text = " ".join(VOCABULARY[t] for t in examples(ListOps(2000), 60).tokens.flatten().tolist() if t)
    assert even.search(text)


@pytest.mark.parametrize("name", TASKS)
def test_short_lengths_are_refused(name: str) -> None:
    least = TASKS[name].min_length
    assert len(TASKS[name](least).examples("train", 0, 0, 3).tokens) == 3
    with pytest.raises(ValueError, match=rf"--length {least - 1} is too short for {name}: use at least {least}"):
        TASKS[name](least - 1)


def trial(task: SyntheticTask, mechanism: dict[str, Any], **effort: Any) -> dict[str, Any]:
    show = TrialProgress(1, 1, Console(quiet=True))
    return run_trial(task, model_for(task, mechanism), TrialConfig(**effort), CPU, show)


def test_accuracy_by_depth() -> None:
    hits = torch.tensor([True, False, True, True, False])
    depth = torch.tensor([0.0, 0.1, 0.5, 1.0, 0.99])
    found = {part["from"]: (part["rows"], part["accuracy"]) for part in accuracy_by_depth(hits, depth)}
    assert len(found) == DEPTHS
    assert found[0.0] == (2, 0.5)
    assert found[0.5] == (1, 1.0)
    assert found[0.875] == (2, 0.5)
    assert found[0.25] == (0, None)


def test_default_windows_do_not_reach_the_source_of_a_copy() -> None:
    for length in (16, 64, 256, 1000):
        config = model_for(Copy(length), mechanism_for("local", length))
        window: int = dict(config.attention.mechanism)["window"]  # type: ignore[arg-type]
        assert config.depth * (window - 1) + 2 * config.depth < length // 2


@pytest.mark.parametrize("name", list_mechanisms())
@pytest.mark.parametrize("task", TASKS)
def test_every_mechanism_runs_on_every_task(task: str, name: str) -> None:
    made = TASKS[task](SHORT[task])
    found = trial(made, mechanism_for(name, made.length), steps=1, batch_size=7)
    assert 0 <= found["accuracy"] <= 1
    assert ModelConfig.from_dict(json.loads(json.dumps(found["model"]))) == model_for(
        made, mechanism_for(name, made.length)
    )


def test_table_and_file_of_trials(tmp_path: Path) -> None:
    words = ["eval", "--task", "needle,copy", "--mechanisms", "local,linear", "--length", 16, "--steps", 8]
    out = tmp_path / "deep" / "found.json"
    done = longspan(*words, "--out", out, log=tmp_path / "log")
    assert done.status == 0, done.stderr
    found = json.loads(out.read_text())
    tried = [(t["task"], t["mechanism"], t["length"], t["steps"]) for t in found["trials"]]
    assert tried == [(task, name, 16, 8) for task in ("needle", "copy") for name in ("local", "linear")]
    assert {"python", "torch", "longspan"} <= set(found["versions"])
    assert {"commit", "date", "device"} <= set(found)
    assert found["effort"]["batch_size"] == 32
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    for t in found["trials"]:
        assert f"{t['accuracy']:.1%}" in done.stdout
    assert "chance" in done.stdout
    assert "88–100" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("copy, linear: ")]
    assert re.fullmatch(r"copy, linear: step 8/8, loss \d\.\d{4}", lines[-2])
    assert re.fullmatch(r"copy, linear: accuracy \d+\.\d% after 8 steps, \d+ s", lines[-1])
    assert "\x1b" not in done.stdout + done.stderr
    for flag, name, value in (("--seed", "seed", 1), ("--batch-size", "batch_size", 5)):
        fewer = ["eval", "--task", "copy", "--mechanisms", "linear", *words[5:]]
        other = longspan(*fewer, flag, value, "--out", out, log=tmp_path / "log")
        assert other.status == 0, other.stderr
        (changed,) = (t for t in json.loads(out.read_text())["trials"] if t["task"] == "copy")
        assert json.loads(out.read_text())["effort"] == {**found["effort"], name: value}
        assert changed["train_loss"] != found["trials"][-1]["train_loss"]


def test_a_trial_is_reproducible_and_restores_the_random_state() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        trial(Copy(16), mechanism_for("performer", 16), steps=3, batch_size=7, seed=seed) for seed in (2, 2, 3)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert (first["train_loss"], first["accuracy"]) == (again["train_loss"], again["accuracy"])
    assert first["train_loss"] != other["train_loss"]


def test_trials_evaluate_the_score_split_and_seed_the_weights() -> None:
    class Watched(Copy):
        def examples(self, side: str, seed: int, index: int, size: int) -> Examples:
            asked.append((side, seed, index, size))
            return super().examples(side, 0, index, size)

    losses = []
    for seed in (2, 3):
        asked: list[tuple[str, int, int, int]] = []
        losses.append(trial(Watched(16), mechanism_for("local", 16), steps=2, batch_size=300, seed=seed)["train_loss"])
        trained = [("train", seed, 0, 300), ("train", seed, 1, 300)]
        assert asked == [*trained, ("score", seed, 0, 300), ("score", seed, 1, NUM_SCORED - 300)]
    assert losses[0] != losses[1]


WRONG = {
    "a task nobody knows": (
        ["--task", "coppy"],
        "unknown task 'coppy'; there is copy, selective-copy, mqar, needle, parity, listops (did",
    ),
    "no task": (["--task", ","], "--task is empty; use copy"),
    "a mechanism nobody knows": (["--task", "copy", "--mechanisms", "liner"], "did you mean 'linear'?"),
    "no mechanism": (["--task", "copy", "--mechanisms", ","], "--mechanisms is empty; use softmax"),
    "a saved model": (
        ["--task", "copy", "--model", "x", "--data", "y"],
        "--model, --data: for evaluating a saved model",
    ),
    "a context": (["--task", "copy", "--context", "9"], "--context: for evaluating a saved model"),
    "tokens": (["--task", "copy", "--max-tokens", "9"], "--max-tokens: for evaluating a saved model"),
    "extensions": (["--task", "copy", "--extensions", ".py"], "--extensions: for evaluating a saved model"),
    "format": (["--task", "copy", "--format", "bytes"], "--format: for evaluating a saved model"),
    "too short": (["--task", "mqar", "--length", "9"], "--length 9 is too short for mqar: use at least 16"),
    "no such device": (["--task", "copy", "--device", "gpu"], "unknown --device 'gpu'; there is cpu"),
    "steps of no task": (["--model", "x", "--data", "y", "--steps", "9"], "--steps: for training on a synthetic task"),
    "other flags of no task": (
        ["--mechanisms", "linear", "--length", "9", "--seed", "0"],
        "--mechanisms, --length, --s",
    ),
    "nothing": ([], "give --model and --data to evaluate a saved model, or --task"),
    "no data": (["--model", "x"], "give --model and --data"),
}


def test_wrong_flags_are_refused_in_one_line(tmp_path: Path) -> None:
    for words, text in WRONG.values():
        done = longspan("eval", *words, log=tmp_path / "log")
        assert done.status == 2, words
        assert done.stdout == ""
        assert done.stderr.startswith("longspan: ")
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    (tmp_path / "file").write_text("")
    done = longspan("eval", "--task", "copy", "--out", tmp_path / "file" / "x.json", log=tmp_path / "log")
    assert done.status == 1
    assert re.fullmatch(r"longspan: .*file.*\n", done.stderr)
