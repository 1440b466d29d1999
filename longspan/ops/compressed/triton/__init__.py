"""Triton kernels of attention over compressed keys and values."""
