"""Softmax attention by PyTorch's kernels on a GPU, compared with matrix products by the tolerance rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_linformer import DTYPES, no_further
from torch import Tensor

from longspan import build_mechanism
from longspan.ops import softmax as sdpa
from longspan.ops import window as window_op

NAMES = ["out", "d_q", "d_k", "d_v", "d_bias"]


def by_products(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, bias: Tensor | None) -> Tensor:
    """Attend with heads before tokens; each product and the softmax are rounded to the dtype."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    scores = scores if bias is None else scores + bias
    return (scores if seen is None else scores.masked_fill(~seen, float("-inf"))).softmax(-1) @ v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["full", "causal", "mask", "bias", "grouped"])
@pytest.mark.parametrize("blocks", [1, 5])
def test_attend(how: str, dtype: torch.dtype, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    B, H, T, D, E = 2, 4, 517, 64, 48
    heads = 2 if how == "grouped" else H
    given = [torch.randn(B, h, T, n, device="cuda", dtype=dtype) for h, n in ((H, D), (heads, D), (heads, E))]
    d = torch.randn(B, H, T, E, device="cuda", dtype=dtype)
    if how == "bias":
        given.append(torch.randn(H, T, T, device="cuda", dtype=dtype))
    seen = {
        "mask": torch.rand(B, 1, T, T, device="cuda") < 0.6,
        "causal": torch.ones(T, T, device="cuda", dtype=torch.bool).tril(),
    }.get(how)
    monkeypatch.setattr(sdpa, "MAX_WEIGHTS", B * H * T * -(-T // blocks))

    def run(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        x = [t.to(dtype).requires_grad_() for t in given]
        bias = x[3] if how == "bias" else None
        if ours:
            options: dict[str, Any] = {"causal": how == "causal", "grouped": how == "grouped", "bias": bias}
            out = sdpa.attend(*x[:3], seen if how == "mask" else None, **options)
        else:
            out = by_products(x[0], x[1], x[2], seen, bias)
        return [out, *torch.autograd.grad(out, x, d.to(dtype))]

    no_further(run(dtype, True), run(dtype, False), run(torch.float64, False), NAMES[: 1 + len(given)])


@pytest.mark.parametrize("options", [{"window": 64, "look_back": 1}, {"window": 40}], ids=str)
def test_windows_in_eager_pytorch(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_op, "why_not_triton", lambda *_, **__: "disabled")
    T, H, D = 517, 2, 64
    local = build_mechanism("local", H, D, **options)
    given = [torch.randn(1, T, H, D, device="cuda") for _ in range(3)]
    d = torch.randn(1, T, H, D, device="cuda")
    i = torch.arange(T, device="cuda")[:, None]
    j = i.mT
    first = (i // 64 - 1) * 64 if "look_back" in options else i - 39
    seen = (j <= i) & (j >= first)

    def run(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        x = [t.to(dtype).requires_grad_() for t in given]
        if ours:
            out = local(*x, causal=True)
        else:
            q, k, v = (t.transpose(1, 2) for t in x)
            out = by_products(q, k, v, seen, None).transpose(1, 2)
        return [out, *torch.autograd.grad(out, x, d.to(dtype))]

    no_further(run(torch.float32, True), run(torch.float32, False), run(torch.float64, False), NAMES[:4])
