"""Sharded checkpoints of torch.distributed.checkpoint (DCP), written while training goes on.

Every rank writes its shards into a folder that is being written. When all have, the main process adds the other files
and renames the folder: a checkpoint is complete, or it is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map

from longspan.models.checkpoint import file_digest
from longspan.models.sharded import MODEL, OPTIMIZER, ShardReader

Finish = Callable[[dict[str, str]], None]


class AsyncSaver:
    """Writes sharded checkpoints in a thread, one at a time. Every rank must make the same calls."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, finish: Finish) -> None:
        """Copy the weights and the optimizer's state, and write them in the background.

        Args:
            folder: An existing folder, which all ranks see.
            module: The model, its weights sharded or not.
            optimizer: Its optimizer.
            finish: Called on the first rank, in the thread, when all ranks have written, with the SHA-256 of each
                shard file. Its errors are raised by `wait`.
        """
        self.wait()
        state = tree_map(_copied, _state(module, optimizer))
        writer = FileSystemWriter(str(folder), single_file_per_rank=True)
        written: Any = async_save(state, storage_writer=writer, process_group=self._group)
        rank = dist.get_rank()

        def complete() -> None:
            try:
                written.result()
                own = {path.name: file_digest(path) for path in folder.glob(f"__{rank}_*.distcp")}
                digests: list[Any] = [None] * dist.get_world_size() if rank == 0 else []
                dist.gather_object(own, digests if rank == 0 else None, group=self._group)
                if rank == 0:
                    finish({name: digest for part in digests for name, digest in part.items()})
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=complete, name="longspan-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            Exception: What went wrong in the thread.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def load_sharded(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state from a sharded checkpoint; each rank reads what it holds.

    The checkpoint may be of any number of ranks and any mesh. Every rank must call this.

    Args:
        folder: The checkpoint.
        module: The model, its weights sharded or not.
        optimizer: Its optimizer.

    Raises:
        ValueError: A file is damaged, or does not fit the model.
    """
    state = _state(module, optimizer)
    try:
        load(state, storage_reader=ShardReader(str(folder)), no_dist=not dist.is_initialized())
    except Exception as error:  # torch raises errors of several kinds for damaged files.
        raise ValueError(f"{folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    set_model_state_dict(module, state[MODEL])
    set_optimizer_state_dict(module, optimizer, state[OPTIMIZER])


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = get_model_state_dict(module)
    return {MODEL: state, OPTIMIZER: get_optimizer_state_dict(module, optimizer)}


def _copied(x: Any) -> Any:
    """Return a copy of a CPU tensor, which the next step would change; DCP itself copies those of a GPU."""
    return x.detach().clone() if isinstance(x, Tensor) and x.device.type == "cpu" else x
