"""`longspan bench`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, Positional

from longspan.bench import BenchOptions, failed, run
from longspan.bench.options import SUBJECTS, SUITES
from longspan.cli.arguments import parse
from longspan.utils import choose

APPENDING = ("host", "quality", "recall", "sweep")  # subjects with options of their own


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
    if argv and argv[0] in APPENDING:
        _append_results(argv[0], argv[1:])
        return
    if argv and argv[0] == "serve":
        _serve(argv[1:])
        return
    flags = parse(BenchFlags, _with_compile_mode(argv), "bench")
    choose("subject", flags.subject, [*SUBJECTS, *SUITES, "tables", *APPENDING, "serve"])
    if flags.subject == "tables":
        from longspan.bench.tables import update

        update(Path.cwd())
        return
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(BenchOptions)}
    values["causal"] = flags.causal if flags.causal or flags.bidirectional else None
    try:
        results = run(BenchOptions(**values))
    except KeyboardInterrupt:
        print("longspan: interrupted; results measured before are written", file=sys.stderr)
        raise SystemExit(130) from None
    if failed(results):
        raise SystemExit(1)


def _append_results(subject: str, argv: Sequence[str]) -> None:
    from longspan.bench import host, quality, recall, sweep

    try:
        if subject == "host":
            host.run(parse(host.HostOptions, argv, "bench host"))
        elif subject == "quality":
            quality.run(parse(quality.QualityOptions, argv, "bench quality"))
        elif subject == "recall":
            recall.run(parse(recall.RecallOptions, argv, "bench recall"))
        else:
            sweep.run(parse(sweep.SweepOptions, argv, "bench sweep"))
    except KeyboardInterrupt:
        print("longspan: interrupted; the results measured before are written", file=sys.stderr)
        raise SystemExit(130) from None


def _serve(argv: Sequence[str]) -> None:
    from longspan.bench import serve

    try:
        result = serve.run(parse(serve.ServeBenchOptions, argv, "bench serve"))
    except KeyboardInterrupt:
        print("longspan: interrupted; the results of finished rounds are written", file=sys.stderr)
        raise SystemExit(130) from None
    if result.failed:
        raise SystemExit(1)


def _with_compile_mode(argv: Sequence[str]) -> list[str]:
    """The words with --compile as --compile=default where it has no value, and --no-compile as --compile=off."""
    words = []
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        bare = word == "--compile" and following.startswith("--")
        words.append("--compile=default" if bare else "--compile=off" if word == "--no-compile" else word)
    return words
