"""Triton's interpreter for tests, which run again in a process of its own: faster, and with bfloat16 mended.

It multiplies the bits of bfloat16 and cuts what it rounds to it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Triton decides when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")


def run_under_the_interpreter(file: str) -> None:
    """The tests of a file, in a process where Triton's interpreter takes the place of its compiler."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'longspan[triton]'")
    if INTERPRETED:
        pytest.skip("already inside")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]


def hurry() -> None:
    """Half of the time goes into putting the interpreter in the place of the language, at every launch and again at
    every call of a helper, ours and Triton's own. Once for a launch will do, for all that any of them sees.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    seen = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = lambda _: patch(seen)
    interpreter.InterpretedFunction.__call__ = called


if INTERPRETED:
    hurry()


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 under the interpreter as a GPU has it: products exact, sums in float32, rounded to the nearest."""
    from triton import language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def whole(x: Any) -> np.ndarray:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return interpreter.TensorHandle(np.matmul(whole(a), whole(b)) + d.data, d.dtype.scalar)

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, x, dtype)
        bits = np.ascontiguousarray(x.data).view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return interpreter.TensorHandle(bits.astype(np.uint16), dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
