"""The folder of a run: a lock that one process at a time holds, and checks before anything is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from longspan.models.checkpoint import LAST, find_checkpoint
from longspan.train.loggers import METRICS, SAMPLES

RUN, DATA, LOCK = "run.json", "data", ".lock"


@contextmanager
def locked(run: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Create the folder of a run and lock it inside the block.

    The operating system releases the lock when the process ends, however it ends. If the block ends before the run has
    started, by writing run.json, everything that it created is removed.

    Args:
        run: The folder.
        notify: Called with a message if the file system has no locks.

    Raises:
        ValueError: Another process holds the lock, or the folder contains files of something else.
        OSError: The folder is not writable.
    """
    with _without_empty_folders(run):
        check_writable(run)
        with _lock(run / LOCK, notify):
            check_foreign(run)
            with cleaned(run):
                yield


@contextmanager
def cleaned(run: Path) -> Iterator[None]:
    """Remove the data that the block created in a locked folder, if it ends before run.json is written."""
    has_data = (run / DATA).exists()
    with _without_empty_folders(run):
        try:
            yield
        finally:
            if not has_data and not (run / RUN).exists():
                shutil.rmtree(run / DATA, ignore_errors=True)


@contextmanager
def _without_empty_folders(run: Path) -> Iterator[None]:
    """Remove the folders that the block created, if they are empty."""
    created = [folder for folder in (run, *run.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in created:
            with suppress(OSError):  # It is not empty.
                folder.rmdir()


@contextmanager
def _lock(path: Path, notify: Callable[[str], None]) -> Iterator[None]:
    handle = _acquire(path, notify)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(holder).encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path, notify: Callable[[str], None]) -> int:
    """Return a handle of the locked file."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # A command that was refused may have removed it.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise ValueError(
                f"{path.parent} is in use by {holder}: wait until that run ends, or choose another --out"
            ) from None
        except OSError as error:
            notify(f"{path.parent} cannot be locked ({error.strerror}): start no second run with this --out")
            return handle
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # Its last holder has removed the file, so that others do not see this lock.


def _holder(handle: int) -> str:
    """Return who holds a lock."""
    try:
        holder: dict[str, Any] = json.loads(os.read(handle, 1 << 12))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet


def check_shared(run: Path, main: bool) -> None:
    """Raise ValueError in a process that does not see the folder which the main process has locked."""
    if not main and not (run / LOCK).exists():
        raise ValueError(
            f"--out {run} of the main process is not visible on {socket.gethostname()}: with --mesh all processes "
            "write there, choose a folder on a file system that all nodes share"
        )


def check_foreign(run: Path) -> None:
    """Raise ValueError if a new run would replace files that no run of longspan wrote."""
    if find_checkpoint(run) != run or _is_run(run / RUN):
        return
    names = [name for name in (RUN, METRICS, SAMPLES, LAST) if (run / name).exists()]
    if names:
        raise ValueError(
            f"{run} is not a run of longspan, and contains {', '.join(names)}, which a run would replace: "
            "choose another --out"
        )


def _is_run(path: Path) -> bool:
    try:
        return "settings" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def check_writable(run: Path, required: int = 0) -> None:
    """Create the folder of a run and check that checkpoints can be written to it.

    Args:
        run: The folder.
        required: Bytes that must be free.

    Raises:
        OSError: The folder is not writable, or the disk is too full.
    """
    if run.exists() and not run.is_dir():
        raise OSError(f"--out {run} is a file: choose a folder")
    try:
        run.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run).close()
    except OSError as error:
        raise OSError(f"cannot write to {run}: {error.strerror or error}") from None
    free = shutil.disk_usage(run).free
    if free < required:
        raise OSError(
            f"{run} has {free / 2**20:,.0f} MiB free, and its checkpoints need {required / 2**20:,.0f} MiB: "
            "free disk space, or choose another --out"
        )
