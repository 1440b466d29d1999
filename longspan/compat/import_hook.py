"""Redirect imports of the older libraries to `longspan.compat`, for one script or for a process.

An installed library is replaced. A copy of it among a project's own sources (beside the script, on PYTHONPATH, or in a
folder that the script adds to `sys.path`) is kept, because such copies are often modified.

This module does not import torch: in a script that imports MindSpore, `local_attention` is `longspan.mindspore`.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from longspan.compat.faithful import faithful as build_faithful

LIBRARIES = ("linear_attention_transformer", "linformer_pytorch", "linformer", "performer_pytorch", "local_attention")
REPLACEMENTS = {name: f"longspan.compat.{name}" for name in LIBRARIES}
MINDSPORE_REPLACEMENTS = {"local_attention": "longspan.mindspore"}


class UsageError(ValueError):
    """A script or device that `run` cannot use; errors raised by the script itself are never of this type."""


def run(
    script: Path,
    arguments: Sequence[str],
    *,
    device: str | None = None,
    faithful: bool = False,
    replace: bool = False,
) -> None:
    """Run a script with the older libraries replaced, as `python script` would.

    Without a GPU, `.cuda()` uses the CPU. The script's namespace contains torch's `nn`, which examples of the older
    libraries use without importing it, and `numpy.fromstring` reads bytes, which numpy 2.3 removed.

    Args:
        script: The path of the script.
        arguments: The script's `sys.argv[1:]`.
        device: "cpu" to use the CPU even if there is a GPU, "cuda" to require a GPU.
        faithful: Build models as the older libraries compute them, defects included; see `longspan.compat.faithful`.
        replace: Replace a project's own copies of the older libraries too.

    Raises:
        UsageError: If there is no such script or device, or MindSpore has no such option.
        SystemExit: If the script is not valid Python; the error is printed as Python prints it.
    """
    try:
        if not script.is_file():
            raise UsageError(f"script not found: {script}")
        source = script.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    try:
        compile(source, str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        print(*traceback.format_exception_only(error), sep="", end="", file=sys.stderr)
        raise SystemExit(1) from None
    mindspore = "mindspore" in imported_packages(source)
    if mindspore and (faithful or device == "cuda"):
        what = "faithful models" if faithful else "a choice of device"
        raise UsageError(f"there is {what} only for PyTorch scripts, but {script} imports mindspore: omit the option")
    replacements = MINDSPORE_REPLACEMENTS if mindspore else REPLACEMENTS
    namespace: dict[str, Any] = {} if mindspore else {"nn": import_module("torch.nn")}
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with ExitStack() as stack:
            stack.enter_context(redirect_imports(replacements, replace=replace))
            stack.enter_context(read_binary_strings())
            if not mindspore:
                stack.enter_context(use_device(device))
                stack.enter_context(build_faithful(faithful))
            runpy.run_path(str(script), init_globals=namespace, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def install(*, replace: bool = False) -> None:
    """Redirect imports of the older libraries for the rest of the process.

    Args:
        replace: Replace a project's own copies of them too.

    Raises:
        ImportError: If one of them has already been imported.
    """
    replacements = REPLACEMENTS if find_spec("torch") is not None else MINDSPORE_REPLACEMENTS
    others = [name for name in replacements if name in sys.modules and not _is_ours(sys.modules[name])]
    imported = sorted(name for name in others if replace or _own_copy(name) is None)
    if imported:
        raise ImportError(f"{', '.join(imported)} was already imported: import longspan.compat.auto before it")
    if not any(isinstance(finder, _RedirectFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RedirectFinder(replacements, replace))


@contextmanager
def redirect_imports(replacements: Mapping[str, str] = REPLACEMENTS, *, replace: bool = False) -> Iterator[None]:
    """Redirect imports inside this block; on exit, restore `sys.modules`, with any originals imported before.

    Args:
        replacements: The module that replaces each package.
        replace: Replace a project's own copies of the packages too.
    """

    def is_replaced(name: str) -> bool:
        return name.partition(".")[0] in replacements

    finder = _RedirectFinder(replacements, replace)
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


@contextmanager
def read_binary_strings() -> Iterator[None]:
    """Let `numpy.fromstring` read bytes inside this block, as it did before numpy 2.3."""
    import numpy

    from_text = numpy.fromstring

    def fromstring(string: Any, dtype: Any = float, count: int = -1, *, sep: str = "", like: Any = None) -> Any:
        if sep:
            return from_text(string, dtype, count, sep=sep, like=like)
        data = string.encode() if isinstance(string, str) else string
        return numpy.frombuffer(data, dtype, count, like=like).copy()

    numpy.fromstring = fromstring  # type: ignore[assignment]
    try:
        yield
    finally:
        numpy.fromstring = from_text


def imported_packages(source: str | bytes) -> set[str]:
    """Return the top-level packages that a script imports; an empty set if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError):
        return set()
    packages: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages


class _RedirectFinder(MetaPathFinder):
    """Find modules of the older libraries in their replacements, except those of a project's own copies."""

    def __init__(self, replacements: Mapping[str, str], replace: bool) -> None:
        self.replacements, self.replace = replacements, replace
        self.kept: dict[str, bool] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, submodule = fullname.partition(".")
        if package not in self.replacements or self._keeps(package):
            return None
        name = f"{self.replacements[package]}.{submodule}" if submodule else self.replacements[package]
        try:
            found = find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        return ModuleSpec(fullname, _RedirectLoader(name), is_package=not submodule) if found else None

    def _keeps(self, package: str) -> bool:
        """Return whether a package is left to the project's own copy, and print a message the first time."""
        if self.replace:
            return False
        if package not in self.kept:
            copy = _own_copy(package)
            self.kept[package] = copy is not None
            if copy is not None:
                note = f"{package} is the project's own copy in {copy}; longspan run --replace uses longspan's instead"
                print(f"longspan: {note}", file=sys.stderr, flush=True)
        return self.kept[package]


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


def _own_copy(package: str) -> Path | None:
    """Return where Python would import a package from if those are a project's sources, not an installed library."""
    spec = PathFinder.find_spec(package)
    if spec is None:
        return None
    if spec.origin is None:  # a folder without __init__.py: a package if there are modules in it
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        found = next((folder for folder in folders if any(folder.glob("*.py"))), None)
    else:
        found = Path(spec.origin) if spec.submodule_search_locations is None else Path(spec.origin).parent
    return None if found is None or _is_installed(package, found.parent) else found


def _is_installed(package: str, folder: Path) -> bool:
    """Return whether a folder is one for installed packages, or has the metadata of an installation of this one."""
    if {"site-packages", "dist-packages"} & set(folder.parts):
        return True
    names = (distribution.metadata["Name"] or "" for distribution in distributions(path=[str(folder)]))
    return package in (re.sub(r"[-_.]+", "_", name).lower() for name in names)


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "longspan"
