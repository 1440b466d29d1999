"""Triton kernels of single-token decoding."""
