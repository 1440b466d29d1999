"""Plots as PNG, in one style: losses against tokens and time, and by position; accuracy by depth."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from longspan.utils import printable

if TYPE_CHECKING:
    from longspan.train.loggers import Record

COLORS = ("#0b6e99", "#c4533a", "#4a8c3f", "#8a5aa8", "#b8860b", "#3f3f3f", "#2aa198", "#d33682")
BASELINE_STYLE = {"color": "#777777", "linestyle": "--", "linewidth": 1}


def plot_losses(runs: Mapping[str, Sequence[Record]], against: str, baselines: Mapping[str, float]) -> bytes:
    """Plot the training loss and the held-out loss of runs.

    Args:
        runs: Records of each run, by its label.
        against: "tokens" or "seconds".
        baselines: Losses to draw a horizontal line at, by label.

    Returns:
        A PNG file.
    """
    figure, axes = new_figure()
    trained = {label: [record for record in records if "loss" in record] for label, records in runs.items()}
    bits = all(record.get("bits_per_byte") is not None for records in trained.values() for record in records)
    name = "bits_per_byte" if bits else "loss"
    for color, label in zip(cycle(COLORS), runs, strict=False):
        points = [r for r in runs[label] if r.get(f"eval_{name}") is not None]
        x, y = [r[against] for r in trained[label]], [r[name] for r in trained[label]]
        axes.plot(x, y, color=color, alpha=0.35, linewidth=1)
        x, y = [r[against] for r in points], [r[f"eval_{name}"] for r in points]
        axes.plot(x, y, "o-", color=color, markersize=4, label=plain_label(label))
    for text, height in baselines.items():
        axes.axhline(height, **BASELINE_STYLE)
        position: Any = {"xy": (0.995, height), "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(f"{text} {height:.2f}", size=8, **position)
    axes.set_xlabel("training tokens" if against == "tokens" else "training time, seconds")
    axes.set_ylabel("bits per byte" if bits else "loss, nats")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, title="dots: held out; faint: training", title_fontsize=8, fontsize=9)
    return to_png(figure)


def plot_positions(losses: Mapping[str, Sequence[Record]]) -> bytes:
    """Plot mean losses by position in the context, each bucket at its geometric mean."""
    figure, axes = new_figure()
    bits = all(bucket["bits_per_byte"] is not None for buckets in losses.values() for bucket in buckets)
    for color, (label, buckets) in zip(cycle(COLORS), losses.items(), strict=False):
        x = [((b["from"] + 1) * (b["to"] + 1)) ** 0.5 for b in buckets]
        y = [b["bits_per_byte" if bits else "loss"] for b in buckets]
        axes.plot(x, y, "o-", color=color, markersize=4, label=plain_label(label))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the context, tokens")
    axes.set_ylabel("bits per byte" if bits else "loss, nats")
    axes.legend(frameon=False)
    return to_png(figure)


def plot_depths(depths: Mapping[str, Sequence[Record]], chance: float, length: int) -> bytes:
    """Plot the accuracy of mechanisms by the depth of the needle, in percent of `length` tokens."""
    figure, axes = new_figure()
    for color, (label, intervals) in zip(cycle(COLORS), depths.items(), strict=False):
        parts = [part for part in intervals if part["accuracy"] is not None]
        x, y = [50 * (part["from"] + part["to"]) for part in parts], [100 * part["accuracy"] for part in parts]
        axes.plot(x, y, "o-", color=color, markersize=4, label=plain_label(label))
    axes.axhline(100 * chance, **BASELINE_STYLE, label="chance")
    axes.set_xlabel(f"depth of the needle, % of {length} tokens (100: directly before the query)")
    axes.set_ylabel("accuracy, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 102)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return to_png(figure)


def plot_confusion(confusion: Sequence[Sequence[int]], names: Sequence[str]) -> bytes:
    """Plot a confusion matrix: rows are the actual classes, columns the predicted ones, shades shares of a row."""
    figure, axes = new_figure()
    counts = np.array(confusion)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.grid(False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    labels = [plain_label(name) for name in names]
    if len(names) <= 40:
        axes.set_xticks(range(len(names)), labels, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), labels)
    if len(names) <= 20:
        for i, row in enumerate(counts.tolist()):
            for j, number in enumerate(row):
                axes.text(
                    j, i, f"{number:,}", ha="center", va="center", color="white" if shares[i, j] > 0.5 else "black"
                )
    axes.set_xlabel("predicted")
    axes.set_ylabel("actual")
    return to_png(figure)


def plain_label(text: str) -> str:
    """Return a label that matplotlib shows as it is: not as a formula, and in the legend whatever it begins with."""
    shown = printable(text).replace("\n", "\\n").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def new_figure() -> tuple[Figure, Any]:
    """Return a figure in the style of all plots, and its axes."""
    figure = Figure(figsize=(7, 4.2), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def to_png(figure: Figure, dpi: float | None = None) -> bytes:
    """Render a figure without a display, at its own resolution unless `dpi` is given."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi="figure" if dpi is None else dpi)
    return file.getvalue()
