"""Results files with one JSON object per line, to which several processes append."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Append a result; several processes may append to the same file at the same time."""
    with path.open("a+b") as file:
        _lock(file.fileno())
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\n"):  # A killed process did not finish its line.
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _lock(descriptor: int) -> None:
    """Lock an open file until it is closed; where there are no such locks, an append is still a single write."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def read(path: Path, *names: str) -> list[Row]:
    """Return the results in a file. A line that a killed process did not finish is left out.

    Args:
        path: The file; there are no results if it does not exist.
        names: What every result has.

    Raises:
        ValueError: A line before the last one is not a result.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not set(names) <= row.keys():
                raise ValueError(f"a result has {', '.join(names)}")
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}; remove the line, or choose another file") from None
        rows.append(row)
    return rows


def prepare(path: Path) -> None:
    """Create a results file and its folder, if they do not exist.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
