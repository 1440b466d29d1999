"""The laws, for every registered mechanism in every case of `helpers.CASES`, float64 to 1e-9: streams, masks, packings.

Laws 7 to 10 are in `test_laws_numbers`.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    B,
    Case,
    S,
    T,
    all_cases,
    assert_same,
    check_gradients_by_name,
    each_case,
    gradients,
    leaves,
    lengths_to_mask,
    pack,
    require_gradients,
)
from law_cases import assert_unchanged, by_steps, poisoned, snapshot
from torch import Tensor
from truths import has_truth, truth

from longspan import Mechanism, Packing, mechanisms
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.local import LocalAttention
from longspan.ops.linear import torch_chunk as chunks

SIDES = pytest.mark.parametrize("side", ["left", "right"])
LENGTHS = [5, 0, 1, 7, 4]  # of packed sequences


pytestmark = pytest.mark.usefixtures("small_chunks")


def test_fresh_memory_is_nan() -> None:
    x = torch.zeros(3)
    for fresh in (torch.empty(3, 5), torch.empty_like(x), x.new_empty(7), x.new_empty(2, dtype=torch.float64)):
        assert fresh.isnan().all()


def test_every_mechanism_has_cases_with_grouped_heads() -> None:
    for name in mechanisms():
        cases = [case for case in all_cases() if case.name == name]
        assert cases
        if has_truth(cases[0]):
            assert any(case.num_kv_heads < case.num_heads for case in cases), name


# 1. Step by step ≡ parallel.


@each_case()
def test_steps_equal_parallel(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    parallel = m(q, k, v, causal=True)
    stepped, state = by_steps(m, m.new_state(B, dtype=q.dtype), q, k, v)
    assert_same(stepped, parallel)
    assert state.length.tolist() == [T] * B
    of = leaves(m, q=q, k=k, v=v)
    check_gradients_by_name(gradients(stepped, of), gradients(parallel, of))


@torch.no_grad()
@each_case()
def test_steps_equal_parallel_where_states_are_consumed(case: Case) -> None:
    m = case.build()
    q, k, v = case.inputs()
    stepped, _ = by_steps(m, m.new_state(B, max_length=T, dtype=q.dtype), q, k, v)
    assert_same(stepped, m(q, k, v, causal=True))


# 2. Any split through `extend` or `past` ≡ parallel.


def in_parts(m: Mechanism, cuts: tuple[int, ...], parallel: Tensor, *qkv: Tensor) -> Tensor:
    """`extend` part by part, and `past` beside it."""
    state, outs = m.new_state(B, dtype=parallel.dtype), []
    for start, stop in zip((0, *cuts), (*cuts, T), strict=True):
        part = [x[:, start:stop] for x in qkv]
        before, old = snapshot(state), state
        assert_same(m(*part, causal=True, past=state), parallel[:, start:stop], f"past, {start}:{stop}")
        assert_unchanged(state, before)
        out, state = m.extend(old, *part)
        if torch.is_grad_enabled():
            assert_unchanged(old, before)
        outs.append(out)
    assert state.length.tolist() == [T] * B
    return torch.cat(outs, 1)


@each_case()
def test_any_split_equals_parallel(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    parallel = m(q, k, v, causal=True)
    extended = in_parts(m, (5, 5, 11), parallel, q, k, v)
    assert_same(extended, parallel)
    of = leaves(m, q=q, k=k, v=v)
    check_gradients_by_name(gradients(extended, of), gradients(parallel, of))


@torch.no_grad()
@each_case()
@pytest.mark.parametrize("cuts", [(0, 1), (3, 4, 8, 12, 16)], ids=str)
def test_any_split_equals_parallel_where_states_are_consumed(case: Case, cuts: tuple[int, ...]) -> None:
    m = case.build()
    q, k, v = case.inputs()
    parallel = m(q, k, v, causal=True)
    assert_same(in_parts(m, cuts, parallel, q, k, v), parallel)


@each_case()
def test_writing_with_gradients_changes_no_state(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    for max_length in (None, 2 * T):
        _, first = m.extend(m.new_state(B, max_length=max_length, dtype=q.dtype), q[:, :5], k[:, :5], v[:, :5])
        before = snapshot(first)
        m.write(first, k, v)
        m.step(first, q[:, :1], k[:, :1], v[:, :1])
        m.extend(first, q, k, v, key_mask=lengths_to_mask([3, 9], T))
        assert_unchanged(first, before)


@each_case()
def test_gradients_reach_back_through_a_past(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    state = m.write(m.new_state(B, dtype=q.dtype), k[:, :9], v[:, :9])
    late = m(q[:, 9:], k[:, 9:], v[:, 9:], causal=True, past=state)
    whole = m(q, k, v, causal=True)[:, 9:]
    of = leaves(m, q=q, k=k, v=v)
    check_gradients_by_name(gradients(late, of), gradients(whole, of))


@torch.no_grad()
@each_case()
@pytest.mark.parametrize("length", [1, 63, 65, chunks.CHUNK - 1, chunks.CHUNK + 1])
def test_lengths_around_a_chunk(case: Case, length: int, real_chunks: None) -> None:
    m = case.build()
    q, k, v = case.inputs(batch=1, queries=length)
    parallel = m(q, k, v, causal=True)
    if has_truth(case):
        assert_same(parallel, truth(case, m, q, k, v, causal=True))
    cut = length // 2
    first, state = m.extend(m.new_state(1, dtype=q.dtype), q[:, :cut], k[:, :cut], v[:, :cut])
    second, _ = m.extend(state, q[:, cut:], k[:, cut:], v[:, cut:])
    assert_same(torch.cat([first, second], 1), parallel)


# 3. Changing the future leaves the past bit-identical, and has no gradient from it.


@each_case()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_future_moves_no_bit_of_the_past(case: Case, dtype: torch.dtype) -> None:
    m, t = case.build(dtype), 6
    past = m.new_state(B, dtype=dtype)
    past = m.write(past, *case.inputs(queries=3, dtype=dtype)[1:])
    now = case.inputs(dtype=dtype)
    other = [torch.cat([x[:, : t + 1], 30 * torch.randn_like(x[:, t + 1 :])], 1) for x in now]
    with torch.no_grad():
        for state in (None, past):
            outs = [m(*qkv, causal=True, past=state)[:, : t + 1] for qkv in (now, other)]
            assert torch.equal(*outs)
    q, k, v = require_gradients(*other)
    for name, grad in gradients(m(q, k, v, causal=True)[:, : t + 1], {"q": q, "k": k, "v": v}).items():
        assert not grad[:, t + 1 :].any(), f"the past has a gradient in the future of {name}"
        assert grad.isfinite().all()


# 4. read∘write ≡ forward.


def reads_all(m: Mechanism) -> bool:
    """Whether a bidirectional query sees what one behind the last key sees: a blind spot is causal only."""
    parts = getattr(m, "parts", None)
    if parts is not None:
        return all(reads_all(part) for part in parts)
    return m.supports_cross and getattr(m, "blind_spot", 1) == 1


@each_case()
def test_reading_what_was_written_is_the_last_causal_row(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs(queries=S))
    state = m.write(m.write(m.new_state(B, dtype=q.dtype), k[:, :8], v[:, :8]), k[:, 8:], v[:, 8:])
    read = m.read(state, q[:, -1:])
    last = m(q, k, v, causal=True)[:, -1:]
    assert_same(read, last)
    of = leaves(m, q=q, k=k, v=v)
    check_gradients_by_name(gradients(read, of), gradients(last, of))


@each_case([case for case in all_cases() if reads_all(case.build())])
def test_reading_what_was_written_is_forward(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs(keys=S))
    of = leaves(m, q=q, k=k, v=v)
    for mask in (None, lengths_to_mask([13, 6], S)):
        read = m.read(m.write(m.new_state(B, dtype=q.dtype), k, v, key_mask=mask), q)
        whole = m(q, k, v, key_mask=mask)
        assert_same(read, whole)
        check_gradients_by_name(gradients(read, of), gradients(whole, of))


def test_only_local_and_blind_spots_are_left_out_above() -> None:
    for case in all_cases():
        m = case.build()
        if not reads_all(m):
            parts = [part for part in m.modules() if isinstance(part, (LocalAttention, LinearAttention))]
            assert any(isinstance(part, LocalAttention) or part.blind_spot > 1 for part in parts), case


# 5. Masked, with NaN in the hidden slots, ≡ shorter, parameter gradients included.


@each_case()
@SIDES
def test_masked_equals_shorter_causal(case: Case, side: str) -> None:
    m = case.build()
    lengths = (11, 0, 17, 1)
    clean = require_gradients(*case.inputs(batch=4))
    mask = lengths_to_mask(lengths, T, side)
    masked = poisoned(mask, *clean)
    out = m(*masked, causal=True, key_mask=mask)
    shorter = torch.zeros_like(out)
    for b, n in enumerate(lengths):
        if n:
            shorter[b, mask[b]] = m(*(x[b : b + 1, mask[b]] for x in clean), causal=True)[0]
    assert_same(out, shorter)
    assert not out[~mask].any()
    got, expected = (
        gradients(x, leaves(m, **dict(zip("qkv", inputs, strict=True))))
        for x, inputs in ((out, masked), (shorter, clean))
    )
    check_gradients_by_name(got, expected)


@each_case()
@pytest.mark.parametrize(("side", "with_gradients"), [("left", True), ("right", False)])
def test_masked_equals_shorter_in_states(case: Case, side: str, with_gradients: bool) -> None:
    with torch.set_grad_enabled(with_gradients):
        check_masked_states(case, side)


def check_masked_states(case: Case, side: str) -> None:
    m = case.build()
    q, k, v = case.inputs()
    q2, k2, v2 = case.inputs(queries=5)
    lengths = (11, 4)
    mask = lengths_to_mask(lengths, T, side)
    state = m.new_state(B, max_length=T + 5 if case.name == "softmax" else None, dtype=q.dtype)
    written = m.write(state.clone(), *poisoned(mask, k, v), key_mask=mask)
    out, state = m.extend(state, *poisoned(mask, q, k, v), key_mask=mask)
    assert state.length.tolist() == written.length.tolist() == list(lengths)
    for after in (state, written):
        late, _ = m.extend(after.clone(), q2, k2, v2)
        read = m.read(after, q2)
        for b in range(B):
            row = [torch.cat([x[b : b + 1, mask[b]], y[b : b + 1]], 1) for x, y in ((q, q2), (k, k2), (v, v2))]
            whole = m(*row, causal=True)
            assert_same(late[b : b + 1], whole[:, -5:])
            assert_same(out[b : b + 1, mask[b]], whole[:, :-5])
            alone = m.write(m.new_state(1, dtype=q.dtype), k[b : b + 1, mask[b]], v[b : b + 1, mask[b]])
            assert_same(read[b : b + 1], m.read(alone, q2[b : b + 1]))


@each_case()
def test_masked_equals_shorter_bidirectional(case: Case) -> None:
    m = case.build()
    keys = S if m.supports_cross else T
    q, k, v = require_gradients(*case.inputs(keys=keys))
    lengths = (13, 1)
    mask = lengths_to_mask(lengths, keys)
    hidden_k, hidden_v = poisoned(mask, k, v)
    out = m(q, hidden_k, hidden_v, key_mask=mask)
    outs, shorter = [], []
    for b, n in enumerate(lengths):
        # Without cross-attention, queries and keys are shortened together.
        queries = slice(None) if m.supports_cross else slice(n)
        shorter.append(m(q[b : b + 1, queries], k[b : b + 1, :n], v[b : b + 1, :n]).flatten(0, 1))
        outs.append(out[b, queries])
    got, expected = torch.cat(outs), torch.cat(shorter)
    assert_same(got, expected)
    check_gradients_by_name(
        gradients(got, leaves(m, q=q, k=hidden_k, v=hidden_v)), gradients(expected, leaves(m, q=q, k=k, v=v))
    )


@each_case([case for case in all_cases() if has_truth(case)])
@pytest.mark.parametrize("kind", ["left", "holes"])
def test_masked_equals_the_definition_bidirectional(case: Case, kind: str) -> None:
    m = case.build()
    keys = S if m.supports_cross else T
    q, k, v = require_gradients(*case.inputs(keys=keys))
    mask = lengths_to_mask((9, 2), keys, "left") if kind == "left" else torch.rand(B, keys) < 0.5
    hidden_k, hidden_v = poisoned(mask, k, v)
    out = m(q, hidden_k, hidden_v, key_mask=mask)
    expected = truth(case, m, q, k, v, key_mask=mask)
    assert_same(out, expected)
    check_gradients_by_name(
        gradients(out, leaves(m, q=q, k=hidden_k, v=hidden_v)), gradients(expected, leaves(m, q=q, k=k, v=v))
    )


# 6. Packed ≡ separate.


@each_case()
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_packed_equals_separate(case: Case, causal: bool) -> None:
    m = case.build()
    sequences = [case.inputs(batch=1, queries=n) for n in LENGTHS]
    (q, k, v), packing = pack(sequences)
    q, k, v = require_gradients(q, k, v)
    of = leaves(m, q=q, k=k, v=v)
    packed = m(q, k, v, causal=causal, packing=packing)
    rows = zip(*(x.split(LENGTHS, 1) for x in (q, k, v)), strict=True)
    separate = torch.cat([m(*row, causal=causal) for row in rows], 1)
    assert_same(packed, separate)
    check_gradients_by_name(gradients(packed, of), gradients(separate, of))


@each_case()
def test_packed_states_equal_separate(case: Case, grad: bool) -> None:
    m = case.build()
    second = [0, 6, 1, 3, 2]
    early = [case.inputs(batch=1, queries=n) for n in LENGTHS]
    late = [case.inputs(batch=1, queries=n) for n in second]
    (q, k, v), packing = pack(early)
    (q2, k2, v2), packing2 = pack(late)
    out, state = m.extend(m.new_state(len(LENGTHS), dtype=q.dtype), q, k, v, packing=packing)
    written = m.write(m.new_state(len(LENGTHS), dtype=q.dtype), k, v, packing=packing)
    assert state.length.tolist() == written.length.tolist() == LENGTHS
    from_past = m(q2, k2, v2, causal=True, packing=packing2, past=state)
    with_written, _ = m.extend(written.clone(), q2, k2, v2, packing=packing2)
    before = snapshot(state)
    with_extended, after = m.extend(state, q2, k2, v2, packing=packing2)
    if grad:
        assert_unchanged(state, before)
    assert after.length.tolist() == [a + b for a, b in zip(LENGTHS, second, strict=True)]
    whole = [
        m(*(torch.cat(x, 1) for x in zip(*both, strict=True)), causal=True) for both in zip(early, late, strict=True)
    ]
    assert_same(out, torch.cat([x[:, :n] for x, n in zip(whole, LENGTHS, strict=True)], 1))
    for name, got in {"past": from_past, "write": with_written, "extend": with_extended}.items():
        assert_same(got, torch.cat([x[:, n:] for x, n in zip(whole, LENGTHS, strict=True)], 1), name)


@each_case([case for case in all_cases() if case.build().supports_cross])
def test_packed_cross_attention_equals_separate(case: Case) -> None:
    m = case.build()
    key_lengths = [3, 6, 0, 1, 9]
    rows = [case.inputs(batch=1, queries=n, keys=s) for n, s in zip(LENGTHS, key_lengths, strict=True)]
    q, k, v = require_gradients(*(torch.cat(parts, 1) for parts in zip(*rows, strict=True)))
    of = leaves(m, q=q, k=k, v=v)
    packings = {
        "packing": Packing.from_lengths(LENGTHS),
        "key_packing": Packing.from_lengths(key_lengths),
    }
    packed = m(q, k, v, **packings)
    parts = zip(q.split(LENGTHS, 1), k.split(key_lengths, 1), v.split(key_lengths, 1), strict=True)
    separate = torch.cat([m(*part) for part in parts], 1)
    assert_same(packed, separate)
    assert not packed[:, LENGTHS[0] + LENGTHS[1]].any(), "a sequence without keys gives zeros"
    check_gradients_by_name(gradients(packed, of), gradients(separate, of))
