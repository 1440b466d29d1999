"""The recall benchmark: models of equal state, the order of runs, results that grow, and a run from start to end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from longspan.bench.jsonl import append
from longspan.bench.recall import RecallOptions, results, run, training
from longspan.bench.recall.runner import RecallPlan
from longspan.bench.recall.training import RecallRun, execute
from longspan.bench.recall.variants import FIRST, RECIPES, LayerOptions, Recipe, mechanisms, model_config
from longspan.models.layers import Attention
from longspan.models.transformer import Classifier, LanguageModel
from longspan.train.synthetic import datasets
from longspan.train.synthetic.datasets import Dataset, cached_dataset, make_dataset
from longspan.train.synthetic.tasks import ListOps, Needle, Parity, Recall

CPU = torch.device("cpu")


def result_of(run_: RecallRun, train: list[Dataset], score: Dataset) -> dict[str, Any]:
    ((ended, found),) = execute([run_], train, score, CPU)
    assert ended == run_
    return found


TINY = LayerOptions(dim=16, heads=2)


def test_a_single_layer_has_no_hybrids_of_layers() -> None:
    for depth, some in ((1, False), (2, True)):
        names = RecallOptions(tasks=("needle",), depth=depth).recipe("needle").mechanisms
        assert any("/" in name for name in names) == some
        assert "local+delta" in names
    with pytest.raises(ValueError, match="delta/local"):
        RecallOptions(tasks=("parity",), mechanisms=("delta/local",))


def test_every_mechanism_has_a_state_of_equal_size() -> None:
    layer = LayerOptions(dim=32, heads=2, conv_size=0)
    sizes = {
        name: LanguageModel(model_config(Needle(64), spec, layer)).state_size() / 4 / layer.depth
        for name, spec in mechanisms(2, 16, 64).items()
        if name != "softmax"
    }
    for name, size in sizes.items():
        assert 2 * 16 * 16 <= size <= 1.2 * 2 * 16 * 16, name


@pytest.mark.parametrize("name", mechanisms(2, 8, 17))
def test_every_mechanism_trains_on_tokens_and_classes(name: str) -> None:
    layer = TINY if "/" in name else replace(TINY, depth=1)
    for score in (Needle(17), ListOps(17))[: 1 if "+" in name or "/" in name else 2]:
        recipe = Recipe(score, (score,), steps=1, batch_tokens=51)
        data = make_dataset(score, "train", 0, 3)
        run_ = RecallRun(score.name, name, mechanisms(2, 8, 17)[name], "final", 1e-3, 0, 1, layer, recipe)
        found = result_of(run_, [data], data)
        assert (found["steps"], found["stopped"], found["answers"]) == (1, "steps", 3)
        assert (found["state_numbers"] is None) == (score.name == "listops")


def small(**options: Any) -> tuple[RecallRun, list[Dataset], Dataset]:
    score = Recall(32, 2, 21)
    recipe = Recipe(score, (score,), steps=4, batch_tokens=160)
    data = make_dataset(score, "train", 0, 64), make_dataset(score, "score", 0, 11)
    spec = mechanisms(2, 8, 32)["delta-head"]
    return (
        RecallRun("mqar", "delta-head", spec, "final", 1e-2, 0, 4, TINY, replace(recipe, **options)),
        [data[0]],
        data[1],
    )


def test_runs_are_reproducible_and_depend_on_seed_rate_and_options() -> None:
    run_, train, score = small()
    loss = result_of(run_, train, score)["train_loss"]
    assert result_of(run_, train, score)["train_loss"] == loss
    others = replace(run_, seed=1), replace(run_, lr=1e-3), replace(run_, layer=replace(TINY, conv_size=0))
    assert len({loss, *(result_of(other, train, score)["train_loss"] for other in others)}) == 4


@pytest.mark.parametrize("gate_noise", [0.0, 1.0])
def test_runs_trained_together_are_those_trained_alone(gate_noise: float) -> None:
    run_, train, score = small(gate_noise=gate_noise)
    runs = [run_, replace(run_, seed=1), replace(run_, steps=2)]
    together = list(execute(runs, [train[0], score], score, CPU))
    assert [(each.seed, each.steps) for each, _ in together] == [(0, 2), (0, 4), (1, 4)], "the shortest ends first"
    for each, found in together:
        alone = result_of(each, [train[0], score], score)
        assert {**alone, "seconds": 0} == {**found, "seconds": 0}
        assert found["steps"] == each.steps, "a step on each data set in turn"


def test_noise_of_gates_is_for_training_alone() -> None:
    run_, train, score = small(gate_noise=2.0)
    loss = result_of(run_, train, score)["train_loss"]
    assert loss == result_of(run_, train, score)["train_loss"] != result_of(*small())["train_loss"]
    without = replace(run_, mechanism="linear", spec=mechanisms(2, 8, 32)["linear"])
    quiet = replace(without, recipe=replace(without.recipe, gate_noise=0.0))
    assert result_of(without, train, score)["train_loss"] == result_of(quiet, train, score)["train_loss"], "no gates"
    model = training._Training(run_, train, CPU, math.inf).model
    tokens = train[0].select(torch.arange(3)).tokens
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))
    chosen = RecallOptions(tasks=("parity", "needle"), gate_noise=0.5)
    assert [chosen.recipe(task).gate_noise for task in chosen.tasks] == [0.5, 0.5]
    assert [RecallOptions().recipe(task).gate_noise for task in chosen.tasks] == [2.0, 0.0]
    assert RecallOptions(gate_noise=0.0).recipe("parity").gate_noise == 0
    assert not chosen.recipe("needle").compile
    assert RecallOptions(tasks=("needle",), compile=True).recipe("needle").compile


def test_compiled_models_train_as_eager_ones_in_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    task, compiled = ListOps(64), torch.compile
    calls, graphs = [], []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_eagerly(call: Any, **options: Any) -> Any:
        calls.append(options)
        return compiled(call, backend=backend, **options)

    monkeypatch.setattr(training.torch, "compile", compile_eagerly)
    layer = replace(TINY, depth=1)
    recipe = Recipe(task, (task,), steps=4, batch_tokens=192, layer=layer)
    run_ = RecallRun("listops", "decay-head", mechanisms(2, 8, 64)["decay-head"], "final", 1e-2, 0, 4, layer, recipe)
    train, score = make_dataset(task, "train", 0, 32).by_length(2), make_dataset(task, "score", 0, 5)
    found = []
    for compile_ in (False, True):
        changed = replace(run_, recipe=replace(recipe, compile=compile_))
        ((_, result),) = execute([changed], train, score, CPU)
        found.append({**result, "seconds": 0})
        assert results.key(results.identify(changed)) == results.key(results.identify(run_)), "the same run"
    assert found[0] == found[1]
    assert calls == [{"fullgraph": True, "dynamic": True}]
    assert len(graphs) == 1
    assert len({part.tokens.shape[1] for part in train}) == 2


def test_training_ends_when_solved_or_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BLOCK", 2)
    run_, train, score = small(solved=100.0)
    assert result_of(run_, train, score)["stopped"] == "solved"
    run_, train, score = small()
    found = result_of(replace(run_, steps=7, seconds=1e-6), train, score)
    assert (found["stopped"], found["steps"]) == ("time", 3), "one more step, with the last learning rate"
    ((_, found),) = execute([replace(run_, steps=7, seconds=100)], train, score, CPU, time.monotonic())
    assert (found["stopped"], found["steps"]) == ("time", 3), "before the deadline of all runs"
    found = result_of(replace(run_, seconds=100), train, score)
    assert (found["stopped"], found["steps"]) == ("steps", 4)


def test_a_step_that_is_not_finite_ends_training_and_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BLOCK", 3)
    run_, train, score = small()
    trained = training._Training(run_, train, CPU, math.inf)
    trained.round()
    before = [p.clone() for p in trained.model.parameters()]
    weight = trained.model.get_parameter("transformer.stack.branches.1.layer.to_out.weight")
    hook = weight.register_hook(lambda grad: grad * math.inf)
    trained.round()
    assert all(torch.equal(p, q) for p, q in zip(trained.model.parameters(), before, strict=True)), "weights are kept"
    trained.round()
    found = trained.result(score)
    assert (found["stopped"], found["steps"], found["train_loss"]) == ("not finite", 1, None)
    assert found["not_finite"] == (
        "step 2, 32 tokens: 1 gradients, the first of them that of transformer.stack.branches.1.layer.to_out.weight"
    )
    hook.remove()
    assert trained._explain() == "step 2, 32 tokens: nothing, computed again"
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")
    assert trained._explain().endswith("again; unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, which is 40")
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    with torch.no_grad():
        weight[0, 0] = math.nan
    assert trained._explain() == "step 2, 32 tokens: the output of transformer.stack.branches.1.layer.to_out"


def test_logits_are_those_of_the_answers() -> None:
    """A model scored on labels (B, T) and on a data set's positions has the same accuracy."""
    task = Recall(32, 2, 21)
    data, arrays = make_dataset(task, "score", 0, 11), task.arrays("score", 0, 0, 11)
    assert data.positions is not None
    for row, positions, answers in zip(arrays[1], data.positions.tolist(), data.answers.tolist(), strict=True):
        assert {i: int(label) for i, label in enumerate(row) if label >= 0} == dict(
            zip(positions, answers, strict=True)
        )
    assert torch.equal(data.tokens.long(), torch.from_numpy(arrays[0]))


def test_the_first_token_tells_the_class() -> None:
    """Only that of all outputs: the mean of a long list hides its root."""
    task = ListOps(64)
    data = make_dataset(task, "score", 0, 5)
    recipe = Recipe(task, (task,), steps=1)
    model = Classifier(model_config(task, mechanisms(2, 8, 64)["linear"], TINY))
    outputs: list[torch.Tensor] = []
    model.to_classes.register_forward_hook(lambda _, __, out: outputs.append(out))
    logits = training._logits(model, recipe, data.select(torch.arange(5)))
    assert torch.equal(logits, outputs[0][:, 0])


@pytest.mark.parametrize("name", [name for name in mechanisms(2, 8, 17) if name.startswith(("decay", "delta"))])
def test_gated_classifiers_tell_a_list_from_its_reverse(name: str) -> None:
    """Sums of both directions alike would have the same outputs in reverse, and no depth of nesting."""
    layer = replace(TINY, depth=2 if "/" in name else 1, conv_size=0)
    model = Classifier(model_config(ListOps(17), mechanisms(2, 8, 17)[name], layer)).eval()
    tokens = torch.randint(1, 16, (2, 17))
    out, back = model(tokens), model(tokens.flip(1)).flip(1)
    assert (out - back).norm() > 0.01 * out.norm()


def test_hybrids_by_layers_have_a_window_in_every_other_layer() -> None:
    model = LanguageModel(model_config(Needle(64), mechanisms(2, 8, 64)["delta-head/local"], replace(TINY, depth=4)))
    found = [type(layer.mechanism).__name__ for layer in model.modules() if isinstance(layer, Attention)]
    assert found == ["DeltaAttention", "LocalAttention"] * 2


def test_tasks_have_layers_of_their_own_unless_given(tmp_path: Path) -> None:
    everything = tuple(RECIPES)
    default = RecallOptions(tasks=everything)
    assert {task: default.recipe(task).layer for task in everything} == {
        **dict.fromkeys(everything, LayerOptions()),
        "parity": LayerOptions(depth=1, conv_size=0),
        "listops": LayerOptions(depth=4, heads=4),
    }
    given = LayerOptions(24, 3, 1, conv_size=3)
    chosen = RecallOptions(tasks=everything, **vars(given))
    assert {chosen.recipe(task).layer for task in everything} == {given}
    (run_,) = RecallPlan(replace(chosen, tasks=("parity",), mechanisms=("local",), lrs=(1e-3,), seeds=(0,)), []).open
    assert (run_.layer, run_.spec) == (given, {"mechanism": "local", "window": 12})


def test_parity_is_scored_by_length_and_needles_by_depth() -> None:
    recipe = RECIPES["parity"][0](256)
    assert (recipe.train[0].length, recipe.score) == (40, Parity(256, first=40))
    data = make_dataset(recipe.score, "score", 0, 3)
    run_ = RecallRun("parity", "linear", mechanisms(2, 8, 256)["linear"], "final", 1e-3, 0, 1, TINY, recipe)
    run_ = replace(run_, recipe=replace(recipe, batch_tokens=256))
    found = result_of(run_, [make_dataset(recipe.train[0], "train", 0, 5)], data)
    assert list(found["lengths"]) == ["40", "64", "96", "128", "192", "256"]
    assert found["answers"] == 3 * 217
    needle = Recipe(Needle(29), (Needle(29),), steps=1, batch_tokens=87)
    data = make_dataset(Needle(29), "score", 0, 17)
    found = result_of(replace(run_, recipe=needle), [data], data)
    assert sum(part["rows"] for part in found["depths"]) == 17


def test_the_mixture_of_recall_reaches_the_scored_task() -> None:
    recipe = RECIPES["mqar"][0](1024)
    assert [(t.length, t.pairs, t.vocab_size) for t in recipe.train if isinstance(t, Recall)] == [
        *((64, 4, 8192), (256, 64, 8192), (1024, 64, 8192))
    ]
    assert recipe.score == Recall(1024, 64, 8192)


def test_datasets_do_not_depend_on_the_processes_and_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ListOps(29)
    monkeypatch.setattr(datasets, "_BLOCK", 5)
    alone = make_dataset(task, "train", 3, 17)
    assert len({tuple(tokens) for tokens in alone.tokens.tolist()}) == 17
    with ThreadPoolExecutor(2) as pool:
        first = cached_dataset(task, "train", 3, 17, tmp_path, pool)
    assert torch.equal(alone.tokens, first.tokens)
    assert torch.equal(alone.answers, first.answers)
    assert first.key_mask is not None
    assert torch.equal(first.key_mask, first.tokens != 0)
    monkeypatch.setattr(ListOps, "draw", None)
    assert torch.equal(cached_dataset(task, "train", 3, 17, tmp_path).tokens, first.tokens)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("listops-29-train-3-17-")


def test_buckets_by_length_have_less_padding() -> None:
    data = make_dataset(ListOps(128), "train", 3, 17)
    parts = data.by_length(3)
    assert [len(part) for part in parts] == [6, 6, 5]
    assert parts[0].tokens.shape[1] < parts[1].tokens.shape[1] < parts[2].tokens.shape[1] <= 128
    padded = [row for part in parts for row in torch.nn.functional.pad(part.tokens, (0, 128))[:, :128].tolist()]
    assert sorted(padded) == sorted(data.tokens.tolist())
    assert sorted(torch.cat([part.answers for part in parts]).tolist()) == sorted(data.answers.tolist())
    assert data.by_length(1) == [data]


def options(folder: Path, **changes: Any) -> RecallOptions:
    values: dict[str, Any] = {"tasks": ("parity", "needle"), "mechanisms": ("local", "delta-negative"), "length": 31}
    values |= {"dim": 16, "steps": 4, "batch_tokens": 155, "train_tokens": 620, "score_sequences": 7}
    values |= {"lrs": (1e-3, 1e-2), "seeds": (0, 5), "threads": 1}
    values |= {"out": folder / "out.jsonl", "cache": folder / "cache"}
    return RecallOptions(**{**values, **changes})


def row(run_: RecallRun, accuracy: float, **values: Any) -> dict[str, Any]:
    found = {"status": "ok", "accuracy": accuracy, "train_loss": 1.0, "chance": 0.5, "stopped": "steps", "steps": 4}
    return {**results.identify(run_), **found, "state_numbers": 512, **values}


def test_sweeps_come_before_seeds_and_the_most_telling_pairs_first(tmp_path: Path) -> None:
    plan = RecallPlan(options(tmp_path), [])
    everything = ("parity", "needle")
    groups = [plan.next(everything) for _ in range(4)]
    assert plan.next(everything) == [], "final runs need the results of the sweep"
    found = [[(r.task, r.mechanism, r.stage, r.lr, r.seed, r.steps) for r in runs] for runs in groups]
    assert found[0] == [("parity", "delta-negative", "sweep", lr, 0, 1) for lr in (1e-3, 1e-2)]
    assert [runs[0][:2] for runs in found[1:]] == [
        *(("parity", "local"), ("needle", "local"), ("needle", "delta-negative"))
    ]
    plan.finish(row(groups[0][0], 0.7))
    assert plan.next(everything) == []
    plan.finish(row(groups[0][1], 0.9))
    assert plan.next(("needle",)) == [], "its data may not be ready"
    assert [(r.stage, r.lr, r.seed, r.steps) for r in plan.next(everything)] == [
        *(("final", 1e-2, 0, 4), ("final", 1e-2, 5, 4))
    ]


def test_what_exists_is_not_run_again_and_failures_are(tmp_path: Path) -> None:
    one = RecallPlan(options(tmp_path, mechanisms=("local",), tasks=("needle",)), []).open
    failed = {**row(one[1], 0.0), "status": "error"}
    plan = RecallPlan(options(tmp_path, mechanisms=("local",), tasks=("needle",)), [row(one[0], 0.5), failed])
    assert [r.lr for r in plan.open] == [1e-2]
    plan.finish(failed)
    assert [(r.stage, r.lr) for r in plan.open] == [("final", 1e-3)] * 2, "not tried twice in one call"
    plan.finish({**row(one[0], 0.5), "status": "error"})
    assert plan.open == []
    for change in ({"dim": 32}, {"steps": 8}, {"conv_size": 0}, {"length": 37}, {"batch_tokens": 310}):
        done = [row(r, 0.5) for r in one]
        again = RecallPlan(options(tmp_path, mechanisms=("local",), tasks=("needle",), **change), done)
        assert [r.stage for r in again.open] == ["sweep", "sweep"], change
    single = RecallPlan(options(tmp_path, mechanisms=("local",), tasks=("needle",), lrs=(1e-3,)), [])
    assert [(r.stage, r.lr) for r in single.open] == [("final", 1e-3)] * 2


def test_the_best_rate_has_the_highest_accuracy_then_the_lowest_loss(tmp_path: Path) -> None:
    runs = RecallPlan(options(tmp_path, lrs=(1e-3, 3e-3, 1e-2)), []).open[:3]
    assert results.best_lr([row(runs[0], 0.5), row(runs[1], 0.9), row(runs[2], 0.8)]) == 3e-3
    losses = (0.4, None, 0.3)
    assert results.best_lr([row(r, 0.5, train_loss=x) for r, x in zip(runs, losses, strict=True)]) == 1e-2


def test_results_are_appended_by_several_processes_and_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    line = {"task": "mqar", "mechanism": "linear", "stage": "final", "status": "ok", "padding": "x" * 9000}
    line |= {"layer": {"dim": 16, "token_shift": [], "out_norm": True, "out_gate": "silu"}, "gate_span": 0}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append(path, {**line, "i": i}), range(64)))
    assert sorted(found["i"] for found in results.read(path)) == list(range(64))
    with path.open("a") as file:
        file.write('{"task": "mqar", "mech')
    assert len(results.read(path)) == 64
    append(path, {**line, "i": 64})
    assert sorted(found["i"] for found in results.read(path)) == list(range(65))
    assert results.read(tmp_path / "nothing") == []
    assert results.read(path)[0]["layer"] == {"dim": 16}, "without what options that are gone were not set to"
    path.write_text('{"task": 1}\n{}\n')
    with pytest.raises(ValueError, match=r"out.jsonl, line 1: a result has task.*remove the line, or choose another"):
        results.read(path)


def test_the_table_has_means_ranges_and_marks(tmp_path: Path) -> None:
    runs = RecallPlan(options(tmp_path, lrs=(1e-3,), mechanisms=("local", "linear")), []).open
    accuracies = {("parity", "local"): (0.5, 0.504), ("parity", "linear"): (0.5, 0.9), ("needle", "local"): (1, 1)}
    rows = [
        row(r, accuracies[r.task, r.mechanism][r.seed > 0], stopped="time" if r.task == "needle" else "steps")
        for r in runs
        if (r.task, r.mechanism) in accuracies
    ]
    table = results.table([*rows, {**rows[0], "status": "error"}, {**rows[0], "stage": "sweep", "accuracy": 0.0}])
    assert table.header == ["", "state, numbers", "parity 31", "needle 31"]
    assert table.rows == [
        ["local", "512", "50.2", "100.0*"],
        ["linear", "512", "70.0 (50–90)", "–"],
        ["chance", "", "50.0", "50.0"],
    ]
    older = [{**each, "max_steps": 2, "accuracy": 0.0} for each in rows]
    assert results.table([*older, *rows]).rows == table.rows, "recipes are never mixed"
    worse = [{**each, "lr": 0.5, "accuracy": 0.3, "max_seconds": 1.0} for each in rows]
    assert results.table([*worse, *rows]).rows == table.rows, "nor learning rates"
    assert results.table([*rows, {**rows[0], "accuracy": 0.0, "train_loss": None}]).rows == table.rows
    shorter = [{**each, "accuracy": 0.0, "max_seconds": 1.0, "stopped": "time", "steps": 1} for each in rows]
    for repeated in ([*shorter, *rows], [*rows, *shorter]):
        assert results.table(repeated).rows == table.rows, "what was repeated counts once, the longest time"
    again = [{**each, "accuracy": 0.25, "max_seconds": 9.0} for each in rows]
    assert results.table([*rows, *again]).rows[0] == ["local", "512", "25.0", "25.0*"], "of equal ones the last"
    assert results.plot(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not results.plot(tmp_path / "b.png", [])


def test_a_benchmark_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(tmp_path, tasks=("needle",), mechanisms=("local",), lrs=(1e-3, 1e-2), seeds=(0,))
    rows = run(chosen)
    assert [(r["stage"], r["status"], r["steps"]) for r in rows] == [
        *(("sweep", "ok", 1), ("sweep", "ok", 1), ("final", "ok", 4))
    ]
    assert {"machine", "versions", "commit", "date"} <= set(rows[0])
    assert (tmp_path / "out.png").exists()
    captured = capsys.readouterr()
    assert "needle, local, final" in captured.err
    assert "| local" in captured.out
    before = chosen.out.read_bytes()
    assert run(chosen) == rows
    assert chosen.out.read_bytes() == before


@pytest.mark.slow
def test_processes_share_a_device_without_the_command_line(tmp_path: Path) -> None:
    values = {"tasks": ["parity"], "mechanisms": ["local", "delta"], "length": 31, "dim": 16, "steps": 4, "jobs": 2}
    values |= {"batch_tokens": 155, "train_tokens": 620, "score_sequences": 7, "seeds": [0], "threads": 1}
    values |= {"out": str(tmp_path / "out.jsonl"), "cache": str(tmp_path / "cache")}
    code = f"""
import sys
sys.modules["tyro"] = sys.modules["rich"] = None
sys.argv[1:] = [{json.dumps(values)!r}]
import runpy
runpy.run_module("longspan.bench.recall", run_name="__main__")
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert len(results.read(tmp_path / "out.jsonl")) == 2 * 3


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    values = {"tasks": ["parity"], "mechanisms": ["delta"], "length": 31, "dim": 16, "steps": 10**6, "lrs": [1e-3]}
    values |= {"batch_tokens": 155, "train_tokens": 620, "score_sequences": 7, "threads": 1}
    values |= {"out": str(tmp_path / "out.jsonl"), "cache": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, "-m", "longspan.bench.recall", json.dumps(values)])
    workers: list[psutil.Process] = []
    while not any(worker.cpu_times().user > 3 for worker in workers):
        time.sleep(0.2)
        workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_the_time_budget_ends_a_run(tmp_path: Path) -> None:
    assert run(options(tmp_path, minutes=1e-9)) == []
    chosen = options(tmp_path, tasks=("needle",), mechanisms=("local",), lrs=(1e-2,), seeds=(0,), minutes=0.5)
    assert run(replace(chosen, run_seconds=60)) == [], "after 15 s to score, less than half of its time is left"
    assert [row["status"] for row in run(replace(chosen, run_seconds=20))] == ["ok"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"tasks": ("mqr",)}, "unknown task 'mqr'.*did you mean 'mqar'"),
    "mechanism": ({"mechanisms": ("dleta",)}, "unknown mechanism 'dleta'"),
    "nothing": ({"tasks": ()}, "tasks and seeds must not be empty"),
    "size": ({"jobs": 0}, "jobs must be positive, got 0"),
    "rate": ({"lrs": (0.0,)}, "lrs must be positive, got 0"),
    "noise": ({"gate_noise": -1.0}, "gate_noise must be 0 or more, got -1"),
    "compile": ({"compile": True}, "compile excludes noise on gates, which parity has: set gate_noise to 0"),
    "seed": ({"seeds": (-1,)}, "seeds must be 0 or more, got -1"),
    "heads": ({"heads": 3}, r"dim \(16\) must be a multiple of heads \(3\)"),
    "length": ({"length": 3}, "too short"),
    "convolution": ({"conv_size": 1}, "conv_size must be 0"),
    "device": ({"device": "gpu"}, "unknown device 'gpu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(tmp_path: Path, name: str) -> None:
    changes, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        options(tmp_path, **changes)


def test_what_is_run_first_exists() -> None:
    known = mechanisms(2, 8, 64)
    assert all(task in RECIPES and name in known for task, names in FIRST.items() for name in names)
    assert isinstance(Classifier(model_config(ListOps(29), known["linear"], TINY)), Classifier)
