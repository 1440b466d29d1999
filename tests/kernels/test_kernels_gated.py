"""The Triton kernels of gated linear attention with one decay per head under Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from gated_cases import Case, arguments, by_kernels, check, check_sums, with_time_steps
from interpreter import interpreted

from longspan.ops import gated
from longspan.ops.common import dispatch
from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved

CASES = [
    Case(T=2, B=1, H=1, Hkv=1),
    Case(T=63, B=1, H=4, Hkv=2),
    Case(T=65, B=1, H=1, Hkv=1, beta=False, state=False, strided=True),
    Case(T=129, B=1, H=2, Hkv=2, decay=None),
    Case(T=67, B=1, H=1, Hkv=1, decay=None, beta=False),
    Case(T=259, B=1, H=2, Hkv=1, strength=2.0, forgets=(-math.inf, -1e30, -104.0, -20.0, 0.0)),
]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and CASES.index(case) % 2:
        pytest.skip("every other case will do")
    check(case, arguments(case, dtype, "cpu"), dtype)


@interpreted
@pytest.mark.parametrize("T", [32, 33])
def test_tiles_without_columns(T: int) -> None:
    """Widths of 96 are padded to 128, four tiles of 32."""
    case = Case(T=T, B=1, H=2, Hkv=2, D=96, E=96, state=T == 33)
    check(case, arguments(case, torch.float32, "cpu"), torch.float32)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("T", [64, 65])
def test_tiles_without_columns_in_bfloat16(T: int) -> None:
    case = Case(T=T, B=1, H=2, Hkv=2, D=192, E=192)
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    "case", [*CASES, Case(T=67, B=1, H=1, Hkv=1, D=130, E=140), Case(T=70, B=1, H=1, Hkv=1, D=64, E=128)], ids=str
)
def test_bfloat16(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tokens_that_forget_everything_cost_no_digits(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Every other token forgets everything: what is behind it must not depend on what was before."""
    if dtype == torch.bfloat16:
        request.getfixturevalue("bfloat16")
    case = Case(T=131, B=1, H=1, Hkv=1, strength=0.01)
    d_out, d_state, x = arguments(case, dtype, "cpu")
    assert x.log_decay is not None
    x.log_decay[:, ::2] = -104
    check(case, (d_out, d_state, x), dtype)
    x.v[:, :100] = 1e20
    for result in by_kernels(case, (d_out, d_state, x)):
        assert result is not None
        assert result.isfinite().all()
    assert by_kernels(case, (d_out, d_state, x))[1].abs().max() < 1e3


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_gradients_of_gates_summed_over_tokens() -> None:
    case = Case(T=512, B=1, H=8, Hkv=8, D=64, E=64, state=False)
    draws = (with_time_steps(arguments(case, torch.bfloat16, "cpu")) for _ in range(4))
    check_sums(case, draws, torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_long_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are summed in pieces, and ⟨dS, S⟩ is taken anew within them."""
    from longspan.ops.gated.triton import decay

    monkeypatch.setattr(decay, "CHECK", 2)
    monkeypatch.setattr(decay, "PIECE", 2)
    monkeypatch.setattr(decay, "_programs", lambda *_: 2)
    case = Case(T=64 * 8 + 3, B=1, H=1, Hkv=1, strength=0.02)
    given = arguments(case, torch.bfloat16, "cpu")
    plan = decay._DecayForward.of((*given[2],), GatedProblem(False, 0.7, "decay"))
    assert (plan.segments, plan.pieces, plan.run) == (2, 2, 6)
    check(case, given, torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_backward_uses_the_saved_states_and_leaves_them() -> None:
    d_out, d_state, x = arguments(Case(T=200, B=1, H=2, Hkv=1), torch.bfloat16, "cpu")
    problem, kernels = GatedProblem(False, 0.7, "decay"), gated._kernels("decay")
    saved = kernels.forward(x, problem)[2]
    before = saved.clone()
    first, second = (kernels.backward(GatedSaved(d_out, d_state, saved), x, problem) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    assert torch.equal(saved, before)
    assert not torch.equal(kernels.backward(GatedSaved(d_out, d_state, saved.zero_()), x, problem)[0], first[0])


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("bare", [False, True])
def test_direct_and_traced_calls_agree(bare: bool) -> None:
    case = Case(T=67, B=1, H=2, Hkv=1, decay=None, beta=False) if bare else Case(T=67, B=1, H=2, Hkv=1)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cpu")
    results = []
    for call in (gated._GatedLinear.direct, gated._GatedLinear.traced):
        leaves = [None if y is None else y.detach().requires_grad_() for y in x]
        out, state = call(*leaves, False, 0.7, "decay")[:2]
        grads = torch.autograd.grad((out, state), [y for y in leaves if y is not None], (d_out, d_state))
        results.append([out, state, *grads])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_the_kernels_are_a_proper_operator() -> None:
    _, _, x = arguments(Case(T=3, B=1, H=1, Hkv=1), torch.bfloat16, "cpu")
    leaves = [y.requires_grad_() for y in x]
    torch.library.opcheck(torch.ops.longspan.gated_linear.default, (*leaves, False, 0.5, "decay"))


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_expanded_inputs() -> None:
    """Queries and keys shared by heads, and a fixed decay, are views."""
    case = Case(T=67, B=1, H=2, Hkv=2)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cpu")
    q, k, g = x.q[:, :, :1], x.k[:, :, :1], x.log_decay[:1, :1]
    views = x._replace(q=q.expand_as(x.q), k=k.expand_as(x.k), log_decay=g.expand_as(x.log_decay))
    copies = GatedInputs(*(y.contiguous() for y in views))
    for ours, theirs in zip(
        by_kernels(case, (d_out, d_state, views)), by_kernels(case, (d_out, d_state, copies)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_reasons() -> None:
    q, gate = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 1)
    x = GatedInputs(q, q, q, gate, gate[..., 0], torch.zeros(1, 2, 8, 8))
    assert gated.why_unsupported(x, False) is None
    assert "CUDA" in str(gated.why_not_triton(x, False))
    assert "float64" in str(gated.why_unsupported(x._replace(q=q.double(), k=q.double(), v=q.double()), False))
    for name in ("log_decay", "beta", "state"):
        other = x._replace(**{name: getattr(x, name).to(torch.bfloat16)})
        assert gated.why_unsupported(other, False) == f"{name} is bfloat16; the kernels take float32"
    wide = torch.zeros(1, 4, 2, 257)
    assert "(8, 257) is over 256" in str(gated.why_unsupported(x._replace(v=wide), False))
    assert "single token" in str(gated.why_unsupported(x._replace(q=q[:, :1]), False))
    assert "empty" in str(gated.why_unsupported(x._replace(q=q[:, :0]), False))


def test_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    q = torch.zeros(1, 4, 2, 8).as_subclass(Cuda)
    x = GatedInputs(q, q, q, None, None, None)
    assert gated.choose_algorithm(x, False) == "decay"
    assert gated.choose_algorithm(x._replace(log_decay=torch.zeros(1, 4, 2, 1)), False) == "decay"
    assert gated.choose_algorithm(x._replace(v=q.double()), False) == "torch"
    assert gated.triton_algorithm(x, True) == "delta"
    assert gated.triton_algorithm(x._replace(log_decay=torch.zeros(1, 4, 2, 8)), False) == "channel"
