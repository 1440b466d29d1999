"""Layers: every field of their configurations does what it says; masks, packings and streams reach what they should."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, check_gradients_by_name, gradients, leaves, lengths_to_mask
from layer_cases import DIM, B, S, T, attention, shaken, tokens
from torch import Tensor

from longspan import Packing, build_mechanism
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.layers import NORMS, Attention, FeedForward, ProductKeyMemory
from longspan.models.transformer import Transformer

SPECS: dict[str, Any] = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 4},
    "linear": "linear",
    "performer": {"mechanism": "performer", "num_features": 5},
    "linformer": {"mechanism": "linformer", "rank": 3, "max_length": 40},
    "split": {
        "mechanism": "split",
        "parts": [
            {"mechanism": "local", "num_heads": 1, "window": 3},
            {"mechanism": "linear", "num_heads": 2},
        ],
    },
}
CROSS = [name for name in SPECS if name not in ("local", "split")]


def by_definition(layer: Attention, config: AttentionConfig, x: Tensor, causal: bool = False) -> Tensor:
    """Softmax attention with everything `config` asks for, head by head."""
    weights = dict(layer.named_parameters())

    def linear(name: str, x: Tensor, bias: bool) -> Tensor:
        assert (f"{name}.bias" in weights) == bias
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if bias else y

    H, Hkv = config.num_heads, config.num_kv_heads or config.num_heads
    D = config.head_dim or x.shape[2] // H
    q = linear("to_q", x, config.qkv_bias)
    kv = linear("to_kv", x, config.qkv_bias)
    k, v = kv[..., : Hkv * D], kv[..., Hkv * D :]
    if config.shared_kv:
        assert v.shape[2] == 0
        v = k
    heads = []
    for h in range(H):
        g = h // (H // Hkv)
        qh, kh, vh = q[..., h * D : (h + 1) * D], k[..., g * D : (g + 1) * D], v[..., g * D : (g + 1) * D]
        if config.qk_norm:
            qh, kh = (
                y / (y.square().mean(-1, keepdim=True) + 1e-12).sqrt() * weights[f"{name}_norm.weight"]
                for name, y in (("q", qh), ("k", kh))
            )
        if config.rotary != "none":
            style = config.rotary_base, config.rotary == "interleaved", config.rotary_dim
            qh, kh = turned(qh, *style), turned(kh, *style)
        scores = qh @ kh.mT / D**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        out = scores.softmax(-1) @ vh
        if config.value_gates:
            gate = x @ weights["to_gates.weight"][h] + weights["to_gates.bias"][h]
            out = out / (1 + (-gate).exp())[..., None]
        heads.append(out)
    out = torch.cat(heads, 2)
    if layer.to_mid is not None:
        out = linear("to_mid", out, config.out_bias)
    return linear("to_out", out, config.out_bias)


def turned(x: Tensor, base: float, interleaved: bool, rotary_dim: int | None = None) -> Tensor:
    """Rotary positions as a product of complex numbers."""
    D = x.shape[-1]
    if rotary_dim is not None and rotary_dim < D:
        return torch.cat([turned(x[..., :rotary_dim], base, interleaved), x[..., rotary_dim:]], -1)
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) if interleaved else torch.complex(*x.chunk(2, -1))
    angle = torch.arange(x.shape[-2])[:, None] * base ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        return torch.view_as_real(pairs).flatten(-2)
    return torch.cat([pairs.real, pairs.imag], -1)


# Each field with values under which it matters; the rest have tests of their own below.
ATTENTION: dict[str, list[dict[str, Any]]] = {
    "num_heads": [{"num_heads": 4}, {"num_heads": 1}],
    "head_dim": [{"head_dim": 10}, {"head_dim": 1}],
    "num_kv_heads": [{"num_kv_heads": 1}, {"num_heads": 6, "num_kv_heads": 2}],
    "shared_kv": [{"shared_kv": True}, {"shared_kv": True, "qk_norm": True, "rotary": "halves"}],
    "qkv_bias": [{"qkv_bias": True}, {"qkv_bias": True, "num_kv_heads": 1}],
    "out_bias": [{"out_bias": False}],
    "qk_norm": [{"qk_norm": True}, {"qk_norm": True, "head_dim": 6, "rotary": "interleaved"}],
    "rotary": [{"rotary": "halves"}, {"rotary": "interleaved"}],
    "rotary_base": [{"rotary": "halves", "rotary_base": 7.0}],
    "rotary_dim": [
        {"rotary": "halves", "rotary_dim": 4, "head_dim": 7},
        {"rotary": "interleaved", "rotary_dim": 2, "qk_norm": True},
    ],
    "value_gates": [{"value_gates": True}, {"value_gates": True, "num_kv_heads": 1}],
}
APART = {"value_embedding", "mechanism", "dropout", "dynamic_bias", "share_projection"}
APART |= {"num_qk_heads", "conv_size", "out_norm", "out_gate"}  # in test_convolution.py


def test_every_field_of_attention_has_a_test() -> None:
    assert {field.name for field in fields(AttentionConfig)} == ATTENTION.keys() | APART


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("field", "options"), [(field, options) for field, cases in ATTENTION.items() for options in cases]
)
def test_attention_is_its_definition(field: str, options: dict[str, Any], causal: bool) -> None:
    config = AttentionConfig(**{"num_heads": 3, **options})
    layer, x = attention(causal, **options), tokens()
    assert_same(layer(x), by_definition(layer, config, x, causal))
    assert layer(x).shape == x.shape
    # The definition without the field cannot be met by the same layer: ignoring it would show.
    default = next(f.default for f in fields(AttentionConfig) if f.name == field)
    without = replace(config, **{field: 2 if field == "num_heads" else default})
    try:
        other = by_definition(layer, without, x, causal)
    except (AssertionError, KeyError, IndexError, RuntimeError):
        return
    assert not torch.allclose(layer(x), other)


@pytest.mark.parametrize("name", SPECS)
def test_the_mechanism_is_the_one_named(name: str) -> None:
    layer, x = attention(mechanism=SPECS[name]), tokens()
    assert type(layer.mechanism).__name__.lower() == f"{name}attention"
    q = (x @ layer.to_q.weight.T).unflatten(2, (3, 4))
    k, v = (y.unflatten(2, (3, 4)) for y in (x @ layer.to_kv.weight.T).chunk(2, -1))
    assert_same(layer(x), layer.to_out(layer.mechanism(q, k, v).flatten(2)))


def test_options_of_a_mechanism_arrive() -> None:
    assert attention(mechanism={"mechanism": "linformer", "rank": 5}).mechanism.rank == 5
    with pytest.raises(ValueError, match="did you mean 'window'"):
        attention(mechanism={"mechanism": "local", "windw": 5})
    with pytest.raises(ValueError, match="a mechanism is a name or"):
        attention(mechanism=["local", "linear"])


def test_a_mechanism_object_brings_its_own_shape() -> None:
    mechanism = build_mechanism("softmax", 2, 5, num_kv_heads=1, value_dim=3)
    layer = shaken(Attention(DIM, AttentionConfig(qk_norm=True), mechanism=mechanism))
    assert layer.to_out.in_features == 6
    assert layer(tokens()).shape == (B, T, DIM)
    with pytest.raises(ValueError, match=r"shared_kv needs value_dim \(3\) = head_dim \(5\)"):
        Attention(DIM, AttentionConfig(shared_kv=True), mechanism=mechanism)
    assert shaken(Attention(7, mechanism=build_mechanism("linear", 2, 5)))(tokens(dim=7)).shape == (B, T, 7)


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dim \(12\) must be a multiple of num_heads \(5\)"):
        attention(num_heads=5)
    with pytest.raises(ValueError, match="must be even, got 3"):
        attention(head_dim=3, rotary="halves")
    with pytest.raises(ValueError, match=r"unknown rotary 'half'.*did you mean 'halves'"):
        attention(rotary="half")
    with pytest.raises(ValueError, match=r"rotary_dim \(6\) must be at most head_dim \(4\)"):
        attention(head_dim=4, rotary="halves", rotary_dim=6)
    for none in ("none", ("none", "none"), {}):
        with pytest.raises(ValueError, match=r"rotary_dim \(2\) goes with rotary embeddings: set rotary"):
            attention(rotary=none, rotary_dim=2)
    with pytest.raises(ValueError, match="rotary_dim must be a positive integer, got 0"):
        attention(rotary="halves", rotary_dim=0)
    with pytest.raises(ValueError, match="rotary names 2 parts"):
        attention(rotary=("halves", "none"))
    with pytest.raises(ValueError, match="num_kv_heads must be a positive integer, got 0"):
        attention(num_kv_heads=0)
    with pytest.raises(ValueError, match="head_dim must be a positive integer, got 0"):
        attention(head_dim=0)


def test_out_features_is_the_width_that_comes_out() -> None:
    assert shaken(Attention(DIM, AttentionConfig(num_heads=3), out_features=5))(tokens()).shape == (B, T, 5)


def test_dropout_of_attention_only_in_training() -> None:
    layer, x = attention(dropout=0.5), tokens(8)
    assert torch.equal(layer(x), layer(x))
    out = layer.train()(x)
    dropped = (out == 0).double().mean()
    assert 0.4 < dropped < 0.6
    assert_same(out[out != 0], 2 * layer.eval()(x)[out != 0])


def linformers(**options: Any) -> list[LinformerAttention]:
    attention = AttentionConfig(num_heads=3, mechanism=SPECS["linformer"], **options)
    model = Transformer(ModelConfig(dim=DIM, depth=3, attention=attention))
    return [branch.layer.mechanism for branch in model.stack.branches if isinstance(branch.layer, Attention)]


def test_share_projection_is_one_object_for_all_layers() -> None:
    assert len({id(p) for m in linformers(share_projection=True) for p in (m.keys, m.values)}) == 1
    assert len({id(p) for m in linformers() for p in (m.keys, m.values)}) == 6


def test_dynamic_bias_is_one_network_for_all_local_heads() -> None:
    def biases(width: int) -> list[Any]:
        attention = AttentionConfig(num_heads=3, mechanism=(SPECS["local"], "linear"), dynamic_bias=width)
        model = Transformer(ModelConfig(dim=DIM, depth=3, attention=attention))
        layers = [branch.layer for branch in model.stack.branches if isinstance(branch.layer, Attention)]
        return [layers[0].mechanism.bias, layers[2].mechanism.bias]

    first, second = biases(5)
    assert first is second
    assert first.layers[0].out_features == 5
    assert biases(0) == [None, None]


@pytest.mark.parametrize("out_bias", [False, True])
def test_an_extra_linear_layer_before_the_output_projection(out_bias: bool) -> None:
    config = AttentionConfig(num_heads=3, out_bias=out_bias)
    layer, x = shaken(Attention(DIM, config, mid_features=7)), tokens()
    assert layer.to_mid.out_features == 7
    assert_same(layer(x), by_definition(layer, config, x))


@pytest.mark.parametrize("options", [{"share_projection": True}, {"dynamic_bias": 4}])
def test_one_layer_alone_refuses_what_spans_layers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="share_projection and dynamic_bias belong to all layers"):
        attention(mechanism=SPECS["linformer"], **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SPECS)
def test_hidden_rows_do_not_exist(name: str, side: str, causal: bool) -> None:
    if not causal and side == "left" and name not in ("softmax", "local"):
        side = "right"  # Bidirectional masks keep slot positions, and only softmax sees no more than their difference.
    layer = attention(causal, mechanism=SPECS[name], rotary="halves", value_gates=True, qk_norm=True)
    lengths = [T, 6]
    mask = lengths_to_mask(lengths, T, side)
    x = tokens().masked_fill(~mask[..., None], float("nan")).requires_grad_()
    out = layer(x, key_mask=mask)
    weight = torch.randn(B, T, DIM, dtype=torch.float64)
    got = gradients((out * weight)[mask], leaves(layer, x=x))
    pieces = [(x[b, mask[b]][None], weight[b, mask[b]]) for b in range(B)]
    separate = torch.cat([layer(piece)[0] * w for piece, w in pieces])
    assert_same((out * weight)[mask], separate)
    check_gradients_by_name(got, gradients(separate, leaves(layer, x=x)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_packed_is_separate(name: str, causal: bool) -> None:
    layer = attention(causal, mechanism=SPECS[name], rotary="interleaved", value_gates=True)
    lengths = [3, 1, 6]
    x, packing = tokens(1, 10), Packing.from_lengths(lengths)
    out = layer(x, packing=packing)
    assert_same(out, torch.cat([layer(piece) for piece in x.split(lengths, 1)], 1))


def test_packing_and_a_mask_exclude_each_other() -> None:
    x = tokens(1, 4)
    with pytest.raises(ValueError, match="packing and key_mask exclude each other"):
        attention(True)(x, packing=Packing.from_lengths([4]), key_mask=torch.ones(1, 4, dtype=torch.bool))


def test_a_mask_of_the_wrong_kind_is_refused() -> None:
    x = tokens()
    with pytest.raises(ValueError, match="key_mask must be bool"):
        attention()(x, key_mask=torch.ones(B, T))
    with pytest.raises(ValueError, match=r"key_mask must be .* = \(2, 11\), got \(2, 12\)"):
        attention()(x, key_mask=torch.ones(B, T + 1, dtype=torch.bool))


@pytest.mark.parametrize("splits", [[1] * T, [4, 1, 6], [10, 1], [T]])
@pytest.mark.parametrize("name", SPECS)
def test_extend_is_forward(name: str, splits: list[int]) -> None:
    layer = attention(True, mechanism=SPECS[name], rotary="halves", value_gates=True, qk_norm=True)
    x = tokens()
    state = layer.new_state(B, dtype=torch.float64)
    outs = []
    for piece in x.split(splits, 1):
        out, state = layer.extend(piece, state)
        outs.append(out)
    assert_same(torch.cat(outs, 1), layer(x))
    assert state.length.tolist() == [T, T]


def test_extend_takes_packed_rows() -> None:
    layer = attention(True, rotary="halves")
    first, second = tokens(2, 5), tokens(1, 4)
    _, state = layer.extend(first, layer.new_state(2, dtype=torch.float64))
    out, _ = layer.extend(second, state, packing=Packing.from_lengths([3, 1]))
    for n, piece in enumerate(second.split([3, 1], 1)):
        whole = torch.cat([first[n : n + 1], piece], 1)
        assert_same(out[:, :3] if n == 0 else out[:, 3:], layer(whole)[:, 5:])


def test_rotary_for_each_part_of_a_split() -> None:
    layer, x = attention(mechanism=SPECS["split"], rotary=("halves", "none")), tokens()
    q = (x @ layer.to_q.weight.T).unflatten(2, (3, 4)).clone()
    k, v = (y.unflatten(2, (3, 4)).clone() for y in (x @ layer.to_kv.weight.T).chunk(2, -1))
    q[:, :, 0], k[:, :, 0] = (turned(y[:, :, 0], 10000.0, False) for y in (q, k))
    assert_same(layer(x), layer.to_out(layer.mechanism(q, k, v).flatten(2)))
    both = attention(mechanism=SPECS["split"], rotary=("halves", "interleaved"))
    both.load_state_dict(layer.state_dict())
    assert not torch.allclose(both(x), layer(x))


def test_rotary_for_each_mechanism_by_name() -> None:
    x, named = tokens(), {"local": "halves", "performer": "interleaved"}
    for spec, rotary in (
        (SPECS["split"], ("halves", "none")),
        (SPECS["local"], "halves"),
        (SPECS["performer"], "interleaved"),
        (SPECS["linear"], "none"),
    ):
        layer, same = attention(mechanism=spec, rotary=named), attention(mechanism=spec, rotary=rotary)
        same.load_state_dict(layer.state_dict())
        assert_same(layer(x), same(x))
    with pytest.raises(ValueError, match="unknown mechanism 'locals'"):
        attention(rotary={"locals": "halves"})
    with pytest.raises(ValueError, match="unknown rotary 'half'"):
        attention(rotary={"local": "half"})


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rotary_of_parts_with_fewer_key_heads(kv_heads: int) -> None:
    parts = [{"mechanism": "local", "num_heads": 2, "window": 3}, {"mechanism": "linear", "num_heads": 4}]
    spec = {"mechanism": "split", "parts": parts}
    options = {"num_heads": 6, "num_kv_heads": kv_heads, "mechanism": spec}
    same = attention(rotary=("halves", "halves"), **options)
    plain = attention(rotary="halves", **options)
    plain.load_state_dict(same.state_dict())
    x = tokens()
    assert_same(same(x), plain(x))
    if kv_heads == 1:
        with pytest.raises(ValueError, match=r"one key/value head.*: give all parts the same, or more"):
            attention(rotary=("halves", "none"), **options)


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_sees_its_context_only(name: str) -> None:
    layer = attention(cross=True, mechanism=SPECS[name], num_kv_heads=1, qk_norm=True, value_gates=True)
    x, context = tokens(), tokens(length=S)
    mask = lengths_to_mask([S, 4], S)
    hidden = context.masked_fill(~mask[..., None], float("nan")).requires_grad_()
    out = layer(x, context=hidden, context_mask=mask)
    separate = torch.cat([layer(x[:1], context=hidden[:1]), layer(x[1:], context=hidden[1:, :4])])
    assert_same(out, separate)
    check_gradients_by_name(
        gradients(out, leaves(layer, context=hidden)), gradients(separate, leaves(layer, context=hidden))
    )
    assert not torch.allclose(out, layer(x, context=context))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_written_once_and_read_is_forward(name: str, masked: bool) -> None:
    layer = attention(cross=True, mechanism=SPECS[name], value_gates=True)
    x, context = tokens(), tokens(length=S)
    mask = lengths_to_mask([S, 4], S) if masked else None
    state = layer.write(layer.new_state(B, dtype=torch.float64), context, key_mask=mask)
    expected = layer(x, context=context, context_mask=mask)
    for piece, want in zip(x.split([1, 4, 6], 1), expected.split([1, 4, 6], 1), strict=True):
        out, after = layer.extend(piece, state)
        assert after is state
        assert_same(out, want)


def test_self_attention_has_no_context_to_write() -> None:
    layer = attention(rotary="halves")
    with pytest.raises(ValueError, match="self-attention takes no context: use extend"):
        layer.write(layer.new_state(B, dtype=torch.float64), tokens())


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_packed_on_both_sides(name: str) -> None:
    layer = attention(cross=True, mechanism=SPECS[name])
    x, context, lengths, others = tokens(1, 7), tokens(1, 6), [3, 4], [5, 1]
    packing, context_packing = (Packing.from_lengths(given) for given in (lengths, others))
    out = layer(x, packing=packing, context=context, context_packing=context_packing)
    pieces = zip(x.split(lengths, 1), context.split(others, 1), strict=True)
    assert_same(out, torch.cat([layer(piece, context=other) for piece, other in pieces], 1))


def test_cross_attention_is_never_rotated() -> None:
    layer = attention(cross=True)
    x, context = tokens(), tokens(length=S)
    assert_same(layer(x.flip(1), context=context).flip(1), layer(x, context=context))
    assert_same(layer(x, context=context.flip(1)), layer(x, context=context))
    with pytest.raises(ValueError, match="cross-attention is never rotated"):
        attention(cross=True, rotary="halves")


def test_cross_attention_refuses_what_it_cannot() -> None:
    with pytest.raises(ValueError, match="cross-attention needs a context"):
        attention(cross=True)(tokens())
    for name in ("local", "split"):
        with pytest.raises(ValueError, match="cannot be used for cross attention"):
            attention(cross=True, mechanism=SPECS[name])


@pytest.mark.parametrize("name", ["linear", "performer", "linformer"])
def test_cross_attention_beside_local_self_attention(name: str) -> None:
    config = ModelConfig(
        dim=DIM,
        depth=2,
        attention=AttentionConfig(num_heads=3, mechanism=SPECS["local"], rotary="halves"),
        cross=AttentionConfig(num_heads=2, mechanism=SPECS[name], dropout=0.0),
        causal=True,
    )
    model = shaken(Transformer(config))
    x, context = tokens(), tokens(length=S)
    mask = lengths_to_mask([S, 4], S)
    hidden = context.masked_fill(~mask[..., None], float("nan"))
    out = model(x, context=hidden, context_mask=mask)
    assert_same(out[1:], model(x[1:], context=context[1:, :4]))
    state = model.new_state(B, context=hidden, context_mask=mask)
    streamed = []
    for piece in x.split([4, 1, 6], 1):
        y, state = model.extend(piece, state)
        streamed.append(y)
    assert_same(torch.cat(streamed, 1), out)


def test_half_precision_runs() -> None:
    x = tokens().bfloat16()
    config = AttentionConfig(num_heads=3, qk_norm=True, rotary="halves", value_gates=True)
    attention = Attention(DIM, config, mid_features=5)
    for layer in (attention, FeedForward(DIM), ProductKeyMemory(DIM, num_keys=3), NORMS["scale"](DIM)):
        out = layer.bfloat16()(x)
        assert out.dtype == torch.bfloat16
        assert out.isfinite().all()
    assert F.mse_loss(out.float(), torch.zeros(B, T, DIM)) > 0


def test_a_context_for_self_attention_is_refused() -> None:
    for given in ({"context": tokens()}, {"context_mask": torch.ones(B, T, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="self-attention takes no context: build the layer with cross=True"):
            attention()(tokens(), **given)
