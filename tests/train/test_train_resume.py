"""Resuming: a run that is killed, stopped or fails continues bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Command, arguments, curve, longspan, metrics, trained, wait_for_step, write_corpus

from longspan.models.checkpoint import load

# Everything that has a state: dropout, redrawn features, accumulated gradients, packed sequences, source weights.
EVERYTHING: dict[str, Any] = {
    "steps": 40,
    "save_every": 4,
    "eval_every": 20,
    "accumulate": 2,
    "packing": "on",
    "model.attention.dropout": 0.1,
    "mechanism": '{"mechanism": "performer", "num_features": 7, "redraw_interval": 9}',
}
CARRIED: dict[str, Any] = {"steps": 30, "save_every": 3, "eval_every": 20, "carry_state": True}


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the settings of SMALL, to compare with and to copy."""
    run = tmp_path_factory.mktemp("finished") / "run"
    trained(corpus, run)
    return run


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder))


def killed_until_done(words: list[str], run: Path, kills: int, steps: int, seed: int) -> int:
    """Run a command, killing it at `kills` random moments; return how many of them hit a running process."""
    draw = random.Random(seed)
    log, hit = run.with_name(run.name + "-log"), 0
    moments = sorted(draw.randrange(steps - 10) for _ in range(kills - 1))
    for moment in [-1, *moments]:
        command = Command(words, log)
        if moment >= 0:
            wait_for_step(run, moment, command)
        time.sleep(draw.uniform(0, 0.05))
        command.kill()
        hit += command.wait().status == -signal.SIGKILL
    done = longspan(*words, log=log)
    assert done.status == 0, done.stderr
    return hit


@pytest.mark.parametrize(("settings", "kills"), [(EVERYTHING, 10), (CARRIED, 3)], ids=["everything", "carried state"])
def test_killed_at_random_moments_a_run_continues_bit_for_bit(
    corpus: Path, tmp_path: Path, settings: dict[str, Any], kills: int
) -> None:
    data = [f"3={corpus / '00*.txt'}", f"1={corpus / '0[12]*.txt'}"]
    expected = trained(data, tmp_path / "whole", **settings)
    words = arguments(data, tmp_path / "killed", **settings)
    assert killed_until_done(words, tmp_path / "killed", kills, settings["steps"], seed=3) == kills
    assert curve(metrics(tmp_path / "killed")) == curve(expected)
    names = ("whole", "killed")
    one, other = ((tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in names)
    assert one == other
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in names]
    assert samples[0] == samples[1]


END_AFTER_A_SAVE = """
import os
from longspan.train.trainer import Trainer
save = Trainer._save
def once(self):
    save(self)
    os._exit(9)
Trainer._save = once
"""


def test_a_checkpoint_needs_each_of_its_parts(corpus: Path, tmp_path: Path) -> None:
    """The comparison above can fail: each part of a checkpoint, if left out, changes the curve."""
    settings = {**EVERYTHING, "steps": 12, "save_every": 6}
    expected = curve(trained(corpus, tmp_path / "whole", **settings))
    words = arguments(corpus, tmp_path / "stopped", **settings)
    assert longspan(*words, log=tmp_path / "log", before=END_AFTER_A_SAVE).status == 9
    for removed in ("nothing", "optimizer", "random", "position"):
        run = copied(tmp_path / "stopped", tmp_path / removed)
        path = run / "checkpoint" / "training.pt"
        saved = torch.load(path, weights_only=True)
        if removed == "optimizer":
            saved["optimizer"]["state"] = {}
        elif removed == "random":
            saved["random"] = [{"cpu": torch.Generator().manual_seed(1).get_state()}]
        elif removed == "position":
            saved["position"] = {"drawn": [0]}
        torch.save(saved, path)
        path.with_name("SHA256SUMS").unlink()
        assert (curve(trained(corpus, run, **settings)) == expected) == (removed == "nothing"), removed


def test_a_signal_saves_and_ends(corpus: Path, tmp_path: Path) -> None:
    settings = {"steps": 40, "save_every": 1000, "eval_every": 1000}
    expected = trained(corpus, tmp_path / "whole", **settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        run = tmp_path / number.name
        command = Command(arguments(corpus, run, **settings), tmp_path / "log")
        wait_for_step(run, 7, command)
        command.kill(number)
        done = command.wait()
        assert done.status == 128 + number, done.stderr
        assert f"{number.name}: saved at step" in done.stderr
        assert "Traceback" not in done.stderr
        reached = torch.load(run / "checkpoint" / "training.pt", weights_only=True)["step"]
        assert 7 <= reached < 40
        assert curve(trained(corpus, run, **settings)) == curve(expected)


def test_a_finished_run_is_unchanged_and_can_be_extended(corpus: Path, finished: Path, tmp_path: Path) -> None:
    run, first = copied(finished, tmp_path / "run"), metrics(finished)
    assert trained(corpus, run) == first
    longer = trained(corpus, run, steps=20)
    assert longer[: len(first)] == first
    assert longer[-1]["step"] == 20


def test_settings_that_must_not_change_are_refused(corpus: Path, finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path / "run")
    done = longspan(*arguments(corpus, run, lr=0.5, batch_size=5), log=tmp_path / "log")
    assert done.status == 2
    for word in ("other settings", "train.lr 0.003 → 0.5", "train.batch_size 3 → 5", "--out"):
        assert word in done.stderr
    write_corpus(corpus.parent / "other", seed=8)
    done = longspan(*arguments(corpus.parent / "other", run), log=tmp_path / "log")
    assert done.status == 2
    assert "train.data" in done.stderr
    trained(corpus, run, log_every=2, save_every=7, eval_every=3, prompt="x")


def test_changed_data_is_refused(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "text")
    trained(data, tmp_path / "run", steps=1)
    (data / "003.txt").write_text("something else entirely, but long enough to be read " * 9)
    done = longspan(*arguments(data, tmp_path / "run", steps=20), log=tmp_path / "log")
    assert done.status == 2
    assert "has changed since the run started" in done.stderr


def test_a_run_contains_a_model_and_no_temporary_files(finished: Path) -> None:
    assert load(finished / "checkpoint").config.dim == 24
    names = {"checkpoint", "checkpoint-previous", "config.json", "data", "metrics.jsonl", "run.json", "samples.jsonl"}
    assert {p.name for p in finished.iterdir()} == names


NAN = """
import longspan.train.objectives as objectives
forward, calls = objectives.Objective.forward, []
def broken(self, *arguments, **how):
    calls.append(1)
    loss, state = forward(self, *arguments, **how)
    return loss * {factor} if len(calls) {when} else loss, state
objectives.Objective.forward = broken
"""


def test_a_loss_of_nan_stops_the_run_and_saves_the_batch(corpus: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = NAN.format(factor="float('nan')", when="== 8")
    done = longspan(*arguments(corpus, run), log=tmp_path / "log", before=before)
    assert done.status == 3
    assert "the loss of step 8 is nan" in done.stderr
    assert "bad-batch.pt" in done.stderr
    assert "Traceback" not in done.stderr
    bad = torch.load(run / "bad-batch.pt", weights_only=True)
    assert bad["step"] == 8
    assert bad["batches"][0]["tokens"].shape == (3, 61)
    assert torch.load(run / "checkpoint" / "training.pt", weights_only=True)["step"] == 5
    assert [r["step"] for r in metrics(run) if "loss" in r] == [1, 2, 3, 4, 5, 6, 7]
    assert curve(trained(corpus, run)) == curve(metrics(finished))


def test_a_diverging_loss_stops_the_run_and_one_large_loss_does_not(corpus: Path, tmp_path: Path) -> None:
    words = arguments(corpus, tmp_path / "run", steps=75)
    done = longspan(*words, log=tmp_path / "log", before=NAN.format(factor="20.0", when=">= 58"))
    assert done.status == 3
    assert "the loss has diverged since step 58" in done.stderr
    assert torch.load(tmp_path / "run" / "checkpoint" / "training.pt", weights_only=True)["step"] == 55
    assert torch.load(tmp_path / "run" / "bad-batch.pt", weights_only=True)["batches"][0]["tokens"].shape == (3, 61)
    spared = NAN.format(factor="20.0", when=">= 3")  # It resumes from step 55.
    assert longspan(*words, "--divergence", "0", log=tmp_path / "log", before=spared).status == 0
    odd = NAN.format(factor="20.0", when="== 58")
    done = longspan(*arguments(corpus, tmp_path / "odd", steps=75), log=tmp_path / "log", before=odd)
    assert done.status == 0, done.stderr


def test_a_full_disk_during_a_save_leaves_the_last_checkpoint(corpus: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert longspan(*arguments(corpus, run), log=tmp_path / "log", before=END_AFTER_A_SAVE).status == 9
    size = (run / "checkpoint" / "training.pt").stat().st_size
    # A limit on the size of files stands in for a full disk.
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}))"
    done = longspan(*arguments(corpus, run), log=tmp_path / "log", before=limit)
    assert done.status == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert torch.load(run / "checkpoint" / "training.pt", weights_only=True)["step"] == 5
    assert load(run / "checkpoint").config.dim == 24
    assert curve(trained(corpus, run)) == curve(metrics(finished))


FULL = """
import shutil, collections
shutil.disk_usage = lambda path: collections.namedtuple("usage", "total used free")(10**9, 10**9 - 4096, 4096)
"""


def test_a_full_disk_and_a_closed_folder_are_reported_before_training(corpus: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(corpus, tmp_path / "run"), log=tmp_path / "log", before=FULL)
    assert done.status == 1
    assert "its checkpoints need" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "file").write_text("")
    done = longspan(*arguments(corpus, tmp_path / "file"), log=tmp_path / "log")
    assert done.status == 1
    assert "file" in done.stderr
    if os.geteuid() != 0:  # The superuser may write anywhere.
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        done = longspan(*arguments(corpus, closed / "run"), log=tmp_path / "log")
        assert done.status == 1
        assert "closed" in done.stderr
