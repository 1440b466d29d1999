"""Gates: raw numbers beside q, k and v, checked and zero-filled by the protocol, projected by the layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import assert_same, lengths_to_mask
from torch import Tensor

from longspan import (
    Attention,
    AttentionConfig,
    LanguageModel,
    Mechanism,
    ModelConfig,
    Packing,
    build_mechanism,
    register_mechanism,
)
from longspan.mechanisms import _REGISTRY
from longspan.models.attention_maps import attention_map
from longspan.models.vision import ImageAttention
from longspan.testing import check_mechanism
from longspan.testing.compare import draw_inputs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "plugin" / "src"))
from longspan_retention import GatedRetention, Retention

B, T, H, D, E = 2, 13, 4, 6, 3
F64 = torch.float64


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(_REGISTRY)
    register_mechanism("gated", GatedRetention)
    register_mechanism("retention", Retention)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


def recurrent(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None, *, causal: bool) -> Tensor:
    """The definition, one token at a time; bidirectional weights decay with the product of the α in between."""
    group, Hkv = q.shape[2] // k.shape[2], k.shape[2]
    if gates is None:
        alpha = (1 - torch.exp2(-5.0 - torch.arange(Hkv, dtype=F64))).expand(k.shape[:3])
    else:
        alpha = gates[..., 0].sigmoid() ** (1 / 16)
    outs = []
    for t in range(q.shape[1]):
        total = 0
        for s in range(t + 1 if causal else k.shape[1]):
            low, high = min(s, t), max(s, t)
            decay = alpha[:, low + 1 : high + 1].prod(1)  # (B, Hkv)
            weight = (q[:, t].unflatten(1, (Hkv, group)) * k[:, s][:, :, None]).sum(-1) * decay[:, :, None]
            total = total + weight[..., None] * v[:, s][:, :, None] / q.shape[3] ** 0.5
        outs.append(total.flatten(1, 2))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("cls", [Retention, GatedRetention])
def test_the_example_obeys_the_laws_and_its_definition(cls: type[Mechanism]) -> None:
    check_mechanism(cls, reference=recurrent)


def test_wrong_gates_are_refused() -> None:
    gated, linear = build_mechanism("gated", H, D), build_mechanism("linear", H, D)
    x = draw_inputs(gated, B, T)
    missing = {name: y for name, y in x.items() if name != "gates"}
    with pytest.raises(
        ValueError, match=r"GatedRetention needs gates of shape \(B, S, Hkv, G\) = \(2, 13, 4, 1\).*use"
    ):
        gated(**missing)
    with pytest.raises(ValueError, match=r"LinearAttention takes no gates \(its num_gates is 0\), got a Tensor: leave"):
        linear(**x)
    with pytest.raises(ValueError, match=r"gates must be floating point .* = \(2, 13, 4, 1\), got \(2, 13, 4, 2\)"):
        gated(**missing, gates=torch.zeros(B, T, H, 2, dtype=F64))
    with pytest.raises(ValueError, match=r"gates must be floating point .*torch.int64"):
        gated(**missing, gates=torch.zeros(B, T, H, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one dtype, got gates of torch.float32 beside torch.float64"):
        gated(**missing, gates=torch.zeros(B, T, H, 1))
    with pytest.raises(ValueError, match="one device, got gates on meta"):
        gated(**missing, gates=torch.zeros(B, T, H, 1, dtype=F64, device="meta"))
    state = gated.new_state(B, dtype=F64)
    for call in (lambda **y: gated.extend(state, **y), lambda q, **y: gated.write(state, **y)):
        with pytest.raises(ValueError, match="needs gates"):
            call(**missing)
    with pytest.raises(ValueError, match="needs gates"):
        gated.step(state, **{name: y[:, :1] for name, y in missing.items()})
    with pytest.raises(ValueError, match="no projection for the gates of GatedRetention"):
        ImageAttention(4, gated)


def split_of(num_kv_heads: int) -> Mechanism:
    parts = [
        {"mechanism": "gated", "num_heads": 2},
        {"mechanism": "linear", "num_heads": 2},
        {"mechanism": "gated", "num_heads": 2, "temperature": 2.0},
    ]
    return build_mechanism("split", 6, D, num_kv_heads=num_kv_heads, value_dim=E, parts=parts).double()


@pytest.mark.parametrize(("num_kv_heads", "num_gates"), [(6, 1), (3, 1), (1, 2)])
def test_a_split_gives_each_part_its_own_columns(num_kv_heads: int, num_gates: int) -> None:
    split = split_of(num_kv_heads)
    assert split.num_gates == num_gates
    check_mechanism(lambda: split_of(num_kv_heads))
    x = draw_inputs(split, B, T)
    out, shift = split(**x, causal=True), 0
    for i, (part, size) in enumerate(zip(split.parts, split.kv_sizes, strict=True)):
        kv = slice(0, 1) if num_kv_heads == 1 else slice(shift, shift + size)
        column = slice(i // 2, i // 2 + 1) if num_kv_heads == 1 else slice(0, 1)
        gates = {"gates": x["gates"][:, :, kv, column]} if part.num_gates else {}
        heads = slice(2 * i, 2 * i + 2)
        assert_same(
            part(x["q"][:, :, heads], x["k"][:, :, kv], x["v"][:, :, kv], **gates, causal=True), out[:, :, heads]
        )
        shift += size


def layer(**options: object) -> Attention:
    torch.manual_seed(3)
    return Attention(12, AttentionConfig(num_heads=H, head_dim=D, mechanism="gated", **options), causal=True).double()


def test_a_layer_projects_the_gates_from_its_input() -> None:
    built, x = layer(num_kv_heads=2), torch.randn(B, T, 12, dtype=F64)
    assert built.to_mechanism_gates.weight.shape == (2, 12)
    q = built.to_q(x).unflatten(2, (H, D))
    k, v = (y.unflatten(2, (2, D)) for y in built.to_kv(x).chunk(2, -1))
    gates = built.to_mechanism_gates(x)[..., None]
    assert_same(built(x), built.to_out(built.mechanism(q, k, v, gates=gates, causal=True).flatten(2)))
    built(x).sum().backward()
    assert built.to_mechanism_gates.weight.grad.abs().max() > 1e-6
    assert "to_mechanism_gates.weight" not in Attention(12, AttentionConfig(num_heads=2)).state_dict()


def test_a_layer_passes_gates_on_everywhere() -> None:
    built, x = layer(num_kv_heads=2), torch.randn(B, T, 12, dtype=F64)
    whole = built(x)
    state, outs = built.new_state(B, dtype=F64), []
    for piece in x.split([4, 1, 8], 1):
        out, state = built.extend(piece, state)
        outs.append(out)
    assert_same(torch.cat(outs, 1), whole)
    mask = lengths_to_mask([T, 5], T, "left")
    hidden = x.masked_fill(~mask[..., None], float("nan"))
    assert_same(built(hidden, key_mask=mask)[1:, T - 5 :], built(x[1:, T - 5 :]))
    packed = built(torch.cat([x[:1], x[1:, :5]], 1), packing=Packing.from_lengths([T, 5]))
    assert_same(packed[:, T:], built(x[1:, :5]))
    # Heads computed in groups, each recomputed in the backward pass.
    gradient = torch.autograd.grad(whole.square().sum(), list(built.parameters()))
    built.set_head_groups(True)
    again = built(x)
    assert_same(again, whole)
    for got, expected in zip(
        torch.autograd.grad(again.square().sum(), list(built.parameters())), gradient, strict=True
    ):
        assert_same(got, expected)
    weights = attention_map(layer(num_kv_heads=2), x, [5])
    assert weights.shape == (B, H, 1, T)
    assert not weights[..., 6:].any()


def test_a_language_model_with_gates_decodes_as_it_trains() -> None:
    parts = [{"mechanism": "gated", "num_heads": 2}, {"mechanism": "local", "num_heads": 2, "window": 3}]
    attention = AttentionConfig(num_heads=4, mechanism={"mechanism": "split", "parts": parts}, value_gates=True)
    config = ModelConfig(dim=16, depth=2, causal=True, vocab_size=11, attention=attention, token_shift=(0, 1))
    model = LanguageModel(config).double().eval()
    assert ModelConfig.from_dict(config.to_dict()) == config
    tokens = torch.randint(11, (B, T))
    stack = model.transformer.stack
    with torch.no_grad():
        expected, state = model(tokens), stack.share_length(model.new_state(B, dtype=F64))
        for t in range(T):
            logits, state = model.decode_step(tokens[:, t], state)
            assert_same(logits, expected[:, t])
