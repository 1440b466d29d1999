"""Writes the README's tables of figures from `benchmarks/results/`: `python benchmarks/tables.py`.

A table stands between `<!-- figures: name -->` and `<!-- end -->`; nobody types one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


def quality() -> str:
    rows = [row for row in _read("h200-quality")["rows"] if "bits_per_byte" in row]
    return _table(
        ["context", "parameters", "bits per byte, held out", "tokens a second"],
        [
            [
                f"{row['context']:,}",
                f"{row['parameters'] / 1e6:.1f} M",
                f"{row['bits_per_byte']:.3f}",
                f"{row['tokens_per_second'] / 1e6:.2f} M",
            ]
            for row in rows
        ],
    )


def training() -> str:
    rows = _read("h200-training-step")["rows"]
    return _table(
        ["19 M-parameter model", "batch × tokens", "torch.compile", "tokens a second"],
        [
            [row["model"], row["shape"].replace("x", " × "), row["mode"], f"{row['tokens_per_second'] / 1e6:.2f} M"]
            for row in rows
        ],
    )


def generation() -> str:
    rows = _read("h200-generate")["rows"]
    return _table(
        [
            "model",
            "ms a token after 512",
            "after 1,000,000",
            "tokens a second, batch 256",
            "prompt tokens a second",
            "state",
        ],
        [
            [
                row["model"],
                _given(row, "ms_per_token_after_512", ".3f"),
                _given(row, "ms_per_token_after_1000000", ".3f"),
                _given(row, "batch_tokens_per_second", ",.0f"),
                _given(row, "prefill_tokens_per_second", ".2f", 1e6, " M"),
                _given(row, "state_bytes", ".1f", 2**20, " MiB"),
            ]
            for row in rows
            if "skipped" not in row
        ],
    )


def _given(row: dict[str, Any], key: str, form: str, unit: float = 1, name: str = "") -> str:
    """A figure, or a dash for what was not measured."""
    return format(row[key] / unit, form) + name if key in row else "–"


def window() -> str:
    (row,) = _read("h200-local-window")["rows"]
    peers = {
        "longspan": row["ours"],
        "FlexAttention, compiled": row["peers"]["flex"],
        "SDPA, full": row["peers"]["sdpa"],
    }
    return _table(
        ["causal, 4 · 8 · 8192 · 64, window 256", "forward ms", "forward + backward ms"],
        [[name, f"{times['forward']:.3f}", f"{times['both']:.3f}"] for name, times in peers.items()],
    )


def causal() -> str:
    rows = _read("h200-causal-linear")["rows"]
    return _attention("causal", rows, {"flash-linear-attention": "fla", "SDPA": "sdpa"})


def bidirectional() -> str:
    rows = [
        row
        for row in _read("h200-bidirectional")["rows"]
        if row["case"][4:] in (["softmax", "query"], ["favor", "query"]) and row["weight"] in (None, "drawn")
    ]
    return _attention("bidirectional", rows, {"performer-pytorch": "performer-pytorch", "SDPA": "sdpa"})


def _attention(kind: str, rows: list[dict[str, Any]], peers: dict[str, str]) -> str:
    """Forward / forward + backward of each case, ours and the peers', from a graph; ours as called too."""

    def cell(times: dict[str, float] | None, how: str = "_graph") -> str:
        return "–" if times is None else f"{times['forward' + how]:.3f} / {times['both' + how]:.3f}"

    lines = []
    for row in rows:
        *shape, name = row["case"][:5]
        name = "`performer`, 256 features" if name == "favor" else f"`linear`, {name}"
        cells = [cell(row["ours"]), cell(row["ours"], ""), *(cell(row["peers"].get(key)) for key in peers.values())]
        lines.append([name, " · ".join(str(n) for n in shape), *cells])
    return _table([kind, "batch · heads · tokens · width", "longspan", "as called from Python", *peers], lines)


def linformer() -> str:
    rows = [
        row
        for row in _read("h200-linformer")["rows"]
        if row["mechanism"].endswith((", bfloat16", "bidirectional")) and row["status"] == "ok"
    ]
    steps = ["forward_ms", "forward_backward_ms", "forward_replayed_ms", "forward_backward_replayed_ms"]

    def cell(row: dict[str, Any], step: str) -> str:
        # Beside each time how many times ours it is.
        return f"{row[step]:.2f} ({row['ratios'][step]:.1f})" if row.get(step) else "–"

    def name(row: dict[str, Any]) -> str:
        return f"{row['package']}, attention alone" if row["mechanism"].startswith("mechanism") else row["name"]

    head = ["bidirectional, dim 512, 8 heads", "batch × tokens", "forward ms", "forward + backward"]
    return _table(
        [*head, "forward, replayed", "forward + backward, replayed"],
        [
            [name(row), f"{row['case']['batch_size']} × {row['case']['length']}", *(cell(row, s) for s in steps)]
            for row in rows
        ],
    )


def processor() -> str:
    rows = _read("cpu-causal-8192")["rows"]
    return _table(
        ["causal, 1 · 8 · 8192 · 64, float32", "forward ms", "forward + backward ms", "peak MB"],
        [
            [row["name"], *(f"{row[name]:,.0f}" for name in ("forward_ms", "forward_backward_ms", "peak_mb"))]
            for row in rows
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    "quality": quality,
    "training": training,
    "generation": generation,
    "window": window,
    "causal": causal,
    "bidirectional": bidirectional,
    "linformer": linformer,
    "processor": processor,
}


def filled(text: str) -> str:
    """The text with every table as the results are now."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- figures: {found[1]} -->\n{TABLES[found[1]]()}<!-- end -->"

    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
