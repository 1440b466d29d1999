"""What a run found: groups of rows, their ratios to ours, how they grow; as JSON, as a table and as a plot."""

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

from longspan.bench.runner import Case, Row

MEMORY = "peak_mb"
_WORDS = {"forward_backward": "fwd + bwd", MEMORY: "memory"}


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
        return {name: compared(row, self.rows[0], name) for name in quantities([self])}


def compared(row: Row, ours: Row, name: str) -> float | None:
    """A quantity of a row divided by that of ours; None where one of them has none."""
    return _ratio(_cost(row, name), _cost(ours, name))


def quantity(row: Row, name: str) -> float | None:
    """The milliseconds of a step, or the peak of memory."""
    return row.peak_mb if name == MEMORY else row.ms(name.removesuffix("_ms"))


def quantities(groups: Sequence[Group]) -> list[str]:
    """What was measured, by its name in JSON."""
    steps = dict.fromkeys(step for group in groups for row in group.rows for step in row.steps)
    return [*(f"{step}_ms" for step in steps), MEMORY]


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
    for name in quantities([group]):
        ratio = _ratio(quantity(row, name), quantity(earlier, name))
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
    # At once or not at all: whoever ends a run while it is written keeps what was there.
    partial = path.with_name(path.name + ".partial") if path.is_file() else path
    partial.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    partial.replace(path)


def table(groups: Sequence[Group]) -> Table:
    """One table, ratios first. A failure stands where its times would."""
    names = quantities(groups)
    counted = {step for group in groups for row in group.rows for run in row.runs for step in run.tokens}
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("n", justify="right")
    found.add_column("what")
    for name in names:
        found.add_column(f"{word(name)}\n÷ ours", justify="right", style="bold")
    for name in names:
        unit = "MB" if name == MEMORY else "ms"
        if name.removesuffix("_ms") in counted:
            unit = "tokens/s"
        found.add_column(f"{'peak' if name == MEMORY else word(name)}\n{unit}", justify="right")
    slowest = names[-2] if len(names) > 1 else names[-1]
    found.add_column(f"{word(slowest)}\ngrows as", justify="right")
    for group in groups:
        for place, row in enumerate(group.rows):
            length = str(group.case.length) if place == 0 else ""
            found.add_row(length, row.subject.name, *_cells(groups, group, row, names))
        found.add_section()
    return found


def plot(path: Path, groups: Sequence[Group]) -> bool:
    """Time and memory against the length, both logarithmic, as a PNG; False where there is only one length."""
    if len({group.case.length for group in groups}) < 2:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = quantities(groups)
    figure, axes = pyplot.subplots(1, len(names), figsize=(5.2 * len(names), 4.4), squeeze=False)
    lines = list(dict.fromkeys(row.subject.name for group in groups for row in group.rows))
    packages = {row.subject.name: row.subject.package for group in groups for row in group.rows}
    for name, axis in zip(names, axes[0], strict=True):
        for i, subject in enumerate(lines):
            points = [
                (group.case.length, value)
                for group in groups
                for row in group.rows
                if row.subject.name == subject and (value := _cost(row, name)) is not None
            ]
            if points:
                style = "-" if packages[subject] == "longspan" else "--"
                axis.plot(*zip(*sorted(points), strict=True), style, marker="o", label=subject, color=f"C{i % 10}")
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=word(name))
        counted = any(
            name.removesuffix("_ms") in run.tokens for group in groups for row in group.rows for run in row.runs
        )
        axis.set_ylabel("peak MB" if name == MEMORY else "ms a token" if counted else "ms")
        axis.grid(alpha=0.3, which="both")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.06 + 0.035 * math.ceil(len(lines) / 2), 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


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


def _cells(groups: Sequence[Group], group: Group, row: Row, names: list[str]) -> list[str | Text]:
    if row.failure is not None:
        return [Text(row.failure.status, style="red"), *[""] * (2 * len(names))]
    ratios = group.ratios(row)
    grown = growth(groups, group, row)
    exponent = None if grown is None else grown.get(names[-2] if len(names) > 1 else names[-1])
    return [
        *("" if ratios.get(name) is None else f"{ratios[name]:.2f}" for name in names),
        *(_shown(row, name) for name in names),
        "" if exponent is None else f"n^{exponent:.2f}",
    ]


def _cost(row: Row, name: str) -> float | None:
    """A quantity by which rows compare: a step that counts tokens may count fewer in one than in another."""
    rate = row.tokens_per_second(name.removesuffix("_ms"))
    return quantity(row, name) if rate is None else 1e3 / rate


def _shown(row: Row, name: str) -> str:
    rate = row.tokens_per_second(name.removesuffix("_ms"))
    return _three(quantity(row, name)) if rate is None else f"{rate:,.0f}"


def word(name: str) -> str:
    """A quantity as it is headed."""
    step = name.removesuffix("_ms")
    return _WORDS.get(step, step)


def _three(value: float | None) -> str:
    """Three digits or all before the point."""
    if value is None:
        return ""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else f"{value:.0f}"


def _ratio(value: float | None, ours: float | None) -> float | None:
    return None if value is None or not ours else value / ours
