"""Triton kernels of causal linear attention with given features."""
