"""What is too large for the kernels: strides whose offsets overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.ops.common.plans import dense_rows


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_rows_of_which_offsets_overflow_are_copied() -> None:
    million = 2**20
    kept = [
        meta(1, million, 32, 128),
        meta(1, million, 3, 32, 128)[:, :, 0],
        meta(1, 15, million, 128).transpose(1, 2),
        meta(64, 4096, 16, 64).transpose(0, 1),
        meta(1, 1, 8, 64).expand(1, million, 8, 64),
    ]
    assert all(dense_rows(x) is x for x in kept)
    by_heads = meta(1, 32, million, 128).transpose(1, 2)
    copied = [
        by_heads,
        by_heads[:, :1024],
        meta(64, 65536, 4, 64).transpose(0, 1)[:, :, ::2],
        meta(2, 5, 3, 8)[..., ::2],
    ]
    for x in [*copied, meta(64, 65536, 8, 64).transpose(0, 1)]:
        assert dense_rows(x).is_contiguous(), x.stride()
