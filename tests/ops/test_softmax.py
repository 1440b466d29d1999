"""Attention by matrix products in blocks of queries, used for float32 on a GPU; here on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.ops import softmax as sdpa

B, H, T, S, D, E = 2, 4, 17, 19, 5, 7


def inputs(S: int, heads: int) -> list[Tensor]:
    sizes = (H, T, D), (heads, S, D), (heads, S, E)
    return [torch.randn(B, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("rows", [1, 4, T])
@pytest.mark.parametrize("how", ["full", "causal", "key mask", "pair mask", "bias", "grouped", "causal, grouped"])
def test_blocks_agree_with_one_product(how: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    causal, grouped = "causal" in how, "grouped" in how
    x = inputs(T if causal else S, 2 if grouped else H)
    options: dict[str, Any] = {"causal": causal, "grouped": grouped, "scale": 0.3}
    mask = {"key mask": torch.rand(B, 1, 1, S) > 0.3, "pair mask": torch.rand(B, 1, T, S) > 0.3}.get(how)
    if mask is not None:
        mask[0, :, -1] = False  # a query that sees no key
    if how == "bias":
        options["bias"] = torch.randn(H, T, S, dtype=torch.float64, requires_grad=True)
        x.append(options["bias"])

    def run() -> list[Tensor]:
        out = sdpa.attend(*x[:3], mask, **options)
        assert out.shape == (B, H, T, E)
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    wanted = run()
    called = []
    products = sdpa._math
    monkeypatch.setattr(sdpa, "_needs_exact_float32", lambda q: True)
    monkeypatch.setattr(sdpa, "MAX_WEIGHTS", rows * B * H * x[1].shape[2])
    monkeypatch.setattr(sdpa, "_math", lambda *given: called.append(given[0].shape[2]) or products(*given))
    for mine, theirs in zip(run(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    forward = [min(rows, T - i) for i in range(0, T, rows)]
    assert sorted(called) == sorted(forward * (1 if rows == T else 2))  # recomputed for the gradients
    with torch.no_grad():
        torch.testing.assert_close(sdpa.attend(*x[:3], mask, **options), wanted[0])


def test_no_weights_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(S, H)
    monkeypatch.setattr(sdpa, "_needs_exact_float32", lambda q: True)
    monkeypatch.setattr(sdpa, "MAX_WEIGHTS", 4 * B * H * S)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        sdpa.attend(*x, None)
    assert all(x.shape[-1] != S for x in saved)


def test_when_float32_is_exact() -> None:
    class OnGpu:
        is_cuda = True

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

    float32: Any = OnGpu(torch.float32)
    assert sdpa._needs_exact_float32(float32)
    assert not sdpa._needs_exact_float32(torch.empty(1))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        other: Any = OnGpu(dtype)
        assert not sdpa._needs_exact_float32(other)
    torch.set_float32_matmul_precision("high")  # a fixture resets it
    assert not sdpa._needs_exact_float32(float32)
