"""Every example script runs from end to end, at a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# The arguments that make a script small, and what it prints when it has done its work.
RUNS = {
    "train_bytes.py": ("--steps 3 --context 64 --batch-size 2", "bits per byte"),
    "classify_documents.py": ("--steps 2 --length 64 --batch-size 4", "accuracy on 64 unseen documents"),
    "stream_from_state.py": ("--prompt-tokens 500 --max-tokens 4", "the saved session takes"),
    "long_sequences.py": ("--length 300 --chunk-length 64 --steps 1 --compare", "300 tokens in pieces of 64: loss"),
    "swap_attention.py": ("--window 16", "generated 8 tokens"),
}


def test_every_script_is_run() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    elsewhere = {"mindspore_copy.py", "context_parallel.py", "accelerate_context_parallel.py"}
    assert scripts == {*RUNS, *elsewhere}  # by tests/mindspore and tests/distributed


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    arguments, expected = RUNS[name]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments.split()], capture_output=True, text=True, cwd=EXAMPLES.parent
    )
    assert run.returncode == 0, run.stderr
    assert expected in run.stdout
