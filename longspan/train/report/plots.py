"""Plots as PNG: loss against tokens and time, and against the position in the context."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

Record = dict[str, Any]
_COLOURS = ("#0b6e99", "#c4533a", "#4a8c3f", "#8a5aa8", "#b8860b", "#3f3f3f", "#2aa198", "#d33682")


def curves(runs: Mapping[str, Sequence[Record]], against: str, levels: Mapping[str, float]) -> bytes:
    """Every run's training loss, faint, and its held-out scores with marks, against "tokens" or "seconds".

    levels: heights to draw a line at, by what they are.
    """
    figure, axes = _axes()
    bits = all(record.get("bits_per_byte") is not None for records in runs.values() for record in _trained(records))
    name, scored = ("bits_per_byte", "eval_bits_per_byte") if bits else ("loss", "eval_loss")
    for color, (label, records) in zip(_cycle(len(runs)), runs.items(), strict=True):
        trained = _trained(records)
        axes.plot([r[against] for r in trained], [r[name] for r in trained], color=color, alpha=0.35, linewidth=1)
        points = [r for r in records if r.get(scored) is not None]
        axes.plot(
            [r[against] for r in points], [r[scored] for r in points], "o-", color=color, markersize=4, label=label
        )
    for text, height in levels.items():
        axes.axhline(height, color="#777777", linestyle="--", linewidth=1)
        axes.annotate(
            f"{text} {height:.2f}", (0.995, height), xycoords=("axes fraction", "data"), ha="right", va="bottom", size=8
        )
    axes.set_xlabel("tokens trained on" if against == "tokens" else "seconds of training")
    axes.set_ylabel("bits per byte" if bits else "loss (nats)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, title="dots: held out; faint: training", title_fontsize=8, fontsize=9)
    return _png(figure)


def positions(scores: Mapping[str, Sequence[Record]]) -> bytes:
    """Mean loss of the tokens at each position in the context; each bucket stands at its middle."""
    figure, axes = _axes()
    bits = all(bucket["bits_per_byte"] is not None for buckets in scores.values() for bucket in buckets)
    for color, (label, buckets) in zip(_cycle(len(scores)), scores.items(), strict=True):
        middle = [((b["from"] + 1) * (b["to"] + 1)) ** 0.5 for b in buckets]
        heights = [b["bits_per_byte"] if bits else b["loss"] for b in buckets]
        axes.plot(middle, heights, "o-", color=color, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the context, tokens")
    axes.set_ylabel("bits per byte" if bits else "loss (nats)")
    axes.legend(frameon=False)
    return _png(figure)


def _trained(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if "loss" in record]


def _cycle(number: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(number)]


def _axes() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4.2), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _png(figure: Figure) -> bytes:
    held = io.BytesIO()
    FigureCanvasAgg(figure)  # without it a figure would look for a screen
    figure.savefig(held, format="png")
    return held.getvalue()
