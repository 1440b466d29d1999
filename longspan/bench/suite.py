"""Run a benchmark: measure its sections, report progress, and write results after every measurement."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from longspan.bench.environment import environment, warn_if_busy
from longspan.bench.options import SUBJECTS, BenchOptions, Section, sections
from longspan.bench.report import RATIO, Comparison, plot, plot_beside, remarks, save, summary_table, table, write_page
from longspan.bench.runner import SubjectResult, measure_rounds
from longspan.bench.subjects.base import MeasurementConfig
from longspan.utils import printable

_GPU_PROCESSES = 8  # processes that compile at the same time


def run(options: BenchOptions) -> dict[str, list[Comparison]]:
    """Measure what the options select.

    Tables go to stdout and progress to stderr. Each section has a JSON file, and a plot if there are several lengths; a
    suite also has summary.json and report.html. Files are rewritten after every measurement, so that a run can be ended
    at any time without losing what it has measured.

    Args:
        options: What to measure, how thoroughly, and where to write.

    Returns:
        The comparisons of each section.

    Raises:
        ValueError: An option is out of range, or the results cannot be written.
    """
    planned = sections(options)
    files = _results_files(options, planned)
    config = options.measurement_config()
    about: dict[str, Any] = {"format": 1, **environment(options.device)}
    about |= {"options": {**asdict(options), "out": None}, "measurement": asdict(config), "ratios": RATIO}
    warn_if_busy(about)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    titles = {section.name: _title(about, section) for section in planned}
    results: dict[str, list[Comparison]] = {}
    for number, section in enumerate(planned, 1):
        label = f"{section.name} ({number} of {len(planned)})" if options.is_suite else section.name
        details = about | {"subject": section.subject, "inputs": SUBJECTS[section.subject]}
        file = files[section.name]
        comparisons = _measure(section, label, config, deadline, partial(save, file, about=details))
        results[section.name] = comparisons
        _show(comparisons, titles[section.name], file)
        if options.is_suite:
            write_page(file.parent, results, about, titles)
    if options.is_suite:
        print(f"{RATIO}\n\n{summary_table(results).markdown()}")
        print(printable(f"written to {options.destination / 'report.html'}"))
    return results


def failed(results: dict[str, list[Comparison]]) -> bool:
    """Return whether a subject of longspan is wrong or crashes; running out of memory or time is a result."""
    found = [result for section in results.values() for each in section for result in each.results]
    return any(
        result.failure is not None and result.failure.status in ("wrong", "error", "crashed")
        for result in found
        if result.subject.package == "longspan"
    )


def _measure(
    section: Section,
    label: str,
    config: MeasurementConfig,
    deadline: float | None,
    save_results: Callable[[list[Comparison]], None],
) -> list[Comparison]:
    comparisons = [
        Comparison(mechanism, case, [SubjectResult(subject, case) for subject in subjects])
        for mechanism, case in section.plan
        for subjects in section.subjects(mechanism, case)
    ]
    total, counter = sum(len(each.results) for each in comparisons) * config.rounds, count(1)

    def observe(result: SubjectResult, round_number: int, measured: bool) -> None:
        if measured:
            save_results(comparisons)
        else:
            text = f"{label}, n = {result.case.length}, round {round_number}: {result.subject.name}"
            print(f"[{next(counter)}/{total}] {text}", file=sys.stderr, flush=True)

    for batch in _batches(comparisons, section.options.device):
        measure_rounds([result for each in batch for result in each.results], config, observe, deadline)
    return comparisons


def _results_files(options: BenchOptions, planned: list[Section]) -> dict[str, Path]:
    out = options.destination
    try:
        (out if options.is_suite else out.parent).mkdir(parents=True, exist_ok=True)
        files = {section.name: out / f"{section.name}.json" if options.is_suite else out for section in planned}
        next(iter(files.values())).touch()
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error
    return files


def _batches(comparisons: list[Comparison], device: str) -> Iterator[list[Comparison]]:
    """Group comparisons that are measured together: one by one on the CPU, up to 8 processes on a GPU."""
    batch: list[Comparison] = []
    for each in comparisons:
        size = sum(len(other.results) for other in (*batch, each))
        if batch and (device == "cpu" or size > _GPU_PROCESSES):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _show(comparisons: list[Comparison], title: str, file: Path) -> None:
    print(f"{title}\n\n{table(comparisons).markdown()}")
    for remark in remarks(comparisons):
        print(printable(remark))
    print(plot_beside(file, lambda path: plot(path, comparisons)), flush=True)


def _title(about: dict[str, Any], section: Section) -> str:
    device, case = about["machine"]["gpu"] or {"name": about["machine"]["cpu"]}, section.plan[0][1]
    mode = "causal" if case.causal else "bidirectional"
    threads, torch_version = about["measurement"]["threads"], about["versions"]["torch"]
    return f"{section.name}: {case.dtype}, {mode}; {device['name']}, {threads} threads, PyTorch {torch_version}"
