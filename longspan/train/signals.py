"""When a run stops, and how long it has run."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from longspan.train.config import TrainConfig


class StoppedError(Exception):
    """A run that ended before its time; status is for the shell."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Clock:
    """Seconds spent training: scoring, saving and compiling do not count."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before, self._since = seconds, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        held = self.seconds
        try:
            yield
        finally:
            self._before, self._since = held, time.perf_counter()


class Signals:
    """SIGINT and SIGTERM, noticed between steps; a second one ends the process at once. received: 0 if none."""

    def __init__(self) -> None:
        self.received = 0

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hears signals in its first thread only.
            return
        before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number


def out_of_memory(error: BaseException, train: TrainConfig) -> str:
    """What to change, and by how much."""
    tried = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", str(error))
    size = f" ({tried[1]} more were needed)" if tried else ""
    said = f"out of GPU memory with --batch-size {train.batch_size} and --context {train.context}{size}: use "
    if train.batch_size > 1:
        half = train.batch_size // 2
        more = -(-train.batch_size * train.accumulate // half)
        return f"{said}--batch-size {half} --accumulate {more}, the same step in half the memory"
    return (
        f"{said}--context {max(1, train.context // 2)}, or --model.execution recompute, "
        "which keeps one activation a layer at the price of a second forward pass"
    )
