"""Redirect imports of the older libraries to `longspan.compat`, for one script or for a process.

This module does not import torch: in a script that imports MindSpore, `local_attention` is `longspan.mindspore`.
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

LIBRARIES = ("linear_attention_transformer", "linformer_pytorch", "linformer", "performer_pytorch", "local_attention")
REPLACEMENTS = {name: f"longspan.compat.{name}" for name in LIBRARIES}
MINDSPORE_REPLACEMENTS = {"local_attention": "longspan.mindspore"}


class UsageError(ValueError):
    """A script or device that `run` cannot use; errors raised by the script itself are never of this type."""


def run(script: Path, arguments: Sequence[str], *, device: str | None = None) -> None:
    """Run a script with the older libraries replaced, as `python script` would.

    Without a GPU, `.cuda()` uses the CPU. The script's namespace contains torch's `nn`, which examples of the older
    libraries use without importing it.

    Args:
        script: The path of the script.
        arguments: The script's `sys.argv[1:]`.
        device: "cpu" to use the CPU even if there is a GPU, "cuda" to require a GPU.

    Raises:
        UsageError: If there is no such script or device.
    """
    if not script.is_file():
        raise UsageError(f"script not found: {script}")
    mindspore = "mindspore" in imported_packages(script.read_text(encoding="utf-8"))
    replacements = MINDSPORE_REPLACEMENTS if mindspore else REPLACEMENTS
    namespace: dict[str, Any] = {} if mindspore else {"nn": import_module("torch.nn")}
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with redirect_imports(replacements), nullcontext() if mindspore else use_device(device):
            runpy.run_path(str(script), init_globals=namespace, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def install() -> None:
    """Redirect imports of the older libraries for the rest of the process.

    Raises:
        ImportError: If one of them has already been imported.
    """
    replacements = REPLACEMENTS if find_spec("torch") is not None else MINDSPORE_REPLACEMENTS
    imported = sorted(name for name in replacements if name in sys.modules and not _is_ours(sys.modules[name]))
    if imported:
        raise ImportError(f"{', '.join(imported)} was already imported: import longspan.compat.auto before it")
    if not any(isinstance(finder, _RedirectFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RedirectFinder(replacements))


@contextmanager
def redirect_imports(replacements: Mapping[str, str] = REPLACEMENTS) -> Iterator[None]:
    """Redirect imports inside this block; on exit, restore `sys.modules`, with any originals imported before."""

    def is_replaced(name: str) -> bool:
        return name.partition(".")[0] in replacements

    finder = _RedirectFinder(replacements)
    originals = {name: sys.modules.pop(name) for name in list(sys.modules) if is_replaced(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if is_replaced(name)]:
            del sys.modules[name]
        sys.modules.update(originals)


@contextmanager
def use_device(device: str | None) -> Iterator[None]:
    """Use the CPU in place of CUDA inside this block if device is "cpu" or there is no GPU."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UsageError(f'device must be "cpu" or "cuda", got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError('device is "cuda", but torch finds no GPU: omit device, or use "cpu"')
    if device != "cpu" and torch.cuda.is_available():
        yield
        return
    from longspan.compat.cpu_mode import CudaToCpuMode

    with CudaToCpuMode():
        yield


def imported_packages(source: str) -> set[str]:
    """Return the top-level packages that a script imports; an empty set if it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()  # Python reports the error when the script runs.
    packages: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages


class _RedirectFinder(MetaPathFinder):
    """Find modules of the older libraries in their replacements."""

    def __init__(self, replacements: Mapping[str, str]) -> None:
        self.replacements = replacements

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, submodule = fullname.partition(".")
        if package not in self.replacements:
            return None
        name = f"{self.replacements[package]}.{submodule}" if submodule else self.replacements[package]
        try:
            found = find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        return ModuleSpec(fullname, _RedirectLoader(name), is_package=not submodule) if found else None


class _RedirectLoader(Loader):
    """Load a longspan module under a second name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.name)
        self.attributes = module.__spec__, getattr(module, "__loader__", None), module.__package__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Between the two calls the import system has overwritten these attributes.
        module.__spec__, module.__loader__, module.__package__ = self.attributes


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "longspan"
