"""Triton's interpreter for tests of kernels, made faster, and with correct bfloat16.

`make test-kernels` runs them with TRITON_INTERPRET=1, which Triton reads when it is imported. The interpreter
multiplies the bits of bfloat16 as integers, and truncates where a GPU rounds to nearest.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: make test-kernels")


def patch_once_per_launch() -> None:
    """Patch Triton's language once per launch instead of at every call of a helper, which takes half of the time."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    seen = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = lambda _: patch(seen)
    interpreter.InterpretedFunction.__call__ = called


if INTERPRETED:
    patch_once_per_launch()


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 under the interpreter as on a GPU: exact products, sums in float32, rounding to nearest."""
    from triton import language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def widen(x: Any) -> np.ndarray:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return interpreter.TensorHandle(np.matmul(widen(a), widen(b)) + d.data, d.dtype.scalar)

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, x, dtype)
        bits = np.ascontiguousarray(x.data).view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return interpreter.TensorHandle(bits.astype(np.uint16), dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
