"""What a sweep shows: ratios to full attention, cliffs, and a heat map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from longspan.bench.jsonl import Row
from longspan.bench.report import TextTable, three_digits
from longspan.bench.subjects.peers import SDPA
from longspan.utils import write_atomically

KEY = ("name", "size", "case", "machine")
STEPS = {"forward_ms": "forward", "forward_backward_ms": "forward + backward"}
SHORTEST = 2048  # tokens from which a mechanism must not be slower than full attention
FACTOR = 2.0  # by which an element may cost more than in a neighboring cell
# What neighboring cells differ in. A size may multiply the cost of an element, the others may not.
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
    """Return by `cell_key` of longspan's cells the time of each step, divided by that of full attention."""
    rows = list(rows)
    full = {_shape_key(row): row for row in rows if row["name"] == SDPA and row["status"] == "ok"}
    found = {}
    for row in rows:
        peer = full.get(_shape_key(row))
        if row["mechanism"] is not None and row["status"] == "ok" and peer is not None:
            found[cell_key(row)] = {step: row[step] / peer[step] for step in STEPS}
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
            if ratio > 1 and row["case"]["length"] >= SHORTEST:
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
                    factor = _per_element(row, step) / _per_element(other, step) / allowed
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
        times = ["–", "–"] if failed else [three_digits(cliff.row[cliff.step]), f"{cliff.factor:.2f}"]
        step = STEPS.get(cliff.step, "–")
        ran = cliff.row.get("implementation") or "–"
        body.append([cliff.row["name"], shape, mode, case["dtype"], step, *times, cliff.than, ran])
    return TextTable(header, body, text_columns=len(header))


def draw(path: Path, rows: Sequence[Row], step: str = "forward_backward_ms") -> bool:
    """Draw the ratios to full attention over lengths and head dimensions, a panel per mechanism and mode.

    Of the other axes a panel shows the values that most of its cells have. False if there are no ratios.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from longspan.train.report.plots import plain_label, to_png

    found = ratios(rows)
    panels: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row["mechanism"] is not None and cell_key(row) in found:
            panels.setdefault((row["mechanism"], row["case"]["causal"]), []).append(row)
    if not panels:
        return False
    names = list(dict.fromkeys(name for name, _ in panels))
    modes = [causal for causal in (True, False) if any(mode == causal for _, mode in panels)]
    kept = {key: _most_common(panel) for key, panel in panels.items()}
    cells = [row for panel in kept.values() for row in panel]
    lengths, dims = (sorted({row["case"][name] for row in cells}) for name in ("length", "head_dim"))
    size = 1.6 + max(2.6, 0.42 * len(lengths) + 0.4) * len(modes), 0.8 + (0.26 * len(dims) + 0.5) * len(names)
    figure = Figure(figsize=size, dpi=144, layout="constrained")
    image = None
    for axes_row, name in zip(figure.subplots(len(names), len(modes), squeeze=False), names, strict=True):
        for axes, causal in zip(axes_row, modes, strict=True):
            values = {
                (dims.index(row["case"]["head_dim"]), lengths.index(row["case"]["length"])): found[cell_key(row)][step]
                for row in kept.get((name, causal), [])
            }
            grid = [[math.log2(values.get((i, j), math.nan)) for j in range(len(lengths))] for i in range(len(dims))]
            image = axes.imshow(grid, cmap="RdYlGn_r", vmin=-3, vmax=3, aspect="auto", origin="lower")
            for (i, j), value in values.items():
                axes.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=5.5)
            label = kept[name, causal][0]["name"] if (name, causal) in kept else name
            axes.set_title(plain_label(f"{label}, {'causal' if causal else 'bidirectional'}"), fontsize=8)
            axes.set_xticks(range(len(lengths)), [_short(n) for n in lengths], fontsize=6)
            axes.set_yticks(range(len(dims)), [str(dim) for dim in dims], fontsize=6)
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("head dimension", fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=figure.axes, ticks=range(-3, 4), shrink=0.6)
    bar.ax.set_yticklabels(["≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"], fontsize=6)
    bar.set_label(f"{STEPS[step]}: time relative to {SDPA}", fontsize=8)
    write_atomically(path, to_png(figure))
    return True


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


def _per_element(row: Row, step: str) -> float:
    case = row["case"]
    elements = case["batch_size"] * case["length"] * case["num_heads"] * case["head_dim"]
    return row[step] / elements
