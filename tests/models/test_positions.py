"""Positions: relative where they promise it, distinct in low precision, with an end that is told or without one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import assert_same, gradients, leaves
from torch import Tensor

from longspan import build_mechanism
from longspan.models.config import AttentionConfig, LegacyConfig, ModelConfig
from longspan.models.positions import (
    AxialPositions,
    DynamicPositionBias,
    LearnedPositions,
    Rotary,
    SinusoidalPositions,
)
from longspan.models.transformer import LanguageModel

B, T, H, D = 2, 7, 3, 10


def at(*positions: int) -> Tensor:
    return torch.tensor([positions])


def vectors(length: int = T, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, length, H, D, dtype=dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("base", [10000.0, 50.0])
@pytest.mark.parametrize("rotary_dim", [D, 6])
def test_rotary_by_hand(interleaved: bool, base: float, rotary_dim: int) -> None:
    x, positions = vectors(4), [0, 3, 1, 500]
    got = Rotary(rotary_dim, base, interleaved=interleaved)(x, at(*positions))
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    for t, position in enumerate(positions):
        for i in range(rotary_dim // 2):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
            a, b = x[:, t, :, first], x[:, t, :, second]
            angle = position * base ** (-2 * i / rotary_dim)
            assert_same(got[:, t, :, first], a * math.cos(angle) - b * math.sin(angle))
            assert_same(got[:, t, :, second], b * math.cos(angle) + a * math.sin(angle))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    rotary = Rotary(D, interleaved=interleaved)
    q, k = vectors(1), vectors(1)

    def score(i: int, j: int) -> Tensor:
        return (rotary(q, at(i)) * rotary(k, at(j))).sum(-1)

    for i, j, shift in [(5, 2, 100), (2, 5, 31), (0, 0, 7), (9, 1, 1000)]:
        assert_same(score(i, j), score(i + shift, j + shift))
    assert not torch.allclose(score(5, 2), score(5, 3))
    assert not torch.allclose(score(5, 2), score(2, 5))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_keeps_lengths_and_position_zero(interleaved: bool) -> None:
    rotary, x = Rotary(D, interleaved=interleaved), vectors()
    position = torch.arange(T)[None] * 1000
    assert_same(rotary(x, position).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotary(x, torch.zeros(1, T, dtype=torch.int64)), x)


def test_rotary_takes_a_position_for_each_row() -> None:
    rotary, x = Rotary(D), vectors()
    position = torch.stack([torch.arange(T), torch.arange(T) + 5])
    expected = torch.cat([rotary(x[b : b + 1], position[b : b + 1]) for b in range(B)])
    assert torch.equal(rotary(x, position), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_are_float32_whatever_the_dtype(dtype: torch.dtype) -> None:
    position = torch.arange(4096)[None]
    rows = Rotary(64)(torch.ones(1, 4096, 1, 64, dtype=dtype), position)
    assert rows.dtype == dtype
    assert len(rows[0, :, 0].float().unique(dim=0)) == 4096
    assert len(SinusoidalPositions(64)(position)[0].to(dtype).float().unique(dim=0)) == 4096
    # Not only distinct: as near to the truth as the dtype can say.
    truth = Rotary(64)(torch.ones(1, 4096, 1, 64, dtype=torch.float64), position)
    assert (rows.double() - truth).abs().max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_million_positions_away_scores_are_the_same(interleaved: bool) -> None:
    rotary = Rotary(D, interleaved=interleaved)
    q, k = vectors(dtype=torch.float32), vectors(dtype=torch.float32)
    near, far = at(*range(T)), at(*range(1_000_000, 1_000_000 + T))
    scores = [torch.einsum("bthd,bshd->bhts", rotary(q, p), rotary(k, p)) for p in (near, far)]
    assert (scores[0] - scores[1]).abs().max() < 1e-5
    sinusoids = SinusoidalPositions(D)
    exact = 1_000_003 * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    assert (sinusoids(at(1_000_003))[0, 0] - torch.cat([exact.sin(), exact.cos()])).abs().max() < 1e-6


def test_a_model_in_bfloat16_tells_4096_positions_apart() -> None:
    for positions in ("sinusoidal", "learned"):
        config = ModelConfig(
            dim=64, depth=1, attention=AttentionConfig(), vocab_size=3, positions=positions, max_length=4096
        )
        model = LanguageModel(config).bfloat16()
        rows = model.positions(torch.arange(4096)[None])[0].bfloat16().float()
        assert len(rows.unique(dim=0)) == 4096


def test_sinusoids_by_hand_with_any_base() -> None:
    for base in (10000.0, 30.0):
        got = SinusoidalPositions(6, base)(at(0, 1, 17))[0]
        for t, position in enumerate((0, 1, 17)):
            angle = [position * base ** (-2 * i / 6) for i in range(3)]
            expected = torch.tensor([*map(math.sin, angle), *map(math.cos, angle)])
            torch.testing.assert_close(got[t], expected, atol=2e-6, rtol=0)


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="even dim, got 7"):
        SinusoidalPositions(7)
    with pytest.raises(ValueError, match="must be even, got 5"):
        Rotary(5)


def test_learned_positions_are_rows_of_a_table() -> None:
    positions = LearnedPositions(5, 9)
    assert torch.equal(positions(at(8, 0, 3)), positions.table[[8, 0, 3]][None])
    assert positions.reach == 9


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 2), (7,)])
def test_axial_positions_are_the_sum_of_their_tables_over_the_grid(shape: tuple[int, ...]) -> None:
    positions = AxialPositions(6, shape).double()
    total = math.prod(shape)
    assert positions.reach == total
    assert [tuple(table.shape) for table in positions.tables] == [(size, 6) for size in shape]
    grid = torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(total, len(shape))
    expected = sum(table[grid[:, axis]] for axis, table in enumerate(positions.tables))
    assert_same(positions(torch.arange(total)[None])[0], expected)


def test_a_million_axial_positions_cost_two_small_tables() -> None:
    positions = AxialPositions(8, (1024, 1024))
    assert positions.reach == 1024**2
    assert sum(p.numel() for p in positions.parameters()) == 2 * 1024 * 8
    last = positions(at(1024**2 - 1))[0, 0]
    torch.testing.assert_close(last, positions.tables[0][-1] + positions.tables[1][-1])


def test_axial_positions_do_not_begin_again() -> None:
    # `check` cannot look at positions on every device: the lookup itself must refuse.
    with pytest.raises(IndexError):
        AxialPositions(6, (3, 5))(at(15))


def test_axial_shapes_that_are_none_are_refused() -> None:
    for shape in ((), (3, 0)):
        with pytest.raises(ValueError, match="an axial shape is one or more positive numbers"):
            AxialPositions(4, shape)


def model(positions: str, rotary: str = "none") -> LanguageModel:
    config = ModelConfig(
        dim=12,
        depth=1,
        attention=AttentionConfig(num_heads=3, rotary=rotary),
        feed_forward=None,
        positions=positions,
        max_length=8 if positions == "learned" else None,
        axial_shape=(2, 4) if positions == "axial" else None,
        causal=True,
        vocab_size=5,
    )
    return LanguageModel(config).double().eval()


@pytest.mark.parametrize("positions", ["learned", "axial"])
def test_tables_refuse_what_lies_beyond_them(positions: str) -> None:
    m, tokens = model(positions), torch.randint(5, (B, 9))
    assert m(tokens[:, :8]).isfinite().all()
    text = r"9 tokens are more than the 8 positions of this model.*larger max_length.*rotary or sinusoidal"
    with pytest.raises(ValueError, match=text):
        m(tokens)
    with pytest.raises(ValueError, match=text):
        m.new_state(B, max_length=9)
    _, state = m.extend(tokens[:, :5], m.new_state(B))
    with pytest.raises(ValueError, match=text):
        m.extend(tokens[:, :4], state)
    out, state = m.extend(tokens[:, :3], state)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match=text):
        m.extend(tokens[:, :1], state)


@pytest.mark.parametrize("positions", ["learned", "axial"])
def test_padding_beyond_a_table_is_no_position(positions: str) -> None:
    m, tokens = model(positions), torch.randint(5, (B, 11))
    mask = torch.zeros(B, 11, dtype=torch.bool)
    mask[0, :8], mask[1, 6:] = True, True
    out = m(tokens, key_mask=mask)
    assert_same(out[1:, 6:], m(tokens[1:, 6:]))
    streamed, state = m.extend(tokens, m.new_state(B), key_mask=mask)
    assert_same(streamed[mask], out[mask])
    # Row 0 is full; the other goes on without it.
    more = torch.tensor([[False], [True]])
    streamed, _ = m.extend(tokens[:, :1], state, key_mask=more)
    assert_same(streamed[1, -1], m(torch.cat([tokens[1:, 6:], tokens[1:, :1]], 1))[0, -1])


@pytest.mark.parametrize(("positions", "rotary"), [("sinusoidal", "none"), ("none", "halves"), ("none", "none")])
def test_formulas_have_no_end(positions: str, rotary: str) -> None:
    m = model(positions, rotary)
    assert m(torch.randint(5, (1, 5000))).isfinite().all()


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "axial"])
def test_what_is_added_tells_positions_apart(positions: str) -> None:
    m = model(positions)
    same = torch.zeros(1, 8, dtype=torch.int64)
    rows = m(same)[0]
    assert all(not torch.allclose(rows[i], rows[j]) for i in range(8) for j in range(i))


def test_without_positions_nothing_is_added() -> None:
    m = model("none")
    rows = m(torch.zeros(1, 8, dtype=torch.int64))[0]
    assert_same(rows, rows[:1].expand_as(rows))


def test_position_base_arrives() -> None:
    config = ModelConfig(dim=12, depth=1, attention=AttentionConfig(num_heads=3), vocab_size=5)
    far = LanguageModel(replace(config, positions="sinusoidal", legacy=LegacyConfig(position_base=10.0)))
    assert torch.equal(far.positions(at(3)), SinusoidalPositions(12, 10.0)(at(3)))


def test_dynamic_bias_is_a_network_of_the_distance_without_its_sign() -> None:
    bias = DynamicPositionBias(H, 4).double()
    distance = torch.arange(-5, 6)
    got = bias(distance)
    assert got.shape == (H, 11)
    assert_same(got, got.flip(1))
    first, second, last = bias.layers
    x = torch.tensor([[3.0]], dtype=torch.float64)
    expected = last(torch.nn.functional.silu(second(torch.nn.functional.silu(first(x)))))[0]
    assert_same(got[:, 2], expected)
    assert not torch.allclose(got[:, 0], got[:, 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{"window": 4}, {"window": 3, "look_back": 1, "look_ahead": 1}])
def test_dynamic_bias_is_added_to_the_scores_of_local_attention(options: dict[str, int], causal: bool) -> None:
    bias = DynamicPositionBias(H, 4).double()
    mechanism = build_mechanism("local", H, D, bias=bias, **options).double()
    q, k, v = vectors(), vectors(), vectors()
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    if "look_back" in options:
        near = (i // 3 - j // 3).abs() <= 1
    else:
        near = (i - j).abs() < 4
    if causal:
        near = near & (j <= i)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5 + bias((i - j).flatten()).view(H, T, T)
    weights = scores.masked_fill(~near, float("-inf")).softmax(-1)
    out = mechanism(q, k, v, causal=causal)
    assert_same(out, torch.einsum("bhij,bjhe->bihe", weights, v))
    for name, grad in gradients(out, leaves(bias)).items():
        if name != "layers.2.bias":  # The same number for all keys of a head changes no softmax.
            assert grad.abs().sum() > 0, name
    if causal:
        state = mechanism.new_state(B, dtype=torch.float64)
        for t in range(T):
            step, state = mechanism.step(state, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
            assert_same(step, out[:, t : t + 1])
