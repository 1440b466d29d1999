"""Small helpers that import no torch: worded errors, text for terminals, files, and the commit of a checkout."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.resources import files
from numbers import Integral
from pathlib import Path
from typing import Any

MIN_TORCH = (2, 10)
_MAX_JSON = 1 << 26  # bytes of a JSON file that is read into memory at once
# Control characters but tabs and line ends, marks that change the direction of text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# How libraries other than Python's own word a full disk: safetensors, torch.save, and numpy.save.
_DISK_FULL = re.compile(
    "No space left on device|StorageFull|Disk quota exceeded|PytorchStreamWriter failed writing"
    r"|inline_container\.cc.*unexpected pos|^\d+ requested and \d+ written$"
)


def check_torch() -> None:
    """Import torch and check its version, before a module that needs it fails with an unclear error.

    Raises:
        ImportError: If it is too old.
    """
    version = str(import_module("torch").__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        raise ImportError(f"longspan needs torch {needed} or newer, found {version}: pip install 'torch>={needed}'")


def choose(what: str, given: str, allowed: Iterable[str]) -> str:
    """Return `given` if it is one of `allowed`, or raise a ValueError that lists them and suggests the nearest."""
    names = list(allowed)
    if given in names:
        return given
    raise ValueError(f"unknown {what} {given!r}; there is {', '.join(names)}{nearest(given, names)}")


def check_integer(name: str, value: object, minimum: int) -> None:
    """Check that an argument is an integer of at least a minimum.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def nearest(given: object, names: Iterable[str]) -> str:
    """Return a question whether the closest of `names` was meant, to end an error with; empty if none is close."""
    close = get_close_matches(str(given), list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def printable(text: str) -> str:
    """Return a text that is safe to show on a terminal: its control characters are replaced by their escapes."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def format_bytes(number: float) -> str:
    """Return a number of bytes in KiB, MiB or GiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 2**10:,.1f} KiB"


def join_names(names: Sequence[str], most: int) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plot_path(out: Path) -> Path:
    """Return the path of the plot beside a results file."""
    return out.with_suffix(".png") if out.suffix != ".png" else out.with_name(f"{out.name}.png")


def choose_device(name: str | None) -> Any:
    """Return the torch.device for the value of --device; None: a GPU if there is one, otherwise the CPU.

    Raises:
        ValueError: If there is no such device on this machine.
    """
    import torch

    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["cpu", *(["cuda"] if cuda else []), *(f"cuda:{i}" for i in range(cuda))]
    if torch.backends.mps.is_available():
        allowed.append("mps")
    if name is None:
        return torch.device("cuda" if cuda else "cpu")
    if name == "cuda" and not cuda:
        raise ValueError("--device cuda: no CUDA device is available; remove --device, or use --device cpu")
    return torch.device(choose("--device", name, allowed))


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, reports that a disk or a quota is full."""
    if error is None:
        return False
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _DISK_FULL.search(str(error)) is not None
    return full or is_disk_full(error.__cause__) or is_disk_full(error.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory could not be allocated, on a CPU or a GPU."""
    worded = isinstance(error, RuntimeError) and ("out of memory" in str(error) or "t allocate memory" in str(error))
    return worded or isinstance(error, MemoryError)


def read_json(path: Path, *, regular: bool = True) -> Any:
    """Read a JSON file that another process, or another person, may have written.

    Args:
        path: The file.
        regular: Refuse pipes and devices, which may never end or begin.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a regular file, too large, not UTF-8, not JSON, or nested too deeply.
    """
    if regular and path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        content = file.read(_MAX_JSON + 1)
    if len(content) > _MAX_JSON:
        raise ValueError(f"{path} is too large for JSON that is read at once: over {_MAX_JSON:,} bytes")
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read as JSON: its values are nested too deeply") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file by `replace_file`: text is encoded as UTF-8."""
    with replace_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes the file when the block ends without an error.

    A reader, or a process killed at any moment, sees the old content or the new one. Links are followed. A device or
    pipe is yielded itself.

    Args:
        path: The file to create or replace. Its folder must exist.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))
    # Of a name of its own, so that two processes do not write into each other's file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


def render_template(package: str, name: str, **values: Any) -> str:
    """Render a jinja2 template of a package as HTML, with autoescaping.

    Args:
        package: The package that contains the template, as "longspan.bench".
        name: File name of the template.
        **values: Variables of the template. The filter `to_json` formats values as indented JSON.

    Raises:
        ValueError: jinja2 is not installed, or a value is nested too deeply.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise ValueError("HTML reports require jinja2: pip install jinja2") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["to_json"] = lambda value: json.dumps(value, indent=1)
    source = files(package).joinpath(name).read_text(encoding="utf-8")
    try:
        return environment.from_string(source).render(values)
    except RecursionError:
        raise ValueError("a value is nested too deeply to be shown in a report") from None


def commit(package: Path = Path(__file__).parent) -> dict[str, Any] | None:
    """Return the commit of longspan's checkout and whether the package differs from it.

    None if the package is not in a checkout of its own: it is installed, or part of another repository.
    """
    root = package.parent
    # Variables that hooks of another repository set.
    environment = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        how: dict[str, Any] = {"cwd": root, "env": environment, "capture_output": True, "text": True, "check": True}
        return subprocess.run(command, **how).stdout.strip()

    try:
        named = 'name = "longspan"' in (root / "pyproject.toml").read_text(encoding="utf-8")
        if not named or not os.path.samefile(git("rev-parse", "--show-toplevel"), root):
            return None
        head, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", package.name)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return {"hash": head, "changed": bool(changed)}
