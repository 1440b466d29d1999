"""The shape of the repository: which way imports point, what importing costs, and documents that run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan.utils import commit

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "longspan"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS.remove(ROOT / "docs" / "mindspore.md")  # run by tests/mindspore, where there is MindSpore


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_point_one_way() -> None:
    """The layers are declared in pyproject.toml and checked by import-linter."""
    command = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_importing_longspan_does_not_import_torch() -> None:
    code = "import sys, longspan; longspan.__version__; print(*sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_only_torch_private_asks_pytorch_whether_it_exports() -> None:
    found = [
        path.name for path in (ROOT / "longspan").rglob("*.py") if "torch.compiler.is_exporting" in path.read_text()
    ]
    assert found == ["torch_private.py"]


def test_using_longspan_does_not_load_the_compiler() -> None:
    names = "'torch._dynamo', 'triton', 'transformers', 'matplotlib', 'accelerate'"
    code = "import sys, longspan, longspan.compat.performer_pytorch\n[getattr(longspan, n) for n in longspan.__all__]\n"
    code += f"print(*sorted({{{names}}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("first", ["longspan", "longspan.mechanisms", "longspan.mechanisms.linear"])
def test_the_list_of_mechanisms_and_its_package_share_a_name(first: str) -> None:
    code = f"import {first}, longspan; print('linear' in longspan.list_mechanisms(), longspan.build_mechanism.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "build_mechanism"]


def test_public_names() -> None:
    assert len(set(longspan.__all__)) == len(longspan.__all__)
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None
    assert set(longspan.__all__) == set(dir(longspan))
    with pytest.raises(AttributeError, match=r"no attribute 'build_mechanisms'; it has .*build_mechanism"):
        _ = longspan.build_mechanisms


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
    assert len(python_blocks(ROOT / "README.md")) == 2
    assert len(python_blocks(ROOT / "docs" / "extending.md")) >= 3


def test_the_public_surface_is_small() -> None:
    assert len(longspan.__all__) <= 27


def test_the_package_root_is_small() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert len(entries) <= 16, sorted(entries)


def definitions(kinds: type | tuple[type, ...]) -> Iterator[tuple[Path, Any]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield path.relative_to(PACKAGE), node


def test_no_two_classes_share_a_name() -> None:
    """The older libraries' names in compat, and MindSpore's twins of them, are theirs."""
    homes: dict[str, set[str]] = {}
    for path, node in definitions(ast.ClassDef):
        if path.parts[0] not in ("compat", "mindspore"):
            homes.setdefault(node.name, set()).add(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_recorded_commit_is_that_of_longspan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a repository around an installed, copied or vendored package."""
    for where in ("venv/site-packages", ".", "third_party/longspan"):
        package = tmp_path / where / "longspan"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (tmp_path / "third_party" / "longspan" / "pyproject.toml").write_text('name = "longspan"\n')
    (tmp_path / "pyproject.toml").write_text('name = "other"\n')
    for arguments in (["init"], ["add", "."], ["commit", "-m", "x"]):
        git(tmp_path, *arguments)
    for where in ("venv/site-packages", ".", "third_party/longspan"):
        assert commit(tmp_path / where / "longspan") is None
    own = tmp_path / "own"
    (own / "longspan").mkdir(parents=True)
    (own / "longspan" / "__init__.py").touch()
    (own / "pyproject.toml").write_text('name = "longspan"\n')
    for arguments in (["init"], ["add", "."], ["commit", "-m", "y"]):
        git(own, *arguments)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    found = commit(own / "longspan")
    monkeypatch.delenv("GIT_DIR")
    assert found == {"hash": git(own, "rev-parse", "HEAD"), "changed": False}
    (own / "longspan" / "__init__.py").write_text("1\n")
    assert commit(own / "longspan") == {"hash": git(own, "rev-parse", "HEAD"), "changed": True}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
