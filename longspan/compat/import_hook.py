"""Serving the older libraries' import names, for one script or for a whole process; nothing is written anywhere.

Imports no torch by itself: in a script that uses MindSpore, `local_attention` is longspan.mindspore.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HOMES = {
    name: f"longspan.compat.{name}"
    for name in (
        "linear_attention_transformer",
        "linformer_pytorch",
        "linformer",
        "performer_pytorch",
        "local_attention",
    )
}
MINDSPORE_HOMES = {"local_attention": "longspan.mindspore"}


class RefusedError(ValueError):
    """What the caller asked for cannot be; a script's own errors are never of this kind."""


def run(script: Path, arguments: Sequence[str], *, device: str | None = None) -> None:
    """Runs a script as Python would, with the older names served and `.cuda()` on the CPU where there is no GPU.

    device: "cpu" keeps everything on the CPU where there is one. `nn` is torch's in the script's namespace, as some of
    the older libraries' examples expect.
    """
    if not script.is_file():
        raise RefusedError(f"there is no script {script}")
    mindspore = "mindspore" in imported_names(script.read_text(encoding="utf-8"))
    homes = MINDSPORE_HOMES if mindspore else HOMES
    known: dict[str, Any] = {} if mindspore else {"nn": import_module("torch.nn")}
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with served(homes), nullcontext() if mindspore else placed(device):
            runpy.run_path(str(script), init_globals=known, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


def serve() -> None:
    """Serves the older names in this process from now on: what `import longspan.compat.auto` does."""
    homes = HOMES if find_spec("torch") is not None else MINDSPORE_HOMES
    taken = sorted(name for name in homes if name in sys.modules and not _ours(sys.modules[name]))
    if taken:
        raise ImportError(f"{', '.join(taken)} was imported already: import longspan.compat.auto before it")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(homes))


@contextmanager
def served(homes: Mapping[str, str] = HOMES) -> Iterator[None]:
    """The older names are longspan's inside this block; then everything is as it was, installed originals included."""

    def of(name: str) -> bool:
        return name.partition(".")[0] in homes

    finder = _Finder(homes)
    originals = {name: sys.modules.pop(name) for name in list(sys.modules) if of(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if of(name)]:
            del sys.modules[name]
        sys.modules.update(originals)


@contextmanager
def placed(device: str | None) -> Iterator[None]:
    """Inside this block, what asks for CUDA stays on the CPU: if device is "cpu", or if there is no GPU."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise RefusedError(f'device must be "cpu" or "cuda", got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise RefusedError("device is cuda, but torch sees no GPU here: leave it out, or give cpu")
    if device != "cpu" and torch.cuda.is_available():
        yield
        return
    from longspan.compat.cpu_mode import OnCPU

    with OnCPU():
        yield


def imported_names(source: str) -> set[str]:
    """The top-level names of everything a script imports; of one that does not parse, nothing."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()  # Python itself will say what is wrong.
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


class _Finder(MetaPathFinder):
    def __init__(self, homes: Mapping[str, str]) -> None:
        self.homes = homes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top not in self.homes:
            return None
        home = f"{self.homes[top]}.{rest}" if rest else self.homes[top]
        try:
            exists = find_spec(home) is not None
        except ModuleNotFoundError:
            exists = False
        return ModuleSpec(fullname, _Alias(home), is_package=not rest) if exists else None


class _Alias(Loader):
    """Loads a module of longspan under a second name."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.home)
        self.own = module.__spec__, getattr(module, "__loader__", None), module.__package__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just written the second name over these.
        module.__spec__, module.__loader__, module.__package__ = self.own


def _ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "longspan"
