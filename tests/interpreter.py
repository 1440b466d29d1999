"""Triton's interpreter for tests of kernels, made faster, with checked addresses and with correct bfloat16.

`make test-kernels` runs them with TRITON_INTERPRET=1, which Triton reads when it is imported. The interpreter
multiplies the bits of bfloat16 as integers, and truncates where a GPU rounds to nearest.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

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


def check_addresses() -> None:
    """Raise an error where a kernel reads or writes outside the tensor that its addresses point to.

    A GPU reports this only where the memory behind a tensor is not in use, and rarely says which kernel did it.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, arguments = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    extents: list[tuple[int, int]] = []

    def init_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        taken = arguments(self, args, kwargs)
        tensors = [x for x in _leaves((*taken[0], *taken[1].values())) if hasattr(x, "data_ptr") and x.numel()]
        extents[:] = [(x.data_ptr(), x.data_ptr() + _span(x) * x.element_size()) for x in tensors]
        return taken

    def check(pointers: Any, mask: Any) -> None:
        used = pointers.data[mask.data] if pointers.data.shape == mask.data.shape else pointers.data
        if used.size:
            first, last = int(used.min()), int(used.max()) + pointers.get_element_ty().primitive_bitwidth // 8
            if not any(start <= first and last <= end for start, end in extents):
                near = min(extents, key=lambda extent: max(extent[0] - first, last - extent[1]))
                start, end = near
                raise IndexError(f"bytes {first - start} to {last - start} of a tensor of {end - start} bytes")

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    executor._init_args_hst = init_arguments


def _leaves(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments, those inside tuples one by one."""
    return [y for x in arguments for y in (_leaves(x) if isinstance(x, tuple) else [x])]


def _span(x: Any) -> int:
    """Elements from the first to the last of a tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


if INTERPRETED:
    patch_once_per_launch()
    check_addresses()


def take_kernels(monkeypatch: pytest.MonkeyPatch, eager: Any, name: str) -> None:
    """Let eager calls on a CPU run on the kernels; what they replace, `eager.name`, must not be called."""
    from longspan.ops.common import dispatch

    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(eager, name, None)
