"""The report of `longspan linearize` as a self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.train.loggers import format_duration
from longspan.train.plots import COLORS, new_figure, plot_positions, to_png
from longspan.train.report import read_run
from longspan.utils import render_template, write_atomically


def write_linearize_report(run: Path, results: Mapping[str, Any], out: Path) -> None:
    """Write the page: curves of the stages, and what was measured of teacher and student.

    Args:
        run: The folder of the run.
        results: What `evaluate` returned, with the stages.
        out: The page.
    """
    logged = read_run(run)
    plots = {"loss of the stages": _plot_losses(logged.records)}
    if results.get("positions"):
        losses = {
            name: [bucket | {"bits_per_byte": None} for bucket in buckets]
            for name, buckets in results["positions"].items()
        }
        plots["loss by position"] = plot_positions(losses)
    if any(results.get("decode", {}).values()):
        plots["time of a token against the length of the context"] = _plot_decode(results["decode"], "ms")
        plots["memory of a sequence against the length of the context"] = _plot_decode(results["decode"], "MiB")
    page = render_template(
        "longspan.train.linearize",
        "page.html.j2",
        title=logged.name,
        plots={title: base64.b64encode(png).decode() for title, png in plots.items()},
        tables=_tables(results),
        samples=results.get("samples", []),
        settings=logged.metadata["settings"],
    )
    write_atomically(out, page)


def _tables(results: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    teacher, student = (results["perplexity"][name] for name in ("teacher", "student"))
    quality = [["", "teacher", "student", "ratio"]]
    about = f"perplexity, {results['eval_tokens']:,} tokens, windows of {results['context']:,}"
    quality.append([about, f"{teacher:.3f}", f"{student:.3f}", f"{student / teacher:.3f}"])
    alone = results.get("perplexity_without_memory")
    if alone is not None:
        quality.append(["perplexity without the memory", "", f"{alone:.3f}", f"{alone / teacher:.3f}"])
    if results.get("kept_layers"):
        quality.append(["layers that keep softmax attention", "", ", ".join(map(str, results["kept_layers"])), ""])
    for length in results.get("needle", {}).get("teacher", {}):
        row = [results["needle"][name][length] for name in ("teacher", "student")]
        quality.append([f"needle recalled in {int(length):,} tokens", *(f"{100 * x:.0f} %" for x in row), ""])
    tables = {"Quality": quality}
    if any(results.get("decode", {}).values()):
        costs = [["tokens before", "teacher, ms", "student, ms", "teacher, MiB", "student, MiB"]]
        for ours, theirs in zip(results["decode"]["student"], results["decode"]["teacher"], strict=True):
            times, sizes = (
                [f"{x[key] / unit:.2f}" for x in (theirs, ours)] for key, unit in (("ms", 1), ("bytes", 2**20))
            )
            costs.append([f"{ours['length']:,}", *times, *sizes])
        tables["A token of one sequence"] = costs
        rows = [[name, f"{x['tokens_per_second']:,.0f}"] for name, x in results["throughput"].items()]
        batch = next(iter(results["throughput"].values()))["batch"]
        tables[f"Tokens per second, {batch} sequences"] = [["", "tokens/s"], *rows]
    stages = [["stage", "tokens", "time"]]
    stages += [[x["stage"], f"{x['tokens']:,}", format_duration(x["seconds"])] for x in results["stages"]]
    tables["Training"] = stages
    return tables


def _plot_losses(records: list[dict[str, Any]]) -> bytes:
    figure, axes = new_figure()
    for color, name, label in zip(
        COLORS,
        ("transfer_loss", "divergence", "text_loss", "eval_loss"),
        ("transfer: relative error", "divergence from the teacher", "loss of the text", "held out"),
        strict=False,
    ):
        points = [(record["tokens"], record[name]) for record in records if record.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, label=label)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss, nats")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    return to_png(figure)


def _plot_decode(costs: Mapping[str, list[dict[str, float]]], unit: str) -> bytes:
    figure, axes = new_figure()
    for color, (name, rows) in zip(COLORS, costs.items(), strict=False):
        x = [row["length"] for row in rows]
        y = [row["ms"] if unit == "ms" else row["bytes"] / 2**20 for row in rows]
        axes.plot(x, y, "o-", color=color, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens before")
    axes.set_ylabel("ms per token" if unit == "ms" else "cache, MiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return to_png(figure)
