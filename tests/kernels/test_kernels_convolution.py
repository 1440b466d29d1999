"""The Triton kernels of short convolutions under Triton's interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch
from convolution_cases import SIZES, check, check_op
from interpreter import interpreted

from longspan.ops.convolution import kernels, short_convolution, why_not_triton


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check(size, dtype, "cpu")


@interpreted
def test_programs_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels(), "PARTS", 2)
    check((3, 53, 3, 4), torch.float32, "cpu")


@interpreted
@pytest.mark.parametrize("call", ["direct", "traced"])
def test_the_op(call: str) -> None:
    check_op(call, torch.float32, "cpu")


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 4, 8)
    assert "CUDA" in str(why_not_triton(x))
    assert short_convolution(x, torch.zeros(4, 8)) is None
    monkeypatch.setattr("longspan.ops.common.dispatch.unavailable", lambda _: None)
    assert why_not_triton(x) is None
    assert "float64" in str(why_not_triton(x.double()))
    assert "empty" in str(why_not_triton(x[:, :0]))
