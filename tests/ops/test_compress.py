"""Few keys for many queries: compression of a sequence, and queries divided among batch rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspan import Attention, AttentionConfig
from longspan.mechanisms import linformer
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.ops import softmax as sdpa
from longspan.ops.compressed import compress
from longspan.ops.compressed import torch as compress_op
from longspan.ops.compressed.torch import _Compress, _compress, _product_in_parts

B, S, HKV, R, N = 2, 19, 3, 5, 7
SHAPES = [(rows, heads) for rows in (1, B) for heads in (1, HKV)]


def sums(e: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bshr,bshn->bhrn", e.expand(B, -1, HKV, -1), x)


@pytest.mark.parametrize(("rows", "heads"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32(rows: int, heads: int, dtype: torch.dtype) -> None:
    e, x = torch.randn(rows, S, heads, R).to(dtype), torch.randn(B, S, HKV, N).to(dtype)
    found = compress(e, x)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tight = 1e-12 if dtype == torch.float64 else 1e-6  # as exact as float32, whatever the inputs
    torch.testing.assert_close(found.double(), sums(e.double(), x.double()), rtol=tight, atol=10 * tight)


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("heads", [1, HKV])
def test_the_op_in_half_precision(rows: int, heads: int) -> None:
    e = torch.randn(rows, S, heads, R).half().requires_grad_()
    x = torch.randn(B, S, heads, N).half().requires_grad_()
    d = torch.randn(B, heads, R, N)
    found = torch.autograd.grad(_compress(e, x), (e, x), d)
    double = [t.detach().double().requires_grad_() for t in (e, x)]
    product = torch.einsum("bshr,bshn->bhrn", double[0].expand(B, -1, -1, -1), double[1])
    wanted = torch.autograd.grad(product, double, d.half().double())
    for ours, truth in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours.double(), truth, rtol=2e-3, atol=5e-3)
    torch.library.opcheck(
        _compress, (e, x), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("heads", [1, HKV])
def test_double_backward(rows: int, heads: int) -> None:
    e = torch.randn(rows, S, heads, R, dtype=torch.float64, requires_grad=True)
    x = torch.randn(B, S, heads, N, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(_Compress.apply, (e, x))


@pytest.mark.parametrize(("rows", "heads"), SHAPES)
@pytest.mark.parametrize(("length", "most"), [(4, 32), (4, 3), (19, 32)])
def test_partial_products(rows: int, heads: int, length: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress_op, "PART_LENGTH", length)
    monkeypatch.setattr(compress_op, "MAX_PARTS", most)
    left = torch.randn(rows, heads, R, S, dtype=torch.float64, requires_grad=True)
    right = torch.randn(B, HKV, S, N, dtype=torch.float64, requires_grad=True)
    results = []
    for out in (_product_in_parts(left, right), left @ right):
        results.append([out, *torch.autograd.grad(out.square().sum(), (left, right))])
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_partial_products_are_more_exact_than_one_sum() -> None:
    left, right = torch.randn(1, 1, R, 4099), torch.randn(1, 1, 4099, N)
    truth = left.double() @ right.double()

    def chain(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for i in range(a.shape[-1]):
            total = torch.addcmul(total, a[..., i : i + 1], b[..., i : i + 1, :])
        return total

    class Chained(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.__matmul__, Tensor.matmul):
                return chain(*(x.as_subclass(Tensor) for x in args)).as_subclass(cls)
            return super().__torch_function__(func, types, args, kwargs or {})

    a, b = (x.as_subclass(Chained) for x in (left, right))
    errors = [float((x.as_subclass(Tensor).double() - truth).abs().max()) for x in (_product_in_parts(a, b), a @ b)]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 3), (5, 1)])
@pytest.mark.parametrize("folds", [1, 2, 4])
def test_divided_queries_see_the_same_keys(heads: int, kv_heads: int, folds: int, monkeypatch: Any) -> None:
    T, D, E = 17, 5, 7
    q = torch.randn(B, T, heads, D, dtype=torch.float64, requires_grad=True)
    k = torch.randn(B, kv_heads, R, D, dtype=torch.float64, requires_grad=True)
    v = torch.randn(B, kv_heads, R, E, dtype=torch.float64, requires_grad=True)
    shapes: list[tuple[int, ...]] = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "_folds", lambda q, k: folds)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **b: shapes.append(q.shape) or real(q, *a, **b)
    )
    out = sdpa.attend(q.transpose(1, 2), k, v, None, grouped=heads > kv_heads, scale=0.3)
    many, one = (T * heads, 1) if kv_heads == 1 else (T, heads)
    assert shapes == [(B * folds, one, -(-many // folds), D)]
    wide = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
    wanted = ((q.transpose(1, 2) @ wide[0].mT * 0.3).softmax(-1)) @ wide[1]
    torch.testing.assert_close(out, wanted)
    d = torch.randn_like(wanted)
    grads = torch.autograd.grad(out, (q, k, v), d), torch.autograd.grad(wanted, (q, k, v), d)
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth)


def test_when_queries_are_divided(monkeypatch: Any) -> None:
    class Fake:
        is_cuda = True

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    assert sdpa._folds(Fake(1, 8, 65536, 64), Fake(1, 8, 256, 64)) == 8
    assert sdpa._folds(Fake(1, 1, 8 * 65536, 64), Fake(1, 1, 256, 64)) == 64
    assert sdpa._folds(Fake(4, 16, 65536, 64), Fake(4, 16, 256, 64)) == 1  # enough programs
    assert sdpa._folds(Fake(1, 1, 600, 64), Fake(1, 1, 256, 64)) == 1  # too few queries
    assert sdpa._folds(Fake(1, 8, 65536, 64), Fake(1, 8, 65536, 64)) == 1
    with torch.no_grad():
        assert sdpa._folds(Fake(1, 8, 65536, 64), Fake(1, 8, 256, 64)) == 1
    assert sdpa._folds(torch.empty(1, 8, 8192, 4), torch.empty(1, 8, 256, 4)) == 1  # on the CPU


def test_a_table_needs_no_mask(monkeypatch: Any) -> None:
    masks = []
    real = linformer.attend
    monkeypatch.setattr(
        linformer, "attend", lambda q, k, v, mask, **how: masks.append(mask) or real(q, k, v, mask, **how)
    )
    q, k, v = (torch.randn(B, S, HKV, N) for _ in range(3))
    key_mask = torch.arange(S) < torch.tensor([[11], [0]])
    for kind, has_mask in (("learned", False), ("convolution", True)):
        mechanism = LinformerAttention(HKV, N, rank=R, max_length=S, projection=kind, bias=True)
        torch.nn.init.normal_(mechanism.values.bias)
        out = mechanism(q, k, v, key_mask=key_mask)
        assert (masks.pop() is not None) == has_mask
        assert out[0].abs().min() > 0
        assert not out[1].any()


@pytest.mark.parametrize(("shared", "times"), [(True, 1), (False, 2)])
def test_keys_that_are_values_are_compressed_once(shared: bool, times: int, monkeypatch: Any) -> None:
    calls = []
    real = Projection.compress
    monkeypatch.setattr(Projection, "compress", lambda self, *given: calls.append(1) or real(self, *given))
    spec = {"mechanism": "linformer", "rank": R, "max_length": S, "share_projection": shared}
    layer = Attention(12, AttentionConfig(num_heads=4, num_kv_heads=1, shared_kv=True, mechanism=spec))
    layer(torch.randn(B, S, 12))
    assert len(calls) == times


@pytest.mark.parametrize("batch", [1, B])
def test_the_direct_call_agrees_with_the_op(batch: int) -> None:
    e, x = torch.randn(1, S, 1, R).bfloat16().requires_grad_(), torch.randn(batch, S, 1, N).bfloat16().requires_grad_()
    d = torch.randn(batch, 1, R, N)
    for ours, op in zip(
        *(torch.autograd.grad(run(e, x), (e, x), d) for run in (_Compress.apply, _compress)), strict=True
    ):
        assert torch.equal(ours, op)
    assert torch.equal(_Compress.apply(e, x), _compress(e, x))
