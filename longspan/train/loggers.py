"""Watching a run: a progress bar on a terminal, plain lines elsewhere, metrics.jsonl always, TensorBoard if asked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
Record = dict[str, Any]


class Watch(Protocol):
    """What the loop tells as it goes."""

    def note(self, text: str) -> None:
        """A line of news."""

    def progress(self, done: float, record: Record) -> None:
        """After every step; done: from 0 to 1."""

    def record(self, record: Record) -> None:
        """A line of metrics."""

    def sample(self, record: Record) -> None:
        """A continuation the model wrote."""

    def close(self) -> None:
        """The end, good or bad."""


class Silent:
    """For the processes that are not the first."""

    def note(self, text: str) -> None: ...

    def progress(self, done: float, record: Record) -> None: ...

    def record(self, record: Record) -> None: ...

    def sample(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Terminal:
    """The screen, and the run's files."""

    def __init__(self, run: Path, *, tensorboard: bool = False, console: Console | None = None) -> None:
        self.console = Console(stderr=True, highlight=False) if console is None else console
        self.run = run
        self._bar: Progress | None = None
        self._board = _board(run) if tensorboard else None

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def progress(self, done: float, record: Record) -> None:
        if not self.console.is_terminal:
            return
        if self._bar is None:
            # The figures come first: what a line has left beside them is the bar's.
            columns = BarColumn(bar_width=max(4, min(40, self.console.width - 76))), _Figures()
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._bar.add_task(self.run.name, total=1.0, record=record)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, record=record)

    def record(self, record: Record) -> None:
        self._write(METRICS, record)
        if self._bar is None or "eval_loss" in record:
            self.note(line(record))
        if self._board is not None:
            for name, value in record.items():
                if name not in ("step", "steps", "eta") and isinstance(value, int | float):
                    self._board.add_scalar(name, value, record["step"])

    def sample(self, record: Record) -> None:
        self._write(SAMPLES, record)
        if self._board is not None:
            self._board.add_text("sample", record["text"], record["step"])

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._board is not None:
            self._board.close()

    def _write(self, name: str, record: Record) -> None:
        with open(self.run / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """The lines of a metrics file; one that a kill cut off is left out."""
    found = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found


def truncate_records(run: Path, step: int) -> None:
    """Drops what was written after the checkpoint a run goes on from."""
    for name in (METRICS, SAMPLES):
        path = run / name
        if path.exists():
            kept = [record for record in read_records(path) if record["step"] <= step]
            beside = path.with_name(f".{name}")
            beside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            os.replace(beside, path)


def line(record: Record) -> str:
    """A record in words."""
    of = "" if record.get("steps") is None else f"/{record['steps']}"
    if "eval_loss" in record:
        parts = [f"step {record['step']}{of} held out: loss {record['eval_loss']:.4f}"]
        for name, text in (
            ("eval_bits_per_byte", "{:.4f} bits per byte"),
            ("eval_perplexity", "perplexity {:.2f}"),
            ("eval_accuracy", "accuracy {:.1%}"),
        ):
            if record.get(name) is not None:
                parts.append(text.format(record[name]))
        return ", ".join(parts)
    return f"step {record['step']}{of} " + figures(record)


def figures(record: Record) -> str:
    """Loss, bits per byte, speed, memory and the time that is left."""
    parts = [f"loss {record['loss']:.4f}"]
    if record.get("bits_per_byte") is not None:
        parts.append(f"{record['bits_per_byte']:.3f} bits/byte")
    parts.append(f"{_short(record['tokens_per_second'])} tokens/s")
    parts.append(f"{record['memory'] / 2**20:,.0f} MiB")
    if record.get("eta") is not None:
        parts.append(f"ETA {clock(record['eta'])}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """65 -> 1:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory(device: torch.device) -> int:
    """Bytes: the most the device has held where it counts them, else what the process holds."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def mean(values: Iterable[float]) -> float:
    """Exactly rounded, so that it does not depend on the order."""
    held = list(values)
    return math.fsum(held) / len(held)


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        record = task.fields["record"]
        of = "" if record.get("steps") is None else f"/{record['steps']}"
        return Text(f"step {record['step']}{of} {figures(record)}".replace("  ", " "), no_wrap=True)


def _short(number: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _board(run: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(str(run / "tensorboard"))
