"""Attention over compressed keys and values: kernels under Triton's interpreter, and the fused Linformer layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import interpreted
from torch import Tensor

from longspan import Attention, AttentionConfig, Packing
from longspan.mechanisms import linformer
from longspan.ops import compressed
from longspan.ops.common import dispatch
from longspan.ops.compressed import CompressedProblem, fused

DIM, T = 24, 17
SPEC = {"mechanism": "linformer", "rank": 40, "max_length": 19, "share_projection": True}


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[1], 1) for x in (k, v))
    return ((q.transpose(1, 2) @ k.mT * scale).softmax(-1) @ v).transpose(1, 2)


class Eager:
    """The kernels' functions in eager PyTorch."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, scale).contiguous(), q.new_zeros(1)

    @staticmethod
    def backward(
        d: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, d_q: Tensor
    ) -> Tensor:
        leaves = [x.detach().requires_grad_() for x in ((q, k) if k is v else (q, k, v))]
        with torch.enable_grad():
            made = torch.autograd.grad(attention(leaves[0], leaves[1], leaves[-1], scale), leaves, d)
        d_q.copy_(made[0])
        return torch.cat(made[1:], -1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that the kernels run, and record a 1 for each fused layer, a 2 for each fused mechanism."""
    found: list[int] = []
    real = linformer.linformer_layer
    attention = linformer.linformer_attention
    monkeypatch.setattr(linformer, "linformer_layer", lambda *given: found.append(1) or real(*given))
    monkeypatch.setattr(linformer, "linformer_attention", lambda *given: found.append(2) or attention(*given))
    monkeypatch.setattr(dispatch, "eager_untraced", lambda x: True)
    monkeypatch.setattr(compressed, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(fused, "kernels", lambda: Eager)
    monkeypatch.setattr(fused, "_float32_product", lambda a, b: a @ b)
    return found


def layer_of(**options: Any) -> Attention:
    config = {"num_heads": 4, "head_dim": 6, "num_kv_heads": 1, "mechanism": SPEC} | options
    mid_features = config.pop("mid_features", None)
    layer = Attention(DIM, AttentionConfig(**config), mid_features=mid_features).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"shared_kv": True}, {"num_kv_heads": 2, "shared_kv": True}, {"out_bias": False}, {"head_dim": 5}],
    ids=str,
)
def test_the_fused_layer(options: dict, batch: int, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(**options), torch.randn(batch, T, DIM, dtype=torch.float64, requires_grad=True)
    d, results = torch.randn(batch, T, DIM).double(), []
    for _ in range(2):
        out = layer(x)
        results.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], d)])
        monkeypatch.setattr(linformer.LinformerAttention, "attend_layer", lambda *_, **__: None)
        monkeypatch.setattr(dispatch, "eager_untraced", lambda x: False)
        monkeypatch.setattr(compressed, "why_not_triton", lambda *_: "disabled")
    assert calls == [1]
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("share_projection", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_fused_mechanism(
    batch: int,
    kv_heads: int,
    share_projection: bool,
    shared: bool,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    D, E, S = 5, 5 if shared else 7, 13
    spec = {"rank": 4, "max_length": 14, "share_projection": share_projection}
    mechanism = linformer.LinformerAttention(4, D, num_kv_heads=kv_heads, value_dim=E, **spec).double()
    shapes = [(T, 4, D), (S, kv_heads, D)] + [(S, kv_heads, E)] * (not shared)
    given = [torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    d, results = torch.randn(batch, T, 4, E).double(), []
    for _ in range(2):
        out = mechanism(given[0], given[1], given[-1])
        results.append([out, *torch.autograd.grad(out, [*given, *mechanism.parameters()], d)])
        monkeypatch.setattr(dispatch, "eager_untraced", lambda x: False)
        monkeypatch.setattr(compressed, "why_not_triton", lambda *_: "disabled")
    assert calls == [2]
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"projection": "convolution"}, {"periodic": True}, {"per_head": True}, {"bias": True}, {"dropout": 0.5}]
)
def test_options_that_are_not_fused(options: dict, calls: list[int]) -> None:
    mechanism = linformer.LinformerAttention(2, 5, rank=4, max_length=14, **options).double()
    q = torch.randn(1, 13, 2, 5).double()
    mechanism(q, q, q)
    assert calls == []
    linformer.LinformerAttention(2, 5, rank=4, max_length=14).double()(q, q, q, key_mask=torch.arange(13)[None] < 9)
    assert calls == []


def test_unneeded_gradients_are_not_computed(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(), torch.randn(1, T, DIM).double()
    products: list[tuple[int, ...]] = []
    real = fused._product
    monkeypatch.setattr(fused, "_product", lambda *given: products.append(given[0].shape) or real(*given))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer.to_out.weight.requires_grad_()
    layer(x).sum().backward()
    assert calls == [1]
    assert len(products) == 1


def test_double_backward_raises(calls: list[int]) -> None:
    layer, x = layer_of(), torch.randn(1, T, DIM, dtype=torch.float64, requires_grad=True)
    (d_x,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        d_x.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True},
        {"qk_norm": True},
        {"rotary": "halves"},
        {"value_gates": True},
        {"mid_features": 5},
        {"dropout": 0.5},
        {"num_kv_heads": 4, "head_dim": 24},  # wide keys, whose input is compressed
        {"mechanism": SPEC | {"share_projection": False}},
        {"mechanism": SPEC | {"projection": "convolution"}},
        {"mechanism": SPEC | {"periodic": True}},
        {"mechanism": SPEC | {"per_head": True}},
        {"mechanism": SPEC | {"bias": True}},
        {"mechanism": SPEC | {"dropout": 0.5}},
        {"mechanism": "softmax"},
    ],
    ids=str,
)
def test_layers_that_are_not_fused(options: dict, calls: list[int]) -> None:
    layer_of(**options)(torch.randn(1, T, DIM).double())
    assert 1 not in calls


def test_hooks_are_called(calls: list[int]) -> None:
    layer, x = layer_of(), torch.randn(1, T, DIM).double()
    seen = []
    handle = layer.to_kv.register_forward_hook(lambda *_: seen.append(1))
    layer(x)
    assert (seen, calls) == ([1], [2])
    handle.remove()
    layer(x, key_mask=torch.arange(T)[None] < 11)
    layer(x, packing=Packing.from_lengths([5, 12]))
    assert calls == [2]
    layer(x)
    assert calls == [2, 1]
    with pytest.raises(ValueError, match="max_length of 19"):
        layer(torch.randn(1, 20, DIM).double())


def test_the_kernels_need_cuda() -> None:
    problem = CompressedProblem(8, 1, 64, 64, 256)
    assert "CUDA" in str(compressed.why_not_triton(torch.empty(1, 200, 8), torch.bfloat16, problem))


@pytest.mark.parametrize(
    ("dtype", "heads", "tokens", "rank", "dims", "why"),
    [
        (torch.float32, 8, 200, 256, (64, 64), "float32"),
        (torch.bfloat16, 8, 200, 257, (64, 64), "rank 257"),
        (torch.bfloat16, 8, 200, 256, (64, 65), "dimension 65"),
        (torch.bfloat16, 65, 200, 256, (64, 64), "65 query heads"),
        (torch.bfloat16, 8, 127, 256, (64, 64), "127 tokens"),
        (torch.bfloat16, 8, 128, 256, (64, 64), "None"),
    ],
)
def test_what_the_kernels_support(
    dtype: torch.dtype,
    heads: int,
    tokens: int,
    rank: int,
    dims: tuple[int, int],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: 227)
    problem = CompressedProblem(heads, 1, *dims, rank)
    assert why in str(compressed.why_not_triton(torch.empty(1, tokens, 8), dtype, problem))


@interpreted
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rank", "head_dim", "value_dim"),
    [(1, 4, 1, 70, 64, 64), (2, 3, 3, 200, 40, 24), (1, 6, 2, 256, 64, 64), (2, 3, 1, 5, 8, 7)],
)
@pytest.mark.parametrize("shared", [False, True])
def test_kernels(batch: int, heads: int, kv_heads: int, rank: int, head_dim: int, value_dim: int, shared: bool) -> None:
    T, value_dim, scale = 53, head_dim if shared else value_dim, head_dim**-0.5
    joint = torch.randn(batch, T, heads * head_dim + 9).half()
    q = joint[..., : heads * head_dim].unflatten(2, (heads, -1))
    k, d = torch.randn(batch, kv_heads, rank, head_dim), torch.randn(batch, T, heads, value_dim).half()
    v = k if shared else torch.randn(batch, rank, kv_heads, value_dim).transpose(1, 2)
    d_q = torch.empty_like(joint)[..., : heads * head_dim].unflatten(2, (heads, -1))
    out, lse = fused.kernels().forward(q, k, v, scale)
    d_kv = fused.kernels().backward(d, out, lse, q, k, v, scale, d_q)
    exact = [x.half().double() for x in (q, k, v)]
    true, _ = Eager.forward(*exact, scale)
    true_d_q = torch.empty_like(exact[0])
    true_d_kv = Eager.backward(d.double(), true, lse, exact[0], exact[1], exact[1 if shared else 2], scale, true_d_q)
    for found, wanted in ((out, true), (d_q, true_d_q), (d_kv, true_d_kv)):
        assert found.shape == wanted.shape
        assert float((found.double() - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())
