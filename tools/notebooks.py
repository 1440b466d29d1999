"""Execute the notebooks of the documentation and store their outputs in them, without Jupyter.

    python tools/notebooks.py docs/tutorials/*.ipynb

A code cell is Python, or `longspan` commands with a "!" before each. Plots of matplotlib are stored as SVG.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from svg_style import STYLE, figure_to_svg

Run = Callable[[list[str]], str]


def run_command(words: list[str]) -> str:
    """Run a `longspan` command in the current folder and return what it prints."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def execute(notebook: dict[str, Any], folder: Path, run: Run = run_command) -> dict[str, Any]:
    """Execute the cells of a notebook.

    Args:
        notebook: The notebook, as JSON.
        folder: The folder to execute it in, for the files that it writes.
        run: Runs a `longspan` command.

    Returns:
        The namespace of the cells, whose outputs are replaced by the new ones.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    with _inside(folder), matplotlib.rc_context(STYLE):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell["outputs"] = list(_outputs("".join(cell["source"]), namespace, run, count))
                cell["execution_count"] = count
    pyplot.close("all")
    notebook["metadata"]["longspan"] = {"digest": digest(notebook)}
    return namespace


def digest(notebook: dict[str, Any]) -> str:
    """Return a digest of the code of all cells, which tells whether outputs are theirs."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def _outputs(source: str, namespace: dict[str, Any], run: Run, count: int) -> Iterator[dict[str, Any]]:
    pyplot.close("all")
    if source.startswith("!"):
        text = "".join(run(shlex.split(line[1:], comments=True)) for line in source.splitlines())
        value = None
    else:
        with redirect_stdout(io.StringIO()) as out:
            value = _evaluate(source, namespace)
        text = out.getvalue()
    if text:
        yield {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        yield {"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}}
    for number in pyplot.get_fignums():
        svg = figure_to_svg(
            pyplot.figure(number), f"{count}-{number}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        )
        data = {"image/svg+xml": svg.splitlines(keepends=True)}
        yield {"output_type": "display_data", "data": data, "metadata": {}}


def _evaluate(source: str, namespace: dict[str, Any]) -> Any:
    """Execute statements; the value of the last one, if it is an expression without ";", is returned."""
    tree = ast.parse(source)
    last = tree.body.pop()
    shown = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    exec(compile(ast.Module(tree.body if shown else [*tree.body, last], []), "<cell>", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace) if shown else None


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(paths: list[str]) -> None:
    """Execute notebooks in temporary folders and write them with their outputs."""
    matplotlib.use("agg")
    for path in map(Path, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path, f"{path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
