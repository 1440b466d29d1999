"""The quality benchmark: candidates that train, results that grow, and their table."""

from __future__ import annotations

import json
import random
import re
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.bench import quality
from longspan.bench.jsonl import append
from longspan.bench.quality import BATCH_FACTOR, RECIPES, QualityOptions, QualitySubject, candidates, run
from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig
from longspan.train.config import described, resolve

QUICK = MeasurementConfig(rounds=1, repeats=2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(random.Random(0).choices(b"the cat sat on a mat. ", k=60_000)))
    return path


def subject(text: Path, **changes: Any) -> QualitySubject:
    values: dict[str, Any] = {"seconds": 0.01, "preset": "tiny", "held_out": 500, **changes}
    return QualitySubject("x", str(text), **values)


def test_a_candidate_trains_for_a_time_and_is_scored_on_the_end(text: Path) -> None:
    calls: list[str] = []
    tried = subject(text, candidate="delta-head/local", seconds=0.5, held_out=5000)
    result = tried.measure(Case(64, batch_size=2), QUICK, lambda: calls.append("compiled"))
    assert (result.status, calls) == ("ok", ["compiled"])
    assert 0 < result.metrics["bits_per_byte"] < 9
    assert (result.metrics["context"], result.metrics["scored"]) == (64, 4999)
    assert result.metrics["train_seconds"] >= 0.5
    assert result.metrics["tokens_per_second"] > 0
    assert len(result.metrics["held_out_curve"]) == 1
    train = result.metrics["settings"]["train"]
    assert (train["data"], train["eval_data"], train["out"]) == (["train.txt"], ["scored.txt"], "run")
    layers = result.metrics["settings"]["model"]["attention"]["mechanism"]
    assert [layer["mechanism"] for layer in layers] == ["delta", "local"]


def test_seconds_of_a_cpu_are_those_of_the_processor(text: Path) -> None:
    """What waits, or runs beside others, trains no shorter."""
    result = subject(text, seconds=0.5).measure(Case(64, batch_size=2), QUICK, lambda: time.sleep(1))
    assert result.metrics["steps"] > 1
    assert (result.metrics["clock"], result.metrics["train_seconds"] >= 0.5) == ("processor", True)


def test_the_table_of_steps_has_a_row_for_each_candidate_and_time() -> None:
    row = {"status": "ok", "candidate": "softmax", "seconds": 40.0, "steps": 1200, "tokens_per_second": 5000}
    rows = [{**row, "bits_per_byte": bits} for bits in (2.1, 2.2)]
    other = {**row, "seconds": 17.5, "steps": 3, "bits_per_byte": 3.0}
    failed = {"status": "error", "candidate": "softmax", "seconds": 40.0}
    assert quality.steps_table([*rows, other, failed]).rows == [
        ["softmax", "40", "1,200", "5,000", "2.150", "2"],
        ["softmax", "17.5", "3", "5,000", "3.000", "1"],
    ]


def test_a_candidate_trains_for_a_number_of_steps(text: Path) -> None:
    result = subject(text, steps=3, eval_every=2).measure(Case(16, batch_size=2), QUICK)
    assert result.metrics["steps"] == 3
    assert result.metrics["epochs"] == pytest.approx(3 * 2 * 16 / 60_000, rel=0.05)
    row = {"status": "ok", "candidate": "softmax", "parameters": 1_230_000, "tokens": 400, "epochs": 2.01}
    rows = [{**row, "held_out_curve": [[200, 1.0, 2.5 + x], [400, 2.0, 2.25 - x]]} for x in (0.0, 0.1)]
    rows += [{**rows[0], "candidate": "other", "epochs": 1.0, "held_out_curve": [[400, 1.0, 3.0]]}]
    assert quality.epochs_table([*rows, {"status": "crashed", "candidate": "softmax"}]).rows == [
        ["softmax", "1.2 M", "2.550", "2.200", "2"],
        ["other", "1.2 M", "3.000", "–", "1"],
    ]


def test_runs_of_a_number_of_steps_are_their_own(text: Path, workers: type[FakeWorker]) -> None:
    for steps, number in ((5, 8), (5, 8), (6, 16), (None, 24)):
        rows = run(options(text, steps=steps))
        assert len(workers.started) == number
    assert [(row["seconds"], row["max_steps"]) for row in rows[::8]] == [(None, 5), (None, 6), (0.1, None)]
    assert {subject.steps for subject, _ in workers.started} == {5, 6, None}


def test_the_curve_of_the_held_out_text(text: Path) -> None:
    result = subject(text, seconds=0.5, eval_every=2).measure(Case(16, batch_size=2), QUICK)
    scores = result.metrics["held_out_curve"]
    steps = [tokens / 32 for tokens, _, _ in scores]
    assert steps[:2] == [2, 4]
    assert steps[-1] == result.metrics["steps"]
    assert scores[-1][2] == result.metrics["bits_per_byte"]
    assert result.metrics["curve"][-1][0] == scores[-1][0]


def test_seed_and_candidate_reach_the_trainer(text: Path, tmp_path: Path) -> None:
    flags = subject(text, candidate="softmax", seed=5)._flags(Case(16, batch_size=3), tmp_path)
    settings = resolve(flags).train
    assert (settings.seed, settings.mechanism, settings.context, settings.batch_size) == (5, "softmax", 16, 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_changes_the_settings_of_a_candidate(text: Path, tmp_path: Path, recipe: str) -> None:
    flags = subject(text, candidate=f"softmax@{recipe}", preset="small")._flags(Case(16, batch_size=5), tmp_path)
    settings = resolve({**flags, "data": ("x",), "out": "y"})
    found = described(settings, settings.complete(256, 0))
    for name, value in RECIPES[recipe].items():
        *groups, field = name.split(".")
        if field == BATCH_FACTOR:
            field, value = "batch_size", int(5 * value)
        values = found if groups else found["train"]
        for group in groups:
            values = values[group]
        assert values[field] == value


def test_recipes_follow_each_other(text: Path, tmp_path: Path) -> None:
    flags = subject(text, candidate="softmax@none@fast@half-batch@all", preset="small")._flags(Case(16, 5), tmp_path)
    assert (flags["muon_lr"], flags["decay_type"], flags["batch_size"]) == (5e-3, "linear", 2)
    assert subject(text, candidate="softmax@half-batch")._flags(Case(16, 1), tmp_path)["batch_size"] == 1


@pytest.mark.parametrize("name", candidates(8, 4096))
def test_candidates_are_settings_of_a_model(name: str) -> None:
    settings = resolve({**candidates(8, 4096)[name], "preset": "small", "data": ("x",), "out": "y"})
    attention = settings.complete(256, 0).attention
    assert ("linear" in str(attention.mechanism)) == ("linear" in name)
    assert (attention.conv_size, attention.out_norm) == (4 * ("conv" in name), name not in ("softmax", "local+linear"))
    assert ("window" in str(attention.mechanism)) == ("local" in name)
    window = re.search(r"local-(\d+)", name)
    if "local" in name:
        assert f"'window': {window[1] if window else 256}" in str(attention.mechanism)
        assert "halves" in str(attention.rotary)


def options(text: Path, **changes: Any) -> QualityOptions:
    values: dict[str, Any] = {"data": str(text), "candidates": ("softmax", "local+linear"), "contexts": (64, 128)}
    values |= {"batch_sizes": (2, 1), "seconds": 0.1, "preset": "tiny", "out": text.with_name("out.jsonl"), "jobs": 3}
    return QualityOptions(**{**values, **changes})


class FakeWorker:
    """Records what is started and ended, instead of processes."""

    started: list[tuple[QualitySubject, Case]]
    finished: list[QualitySubject]
    killed: int

    def __init__(self, subject: QualitySubject, case: Case, config: MeasurementConfig) -> None:
        self.subject = subject
        FakeWorker.started.append((subject, case))

    def wait_until_ready(self) -> None:
        assert not FakeWorker.finished or FakeWorker.finished[-1] is not self.subject

    def finish(self) -> Measurement:
        FakeWorker.finished.append(self.subject)
        metrics = {"bits_per_byte": 2.0 + self.subject.seed, "tokens_per_second": 5_000_000, "parameters": 1_230_000}
        return Measurement("crashed" if self.subject.candidate == "3delta-head/local" else "ok", metrics=metrics)

    def kill(self) -> None:
        FakeWorker.killed += 1


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.started, FakeWorker.finished, FakeWorker.killed = [], [], 0
    monkeypatch.setattr(quality, "WorkerProcess", FakeWorker)
    return FakeWorker


def test_options_as_json(text: Path, workers: type[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes are those that a worker imports, not those of __main__."""
    values = {
        "data": str(text),
        "candidates": ["local+linear@muon"],
        "seeds": [5],
        "contexts": [64],
        "batch_sizes": [2],
    }
    values["out"] = str(text.with_name("out.jsonl"))
    monkeypatch.setattr(sys, "argv", ["quality", json.dumps(values)])
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):
        runpy.run_module("longspan.bench.quality", run_name="__main__")
    ((each, case),) = workers.started
    assert type(each) is QualitySubject
    assert (each.candidate, each.seed, case.length) == ("local+linear@muon", 5, 64)


def test_candidates_take_turns_and_what_exists_is_not_run_again(
    text: Path, workers: type[FakeWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(options(text))
    order = [(each.candidate, case.length, case.batch_size, each.seed) for each, case in workers.started]
    assert order[:2] == [("softmax", 64, 2, 0), ("local+linear", 64, 2, 0)]
    assert order[2:4] == [("softmax", 128, 1, 0), ("local+linear", 128, 1, 0)]
    assert [seed for *_, seed in order] == [0] * 4 + [1] * 4
    assert len(rows) == 8
    assert {"machine", "versions", "commit", "date"} <= rows[0].keys()
    shown = capsys.readouterr().out
    assert "64: bits per byte" in shown
    assert "2.500" in shown
    run(options(text))
    assert len(workers.started) == 8
    for change in ({"seconds": 0.2}, {"batch_sizes": (3, 2)}, {"held_out": 7}):
        run(options(text, seeds=(0,), **change))
        assert len(workers.started) == 12
        del workers.started[8:]


def test_failures_are_tried_again(text: Path, workers: type[FakeWorker]) -> None:
    for _ in range(2):
        rows = run(options(text, candidates=("3delta-head/local",), seeds=(0,)))
    assert [row["status"] for row in rows] == ["crashed"] * 4
    assert quality.table(rows).rows == []


def test_the_time_budget_ends_a_run(text: Path, workers: type[FakeWorker]) -> None:
    assert run(options(text, minutes=1e-9)) == []
    assert workers.killed == len(workers.started) == 8


def test_a_damaged_file_is_refused(text: Path) -> None:
    chosen = options(text)
    append(chosen.out, {"candidate": "softmax"})
    append(chosen.out, {"candidate": "softmax"})
    with pytest.raises(ValueError, match=r"out.jsonl, line 1: a result has candidate, context, seed, seconds, status"):
        run(chosen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "give its file as data"),
        ({"preset": "smal"}, "unknown preset 'smal'"),
        ({"candidates": ("softmax@muonn",)}, "unknown recipe 'muonn'.*did you mean 'muon'"),
        ({"candidates": ("softmx",)}, "unknown candidate 'softmx'.*did you mean 'softmax'"),
        ({"contexts": (64,)}, "one batch size for each context"),
        ({"contexts": (0, 1)}, "contexts must be positive, got 0, 1"),
        ({"seconds": 0.0}, "seconds must be positive, got 0"),
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"eval_every": 0}, "eval_every must be positive, got 0"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_wrong_options_are_refused(text: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(text, **changes)
    with pytest.raises(ValueError, match="there is no such file"):
        run(replace(options(text), data=str(text / "nothing")))
