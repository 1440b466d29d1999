"""The folder of a run: locked, replaced atomically, verified, and saved at every stop."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training import Command, arguments, curve, longspan, metrics, trained, wait_for_step, write_corpus

from longspan.cli.generate import load_model
from longspan.models.checkpoint import (
    LAST,
    committed_folder,
    find_checkpoint,
    load,
    read_committed,
    replace_folder,
)
from longspan.train import run_checkpoint
from longspan.train.data.readers import DataSource, ReadOptions, find_source
from longspan.train.data.token_store import StoreSpec, TokenStore, open_store
from longspan.train.loggers import format_duration, read_records, truncate_records
from longspan.train.run_folder import locked
from longspan.train.setup import _check_apart
from longspan.train.signals import TrainingTimer
from longspan.train.trainer import Trainer

PREVIOUS = "checkpoint-previous"


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps, with checkpoints of steps 10 and 12."""
    run = tmp_path_factory.mktemp("finished") / "run"
    trained(corpus, run)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_ino) for path in files}


def saved_step(checkpoint: Path) -> int:
    return int(torch.load(checkpoint / "training.pt", weights_only=True)["step"])


def ignore(text: str) -> None:
    """Receive a message."""


# The lock.


def test_a_second_start_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with locked(run, ignore):
        with pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on {socket.gethostname()} since 20"):
            locked(run, ignore).__enter__()
        with pytest.raises(ValueError, match="wait until that run ends, or choose another --out"):
            locked(run, ignore).__enter__()
        (run / ".lock").write_text("")  # Its holder has not written its name yet.
        with pytest.raises(ValueError, match="in use by another process"):
            locked(run, ignore).__enter__()
    assert not (tmp_path / "deep").exists()


def test_of_many_starts_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    barrier, outcomes = threading.Barrier(9), []

    def start() -> None:
        with ExitStack() as stack:
            barrier.wait()
            try:
                stack.enter_context(locked(tmp_path / "run", ignore))
                outcomes.append("locked")
            except ValueError:
                outcomes.append("refused")
            barrier.wait()  # The lock is held until all have tried.

    for _ in range(20):
        outcomes.clear()
        threads = [threading.Thread(target=start) for _ in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["locked"] + ["refused"] * 8


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also if the file remains, and another process has the number in it."""
    code = "import fcntl, sys, time\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    code += "print('locked', flush=True)\ntime.sleep(60)"
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            with pytest.raises(ValueError, match="in use"):
                locked(tmp_path / "run", ignore).__enter__()
        finally:
            holder.kill()
    path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "before"}))
    with locked(tmp_path / "run", ignore):
        assert json.loads(path.read_text())["since"] != "before"
    assert (tmp_path / "run").is_dir()  # It was there before.


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("longspan.train.run_folder.fcntl.flock", refuse)
    said: list[str] = []
    with locked(tmp_path / "run", said.append):
        assert "cannot be locked (Operation not supported): start no second run" in said[0]


HOLD = """
import time
from pathlib import Path
from longspan.train.trainer import Trainer
step = Trainer.train_step
def held(self):
    while self.step == 7 and not (self.folder / "go on").exists():
        time.sleep(0.01)
    step(self)
Trainer.train_step = held
"""


def test_a_live_run_is_not_touched(corpus: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    live = Command(arguments(corpus, run), tmp_path / "live", before=HOLD)
    wait_for_step(run, 7, live)
    before = contents(run)
    other = write_corpus(tmp_path / "other", documents=3, seed=8)
    done = longspan(*arguments(other, run), log=tmp_path / "log")
    after = contents(run)
    (run / "go on").touch()
    assert live.wait().status == 0
    assert done.status == 2
    assert f"run is in use by process {live.process.pid} on" in done.stderr
    assert after == before
    assert curve(metrics(run)) == curve(metrics(finished))


@pytest.mark.slow
def test_every_process_ends_if_the_folder_is_in_use(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "longspan", *arguments(corpus, run, device="cpu")]
    with locked(run, ignore):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode != 0
        # torchrun may end the second process before it has answered.
        assert 1 <= done.stderr.count("longspan: ") == done.stderr.count("is in use by process") <= 2
        assert os.listdir(run) == [".lock"]
    trained(corpus, run, batch_size=6, steps=5)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "resuming from step 5; processes 1 × --batch-size 6 → 2 × --batch-size 3" in done.stderr
    assert done.returncode == 0, done.stderr
    done = longspan(*arguments(corpus, run), log=tmp_path / "log")
    assert done.status == 2
    assert (
        "2 × --batch-size 3 = 6 sequences, this command has 1 × --batch-size 3 = 3: use --batch-size 6" in done.stderr
    )


# What is compared before anything is written.


def test_other_settings_are_refused_before_anything_is_written(corpus: Path, run: Path, tmp_path: Path) -> None:
    before = contents(run)
    os.utime(corpus / "003.txt")  # The store would be built again.
    for changes in ({"model.dim": 32}, {"context": 59}):
        done = longspan(*arguments(corpus, run, **changes), log=tmp_path / "log")
        assert done.status == 2
        assert "is a run with other settings" in done.stderr
    assert contents(run) == before


def described(**changes: Any) -> dict[str, Any]:
    values = {"lr": 0.004, "warmup": 3, "batch_size": 6, "accumulate": 2, "data": ["a"], **changes}
    return {"train": values, "model": {"dim": 24}}


def test_settings_that_may_change() -> None:
    before = {"settings": described(), "processes": 1}

    def compare(processes: int = 1, **changes: Any) -> list[str]:
        return run_checkpoint.check_settings(Path("run"), before, described(**changes), processes)

    assert compare() == []
    assert compare(lr=0.001, warmup=7) == ["--lr 0.004 → 0.001", "--warmup 3 → 7"]
    for changes in ({"lr": 0.005}, {"warmup": 2}, {"batch_size": 3}, {"accumulate": 1}, {"data": ["b"]}):
        with pytest.raises(ValueError, match=f"other settings .train.{next(iter(changes))} "):
            compare(**changes)
    (said,) = compare(processes=3, batch_size=2)
    assert said.startswith("processes 1 × --batch-size 6 → 3 × --batch-size 2: steps read the same sequences")
    with pytest.raises(
        ValueError, match=r"6 sequences, this command has 2 × --batch-size 6 = 12: use --batch-size 3, or"
    ):
        compare(processes=2)
    with pytest.raises(ValueError, match="4 × --batch-size 6 = 24: use the number of processes of before"):
        compare(processes=4)


def test_fields_that_a_run_does_not_know_have_their_defaults(run: Path) -> None:
    path = run / LAST / "training.pt"
    saved = torch.load(path, weights_only=True)
    expected = dict(saved["about"]["settings"]["model"])
    del saved["about"]["settings"]["model"]["positions"]
    torch.save(saved, path)
    path.with_name("SHA256SUMS").unlink()
    loaded = run_checkpoint.load(run)
    assert loaded is not None
    assert loaded[1]["about"]["settings"]["model"] == expected


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "run.json", "checkpoint"):
        run = tmp_path / name.partition(".")[0]
        run.mkdir()
        (run / name).write_text("[1]\n")
        with pytest.raises(ValueError, match=f"is not a run of longspan, and contains {name}"):
            locked(run, ignore).__enter__()
        assert (run / name).read_text() == "[1]\n"
        assert os.listdir(run) == [name]
    (tmp_path / "run" / "run.json").write_text('{"settings": {}}')
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with locked(tmp_path / "run", ignore):
        assert (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "book.txt").write_text("text " * 99)
    with pytest.raises(ValueError, match=r"holds more than a token store \(book.txt\)"):
        make_store(tmp_path / "mine" / "data", tmp_path / "mine" / "data" / "book.txt")
    assert os.listdir(tmp_path / "mine" / "data") == ["book.txt"]


def test_out_inside_the_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to("data")
    for data, out in (
        ("data", "data"),
        ("data", "data/run"),
        ("data", "link/text/run"),
        ("link", "data/text"),
        ("data/text/a.txt", "data/text/a.txt"),
        ("data/**/*.txt", "data/run"),
        ("**", "run"),
        ("data/*/*", "data/run"),
        ("data/*/*.jsonl", "data/run"),
    ):
        with pytest.raises(ValueError, match=r"--out \S+ is inside --data \S+, .* choose an --out elsewhere"):
            _check_apart(Path(out), DataSource(data, ()))
    for data, out in (("data", "run"), ("data/text", "data/run"), ("data/*", "data/run"), ("data/*/*.txt", "data/run")):
        _check_apart(Path(out), DataSource(data, ()))


# Digests.


def flipped(path: Path, seed: int) -> bytes:
    """Flip a bit of a file and return what it was."""
    data = path.read_bytes()
    position, bit = random.Random(seed).randrange(len(data)), seed % 8
    path.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
    return data


@pytest.mark.parametrize("name", ["training.pt", "model.safetensors", "config.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_refused(run: Path, name: str) -> None:
    path = run / LAST / name
    for seed in range(29):
        data = flipped(path, seed)
        with pytest.raises(
            ValueError, match=r"(training.pt|model.safetensors|config.json|SHA256SUMS)\W.*(damaged|lists?)"
        ):
            run_checkpoint.load(run)
        path.write_bytes(data)
    path.unlink()
    if name != "SHA256SUMS":
        with pytest.raises((ValueError, FileNotFoundError), match=name):
            run_checkpoint.load(run)


def make_store(folder: Path, data: Path, **how: Any) -> TokenStore:
    options = ReadOptions()
    return open_store(folder, StoreSpec((find_source(str(data), options),), (), options, None, 31, 0.2), **how)


def test_a_damaged_token_store_is_refused(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    store = make_store(folder, corpus)
    expected = store.tokens.tobytes()
    for name in ("tokens.bin", "segments.npy"):
        for seed in range(7):
            data = flipped(folder / name, seed)
            with pytest.raises(ValueError, match=rf"{name} is damaged.* remove \S+data, and the data is read again"):
                make_store(folder, corpus)
            (folder / name).write_bytes(data)
    metadata = (folder / "store.json").read_bytes()
    (folder / "store.json").write_bytes(metadata.replace(b'"vocab_size": 256', b'"vocab_size": 257'))
    with pytest.raises(ValueError, match=r"store\.json is damaged"):
        make_store(folder, corpus)
    (folder / "store.json").write_bytes(metadata[:-9])
    assert make_store(folder, corpus).metadata == store.metadata  # built again
    (folder / "SHA256SUMS").unlink()  # as before version 0.2: built again
    (folder / "tokens.bin").write_bytes(bytes(len(expected)))
    assert make_store(folder, corpus).tokens.tobytes() == expected


def test_a_damaged_run_is_refused_until_the_last_checkpoint_is_removed(
    corpus: Path, finished: Path, run: Path, tmp_path: Path
) -> None:
    flipped(run / LAST / "training.pt", 3)
    done = longspan(*arguments(corpus, run), log=tmp_path / "log")
    assert done.status == 2
    for words in ("checkpoint/training.pt is damaged", "remove ", "resume from the checkpoint before it"):
        assert words in done.stderr
    assert load_model(run).config.dim == 24  # The model is not damaged.
    shutil.rmtree(run / LAST)
    assert find_checkpoint(run) == (run / PREVIOUS).resolve()
    assert load_model(run).config.dim == 24
    assert curve(trained(corpus, run)) == curve(metrics(finished))
    assert (saved_step(run / LAST), saved_step(run / PREVIOUS)) == (12, 10)


def test_a_store_in_use_keeps_its_tokens(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "text", documents=5)
    store = make_store(tmp_path / "data", data)
    expected, sha256 = store.tokens.tobytes(), store.metadata["sha256"]
    (data / "003.txt").write_text("something else " * 99)
    before = contents(tmp_path / "data")
    with pytest.raises(
        ValueError, match="the data has changed since the run started: restore it, or use another --out"
    ):
        make_store(tmp_path / "data", data, sha256=sha256)
    assert contents(tmp_path / "data") == before
    assert sorted(os.listdir(tmp_path)) == ["data", "text"]
    assert make_store(tmp_path / "data", data).metadata["sha256"] != sha256
    assert store.tokens.tobytes() == expected


# Weights that are not finite.


NOT_FINITE = """
import torch
from longspan.train.trainer import Trainer
step = Trainer.train_step
def broken(self):
    step(self)
    if self.step == 10:
        next(self.objective.parameters()).data[3] = float("inf")
Trainer.train_step = broken
"""


def test_only_finite_weights_are_saved_and_a_lower_rate_resumes(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = longspan(*arguments(corpus, run, eval_every=99), log=tmp_path / "log", before=NOT_FINITE)
    assert done.status == 3
    for words in (
        "the weights are not finite after step 10",
        "the last checkpoint, of step 5, is unchanged",
        "lower --lr",
    ):
        assert words in done.stderr
    assert saved_step(run / LAST) == 5
    assert all(x.isfinite().all() for x in load(run / LAST).state_dict().values())
    assert torch.load(run / "bad-batch.pt", weights_only=True)["step"] == 10
    done = longspan(*arguments(corpus, run, lr=0.001, warmup=4), log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert "resuming from step 5; --lr 0.003 → 0.001; --warmup 3 → 4" in done.stderr
    assert json.loads((run / "run.json").read_text())["settings"]["train"]["lr"] == 0.001
    assert (saved_step(run / LAST), saved_step(run / PREVIOUS)) == (12, 10)


# Stops.


# Under nohup, as in `nohup make test`, processes ignore SIGHUP.
HANDLED = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"


def test_a_signal_in_the_final_evaluation_loses_nothing(corpus: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"save_every": 1000, "eval_every": 1000, "sample_tokens": 10**6}
    command = Command(arguments(corpus, run, **settings), tmp_path / "log", before=HANDLED)
    while command.alive and not any("eval_loss" in record for record in read_records(run / "metrics.jsonl")):
        time.sleep(0.01)
    assert saved_step(run / LAST) == 12
    command.kill(signal.SIGHUP)
    done = command.wait()
    assert done.status == 128 + signal.SIGHUP, done.stderr
    assert "SIGHUP: saved at step 12; run the same command to resume" in done.stderr
    assert saved_step(run / LAST) == 12
    records = trained(corpus, run, save_every=1000, eval_every=1000)
    assert curve(records) == [record for record in curve(metrics(finished)) if record[1] is not None or record[0] == 12]
    assert len((run / "samples.jsonl").read_text().splitlines()) == 1


CLOSED = """
import os
from longspan.train.trainer import Trainer
read, write = os.pipe()
os.dup2(write, 2)
os.close(write)
step = Trainer.train_step
def closing(self):
    step(self)
    if self.step == 4:
        os.close(read)
Trainer.train_step = closing
"""


def test_a_closed_pipe_saves(corpus: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(corpus, tmp_path / "run", save_every=1000), log=tmp_path / "log", before=CLOSED)
    assert done.status == 128 + signal.SIGPIPE
    assert saved_step(tmp_path / "run" / LAST) == 4
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


FAILING = """
import longspan.train.trainer as trainer
def broken(*arguments):
    raise MemoryError("no memory for the evaluation")
trainer.evaluate_held_out = broken
"""


def test_an_error_between_steps_saves(corpus: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(corpus, tmp_path / "run", save_every=1000), log=tmp_path / "log", before=FAILING)
    assert done.status == 1
    assert saved_step(tmp_path / "run" / LAST) == 6


# Checkpoints while they are replaced.


class PowerFailure(BaseException):
    """The process ends here."""


def fail_at(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let the count-th call that changes the disk, and all later ones, fail."""
    calls = itertools.count(1)

    def replaced(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **how: Any) -> Any:
            if next(calls) >= count:
                raise PowerFailure
            return do(*arguments, **how)

        return call

    for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
        patch.setattr(os, name, replaced(getattr(os, name)))


def test_a_run_has_a_checkpoint_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a file of a file manager and a file of the user, which are neither in the way nor lost."""
    run = tmp_path / "run"

    def save(text: str) -> None:
        with replace_folder(run / LAST, ("a",), mark="a", keep=True) as partial:
            (partial / "a").write_text(text)

    def read() -> str:
        return read_committed(find_checkpoint(run), lambda folder: (folder / "a").read_text())

    count, cut = 0, True
    while cut:
        count += 1
        shutil.rmtree(run, ignore_errors=True)
        for text in ("1", "2"):
            save(text)
        (run / LAST / "notes").write_text("mine")
        (run / LAST / ".DS_Store").write_text("")
        with monkeypatch.context() as patch:
            fail_at(count, patch)
            try:
                save("3")
                cut = False
            except PowerFailure:
                cut = True
        assert read() in ("23" if cut else "3")
        assert [path.read_text() for path in run.rglob("notes")] == ["mine"]
        save("4")
        assert read() == "4"
        assert sorted(os.listdir(run)) == [LAST, PREVIOUS]
        assert (run / PREVIOUS / "a").read_text() in "23"
        assert (run / LAST / "notes").read_text() == "mine"
    assert 9 < count < 40


def test_a_checkpoint_on_another_disk_is_a_link(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    (disk / "mine").mkdir(parents=True)
    run.mkdir()
    (run / LAST).symlink_to(disk / "mine")
    for text in ("1", "2"):
        with replace_folder(run / LAST, ("a",), keep=True) as partial:
            (partial / "a").write_text(text)
    assert sorted(os.listdir(disk)) == ["mine", "mine-previous"]
    assert (find_checkpoint(run) / "a").read_text() == "2"
    (disk / "mine").rename(disk / ".mine.new")
    assert read_committed(find_checkpoint(run), lambda path: (path / "a").read_text()) == "2"
    shutil.rmtree(disk / ".mine.new")
    assert (find_checkpoint(run) / "a").read_text() == "1"


def test_a_reader_never_sees_two_saves(tmp_path: Path) -> None:
    folder, calls = tmp_path / "model", []

    def save(text: str) -> None:
        with replace_folder(folder, ("a", "b")) as partial:
            for name in ("a", "b"):
                (partial / name).write_text(text)

    def read(path: Path) -> str:
        first = (path / "a").read_text()
        calls.append(first)
        if len(calls) < 3:
            save(str(len(calls)))
        return first + (path / "b").read_text()

    save("0")
    assert read_committed(folder, read) == "22"
    assert calls == ["0", "1", "2"]


def test_a_checkpoint_cut_in_the_middle_of_a_swap_is_found(corpus: Path, run: Path, tmp_path: Path) -> None:
    (run / LAST).rename(run / ".checkpoint.new")
    assert committed_folder(run / LAST) == run / ".checkpoint.new"
    for words in (["info", "--model", run], ["eval", "--model", run, "--data", corpus / "003.txt"]):
        done = longspan(*words, log=tmp_path / "log")
        assert done.status == 0, done.stderr
    assert load_model(run).config.dim == 24
    loaded = run_checkpoint.load(run)
    assert loaded is not None
    assert loaded[1]["step"] == 12


# Records.


def test_damaged_and_doubled_records_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [{"step": 3, "loss": 1.0}, {"step": 5, "loss": 2.0}, {"step": 5, "eval_loss": 3.0}]
    bad = [b"[1]", b"7", b'{"loss": 1}', b'{"step": "9"}', b"\xff\xfe{", b'{"step": 4, "lo', b"[" * 100_000]
    lines = [json.dumps(record).encode() for record in good]
    path.write_bytes(b"\n".join([lines[0], *bad, *lines, lines[0], b'{"step": 6, "loss": 1.0}']))
    assert [record["step"] for record in read_records(path)] == [3, 3, 5, 5, 3, 6]
    for logged, evaluated, kept in ((True, True, good), (True, False, good[:2]), (False, True, [good[0], good[2]])):
        truncate_records(tmp_path, 5, logged=logged, evaluated=evaluated)
        assert read_records(path) == kept
        path.write_bytes(b"\n".join(lines))


def test_remaining_time_is_not_negative() -> None:
    trainer: Any = SimpleNamespace(
        timer=TrainingTimer(9.0),
        config=SimpleNamespace(objective="masked", steps=None),
        _last_record=(0.0, 0),
        tokens=7,
        step=3,
        lr=0.1,
        device=torch.device("cpu"),
        done=1.01,
    )
    assert Trainer._metrics(trainer, 1.0)["eta"] == 0
    assert format_duration(-3) == "0:00"
