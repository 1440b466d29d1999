"""The Triton kernels of causal FAVOR+ under Triton's interpreter, on the CPU, against eager PyTorch."""

from __future__ import annotations

from typing import Any

import kernel_cases
import pytest
import torch
from interpreter import interpreted
from kernel_cases import (
    NAMES,
    Arguments,
    Case,
    arguments,
    backward,
    by_kernels,
    by_short_kernels,
    check,
    check_epsilon,
    forward,
    kernel_problem,
)
from torch import Tensor

from longspan import build_mechanism
from longspan.mechanisms.feature_maps import orthogonal_rows
from longspan.ops import linear
from longspan.ops.linear import Sums, causal_linear, causal_linear_out, sum_dtype

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of exponentials in slots that are then masked

CASES = [
    Case(T=2, B=1, H=2, Hkv=1, feature_map="favor", num_features=19, state=False),
    Case(T=63, B=1, H=1, Hkv=1, feature_map="favor", num_features=70),
    Case(T=64, B=1, H=2, Hkv=2, feature_map="favor", num_features=19, lengths=(40,)),
    Case(T=65, B=1, H=4, Hkv=2, feature_map="favor", num_features=19),
    Case(T=193, B=2, H=1, Hkv=1, D=33, E=20, feature_map="favor", num_features=19, lengths=(0, 150)),
    Case(T=300, B=1, H=1, Hkv=1, feature_map="favor", num_features=19, size=4),
    Case(T=65, B=1, H=2, Hkv=1, feature_map="favor", num_features=19, stateless=True, lengths=(64,)),
]
# Wider, and of more features than one program holds at once.
LARGE = [
    Case(T=65, B=1, H=1, Hkv=1, feature_map="favor", num_features=266, state=False),
    Case(T=65, B=1, H=1, Hkv=1, D=131, E=70, feature_map="favor", num_features=19),
]
# Without a state: several chunks in a segment, several segments, hidden keys, groups.
SHORT = [
    Case(T=2, B=1, H=2, Hkv=1, feature_map="favor", num_features=19, stateless=True),
    Case(T=64, B=1, H=2, Hkv=2, feature_map="favor", num_features=70, stateless=True, lengths=(40,)),
    Case(T=193, B=2, H=2, Hkv=1, D=33, E=20, feature_map="favor", num_features=19, stateless=True, lengths=(0, 150)),
    Case(T=450, B=2, H=2, Hkv=1, feature_map="favor", num_features=70, size=4, stateless=True, strided=True),
]
EPSILON = [
    Case(T=65, B=1, H=2, Hkv=1, feature_map="favor", num_features=19),
    Case(T=67, B=2, H=1, Hkv=1, feature_map="favor", num_features=70, lengths=(0, 65), state=False),
    Case(T=70, B=1, H=1, Hkv=1, feature_map="favor", num_features=19, state=False, size=3),
]


def given(case: Case, *, exact: bool = True) -> Arguments:
    """exact: a projection that bfloat16 holds, as longspan draws them."""
    d_out, d_kv, tensors = arguments(case, torch.bfloat16, "cpu")
    weight = tensors[3]
    assert weight is not None
    return d_out, d_kv, (*tensors[:3], weight.bfloat16().float() if exact else weight, *tensors[4:])


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("exact", [True, False], ids=["one product", "two products"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, exact: bool) -> None:
    check(case, given(case, exact=exact), torch.bfloat16)


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("exact", [True, False], ids=["one product", "two products"])
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_short_sequences(case: Case, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "by_kernels", by_short_kernels)
    check(case, given(case, exact=exact), torch.bfloat16)


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_many_features_and_wide_heads(case: Case) -> None:
    check(case, given(case), torch.bfloat16)


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(("case", "epsilon"), list(zip(EPSILON, (1e-2, 1e-4, 1e-4), strict=True)), ids=str)
def test_epsilon(case: Case, epsilon: float) -> None:
    check_epsilon(case, epsilon, torch.bfloat16, "cpu")


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("phantom", [0.0, 0.5])
def test_a_mechanism_with_an_epsilon(phantom: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = build_mechanism("performer", 2, 5, num_features=19, num_kv_heads=1, epsilon=1e-2, phantom=phantom)
    x = [torch.randn(1, 67, heads, 5, dtype=torch.bfloat16) for heads in (2, 1, 1)]

    def attend() -> list[Tensor]:
        first, state = mechanism.extend(mechanism.new_state(1), *(t[:, :65] for t in x))
        second, state = mechanism.extend(state, *(t[:, 65:] for t in x))
        return [mechanism(*x, causal=True), first, second, state.kv, state.z, state.total]

    eager = attend()
    called = []
    monkeypatch.setattr(linear, "choose_algorithm", lambda *_: called.append(1) or "favor")
    monkeypatch.setattr(type(mechanism), "_fused_epsilon", lambda *_: True)
    for ours, theirs in zip(attend(), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
    assert len(called) == 3


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
def test_segments_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.linear.triton import favor

    tilings = favor.TILINGS[64]
    few = {name: getattr(tilings, name)._replace(programs=2) for name in ("scales", "sums")}
    monkeypatch.setitem(favor.TILINGS, 64, tilings._replace(**few))
    case = Case(T=389, B=1, H=1, Hkv=1, feature_map="favor", num_features=19, size=2)
    check(case, given(case), torch.bfloat16)


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
def test_sequences_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.common.launch import signature
    from longspan.ops.linear.triton import favor, scan

    monkeypatch.setattr(scan, "SMALL", 0)
    for name, value in (("READ_SHARE", 10.0), ("QUERIES_SHARE", 10.0), ("KEYS_SHARE", 5.0)):
        monkeypatch.setattr(favor, name, value)
    case = Case(T=71, B=1, H=6, Hkv=3, feature_map="favor", num_features=19)
    arguments = given(case)
    check(case, arguments, torch.bfloat16)
    q, k, v, weight, _, lengths, kv, _ = arguments[2]
    problem = kernel_problem(case, arguments[2])
    reading = favor._FavorForward(-1, signature(q, k, v, weight, lengths, kv, None), problem)
    plan = favor._FavorBackward(-1, signature(q, k, v, weight, lengths, kv, arguments[0]), problem)
    found = reading.parts, plan.query_parts, plan.key_parts
    parts = [[launches[2].scalars[3:5] for launches in part] for part in found]
    assert parts == [[(0, 2), (2, 1)], [(0, 2), (2, 1)], [(0, 1), (1, 1), (2, 1)]]


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
def test_backward_leaves_what_is_saved() -> None:
    case = Case(T=67, B=1, H=2, Hkv=1, feature_map="favor", num_features=19, lengths=(50,))
    arguments = given(case)
    out, _, _, den, saved = forward(case, arguments[2])
    before = saved.clone()
    grads = [backward(case, arguments, out, den, saved) for _ in range(2)]
    for name, x, y in zip(NAMES[4:], *grads, strict=True):
        assert torch.equal(x, y), name
    torch.testing.assert_close(saved, before, rtol=0, atol=0, equal_nan=True)  # It may be needed a second time.


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
def test_no_sums_are_zeros() -> None:
    case = Case(T=65, B=1, H=1, Hkv=1, feature_map="favor", num_features=19, state=False)
    d_out, d_kv, tensors = given(case)
    zeros = by_kernels(case, (d_out, torch.zeros_like(d_kv), tensors))
    none = by_kernels(case, (d_out, None, (*tensors[:6], None, None)))
    assert none[-1] is None
    for name, ours, theirs in zip(NAMES, none[:-1], zeros[:-1], strict=False):
        assert torch.equal(ours, theirs), name


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("size", [10.0, 50.0])
def test_large_inputs(size: float) -> None:
    case = Case(T=70, B=1, H=1, Hkv=1, feature_map="favor", num_features=19, size=size, state=False)
    for name, result in zip(NAMES, by_kernels(case, given(case)), strict=True):
        assert result.isfinite().all(), name


@interpreted
@quiet
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("change", [0.5, 40.0])
def test_the_future_moves_no_bit(change: float) -> None:
    case = Case(T=150, B=1, H=1, Hkv=1, feature_map="favor", num_features=19)
    _, _, (q, k, v, *rest) = given(case)
    before = forward(case, (q, k, v, *rest))
    later = torch.arange(case.T)[:, None, None] >= 100
    k, v = torch.where(later, k * change, k), torch.where(later, -v, v)
    after = forward(case, (q, k, v, *rest))
    for i in (0, 3):
        assert torch.equal(before[i][:, :100], after[i][:, :100])


@interpreted
@quiet
def test_a_projection_is_two_bfloat16_matrices() -> None:
    from longspan.ops.linear.triton.favor import linear_favor_forward_weight_kernel

    for weight, exact in ((torch.randn(19, 5), False), (orthogonal_rows(19, 5, unit=False), True)):
        high, low = torch.full((2, 64, 16), float("nan"), dtype=torch.bfloat16)
        flag = torch.full((1,), float("nan"))
        linear_favor_forward_weight_kernel[(1,)](weight, high, low, flag, D=5, M=19, BD=16, BM=64, TILE=16)
        both = high.double() + low.double()
        torch.testing.assert_close(both[:19, :5], weight.double(), atol=0, rtol=2**-15)
        assert not both[19:].any()
        assert not both[:, 5:].any()
        assert (flag.item() == 0) == exact


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_projection_in_bfloat16(dtype: torch.dtype) -> None:
    """`favor` takes it as it is; `chunk`, which computes float16, in float32."""
    check_projection_in_bfloat16(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_projection_in_bfloat16_by_torch(dtype: torch.dtype) -> None:
    check_projection_in_bfloat16(dtype)


def check_projection_in_bfloat16(dtype: torch.dtype) -> None:
    leaves = [torch.randn(1, 67, 2, 16).to(dtype).requires_grad_() for _ in range(3)]
    weight, kv = orthogonal_rows(19, 16, unit=False), torch.ones(1, 2, 19, 16, dtype=sum_dtype(leaves[0]))
    for sums in (None, Sums(kv, kv[..., 0], kv[..., 0, 0])):
        expected, found = (with_gradients(leaves, sums, w) for w in (weight, weight.bfloat16()))
        assert all(map(torch.equal, found, expected))


def with_gradients(leaves: list[Tensor], sums: Sums | None, weight: Tensor) -> list[Tensor]:
    options: dict[str, Any] = {"feature_map": "favor", "weight": weight}
    out = causal_linear_out(*leaves, **options) if sums is None else causal_linear(*leaves, sums=sums, **options)[0]
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def estimated(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return causal_linear(q, k, v, feature_map="favor", weight=weight)[0]


@pytest.mark.parametrize("unit", [False, True])
def test_rounded_rows_estimate_as_well(unit: bool) -> None:
    """The mean error of causal attention over many draws, beside the same draws before they are rounded."""
    D, M = 16, 48
    q, k, v = (torch.randn(1, 41, 2, D, dtype=torch.float64) for _ in range(3))
    causal = torch.ones(41, 41).tril().log()
    truth = (torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5 + causal).softmax(-1) @ v.transpose(1, 2)
    errors = torch.zeros(2)
    for seed in range(40):
        rows = orthogonal_rows(M, D, unit=unit, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed)
        directions, r = torch.linalg.qr(torch.randn(M // D, D, D, generator=generator))
        directions = (directions * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(M, D)
        norms = D**0.5 if unit else torch.randn(M, D, generator=generator).norm(dim=1, keepdim=True)
        assert torch.equal(rows, rows.bfloat16().float())
        torch.testing.assert_close(rows, directions * norms, atol=0, rtol=2**-8)
        for i, weight in enumerate((rows, directions * norms)):
            error = estimated(q, k, v, weight.double()).transpose(1, 2) - truth
            errors[i] += error.square().mean().sqrt().item()
    assert abs(errors[0] / errors[1] - 1) < 0.002


def test_older_projections_are_kept() -> None:
    """Checkpoints from before rows were rounded give what they gave."""
    mechanism = build_mechanism("performer", 2, 16, num_features=24)
    older = torch.randn(24, 16)
    state = {**mechanism.state_dict(), "feature_map.projection": older}
    mechanism.load_state_dict(state)
    assert torch.equal(mechanism.state_dict()["feature_map.projection"], older)
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    torch.testing.assert_close(mechanism(q, k, v, causal=True), estimated(q, k, v, older))
