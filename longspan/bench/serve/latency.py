"""One stream at a time: the first token of a cached prompt, and the speed of speculation."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from longspan.bench.report import TextTable
from longspan.bench.serve.client import Address, Answer, ask, running_server, say
from longspan.models.transformer import LanguageModel

if TYPE_CHECKING:
    from longspan.bench.serve import ServeBenchOptions

_REPEATS = 9
_TOKENS = 400  # that speculation is timed over
_LINE = "    result[key] = transform(value, options=options)\n"


@dataclass
class PrefixResult:
    """What a prompt costs that the prefix cache holds.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: How many of them were not read again.
        cold_ms: Time to the first token when nothing was cached.
        hit_ms: Time to the first token with the cache: the median, and the worst of nine.
        worst_hit_ms: The worst of them.
        same: Whether all answers were the same.
    """

    prompt_tokens: int
    cached_tokens: int
    cold_ms: float
    hit_ms: float
    worst_hit_ms: float
    same: bool


@dataclass
class SpeculationResult:
    """The speed of one stream with and without `--speculation ngram`.

    Attributes:
        text: What the prompt is.
        plain_tokens_per_second: Without.
        tokens_per_second: With.
        ratio: The one relative to the other: the median over pairs of runs, one after the other.
        same: Whether the answers were the same.
    """

    text: str
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    same: bool


def measure_prefix(options: ServeBenchOptions, model: LanguageModel) -> PrefixResult:
    """Ask for the first token of one long prompt again and again."""
    prompt: list[int] | str = _random_prompt(options, model)
    flags = {**options.server_flags(model), "slots": options.slots, "max-body": "64MiB"}
    if model.config.vocab_size == 256:
        prompt = "".join(chr(48 + int(x) % 64) for x in prompt)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    with running_server(flags, options.serve_arguments) as address:
        say(f"a prompt of {options.prefix_tokens:,} tokens")
        cold, *hits = asyncio.run(_ask_in_turn([address], [body] * (1 + _REPEATS)))
    times = [_first_ms(answer) for answer in hits]
    return PrefixResult(
        prompt_tokens=options.prefix_tokens,
        cached_tokens=min(answer.cached for answer in hits),
        cold_ms=_first_ms(cold),
        hit_ms=median(times),
        worst_hit_ms=max(times),
        same=all(answer.text == cold.text for answer in hits),
    )


def measure_speculation(options: ServeBenchOptions, model: LanguageModel) -> list[SpeculationResult]:
    """Time one stream of two servers in turn, for texts that repeat themselves and others."""
    flags = {**options.server_flags(model), "slots": 1, "cache": 0}
    results = []
    with (
        running_server(flags, options.serve_arguments) as plain,
        running_server({**flags, "speculation": "ngram"}, options.serve_arguments) as guessing,
    ):
        for name, body in _texts(options, model).items():
            say(f"speculation: {name}")
            answers = asyncio.run(_ask_in_turn([plain, guessing], [body] * (1 + _REPEATS)))[2:]
            speeds = [answer.tokens / answer.seconds for answer in answers]
            pairs = list(zip(speeds[::2], speeds[1::2], strict=True))
            results.append(
                SpeculationResult(
                    text=name,
                    plain_tokens_per_second=median(speeds[::2]),
                    tokens_per_second=median(speeds[1::2]),
                    ratio=median(after / before for before, after in pairs),
                    same=len({answer.text for answer in answers}) == 1,
                )
            )
    return results


def prefix_table(x: PrefixResult) -> TextTable:
    """Return one row."""
    header = ["prompt", "cached", "first token, read, ms", "first token, cached, ms", "worst, ms"]
    cells = [f"{x.prompt_tokens:,}", f"{x.cached_tokens:,}"]
    return TextTable(header, [[*cells, *(f"{ms:,.1f}" for ms in (x.cold_ms, x.hit_ms, x.worst_hit_ms))]])


def speculation_table(results: list[SpeculationResult]) -> TextTable:
    """Return a row for each text."""
    header = ["one stream", "tokens/s", "with speculation", "ratio"]
    rows = [
        [x.text, f"{x.plain_tokens_per_second:,.0f}", f"{x.tokens_per_second:,.0f}", f"{x.ratio:.2f}×"] for x in results
    ]
    return TextTable(header, rows)


def _first_ms(answer: Answer) -> float:
    """Return the time to the first token; a token that is no text of its own comes with the end."""
    return 1e3 * (answer.seconds if answer.first is None else answer.first)


async def _ask_in_turn(addresses: list[Address], bodies: list[dict[str, Any]]) -> list[Answer]:
    """Ask every server each of the requests, one after another.

    Raises:
        ValueError: If there is no answer.
    """
    answers = []
    for body in bodies:
        for address in addresses:
            answers.append(await ask(address, body))
            if answers[-1].error:
                raise ValueError(f"the server did not answer: {answers[-1].error}")
    return answers


def _random_prompt(options: ServeBenchOptions, model: LanguageModel, size: int | None = None) -> list[int]:
    rng = random.Random(options.seed)
    return [rng.randrange(model.config.vocab_size or 0) for _ in range(size or options.prefix_tokens)]


def _texts(options: ServeBenchOptions, model: LanguageModel) -> dict[str, dict[str, Any]]:
    """Return requests by the names of their texts."""
    common = {"max_tokens": _TOKENS, "ignore_eos": True, "seed": options.seed}
    return {
        "repeated line, greedy": {"prompt": _LINE * 12, "temperature": 0, **common},
        "own text, temperature 0.7": {"prompt": "def ", "temperature": 0.7, **common},
        "random tokens, temperature 1": {"prompt": _random_prompt(options, model, 256), "temperature": 1, **common},
    }
