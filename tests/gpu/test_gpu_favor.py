"""The Triton kernels of causal FAVOR+ on a GPU: lengths, sizes, states, and what the interpreter cannot show."""

from __future__ import annotations

import copy
from dataclasses import replace

import kernel_cases
import pytest
import torch
from kernel_cases import (
    NAMES,
    Arguments,
    Case,
    arguments,
    by_kernels,
    by_short_kernels,
    check,
    check_epsilon,
    forward,
    kernel_problem,
)

from longspan import build_mechanism
from longspan.mechanisms.feature_maps import orthogonal_rows
from longspan.ops.linear import LinearInputs, causal_linear, choose_algorithm

FAVOR = Case(T=517, B=1, H=2, Hkv=2, D=64, E=64, feature_map="favor", num_features=256)

CASES = [
    *(replace(FAVOR, T=T) for T in (2, 63, 64, 65, 127, 128, 129, 1031, 4099)),
    replace(FAVOR, T=1031, state=False),
    *(replace(FAVOR, T=T, stateless=True) for T in (64, 65, 512, 513)),
    replace(FAVOR, T=389, B=3, H=4, stateless=True, lengths=(0, 1, 300)),
    replace(FAVOR, T=130, D=128, E=128, stateless=True),
    replace(FAVOR, B=3, lengths=(0, 1, 400)),
    replace(FAVOR, strided=True),
    replace(FAVOR, size=3.0),
    replace(FAVOR, H=6, lengths=(300,)),
    replace(FAVOR, num_features=100),
    replace(FAVOR, T=300, D=33, E=100, Hkv=1, num_features=256),
    replace(FAVOR, T=300, D=128, E=20, num_features=100),
    replace(FAVOR, T=130, D=16, E=16, num_features=19),
    replace(FAVOR, T=7, D=16, E=16, num_features=33),
    replace(FAVOR, T=300, D=16, E=128, num_features=19),
    *(replace(FAVOR, T=300, num_features=number) for number in (266, 320, 513, 1024)),
    replace(FAVOR, T=300, D=128, E=128, num_features=256, H=4),
    replace(FAVOR, T=300, D=128, E=128, num_features=621),
    replace(FAVOR, T=300, D=16, E=130, num_features=266),
    replace(FAVOR, T=300, D=256, E=256, num_features=266),
    replace(FAVOR, T=130, D=160, E=192, num_features=1024, lengths=(99,)),
]


def given(case: Case, *, exact: bool = True) -> Arguments:
    """exact: a projection that bfloat16 holds, as longspan draws them."""
    d_out, d_kv, tensors = arguments(case, torch.bfloat16, "cuda")
    weight = tensors[3]
    assert weight is not None
    if exact:
        weight = weight.to(torch.bfloat16).float()
    assert kernel_problem(case, tensors).algorithm == "favor"
    return d_out, d_kv, (*tensors[:3], weight, *tensors[4:])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case) -> None:
    check(case, given(case), torch.bfloat16)


@pytest.mark.parametrize(
    "case",
    [
        *(replace(FAVOR, T=T, stateless=True) for T in (2, 65, 512)),
        replace(FAVOR, T=513, B=8, stateless=True),
        replace(FAVOR, T=1024, B=2, H=16, Hkv=16, stateless=True),
        replace(FAVOR, T=1031, B=2, H=32, Hkv=16, stateless=True, lengths=(1031, 700), num_features=257),
        replace(FAVOR, T=389, B=3, H=4, stateless=True, lengths=(0, 1, 300)),
        replace(FAVOR, T=389, B=2, H=4, stateless=True, strided=True, num_features=266),
        replace(FAVOR, T=300, D=128, E=100, stateless=True),
        replace(FAVOR, T=130, D=160, E=192, num_features=321, stateless=True),
    ],
    ids=str,
)
def test_short_sequences(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "by_kernels", by_short_kernels)
    arguments = given(case, exact=case.num_features not in (257, 266))
    check(case, arguments, torch.bfloat16)
    # The programs that scan read what others have just written: two inputs in turns, so that stale sums are wrong.
    draws = arguments, given(case)
    expected = [by_short_kernels(case, draw) for draw in draws]
    for i in range(100):
        for name, x, y in zip(NAMES, by_short_kernels(case, draws[i % 2]), expected[i % 2], strict=True):
            assert name == "den" or x is None or torch.equal(x, y), name


@pytest.mark.parametrize("case", [FAVOR, replace(FAVOR, T=65, H=4)], ids=str)
def test_a_projection_that_needs_two_products(case: Case) -> None:
    check(case, given(case, exact=False), torch.bfloat16)


@pytest.mark.parametrize("epsilon", [1e-4, 1e-2])
@pytest.mark.parametrize(
    "case",
    [
        replace(FAVOR, H=4, num_features=266),
        replace(FAVOR, T=300, B=2, D=128, E=128, lengths=(0, 250), state=False),
        replace(FAVOR, T=130, D=16, E=200, num_features=19),
    ],
    ids=str,
)
def test_epsilon(case: Case, epsilon: float) -> None:
    check_epsilon(case, epsilon, torch.bfloat16, "cuda")


def test_a_mechanism_with_an_epsilon_and_a_phantom() -> None:
    mechanism = build_mechanism("performer", 2, 64, num_features=266, epsilon=1e-2, phantom=0.5)
    x = [torch.randn(2, 300, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    key_mask = torch.arange(300) < torch.tensor([[300], [131]])
    for causal in (True, False):
        expected = mechanism(*x, causal=causal, key_mask=key_mask)
        there = copy.deepcopy(mechanism).cuda()
        assert there._fused_epsilon(*(t.cuda() for t in x))
        out = there(*(t.cuda() for t in x), causal=causal, key_mask=key_mask.cuda())
        torch.testing.assert_close(out.cpu(), expected, rtol=2**-6, atol=2**-6)


def test_the_second_product_counts() -> None:
    case = replace(FAVOR, state=False)
    _, _, (q, k, v, weight, *rest) = given(case, exact=False)
    assert weight is not None
    exact, rounded = (forward(case, (q, k, v, w, *rest))[3] for w in (weight, weight.bfloat16().float()))
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("size", [10.0, 50.0])
def test_large_inputs(size: float) -> None:
    case = replace(FAVOR, size=size, state=False)
    for name, result in zip(NAMES, by_kernels(case, given(case)), strict=True):
        assert result.isfinite().all(), name


def test_the_same_bits_twice() -> None:
    case = replace(FAVOR, T=2111, B=2, H=4)
    arguments = given(case)
    for first, second in zip(by_kernels(case, arguments), by_kernels(case, arguments), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("change", [0.5, 5.0, 100.0])
def test_the_future_moves_no_bit(change: float) -> None:
    case = replace(FAVOR, T=1031)
    _, _, (q, k, v, *rest) = given(case)
    before = forward(case, (q, k, v, *rest))
    for cut in (300, 320, 1000):
        later = torch.arange(case.T, device="cuda")[:, None, None] >= cut
        after = forward(case, (q, torch.where(later, k * change, k), torch.where(later, -v, v), *rest))
        for i in (0, 3):
            assert torch.equal(before[i][:, :cut], after[i][:, :cut])


def test_the_future_has_no_gradient_from_the_past() -> None:
    _, _, (q, k, v, weight, *_) = given(replace(FAVOR, state=False))
    x = [t.requires_grad_() for t in (q, k, v)]
    out, _ = causal_linear(*x, feature_map="favor", weight=weight)
    for grad in torch.autograd.grad(out[:, :300].float().square().sum(), x):
        assert not grad[:, 300:].any()


def test_ones_come_back() -> None:
    _, _, (q, k, v, weight, *_) = given(replace(FAVOR, state=False))
    out, _ = causal_linear(q, k, torch.ones_like(v), feature_map="favor", weight=weight)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=2**-7, atol=0)


def test_two_calls_with_a_state_are_one() -> None:
    _, _, (q, k, v, weight, *_) = given(replace(FAVOR, T=700, state=False))
    expected, end = causal_linear(q, k, v, feature_map="favor", weight=weight)
    first, sums = causal_linear(q[:, :333], k[:, :333], v[:, :333], feature_map="favor", weight=weight)
    second, sums = causal_linear(q[:, 333:], k[:, 333:], v[:, 333:], feature_map="favor", weight=weight, sums=sums)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sums.kv, end.kv, rtol=1e-2, atol=1e-2 * end.kv.abs().max().item())
    torch.testing.assert_close(sums.shift, end.shift)


def test_compiled_whole_and_for_any_length() -> None:
    weight = orthogonal_rows(100, 16, unit=False).cuda()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_linear(q, k, v, feature_map="favor", weight=weight)[0] * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (130, 257, 1031):
            x = [torch.randn(2, T, 3, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            out, plain = compiled(*x), attend(*x)
            assert torch.equal(out, plain)
            d = torch.randn_like(out)
            for ours, theirs in zip(torch.autograd.grad(out, x, d), torch.autograd.grad(plain, x, d), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("batch", "heads", "dim"), [(1, 16, 64), (4, 8, 64), (2, 8, 32), (4, 8, 128)])
def test_memory_stays_near_the_tensors(batch: int, heads: int, dim: int) -> None:
    weight = orthogonal_rows(256, dim, unit=False).cuda()
    shape = batch, 8192, heads, dim
    x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    d_out = torch.randn_like(x[0])
    own = 4 * d_out.numel() * d_out.element_size()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(causal_linear(*x, feature_map="favor", weight=weight)[0], x, d_out)
    assert torch.cuda.max_memory_allocated() - before + own <= 1.5 * 2 * own


@pytest.mark.parametrize("state", [False, True])
def test_opcheck(state: bool) -> None:
    _, _, (q, k, v, *rest) = given(Case(T=130, D=16, E=16, feature_map="favor", num_features=19))
    if not state:
        rest[3:] = [None, None]
    problem = kernel_problem(FAVOR, (q, k, v, *rest))
    x = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.longspan.causal_linear.default, (*x, *rest, None, *problem))


def test_a_mechanism_with_its_own_features_runs_on_the_kernels() -> None:
    q = torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16, device="cuda")
    for number in (16, 266, 1024):
        inputs = LinearInputs(q, q, q, torch.zeros(number, 64, device="cuda"), *[None] * 4)
        assert choose_algorithm(inputs, "favor", True, 1) == "favor"
