"""Measuring: each measurement in a process of its own, subjects taken in turn, failures recorded as results."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Status = Literal["ok", "out of memory", "timed out", "crashed", "error", "wrong", "not installed", "not supported"]


@dataclass(frozen=True)
class Case:
    """What is measured: the sizes of q, k and v, and where they live. depth: layers, where a model is measured."""

    length: int
    batch_size: int = 1
    num_heads: int = 8
    head_dim: int = 64
    causal: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    depth: int = 1

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Effort:
    """How hard to measure.

    rounds: processes per subject; subjects take turns, so that a machine that drifts drifts for all of them.
    repeats: samples per process and kind of step, fewer once `seconds` have passed, at least one.
    timeout: seconds after which a process is ended. patience: a round that took longer than this many is the last.
    memory_limit: GB a process may allocate beyond its libraries; None is no limit.
    """

    rounds: int = 3
    repeats: int = 5
    seconds: float = 10.0
    timeout: float = 900.0
    patience: float = 180.0
    threads: int = 1
    memory_limit: float | None = None


class Step(NamedTuple):
    """Something to time. It returns the tensors it made, which are dropped after the clock has stopped.

    gradients: whether it needs them; if not, it is timed without. tokens: how many it reads or writes, if that counts.
    """

    call: Callable[[], Sequence[Tensor]]
    gradients: bool = False
    tokens: int | None = None


Work = Mapping[str, Step]  # by name, the one that needs most memory last


class Check(NamedTuple):
    """The largest error found, relative to the largest true value, beside the largest allowed."""

    error: float
    tolerance: float
    against: str


@dataclass(frozen=True)
class Subject(ABC):
    """Something to measure. It is pickled to the process that measures it, so it holds names and numbers only."""

    name: str

    @property
    def package(self) -> str:
        """The distribution that it comes from."""
        return "longspan"

    def unfit(self, case: Case) -> tuple[Status, str] | None:
        """Why it cannot be measured, known without running it."""
        return None

    @abstractmethod
    def work(self, case: Case) -> Work:
        """The steps, with all inputs made."""

    def check(self, case: Case) -> Check | None:
        """A comparison with the truth at a small size; None where there is nothing to compare with."""
        return None


@dataclass
class Run:
    """One process's answer; times of each step in milliseconds. `memory`: how the peak was taken."""

    status: Status
    message: str = ""
    times: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    peak_mb: float | None = None
    memory: str = ""
    check: dict[str, Any] | None = None


@dataclass
class Row:
    """A subject in a case, over all rounds."""

    subject: Subject
    case: Case
    runs: list[Run] = field(default_factory=list)

    @property
    def failure(self) -> Run | None:
        """The first run that gave no measurement."""
        return next((run for run in self.runs if run.status != "ok"), None)

    @property
    def steps(self) -> list[str]:
        """What was timed."""
        return list(self.runs[0].times) if self.runs else []

    def ms(self, step: str) -> float | None:
        """The median over rounds of each round's median; None after a failure, or where there is no such step."""
        return self._median([median(run.times[step]) for run in self.runs if run.times.get(step)])

    def tokens_per_second(self, step: str) -> float | None:
        """None where the step does not count tokens."""
        ms, tokens = self.ms(step), self.runs[0].tokens.get(step) if self.runs else None
        return None if ms is None or tokens is None else tokens / ms * 1e3

    @property
    def peak_mb(self) -> float | None:
        """The median over rounds."""
        return self._median([run.peak_mb for run in self.runs if run.peak_mb is not None])

    def as_dict(self) -> dict[str, Any]:
        """Everything, raw samples included, for JSON."""
        failure = self.failure
        return {
            "name": self.subject.name,
            "package": self.subject.package,
            "case": asdict(self.case),
            "status": "ok" if failure is None else failure.status,
            "message": "" if failure is None else failure.message,
            **{f"{step}_ms": self.ms(step) for step in self.steps},
            **{f"{step}_tokens_per_second": self.tokens_per_second(step) for step in self.runs[0].tokens},
            "peak_mb": self.peak_mb,
            "runs": [asdict(run) for run in self.runs],
        }

    def _median(self, values: list[float]) -> float | None:
        return median(values) if values and self.failure is None else None


def compare(
    subjects: Sequence[Subject], case: Case, effort: Effort, progress: Callable[[Subject, int], None] | None = None
) -> list[Row]:
    """One row per subject. In each round every subject that has not failed is measured once.

    progress: called with each subject and round (from 1) before it is measured.
    """
    rows = [Row(subject, case) for subject in subjects]
    for number in range(1, effort.rounds + 1):
        begun = time.perf_counter()
        for row in rows:
            if row.failure is not None:
                continue
            if progress is not None:
                progress(row.subject, number)
            row.runs.append(measure(row.subject, case, effort))
        if time.perf_counter() - begun > effort.patience:
            break
    return rows


def measure(subject: Subject, case: Case, effort: Effort) -> Run:
    """One subject once, in a process of its own: whatever happens there becomes a `Run`."""
    unfit = subject.unfit(case)
    if unfit is not None:
        return Run(*unfit)
    threads = str(effort.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    try:
        process = subprocess.run(
            [sys.executable, "-m", "longspan.bench.worker"],
            input=pickle.dumps((subject, case, effort)),
            capture_output=True,
            timeout=effort.timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Run("timed out", f"no answer within {effort.timeout:g} s")
    if process.returncode == 0:
        return Run(**json.loads(process.stdout))
    return _died(process.returncode, process.stderr.decode(errors="replace"))


def one_line(error: BaseException | str) -> str:
    """The first line of a message, of readable length."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    return line if len(line) <= 200 else line[:199] + "…"


def out_of_memory(message: str) -> bool:
    """Whether an error's text, as PyTorch, the C++ runtime or the system word it, means that memory ran out."""
    said = message.lower()
    return any(words in said for words in ("allocate memory", "out of memory", "bad_alloc", "memoryerror"))


def _died(returncode: int, stderr: str) -> Run:
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = one_line(lines[-1]) if lines else "no message"
    if out_of_memory("\n".join(lines[-5:])):
        return Run("out of memory", last)
    if returncode == -signal.SIGKILL:
        return Run("out of memory", "killed by the system, which ends processes when memory runs out")
    if returncode < 0:
        return Run("crashed", f"{signal.Signals(-returncode).name}: {last}")
    return Run("crashed", f"exit status {returncode}: {last}")
