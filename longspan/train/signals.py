"""Stop a run: signals, training time, and the errors that end it."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from longspan.train.config import TrainConfig


class StoppedError(Exception):
    """A run ended before its last step.

    Args:
        message: The reason, and what to do.
        status: Exit status of the command.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TrainingTimer:
    """Seconds spent on training steps; evaluation, saving and compilation are excluded by `paused`.

    Args:
        seconds: Those of an earlier part of the run.
        clock: Returns the time in seconds.
    """

    def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._before, self._since, self._clock = seconds, clock(), clock

    @property
    def seconds(self) -> float:
        return self._before + self._clock() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the timer inside the block."""
        seconds = self.seconds
        try:
            yield
        finally:
            self._before, self._since = seconds, self._clock()


class InterruptedWorkError(Exception):
    """A signal arrived inside `SignalHandler.interrupting`."""


class SignalHandler:
    """Store the termination signal that was received in `received` (0 if none), for the trainer to check.

    A second signal interrupts at once. SIGHUP is left alone if it is ignored, as under nohup.
    """

    def __init__(self) -> None:
        self.received = 0
        self._interrupts = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only.
            return
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has the first two.
        handled = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        previous = [signal.signal(number, self._handle) for number in handled]
        try:
            yield
        finally:
            for number, handler in zip(handled, previous, strict=True):
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise InterruptedWorkError inside the block as soon as a signal arrives."""
        self._interrupts = True
        try:
            if self.received:
                raise InterruptedWorkError
            yield
        finally:
            self._interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number
        if self._interrupts:
            raise InterruptedWorkError


def out_of_memory_message(error: BaseException, train: TrainConfig) -> str:
    """Return the error message for running out of GPU memory: which settings to change, and to what."""
    size = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", str(error))
    missing = f" ({size[1]} more needed)" if size else ""
    start = f"out of GPU memory with --batch-size {train.batch_size} and --context {train.context}{missing}: use "
    if train.batch_size > 1:
        half = train.batch_size // 2
        accumulate = -(-train.batch_size * train.accumulate // half)
        return f"{start}--batch-size {half} --accumulate {accumulate}, the same step in half the memory"
    half, eighth = max(1, train.context // 2), max(1, train.context // 8)
    return (
        f"{start}--context {half}; or, for a second forward pass, --model.execution recompute, which saves one "
        f"activation per layer, or --chunk-length {eighth}, which saves the activations of a piece"
    )
