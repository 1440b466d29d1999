"""What a client of the engine gives and gets: requests, streams and completions."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from longspan.generation.generate import check_stop_strings
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session, to_tokens
from longspan.utils import check_integer

MAX_LOGPROBS = 20


class Waker(Protocol):
    """Wakes what waits for deltas; one call for all streams that it waits for."""

    def wake(self, waiting: list[Any]) -> None:
        """Wake what was given with the waker in a `Waiter`."""


Waiter = tuple[Waker, Any]  # what to wake, and by whom


@dataclass(frozen=True)
class EventLoop:
    """Wakes coroutines."""

    loop: asyncio.AbstractEventLoop

    def wake(self, waiting: list[asyncio.Future[None]]) -> None:
        """Resolve futures of the loop, from another thread."""
        with suppress(RuntimeError):  # The loop is closed.
            self.loop.call_soon_threadsafe(_resolve, waiting)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def wake_all(waiters: list[Waiter]) -> None:
    """Wake all of several waiters, each waker once."""
    found: dict[Waker, list[Any]] = {}
    for waker, waiting in waiters:
        found.setdefault(waker, []).append(waiting)
    for waker, several in found.items():
        waker.wake(several)


@dataclass(frozen=True)
class SavedState:
    """A saved session that another process holds.

    Attributes:
        name: Its name in that process' `StateStore`.
        length: Tokens in it.
        recent_tokens: The latest of them.
    """

    name: str
    length: int
    recent_tokens: list[int]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        prompt: Tokens or bytes; may be empty with `previous_state`.
        max_tokens: The most tokens to generate; 0 with `echo` only scores the prompt.
        sampling: How tokens are chosen.
        seed: Choice i draws from seed + i. The tokens of a choice depend on the prompt, the options and its seed alone.
        n: Number of choices: continuations of the prompt, which is read once.
        stop: Tokens that end a choice. They are not part of its text.
        stop_strings: Texts that end a choice. They are not part of its text.
        logprobs: How many of the likeliest tokens to report at each position, beside the log-probability of the chosen
            one; None for no log-probabilities. They are the model's, before temperature and filters.
        echo: Whether the stream begins with the prompt, with log-probabilities where these are requested.
        timeout: Seconds after which the request ends, with what it has got.
        client: Whom the request is from. Waiting clients take turns.
        previous_state: A session of one sequence that the prompt continues.
        keep_state: Whether choices end with a session, to be continued with `previous_state`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    prompt: Tensor | Sequence[int] | bytes
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    n: int = 1
    stop: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    logprobs: int | None = None
    echo: bool = False
    timeout: float | None = None
    client: str = ""
    previous_state: Session | SavedState | None = None
    keep_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", to_tokens("prompt", self.prompt).cpu().contiguous())
        check_integer("max_tokens", self.max_tokens, 0)
        check_integer("n", self.n, 1)
        check_integer("seed", self.seed, -(2**63))
        if not self.seed + self.n - 1 < 2**64:
            raise ValueError(f"seeds must be from -2**63 to 2**64 - 1, got {self.seed} for {self.n} choices")
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, got {self.sampling!r}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0)
            if self.logprobs > MAX_LOGPROBS:
                raise ValueError(f"logprobs must be at most {MAX_LOGPROBS}, got {self.logprobs}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        check_stop_strings(self.stop_strings)
        if not all(isinstance(stop, str) for stop in self.stop_strings):
            raise TypeError(f"stop_strings must be texts, got {self.stop_strings!r}")
        if not len(self.tokens) and self.previous_state is None:
            raise ValueError("every prompt must have at least one token: there is nothing to continue")
        if isinstance(self.previous_state, Session) and len(self.previous_state.logits) != 1:
            raise ValueError(f"previous_state must hold one sequence, got {len(self.previous_state.logits)}")
        if self.previous_state is not None and self.echo:
            raise ValueError("echo gives back the prompt, and previous_state holds only a state: leave one of them out")

    @property
    def tokens(self) -> Tensor:
        """The prompt as (T,) int64."""
        assert isinstance(self.prompt, Tensor)
        return self.prompt

    @property
    def session(self) -> Session | None:
        """The session that the prompt continues, in the engine's process."""
        assert not isinstance(self.previous_state, SavedState)
        return self.previous_state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it with the prompt as an array of few bytes, which takes less time than a tensor."""
        _, *others = (getattr(self, field.name) for field in fields(self))
        tokens = self.tokens.numpy()
        smallest, largest = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        return _request, (
            tokens.astype(np.min_scalar_type(min(smallest, -largest - 1) if smallest < 0 else largest)),
            *others,
        )


def _request(tokens: np.ndarray[Any, Any], *others: Any) -> Request:
    """Return a request that was pickled."""
    return Request(tokens.astype(np.int64), *others)  # type: ignore[arg-type]


class Delta(NamedTuple):
    """The next tokens of a choice: one on a CPU, those of several steps on a GPU or where an event loop reads them.

    There are none if the choice ends without another one.

    Attributes:
        index: Number of the choice.
        tokens: The tokens.
        text: The text that became certain: whole characters, nothing that may be the beginning of a stop string.
        log_probabilities: Of the tokens, if requested; None for the first token of a prompt.
        top: For each token the likeliest ones and their log-probabilities, if requested.
        finish_reason: "stop", "length", "cancelled" or "timeout" in the last delta of a choice.
        session: The state after the choice in its last delta, if requested; from an engine of another process, the
            name that it was saved under.
        prompt: Whether the tokens are those of the prompt (`echo`).
    """

    index: int  # type: ignore[assignment]  # A tuple has a method of this name.
    tokens: Sequence[int] = ()
    text: str = ""
    log_probabilities: Sequence[float | None] = ()
    top: Sequence[dict[int, float]] = ()
    finish_reason: str | None = None
    session: Session | str | None = None
    prompt: bool = False


@dataclass
class Completion:
    """A finished choice: what its deltas add up to."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    log_probabilities: list[float | None] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    session: Session | str | None = None

    def add(self, delta: Delta) -> None:
        """Add what came next."""
        self.tokens += delta.tokens
        self.text += delta.text
        self.log_probabilities += delta.log_probabilities
        self.top += delta.top
        self.finish_reason, self.session = delta.finish_reason, delta.session


class Generation:
    """The stream of a request: iterate over it, or `async for`, for the deltas of all its choices as they come.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        cached_tokens: How many of them were found in the prefix cache; known with the first delta.
        completion_tokens: Number of tokens generated so far, of all choices.
        is_async: Whether an event loop or another process reads it. Tokens then come several at a time.
    """

    def __init__(self, request: Request, cancel: Callable[[Generation], None]) -> None:
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = len(request.tokens), 0, 0
        self.is_async = False
        self._choices, self._left, self._cancel = request.n, request.n, cancel
        self._queue: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._waiter: Waiter | None = None
        self._forwarded: Waiter | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if not self._left:
            raise StopIteration
        return self._received(self._queue.get())

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._left:
            raise StopAsyncIteration
        self.is_async = True
        while True:
            loop = asyncio.get_running_loop()
            with self._lock:
                if not self._queue.empty():
                    return self._received(self._queue.get())
                waiting: asyncio.Future[None] = loop.create_future()
                self._waiter = EventLoop(loop), waiting
            await waiting

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Iterate over deltas as `async for` does, several at a time where several have come."""
        async for delta in self:
            found = [delta]
            while self._left and not self._queue.empty():
                found.append(self._received(self._queue.get()))
            yield found

    def result(self) -> list[Completion]:
        """Wait for the end and return the choices, made of the deltas that were not iterated over before."""
        choices = [Completion() for _ in range(self._choices)]
        for delta in self:
            choices[delta.index].add(delta)
        return choices

    def cancel(self) -> None:
        """End all choices within one step. Their last delta says so; what came before can still be read."""
        if self._left:
            self._cancel(self)

    async def accepted(self) -> None:
        """Wait until the engine has taken the request; raises what `Engine.submit` does, if it has not."""

    def forward(self, waker: Waker, number: int) -> None:
        """Let a waker `take` what comes, instead of iterating over it.

        Args:
            waker: Is woken with (number, self).
            number: Of this stream.
        """
        with self._lock:
            self.is_async, self._forwarded = True, (waker, (number, self))
        waker.wake([(number, self)])

    def take(self) -> list[Delta | BaseException]:
        """Return what has come, without waiting; may be called by one thread at a time."""
        found: list[Delta | BaseException] = []
        while not self._queue.empty():
            found.append(self._queue.get())
            self._count(found[-1])
        return found

    @property
    def ended(self) -> bool:
        """Whether all of it has been read."""
        return not self._left

    def push(self, item: Delta | BaseException) -> Waiter | None:
        """Add a delta, or an error to raise. Called by the engine, which wakes what is returned."""
        with self._lock:
            self._queue.put(item)
            waiter, self._waiter = self._waiter, None
            return self._forwarded or waiter

    def _received(self, item: Delta | BaseException) -> Delta:
        self._count(item)
        if isinstance(item, BaseException):
            raise item
        return item

    def _count(self, item: Delta | BaseException) -> None:
        self._left = self._left - (item.finish_reason is not None) if isinstance(item, Delta) else 0
