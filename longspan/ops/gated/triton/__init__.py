"""Triton kernels of gated linear attention, one file per algorithm. This file needs no Triton."""

from torch import bfloat16, dtype

# The algorithms that have kernels; the others run in eager PyTorch.
ALGORITHMS: tuple[str, ...] = ("decay", "delta", "channel")


def decay_chunk(kind: dtype) -> int:
    """Return the number of tokens in a chunk of "decay"; products of other dtypes than bfloat16 take more registers."""
    return 64 if kind == bfloat16 else 32
