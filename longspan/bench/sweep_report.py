"""The report of a sweep: ratios to full attention, cliffs, and a heat map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.bench.jsonl import Row
from longspan.bench.report import TextTable, three_digits
from longspan.bench.subjects.peers import SDPA
from longspan.utils import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = ("name", "size", "case", "machine")
STEPS = {"forward_ms": "forward", "forward_backward_ms": "forward + backward"}
SHORTEST = 2048  # tokens from which a mechanism must not be slower than full attention
FACTOR = 2.0  # by which an element may cost more than in a neighboring cell
# What neighboring cells differ in. A size may multiply the cost of an element, the others may not.
_COLUMNS = 4  # panels of the heat map side by side
_AXES = ("length", "head_dim", "num_heads", "size")


class Cliff(NamedTuple):
    """A step of a cell that takes `factor` times as long as what it is compared with, or that fails.

    Attributes:
        row: The result of the cell.
        step: A key of `STEPS`; empty for a failure.
        factor: How many times as long it takes; infinity for a failure.
        than: What it is compared with, or how it fails.
    """

    row: Row
    step: str
    factor: float
    than: str


def cell_key(row: Mapping[str, Any]) -> str:
    """Return what identifies a result: the cell, and the processor or GPU."""
    machine = row["machine"]
    where = machine["cpu"] if row["case"]["device"] == "cpu" else machine["gpu"]["name"]
    return json.dumps([row["name"], row["size"], row["case"], where], sort_keys=True)


def ratios(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return by `cell_key` of longspan's cells the time of each step, divided by that of full attention.

    Of cells that were timed from CUDA graphs too, these times are compared, here and by `find_cliffs`: they do not
    depend on the host.
    """
    rows = list(rows)
    full = {_shape_key(row): row for row in rows if row["name"] == SDPA and row["status"] == "ok"}
    found = {}
    for row in rows:
        peer = full.get(_shape_key(row))
        if row["mechanism"] is not None and row["status"] == "ok" and peer is not None:
            found[cell_key(row)] = {step: _times_as_long(row, peer, step) for step in STEPS}
    return found


def find_cliffs(rows: Sequence[Row]) -> list[Cliff]:
    """Return the cells that fail, are slower than full attention from 2048 tokens up, or than neighbors per element.

    A neighbor has the next smaller or larger measured length, head dimension, number of heads or size, and the same
    values otherwise. The batch size follows the length. A cell with twice the size may take twice as long.
    """
    own = [row for row in rows if row["mechanism"] is not None]
    to_full, found = ratios(rows), []
    for row in own:
        if row["status"] != "ok":
            found.append(Cliff(row, "", math.inf, f"{row['status']}: {row['message']}"))
            continue
        for step, ratio in to_full.get(cell_key(row), {}).items():
            if ratio > 1 and _is_long(row):
                found.append(Cliff(row, step, ratio, SDPA))
    return found + _steeper([row for row in own if row["status"] == "ok"])


def _steeper(rows: Sequence[Row]) -> list[Cliff]:
    """The cells whose elements cost more than `FACTOR` times those of a neighbor: of several, the cheapest one."""
    worst: dict[tuple[str, str], Cliff] = {}
    for axis in _AXES:
        lines: dict[str, list[Row]] = {}
        for row in rows:
            if _value(row, axis) is not None:
                lines.setdefault(_line_key(row, axis), []).append(row)
        for line in lines.values():
            line.sort(key=lambda row: _value(row, axis))
            neighbors = list(pairwise(line))
            for row, other in [*neighbors, *(pair[::-1] for pair in neighbors)]:
                allowed = max(1.0, _value(row, axis) / _value(other, axis)) if axis == "size" else 1.0
                for step in STEPS:
                    factor = _times_as_long(row, other, step) * _elements(other) / _elements(row) / allowed
                    key, than = (cell_key(row), step), f"{axis} {_value(other, axis)}, per element"
                    if factor > FACTOR and (key not in worst or worst[key].factor < factor):
                        worst[key] = Cliff(row, step, factor, than)
    return list(worst.values())


def cliff_table(cliffs: Sequence[Cliff]) -> TextTable:
    """Return a row for each cliff, the steepest first, with the implementation that ran."""
    header = [
        "",
        "batch × heads × tokens × head dim",
        "mode",
        "dtype",
        "step",
        "ms",
        "times",
        "compared with",
        "ran on",
    ]
    body = []
    for cliff in sorted(cliffs, key=lambda cliff: -cliff.factor):
        case, failed = cliff.row["case"], math.isinf(cliff.factor)
        shape = f"{case['batch_size']} × {case['num_heads']} × {case['length']} × {case['head_dim']}"
        mode = "causal" if case["causal"] else "bidirectional"
        times = ["–", "–"] if failed else [three_digits(_ms(cliff.row, cliff.step)), f"{cliff.factor:.2f}"]
        step = STEPS.get(cliff.step, "–")
        ran = cliff.row.get("implementation") or "–"
        body.append([cliff.row["name"], shape, mode, case["dtype"], step, *times, cliff.than, ran])
    return TextTable(header, body, text_columns=len(header))


def grouped_cliff_table(rows: Sequence[Row]) -> TextTable:
    """Return the cliffs of each mechanism, mode and comparison as one row: where they are, and how steep."""
    groups: dict[tuple[str, bool, str], list[Cliff]] = {}
    for cliff in find_cliffs(rows):
        kind = cliff.than if cliff.than == SDPA or not cliff.step else cliff.than.partition(" ")[0].replace("_", " ")
        groups.setdefault((cliff.row["name"], cliff.row["case"]["causal"], kind), []).append(cliff)
    header = ["", "mode", "compared with", "cells", "tokens", "head dims", "times", "ran on"]
    body = []
    for (name, causal, kind), found in groups.items():
        cases = [cliff.row["case"] for cliff in found]
        values = [sorted({case[axis] for case in cases}) for axis in ("length", "head_dim")]
        cells = str(len({cell_key(cliff.row) for cliff in found}))
        times = "–" if math.isinf(found[0].factor) else _span([cliff.factor for cliff in found])
        ran = "; ".join(dict.fromkeys(cliff.row.get("implementation") or "–" for cliff in found))
        listed = [", ".join(map(str, numbers)) for numbers in values]
        body.append([name, "causal" if causal else "bidirectional", kind, cells, *listed, times, ran])
    return TextTable(header, body, text_columns=len(header))


def summary_table(rows: Sequence[Row]) -> TextTable:
    """Return a row for each mechanism and mode: its cells, the ratios to full attention, and its cliffs."""
    found, cliffs = ratios(rows), find_cliffs(rows)
    header = ["", "mode", "cells", "forward", "forward + backward", "slower than SDPA", "over 2× a neighbor", "fails"]
    body = []
    for name, causal in dict.fromkeys((row["name"], row["case"]["causal"]) for row in rows if row["mechanism"]):
        own = [row for row in rows if (row["name"], row["case"]["causal"]) == (name, causal)]
        steep = [cliff for cliff in cliffs if (cliff.row["name"], cliff.row["case"]["causal"]) == (name, causal)]
        compared = [found[cell_key(row)] for row in own if cell_key(row) in found and _is_long(row)]
        spans = [_span([ratio[step] for ratio in compared]) for step in STEPS]
        kinds = [
            [cliff for cliff in steep if cliff.than == SDPA],
            [cliff for cliff in steep if cliff.than != SDPA and cliff.step],
            [cliff for cliff in steep if not cliff.step],
        ]
        counts = [_worst(kind) for kind in kinds]
        body.append([name, "causal" if causal else "bidirectional", str(len(own)), *spans, *counts])
    return TextTable(header, body, text_columns=2)


def speed_table(rows: Sequence[Row]) -> TextTable:
    """Return how many times as fast as full attention causal mechanisms are, forward and backward, by shape."""
    found, speeds = ratios(rows), {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if cell_key(row) in found and row["case"]["causal"] and row["case"]["head_dim"] in (64, 128):
            groups.setdefault(row["name"], []).append(row)
    for name, group in groups.items():
        for row in _most_common(group):
            case = row["case"]
            speeds[name, (case["length"], case["head_dim"])] = 1 / found[cell_key(row)]["forward_backward_ms"]
    shapes = sorted({shape for _, shape in speeds})
    body = [[name, *(_speed(speeds.get((name, shape))) for shape in shapes)] for name in groups]
    return TextTable(["tokens × head dim", *(f"{length:,} × {dim}" for length, dim in shapes)], body)


def _speed(speed: float | None) -> str:
    return "–" if speed is None else f"{speed:.{0 if speed >= 9.95 else 1}f}×"


def _is_long(row: Row) -> bool:
    return row["case"]["length"] >= SHORTEST


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2g}–{max(values):.2g}" if values else "–"


def _worst(cliffs: Sequence[Cliff]) -> str:
    """The number of cells, and the tokens and head dimension of the steepest one."""
    if not cliffs:
        return "0"
    worst = max(cliffs, key=lambda cliff: cliff.factor)
    case, count = worst.row["case"], len({cell_key(cliff.row) for cliff in cliffs})
    factor = f"{worst.factor:.2g}× at " if worst.step else ""
    return f"{count}: {factor}{case['length']} × {case['head_dim']}"


def panels(rows: Sequence[Row]) -> dict[str, list[list[float]]]:
    """Return for each mechanism and mode [tokens, head dimension, time relative to full attention] of its cells.

    Of heads, sizes and dtypes a panel has the values of most of its cells.
    """
    found = ratios(rows)
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if cell_key(row) in found:
            groups.setdefault((row["mechanism"], row["case"]["causal"]), []).append(row)
    shown = {}
    for (_, causal), group in groups.items():
        kept = _most_common(group)
        title = f"{kept[0]['name']}, {'causal' if causal else 'bidirectional'}"
        shown[title] = [
            [row["case"]["length"], row["case"]["head_dim"], round(found[cell_key(row)]["forward_backward_ms"], 3)]
            for row in kept
        ]
    return shown


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """Draw the heat map of `panels` as PNG; False if there are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from longspan.train.plots import to_png

    data = panels(rows)
    if data:
        figure = Figure(dpi=144, layout="constrained")
        draw_panels(data, figure)
        write_atomically(path, to_png(figure))
    return bool(data)


def draw_panels(data: Mapping[str, Sequence[Sequence[float]]], figure: Figure) -> None:
    """Draw `panels`: a color and a number per cell, green where the mechanism takes less time."""
    lengths, dims = (sorted({int(cell[i]) for cells in data.values() for cell in cells}) for i in (0, 1))
    columns = min(len(data), _COLUMNS)
    lines = -(-len(data) // columns)
    figure.set_size_inches(
        1.2 + max(1.7, 0.36 * len(lengths) + 0.2) * columns, 0.6 + max(1.1, 0.24 * len(dims) + 0.4) * lines
    )
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    image = None
    for axes, (title, cells) in zip(grid.flat, data.items(), strict=False):
        values = {(dims.index(int(dim)), lengths.index(int(n))): ratio for n, dim, ratio in cells}
        colors = [[math.log2(values.get((i, j), math.nan)) for j in range(len(lengths))] for i in range(len(dims))]
        image = axes.imshow(colors, cmap="RdYlGn_r", vmin=-3, vmax=3, aspect="auto", origin="lower", alpha=0.8)
        for (i, j), ratio in values.items():
            axes.text(j, i, f"{ratio:.2g}", ha="center", va="center", fontsize=6, color="#202020")
        axes.set_title(title.replace("_", " "), fontsize=6)
        axes.tick_params(bottom=False, left=False)
        axes.set_frame_on(False)
        axes.set_xticks(range(len(lengths)), [_short(n) for n in lengths], fontsize=6)
        axes.set_yticks(range(len(dims)), [str(dim) for dim in dims], fontsize=6)
    for axes in grid.flat[len(data) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens", fontsize=8)
    figure.supylabel("head dimension", fontsize=8)
    assert image is not None
    bar = figure.colorbar(image, ax=figure.axes, ticks=range(-3, 4), shrink=0.8)
    bar.ax.set_yticklabels(["≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"], fontsize=6)
    bar.set_label(f"time relative to {SDPA}", fontsize=7)


def _most_common(rows: Sequence[Row]) -> list[Row]:
    """The rows with the heads, size and dtype that most of them have; of equally common ones the first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"]["num_heads"], row["size"], row["case"]["dtype"]), []).append(row)
    return max(groups.values(), key=len)


def _short(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def _value(row: Row, axis: str) -> Any:
    return row["size"] if axis == "size" else row["case"][axis]


def _line_key(row: Row, axis: str) -> str:
    """What the cells have in common that differ in one axis only."""
    rest = {name: value for name, value in row["case"].items() if name not in ("batch_size", axis)}
    return json.dumps([row["mechanism"], None if axis == "size" else row["size"], rest], sort_keys=True)


def _shape_key(row: Row) -> str:
    return cell_key({**row, "name": "", "size": None})


def _graph(step: str) -> str:
    """The key of the same step, replayed from a CUDA graph."""
    return step.replace("_ms", "_graph_ms")


def _ms(row: Row, step: str) -> float:
    return row[_graph(step) if _graph(step) in row else step]


def _times_as_long(row: Row, other: Row, step: str) -> float:
    """The time of a step relative to that of another cell: from CUDA graphs if both were timed so."""
    key = _graph(step) if _graph(step) in row and _graph(step) in other else step
    return row[key] / other[key]


def _elements(row: Row) -> int:
    case = row["case"]
    return case["batch_size"] * case["length"] * case["num_heads"] * case["head_dim"]
