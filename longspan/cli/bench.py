"""The command `longspan bench`: run benchmarks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional

from longspan.bench import BenchOptions, failed, run
from longspan.bench.options import SUBJECTS, SUITES
from longspan.cli.arguments import parse
from longspan.utils import choose

SEPARATE = ("host", "quality", "recall", "serve", "sweep")  # subjects with options of their own


@dataclass(frozen=True)
class BenchFlags(BenchOptions):
    """Measure mechanisms, layers and models against other packages: time, memory and ratios in the same run.

    Each measurement runs in its own process, after a check of its results.
    """

    subject: Annotated[str, Positional, tyro.conf.arg(metavar="SUBJECT")] = "mechanisms"
    """mechanisms, layers, train, generate, decode or compile; all: all of these; gpu: the GPU suite; tables: update
    the tables in the documents from results. `longspan bench sweep`, `longspan bench host`, `longspan bench quality`,
    `longspan bench recall` and `longspan bench serve` have options of their own."""
    causal: FlagCreatePairsOff[bool] = False
    """Causal attention, the default; the suite "all" measures both."""
    bidirectional: FlagCreatePairsOff[bool] = False
    """Bidirectional attention."""

    def __post_init__(self) -> None:
        """Skip the checks of `BenchOptions`: `causal` is not final."""
        if self.causal and self.bidirectional:
            raise ValueError("--causal and --bidirectional exclude each other: give one of them")


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    try:
        failure = _run(argv)
    except KeyboardInterrupt:
        print("longspan: interrupted; results measured before are written", file=sys.stderr)
        raise SystemExit(130) from None
    if failure:
        raise SystemExit(1)


def _run(argv: Sequence[str]) -> bool:
    """Run a benchmark; return whether a result is wrong."""
    if argv and argv[0] in SEPARATE:
        from longspan.bench import host, quality, recall, serve, sweep

        runs: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "host": (host.HostOptions, host.run),
            "quality": (quality.QualityOptions, quality.run),
            "recall": (recall.RecallOptions, recall.run),
            "serve": (serve.ServeBenchOptions, serve.run),
            "sweep": (sweep.SweepOptions, sweep.run),
        }
        options, start = runs[argv[0]]
        result = start(parse(options, argv[1:], f"bench {argv[0]}"))
        return isinstance(result, serve.ServeResult) and result.failed
    flags = parse(BenchFlags, _with_compile_mode(argv), "bench")
    choose("subject", flags.subject, [*SUBJECTS, *SUITES, "tables", *SEPARATE])
    if flags.subject == "tables":
        from longspan.bench.tables import update

        update(Path.cwd())
        return False
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(BenchOptions)}
    values["causal"] = flags.causal if flags.causal or flags.bidirectional else None
    return failed(run(BenchOptions(**values)))


def _with_compile_mode(argv: Sequence[str]) -> list[str]:
    """The words with --compile as --compile=default where it has no value, and --no-compile as --compile=off."""
    words = []
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        bare = word == "--compile" and following.startswith("--")
        words.append("--compile=default" if bare else "--compile=off" if word == "--no-compile" else word)
    return words
