"""Measure how readable the repository is: lines of code, entries at the package root, and the path of a training step.

    python tools/measure.py [--root CHECKOUT]

Lines of code exclude blank lines, comments and docstrings. The trace runs `loss.backward()` of a depth-1 language model
with `linear` attention on the CPU and counts the files of the package whose functions are called, and how often a call
enters another file than the call before it.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

IGNORED_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
NOT_COUNTED = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}


def lines_of_code(source: str) -> int:
    """Count the lines of a Python source that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IGNORED_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # Docstrings of modules, classes, functions and, below an assignment, of attributes.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count(files: Iterable[Path]) -> tuple[int, int]:
    """Return the number of files and their lines of code."""
    sources = [path.read_text(encoding="utf-8") for path in files]
    return len(sources), sum(lines_of_code(source) for source in sources)


def trace(function: Callable[[], Any], package: Path) -> list[str]:
    """Return the file of every Python function of `package` that `function` calls, in order."""
    visited: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(package)):
            visited.append(str(Path(name).relative_to(package)))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return visited


def changes_of_file(visited: list[str]) -> int:
    """Count how often a call enters another file than the call before it."""
    return sum(a != b for a, b in pairwise(visited))


def training_step(package: Path) -> tuple[list[str], list[str]]:
    """Trace forward and backward of the second training step of a depth-1 language model with linear attention."""
    sys.path.insert(0, str(package.parent))
    import torch

    from longspan import AttentionConfig, LanguageModel, ModelConfig

    attention = AttentionConfig(num_heads=2, mechanism={"mechanism": "linear", "feature_map": "softmax"})
    model = LanguageModel(ModelConfig(dim=16, depth=1, causal=True, vocab_size=32, attention=attention))
    tokens = torch.randint(0, 32, (2, 64))
    model.loss(tokens).backward()
    loss: list[torch.Tensor] = []
    forward = trace(lambda: loss.append(model.loss(tokens)), package)
    # The backward pass of CPU tensors runs in this thread, so that the profiler sees it.
    return forward, trace(loss[0].backward, package)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout to measure"
    )
    root: Path = parser.parse_args().root.resolve()
    package = root / "longspan"
    total = 0
    for folder in (*sorted(path for path in package.iterdir() if path.is_dir()), package, root / "benchmarks"):
        files = sorted(folder.glob("*.py") if folder == package else folder.rglob("*.py"))
        number, lines = count(files)
        total += lines
        if number:
            print(f"{folder.relative_to(root)!s:24} {number:4} files {lines:7,} lines of code")
    print(f"{'longspan and benchmarks':24} {'':10} {total:7,} lines of code")
    entries = sorted(path.name for path in package.iterdir() if path.name not in NOT_COUNTED)
    print(f"{len(entries)} entries at the package root: {', '.join(entries)}")
    forward, backward = training_step(package)
    files = sorted({*forward, *backward})
    print(
        f"a training step visits {len(files)} files with {changes_of_file(forward)} changes of file forward and "
        f"{changes_of_file(backward)} backward: {', '.join(files)}"
    )


if __name__ == "__main__":
    main()
