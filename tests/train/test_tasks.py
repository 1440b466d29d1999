"""Supervised tasks by the real commands: train, evaluate, predict and describe, on small generated data."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import arguments, curve, longspan, trained

from longspan import AttentionConfig, Classifier, ModelConfig, load
from longspan.cli import predict as predict_command
from longspan.models.checkpoint import write
from longspan.train.data.readers import ReadOptions, find_source
from longspan.train.data.tasks import SupervisedTask, guess_task, read_label
from longspan.train.data.token_store import StoreSpec, open_store
from longspan.train.prediction import TaskModel, load_task_model, predict

WORDS = ["stone", "river", "field", "birds", "trees", "light"]
SMALL = {
    "steps": 50,
    "batch_size": 8,
    "lr": 0.01,
    "held_out": 0.2,
    "sample_tokens": 0,
    "eval_every": 50,
    "model.depth": 1,
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def text_rows(number: int = 150) -> list[dict[str, Any]]:
    draw, rows = random.Random(3), []
    for i in range(number):
        share = draw.random()
        words = ["river" if draw.random() < share else draw.choice(WORDS[2:]) for _ in range(draw.randint(5, 9))]
        wet, stony = "river" in words, draw.random() < 0.5
        words += ["stone"] * 2 * stony
        amount = 3 + 10 * words.count("river") / len(words)
        row = {"note": " ".join(words), "kind": "stony" if stony else "soft", "amount": round(amount, 3)}
        rows.append({"row": f"r{i}", **row, "wet": int(wet), "stony": int(stony)})
    return rows


def command(tmp_path: Path, *words: Any) -> str:
    done = longspan(*words, log=tmp_path / "command")
    assert done.status == 0, done.stderr
    return done.stdout


def scored(tmp_path: Path, data: Path, run: Path) -> dict[str, Any]:
    command(tmp_path, "eval", "--model", run, "--data", data, "--out", tmp_path / "eval.json")
    return json.loads((tmp_path / "eval.json").read_text())


def predicted(tmp_path: Path, data: Path, run: Path) -> list[dict[str, str]]:
    out = tmp_path / "predicted.csv"
    command(tmp_path, "predict", "--model", run, "--data", data, "--out", out, "--batch-size", "7")
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_classes_of_a_table(tmp_path: Path) -> None:
    rows = text_rows()
    data = write_rows(tmp_path / "x.csv", rows)
    records = trained(data, tmp_path / "run", label_field="kind", text_field="note", **SMALL)
    assert next(r["eval_accuracy"] for r in reversed(records) if "eval_accuracy" in r) > 0.8
    config = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())
    names = config["task"]["names"]
    assert sorted(names) == ["soft", "stony"]
    assert config["id2label"] == {"0": names[0], "1": names[1]}
    assert config["problem_type"] == "single_label_classification"
    score = scored(tmp_path, data, tmp_path / "run")
    found = predicted(tmp_path, data, tmp_path / "run")
    assert [row["row"] for row in found] == [row["row"] for row in rows]
    hits = sum(row["prediction"] == row["kind"] for row in found)
    assert hits / len(rows) == pytest.approx(score["accuracy"])
    assert score["accuracy"] > 0.8
    confusion = np.array(score["confusion"])
    assert confusion.sum() == len(rows)
    assert confusion.diagonal().sum() == hits
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    info = command(tmp_path, "info", "--model", tmp_path / "run")
    assert f"predicts 2 outputs (classify): {', '.join(names)}" in info
    transformers = pytest.importorskip("transformers")
    import_module("longspan.hf")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint")
    assert model.config.id2label == dict(enumerate(names))
    other = write_rows(tmp_path / "y.csv", [{"note": "x y", "kind": "new"}, {"note": "y", "kind": "soft"}])
    done = longspan("eval", "--model", tmp_path / "run", "--data", other, log=tmp_path / "log")
    assert "the model does not know the class 'new'; it knows " in done.stderr


def test_predictions_to_a_pipe_or_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(found: Any, data: Any, options: Any, file: Any, **_: Any) -> int:
        return file.write("a,b\n")

    monkeypatch.setattr("longspan.train.prediction.load_task_model", lambda *_: object())
    monkeypatch.setattr("longspan.train.prediction.predict", write)
    pipe, link, target = (tmp_path / name for name in ("pipe", "link", "target"))
    os.mkfifo(pipe)
    link.symlink_to(target)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for out in (pipe, link):
        predict_command.main(["--model", str(tmp_path), "--data", "x", "--out", str(out)])
    assert os.read(reader, 9) == target.read_bytes() == b"a,b\n"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_a_column_of_fractions_is_regression(tmp_path: Path) -> None:
    rows = text_rows()
    data = write_rows(tmp_path / "x.csv", rows)
    trained(data, tmp_path / "run", label_field="amount", text_field="note", **SMALL)
    assert load(tmp_path / "run" / "checkpoint").config.num_classes == 1
    score = scored(tmp_path, data, tmp_path / "run")
    found = predicted(tmp_path, data, tmp_path / "run")
    errors = [abs(float(row["prediction"]) - float(row["amount"])) for row in found]
    assert np.mean(errors) == pytest.approx(score["mae"], rel=1e-4)
    assert score["r2"] > 0.7
    done = longspan(
        *arguments(data, tmp_path / "no", label_field="amount", text_field="note", objective="classify"),
        log=tmp_path / "log",
    )
    assert done.status == 2
    assert "the labels are numbers such as" in done.stderr
    assert "use --objective regress" in done.stderr


def test_several_classes(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "x.csv", text_rows())
    trained(data, tmp_path / "run", label_field="wet,stony", text_field="note", **SMALL)
    score = scored(tmp_path, data, tmp_path / "run")
    assert [row["name"] for row in sorted(score["classes"], key=lambda row: str(row["name"]))] == ["stony", "wet"]
    assert score["micro_f1"] > 0.8
    found = predicted(tmp_path, data, tmp_path / "run")
    exact = [
        set(filter(None, row["prediction"].split("|"))) == {n for n in ("wet", "stony") if row[n] == "1"}
        for row in found
    ]
    assert np.mean(exact) == pytest.approx(score["accuracy"])


@pytest.mark.parametrize("form", ["words", "characters", "conll"])
def test_a_class_for_each_token(form: str, tmp_path: Path) -> None:
    rows = []
    for row in text_rows(80):
        words = row["note"].split()
        tags = ["many" if word.endswith("s") else "one" for word in words]
        if form == "characters":
            letters = "".join(words)
            rows.append({"sequence": letters, "labels": "".join("v" if c in "aeiou" else "c" for c in letters)})
        else:
            rows.append({"tokens": words, "tags": tags})
    data = tmp_path / "x.jsonl"
    if form == "conll":
        data = tmp_path / "x.conll"
        data.write_text(
            "\n\n".join("\n".join(f"{w} {t}" for w, t in zip(r["tokens"], r["tags"], strict=True)) for r in rows)
        )
    else:
        write_rows(data, rows)
    trained(data, tmp_path / "run", objective="tag", **SMALL)
    score = scored(tmp_path, data, tmp_path / "run")
    assert score["accuracy"] > 0.9
    found = predicted(tmp_path, data, tmp_path / "run")
    assert len(found) == len(rows)
    wanted = [list(row["labels"]) if form == "characters" else row["tags"] for row in rows]
    pairs = [
        (a, b)
        for row, want in zip(found, wanted, strict=True)
        for a, b in zip(row["prediction"].split(), want, strict=False)
    ]
    assert np.mean([a == b for a, b in pairs]) > 0.9


def waves(length: int = 1500) -> np.ndarray[Any, Any]:
    t = np.arange(length)
    return np.stack([np.sin(t / 3), 5 + 3 * np.cos(t / 3), np.sin(t / 2)], 1).astype(np.float32)


def test_forecasting_and_resuming(tmp_path: Path) -> None:
    series = waves()
    np.save(tmp_path / "x.npy", series)
    names = ("time", "a", "b", "c")
    rows = [dict(zip(names, (i, *row.tolist()), strict=True)) for i, row in enumerate(series)]
    table = write_rows(tmp_path / "x.csv", rows)
    settings = {**SMALL, "objective": "forecast", "eval_every": 20, "min_lr": 1}
    first = trained(tmp_path / "x.npy", tmp_path / "run", **settings)
    assert curve(trained(table, tmp_path / "table", **settings)) == curve(first)
    trained(table, tmp_path / "parts", **{**settings, "steps": 20})
    parts = trained(table, tmp_path / "parts", **settings)
    losses = {r["step"]: r["loss"] for r in first if "loss" in r}
    assert {r["step"]: r["loss"] for r in parts if "loss" in r and r["step"] > 20} == {
        step: loss for step, loss in losses.items() if step > 20
    }
    score = scored(tmp_path, table, tmp_path / "table")
    assert [row["name"] for row in score["outputs"]] == ["a", "b", "c"]
    assert score["r2"] > 0.9
    assert score["count"] == len(series) - 1
    (found,) = predicted(tmp_path, table, tmp_path / "table")
    following = waves(len(series) + 1)[-1]
    assert [float(found[f"prediction {name}"]) for name in names[1:]] == pytest.approx(following.tolist(), abs=0.8)
    model: Any = load(tmp_path / "run" / "checkpoint")
    assert model.project.mean.tolist()[1] == pytest.approx(5, abs=0.1)


def test_a_class_for_each_row_of_a_series(tmp_path: Path) -> None:
    rows = [{"a": float(x), "b": float(y), "state": "up" if x > 0 else "down"} for x, y, _ in waves(800)]
    data = write_rows(tmp_path / "x.csv", rows)
    trained(data, tmp_path / "run", objective="tag", label_field="state", **{**SMALL, "steps": 30})
    assert scored(tmp_path, data, tmp_path / "run")["accuracy"] > 0.9
    found = predicted(tmp_path, data, tmp_path / "run")
    assert np.mean([row["prediction"] == row["state"] for row in found]) > 0.9
    assert len(found) == 800


def test_windows_of_channels(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 120)
    t = np.arange(40)
    phase = rng.uniform(0, 6, 120)
    x = np.sin(t[None] / np.where(y, 2, 5)[:, None] + phase[:, None])[:, :, None] * [1.0, -2.0]
    x = x + rng.normal(0, 0.1, x.shape)
    np.savez(tmp_path / "eeg.npz", x=x.astype(np.float32), y=y)
    trained(tmp_path / "eeg.npz", tmp_path / "run", objective="classify", **SMALL)
    assert scored(tmp_path, tmp_path / "eeg.npz", tmp_path / "run")["accuracy"] > 0.9
    assert load(tmp_path / "run" / "checkpoint").config.input_dim == 2
    for i, window in enumerate(x):
        folder = tmp_path / "folders" / f"class{y[i]}"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{i}.npy", window)
    options = ReadOptions(labeled=True)
    spec = StoreSpec((find_source(str(tmp_path / "folders"), options),), (), options, None, 31, 0.0)
    store = open_store(tmp_path / "store", spec)
    assert (store.channels, store.tokens.shape, sorted(store.labels)) == (2, (4800, 2), ["class0", "class1"])


def test_files_that_a_table_names(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng, rows = np.random.default_rng(7), []
    for i in range(60):
        level = int(rng.integers(0, 200))
        pixels = rng.integers(level, level + 50, (9, 9)).astype(np.uint8)
        image.fromarray(pixels).save(tmp_path / f"{i}.png")
        rows.append({"photo": f"{i}.png", "brightness": level / 200})
    data = write_rows(tmp_path / "x.csv", rows)
    flags = {"label_field": "brightness", "file_field": "photo", "image_size": 5}
    trained(data, tmp_path / "run", **flags, **SMALL)
    score = scored(tmp_path, data, tmp_path / "run")
    assert score["r2"] > 0.5
    found = predicted(tmp_path, data, tmp_path / "run")
    errors = [abs(float(row["prediction"]) - float(row["brightness"])) for row in found]
    assert np.mean(errors) == pytest.approx(score["mae"], rel=1e-4)


@pytest.mark.parametrize(
    ("values", "columns", "kind"),
    [
        ([["a"], ["b"]], 1, "classify"),
        ([["0"], ["1"], ["2"]], 1, "classify"),
        ([[i] for i in range(500)], 1, "regress"),
        ([["0.5"], ["1.0"]], 1, "regress"),
        ([[0.5], [2.0]], 1, "regress"),
        ([["0", "1"], ["1", "1"]], 2, "multilabel"),
        ([["0.2", "1"], ["1", "3"]], 2, "regress"),
        ([[["a", "b"]], [["a"]]], 1, "multilabel"),
        ([[True], [False]], 1, "classify"),
    ],
)
def test_the_task_follows_from_the_labels(values: list[list[Any]], columns: int, kind: str) -> None:
    names = [f"c{i}" for i in range(columns)]
    assert guess_task((dict(zip(names, row, strict=True)) for row in values), names) == kind


def test_lists_as_long_as_the_words_are_their_labels() -> None:
    rows = [{"tokens": ["a"] * n, "ner_tags": [0] * n, "ids": [7, 8]} for n in (3, 5)]
    assert guess_task(iter(rows), ["ner_tags"]) == "tag"
    assert guess_task(iter([*rows, {"tokens": ["a"], "ner_tags": [0, 1]}]), ["ner_tags"]) == "multilabel"


def test_no_class_is_a_label_of_several_classes(tmp_path: Path) -> None:
    assert read_label("multilabel", [""], ["tags"]) == ()
    assert read_label("multilabel", [None], ["tags"]) is None
    assert read_label("multilabel", ["", "1"], ["a", "b"]) is None
    rows = [{"text": f"text {i}", "tags": "a|b" if i % 2 else ""} for i in range(5)]
    options = ReadOptions(labeled=True, task="multilabel", label_field=("tags",))
    source = find_source(str(write_rows(tmp_path / "x.csv", rows)), options)
    found = open_store(tmp_path / "s", StoreSpec((source,), (), options, None, 31, 0.0))
    assert found.values is not None
    assert found.values.tolist() == [[i % 2, i % 2] for i in range(5)]


def saved_task(folder: Path, task: SupervisedTask, **model: Any) -> TaskModel:
    """A model with random weights and its task, as a run saves it."""
    torch.manual_seed(3)
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    pooling = "none" if task.per_token else "mean"
    config = ModelConfig(dim=14, depth=1, attention=attention, num_classes=len(task.names), pooling=pooling, **model)
    folder.mkdir()
    write(Classifier(config), folder, task.description())
    found = load_task_model(folder, "cpu")
    assert found is not None
    return found


def answers_for(found: TaskModel, data: Path, context: int = 61, **options: Any) -> list[dict[str, str]]:
    file = io.StringIO()
    predict(found, [str(data)], ReadOptions(**options), file, context=context, batch_size=3)
    file.seek(0)
    return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_predictions_of_vectors_from_every_kind_of_file(kind: Any, tmp_path: Path) -> None:
    names = ("n", "p") if kind == "classify" else ("y",)
    scale = () if kind == "classify" else (1.0,)
    found = saved_task(tmp_path / "model", SupervisedTask(kind, names, scale, scale), input_dim=3)
    x = np.random.default_rng(5).normal(size=(5, 17, 3)).astype(np.float32)
    (tmp_path / "files").mkdir()
    for i, document in enumerate(x):
        np.save(tmp_path / f"files/{i}.npy", document)
        write_rows(tmp_path / f"{i}.csv", [dict(zip("abc", map(float, row), strict=True)) for row in document])
    np.savez(tmp_path / "x.npz", x=x)
    np.save(tmp_path / "x.npy", x)
    write_rows(tmp_path / "list.csv", [{"file": f"{i}.csv"} for i in range(5)])
    write_rows(tmp_path / "arrays.csv", [{"file": f"files/{i}.npy"} for i in range(5)])
    with torch.no_grad():
        outputs = found.model(torch.from_numpy(x)).numpy()
    expected = [names[i] for i in outputs.argmax(1)] if kind == "classify" else (outputs[:, 0] + 1).tolist()
    for data, options in (
        ("x.npz", {}),
        ("x.npy", {}),
        ("files", {}),
        ("[0-4].csv", {}),
        ("list.csv", {"file_field": "file"}),
        ("arrays.csv", {"file_field": "file"}),
    ):
        answers: list[Any] = [row["prediction"] for row in answers_for(found, tmp_path / data, **options)]
        if kind == "regress":
            np.testing.assert_allclose([float(x) for x in answers], expected, atol=1e-5)
        else:
            assert answers == expected, data


def test_data_of_another_kind_than_the_model_reads(tmp_path: Path) -> None:
    text = write_rows(tmp_path / "x.csv", [{"text": "a river"}])
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 5, 3)))
    vectors = saved_task(tmp_path / "vectors", SupervisedTask("classify", ("n", "p")), input_dim=3)
    with pytest.raises(ValueError, match="the model reads vectors, and the data is text or tokens"):
        answers_for(vectors, text)
    words = saved_task(tmp_path / "words", SupervisedTask("classify", ("n", "p")), vocab_size=256)
    with pytest.raises(ValueError, match="the model reads text or tokens, and the data is vectors"):
        answers_for(words, tmp_path / "x.npz")
    options = ReadOptions()
    spec = StoreSpec((find_source(str(tmp_path / "x.npz"), options),), (), options, None, 31, 0.0)
    with pytest.raises(ValueError, match=r"x\.npz has arrays of vectors, which are for --objective classify"):
        open_store(tmp_path / "s", spec)


def test_a_table_of_series_trains_on_vectors(tmp_path: Path) -> None:
    for i in range(3):
        write_rows(tmp_path / f"{i}.csv", [{"time": 5, "a": i, "b": 2.5}] * 7)
    rows = [{"file": f"{i}.csv", "label": "up" if i else "down"} for i in range(3)]
    options = ReadOptions(labeled=True, file_field="file")
    source = find_source(str(write_rows(tmp_path / "list.csv", rows)), options)
    found = open_store(tmp_path / "s", StoreSpec((source,), (), options, None, 31, 0.0))
    assert found.channels == 2
    assert found.tokens[::7].tolist() == [[i, 2.5] for i in range(3)]


def test_labels_of_all_words_of_a_long_document(tmp_path: Path) -> None:
    found = saved_task(tmp_path / "model", SupervisedTask("tag", ("A", "B", "C")), vocab_size=256)
    words = [f"{'xyz'[i % 3]}{i}" for i in range(41)]
    (row,) = answers_for(found, write_rows(tmp_path / "x.jsonl", [{"words": words}]), context=29)
    assert json.loads(row["words"]) == words
    tokens = np.frombuffer(" ".join(words).encode(), np.uint8).astype(np.int64)
    with torch.no_grad():
        parts = [found.model(torch.from_numpy(tokens[None, i : i + 29]))[0] for i in range(0, len(tokens), 29)]
    outputs, spaces = torch.cat(parts), torch.from_numpy(tokens == 32)
    votes = torch.zeros(41, 3).index_add(0, spaces.cumsum(0)[~spaces], outputs[~spaces])
    assert row["prediction"].split() == ["ABC"[i] for i in votes.argmax(1)]


def test_predictions_for_every_table_of_an_archive(tmp_path: Path) -> None:
    found = saved_task(tmp_path / "model", SupervisedTask("classify", ("n", "p")), vocab_size=256)
    rows = [{"text": f"document {i}"} for i in range(7)]
    whole = answers_for(found, write_rows(tmp_path / "x.csv", rows))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(write_rows(tmp_path / "a.csv", rows[:3]), "a.csv")
        archive.write(write_rows(tmp_path / "b.jsonl", rows[3:]), "b.jsonl")
    assert answers_for(found, tmp_path / "x.zip") == whole
    assert len(whole) == 7


def test_labels_of_the_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'price' must be a number, got 'cheap'; use --objective classify for names"):
        read_label("regress", ["cheap"], ["price"])
    with pytest.raises(ValueError, match=r"several label columns are true or false \(1 or 0\), got 7"):
        read_label("multilabel", [7, 0], ["a", "b"])
    assert read_label("multilabel", ["a| b;c"], ["x"]) == ("a", "b", "c")
    assert read_label("tag", ["A B"], ["x"]) == ["A", "B"]
    data = write_rows(tmp_path / "x.jsonl", [{"tokens": ["a", "b"], "tags": ["A"]}])
    options = ReadOptions(labeled=True, task="tag")
    with pytest.raises(ValueError, match=r"x\.jsonl, row 1: 1 labels do not fit 2 words"):
        open_store(tmp_path / "s", StoreSpec((find_source(str(data), options),), (), options, None, 31, 0.0))
    np.save(tmp_path / "x.npy", np.array([[1.0, np.nan]] * 9, np.float32))
    options = ReadOptions(task="forecast")
    with pytest.raises(ValueError, match="vectors must be finite: fill or drop the values that are missing"):
        open_store(
            tmp_path / "s", StoreSpec((find_source(str(tmp_path / "x.npy"), options),), (), options, None, 3, 0.0)
        )


def test_a_language_model_predicts_no_classes(tmp_path: Path) -> None:
    text = tmp_path / "x.txt"
    text.write_text(" ".join(row["note"] for row in text_rows()))
    trained(text, tmp_path / "run", steps=1)
    done = longspan("predict", "--model", tmp_path / "run", "--data", text, log=tmp_path / "log")
    assert done.status == 2
    assert "is a language model, which longspan generate uses" in done.stderr
    assert "reads 256 tokens" in command(tmp_path, "info", "--model", tmp_path / "run")
