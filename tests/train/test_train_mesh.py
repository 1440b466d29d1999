"""Runs with --mesh: the losses of one process, sharded checkpoints, restarts, and the errors for wrong input."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from training import ElasticRun, arguments, longspan, metrics, ranks, trained, write_corpus

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.distributed.mesh import MeshShape, shard_weights
from longspan.distributed.rendezvous import agree_on_prefix
from longspan.models.checkpoint import LAST, load
from longspan.models.sharded import ShardReader
from longspan.train.config import resolve
from longspan.train.data.batches import BatchShape
from longspan.train.run_checkpoint import ShardedCheckpoint
from longspan.train.run_folder import check_shared
from longspan.train.setup import make_mesh

RUN = Path(__file__).parent.parent / "guards" / "fixtures" / "run" / "out"
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
    shutil.copytree(tmp_path / "four", tmp_path / "alone")
    run_ranks(2, corpus, tmp_path / "four", **settings, batch_size=2, mesh="fsdp=-1")
    trained(corpus, tmp_path / "alone", **settings, batch_size=4)
    for name in ("four", "alone"):
        assert_same_losses(tmp_path / name, tmp_path / "one")
        assert len((tmp_path / name / "samples.jsonl").read_text().splitlines()) == 2
    done = longspan("export", tmp_path / "four", tmp_path / "exported", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "exported")) == ["config.json", "model.safetensors", "modeling_longspan.py"]
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
    check_restarts(corpus, tmp_path, kills=1, steps=7)


@pytest.mark.slow
def test_ten_random_kills(corpus: Path, tmp_path: Path) -> None:
    check_restarts(corpus, tmp_path, kills=10, steps=90)


WRONG: list[tuple[str, dict[str, Any], dict[str, Any], bool, str]] = [
    ("world", {"mesh": "dp=2,cp=2"}, {}, False, "--mesh dp=2,cp=2 needs 4 processes, and there are 2"),
    ("settings", {"mesh": "cp=2"}, {"seed": 7}, False, "different settings (train.seed: 0 and 7)"),
    ("data", {}, {}, True, "processes 0 and 1 have different data or checkpoints (data: "),
    ("model", {"mesh": "fsdp=2", "batch_size": 1}, {}, False, "is a run with other settings"),
]


def files(folder: Path) -> dict[Path, int]:
    """The folders, and the files with their time of change."""
    return {path: 0 if path.is_dir() else path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("case", "settings", "second", "apart", "message"), WRONG, ids=[case for case, *_ in WRONG])
def test_wrong_input_ends_every_process_and_writes_nothing(
    corpus: Path, tmp_path: Path, case: str, settings: dict[str, Any], second: dict[str, Any], apart: bool, message: str
) -> None:
    data, out, before = corpus, tmp_path / "run", None
    if apart:  # Every process has a disk of its own.
        for rank in range(2):
            write_corpus(tmp_path / str(rank) / "text", documents=5, seed=rank)
        data, out = Path("text"), Path("run")
        before = f"import os; os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])"
    if case == "model":
        shutil.copytree(RUN, out)
    found = files(tmp_path)
    words = [arguments(data, out, **settings, **changes) for changes in ({}, second)]
    done = ranks(2, words, tmp_path.with_name(f"{tmp_path.name}-log"), before=before)
    assert [result.status for result in done] == [2, 2]
    first, other = (result.stderr.strip().splitlines() for result in done)
    assert message in first[-1]
    assert first[-1].startswith("longspan: ")
    assert not [line for line in other if line.startswith("longspan:")]  # The main process has said it.
    assert files(tmp_path) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,tp=2", "'tp' is no axis; axes are dp, fsdp, cp"),
        ("dp=2,dp=2", "'dp' is given twice"),
        ("dp=0", "dp must be a positive integer, or -1 for the rest, got '0'"),
        ("cp=two", "got 'two'"),
        ("cp", "got ''"),
        ("dp=-1,cp=-1", "only one axis can be -1"),
    ],
)
def test_a_mesh_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MeshShape.parse(text)


def test_a_mesh_fits_the_processes() -> None:
    assert MeshShape.parse("fsdp=-1, cp=3").fit(12) == MeshShape(1, 4, 3)
    assert str(MeshShape.parse("fsdp=2,cp=3")) == "fsdp=2,cp=3"
    assert MeshShape(2, 3, 5).data_ranks == 6
    with pytest.raises(ValueError, match="--mesh fsdp=-1,cp=3 needs a multiple of 3 processes, and there are 4"):
        MeshShape.parse("fsdp=-1,cp=3").fit(4)


def test_options_that_cannot_divide_sequences_are_refused() -> None:
    accelerator = SimpleNamespace(num_processes=2, distributed_type="MULTI_CPU", mixed_precision="no")
    for given in ({"chunk_length": 5}, {"compile": "on"}):
        settings = resolve({"data": ["x"], "out": "y", "mesh": "cp=2", **given}).train
        with pytest.raises(ValueError, match=r"cannot be combined with --mesh cp=2: use cp=1"):
            make_mesh(settings, accelerator)
    with pytest.raises(ValueError, match="over 2 ranks, more than the 1 tokens of --context: use a longer --context"):
        make_mesh(resolve({"data": ["x"], "out": "y", "mesh": "cp=2", "context": 1}).train, accelerator)
    accelerator.mixed_precision = "fp16"
    with pytest.raises(ValueError, match="--mesh cannot be combined with --precision fp16"):
        make_mesh(resolve({"data": ["x"], "out": "y", "mesh": "dp=2"}).train, accelerator)


def test_every_process_evaluates_as_many_batches() -> None:
    """Sharded weights are gathered by all processes together."""
    for number in range(9):
        shapes = [BatchShape(31, 3, processes=4, process=i) for i in range(4)]
        counts = [len(range(shape.process, number, 4)) + shape.has_spare_batch(number) for shape in shapes]
        assert len(set(counts)) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"residual": "hyper"}, "connections.0.mix_scale"),
        ({"norm_position": "rezero"}, "branches.0.weight"),
        ({"final_norm": "scale"}, "norm.scale"),
    ],
)
def test_scalars_are_not_sharded(options: dict[str, Any], name: str) -> None:
    attention = AttentionConfig(num_heads=2)
    model = LanguageModel(ModelConfig(dim=8, depth=1, causal=True, vocab_size=9, attention=attention, **options))
    with pytest.raises(
        ValueError, match=rf"FSDP does not shard scalars such as \S*{re.escape(name)}: .* without --mesh"
    ):
        shard_weights(model, SimpleNamespace())  # type: ignore[arg-type]


def test_a_folder_that_a_process_does_not_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of the main process is not visible on .* that all nodes share"):
        check_shared(tmp_path, main=False)
    check_shared(tmp_path, main=True)
    (tmp_path / ".lock").touch()
    check_shared(tmp_path, main=False)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    # A dotted name reaches what a module imports: here os.mkdir, by way of a module of DCP.
    module, folder = b"torch.distributed.checkpoint.filesystem", str(tmp_path / "made").encode()
    words = b"".join(b"\x8c" + bytes([len(word)]) + word for word in (module, b"os.mkdir"))
    dotted = b"\x80\x04" + words + b"\x93\x8c" + bytes([len(folder)]) + folder + b"\x85R."
    for contents, name in ((pickle.dumps(Harmful()), "posix.mkdir"), (dotted, "os.mkdir")):
        (tmp_path / ".metadata").write_bytes(contents)
        with pytest.raises(ValueError, match=rf"\.metadata is damaged: .*{name} does not belong into it"):
            ShardReader(str(tmp_path)).read_metadata()
        assert not (tmp_path / "made").exists()


def test_processes_of_an_attempt_agree_apart_from_those_before() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            attempt = [pool.submit(agree_on_prefix, store, rank, 3, 20.0) for rank in (2, 1, 0)]
            prefixes = {future.result() for future in attempt}
            assert len(prefixes) == 1
            assert not store.check([f"{prefixes.pop()}/seen"])
    with pytest.raises(TimeoutError, match=r"process 0 waited 0 s for the other processes: start all 2"):
        agree_on_prefix(dist.HashStore(), 0, 2, 0.05)


def test_a_sharded_checkpoint_has_the_chat_template_of_the_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(name)
    for step in range(2):  # The second replaces the first.
        checkpoint = ShardedCheckpoint(tmp_path, source / "tokenizer.json", keep=False)
        checkpoint.open()
        checkpoint.finish({}, {}, {"step": step})
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / LAST / name).read_text() == name


# A loss that diverges in the step after a checkpoint, while this is being written, slowly.
DIVERGE = """
import time
from longspan.train.run_checkpoint import ShardedCheckpoint
from longspan.train.trainer import Trainer
finish, after = ShardedCheckpoint.finish, Trainer._after_step
def slowly(self, *rest):
    time.sleep(2)
    finish(self, *rest)
def diverge(self):
    if self.step == 3:
        self.read_loss()
        raise self._bad_batch(3, "the loss has diverged")
    after(self)
    if self.step == 2:
        self._save()
ShardedCheckpoint.finish, Trainer._after_step = slowly, diverge
"""


@pytest.mark.slow
def test_a_run_that_stops_completes_its_checkpoint(corpus: Path, tmp_path: Path) -> None:
    run_ranks(2, corpus, tmp_path / "run", status=3, before=DIVERGE, **SETTINGS, mesh="cp=2")
    saved = torch.load(tmp_path / "run" / "checkpoint" / "training.pt", weights_only=True)
    assert saved["step"] == 2
    assert saved["window"] == []  # not the loss of step 3, for which resuming would remove the metrics of step 2
    assert not (tmp_path / "run" / ".checkpoint.partial").exists()


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "pieces": ({"packing": "off", "chunk_length": 17}, "fsdp=2"),
    "carried": ({"carry_state": True}, "fsdp=2"),
    "carried pieces": ({"carry_state": True, "chunk_length": 17}, "dp=2"),
    "masked": ({"objective": "masked"}, "cp=2"),
    "reversed": ({"model.residual": "double", "model.execution": "reverse"}, "fsdp=2"),
    "windows": ({"packing": "off"}, "cp=2"),
    "carried and divided": ({"carry_state": True}, "cp=2"),
    "classes": ({"objective": "classify", "held_out": 0.3}, "cp=2"),
}


@pytest.mark.slow
def test_a_checkpoint_fits_another_mesh_of_as_many_processes(corpus: Path, tmp_path: Path) -> None:
    trained(corpus, tmp_path / "one", **SETTINGS, batch_size=4)
    run_ranks(4, corpus, tmp_path / "four", status=143, before=STOP, **SETTINGS, batch_size=1, mesh="dp=2,fsdp=2")
    run_ranks(4, corpus, tmp_path / "four", **SETTINGS, batch_size=2, mesh="fsdp=-1,cp=2")
    assert_same_losses(tmp_path / "four", tmp_path / "one")
    generate = ("generate", "--model", tmp_path / "four", "--prompt", "the", "--max-tokens", "3")
    for words in (("report", tmp_path / "four"), generate):
        done = longspan(*words, log=tmp_path / "log")
        assert done.status == 0, done.stderr


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_a_mesh(corpus: Path, tmp_path: Path) -> None:
    trained(corpus, tmp_path / "one", **SETTINGS, batch_size=4)
    words = arguments(corpus, tmp_path / "two", **SETTINGS, batch_size=4)
    assert longspan(*words, log=tmp_path / "log", before=STOP).status == 143
    run_ranks(2, corpus, tmp_path / "two", **SETTINGS, batch_size=2, mesh="fsdp=2")
    assert_same_losses(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_other_runs_match_one_process(corpus: Path, tmp_path: Path, case: str) -> None:
    changes, mesh = OTHERS[case]
    if case == "classes":
        for i, path in enumerate(sorted(write_corpus(tmp_path / "text").iterdir())):
            (tmp_path / "classes" / str(i % 2)).mkdir(parents=True, exist_ok=True)
            path.rename(tmp_path / "classes" / str(i % 2) / path.name)
        corpus = tmp_path / "classes"
    trained(corpus, tmp_path / "one", **SETTINGS, **changes, batch_size=4)
    size = 4 if mesh == "cp=2" else 2
    run_ranks(2, corpus, tmp_path / "two", **SETTINGS, **changes, batch_size=size, mesh=mesh)
    assert_same_losses(tmp_path / "two", tmp_path / "one")
