"""Options of `performer`, as in `test_options`, and how its features are drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from option_cases import (
    B,
    D,
    E,
    H,
    T,
    assert_same,
    build,
    by_weights,
    checks,
    differ,
    inputs,
    kernel_attention,
    option_test,
    scores,
    softmax_attention,
)
from torch import Tensor

from longspan import AttentionConfig, ModelConfig, Transformer, build_mechanism
from longspan.mechanisms.feature_maps import ACTIVATIONS
from longspan.mechanisms.performer import random_feature_mechanisms


def favor(x: Tensor, w: Tensor) -> Tensor:
    x = x * x.shape[-1] ** -0.25
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp()


@checks("performer", "phantom")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("performer", epsilon=0.01, phantom=0.05)
    plain = build("performer", epsilon=0.01)
    plain.load_state_dict(mechanism.state_dict())
    w = mechanism.feature_map.projection
    largest = (k * D**-0.25 @ w.T).amax(-1).cummax(1).values  # (B, T, H)
    query = (favor(q, w) * (-(q * D**-0.25 @ w.T).amax(-1, keepdim=True)).exp()) + 0.01
    for t in (0, 1, T - 1):
        keys = favor(k[:, : t + 1], w) * (-largest[:, t, None, :, None]).exp() + 0.01
        weights = torch.einsum("bhm,bshm->bsh", query[:, t], keys)
        den = weights.sum(1) + 0.05 * query[:, t].sum(-1)
        expected = torch.einsum("bsh,bshe->bhe", weights, v[:, : t + 1]) / den[..., None]
        assert_same(mechanism(q, k, v, causal=True)[:, t], expected)
    assert_same(mechanism(q, k, v), plain(q, k, v))  # Causal only.
    with pytest.raises(ValueError, match="must not be negative"):
        build("performer", epsilon=0.01, phantom=-0.05)


@checks("performer", "num_features")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("performer", num_features=11)
    w = mechanism.feature_map.projection
    assert w.shape == (11, D)
    assert mechanism.new_state(B).kv.shape == (B, H, 11, E)
    for causal in (False, True):
        assert_same(mechanism(q, k, v, causal=causal), kernel_attention(favor(q, w), favor(k, w), v, causal))


@pytest.mark.parametrize("dim", [1, 5, 128])
def test_performer_default_number_of_features(dim: int) -> None:
    assert len(build_mechanism("performer", 1, dim).feature_map.projection) == 256


# Householder's Q alone leans to one side (Mezzadri, 2007): each column needs the sign of R's diagonal.
def test_more_features_come_nearer_to_softmax() -> None:
    q, k, v = (0.5 * x for x in inputs())
    exact = softmax_attention(q, k, v)
    errors = [(build("performer", num_features=m)(q, k, v) - exact).abs().mean().item() for m in (10, 4000)]
    assert errors[1] < errors[0] / 5  # Like 1/√M, a factor of 20.


@checks("performer", "kernel")
def _() -> None:
    q, k, v = inputs()
    for kernel in (*ACTIVATIONS, lambda x: x.square() + x.abs()):
        mechanism = build("performer", kernel=kernel)
        act, w = ACTIVATIONS.get(kernel, kernel), mechanism.feature_map.projection
        fq, fk = (act(x * D**-0.25 @ w.T) + 1e-3 for x in (q, k))
        # elu, silu and gelu have a sign, so their normalizer may come near zero and lose digits.
        expected = kernel_attention(fq, fk, v)
        torch.testing.assert_close(mechanism(q, k, v), expected, atol=1e-7, rtol=1e-7)
    softmax, relu = build("performer"), build("performer", kernel="relu")
    differ(softmax(q, k, v), relu(q, k, v))


@checks("performer", "projection")
def _() -> None:
    q, k, v = inputs()
    bare = build("performer", projection=False)
    assert_same(bare(q, k, v, causal=True), build("linear", feature_map="softmax")(q, k, v, causal=True))
    relu = build("performer", projection=False, kernel="relu")
    fq, fk = (F.relu(x * D**-0.25) + 1e-3 for x in (q, k))
    assert_same(relu(q, k, v, causal=True), kernel_attention(fq, fk, v, True))
    assert relu.new_state(B).kv.shape == (B, H, D, E)
    assert not any("projection" in name for name in relu.state_dict())
    relu.redraw()  # Nothing to draw: states stay good.
    relu.read(build("performer", projection=False, kernel="relu").new_state(B, dtype=torch.float64), q)


@checks("performer", "row_norms")
def _() -> None:
    torch.manual_seed(0)
    unit = build("performer", head_dim=16, num_features=1024, row_norms="unit").feature_map.projection
    sampled = build("performer", head_dim=16, num_features=1024, row_norms="sampled").feature_map.projection
    torch.testing.assert_close(unit.norm(dim=1), torch.full((1024,), 4.0, dtype=torch.float64), atol=0, rtol=2**-8)
    squares = sampled.square().sum(1)  # χ² with 16 degrees of freedom: mean 16, variance 32
    assert abs(squares.mean() - 16) < 5 * (32 / 1024) ** 0.5
    assert abs(squares.var() - 32) < 8


@pytest.mark.parametrize("row_norms", ["sampled", "unit"])
def test_rows_are_orthogonal_in_blocks(row_norms: str) -> None:
    rows = build("performer", head_dim=16, num_features=40, row_norms=row_norms).feature_map.projection
    rows = rows / rows.norm(dim=1, keepdim=True)
    for block in rows.split(16):
        same_block = block @ block.T
        torch.testing.assert_close(same_block, torch.eye(len(block), dtype=torch.float64), atol=2**-7, rtol=0)
    assert (rows[:16] @ rows[16:32].T).abs().max() > 0.1, "blocks are independent of each other"


def test_directions_are_uniform() -> None:
    rows = build("performer", head_dim=4, num_features=4000, row_norms="unit").feature_map.projection
    assert rows.mean(0).abs().max() < 5 * 4000**-0.5
    assert rows.unflatten(0, (1000, 4)).mean(0).abs().max() < 5 * 1000**-0.5, "whatever the place in the block"


@checks("performer", "epsilon")
def _() -> None:
    """As performer-pytorch: the largest w·k is divided out of the keys, then epsilon is added to every feature."""
    q, k, v = inputs()
    mechanism = build("performer", epsilon=0.05)
    w = mechanism.feature_map.projection

    def old(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        largest_q = (q * D**-0.25 @ w.T).amax(-1, keepdim=True)
        largest_k = (k * D**-0.25 @ w.T).amax((1, 3), keepdim=True)
        return kernel_attention(favor(q, w) / largest_q.exp() + 0.05, favor(k, w) / largest_k.exp() + 0.05, v)

    assert_same(mechanism(q, k, v), old(q, k, v))
    differ(mechanism(q, k, v), kernel_attention(favor(q, w), favor(k, w), v))
    causal = mechanism(q, k, v, causal=True)
    for t in range(T):
        assert_same(causal[:, t : t + 1], old(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1]))
    relu = build("performer", kernel="relu", epsilon=0.5)
    w = relu.feature_map.projection
    assert_same(relu(q, k, v), kernel_attention(*(F.relu(x * D**-0.25 @ w.T) + 0.5 for x in (q, k)), v))


@checks("performer", "redraw_interval")
def _() -> None:
    mechanism = build("performer", redraw_interval=3).train()
    for call in range(1, 8):
        before = mechanism.feature_map.projection.clone()
        mechanism.count_forward()
        assert mechanism.draw == call // 3
        assert torch.equal(mechanism.feature_map.projection, before) == (call % 3 != 0)
    assert mechanism.counts.tolist() == [2, 1]
    frozen = build("performer", redraw_interval=None).train()
    before = frozen.feature_map.projection.clone()
    for _ in range(2000):
        frozen.count_forward()
    assert torch.equal(frozen.feature_map.projection, before)
    assert frozen.counts.tolist() == [0, 0]


@checks("performer", "normalize")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("performer", normalize="feature")
    w = mechanism.feature_map.projection
    keys = favor(k, w)
    query = (q * D**-0.25 @ w.T).softmax(-1)  # A query's features sum to one, and so do its weights over the keys.
    assert_same(mechanism(q, k, v), by_weights(scores(query, keys / keys.sum(1, keepdim=True)), v))
    relu = build("performer", kernel="relu", normalize="none")
    w = relu.feature_map.projection
    assert_same(relu(q, k, v), by_weights(scores(*(F.relu(x * D**-0.25 @ w.T) + 1e-3 for x in (q, k))), v))


def test_eval_never_redraws() -> None:
    mechanism = build("performer", redraw_interval=1).eval()
    before = mechanism.feature_map.projection.clone()
    for _ in range(5):
        mechanism.count_forward()
    assert torch.equal(mechanism.feature_map.projection, before)
    assert mechanism.counts.tolist() == [0, 0]


def test_a_forward_does_not_count_by_itself() -> None:
    """A layer that is recomputed runs forward twice: only `count_forward` counts."""
    mechanism = build("performer", redraw_interval=1).train()
    before = mechanism.feature_map.projection.clone()
    mechanism(*inputs(), causal=True)
    assert torch.equal(mechanism.feature_map.projection, before)


def test_counts_survive_a_state_dict() -> None:
    mechanism = build("performer", redraw_interval=3).train()
    for _ in range(5):
        mechanism.count_forward()
    resumed = build("performer", redraw_interval=3).train()
    resumed.load_state_dict(mechanism.state_dict())
    assert (resumed.draw, resumed.counts.tolist()) == (1, [1, 2])
    assert torch.equal(resumed.feature_map.projection, mechanism.feature_map.projection)
    resumed.count_forward()
    assert resumed.draw == 2
    assert mechanism.draw == 1
    # A state from before the checkpoint is still good after it.
    q, k, v = inputs()
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    loaded = build("performer")
    loaded.load_state_dict(mechanism.state_dict())
    assert_same(loaded.read(state, q), mechanism.read(state, q))


def test_redraw_with_a_generator_is_repeatable() -> None:
    draws = []
    for _ in range(2):
        mechanism = build("performer")
        before = mechanism.feature_map.projection.clone()
        mechanism.redraw(torch.Generator().manual_seed(3))
        differ(mechanism.feature_map.projection, before)
        draws.append(mechanism.feature_map.projection)
    assert torch.equal(*draws)


def test_a_model_counts_the_forwards_of_every_part() -> None:
    part = {"mechanism": "performer", "num_heads": 1, "redraw_interval": 2}
    parts = [part, {"mechanism": "softmax", "num_heads": 1}]
    config = AttentionConfig(num_heads=2, mechanism={"mechanism": "split", "parts": parts})
    model = Transformer(ModelConfig(dim=8, depth=2, attention=config)).train()
    for _ in range(2):
        model(torch.randn(1, 3, 8))
    assert [m.counts.tolist() for m in random_feature_mechanisms(model)] == [[1, 0], [1, 0]]
    model.eval()(torch.randn(1, 3, 8))
    assert [m.draw for m in random_feature_mechanisms(model)] == [1, 1]


test_option = option_test(__name__)
