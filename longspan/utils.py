"""Small helpers that need no torch: errors for wrong names, and the commit of a checkout."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any


def choose(what: str, given: str, allowed: Iterable[str]) -> str:
    """`given`, if it is one of `allowed`; otherwise an error that lists them and the nearest."""
    names = list(allowed)
    if given in names:
        return given
    raise ValueError(f"unknown {what} {given!r}; there is {', '.join(names)}{nearest(given, names)}")


def nearest(given: object, names: Iterable[str]) -> str:
    """A question whether the closest of `names` was meant, to end an error with; empty if none is close."""
    close = get_close_matches(str(given), list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a process killed at any moment, sees the old content or the new one.

    Args:
        path: The file to create or replace. Its folder must exist.
        content: Bytes, or text to encode as UTF-8.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)


def render_template(package: str, name: str, **values: Any) -> str:
    """Render a jinja2 template of a package as HTML, with autoescaping.

    Args:
        package: The package that contains the template, as "longspan.bench".
        name: File name of the template.
        **values: Variables of the template. The filter `to_json` formats values as indented JSON.

    Raises:
        ValueError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise ValueError("HTML reports require jinja2: pip install jinja2") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["to_json"] = lambda value: json.dumps(value, indent=1)
    source = files(package).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)


def commit() -> dict[str, Any] | None:
    """The commit of this checkout and whether the package differs from it; None outside a checkout."""
    package = Path(__file__).parent
    try:
        head, changed = (
            subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"hash": head, "changed": bool(changed)}
