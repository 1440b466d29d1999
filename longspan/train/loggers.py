"""Log a run: metrics.jsonl and samples.jsonl, a progress bar or lines of text, and optionally TensorBoard."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from longspan.utils import printable, write_atomically

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
Record = dict[str, Any]


class Logger:
    """Interface of a logger. This base class does nothing, for processes other than the main one.

    Attributes:
        closed: The reader of the messages has closed its pipe.
    """

    closed = False

    def info(self, text: str) -> None:
        """Show a message."""

    def progress(self, fraction: float, record: Record) -> None:
        """Show the metrics of a step and the fraction of the run that is done, from 0 to 1."""

    def log_metrics(self, record: Record) -> None:
        """Record the metrics of a step."""

    def log_sample(self, record: Record) -> None:
        """Record a generated text."""

    def close(self) -> None:
        """Close files and the progress bar. Called after errors too."""


class RunLogger(Logger):
    """Writes the log files of a run and shows its progress.

    Args:
        run: The folder of the run.
        tensorboard: Write TensorBoard event files too.
        console: Where to show progress: a bar on a terminal, lines elsewhere. Default: stderr.
    """

    def __init__(self, run: Path, *, tensorboard: bool = False, console: Console | None = None) -> None:
        self.console = _Console(stderr=True, highlight=False) if console is None else console
        self.run = run
        self._bar: Progress | None = None
        self._make_writer = _summary_writer() if tensorboard else None
        self._writer: Any = None

    def info(self, text: str) -> None:
        try:
            self.console.print(printable(text), markup=False, soft_wrap=True)
        except BrokenPipeError:
            self.closed = True
        except OSError:  # The terminal is gone, or the disk of a redirected log is full: training can go on.
            pass

    def progress(self, fraction: float, record: Record) -> None:
        if not self.console.is_terminal:
            return
        if self._bar is None:
            columns = BarColumn(bar_width=max(4, min(40, self.console.width - 76))), _MetricsColumn()
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._bar.add_task(self.run.name, total=1.0, record=record)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=fraction, record=record)

    def log_metrics(self, record: Record) -> None:
        self._append(METRICS, record)
        if self._bar is None or "eval_loss" in record:
            self.info(format_record(record))
        if self._tensorboard is not None:
            for name, value in record.items():
                if name not in ("step", "steps", "eta") and isinstance(value, int | float):
                    self._tensorboard.add_scalar(name, value, record["step"])

    def log_sample(self, record: Record) -> None:
        self._append(SAMPLES, record)
        if self._tensorboard is not None:
            self._tensorboard.add_text("sample", record["text"], record["step"])

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._writer is not None:
            self._writer.close()

    @property
    def _tensorboard(self) -> Any:
        """The TensorBoard writer, whose files are created with the first record; None without --tensorboard."""
        if self._writer is None and self._make_writer is not None:
            self._writer = self._make_writer(str(self.run / "tensorboard"))
        return self._writer

    def _append(self, name: str, record: Record) -> None:
        with open(self.run / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """Return the records of a JSON Lines file. Lines that are damaged, or were not written completely, are skipped."""
    records = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    records.append(record)
    return records


def truncate_records(run: Path, step: int, *, logged: bool = True, evaluated: bool = True) -> None:
    """Remove the records that a run writes again when it is resumed, and those that an interrupted run wrote twice.

    Args:
        run: The folder of the run.
        step: The step of the checkpoint from which the run is resumed. Records of later steps are removed.
        logged: The checkpoint was saved after the metrics of this step were logged.
        evaluated: The checkpoint was saved after the evaluation of this step.
    """
    for name in (METRICS, SAMPLES):
        kept: dict[tuple[int, bool], Record] = {}
        for record in read_records(run / name):
            evaluation = name == SAMPLES or "eval_loss" in record
            if record["step"] < step or (record["step"] == step and (evaluated if evaluation else logged)):
                kept.setdefault((record["step"], evaluation), record)
        if (run / name).exists():
            write_atomically(run / name, "".join(json.dumps(record) + "\n" for record in kept.values()))


def format_record(record: Record) -> str:
    """Return a record as a line of text."""
    step = f"step {record['step']}" + ("" if record.get("steps") is None else f"/{record['steps']}")
    if "eval_loss" not in record:
        return f"{step} {format_metrics(record)}"
    parts = [f"{step} held out: loss {record['eval_loss']:.4f}"]
    for name, template in (
        ("eval_bits_per_byte", "{:.4f} bits per byte"),
        ("eval_perplexity", "perplexity {:.2f}"),
        ("eval_accuracy", "accuracy {:.1%}"),
    ):
        if record.get(name) is not None:
            parts.append(template.format(record[name]))
    return ", ".join(parts)


def format_metrics(record: Record) -> str:
    """Return loss, bits per byte, throughput, memory and remaining time of a training record."""
    parts = [f"loss {record['loss']:.4f}"]
    if record.get("bits_per_byte") is not None:
        parts.append(f"{record['bits_per_byte']:.3f} bits/byte")
    parts.append(f"{_with_unit(record['tokens_per_second'])} tokens/s")
    parts.append(f"{record['memory'] / 2**20:,.0f} MiB")
    if record.get("eta") is not None:
        parts.append(f"ETA {format_duration(record['eta'])}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory_used(device: torch.device) -> int:
    """Return the peak of allocated bytes on a GPU, or the resident set size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


class _Console(Console):
    """A console that raises BrokenPipeError, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # Python flushes the file when it ends.
        raise BrokenPipeError


class _MetricsColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(format_record(task.fields["record"]).replace("  ", " "), no_wrap=True)


def _with_unit(number: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard requires tensorboard: pip install tensorboard") from None
    return SummaryWriter
