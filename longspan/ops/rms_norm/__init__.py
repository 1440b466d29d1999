"""RMS norm of heads and the gate of an output in one pass, where no gradient is needed.

PyTorch's norm has a block of threads per row, and rows of one head are too short for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import lazy_module
from longspan.ops.decode import rms_norm_scale

_kernels = lazy_module("longspan.ops.rms_norm.triton")


def rms_norm_heads(
    x: Tensor, norm: nn.Module, gates: Tensor | None = None, activation: str = "identity"
) -> Tensor | None:
    """Compute norm(x) ∘ activation(gates), rounded after each as separate operations would.

    Args:
        x: Heads (B, T, H, D).
        norm: Applied to each head.
        gates: Raw gates (B, T, H · D).
        activation: "silu" or "sigmoid", of the gates.

    Returns:
        (B, T, H, D), or None if no kernel supports these tensors and modules: on a CPU, where something needs a
        gradient, traces or explains the call, or for another norm.
    """
    if dispatch.recording is not None or not _untraced(x):
        return None
    scale = rms_norm_scale(norm, x.shape[3])
    if scale is None or not _takes_kernel(x, scale[0], gates):
        return None
    wide = None if gates is None else gates.unflatten(2, x.shape[2:])
    return _kernels().rms_norm_heads(x, scale[0], wide, scale[1], activation)


def _untraced(x: Tensor) -> bool:
    plain = dispatch.eager_untraced(x) and not torch.is_autocast_enabled("cuda")
    return plain and dispatch.unavailable(x) is None


def _takes_kernel(x: Tensor, weight: Tensor, gates: Tensor | None) -> bool:
    tensors = [x, weight] if gates is None else [x, weight, gates]
    if torch.is_grad_enabled() and any(y.requires_grad for y in tensors):
        return False
    fits = x.dtype in dispatch.DTYPES and all(y.dtype == x.dtype for y in tensors)
    return fits and x.shape[3] <= 512 and x.numel() > 0
