"""Run a function in several processes of a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(function: Any, ranks: int, *rest: Any, timeout: float = 60) -> None:
    """Call function(rank, ranks, *rest) in each process; raise what one of them raises."""
    arguments = function, ranks, _prepare(), timeout, rest
    mp.start_processes(_run, args=arguments, nprocs=ranks, start_method="forkserver")


def spawn_apart(function: Any, ranks: int, folder: Path, *rest: Any, timeout: float, limit: float) -> list[str]:
    """Call function(rank, ranks, *rest) in each process; return what each raised, after at most `limit` seconds each.

    One that fails leaves the others alone; one that still runs at the end is killed, and its answer is "hangs".
    """
    port, context = _prepare(), multiprocessing.get_context("forkserver")
    processes = []
    for rank in range(ranks):
        arguments = rank, function, ranks, port, timeout, rest, folder / f"{rank}.txt"
        processes.append(context.Process(target=_run_apart, args=arguments))
        processes[-1].start()
    answers = []
    for rank, process in enumerate(processes):
        process.join(limit)
        answer = folder / f"{rank}.txt"
        answers.append(answer.read_text() if answer.exists() else "hangs" if process.is_alive() else "died")
        if process.is_alive():
            process.kill()
    return answers


def _prepare() -> int:
    """Have a server import once what all processes need; return a free port."""
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "longspan.hf", "pytest"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _run(rank: int, function: Any, ranks: int, port: int, timeout: float, rest: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    where, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=limit)
    function(rank, ranks, *rest)
    dist.destroy_process_group()


def _run_apart(
    rank: int, function: Any, ranks: int, port: int, timeout: float, rest: tuple[Any, ...], to: Path
) -> None:
    answer = "returned"
    try:
        _run(rank, function, ranks, port, timeout, rest)
    except Exception:
        answer = traceback.format_exc()
    to.write_text(answer)
    os._exit(answer != "returned")
