"""Cases for the Triton kernels of short convolutions, and their comparison with the definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.ops.convolution import _Convolution, kernels

# B, T, C, size.
SIZES = [(2, 37, 67, 4), (3, 1, 5, 3), (1, 33, 65, 2), (5, 3, 64, 7)]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the weight in float32, and the gradient of the output, not contiguous."""
    B, T, C, width = size
    x, d_out = torch.randn(B, T, C).to(device, dtype), torch.randn(B, C, T).transpose(1, 2).to(device, dtype)
    return x, torch.randn(width, C, device=device), d_out


def by_torch(x: Tensor, weight: Tensor, d_out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x, weight = (a.detach().cpu().to(dtype).requires_grad_() for a in (x, weight))
    shifted = [F.pad(x, (0, 0, j, 0))[:, : x.shape[1]] for j in range(len(weight))]
    out = F.silu(torch.stack([a * w for a, w in zip(shifted, weight, strict=True)]).sum(0))
    return [out.detach(), *torch.autograd.grad(out, (x, weight), d_out.cpu().to(dtype))]


def check(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""
    x, weight, d_out = inputs(size, dtype, device)
    truth, eager = (by_torch(x, weight, d_out, kind) for kind in (torch.float64, dtype))
    found = [kernels().forward(x, weight), *kernels().backward(d_out, x, weight)]
    assert [a.dtype for a in found] == [dtype, dtype, torch.float32]
    for name, ours, near, exact in zip(("out", "d_x", "d_weight"), found, eager, truth, strict=True):
        ulp = exact.abs().max().item() * torch.finfo(dtype).eps
        allowed = 2 * (near.double() - exact).abs().max().item() + ulp
        error = (ours.cpu().double() - exact).abs().max().item()
        assert error <= allowed, f"{name}: {error:.3g} from the truth, {allowed:.3g} allowed"


def check_op(call: str, dtype: torch.dtype, device: str) -> None:
    """Assert that the op returns what the kernels return, gradients too."""
    x, weight, d_out = inputs(SIZES[0], dtype, device)
    x, weight = x.detach().requires_grad_(), weight.requires_grad_()
    out = getattr(_Convolution, call)(x, weight)
    found = [out, *torch.autograd.grad(out, (x, weight), d_out)]
    expected = [kernels().forward(x, weight), *kernels().backward(d_out, x, weight)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
