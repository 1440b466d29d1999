"""Run the recall benchmark: choose learning rates, train with several seeds, and store every run when it ends."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from longspan.bench.arguments import check_device, check_positive
from longspan.bench.environment import cores, environment
from longspan.bench.jsonl import Row, append, prepare
from longspan.bench.recall.results import best_lr, identify, key, plot, read, table
from longspan.bench.recall.training import RecallRun, execute
from longspan.bench.recall.variants import FIRST, RECIPES, LayerOptions, Recipe, model_config
from longspan.bench.report import plot_beside
from longspan.bench.subjects.base import failure, one_line
from longspan.train.synthetic.datasets import Dataset, cached_dataset
from longspan.train.synthetic.tasks import SyntheticTask
from longspan.utils import choose, printable

_SCORING = 15.0  # seconds between the end of training and the end of the time budget


@dataclass(frozen=True)
class RecallOptions:
    """Train small models of every mechanism on synthetic tasks, with states of equal size, and report their accuracy.

    For each task and mechanism a learning rate is chosen on one seed in a quarter of the steps; then several seeds are
    trained with it. Every finished run is appended to the results file: call again to continue.
    """

    tasks: tuple[str, ...] = tuple(RECIPES)
    """Tasks: mqar, parity, selective-copy, needle, listops."""
    mechanisms: tuple[str, ...] = ()
    """Mechanisms, such as linear,delta-head,local+delta-head. By default all of them."""
    length: int | None = None
    """Tokens of a sequence. By default 1024; 256 for parity, 2000 for listops."""
    steps: int | None = None
    """Steps of a run. By default 6000 for mqar, 3000 for parity, 4000 for selective-copy, 1600 for needle, 30,000 for
    listops; a quarter in sweeps."""
    batch_tokens: int | None = None
    """Tokens of a step, with padding. By default 8192; 5120 for parity, 128,000 for listops."""
    train_tokens: int | None = None
    """Tokens of a training set. By default 17 million, 4 for parity, 96,000 sequences for listops."""
    score_sequences: int = 1024
    """Sequences to score."""
    dim: int | None = None
    """Width of the models. By default 128."""
    depth: int | None = None
    """Number of layers. By default 2; 1 for parity, 4 for listops."""
    heads: int | None = None
    """Number of heads. By default 2; 4 for listops."""
    conv_size: int | None = None
    """Width of the convolution over queries, keys and values, 0 for none. By default 4; 0 for parity."""
    gate_noise: float | None = None
    """Standard deviation of noise added to the mechanisms' gates in training. By default 2 for parity, 0 otherwise."""
    compile: bool = False
    """Compile the models: fewer launches and less memory traffic, for half a minute of a CPU core or more per model."""
    lrs: tuple[float, ...] = ()
    """Learning rates to choose from on seed 0; a single one is used as it is. By default two of each task."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the final runs."""
    run_seconds: float | None = None
    """Longest training time of a run, a quarter in sweeps; the schedule of the learning rate is shortened to it."""
    jobs: int = 1
    """Processes that share the device; each trains the learning rates or seeds of one mechanism at the same time."""
    minutes: float | None = None
    """Time budget: what has not finished by then is left to the next call, but run_seconds are shortened to it where at
    least half of them are left."""
    device: str = "cpu"
    """cpu or cuda."""
    threads: int | None = None
    """CPU threads of each process. By default the cores divided among the processes."""
    cache: Path = Path("runs/recall-data")
    """Folder of the generated sequences."""
    out: Path = Path("runs/recall.jsonl")
    """File of the results, one JSON object per run. Runs that it holds are not repeated."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            choose("task", name, RECIPES)
        if not self.tasks or not self.seeds:
            raise ValueError("tasks and seeds must not be empty")
        check_positive(self, "dim", "depth", "heads", "length", "steps", "batch_tokens", "train_tokens", "lrs")
        check_positive(self, "score_sequences", "jobs", "minutes", "threads", "run_seconds")
        if self.gate_noise is not None and not 0 <= self.gate_noise < math.inf:
            raise ValueError(f"gate_noise must be 0 or more, got {self.gate_noise:g}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"seeds must be 0 or more, got {', '.join(map(str, self.seeds))}")
        for task in self.tasks:
            recipe = self.recipe(task)
            known = recipe.mechanisms
            for name in self.mechanisms:
                choose("mechanism", name, known)
            model_config(recipe.score, known["linear"], recipe.layer)
            if recipe.compile and recipe.gate_noise:
                raise ValueError(f"compile excludes noise on gates, which {task} has: set gate_noise to 0")
        check_device(self.device)

    def recipe(self, task: str) -> Recipe:
        """Return how a task is trained with these options."""
        make, length = RECIPES[task]
        recipe = make(self.length or length)
        changes: dict[str, Any] = {"lrs": self.lrs or recipe.lrs, "steps": self.steps or recipe.steps}
        for name in ("batch_tokens", "train_tokens"):
            changes[name] = getattr(self, name) or getattr(recipe, name)
        changes["compile"] = self.compile
        changes["gate_noise"] = recipe.gate_noise if self.gate_noise is None else self.gate_noise
        given = {each.name: getattr(self, each.name) for each in fields(LayerOptions)}
        layer = replace(recipe.layer, **{name: value for name, value in given.items() if value is not None})
        return replace(recipe, layer=layer, **changes)


def run(options: RecallOptions) -> list[Row]:
    """Run what the options select and the results file does not hold.

    The table goes to stdout and progress to stderr; a plot is written beside the results.

    Args:
        options: What to run and where to store it.

    Returns:
        All results in the file.

    Raises:
        ValueError: The results file cannot be read or written.
    """
    started = time.monotonic()
    deadline = None if options.minutes is None else started + 60 * options.minutes
    prepare(options.out)
    plan = RecallPlan(options, read(options.out))
    if plan.open:
        _run_plan(plan, options, deadline)
    rows = read(options.out)
    print(table(rows).markdown(), flush=True)
    print(plot_beside(options.out, lambda path: plot(path, rows)), file=sys.stderr)
    return rows


class RecallPlan:
    """The runs in order of importance: for each task and mechanism a sweep of learning rates, then several seeds.

    Args:
        options: What to run.
        done: Results of earlier calls; runs that failed are tried again.
    """

    def __init__(self, options: RecallOptions, done: Sequence[Row]) -> None:
        self._options = options
        self._ended = {key(row): row for row in done if row["status"] == "ok"}
        self._started: set[str] = set()
        self._pairs = list(_pairs(options))
        self._sweeps = {pair: self._sweep(*pair) for pair in self._pairs}

    def next(self, tasks: Container[str]) -> list[RecallRun]:
        """Return the runs of the first pair of one of the tasks that can start now, and count them as started."""
        for runs in self._open():
            if next(iter(runs.values())).task in tasks:
                self._started |= runs.keys()
                return list(runs.values())
        return []

    def finish(self, row: Row) -> None:
        """Count a result; a run that failed is not tried again in this call."""
        self._ended[key(row)] = row

    @property
    def open(self) -> list[RecallRun]:
        """The runs that could start now."""
        return [run for runs in self._open() for run in runs.values()]

    def _open(self) -> Iterator[dict[str, RecallRun]]:
        for pair in self._pairs:
            sweep = self._sweeps[pair]
            found = sweep
            if all(name in self._ended for name in sweep):
                rows = [self._ended[name] for name in sweep if self._ended[name]["status"] == "ok"]
                if not rows and sweep:
                    continue
                lr = best_lr(rows) if rows else self._options.recipe(pair[0]).lrs[0]
                found = self._named([self._run(*pair, "final", lr, seed) for seed in self._options.seeds])
            found = {name: run for name, run in found.items() if name not in self._started | self._ended.keys()}
            if found:
                yield found

    def _sweep(self, task: str, mechanism: str) -> dict[str, RecallRun]:
        lrs = self._options.recipe(task).lrs
        return self._named([self._run(task, mechanism, "sweep", lr, 0) for lr in lrs if len(lrs) > 1])

    def _run(self, task: str, mechanism: str, stage: str, lr: float, seed: int) -> RecallRun:
        options, recipe = self._options, self._options.recipe(task)
        steps, seconds = recipe.steps, options.run_seconds
        if stage == "sweep":
            steps, seconds = max(1, steps // 4), None if seconds is None else seconds / 4
        spec = recipe.mechanisms[mechanism]
        return RecallRun(task, mechanism, spec, stage, lr, seed, steps, recipe.layer, recipe, seconds)

    @staticmethod
    def _named(runs: Sequence[RecallRun]) -> dict[str, RecallRun]:
        return {key(identify(run)): run for run in runs}


def _pairs(options: RecallOptions) -> Iterator[tuple[str, str]]:
    """Tasks and mechanisms, the most informative ones first."""
    chosen = {task: options.mechanisms or tuple(options.recipe(task).mechanisms) for task in options.tasks}
    first = [(task, name) for task in options.tasks for name in FIRST.get(task, ()) if name in chosen[task]]
    rest = [(task, name) for task in options.tasks for name in chosen[task] if (task, name) not in first]
    yield from first
    yield from rest


def _run_plan(plan: RecallPlan, options: RecallOptions, deadline: float | None) -> None:
    threads = options.threads or max(1, cores() // options.jobs)
    about = environment(options.device)
    workers = [_Worker(options, threads, deadline) for _ in range(options.jobs)]
    data = _Preparation(options, list(dict.fromkeys(run.task for run in plan.open)))
    try:
        while deadline is None or time.monotonic() < deadline:
            prepared = not data.is_alive()
            for worker in workers:
                if not worker.runs and _time_for_a_run(options, deadline) and (runs := plan.next(data.ready)):
                    worker.start(runs)
            busy = {worker.connection: worker for worker in workers if worker.runs}
            if not busy and prepared:
                break
            if not busy:
                time.sleep(0.1)
            for connection in wait(list(busy), timeout=0.5):
                worker = busy[connection]  # type: ignore[index]
                rows = [about | row for row in worker.receive()]
                for row in rows:
                    append(options.out, row)
                    plan.finish(row)
                    print(_line(row), file=sys.stderr, flush=True)
                if rows[0]["status"] != "ok":  # A failed kernel leaves the CUDA context unusable.
                    worker.stop()
                    workers[workers.index(worker)] = _Worker(options, threads, deadline)
    finally:
        for worker in workers:
            worker.stop()
    data.check()


def _time_for_a_run(options: RecallOptions, deadline: float | None) -> bool:
    """Whether a run that starts now could train for half of its seconds: shorter ones cannot be compared."""
    if deadline is None or options.run_seconds is None:
        return True
    return deadline - _SCORING - time.monotonic() >= options.run_seconds / 2


class _Preparation(Thread):
    """Generates the data of tasks, one after another.

    Attributes:
        ready: Tasks whose data is stored.
    """

    def __init__(self, options: RecallOptions, tasks: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._options, self._tasks = options, tasks
        self.ready: set[str] = set()
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Generate what is not in the cache."""
        try:
            jobs = self._options.jobs
            with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
                for task in self._tasks:
                    _datasets(self._options, task, pool)
                    self.ready.add(task)
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise ValueError(f"cannot generate data in {self._options.cache}: {one_line(self._error)}")


def _datasets(
    options: RecallOptions, task: str, pool: ProcessPoolExecutor | None = None
) -> tuple[list[Dataset], Dataset]:
    """The data sets of a task: those to train on, and the one to score."""
    recipe = options.recipe(task)

    def load(which: SyntheticTask, split: str, size: int) -> Dataset:
        return cached_dataset(which, split, 0, max(1, size), options.cache, pool)

    train = [load(each, "train", recipe.train_tokens // each.length) for each in recipe.train]
    return train, load(recipe.score, "score", options.score_sequences)


class _Worker:
    """A process that executes runs.

    Attributes:
        runs: Those that have not ended, by their identity.
    """

    def __init__(self, options: RecallOptions, threads: int, deadline: float | None) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, options, threads, deadline), daemon=True)
        self._process.start()
        other.close()
        self.runs: dict[str, RecallRun] = {}

    def start(self, runs: Sequence[RecallRun]) -> None:
        """Execute runs of one task; a result makes the connection ready."""
        self.runs = {key(identify(run)): run for run in runs}
        self.connection.send(runs)

    def receive(self) -> list[Row]:
        """Return the result of a run that ended, or of all where the process failed."""
        try:
            name, row = self.connection.recv()
        except EOFError:
            self._process.join()
            name, row = None, {"status": "crashed", "message": f"exit status {self._process.exitcode}"}
        ended = [name] if name is not None else list(self.runs)
        return [identify(self.runs.pop(name)) | row for name in ended]

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(connection: Connection, options: RecallOptions, threads: int, deadline: float | None) -> None:
    """Execute the runs that arrive, until the connection closes or the process that started this one ends."""
    Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    device = torch.device(options.device)
    end = math.inf if deadline is None else deadline - _SCORING

    @cache
    def load(task: str) -> tuple[list[Dataset], Dataset]:
        train, score = _datasets(options, task)
        parts = [part for each in train for part in each.by_length(options.recipe(task).length_buckets)]
        return [part.to(device) for part in parts], score.to(device)

    while True:
        try:
            runs = connection.recv()
        except EOFError:
            return
        try:
            for run, found in execute(runs, *load(runs[0].task), device, end):
                connection.send((key(identify(run)), {"status": "ok", **found}))
        except Exception as error:
            traceback.print_exc()
            failed = failure(error)
            connection.send((None, {"status": failed.status, "message": failed.message}))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _line(row: Row) -> str:
    head = f"{row['task']}, {row['mechanism']}, {row['stage']}, lr {row['lr']:g}, seed {row['seed']}: "
    if row["status"] != "ok":
        return printable(head + f"{row['status']}: {row['message']}")
    loss = "–" if row["train_loss"] is None else f"{row['train_loss']:.4f}"
    stopped = f"not finite: {row['not_finite']}" if row.get("not_finite") else row["stopped"]
    return f"{head}{row['accuracy']:.1%}, loss {loss}, {row['steps']} steps ({stopped}), {row['seconds']:.1f} s"
