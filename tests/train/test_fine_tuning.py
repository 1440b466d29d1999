"""Start from a checkpoint, freeze parameters, and resume by the folder alone."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from training import WORDS, arguments, curve, longspan, metrics, trained, write_corpus

from longspan import load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a language model."""
    folder = tmp_path_factory.mktemp("base")
    trained(write_corpus(folder / "text"), folder / "run")
    return folder / "run"


def equal(one: Any, two: Any, names: Any) -> list[bool]:
    return [torch.equal(one[name], two[name]) for name in names]


def start(data: Path, out: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Train a step and return the weights with the messages; shapes of the model are those of --init."""
    mine = dict.fromkeys(("model.dim", "model.depth", "model.attention.num_heads", "model.feed_forward.mult"))
    done = longspan(*arguments(data, out, **{**mine, "steps": 1, **changes}), log=out.with_name("log"))
    assert done.status == 0, done.stderr
    return load(out).state_dict(), done.stderr


def test_a_run_starts_from_another_with_a_longer_context(base: Path, tmp_path: Path) -> None:
    data = base.parent / "text"
    before = load(base).state_dict()
    after, said = start(data, tmp_path / "run", init=base, context=127, lr=1e-12, weight_decay=0)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    assert f"{len(before)} of {len(before)} tensors are from {base}" in said
    other, _ = start(data, tmp_path / "other", context=127, lr=1e-12, **{"model.dim": 24, "model.depth": 2})
    assert not torch.equal(other["embedding.weight"], before["embedding.weight"])


def test_a_language_model_becomes_a_classifier_with_a_frozen_body(base: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    data = tmp_path / "x.csv"
    with data.open("w", newline="") as file:
        rows = [(" ".join(draw.choices(WORDS, k=9)), draw.choice("ab")) for _ in range(40)]
        csv.writer(file).writerows([("text", "label"), *rows])
    before = load(base).state_dict()
    after, said = start(data, tmp_path / "run", init=base, objective="classify", freeze="body", steps=3)
    body = [name for name in after if name.startswith("body.")]
    assert all(equal({f"body.{name}": x for name, x in before.items()}, after, body))
    assert "new: to_classes.bias, to_classes.weight; not taken over: body.to_logits" in said
    assert not torch.equal(after["to_classes.bias"], torch.zeros(2))
    done = longspan(*arguments(data, tmp_path / "no", objective="classify", freeze="bodi"), log=tmp_path / "log")
    assert done.status == 2
    assert "--freeze bodi is no parameter of the model; it has body, to_classes" in done.stderr


def test_init_refuses_what_is_no_checkpoint(base: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(base.parent / "text", tmp_path / "run", init=tmp_path), log=tmp_path / "log")
    assert done.status == 2
    assert f"--init {tmp_path} is no checkpoint of a model that can be trained" in done.stderr


def test_the_folder_alone_resumes_a_run(base: Path, tmp_path: Path) -> None:
    data = base.parent / "text"
    whole = trained(data, tmp_path / "whole", steps=12, min_lr=1)
    trained(data, tmp_path / "run", steps=7, min_lr=1)
    done = longspan("train", "--out", tmp_path / "run", "--steps", "12", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert "resuming from step 7" in done.stderr
    losses = [{r["step"]: r["loss"] for r in records if "loss" in r} for records in (whole, metrics(tmp_path / "run"))]
    assert losses[0] == losses[1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["train"]["steps"] == 12
    done = longspan("train", "--out", tmp_path / "run", "--model.dim", "9", log=tmp_path / "log")
    assert "--model.dim cannot change in a run that is resumed" in done.stderr
    done = longspan("train", "--out", tmp_path / "nothing", log=tmp_path / "log")
    assert "there is nothing to train on: give --data" in done.stderr


def test_a_run_is_loaded_by_its_folder(base: Path) -> None:
    one, two = load(base).state_dict(), load(base / "checkpoint").state_dict()
    assert all(equal(one, two, one))
    assert curve(metrics(base))
