"""The Triton kernels of Hedgehog's features on a GPU, and the mixture that uses them."""

from __future__ import annotations

import pytest
import torch
from hedgehog_cases import SIZES, check, check_op

from longspan import build_mechanism

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (4, 1031, 9, 64, 64), (1, 517, 2, 128, 128), (2, 1031, 3, 256, 256)], ids=str)
def test_kernels(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check(size, dtype, "cuda")


@pytest.mark.parametrize("call", ["direct", "traced"])
def test_the_op(call: str) -> None:
    check_op(call, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "causal", "head_dim"),
    [
        ("mixture", True, 64),
        ("mixture", False, 64),
        ("mixture", True, 192),
        ("mixture", False, 256),
        ("linear", True, 64),
        ("linear", False, 64),
    ],
)
def test_mechanisms(name: str, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    """Results and gradients on the GPU are near those of float64 on the CPU."""
    torch.manual_seed(0)
    options = {"window": 64} if name == "mixture" else {"feature_map": "hedgehog"}
    mechanism = build_mechanism(name, 6, head_dim, num_kv_heads=2, **options)
    q, k, v = (torch.randn(2, 517, heads, head_dim).to(dtype) for heads in (6, 2, 2))
    d_out = torch.randn(2, 517, 6, head_dim).to(dtype)
    results = {}
    for device, kind in (("cpu", torch.float64), ("cpu", dtype), ("cuda", dtype)):
        leaves = [x.to(device, kind).requires_grad_() for x in (q, k, v)]
        out = mechanism.to(device, torch.float64 if kind == torch.float64 else torch.float32)(*leaves, causal=causal)
        results[device, kind] = [out, *torch.autograd.grad(out, leaves, d_out.to(out))]
        mechanism.to(torch.float32)
    for truth, near, ours in zip(*results.values(), strict=True):
        allowed = 4 * (near.double() - truth).abs().max() + truth.abs().max() * torch.finfo(dtype).eps
        assert (ours.cpu().double() - truth).abs().max() <= allowed
