"""What the laws of `test_laws` leave to numbers: blind queries of windows and buckets, the definitions, precision."""

from __future__ import annotations

from functools import partial
from typing import Any

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
    poisoned,
    require_gradients,
)
from torch import Tensor, nn
from truths import has_truth, truth

from longspan.ops.linear import reference
from longspan.ops.linear import torch as chunks
from longspan.ops.window import reference as window_reference
from longspan.testing.laws import assert_zeros_with_finite_gradients

pytestmark = pytest.mark.usefixtures("small_chunks")


# 8. A query that sees no key returns zeros, and its gradient is finite.


@each_case([case for case in all_cases() if case.options.get("first_bucket") == "zero"])
def test_a_blind_first_bucket_gives_zeros(case: Case) -> None:
    m = case.build()
    q, k, v = require_gradients(*case.inputs())
    out = m(q, k, v, causal=True)
    blind = (torch.arange(T) < case.options["blind_spot"]).expand(B, -1)
    assert_zeros_with_finite_gradients(m, out, blind, {"q": q, "k": k, "v": v})
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
    assert_zeros_with_finite_gradients(m, m(q, k, v, key_mask=mask), blind, {"q": q, "k": k, "v": v})


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


# 10. Low precision.


def sums_to_one(case: Case) -> bool:
    """Whether a query's weights sum to one; compressed rows, unnormalized products and features that do not sum to
    one themselves make no such promise.
    """
    o = case.options
    if case.name == "split":
        return all(sums_to_one(Case(part["mechanism"], part)) for part in o["parts"])
    if case.name in ("linformer", "decay", "delta") or o.get("memory") == "delta" or o.get("output_scale", 1.0) != 1:
        return False
    if o.get("normalize", "query") == "feature":
        return o.get("feature_map") != "elu"
    return o.get("normalize", "query") == "query"


@each_case([case for case in all_cases() if sums_to_one(case)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_weights_sum_to_one(case: Case, causal: bool) -> None:
    check_sums(case, causal)


def at_64(case: Case) -> Case:
    """The case with heads of 64, and ⌊D ln D⌋ features where there were those of 5."""
    features = {"num_features": 266} if case.options.get("num_features") == 8 else {}
    return Case(case.name, {**case.options, **features, "head_dim": 64})


# Features of 64 dimensions are further apart than those of 5.
@each_case([at_64(case) for case in all_cases() if sums_to_one(case)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_weights_sum_to_one_at_64(case: Case, causal: bool, real_chunks: None) -> None:
    if not isinstance(case.options.get("feature_map", ""), nn.Module):
        check_sums(case, causal)


@torch.no_grad()
def check_sums(case: Case, causal: bool) -> None:
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


@pytest.mark.parametrize(
    "options",
    [
        {"num_features": 512},
        {"num_features": 1024},
        {"num_features": 1024, "epsilon": 1e-3},
        {"num_features": 1024, "normalize": "feature"},
    ],
    ids=str,
)
def test_sums_over_many_features_are_as_precise(options: dict[str, Any]) -> None:
    """Outputs and gradients of bidirectional attention with many more features than keys: the mean of eight draws."""
    case, f32, f64 = Case("performer", options), torch.float32, torch.float64
    error, allowed = torch.zeros(4, dtype=f64), torch.zeros(4, dtype=f64)
    for _ in range(8):
        m, qkv = case.build(f32), case.inputs(dtype=f32)
        d_out = torch.randn(B, T, case.num_heads, case.value_dim)

        def results(attend: Any, dtype: torch.dtype) -> list[Tensor]:
            x = [y.to(dtype).requires_grad_() for y in qkv]  # noqa: B023
            out = attend(*x)
            return [y.double() for y in (out, *torch.autograd.grad(out, x, d_out.to(dtype)))]  # noqa: B023

        ours, plain = results(m, f32), results(partial(truth, case, m), f32)
        exact = results(partial(truth, case, m.double()), f64)
        error += torch.stack([(x - y).abs().max() for x, y in zip(ours, exact, strict=True)])
        allowed += torch.stack([2 * (x - y).abs().max() for x, y in zip(plain, exact, strict=True)])
        allowed += torch.stack([y.abs().max() * torch.finfo(f32).eps for y in exact])
    assert (error <= allowed).all(), f"errors of out, d_q, d_k, d_v over those allowed: {(error / allowed).tolist()}"
