"""Results of the recall benchmark: a file with one JSON object per line, and the table and the plot made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from longspan.bench import jsonl
from longspan.bench.jsonl import Row
from longspan.bench.recall.training import RecallRun
from longspan.bench.recall.variants import RECIPES, described, mechanisms
from longspan.bench.report import TextTable
from longspan.utils import write_atomically

IDENTITY = (
    *("task", "mechanism", "stage", "lr", "seed", "max_steps", "max_seconds", "spec", "layer", "score", "train"),
    *("batch_tokens", "train_tokens", "length_buckets", "solved", "precision", "gate_noise"),
)


def identify(run: RecallRun) -> Row:
    """Return what distinguishes a run from others, as JSON values."""
    recipe = run.recipe
    return {
        "task": run.task,
        "mechanism": run.mechanism,
        "stage": run.stage,
        "lr": run.lr,
        "seed": run.seed,
        "max_steps": run.steps,
        "max_seconds": run.seconds,
        "spec": json.loads(json.dumps(run.spec)),
        "layer": json.loads(json.dumps(vars(run.layer))),
        "score": described(recipe.score),
        "train": [described(task) for task in recipe.train],
        "batch_tokens": recipe.batch_tokens,
        "train_tokens": recipe.train_tokens,
        "length_buckets": recipe.length_buckets,
        "solved": recipe.solved,
        "precision": recipe.precision,
        "gate_noise": recipe.gate_noise,
    }


def key(row: Mapping[str, Any]) -> str:
    """Return the identity of a run, of its result or of what `identify` returned."""
    return json.dumps({name: row.get(name) for name in IDENTITY}, sort_keys=True)


def read(path: Path) -> list[Row]:
    """Return the results in a file."""
    rows = jsonl.read(path, "task", "mechanism", "stage", "status")
    # What older results do not state, and options that are gone, which no run had set.
    rows = [{"length_buckets": 1, "gate_noise": 0.0, **row} for row in rows]
    gone: dict[str, Any] = {"token_shift": [], "out_norm": True, "out_gate": "silu"}
    return [{**row, "layer": {k: v for k, v in row["layer"].items() if (k, v) not in gone.items()}} for row in rows]


def best_lr(rows: Iterable[Row]) -> float:
    """Return the learning rate with the highest accuracy; of equal ones that with the lowest loss."""
    finished = [row for row in rows if row["status"] == "ok"]

    def quality(row: Row) -> tuple[float, float]:
        loss = row["train_loss"]
        return row["accuracy"], -float("inf") if loss is None else -loss

    return max(finished, key=quality)["lr"]


# What the runs of a task share that may be compared.
_RECIPE = [name for name in IDENTITY if name not in ("mechanism", "lr", "seed", "spec", "max_seconds")]


def _final(rows: Iterable[Row]) -> list[Row]:
    """The final runs, of each task those with the recipe of its last one, and of each mechanism those at its best rate.

    A run that was not finite has no result.
    """
    final = [row for row in rows if row["stage"] == "final" and row["status"] == "ok" and row["train_loss"] is not None]
    last = {row["task"]: row for row in final}
    final = [row for row in final if all(row.get(name) == last[row["task"]].get(name) for name in _RECIPE)]
    # Of a run that was repeated, with another time limit, the longest counts, or the last that was not cut short.
    final.sort(key=lambda row: row["steps"] if row["stopped"] == "time" else math.inf)
    final = list({(row["task"], row["mechanism"], row["lr"], row["seed"]): row for row in final}.values())
    found: dict[tuple[str, str], dict[float, list[Row]]] = {}
    for row in final:
        found.setdefault((row["task"], row["mechanism"]), {}).setdefault(row["lr"], []).append(row)
    return [row for rates in found.values() for row in max(rates.values(), key=_mean_accuracy)]


def _names(rows: Sequence[Row]) -> list[str]:
    """The mechanisms of results, in the order of `mechanisms`."""
    known, found = list(mechanisms(2, 2, 2)), {row["mechanism"] for row in rows}
    return [name for name in known if name in found] + sorted(found.difference(known))


def _mean_accuracy(rows: Sequence[Row]) -> float:
    return fmean(row["accuracy"] for row in rows)


def table(rows: Sequence[Row]) -> TextTable:
    """Return the mean accuracy on each task, with its last recipe, of each mechanism at its best learning rate."""
    final = _final(rows)
    tasks = [task for task in RECIPES if any(row["task"] == task for row in final)]
    header, body = ["", "state, numbers"], []
    for task in tasks:
        header.append(f"{task} {next(row['score']['length'] for row in final if row['task'] == task):,}")
    for mechanism in _names(final):
        own = [row for row in final if row["mechanism"] == mechanism]
        sizes = [row["state_numbers"] for row in own if row["state_numbers"] is not None]
        state = "grows" if mechanism == "softmax" else f"{max(sizes):,}" if sizes else "–"
        cells = [_cell([row for row in own if row["task"] == task]) for task in tasks]
        body.append([mechanism, state, *cells])
    chances = [fmean(row["chance"] for row in final if row["task"] == task) for task in tasks]
    body.append(["chance", "", *(f"{100 * chance:.1f}" for chance in chances)])
    return TextTable(header, body)


def _cell(rows: Sequence[Row]) -> str:
    """The mean accuracy in percent, the range over seeds where it is wider than a point, and what was cut short."""
    if not rows:
        return "–"
    found = [100 * row["accuracy"] for row in rows]
    text = f"{fmean(found):.1f}"
    if max(found) - min(found) > 1:
        text += f" ({min(found):.0f}–{max(found):.0f})"
    return text + ("*" if any(row["stopped"] == "time" for row in rows) else "")


def plot(path: Path, rows: Sequence[Row]) -> bool:
    """Draw the accuracies of the table; False if there are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from longspan.train.plots import COLORS, plain_label, to_png

    final = _final(rows)
    tasks = [task for task in RECIPES if any(row["task"] == task for row in final)]
    if not tasks:
        return False
    names = _names(final)
    figure = Figure(figsize=(2.4 * len(tasks) + 2, 0.26 * len(names) + 1.2), dpi=144, layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        own = [row for row in final if row["task"] == task]
        for place, name in enumerate(names):
            found = [100 * row["accuracy"] for row in own if row["mechanism"] == name]
            if found:
                axes.barh(place, fmean(found), color=COLORS[0], height=0.7)
                axes.plot(found, [place] * len(found), "|", color="black", markersize=6)
        axes.axvline(100 * fmean(row["chance"] for row in own), color="gray", linestyle=":")
        axes.set_title(f"{task} {own[0]['score']['length']:,}", fontsize=9)
        axes.set_xlim(0, 102)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), [plain_label(name) for name in names], fontsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel("accuracy, %", fontsize=9)
    write_atomically(path, to_png(figure))
    return True
