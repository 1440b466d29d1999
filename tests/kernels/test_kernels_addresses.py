"""Kernels that read or write outside their tensors fail under the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreter import interpreted


@triton.jit
def copy_kernel(p_x, p_y, read, write):
    i = tl.arange(0, 8)
    tl.store(p_y + i, tl.load(p_x + i, mask=i < read, other=0), mask=i < write)


@interpreted
def test_addresses_outside_of_tensors_raise() -> None:
    x, y = torch.arange(14.0)[::2][:5], torch.zeros(7)  # x spans 9 elements
    copy_kernel[(1,)](x, y, 8, 7)
    assert y.tolist() == [*range(7)]
    with pytest.raises(Exception, match="bytes 0 to 32 of a tensor of 28 bytes"):
        copy_kernel[(1,)](x, y, 7, 8)
    with pytest.raises(Exception, match="bytes 0 to 28 of a tensor of 20 bytes"):
        copy_kernel[(1,)](torch.zeros(5), y, 7, 7)
