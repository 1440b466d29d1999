"""Measure every mechanism over a grid of shapes, and list its cliffs.

`longspan bench sweep` measures forward and forward + backward of each mechanism and of its peers over sequence lengths,
head dimensions, heads, sizes (features, windows, ranks), causal or not, and dtypes. Every result is appended to a file,
so that a run that was killed or ran out of time continues where it stopped. Cells are ordered so that the first ones
cover the grid coarsely. `python -m longspan.bench '{"subject": "sweep"}'` takes options as JSON.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from longspan.bench.arguments import check_device, check_positive
from longspan.bench.environment import cores, environment, warn_if_busy
from longspan.bench.jsonl import Row, append, prepare, read
from longspan.bench.report import plot_beside
from longspan.bench.subjects.base import (
    Case,
    Measurement,
    MeasurementConfig,
    Subject,
    failure,
    small_case,
)
from longspan.bench.subjects.peers import SDPA
from longspan.bench.subjects.sweep import SIZES, FlexWindowSubject, SweepSubject, sweep_subjects
from longspan.bench.sweep_report import KEY, cell_key, cliff_table, draw, find_cliffs, grouped_cliff_table
from longspan.bench.timing import CLOCKS
from longspan.mechanisms import list_mechanisms
from longspan.models.explain import explain
from longspan.utils import choose

MODES = ("causal", "bidirectional")
DTYPES = ("bfloat16", "float16", "float32")


# Full attention of a cell with more operations is left out: forward + backward takes seconds on a fast GPU.
MOST_OPERATIONS = 1.5e14
# Lengths, head dimensions, modes, heads, sizes and dtypes that are measured first, for all mechanisms.
COARSE = (3, 2, 1, 1, 1, 1)
BATCH = 4  # cells of each process, at most, that are compiled on CUDA before they are timed


class Grid(NamedTuple):
    """Default values of a device, of each axis the most informative first."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[int, ...]
    dtypes: tuple[str, ...]
    tokens: int


GRIDS = {
    "cpu": Grid((2048, 512, 8192, 1024, 4096, 256, 16384), (64, 128, 32, 96, 256, 80, 192), (4, 8), ("float32",), 4096),
    "cuda": Grid(
        (2048, 16384, 65536, 512, 131072, 8192, 1024, 4096, 32768, 256, 262144),
        (64, 128, 96, 32, 192, 80, 256, 160),
        (8, 16, 32),
        DTYPES,
        32768,
    ),
}


@dataclass(frozen=True)
class SweepOptions:
    """Measure every mechanism over a grid of shapes beside SDPA, FlexAttention and flash-linear-attention.

    Every result is appended to a file: call again to continue. A cell slower than SDPA from 2048 tokens up, or twice as
    slow as its neighbors per element, is listed as a cliff.
    """

    mechanisms: tuple[str, ...] = ()
    """Mechanisms to measure. By default all but softmax, which is PyTorch's SDPA."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths. By default 256 to 262144, on a CPU to 16384. The first values of each axis are measured
    first."""
    head_dims: tuple[int, ...] = ()
    """Dimensions of a head. By default 32 to 256."""
    heads: tuple[int, ...] = ()
    """Numbers of heads. By default 8, 16 and 32, on a CPU 4 and 8."""
    num_features: tuple[int, ...] = ()
    """Numbers of features of performer. By default 64 to 1024, on a CPU 64 and 256."""
    windows: tuple[int, ...] = ()
    """Windows of local. By default 64 to 1024, on a CPU 64 and 256."""
    ranks: tuple[int, ...] = ()
    """Ranks of linformer. By default 64, 128 and 256."""
    modes: tuple[str, ...] = MODES
    """causal, bidirectional, or both."""
    dtypes: tuple[str, ...] = ()
    """float32, bfloat16, float16. By default all of them on CUDA, float32 on a CPU."""
    tokens: int | None = None
    """Tokens of a batch: the batch size is this divided by the length. By default 32768, on a CPU 4096."""
    peers: bool = True
    """Measure SDPA, FlexAttention and flash-linear-attention too."""
    device: str = "cpu"
    """cpu or cuda."""
    minutes: float | None = None
    """Time budget: what is not measured by then is left to the next call."""
    repeats: int = 10
    """Samples of each step."""
    threads: int | None = None
    """CPU threads. By default the number of cores."""
    clock: str = "wall"
    """wall, or processor: the processor time of one thread, which other processes on a busy machine do not change."""
    jobs: int | None = None
    """Processes that compile at the same time; cells are timed one after another. By default 1, on CUDA 8."""
    timeout: float = 120.0
    """Seconds after which a cell is given up."""
    out: Path = Path("runs/sweep.jsonl")
    """File of the results, one JSON object per line; the heat map is beside it. Cells that it holds are not measured
    again."""

    def __post_init__(self) -> None:
        for what, given, allowed in (
            ("mechanism", self.mechanisms, list(list_mechanisms())),
            ("mode", self.modes, MODES),
            ("dtype", self.dtypes, DTYPES),
        ):
            for name in given:
                choose(what, name, allowed)
        choose("clock", self.clock, CLOCKS)
        if self.clock == "processor" and (self.device != "cpu" or self.threads != 1):
            raise ValueError("the clock processor is for one thread of a CPU: set threads to 1, or use the clock wall")
        if not self.modes:
            raise ValueError(f"modes must name one of {', '.join(MODES)}")
        check_positive(self, "lengths", "head_dims", "heads", "num_features", "windows", "ranks")
        check_positive(self, "tokens", "minutes", "repeats", "threads", "jobs", "timeout")
        check_device(self.device)

    def sizes(self, mechanism: str) -> tuple[int | None, ...]:
        """Return the values of the option of a mechanism that is varied; (None,) if it has none."""
        if mechanism not in SIZES:
            return (None,)
        option, defaults = SIZES[mechanism]
        given = {"num_features": self.num_features, "window": self.windows, "rank": self.ranks}[option]
        return given or (defaults[:2] if self.device == "cpu" else defaults)

    def config(self) -> MeasurementConfig:
        """Return how each cell is measured."""
        return MeasurementConfig(
            repeats=self.repeats,
            seconds=0.5,
            timeout=self.timeout,
            threads=self.threads or cores(),
            profile=False,
            longest_graph=20.0,
            check=False,
            warm_up=0.01,
            clock=self.clock,
        )


Kind = tuple[Subject, Case]  # cells of all lengths, which are checked once and share kernels


class Cell(NamedTuple):
    """What is measured in which case."""

    subject: Subject
    case: Case

    @property
    def kind(self) -> Kind:
        """What it has in common with the cells of other lengths."""
        return self.subject, small_case(self.case)

    @property
    def row(self) -> Row:
        """What identifies the cell in a results file."""
        subject = self.subject
        mechanism, size = (subject.mechanism, subject.size) if isinstance(subject, SweepSubject) else (None, None)
        named = {"name": subject.name, "package": subject.package, "mechanism": mechanism, "size": size}
        return {**named, "case": asdict(self.case)}


def plan(options: SweepOptions) -> list[Cell]:
    """Return the cells of a sweep, ordered so that any first part of them covers the grid coarsely.

    Lengths, head dimensions and modes are combined with each other, and with at most one value of heads, size or dtype
    that is not its axis' first. The cells of the `COARSE` grid come first, of all mechanisms. Then a cell comes the
    earlier the nearer its values are to the beginnings of their axes.
    """
    grid = GRIDS[options.device]
    names = options.mechanisms or [name for name in list_mechanisms() if name != "softmax"]
    found: list[tuple[tuple[int, ...], Cell]] = []
    for name in names:
        axes: tuple[Sequence[Any], ...] = (
            *(options.lengths or grid.lengths, options.head_dims or grid.head_dims, options.modes),
            *(options.heads or grid.heads, options.sizes(name), options.dtypes or grid.dtypes),
        )
        for index in product(*(range(len(axis)) for axis in axes)):
            if sum(i > 0 for i in index[3:]) > 1:
                continue
            length, head_dim, mode, heads, size, dtype = (axis[i] for axis, i in zip(axes, index, strict=True))
            batch_size = max(1, (options.tokens or grid.tokens) // length)
            case = Case(length, batch_size, heads, head_dim, mode == "causal", dtype, options.device)
            for subject in sweep_subjects(name, size, case, options.peers):
                if subject.name == SDPA and _operations(case) > MOST_OPERATIONS:
                    continue
                fine = any(i >= count for i, count in zip(index, COARSE, strict=True))
                found.append(((_rank(subject), fine, sum(index), *index), Cell(subject, case)))
    return list(dict.fromkeys(cell for _, cell in sorted(found, key=lambda pair: pair[0])))


def _operations(case: Case) -> float:
    """Floating-point operations of the forward pass of full attention."""
    pairs = case.batch_size * case.num_heads * case.length**2 / (2 if case.causal else 1)
    return 4.0 * pairs * case.head_dim


def _rank(subject: Subject) -> int:
    """Peers other than full attention come last: torch.compile and autotuning take most of the time."""
    return 2 if isinstance(subject, FlexWindowSubject) else 0 if subject.package in ("longspan", "torch") else 1


def run(options: SweepOptions) -> list[Row]:
    """Measure what the options select and the results file does not hold, then list the cliffs and draw the heat map.

    The list goes to stdout and progress to stderr.

    Args:
        options: What to measure, for how long, and where to store it.

    Returns:
        All results in the file.

    Raises:
        ValueError: The results cannot be read or written.
    """
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    prepare(options.out)
    rows = read(options.out, *KEY, "status")
    about = environment(options.device)
    about |= {"threads": options.threads or cores(), "clock": options.clock}
    done, missing = {cell_key(row) for row in rows}, set()
    warn_if_busy(about)
    cells, measured = [], 0
    for cell in plan(options):
        if (why := cell.subject.unavailable(cell.case)) is not None:
            missing.add(why[1])
        elif cell_key({**cell.row, **about}) not in done:
            cells.append(cell)
    for message in sorted(missing):
        print(f"left out: {message}", file=sys.stderr)
    began = time.monotonic()
    for cell, found in _measure(cells, options, deadline):
        measured += 1
        result = {**cell.row, **_figures(found), **about}
        append(options.out, result)
        rows.append(result)
        figure = result.get("forward_backward_ms")
        shown = found.status if figure is None else f"{figure:.3g} ms"
        case = cell.case
        shape = f"{case.batch_size} × {case.num_heads} × {case.length} × {case.head_dim}, {case.dtype}"
        mode = MODES[0] if case.causal else MODES[1]
        place = f"[{measured}/{len(cells)}, {time.monotonic() - began:.0f} s]"
        print(f"{place} {cell.subject.name}: {shape}, {mode}: {shown}", file=sys.stderr, flush=True)
    if measured < len(cells):
        print(f"{len(cells) - measured} cells are left to the next call", file=sys.stderr)
    _show(rows, options.out)
    return rows


def _show(rows: Sequence[Row], out: Path) -> None:
    found = find_cliffs(rows)
    if found:
        print(f"{len(found)} cliffs\n\n{cliff_table(found).markdown()}\n{grouped_cliff_table(rows).markdown()}")
    else:
        print("no cliffs")
    print(plot_beside(out, lambda path: draw(path, rows)))


def _figures(found: Measurement) -> Row:
    """The result of a measurement, without its samples."""
    times = {f"{step}_ms": median(samples) for step, samples in found.times.items()}
    status = {"status": found.status, "message": found.message, "check": found.check}
    return {**status, **times, "peak_mb": found.peak_mb, **found.metrics}


def _measure(
    cells: Sequence[Cell], options: SweepOptions, deadline: float | None
) -> Iterator[tuple[Cell, Measurement]]:
    """Yield a measurement of each cell, in order, until the deadline.

    The cells of a batch are checked and compiled by several processes at the same time, and then timed one after
    another, each in the process that has compiled it. All lengths of a cell are measured by the same process, which
    checks it once and keeps its kernels.
    """
    jobs = options.jobs or (8 if options.device == "cuda" else 1)
    config = options.config()
    workers = [SweepWorker(config) for _ in range(min(jobs, len(cells)))]
    by_kind: dict[Kind, SweepWorker] = {}
    try:
        for together in _batches(cells, jobs) if options.device == "cuda" else ([cell] for cell in cells):
            batch = [(cell, by_kind.setdefault(cell.kind, workers[len(by_kind) % len(workers)])) for cell in together]
            for cell, worker in batch:
                worker.ask("prepare", cell)
            checks = [worker.answer(deadline) for _, worker in batch]
            for (cell, worker), found in zip(batch, checks, strict=True):
                if found.status == "ok":
                    worker.ask("time", cell)
                    timed = worker.answer(deadline)
                    found = replace(timed, check=found.check, metrics={**timed.metrics, **found.metrics})
                if found.status == "skipped":
                    return
                yield cell, found
    finally:
        for worker in workers:
            worker.kill()


def _batches(cells: Sequence[Cell], jobs: int) -> Iterator[list[Cell]]:
    """Yield the cells in order, in batches with at most one new kind to compile and `BATCH` cells for each process.

    SDPA needs no compilation.
    """
    known: set[Kind] = set()
    batch: list[Cell] = []
    new = 0
    for cell in cells:
        compiles = cell.kind not in known and cell.subject.name != SDPA
        if len(batch) == BATCH * jobs or (compiles and new == jobs):
            yield batch
            batch, new = [], 0
        new += compiles
        known.add(cell.kind)
        batch.append(cell)
    if batch:
        yield batch


class SweepWorker:
    """A process that prepares and times cells in order. One that crashes or hangs is replaced by a new one."""

    def __init__(self, config: MeasurementConfig) -> None:
        self._config = config
        self._asked: list[tuple[str, Cell]] = []
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._config), daemon=True)
        self._process.start()
        theirs.close()
        for request in self._asked:
            self._send(*request)
        self._since = time.monotonic()

    def ask(self, what: str, cell: Cell) -> None:
        """Start to prepare or to time a cell, after those requested before."""
        if not self._asked:
            self._since = time.monotonic()
        self._asked.append((what, cell))
        self._send(what, cell)

    def _send(self, what: str, cell: Cell) -> None:
        with suppress(BrokenPipeError):  # `answer` finds that the process has ended.
            self._connection.send((what, cell.subject, cell.case))

    def answer(self, deadline: float | None) -> Measurement:
        """Return the result of the first request without an answer; "skipped" at the deadline."""
        found = self._receive(deadline)
        if found.status != "skipped":
            self._asked.pop(0)
            self._since = time.monotonic()
        if found.status in ("timed out", "crashed"):
            self.kill()
            self._start()
        return found

    def _receive(self, deadline: float | None) -> Measurement:
        limit = self._since + self._config.timeout
        end = limit if deadline is None else min(limit, deadline)
        try:
            if not self._connection.poll(max(0.0, end - time.monotonic())):
                if end < limit:
                    return Measurement("skipped", "the time budget of the run is exhausted")
                return Measurement("timed out", f"no result within {self._config.timeout:g} s")
            found = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return Measurement("crashed", f"the process ended with exit status {self._process.exitcode}")
        assert isinstance(found, Measurement)
        return found

    def kill(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, config: MeasurementConfig) -> None:
    """Answer the requests of a `SweepWorker` until its connection is closed."""
    warnings.simplefilter("ignore")  # deprecations inside peers
    torch.set_num_threads(config.threads)
    gc.freeze()  # Each cell collects garbage, which need not visit the modules of the libraries.
    checked: dict[Kind, Measurement] = {}
    while True:
        try:
            what, subject, case = connection.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            found = _prepare(subject, case, checked) if what == "prepare" else subject.measure(case, config)
        except Exception as error:
            found = failure(error)
        if case.device == "cuda":
            torch.cuda.synchronize()  # raises after an illegal memory access: a new process measures the next cell
            torch.cuda.empty_cache()
        found.metrics[f"{what}_s"] = round(time.monotonic() - began, 3)
        connection.send(found)


def _prepare(subject: Subject, case: Case, checked: dict[Kind, Measurement]) -> Measurement:
    """Check the accuracy at a small size, once for all lengths, and compile what the case needs."""
    torch.manual_seed(0)
    kind, metrics = Cell(subject, case).kind, dict[str, Any]()
    if kind not in checked:
        began = time.monotonic()
        check = subject.check(case)
        metrics["check_s"] = round(time.monotonic() - began, 3)
        found = Measurement("ok", check=None if check is None else check._asdict())
        if check is not None and check.failure is not None:
            found = replace(found, status="wrong", message=check.failure)
        checked[kind] = found
    if checked[kind].status == "ok" and case.device == "cuda":
        subject.workload(case).heaviest.run()
        torch.cuda.synchronize()
    if isinstance(subject, SweepSubject):
        metrics["implementation"] = _implementation(subject, case)
    return replace(checked[kind], metrics=metrics)


def _implementation(subject: SweepSubject, case: Case) -> str:
    """Return the kernels that run a case, and why others do not."""
    mechanism = subject.build(replace(case, device="meta"))
    shape = case.batch_size, case.length
    found = explain(mechanism, *shape, causal=case.causal, dtype=case.torch_dtype, device=case.device)
    names = (d.algorithm if d.why is None else f"eager PyTorch ({d.why})" for d in found.decisions)
    return ", ".join(dict.fromkeys(names))
