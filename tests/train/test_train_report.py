"""`longspan eval --data`, `longspan report`, and the loggers."""

from __future__ import annotations

import html
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from training import longspan, metrics, trained, write_corpus

from longspan.models.checkpoint import load
from longspan.train.loggers import RunLogger, format_duration, format_metrics, read_records, truncate_records
from longspan.train.report import read_run, write_report

FIXTURES = Path(__file__).parents[1] / "guards" / "fixtures"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder / "text")
    trained(folder / "text", folder / "first")
    trained(folder / "text", folder / "second", lr=0.001, model__dim=32)
    return folder


def test_evaluation_matches_the_model_window_by_window(runs: Path, tmp_path: Path) -> None:
    text = (runs / "text" / "003.txt").read_bytes()
    out = tmp_path / "scores.json"
    words = ["eval", "--model", runs / "first", "--data", runs / "text" / "003.txt", "--context", 50, "--out", out]
    done = longspan(*words, log=tmp_path / "log")
    assert done.status == 0, done.stderr
    found = json.loads(out.read_text())
    model = load(runs / "first" / "checkpoint").eval()
    tokens, total = torch.tensor([list(text)]), torch.zeros(50)
    count = torch.zeros(50)
    with torch.no_grad():
        for i in range(0, len(text) - 1, 50):
            x, y = tokens[:, i : i + 50], tokens[0, i + 1 : i + 51]
            losses = F.cross_entropy(model(x[:, : len(y)])[0], y, reduction="none")
            total[: len(y)] += losses
            count[: len(y)] += 1
    assert found["tokens"] == len(text) - 1
    assert found["loss"] == pytest.approx(float(total.sum() / count.sum()), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert [(b["from"], b["to"]) for b in found["positions"]][-2:] == [(16, 31), (32, 49)]
    for bucket in found["positions"]:
        where = slice(bucket["from"], bucket["to"] + 1)
        assert bucket["loss"] == pytest.approx(float(total[where].sum() / count[where].sum()), rel=1e-5)
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "32–49" in done.stdout


def test_evaluation_takes_context_limit_and_batch_size(runs: Path, tmp_path: Path) -> None:
    outs = [tmp_path / f"{i}.json" for i in range(3)]
    base = ["eval", "--model", runs / "first" / "checkpoint", "--data", runs / "text" / "00*.txt"]
    for out, more in zip(outs, ([], ["--max-tokens", 600], ["--batch-size", 1]), strict=True):
        assert longspan(*base, "--out", out, *more, log=tmp_path / "log").status == 0
    whole, part, single = (json.loads(out.read_text()) for out in outs)
    assert whole["context"] == 61
    assert 300 < part["tokens"] < 900 < whole["tokens"]
    assert single["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    done = longspan(*base[:3], "--data", runs / "text", "--extensions", ".zzz", log=tmp_path / "log")
    assert done.status == 2
    assert "no files with extension" in done.stderr


def test_a_report_is_self_contained_and_shows_differences(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = longspan("report", runs / "first", runs / "second", "--out", out, log=tmp_path / "log")
    assert done.status == 0, done.stderr
    page = out.read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("data:image/png;base64,") == 2
    assert done.stdout.split() == [str(out), str(tmp_path / "page-tokens.png"), str(tmp_path / "page-seconds.png")]
    for path in done.stdout.split()[1:]:
        assert Path(path).read_bytes()[:4] == b"\x89PNG"
    for setting in ("train.lr", "model.dim"):
        assert f"<th>{setting}</th>" in page
    assert "<th>train.seed</th>" not in page
    last = json.loads((runs / "first" / "samples.jsonl").read_text().splitlines()[-1])
    assert html.escape(last["prompt"]) in page
    score = next(r for r in reversed(metrics(runs / "first")) if "eval_bits_per_byte" in r)
    assert f"{score['eval_bits_per_byte']:.4f}" in page
    alone = longspan("report", runs / "first", log=tmp_path / "log")
    assert alone.status == 0
    assert (runs / "first" / "report.html").exists()
    assert "Differences" not in (runs / "first" / "report.html").read_text()


def test_a_run_folder_can_generate(runs: Path, tmp_path: Path) -> None:
    words = ["--prompt", "the old", "--max-tokens", 7, "--temperature", 0]
    said = [
        longspan("generate", "--model", where, *words, log=tmp_path / "log")
        for where in (runs / "first", runs / "first" / "checkpoint")
    ]
    assert [done.status for done in said] == [0, 0]
    assert said[0].stdout
    assert said[0].stdout == said[1].stdout


def test_runs_with_equal_names_are_numbered(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_report([read_run(runs / "first"), read_run(runs / "first")], out)
    assert "first (2)" in out.read_text()


def test_text_of_a_run_is_escaped(runs: Path, tmp_path: Path) -> None:
    run = read_run(runs / "first")
    script = "<script>alert('x')</script>"
    sample = {"step": 1, "prompt": script, "text": script}
    write_report([replace(run, name=script, samples=[sample, sample])], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 6


def test_a_run_of_an_earlier_version_is_reported(tmp_path: Path) -> None:
    run = read_run(FIXTURES / "run" / "out")
    write_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"{run.metadata['data']['unigram_bits_per_byte']:.4f}" in page
    assert run.metadata["data"]["sha256"][:16] in page


def test_wrong_folders_are_refused(runs: Path, tmp_path: Path) -> None:
    for words, message in (
        (["report", tmp_path / "none"], "there is no run"),
        (["report", tmp_path], "has no run.json"),
        (["eval", "--model", tmp_path / "none", "--data", runs / "text"], "none"),
        (["eval", "--model", runs / "first", "--data", tmp_path / "none"], "no such file or folder"),
    ):
        done = longspan(*words, log=tmp_path / "log")
        assert done.status == 1, done.stderr
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


RECORD = {"step": 7, "steps": 9, "loss": 1.5, "bits_per_byte": 2.164, "tokens_per_second": 12_345.0}
RECORD |= {"memory": 300 * 2**20, "eta": 65.0, "tokens": 700, "seconds": 3.0, "lr": 0.1}


@pytest.mark.parametrize("width", [80, 120])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(tmp_path: Path, width: int) -> None:
    screen = io.StringIO()
    logger = RunLogger(tmp_path, console=Console(file=screen, force_terminal=True, width=width, highlight=False))
    logger.progress(0.5, RECORD)
    logger.log_metrics(RECORD)
    logger.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    for word in ("step 7/9", "loss 1.5000", "2.164 bits/byte", "12.3k tokens/s", "300 MiB", "ETA 1:05", "━"):
        assert word in shown
    lines = io.StringIO()
    logger = RunLogger(tmp_path, console=Console(file=lines, force_terminal=False, width=40, highlight=False))
    logger.progress(0.5, RECORD)
    logger.log_metrics(RECORD)
    assert lines.getvalue() == f"step 7/9 {format_metrics(RECORD)}\n"
    assert read_records(tmp_path / "metrics.jsonl") == [RECORD, RECORD]


def test_later_records_and_incomplete_lines_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(5)) + '{"step": 5, "lo')
    truncate_records(tmp_path, 3)
    assert [record["step"] for record in read_records(path)] == [0, 1, 2, 3]
    assert [format_duration(seconds) for seconds in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
