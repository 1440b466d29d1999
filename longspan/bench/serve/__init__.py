"""A server under load: `longspan bench serve --model runs/demo` starts `longspan serve` and sends requests over HTTP.

Sections: `load` sends requests at random times (Poisson) and of mixed lengths, beside `generate` at the same batch.
Different ones are first sent alone; every answer under load must be the same text as the one alone, so that none is
lost and none is another's. `prefix` times the first token of a long cached prompt, `speculation` one stream with and
without it, `quantize` one stream with and without int8 weights (on a CPU).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from longspan.bench.environment import environment
from longspan.bench.report import TextTable, plot_beside
from longspan.bench.serve import latency, load
from longspan.bench.serve.latency import PrefixResult, QuantizationResult, SpeculationResult
from longspan.bench.serve.load import LoadResult
from longspan.models.checkpoint import find_checkpoint
from longspan.models.checkpoint import load as load_checkpoint
from longspan.models.transformer import LanguageModel
from longspan.utils import choose, choose_device, printable, write_atomically

SECTIONS = ("load", "prefix", "speculation", "quantize")


@dataclass(frozen=True)
class ServeBenchOptions:
    """Measure a server under load, beside `generate` at the same batch, and single streams of it."""

    model: Path
    """Checkpoint folder, or the folder of a run."""
    sections: tuple[str, ...] = SECTIONS[:3]
    """What to measure: load, prefix (the first token of a cached prompt), speculation, quantize (int8 weights)."""
    requests: int = 300
    """Number of requests, of all loads together."""
    slots: int = 8
    """Number of choices that the server decodes together, and the batch of `generate`."""
    loads: tuple[float, ...] = (0.5, 0.8, 1.2)
    """Requests per second, at random times, relative to what `generate` could answer; above 1 a queue builds up."""
    rounds: int = 1
    """How often the loads are offered in turn, each time after a measurement of `generate`."""
    prompt_tokens: tuple[int, ...] = (16, 256)
    """The fewest and the most tokens of a prompt; their logarithm is uniformly distributed."""
    max_tokens: tuple[int, ...] = (32, 512)
    """The fewest and the most tokens to generate; their logarithm is uniformly distributed."""
    prefix_tokens: int = 100_000
    """Tokens of the cached prompt."""
    distinct: int = 32
    """Number of different requests, each of which is first sent alone."""
    serve_arguments: tuple[str, ...] = ()
    """More arguments of `longspan serve`, such as --threads=2."""
    cache: str = "0"
    """Memory of the prefix cache under load. By default none, because the same prompts come again."""
    seed: int = 0
    """Seed of the requests and their times."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""
    out: Path = Path("runs/bench-serve.json")
    """The JSON file of the results; a plot of the loads is beside it."""

    def __post_init__(self) -> None:
        for name in ("requests", "slots", "distinct", "rounds", "prefix_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prompt_tokens", "max_tokens"):
            found = getattr(self, name)
            if len(found) != 2 or not 1 <= found[0] <= found[1]:
                raise ValueError(
                    f"{name} must be a smallest and a largest number of at least 1, such as 16,256, "
                    f"got {', '.join(map(str, found))}"
                )
        for section in self.sections:
            choose("section", section, SECTIONS)
        if not self.sections:
            raise ValueError(f"sections must name at least one of {', '.join(SECTIONS)}")
        if not self.loads or not all(0 < x < math.inf for x in self.loads):
            raise ValueError(f"loads must be positive numbers, got {', '.join(map(str, self.loads)) or 'none'}")
        least = self.rounds * len(self.loads)
        if self.requests < least:
            raise ValueError(f"requests must be at least {least}, one for each round of each load, got {self.requests}")
        if self.device is not None:
            choose("device", self.device, ("cpu", "cuda"))

    def server_flags(self, model: LanguageModel) -> dict[str, object]:
        """Return the flags of every server: the model, and the device that it is on here."""
        return {"model": self.model, "device": next(model.parameters()).device.type}


@dataclass
class ServeResult:
    """The results of the sections that were measured.

    Attributes:
        loads: One for each load.
        prefix: Of a cached prompt.
        speculation: One for each text.
        quantization: Of int8 weights.
    """

    loads: list[LoadResult] = field(default_factory=list)
    prefix: PrefixResult | None = None
    speculation: list[SpeculationResult] = field(default_factory=list)
    quantization: QuantizationResult | None = None

    @property
    def failed(self) -> bool:
        """Whether an answer was lost, or was not the right one."""
        return any(x.lost or x.wrong for x in self.loads) or (self.prefix is not None and not self.prefix.same)

    def tables(self) -> Iterator[TextTable]:
        """Iterate over a table for each section."""
        if self.loads:
            yield load.table(self.loads)
        if self.prefix is not None:
            yield latency.prefix_table(self.prefix)
        if self.speculation:
            yield latency.speculation_table(self.speculation)
        if self.quantization is not None:
            yield latency.quantization_table(self.quantization)


def run(options: ServeBenchOptions) -> ServeResult:
    """Start servers, send requests and print what was measured; progress goes to stderr.

    Raises:
        ValueError: If there is no such model, or a server does not start.
    """
    device = choose_device(options.device)
    about = environment(device.type)
    model, result = _load(options.model, device), ServeResult()
    for _ in _measure(options, model, result):
        _save(options, result, {**about, **_about(model)})
    _report(options, result)
    return result


def _measure(options: ServeBenchOptions, model: LanguageModel, result: ServeResult) -> Iterator[None]:
    """Fill in the result; yield whenever there is more of it."""
    if "load" in options.sections:
        for result.loads in load.measure(options, model):
            yield
    if "prefix" in options.sections:
        result.prefix = latency.measure_prefix(options, model)
        yield
    if "speculation" in options.sections:
        result.speculation = latency.measure_speculation(options, model)
        yield
    if "quantize" in options.sections:
        result.quantization = latency.measure_quantization(options, model)
        yield


def _load(folder: Path, device: torch.device) -> LanguageModel:
    try:
        model = load_checkpoint(find_checkpoint(folder), device=device)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror or error}") from None
    if not isinstance(model, LanguageModel) or not model.config.causal:
        raise ValueError(f"{folder} contains a {type(model).__name__}; a server needs a causal LanguageModel")
    return model.eval()


def _about(model: LanguageModel) -> dict[str, Any]:
    return {
        "parameters": sum(x.numel() for x in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _save(options: ServeBenchOptions, result: ServeResult, about: dict[str, Any]) -> None:
    """Write what was measured so far to the JSON file."""
    content = {
        "format": 2,
        **about,
        "options": {**asdict(options), "model": options.model.name, "out": None},
        "rows": [{"status": "ok", **asdict(x)} for x in result.loads],
        "prefix": None if result.prefix is None else asdict(result.prefix),
        "speculation": [asdict(x) for x in result.speculation],
        "quantization": None if result.quantization is None else asdict(result.quantization),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(content, indent=1).encode())


def _report(options: ServeBenchOptions, result: ServeResult) -> None:
    """Print the tables and draw the plot."""
    print("\n".join(table.markdown() for table in result.tables()))
    for error in sorted({error for x in result.loads for error in x.errors}):
        print(printable(f"error: {error}"))
    print(plot_beside(options.out, lambda path: _plot(path, result.loads)), flush=True)


def _plot(path: Path, results: list[LoadResult]) -> bool:
    """Draw throughput and the percentiles of both times over the load; False if there is none."""
    if not results:
        return False
    from matplotlib.figure import Figure

    from longspan.train.plots import to_png

    figure = Figure(figsize=(9, 3), layout="constrained")
    throughput, *times = figure.subplots(1, 3)
    loads = [x.load for x in results]
    throughput.plot(loads, [x.tokens_per_second for x in results], "o-", label="server")
    throughput.plot(loads, [x.generate_tokens_per_second for x in results], "--", label="generate")
    throughput.set(ylabel="tokens/s", ylim=(0, None))
    for axis, name, label in zip(
        times, ("first_token_ms", "token_ms"), ("ms to first token", "ms per token"), strict=True
    ):
        for p in load.PERCENTILES:
            axis.plot(loads, [getattr(x, name).get(p, math.nan) for x in results], "o-", label=f"p{p}")
        axis.set(ylabel=label, yscale="log")
    for axis in (throughput, *times):
        axis.set_xlabel("load")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    write_atomically(path, to_png(figure, dpi=150))
    return True
