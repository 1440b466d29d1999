"""Fixtures of tests of kernels: calls on a CPU that run on them, and correct bfloat16 under the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longspan.ops.common import dispatch


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager calls on a CPU run on the kernels."""
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(dispatch, "insufficient_shared_memory", lambda q, needed: None)


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
