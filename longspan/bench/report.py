"""What a run found: groups of rows, their ratios to ours, how they grow; as JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from longspan.bench.measuring import Case, Row

_QUANTITIES = ("forward_ms", "forward_backward_ms", "peak_mb")


@dataclass
class Group:
    """A mechanism in one case: its variants, then its peers. Ratios refer to the first row."""

    mechanism: str
    case: Case
    rows: list[Row]

    @property
    def ours(self) -> list[Row]:
        """The rows of longspan itself."""
        return [row for row in self.rows if row.subject.package == "longspan"]

    def ratios(self, row: Row) -> dict[str, float | None]:
        """Each quantity of a row divided by that of ours: above 1, ours needs less."""
        return {name: _ratio(getattr(row, name), getattr(self.rows[0], name)) for name in _QUANTITIES}


def growth(groups: Sequence[Group], group: Group, row: Row) -> dict[str, Any] | None:
    """How a row grew since the next shorter length: exponents x of n^x, 1 being linear."""
    shorter = [
        (other.case.length, earlier)
        for other in groups
        for earlier in other.rows
        if other.mechanism == group.mechanism and earlier.subject == row.subject
        if other.case.length < group.case.length
    ]
    if not shorter:
        return None
    length, earlier = max(shorter, key=lambda found: found[0])
    exponents: dict[str, Any] = {"from": length}
    for name in _QUANTITIES:
        ratio = _ratio(getattr(row, name), getattr(earlier, name))
        exponents[name] = None if not ratio else math.log(ratio) / math.log(group.case.length / length)
    return exponents


def save(path: Path, groups: Sequence[Group], about: dict[str, Any]) -> None:
    """Everything as JSON: `about` the run, then every row with its raw samples."""
    rows = [
        {"mechanism": group.mechanism, "ratio_to": group.rows[0].subject.name}
        | row.as_dict()
        | {"ratios": group.ratios(row), "growth": growth(groups, group, row)}
        for group in groups
        for row in group.rows
    ]
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def table(groups: Sequence[Group]) -> Table:
    """One table, ratios first. A failure stands where its times would."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("n", justify="right")
    found.add_column("what")
    for name in ("forward\n÷ ours", "fwd + bwd\n÷ ours", "memory\n÷ ours"):
        found.add_column(name, justify="right", style="bold")
    for name in ("forward\nms", "fwd + bwd\nms", "peak\nMB", "fwd + bwd\ngrows as"):
        found.add_column(name, justify="right")
    for group in groups:
        for place, row in enumerate(group.rows):
            length = str(group.case.length) if place == 0 else ""
            found.add_row(length, row.subject.name, *_cells(groups, group, row))
        found.add_section()
    return found


def remarks(groups: Sequence[Group]) -> list[str]:
    """One line for each row that has no times; a peer that is not there is named once."""
    found = []
    for group in groups:
        for row in group.rows:
            if row.failure is None:
                continue
            absent = row.failure.status in ("not installed", "not supported")
            where = f"{row.subject.name}, n = {group.case.length}: {row.failure.status}: "
            found.append(("" if absent else where) + row.failure.message)
    return list(dict.fromkeys(found))


def _cells(groups: Sequence[Group], group: Group, row: Row) -> list[str | Text]:
    if row.failure is not None:
        return [Text(row.failure.status, style="red"), *[""] * 6]
    ratios = group.ratios(row)
    grown = growth(groups, group, row)
    exponent = None if grown is None else grown["forward_backward_ms"]
    return [
        *("" if ratios[name] is None else f"{ratios[name]:.2f}" for name in _QUANTITIES),
        *(_three(getattr(row, name)) for name in _QUANTITIES),
        "" if exponent is None else f"n^{exponent:.2f}",
    ]


def _three(value: float | None) -> str:
    """Three digits or all before the point."""
    if value is None:
        return ""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else f"{value:.0f}"


def _ratio(value: float | None, ours: float | None) -> float | None:
    return None if value is None or not ours else value / ours
