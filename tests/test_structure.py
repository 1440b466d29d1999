"""The shape of the repository: which way imports point, what importing costs, and documents that run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "longspan"
FILES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS.remove(ROOT / "docs" / "mindspore.md")  # run by tests/mindspore, where there is MindSpore
MAX_LINES = 450

# From the bottom up: each part may import from its own or from those in lines above it.
TIERS = [
    {"kernels", "origin", "text"},
    {"ops"},
    {"rows"},
    {"checks"},
    {"mechanism", "positions"},
    {"mechanisms"},
    {"config"},
    {"layers", "reversible"},
    {"stack"},
    {"assembly"},
    {"models", "images"},
    {"checkpoint", "maps", "memory"},
    {"loop"},
    {"generation"},
    {"longspan"},  # the public names
    {"compat"},
    {"train", "bench", "terminal", "hf"},
    {"cli"},
    {"__main__"},
]
LEVELS = {part: level for level, tier in enumerate(TIERS) for part in tier}
APART = {"mindspore"}  # works without torch, and shares nothing with the rest


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(module: str) -> str:
    """longspan.ops.linear -> ops; a public name -> the part it lives in."""
    names = longspan._HOME.get(module.removeprefix("longspan."), module).split(".")
    return names[1] if len(names) > 1 else names[0]


def imported(path: Path) -> set[str]:
    """Every module of the package that a file imports, wherever in it the import stands."""
    here = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            # `from longspan import ops` names a module, `from longspan.rows import Packing` does not.
            submodule = base == "longspan" or (PACKAGE.parent / base.replace(".", "/")).is_dir()
            found |= {f"{base}.{name.name}" for name in node.names} if submodule else {base}
    return {name for name in found if name.split(".")[0] == "longspan"}


def wrong_imports(path: Path) -> list[str]:
    """The imports of a file that point upwards."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    part = relative.parts[0]
    found = []
    for module in sorted(imported(path)):
        target = part_of(module)
        if target in (part, "__version__"):
            continue
        if target not in LEVELS or part not in LEVELS or LEVELS[target] >= LEVELS[part]:
            found.append(f"{relative} imports {module}")
    return found


@pytest.mark.parametrize("path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=short)
def test_imports_point_one_way(path: Path) -> None:
    assert wrong_imports(path) == []


def test_every_part_has_a_level() -> None:
    parts = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert parts - {"__init__"} <= set(LEVELS) | APART, "give the new part a place in TIERS"


def test_the_import_check_sees_upward_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "longspan"
    (package / "ops").mkdir(parents=True)
    bad = package / "ops" / "bad.py"
    lines = (
        "import torch, longspan.cli",
        "from longspan.kernels import linear",
        "from longspan import build_mechanism",
        "from ..mechanism import State",
        "def f(): from longspan.mechanisms import softmax",
    )
    bad.write_text("\n".join(lines))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    upward = ("build_mechanism", "cli", "mechanism", "mechanisms")
    assert wrong_imports(bad) == [f"ops/bad imports longspan.{name}" for name in upward]


def test_importing_longspan_does_not_import_torch() -> None:
    code = "import sys, longspan; longspan.__version__; print(*sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_using_longspan_does_not_load_the_compiler() -> None:
    names = "'torch._dynamo', 'triton', 'transformers', 'matplotlib', 'accelerate'"
    code = "import sys, longspan, longspan.compat.performer_pytorch\n[getattr(longspan, n) for n in longspan.__all__]\n"
    code += f"print(*sorted({{{names}}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("first", ["longspan", "longspan.mechanisms", "longspan.mechanisms.linear"])
def test_the_list_of_mechanisms_and_its_package_share_a_name(first: str) -> None:
    code = f"import {first}, longspan; print('linear' in longspan.mechanisms(), longspan.build_mechanism.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "build_mechanism"]


def test_public_names() -> None:
    assert len(set(longspan.__all__)) == len(longspan.__all__)
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None
    assert set(longspan.__all__) == set(dir(longspan))
    with pytest.raises(AttributeError, match=r"no attribute 'build_mechanisms'; it has .*build_mechanism"):
        _ = longspan.build_mechanisms


@pytest.mark.parametrize("path", FILES, ids=short)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def python_blocks(path: Path) -> list[str]:
    """The ```python blocks of a document, each with blank lines before it so that errors give the right line."""
    text = path.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text[: match.start(1)].count("\n") + match.group(1) for match in found]


@pytest.mark.parametrize("path", DOCUMENTS, ids=short)
def test_documents_run(path: Path) -> None:
    from longspan import mechanisms as package

    before = dict(package._REGISTRY)
    # A module's name of its own, so that dataclasses find where they are defined.
    namespace: dict = {"__name__": f"document_{path.stem}"}
    try:
        for block in python_blocks(path):
            exec(compile(block, str(path), "exec", dont_inherit=True), namespace)
    finally:
        package._REGISTRY.clear()
        package._REGISTRY.update(before)


def test_documents_have_blocks() -> None:
    assert len(python_blocks(ROOT / "README.md")) >= 3
    assert len(python_blocks(ROOT / "CONTRIBUTING.md")) == 1


def test_the_public_surface_is_small() -> None:
    assert len(longspan.__all__) <= 25
