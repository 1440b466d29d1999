"""The tables of the documents are those of the results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from longspan.bench.report import TextTable
from longspan.bench.tables import DOCUMENTS, RESULTS, TABLES, fill, table, update

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_tables_are_up_to_date(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert re.findall(r"<!-- table: ([\w-]+) -->", text)
    assert fill(text, ROOT / RESULTS) == text, "run `longspan bench tables`"


def test_every_table_is_in_a_document() -> None:
    names = {path: re.findall(r"<!-- table: ([\w-]+) -->", (ROOT / path).read_text("utf-8")) for path in DOCUMENTS}
    assert names.pop(Path("README.md")) == ["full-attention", "ratios"]  # the summary, which the benchmarks have too
    assert sorted(name for found in names.values() for name in found) == sorted(TABLES)


def test_the_readme_compares_other_libraries_and_full_attention_where_it_is_faster_too() -> None:
    full, ratios = (table(name, ROOT / RESULTS) for name in ("full-attention", "ratios"))
    assert {"linear", "mixture"} <= {row[0] for row in full.rows}
    assert any(float(cell.rstrip("×")) < 1 for row in full.rows for cell in row[1:])
    compared = [row[2] for row in ratios.rows]
    assert "FlexAttention, 256 keys" in compared
    assert "PyTorch SDPA" not in compared


def test_a_changed_table_is_restored(tmp_path: Path) -> None:
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    for document in DOCUMENTS:
        (tmp_path / document).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / document, tmp_path / document)
    assert update(tmp_path) == []
    page = tmp_path / DOCUMENTS[1]
    original = page.read_text(encoding="utf-8")
    page.write_text(original.replace("| linear,", "| liner,"), encoding="utf-8")
    assert update(tmp_path) == [page]
    assert page.read_text(encoding="utf-8") == original


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no benchmarks/results: run it in a checkout"):
        update(tmp_path)


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"unknown table 'casual'; there is full-attention, ratios.*did you mean 'causal'"
    ):
        fill("<!-- table: casual -->\n<!-- end -->", ROOT / RESULTS)


def test_the_sentence_on_compilation_is_that_of_its_results(tmp_path: Path) -> None:
    case = {"batch_size": 8, "length": 4096}
    rows = [
        {"name": "linear", "status": "ok", "case": case, "compile": mode, "step_tokens_per_second": speed}
        for mode, speed in (("reduce-overhead", 2.5e6), ("default", 2e6), ("off", 1e6))
    ]
    rows.append({**rows[0], "name": "softmax", "step_tokens_per_second": 7e6})
    (tmp_path / "h200-compile.json").write_text(json.dumps({"rows": rows, "versions": {"longspan": "9.9"}}))
    text = fill("<!-- sentence: compile -->\nold\n<!-- end -->", tmp_path)
    assert text == (
        "<!-- sentence: compile -->\nA training step of 8 × 4,096 tokens with the model `linear` reads 2.50 M tokens/s "
        "with `torch.compile` in mode `reduce-overhead`, 2.00 M (1.25 times slower) in mode `default` and 1.00 M (2.50 "
        "times slower) without `torch.compile`, measured with longspan 9.9.\n<!-- end -->"
    )
    with pytest.raises(ValueError, match="unknown sentence 'compil'; there is compile"):
        fill("<!-- sentence: compil -->\n<!-- end -->", tmp_path)


def test_the_sentence_on_a_longer_run_is_that_of_its_results(tmp_path: Path) -> None:
    region = "<!-- sentence: base -->\n{}\n<!-- end -->"
    assert fill(region.format("old"), tmp_path) == region.format("")  # not measured
    row = {"candidate": "local+linear-gated", "context": 8192, "seed": 0, "seconds": 600, "status": "ok"}
    row |= {"bits_per_byte": 1.2345, "parameters": 168_000_000, "tokens": 400_000_000, "steps": 6103}
    failed = {**row, "seed": 1, "status": "error"}
    lines = [json.dumps(x) for x in (failed, {**row, "tokens_per_second": 666_667})]
    (tmp_path / "h200-base.jsonl").write_text("\n".join(lines) + "\n")
    text = fill(region.format("old"), tmp_path)
    assert "168 M parameters with a context of 8,192, in 10 minutes of one H200" in text
    assert "400 M tokens in 6,103 steps, 0.67 M tokens/s, 1.234 bits per byte" in text
    assert "(figures/train-base-h200.svg)" in text


def test_markdown_is_aligned() -> None:
    table = TextTable(["", "ms"], [["linear", "1.25"], ["SDPA", "12.5 (10.0×)"]])
    assert table.markdown() == (
        "|        |           ms |\n| ------ | -----------: |\n| linear |         1.25 |\n| SDPA   | 12.5 (10.0×) |\n"
    )
