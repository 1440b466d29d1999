"""The prefix cache on disk: states at chunk boundaries, in files that survive the process."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longspan.utils import write_atomically

_SUFFIX = ".safetensors"
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.safetensors\.(\d+)\.partial")
_FORMAT = "longspan-prefix-1"

logger = logging.getLogger(__name__)


class DiskStore:
    """Tensors by digest, one file each, the least recently used removed above a budget.

    Files are written by a thread of their own, atomically: a process that is killed leaves complete files only. A file
    that cannot be read, or whose contents do not match the digest in it, is removed and ignored.

    Args:
        folder: Where the files are; created if there is none.
        budget: The most bytes to hold.

    Raises:
        OSError: If the folder cannot be created.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.budget = folder, budget
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._scan()
        self._queue: queue.SimpleQueue[tuple[bytes, dict[str, Tensor]] | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._write_all, name="longspan-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def size(self) -> int:
        """Return the bytes of all files."""
        with self._lock:
            return sum(self._sizes.values())

    def write(self, key: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Queue tensors to be written; they must not be changed afterwards."""
        if key not in self and not self._failed:
            self._queue.put((key, {name: x.cpu().contiguous() for name, x in tensors.items()}))

    def read(self, key: bytes, device: torch.device) -> dict[str, Tensor] | None:
        """Return the tensors of a file, or None if there is none that is intact."""
        if key not in self:
            return None
        path = self._path(key)
        try:
            with safe_open(str(path), "pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != _FORMAT or metadata.get("digest") != _digest(key, tensors):
                raise ValueError("its contents do not match its digest")
            os.utime(path)
        except (OSError, SafetensorError, ValueError) as error:
            logger.warning("%s is removed from the prefix cache: %s", path, error)
            self._remove(key)
            return None
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        return tensors

    def close(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            key, tensors = item
            content = save(tensors, {"format": _FORMAT, "digest": _digest(key, tensors)})
            try:
                write_atomically(self._path(key), content)
            except OSError as error:
                logger.warning("the prefix cache is not written to disk any more: %s", error)
                self._failed = True
                continue
            with self._lock:
                self._sizes[key] = len(content)
            while (oldest := self._excess()) is not None:
                self._remove(oldest)

    def _excess(self) -> bytes | None:
        """Return the least recently used file if there are more bytes than the budget."""
        with self._lock:
            return next(iter(self._sizes)) if sum(self._sizes.values()) > self.budget else None

    def _scan(self) -> None:
        """Find the files of earlier processes, and remove what those that were killed left incomplete."""
        found = []
        for entry in os.scandir(self.folder):
            partial = _PARTIAL.fullmatch(entry.name)
            if partial is not None and not _is_running(int(partial[1])):
                Path(entry.path).unlink(missing_ok=True)
            with suppress(ValueError, FileNotFoundError):
                key = bytes.fromhex(entry.name.removesuffix(_SUFFIX))
                if entry.name.endswith(_SUFFIX) and len(key) == 32:
                    found.append((entry.stat().st_mtime, key, entry.stat().st_size))
        self._sizes.update({key: size for _, key, size in sorted(found)})

    def _remove(self, key: bytes) -> None:
        with self._lock:
            self._sizes.pop(key, None)
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self.folder / (key.hex() + _SUFFIX)


def _digest(key: bytes, tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, types, shapes and contents, and of the name of the file."""
    digest = hashlib.sha256(key)
    for name in sorted(tensors):
        x = tensors[name].cpu().contiguous()
        digest.update(f"{name}:{x.dtype}:{tuple(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
