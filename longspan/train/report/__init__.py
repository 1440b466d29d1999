"""A page about one run or several: curves, figures, differences, samples; one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.train.config import differences
from longspan.train.loggers import METRICS, SAMPLES, clock, read_records
from longspan.train.report.plots import curves
from longspan.train.setup import RUN

Record = dict[str, Any]
_AGAINST = ("tokens", "seconds")


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    name: str
    about: Record
    records: list[Record]
    samples: list[Record]

    @property
    def last(self) -> Record:
        return next((r for r in reversed(self.records) if "loss" in r), {})

    @property
    def score(self) -> Record:
        return next((r for r in reversed(self.records) if "eval_loss" in r), {})


def read(folder: Path) -> Run:
    """The run in `folder`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run {folder}: give folders that `longspan train --out` made")
    try:
        about = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no {RUN}: it is not a folder that `longspan train --out` made") from None
    records = read_records(folder / METRICS)
    if not records:
        raise ValueError(f"{folder} has no metrics yet: train for a few steps first")
    return Run(folder.name, about, records, read_records(folder / SAMPLES))


def write_report(runs: Sequence[Run], out: Path) -> list[Path]:
    """The page, and each of its plots as a PNG beside it; what was written, the page first."""
    named = _named(runs)
    levels = {}
    unigram = {run.about["data"]["unigram_bits_per_byte"] for run in runs}
    if len(unigram) == 1 and None not in unigram:
        levels["letter frequencies alone"] = float(next(iter(unigram)))
    out.parent.mkdir(parents=True, exist_ok=True)
    written, images = [out], []
    for against in _AGAINST:
        png = curves({name: run.records for name, run in named.items()}, against, levels)
        path = out.with_name(f"{out.stem}-{against}.png")
        path.write_bytes(png)
        written.append(path)
        images.append(f'<img alt="loss against {against}" src="data:image/png;base64,{_encoded(png)}">')
    parts = [
        f"<h1>{html.escape(', '.join(named))}</h1>",
        f'<div class="plots">{"".join(images)}</div>',
        "<h2>Figures</h2>",
        _table(_figures(named)),
    ]
    if len(named) > 1:
        parts += ["<h2>What differs</h2>", _table(_differences(named))]
    parts += ["<h2>Samples</h2>", *(_samples(name, run) for name, run in named.items())]
    parts += ["<h2>Settings</h2>", *(_settings(name, run) for name, run in named.items())]
    out.write_text(_PAGE.format(title=html.escape(", ".join(named)), body="\n".join(parts)), encoding="utf-8")
    return written


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by name; those of one name are told apart by a number."""
    named: dict[str, Run] = {}
    for run in runs:
        name, number = run.name, 2
        while name in named:
            name, number = f"{run.name} ({number})", number + 1
        named[name] = run
    return named


def _figures(named: dict[str, Run]) -> list[list[str]]:
    head = ["run", "held out", "bits per byte", "letter frequencies alone", "steps", "tokens", "time", "tokens/s"]
    rows = [[*head, "memory", "parameters", "device", "data (SHA-256)"]]
    for name, run in named.items():
        last, score, data = run.last, run.score, run.about["data"]
        seconds = max(last.get("seconds", 0.0), 1e-9)
        cells = [
            name,
            _number(score.get("eval_loss"), "{:.4f} nats"),
            _number(score.get("eval_bits_per_byte"), "{:.4f}"),
            _number(data["unigram_bits_per_byte"], "{:.4f}"),
            _number(last.get("step"), "{:,}"),
            _number(last.get("tokens"), "{:,}"),
            clock(seconds),
            f"{last.get('tokens', 0) / seconds:,.0f}",
            _number(last.get("memory", 0) / 2**20, "{:,.0f} MiB"),
            f"{run.about['parameters']:,}",
            f"{run.about['device']}, {run.about['precision']}",
            data["sha256"][:16],
        ]
        if score.get("eval_accuracy") is not None:
            cells[1] += f", {score['eval_accuracy']:.1%} right"
        rows.append(cells)
    return [list(column) for column in zip(*rows, strict=True)]


def _differences(named: dict[str, Run]) -> list[list[str]]:
    names = list(named)
    first = named[names[0]].about["settings"]
    fields: list[str] = []
    for name in names[1:]:
        fields += [f for f in differences(first, named[name].about["settings"]) if f not in fields]
    rows = [["setting", *names]]
    for field in sorted(fields):
        rows.append([field, *(_value(named[name].about["settings"], field) for name in names)])
    return rows


def _value(settings: Record, field: str) -> str:
    value: Any = settings
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return json.dumps(value)


def _samples(name: str, run: Run) -> str:
    if not run.samples:
        return f"<p>{html.escape(name)} drew no samples.</p>"
    last = run.samples[-1]
    text = f"<b>{html.escape(last['prompt'])}</b>{html.escape(last['text'])}"
    earlier = "".join(
        f"<details><summary>after step {sample['step']}</summary>"
        f"<pre><b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}</pre></details>"
        for sample in run.samples[:-1]
    )
    return f"<h3>{html.escape(name)}, step {last['step']}</h3><pre>{text}</pre>{earlier}"


def _settings(name: str, run: Run) -> str:
    about = {key: value for key, value in run.about.items() if key != "settings"}
    text = html.escape(json.dumps({"settings": run.about["settings"], **about}, indent=1))
    return f"<details><summary>{html.escape(name)}</summary><pre>{text}</pre></details>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        first, *rest = (html.escape(cell) for cell in cells)
        return f"<tr><th>{first}</th>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in rest) + "</tr>"

    head, *body = rows
    return f'<div class="wide"><table>{line(head, "th")}{"".join(line(row, "td") for row in body)}</table></div>'


def _number(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def _encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2rem; }} h3 {{ font-size: 1rem; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1rem; }} .plots img {{ flex: 1 1 24rem; min-width: 0; width: 100%; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }}
td {{ font-variant-numeric: tabular-nums; }}
pre {{ background: #f6f6f4; padding: .8rem; overflow-x: auto; white-space: pre-wrap; font-size: .85rem; }}
</style></head><body>
{body}
</body></html>
"""
