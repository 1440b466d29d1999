"""Triton kernels of gated linear attention, one file per algorithm. This file needs no Triton."""

# The algorithms that have kernels; the others run in eager PyTorch.
ALGORITHMS: tuple[str, ...] = ("decay", "delta", "channel")
