"""Run a function in several processes of a gloo group."""

from __future__ import annotations

import multiprocessing
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(function: Any, ranks: int, *rest: Any, timeout: float = 60) -> None:
    """Call function(rank, ranks, *rest) in each process; raise what one of them raises."""
    # The server imports once what all processes need.
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "longspan.distributed", "pytest"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = function, ranks, port, timeout, rest
    mp.start_processes(_run, args=arguments, nprocs=ranks, start_method="forkserver")


def _run(rank: int, function: Any, ranks: int, port: int, timeout: float, rest: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    where, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=limit)
    function(rank, ranks, *rest)
    dist.destroy_process_group()
