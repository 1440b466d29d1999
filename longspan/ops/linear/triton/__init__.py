"""Triton kernels of linear attention."""
