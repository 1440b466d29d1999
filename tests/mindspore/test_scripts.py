"""Scripts as users have them: the original's README through `longspan run`, our document, the example, no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT.parent / "shared" / "reference" / "local-attention-mindspore.md"
SHAPES = ["(2, 8, 2048, 64)", "(2, 8, 2048, 64)", "(8, 2057, 64)", "(1, 8192, 256)"]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# The last line asks for what the README says, and that no torch came along.
ASKED = "\nimport sys\nprint((out if 'out' in globals() else logits).shape, 'torch' in sys.modules)\n"


@pytest.mark.parametrize("how", ["longspan run", "changed import"])
@pytest.mark.parametrize("block", range(4))
def test_the_readme_of_the_original(block: int, how: str, tmp_path: Path) -> None:
    if not README.is_file():
        pytest.skip(f"{README} is not here")
    text = blocks(README)
    assert len(text) == len(SHAPES)
    script, source = tmp_path / "script.py", text[block] + ASKED
    if how == "longspan run":
        script.write_text(source)
        out = run(sys.executable, "-m", "longspan", "run", str(script), cwd=tmp_path)
    else:
        assert source.count("from local_attention import") == 1
        script.write_text(source.replace("from local_attention import", "from longspan.mindspore import"))
        out = run(sys.executable, str(script), cwd=tmp_path)
    assert out.splitlines()[-1] == f"{SHAPES[block]} False"


def test_our_document(tmp_path: Path) -> None:
    found = blocks(ROOT / "docs" / "mindspore.md")
    assert len(found) >= 3
    script = tmp_path / "document.py"
    script.write_text("\n".join(found))
    run(sys.executable, str(script), cwd=tmp_path)


def test_only_mindspore_and_numpy_are_imported(tmp_path: Path) -> None:
    code = (
        "import sys, longspan.mindspore, longspan.mindspore.weights\n"
        "print(*sorted(name for name in sys.modules if name.startswith('longspan')), sep='\\n')\n"
        "print('torch' in sys.modules)\n"
    )
    *ours, torch = run(sys.executable, "-c", code, cwd=tmp_path).split()
    assert torch == "False"
    assert all(name == "longspan" or name.startswith("longspan.mindspore") for name in ours)


def test_the_copy_task_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from mindspore_copy import train

    assert train(steps=200) >= 0.99
