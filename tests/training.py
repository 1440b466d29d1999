"""Run `longspan` commands in tests, in processes forked from one that has imported torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_CONTEXT = multiprocessing.get_context("forkserver")
# Optimizers import torch._dynamo.
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "longspan.cli", "longspan.cli.train"]
    + [f"longspan.train.{name}" for name in ("dry_run", "evaluation", "report", "synthetic.evaluation", "trainer")]
)

WORDS = [
    *("the", "a", "one", "some", "every", "old", "new", "long", "short", "far", "near", "river", "stone", "house"),
    *("field", "bird", "tree", "light", "water", "word", "runs", "stands", "falls", "turns", "keeps", "finds"),
    *("under", "over", "beside", "before", "after", "and", "but", "so", "then", "again", "slowly", "at", "last"),
]


def write_corpus(folder: Path, *, documents: int = 24, words: tuple[int, int] = (60, 400), seed: int = 7) -> Path:
    """Write text files of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for i in range(documents):
        text = f"document {i}. " + " ".join(draw.choice(WORDS) for _ in range(draw.randint(*words)))
        (folder / f"{i:03}.txt").write_text(text + "\n")
    return folder


# Small and distinct sizes; a split has two heads of each kind.
SMALL = {
    "preset": "tiny",
    "context": 61,
    "batch-size": 3,
    "model.dim": 24,
    "model.depth": 2,
    "model.attention.num_heads": 4,
    "model.feed_forward.mult": 2,
    "steps": 12,
    "warmup": 3,
    "log-every": 1,
    "eval-every": 6,
    "eval-tokens": 500,
    "save-every": 5,
    "sample-tokens": 5,
    # The recipe of the preset has tests of its own.
    "optimizer": "adamw",
    "decay_type": "cosine",
}


def arguments(data: Any, out: Path, **changes: Any) -> list[str]:
    """Return `train` and its flags; True is a flag without a value, None removes one."""
    values = {**SMALL, **{name.replace("__", "."): value for name, value in changes.items()}}
    found = ["train", "--out", str(out)]
    for source in data if isinstance(data, list) else [data]:
        found += ["--data", str(source)]
    for name, value in values.items():
        flag = f"--{name}" if name.startswith("model.") else f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif value is not None:
            found += [flag, str(value)]
    return found


@dataclass
class Result:
    """Outcome of a command; a signal that ended it is a negative status."""

    status: int
    stdout: str
    stderr: str


class Command:
    """A `longspan` command in its own process."""

    def __init__(self, words: list[Any], log: Path, *, before: str | None = None, env: dict[str, str] | None = None):
        self.log = log
        log.mkdir(parents=True, exist_ok=True)
        for name in ("out", "err"):
            (log / name).write_text("")
        self.process = _CONTEXT.Process(target=_main, args=([str(w) for w in words], str(log), before, env or {}))
        self.process.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def wait(self, seconds: float = 120) -> Result:
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {seconds} s:\n{(self.log / 'err').read_text()}")
        return Result(self.process.exitcode, (self.log / "out").read_text(), (self.log / "err").read_text())


def ranks(number: int, words: list[Any] | list[list[Any]], log: Path, **how: Any) -> list[Result]:
    """Run a command in `number` processes of one group, as torchrun starts them; `words` may differ by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    env = {**common, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **how.pop("env", {})}
    commands = []
    for rank in range(number):
        mine = words[rank] if isinstance(words[0], list) else words
        own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        commands.append(Command(mine, log / str(rank), env=own, **how))
    return [command.wait() for command in commands]


class ElasticRun(Command):
    """A command in `number` processes under the agent of torchrun, which restarts them when one dies."""

    def __init__(self, number: int, restarts: int, words: list[Any], log: Path) -> None:
        self.log = log
        log.mkdir(parents=True)
        for name in ("out", "err"):
            (log / name).write_text("")
        arguments = (number, restarts, [str(w) for w in words], str(log))
        self.process = _CONTEXT.Process(target=_elastic, args=arguments)
        self.process.start()

    def workers(self) -> list[psutil.Process]:
        """The processes that run the command."""
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []


def _elastic(number: int, restarts: int, words: list[str], log: str) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ |= {"OMP_NUM_THREADS": "1"}
    _redirect(log)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=Path(log).parent.name,
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, _worker)(words)


def _worker(words: list[str]) -> None:
    import torch

    from longspan.cli import main

    torch.set_num_threads(1)
    main(words)


def longspan(*words: Any, log: Path, **how: Any) -> Result:
    """Run a command to its end."""
    return Command(list(words), log, **how).wait()


def trained(data: Any, out: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train, require success, and return the metrics."""
    done = longspan(*arguments(data, out, **changes), log=out.with_name(out.name + "-log"))
    assert done.status == 0, done.stderr
    return metrics(out)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the metrics that do not depend on time."""
    names = ("step", "loss", "bits_per_byte", "lr", "tokens", "eval_loss", "eval_bits_per_byte")
    return [tuple(record.get(name) for name in names) for record in records]


def wait_for_step(run: Path, step: int, command: Command, seconds: float = 60) -> None:
    """Wait until the run has logged a step or has ended."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and command.alive:
        try:
            lines = (run / "metrics.jsonl").read_bytes().splitlines()
            if lines and json.loads(lines[-1])["step"] >= step:
                return
        except (FileNotFoundError, ValueError):
            pass
        time.sleep(0.001)


def _redirect(log: str) -> None:
    """Write standard output and errors to files."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(log) / name, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)


def _main(words: list[str], log: str, before: str | None, env: dict[str, str]) -> None:
    """Run the command line after the statements `before`, with its output in files."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(env)
    _redirect(log)
    if before is not None:
        exec(before, {})
    from longspan.cli import main

    try:
        main(words)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
