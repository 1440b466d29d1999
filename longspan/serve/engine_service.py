"""An engine in one process, used by another: requests, streams and states over one connection.

The HTTP server runs in a process of its own. In one process its thread and the engine's would take turns at the Python
interpreter, and a decode step is many small operations that each wait for their turn.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from longspan.generation.session import Session
from longspan.generation.tokenization import TextCodec
from longspan.serve.engine import Engine, EngineClosedError, EngineFailedError, EngineStats, QueueFullError
from longspan.serve.openai_protocol import APIError
from longspan.serve.request import Delta, Generation, Request, SavedState, Waiter, wake_all
from longspan.serve.state_store import StateFiles, StateInfo, StateStore

logger = logging.getLogger("longspan.serve")

_THREADS = 4  # that read and write states
_EXPECTED = (APIError, QueueFullError, EngineClosedError, ValueError, TypeError, OverflowError)
_Part = tuple[int, int, list[Any]]  # of a stream: its number, cached tokens, deltas or an error


@dataclass(frozen=True)
class EngineInfo:
    """What a client needs of an engine and its saved states.

    Attributes:
        codec: Text of its tokens.
        slots: Choices that are decoded together.
        max_queue: The most that wait.
        max_length: The most tokens of a sequence; None for any number.
        fingerprint: Of the model.
        state_bytes: Bytes of an empty state.
        state_folder: Folder of saved states.
        max_state_bytes: The most bytes of a saved state.
    """

    codec: TextCodec | None
    slots: int
    max_queue: int
    max_length: int | None
    fingerprint: str
    state_bytes: int
    state_folder: Path
    max_state_bytes: int

    @classmethod
    def of(cls, engine: Engine, states: StateStore) -> EngineInfo:
        """Return what is to be known of an engine and its states."""
        limits = engine.slots, engine.max_queue, engine.max_length
        return cls(engine.codec, *limits, engine.fingerprint, engine.state_bytes, states.folder, states.max_bytes)


class EngineService:
    """Lets another process use an engine and its saved states.

    Args:
        engine: The engine.
        states: Its saved states.
        connection: To the other process' `RemoteEngine`.
    """

    def __init__(self, engine: Engine, states: StateStore, connection: Connection) -> None:
        self._engine, self._states, self._connection = engine, states, connection
        self._calls: dict[str, Callable[..., object]] = {
            "stats": engine.stats,
            "close": partial(engine.close, drain=False),
            "load": self._load,
            "copy": states.copy,
            "add": states.add,
        }
        self._lock = threading.RLock()  # of what follows, and of the connection
        self._streams: dict[int, Generation | None] = {}  # None while the state that a request continues is read
        self._unwanted: set[int] = set()  # cancelled meanwhile
        self._pool = ThreadPoolExecutor(_THREADS, "longspan-states")

    def run(self) -> None:
        """Answer until the other process ends; then cancel its requests."""
        threading.Thread(target=self._watch, name="longspan-watch", daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                self._receive(*self._connection.recv())
        with self._lock:
            streams = [stream for stream in self._streams.values() if stream is not None]
        for stream in streams:
            stream.cancel()
        self._pool.shutdown()

    def send(self, *message: object) -> None:
        """Send a message, unless the other process has ended."""
        with self._lock, suppress(OSError):
            self._connection.send(message)

    def wake(self, waiting: list[tuple[int, Generation]]) -> None:
        """Send what streams have got, in one message. Called by the engine."""
        parts: list[_Part] = []
        with self._lock:
            for number, stream in waiting:
                items = []
                for item in stream.take():
                    if isinstance(item, Delta) and isinstance(item.session, Session):
                        # The last of its choice: what comes meanwhile is of others.
                        self._pool.submit(self._save_and_send, number, stream.cached_tokens, item, item.session)
                    else:
                        items.append(item)
                if items:
                    parts.append((number, stream.cached_tokens, items))
                if stream.ended:
                    self._streams.pop(number, None)
            if parts:
                self.send("deltas", parts)

    def _receive(self, kind: str, number: int, *content: Any) -> None:
        if kind == "cancel":
            self._cancel(number)
        elif kind == "call":
            self._pool.submit(self._call, number, *content)
        else:
            (request,) = content
            if request.previous_state is None:
                self._submit(number, request)
            else:
                with self._lock:
                    self._streams[number] = None
                self._pool.submit(self._submit, number, request)

    def _submit(self, number: int, request: Request) -> None:
        try:
            if isinstance(request.previous_state, SavedState):
                request = replace(request, previous_state=self._states.load(request.previous_state.name))
            stream = self._engine.submit(request)
        except Exception as error:
            with self._lock:
                self._streams.pop(number, None)
                self._unwanted.discard(number)
            self.send("reply", number, _portable(error))
            return
        with self._lock:
            self._streams[number] = stream
            unwanted = number in self._unwanted
            self._unwanted.discard(number)
        self.send("reply", number, None)
        stream.forward(self, number)
        if unwanted:
            stream.cancel()

    def _cancel(self, number: int) -> None:
        with self._lock:
            stream = self._streams.get(number)
            if stream is None and number in self._streams:
                self._unwanted.add(number)
        if stream is not None:
            stream.cancel()

    def _call(self, number: int, name: str, *arguments: Any) -> None:
        try:
            found = self._calls[name](*arguments)
        except Exception as error:
            found = _portable(error)
        self.send("reply", number, found)

    def _load(self, name: str) -> SavedState:
        session = self._states.load(name)
        return SavedState(name, session.length, session.recent_tokens)

    def _save_and_send(self, number: int, cached: int, delta: Delta, session: Session) -> None:
        """Save a session, and send the delta that it came with, with its name."""
        item: Delta | Exception
        try:
            item = delta._replace(session=self._states.save(session).name)
        except Exception as error:
            item = _portable(error)
        self.send("deltas", [(number, cached, [item])])

    def _watch(self) -> None:
        self._engine.wait()
        self.send("ended")


def _portable(error: Exception) -> Exception:
    """Return an error to send to another process; one that is not expected is logged, without its text."""
    if isinstance(error, _EXPECTED):
        return error
    logger.error("%s in the engine:\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    return RuntimeError(type(error).__name__)


class _RemoteGeneration(Generation):
    """The stream of a request that another process answers."""

    def __init__(self, request: Request, cancel: Callable[[Generation], None], reply: Future[None]) -> None:
        super().__init__(request, cancel)
        self._reply, self.choices_left = reply, request.n

    async def accepted(self) -> None:
        await asyncio.wrap_future(self._reply)


class RemoteEngine:
    """An engine of another process, for `ServedModel`.

    Args:
        connection: To the other process' `EngineService`.
        info: What must be known of the engine.

    Attributes:
        is_alive: Whether the engine runs.
    """

    def __init__(self, connection: Connection, info: EngineInfo) -> None:
        self.codec, self.fingerprint, self.state_bytes = info.codec, info.fingerprint, info.state_bytes
        self.slots, self.max_queue, self.max_length = info.slots, info.max_queue, info.max_length
        self.is_alive = True
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = count()
        self._streams: dict[int, _RemoteGeneration] = {}
        self._replies: dict[int, Future[Any]] = {}

    def listen(self, on_message: Callable[..., None], on_end: Callable[[], None]) -> None:
        """Receive messages, in a thread.

        Args:
            on_message: Called with those that are not the engine's.
            on_end: Called when the other process has ended.
        """
        receive = partial(self._receive, on_message, on_end)
        threading.Thread(target=receive, name="longspan-receive", daemon=True).start()

    def submit(self, request: Request) -> Generation:
        """Send a request; see `Engine.submit`, whose errors `Generation.accepted` raises."""
        number, reply = self._expect_reply()
        stream = _RemoteGeneration(request, lambda _: self._send("cancel", number), reply)
        self._streams[number] = stream
        self._send("submit", number, request)
        return stream

    def stats(self) -> EngineStats:
        """Return the counters."""
        found = self.call("stats")
        assert isinstance(found, EngineStats)
        return found

    def close(self, *, drain: bool) -> None:
        """Cancel what was accepted, and end the engine."""
        assert not drain
        self.call("close")

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function of the service, and wait for what it returns or raises."""
        number, reply = self._expect_reply()
        self._send("call", number, name, *arguments)
        return reply.result()

    def _expect_reply(self) -> tuple[int, Future[Any]]:
        number, reply = next(self._numbers), Future[Any]()
        self._replies[number] = reply
        return number, reply

    def _send(self, *message: object) -> None:
        with self._lock:
            self._connection.send(message)

    def _receive(self, on_message: Callable[..., None], on_end: Callable[[], None]) -> None:
        with suppress(EOFError, OSError):
            while True:
                kind, *content = self._connection.recv()
                if kind == "deltas":
                    wake_all([waiter for part in content[0] for waiter in self._push(*part)])
                elif kind == "reply":
                    self._reply(*content)
                elif kind == "ended":
                    self.is_alive = False
                else:
                    on_message(kind, *content)
        on_end()

    def _push(self, number: int, cached: int, items: list[Delta | Exception]) -> list[Waiter]:
        """Add what came to its stream, unless an error has ended that; return what waits for it."""
        stream = self._streams.get(number)
        if stream is None:
            return []
        stream.cached_tokens, found = cached, []
        for item in items:
            if not isinstance(item, Delta):
                stream.choices_left = 0
                self.is_alive = self.is_alive and not isinstance(item, EngineFailedError)
            else:
                stream.choices_left -= item.finish_reason is not None
                stream.completion_tokens += 0 if item.prompt else len(item.tokens)
            found.append(stream.push(item))
        if not stream.choices_left:
            del self._streams[number]
        return [waiter for waiter in found if waiter is not None]

    def _reply(self, number: int, found: object) -> None:
        reply = self._replies.pop(number)
        if isinstance(found, Exception):
            self._streams.pop(number, None)
            reply.set_exception(found)
        else:
            reply.set_result(found)


class RemoteStates(StateFiles):
    """Saved states of an engine of another process, which checks and writes them.

    Args:
        engine: The engine.
        info: What must be known of it.
    """

    def __init__(self, engine: RemoteEngine, info: EngineInfo) -> None:
        super().__init__(info.state_folder, info.max_state_bytes)
        self._engine = engine

    def load(self, name: str) -> SavedState:
        """Check a state; see `StateStore.load`."""
        found = self._engine.call("load", name)
        assert isinstance(found, SavedState)
        return found

    def add(self, path: Path, name: str | None = None) -> StateInfo:
        """Move a file to the states; see `StateStore.add`."""
        found = self._engine.call("add", path, name)
        assert isinstance(found, StateInfo)
        return found

    def copy(self, source: str, name: str | None = None) -> StateInfo:
        """Copy a state; see `StateStore.copy`."""
        found = self._engine.call("copy", source, name)
        assert isinstance(found, StateInfo)
        return found
