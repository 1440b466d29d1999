"""Report one run or several as a self-contained HTML page: curves, metrics, differing settings, samples."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.train.config import differences
from longspan.train.loggers import METRICS, SAMPLES, Record, format_duration, read_records
from longspan.train.plots import plot_losses
from longspan.train.run_folder import RUN
from longspan.utils import printable, read_json, render_template, write_atomically


@dataclass(frozen=True)
class LoggedRun:
    """The files that a run has written.

    Args:
        name: Name of its folder.
        metadata: Contents of `run.json`.
        records: Contents of `metrics.jsonl`.
        samples: Contents of `samples.jsonl`.
    """

    name: str
    metadata: Record
    records: list[Record]
    samples: list[Record]

    def last(self, metric: str) -> Record:
        """Return the last record that has a metric; empty if there is none."""
        return next((r for r in reversed(self.records) if metric in r), {})


def read_run(folder: Path) -> LoggedRun:
    """Read the logs of the run in `folder`. Nothing in them is trusted: they may come from another machine.

    Raises:
        FileNotFoundError: The folder does not exist or is not a run.
        ValueError: The run has no metrics yet, or a file is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run {folder}: give folders written by `longspan train --out`")
    try:
        metadata = read_json(folder / RUN)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no {RUN}: it was not written by `longspan train --out`") from None
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(x), dict) for x in ("data", "settings")):
        raise ValueError(f"{folder / RUN} is damaged: it has no data and settings")
    records = [_numbers(record) for record in _read_log(folder / METRICS)]
    records = [record for record in records if {"step", "tokens", "seconds"} <= set(record)]
    if not records:
        raise ValueError(f"{folder} has no metrics yet: train for a few steps first")
    samples = [{"step": "–", "prompt": "", "text": "", **sample} for sample in _read_log(folder / SAMPLES)]
    return LoggedRun(folder.name or folder.resolve().name, metadata, records, samples)


def write_report(runs: Sequence[LoggedRun], out: Path) -> list[Path]:
    """Write the page and, beside it, each of its plots as PNG; return the paths, the page first."""
    named = _unique_names(runs)
    baselines = {}
    unigram = {_number(run.metadata["data"].get("unigram_bits_per_byte")) for run in runs}
    if len(unigram) == 1 and None not in unigram:
        baselines["unigram baseline"] = float(next(iter(unigram)) or 0)
    plots = {
        against: plot_losses({name: run.records for name, run in named.items()}, against, baselines)
        for against in ("tokens", "seconds")
    }
    page = render_template(
        "longspan.train.report",
        "page.html.j2",
        runs=named,
        plots={f"loss against {against}": base64.b64encode(png).decode() for against, png in plots.items()},
        metrics=_metrics_table(named),
        differences=_differences_table(named) if len(named) > 1 else None,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    images = {out.with_name(f"{out.stem}-{against}.png"): png for against, png in plots.items()}
    for path, png in images.items():
        write_atomically(path, png)
    write_atomically(out, page)
    return [out, *images]


def _read_log(path: Path) -> list[Record]:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return read_records(path)


def _numbers(record: Record) -> Record:
    return {name: value for name, value in record.items() if _number(value) is not None}


def _number(value: Any) -> float | None:
    """Return the value if it is a number that can be drawn."""
    drawable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if drawable else None


def _unique_names(runs: Sequence[LoggedRun]) -> dict[str, LoggedRun]:
    """Return runs by name, with a number appended to repeated names."""
    named: dict[str, LoggedRun] = {}
    for run in runs:
        name, number = printable(run.name), 2
        while name in named:
            name, number = f"{printable(run.name)} ({number})", number + 1
        named[name] = run
    return named


def _metrics_table(named: dict[str, LoggedRun]) -> list[list[str]]:
    """Return a row per metric and a column per run."""
    columns = []
    for name, run in named.items():
        last, score, data = run.last("loss"), run.last("eval_loss"), run.metadata["data"]
        seconds, accuracy = max(last.get("seconds", 0.0), 1e-9), score.get("eval_accuracy")
        columns.append(
            {
                "run": name,
                "held-out loss": _format(score.get("eval_loss"), "{:.4f} nats"),
                **({} if accuracy is None else {"held-out accuracy": f"{accuracy:.1%}"}),
                "held-out bits per byte": _format(score.get("eval_bits_per_byte"), "{:.4f}"),
                "unigram baseline, bits per byte": _format(data.get("unigram_bits_per_byte"), "{:.4f}"),
                "steps": _format(last.get("step"), "{:,}"),
                "tokens": _format(last.get("tokens"), "{:,}"),
                "time": format_duration(seconds),
                "tokens/s": f"{last.get('tokens', 0) / seconds:,.0f}",
                "memory": f"{last.get('memory', 0) / 2**20:,.0f} MiB",
                "parameters": _format(run.metadata.get("parameters"), "{:,}"),
                "device": f"{run.metadata.get('device')}, {run.metadata.get('precision')}",
                "data (SHA-256)": str(data.get("sha256"))[:16],
            }
        )
    headings = dict.fromkeys(heading for column in columns for heading in column)
    return [[heading, *(column.get(heading, "–") for column in columns)] for heading in headings]


def _differences_table(named: dict[str, LoggedRun]) -> list[list[str]]:
    first, *others = (run.metadata["settings"] for run in named.values())
    fields = sorted({field for other in others for field in differences(first, other)})
    rows = [[field, *(_setting(settings, field) for settings in (first, *others))] for field in fields]
    return [["setting", *named], *rows]


def _setting(settings: Record, field: str) -> str:
    value: Any = settings
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return json.dumps(value)


def _format(value: Any, template: str) -> str:
    return "–" if _number(value) is None else template.format(value)
