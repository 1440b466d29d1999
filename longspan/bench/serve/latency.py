"""One stream at a time: the first token of a cached prompt, and the speed of speculation and of int8 weights."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from longspan.bench.report import TextTable
from longspan.bench.serve.client import Address, Answer, Client, print_progress, running_server
from longspan.generation.generate import generate
from longspan.models.transformer import LanguageModel
from longspan.serve.quantize import bits_per_token, quantize_weights

if TYPE_CHECKING:
    from longspan.bench.serve import ServeBenchOptions

_REPEATS = 9
_TOKENS = 400  # that speculation is timed over
_MEASURED = 1024  # tokens that the loss of int8 weights is measured on
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


@dataclass
class QuantizationResult:
    """The speed of one stream, and the bits of a text that the model wrote, with `--quantize int8` and without.

    Attributes:
        plain_tokens_per_second: Without.
        tokens_per_second: With.
        ratio: The one relative to the other: the median over pairs of runs, one after the other.
        bits_per_token: Without.
        quantized_bits_per_token: With.
    """

    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    bits_per_token: float
    quantized_bits_per_token: float


def measure_prefix(options: ServeBenchOptions, model: LanguageModel) -> PrefixResult:
    """Measure the time to the first token of one long prompt, sent several times."""
    prompt: list[int] | str = _random_prompt(options, model)
    flags = {**options.server_flags(model), "slots": options.slots, "max-body": "64MiB"}
    if model.config.vocab_size == 256:
        prompt = "".join(chr(48 + int(x) % 64) for x in prompt)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    with running_server(flags, options.serve_arguments) as address:
        print_progress(f"a prompt of {options.prefix_tokens:,} tokens")
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
    results = []
    with _two_servers(options, model, {"speculation": "ngram"}) as addresses:
        for name, body in _texts(options, model).items():
            print_progress(f"speculation: {name}")
            answers, plain, fast, ratio = _compare(addresses, body)
            same = len({answer.text for answer in answers}) == 1
            results.append(SpeculationResult(name, plain, fast, ratio, same))
    return results


def measure_quantization(options: ServeBenchOptions, model: LanguageModel) -> QuantizationResult:
    """Time one stream of two servers in turn, one of which has int8 weights, and measure their loss.

    Raises:
        ValueError: If the model is not on a CPU.
    """
    quantized = quantize_weights(model)
    tokens = torch.tensor(generate(model, [0], _MEASURED).tokens[0])
    before, after = bits_per_token(model, tokens), bits_per_token(quantized, tokens)
    with _two_servers(options, model, {"quantize": "int8"}) as addresses:
        print_progress("int8 weights")
        _, plain, fast, ratio = _compare(addresses, _texts(options, model)["own text, temperature 0.7"])
    return QuantizationResult(plain, fast, ratio, before, after)


@contextmanager
def _two_servers(
    options: ServeBenchOptions, model: LanguageModel, flags: Mapping[str, object]
) -> Iterator[list[Address]]:
    """Run a server of one slot, and one with more flags."""
    common = {**options.server_flags(model), "slots": 1, "cache": 0}
    with (
        running_server(common, options.serve_arguments) as plain,
        running_server({**common, **flags}, options.serve_arguments) as other,
    ):
        yield [plain, other]


def _compare(addresses: list[Address], body: dict[str, Any]) -> tuple[list[Answer], float, float, float]:
    """Return the answers of two servers in turn, their tokens per second, and the ratio of these within pairs."""
    answers = asyncio.run(_ask_in_turn(addresses, [body] * (1 + _REPEATS)))[2:]
    speeds = [answer.tokens / answer.seconds for answer in answers]
    pairs = zip(speeds[::2], speeds[1::2], strict=True)
    return answers, median(speeds[::2]), median(speeds[1::2]), median(after / before for before, after in pairs)


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


def quantization_table(x: QuantizationResult) -> TextTable:
    """Return one row."""
    loss = x.quantized_bits_per_token / x.bits_per_token - 1
    header = ["one stream", "tokens/s", "with int8 weights", "ratio", "bits per token", "with int8", "loss"]
    speeds = [f"{x.plain_tokens_per_second:,.0f}", f"{x.tokens_per_second:,.0f}", f"{x.ratio:.2f}×"]
    bits = [f"{x.bits_per_token:.4f}", f"{x.quantized_bits_per_token:.4f}", f"{100 * loss:+.2f} %"]
    return TextTable(header, [["own text", *speeds, *bits]])


async def _ask_in_turn(addresses: list[Address], bodies: list[dict[str, Any]]) -> list[Answer]:
    """Send each of the requests to every server, one after another.

    Raises:
        ValueError: If there is no answer.
    """
    answers = []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(address)) for address in addresses]
        for body in bodies:
            for client in clients:
                answers.append(await client.ask(body))
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
