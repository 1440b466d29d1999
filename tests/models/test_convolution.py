"""Attention with a short convolution, an output norm and gate, and shared query and key heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from torch import Tensor

from longspan import (
    Attention,
    AttentionConfig,
    LanguageModel,
    ModelConfig,
    Packing,
    Sampling,
    build_mechanism,
    generate,
    load,
    save,
)
from longspan.layout import TokenLayout
from longspan.models import layers
from longspan.models.layers import ConvolutionState, ShortConvolution

DIM, H, V, T = 16, 4, 11, 29
F64 = torch.float64
OPTIONS: list[dict[str, Any]] = [
    {"mechanism": "softmax", "conv_size": 4, "out_norm": True, "out_gate": "silu"},
    {"mechanism": "linear", "conv_size": 3, "qkv_bias": True, "rotary": "halves"},
    {"mechanism": "delta", "conv_size": 4, "out_norm": True, "out_gate": "sigmoid", "num_qk_heads": 2},
    {"mechanism": {"mechanism": "decay", "gate": "channel"}, "conv_size": 2, "num_qk_heads": 1},
    {"mechanism": {"mechanism": "local", "window": 5}, "conv_size": 4, "shared_kv": True, "out_gate": "silu"},
]
EACH = pytest.mark.parametrize("options", OPTIONS, ids=str)


def build(options: dict[str, Any], **more: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=H, **options)
    config = ModelConfig(dim=DIM, depth=2, causal=True, vocab_size=V, attention=attention, token_shift=(0, 1), **more)
    return LanguageModel(config).to(F64).eval()


@EACH
def test_states_masks_and_packing(options: dict[str, Any]) -> None:
    """Pieces, single tokens, padding on both sides and packed sequences equal the whole."""
    model, tokens = build(options), torch.randint(V, (2, T))
    expected, state, outs = model(tokens), model.new_state(2, dtype=F64), []
    for start, stop in ((0, 5), (5, 6), (6, 8), (8, T)):
        out, state = model.extend(tokens[:, start:stop], state)
        outs.append(out)
    assert_same(torch.cat(outs, 1), expected)
    for left, right in ((7, 0), (0, 4), (3, 2)):
        mask = torch.zeros(2, T, dtype=torch.bool)
        mask[:, left : T - right] = True
        shorter = model(tokens[:, left : T - right])
        assert_same(model(tokens, key_mask=mask)[:, left : T - right], shorter)
        got, after = model.extend(tokens, model.new_state(2, dtype=F64), key_mask=mask)
        assert_same(got[:, left : T - right], shorter)
        assert_same(
            model.extend(tokens[:, :3], after)[0],
            model(torch.cat([tokens[:, left : T - right], tokens[:, :3]], 1))[:, -3:],
        )
    packed = model(tokens[:1], packing=Packing.from_lengths([7, 1, 21]))
    assert_same(packed, torch.cat([model(part) for part in tokens[:1].split([7, 1, 21], 1)], 1))


@EACH
def test_new_sequences_take_the_place_of_others(options: dict[str, Any]) -> None:
    """A state that stores every token is longer than the one that is put into it, or shorter."""
    model, tokens = build(options), torch.randint(V, (3, T))
    long = model.extend(tokens[:, :9], model.new_state(3, dtype=F64))[1]
    short = model.extend(tokens[:2, 9:11], model.new_state(2, dtype=F64))[1]
    for state, rows, pieces in (
        (long, short, (tokens[0, 9:11], tokens[1, :9], tokens[1, 9:11])),
        (short, long.select([2, 1]), (tokens[1, :9], None, tokens[2, :9])),
    ):
        index = [0, 2] if len(state.length) == 3 else [1, 0]
        expected = [piece for piece in pieces if piece is not None]
        more = torch.randint(V, (len(expected), 3))
        got = model.extend(more, state.put(index, rows))[0]
        for row, piece in enumerate(expected):
            assert_same(got[row], model(torch.cat([piece, more[row]])[None])[0, -3:])


@EACH
@pytest.mark.parametrize("form", ["left", "right", "both", "packed"])
def test_a_layer_is_extended_by_padded_and_packed_pieces(options: dict[str, Any], form: str) -> None:
    """Rows of 7, 4 and 0 tokens after a first piece of 5, NaN beside them; then one more token."""
    layer = Attention(DIM, AttentionConfig(num_heads=H, **options), causal=True).to(F64).eval()
    rows = [torch.randn(1, 5 + n, DIM, dtype=F64) for n in (7, 4, 0)]
    state = layer.extend(torch.cat([row[:, :5] for row in rows]), layer.new_state(3, dtype=F64))[1]
    if form == "packed":
        x = torch.cat([row[:, 5:] for row in rows], 1)
        out, state = layer.extend(x, state, packing=Packing.from_lengths([7, 4, 0]))
        found = out.split([7, 4, 0], 1)
    else:
        x, begins = torch.full((3, 7, DIM), torch.nan, dtype=F64), []
        for b, row in enumerate(rows):
            n = row.shape[1] - 5
            begins.append({"left": 7 - n, "right": 0, "both": (7 - n) // 2}[form])
            x[b, begins[b] : begins[b] + n] = row[0, 5:]
        out, state = layer.extend(x, state, key_mask=x.isfinite().all(2))
        found = [out[b : b + 1, begin : begin + n] for b, (begin, n) in enumerate(zip(begins, (7, 4, 0), strict=True))]
        assert out[x.isnan().any(2)].count_nonzero() == 0
    more = torch.randn(3, 1, DIM, dtype=F64)
    last = layer.extend(more, state)[0]
    for b, row in enumerate(rows):
        expected = layer(torch.cat([row, more[b : b + 1]], 1))[:, 5:]
        assert_same(torch.cat([found[b], last[b : b + 1]], 1), expected)


def test_states_of_layers_with_another_convolution_are_refused() -> None:
    plain, three, four = (Attention(12, AttentionConfig(num_heads=2, conv_size=n), causal=True) for n in (0, 3, 4))
    for layer, other, held in ((plain, four, r"\(3, 36\)"), (four, plain, "None"), (four, three, r"\(2, 36\)")):
        with pytest.raises(ValueError, match=f"holds {held} .*: use states from its own new_state"):
            layer.extend(torch.randn(1, 5, 12), other.new_state(1))


@EACH
def test_generation_and_checkpoints(options: dict[str, Any], tmp_path: Any) -> None:
    model, tokens = build(options), torch.randint(V, (1, 9))
    found = generate(model, tokens, 12, sampling=Sampling(temperature=0)).tokens[0]
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert list(found) == tokens[0, 9:].tolist()
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").eval()(tokens), model(tokens))


@EACH
def test_gradients_reach_every_parameter(options: dict[str, Any]) -> None:
    model = build(options).train()
    model.loss(torch.randint(V, (2, T))).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@EACH
def test_rows_of_a_state_can_be_chosen(options: dict[str, Any]) -> None:
    model, tokens = build(options), torch.randint(V, (3, T))
    _, state = model.extend(tokens[:, :8], model.new_state(3, dtype=F64))
    chosen = model.extend(tokens[[2, 0], 8:], state.select([2, 0]))[0]
    assert_same(chosen, model(tokens)[[2, 0], 8:])
    _, longer = model.extend(tokens[2:, :12], model.new_state(1, dtype=F64))
    replaced = model.extend(tokens[1:, 12:], state.select([1, 1]).put([1], longer))[0]
    assert_same(replaced[1:], model(tokens)[2:, 12:])


def test_a_convolution_is_a_weighted_sum_of_the_last_tokens() -> None:
    layer, x = (
        Attention(DIM, AttentionConfig(num_heads=H, conv_size=3), causal=True).to(F64),
        torch.randn(1, T, DIM, dtype=F64),
    )
    conv = layer.conv
    assert isinstance(conv, ShortConvolution)
    joined = torch.cat([layer.to_q(x), layer.to_kv(x)], 2)
    before = F.pad(joined, (0, 0, 2, 0))
    mixed = F.silu(sum(conv.weight[j] * before[:, 2 - j : 2 - j + T] for j in range(3)))
    q, k, v = (y.unflatten(2, (H, -1)) for y in mixed.chunk(3, 2))
    assert_same(layer(x), layer.project_output(x, layer.mechanism(q, k, v, causal=True)))
    state = layer.new_state(1, dtype=F64)
    assert isinstance(state, ConvolutionState)
    assert state.recent.shape == (1, 2, 3 * DIM)


def test_output_norm_and_gate() -> None:
    config = AttentionConfig(num_heads=H, out_norm=True, out_gate="silu")
    layer, x = Attention(DIM, config).to(F64), torch.randn(2, T, DIM, dtype=F64)
    q, k, v = layer.to_q(x), *layer.to_kv(x).chunk(2, 2)
    out = layer.mechanism(*(y.unflatten(2, (H, -1)) for y in (q, k, v)))
    out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert_same(layer(x), layer.to_out(out.flatten(2) * F.silu(layer.to_out_gate(x))))
    sigmoid = Attention(DIM, AttentionConfig(num_heads=H, out_norm=True, out_gate="sigmoid")).to(F64)
    sigmoid.load_state_dict(layer.state_dict())
    assert_same(sigmoid(x), layer.to_out(out.flatten(2) * layer.to_out_gate(x).sigmoid()))


def test_value_heads_share_query_and_key_heads() -> None:
    config = AttentionConfig(num_heads=H, num_qk_heads=2, mechanism="delta")
    layer, x = Attention(DIM, config, causal=True).to(F64), torch.randn(2, T, DIM, dtype=F64)
    assert layer.to_q.out_features == 2 * 4
    assert layer.to_kv.out_features == 2 * 4 + H * 4
    assert layer.mechanism.num_kv_heads == H
    q, (k, v) = layer.to_q(x), layer.to_kv(x).split([2 * 4, H * 4], 2)
    q, k = (y.unflatten(2, (2, -1)).repeat_interleave(2, 2) for y in (q, k))
    gates = layer.to_mechanism_gates(x).unflatten(2, (H, -1))
    out = layer.mechanism(q, k, v.unflatten(2, (H, -1)), gates=gates, causal=True)
    assert_same(layer(x), layer.to_out(out.flatten(2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_size": 1}, r"conv_size must be 0 \(no convolution\) or at least 2, got 1"),
        ({"conv_size": -1}, "conv_size must be 0"),
        ({"num_qk_heads": 3}, r"num_heads \(4\) must be a multiple of num_qk_heads \(3\)"),
        ({"num_qk_heads": 2, "num_kv_heads": 2}, "num_qk_heads excludes num_kv_heads and shared_kv"),
        ({"num_qk_heads": 2, "shared_kv": True}, "num_qk_heads excludes num_kv_heads and shared_kv"),
        ({"out_gate": "tanh"}, "unknown out_gate 'tanh'; there is none, sigmoid, silu"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig(num_heads=H, **options)


def test_a_given_mechanism_has_a_multiple_of_the_query_heads() -> None:
    with pytest.raises(ValueError, match=r"6 heads must be a multiple of num_qk_heads \(4\)"):
        Attention(24, AttentionConfig(num_heads=4, num_qk_heads=4), mechanism=build_mechanism("delta", 6, 4))


def test_cross_attention_has_no_convolution() -> None:
    with pytest.raises(ValueError, match=r"conv_size \(4\) is for self-attention: set it to 0"):
        Attention(DIM, AttentionConfig(num_heads=H, conv_size=4), cross=True)


def test_kernels_leave_padding_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels compute, which know no padding, equals what masked shifts give, hidden slots included."""

    def unmasked(x: Tensor, weight: Tensor) -> Tensor:
        shifted = [F.pad(x, (0, 0, j, 0))[:, : x.shape[1]] * w for j, w in enumerate(weight)]
        return F.silu(torch.stack(shifted).sum(0))

    layer, x = ShortConvolution(5, 4).to(F64), torch.randn(3, 17, 5, dtype=F64)
    mask = torch.arange(17) < torch.tensor([[17], [7], [0]])
    mask[1, :2] = False
    layout = TokenLayout.of(x, causal=True, key_mask=mask)
    expected = layer(layout.zero_fill(x), layout)
    monkeypatch.setattr(layers, "short_convolution", unmasked)
    assert_same(layer(layout.zero_fill(x), layout), expected)
