"""Laws 7 to 10, as in `test_laws`: states are values, blind queries give zeros, gradients, low precision."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    B,
    Case,
    S,
    T,
    all_cases,
    assert_close_to_truth,
    assert_same,
    check_gradients_by_name,
    each_case,
    gradients,
    leaves,
    lengths_to_mask,
    require_gradients,
)
from law_cases import assert_unchanged, by_steps, poisoned, snapshot
from torch import Tensor
from truths import has_truth, truth

from longspan import Mechanism
from longspan.ops import reference
from longspan.ops.linear import torch_chunk as chunks
from longspan.ops.window import reference as window_reference

pytestmark = pytest.mark.usefixtures("small_chunks")


# 7. `select` ≡ indexing, and what else a state can do.


@each_case()
def test_select_equals_indexing(case: Case, grad: bool) -> None:
    m = case.build()
    early, late = case.inputs(batch=3, queries=6), case.inputs(batch=3, queries=7)
    _, state = m.extend(m.new_state(3, dtype=torch.float64), *early, key_mask=lengths_to_mask([6, 2, 5], 6))
    before = snapshot(state)
    expected = m(*late, causal=True, past=state)
    for index in ([2, 0, 0, 1], slice(1, 3), torch.tensor([1])):
        got, _ = m.extend(state.select(index), *(x[index] for x in late))
        assert_same(got, expected[index])
        got, _ = m.step(state.select(index), *(x[index, :1] for x in late))
        assert_same(got, expected[index][:, :1])
        assert_unchanged(state, before)


@each_case()
def test_put_replaces_rows(case: Case) -> None:
    m = case.build()
    old, new, late = (case.inputs(batch=n, queries=t) for n, t in ((3, 6), (2, 4), (3, 5)))
    _, state = m.extend(m.new_state(3, dtype=torch.float64), *old)
    _, rows = m.extend(m.new_state(2, dtype=torch.float64), *new)
    expected = torch.cat(
        [
            m(*(torch.cat([x[1:], z[:1]], 1) for x, z in zip(new, late, strict=True)), causal=True)[:, -5:],
            m(*(torch.cat([x[1:2], z[1:2]], 1) for x, z in zip(old, late, strict=True)), causal=True)[:, -5:],
            m(*(torch.cat([x[:1], z[2:]], 1) for x, z in zip(new, late, strict=True)), causal=True)[:, -5:],
        ]
    )
    both = state.put([2, 0], rows)
    assert both.length.tolist() == [4, 6, 4]
    got, _ = m.extend(both, *late)
    assert_same(got, expected)
    emptied = state.put(slice(0, 2), m.new_state(2, dtype=torch.float64))
    got, _ = m.extend(emptied, *late)
    assert_same(got[:2], m(*(x[:2] for x in late), causal=True))


@each_case()
def test_clone_detach_and_tensors(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    _, state = m.extend(m.new_state(B, dtype=q.dtype), q, k, v)
    tensors = state.tensors()
    assert tensors["length"].dtype == torch.int64
    assert tensors["length"].shape == (B,)
    assert len(tensors) > 1
    assert all(len(x) == B for x in tensors.values())
    assert any(x.requires_grad for x in tensors.values())
    assert not any(x.requires_grad for x in state.detach().tensors().values())
    copy = state.detach().clone()
    for name, x in copy.tensors().items():
        assert torch.equal(x, tensors[name])
        assert x.data_ptr() != tensors[name].data_ptr() or not x.numel(), f"{name} shares memory"
    with torch.no_grad():
        before = snapshot(state)
        m.step(copy, q[:, :1], k[:, :1], v[:, :1])
        assert_unchanged(state, before)
    truncated = m(q, k, v, causal=True, past=state.detach())
    whole = m(q, k, v, causal=True, past=state)
    assert torch.equal(truncated, whole)


# 8. A query that sees no key returns zeros, and its gradient is finite.


def assert_zero_with_finite_gradients(m: Mechanism, out: Tensor, blind: Tensor, **inputs: Tensor) -> None:
    """blind: which (B, T) of the queries see nothing."""
    assert out.isfinite().all()
    assert not out[blind].any(), "a query that sees nothing returned something"
    for name, grad in gradients(out, leaves(m, **inputs)).items():
        assert grad.isfinite().all(), f"the gradient of {name} is not finite"


@each_case()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_seeing_nothing_gives_zeros(case: Case, dtype: torch.dtype) -> None:
    m = case.build(dtype)
    keys = S if m.supports_cross else T
    q, k, v = require_gradients(*case.inputs(keys=keys, dtype=dtype))
    mask = lengths_to_mask([0, 7], keys)
    blind = torch.zeros(B, T, dtype=torch.bool)
    blind[0] = True
    hidden_k, hidden_v = poisoned(mask, k, v)
    out = m(q, hidden_k, hidden_v, key_mask=mask)
    assert_zero_with_finite_gradients(m, out, blind, q=q, k=hidden_k, v=hidden_v)
    none = m.new_state(B, dtype=dtype)
    assert_zero_with_finite_gradients(m, m.read(none, q), torch.ones_like(blind), q=q)
    mask = lengths_to_mask([0, 7], T)
    q, k, v = poisoned(mask, *case.inputs(dtype=dtype))
    out = m(q, k, v, causal=True, key_mask=mask)
    assert_zero_with_finite_gradients(m, out, ~mask, q=q, k=k, v=v)
    out, state = m.extend(m.new_state(B, dtype=dtype), q, k, v, key_mask=mask)
    clean = case.inputs(dtype=dtype)[0]
    assert_zero_with_finite_gradients(m, m.read(state, clean), blind, q=q, k=k, v=v)


@each_case([case for case in all_cases() if case.options.get("first_bucket") == "zero"])
def test_a_blind_first_bucket_gives_zeros(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    out = m(q, k, v, causal=True)
    blind = (torch.arange(T) < case.options["blind_spot"]).expand(B, -1)
    assert_zero_with_finite_gradients(m, out, blind, q=q, k=k, v=v)
    assert out[~blind].abs().amin() > 0


@each_case([case for case in all_cases() if case.name == "local"])
def test_a_window_of_hidden_keys_gives_zeros(case: Case) -> None:
    m = case.build()
    length = 65
    q, k, v = case.inputs(queries=length)
    mask = torch.zeros(B, length, dtype=torch.bool)
    mask[:, :2] = True
    mask[0, 60:] = True
    k, v = poisoned(mask, k, v)
    (q,) = require_gradients(q)
    ones = torch.ones(B, length, case.num_kv_heads, case.value_dim, dtype=torch.float64)
    safe_k = k.detach().nan_to_num(1.0)
    blind = truth(case, m, q, safe_k, ones, key_mask=mask)[:, :, 0, 0] < 0.5
    assert blind.any()
    assert not blind.all()
    assert_zero_with_finite_gradients(m, m(q, k, v, key_mask=mask), blind, q=q, k=k, v=v)


# 9. Outputs and gradients match the definitions.


@each_case([case for case in all_cases() if has_truth(case)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_gradients_match_the_definition(case: Case, causal: bool) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs(keys=T if causal or not m.supports_cross else S))
    of = leaves(m, q=q, k=k, v=v)
    out, expected = m(q, k, v, causal=causal), truth(case, m, q, k, v, causal=causal)
    assert_same(out, expected)
    check_gradients_by_name(gradients(out, of), gradients(expected, of))


@each_case([case for case in all_cases() if has_truth(case)])
def test_gradients_match_the_definition_over_real_chunks(case: Case, real_chunks: None) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs(batch=1, queries=chunks.CHUNK + 1))
    of = leaves(m, q=q, k=k, v=v)
    out, expected = m(q, k, v, causal=True), truth(case, m, q, k, v, causal=True)
    assert_same(out, expected)
    check_gradients_by_name(gradients(out, of), gradients(expected, of))


@each_case([case for case in all_cases() if not has_truth(case) or len(case.options) <= 1])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_gradients_match_finite_differences(case: Case, causal: bool) -> None:
    """Without a definition this is all there is; the plainest of the others are held to it too."""
    m = case.build()
    inputs = require_gradients(*case.inputs(batch=1, queries=3))
    assert torch.autograd.gradcheck(lambda q, k, v: m(q, k, v, causal=causal), inputs, fast_mode=True)


def test_one_key_is_its_value() -> None:
    """What softmax and normalized attention give needs no reference where there is one key."""
    for name in ("softmax", "local", "linear", "performer"):
        case = Case(name, {})
        q, k, v = case.inputs(queries=1)
        assert_same(case.build()(q, k, v, causal=True), v, name)


def test_the_definitions_on_small_numbers() -> None:
    """The reference itself, by hand."""
    q = k = torch.tensor([[[[1.0]], [[2.0]], [[0.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[1.0]], [[10.0]], [[100.0]]]], dtype=torch.float64)
    seen = window_reference.causal_visibility(3)
    e = torch.e
    softmax = window_reference.softmax_attention(q, k, v, seen, scale=0.5).flatten()
    assert_same(softmax, torch.tensor([1.0, (e * 1 + e**2 * 10) / (e + e**2), 37.0], dtype=torch.float64))
    for normalize, expected in {
        "none": [1.0, 2 * 1 + 4 * 10, 0.0],
        "query": [1.0, 42 / 6, 0.0],
        "feature": [1.0, 2 * (1 + 20) / 3, 0.0],
    }.items():
        out = reference.linear_attention(q, k, v, seen, normalize).flatten()
        assert_same(out, torch.tensor(expected, dtype=torch.float64), normalize)
    assert reference.blind_spot_visibility(2, "causal", 5).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
    ]
    assert reference.blind_spot_visibility(2, "zero", 5).sum(1).tolist() == [0, 0, 2, 2, 4]
    assert window_reference.window_visibility(1, 0, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert window_reference.block_visibility(2, 0, 1, 5).sum(1).tolist() == [4, 4, 3, 3, 1]
    alone = window_reference.self_as_last_resort(window_reference.causal_visibility(3))
    assert alone.int().tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0]]


# 10. Large inputs, low precision.


@each_case()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_large_inputs_are_finite(case: Case, dtype: torch.dtype, causal: bool) -> None:
    m = case.build()
    names, inputs = ("q", "k", "v"), require_gradients(*(50 * x for x in case.inputs()))
    exact = m(*inputs, causal=causal)
    expected = gradients(exact, dict(zip(names, inputs, strict=True)))
    m.to(dtype)
    low = require_gradients(*(x.to(dtype) for x in inputs))
    out = m(*low, causal=causal)
    assert out.dtype == dtype
    got = gradients(out, dict(zip(names, low, strict=True)))
    with torch.no_grad():
        stepped, _ = by_steps(m, m.new_state(B, dtype=dtype), *low)
    results = {"output": (out, exact), **{name: (got[name], expected[name]) for name in names}}
    if causal:
        results["steps"] = (stepped, exact)
    for name, (result, wanted) in results.items():
        assert wanted.isfinite().all(), name
        # Only where the answer itself does not fit into the dtype may there be an infinity.
        fits = wanted.abs().amax() < torch.finfo(dtype).max / 2
        assert result.isfinite().all() if fits else not result.isnan().any(), name
    normalized = case.options.get("normalize") != "none"
    assert not normalized or exact.abs().amax() < torch.finfo(dtype).max


def sums_to_one(case: Case) -> bool:
    """Whether a query's weights sum to one; compressed rows, unnormalized products and features that do not sum to
    one themselves make no such promise.
    """
    o = case.options
    if case.name == "split":
        return all(sums_to_one(Case(part["mechanism"], part)) for part in o["parts"])
    if case.name == "linformer" or o.get("output_scale", 1.0) != 1:
        return False
    if o.get("normalize", "query") == "feature":
        return o.get("feature_map") != "elu"
    return o.get("normalize", "query") == "query"


@each_case([case for case in all_cases() if sums_to_one(case)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_weights_sum_to_one(case: Case, causal: bool) -> None:
    m = case.build(torch.float32)
    q, k, v = case.inputs(queries=65, dtype=torch.float32)
    out = m(10 * q, 10 * k, torch.ones_like(v), causal=causal)
    if causal and case.options.get("first_bucket") == "zero":
        out = out[:, case.options["blind_spot"] :]
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-5, rtol=0)


@torch.no_grad()
@each_case([case for case in all_cases() if has_truth(case)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_as_precise_as_plain_torch(case: Case, dtype: torch.dtype, causal: bool) -> None:
    m = case.build(dtype)
    qkv = case.inputs(queries=31, dtype=dtype)
    exact = truth(case, m.double(), *(x.double() for x in qkv), causal=causal)
    m.to(dtype)
    assert_close_to_truth(m(*qkv, causal=causal), truth(case, m, *qkv, causal=causal), exact)
