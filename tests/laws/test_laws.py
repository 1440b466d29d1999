"""The laws, for every registered mechanism in every case of `helpers.CASES`, float64 to 1e-9.

The laws themselves are in `longspan.testing`; here is what one of their sizes does not show. What needs a reference or
a precision is in `test_laws_numbers`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import B, Case, T, all_cases, assert_same, each_case, lengths_to_mask
from truths import has_truth, truth

from longspan import Mechanism, build_mechanism, list_mechanisms
from longspan.mechanisms.linear import LinearAttention
from longspan.ops.linear import torch as chunks
from longspan.testing import LAWS, check_mechanism
from longspan.testing.compare import (
    assert_equal_with_gradients,
    assert_unchanged,
    draw_inputs,
    require_grad,
    snapshot,
    tokens,
    without_queries,
)

pytestmark = pytest.mark.usefixtures("small_chunks")
F64 = torch.float64


def test_fresh_memory_is_nan() -> None:
    x = torch.zeros(3)
    for fresh in (torch.empty(3, 5), torch.empty_like(x), x.new_empty(7), x.new_empty(2, dtype=torch.float64)):
        assert fresh.isnan().all()


def test_every_mechanism_has_cases_with_grouped_heads() -> None:
    for name in list_mechanisms():
        cases = [case for case in all_cases() if case.name == name]
        assert cases
        if has_truth(cases[0]):
            assert any(case.num_kv_heads < case.num_heads for case in cases), name


def reads_all(m: Mechanism) -> bool:
    """Whether a bidirectional query sees what one behind the last key sees: a blind spot is causal only."""
    parts = getattr(m, "parts", None)
    if parts is not None:
        return all(reads_all(part) for part in parts)
    return m.supports_cross and getattr(m, "blind_spot", 1) == 1


def holds(law: str, case: Case) -> bool:
    """Whether a law is said of a case; with a reference, finite differences are left to the simplest ones."""
    if law == "4, reading ≡ bidirectional attention":
        return reads_all(case.build())
    if law == "9, gradients ≡ finite differences":
        return not has_truth(case) or len(case.options) <= 1
    return True


@pytest.mark.parametrize(
    ("law", "case"),
    [pytest.param(law, case, id=f"{law}-{case}") for law in LAWS for case in all_cases() if holds(law, case)],
)
def test_law(law: str, case: Case) -> None:
    LAWS[law](case.build)


def test_only_self_attention_and_blind_spots_are_left_out_above() -> None:
    for case in all_cases():
        m = case.build()
        if not reads_all(m):
            parts = [part for part in m.modules() if isinstance(part, Mechanism)]
            assert any(not part.supports_cross or getattr(part, "blind_spot", 1) > 1 for part in parts), case


@each_case()
def test_writing_with_gradients_changes_no_state(case: Case) -> None:
    m = case.build()
    x = require_grad(draw_inputs(m, B, T))
    for max_length in (None, 2 * T):
        _, first = m.extend(m.new_state(B, max_length=max_length, dtype=F64), **tokens(x, 0, 5))
        before = snapshot(first)
        m.write(first, **without_queries(x))
        m.step(first, **tokens(x, 0, 1))
        m.extend(first, **x, key_mask=lengths_to_mask([3, 9], T))
        assert_unchanged(first, before)


@each_case()
def test_gradients_reach_back_through_a_past(case: Case) -> None:
    m = case.build()
    x = require_grad(draw_inputs(m, B, T))
    state = m.write(m.new_state(B, dtype=F64), **without_queries(tokens(x, 0, 9)))
    late = m(**tokens(x, 9), causal=True, past=state)
    assert_equal_with_gradients(m, late, m(**x, causal=True)[:, 9:], x)


@torch.no_grad()
@each_case()
@pytest.mark.parametrize("length", [1, 63, 65, chunks.CHUNK - 1, chunks.CHUNK + 1])
def test_lengths_around_a_chunk(case: Case, length: int, real_chunks: None) -> None:
    m = case.build()
    x = draw_inputs(m, 1, length)
    parallel = m(**x, causal=True)
    if has_truth(case):
        assert_same(parallel, truth(case, m, x["q"], x["k"], x["v"], causal=True))
    cut = length // 2
    first, state = m.extend(m.new_state(1, dtype=F64), **tokens(x, 0, cut))
    second, _ = m.extend(state, **tokens(x, cut))
    assert_same(torch.cat([first, second], 1), parallel)
    later = m.write(m.new_state(1, start=cut, transition=True, dtype=F64), **without_queries(tokens(x, cut)))
    merged = m.write(m.new_state(1, dtype=F64), **without_queries(tokens(x, 0, cut))).merge(later)
    assert_same(m.read(merged, x["q"][:, -1:]), parallel[:, -1:])


@each_case()
def test_put_replaces_rows(case: Case) -> None:
    m = case.build()
    old, new, late = (draw_inputs(m, n, t) for n, t in ((3, 6), (2, 4), (3, 5)))
    _, state = m.extend(m.new_state(3, dtype=F64), **old)
    _, rows = m.extend(m.new_state(2, dtype=F64), **new)

    def continued(early: dict[str, torch.Tensor], row: int, b: int) -> torch.Tensor:
        joined = {name: torch.cat([x[row : row + 1], late[name][b : b + 1]], 1) for name, x in early.items()}
        return m(**joined, causal=True)[:, -5:]

    both = state.put([2, 0], rows)
    assert both.length.tolist() == [4, 6, 4]
    assert_same(
        m.extend(both, **late)[0], torch.cat([continued(new, 1, 0), continued(old, 1, 1), continued(new, 0, 2)])
    )
    emptied = state.put(slice(0, 2), m.new_state(2, dtype=F64))
    got, _ = m.extend(emptied, **late)
    assert_same(got[:2], m(**{name: x[:2] for name, x in late.items()}, causal=True))


# 11. States of consecutive pieces merge.


@each_case()
def test_rows_that_start_elsewhere_are_put_and_selected(case: Case) -> None:
    m = case.build()
    x = draw_inputs(m, 2, T)
    first = m.write(m.new_state(2, transition=True, dtype=F64), **without_queries(tokens(x, 0, 6)))
    later = m.write(m.new_state(2, start=6, transition=True, dtype=F64), **without_queries(tokens(x, 6)))
    mixed = first.put([1], later.select([0]))
    assert mixed.end.tolist() == [6, T]
    assert mixed.length.tolist() == [6, T - 6]
    for state, row, b in ((first, mixed.select([0]), 0), (later.select([0]), mixed.select([1]), 0)):
        assert_same(m.read(row, x["q"][b : b + 1]), m.read(state.select([0]), x["q"][b : b + 1]))
    whole = m.write(m.new_state(2, dtype=F64), **without_queries(x))
    merged = first.select([0]).merge(mixed.select([1]))
    assert_same(m.read(merged, x["q"][:1]), m.read(whole.select([0]), x["q"][:1]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"phantom": 0.5}),
        ("linear", {"feature_map": "relu", "phantom": 0.1}),
        ("performer", {"num_features": 7, "epsilon": 1e-3, "phantom": 1e-2}),
        ("performer", {"kernel": "relu", "phantom": 0.01}),
        ("linear", {"feature_map": "softmax", "phantom": 0.1}),
    ],
)
def test_a_phantom_key_is_merged_once(name: str, options: dict) -> None:
    case = Case(name, options)
    for law in (law for law in LAWS if law.startswith("11")):
        LAWS[law](case.build)
    m = case.build()
    x = draw_inputs(m, B, T)
    empty = m.new_state(B, dtype=F64)
    one = m.write(empty, **without_queries(x))
    assert_same(m.read(empty.merge(one), x["q"]), m.read(one, x["q"]))


def test_merging_refuses_what_does_not_follow() -> None:
    linear, softmax = build_mechanism("linear", 1, 4), build_mechanism("softmax", 1, 4)
    k = torch.randn(2, 3, 1, 4)
    state = linear.write(linear.new_state(2), k, k)
    with pytest.raises(ValueError, match=r"later.start == start \+ length.*got start \[0, 0\] after end \[3, 3\]"):
        state.merge(state)
    with pytest.raises(ValueError, match=r"make it with new_state\(batch_size, start=earlier.end\)"):
        state.merge(linear.new_state(2, start=4))
    with pytest.raises(ValueError, match="later must be a LinearState like this state, got a SoftmaxState"):
        state.merge(softmax.new_state(2, start=3))
    with pytest.raises(ValueError, match="must hold as many rows, got 2 and 1"):
        state.merge(linear.new_state(1, start=3))
    with pytest.raises(ValueError, match=r"start must be a position, or integers \(B,\) = \(2,\), got \(3,\)"):
        linear.new_state(2, start=torch.zeros(3))
    performer = build_mechanism("performer", 1, 4)
    first = performer.new_state(2)
    performer.redraw()
    with pytest.raises(ValueError, match="one draw of random features, got 0 and 1"):
        first.merge(performer.new_state(2, start=0))
    pending = replace(state, pending=(linear.new_state(2),))
    with pytest.raises(ValueError, match="cannot be merged: call finish_decode first"):
        pending.merge(linear.new_state(2, start=3))


def test_a_broken_law_is_named() -> None:
    class Leaky(LinearAttention):
        def _attend_causal(self, q, k, v, *, gates, lengths):
            return self._attend(q, k, v, gates=gates, key_mask=None)

    with pytest.raises(AssertionError, match=r"^law 1, step by step ≡ parallel: AssertionError: output: "):
        check_mechanism(lambda: Leaky(4, 8, num_kv_heads=2))


def test_a_wrong_reference_is_noticed() -> None:
    def build() -> Mechanism:
        return build_mechanism("softmax", 2, 4)

    def definition(q, k, v, *, causal):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / 2
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1) & causal
        return torch.einsum("bhts,bshe->bthe", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    check_mechanism(build, reference=definition)
    with pytest.raises(AssertionError, match="output"):
        check_mechanism(build, reference=lambda q, k, v, *, causal: 2 * definition(q, k, v, causal=causal))
