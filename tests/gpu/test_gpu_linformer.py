"""Linformer on a GPU: compression in float32, the attention kernels, the fused layer, and the causal form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Attention, AttentionConfig
from longspan.mechanisms import linformer
from longspan.mechanisms.linformer import LinformerAttention
from longspan.ops import compressed
from longspan.ops import softmax as sdpa
from longspan.ops.compressed import CompressedProblem
from longspan.ops.compressed.torch import _compress

# The first backward pass of a process that begins with a matrix product.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
R = 64


def by_products(mechanism: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute the equations in the dtype of the inputs, by matrix products."""
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


@pytest.mark.parametrize(("causal", "rank"), [(False, R), (True, R), (True, 300)])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_that_of_eager_pytorch(
    dtype: torch.dtype, kv_heads: int, causal: bool, rank: int
) -> None:
    B, T, H, D = 2, 1031, 2, 64
    torch.manual_seed(0)
    built = LinformerAttention(H, D, num_kv_heads=kv_heads, rank=rank, max_length=T).to("cuda", dtype)
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
        return by_products(m, *qkv, causal)

    names = ["out", "d_q", "d_k", "d_v", "d_e", "d_f"]
    no_further(run(ours, dtype), run(equations, dtype), run(equations, torch.float64), names)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rank", "dims"), [(8, 8, 256, (64, 64)), (6, 2, 200, (40, 24)), (3, 3, 5, (8, 7))]
)
def test_compressed_attention(heads: int, kv_heads: int, rank: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    B, T, (D, E) = 2, 4099, dims
    q = torch.randn(B, T, heads, D, device="cuda", dtype=dtype)
    k, v = (torch.randn(B, rank, kv_heads, n, device="cuda", dtype=dtype).transpose(1, 2) for n in dims)
    d = torch.randn(B, T, heads, E, device="cuda", dtype=dtype)
    assert compressed.why_not_triton(q, dtype, CompressedProblem(heads, kv_heads, *dims, rank)) is None

    def run(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        wide = [t.repeat_interleave(heads // kv_heads, 1) for t in x[1:]]
        if ours:
            out = compressed.compressed_attention(*x)
        else:
            out = ((x[0].transpose(1, 2) @ wide[0].mT * D**-0.5).softmax(-1) @ wide[1]).transpose(1, 2)
        return [out, *torch.autograd.grad(out, x, d.to(dtype))]

    found = run(dtype, True)
    no_further(found, run(dtype, False), run(torch.float64, False), ["out", "d_q", "d_k", "d_v"])
    assert all(torch.equal(x, y) for x, y in zip(found, run(dtype, True), strict=True))


@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("options", [{"shared_kv": True}, {}, {"num_kv_heads": 2, "shared_kv": True}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_fused_layer(batch: int, options: dict, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    T, dim, dtype = 1031, 227, torch.float32 if how == "autocast" else getattr(torch, how)
    spec = {"mechanism": "linformer", "rank": 2 * R, "max_length": 1100, "share_projection": True}
    config = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 40, "mechanism": spec} | options
    layer = Attention(dim, AttentionConfig(**config)).to("cuda", dtype)
    assert not layer.mechanism.compresses_first(dim, layer.to_kv.out_features)
    x, d = (torch.randn(batch, T, dim, device="cuda", dtype=dtype) for _ in range(2))
    calls: list[int] = []
    real = linformer.linformer_layer
    monkeypatch.setattr(linformer, "linformer_layer", lambda *given: calls.append(1) or real(*given))

    def run(dtype: torch.dtype) -> list[Tensor]:
        given, module = x.to(dtype).requires_grad_(), layer.to(dtype)
        with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast" and dtype == torch.float32):
            out = module(given)
        wanted = [given, *(p for p in module.parameters())]
        found = torch.autograd.grad(out, wanted, d.to(out.dtype))
        assert all(g.dtype == p.dtype for g, p in zip(found, wanted, strict=True))
        return [out, *found]

    ours = run(dtype)
    assert calls == [1]
    monkeypatch.setattr(LinformerAttention, "attend_layer", lambda *_, **__: None)
    monkeypatch.setattr(compressed, "why_not_triton", lambda *_: "disabled")
    names = ["out", "d_x", *(name for name, _ in layer.named_parameters())]
    eager, truth = run(dtype), run(torch.float64)
    assert calls == [1]
    # Under autocast, results of half-precision products are returned as float32.
    eps = torch.finfo(torch.bfloat16 if how == "autocast" else dtype).eps
    for name, found, other, true in zip(names, ours, eager, truth, strict=True):
        error, allowed = (float((y.double() - true).detach().abs().max()) for y in (found, other))
        assert error <= 2 * allowed + eps * float(true.detach().abs().max()), (name, error, allowed)


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
def test_compression_sums_in_float32(rows: int, heads: int) -> None:
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


def test_compiles() -> None:
    mechanism = LinformerAttention(4, 32, num_kv_heads=1, rank=R, max_length=4096, share_projection=True)
    mechanism.to("cuda", torch.bfloat16)
    compiled = torch.compile(mechanism, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (2050, 3001):
        q = torch.randn(2, T, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(2, T, 1, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for out in (compiled(q, k, k), compiled(q, k, k, causal=True)):
            out.float().square().sum().backward()
        torch.testing.assert_close(compiled(q, k, k), mechanism(q, k, k), rtol=2e-2, atol=2e-2)
