"""Requests at random times (Poisson) and of mixed lengths, with a check of every answer."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from longspan.bench.report import TextTable
from longspan.bench.serve.client import Address, Answer, Client, print_progress, running_server
from longspan.generation.generate import generate
from longspan.models.transformer import LanguageModel

if TYPE_CHECKING:
    from longspan.bench.serve import ServeBenchOptions

PERCENTILES = (50, 95, 99)
_SAMPLE_SECONDS = 0.5  # between two samples of the server's counters
_COUNTERS = ("decode_steps_total", "generation_tokens_total", "decode_seconds_total", "prefill_seconds_total")
Body = dict[str, Any]


@dataclass
class LoadResult:
    """What was measured at one load.

    Attributes:
        load: Requests offered, relative to what `generate` could answer.
        rate: Requests offered per second.
        requests: Requests sent.
        lost: Requests without a whole answer.
        wrong: Answers that are not the one that the same request got alone.
        seconds: From the first request to the last answer, of all rounds.
        tokens: Tokens generated.
        tokens_per_second: Of all answers together.
        generate_tokens_per_second: Of `generate` with as many prompts as slots, of mean length, reading them included;
            measured before each round, the median.
        ratio: The one relative to the other in the same round, the median.
        steady_seconds: From as long after the first request as the longest stream takes, when slots have filled, until
            the last request arrives, when they begin to empty; of all rounds. 0 if the load was too short for that.
        steady_tokens_per_second: Within that time; an event has as much of its stream's tokens as of its text.
        steady_ratio: The same relative to `generate` in the same round, the median.
        busy_slots: Mean number of choices in a decode step of that time, by the server's counters.
        decode_share: Share of that time that the device spent on decode steps.
        prefill_share: Share that it spent on prompts.
        idle_share: Share in which it had nothing to do, or waited for the host.
        client_share: Share of one core that the client took, of the whole time.
        first_token_ms: Time to the first token, by percentile.
        token_ms: Time per further token, by percentile.
        errors: Different errors.
    """

    load: float
    rate: float
    requests: int
    lost: int
    wrong: int
    seconds: float
    tokens: int
    tokens_per_second: float
    generate_tokens_per_second: float
    ratio: float
    steady_seconds: float = 0.0
    steady_tokens_per_second: float | None = None
    steady_ratio: float | None = None
    busy_slots: float | None = None
    decode_share: float | None = None
    prefill_share: float | None = None
    idle_share: float | None = None
    client_share: float | None = None
    first_token_ms: dict[int, float] = field(default_factory=dict)
    token_ms: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Sample(NamedTuple):
    """The server's counters, at a time in seconds from the beginning of the load."""

    time: float
    counters: dict[str, float]


class Sent(NamedTuple):
    """What came back under load: answers, samples of the server's counters, and seconds of CPU time of the client."""

    answers: list[Answer]
    samples: list[Sample]
    client_seconds: float


class Round(NamedTuple):
    """Answers under load, what the same requests got alone, and what was measured and offered before.

    Attributes:
        answers: The answers.
        alone: What the same requests got alone.
        raw: Tokens per second of `generate`.
        rate: Requests per second that were offered.
        samples: The server's counters under load.
        client_seconds: CPU time of the client.
    """

    answers: list[Answer]
    alone: list[Answer]
    raw: float
    rate: float
    samples: Sequence[Sample] = ()
    client_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        ends = (answer.arrived + answer.seconds for answer in self.answers)
        return max(ends) - min(answer.arrived for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Tokens of whole answers."""
        return sum(answer.tokens for answer in self.answers if not answer.error)

    @property
    def window(self) -> tuple[float, float]:
        """When the load is steady, see `LoadResult.steady_seconds`; its end is not after its start if it never is."""
        arrivals = [answer.arrived for answer in self.answers]
        longest = max((x.seconds - x.first for x in self.answers if x.first is not None and not x.error), default=0.0)
        return (min(arrivals) + longest, max(arrivals)) if longest else (0.0, 0.0)

    @property
    def steady_seconds(self) -> float:
        """Length of the window."""
        begin, end = self.window
        return max(0.0, end - begin)

    @property
    def steady_tokens(self) -> float:
        """Tokens within the window."""
        begin, end = self.window
        found = 0.0
        for answer in self.answers:
            if answer.error or not answer.events:
                continue
            inside = sum(size for after, size in answer.events if begin <= answer.arrived + after <= end)
            found += answer.tokens * inside / sum(size for _, size in answer.events)
        return found

    def change(self, name: str) -> float | None:
        """Return how much a counter of the server grew within the window, None if that is not known."""
        begin, end = self.window
        inside = [sample for sample in self.samples if begin <= sample.time <= end and name in sample.counters]
        if len(inside) < 2:
            return None
        grown = inside[-1].counters[name] - inside[0].counters[name]
        return grown * (end - begin) / (inside[-1].time - inside[0].time)


def measure(options: ServeBenchOptions, model: LanguageModel) -> Iterator[list[LoadResult]]:
    """Send different requests alone, then offer each load; `generate` is measured before each.

    Yields:
        A result for each load, after every round.

    Raises:
        ValueError: If the server does not start, or does not answer a request that nothing runs beside.
    """
    bodies = make_bodies(options, model)
    mean = fmean(body["max_tokens"] for body in bodies)
    most = options.requests + options.distinct
    limits = {"max-queue": most, "max-streams": most, "max-connections": most + 8}
    flags = {**options.server_flags(model), "slots": options.slots, "cache": options.cache, **limits}
    rounds: dict[float, list[Round]] = {}
    with running_server(flags, options.serve_arguments) as address:
        alone = asyncio.run(ask_alone(address, bodies))
        for i, (load, requests) in enumerate(_numbers(options)):
            raw = generate_rate(model, bodies, options)
            rate = load * raw / mean
            print_progress(
                f"generate, {options.slots} prompts together: {raw:,.0f} tokens/s; offering {rate:,.2f} requests/s"
            )
            order = _order(len(bodies), requests, options.seed + i)
            sent = asyncio.run(send(address, [bodies[j] for j in order], rate, options.seed + i))
            found = Round(sent.answers, [alone[j] for j in order], raw, rate, sent.samples, sent.client_seconds)
            rounds.setdefault(load, []).append(found)
            yield [summarize(load, found) for load, found in rounds.items()]


def make_bodies(options: ServeBenchOptions, model: LanguageModel) -> list[Body]:
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


def generate_rate(model: LanguageModel, bodies: Sequence[Body], options: ServeBenchOptions) -> float:
    """Return the tokens per second of `generate` at a batch of `slots`, the best of three runs after one."""
    prompt = round(fmean(len(body["prompt"]) for body in bodies))
    tokens = round(fmean(body["max_tokens"] for body in bodies))
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(int(model.config.vocab_size or 0), (options.slots, prompt), generator=generator)
    best = 0.0
    for _ in range(4):
        begun = time.perf_counter()
        generate(model, prompts, tokens)
        best = max(best, options.slots * tokens / (time.perf_counter() - begun))
    return best


async def ask_alone(address: Address, bodies: Sequence[Body]) -> list[Answer]:
    """Return the answers to requests that nothing runs beside."""
    answers = []
    async with Client(address) as client:
        for i, body in enumerate(bodies):
            print_progress(f"alone: {i + 1} of {len(bodies)}", end="\r")
            answers.append(await client.ask(body))
            if answers[-1].error:
                raise ValueError(f"the server did not answer a request that nothing ran beside: {answers[-1].error}")
    print_progress(f"alone: {len(bodies)} of {len(bodies)}")
    return answers


async def send(address: Address, bodies: Sequence[Body], rate: float, seed: int) -> Sent:
    """Send requests at random times, `rate` of them per second; return what came back."""
    rng, begun, used, done = random.Random(seed + 1), time.perf_counter(), time.process_time(), 0
    samples: list[Sample] = []

    async def ask_at(arrival: float, body: Body) -> Answer:
        nonlocal done
        await asyncio.sleep(arrival - (time.perf_counter() - begun))
        arrived = time.perf_counter() - begun
        answer = await client.ask(body)
        answer.arrived, done = arrived, done + 1
        return answer

    async def report() -> None:
        while True:
            samples.append(Sample(time.perf_counter() - begun, await client.counters()))
            await asyncio.sleep(_SAMPLE_SECONDS)
            print_progress(f"under load: {done} of {len(bodies)}", end="\r")

    async with Client(address) as client:
        arrival, tasks = 0.0, []
        for body in bodies:
            tasks.append(asyncio.create_task(ask_at(arrival, body)))
            arrival += rng.expovariate(rate)
        reporter = asyncio.create_task(report())
        answers = await asyncio.gather(*tasks)
        reporter.cancel()
        await asyncio.wait([reporter])
    print_progress(f"under load: {done} of {len(bodies)}")
    return Sent(answers, samples, time.process_time() - used)


def summarize(load: float, rounds: Sequence[Round]) -> LoadResult:
    """Return what the rounds of one load amount to."""
    answers = [answer for round in rounds for answer in round.answers]
    alone = [answer for round in rounds for answer in round.alone]
    whole = [answer for answer in answers if not answer.error]
    wrong = sum(
        not answer.error and (answer.text, answer.tokens) != (own.text, own.tokens)
        for answer, own in zip(answers, alone, strict=True)
    )
    seconds, tokens = sum(x.seconds for x in rounds), sum(x.tokens for x in rounds)
    first = [1e3 * answer.first for answer in whole if answer.first is not None]
    later = [
        1e3 * (answer.seconds - answer.first) / (answer.tokens - 1)
        for answer in whole
        if answer.first is not None and answer.tokens > 1
    ]
    steady = [x for x in rounds if x.steady_seconds > 0]
    steady_seconds = sum(x.steady_seconds for x in steady)
    steps, new, decode, prefill = (_change(steady, name) for name in _COUNTERS)
    idle = None if decode is None or prefill is None else max(0.0, 1 - (decode + prefill) / steady_seconds)
    return LoadResult(
        load=load,
        rate=median(x.rate for x in rounds),
        requests=len(answers),
        lost=len(answers) - len(whole),
        wrong=wrong,
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        generate_tokens_per_second=median(x.raw for x in rounds),
        ratio=median(x.tokens / x.seconds / x.raw for x in rounds),
        steady_seconds=steady_seconds,
        steady_tokens_per_second=sum(x.steady_tokens for x in steady) / steady_seconds if steady else None,
        steady_ratio=median(x.steady_tokens / x.steady_seconds / x.raw for x in steady) if steady else None,
        busy_slots=None if new is None or not steps else new / steps,
        decode_share=None if decode is None else decode / steady_seconds,
        prefill_share=None if prefill is None else prefill / steady_seconds,
        idle_share=idle,
        client_share=sum(x.client_seconds for x in rounds) / seconds,
        first_token_ms=percentiles(first),
        token_ms=percentiles(later),
        errors=sorted({answer.error for answer in answers if answer.error})[:10],
    )


def _change(rounds: Sequence[Round], name: str) -> float | None:
    """Return how much a counter grew in the windows of all rounds, None if that is not known."""
    found = [round.change(name) for round in rounds]
    known = [x for x in found if x is not None]
    return sum(known) if known and len(known) == len(found) else None


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return percentiles by the nearest rank."""
    ordered = sorted(values)
    return {p: ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES if ordered}


def table(results: Sequence[LoadResult]) -> TextTable:
    """Return a row for each load."""
    header = ["load", "requests/s", "requests", "lost", "wrong", "tokens/s", "of generate", "steady tokens/s"]
    header += ["of generate", "busy slots", "device idle"]
    header += [f"{name}, p{p}" for name in ("ms to first token", "ms per token") for p in PERCENTILES]
    rows = []
    for x in results:
        found = [f"{x.load:.2f}", f"{x.rate:,.1f}", str(x.requests), str(x.lost), str(x.wrong)]
        found += [f"{x.tokens_per_second:,.0f}", f"{100 * x.ratio:.0f} %", _cell(x.steady_tokens_per_second, ",.0f")]
        found += [_cell(x.steady_ratio, ".0%"), _cell(x.busy_slots, ".1f"), _cell(x.idle_share, ".0%")]
        for times in (x.first_token_ms, x.token_ms):
            found += [f"{times[p]:,.1f}" if p in times else "–" for p in PERCENTILES]
        rows.append(found)
    return TextTable(header, rows)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form).replace("%", " %")


def _numbers(options: ServeBenchOptions) -> list[tuple[float, int]]:
    """Return the load of each round, and how many requests it gets; the same number but for one."""
    loads = options.loads * options.rounds
    bounds = [round(i * options.requests / len(loads)) for i in range(len(loads) + 1)]
    return [(load, bounds[i + 1] - bounds[i]) for i, load in enumerate(loads)]


def _order(distinct: int, requests: int, seed: int) -> list[int]:
    """Return which of the different requests are sent, in a random order."""
    order = [i % distinct for i in range(requests)]
    random.Random(seed).shuffle(order)
    return order
