"""Calls on batches of more rows than a grid has programs for: CUDA limits its second and third axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def split_batch(function: Callable[..., tuple[Tensor, ...]], rows: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return function(*tensors), computed for some rows of the batch at a time.

    Args:
        function: Returns tensors (B, …).
        rows: Rows of a call, at most.
        tensors: (B, …), the first of them; the others also (1, …) or None for all rows.
    """
    first = tensors[0]
    assert first is not None
    B = first.shape[0]
    if rows >= B:
        return function(*tensors)
    calls = -(-B // rows)
    parts: Any = [x.split(rows) if x is not None and x.shape[0] == B else [x] * calls for x in tensors]
    results = [function(*part) for part in zip(*parts, strict=True)]
    return tuple(torch.cat(result) for result in zip(*results, strict=True))
