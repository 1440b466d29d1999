"""Triton kernels of windowed attention."""
