"""The sweep: the order of its cells, results that grow, cliffs that are found, and the heat map."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from longspan.bench import __main__ as by_json
from longspan.bench import sweep
from longspan.bench.jsonl import read
from longspan.bench.subjects import base
from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig, TimedStep, Workload
from longspan.bench.subjects.peers import SDPA
from longspan.bench.subjects.sweep import SweepSubject
from longspan.bench.sweep import Cell, SweepOptions, SweepWorker, plan, run
from longspan.bench.sweep_report import (
    cliff_table,
    draw,
    find_cliffs,
    grouped_cliff_table,
    panels,
    ratios,
    speed_table,
    summary_table,
)
from longspan.bench.timing import cpu_ms
from longspan.mechanisms import _REGISTRY, list_mechanisms, register_mechanism
from longspan.mechanisms.decay import DecayAttention
from longspan.mechanisms.linear import LinearAttention

TINY: dict[str, Any] = {"lengths": (67, 131), "head_dims": (8, 24), "heads": (2,), "modes": ("causal",), "tokens": 131}
CPU = {"cpu": "a processor", "gpu": None}


class InProcess:
    """A `SweepWorker` without a process of its own, so that mechanisms of a test can be measured."""

    def __init__(self, config: MeasurementConfig) -> None:
        self.config, self.checked, self.asked = config, {}, []

    def ask(self, what: str, cell: Cell) -> None:
        self.asked.append((what, cell))

    def answer(self, deadline: float | None) -> Measurement:
        what, cell = self.asked.pop(0)
        if deadline is not None and time.monotonic() > deadline:
            return Measurement("skipped")
        if what == "prepare":
            return sweep._prepare(cell.subject, cell.case, self.checked)
        return cell.subject.measure(cell.case, self.config)

    def kill(self) -> None: ...


class SlowAttention(LinearAttention):
    """Linear attention with a cliff at head dimension 8."""

    def forward(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        if q.shape[3] == 8 and q.shape[1] < 512:  # not in the check
            time.sleep(0.2)
        return super().forward(q, *args, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep, "SweepWorker", InProcess)
    register_mechanism("slow", SlowAttention)
    yield
    del _REGISTRY["slow"]


def row(name: str, ms: float, *, size: int | None = None, status: str = "ok", **case: Any) -> dict[str, Any]:
    """A result of a mechanism, or of SDPA, whose backward pass takes as long as its forward pass."""
    named = {"name": name, "mechanism": None if name == SDPA else name, "size": size, "case": asdict(Case(**case))}
    times = {"forward_ms": ms, "forward_backward_ms": 2 * ms} if status == "ok" else {}
    return {**named, "status": status, "message": "why", "machine": CPU, **times}


def cells(**changes: Any) -> list[Cell]:
    return plan(SweepOptions(**{**TINY, **changes}))


def test_speeds_beside_full_attention_are_of_causal_cells_by_length_and_head_dimension() -> None:
    shapes = [{"length": length, "head_dim": dim} for length in (2048, 4096) for dim in (64, 128, 256)]
    rows = [row(SDPA, 8.0, **shape, causal=True) for shape in shapes]
    rows += [row("linear", 16.0 if shape["head_dim"] == 128 else 0.5, **shape, causal=True) for shape in shapes]
    rows += [row("local", 3.2, **shapes[0], causal=True), row("local", 0.1, **shapes[3], causal=True, dtype="float16")]
    rows += [row(SDPA, 8.0, **shapes[0], causal=False), row("linear", 1.0, **shapes[0], causal=False)]
    assert speed_table(rows) == (
        ["tokens × head dim", "2,048 × 64", "2,048 × 128", "4,096 × 64", "4,096 × 128"],
        [["linear", "16×", "0.5×", "16×", "0.5×"], ["local", "2.5×", "–", "–", "–"]],
        1,
    )


def test_a_first_part_of_the_plan_covers_the_grid_coarsely() -> None:
    whole = plan(SweepOptions())
    assert len(whole) == len(set(whole)) > 500
    own = [cell for cell in whole if isinstance(cell.subject, SweepSubject)]
    names = [name for name in list_mechanisms() if name != "softmax"]
    first = {(cell.case.length, cell.case.head_dim, cell.case.num_heads) for cell in own[: len(names)]}
    assert first == {(2048, 64, 4)}
    assert {cell.subject.name.partition(",")[0] for cell in own[: len(names)]} == set(names)
    early = own[: 20 * len(names)]
    assert {512, 2048, 8192} <= {cell.case.length for cell in early}
    assert {32, 64, 128} <= {cell.case.head_dim for cell in early}
    assert {cell.case.causal for cell in early} == {True, False}
    assert {cell.case.length for cell in own} == {256, 512, 1024, 2048, 4096, 8192, 16384}
    assert {cell.case.head_dim for cell in own} == {32, 64, 80, 96, 128, 192, 256}
    for cell in own:
        first_size = cell.subject.size in (None, 256)
        assert cell.case.num_heads == 4 or first_size  # of heads, size and dtype at most one is not the first


def test_the_coarse_grid_of_a_gpu_comes_first_and_is_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    whole = plan(SweepOptions(device="cuda"))
    names = [name for name in list_mechanisms() if name != "softmax"]
    wanted = {(n, dim) for n in (2048, 16384, 65536) for dim in (64, 128)}
    first = whole[: len(wanted) * (len(names) + 1)]
    found: dict[str, set[tuple[int, int]]] = {}
    for cell in first:
        assert (cell.case.causal, cell.case.dtype, cell.case.num_heads) == (True, "bfloat16", 8)
        shapes = found.setdefault(cell.subject.name.partition(",")[0], set())
        shapes.add((cell.case.length, cell.case.head_dim))
    assert found == dict.fromkeys([SDPA, *names], wanted)
    batches = list(sweep._batches(whole, 2 * len(names)))
    assert batches[0][: len(first)] == first
    assert all(cell.subject.name == SDPA for cell in batches[0][len(first) :])
    assert [cell for batch in batches for cell in batch] == whole
    assert max(map(len, batches)) == sweep.BATCH * 2 * len(names)


def test_full_attention_is_measured_once_for_all_mechanisms_of_a_shape() -> None:
    found = cells(mechanisms=("linear", "local"))
    full = [cell.case for cell in found if cell.subject.name == SDPA]
    assert len(full) == len(set(full)) == 4
    assert full[0] == found[1].case  # right before the mechanisms
    assert all(cell.subject.name != SDPA for cell in cells(peers=False))


def test_full_attention_that_takes_seconds_is_left_out() -> None:
    found = plan(SweepOptions(lengths=(65536, 262144), heads=(16,), head_dims=(64,), mechanisms=("linear",)))
    own, full = ([c.case for c in found if (c.subject.name == SDPA) is peer] for peer in (False, True))
    assert {(case.length, case.causal) for case in own} - {(case.length, case.causal) for case in full} == {
        (262144, False)
    }


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"mechanisms": ("delta",)}, {"name": {"delta"}}),
        ({"lengths": (63, 65)}, {"length": {63, 65}}),
        ({"head_dims": (5, 7)}, {"head_dim": {5, 7}}),
        ({"heads": (3,)}, {"num_heads": {3}}),
        ({"modes": ("bidirectional",)}, {"causal": {False}}),
        ({"modes": ("causal", "bidirectional")}, {"causal": {True, False}}),
        ({"dtypes": ("bfloat16",)}, {"dtype": {"bfloat16"}}),
        ({"tokens": 17 * 131}, {"batch_size": {17, 17 * 131 // 67}}),
        ({"mechanisms": ("performer",), "num_features": (31, 37)}, {"size": {31, 37}}),
        ({"mechanisms": ("local",), "windows": (13,)}, {"size": {13}}),
        ({"mechanisms": ("linformer",), "ranks": (11,)}, {"size": {11}}),
    ],
)
def test_options_choose_the_cells(changes: dict[str, Any], values: dict[str, set[Any]]) -> None:
    found = cells(peers=False, **changes)
    for name, expected in values.items():
        assert {{**asdict(cell.case), **cell.row}[name] for cell in found} == expected


def test_options_reach_the_measurement() -> None:
    config = SweepOptions(repeats=3, threads=1, timeout=7.0, clock="processor").config()
    assert (config.repeats, config.threads, config.timeout) == (3, 1, 7.0)
    assert (config.check, config.profile, config.longest_graph) == (False, False, 20.0)
    # Waiting takes no processor time.
    assert cpu_ms(lambda: time.sleep(0.05), config.clock) < 25 < 50 <= cpu_ms(lambda: time.sleep(0.05))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mechanisms": ("lineer",)}, "unknown mechanism 'lineer'.*did you mean 'linear'"),
        ({"modes": ()}, "modes must name one of causal, bidirectional"),
        ({"modes": ("both",)}, "unknown mode 'both'"),
        ({"dtypes": ("float8",)}, "unknown dtype 'float8'"),
        ({"lengths": (0,)}, "lengths must be positive, got 0"),
        ({"minutes": -1.0}, "minutes must be positive, got -1"),
        ({"clock": "processor"}, "for one thread of a CPU: set threads to 1"),
        ({"clock": "sun"}, "unknown clock 'sun'; there is wall, processor"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweepOptions(**wrong)


def test_the_size_reaches_the_mechanism() -> None:
    case = Case(67, num_heads=2, head_dim=8)
    assert SweepSubject("", "performer", 31).build(case).num_features == 31
    assert SweepSubject("", "local", 13).build(case).window.reach()[0] == 12
    linformer = SweepSubject("", "linformer", 11).build(case)
    assert (linformer.rank, linformer.keys.table.shape[1]) == (11, 67)
    assert [type(part).__name__ for part in SweepSubject("", "split").build(case).parts] == [
        "LocalAttention",
        "PerformerAttention",
    ]


def test_a_cell_slower_than_full_attention_is_a_cliff_from_2048_tokens_up() -> None:
    rows = [
        *(row(SDPA, 1.0, length=1024), row("linear", 3.0, length=1024)),
        *(row(SDPA, 4.0, length=2048), row("linear", 4.4, length=2048)),
        *(row(SDPA, 16.0, length=4096), row("linear", 8.0, length=4096)),
        *(row(SDPA, 99.0, length=4096, head_dim=128), row("linear", 98.0, length=4096, head_dim=128)),
    ]
    found = [cliff for cliff in find_cliffs(rows) if cliff.than == SDPA]
    assert [(cliff.row["case"]["length"], cliff.step) for cliff in found] == [
        (2048, "forward_ms"),
        (2048, "forward_backward_ms"),
    ]
    assert [round(cliff.factor, 3) for cliff in found] == [1.1, 1.1]
    assert sorted(round(ratio["forward_ms"], 3) for ratio in ratios(rows).values()) == [0.5, 0.99, 1.1, 3.0]


def test_a_cell_twice_as_slow_as_a_neighbor_per_element_is_a_cliff() -> None:
    dims = {64: 1.0, 80: 3.0, 96: 1.5, 128: 2.0}  # 80: 2.4 times 64's cost per element, 2.4 times 96's
    found = find_cliffs([row("local", ms, length=128, head_dim=dim, size=7) for dim, ms in dims.items()])
    assert {(cliff.row["case"]["head_dim"], cliff.step) for cliff in found} == {
        (80, "forward_ms"),
        (80, "forward_backward_ms"),
    }
    assert all(cliff.factor == pytest.approx(2.4) and "per element" in cliff.than for cliff in found)
    # A batch of the same tokens has as many elements at every length.
    lengths = [row("linear", 1.0, length=2**n, batch_size=2 ** (10 - n)) for n in (8, 9, 10)]
    assert find_cliffs(lengths) == []
    lengths[1] |= {"forward_ms": 2.3}
    lengths[0] |= {"forward_ms": 1.1}
    assert [(cliff.row["case"]["length"], cliff.than) for cliff in find_cliffs(lengths)] == [
        (512, "length 1024, per element")
    ]


def test_twice_the_size_may_take_twice_as_long() -> None:
    fair = [row("performer", ms, length=128, size=size) for size, ms in ((64, 1.0), (128, 2.2), (256, 4.0))]
    assert find_cliffs(fair) == []
    over = [*fair, row("performer", 30.0, length=128, size=266)]
    assert {(cliff.row["size"], cliff.than) for cliff in find_cliffs(over)} == {(266, "size 256, per element")}


def test_failures_are_cliffs_and_the_steepest_comes_first() -> None:
    rows = [
        *(row(SDPA, 1.0, length=2048), row("linear", 1.5, length=2048), row("local", 1.2, length=2048, size=7)),
        row("decay", 0.0, length=2048, status="wrong"),
    ]
    rows[1]["implementation"] = "eager PyTorch: a reason"
    table = cliff_table(find_cliffs(rows))
    assert [cells[0] for cells in table.rows] == ["decay", "linear", "linear", "local", "local"]
    assert "wrong: why" in table.rows[0]
    assert table.rows[1][4:] == ["forward", "1.50", "1.50", SDPA, "eager PyTorch: a reason"]


def test_cliffs_are_grouped_by_mechanism_mode_and_comparison() -> None:
    rows = [
        *(row(SDPA, 4.0, length=2048), row("linear", 6.0, length=2048)),
        *(row(SDPA, 9.0, length=2048, head_dim=96), row("linear", 36.0, length=2048, head_dim=96)),
        row("decay", 0.0, length=4096, status="wrong"),
    ]
    rows[1]["implementation"] = "chunk"
    assert grouped_cliff_table(rows).rows == [
        ["linear", "causal", SDPA, "2", "2048", "64, 96", "1.5–4", "chunk; –"],
        ["decay", "causal", "wrong: why", "1", "4096", "64", "–", "–"],
        ["linear", "causal", "head dim", "1", "2048", "96", "4–4", "–"],
    ]


def test_the_summary_counts_cliffs_of_each_mechanism_and_mode() -> None:
    rows = [
        *(row(SDPA, 4.0, length=2048), row("linear", 6.0, length=2048)),
        *(row(SDPA, 16.0, length=4096), row("linear", 4.0, length=4096)),
        *(row(SDPA, 4.0, length=512, causal=False), row("linear", 30.0, length=512, causal=False)),
        row("decay", 0.0, length=2048, status="error"),
    ]
    assert summary_table(rows).rows == [
        ["linear", "causal", "2", "0.25–1.5", "0.25–1.5", "1: 1.5× at 2048 × 64", "1: 3× at 2048 × 64", "0"],
        ["linear", "bidirectional", "1", "–", "–", "0", "0", "0"],
        ["decay", "causal", "1", "–", "–", "0", "0", "1: 2048 × 64"],
    ]


def test_a_planted_slow_cell_is_measured_and_listed(
    slow: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.jsonl"
    options = SweepOptions(**{**TINY, "lengths": (67,)}, mechanisms=("slow",), repeats=1, threads=1, out=out)
    rows = run(options)
    assert len(rows) == 4
    assert all(each["status"] == "ok" and each["check"]["error"] <= each["check"]["tolerance"] for each in rows)
    assert [each.get("implementation") for each in rows] == [
        *(None, "eager PyTorch (the tensors are on cpu; the kernels need CUDA)") * 2
    ]
    assert all({"commit", "machine", "versions", "date", "threads"} <= each.keys() for each in rows)
    steep = {cliff.row["case"]["head_dim"] for cliff in find_cliffs(rows) if cliff.factor > 3}
    assert steep == {8}
    shown = capsys.readouterr()
    assert "cliffs" in shown.out
    assert "| slow " in shown.out
    assert "[4/4, " in shown.err
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert run(options) == rows  # nothing is measured again
    assert "[1/" not in capsys.readouterr().err


def test_a_killed_run_continues(slow: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.jsonl"
    options = SweepOptions(
        lengths=(67,), head_dims=(5,), heads=(1,), modes=("causal",), tokens=67, mechanisms=("slow",), out=out
    )
    rows = run(replace(options, repeats=1))
    lines = out.read_text().splitlines()
    out.write_text(lines[0] + "\n" + lines[1][:50])
    again = run(replace(options, repeats=1))
    assert [each["name"] for each in again] == [each["name"] for each in rows] == [SDPA, "slow"]
    assert len(out.read_text().splitlines()) == 2
    capsys.readouterr()
    out.write_text("")
    assert run(replace(options, minutes=1e-9)) == []
    assert "2 cells are left to the next call" in capsys.readouterr().err


def test_jobs_is_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[InProcess] = []

    class Counting(InProcess):
        def __init__(self, config: MeasurementConfig) -> None:
            super().__init__(config)
            started.append(self)

        def answer(self, deadline: float | None) -> Measurement:
            self.asked.pop(0)
            return Measurement("ok", check={"error": 0.0})

    monkeypatch.setattr(sweep, "SweepWorker", Counting)
    for jobs in (1, 3):
        started.clear()
        found = list(sweep._measure(cells(), SweepOptions(jobs=jobs), None))
        assert len(started) == jobs
        assert [cell for cell, _ in found] == cells()
        assert all(measured.check == {"error": 0.0} for _, measured in found)


def test_long_steps_are_not_timed_from_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TimedStep(list, graph=True)
    monkeypatch.setattr(base, "cuda_graph", lambda call: call)
    monkeypatch.setattr(base, "sample_ms", lambda *_: [1.5])
    for longest, expected in ((20.0, {"forward"}), (40.0, {"forward", "forward_backward"})):
        result = Measurement("ok", times={"forward": [1.0, 2.0, 90.0], "forward_backward": [30.0]})
        config = MeasurementConfig(longest_graph=longest)
        base._measure_kernels(Workload(dict.fromkeys(list(result.times), step)), config, result, profile=False)
        assert {name for name in ("forward", "forward_backward") if f"{name}_graph" in result.times} == expected


def test_times_of_cuda_graphs_are_compared_where_both_have_them() -> None:
    def timed(name: str, called: float, graph: float | None, **case: Any) -> dict[str, Any]:
        found = row(name, called, **case)
        return found if graph is None else found | {"forward_graph_ms": graph, "forward_backward_graph_ms": 2 * graph}

    rows = [timed(SDPA, 1.0, 0.5, length=2048), timed("linear", 3.0, 0.1, length=2048)]
    assert list(ratios(rows).values()) == [{"forward_ms": 0.2, "forward_backward_ms": 0.2}]
    assert find_cliffs(rows) == []
    rows = [timed(SDPA, 1.0, None, length=2048), timed("linear", 3.0, 0.1, length=2048)]
    assert [(cliff.factor, cliff.than) for cliff in find_cliffs(rows)] == [(3.0, SDPA)] * 2
    rows = [timed("linear", 1.0, 0.1, length=2048, head_dim=64), timed("linear", 1.0, 0.5, length=2048, head_dim=128)]
    (forward, _) = find_cliffs(rows)
    assert (forward.factor, forward.than) == (2.5, "head_dim 64, per element")
    assert "| 0.500 | 2.50  |" in cliff_table([forward]).markdown()
    rows[0].pop("forward_graph_ms")
    assert [cliff.step for cliff in find_cliffs(rows)] == ["forward_backward_ms"]


class Recording(InProcess):
    """Answers without measuring, and records what it was asked for in the order of the answers."""

    log: ClassVar[list[tuple[str, Cell, Recording]]] = []

    def answer(self, deadline: float | None) -> Measurement:
        what, cell = self.asked.pop(0)
        self.log.append((what, cell, self))
        if what == "prepare":
            return Measurement("ok", check={"error": 0.0}, metrics={"implementation": "kernels"})
        return Measurement("ok", times={"forward": [1.0, 2.0, 9.0], "forward_backward": [4.0]}, peak_mb=5.0)


def test_a_gpu_is_timed_after_all_processes_have_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep, "SweepWorker", Recording)
    monkeypatch.setattr(sweep, "BATCH", 4)
    monkeypatch.setattr(Recording, "log", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="a GPU", total_memory=10**11)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    values = {"subject": "sweep", "device": "cuda", "lengths": [512, 2048, 8192], "head_dims": [64, 128]}
    values |= {"heads": [8], "modes": ["causal"], "mechanisms": ["linear", "delta"], "dtypes": ["bfloat16"]}
    values |= {"jobs": 2, "minutes": 2, "out": str(tmp_path / "sweep.jsonl")}
    monkeypatch.setattr(sys, "argv", ["bench", json.dumps(values)])
    by_json.main()
    log = Recording.log
    # First one new kind for each process, and SDPA, which needs no compilation; then four cells for each.
    assert [what for what, _, _ in log][:24] == ["prepare"] * 4 + ["time"] * 4 + ["prepare"] * 8 + ["time"] * 8
    assert sorted(map(str, (cell for what, cell, _ in log if what == "prepare"))) == sorted(
        map(str, (cell for what, cell, _ in log if what == "time"))
    )
    kinds: dict[tuple[str, int], set[int]] = {}
    for _, cell, worker in log:
        kinds.setdefault((cell.subject.name, cell.case.head_dim), set()).add(id(worker))
    assert {len(workers) for workers in kinds.values()} == {1}, "all lengths in the process that has their kernels"
    assert len(set.union(*kinds.values())) == 2
    rows = read(tmp_path / "sweep.jsonl")
    assert len(rows) == len(log) // 2 >= 18
    first = next(each for each in rows if each["mechanism"] == "linear")
    assert (first["forward_ms"], first["peak_mb"], first["implementation"]) == (2.0, 5.0, "kernels")
    assert first["machine"]["gpu"]["name"] == "a GPU"
    assert first["case"]["batch_size"] * first["case"]["length"] == 32768
    log.clear()
    by_json.main()
    assert log == [], "cells in the file are not measured again"


def test_the_heat_map_has_a_panel_for_each_mechanism_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    assert not draw(path, [row("linear", 1.0, length=64)])
    rows = [row(name, 1.0, length=n, causal=c) for name in (SDPA, "a", "b") for n in (64, 128) for c in (True, False)]
    assert panels(rows) == {
        f"{name}, {mode}": [[64, 64, 1.0], [128, 64, 1.0]]
        for name in ("a", "b")
        for mode in ("causal", "bidirectional")
    }
    assert draw(path, rows)
    assert path.read_bytes().startswith(b"\x89PNG")


@dataclass(frozen=True)
class Crashing(SweepSubject):
    """Ends its process in the first length, and hangs in the second."""

    def workload(self, case: Case) -> Workload:
        if case.length == 7:
            os._exit(3)
        time.sleep(60)
        raise AssertionError


def test_a_process_that_crashes_or_hangs_is_a_result() -> None:
    worker = SweepWorker(SweepOptions(timeout=20.0, threads=1).config())
    try:
        cell = Cell(Crashing("x", "linear"), Case(7, num_heads=1, head_dim=3))
        worker.ask("time", cell)
        worker.ask("time", cell._replace(case=replace(cell.case, length=11)))
        assert worker.answer(None) == Measurement("crashed", "the process ended with exit status 3")
        assert worker.answer(time.monotonic() + 0.1).status == "skipped"
        worker._config = replace(worker._config, timeout=0.1)
        assert worker.answer(None) == Measurement("timed out", "no result within 0.1 s")
        assert worker._asked == []
    finally:
        worker.kill()


def test_a_process_reports_how_long_it_took() -> None:
    worker = SweepWorker(SweepOptions(timeout=60.0, threads=1, repeats=1).config())
    try:
        for length, what in ((67, "prepare"), (67, "time"), (131, "prepare")):
            worker.ask(what, Cell(SweepSubject("linear", "linear"), Case(length, num_heads=1, head_dim=3)))
        first, timed, second = (worker.answer(None).metrics for _ in range(3))
    finally:
        worker.kill()
    assert 0 < first["check_s"] <= first["prepare_s"]
    assert timed["time_s"] > 0
    assert second["prepare_s"] >= 0
    assert "check_s" not in second, "one check for all lengths"


class WrongGateAttention(DecayAttention):
    """Decay with a wrong gradient of one parameter."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.time_step.A_log.register_hook(lambda d: d if d.dtype == torch.float64 else d * 1.1)


def test_a_check_names_the_result_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(SweepSubject("decay", "decay"), Case(67, num_heads=2, head_dim=8))
    found = sweep._prepare(*cell, {})
    assert (found.status, found.message) == ("ok", "")
    monkeypatch.setitem(_REGISTRY, "decay", WrongGateAttention)
    found = sweep._prepare(*cell, {})
    assert found.status == "wrong"
    assert found.message.startswith("error 1.0e-01 of the gradient of time_step.A_log against itself in float64")
    assert found.check is not None
    assert found.check["result"] == "the gradient of time_step.A_log"


def test_drawing_needs_no_package_of_the_command_line(tmp_path: Path) -> None:
    rows = [row(name, 1.0, length=64) for name in (SDPA, "linear")]
    program = (
        "import json, sys\n"
        "sys.modules.update(dict.fromkeys(('tyro', 'rich')))\n"
        "from pathlib import Path\n"
        "from longspan.bench.sweep_report import draw\n"
        "assert draw(Path(sys.argv[1]), json.loads(sys.argv[2]))\n"
    )
    path = tmp_path / "map.png"
    subprocess.run([sys.executable, "-c", program, str(path), json.dumps(rows)], check=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_options_can_be_given_as_json(slow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep.jsonl"
    values = {"subject": "sweep", "lengths": [67], "head_dims": [5], "heads": [1], "mechanisms": ["slow"]}
    values |= {"modes": ["causal"], "tokens": 67, "repeats": 1, "peers": False, "out": str(out)}
    monkeypatch.setattr(sys, "argv", ["bench", json.dumps(values)])
    by_json.main()
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["slow"]
