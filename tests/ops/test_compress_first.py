"""Linformer's input compressed before it is projected, and dropout recomputed in the backward pass."""

import pytest
import torch
import torch.nn.functional as F

from longspan import Attention, AttentionConfig
from longspan.layout import TokenLayout
from longspan.mechanisms.linformer import LinformerAttention
from longspan.ops import softmax as sdpa

B, T, S, DIM = 2, 17, 13, 10
LINFORMER = {"mechanism": "linformer", "rank": 4, "max_length": 19}
USED = [
    {},
    {"shared_kv": True},
    {"num_kv_heads": 3},
    {"mechanism": LINFORMER | {"share_projection": True}, "shared_kv": True},
    {"mechanism": LINFORMER | {"bias": True, "periodic": True, "max_length": 7}},
    {"mechanism": LINFORMER | {"projection": "random"}, "mid_features": 3},
]
NOT_USED = [
    {"mechanism": LINFORMER | {"per_head": True}},
    {"mechanism": LINFORMER | {"projection": "convolution"}},
    {"qkv_bias": True},
    {"qk_norm": True},
    {"rotary": "halves", "head_dim": 4},
    {"num_kv_heads": 1, "head_dim": 2},  # narrow keys, which cost less to compress than their input
]


def layer_of(options: dict, **how) -> Attention:
    config = {"num_heads": 6, "head_dim": 5, "mechanism": LINFORMER} | options
    mid_features = config.pop("mid_features", None)
    layer = Attention(DIM, AttentionConfig(**config), mid_features=mid_features, **how)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.double()


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    found: list[int] = []
    real = LinformerAttention.attend_source

    def counted(self, *args, **how):
        found.append(1)
        return real(self, *args, **how)

    monkeypatch.setattr(LinformerAttention, "attend_source", counted)
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("options", USED, ids=str)
def test_outputs_and_gradients_agree(options: dict, cross: bool, masked: bool, calls: list[int]) -> None:
    layer = layer_of(options, cross=cross)
    x, context = torch.randn(B, T, DIM).double(), torch.randn(B, S, DIM).double()
    source = context if cross else x
    mask = torch.arange(source.shape[1]).expand(B, -1) < torch.tensor([[9], [0]]) if masked else None
    if mask is not None:
        source[~mask] = float("nan")
    layout = TokenLayout.of(source, causal=False, key_mask=mask)
    results = []
    for manual in (False, True):
        layer.zero_grad()
        if manual:
            hidden = x if cross else layout.zero_fill(x)
            k, v, _ = layer._project_keys(layout.zero_fill(source), layout)
            mixed = layer.mechanism(layer.project_queries(hidden), k, v, key_mask=mask)
            out = layer.project_output(hidden, mixed)
        elif cross:
            out = layer(x, context=context, context_mask=mask)
        else:
            out = layer(x, key_mask=mask)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in layer.parameters())])
    assert calls == [1]
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
        assert ours.isfinite().all()


@pytest.mark.parametrize("options", NOT_USED, ids=str)
def test_where_keys_are_not_a_linear_map_of_the_input(options: dict, calls: list[int]) -> None:
    layer_of(options)(torch.randn(B, T, DIM).double())
    assert calls == []


def test_a_replaced_to_kv_is_called(calls: list[int]) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    layer, x = layer_of({}), torch.randn(B, T, DIM).double()
    plain = layer(x)
    layer.to_kv.__class__ = Scaled
    assert not torch.allclose(layer(x), plain)
    assert calls == [1]


def test_half_precision_sums_in_float32() -> None:
    layer = layer_of({})
    x = torch.randn(B, T, DIM).double()
    truth = layer(x)
    half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), truth, rtol=0.1, atol=0.05 * float(truth.detach().abs().max()))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x.float()).isfinite().all()


@pytest.mark.parametrize("kind", ["full", "masked", "rows", "bias"])
def test_dropout_is_recomputed(kind: str, monkeypatch) -> None:
    H, D = 2, 5
    q, k, v = (torch.randn(B, H, n, D, dtype=torch.float64, requires_grad=True) for n in (T, S, S))
    mask = {"masked": torch.rand(B, 1, 1, S) > 0.3, "rows": torch.rand(B, 1, T, S) > 0.3}.get(kind)
    bias = torch.randn(H, T, S).double() if kind == "bias" else None
    size = 4
    monkeypatch.setattr(sdpa, "MAX_WEIGHTS", size * B * H * S)

    def saves_weights(call) -> bool:
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            call()
        return any(x.shape[-1] == S and x.numel() in (B * H * T * S, B * H * size * S) for x in found)

    assert saves_weights(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)), "PyTorch no longer saves them"
    assert not saves_weights(lambda: sdpa.attend(q, k, v, mask, bias=bias, dropout=0.4))
    torch.manual_seed(3)
    out = sdpa.attend(q, k, v, mask, bias=bias, dropout=0.4)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.manual_seed(3)
    pieces = []
    for i in range(0, T, size):
        part = None
        if bias is not None:
            part = bias[:, i : i + size]
        elif mask is not None:
            part = mask if mask.shape[2] == 1 else mask[:, :, i : i + size]
        pieces.append(F.scaled_dot_product_attention(q[:, :, i : i + size], k, v, attn_mask=part, dropout_p=0.4))
    wanted = torch.cat(pieces, 2)
    torch.testing.assert_close(out, wanted)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(mine, theirs)
