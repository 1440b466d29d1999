"""Linformer on a GPU: halves summed in float32, divided queries, and the causal form on the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.mechanisms.linformer import LinformerAttention
from longspan.ops import sdpa
from longspan.ops.compress import _compress

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
R = 64


def plain(mechanism: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The equations in the dtype of the inputs, as products of matrices."""
    e, f = (p.table[0, : q.shape[1]] for p in (mechanism.keys, mechanism.values))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    if causal:
        p = ((q @ k.mT).tril() @ e * q.shape[3] ** -0.5).softmax(-1)
        return ((p @ f.mT).tril() @ v).transpose(1, 2)
    p = (q @ (e.mT @ k).mT * q.shape[3] ** -0.5).softmax(-1)
    return (p @ (f.mT @ v)).transpose(1, 2)


def no_further(found: list[Tensor], reference: list[Tensor], truth: list[Tensor], names: list[str]) -> None:
    for name, x, other, true in zip(names, found, reference, truth, strict=True):
        error, allowed = (float((y.double() - true).detach().abs().max()) for y in (x, other))
        largest = float(true.detach().abs().max())
        assert error <= 2 * allowed + torch.finfo(x.dtype).eps * largest, (name, error, allowed, largest)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_further_from_the_truth_than_twice_plain_pytorch(dtype: torch.dtype, kv_heads: int, causal: bool) -> None:
    B, T, H, D = 2, 1031, 2, 64
    torch.manual_seed(0)
    built = LinformerAttention(H, D, num_kv_heads=kv_heads, rank=R, max_length=T).to("cuda", dtype)
    given = [torch.randn(B, T, heads, D, device="cuda", dtype=dtype) for heads in (H, kv_heads, kv_heads)]
    d = torch.randn(B, T, H, D, device="cuda", dtype=dtype)

    def run(attend: Any, dtype: torch.dtype) -> list[Tensor]:
        mechanism = built.to(dtype)
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = attend(mechanism, *leaves)
        return [out, *torch.autograd.grad(out, [*leaves, *(p.table for p in (built.keys, built.values))], d.to(dtype))]

    def ours(m: LinformerAttention, *qkv: Tensor) -> Tensor:
        return m(*qkv, causal=causal)

    def equations(m: LinformerAttention, *qkv: Tensor) -> Tensor:
        return plain(m, *qkv, causal)

    names = ["out", "d_q", "d_k", "d_v", "d_e", "d_f"]
    no_further(run(ours, dtype), run(equations, dtype), run(equations, torch.float64), names)


@pytest.mark.parametrize("T", [4096, 4099])
def test_divided_queries(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, T, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, R, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert sdpa._folds(q.flatten(1, 2)[:, None], k) > 1
    d = torch.randn_like(q)

    def run(dtype: torch.dtype) -> list[Tensor]:
        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = sdpa.attend(x[0].transpose(1, 2), x[1], x[2], None, grouped=True).transpose(1, 2)
        return [out, *torch.autograd.grad(out, x, d.to(dtype))]

    divided = run(torch.bfloat16)
    monkeypatch.setattr(sdpa, "_folds", lambda q, k: 1)
    no_further(divided, run(torch.bfloat16), run(torch.float64), ["out", "d_q", "d_k", "d_v"])


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_sums_of_halves_are_float32(rows: int, heads: int) -> None:
    for B in (1, 3):
        e = torch.randn(min(rows, B), 5003, heads, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        x = torch.randn(B, 5003, heads, 40, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        found = _compress(e, x)
        truth = torch.einsum("bsgr,bsgn->bgrn", e.double().expand(B, -1, -1, -1), x.double())
        assert float(((found - truth).norm() / truth.norm()).detach()) < 1e-5
        d = torch.randn_like(found)
        for ours, true in zip(
            torch.autograd.grad(found, (e, x), d), torch.autograd.grad(truth, (e, x), d.double()), strict=True
        ):
            assert float((ours.double() - true).norm() / true.norm()) < 1e-2


def test_compiled_whole() -> None:
    mechanism = LinformerAttention(4, 32, num_kv_heads=1, rank=R, max_length=4096, share_projection=True)
    mechanism.to("cuda", torch.bfloat16)
    compiled = torch.compile(mechanism, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (2050, 3001):
        q = torch.randn(2, T, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(2, T, 1, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for out in (compiled(q, k, k), compiled(q, k, k, causal=True)):
            out.float().square().sum().backward()
        torch.testing.assert_close(compiled(q, k, k), mechanism(q, k, k), rtol=2e-2, atol=2e-2)
