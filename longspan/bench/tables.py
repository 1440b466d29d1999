"""Generate the benchmark tables of README.md and the documentation from benchmarks/results.

A table is the region from `<!-- table: name -->` to `<!-- end -->`, a sentence that from `<!-- sentence: name -->`.
In a checkout, `longspan bench tables`, `python -m longspan.bench.tables` and `make tables` rewrite all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.bench import quality, sweep_report
from longspan.bench.jsonl import Row, read
from longspan.bench.recall import results as recall_results
from longspan.bench.report import TextTable, three_digits
from longspan.bench.subjects.peers import SDPA
from longspan.utils import choose

RESULTS = Path("benchmarks/results")
BASE, BASE_FIGURE = "h200-base", "train-base-h200"  # the results of a longer run, and the figure of its curve
_DOCUMENTS = "README.md", "docs/benchmarks.md", "docs/linearize.md", "docs/serving.md", "docs/mechanisms/performer.md"
DOCUMENTS = tuple(map(Path, _DOCUMENTS))
Cell = Callable[[Row], str]


def update(root: Path) -> list[Path]:
    """Rewrite the tables of the documents in a checkout.

    Args:
        root: The folder of the checkout.

    Returns:
        The documents that changed.

    Raises:
        ValueError: There are no results in this folder.
    """
    if not (root / RESULTS).is_dir():
        raise ValueError(f"{root} has no {RESULTS}: run it in a checkout of longspan")
    changed = []
    for document in DOCUMENTS:
        path = root / document
        text = path.read_text(encoding="utf-8")
        if (new := fill(text, root / RESULTS)) != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


def fill(text: str, results: Path) -> str:
    """Return a document with every table and sentence generated from the results."""

    def region(match: re.Match[str]) -> str:
        kind, name = match.groups()
        content = table(name, results).markdown() if kind == "table" else f"{sentence(name, results)}\n"
        return f"<!-- {kind}: {name} -->\n{content}<!-- end -->"

    return re.sub(r"<!-- (table|sentence): ([\w-]+) -->\n.*?<!-- end -->", region, text, flags=re.DOTALL)


def sentence(name: str, results: Path) -> str:
    """Return one of `SENTENCES`, generated from the results in a folder."""
    return SENTENCES[choose("sentence", name, SENTENCES)](results)


def _compile_modes(results: Path) -> str:
    """How the modes of torch.compile compare in training steps of the first model that was measured in several."""
    path = results / "h200-compile.json"
    content = json.loads((path if path.exists() else results / "h200-train.json").read_text(encoding="utf-8"))
    first = content["rows"][0]
    same = [row for row in content["rows"] if (row["name"], row["case"]) == (first["name"], first["case"])]
    speeds = {row.get("compile", "off"): row["step_tokens_per_second"] for row in same if row["status"] == "ok"}
    graphs = speeds.pop("reduce-overhead")
    others = [
        f"{speed / 1e6:.2f} M ({graphs / speed:.2f} times slower) "
        + ("without `torch.compile`" if mode == "off" else f"in mode `{mode}`")
        for mode, speed in speeds.items()
    ]
    return (
        f"A training step of {_batch(first)} tokens with the model `{first['name']}` reads {graphs / 1e6:.2f} M "
        f"tokens/s with `torch.compile` in mode `reduce-overhead`, {' and '.join(others)}, measured with longspan "
        f"{content['versions']['longspan']}."
    )


def _base_run(results: Path) -> str:
    """What the preset `base` learned, with its curve; nothing without results."""
    path = results / f"{BASE}.jsonl"
    found = [row for row in quality.read_results(path) if row["status"] == "ok"] if path.exists() else []
    if not found:
        return ""
    first = found[0]
    scores = " and ".join(f"{row['bits_per_byte']:.3f}" for row in found)
    return (
        f"The preset `base`, {first['parameters'] / 1e6:.0f} M parameters with a context of {first['context']:,}, in "
        f"{first['seconds'] / 60:g} minutes of one H200: {first['tokens'] / 1e6:.0f} M tokens in {first['steps']:,} "
        f"steps, {first['tokens_per_second'] / 1e6:.2f} M tokens/s, {scores} bits per byte on the held-out text.\n\n"
        f"![Held-out bits per byte of the preset base over minutes and over tokens](figures/{BASE_FIGURE}.svg)"
    )


def table(name: str, results: Path) -> TextTable:
    """Return one of `TABLES`, generated from the results in a folder."""
    if choose("table", name, TABLES) == "ratios":
        return _ratios(results)
    if name == "full-attention":
        return sweep_report.speed_table(read(results / "h200-sweep.jsonl"))
    if name in _STREAMS:
        return _streams(_content(results, _STREAMS[name]))
    if name == "linearize-stages":
        return _linearize_stages(_content(results, "h200-linearize"))
    if name in _JSONL:
        read_rows, make = _JSONL[name]
        return make(read_rows(results / f"{name}.jsonl"))
    file, columns = _COLUMNS[name]
    return TextTable(list(columns), [[cell(row) for cell in columns.values()] for row in _rows(results, file)])


def _ratios(results: Path) -> TextTable:
    """The ratios of every other library in the first comparison of each results file that has it."""
    rows, seen = [], set()
    for title, file, *steps in (
        ("H200, causal", "h200-causal", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, bidirectional", "h200-bidirectional", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, causal", "h200-local", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, causal", "h200-gated", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, layer", "h200-layers", "forward_ms", "forward_backward_ms"),
        ("H200, generation", "h200-generate", "", "", "token_ms"),
        ("CPU, causal", "cpu-causal-8192", "forward_ms", "forward_backward_ms"),
        ("CPU, generation", "cpu-generate", "", "", "token_ms"),
    ):
        for row in _rows(results, file):
            found = [row.get("ratios", {}).get(step) for step in (*steps, "")[:3]]
            key = file, row["mechanism"], row["name"]
            if row["package"] == "longspan" or row["name"] == SDPA or row["name"].endswith("autocast"):
                continue
            if key in seen or not any(found):
                continue
            seen.add(key)
            cells = ["" if ratio is None else f"{ratio:.1f}×" for ratio in found]
            rows.append([title, row["ratio_to"], row["name"], _shape(row), *cells])
    header = ["", "longspan", "compared with", "shape", "forward", "forward + backward", "per token"]
    return TextTable(header, rows, text_columns=3)


def _rows(results: Path, file: str) -> list[Row]:
    return [row for row in _content(results, file)["rows"] if row["status"] == "ok"]


def _content(results: Path, file: str) -> dict[str, Any]:
    return json.loads((results / f"{file}.json").read_text(encoding="utf-8"))


def _streams(found: dict[str, Any]) -> TextTable:
    """The first token of a cached prompt, speculation and int8 weights."""
    rows = []
    if found["prefix"]:
        x = found["prefix"]
        prompt = f"first token of {x['prompt_tokens']:,} tokens, ms"
        rows.append([f"{prompt}: read, cached", f"{x['cold_ms']:,.0f}", f"{x['hit_ms']:,.1f}"])
    for x in found["speculation"]:
        speeds = (x["plain_tokens_per_second"], x["tokens_per_second"])
        name = f"tokens/s, {x['text']}: without, with speculation ({x['ratio']:.2f}×)"
        rows.append([name, *(f"{speed:,.0f}" for speed in speeds)])
    if found.get("quantization"):
        x = found["quantization"]
        loss = 100 * (x["quantized_bits_per_token"] / x["bits_per_token"] - 1)
        name = f"tokens/s, own text: float32, int8 weights ({x['ratio']:.2f}×, {loss:+.2f} % bits)"
        rows.append([name, *(f"{x[key]:,.0f}" for key in ("plain_tokens_per_second", "tokens_per_second"))])
    return TextTable(["one stream", "", ""], rows)


def _linearize_stages(found: dict[str, Any]) -> TextTable:
    """What the time of a run of linearize is spent on, from the start of the process to the end of training."""
    times = found["times"]
    rows = [["loading", f"{times['loaded']:.0f}", "", ""]]
    for x in found["stages"]:
        rate = f"{x['tokens'] / x['seconds'] / 1e3:,.0f},000"
        rows.append([x["stage"], f"{x['seconds']:.0f}", f"{x['tokens'] / 1e6:.1f} M", rate])
    rest = times["training ended"] - times["loaded"] - sum(x["seconds"] for x in found["stages"])
    rows.append(["compilation and evaluation", f"{rest:.0f}", "", ""])
    rows.append(["total", f"{times['training ended']:.0f}", "", ""])
    return TextTable(["", "seconds", "tokens", "tokens/s"], rows)


def _shape(row: Row) -> str:
    case = row["case"]
    return f"{case['batch_size']} × {case['num_heads']} × {case['length']} × {case['head_dim']}"


def _batch(row: Row) -> str:
    return f"{row['case']['batch_size']} × {row['case']['length']:,}"


def _number(key: str, form: str = ",.0f", unit: float = 1, suffix: str = "") -> Cell:
    return lambda row: "–" if row.get(key) is None else f"{row[key] / unit:{form}}{suffix}"


def _with_ratio(step: str) -> Cell:
    """A value with its ratio; per token if the step counts tokens."""

    def cell(row: Row) -> str:
        value, ratio = row.get(step), row.get("ratios", {}).get(step)
        rate = row.get(f"{step.removesuffix('_ms')}_tokens_per_second")
        shown = "–" if value is None else three_digits(value if rate is None else 1e3 / rate)
        return shown if ratio is None or value is None else f"{shown} ({ratio:.1f}×)"

    return cell


def _ms_per_token(row: Row) -> str:
    rate = row.get("token_tokens_per_second")
    return "–" if rate is None else three_digits(1e3 * row["case"]["batch_size"] / rate)


def _percentile(key: str, p: int) -> Cell:
    return lambda row: f"{row[key][str(p)]:,.1f}"


_LOADS: dict[str, Cell] = {
    "load": _number("load", ".1f"),
    "requests": _number("requests"),
    "lost": _number("lost"),
    "wrong": _number("wrong"),
    "tokens/s": _number("tokens_per_second"),
    "of generate": _number("ratio", ".0f", 0.01, " %"),
    "steady, tokens/s": _number("steady_tokens_per_second"),
    "steady, of generate": _number("steady_ratio", ".0f", 0.01, " %"),
    "busy slots": _number("busy_slots", ".1f"),
    "device idle": _number("idle_share", ".0f", 0.01, " %"),
    **{f"first token, p{p}, ms": _percentile("first_token_ms", p) for p in (50, 95, 99)},
    **{f"per token, p{p}, ms": _percentile("token_ms", p) for p in (50, 95, 99)},
}
_PERPLEXITIES: dict[str, Cell] = {
    "text": lambda row: str(row["text"]),
    "after": lambda row: str(row["stage"]),
    "tokens": _number("tokens"),
    "teacher": _number("teacher", ".2f"),
    "student": _number("student", ".2f"),
    "ratio": _number("ratio", ".3f"),
    "without the memory": _number("without_memory", ".2f", 1, "×"),
}
_NAME: dict[str, Cell] = {"": lambda row: row["name"]}
_TIMES = {"forward, ms": _with_ratio("forward_ms"), "forward + backward, ms": _with_ratio("forward_backward_ms")}
_ATTENTION = _NAME | {
    "batch × heads × tokens × head dim": _shape,
    "forward, CUDA graph, ms": _with_ratio("forward_graph_ms"),
    "forward + backward, CUDA graph, ms": _with_ratio("forward_backward_graph_ms"),
    **_TIMES,
}
_GENERATION = _NAME | {
    "batch × prompt": _batch,
    "ms per token": _ms_per_token,
    "tokens/s": _number("token_tokens_per_second"),
    "prompt tokens/s": _number("prefill_tokens_per_second"),
    "state, MiB": _number("state_bytes", ".1f", 2**20),
}
# The results file and the columns of each table with one row per result.
_COLUMNS: dict[str, tuple[str, dict[str, Cell]]] = {
    "causal": ("h200-causal", _ATTENTION),
    "bidirectional": ("h200-bidirectional", _ATTENTION),
    "local": ("h200-local", _ATTENTION),
    "gated": ("h200-gated", {name.replace("CUDA graph", "GPU"): cell for name, cell in list(_ATTENTION.items())[:4]}),
    "host": (
        "h200-host",
        _ATTENTION
        | {
            "host, forward, µs": _with_ratio("host_forward_us"),
            "host, forward + backward, µs": _with_ratio("host_forward_backward_us"),
            "in one thread, µs": _with_ratio("host_forward_backward_one_thread_us"),
        },
    ),
    "layers": ("h200-layers", _ATTENTION),
    "train": (
        "h200-train",
        _NAME
        | {
            "batch × tokens": _batch,
            "torch.compile": lambda row: row.get("compile", "off"),
            "tokens/s": _number("step_tokens_per_second", ".2f", 1e6, " M"),
        },
    ),
    "quality": (
        "h200-quality",
        {
            "context": _number("context"),
            "parameters": _number("parameters", ".1f", 1e6, " M"),
            "seconds": _number("train_seconds"),
            "bits per byte, held out": _number("bits_per_byte", ".3f"),
            "tokens/s": _number("tokens_per_second", ".2f", 1e6, " M"),
        },
    ),
    "long-sequences": (
        "h200-long-sequences",
        _NAME
        | {
            "parameters": _number("parameters", ".1f", 1e6, " M"),
            "tokens": _number("length"),
            "tokens in a piece": lambda row: "at once" if row["chunk_length"] is None else f"{row['chunk_length']:,}",
            "tokens/s": _number("tokens_per_second", ".2f", 1e6, " M"),
            "peak memory, GiB": _number("peak_gib", ".1f"),
        },
    ),
    "generate": ("h200-generate", _GENERATION),
    "generate-small": ("h200-generate-small", _GENERATION),
    "linearize": ("h200-linearize", _PERPLEXITIES),
    "linearize-keep": ("h200-linearize-keep", _PERPLEXITIES),
    "options": ("h200-options", {name: cell for name, cell in _ATTENTION.items() if not name.startswith("batch")}),
    "linformer": ("h200-linformer", dict(list(_ATTENTION.items())[:4])),
    "mixture": ("h200-mixture", dict(list(_ATTENTION.items())[:4])),
    "cpu": (
        "cpu-causal-8192",
        _NAME | {"batch × heads × tokens × head dim": _shape} | _TIMES | {"peak memory, MB": _with_ratio("peak_mb")},
    ),
    "cpu-generate": ("cpu-generate", _GENERATION),
    "h200-serve": ("h200-serve", _LOADS),
    "h200-serve-short": ("h200-serve-short", _LOADS),
    "cpu-serve": ("cpu-serve", _LOADS),
    "cpu-serve-10000": ("cpu-serve-10000", _LOADS),
    "cpu-decode": ("cpu-decode", _NAME | {"batch × prompt": _batch, "ms per token": _with_ratio("token_ms")}),
}
# Tables of results that grow: how a file is read, and how its table is made.
_JSONL: dict[str, tuple[Callable[[Path], list[Row]], Callable[[list[Row]], TextTable]]] = {
    "h200-quality-90s": (quality.read_results, quality.table),
    "h200-recipe": (quality.read_results, quality.table),
    "cpu-performer": (quality.read_results, quality.steps_table),
    "cpu-repetition": (quality.read_results, quality.epochs_table),
    "h200-recall": (recall_results.read, recall_results.table),
    "h200-recall-1200": (recall_results.read, recall_results.table),
    "cpu-recall": (recall_results.read, recall_results.table),
    "h200-sweep": (read, sweep_report.summary_table),
    "cpu-sweep": (read, sweep_report.summary_table),
}
_STREAMS = {"serve-streams": "cpu-serve-streams", "h200-serve-streams": "h200-serve", "serve-int8": "cpu-serve-int8"}
_STREAMS |= {"serve-speculation": "cpu-serve-speculation", "serve-int8-two-threads": "cpu-serve-int8-two-threads"}
TABLES = ("full-attention", "ratios", *_COLUMNS, *_JSONL, *_STREAMS, "linearize-stages")
SENTENCES: dict[str, Callable[[Path], str]] = {"compile": _compile_modes, "base": _base_run}


if __name__ == "__main__":
    for document in update(Path.cwd()):
        print(f"updated {document}")
