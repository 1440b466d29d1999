"""What a run over several subjects found, in short: peers' costs divided by ours, as a table, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from longspan.bench.report import Group, compared, quantities, remarks, table, word

Parts = Mapping[str, Sequence[Group]]  # by name: a subject, and whether it was bidirectional


def ratios(parts: Parts) -> list[dict[str, Any]]:
    """A row for each peer beside each of our mechanisms, full attention of the same run included."""
    found = []
    for part, groups in parts.items():
        # The last of its group: PyTorch's own where peers were measured, else ours.
        full = {group.case.length: group.rows[-1] for group in groups if group.mechanism == "softmax"}
        for group in groups:
            beside = [row for row in group.rows if row.subject.package != "longspan"]
            if group.mechanism != "softmax" and group.case.length in full:
                beside.append(full[group.case.length])
            for row in beside:
                found.append(
                    {
                        "part": part,
                        "length": group.case.length,
                        "ours": group.rows[0].subject.name,
                        "peer": row.subject.name,
                        "status": "ok" if row.failure is None else row.failure.status,
                        "ratios": {name: compared(row, group.rows[0], name) for name in quantities([group])},
                    }
                )
    return found


def summary(parts: Parts) -> Table:
    """The ratios of all parts side by side: above 1, ours needs less."""
    rows = ratios(parts)
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    names.sort(key=lambda name: name == "peak_mb")  # memory last
    shown = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="÷ ours: above 1, longspan needs less", title_justify="left"
    )
    for heading in ("measured", "ours", "beside"):
        shown.add_column(heading, overflow="fold")
    shown.add_column("n", justify="right")
    for name in names:
        shown.add_column(word(name), justify="right")
    for row in rows:
        values = [row["ratios"].get(name) for name in names]
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        if row["status"] != "ok":
            cells[0] = row["status"]
        shown.add_row(row["part"], row["ours"], row["peer"], str(row["length"]), *cells)
    return shown


def write(folder: Path, parts: Parts, about: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    """summary.json, and report.html: all tables, and the plots that are in the folder."""
    (folder / "summary.json").write_text(json.dumps({**about, "rows": ratios(parts)}, indent=1) + "\n")
    page = [
        "<!doctype html><meta charset=utf-8><title>longspan bench</title><h1>longspan bench</h1>",
        _html(summary(parts)),
    ]
    for part, groups in parts.items():
        page.append(f"<h2>{escape(part)}</h2><p>{escape(titles[part])}</p>{_html(table(groups))}")
        page.extend(f"<p>{escape(remark)}</p>" for remark in remarks(groups))
        if (folder / f"{part}.png").exists():
            page.append(f'<img src="{part}.png" alt="{part} over n" style="max-width:100%">')
    (folder / "report.html").write_text("\n".join(page) + "\n")


def _html(shown: Table) -> str:
    console = Console(record=True, file=StringIO(), width=200)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
