"""The eleven laws of the protocol as functions of how a mechanism is built.

Each takes ``build(dtype)``, which returns the mechanism in eval mode, and raises AssertionError if the law is broken.
Sizes are distinct primes, so that swapped dimensions show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from longspan.layout import Packing
from longspan.protocol import Mechanism, State
from longspan.testing.compare import (
    Inputs,
    assert_equal_with_gradients,
    assert_same,
    assert_unchanged,
    draw_inputs,
    fill_hidden,
    gradients,
    padding_mask,
    require_grad,
    run_steps,
    snapshot,
    tokens,
    without_queries,
)

B, T, S = 2, 17, 19
LENGTHS = [5, 0, 1, 7, 4]  # of packed sequences
F64 = torch.float64


class Build(Protocol):
    """Build a mechanism in eval mode and in this dtype."""

    def __call__(self, dtype: torch.dtype = F64) -> Mechanism: ...


def check_mechanism(
    factory: type[Mechanism] | Callable[[], Mechanism],
    *,
    reference: Callable[..., Tensor] | None = None,
    seed: int = 0,
) -> None:
    """Check that a mechanism obeys the laws, in float64 to 1e-9.

    Args:
        factory: The class, or a function that returns a new mechanism. The class is built with 6 heads of 5 features, 2
            key/value heads, and values of 7 features.
        reference: The definition, ``reference(q, k, v[, gates], causal=...)`` in plain PyTorch: outputs and gradients
            are compared with it. Without one gradients are compared with finite differences.
        seed: Of the weights and inputs; the global random state is left as it was.

    Raises:
        AssertionError: If a law is broken; the message begins with its number and name.
    """

    def build(dtype: torch.dtype = F64) -> Mechanism:
        torch.manual_seed(seed)
        m = factory(6, 5, num_kv_heads=2, value_dim=7) if isinstance(factory, type) else factory()
        for parameter in m.parameters():
            if not parameter.any():
                nn.init.normal_(parameter)  # Zeros, as of biases, would hide mistakes.
        return m.eval().to(dtype)

    for name, law in LAWS.items():
        with torch.random.fork_rng(devices=[]):
            try:
                law(build)
            except Exception as error:
                raise AssertionError(f"law {name}: {type(error).__name__}: {error}") from error
    if reference is not None:
        with torch.random.fork_rng(devices=[]):
            matches_reference(build, reference)


def steps_equal_parallel(build: Build) -> None:
    """Step by step ≡ parallel, with states saved for gradients and with states updated in place."""
    m = build()
    x = require_grad(draw_inputs(m, B, T))
    parallel = m(**x, causal=True)
    stepped, state = run_steps(m, m.new_state(B, dtype=F64), x)
    assert state.length.tolist() == [T] * B
    assert_equal_with_gradients(m, stepped, parallel, x)
    with torch.no_grad():
        stepped, _ = run_steps(m, m.new_state(B, max_length=T, dtype=F64), x)
    assert_same(stepped, parallel)


def splits_equal_parallel(build: Build) -> None:
    """Any split through `extend` or `past` ≡ parallel; neither `past` nor a state with gradients is changed."""
    m = build()
    x = require_grad(draw_inputs(m, B, T))
    parallel = m(**x, causal=True)
    for number, cuts in enumerate(((5, 5, 11), (0, 1), (3, 4, 8, 12, 16))):
        with torch.set_grad_enabled(number == 0):
            out = _extend_in_parts(m, cuts, parallel, x)
        assert_same(out, parallel)
        if number == 0:
            assert_equal_with_gradients(m, out, parallel, x)


def _extend_in_parts(m: Mechanism, cuts: Sequence[int], parallel: Tensor, x: Inputs) -> Tensor:
    state, outs = m.new_state(B, dtype=F64), []
    for start, stop in zip((0, *cuts), (*cuts, T), strict=True):
        part, before, old = tokens(x, start, stop), snapshot(state), state
        assert_same(m(**part, causal=True, past=state), parallel[:, start:stop], f"past, {start}:{stop}")
        assert_unchanged(state, before)
        out, state = m.extend(old, **part)
        if torch.is_grad_enabled():
            assert_unchanged(old, before)
        outs.append(out)
    assert state.length.tolist() == [T] * B
    return torch.cat(outs, 1)


def future_changes_nothing(build: Build) -> None:
    """Changing future tokens leaves earlier outputs bit-identical, and earlier outputs have no gradient there."""
    for dtype in (F64, torch.float32):
        m, t = build(dtype), 6
        past = m.write(m.new_state(B, dtype=dtype), **without_queries(draw_inputs(m, B, 3, dtype=dtype)))
        now = draw_inputs(m, B, T, dtype=dtype)
        other = {name: torch.cat([x[:, : t + 1], 30 * torch.randn_like(x[:, t + 1 :])], 1) for name, x in now.items()}
        with torch.no_grad():
            for state in (None, past):
                outs = [m(**x, causal=True, past=state)[:, : t + 1] for x in (now, other)]
                assert torch.equal(*outs), "an output depends on later tokens"
        other = require_grad(other)
        for name, grad in gradients(m(**other, causal=True)[:, : t + 1], other).items():
            assert not grad[:, t + 1 :].any(), f"an output has a gradient with respect to later tokens of {name}"
            assert grad.isfinite().all(), f"the gradient of {name} is not finite"


def reading_equals_the_last_query(build: Build) -> None:
    """Reading what was written ≡ the last causal query."""
    m = build()
    x = require_grad(draw_inputs(m, B, S))
    state = m.write(m.new_state(B, dtype=F64), **without_queries(tokens(x, 0, 8)))
    state = m.write(state, **without_queries(tokens(x, 8)))
    assert_equal_with_gradients(m, m.read(state, x["q"][:, -1:]), m(**x, causal=True)[:, -1:], x)


def reading_equals_forward(build: Build) -> None:
    """Reading what was written ≡ bidirectional attention, for mechanisms that fulfil it."""
    m = build()
    if not m.supports_cross:
        return
    x = require_grad(draw_inputs(m, B, T, S))
    scattered = torch.arange(S) * torch.tensor([[5], [8]]) % S < 9  # in no order, and nine in each row
    for mask in (None, padding_mask([13, 6], S), padding_mask([13, 6], S, "left"), scattered):
        written = m.write(m.new_state(B, dtype=F64), **without_queries(x), key_mask=mask)
        assert_equal_with_gradients(m, m.read(written, x["q"]), m(**x, key_mask=mask), x)


def masked_equals_shorter(build: Build) -> None:
    """Masked, with NaN in hidden slots, ≡ shorter, parameter gradients included."""
    m, lengths = build(), (11, 0, 17, 1)
    clean = require_grad(draw_inputs(m, 4, T))
    for side in ("left", "right"):
        mask = padding_mask(lengths, T, side)
        masked = fill_hidden(clean, mask)
        out = m(**masked, causal=True, key_mask=mask)
        shorter = torch.zeros_like(out)
        for b, n in enumerate(lengths):
            if n:
                shorter[b, mask[b]] = m(**{name: x[b : b + 1, mask[b]] for name, x in clean.items()}, causal=True)[0]
        assert not out[~mask].any(), "a hidden slot returned something"
        assert_equal_with_gradients(m, out, shorter, masked, clean)


def masked_equals_shorter_bidirectional(build: Build) -> None:
    """Masked, with NaN in hidden slots, ≡ shorter, for bidirectional attention."""
    m, lengths = build(), (13, 1)
    keys = S if m.supports_cross else T
    clean = require_grad(draw_inputs(m, B, T, keys))
    mask = padding_mask(lengths, keys)
    masked = {"q": clean["q"], **fill_hidden(without_queries(clean), mask)}
    out = m(**masked, key_mask=mask)
    outs, shorter = [], []
    for b, n in enumerate(lengths):
        # Without cross-attention queries and keys are shortened together.
        queries = slice(None) if m.supports_cross else slice(n)
        row = {name: x[b : b + 1, :n] for name, x in clean.items()} | {"q": clean["q"][b : b + 1, queries]}
        shorter.append(m(**row).flatten(0, 1))
        outs.append(out[b, queries])
    assert_equal_with_gradients(m, torch.cat(outs), torch.cat(shorter), masked, clean)


def masked_states_equal_shorter(build: Build) -> None:
    """States written under a mask ≡ states of the shorter sequences."""
    m = build()
    for side, with_gradients in (("left", True), ("right", False)):
        for max_length in (None, T + 5):
            with torch.set_grad_enabled(with_gradients):
                _check_masked_states(m, side, max_length)


def _check_masked_states(m: Mechanism, side: str, max_length: int | None) -> None:
    x, more, lengths = draw_inputs(m, B, T), draw_inputs(m, B, 5), (11, 4)
    mask = padding_mask(lengths, T, side)
    empty = m.new_state(B, max_length=max_length, dtype=F64)
    written = m.write(empty.clone(), **without_queries(fill_hidden(x, mask)), key_mask=mask)
    out, state = m.extend(empty, **fill_hidden(x, mask), key_mask=mask)
    assert state.length.tolist() == written.length.tolist() == list(lengths)
    for after in (state, written):
        late, _ = m.extend(after.clone(), **more)
        read = m.read(after, more["q"])
        for b in range(B):
            shorter = {name: y[b : b + 1, mask[b]] for name, y in x.items()}
            row = {name: torch.cat([y, more[name][b : b + 1]], 1) for name, y in shorter.items()}
            whole = m(**row, causal=True)
            assert_same(late[b : b + 1], whole[:, -5:])
            assert_same(out[b : b + 1, mask[b]], whole[:, :-5])
            alone = m.write(m.new_state(1, dtype=F64), **without_queries(shorter))
            assert_same(read[b : b + 1], m.read(alone, more["q"][b : b + 1]))


def packed_equals_separate(build: Build) -> None:
    """Packed ≡ separate, causal and bidirectional."""
    m = build()
    x = require_grad(draw_inputs(m, 1, sum(LENGTHS)))
    for causal in (True, False):
        packed = m(**x, causal=causal, packing=Packing.from_lengths(LENGTHS))
        separate = torch.cat([m(**row, causal=causal) for row in _split(x, LENGTHS)], 1)
        assert_equal_with_gradients(m, packed, separate, x)


def packed_cross_attention_equals_separate(build: Build) -> None:
    """Packed ≡ separate, with queries and keys packed differently."""
    m, key_lengths = build(), [3, 6, 0, 1, 9]
    if not m.supports_cross:
        return
    x = require_grad(draw_inputs(m, 1, sum(LENGTHS), sum(key_lengths)))
    packed = m(**x, packing=Packing.from_lengths(LENGTHS), key_packing=Packing.from_lengths(key_lengths))
    parts = zip(x["q"].split(LENGTHS, 1), _split(without_queries(x), key_lengths), strict=True)
    assert_equal_with_gradients(m, packed, torch.cat([m(q=q, **row) for q, row in parts], 1), x)
    assert not packed[:, LENGTHS[0] + LENGTHS[1]].any(), "a sequence without keys returned something"


def packed_states_equal_separate(build: Build) -> None:
    """Packed ≡ separate through states, saved for gradients and updated in place."""
    m, second = build(), [0, 6, 1, 3, 2]
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            early, late = draw_inputs(m, 1, sum(LENGTHS)), draw_inputs(m, 1, sum(second))
            packings = Packing.from_lengths(LENGTHS), Packing.from_lengths(second)
            empty = m.new_state(len(LENGTHS), dtype=F64)
            written = m.write(empty.clone(), **without_queries(early), packing=packings[0])
            out, state = m.extend(empty, **early, packing=packings[0])
            assert state.length.tolist() == written.length.tolist() == LENGTHS
            outs = {"past": m(**late, causal=True, packing=packings[1], past=state)}
            outs["write"] = m.extend(written.clone(), **late, packing=packings[1])[0]
            before = snapshot(state)
            outs["extend"], after = m.extend(state, **late, packing=packings[1])
            if with_gradients:
                assert_unchanged(state, before)
            assert after.length.tolist() == [a + b for a, b in zip(LENGTHS, second, strict=True)]
            both = zip(_split(early, LENGTHS), _split(late, second), strict=True)
            whole = [m(**{n: torch.cat([x, b[n]], 1) for n, x in a.items()}, causal=True) for a, b in both]
            assert_same(out, torch.cat([x[:, :n] for x, n in zip(whole, LENGTHS, strict=True)], 1))
            for name, got in outs.items():
                assert_same(got, torch.cat([x[:, n:] for x, n in zip(whole, LENGTHS, strict=True)], 1), name)


def _split(x: Inputs, lengths: list[int]) -> list[Inputs]:
    rows = zip(*(y.split(lengths, 1) for y in x.values()), strict=True)
    return [dict(zip(x, row, strict=True)) for row in rows]


def select_and_put_equal_indexing(build: Build) -> None:
    """`select` and `put` ≡ indexing the batch."""
    m = build()
    early, late = draw_inputs(m, 3, 6), draw_inputs(m, 3, 7)
    mask = padding_mask([6, 2, 5], 6)
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            _, state = m.extend(m.new_state(3, dtype=F64), **early, key_mask=mask)
            before, expected = snapshot(state), m(**late, causal=True, past=state)
            for index in ([2, 0, 0, 1], slice(1, 3), torch.tensor([1])):
                chosen = {name: x[index] for name, x in late.items()}
                assert_same(m.extend(state.select(index), **chosen)[0], expected[index], "select, then extend")
                assert_same(m.step(state.select(index), **tokens(chosen, 0, 1))[0], expected[index][:, :1])
                assert_unchanged(state, before)
            rows = state.select([0, 2])
            both = m.new_state(3, dtype=F64).put([2, 0], rows)
            assert both.length.tolist() == [5, 0, 6]
            got, _ = m.extend(both, **{name: x[[2, 1, 0]] for name, x in late.items()})
            assert_same(got[::2], expected[[2, 0]], "put, then extend")
            assert_same(got[1:2], m(**{name: x[1:2] for name, x in late.items()}, causal=True), "rows left alone")


def states_are_values(build: Build) -> None:
    """`clone`, `detach` and `tensors` hold a state's contents, batch-first and apart from it."""
    m = build()
    x = require_grad(draw_inputs(m, B, T))
    _, state = m.extend(m.new_state(B, dtype=F64), **x)
    contents = state.tensors()
    assert contents["length"].dtype == torch.int64
    assert all(len(y) == B for y in contents.values()), "a tensor of the state is not batch-first"
    assert any(y.requires_grad for y in contents.values())
    assert not any(y.requires_grad for y in state.detach().tensors().values())
    copy = state.detach().clone()
    for name, y in copy.tensors().items():
        assert torch.equal(y, contents[name])
        assert y.data_ptr() != contents[name].data_ptr() or not y.numel(), f"{name} shares memory with its clone"
    with torch.no_grad():
        before = snapshot(state)
        m.step(copy, **tokens(x, 0, 1))
        assert_unchanged(state, before)
    assert torch.equal(m(**x, causal=True, past=state.detach()), m(**x, causal=True, past=state))


def blind_queries_return_zeros(build: Build) -> None:
    """A query that sees no key returns zeros, with finite gradients."""
    for dtype in (F64, torch.bfloat16):
        m = build(dtype)
        keys = S if m.supports_cross else T
        x, mask = require_grad(draw_inputs(m, B, T, keys, dtype)), padding_mask([0, 7], keys)
        blind = torch.zeros(B, T, dtype=torch.bool)
        blind[0] = True
        hidden = {"q": x["q"], **fill_hidden(without_queries(x), mask)}
        assert_zeros_with_finite_gradients(m, m(**hidden, key_mask=mask), blind, hidden)
        empty = m.new_state(B, dtype=dtype)
        assert_zeros_with_finite_gradients(m, m.read(empty, x["q"]), torch.ones_like(blind), x)
        mask = padding_mask([0, 7], T)
        hidden = fill_hidden(draw_inputs(m, B, T, dtype=dtype), mask)
        assert_zeros_with_finite_gradients(m, m(**hidden, causal=True, key_mask=mask), ~mask, hidden)
        _, state = m.extend(m.new_state(B, dtype=dtype), **hidden, key_mask=mask)
        assert_zeros_with_finite_gradients(m, m.read(state, x["q"].detach()), blind, hidden)


def assert_zeros_with_finite_gradients(m: Mechanism, out: Tensor, blind: Tensor, inputs: Inputs) -> None:
    """Assert that the outputs of blind queries (B, T) are zero, and everything is finite."""
    assert out.isfinite().all()
    assert not out[blind].any(), "a query that sees nothing returned something"
    for name, grad in gradients(out, {**inputs, **dict(m.named_parameters())}).items():
        assert grad.isfinite().all(), f"the gradient of {name} is not finite"


def gradients_equal_finite_differences(build: Build) -> None:
    """Gradients match finite differences."""
    m = build()
    x = require_grad(draw_inputs(m, 1, 3))
    for causal in (True, False):

        def run(*given: Tensor, causal: bool = causal) -> Tensor:
            return m(**dict(zip(x, given, strict=True)), causal=causal)

        assert torch.autograd.gradcheck(run, tuple(x.values()), fast_mode=True)


def matches_reference(build: Build, reference: Callable[..., Tensor]) -> None:
    """Outputs and gradients match the definition."""
    m = build()
    for causal in (True, False):
        x = require_grad(draw_inputs(m, B, T))
        assert_equal_with_gradients(m, m(**x, causal=causal), reference(**x, causal=causal), x)


def large_inputs_stay_finite(build: Build) -> None:
    """Large inputs stay finite in bfloat16 and float16, forward, backward and step by step."""
    for dtype in (torch.bfloat16, torch.float16):
        for causal in (True, False):
            m = build()
            x = require_grad({name: 50 * y for name, y in draw_inputs(m, B, T).items()})
            exact = m(**x, causal=causal)
            expected = gradients(exact, x)
            m.to(dtype)
            low = require_grad({name: y.to(dtype) for name, y in x.items()})
            out = m(**low, causal=causal)
            assert out.dtype == dtype
            results = {"output": (out, exact)}
            results |= {name: (grad, expected[name]) for name, grad in gradients(out, low).items()}
            if causal:
                with torch.no_grad():
                    results["steps"] = run_steps(m, m.new_state(B, dtype=dtype), low)[0], exact
            for name, (result, wanted) in results.items():
                assert wanted.isfinite().all(), f"{name} is not finite in float64"
                # Only where the result itself does not fit into the dtype may there be an infinity.
                fits = wanted.abs().amax() < torch.finfo(dtype).max / 2
                assert result.isfinite().all() if fits else not result.isnan().any(), f"{name} is not finite in {dtype}"


def merged_states_equal_one(build: Build) -> None:
    """state(a ⧺ b) ≡ state(a).merge(state(b)), with gradients, and merging is associative."""
    m = build()
    x, more = require_grad(draw_inputs(m, B, T)), draw_inputs(m, B, 4)
    for cuts, start in (((5, 5, 11), 0), ((0, 4), 0), ((1,), 0), ((16,), 0), ((3, 9), 7)):
        states = []
        for a, b in zip((0, *cuts), (*cuts, T), strict=True):
            states.append(_written(m, tokens(x, a, b), start + a))
        whole = _written(m, x, start)
        left, right = states[0], states[-1]
        for state in states[1:]:
            left = left.merge(state)
        for state in reversed(states[:-1]):
            right = state.merge(right)
        for merged in (left, right):
            assert merged.length.tolist() == [T] * B
            assert merged.end.tolist() == [start + T] * B
            assert_equal_with_gradients(m, _use(m, merged, more), _use(m, whole, more), x)


def merged_rows_of_different_lengths_equal_one(build: Build) -> None:
    """Merging ≡ writing one after the other, also where rows have different lengths, and none."""
    m = build()
    first, second, more = draw_inputs(m, 3, T), draw_inputs(m, 3, 7), draw_inputs(m, 3, 4)
    masks = padding_mask([11, 0, 2], T), padding_mask([0, 5, 7], 7)
    with torch.no_grad():
        one = m.write(m.new_state(3, dtype=F64), **without_queries(first), key_mask=masks[0])
        later = m.new_state(3, start=one.end, transition=True, dtype=F64)
        later = m.write(later, **without_queries(second), key_mask=masks[1])
        before = snapshot(one), snapshot(later)
        merged = one.merge(later)
        assert_unchanged(one, before[0])
        assert_unchanged(later, before[1])
        both = m.write(one, **without_queries(second), key_mask=masks[1])
        assert merged.length.tolist() == [11, 5, 9]
        assert_same(_use(m, merged, more), _use(m, both, more))


def _written(m: Mechanism, x: Inputs, start: int) -> State:
    """Write one half of the tokens and extend by the rest, from position `start`."""
    half = x["q"].shape[1] // 2
    state = m.new_state(B, start=start or None, transition=True, dtype=F64)
    state = m.write(state, **without_queries(tokens(x, 0, half)))
    return m.extend(state, **tokens(x, half))[1]


def _use(m: Mechanism, state: State, more: Inputs) -> Tensor:
    """Read a state, and extend it: what it is good for."""
    with_more, after = m.extend(state.clone(), **more)
    return torch.cat([m.read(state, more["q"]), with_more, m.read(after, more["q"])], 1)


LAWS: dict[str, Callable[[Build], None]] = {
    "1, step by step ≡ parallel": steps_equal_parallel,
    "2, any split ≡ parallel": splits_equal_parallel,
    "3, the future changes nothing": future_changes_nothing,
    "4, reading ≡ the last causal query": reading_equals_the_last_query,
    "4, reading ≡ bidirectional attention": reading_equals_forward,
    "5, masked ≡ shorter": masked_equals_shorter,
    "5, masked ≡ shorter, bidirectional": masked_equals_shorter_bidirectional,
    "5, masked ≡ shorter, in states": masked_states_equal_shorter,
    "6, packed ≡ separate": packed_equals_separate,
    "6, packed ≡ separate, cross-attention": packed_cross_attention_equals_separate,
    "6, packed ≡ separate, in states": packed_states_equal_separate,
    "7, select and put ≡ indexing": select_and_put_equal_indexing,
    "7, states are values": states_are_values,
    "8, a query that sees nothing returns zeros": blind_queries_return_zeros,
    "9, gradients ≡ finite differences": gradients_equal_finite_differences,
    "10, large inputs stay finite": large_inputs_stay_finite,
    "11, merge": merged_states_equal_one,
    "11, merge, rows of different lengths": merged_rows_of_different_lengths_equal_one,
}
