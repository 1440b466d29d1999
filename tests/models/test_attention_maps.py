"""Looking at attention: rows of the implicit matrix, times the values, are the forward pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import B, Case, D, T, all_cases, assert_same, each_case, lengths_to_mask, refused
from torch import Tensor

from longspan import Mechanism
from longspan.layout import TokenLayout
from longspan.mechanisms.gated import GatedMechanism
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.mechanisms.split import SplitAttention
from longspan.models.attention_maps import attention_map, compressed_map, plot_attention
from longspan.models.config import AttentionConfig
from longspan.models.layers import Attention

DIM = 11
QUERIES = [0, 3, 8, 11, -1]
KINDS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])


def mixes_features(m: Mechanism) -> bool:
    if isinstance(m, MixtureAttention):
        return isinstance(m.memory, GatedMechanism)  # what such a memory returns is normalized
    parts = m.parts if isinstance(m, SplitAttention) else [m]
    return any(isinstance(part, LinformerAttention) and part.values.kind == "convolution" for part in parts)


def build(mechanism: Mechanism, causal: bool, **options) -> Attention:
    config = AttentionConfig(head_dim=mechanism.head_dim, **options)
    return Attention(DIM, config, mechanism=mechanism, causal=causal).double().eval()


def make_mask(causal: bool, masked: bool) -> Tensor | None:
    """One run a row if causal, left-padded in the first; otherwise with holes."""
    if not masked:
        return None
    if causal:
        return torch.cat([lengths_to_mask([9], T, "left"), lengths_to_mask([12], T, "right")])
    mask = torch.rand(B, T) < 0.6
    mask[:, 4] = True
    return mask


def qkv(layer: Attention, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    layout = TokenLayout.of(x, causal=layer.causal, key_mask=key_mask)
    x = layout.zero_fill(x)
    return layer.project_queries(x, layout), *layer._project_keys(x, layout)[:2]


def times(maps: Tensor, v: Tensor) -> Tensor:
    """maps (B, H, L, S), v (B, S, Hkv, E) -> (B, L, H, E)."""
    return torch.einsum("bhls,bshe->blhe", maps, v.repeat_interleave(maps.shape[1] // v.shape[2], 2))


@MASKED
@KINDS
@each_case()
@torch.no_grad()
def test_rows_times_values_are_the_forward_pass(case: Case, causal: bool, masked: bool) -> None:
    m = case.build()
    layer, x, key_mask = build(m, causal), torch.randn(B, T, DIM, dtype=torch.float64), make_mask(causal, masked)
    if mixes_features(m):
        with refused("mixes the features of values", "compressed_map"):
            attention_map(layer, x, QUERIES, key_mask=key_mask)
        return
    maps = attention_map(layer, x, QUERIES, key_mask=key_mask)
    assert maps.shape == (B, m.num_heads, len(QUERIES), T)
    if causal:
        for row, i in enumerate(QUERIES[:-1]):
            assert not maps[:, :, row, i + 1 :].any(), "weight on the future"
    if key_mask is not None:
        assert not maps.masked_select(~key_mask[:, None, None]).any(), "weight on a hidden key"
    q, k, v = qkv(layer, x, key_mask)
    filled = x if key_mask is None else x.masked_fill(~key_mask[..., None], 0)
    given = {"gates": layer._project_gates(filled), "causal": causal, "key_mask": key_mask}
    for _ in range(3):  # Together more equations than a row has weights.
        constant = m(q, k, torch.zeros_like(v), **given)[:, QUERIES]
        expected = m(q, k, v, **given)[:, QUERIES]
        assert_same(times(maps, v) + constant, expected)
        v = torch.randn_like(v)


@KINDS
def test_definitions(causal: bool) -> None:
    """Softmax weights, φ(q)·φ(k)ᵀ / z and softmax(q K̃ᵀ) Fᵀ, written out."""
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    seen = torch.ones(T, T, dtype=torch.bool).tril() if causal else torch.ones(T, T, dtype=torch.bool)
    for name, options in (("softmax", {}), ("linear", {}), ("linformer", {"rank": 4, "max_length": 31})):
        layer = build(Case(name, options).build(), causal)
        q, k, _ = qkv(layer, x, None)
        if name == "softmax":
            scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
            expected = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        elif name == "linear":
            phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
            scores = torch.einsum("bthd,bshd->bhts", phi_q, phi_k) * seen
            expected = scores / scores.sum(-1, keepdim=True)
        else:
            e, f = (p.table[0, :T] for p in (layer.mechanism.keys, layer.mechanism.values))
            rows = torch.einsum("ts,sr,bshd->bthrd", seen.double(), e, k)
            weights = (torch.einsum("bthd,bthrd->bhtr", q, rows) * D**-0.5).softmax(-1)
            assert_same(compressed_map(layer, x), weights)
            expected = torch.einsum("bhtr,sr->bhts", weights, f) * seen
        assert_same(attention_map(layer, x, range(T)), expected)


@KINDS
def test_options_of_the_layer(causal: bool) -> None:
    options = {"rotary": "halves", "qk_norm": True, "shared_kv": True, "qkv_bias": True, "value_gates": True}
    m = SoftmaxAttention(6, 4, num_kv_heads=2)
    layer = build(m, causal, **options)
    x, key_mask = torch.randn(B, T, DIM, dtype=torch.float64), make_mask(causal, True)
    layout = TokenLayout.of(x, causal=causal, key_mask=key_mask)
    _, _, v = qkv(layer, x, key_mask)
    out = times(attention_map(layer, x, range(T), key_mask=key_mask), v)
    assert_same(layer.project_output(layout.zero_fill(x), out), layer(x, key_mask=key_mask))


@MASKED
@each_case([case for case in all_cases() if case.build().supports_cross and not mixes_features(case.build())])
def test_cross_attention(case: Case, masked: bool) -> None:
    S = 19
    layer = Attention(DIM, AttentionConfig(head_dim=D), mechanism=case.build(), cross=True).double().eval()
    x, context = torch.randn(B, T, DIM, dtype=torch.float64), torch.randn(B, S, DIM, dtype=torch.float64)
    key_mask = torch.rand(B, S) < 0.6 if masked else None
    maps = attention_map(layer, x, QUERIES, key_mask=key_mask, context=context)
    layout = TokenLayout.of(context, causal=False, key_mask=key_mask)
    k, v, _ = layer._project_keys(layout.zero_fill(context), None)
    q = layer.project_queries(x)[:, QUERIES]
    constant = layer.mechanism(q, k, torch.zeros_like(v), key_mask=key_mask)
    assert_same(times(maps, v) + constant, layer.mechanism(q, k, v, key_mask=key_mask))


@MASKED
@KINDS
@each_case([case for case in all_cases() if case.name == "linformer"])
@torch.no_grad()
def test_compressed_rows(case: Case, causal: bool, masked: bool) -> None:
    m = case.build()
    assert isinstance(m, LinformerAttention)
    layer, x, key_mask = build(m, causal), torch.randn(B, T, DIM, dtype=torch.float64), make_mask(causal, masked)
    own_values = m.values
    weights = compressed_map(layer, x, key_mask=key_mask)
    assert m.values is own_values, "looking changed the layer"
    assert weights.shape == (B, m.num_heads, T, m.rank)
    q, k, v = qkv(layer, x, key_mask)
    expected = m(q, k, v, causal=causal, key_mask=key_mask)
    bias = 0 if m.values.bias is None else m.values.bias
    mask = torch.ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    for t in range(T):
        seen = slice(0, t + 1 if causal else T)
        state = m.write(m.new_state(B, dtype=x.dtype), k[:, seen], v[:, seen], key_mask=mask[:, seen])
        rows, length = state.v, state.length
        periods = (-(-length // m.values.max_length)).clamp(min=1) if m.values.periodic else torch.ones_like(length)
        rows = rows / periods[:, None, None, None] + bias
        out = torch.einsum("bhr,bhre->bhe", weights[:, :, t], rows.repeat_interleave(m.num_heads // rows.shape[1], 1))
        assert_same(out, expected[:, t])


@KINDS
@pytest.mark.parametrize("name", ["softmax", "local", "linear", "performer", "linformer"])
def test_a_row_costs_what_one_query_costs(name: str, causal: bool) -> None:
    """What is kept for a row's backward pass grows with n, not with n²."""
    options = {"local": {"window": 4}, "linformer": {"rank": 4, "max_length": 2048}}.get(name, {})
    layer = build(Case(name, options).build(), causal)

    def kept(length: int) -> int:
        sizes: list[int] = []

        def pack(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attention_map(layer, torch.randn(1, length, DIM, dtype=torch.float64), [length // 2])
        return sum(sizes)

    assert 0 < kept(2048) < 6 * kept(512)


def test_low_precision_and_modes() -> None:
    layer = build(Case("linear", {"feature_map": "softmax"}).build(), True).bfloat16()
    x, mask = torch.randn(B, T, DIM, dtype=torch.bfloat16), make_mask(True, True)
    expected = attention_map(layer, x, QUERIES, key_mask=mask)
    assert expected.dtype == torch.float32
    assert not expected.requires_grad
    with torch.inference_mode():
        assert torch.equal(attention_map(layer, x.clone(), QUERIES, key_mask=mask.clone()), expected)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_nothing() -> None:
    layer = build(LocalAttention(3, D, window=4), True)
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    assert attention_map(layer, x, []).shape == (B, 3, 0, T)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    assert not attention_map(layer, x, QUERIES, key_mask=hidden).any()


def test_refusals() -> None:
    layer, x = build(SoftmaxAttention(3, D), True), torch.randn(B, T, DIM, dtype=torch.float64)
    with refused("queries must be positions in x, -17 to 16, got 17"):
        attention_map(layer, x, [0, 17])
    with refused("this layer takes no context"):
        attention_map(layer, x, [0], context=x)
    with refused("only linformer's self-attention has compressed keys, got SoftmaxAttention"):
        compressed_map(layer, x)
    cross = Attention(DIM, AttentionConfig(head_dim=D), mechanism=SoftmaxAttention(3, D), cross=True)
    with refused("this layer needs context=, of shape (B, S, dim)"):
        attention_map(cross, x, [0])
    short = build(LinformerAttention(3, D, rank=4, max_length=5), False)
    with refused("17 tokens are more than", "max_length of 5"):
        compressed_map(short, x)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed ([train])")
    parts = [{"mechanism": "local", "num_heads": 2, "window": 6}, {"mechanism": "linear", "num_heads": 3}]
    layer = build(SplitAttention(5, D, parts=parts), True)
    queries = range(0, 40, 3)
    maps = attention_map(layer, 4 * torch.randn(B, 40, DIM, dtype=torch.float64), queries)
    plot_attention(maps[0], tmp_path / "positive.png", queries=queries)
    plot_attention(maps[0, :1, :1] - 0.2, str(tmp_path / "signed.png"))
    for name in ("positive", "signed"):
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5000


def test_what_cannot_be_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "map.png"
    with refused("one sequence of a batch, got (2, 3, 5, 7); plot maps[b]"):
        plot_attention(torch.rand(2, 3, 5, 7), path)
    with refused("nothing to plot in maps of shape (3, 0, 7)"):
        plot_attention(torch.rand(3, 0, 7), path)
    with refused("queries must label 5 rows, got 2"):
        plot_attention(torch.rand(3, 5, 7), path, queries=[1, 2])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'longspan\[train\]'"):
        plot_attention(torch.rand(3, 5, 7), path)
