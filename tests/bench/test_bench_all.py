"""`longspan bench all`: every subject in one run, summed up on one page. What is measured is made up here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.bench import Case, Effort, Run, Subject
from longspan.bench.report import Group, Row, save
from longspan.bench.summary import ratios
from longspan.cli.bench import main

PARTS = ["mechanisms", "mechanisms-bidirectional", "layers", "layers-bidirectional", "train", "generate"]


class Machine:
    """Takes measurements at once: a length's worth of milliseconds for ours, thrice that for others."""

    def __init__(self, until: int = 10**6) -> None:
        self.taken: list[tuple[Subject, Case, Effort]] = []
        self.until = until

    def __call__(self, subject: Subject, case: Case, effort: Effort) -> Run:
        if len(self.taken) == self.until:
            raise KeyboardInterrupt
        self.taken.append((subject, case, effort))
        ms = case.length * (1.0 if subject.package == "longspan" else 3.0)
        if getattr(subject, "task", None) == "train":
            return Run("ok", "", {"step": [ms]}, {"step": case.length}, ms / 2)
        if getattr(subject, "task", None) == "generate":
            return Run("ok", "", {"token": [ms]}, {"token": 16}, ms / 2)
        return Run("ok", "", {"forward": [ms], "forward_backward": [2 * ms]}, peak_mb=ms / 4)


def bench_all(monkeypatch: pytest.MonkeyPatch, machine: Machine, *arguments: str) -> int:
    monkeypatch.setattr("longspan.bench.runner.measure", machine)
    monkeypatch.setattr(sys, "argv", ["longspan.bench", "all", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_everything_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    folder, machine = tmp_path / "new" / "results", Machine()
    assert bench_all(monkeypatch, machine, "--lengths=64,256", "--rounds=1", "--out", str(folder)) == 0
    for part in PARTS:
        found = json.loads((folder / f"{part}.json").read_text())
        assert found["arguments"]["what"] == part.removesuffix("-bidirectional")
        assert {row["case"]["causal"] for row in found["rows"]} == {not part.endswith("bidirectional")}
        assert {row["case"]["length"] for row in found["rows"]} == {64, 256}
        assert {row["peak_mb"] is not None for row in found["rows"]} == {True}
        assert (folder / f"{part}.png").stat().st_size > 1000
    assert sorted(file.stem for file in folder.glob("*.json")) == sorted([*PARTS, "summary"])
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert list(dict.fromkeys(row["part"] for row in rows)) == PARTS
    # Full attention stands beside every mechanism, PyTorch's own where it is measured.
    beside = {(row["part"], row["ours"]): row for row in rows if row["peer"] == "PyTorch SDPA"}
    assert beside["mechanisms", "linear, softmax map"]["ratios"] == {
        "forward_ms": 3.0,
        "forward_backward_ms": 3.0,
        "peak_mb": 3.0,
    }
    (model,) = [row for row in rows if (row["part"], row["ours"], row["length"]) == ("train", "local", 64)][-1:]
    assert (model["peer"], model["ratios"]) == ("softmax", {"step_ms": 1.0, "peak_mb": 1.0})
    page = (folder / "report.html").read_text()
    for part in PARTS:
        assert f"<h2>{part}</h2>" in page
        assert f'src="{part}.png"' in page
    printed = capfd.readouterr()
    assert "above 1, longspan needs less" in printed.out
    assert "layers (3 of 6), n = 64, round 1: longspan for" in printed.err


def test_options_reach_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    sizes = ["--lengths=40", "--heads=2", "--head-dim=8", "--batch=3", "--depth=5", "--dtype=bfloat16"]
    effort = ["--rounds=2", "--repeats=7", "--threads=1", "--timeout=11", "--memory-limit=2"]
    options = ["--mechanisms=linear,softmax", "--compile", "--no-peers", "--causal", "--out", str(tmp_path)]
    assert bench_all(monkeypatch, machine, *sizes, *effort, *options) == 0
    assert {file.stem for file in tmp_path.glob("*.json")} == {"mechanisms", "layers", "train", "generate", "summary"}
    wanted = Case(40, 3, 2, 8, True, "bfloat16", "cpu")
    for subject, case, effort in machine.taken:
        assert subject.package == "longspan"
        assert case == replace(wanted, depth=5 if hasattr(subject, "task") else 1)
        assert (effort.repeats, effort.threads, effort.timeout, effort.memory_limit) == (7, 1, 11, 2)
        assert getattr(subject, "compiled", True) == (getattr(subject, "task", "") != "generate")
    assert len(machine.taken) == 2 * len({subject for subject, *_ in machine.taken})  # rounds
    # A layer of `softmax` there is none: the rest of what was asked for is measured.
    layers = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert {row["mechanism"] for row in layers} == {"linear"}


def test_bidirectional_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    arguments = ["--bidirectional", "--mechanisms=local", "--lengths=64", "--rounds=1", "--out", str(tmp_path)]
    assert bench_all(monkeypatch, machine, *arguments) == 0
    assert {case.causal for _, case, _ in machine.taken} == {False}
    names = {"mechanisms-bidirectional", "layers-bidirectional", "summary"}
    assert {file.stem for file in tmp_path.glob("*.json")} == names
    assert not list(tmp_path.glob("*.png"))  # one length is no line


def test_a_run_that_is_ended_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    whole = Machine()
    arguments = ["--mechanisms=local", "--lengths=64,256", "--rounds=1", "--no-peers"]
    bench_all(monkeypatch, whole, *arguments, "--out", str(tmp_path / "whole"))
    ended = Machine(until=len(whole.taken) - 1)  # in the last group of the last part
    assert bench_all(monkeypatch, ended, *arguments, "--out", str(tmp_path)) == 130
    assert "what was measured before is written" in capfd.readouterr().err
    for part in PARTS:
        rows = [json.loads((folder / f"{part}.json").read_text())["rows"] for folder in (tmp_path, tmp_path / "whole")]
        assert rows[0] == (rows[1] if part != "generate" else rows[1][:1])
    page = (tmp_path / "report.html").read_text()
    assert "<h2>train</h2>" in page
    assert "<h2>generate</h2>" not in page


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    file.write_text("what was there")
    real = Path.write_text

    def half(self: Path, text: str) -> int:
        real(self, text[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        save(file, [], {})
    assert file.read_text() == "what was there"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mechanisms linaer", "did you mean 'linear'?"),
        ("--lengths 8k", "got '8k'"),
        ("--out pyproject.toml", "cannot write pyproject.toml: File exists"),
    ],
)
def test_wrong_arguments(arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert bench_all(monkeypatch, Machine(until=0), *arguments.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_failed_is_named_and_has_no_ratio() -> None:
    from longspan.bench import Ours, Theirs

    case = Case(64)
    mine = Row(Ours("local, 257 keys", "local"), case, [Run("ok", "", {"forward": [2.0]}, peak_mb=1.0)])
    other = Row(Theirs("local-attention, 257 keys"), case, [Run("out of memory", "too much")])
    (row,) = ratios({"mechanisms": [Group("local", case, [mine, other])]})
    assert row["status"] == "out of memory"
    assert set(row["ratios"].values()) == {None}
