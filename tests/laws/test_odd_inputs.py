"""Odd input has an answer: nothing at all, no keys, hidden slots full of NaN."""

from __future__ import annotations

import pytest
import torch
from input_cases import ALL, CROSS, B, E, H, T, build, inputs
from torch import Tensor

from longspan import Packing


def grads(out: Tensor, *xs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.sum(), xs))


@ALL
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(0, T), (0, 1), (B, 0), (0, 0)])
def test_empty_inputs(name: str, causal: bool, batch: int, length: int) -> None:
    mechanism = build(name)
    q, k, v = (x.requires_grad_() for x in inputs(batch, length))
    for mask in (None, torch.ones(batch, length, dtype=torch.bool)):
        out = mechanism(q, k, v, causal=causal, key_mask=mask)
        assert out.shape == (batch, length, H, E)
        assert [g.shape for g in grads(out, q, k, v)] == [q.shape, k.shape, v.shape]
    state = mechanism.write(mechanism.new_state(batch), k, v)
    out, state = mechanism.extend(state, q, k, v)
    assert out.shape == (batch, length, H, E)
    assert state.length.tolist() == [2 * length] * batch
    assert mechanism.read(state, q).shape == (batch, length, H, E)


@ALL
def test_empty_extension_keeps_the_state(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs()
    state = mechanism.write(mechanism.new_state(B), k, v)
    before = mechanism.read(state, q)
    _, state = mechanism.extend(state, q[:, :0], k[:, :0], v[:, :0])
    state = mechanism.write(state, k[:, :0], v[:, :0])
    assert torch.equal(mechanism.read(state, q), before)


@CROSS
def test_no_keys(name: str) -> None:
    mechanism, (q, k, v) = build(name), inputs(keys=0)
    q[0, 0] = float("nan")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = mechanism(q, k, v)
    assert out.shape == (B, T, H, E)
    assert (out == 0).all()
    assert all((g == 0).all() for g in grads(out, q, k, v))


@ALL
def test_reading_an_empty_state(name: str) -> None:
    mechanism, (q, *_) = build(name), inputs()
    assert (mechanism.read(mechanism.new_state(B), q) == 0).all()


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_empty_packed_sequences(name: str, causal: bool) -> None:
    mechanism, (q, k, v) = build(name), inputs(1)
    out = mechanism(q, k, v, causal=causal, packing=Packing.from_lengths([0, 5, 0, 12, 0]))
    torch.testing.assert_close(out, mechanism(q, k, v, causal=causal, packing=Packing.from_lengths([5, 12])))
    nothing = mechanism(q[:, :0], k[:, :0], v[:, :0], causal=causal, packing=Packing.from_lengths([0, 0]))
    assert nothing.shape == (1, 0, H, E)


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_hidden_slots(name: str, causal: bool) -> None:
    mechanism, (q, k, v) = build(name), inputs()
    mask = torch.arange(T).expand(B, T) < torch.tensor([[T], [11]])
    clean = mechanism(q, k, v, causal=causal, key_mask=mask)
    dirty = []
    for x in (q, k, v):
        filled = x if x is q and not causal else x.masked_fill(~mask[:, :, None, None], float("nan"))
        dirty.append(filled.requires_grad_())
    out = mechanism(*dirty, causal=causal, key_mask=mask)
    assert torch.equal(out, clean)
    for g in torch.autograd.grad(out.square().sum(), (*dirty, *mechanism.parameters())):
        assert g.isfinite().all()


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_all_keys_hidden(name: str, causal: bool) -> None:
    mechanism = build(name)
    q, k, v = (x.requires_grad_() for x in inputs())
    mask = torch.tensor([True, False])[:, None].expand(B, T)
    out = mechanism(q, k, v, causal=causal, key_mask=mask)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all(), "the other row is untouched"
    for g in grads(out, q, k, v):
        assert g.isfinite().all()
        assert (g[1] == 0).all()
