"""Generate the benchmark tables of README.md and docs/benchmarks.md from benchmarks/results.

A table is the region from `<!-- table: name -->` to `<!-- end -->`. In a checkout, `longspan bench tables`,
`python -m longspan.bench.tables` and `make tables` rewrite all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.bench.report import TextTable, three_digits

RESULTS = Path("benchmarks/results")
DOCUMENTS = (Path("README.md"), Path("docs/benchmarks.md"))
_STEPS = {
    "forward_graph_ms": "forward, CUDA graph",
    "forward_backward_graph_ms": "forward + backward, CUDA graph",
    "forward_ms": "forward",
    "forward_backward_ms": "forward + backward",
    "step_ms": "step",
    "token_ms": "per token",
    "peak_mb": "peak memory",
}
Row = dict[str, Any]


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
    """Return a document with every table generated from the results."""

    def region(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]](results).markdown()}<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", region, text, flags=re.DOTALL)


def attention_table(file: str, *steps: str) -> Callable[[Path], TextTable]:
    """Return a generator of a table with the given steps, each with its ratio to longspan in the same comparison."""

    def generate(results: Path) -> TextTable:
        rows = [[row["name"], _shape(row), *(_with_ratio(row, step) for step in steps)] for row in _rows(results, file)]
        units = [f"{_STEPS[step]}, {'MB' if step == 'peak_mb' else 'ms'}" for step in steps]
        return TextTable(["", "batch × heads × tokens × head dim", *units], rows)

    return generate


def quality(results: Path) -> TextTable:
    """Return bits per byte after equal training times."""
    rows = [
        [
            f"{row['context']:,}",
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['train_seconds']:.0f}",
            f"{row['bits_per_byte']:.3f}",
            f"{row['tokens_per_second'] / 1e6:.2f} M",
        ]
        for row in _rows(results, "h200-quality")
    ]
    return TextTable(["context", "parameters", "seconds", "bits per byte, held out", "tokens/s"], rows)


def train(results: Path) -> TextTable:
    """Return tokens/s of training steps."""
    rows = []
    for row in _rows(results, "h200-train"):
        mode = row.get("compile", "off")
        rate = f"{row['step_tokens_per_second'] / 1e6:.2f} M"
        rows.append([row["name"], f"{row['case']['batch_size']} × {row['case']['length']:,}", mode, rate])
    return TextTable(["model", "batch × tokens", "torch.compile", "tokens/s"], rows)


def generation(file: str) -> Callable[[Path], TextTable]:
    """Return a generator of a table of decoding and prefill speeds."""

    def generate(results: Path) -> TextTable:
        rows = []
        for row in _rows(results, file):
            batch, rate = row["case"]["batch_size"], row.get("token_tokens_per_second")
            prefill, state = row.get("prefill_tokens_per_second"), row.get("state_bytes")
            rows.append(
                [
                    row["name"],
                    f"{batch} × {row['case']['length']:,}",
                    "–" if rate is None else three_digits(1e3 * batch / rate),
                    "–" if rate is None else f"{rate:,.0f}",
                    "–" if prefill is None else f"{prefill:,.0f}",
                    "–" if state is None else f"{state / 2**20:.1f}",
                ]
            )
        header = ["model", "batch × prompt", "ms per token", "tokens/s", "prompt tokens/s", "state, MiB"]
        return TextTable(header, rows)

    return generate


def ratios(results: Path) -> TextTable:
    """Return the ratios of every peer in the first comparison of each results file that has it."""
    rows, seen = [], set()
    for title, file, *steps in (
        ("H200, causal", "h200-causal", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, bidirectional", "h200-bidirectional", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, causal", "h200-local", "forward_graph_ms", "forward_backward_graph_ms"),
        ("H200, layer", "h200-layers", "forward_ms", "forward_backward_ms"),
        ("H200, generation", "h200-generate", "", "", "token_ms"),
        ("CPU, causal", "cpu-causal-8192", "forward_ms", "forward_backward_ms"),
        ("CPU, generation", "cpu-generate", "", "", "token_ms"),
    ):
        for row in _rows(results, file):
            found = [row.get("ratios", {}).get(step) for step in (*steps, "")[:3]]
            key = file, row["mechanism"], row["name"]
            if row["package"] == "longspan" or key in seen or not any(found) or row["name"].endswith("autocast"):
                continue
            seen.add(key)
            cells = ["" if ratio is None else f"{ratio:.1f}×" for ratio in found]
            rows.append([title, row["ratio_to"], row["name"], _shape(row), *cells])
    header = ["", "longspan", "compared with", "shape", "forward", "forward + backward", "per token"]
    return TextTable(header, rows, text_columns=4)


_ATTENTION = ("forward_graph_ms", "forward_backward_graph_ms", "forward_ms", "forward_backward_ms")
TABLES: dict[str, Callable[[Path], TextTable]] = {
    "ratios": ratios,
    "quality": quality,
    "train": train,
    "generate": generation("h200-generate"),
    "causal": attention_table("h200-causal", *_ATTENTION),
    "bidirectional": attention_table("h200-bidirectional", *_ATTENTION),
    "local": attention_table("h200-local", *_ATTENTION),
    "layers": attention_table("h200-layers", *_ATTENTION),
    "cpu": attention_table("cpu-causal-8192", "forward_ms", "forward_backward_ms", "peak_mb"),
    "cpu-generate": generation("cpu-generate"),
    "cpu-decode": attention_table("cpu-decode", "token_ms"),
}


def _rows(results: Path, file: str) -> list[Row]:
    content = json.loads((results / f"{file}.json").read_text(encoding="utf-8"))
    return [row for row in content["rows"] if row["status"] == "ok"]


def _shape(row: Row) -> str:
    case = row["case"]
    return f"{case['batch_size']} × {case['num_heads']} × {case['length']} × {case['head_dim']}"


def _with_ratio(row: Row, step: str) -> str:
    """A value with its ratio; per token where the step counts tokens."""
    value, ratio = row.get(step), row.get("ratios", {}).get(step)
    rate = row.get(f"{step.removesuffix('_ms')}_tokens_per_second")
    if value is None:
        return "–"
    value = value if rate is None else 1e3 / rate
    return three_digits(value) + ("" if ratio is None else f" ({ratio:.1f}×)")


if __name__ == "__main__":
    for document in update(Path.cwd()):
        print(f"updated {document}")
