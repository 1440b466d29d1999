"""Measure subjects in separate processes: one per measurement, subjects interleaved, failures recorded as results."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from select import select
from statistics import median
from typing import Any

from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig, Subject, one_line, says_out_of_memory

_ROUND_SECONDS = 180.0  # no further round is started after one that took longer than this


@dataclass
class SubjectResult:
    """The measurements of a subject in one case, over all rounds."""

    subject: Subject
    case: Case
    measurements: list[Measurement] = field(default_factory=list)

    @property
    def failure(self) -> Measurement | None:
        """The first measurement whose status is not "ok"."""
        return next((each for each in self.measurements if each.status != "ok"), None)

    @property
    def steps(self) -> list[str]:
        """The names of the timed steps."""
        return list(self.measurements[0].times) if self.measurements else []

    def ms(self, step: str) -> float | None:
        """Return the median over rounds of each round's median; None if the subject failed or has no such step."""
        return self._median([median(each.times[step]) for each in self.measurements if each.times.get(step)])

    def tokens_per_second(self, step: str) -> float | None:
        """Return tokens/s; None for a step that does not count tokens."""
        ms, tokens = self.ms(step), self.measurements[0].tokens.get(step) if self.measurements else None
        return None if ms is None or tokens is None else tokens / ms * 1e3

    @property
    def peak_mb(self) -> float | None:
        """The median peak memory over rounds."""
        return self._median([each.peak_mb for each in self.measurements if each.peak_mb is not None])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures and samples for JSON."""
        failure, first = self.failure, self.measurements[0] if self.measurements else Measurement("skipped")
        return {
            "name": self.subject.name,
            "package": self.subject.package,
            "case": asdict(self.case),
            "status": first.status if failure is None else failure.status,
            "message": "" if failure is None else failure.message,
            **{f"{step}_ms": self.ms(step) for step in self.steps},
            **{f"{step}_tokens_per_second": self.tokens_per_second(step) for step in first.tokens},
            **{f"{step}_tb_per_second": n / ms / 1e9 for step, n in first.bytes.items() if (ms := self.ms(step))},
            "peak_mb": self.peak_mb,
            **first.metrics,
            "runs": [asdict(each) for each in self.measurements],
        }

    def _median(self, values: list[float]) -> float | None:
        return median(values) if values and self.failure is None else None


Observer = Callable[[SubjectResult, int, bool], None]  # result, round from 1, whether it has been measured


def _ignore(result: SubjectResult, round_number: int, measured: bool) -> None: ...


def compare(
    subjects: Sequence[Subject], case: Case, config: MeasurementConfig, observer: Observer = _ignore
) -> list[SubjectResult]:
    """Measure several subjects in one case.

    Args:
        subjects: What to measure.
        case: Sizes, dtype and device.
        config: Number of samples and limits.
        observer: Called before and after each measurement.

    Returns:
        One result per subject.
    """
    results = [SubjectResult(subject, case) for subject in subjects]
    measure_rounds(results, config, observer)
    return results


def measure_rounds(
    results: Sequence[SubjectResult],
    config: MeasurementConfig,
    observer: Observer = _ignore,
    deadline: float | None = None,
) -> None:
    """Measure each result's subject once per round, unless it has failed.

    Processes that use a GPU start together and are timed one after another when all of them have compiled, so that no
    compiler competes for the host while another subject is timed.

    Args:
        results: The results to fill.
        config: Number of samples and limits.
        observer: Called before and after each measurement.
        deadline: `time.monotonic()` after which no measurement is started. None: no deadline.
    """
    for number in range(1, config.rounds + 1):
        started = time.monotonic()
        pending = [result for result in results if result.failure is None]
        workers = _start_workers(pending, _limited(config, deadline))
        for result in pending:
            observer(result, number, False)
            limited, worker = _limited(config, deadline), workers.get(id(result))
            if limited.timeout <= 0:
                if worker is not None:
                    worker.kill()
                if not result.measurements:
                    result.measurements.append(Measurement("skipped", "the time budget of the run is exhausted"))
            else:
                found = worker.finish() if worker is not None else measure(result.subject, result.case, limited)
                result.measurements.append(found)
            observer(result, number, True)
        for result in pending:
            limited = _limited(config, deadline)
            if len(workers) > 1 and result.measurements[-1].status == "out of memory" and limited.timeout > 0:
                result.measurements[-1] = measure(result.subject, result.case, limited)  # alone on the GPU
                observer(result, number, True)
        if time.monotonic() - started > _ROUND_SECONDS:
            break


def _start_workers(results: Sequence[SubjectResult], config: MeasurementConfig) -> dict[int, WorkerProcess]:
    """Start the processes that use a GPU and wait until all of them have compiled."""
    workers = {
        id(result): WorkerProcess(result.subject, result.case, config)
        for result in results
        if result.case.device == "cuda" and config.timeout > 0 and result.subject.unavailable(result.case) is None
    }
    for worker in workers.values():
        worker.wait_until_ready()
    return workers


def measure(subject: Subject, case: Case, config: MeasurementConfig) -> Measurement:
    """Measure a subject once in a new process; a failure of the process becomes the status of the measurement."""
    unavailable = subject.unavailable(case)
    return Measurement(*unavailable) if unavailable else WorkerProcess(subject, case, config).finish()


class WorkerProcess:
    """A process that starts to prepare a measurement immediately and takes it when `finish` is called."""

    def __init__(self, subject: Subject, case: Case, config: MeasurementConfig) -> None:
        threads = str(config.threads)
        self._timeout, self._timed_out, self._started = config.timeout, False, time.monotonic()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in `finish`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "longspan.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,  # `select` must see everything that has not been read
            env={
                "TORCHINDUCTOR_COMPILE_THREADS": "4",  # Several processes may compile at the same time.
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
            },
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps((subject, case, config)))
            self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Block until the process has compiled everything or has ended; kill it if it takes longer than the timeout."""
        assert self._process.stdout is not None
        left = self._started + self._timeout - time.monotonic()
        ready, _, _ = select([self._process.stdout], [], [], max(0.0, left))
        if not ready:
            self._timed_out = True
            self._process.kill()

    def finish(self) -> Measurement:
        """Let the process take the measurement and return it."""
        try:
            output, _ = self._process.communicate(b"\n", self._timeout)
        except subprocess.TimeoutExpired:
            self._timed_out = True
        finally:
            self._process.kill()  # has no effect if the process has ended
        with self._stderr:
            self._stderr.seek(0)
            error = self._stderr.read().decode(errors="replace")
        if self._timed_out:
            self._process.communicate()
            return Measurement("timed out", f"no result within {self._timeout:g} s")
        if self._process.returncode == 0:
            return Measurement(**json.loads(output.splitlines()[-1]))
        return _crash(self._process.returncode, error)

    def kill(self) -> None:
        """End the process without a measurement."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()


def _limited(config: MeasurementConfig, deadline: float | None) -> MeasurementConfig:
    """The configuration with its timeout shortened to the deadline."""
    left = float("inf") if deadline is None else deadline - time.monotonic()
    return replace(config, timeout=min(config.timeout, left))


def _crash(returncode: int, stderr: str) -> Measurement:
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = one_line(lines[-1]) if lines else "no message"
    if says_out_of_memory("\n".join(lines[-5:])):
        return Measurement("out of memory", last)
    if returncode == -signal.SIGKILL:
        return Measurement("out of memory", "killed by the system, which ends processes when memory runs out")
    if returncode < 0:
        return Measurement("crashed", f"{signal.Signals(-returncode).name}: {last}")
    return Measurement("crashed", f"exit status {returncode}: {last}")
