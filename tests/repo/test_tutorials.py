"""The tutorials run from end to end, their stored outputs are their own, and figures show what the code computes."""

import json
import os
import re
from itertools import chain
from pathlib import Path

import figures
import matplotlib
import notebooks
import pytest
from training import longspan, metrics

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def accuracy(folder, space):
    return json.loads((folder / "scores.json").read_text())["accuracy"]


def last_eval(folder, name):
    return next(r for r in reversed(metrics(folder / "runs" / name)) if "eval_loss" in r)


def check_text(folder, space):
    assert last_eval(folder, "mine")["step"] == 100
    assert last_eval(folder, "mine")["eval_bits_per_byte"] < 1
    assert re.match(rb"(a boat|a kite|some bread|two keys|the map) ", bytes(space["result"].tokens[0]))


def check_fine_tuning(folder, space):
    first = metrics(folder / "runs" / "owl")[0]["bits_per_byte"]
    assert first < 6  # random weights have 8
    assert last_eval(folder, "owl")["eval_bits_per_byte"] < first / 2
    assert last_eval(folder, "whole")["eval_accuracy"] > 0.5


def check_linearizing(folder, space):
    found = space["results"]["perplexity"]
    assert found["teacher"] < 1.3
    assert found["student"] < 1.1 * found["teacher"]
    assert space["results"]["perplexity_without_memory"] > found["student"]
    assert space["model"].state_size() < 100 * space["cache"]


def check_serving(folder, space):
    assert space["alone"] == space["together"][3]
    assert len(space["second"].tokens) == 8
    assert space["stats"].cache.hits == 2  # a prompt given again, and the beginning of two
    assert (folder / "story.safetensors").stat().st_size > 1000


def test_every_tutorial_is_checked():
    assert {path.stem for path in TUTORIALS} == set(CHECKS)


CHECKS = {
    "classify_documents": lambda folder, space: accuracy(folder, space) > 0.9,
    "dna": lambda folder, space: accuracy(folder, space) > 0.7,
    "eeg": lambda folder, space: accuracy(folder, space) > 0.9,
    "fine_tune": check_fine_tuning,
    "linearize": check_linearizing,
    "serve": check_serving,
    "train_text": check_text,
}


LONG = {"dna", "fine_tune", "linearize"}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # cells leave the closing of files to Python, as notebooks do
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in LONG else []) for p in TUTORIALS]
)
def test_tutorials_run(path, tmp_path):
    def run(words):
        assert words[0] == "longspan"
        done = longspan(*words[1:], log=tmp_path / "log", before=f"import os; os.chdir({os.getcwd()!r})")
        assert done.status == 0, done.stderr
        return done.stdout + done.stderr

    matplotlib.use("agg")
    folder = tmp_path / "folder"
    folder.mkdir()
    notebook = read(path)
    kinds = [[output["output_type"] for output in cell.get("outputs", ())] for cell in notebook["cells"]]
    space = notebooks.execute(notebook, folder, run)
    assert CHECKS[path.stem](folder, space) is not False
    assert [[output["output_type"] for output in cell.get("outputs", ())] for cell in notebook["cells"]] == kinds


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_stored_outputs_belong_to_the_cells_and_are_small(path):
    notebook = read(path)
    told = f"run: python tools/notebooks.py docs/tutorials/{path.name}"
    assert notebook["metadata"]["longspan"]["digest"] == notebooks.digest(notebook), told
    assert path.stat().st_size < 100_000
    assert any(
        "image/svg+xml" in output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", ())
    )
    assert not re.search(r"/(tmp|work|home|root)/", path.read_text(encoding="utf-8"))


def test_a_changed_cell_changes_the_digest():
    notebook = {"cells": [{"cell_type": "code", "source": ["x = 1\n", "x"]}], "metadata": {}}
    before = notebooks.digest(notebook)
    notebook["cells"][0]["source"] = ["x = 2\n", "x"]
    assert notebooks.digest(notebook) != before


def test_cells_give_what_jupyter_gives(tmp_path):
    sources = [
        "x = 3\nprint('a')\nx",
        "!longspan --version",
        "x;",
        "import matplotlib.pyplot as plt\nplt.plot([1, x]);",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": [source]} for source in sources], "metadata": {}}
    notebooks.execute(notebook, tmp_path, lambda words: f"{words}\n")
    first, second, third, fourth = (cell["outputs"] for cell in notebook["cells"])
    assert [first[0]["text"], first[1]["data"]["text/plain"]] == [["a\n"], ["3"]]
    assert second[0]["text"] == ["['longspan', '--version']\n"]
    assert third == []
    assert "currentColor" in "".join(fourth[0]["data"]["image/svg+xml"])


@pytest.mark.parametrize("name", figures.PLOTS)
def test_figures_show_what_the_code_and_the_results_say(name):
    stored = re.search(r"<metadata>(.*?)</metadata>", (figures.FIGURES / f"{name}.svg").read_text(encoding="utf-8"))
    assert stored
    told = "run: python tools/figures.py"
    for key, values in figures.PLOTS[name][0]().items():
        found = json.loads(stored[1])[key]
        if isinstance(values, list) and isinstance(values[0], list):
            values, found = ([*chain(*rows)] for rows in (values, found))
        assert found == pytest.approx(values, abs=2e-3), told


def test_curves_of_training(tmp_path, monkeypatch):
    curve = [[1e6, 60.0, 1.5], [2e6, 120.0, 1.25]]
    row = {"candidate": "linear", "seed": 0, "status": "ok", "held_out_curve": curve}
    lines = [json.dumps(x) for x in (row, {**row, "seed": 1}, {**row, "seed": 2, "status": "error"})]
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    data = figures.training_curves("run")
    one = [[1.0, 2.0], [1.0, 2.0], [1.5, 1.25]]
    assert data == {"linear, seed 0": one, "linear, seed 1": one}
    figure = figures.Figure()
    figures.draw_curves(data, figure)
    left, right = figure.axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[1.5, 1.25]] * 2
    assert right.get_xlabel() == "million tokens"


def test_figures_are_readable_in_light_and_dark_and_load_nothing():
    assert {path.stem for path in figures.FIGURES.glob("*.svg")} == set(figures.PLOTS)
    for path in figures.FIGURES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert "fill: currentColor" in text
        assert not re.search(r"(fill|stroke): #(000000|ffffff)", text)
        assert not re.search(r'(href|src)="https?:', text)
        assert len(text) < 40_000
