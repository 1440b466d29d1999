"""Layers and models: caches, padding, loss, generation, half precision."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from longspan.mindspore import DynamicPositionBias, LocalMHA, LocalTransformer
from longspan.mindspore.transformer import sample

B, DIM, W, TOKENS = 2, 20, 5, 19
LAYER = {"dim": DIM, "window_size": W, "dim_head": 6, "heads": 3}
MODEL = {"num_tokens": TOKENS, "dim": DIM, "depth": 2, "max_seq_len": 41, "local_attn_window_size": W}
MODEL |= {"dim_head": 6, "heads": 3}
CACHED: dict[str, dict[str, Any]] = {
    "rotary": {},
    "blocks": {"exact_windowsize": False},
    "far": {"look_backward": 2},
    "far_blocks": {"look_backward": 2, "exact_windowsize": False},
    "own_block": {"look_backward": 0, "exact_windowsize": False},
    "xpos": {"use_xpos": True, "prenorm": True},
    "rmsnorm": {"qk_rmsnorm": True, "qk_scale": 5},
    "shared": {"shared_qk": True},
    "gates": {"gate_values_per_head": True, "use_rotary_pos_emb": False},
}


def ids(n: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).integers(0, TOKENS, (B, n)))


def vectors(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, n, DIM)).astype(np.float32)


def disturbed(cell: nn.Cell) -> nn.Cell:
    """Weights that are zero or one at first would hide mistakes."""
    random = np.random.default_rng(3)
    for weight in cell.get_parameters():
        weight.set_data(weight + Tensor(0.1 * random.standard_normal(weight.shape).astype(np.float32)))
    return cell.set_train(False)


def steps(cell: LocalMHA, x: Tensor, prefix: int, bias: Tensor | None = None) -> np.ndarray:
    out, cache = cell(x[:, :prefix], attn_bias=bias, return_cache=True)
    outs = [out.asnumpy()]
    for at in range(prefix, x.shape[1]):
        out, cache = cell(x[:, at : at + 1], attn_bias=bias, cache=ms.mutable(cache), return_cache=True)
        outs.append(out.asnumpy())
    return np.concatenate(outs, 1)


@pytest.mark.parametrize("prefix", [1, 13])
@pytest.mark.parametrize("name", CACHED)
def test_cached_is_uncached(name: str, prefix: int) -> None:
    cell = disturbed(LocalMHA(**LAYER, causal=True, **CACHED[name]))
    x = Tensor(vectors(31))
    np.testing.assert_allclose(steps(cell, x, prefix), cell(x).asnumpy(), atol=3e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_cached_is_uncached_with_any_bias(exact: bool) -> None:
    """A table that is no function of the distance: rows and columns are those of the block."""
    cell = disturbed(LocalMHA(**LAYER, causal=True, exact_windowsize=exact))
    bias = Tensor(np.random.default_rng(5).standard_normal((3, W, 2 * W)).astype(np.float32))
    x = Tensor(vectors(23))
    np.testing.assert_allclose(steps(cell, x, 3, bias), cell(x, attn_bias=bias).asnumpy(), atol=3e-6)


def test_cached_is_uncached_in_both_modes(mode: str) -> None:
    cell = disturbed(LocalMHA(**LAYER, causal=True))
    x = Tensor(vectors(23))
    np.testing.assert_allclose(steps(cell, x, 3), cell(x).asnumpy(), atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"use_dynamic_pos_bias": True}, {"num_residual_streams": 1, "use_xpos": True}])
def test_a_model_with_a_cache_is_one_without(options: dict[str, Any]) -> None:
    model, x = disturbed(LocalTransformer(**MODEL, **options)), ids(41)
    whole = model(x).asnumpy()
    out, cache = model(x[:, :7], return_cache=True)
    np.testing.assert_allclose(out.asnumpy(), whole[:, :7], atol=1e-5)
    for at in range(7, 41):
        # All tokens so far, as local-attention has it, or the new one alone.
        given = x[:, : at + 1] if at % 2 else x[:, at : at + 1]
        out, cache = model(given, cache=cache, return_cache=True)
        np.testing.assert_allclose(out.asnumpy(), whole[:, at : at + 1], atol=1e-5)
    assert cache[0][0].shape[-2] == 2 * W  # no more than it can see


@pytest.mark.parametrize("options", [{}, {"exact_windowsize": False, "use_dynamic_pos_bias": True}])
def test_generation_with_a_cache_is_generation_without(options: dict[str, Any]) -> None:
    """Past max_seq_len too, where only the last tokens are read."""
    model, prime = disturbed(LocalTransformer(**{**MODEL, **options, "max_seq_len": 17})).set_train(True), ids(3)
    cached = model.generate(prime, 19, temperature=0.0)
    assert cached.shape == (B, 19)
    assert cached.dtype == prime.dtype
    again = model.generate(prime, 19, temperature=0.0, use_kv_cache=False)
    np.testing.assert_array_equal(cached.asnumpy(), again.asnumpy())
    assert len(np.unique(cached.asnumpy())) > 2
    assert model.training


def test_generation_in_graph_mode_compiles_a_step_once(mode: str) -> None:
    model, prime = disturbed(LocalTransformer(**MODEL)), ids(3)
    found = model.generate(prime, 13, temperature=0.0).asnumpy()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    np.testing.assert_array_equal(found, model.generate(prime, 13, temperature=0.0).asnumpy())
    assert len(model.compile_cache) == (0 if mode == "pynative" else 2)


def test_sampling_keeps_to_the_best() -> None:
    logits = np.random.default_rng(0).standard_normal((B, TOKENS)).astype(np.float32)
    best = np.argsort(logits, -1)[:, -5:]  # (1 − 0.7) · 19
    rows = Tensor(np.repeat(logits, 2000, 0))
    drawn = sample(rows, 0.7, 0.7).asnumpy().reshape(B, 2000)
    for row, scores, kept in zip(drawn, logits, best, strict=True):
        share = np.exp(scores[kept] / 0.7) / np.exp(scores[kept] / 0.7).sum()
        found = np.array([(row == token).mean() for token in kept])
        np.testing.assert_allclose(found, share, atol=0.05)  # over four standard deviations
    for temperature, thres in ((0.0, 0.0), (1e-4, 0.0), (1.0, 1.0)):
        np.testing.assert_array_equal(sample(Tensor(logits), temperature, thres).asnumpy()[:, 0], logits.argmax(-1))


def test_generation_uses_its_options() -> None:
    model, prime = disturbed(LocalTransformer(**MODEL)), ids(3)
    best = model.generate(prime, 7, temperature=0.0).asnumpy()
    np.testing.assert_array_equal(best, model.generate(prime, 7, filter_thres=1.0).asnumpy())
    np.testing.assert_array_equal(best, model.generate(prime, 7, temperature=1e-5, filter_thres=0.0).asnumpy())
    assert not np.array_equal(best, model.generate(prime, 7, temperature=9.0, filter_thres=0.0).asnumpy())


# A bidirectional mask keeps slots: there padding on the left moves the blocks.
@pytest.mark.parametrize(("causal", "left"), [(True, True), (True, False), (False, False)])
def test_hidden_tokens_change_nothing(causal: bool, left: bool) -> None:
    """NaN in the hidden tokens of a layer: as if they were not there, in the weights' gradients too."""
    cell = disturbed(LocalMHA(**LAYER, causal=causal, prenorm=True, exact_windowsize=False, gate_values_per_head=True))
    whole, n, kept = vectors(13), 13, slice(4, 13) if left else slice(0, 9)
    mask = np.zeros((B, n), bool)
    mask[:, kept] = True
    short = Tensor(whole[:, kept])
    whole[~mask] = np.nan

    def padded(x: Tensor) -> Tensor:
        return (cell(x, mask=Tensor(mask))[:, kept] ** 2).sum()

    def plain(x: Tensor) -> Tensor:
        return (cell(x) ** 2).sum()

    weights = cell.trainable_params()
    one, two = (ms.value_and_grad(f, 0, weights)(x) for f, x in ((padded, Tensor(whole)), (plain, short)))
    np.testing.assert_allclose(one[0].asnumpy(), two[0].asnumpy(), rtol=1e-6)
    np.testing.assert_allclose(one[1][0].asnumpy()[:, kept], two[1][0].asnumpy(), atol=2e-5)
    assert np.all(one[1][0].asnumpy()[~mask] == 0)
    for a, b in zip(one[1][1], two[1][1], strict=True):
        np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"exact_windowsize": False, "use_dynamic_pos_bias": True}])
def test_padding_on_either_side_is_a_shorter_row(options: dict[str, Any]) -> None:
    model, x, mask = disturbed(LocalTransformer(**MODEL, **options)), ids(13), padded_on_either_side()
    out = model(x, mask=mask).asnumpy()
    np.testing.assert_allclose(out[:1, 4:], model(x[:1, 4:]).asnumpy(), atol=1e-5)
    np.testing.assert_allclose(out[1:, :9], model(x[1:, :9]).asnumpy(), atol=1e-5)
    loss = model(x, mask=mask, return_loss=True).asnumpy()
    parts = [model(x[:1, 4:], return_loss=True).asnumpy(), model(x[1:, :9], return_loss=True).asnumpy()]
    np.testing.assert_allclose(loss, np.mean(parts), atol=1e-5)


def test_modes_agree_on_a_loss_with_padding() -> None:
    model, x, mask = disturbed(LocalTransformer(**MODEL)), ids(13), padded_on_either_side()

    def loss(x: Tensor) -> Tensor:
        return model(x, mask=mask, return_loss=True)

    plain = ms.value_and_grad(loss, None, model.trainable_params())(x)
    ms.set_context(mode=ms.GRAPH_MODE)
    compiled = ms.value_and_grad(loss, None, model.trainable_params())(x)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    np.testing.assert_allclose(plain[0].asnumpy(), compiled[0].asnumpy(), atol=1e-6)
    for one, two in zip(plain[1], compiled[1], strict=True):
        np.testing.assert_allclose(one.asnumpy(), two.asnumpy(), atol=1e-5)


def padded_on_either_side() -> Tensor:
    mask = np.ones((B, 13), bool)
    mask[0, :4] = False
    mask[1, 9:] = False
    return Tensor(mask)


def test_vectors_with_nan_in_padding() -> None:
    model = disturbed(LocalTransformer(**{**MODEL, "num_tokens": None}))
    x = vectors(13)
    mask = np.tile(np.arange(13) < 9, (B, 1))
    short = model(Tensor(x[:, :9])).asnumpy()
    x[~mask] = np.nan
    np.testing.assert_allclose(model(Tensor(x), mask=Tensor(mask)).asnumpy()[:, :9], short, atol=1e-5)
    with pytest.raises(ValueError, match="num_tokens is None"):
        model(Tensor(x), return_loss=True)
    with pytest.raises(ValueError, match="num_tokens is None"):
        model.generate(ids(3), 1)


def test_the_loss_is_the_mean_over_labels_that_count() -> None:
    model, x = disturbed(LocalTransformer(**MODEL, ignore_index=7)), ids(13).asnumpy()
    x[:, 5] = 7
    logits = model(Tensor(x[:, :-1])).asnumpy().astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = -np.take_along_axis(logs, x[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(model(Tensor(x), return_loss=True).asnumpy(), picked[x[:, 1:] != 7].mean(), atol=1e-5)


def test_ignored_tokens_may_be_no_tokens() -> None:
    model, x = disturbed(LocalTransformer(**MODEL)), ids(13).asnumpy()
    x[:, 9:] = -1
    short = model(Tensor(x[:, :9]), return_loss=True).asnumpy()
    np.testing.assert_allclose(model(Tensor(x), return_loss=True).asnumpy(), short, atol=1e-6)


class Mixer(nn.Cell):
    """Something that sees the whole sequence, causally."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(DIM, DIM)

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(ops.cumsum(x, 1))


@pytest.mark.parametrize("streams", [1, 4])
def test_global_layers(streams: int) -> None:
    plain = LocalTransformer(**MODEL, num_residual_streams=streams)
    options = {"global_attn_layer": Mixer(), "num_residual_streams": streams}
    model = disturbed(LocalTransformer(**MODEL, **options, layers_insert_global_attn=(2,)))
    names = set(model.parameters_dict()) - set(plain.parameters_dict())
    assert {"global_layers.1.branch.inner.weight", "global_layers.1.branch.inner.bias"} <= names
    assert all(name.startswith("global_layers.1.") for name in names)
    every = LocalTransformer(**MODEL, **options)
    assert {"global_layers.0.branch.inner.weight", "global_layers.1.branch.inner.weight"} <= set(
        every.parameters_dict()
    )
    x = ids(13)
    before = model(x).asnumpy()
    assert model(x, return_cache=True)[1] is None
    cached, again = (model.generate(x, 3, temperature=0.0, use_kv_cache=use) for use in (True, False))
    np.testing.assert_array_equal(cached.asnumpy(), again.asnumpy())
    weight = model.global_layers[1].branch.inner.weight
    weight.set_data(weight + 1)
    assert not np.allclose(model(x).asnumpy(), before)
    with pytest.raises(ValueError, match="must be layers from 1 to 2"):
        LocalTransformer(**MODEL, **options, layers_insert_global_attn=(3,))


@pytest.mark.parametrize("options", [{"attn_dropout": 0.5}, {"ff_dropout": 0.5}])
def test_dropout_acts_in_training_alone(options: dict[str, float]) -> None:
    model, x = disturbed(LocalTransformer(**MODEL, **options)), ids(13)
    still = model(x).asnumpy()
    np.testing.assert_array_equal(still, model(x).asnumpy())
    model.set_train(True)
    assert not np.allclose(model(x).asnumpy(), still)


def test_half_precision_weights(mode: str) -> None:
    """Weights in float16, and float16 computed from float32 weights: near the answer of float32, gradients finite."""
    x, first = ids(13), disturbed(LocalTransformer(**MODEL))
    whole = first(x).asnumpy()

    def another() -> LocalTransformer:
        model = LocalTransformer(**MODEL).set_train(False)
        for weight, same in zip(model.get_parameters(), first.get_parameters(), strict=True):
            weight.set_data(Tensor(same.asnumpy()))
        return model

    model = another()
    for weight in model.get_parameters():
        weight.set_dtype(ms.float16)
    half = model(x)
    assert half.dtype == ms.float16
    np.testing.assert_allclose(half.asnumpy(), whole, atol=0.05)

    def loss(x: Tensor) -> Tensor:
        return model(x, return_loss=True)

    value, gradients = ms.value_and_grad(loss, None, model.trainable_params())(x)
    assert value.dtype == ms.float32
    assert all(ops.isfinite(gradient).all() for gradient in gradients)

    np.testing.assert_allclose(another().to_float(ms.float16)(x).asnumpy(), whole, atol=0.05)


def test_dynamic_bias_is_of_the_distance() -> None:
    bias = DynamicPositionBias(7, 3)(5, 13).asnumpy()
    assert bias.shape == (3, 5, 13)
    for i in range(5):
        for j in range(13):
            np.testing.assert_allclose(bias[:, i, j], bias[:, 4, 12 - abs(8 + i - j)], atol=1e-6)
    with pytest.raises(ValueError, match="must be at least that of queries, i, got i=5 and j=3"):
        DynamicPositionBias(7, 3)(5, 3)


def test_what_cannot_be() -> None:
    model, layer, x = LocalTransformer(**MODEL), LocalMHA(**LAYER, causal=True), Tensor(vectors(7))
    with pytest.raises(ValueError, match=r"length \(43\) must be at most max_seq_len \(41\)"):
        model(ids(43))
    with pytest.raises(ValueError, match="temperature must be 0"):
        model.generate(ids(3), 1, temperature=-1)
    with pytest.raises(ValueError, match=r"prime must be \(batch, n\)"):
        model.generate(ids(3)[0], 1)
    with pytest.raises(ValueError, match=r"mask must be \(batch, n\) = \(2, 7\)"):
        layer(x, mask=ops.ones((B, 6)).bool())
    mask, (_, cache) = ops.ones((B, 7)).bool(), layer(x, return_cache=True)
    with pytest.raises(ValueError, match="a cache cannot be combined with a mask"):
        layer(x, mask=mask, return_cache=True)
    with pytest.raises(ValueError, match="the one token that follows it, got 7 tokens"):
        layer(x, cache=cache)
    with pytest.raises(ValueError, match="a cache cannot be combined with a mask"):
        model(ids(8), mask=ops.ones((B, 8)).bool(), cache=model(ids(7), return_cache=True)[1])
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        LocalTransformer(**{**MODEL, "depth": 0})
    with pytest.raises(ValueError, match="num_residual_streams must be at least 1"):
        LocalTransformer(**MODEL, num_residual_streams=0)
    with pytest.raises(TypeError, match="window"):
        LocalMHA(**LAYER, window=3)
