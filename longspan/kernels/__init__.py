"""Triton kernels, imported on first use by `longspan.ops`; the plain PyTorch path is their fallback and their truth."""
