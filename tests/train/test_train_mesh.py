"""Runs with --mesh: the losses of one process, sharded checkpoints, restarts, and the errors for wrong input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import arguments, longspan, metrics, ranks, trained, write_corpus

from longspan.models.checkpoint import load

# Stop by a signal after a step, as a scheduler would: all processes save.
STOP = """
from longspan.train.trainer import Trainer
after = Trainer._after_step
def stop(self):
    after(self)
    self.signals.received = 15 if self.step == 2 else 0
Trainer._after_step = stop
"""
SETTINGS: dict[str, Any] = {"steps": 4, "eval_every": 2, "save_every": 3, "sample_tokens": 3}
PERFORMER = {
    "accumulate": 2,
    "packing": "on",
    "mechanism": '{"mechanism": "performer", "num_features": 7, "redraw_interval": 4}',
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


def assert_same_losses(run: Path, expected: Path) -> None:
    """Losses and evaluations agree up to rounding."""
    found, wanted = metrics(run), metrics(expected)
    assert [(r["step"], r["tokens"]) for r in found] == [(r["step"], r["tokens"]) for r in wanted]
    for name in ("loss", "eval_loss"):
        pairs = [(a[name], b[name]) for a, b in zip(found, wanted, strict=True) if name in b]
        assert pairs
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=2e-6)


def run_ranks(number: int, corpus: Path, out: Path, *, status: int = 0, before: str | None = None, **how: Any) -> None:
    log = out.with_name(f"{out.name}-log")
    done = ranks(number, arguments(corpus, out, **how), log, before=before)
    assert [result.status for result in done] == [status] * number, done


def test_a_mesh_matches_one_process_and_its_checkpoint_fits_other_meshes(corpus: Path, tmp_path: Path) -> None:
    """With packing, random features redrawn and accumulation; stopped after two steps and resumed elsewhere."""
    settings = {**SETTINGS, **PERFORMER}
    trained(corpus, tmp_path / "one", **settings, batch_size=4)
    run_ranks(4, corpus, tmp_path / "four", status=143, before=STOP, **settings, batch_size=2, mesh="dp=2,cp=2")
    stopped = tmp_path / "four" / "checkpoint"
    assert sorted(path.name for path in stopped.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(4)]
    assert json.loads((tmp_path / "four" / "run.json").read_text())["processes"] == 4
    for name in ("alone", "two"):
        shutil.copytree(tmp_path / "four", tmp_path / name)
    run_ranks(4, corpus, tmp_path / "four", **settings, batch_size=2, mesh="fsdp=-1,cp=2")
    run_ranks(2, corpus, tmp_path / "two", **settings, batch_size=2, mesh="fsdp=2")
    trained(corpus, tmp_path / "alone", **settings, batch_size=4)
    for name in ("four", "two", "alone"):
        assert_same_losses(tmp_path / name, tmp_path / "one")
        assert len((tmp_path / name / "samples.jsonl").read_text().splitlines()) == 2
    done = longspan("export", tmp_path / "four", tmp_path / "exported", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "exported")) == ["config.json", "model.safetensors"]
    one, four = (load(tmp_path / name).state_dict() for name in ("one/checkpoint", "exported"))
    assert (tmp_path / "one" / "checkpoint" / "model.safetensors").exists()
    for name, x in one.items():
        torch.testing.assert_close(four[name], x, rtol=1e-3, atol=1e-5)
    assert not list((tmp_path / "alone" / "checkpoint").glob("*.distcp"))
