"""What topologies, norms and axial folding compute, and how their states are handled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_same, gradients, leaves, lengths_to_mask
from model_cases import shaken
from stack_cases import DIM, EXECUTIONS, B, Live, T, tokens, transformer
from torch import Tensor

from longspan import Packing
from longspan.layout import TokenLayout
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.layers import Attention, FeedForward
from longspan.models.residual import HyperConnection, ResidualBranch, Stack
from longspan.models.transformer import Transformer


def linear_branch(norm_position: str = "pre", **options: Any) -> ResidualBranch:
    return shaken(
        ResidualBranch(FeedForward(DIM, FeedForwardConfig(mult=1)), DIM, norm_position=norm_position, **options)
    )


@pytest.mark.parametrize("norm", ["layer", "rms", "scale"])
@pytest.mark.parametrize("norm_position", ["pre", "post", "rezero"])
def test_norm_positions_by_hand(norm_position: str, norm: str) -> None:
    branches, x = [linear_branch(norm_position, norm=norm) for _ in range(2)], tokens()
    expected = x
    for branch in branches:
        if norm_position == "pre":
            expected = expected + branch.layer(branch.norm(expected))
        elif norm_position == "post":
            expected = branch.norm(expected + branch.layer(expected))
        else:
            expected = expected + branch.weight * branch.layer(expected)
    assert_same(Stack(branches, DIM)(x, TokenLayout.of(x, causal=False)), expected)


@pytest.mark.parametrize("norm_position", ["pre", "rezero"])
def test_parallel_branches_by_hand(norm_position: str) -> None:
    branches, x = [linear_branch(norm_position) for _ in range(4)], tokens()
    pre = norm_position == "pre"
    f = [lambda y, b=b: b.layer(b.norm(y)) if pre else b.weight * b.layer(y) for b in branches]
    middle = x + f[0](x) + f[1](x)
    expected = middle + f[2](middle) + f[3](middle)
    for execution in EXECUTIONS["parallel"]:
        stack = Stack(branches, DIM, topology="parallel", execution=execution)
        assert_same(stack(x, TokenLayout.of(x, causal=False)), expected)


def test_what_parallel_branches_need() -> None:
    with pytest.raises(ValueError, match='residual="parallel" needs pairs of branches, got 3'):
        Stack([linear_branch() for _ in range(3)], DIM, topology="parallel")
    with pytest.raises(ValueError, match='post-norm needs residual="single"'):
        Stack([linear_branch("post") for _ in range(2)], DIM, topology="parallel")


def test_two_streams_by_hand() -> None:
    branches, x = [linear_branch() for _ in range(5)], tokens()
    f = [lambda y, b=branch: b.layer(b.norm(y)) for branch in branches]
    first, second = x, x
    first = first + f[0](second)
    second = second + f[1](first)
    first = first + f[2](second)
    second = second + f[3](first)
    first = first + f[4](second)
    for execution in EXECUTIONS["double"]:
        stack = Stack(branches, DIM, topology="double", execution=execution)
        assert_same(stack(x, TokenLayout.of(x, causal=False)), (first + second) / 2)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_connections_by_hand(streams: int) -> None:
    branches, x = [linear_branch() for _ in range(3)], tokens()
    stack = shaken(Stack(branches, DIM, topology="hyper", num_streams=streams))
    many = [x] * streams
    for branch, connection in zip(branches, stack.connections, strict=True):
        weight = 1 + connection.norm.offset
        normed = [y / (y.square().mean(-1, keepdim=True) + 1e-12).sqrt() * weight for y in many]
        mix = [
            connection.mix_scale * (y @ connection.dynamic_mix).tanh() + connection.static_mix[i]
            for i, y in enumerate(normed)
        ]
        share = [
            connection.out_scale * (y @ connection.dynamic_out).tanh() + connection.static_out[i]
            for i, y in enumerate(normed)
        ]
        mixed = [sum(mix[i][..., c, None] * many[i] for i in range(streams)) for c in range(streams + 1)]
        answer = branch.layer(branch.norm(mixed[0]))
        many = [mixed[1 + i] + share[i][..., None] * answer for i in range(streams)]
    assert_same(stack(x, TokenLayout.of(x, causal=False)), sum(many))


@pytest.mark.parametrize("streams", [1, 3])
def test_hyper_connections_begin_as_one_stream(streams: int) -> None:
    branches, x = [linear_branch() for _ in range(3)], tokens()
    rows = TokenLayout.of(x, causal=False)
    hyper = Stack(branches, DIM, topology="hyper", num_streams=streams).double()
    assert_same(hyper(x, rows), streams * Stack(branches, DIM)(x, rows))
    assert [int(c.static_mix[:, 0].argmax()) for c in hyper.connections] == [i % streams for i in range(3)]
    assert all(isinstance(c, HyperConnection) for c in hyper.connections)


def test_hyper_connections_need_a_stream() -> None:
    with pytest.raises(ValueError, match="num_streams must be at least 1, got 0"):
        Stack([linear_branch()], DIM, topology="hyper", num_streams=0)


@pytest.mark.parametrize("topology", EXECUTIONS)
def test_rezero_begins_as_the_identity(topology: str) -> None:
    config = ModelConfig(
        dim=DIM,
        depth=3,
        attention=AttentionConfig(num_heads=3),
        norm_position="rezero",
        final_norm=False,
        residual=topology,
        num_streams=2,
    )
    model, x = Transformer(config).double(), tokens()
    assert_same(model(x), 2 * x if topology == "hyper" else x)
    model(x).sum().backward()
    assert all(branch.weight.grad.abs() > 0 for branch in model.stack.branches)


def test_hidden_nan_stays_out_of_every_gradient() -> None:
    mask = lengths_to_mask([T, 4], T)
    x = tokens().masked_fill(~mask[..., None], float("nan"))
    cases = [("single", "pre"), ("single", "post"), ("single", "rezero"), ("double", "pre"), ("hyper", "pre")]
    cases += [("parallel", "pre"), ("parallel", "rezero")]
    for topology, norm_position in cases:
        model = transformer(topology, norm_position=norm_position, cross=None)
        out = model(x, key_mask=mask)
        assert_same(out[1:, :4], model(x[1:, :4]))
        for name, grad in gradients(out[mask], leaves(model)).items():
            assert grad.isfinite().all(), f"{topology} {norm_position} {name}"


# Axial folding.


def folded_by_definition(layer: Attention, x: Tensor, stride: int, **how: Any) -> Tensor:
    """Attention among the tokens of one sequence (1, T, dim) whose positions are equal modulo stride."""
    out = torch.zeros_like(x)
    for column in range(min(stride, x.shape[1])):
        out[:, column::stride] = layer(x[:, column::stride], **how)
    return out


def folding(stride: int, causal: bool, **options: Any) -> tuple[ResidualBranch, Callable[[Tensor], Tensor]]:
    config = AttentionConfig(**{"num_heads": 3, "rotary": "halves", **options})
    branch = shaken(ResidualBranch(Attention(DIM, config, causal=causal), DIM, norm_position="rezero", stride=stride))
    return branch, lambda x: folded_by_definition(branch.layer, x, stride)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stride", [2, 3, 5])
def test_folding_is_its_definition_for_any_length(stride: int, causal: bool) -> None:
    branch, expected = folding(stride, causal)
    for length in range(1, 14):
        x = tokens(length=length)
        assert_same(branch(x, TokenLayout.of(x, causal=causal), None, None), expected(x))


MECHANISMS: list[Any] = [
    "linear",
    {"mechanism": "local", "window": 2},
    {"mechanism": "linformer", "rank": 2, "max_length": 20},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=["linear", "local", "linformer"])
def test_folding_takes_any_mechanism(mechanism: Any, causal: bool) -> None:
    branch, expected = folding(3, causal, mechanism=mechanism)
    x = tokens(length=11)
    assert_same(branch(x, TokenLayout.of(x, causal=causal), None, None), expected(x))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("stride", [2, 3])
def test_folding_counts_real_tokens_when_causal(stride: int, side: str) -> None:
    branch, expected = folding(stride, causal=True)
    lengths = [11, 7, 1, 0, 6]
    mask = lengths_to_mask(lengths, 11, side)
    x = tokens(5, 11).masked_fill(~mask[..., None], float("nan"))
    out = branch(x, TokenLayout.of(x, causal=True, key_mask=mask), None, None)
    assert out.isfinite().all()
    for b in range(5):
        if lengths[b]:
            assert_same(out[b, mask[b]][None], expected(x[b, mask[b]][None]))


@pytest.mark.parametrize("mechanism", ["softmax", *MECHANISMS], ids=["softmax", "linear", "local", "linformer"])
@pytest.mark.parametrize("stride", [2, 3])
def test_folding_counts_slots_when_bidirectional(stride: int, mechanism: Any) -> None:
    branch, _ = folding(stride, causal=False, mechanism=mechanism)
    mask = torch.rand(4, 10) < 0.6
    mask[0, 0], mask[1], mask[2, 0] = False, True, True
    x = tokens(4, 10).masked_fill(~mask[..., None], float("nan"))
    out = branch(x, TokenLayout.of(x, causal=False, key_mask=mask), None, None)
    for b in range(4):
        for column in range(stride):
            piece, seen = x[b : b + 1, column::stride], mask[b : b + 1, column::stride]
            want = branch.layer(piece, key_mask=seen)
            assert_same(out[b, column::stride][seen[0]], want[0, seen[0]])


@pytest.mark.parametrize("causal", [False, True])
def test_folding_stays_inside_packed_sequences(causal: bool) -> None:
    branch, expected = folding(3, causal)
    lengths = [4, 1, 0, 8, 2]
    x = tokens(1, 15)
    out = branch(x, TokenLayout.of(x, causal=causal, packing=Packing.from_lengths(lengths)), None, None)
    assert_same(out, torch.cat([expected(piece) for piece in x.split(lengths, 1) if piece.shape[1]], 1))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("splits", [[1] * 13, [4, 1, 8], [2, 2, 3, 6]])
@pytest.mark.parametrize("mechanism", ["softmax", *MECHANISMS], ids=["softmax", "linear", "local", "linformer"])
def test_folding_streams(mechanism: Any, splits: list[int], grad: bool) -> None:
    branch, expected = folding(3, True, mechanism=mechanism)
    x, start = tokens(length=13), 0
    want = expected(x)
    with nullcontext() if grad else torch.no_grad():
        state = branch.new_state(B, max_length=13, device=None, dtype=torch.float64)
        for piece in x.split(splits, 1):
            before = state.clone()
            rows = TokenLayout.of(piece, causal=True, start=torch.full((B,), start))
            given, (out, state) = state, branch.extend(piece, rows, state)
            assert_same(out, want[:, start : start + piece.shape[1]])
            start += piece.shape[1]
            if grad:
                for name, tensor in given.tensors().items():
                    assert torch.equal(tensor, before.tensors()[name]), f"{name} was changed"


def test_folding_streams_rows_of_different_length() -> None:
    branch, expected = folding(3, causal=True)
    state = branch.new_state(B, max_length=None, device=None, dtype=torch.float64)
    seen, start = [tokens(1, 0), tokens(1, 0)], torch.zeros(B, dtype=torch.int64)
    for lengths in ([2, 5], [0, 1], [4, 0], [1, 1], [3, 2]):
        mask = lengths_to_mask(lengths, max(lengths))
        x = tokens(B, max(lengths)).masked_fill(~mask[..., None], float("nan"))
        out, state = branch.extend(x, TokenLayout.of(x, causal=True, key_mask=mask, start=start), state)
        for b, length in enumerate(lengths):
            seen[b] = torch.cat([seen[b], x[b : b + 1, :length]], 1)
            assert_same(out[b : b + 1, :length], expected(seen[b])[:, seen[b].shape[1] - length :])
        start = start + torch.tensor(lengths)


@pytest.mark.parametrize("mechanism", ["linear", {"mechanism": "local", "window": 2}], ids=["linear", "local"])
def test_a_streamed_token_costs_the_same_for_any_stride(mechanism: Any) -> None:
    def cost(stride: int) -> int:
        branch, _ = folding(stride, True, mechanism=mechanism)
        x = tokens(length=1)
        state = branch.new_state(B, max_length=None, device=None, dtype=torch.float64)
        with torch.no_grad(), Live() as live:
            branch.extend(x, TokenLayout.of(x, causal=True, start=state.length), state)
        return live.made

    assert cost(64) == cost(2) > 0


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 1, 0], slice(1, 3), torch.tensor([True, False, True])])
@pytest.mark.parametrize("topology", EXECUTIONS)
def test_states_select_their_rows(topology: str, index: Any) -> None:
    model = transformer(topology, cross=None, axial_stride=3)
    x = tokens(3)
    with torch.no_grad():
        _, state = model.extend(x[:, :5], model.new_state(3, max_length=T))
        out, after = model.extend(x[index, 5:], state.select(index))
    assert_same(out, model(x[index])[:, 5:])
    assert after.length.tolist() == [T] * len(x[index])


def test_states_take_rows_of_another() -> None:
    model = transformer("single", cross=None, axial_stride=3)
    x, y = tokens(3), tokens(1, 4)
    with torch.no_grad():
        _, state = model.extend(x[:, :7], model.new_state(3))
        _, row = model.extend(y[:, :2], model.new_state(1))
        state = state.put([1], row)
        assert state.length.tolist() == [7, 2, 7]
        piece = torch.cat([x[:1, 7:], y[:, 2:], x[2:, 7:]])
        out, _ = model.extend(piece, state)
        assert_same(out[[0, 2]], model(x)[[0, 2], 7:])
        assert_same(out[1:2], model(y)[:, 2:])
    with pytest.raises(ValueError, match="rows must be a StackState"):
        state.put([1], row.branches[0])
