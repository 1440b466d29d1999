"""Triton kernels of normalization by feature."""
