"""Measurements: results files, failures as results, and peers that compute what longspan computes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.bench import SubjectResult, compare, measure
from longspan.bench.report import Comparison, remarks, scaling
from longspan.bench.runner import WorkerProcess, measure_rounds
from longspan.bench.subjects import peers
from longspan.bench.subjects.base import (
    AccuracyCheck,
    Case,
    Measurement,
    MeasurementConfig,
    Subject,
    TimedStep,
    Workload,
)
from longspan.bench.subjects.generation import PeerGenerateSubject, decode_subjects, generate_subjects
from longspan.bench.subjects.mechanisms import VARIANTS, MechanismSubject, PeerSubject, mechanism_subjects
from longspan.bench.subjects.models import PeerTrainSubject, train_subjects
from longspan.bench.subjects.peers import MECHANISM_PEERS, MODEL_PEERS
from longspan.cli import main

TINY = Case(64, num_heads=2, head_dim=8)
QUICK = MeasurementConfig(rounds=1, repeats=2)
SIZES = ["--lengths=64", "--heads=2", "--head-dim=8", "--rounds=1", "--repeats=2", "--threads=1"]


def command(*arguments: str) -> int:
    try:
        main(["bench", *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def positive(row: dict[str, Any]) -> bool:
    samples = [x for run in row["runs"] for step in run["times"].values() for x in step]
    medians = [row[name] for name in ("forward_ms", "forward_backward_ms", "peak_mb")]
    return bool(samples) and all(x > 0 for x in (*samples, *medians[:2])) and medians[2] >= 0


def test_command_measures_ours_beside_a_peer(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "new" / "results.json"
    assert command("--mechanisms", "softmax", *SIZES, "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert found["versions"]["torch"] == torch.__version__
    assert {"longspan", "python", "performer-pytorch"} <= set(found["versions"])
    assert {"date", "commit", "options", "measurement"} <= set(found)
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
    assert "ratio" in printed.out
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
        ("--lengths 8k", "--lengths must be an integer, got '8k'"),
        ("--dtype int8", "there is float32, float64, bfloat16, float16"),
        ("--device tpu", "there is cpu, cuda"),
        ("--memory-limit -1", "positive number of GB, got -1"),
        ("--memory-limit nan", "positive number of GB, got nan"),
        ("--heads none", "--heads must be an integer, got 'none'"),
        ("--lenghts 64", "unknown flag --lenghts (did you mean '--lengths'?)"),
        ("--causal --bidirectional", "exclude each other"),
        ("mechanisms --compile", "compile is an option of bench layers and bench train"),
        ("sing", "unknown subject 'sing'; there is mechanisms, layers, train, generate, decode, compile"),
        ("swep", "(did you mean 'sweep'?)"),
        ("train --bidirectional", "measures causal models"),
        ("generate --compile default", "compile is an option of bench layers and bench train"),
        ("layers --compile fast", "unknown compile mode 'fast'; there is off, default, reduce-overhead"),
        ("mechanisms --autocast", "autocast is an option of bench layers"),
        ("mechanisms --sections causal", "sections is an option of the suites all, gpu, got it for mechanisms"),
        ("gpu", "set device to cuda, got cpu"),
        ("all --sections traain", "did you mean 'train'?"),
        ("quality", "give its file as data"),
        ("quality --data nothing.txt", "data nothing.txt: there is no such file"),
        ("quality --data x --seeds 0 --contexts 64", "one batch size for each context"),
        ("recall --tasks mqr", "unknown task 'mqr'"),
        ("sweep --modes both", "unknown mode 'both'; there is causal, bidirectional"),
        ("--minutes -1", "minutes must be positive, got -1"),
        ("--minutes nan", "minutes must be positive, got nan"),
        ("layers --mechanisms softmax", "there is linear, performer, local, linformer"),
        ("train --mechanisms split", "there is linear, performer, local, linformer, decay, delta, softmax"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(*arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("longspan: ")
    assert said in error
    assert error.count("\n") == 1


def test_out_of_memory_is_a_result() -> None:
    run = measure(MechanismSubject("softmax", "softmax"), Case(32768), MeasurementConfig(repeats=1, memory_limit=0.05))
    assert run.status == "out of memory"
    assert "allocate" in run.message
    assert "\n" not in run.message


def test_running_out_of_time_is_a_result() -> None:
    run = measure(MechanismSubject("softmax", "softmax"), TINY, MeasurementConfig(timeout=0.05))
    assert (run.status, run.message) == ("timed out", "no result within 0.05 s")


def test_an_installed_older_package_is_measured() -> None:
    subject = PeerSubject("linear-attention-transformer, blind spot 64")
    if subject.unavailable(TINY) is not None:
        pytest.skip("linear-attention-transformer is not installed: make bench installs it")
    run = measure(subject, TINY, QUICK)
    assert run.status == "ok", run.message
    assert min(run.times["forward"] + run.times["forward_backward"]) > 0


def test_a_missing_package_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed_version", lambda package: None)
    results = compare([PeerSubject("performer-pytorch, 256 features")], TINY, QUICK)
    (remark,) = remarks([Comparison("performer", case, results) for case in (TINY, Case(128))])
    assert remark == "performer-pytorch is not installed: pip install 'longspan[parity]'"


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        (name, causal)
        for name, peer in MECHANISM_PEERS.items()
        for causal in (True, False)
        if peer.only_causal in (None, causal) and not (causal and peer.not_causal)
    ],
)
def test_a_peer_computes_what_longspan_does(name: str, causal: bool) -> None:
    case, peer = Case(64, causal=causal), PeerSubject(name)
    unavailable = peer.unavailable(case)
    if unavailable is not None:
        pytest.skip(unavailable[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        check = peer.check(case)
    assert check.error <= check.tolerance


@pytest.mark.parametrize("mechanism", [*VARIANTS, "softmax", "decay", "delta"])
def test_every_variant_agrees_with_itself_in_float64(mechanism: str) -> None:
    case = Case(64, causal=mechanism not in ("decay", "delta"))
    for subject in mechanism_subjects(mechanism, case, with_peers=False):
        check = subject.check(case)
        assert check.error <= check.tolerance, subject.name


class Fixed(Subject):
    """A subject whose error is its name."""

    def check(self, case: Case) -> AccuracyCheck:
        return AccuracyCheck(float(self.name), 1e-4, "the truth")

    def workload(self, case: Case) -> Workload:
        last = TimedStep(lambda: [torch.full((1,), float(case.length))])
        return Workload({"forward": TimedStep(lambda: [torch.ones(1)]), "last": last}, {"parameters": 5})


def test_nothing_wrong_is_timed() -> None:
    for error in ("0.5", "nan"):
        run = Fixed(error).measure(TINY, QUICK)
        assert (run.status, run.times) == ("wrong", {})
        assert "against the truth, allowed 1e-04" in run.message
    accurate = Fixed("0").measure(TINY, QUICK)
    assert (accurate.status, accurate.metrics) == ("ok", {"parameters": 5})


def test_rows_take_turns_and_stop_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fake(subject: Subject, case: Case, config: MeasurementConfig) -> Measurement:
        order.append(subject.name)
        if subject.name == "b":
            return Measurement("out of memory", "too much")
        return Measurement("ok", "", {"forward": [float(len(order))], "token": [2.0]}, {"token": 5}, peak_mb=3.0)

    monkeypatch.setattr("longspan.bench.runner.measure", fake)
    a, b, c = compare([Fixed("a"), Fixed("b"), Fixed("c")], TINY, MeasurementConfig(rounds=3))
    assert order == ["a", "b", "c", "a", "c", "a", "c"]
    assert a.ms("forward") == 4  # the median of 1, 4 and 6
    assert b.ms("forward") is None
    assert (a.tokens_per_second("token"), a.tokens_per_second("forward")) == (2500, None)
    assert a.as_dict()["token_tokens_per_second"] == 2500
    assert b.as_dict()["status"] == "out of memory"
    assert c.peak_mb == 3


def test_ratios_are_per_token() -> None:
    def row(ms: float, tokens: int) -> SubjectResult:
        return SubjectResult(Fixed("0"), TINY, [Measurement("ok", "", {"token": [ms]}, {"token": tokens}, peak_mb=1.0)])

    found = Comparison("x", TINY, [row(8.0, 16), row(6.0, 2)])
    assert found.ratios(found.results[1])["token_ms"] == pytest.approx(6)  # 3 against 0.5 ms per token


def test_scaling_is_an_exponent_of_the_length() -> None:
    def comparison(length: int, ms: float) -> Comparison:
        case = Case(length)
        measured = Measurement("ok", "", {"forward": [ms], "forward_backward": [ms * ms]}, peak_mb=1.0)
        return Comparison("x", case, [SubjectResult(Fixed("0"), case, [measured])])

    both = [comparison(8, 1.0), comparison(64, 8.0)]
    assert scaling(both, both[0], both[0].results[0]) is None
    found = scaling(both, both[1], both[1].results[0])
    assert found is not None
    assert (found["from"], found["forward_ms"], found["forward_backward_ms"]) == (8, pytest.approx(1), pytest.approx(2))


def test_command_measures_models(tmp_path: Path, in_process: None, capfd: Any) -> None:
    small = ["--heads=2", "--head-dim=8", "--depth=1", "--rounds=1", "--repeats=1", "--threads=1"]
    for what, steps in (("train", ["step"]), ("generate", ["token", "prefill"])):
        out = tmp_path / f"{what}.json"
        arguments = [what, "--mechanisms=local", "--lengths=40", "--no-peers", *small, "--out", str(out)]
        assert command(*arguments) == 0
        rows = json.loads(out.read_text())["rows"]
        assert [row["name"] for row in rows] == ["local"]
        for row in rows:
            assert row["status"] == "ok", row["message"]
            assert list(row["runs"][0]["times"]) == steps
            for step in steps:
                tokens = row["runs"][0]["tokens"][step]
                assert row[f"{step}_tokens_per_second"] == pytest.approx(tokens / row[f"{step}_ms"] * 1e3)
            assert row["runs"][0]["check"]["error"] <= row["runs"][0]["check"]["tolerance"]
        assert "tokens/s" in capfd.readouterr().out


@pytest.mark.parametrize("name", MODEL_PEERS)
@pytest.mark.parametrize(("kind", "step"), [(PeerTrainSubject, "step"), (PeerGenerateSubject, "token")])
def test_peer_models_run(name: str, kind: type[Subject], step: str, in_process: None) -> None:
    case = Case(256, num_heads=2, head_dim=16, depth=1)
    older = kind(name)
    unavailable = older.unavailable(case)
    if unavailable is not None:
        pytest.skip(unavailable[1])
    (result,) = compare([older], case, MeasurementConfig(rounds=1, repeats=1))
    (run,) = result.measurements
    assert run.status == "ok", run.message
    assert list(run.times) == [step]


def test_models_of_a_mechanism_and_their_peers() -> None:
    names = [subject.name for subject in train_subjects("linear", "off", with_peers=True)]
    assert names[:3] == ["linear", "linear, half the heads local", "linear and local layers"]
    assert names[3:] == ["linear-attention-transformer, half local", "flash-linear-attention"]
    assert [subject.name for subject in generate_subjects("softmax", with_peers=False)] == ["softmax"]


@pytest.mark.parametrize("mechanism", ["linear", "performer", "local"])
def test_every_api_decodes_the_same_tokens(mechanism: str) -> None:
    (subjects,) = decode_subjects(mechanism)
    assert [subject.name.split(",")[0] for subject in subjects] == [
        "longspan.generate",
        "transformers",
        "older package",
    ]
    for subject in subjects:
        check = subject.check(Case(64))
        assert (check.error, check.tolerance) == (0, 0), subject.name
        assert subject.workload(Case(5, num_heads=2, head_dim=8)).steps["token"].tokens == 64


def test_nothing_starts_after_the_time_budget() -> None:
    results = [SubjectResult(Fixed("0"), TINY), SubjectResult(Fixed("1"), TINY, [Measurement("ok")])]
    measure_rounds(results, MeasurementConfig(rounds=2), deadline=time.monotonic() - 1)
    assert [each.measurements[0].status for each in results] == ["skipped", "ok"]
    assert results[0].as_dict()["message"] == "the time budget of the run is exhausted"


def test_processes_prepare_before_they_are_timed() -> None:
    worker = WorkerProcess(MechanismSubject("softmax", "softmax"), TINY, QUICK)
    worker.wait_until_ready()
    result = worker.finish()
    assert result.status == "ok", result.message
    slow = WorkerProcess(MechanismSubject("softmax", "softmax"), TINY, MeasurementConfig(timeout=0.01))
    slow.wait_until_ready()
    assert slow.finish().status == "timed out"
    killed = WorkerProcess(MechanismSubject("softmax", "softmax"), TINY, QUICK)
    killed.kill()


def test_options_as_json_without_the_command_line(tmp_path: Path) -> None:
    options = {"mechanisms": ["softmax"], "lengths": [64], "heads": 2, "head_dim": 8, "rounds": 1, "repeats": 1}
    code = f"""
import sys
sys.modules["tyro"] = sys.modules["rich"] = None
from longspan.bench import runner
runner.measure = lambda subject, *given: subject.measure(*given)
sys.argv[1:] = [{json.dumps(options | {"peers": False, "out": str(tmp_path / "results.json")})!r}]
import runpy
runpy.run_module("longspan.bench", run_name="__main__")
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["name"], row["status"], len(row["runs"])) == ("softmax", "ok", 1)
    assert row["forward_tb_per_second"] > 0
