"""The Triton kernels of the delta rule with one decay per head under Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gated_cases import (
    NAMES,
    Arguments,
    Case,
    arguments,
    by_kernels,
    check,
    check_sums,
    errors,
    grouped_keys,
    partly_parallel,
    with_keys,
)
from helpers import within_tolerance
from interpreter import interpreted

from longspan.ops import gated
from longspan.ops.common import dispatch
from longspan.ops.common.launch import Workspace
from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved

tl = pytest.importorskip("triton.language")
delta = pytest.importorskip("longspan.ops.gated.triton.delta")

DELTA = Case(B=1, H=1, Hkv=1, delta=True)
CASES = [
    replace(DELTA, T=2, B=2, E=5),
    replace(DELTA, T=63, H=4, Hkv=2, E=3),
    replace(DELTA, T=65, beta=False, state=False, strided=True),
    replace(DELTA, T=64, H=2, Hkv=2, decay=None),
    replace(DELTA, T=131, strength=2.0, forgets=(-math.inf, -1e30, -104.0, -20.0, 0.0)),
]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and CASES.index(case) % 2:
        pytest.skip("every other case will do")
    check(case, arguments(case, dtype, "cpu"), dtype, (arguments(case, dtype, "cpu") for _ in range(3)))


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("case", [*CASES, replace(DELTA, T=67, D=130, E=70), replace(DELTA, T=67, D=67, E=65)], ids=str)
def test_bfloat16(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_gradients_of_gates_summed_over_tokens() -> None:
    case = replace(DELTA, T=512, H=4, Hkv=4, D=64, E=64, state=False)
    check_sums(case, (arguments(case, torch.bfloat16, "cpu") for _ in range(4)), torch.bfloat16)


@interpreted
@pytest.mark.parametrize("state", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_segments(state: bool) -> None:
    case = replace(DELTA, T=32 * 13 + 5, state=state)
    check(case, arguments(case, torch.float32, "cpu"), torch.float32)


@interpreted
@pytest.mark.parametrize("strength", [1.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_segments_that_forget_the_state_before_them(strength: float) -> None:
    """Four segments of five chunks: their states depend on the last four, or on two segments."""
    case = replace(DELTA, T=32 * 17 + 5, strength=strength)
    d_out, d_state, x = arguments(case, torch.float32, "cpu")
    check(case, (d_out, d_state, x), torch.float32)


@interpreted
def test_segments_with_keys_that_undo_the_decay() -> None:
    """Keys of norm 2 and β = 1 multiply one direction of the state by −3 at every token, and decays by 0.32."""
    case = replace(DELTA, T=32 * 17 + 5, D=1, beta=False)

    def draw() -> Arguments:
        d_out, d_state, x = arguments(case, torch.float32, "cpu")
        x = x._replace(k=torch.full_like(x.k, 2.0), log_decay=torch.full((1, case.T, 1, 1), math.log(0.32)))
        return d_out, d_state, x

    check(case, draw(), torch.float32, (draw() for _ in range(3)))


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("decay", "noise", "names"),
    [
        (None, 0.3, NAMES),
        (None, 0.05, ["out", "state", "d_v", "d_start"]),
        ("head", 0.1, NAMES),
    ],
)
def test_nearly_parallel_keys_that_reflect(
    decay: str | None, noise: float, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """β = 2: the entries of the triangular inverse alternate, and what is written is a small difference."""
    case = replace(DELTA, T=131, D=64, E=16, decay=decay, strength=0.1)
    keys = torch.randn(64) + noise * torch.randn(1, 131, 1, 64)
    given = with_keys(arguments(case, torch.bfloat16, "cpu"), keys, 2.0)
    found = errors(case, given, torch.bfloat16)
    within_tolerance([{name: found[name] for name in names if name in found}])
    # Single bfloat16 numbers would not do.
    monkeypatch.setattr(delta, "MILD", tl.constexpr(math.inf))
    found = errors(case, given, torch.bfloat16)
    with pytest.raises(AssertionError, match="times as far"):
        within_tolerance([{name: found[name] for name in names if name in found}])


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    "case", [replace(DELTA, T=64 * 4 + 3, D=64, E=16), replace(DELTA, T=64 * 17, D=16, E=16)], ids=str
)
def test_some_chunks_of_nearly_parallel_keys(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked and mild chunks in turn, in one segment and in four; memory that is not written holds no number."""
    case = replace(case, strength=0.05)
    given = partly_parallel(case, arguments(case, torch.bfloat16, "cpu"))
    monkeypatch.setattr(Workspace, "allocate", lambda self, like, **_: torch.full((self.size,), math.nan))
    check(case, given, torch.bfloat16)
    results = [by_kernels(case, given)]
    for limit in (0.0, math.inf):  # All chunks are marked, and none.
        monkeypatch.setattr(delta, "MILD", tl.constexpr(limit))
        results.append(by_kernels(case, given))
    assert not torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][0], results[2][0])


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("decay", [None, "head"])
def test_pairs_of_nearly_equal_keys_are_mild(decay: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(DELTA, T=131, D=128, E=16, decay=decay, strength=0.1)
    given = arguments(case, torch.bfloat16, "cpu")
    given = with_keys(given, grouped_keys(given[2].k.shape, 2), 1.0)
    check(case, given, torch.bfloat16)
    results = [by_kernels(case, given)]
    for limit in (math.inf, 0.0):
        monkeypatch.setattr(delta, "MILD", tl.constexpr(limit))
        results.append(by_kernels(case, given))
    usual, single, exact = ([y for y in result if y is not None] for result in results)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(usual, single, strict=True))
    assert not torch.equal(usual[0], exact[0])


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_chunks_that_are_nearly_mild() -> None:
    """Groups of three nearly equal keys with β = 1, and independent keys with β up to 2."""
    case = replace(DELTA, T=131, D=64, E=64, decay=None)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cpu")
    assert x.beta is not None
    check(case, with_keys((d_out, d_state, x), grouped_keys(x.k.shape, 3), 1.0), torch.bfloat16)
    check(case, (d_out, d_state, x._replace(beta=2 * x.beta)), torch.bfloat16)


@interpreted
def test_tokens_that_write_nothing_have_gradients() -> None:
    case = replace(DELTA, T=37)
    d_out, d_state, x = arguments(case, torch.float32, "cpu")
    assert x.beta is not None
    x.beta[:, ::3] = 0
    check(case, (d_out, d_state, x), torch.float32)
    assert by_kernels(case, (d_out, d_state, x))[6][:, ::3].abs().min() > 0


@interpreted
def test_backward_uses_what_is_saved_and_leaves_it() -> None:
    d_out, d_state, x = arguments(replace(DELTA, T=70), torch.float32, "cpu")
    problem, kernels = GatedProblem(True, 0.7, "delta"), gated._kernels("delta")
    saved = kernels.forward(x, problem)[2]
    before = saved.clone()
    first, second = (kernels.backward(GatedSaved(d_out, d_state, saved), x, problem) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    torch.testing.assert_close(saved, before, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(kernels.backward(GatedSaved(d_out, d_state, saved.zero_()), x, problem)[0], first[0])


@interpreted
def test_the_kernels_are_a_proper_operator() -> None:
    _, _, x = arguments(replace(DELTA, T=3), torch.float32, "cpu")
    leaves = [y.requires_grad_() for y in x]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.longspan.gated_linear.default, (*leaves, True, 0.5, "delta"), test_utils=tests)


@interpreted
def test_direct_and_traced_calls_agree() -> None:
    d_out, d_state, x = arguments(replace(DELTA, T=37), torch.float32, "cpu")
    results = []
    for call in (gated._GatedLinear.direct, gated._GatedLinear.traced):
        leaves = GatedInputs(*(y.detach().requires_grad_() for y in x))
        out, state = call(*leaves, *GatedProblem(True, 0.7, "delta"))[:2]
        results.append((out, state, *torch.autograd.grad((out, state), leaves, (d_out, d_state))))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_the_dispatch_knows_the_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    _, _, x = arguments(DELTA, torch.bfloat16, "cpu")
    assert gated.why_not_triton(x, True) is None
    assert gated.triton_algorithm(x, True) == "delta"
    assert gated.triton_algorithm(x._replace(log_decay=None), True) == "delta"
