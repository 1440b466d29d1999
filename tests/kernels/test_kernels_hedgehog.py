"""The Triton kernels of Hedgehog's features under Triton's interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hedgehog_cases import SIZES, check, check_op, inputs
from interpreter import interpreted

from longspan.ops.hedgehog import kernels, why_not_triton, why_unsupported


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check(size, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("call", ["direct", "traced"])
def test_the_op(call: str) -> None:
    check_op(call, torch.float32, "cpu")


@interpreted
def test_large_inputs_are_finite() -> None:
    x, weight, d_features = inputs(SIZES[0], torch.float16, "cpu", scale=300.0)
    for result in (kernels().forward(x, weight), *kernels().backward(d_features, x, weight)):
        assert result.isfinite().all()


def test_reasons() -> None:
    x, weight = torch.zeros(1, 4, 2, 8), torch.zeros(2, 8, 8)
    assert why_unsupported(x, weight) is None
    assert "CUDA" in str(why_not_triton(x, weight))
    assert "float64" in str(why_unsupported(x.double(), weight))
    assert "64 × 64 at most" in str(why_unsupported(x, torch.zeros(2, 65, 8)))
    assert why_unsupported(x.bfloat16(), torch.zeros(2, 65, 8)) is None
    assert "128 × 128 at most" in str(why_unsupported(x.half(), torch.zeros(2, 129, 8)))
    assert "empty" in str(why_unsupported(x[:, :0], weight))
