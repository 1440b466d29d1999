"""Triton's interpreter for tests: it multiplies the bits of bfloat16 and cuts what it rounds to it; mended here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


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
