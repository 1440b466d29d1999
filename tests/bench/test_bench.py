"""The benchmark: what it writes, what it makes of failures, and that peers compute what their twins do."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.bench import PEERS, Case, Check, Effort, Ours, Row, Run, Step, Subject, Theirs, Work, compare, measure
from longspan.bench.report import Group, growth, remarks
from longspan.bench.subjects import peers as peering
from longspan.bench.subjects.mechanisms import VARIANTS, ours
from longspan.bench.subjects.models import OLDER, TheirModel
from longspan.bench.worker import take
from longspan.cli.bench import main

TINY = Case(64, num_heads=2, head_dim=8)
QUICK = Effort(rounds=1, repeats=2)
SIZES = ["--lengths=64", "--heads=2", "--head-dim=8", "--rounds=1", "--repeats=2", "--threads=1"]


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["longspan.bench", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def positive(row: dict[str, Any]) -> bool:
    samples = [x for run in row["runs"] for step in run["times"].values() for x in step]
    medians = [row[name] for name in ("forward_ms", "forward_backward_ms", "peak_mb")]
    return bool(samples) and all(x > 0 for x in (*samples, *medians[:2])) and medians[2] >= 0


def test_command_measures_ours_beside_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    out = tmp_path / "new" / "results.json"
    assert command(monkeypatch, "--mechanisms", "softmax", *SIZES, "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert found["versions"]["torch"] == torch.__version__
    assert {"longspan", "python", "performer-pytorch"} <= set(found["versions"])
    assert {"date", "commit", "arguments", "effort"} <= set(found)
    mine, sdpa = found["rows"]
    assert (mine["name"], sdpa["name"]) == ("softmax", "PyTorch SDPA")
    for row in (mine, sdpa):
        assert (row["status"], row["message"]) == ("ok", "")
        assert positive(row)
        (run,) = row["runs"]
        assert [len(samples) for samples in run["times"].values()] == [2, 2]
        assert run["check"]["error"] <= run["check"]["tolerance"]
        assert run["memory"].startswith("growth of")
    assert mine["ratios"]["forward_ms"] == 1
    assert sdpa["ratios"]["forward_ms"] == sdpa["forward_ms"] / mine["forward_ms"]
    printed = capfd.readouterr()
    assert "÷ ours" in printed.out
    assert "round 1: PyTorch SDPA" in printed.err


def test_command_without_peers(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = ["--mechanisms", "linformer", "--bidirectional", "--no-peers", *SIZES, "--out", str(out)]
    subprocess.run([sys.executable, "-m", "longspan", "bench", *arguments], check=True, capture_output=True)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["name"], row["status"], row["case"]["causal"]) == ("linformer, rank 256", "ok", False)
    assert positive(row)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mechanisms linaer", "unknown mechanism 'linaer'; there is softmax, local, linear, performer"),
        ("--mechanisms linaer", "did you mean 'linear'?"),
        ("--lengths 8k", "positive whole numbers separated by commas, got '8k'"),
        ("--dtype int8", "there is float32, float64, bfloat16, float16"),
        ("--device tpu", "there is cpu, cuda"),
        ("--memory-limit -1", "positive number of GB, got -1"),
        ("--heads none", "--heads"),
        ("--lenghts 64", "--lengths"),
        ("sing", "unknown subject 'sing'; there is mechanisms, layers, train, generate"),
        ("train --bidirectional", "measures causal models"),
        ("generate --compile", "--compile is for bench layers and bench train"),
        ("mechanisms --compile", "--compile is for bench layers and bench train"),
        ("layers --mechanisms softmax", "there is linear, performer, local, linformer"),
        ("train --mechanisms split", "there is linear, performer, local, linformer, softmax"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(monkeypatch, *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_out_of_memory_is_a_result() -> None:
    run = measure(Ours("softmax", "softmax"), Case(32768), Effort(repeats=1, memory_limit=0.05))
    assert run.status == "out of memory"
    assert "allocate" in run.message
    assert "\n" not in run.message


def test_running_out_of_time_is_a_result() -> None:
    run = measure(Ours("softmax", "softmax"), TINY, Effort(timeout=0.05))
    assert (run.status, run.message) == ("timed out", "no answer within 0.05 s")


def test_an_installed_older_package_is_measured() -> None:
    subject = Theirs("linear-attention-transformer, blind spot 64")
    if subject.unfit(TINY) is not None:
        pytest.skip("linear-attention-transformer is not installed: make bench installs it")
    run = measure(subject, TINY, QUICK)
    assert run.status == "ok", run.message
    assert min(run.times["forward"] + run.times["forward_backward"]) > 0


def test_a_missing_package_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peering, "installed_version", lambda package: None)
    rows = compare([Theirs("performer-pytorch, 256 features")], TINY, QUICK)
    (remark,) = remarks([Group("performer", case, rows) for case in (TINY, Case(128))])
    assert remark == "performer-pytorch is not installed: pip install 'longspan[parity]'"


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        (name, causal)
        for name, peer in PEERS.items()
        for causal in (True, False)
        if peer.mode in (None, causal) and not (causal and peer.not_causal)
    ],
)
def test_a_peer_computes_what_its_twin_does(name: str, causal: bool) -> None:
    case, peer = Case(64, causal=causal), Theirs(name)
    unfit = peer.unfit(case)
    if unfit is not None:
        pytest.skip(unfit[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        check = peer.check(case)
    assert check.error <= check.tolerance


@pytest.mark.parametrize("mechanism", [*VARIANTS, "softmax"])
def test_every_variant_agrees_with_itself_in_float64(mechanism: str) -> None:
    for subject in ours(mechanism):
        check = subject.check(Case(64))
        assert check.error <= check.tolerance, subject.name


class Fixed(Subject):
    """A subject that is as wrong as its name says, and returns what it is told to."""

    def check(self, case: Case) -> Check:
        return Check(float(self.name), 1e-4, "the truth")

    def work(self, case: Case) -> Work:
        return {"forward": Step(lambda: [torch.ones(1)]), "last": Step(lambda: [torch.full((1,), float(case.length))])}


def test_nothing_wrong_is_timed() -> None:
    for error in ("0.5", "nan"):
        run = take(Fixed(error), TINY, QUICK)
        assert (run.status, run.times) == ("wrong", {})
        assert "against the truth, allowed 1e-04" in run.message
    assert take(Fixed("0"), TINY, QUICK).status == "ok"


def test_rows_take_turns_and_stop_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fake(subject: Subject, case: Case, effort: Effort) -> Run:
        order.append(subject.name)
        if subject.name == "b":
            return Run("out of memory", "too much")
        return Run("ok", "", {"forward": [float(len(order))], "token": [2.0]}, {"token": 5}, 3.0)

    monkeypatch.setattr("longspan.bench.runner.measure", fake)
    a, b, c = compare([Fixed("a"), Fixed("b"), Fixed("c")], TINY, Effort(rounds=3))
    assert order == ["a", "b", "c", "a", "c", "a", "c"]
    assert a.ms("forward") == 4  # the median of 1, 4 and 6
    assert b.ms("forward") is None
    assert (a.tokens_per_second("token"), a.tokens_per_second("forward")) == (2500, None)
    assert a.as_dict()["token_tokens_per_second"] == 2500
    assert b.as_dict()["status"] == "out of memory"
    assert c.peak_mb == 3


def test_rows_compare_token_by_token() -> None:
    def row(ms: float, tokens: int) -> Row:
        return Row(Fixed("0"), TINY, [Run("ok", "", {"token": [ms]}, {"token": tokens}, 1.0)])

    group = Group("x", TINY, [row(8.0, 16), row(6.0, 2)])
    assert group.ratios(group.rows[1])["token_ms"] == pytest.approx(6)  # 3 ms a token against half of one


def test_growth_is_an_exponent_of_the_length() -> None:
    def group(length: int, ms: float) -> Group:
        case = Case(length)
        return Group(
            "x",
            case,
            [Row(Fixed("0"), case, [Run("ok", "", {"forward": [ms], "forward_backward": [ms * ms]}, peak_mb=1.0)])],
        )

    groups = [group(8, 1.0), group(64, 8.0)]
    assert growth(groups, groups[0], groups[0].rows[0]) is None
    found = growth(groups, groups[1], groups[1].rows[0])
    assert found is not None
    assert (found["from"], found["forward_ms"], found["forward_backward_ms"]) == (8, pytest.approx(1), pytest.approx(2))


def test_command_measures_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    small = ["--heads=2", "--head-dim=8", "--depth=1", "--rounds=1", "--repeats=1", "--threads=1"]
    for what, steps in (("train", ["step"]), ("generate", ["token", "prefill"])):
        out = tmp_path / f"{what}.json"
        arguments = [what, "--mechanisms=linear", "--lengths=40", "--no-peers", *small, "--out", str(out)]
        assert command(monkeypatch, *arguments) == 0
        rows = json.loads(out.read_text())["rows"]
        assert [row["name"] for row in rows] == ["linear", "linear, half the heads local"]
        for row in rows:
            assert row["status"] == "ok", row["message"]
            assert list(row["runs"][0]["times"]) == steps
            for step in steps:
                tokens = row["runs"][0]["tokens"][step]
                assert row[f"{step}_tokens_per_second"] == pytest.approx(tokens / row[f"{step}_ms"] * 1e3)
            assert row["runs"][0]["check"]["error"] <= row["runs"][0]["check"]["tolerance"]
        assert "tokens/s" in capfd.readouterr().out


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("task", ["train", "generate"])
def test_older_models_run(name: str, task: str) -> None:
    case = Case(256, num_heads=2, head_dim=16, depth=1)
    older = TheirModel(name, task)
    unfit = older.unfit(case)
    if unfit is not None:
        pytest.skip(unfit[1])
    run = measure(older, case, Effort(repeats=1))
    assert run.status == "ok", run.message
    assert list(run.times) == ["step" if task == "train" else "token"]
