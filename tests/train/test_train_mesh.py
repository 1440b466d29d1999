"""Runs with --mesh: the losses of one process, sharded checkpoints, restarts, and the errors for wrong input."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from training import ElasticRun, arguments, longspan, metrics, ranks, trained, write_corpus

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


def kill_at_random(run: Path, elastic: ElasticRun, kills: int, seed: int) -> int:
    """Kill one of the workers at random moments after the first checkpoint; return the number of kills."""
    draw, done = random.Random(seed), 0
    while done < kills and elastic.alive:
        before = metrics(run)[-1]["step"] if (run / "checkpoint").exists() else None
        time.sleep(draw.uniform(0.05, 0.4))
        workers = elastic.workers()
        if before is None or not workers or not metrics(run):
            continue
        try:
            draw.choice(workers).kill()
        except psutil.NoSuchProcess:
            continue
        done += 1
        deadline = time.monotonic() + 60
        gone = {worker.pid for worker in workers}
        while elastic.alive and time.monotonic() < deadline:  # until it was restarted and has trained on
            if not gone & {worker.pid for worker in elastic.workers()} and metrics(run)[-1]["step"] > before + 1:
                break
            time.sleep(0.02)
    return done


def check_restarts(corpus: Path, folder: Path, kills: int, steps: int) -> None:
    settings = {**SETTINGS, "steps": steps, "save_every": 1, "eval_every": 1000, "sample_tokens": 0}
    trained(corpus, folder / "one", **settings, batch_size=4)
    words = arguments(corpus, folder / "two", **settings, batch_size=4, mesh="cp=2")
    elastic = ElasticRun(2, kills + 2, words, folder / "log")
    killed = kill_at_random(folder / "two", elastic, kills, seed=3)
    done = elastic.wait(300)
    assert done.status == 0, done.stderr
    assert killed == kills, f"the run ended after {killed} kills"
    assert done.stderr.count("resuming from step") >= kills
    assert_same_losses(folder / "two", folder / "one")


def test_a_killed_process_costs_a_restart_from_the_last_checkpoint(corpus: Path, tmp_path: Path) -> None:
    check_restarts(corpus, tmp_path, kills=2, steps=30)


@pytest.mark.slow
def test_ten_random_kills(corpus: Path, tmp_path: Path) -> None:
    check_restarts(corpus, tmp_path, kills=10, steps=200)
