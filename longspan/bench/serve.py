"""Load on a server: `longspan bench serve --model runs/demo` starts `longspan serve` and sends requests over HTTP.

Requests arrive at random times (Poisson) and have mixed lengths. Some different ones are first asked alone; every
answer under load must be the same text as the one alone, so that none is lost and none is another's.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from longspan.bench.environment import environment
from longspan.bench.report import TextTable
from longspan.generation.generate import generate
from longspan.models.checkpoint import find_checkpoint, load
from longspan.models.transformer import LanguageModel
from longspan.utils import choose, choose_device, printable, write_atomically

_PERCENTILES = (50, 95, 99)
_ADDRESS = re.compile(r" at http://([^ ]+):(\d+) with ")
_START_SECONDS, _ANSWER_SECONDS = 300.0, 600.0
_LOAD = 1.2  # requests per second by default, relative to what `generate` could answer


@dataclass(frozen=True)
class ServeBenchOptions:
    """Measure a server under load, beside `generate` at the same batch."""

    model: Path
    """Checkpoint folder, or the folder of a run."""
    requests: int = 200
    """Number of requests."""
    slots: int = 8
    """Number of choices that the server decodes together, and the batch of `generate`."""
    rate: float | None = None
    """Requests per second, at random times. By default 1.2 times as many as `generate` could answer."""
    prompt_tokens: tuple[int, ...] = (16, 256)
    """The fewest and the most tokens of a prompt; their logarithm is uniformly distributed."""
    max_tokens: tuple[int, ...] = (16, 128)
    """The fewest and the most tokens to generate; their logarithm is uniformly distributed."""
    distinct: int = 32
    """Number of different requests, each of which is first asked alone."""
    stream: bool = True
    """Stream the answers; otherwise the time to the first token is that of the whole answer."""
    serve_arguments: tuple[str, ...] = ()
    """More arguments of `longspan serve`, such as --speculation=ngram."""
    cache: str = "0"
    """Memory of the server's prefix cache. By default none, because the same prompts come again."""
    seed: int = 0
    """Seed of the requests and their times."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""
    out: Path = Path("runs/bench-serve.json")
    """The JSON file of the results; a plot is beside it."""

    def __post_init__(self) -> None:
        for name in ("requests", "slots", "distinct"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prompt_tokens", "max_tokens"):
            found = getattr(self, name)
            if len(found) != 2 or not 1 <= found[0] <= found[1]:
                raise ValueError(
                    f"{name} must be a smallest and a largest number of at least 1, such as 16,256, "
                    f"got {', '.join(map(str, found))}"
                )
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be a positive number of requests per second, got {self.rate}")
        if self.device is not None:
            choose("device", self.device, ("cpu", "cuda"))


@dataclass
class Answer:
    """What came back for a request.

    Attributes:
        text: The whole text.
        tokens: Tokens generated.
        arrived: Seconds at which the request was sent, from the beginning of the load.
        first: Seconds until the first text.
        seconds: Seconds until the end.
        error: What went wrong, empty if nothing did.
    """

    text: str = ""
    tokens: int = 0
    arrived: float = 0.0
    first: float | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass
class LoadResult:
    """What a load run measured.

    Attributes:
        requests: Requests sent.
        lost: Requests without a whole answer.
        wrong: Answers that are not the one that the same request got alone.
        seconds: From the first request to the last answer.
        tokens: Tokens generated.
        tokens_per_second: Of all answers together.
        generate_tokens_per_second: Of `generate` with as many prompts as slots, of mean length, reading them included.
        rate: Requests per second that were offered.
        first_token_ms: Time to the first token, by percentile.
        token_ms: Time per further token, by percentile.
        errors: Different errors.
    """

    requests: int
    lost: int
    wrong: int
    seconds: float
    tokens: int
    tokens_per_second: float
    generate_tokens_per_second: float
    rate: float
    first_token_ms: dict[int, float] = field(default_factory=dict)
    token_ms: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Throughput relative to `generate`."""
        return self.tokens_per_second / self.generate_tokens_per_second

    def table(self) -> TextTable:
        """Return the results as a table."""
        rows = [
            ["tokens/s, server", f"{self.tokens_per_second:,.0f}", "", ""],
            ["tokens/s, generate", f"{self.generate_tokens_per_second:,.0f}", "", ""],
            ["ratio", f"{self.ratio:.2f}", "", ""],
            ["requests/s offered", f"{self.rate:,.1f}", "", ""],
            ["requests, lost, wrong", str(self.requests), str(self.lost), str(self.wrong)],
        ]
        for name, found in (("ms to first token", self.first_token_ms), ("ms per token", self.token_ms)):
            rows.append([name, *(f"{found[p]:,.1f}" if p in found else "–" for p in _PERCENTILES)])
        return TextTable(["", *(f"p{p}" for p in _PERCENTILES)], rows)


def run(options: ServeBenchOptions) -> LoadResult:
    """Start a server, send requests and print what was measured; progress goes to stderr.

    Raises:
        ValueError: If there is no such model, or the server does not start.
    """
    device = choose_device(options.device)
    model = _load(options.model, device)
    bodies = _bodies(options, model)
    _say(f"generate, {options.slots} prompts together")
    raw = _generate_rate(model, options)
    del model
    mean = fmean(body["max_tokens"] for body in bodies)
    rate = options.rate or _LOAD * raw / mean
    with _server(options, str(device)) as (host, port):
        alone = asyncio.run(_ask_alone(host, port, bodies))
        answers, order = asyncio.run(_load_run(host, port, bodies, options, rate))
    result = _result(answers, [alone[i] for i in order], raw, rate)
    _write(options, result, answers, environment(device.type))
    return result


def _load(folder: Path, device: torch.device) -> LanguageModel:
    try:
        model = load(find_checkpoint(folder), device=device)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror or error}") from None
    if not isinstance(model, LanguageModel) or not model.config.causal:
        raise ValueError(f"{folder} contains a {type(model).__name__}; a server needs a causal LanguageModel")
    return model.eval()


def _bodies(options: ServeBenchOptions, model: LanguageModel) -> list[dict[str, Any]]:
    """Return the different requests: random tokens, lengths, temperatures and seeds."""
    rng, size = random.Random(options.seed), model.config.vocab_size
    assert size is not None

    def length(low: int, high: int) -> int:
        return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))

    bodies = []
    for _ in range(options.distinct):
        prompt = [rng.randrange(size) for _ in range(length(*options.prompt_tokens))]
        chosen = {"temperature": rng.choice([0, 0.7, 1]), "seed": rng.randrange(1 << 31)}
        bodies.append({"prompt": prompt, "max_tokens": length(*options.max_tokens), **chosen})
    return bodies


def _generate_rate(model: LanguageModel, options: ServeBenchOptions) -> float:
    """Return the tokens per second of `generate` at a batch of `slots`, the best of three runs after one."""
    bodies = _bodies(options, model)
    size, prompt, tokens = (
        int(model.config.vocab_size or 0),
        round(fmean(len(body["prompt"]) for body in bodies)),
        round(fmean(body["max_tokens"] for body in bodies)),
    )
    prompts = torch.randint(size, (options.slots, prompt), generator=torch.Generator().manual_seed(options.seed))
    best = 0.0
    for _ in range(4):
        begun = time.perf_counter()
        generate(model, prompts, tokens)
        best = max(best, options.slots * tokens / (time.perf_counter() - begun))
    return best


@contextmanager
def _server(options: ServeBenchOptions, device: str) -> Iterator[tuple[str, int]]:
    """Run `longspan serve` on a free port; end it, and wait, afterwards."""
    flags: dict[str, object] = {
        "model": options.model,
        "port": 0,
        "slots": options.slots,
        "max-queue": options.requests + options.distinct,
        "max-streams": options.requests + options.distinct,
        "max-connections": options.requests + options.distinct + 8,
        "cache": options.cache,
        "device": device,
    }
    command = [sys.executable, "-m", "longspan", "serve", *(f"--{name}={value}" for name, value in flags.items())]
    _say("starting the server")
    process = subprocess.Popen([*command, *options.serve_arguments], stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stderr is not None
    try:
        yield _address(process)
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        process.stderr.close()


def _address(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Return where a server listens, from what it prints. Its later messages are passed on by a thread."""
    assert process.stderr is not None
    stream, lines, deadline = process.stderr, [], time.monotonic() + _START_SECONDS
    for line in stream:
        match = _ADDRESS.search(line)
        if match is not None:
            threading.Thread(target=stream.read, daemon=True).start()
            return match[1].strip("[]"), int(match[2])
        lines.append(line.strip())
        if time.monotonic() > deadline:
            break
    raise ValueError(f"the server did not start: {printable(' '.join(lines[-5:]) or 'it printed nothing')}")


async def _ask_alone(host: str, port: int, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Return the answers to requests that nothing runs beside."""
    answers = []
    for i, body in enumerate(bodies):
        _say(f"alone: {i + 1} of {len(bodies)}", end="\r")
        answers.append(await _ask(host, port, body, stream=True))
        if answers[-1].error:
            raise ValueError(f"the server did not answer a request that nothing ran beside: {answers[-1].error}")
    _say("")
    return answers


async def _load_run(
    host: str, port: int, bodies: Sequence[dict[str, Any]], options: ServeBenchOptions, rate: float
) -> tuple[list[Answer], list[int]]:
    """Send requests at random times; return the answers, and which of the different requests each one was."""
    rng = random.Random(options.seed + 1)
    order = [i % len(bodies) for i in range(options.requests)]
    rng.shuffle(order)
    begun, done = time.perf_counter(), 0

    async def ask(arrival: float, body: dict[str, Any]) -> Answer:
        nonlocal done
        await asyncio.sleep(arrival - (time.perf_counter() - begun))
        arrived = time.perf_counter() - begun
        answer = await _ask(host, port, body, stream=options.stream)
        answer.arrived, done = arrived, done + 1
        return answer

    async def report() -> None:
        while True:
            await asyncio.sleep(1)
            _say(f"under load: {done} of {options.requests}", end="\r")

    arrival, tasks = 0.0, []
    for i in order:
        tasks.append(asyncio.create_task(ask(arrival, bodies[i])))
        arrival += rng.expovariate(rate)
    reporter = asyncio.create_task(report())
    answers = await asyncio.gather(*tasks)
    reporter.cancel()
    _say(f"under load: {done} of {options.requests}")
    return answers, order


async def _ask(host: str, port: int, body: dict[str, Any], *, stream: bool) -> Answer:
    """Send a request and read its answer."""
    answer, begun = Answer(), time.perf_counter()
    try:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

        async def receive() -> None:
            async for event in _post(host, port, "/v1/completions", {**body, **options}):
                _add(answer, event, time.perf_counter() - begun)

        await asyncio.wait_for(receive(), _ANSWER_SECONDS)
    except (OSError, ValueError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - begun
    return answer


def _add(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Add an event of a stream, or a whole answer."""
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        if choice["text"] and answer.first is None:
            answer.first = now
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]


async def _post(host: str, port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Post JSON on a connection of its own; iterate over the events of the answer, or its one JSON object."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        status = (await reader.readline()).split()
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        parts = _chunks(reader) if b"transfer-encoding: chunked" in headers else _rest(reader)
        if status[1:2] != [b"200"] or b"text/event-stream" not in headers:
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
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Iterate over the chunks of a body with chunked transfer encoding."""
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    yield await reader.read()


def _result(answers: Sequence[Answer], alone: Sequence[Answer], raw: float, rate: float) -> LoadResult:
    whole = [answer for answer in answers if not answer.error]
    wrong = sum(
        not answer.error and (answer.text, answer.tokens) != (own.text, own.tokens)
        for answer, own in zip(answers, alone, strict=True)
    )
    seconds = max(answer.arrived + answer.seconds for answer in answers) - min(answer.arrived for answer in answers)
    tokens = sum(answer.tokens for answer in whole)
    first = [1e3 * answer.first for answer in whole if answer.first is not None]
    later = [
        1e3 * (answer.seconds - answer.first) / (answer.tokens - 1)
        for answer in whole
        if answer.first is not None and answer.tokens > 1
    ]
    return LoadResult(
        requests=len(answers),
        lost=len(answers) - len(whole),
        wrong=wrong,
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        generate_tokens_per_second=raw,
        rate=rate,
        first_token_ms=_percentiles(first),
        token_ms=_percentiles(later),
        errors=sorted({answer.error for answer in answers if answer.error})[:10],
    )


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return percentiles by the nearest rank."""
    ordered = sorted(values)
    return {p: ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in _PERCENTILES if ordered}


def _write(options: ServeBenchOptions, result: LoadResult, answers: Sequence[Answer], about: dict[str, Any]) -> None:
    """Print the table; write the JSON file and the plot."""
    print(result.table().markdown())
    for error in result.errors:
        print(printable(f"error: {error}"))
    shown = {**asdict(options), "model": options.model.name, "out": None}
    content = {"format": 1, **about, "options": shown, "result": {**asdict(result), "ratio": result.ratio}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(content, indent=1).encode())
    try:
        _plot(options.out.with_suffix(".png"), answers, result)
        written = f"{options.out} and {options.out.with_suffix('.png')}"
    except ImportError as error:
        written = f"{options.out}, without a plot: {error}; pip install 'longspan[train]'"
    print(printable(f"written to {written}"), flush=True)


def _plot(path: Path, answers: Sequence[Answer], result: LoadResult) -> None:
    """Draw the share of requests within each time to the first token, and per further token."""
    from matplotlib.figure import Figure

    whole = [(answer, answer.first) for answer in answers if answer.first is not None and not answer.error]
    panels = {
        "to the first token": sorted(1e3 * first for _, first in whole),
        "per token": sorted(1e3 * (x.seconds - first) / (x.tokens - 1) for x, first in whole if x.tokens > 1),
    }
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, ordered) in zip(axes, panels.items(), strict=True):
        axis.step(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axis.set(xlabel=f"ms {name}", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% of requests")
    figure.suptitle(
        f"{result.requests} requests, {result.tokens_per_second:,.0f} tokens/s, "
        f"{100 * result.ratio:.0f} % of generate at the same batch",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _say(text: str, end: str = "\n") -> None:
    """Print progress; over itself on a terminal, otherwise not too often."""
    if end == "\n" or os.isatty(2):
        print(f"\x1b[K{text}" if os.isatty(2) else text, end=end, file=sys.stderr, flush=True)
