"""A server process and requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from longspan.utils import printable

_ADDRESS = re.compile(r" at http://([^ ]+):(\d+) with ")
_START_SECONDS, _ANSWER_SECONDS = 300.0, 600.0
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


@dataclass
class Answer:
    """What came back for a request.

    Attributes:
        text: The whole text.
        tokens: Tokens generated.
        cached: Tokens of the prompt that the prefix cache had.
        arrived: Seconds at which the request was sent, from the beginning of the load.
        first: Seconds until the first text, with those of opening a connection where none is idle.
        seconds: Seconds until the end.
        error: What went wrong, empty if nothing did.
        events: Seconds and characters of each event with text.
    """

    text: str = ""
    tokens: int = 0
    cached: int = 0
    arrived: float = 0.0
    first: float | None = None
    seconds: float = 0.0
    error: str = ""
    events: list[tuple[float, int]] = field(default_factory=list)


@contextmanager
def running_server(flags: Mapping[str, object], arguments: Sequence[str] = ()) -> Iterator[Address]:
    """Run `longspan serve` on a free port; end it, and wait, afterwards.

    Args:
        flags: Its flags, without dashes, and their values.
        arguments: More arguments.

    Raises:
        ValueError: If it does not start.
    """
    command = [sys.executable, "-m", "longspan", "serve", "--port=0"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    print_progress("starting the server")
    # A file, because a thread that read a pipe would change the number of PyTorch threads of `generate`.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *arguments], stderr=log)
        try:
            yield _address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: IO[bytes]) -> Address:
    """Return where a server listens, from what it writes."""
    deadline, text = time.monotonic() + _START_SECONDS, ""
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
        match = _ADDRESS.search(text)
        if match is not None:
            return Address(match[1].strip("[]"), int(match[2]))
        if ended:
            break
        time.sleep(0.05)
    said = " ".join(text.split("\n")[-5:]).strip()
    raise ValueError(f"the server did not start: {printable(said or 'it wrote nothing')}")


class Client:
    """Sends requests to one server, over persistent connections as most clients do.

    Args:
        address: Where the server listens.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, writer in self._idle:
            writer.close()

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """Send a request to /v1/completions and read its answer, a stream."""
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        answer, begun = Answer(), time.perf_counter()
        try:

            async def receive() -> None:
                async for event in self._post("/v1/completions", content):
                    _add(answer, event, time.perf_counter() - begun)

            await asyncio.wait_for(receive(), _ANSWER_SECONDS)
        except (OSError, ValueError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.seconds = time.perf_counter() - begun
        return answer

    async def counters(self) -> dict[str, float]:
        """Return the numbers at /metrics that have no labels, by name; none if the server does not report them."""
        found = {}
        with suppress(OSError, ValueError, EOFError):
            async with self._request(self._head("GET", "/metrics") + "\r\n") as (_, parts):
                body = b"".join([part async for part in parts])
            for line in body.decode().splitlines():
                name, _, value = line.partition(" ")
                if name.startswith("longspan_") and "{" not in name:
                    found[name.removeprefix("longspan_")] = float(value)
        return found

    async def _post(self, path: str, content: bytes) -> AsyncIterator[dict[str, Any]]:
        """Post JSON; iterate over the events of the answer, or yield the error that is the answer."""
        head = self._head("POST", path) + "Content-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        async with self._request(head, content) as (status, parts):
            if status != 200:
                yield json.loads(b"".join([part async for part in parts]))
                return
            left, ended = b"", False
            async for part in parts:
                *events, left = (left + part).split(b"\n\n")
                for event in events:
                    ended = ended or event == b"data: [DONE]"
                    if event.startswith(b"data: {"):
                        yield json.loads(event.removeprefix(b"data: "))
            if not ended:
                raise EOFError("the stream broke off")

    @asynccontextmanager
    async def _request(self, head: str, content: bytes = b"") -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Send a request; yield the status and the parts of the body, which must be read to its end."""
        reader, writer = await self._connection()
        try:
            writer.write(head.encode() + content)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            yield status, _chunks(reader) if b"transfer-encoding: chunked" in headers else _whole(reader, headers)
        except BaseException:
            writer.close()
            raise
        if b"connection: close" in headers:
            writer.close()
        else:
            self._idle.append((reader, writer))

    async def _connection(self) -> Connection:
        """Return a connection that nothing else uses, the one used last if the server has not closed it."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._address)

    def _head(self, method: str, path: str) -> str:
        return f"{method} {path} HTTP/1.1\r\nHost: {self._address.host}:{self._address.port}\r\n"


def _add(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Add an event of a stream, or an error."""
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        if choice["text"]:
            answer.first = now if answer.first is None else answer.first
            answer.events.append((now, len(choice["text"])))
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
        answer.cached = event["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Iterate over the chunks of a body with chunked transfer encoding."""
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def _whole(reader: asyncio.StreamReader, headers: bytes) -> AsyncIterator[bytes]:
    """Iterate over the one part of a body whose size is in the headers."""
    size = re.search(rb"content-length: *(\d+)", headers)
    if size is None:
        raise ValueError("the answer does not say how long it is")
    yield await reader.readexactly(int(size[1]))


def print_progress(text: str, end: str = "\n") -> None:
    """Print progress; over itself on a terminal, otherwise not too often."""
    if end == "\n" or os.isatty(2):
        print(f"\x1b[K{text}" if os.isatty(2) else text, end=end, file=sys.stderr, flush=True)
