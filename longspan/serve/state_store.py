"""Saved states of conversations: files by name, checked before they are continued."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longspan.generation.session import Session, state_values
from longspan.models.residual import StackState
from longspan.serve.engine import Engine
from longspan.serve.openai_protocol import APIError
from longspan.serve.prefix_cache import token_tensors

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_GENERATED = "state-"  # what names that no client chose begin with
_SUFFIX = ".safetensors"
_HEADER = 1 << 20  # bytes of a file that are not tensors


@dataclass(frozen=True)
class StateInfo:
    """A saved state."""

    name: str
    bytes: int
    created: float

    def body(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return {"id": self.name, "object": "state", "bytes": self.bytes, "created_at": int(self.created)}


class StateFiles:
    """The files of saved states.

    Args:
        folder: The folder; created if there is none.
        max_bytes: The most bytes of a file.

    Raises:
        OSError: If the folder cannot be created.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.max_bytes = folder, max_bytes

    def delete(self, name: str) -> None:
        """Remove a state."""
        self.path(name).unlink(missing_ok=True)

    def info(self, name: str) -> StateInfo:
        """Describe a state."""
        status = self.path(name).stat()
        return StateInfo(name, status.st_size, status.st_mtime)

    def list(self) -> list[StateInfo]:
        """Describe all states, the least recently used first."""
        found = []
        for entry in os.scandir(self.folder):
            name = entry.name.removesuffix(_SUFFIX)
            if entry.name.endswith(_SUFFIX) and _NAME.fullmatch(name) and entry.is_file():
                with suppress(FileNotFoundError):  # It has been deleted meanwhile.
                    found.append(StateInfo(name, entry.stat().st_size, entry.stat().st_mtime))
        return sorted(found, key=lambda info: (info.created, info.name))

    def path(self, name: str) -> Path:
        """Return the file of a state.

        Raises:
            APIError: If there is none.
        """
        path = self.folder / (name + _SUFFIX)
        if not _NAME.fullmatch(name) or not path.is_file():
            raise APIError(404, f"there is no state {name[:80]!r}", kind="not_found_error", code="state_not_found")
        return path

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """Yield a path to write a state to, which is removed at the end unless it was moved."""
        path = self.folder / f".{secrets.token_hex(16)}.upload"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


class StateStore(StateFiles):
    """Sessions in a folder, one safetensors file each, as `longspan generate --state` writes them.

    States that no client named are removed, the least recently used first, where they exceed the budget.

    Args:
        folder: The folder; created if there is none.
        engine: The engine whose model's states these are.
        budget: The most bytes of all files.

    Attributes:
        max_bytes: The most bytes of a file.

    Raises:
        OSError: If the folder cannot be created.
    """

    def __init__(self, folder: Path, engine: Engine, budget: int) -> None:
        empty = engine.model.new_state(1, max_length=engine.max_length)
        vocab_size = engine.model.config.vocab_size or 0
        size = sum(x.numel() * x.element_size() for x in empty.tensors().values())
        super().__init__(folder, size + 8 * vocab_size + _HEADER)
        self.budget, self._engine = budget, engine
        self._lock = threading.Lock()
        for path in folder.glob(".*.upload"):
            path.unlink(missing_ok=True)  # of a process that was killed

    def save(self, session: Session, name: str | None = None) -> StateInfo:
        """Write a session, under a new name unless one is given.

        Raises:
            APIError: If the name is not allowed or taken, or there is no space.
        """
        with self.new_file() as path:
            session.save(path, model_fingerprint=self._engine.fingerprint)
            return self._commit(path, name)

    def load(self, name: str) -> Session:
        """Return a session.

        Raises:
            APIError: If there is none, or it is of another model.
        """
        path = self.path(name)
        os.utime(path)
        return self._read(path)

    def add(self, path: Path, name: str | None = None) -> StateInfo:
        """Move a file that a client sent, from `new_file`, to the states.

        Raises:
            APIError: If it is not a state of this model, the name is not allowed or taken, or there is no space.
        """
        self._read(path)
        return self._commit(path, name)

    def copy(self, source: str, name: str | None = None) -> StateInfo:
        """Copy a state, under a new name unless one is given."""
        with self.new_file() as path:
            os.utime(self.path(source))
            shutil.copyfile(self.path(source), path)
            return self._commit(path, name)

    def _commit(self, path: Path, name: str | None) -> StateInfo:
        if name is not None and (not _NAME.fullmatch(name) or name.startswith(_GENERATED)):
            raise APIError(
                400,
                "name must have up to 64 of a-z, 0-9, '.', '_' and '-', begin with a letter or digit, and not with "
                f"{_GENERATED!r}, got {name[:80]!r}",
                param="name",
            )
        chosen = name or _GENERATED + secrets.token_hex(16)
        target, size = self.folder / (chosen + _SUFFIX), path.stat().st_size
        with self._lock:
            if target.exists():
                raise APIError(
                    409, f"there already is a state {chosen!r}: delete it first", param="name", code="exists"
                )
            self._make_space(size)
            os.rename(path, target)
        return StateInfo(chosen, size, time.time())

    def _make_space(self, size: int) -> None:
        states = self.list()
        named = sum(info.bytes for info in states if not info.name.startswith(_GENERATED))
        if named + size > self.budget:
            raise APIError(
                507,
                f"named states take {named} of {self.budget} bytes, and this one has {size}: delete some",
                kind="server_error",
                code="storage_full",
            )
        total = size + sum(info.bytes for info in states)
        for info in states:
            if total > self.budget and info.name.startswith(_GENERATED):
                (self.folder / (info.name + _SUFFIX)).unlink(missing_ok=True)
                total -= info.bytes

    def _read(self, path: Path) -> Session:
        """Return the session in a file of this model."""
        engine = self._engine
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
            if metadata.get("model") != engine.fingerprint:
                raise ValueError("it is the state of another model, or does not say of which")
            session = Session.load(path, engine.model, model_fingerprint=engine.fingerprint)
            _check_fits(session, engine)
        except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
            text = str(error).replace(str(path), "the file")
            raise APIError(400, f"the state cannot be used: {text}", param="state", code="wrong_state") from None
        return session


def _check_fits(session: Session, engine: Engine) -> None:
    """Raise ValueError unless a session could have been made by this engine, or by `longspan generate`."""
    state, empty = session.state, engine.model.new_state(1, max_length=engine.max_length)
    if len(session.logits) != 1:
        raise ValueError(f"it holds {len(session.logits)} sequences: one is needed")
    if _fixed_values(state) != _fixed_values(empty):
        raise ValueError("its options are not those of the model")
    found, expected, growing = state.tensors(), empty.tensors(), set(token_tensors(empty, ""))
    if found.keys() != expected.keys():
        raise ValueError("it has other tensors than the model's states")
    length = int(state.length)
    if not 0 <= length <= (2**40 if engine.max_length is None else engine.max_length):
        raise ValueError(f"it holds {length} tokens, and the most is {engine.max_length}")
    for name, x in found.items():
        # Codes of the latest tokens, for n-grams; other integers count tokens.
        largest = engine.model.config.vocab_size or 0 if name == "recent" else length
        _check_tensor(name, x, expected[name], length, largest, name in growing)
    _check_numbers("logits", session.logits)


def _check_tensor(name: str, x: Tensor, expected: Tensor, length: int, largest: int, grows: bool) -> None:
    shape, wanted = list(x.shape), list(expected.shape)
    if grows:  # The third dimension is a capacity.
        enough = len(shape) == len(wanted) and shape[2] >= length
        shape[2:3] = wanted[2:3] if enough else shape[2:3]
    if shape != wanted or x.dtype != expected.dtype:
        raise ValueError(f"{name} must be {tuple(wanted)} {expected.dtype}, got {tuple(x.shape)} {x.dtype}")
    if not x.is_floating_point() and x.numel() and not -1 <= int(x.min()) <= int(x.max()) <= largest:
        raise ValueError(f"{name} must have numbers from -1 to {largest}, got {int(x.min())} to {int(x.max())}")
    _check_numbers(name, x)


def _check_numbers(name: str, x: Tensor) -> None:
    if x.is_floating_point() and bool((x.isnan() | (x == torch.inf)).any()):
        raise ValueError(f"{name} has numbers that are not finite")


def _fixed_values(state: StackState) -> dict[str, Any]:
    return {name: value for name, value in state_values(state, "").items() if not name.endswith(".max_length")}
