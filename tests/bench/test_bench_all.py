"""The suite `longspan bench all`, with invented measurements: sections, files, summary and interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.bench import BenchOptions, SubjectResult, sections
from longspan.bench.report import Comparison, save, summary
from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig, Subject
from longspan.bench.subjects.mechanisms import MechanismSubject, PeerSubject
from longspan.cli import main

PARTS = ["mechanisms", "mechanisms-bidirectional", "layers", "layers-bidirectional", "train", "generate", "decode"]


class Machine:
    """Returns invented times: as many milliseconds as tokens for longspan, three times as many for peers."""

    def __init__(self, until: int = 10**6) -> None:
        self.taken: list[tuple[Subject, Case, MeasurementConfig]] = []
        self.until = until

    def __call__(self, subject: Subject, case: Case, config: MeasurementConfig) -> Measurement:
        if len(self.taken) == self.until:
            raise KeyboardInterrupt
        self.taken.append((subject, case, config))
        ms = case.length * (1.0 if subject.package == "longspan" else 3.0)
        kind = type(subject).__name__
        if "Train" in kind:
            return Measurement("ok", "", {"step": [ms]}, {"step": case.length}, peak_mb=ms / 2)
        if "Generate" in kind or "Decode" in kind:
            return Measurement("ok", "", {"token": [ms]}, {"token": 16}, peak_mb=ms / 2)
        return Measurement("ok", "", {"forward": [ms], "forward_backward": [2 * ms]}, peak_mb=ms / 4)


def bench_all(monkeypatch: pytest.MonkeyPatch, machine: Machine, *arguments: str) -> int:
    monkeypatch.setattr("longspan.bench.runner.measure", machine)
    try:
        main(["bench", "all", *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_everything_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    folder, machine = tmp_path / "new" / "results", Machine()
    assert bench_all(monkeypatch, machine, "--lengths=64,256", "--rounds=1", "--out", str(folder)) == 0
    for part in PARTS:
        found = json.loads((folder / f"{part}.json").read_text())
        assert found["subject"] == part.removesuffix("-bidirectional")
        assert {row["case"]["causal"] for row in found["rows"]} == {not part.endswith("bidirectional")}
        assert {row["case"]["length"] for row in found["rows"]} == {64, 256}
        assert {row["peak_mb"] is not None for row in found["rows"]} == {True}
        assert (folder / f"{part}.png").stat().st_size > 1000
    assert sorted(file.stem for file in folder.glob("*.json")) == sorted([*PARTS, "summary"])
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert list(dict.fromkeys(row["section"] for row in rows)) == PARTS
    # Every mechanism is compared with full attention.
    beside = {(row["section"], row["subject"]): row for row in rows if row["peer"] == "PyTorch SDPA"}
    assert beside["mechanisms", "linear, softmax map"]["ratios"] == {
        "forward_ms": 3.0,
        "forward_backward_ms": 3.0,
        "peak_mb": 3.0,
    }
    (model,) = [row for row in rows if (row["section"], row["subject"], row["length"]) == ("train", "local", 64)][-1:]
    assert (model["peer"], model["ratios"]) == ("PyTorch transformer", {"step_ms": 3.0, "peak_mb": 3.0})
    page = (folder / "report.html").read_text()
    for part in PARTS:
        assert f"<h2>{part}</h2>" in page
        assert f'src="{part}.png"' in page
    printed = capfd.readouterr()
    assert "above 1, longspan needs less" in printed.out
    assert "| forward | fwd + bwd |" in printed.out
    assert "layers (3 of 7), n = 64, round 1: longspan for" in printed.err


def test_options_reach_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    sizes = ["--lengths=40", "--heads=2", "--head-dim=8", "--batch=3", "--depth=5", "--dtype=bfloat16"]
    effort = ["--rounds=2", "--repeats=7", "--threads=1", "--timeout=11", "--memory-limit=2"]
    options = ["--mechanisms=linear,softmax", "--compile=default", "--no-peers", "--causal", "--out", str(tmp_path)]
    assert bench_all(monkeypatch, machine, *sizes, *effort, *options) == 0
    assert {file.stem for file in tmp_path.glob("*.json")} == {
        *("mechanisms", "layers", "train", "generate", "decode", "summary"),
    }
    wanted = Case(40, 3, 2, 8, True, "bfloat16", "cpu")
    for subject, case, config in machine.taken:
        assert subject.package == "longspan"
        assert case == replace(wanted, depth=5 if case.depth > 1 else 1)
        assert (config.repeats, config.threads, config.memory_limit) == (7, 1, 2)
        assert config.timeout == 11
        assert getattr(subject, "compile", "default") == "default"
    assert len(machine.taken) == 2 * len({subject for subject, *_ in machine.taken})  # rounds
    # Mechanisms without layers are left out of that section.
    layers = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert {row["mechanism"] for row in layers} == {"linear"}


def test_bidirectional_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    arguments = ["--bidirectional", "--mechanisms=local", "--lengths=64", "--rounds=1", "--out", str(tmp_path)]
    assert bench_all(monkeypatch, machine, *arguments) == 0
    assert {case.causal for _, case, _ in machine.taken} == {False}
    names = {"mechanisms-bidirectional", "layers-bidirectional", "summary"}
    assert {file.stem for file in tmp_path.glob("*.json")} == names
    assert not list(tmp_path.glob("*.png"))  # a plot needs two lengths


def test_a_run_that_is_ended_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    complete = Machine()
    arguments = ["--mechanisms=local", "--lengths=64", "--rounds=1", "--no-peers"]
    bench_all(monkeypatch, complete, *arguments, "--out", str(tmp_path / "complete"))
    ended = Machine(until=len(complete.taken) - 1)  # in the last comparison of the last section
    assert bench_all(monkeypatch, ended, *arguments, "--out", str(tmp_path)) == 130
    assert "results measured before are written" in capfd.readouterr().err
    for part in PARTS:
        rows = [
            json.loads((folder / f"{part}.json").read_text())["rows"] for folder in (tmp_path, tmp_path / "complete")
        ]
        assert rows[0] == (rows[1] if part != "decode" else rows[1][:2])
    page = (tmp_path / "report.html").read_text()
    assert "<h2>generate</h2>" in page
    assert "<h2>decode</h2>" not in page


def test_results_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    file.write_text("older results")
    real = Path.write_bytes

    def interrupted(self: Path, content: bytes) -> int:
        real(self, content[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(file, [], {})
    assert file.read_text() == "older results"


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


def test_a_failure_is_named_and_has_no_ratio() -> None:
    case = Case(64)
    measured = Measurement("ok", "", {"forward": [2.0]}, peak_mb=1.0)
    first = SubjectResult(MechanismSubject("local, 257 keys", "local"), case, [measured])
    peer = SubjectResult(PeerSubject("local-attention, 257 keys"), case, [Measurement("out of memory", "too much")])
    (row,) = summary({"mechanisms": [Comparison("local", case, [first, peer])]})
    assert row["status"] == "out of memory"
    assert set(row["ratios"].values()) == {None}


def test_the_gpu_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = BenchOptions("gpu", device="cuda")
    suite = {section.name: section for section in sections(options)}
    assert list(suite) == [
        *("causal", "bidirectional", "local", "gated", "layers", "layers-autocast", "train", "compile", "generate"),
        "longest",
    ]
    for section in suite.values():
        assert {(case.device, case.dtype) for _, case in section.plan} == {("cuda", "bfloat16")}
        subjects = [each for pair in section.plan for group in section.subjects(*pair) for each in group]
        assert len(subjects) >= len(section.plan)
    assert [section.name for section in sections(replace(options, sections=("train",)))] == ["train"]
    # Full attention is measured in every comparison of mechanisms.
    for name in ("causal", "gated"):
        for mechanism, case in suite[name].plan:
            assert all(group[-1].name == "PyTorch SDPA" for group in suite[name].subjects(mechanism, case))
    assert suite["train"].subjects("linear", Case(64))[0][0].compile == "reduce-overhead"
    modes = [subject.compile for subject in suite["compile"].subjects("linear", Case(64))[0]]
    assert modes == ["reduce-overhead", "default", "off"]
    assert suite["layers-autocast"].subjects("linformer", Case(64))[0][0].autocast
    assert options.measurement_config().rounds == 1
