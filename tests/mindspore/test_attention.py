"""LocalAttention: its definition, and the laws."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
import reference
from mindspore import Tensor, ops

from longspan.mindspore import LocalAttention

B, H, D, W = 2, 3, 6, 5
# Our arguments, and the definition's.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {"causal": True}),
    "exact": ({"causal": True, "exact_windowsize": True}, {"causal": True, "exact": True}),
    "far": ({"causal": True, "look_backward": 2}, {"causal": True, "back": 2}),
    "both": ({}, {"ahead": 1}),
    "both_exact": ({"exact_windowsize": True, "look_forward": 2}, {"ahead": 2, "exact": True}),
    "shared": ({"causal": True, "shared_qk": True}, {"causal": True, "shared": True}),
    "plain": ({"use_rotary_pos_emb": False, "causal": True}, {"rotary": False, "causal": True}),
    "scale": ({"scale": 3.0, "causal": True}, {"scale": 3.0, "causal": True}),
    "xpos": ({"use_xpos": True, "causal": True}, {"xpos": W // 2, "causal": True}),
    "xpos_base": ({"use_xpos": True, "xpos_scale_base": 7}, {"xpos": 7, "ahead": 1}),
}
CAUSAL = [name for name, (ours, _) in CASES.items() if ours.get("causal")]


def drawn(n: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((B, H, n, D)).astype(np.float32) for _ in range(3)]


def made(name: str, **more: Any) -> LocalAttention:
    return LocalAttention(W, dim=D, autopad=True, **CASES[name][0], **more).set_train(False)


def defined(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, **more: Any) -> np.ndarray:
    mask, bias = more.get("mask"), more.get("bias")
    return np.stack(
        [
            [
                reference.attention(
                    q[b, h],
                    k[b, h],
                    v[b, h],
                    window=W,
                    mask=None if mask is None else mask[b],
                    bias=None if bias is None else bias[h],
                    **CASES[name][1],
                )
                for h in range(H)
            ]
            for b in range(B)
        ]
    )


@pytest.mark.parametrize("n", [1, 4, 5, 6, 17])
@pytest.mark.parametrize("name", CASES)
def test_any_length_is_the_definition(name: str, n: int) -> None:
    q, k, v = drawn(n)
    out = made(name)(Tensor(q), Tensor(k), Tensor(v))
    np.testing.assert_allclose(out.asnumpy(), defined(name, q, k, v), atol=3e-6)


@pytest.mark.parametrize("name", ["exact", "both"])
def test_mask_and_bias_are_the_definition(name: str, mode: str) -> None:
    q, k, v = drawn(13)
    random = np.random.default_rng(1)
    mask = random.random((B, 13)) < 0.6
    columns = (2 + made(name).look_forward) * W
    bias = random.standard_normal((H, W, columns)).astype(np.float32)
    out = made(name)(Tensor(q), Tensor(k), Tensor(v), mask=Tensor(mask), attn_bias=Tensor(bias)).asnumpy()
    expected = defined(name, q, k, v, mask=mask, bias=bias)
    kept = np.broadcast_to(mask[:, None, :, None], out.shape)
    np.testing.assert_allclose(out[kept], expected[kept], atol=3e-6)


def test_modes_agree_on_gradients() -> None:
    found = []
    q, k, v = (Tensor(x) for x in drawn(13))
    cell = made("both")

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (cell(q, k, v) ** 2).sum()

    for how in (ms.PYNATIVE_MODE, ms.GRAPH_MODE):
        ms.set_context(mode=how)
        found.append([x.asnumpy() for x in ms.grad(total, (0, 1, 2))(q, k, v)])
    ms.set_context(mode=ms.PYNATIVE_MODE)
    jitted = ms.jit(total)
    found.append([x.asnumpy() for x in ms.grad(jitted, (0, 1, 2))(q, k, v)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_never_reaches_the_past(name: str) -> None:
    q, k, v = drawn(17)
    other = drawn(17, seed=1)
    cell, at = made(name), 8
    changed = [np.concatenate([x[:, :, :at], y[:, :, at:]], 2) for x, y in zip((q, k, v), other, strict=True)]
    one, two = (cell(*(Tensor(x) for x in xs)).asnumpy() for xs in ((q, k, v), changed))
    np.testing.assert_array_equal(one[:, :, :at], two[:, :, :at])
    assert not np.allclose(one[:, :, at:], two[:, :, at:])

    def past(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cell(q, k, v)[:, :, :at].sum()

    for gradient in ms.grad(past, (0, 1, 2))(Tensor(q), Tensor(k), Tensor(v)):
        assert (gradient[:, :, at:] == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_hidden_slots_change_nothing(name: str) -> None:
    """With NaN in them: as if the sequence were shorter, in gradients too."""
    xs, n, kept = drawn(13), 13, 9
    mask = Tensor(np.tile(np.arange(n) < kept, (B, 1)))
    for x in xs:
        x[:, :, kept:] = np.nan
    cell = made(name)

    def long(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (cell(q, k, v, mask=mask)[:, :, :kept] ** 2).sum()

    def short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (cell(q, k, v) ** 2).sum()

    whole, cut = (
        ms.grad(long, (0, 1, 2))(*map(Tensor, xs)),
        ms.grad(short, (0, 1, 2))(*(Tensor(x[:, :, :kept]) for x in xs)),
    )
    for one, two in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one.asnumpy()[:, :, :kept], two.asnumpy(), atol=1e-6)
        assert (one[:, :, kept:] == 0).all()


@pytest.mark.parametrize("name", ["causal", "shared", "both"])
def test_a_query_that_sees_nothing_gets_zeros(name: str) -> None:
    q, k, v = (Tensor(x) for x in drawn(13))
    mask = Tensor(np.stack([np.arange(13) >= 12, np.zeros(13, bool)]))
    cell = made(name)
    out = cell(q, k, v, mask=mask)
    assert (out[1] == 0).all()

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (cell(q, k, v, mask=mask) ** 2).sum()

    for gradient in ms.grad(total, (0, 1, 2))(q, k, v):
        assert ops.isfinite(gradient).all()


@pytest.mark.parametrize("name", CASES)
def test_half_precision(name: str) -> None:
    check_half(name)


@pytest.mark.parametrize("name", ["both", "shared"])
def test_half_precision_in_both_modes(name: str, mode: str) -> None:
    check_half(name)


def check_half(name: str) -> None:
    """float16 in and out: the answer of float32 for the same inputs, rounded once."""
    xs = [x.astype(np.float16) for x in drawn(13)]
    cell = made(name)
    half = cell(*map(Tensor, xs))
    assert half.dtype == ms.float16
    whole = cell(*(Tensor(x.astype(np.float32)) for x in xs)).asnumpy()
    np.testing.assert_allclose(half.asnumpy(), whole, atol=1e-5, rtol=2**-10)


def test_large_inputs_in_half_precision_stay_finite() -> None:
    q, k, v = drawn(17)
    cell = made("exact")
    half = [Tensor((50 * x).astype(np.float16)) for x in (q, k)]

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cell(q, k, v).astype(ms.float32).sum()

    value, gradients = ms.value_and_grad(total, (0, 1, 2))(*half, Tensor(v.astype(np.float16)))
    assert ops.isfinite(value)
    assert all(ops.isfinite(gradient).all() for gradient in gradients)
    ones = cell(*half, ops.ones_like(half[0]))
    np.testing.assert_allclose(ones.asnumpy(), 1, atol=2e-3)


def test_dropout_acts_in_training_alone(mode: str) -> None:
    q, k, v = (Tensor(x) for x in drawn(13))
    cell = made("causal", dropout=0.5)
    still = cell(q, k, v).asnumpy()
    np.testing.assert_array_equal(still, made("causal")(q, k, v).asnumpy())
    cell.set_train(True)
    assert not np.allclose(cell(q, k, v).asnumpy(), still)
    assert not np.allclose(cell(q, k, v).asnumpy(), cell(q, k, v).asnumpy())


def test_another_window_with_xpos() -> None:
    q, k, v = (Tensor(x) for x in drawn(13))
    wide = LocalAttention(7, dim=D, causal=True, autopad=True, use_xpos=True, xpos_scale_base=W // 2)
    out = made("xpos")(q, k, v, window_size=7)
    np.testing.assert_allclose(out.asnumpy(), wide(q, k, v).asnumpy(), atol=1e-6)
    with pytest.raises(ValueError, match="another window_size needs use_xpos=True"):
        made("causal")(q, k, v, window_size=7)


def test_masks_of_both_names_and_any_leading_dimensions() -> None:
    q, k, v = (Tensor(x) for x in drawn(10))
    mask = Tensor(np.tile(np.arange(10) < 7, (B, 1)))
    cell = LocalAttention(W, dim=D, causal=True)
    out = cell(q, k, v, input_mask=mask)
    flat = cell(*(x.reshape((B * H, 10, D)) for x in (q, k, v)), mask=mask).reshape(out.shape)
    np.testing.assert_array_equal(out.asnumpy(), flat.asnumpy())
    assert not np.allclose(out.asnumpy(), cell(q, k, v).asnumpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True, "look_forward": 1}, "look_forward must be 0, got 1"),
        ({"window_size": 0}, "window_size must be at least 1"),
        ({"use_xpos": True, "dim": None}, "use_xpos needs rotary positions"),
        ({"use_xpos": True, "xpos_scale_base": 0}, "xpos_scale_base must be positive, got 0"),
        ({"dim": 5}, "dim must be even, got 5"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalAttention(**{"window_size": W, "dim": D, **options})


def test_inputs_that_cannot_be(mode: str) -> None:
    q, k, v = (Tensor(x) for x in drawn(13))
    with pytest.raises(ValueError, match=r"length \(13\) must be a multiple of window_size \(5\)"):
        LocalAttention(W, dim=D)(q, k, v)
    longer = Tensor(drawn(26)[1])
    with pytest.raises(ValueError, match="q, k and v must have the same length, got 13, 26 and 13"):
        made("causal")(q, longer, v)
    with pytest.raises(ValueError, match=r"mask must be \(batch, 13\)"):
        made("causal")(q, k, v, mask=ops.ones((B, 12)).bool())
    with pytest.raises(ValueError, match=r"attn_bias must be \(heads, 5, 10\)"):
        made("causal")(q, k, v, attn_bias=ops.ones((H, W, 3)))
