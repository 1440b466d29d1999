"""Process groups of a run that torchrun may restart.

Restarted processes find the store of the attempt before, with the addresses of processes that are dead. The processes
of an attempt therefore agree on a prefix of their own before anything else is read from the store.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NAME = "longspan"


def init_process_group(backend: str, timeout: timedelta | None = None) -> None:
    """Create the default process group from the environment of torchrun, apart from that of an earlier attempt.

    Args:
        backend: As for `torch.distributed.init_process_group`.
        timeout: The longest time that a collective may take; PyTorch's default unless given.

    Raises:
        TimeoutError: Some processes did not come.
    """
    distributed: Any = dist
    store, rank, world_size = next(iter(distributed.rendezvous("env://")))
    store = distributed.PrefixStore(agree_on_prefix(store, rank, world_size), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def agree_on_prefix(store: Any, rank: int, world_size: int, limit: float = 1800.0) -> str:
    """Return a text that all processes of this attempt, and no others, get.

    Every process announces a number that no earlier one had. The first answers each of them, under that number, with
    the prefix, until all have confirmed: what earlier attempts left in the store is answered too, and ignored.

    Args:
        store: A store that all processes share, with keys of earlier attempts.
        rank: The number of this process.
        world_size: The number of processes.
        limit: Seconds to wait for the others.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + limit
    prefix = f"{_NAME}/{own}" if rank == 0 else None
    store.set(f"{_NAME}/process/{rank}", own)
    missing = list(range(1, world_size)) if rank == 0 else []
    while prefix is None or missing:
        for other in missing:
            if store.check([f"{_NAME}/process/{other}"]):
                number = store.get(f"{_NAME}/process/{other}").decode()
                store.set(f"{_NAME}/answer/{number}", prefix or "")
        missing = [other for other in missing if not store.check([f"{prefix}/confirmed/{other}"])]
        if rank and store.check([f"{_NAME}/answer/{own}"]):
            prefix = store.get(f"{_NAME}/answer/{own}").decode()
            store.set(f"{prefix}/confirmed/{rank}", "")
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {rank} waited {limit:.0f} s for the other processes: start all {world_size}")
        if prefix is None or missing:
            time.sleep(0.01)
    return prefix
