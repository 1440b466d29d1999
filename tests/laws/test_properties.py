"""The laws again, over shapes, masks, splits and packings that nobody chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    Case,
    all_cases,
    assert_same,
    check_gradients_by_name,
    gradients,
    leaves,
    require_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from truths import has_truth, truth

from longspan import Packing, build_mechanism
from longspan.ops.common import parts
from longspan.ops.gated import gated_linear
from longspan.ops.gated import reference as gated_reference
from longspan.ops.gated import torch as gated_chunks
from longspan.ops.linear import torch as chunks
from longspan.ops.window import reference as window_reference

CASES = st.sampled_from([case for case in all_cases() if has_truth(case)])
few = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, gated_chunks):
        monkeypatch.setattr(module, "CPU_CHUNK", 4)
        monkeypatch.setattr(module, "GROUP", 12)
    monkeypatch.setattr(parts, "CACHED", 200)


@st.composite
def split_lengths(draw: Any) -> list[int]:
    """How many tokens arrive at a time."""
    return draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum))


@few
@given(case=CASES, lengths=split_lengths(), batch=st.integers(1, 3), with_gradients=st.booleans())
def test_any_split(case: Case, lengths: list[int], batch: int, with_gradients: bool) -> None:
    torch.manual_seed(sum(lengths))
    m = case.build()
    q, k, v = case.inputs(batch, sum(lengths))
    with torch.set_grad_enabled(with_gradients):
        state, outs = m.new_state(batch, dtype=q.dtype), []
        for part in zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True):
            out, state = m.step(state, *part) if part[0].shape[1] == 1 else m.extend(state, *part)
            outs.append(out)
        assert_same(torch.cat(outs, 1), truth(case, m, q, k, v, causal=True))


@st.composite
def runs(draw: Any) -> tuple[list[list[bool]], int]:
    """Causal masks: one run of real tokens in each row."""
    size = draw(st.integers(1, 23))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        rows.append([start <= i < stop for i in range(size)])
    return rows, size


@few
@given(case=CASES, masks=st.tuples(runs(), st.integers(0, 7)))
def test_any_run(case: Case, masks: tuple[tuple[list[list[bool]], int], int]) -> None:
    (rows, size), more = masks
    torch.manual_seed(size)
    m, mask = case.build(), torch.tensor(rows)
    clean = require_gradients(*case.inputs(len(rows), size))
    hidden = require_gradients(*(x.detach().masked_fill(~mask[:, :, None, None], float("nan")) for x in clean))
    out = m(*hidden, causal=True, key_mask=mask)
    expected = truth(case, m, *clean, causal=True, key_mask=mask)
    assert_same(out, expected)
    got, want = (
        gradients(x, leaves(m, **dict(zip("qkv", xs, strict=True)))) for x, xs in ((out, hidden), (expected, clean))
    )
    check_gradients_by_name(got, want)
    with torch.no_grad():
        # What follows continues each row behind its own last token.
        late = case.inputs(len(rows), more)
        _, state = m.extend(m.new_state(len(rows), dtype=out.dtype), *hidden, key_mask=mask)
        assert state.length.tolist() == mask.sum(1).tolist()
        after, _ = m.extend(state, *late)
        for b in range(len(rows)):
            whole = [torch.cat([x[b : b + 1, mask[b]], y[b : b + 1]], 1) for x, y in zip(clean, late, strict=True)]
            if more:
                assert_same(after[b : b + 1], truth(case, m, *whole, causal=True)[:, -more:])


@few
@given(case=CASES, data=st.data(), queries=st.integers(1, 11), keys=st.integers(1, 23))
def test_any_bidirectional_mask(case: Case, data: st.DataObject, queries: int, keys: int) -> None:
    torch.manual_seed(keys)
    m = case.build()
    queries = queries if m.supports_cross else keys
    q, k, v = case.inputs(2, queries, keys)
    bits = st.lists(st.booleans(), min_size=keys, max_size=keys)
    mask = torch.tensor([data.draw(bits), data.draw(bits)])
    hidden = [x.masked_fill(~mask[:, :, None, None], float("nan")) for x in (k, v)]
    assert_same(m(q, *hidden, key_mask=mask), truth(case, m, q, k, v, key_mask=mask))


@few
@given(case=CASES, data=st.data(), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), causal=st.booleans())
def test_any_packing(case: Case, data: st.DataObject, lengths: list[int], causal: bool) -> None:
    torch.manual_seed(sum(lengths))
    m = case.build()
    key_lengths = lengths
    packings = {"packing": Packing.from_lengths(lengths)}
    if m.supports_cross and not causal:
        size = len(lengths)
        key_lengths = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        packings["key_packing"] = Packing.from_lengths(key_lengths)
    q, k, v = case.inputs(1, sum(lengths), sum(key_lengths))
    packed = m(q, k, v, causal=causal, **packings)
    assert packed.shape == (1, sum(lengths), case.num_heads, case.value_dim)
    keys_and_values = zip(k.split(key_lengths, 1), v.split(key_lengths, 1), strict=True)
    queries_and_outs = zip(q.split(lengths, 1), packed.split(lengths, 1), strict=True)
    for (one_q, out), (one_k, one_v) in zip(queries_and_outs, keys_and_values, strict=True):
        if one_q.shape[1] and one_k.shape[1]:
            assert_same(out, truth(case, m, one_q, one_k, one_v, causal=causal))
        else:
            assert not out.any()


@few
@given(
    groups=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 3), st.integers(1, 41)),
    chunk=st.integers(1, 9),
    cached=st.sampled_from([1, 500, parts.CACHED]),
    kind=st.sampled_from(["elu", "softmax", "relu", "identity"]),
)
def test_any_shape_of_causal_linear(
    groups: tuple[int, int], dims: tuple[int, int], size: tuple[int, int], chunk: int, cached: int, kind: str
) -> None:
    (heads, group), (D, E), (B, T) = groups, dims, size
    torch.manual_seed(T)
    before, chunks.CPU_CHUNK, parts.CACHED = (chunks.CPU_CHUNK, parts.CACHED), chunk, cached
    try:
        q = torch.randn(B, T, heads * group, D, dtype=torch.float64, requires_grad=True)
        k = torch.randn(B, T, heads, D, dtype=torch.float64, requires_grad=True)
        v = torch.randn(B, T, heads, E, dtype=torch.float64, requires_grad=True)
        normalize = "none" if kind == "identity" else "query"
        m = build_mechanism(
            "linear", heads * group, D, num_kv_heads=heads, value_dim=E, feature_map=kind, normalize=normalize
        )
        case = Case("linear", {"feature_map": kind, "normalize": normalize})
        of = leaves(m, q=q, k=k, v=v)
        out, expected = m(q, k, v, causal=True), truth(case, m, q, k, v, causal=True)
        assert_same(out, expected)
        check_gradients_by_name(gradients(out, of), gradients(expected, of))
    finally:
        chunks.CPU_CHUNK, parts.CACHED = before


@few
@given(
    groups=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 3), st.integers(1, 41)),
    chunk=st.sampled_from([1, 2, 3, 6, 12]),
    cached=st.sampled_from([1, 500, parts.CACHED]),
    gate=st.sampled_from(["none", "head", "channel"]),
    delta=st.booleans(),
)
def test_any_shape_of_gated_linear(
    groups: tuple[int, int],
    dims: tuple[int, int],
    size: tuple[int, int],
    chunk: int,
    cached: int,
    gate: str,
    delta: bool,
) -> None:
    (heads, group), (D, E), (B, T) = groups, dims, size
    torch.manual_seed(T)
    before, gated_chunks.CPU_CHUNK, parts.CACHED = (gated_chunks.CPU_CHUNK, parts.CACHED), chunk, cached
    try:
        k, v, state = torch.randn(B, T, heads, D), torch.randn(B, T, heads, E), torch.randn(B, heads, D, E)
        of = {"q": torch.randn(B, T, heads * group, D), "k": k / k.norm(dim=-1, keepdim=True), "v": v, "state": state}
        if gate != "none":
            of["log_decay"] = -torch.rand(B, T, heads, D if gate == "channel" else 1)
            of["beta"] = 2 * torch.rand(B, T, heads)
        of = {name: x.double().requires_grad_() for name, x in of.items()}
        found = []
        for function in (gated_linear, gated_reference.gated_linear):
            out, last = function(**of, delta=delta)
            found.append(((out, last), gradients(torch.cat([out.flatten(), last.flatten()]), of)))
        for got, expected in zip(found[0][0], found[1][0], strict=True):
            assert_same(got, expected)
        check_gradients_by_name(found[0][1], found[1][1])
    finally:
        gated_chunks.CPU_CHUNK, parts.CACHED = before


@few
@given(
    length=st.integers(1, 97),
    back=st.integers(0, 40),
    ahead=st.integers(0, 40),
    causal=st.booleans(),
    block=st.none() | st.integers(1, 11),
)
def test_any_window(length: int, back: int, ahead: int, causal: bool, block: int | None) -> None:
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, length, 2, 3, dtype=torch.float64) for _ in range(3))
    if block is None:
        m = build_mechanism("local", 2, 3, window=(back, ahead))
        visible = window_reference.window_visibility(back, ahead, length)
    else:
        back, ahead = back % 4, ahead % 4
        m = build_mechanism("local", 2, 3, window=block, look_back=back, look_ahead=ahead)
        visible = window_reference.block_visibility(block, back, ahead, length)
    if causal:
        visible = visible & window_reference.causal_visibility(length)
    assert_same(m(q, k, v, causal=causal), window_reference.softmax_attention(q, k, v, visible))
