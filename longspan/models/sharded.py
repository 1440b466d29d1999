"""Read sharded checkpoints, which torch.distributed.checkpoint (DCP) wrote from any number of ranks.

Files: `.metadata`, which tensor is where, and `__<rank>_<number>.distcp`, the tensors. `.metadata` is a pickle: it is
read by an unpickler that knows the classes of DCP's metadata and no others.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

METADATA = ".metadata"
MODEL, OPTIMIZER = "model", "optimizer"  # the parts of a checkpoint
_CLASSES = "torch.distributed.checkpoint.metadata"
_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "dict"),
    ("builtins", "list"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class ShardReader(FileSystemReader):
    """A reader of a DCP folder that executes nothing in it.

    Raises:
        ValueError: `.metadata` is damaged, or contains objects of other kinds.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of `.metadata`."""
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file:
                found = _Unpickler(file).load()
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError(f"it contains a {type(found).__name__}")
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module == _CLASSES and "." not in name else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into it")


def is_sharded(folder: Path) -> bool:
    """Return whether a folder holds a sharded checkpoint."""
    return (folder / METADATA).is_file()


def shard_files(folder: Path) -> list[str]:
    """Return the names of the files of a sharded checkpoint; none for a folder that is not one, or does not exist."""
    found = [path.name for path in folder.glob("*.distcp")] if folder.is_dir() else []
    return sorted([*found, METADATA]) if is_sharded(folder) or found else []


def read_model(folder: Path) -> dict[str, Tensor]:
    """Return the model's tensors of a sharded checkpoint, whole.

    Raises:
        ValueError: A file is damaged.
    """
    reader = ShardReader(str(folder))
    prefix = f"{MODEL}."
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in stored.items()
        if name.startswith(prefix) and isinstance(tensor, TensorStorageMetadata)
    }
    try:
        load(state, storage_reader=reader, no_dist=True)
    except Exception as error:  # torch raises errors of several kinds for damaged files.
        raise ValueError(f"{folder} is damaged: {' '.join(str(error).split())[:200]}") from error
    return {name.removeprefix(prefix): x for name, x in state.items()}
