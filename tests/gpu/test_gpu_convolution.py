"""The Triton kernels of short convolutions on a GPU, and the layer that uses them."""

from __future__ import annotations

import pytest
import torch
from convolution_cases import SIZES, check, check_op

from longspan.layout import TokenLayout
from longspan.models.layers import ShortConvolution


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (16, 1024, 384, 4)], ids=str)
def test_kernels(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check(size, dtype, "cuda")


@pytest.mark.parametrize("call", ["direct", "traced"])
def test_the_op(call: str) -> None:
    check_op(call, torch.bfloat16, "cuda")


@pytest.mark.parametrize("masked", [False, True])
def test_the_layer(masked: bool) -> None:
    """Results on the GPU are those of the CPU, also of padded sequences."""
    torch.manual_seed(0)
    layer, x = ShortConvolution(67, 4), torch.randn(3, 37, 67)
    mask = torch.arange(37) < torch.tensor([[37], [5], [2]]) if masked else None
    found = []
    for device in ("cpu", "cuda"):
        layer, y = layer.to(device), x.to(device)
        layout = TokenLayout.of(y, causal=True, key_mask=None if mask is None else mask.to(device))
        found.append(layer(layout.zero_fill(y), layout).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
