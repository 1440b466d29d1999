"""Awkward inputs of `decay` and `delta`: forward, extended, decoded token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Mechanism, build_mechanism
from longspan.testing.compare import draw_inputs, without_queries

B, H, D, E = 3, 2, 5, 7
KINDS: dict[str, dict[str, Any]] = {
    "decay-head": {"name": "decay", "gate": "head"},
    "decay-channel": {"name": "decay", "gate": "channel"},
    "delta": {"name": "delta", "gate": "none"},
    "delta-head": {"name": "delta", "gate": "head"},
    "delta-channel-negative": {"name": "delta", "gate": "channel", "negative_eigenvalues": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
Inputs = dict[str, Tensor]


def build(kind: str) -> Mechanism:
    options = dict(KINDS[kind])
    return build_mechanism(options.pop("name"), H, D, value_dim=E, **options).eval().double()


def token(x: Inputs, t: int) -> Inputs:
    return {name: y[:, t : t + 1] for name, y in x.items()}


def by_steps(m: Mechanism, x: Inputs) -> Tensor:
    state, outs = m.new_state(B, dtype=torch.float64), []
    for t in range(x["q"].shape[1]):
        out, state = m.step(state, **token(x, t))
        outs.append(out)
    return torch.cat(outs, 1)


def by_decoding(m: Mechanism, x: Inputs) -> Tensor:
    state, outs = m.decode_state(m.new_state(B, dtype=torch.float64), torch.float64), []
    for t in range(x["q"].shape[1]):
        out, state = m.decode_step(state, **token(x, t))
        outs.append(out)
    return torch.cat(outs, 1)


def by_extending(m: Mechanism, x: Inputs) -> Tensor:
    half = x["q"].shape[1] // 2
    state = m.new_state(B, dtype=torch.float64)
    first, state = m.extend(state, **{name: y[:, :half] for name, y in x.items()})
    return torch.cat([first, m.extend(state, **{name: y[:, half:] for name, y in x.items()})[0]], 1)


@each_kind
@pytest.mark.parametrize("T", [1, 2, 63, 65])
@torch.no_grad()
def test_extreme_gates_give_one_answer(kind: str, T: int) -> None:
    m = build(kind)
    x = draw_inputs(m, B, T)
    for i, value in enumerate((1e30, -1e30, 104.0, -1e4)):
        x["gates"][:, i::7] = value
    expected = by_steps(m, x)
    assert expected.isfinite().all()
    allowed = 1e-9 * expected.abs().amax((0, 2, 3), keepdim=True)
    for found in (m(**x, causal=True), by_extending(m, x), by_decoding(m, x)):
        assert ((found - expected).abs() <= allowed).all()


@each_kind
@pytest.mark.parametrize("change", [1, -1])
def test_gates_of_another_width_are_refused_everywhere(kind: str, change: int) -> None:
    m = build(kind)
    x = draw_inputs(m, B, 3)
    x["gates"] = torch.zeros(B, 3, H, m.num_gates + change, dtype=torch.float64)
    state = m.new_state(B, dtype=torch.float64)
    wrong = rf"gates must be floating point of shape .*, 2, {m.num_gates}\), got .*, 2, {m.num_gates + change}\)"
    for call in (
        lambda: m(**x),
        lambda: m(**x, causal=True),
        lambda: m.extend(state, **x),
        lambda: m.write(state, **without_queries(x)),
        lambda: m.step(state, **token(x, 0)),
    ):
        with pytest.raises(ValueError, match=wrong):
            call()


@pytest.mark.parametrize("kind", ["decay-head", "delta-head"])
def test_what_does_not_fit_is_refused(kind: str) -> None:
    m = build(kind)
    x = draw_inputs(m, B, 3)
    other = "delta" if kind == "decay-head" else "decay"
    for state, got in (
        (build_mechanism(other, H, D, value_dim=E).new_state(B, dtype=torch.float64), rf"{other} with \(2, 5, 7\)"),
        (build_mechanism(kind[:5], H, D).new_state(B, dtype=torch.float64), rf"{kind[:5]} with \(2, 5, 5\)"),
    ):
        for call in (lambda s: m.extend(s, **x), lambda s: m(**x, causal=True, past=s), lambda s: m.read(s, x["q"])):
            with pytest.raises(ValueError, match=rf"\(Hkv, D, E\) = \(2, 5, 7\) got one of {got}: use states from its"):
                call(state)
    shorter = {**x, **{name: x[name][:, :2] for name in ("k", "v", "gates")}}
    with pytest.raises(ValueError, match=r"has a decay, a delta rule, .*\(got 3 queries and 2 keys\); use linear"):
        m(**shorter)


@each_kind
@torch.no_grad()
def test_nan_in_padding_and_in_other_rows_has_no_effect(kind: str) -> None:
    m = build(kind)
    x = draw_inputs(m, B, 17)
    mask = torch.ones(B, 17, dtype=torch.bool)
    mask[1, 11:] = mask[2] = False
    clean = {name: y.masked_fill(~mask[:, :, None, None], 0) for name, y in x.items()}
    for y in x.values():
        y.masked_fill_(~mask[:, :, None, None], torch.nan)
    for causal in (True, False):
        found = m(**x, causal=causal, key_mask=mask)
        assert torch.equal(found[mask], m(**clean, causal=causal, key_mask=mask)[mask])
    state = m.new_state(B, dtype=torch.float64)
    found, state = m.extend(state, **x, key_mask=mask)
    assert torch.equal(found[mask], m.extend(m.new_state(B, dtype=torch.float64), **clean, key_mask=mask)[0][mask])
    short = m.write(m.new_state(1, dtype=torch.float64), **without_queries({n: y[1:2, :11] for n, y in x.items()}))
    torch.testing.assert_close(state.kv[1:2], short.kv, atol=1e-12, rtol=1e-12)
    assert state.kv[2].count_nonzero() == 0, "a row of padding alone writes nothing"
    x = draw_inputs(m, B, 17)
    expected = m(**x, causal=True), by_steps(m, x), by_decoding(m, x)
    x["gates"][0] = torch.nan
    for found, before in zip((m(**x, causal=True), by_steps(m, x), by_decoding(m, x)), expected, strict=True):
        torch.testing.assert_close(found[1:], before[1:], atol=1e-12, rtol=1e-12)


@each_kind
def test_no_tokens_and_no_rows(kind: str) -> None:
    m = build(kind)
    for rows, tokens in ((B, 0), (0, 13)):
        x = draw_inputs(m, rows, tokens)
        for causal in (True, False):
            assert m(**x, causal=causal).shape == (rows, tokens, H, E)
        out, state = m.extend(m.new_state(rows, dtype=torch.float64), **x)
        assert out.shape == (rows, tokens, H, E)
        assert state.kv.count_nonzero() == 0


@pytest.mark.parametrize(("kind", "largest"), [("delta", 1.0), ("delta-channel-negative", 2.0)])
@torch.no_grad()
def test_the_strength_of_a_write_stays_in_its_range(kind: str, largest: float) -> None:
    """Whatever the gate: at +1e30 a key reads β times the value written for it, at −1e30 nothing."""
    m = build(kind)
    x = draw_inputs(m, B, 1)
    x["q"] = x["k"]
    for gate, beta in ((1e30, largest), (-1e30, 0.0)):
        x["gates"] = torch.full_like(x["gates"], gate)
        for out in (m(**x, causal=True), by_steps(m, x), by_decoding(m, x)):
            torch.testing.assert_close(out, beta * x["v"] * D**-0.5, atol=1e-4, rtol=1e-4)


@each_kind
@torch.no_grad()
def test_large_tokens_leave_those_before_as_they_are(kind: str) -> None:
    """Products of earlier queries and later keys overflow, and are hidden by a mask, not by a factor of 0."""
    m = build(kind).float()
    x = draw_inputs(m, B, 67, dtype=torch.float32)
    x["q"] *= 1e25
    expected = m(**x, causal=True)[:, :64]
    for begin in (1, 6, 64):
        later = {name: torch.cat([y[:, :begin], y[:, begin:] * 1e20], 1) if name == "k" else y for name, y in x.items()}
        found = m(**later, causal=True)[:, :begin]
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected[:, :begin], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
