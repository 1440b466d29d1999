"""Results of a run: comparisons with their ratios and scaling, as JSON, text tables, plots and an HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from longspan.bench.runner import SubjectResult
from longspan.bench.subjects.base import Case
from longspan.utils import printable, render_template, write_atomically

PEAK = "peak_mb"
RATIO = "ratio: relative to the first row of each comparison; above 1, longspan needs less"


class TextTable(NamedTuple):
    """A header and rows of cells. All columns but the first `text_columns` are aligned to the right."""

    header: list[str]
    rows: list[list[str]]
    text_columns: int = 1

    def markdown(self) -> str:
        """Return a Markdown table with padded cells."""
        widths = [max(len(cell) for cell in column) for column in zip(self.header, *self.rows, strict=True)]
        rule = ["-" * width if i < self.text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.ljust(width) if i < self.text_columns else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "| " + " | ".join(padded) + " |\n"

        return "".join(map(line, [self.header, rule, *self.rows]))


@dataclass
class Comparison:
    """The results of several subjects in one case. Ratios refer to the first, which is longspan's."""

    mechanism: str
    case: Case
    results: list[SubjectResult]

    def ratio(self, result: SubjectResult, quantity: str) -> float | None:
        """Return a quantity divided by that of the first result; None if one of them is missing."""
        return _ratio(_cost(result, quantity), _cost(self.results[0], quantity))

    def ratios(self, result: SubjectResult) -> dict[str, float | None]:
        """Return the ratio of every quantity."""
        return {quantity: self.ratio(result, quantity) for quantity in quantities([self])}


Comparisons = Sequence[Comparison]


def quantities(comparisons: Comparisons) -> list[str]:
    """Return the names of the measured quantities in JSON, peak memory last."""
    steps = dict.fromkeys(step for each in comparisons for result in each.results for step in result.steps)
    return [*(f"{step}_ms" for step in steps), PEAK]


def scaling(comparisons: Comparisons, comparison: Comparison, result: SubjectResult) -> dict[str, Any] | None:
    """Return the exponents x of n^x by which quantities grew from the next shorter length; 1 is linear."""
    shorter = [
        (other.case.length, earlier)
        for other in comparisons
        for earlier in other.results
        if other.mechanism == comparison.mechanism and earlier.subject == result.subject
        if other.case.length < comparison.case.length and _without_length(other) == _without_length(comparison)
    ]
    if not shorter:
        return None
    length, earlier = max(shorter, key=lambda pair: pair[0])
    exponents: dict[str, Any] = {"from": length}
    for quantity in quantities([comparison]):
        ratio = _ratio(_value(result, quantity), _value(earlier, quantity))
        exponents[quantity] = math.log(ratio) / math.log(comparison.case.length / length) if ratio else None
    return exponents


def save(path: Path, comparisons: Comparisons, about: Mapping[str, Any]) -> None:
    """Write a results file: the metadata `about` of the run, then every result with its samples."""
    rows = [
        {"mechanism": each.mechanism, "ratio_to": each.results[0].subject.name}
        | result.as_dict()
        | {"ratios": each.ratios(result), "scaling": scaling(comparisons, each, result)}
        for each in comparisons
        for result in each.results
        if result.measurements
    ]
    write_atomically(path, json.dumps({**about, "rows": rows}, indent=1) + "\n")


def table(comparisons: Comparisons) -> TextTable:
    """Return all results: each quantity with its ratio. A failure is shown instead of the first quantity."""
    names = quantities(comparisons)
    last_step = names[-2] if len(names) > 1 else names[-1]
    header = ["shape", "subject"]
    for name in names:
        header += [_heading(comparisons, name), "ratio"]
    rows = []
    for each in comparisons:
        for result in each.results:
            cells = [shape(each.case), result.subject.name]
            for name in names:
                cells += [_shown(result, name), _two_digits(each.ratio(result, name))]
            if result.failure is not None:
                cells[2] = result.failure.status
            exponent = (scaling(comparisons, each, result) or {}).get(last_step)
            rows.append([*cells, "" if exponent is None else f"n^{exponent:.2f}"])
    return TextTable([*header, f"{_step_name(last_step)} scaling"], rows, text_columns=2)


def remarks(comparisons: Comparisons) -> list[str]:
    """Return one line for each failure; a missing package is named once."""
    found = []
    for each in comparisons:
        for result in each.results:
            if result.failure is not None:
                absent = result.failure.status in ("not installed", "not supported")
                where = f"{result.subject.name}, {shape(each.case)}: {result.failure.status}: "
                found.append(("" if absent else where) + result.failure.message)
    return list(dict.fromkeys(found))


def plot(path: Path, comparisons: Comparisons) -> bool:
    """Plot time and memory against the length as PNG; return False if cases do not differ in length, and only in it."""
    if len({each.case.length for each in comparisons}) < 2 or len(set(map(_without_length, comparisons))) > 1:
        return False
    from matplotlib.figure import Figure

    from longspan.train.plots import COLORS, plain_label, to_png

    names = quantities(comparisons)
    figure = Figure(figsize=(5.2 * len(names), 5.6), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    subjects = {result.subject.name: result.subject.package for each in comparisons for result in each.results}
    for name, axis in zip(names, axes, strict=True):
        for color, (subject, package) in zip(cycle(COLORS), subjects.items(), strict=False):
            points = [
                (each.case.length, cost)
                for each in comparisons
                for result in each.results
                if result.subject.name == subject and (cost := _cost(result, name)) is not None
            ]
            if points:
                style = "-" if package == "longspan" else "--"
                axis.plot(
                    *zip(*sorted(points), strict=True), style, marker="o", label=plain_label(subject), color=color
                )
        unit = "MB" if name == PEAK else "ms/token" if _counts_tokens(comparisons, name) else "ms"
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, title=_step_name(name))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    write_atomically(path, to_png(figure, dpi=120))
    return True


def plot_beside(out: Path, draw: Callable[[Path], bool]) -> str:
    """Draw the plot of a results file, if there is one to draw, and return where both were written."""
    picture = out.with_suffix(".png")
    try:
        written = f"{out} and {picture}" if draw(picture) else str(out)
    except ImportError as error:
        written = f"{out}, without a plot: {error}; pip install 'longspan[train]'"
    return printable(f"written to {written}")


def summary(results: Mapping[str, Comparisons]) -> list[dict[str, Any]]:
    """Return the ratios of every peer, and of full attention of the same section, by section."""
    rows = []
    for section, comparisons in results.items():
        # The last result of a comparison is PyTorch's own if peers are measured.
        full = {each.case: each.results[-1] for each in comparisons if each.mechanism == "softmax"}
        for each in comparisons:
            others = [result for result in each.results if result.subject.package != "longspan"] or each.results[1:]
            extra = full.get(each.case)
            if each.mechanism != "softmax" and extra and extra.subject not in [other.subject for other in others]:
                others.append(extra)
            rows += [
                {
                    "section": section,
                    "shape": shape(each.case),
                    "length": each.case.length,
                    "subject": each.results[0].subject.name,
                    "peer": other.subject.name,
                    "status": "ok" if other.failure is None else other.failure.status,
                    "ratios": each.ratios(other),
                }
                for other in others
            ]
    return rows


def summary_table(results: Mapping[str, Comparisons]) -> TextTable:
    """Return the ratios of all sections side by side."""
    rows = summary(results)
    names = sorted(dict.fromkeys(name for row in rows for name in row["ratios"]), key=lambda name: name == PEAK)
    cells = []
    for row in rows:
        ratios = [_two_digits(row["ratios"].get(name)) for name in names]
        if row["status"] != "ok":
            ratios[0] = row["status"]
        cells.append([row["section"], row["subject"], row["peer"], row["shape"], *ratios])
    return TextTable(["section", "subject", "peer", "shape", *map(_step_name, names)], cells, text_columns=4)


def write_page(
    folder: Path, results: Mapping[str, Comparisons], about: Mapping[str, Any], titles: Mapping[str, str]
) -> None:
    """Write summary.json and report.html: all tables, and the plots found in the folder."""
    write_atomically(folder / "summary.json", json.dumps({**about, "rows": summary(results)}, indent=1) + "\n")
    sections = [
        {
            "name": name,
            "title": titles[name],
            "table": table(comparisons),
            "remarks": remarks(comparisons),
            "plot": f"{name}.png" if (folder / f"{name}.png").exists() else None,
        }
        for name, comparisons in results.items()
    ]
    values = {"summary": summary_table(results), "note": RATIO, "sections": sections, "about": about}
    write_atomically(folder / "report.html", render_template("longspan.bench", "report.html.j2", **values))


def shape(case: Case) -> str:
    """Return batch × heads × tokens × head dimension, and the depth of a model."""
    sizes = f"{case.batch_size}×{case.num_heads}×{case.length}×{case.head_dim}"
    return sizes if case.depth == 1 else f"{sizes}, {case.depth} layers"


def _without_length(comparison: Comparison) -> Case:
    return replace(comparison.case, length=0)


def _value(result: SubjectResult, quantity: str) -> float | None:
    return result.peak_mb if quantity == PEAK else result.ms(quantity.removesuffix("_ms"))


def _cost(result: SubjectResult, quantity: str) -> float | None:
    """A quantity per token if the step counts tokens: subjects may process different numbers of them."""
    rate = result.tokens_per_second(quantity.removesuffix("_ms"))
    return _value(result, quantity) if rate is None else 1e3 / rate


def _counts_tokens(comparisons: Comparisons, quantity: str) -> bool:
    step = quantity.removesuffix("_ms")
    return any(step in m.tokens for each in comparisons for result in each.results for m in result.measurements)


def _heading(comparisons: Comparisons, quantity: str) -> str:
    if quantity == PEAK:
        return "peak MB"
    return f"{_step_name(quantity)} {'tokens/s' if _counts_tokens(comparisons, quantity) else 'ms'}"


def _step_name(quantity: str) -> str:
    step = quantity.removesuffix("_ms")
    names = {"forward_backward": "fwd + bwd", "forward_backward_graph": "fwd + bwd, graph", PEAK: "memory"}
    return names.get(step, step.replace("_graph", ", graph"))


def _shown(result: SubjectResult, quantity: str) -> str:
    rate = result.tokens_per_second(quantity.removesuffix("_ms"))
    return three_digits(_value(result, quantity)) if rate is None else f"{rate:,.0f}"


def three_digits(value: float | None) -> str:
    """Return a number with three significant digits, but never fewer than those before the point."""
    if value is None:
        return ""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else f"{value:.0f}"


def _two_digits(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference
