"""Cases for the Triton kernels of Hedgehog's features, and their comparison with the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.ops.hedgehog import _Hedgehog, hedgehog_features, kernels, why_unsupported

# B, T, H, D, F.
SIZES = [
    (2, 37, 3, 5, 7),
    (1, 1, 2, 16, 16),
    (3, 65, 1, 64, 64),
    (1, 33, 2, 70, 100),
    (2, 65, 2, 160, 160),
    (1, 70, 1, 256, 256),
]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, whose tokens are not adjacent in memory, the weight in float32, and the gradient of the features."""
    B, T, H, D, F = size
    x = (scale * torch.randn(B, H, T + 2, D)).transpose(1, 2)[:, 1:-1].to(device, dtype)
    return x, torch.randn(H, F, D, device=device), torch.randn(B, T, H, 2 * F).to(device, dtype)


def by_torch(x: Tensor, weight: Tensor, d_features: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x, weight = (a.detach().cpu().to(dtype).requires_grad_() for a in (x, weight))
    features = hedgehog_features(x, weight)
    return [features.detach(), *torch.autograd.grad(features, (x, weight), d_features.cpu().to(dtype))]


def check(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""
    x, weight, d_features = inputs(size, dtype, device)
    if why_unsupported(x, weight) is not None:
        pytest.skip("more than the kernels take in float32")
    truth, eager = (by_torch(x, weight, d_features, kind) for kind in (torch.float64, dtype))
    found = [kernels().forward(x, weight), *kernels().backward(d_features, x, weight)]
    assert [a.dtype for a in found] == [dtype, dtype, torch.float32]
    for name, ours, near, exact in zip(("features", "d_x", "d_weight"), found, eager, truth, strict=True):
        ulp = exact.abs().max().item() * torch.finfo(dtype).eps
        allowed = 2 * (near.double() - exact).abs().max().item() + ulp
        error = (ours.cpu().double() - exact).abs().max().item()
        assert error <= allowed, f"{name}: {error:.3g} from the truth, {allowed:.3g} allowed"


def check_op(call: str, dtype: torch.dtype, device: str) -> None:
    """Assert that the op returns what the kernels return, gradients too."""
    x, weight, d_features = inputs(SIZES[0], dtype, device)
    x, weight = x.detach().requires_grad_(), weight.requires_grad_()
    features = getattr(_Hedgehog, call)(x, weight)
    found = [features, *torch.autograd.grad(features, (x, weight), d_features)]
    expected = [kernels().forward(x, weight), *kernels().backward(d_features, x, weight)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
