"""Feed-forward layers, product keys, norms and token shift: what they compute, and that padding stays out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import assert_same, check_gradients_by_name, gradients, leaves, lengths_to_mask
from layer_cases import DIM, B, T, attention, shaken, tokens
from torch import Tensor, nn

from longspan import Packing
from longspan.layout import TokenLayout
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import ACTIVATIONS, NORMS, Attention, FeedForward, ProductKeyMemory, shift_tokens
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import Transformer


def feed_forward_by_definition(layer: FeedForward, config: FeedForwardConfig, x: Tensor) -> Tensor:
    weights = dict(layer.named_parameters())
    assert ("to_hidden.bias" in weights) == ("to_out.bias" in weights) == config.bias
    hidden = config.hidden or int(DIM * config.mult)
    a = x @ weights["to_hidden.weight"].T + (weights["to_hidden.bias"] if config.bias else 0)
    if config.gated:
        a, b = a[..., :hidden], a[..., hidden:]
        a = ACTIVATION_FORMULAS[config.activation](a) * b
    else:
        a = ACTIVATION_FORMULAS[config.activation](a)
    assert a.shape[-1] == hidden
    return a @ weights["to_out.weight"].T + (weights["to_out.bias"] if config.bias else 0)


ACTIVATION_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + (-x).exp()),
    "tanh": lambda x: (1 - (-2 * x).exp()) / (1 + (-2 * x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "identity": lambda x: x,
}
FEED_FORWARD: dict[str, list[dict[str, Any]]] = {
    "mult": [{"mult": 2}, {"mult": 2.5}],
    "hidden": [{"hidden": 7}, {"hidden": 7, "mult": 2}],
    "activation": [{"activation": name} for name in ACTIVATION_FORMULAS if name != "gelu"],
    "gated": [{"gated": True}, {"gated": True, "activation": "sigmoid"}, {"gated": True, "hidden": 5}],
    "bias": [{"bias": False}, {"bias": False, "gated": True}],
}
FEED_FORWARD_APART = {"dropout", "chunks"}


def test_every_field_of_feed_forward_has_a_test() -> None:
    assert {field.name for field in fields(FeedForwardConfig)} == FEED_FORWARD.keys() | FEED_FORWARD_APART
    assert ACTIVATION_FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize(
    ("field", "options"), [(field, options) for field, cases in FEED_FORWARD.items() for options in cases]
)
def test_feed_forward_is_its_definition(field: str, options: dict[str, Any]) -> None:
    config = FeedForwardConfig(**options)
    layer, x = shaken(FeedForward(DIM, config)), tokens()
    assert_same(layer(x), feed_forward_by_definition(layer, config, x))
    default = next(f.default for f in fields(FeedForwardConfig) if f.name == field)
    try:
        other = feed_forward_by_definition(layer, replace(config, **{field: default}), x)
    except (AssertionError, KeyError, RuntimeError):
        return
    assert not torch.allclose(layer(x), other)


def test_an_unknown_activation_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'gelo'.*did you mean 'gelu'"):
        FeedForward(DIM, FeedForwardConfig(activation="gelo"))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, T, 40])
def test_chunks_change_nothing_but_the_size_of_the_pieces(chunks: int, gated: bool) -> None:
    whole = shaken(FeedForward(DIM, FeedForwardConfig(gated=gated)))
    pieces = shaken(FeedForward(DIM, FeedForwardConfig(gated=gated, chunks=chunks)))
    pieces.load_state_dict(whole.state_dict())
    sizes: list[int] = []
    pieces.to_hidden.register_forward_hook(lambda _, args, out: sizes.append(args[0].shape[1]))
    x = tokens().requires_grad_()
    assert_same(pieces(x), whole(x))
    assert max(sizes) <= -(-T // chunks)
    check_gradients_by_name(gradients(pieces(x), leaves(pieces, x=x)), gradients(whole(x), leaves(whole, x=x)))


def test_chunks_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        FeedForward(DIM, FeedForwardConfig(chunks=0))


def test_dropout_inside_and_after() -> None:
    x = tokens(8)
    inside = shaken(FeedForward(DIM, FeedForwardConfig(dropout=0.5)))
    after = shaken(FeedForward(DIM, out_dropout=0.5))
    for layer in (inside, after):
        assert torch.equal(layer(x), layer(x))
        assert not torch.allclose(layer.train()(x), layer.eval()(x))
        layer.train()
    seen: list[Tensor] = []
    inside.to_out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert (inside(x) != 0).all()
    assert 0.4 < (seen[0] == 0).double().mean() < 0.6
    out = after(x)
    assert 0.4 < (out == 0).double().mean() < 0.6
    assert_same(out[out != 0], 2 * after.eval()(x)[out != 0])


def test_product_keys_and_their_number() -> None:
    legacy = LegacyConfig(product_keys=(1,), num_keys=5)
    model = Transformer(ModelConfig(dim=DIM, depth=3, attention=AttentionConfig(num_heads=3), legacy=legacy))
    layers = [branch.layer for branch in model.stack.branches if not isinstance(branch.layer, Attention)]
    assert [type(layer) for layer in layers] == [FeedForward, ProductKeyMemory, FeedForward]
    assert layers[1].values.num_embeddings == 25
    assert model(tokens().float()).shape == (B, T, DIM)


@pytest.mark.parametrize(("num_keys", "best"), [(5, 3), (4, 4), (3, 32), (7, 1)])
def test_product_key_memory_is_its_definition(num_keys: int, best: int) -> None:
    heads, key_dim = 2, 3
    memory = shaken(ProductKeyMemory(DIM, num_keys=num_keys, num_heads=heads, key_dim=key_dim, best=best))
    x = tokens()
    best = min(best, num_keys)
    expected = torch.zeros_like(x)
    for b in range(B):
        for t in range(T):
            queries = memory.norm((memory.to_queries.weight @ x[b, t]).view(2, heads, key_dim))
            for h in range(heads):
                scores = torch.empty(num_keys, num_keys, dtype=torch.float64)
                for i in range(num_keys):
                    for j in range(num_keys):
                        scores[i, j] = queries[0, h] @ memory.keys[h, i, 0] + queries[1, h] @ memory.keys[h, j, 1]
                values, places = scores.flatten().topk(best)
                expected[b, t] += values.softmax(0) @ memory.values.weight[places]
    assert_same(memory(x), expected)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_product_key_memory_of_nothing(shape: tuple[int, int]) -> None:
    layer = ProductKeyMemory(DIM, num_keys=3)
    out = layer(torch.randn(*shape, DIM))
    assert out.shape == (*shape, DIM)
    out.sum().backward()
    assert all(not p.grad.any() for p in layer.parameters())


def test_product_key_memory_trains_all_it_has() -> None:
    memory = shaken(ProductKeyMemory(DIM, num_keys=3, num_heads=2, key_dim=3, best=3))
    x = tokens(8).requires_grad_()
    memory(x).square().sum().backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert x.grad.isfinite().all()


# Norms.


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_their_formulas(norm: str) -> None:
    layer, x = shaken(NORMS[norm](DIM)), tokens()
    if norm == "layer":
        centered = x - x.mean(-1, keepdim=True)
        expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias
    elif norm == "rms":
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight
    else:
        expected = x / x.square().sum(-1, keepdim=True).sqrt() * layer.scale
    assert_same(layer(x), expected)
    zero = torch.zeros(1, 1, DIM, dtype=torch.float64, requires_grad=True)
    layer(zero).sum().backward()
    assert zero.grad.isfinite().all()


# Token shift.


def shifted(x: Tensor, offsets: Sequence[int]) -> Tensor:
    """One sequence (T, dim), part by part and token by token."""
    out, size = x.clone(), x.shape[1] // len(offsets)
    for part, offset in enumerate(offsets):
        for t in range(len(x)):
            there = t - offset
            value = x[there, part * size : (part + 1) * size] if 0 <= there < len(x) else 0
            out[t, part * size : (part + 1) * size] = value
    return out


OFFSETS = [(0, 1), (-1, 0, 1), (2, 0), (0,), (3,), (1, 0, 2, 0, 1), (-2, 20)]
CAUSAL_OFFSETS = [offsets for offsets in OFFSETS if min(offsets) >= 0]


@pytest.mark.parametrize("length", [1, 2, T])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_shift_by_hand(offsets: tuple[int, ...], length: int) -> None:
    x = tokens(length=length)
    got = shift_tokens(x, offsets, TokenLayout.of(x, causal=False))
    assert torch.equal(got, torch.stack([shifted(row, offsets) for row in x]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_shift_does_not_cross_padding(offsets: tuple[int, ...], side: str, causal: bool) -> None:
    mask = lengths_to_mask([T, 5], T, side)
    x = tokens().masked_fill(~mask[..., None], 0)
    got = shift_tokens(x, offsets, TokenLayout.of(x, causal=causal, key_mask=mask))
    for b in range(B):
        assert torch.equal(got[b, mask[b]], shifted(x[b, mask[b]], offsets))


def test_shift_past_a_hole_brings_zeros() -> None:
    mask = torch.tensor([[True, True, False, True, True]])
    x = tokens(1, 5).masked_fill(~mask[..., None], 0)
    got = shift_tokens(x, (-1, 0, 1), TokenLayout.of(x, causal=False, key_mask=mask))
    assert torch.equal(got[0, mask[0]], shifted(x[0], (-1, 0, 1))[mask[0]])


@pytest.mark.parametrize("offsets", OFFSETS)
def test_shift_does_not_cross_packed_sequences(offsets: tuple[int, ...]) -> None:
    lengths = [4, 1, 0, 6]
    x = tokens(1, T)
    got = shift_tokens(x, offsets, TokenLayout.of(x, causal=False, packing=Packing.from_lengths(lengths)))
    assert torch.equal(got[0], torch.cat([shifted(piece, offsets) for piece in x[0].split(lengths)]))


@pytest.mark.parametrize("norm_position", ["pre", "post", "rezero"])
@pytest.mark.parametrize("splits", [[1] * T, [2, 1, 8], [3, 3, 3, 2]])
@pytest.mark.parametrize("offsets", CAUSAL_OFFSETS)
def test_shift_streams(offsets: tuple[int, ...], splits: list[int], norm_position: str) -> None:
    branch = shaken(ResidualBranch(nn.Identity(), DIM, norm_position=norm_position, token_shift=offsets))
    x = tokens()
    expected = branch(x, TokenLayout.of(x, causal=True), None, None)
    state = branch.new_state(B, max_length=None, device=None, dtype=torch.float64)
    assert state.recent.shape == (B, max(offsets), DIM)
    bounds = torch.tensor([0, *splits]).cumsum(0).tolist()
    for start, stop in pairwise(bounds):
        piece = x[:, start:stop]
        rows = TokenLayout.of(piece, causal=True, start=torch.full((B,), start))
        out, state = branch.extend(piece, rows, state)
        assert torch.equal(out, expected[:, start:stop])


def test_shift_streams_rows_of_different_length() -> None:
    branch = shaken(ResidualBranch(nn.Identity(), DIM, norm_position="rezero", token_shift=(2, 0, 1)))
    x, seen = tokens(), [torch.empty(0, DIM, dtype=torch.float64)] * B
    state, start = branch.new_state(B, max_length=None, device=None, dtype=torch.float64), torch.zeros(B).long()
    for lengths in ([1, 3], [0, 2], [4, 0], [2, 1], [1, 1]):
        mask = lengths_to_mask(lengths, max(lengths))
        piece = x[:, : max(lengths)].masked_fill(~mask[..., None], float("nan"))
        rows = TokenLayout.of(piece, causal=True, key_mask=mask, start=start)
        out, state = branch.extend(piece, rows, state)
        for b, length in enumerate(lengths):
            seen[b] = torch.cat([seen[b], piece[b, :length]])
            assert torch.equal(out[b, :length], shifted(seen[b], (2, 0, 1))[len(seen[b]) - length :])
        start = start + torch.tensor(lengths)


def test_features_left_over_stay() -> None:
    x = tokens(dim=7)
    got = shift_tokens(x, (1, 2), TokenLayout.of(x, causal=True))
    assert torch.equal(got[..., 6], x[..., 6])
    assert torch.equal(got[..., :6], torch.stack([shifted(row, (1, 2)) for row in x[..., :6]]))


@pytest.mark.parametrize("shift", [(), (0, 1)])
def test_hidden_nan_stays_out_of_every_gradient(shift: tuple[int, ...]) -> None:
    mask = lengths_to_mask([T, 6], T)
    x = tokens().masked_fill(~mask[..., None], float("nan"))
    for layer in (attention(True), shaken(FeedForward(DIM)), shaken(ProductKeyMemory(DIM, num_keys=3))):
        branch = shaken(ResidualBranch(layer, DIM, token_shift=shift))
        out = branch(x, TokenLayout.of(x, causal=True, key_mask=mask), None, None)
        for name, grad in gradients(out[mask], leaves(branch)).items():
            assert grad.isfinite().all(), f"{type(layer).__name__} {name}"
