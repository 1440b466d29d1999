"""The command `longspan report`: write an HTML report of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from longspan.cli.arguments import parse, show


@dataclass(frozen=True)
class ReportFlags:
    """Write an HTML report of training runs: losses, differences of their settings, samples."""

    runs: Annotated[tuple[Path, ...], Positional, tyro.conf.arg(metavar="RUN ...")]
    """Folders of `longspan train --out`."""
    out: Path | None = None
    """The page; report.html in the folder of the first run by default."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(ReportFlags, argv, "report")
    if not flags.runs:
        raise ValueError("give the folder of a run: longspan report RUN ...")
    from longspan.train.report import read_run, write_report

    out = flags.runs[0] / "report.html" if flags.out is None else flags.out
    for path in write_report([read_run(run) for run in flags.runs], out):
        print(show(path))
