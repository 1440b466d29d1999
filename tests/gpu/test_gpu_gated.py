"""The Triton kernels of gated linear attention with one decay per head on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gated_cases import NAMES, Case, arguments, by_kernels, check, check_sums, with_time_steps

from longspan.ops.common import plans
from longspan.ops.gated import GatedInputs, _kernels, choose_algorithm, gated_linear
from longspan.ops.gated.triton import ALGORITHMS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

CASES = [
    *(Case(T=T, D=16, E=16) for T in (2, 63, 64, 65, 129, 1031)),
    *(Case(T=517, B=1, H=2, Hkv=2, D=dim, E=dim) for dim in (32, 48, 64, 96, 128, 192, 256)),
    Case(T=1024, B=1, H=4, Hkv=2, D=128, E=128, strength=0.02),
    Case(T=2048, B=1, H=8, Hkv=8, D=64, E=64, strength=0.005, state=False),
    Case(T=517, B=1, H=2, Hkv=1, D=64, E=128, beta=False),
    Case(T=517, B=1, H=2, Hkv=1, D=128, E=64, decay=None),
    Case(T=517, B=1, H=6, Hkv=2, D=70, E=40, decay=None, beta=False),
    Case(T=517, D=64, E=64, strided=True, strength=2.0),
    Case(T=1031, D=64, E=64, forgets=(-math.inf, -1e30, -104.0, -20.0, 0.0)),
    Case(T=1024, B=1, D=128, E=128, forgets=(-104.0, -20.0, 0.0), state=False),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    check(case, arguments(case, dtype, "cuda"), dtype)


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_the_decay_over_a_long_sequence(dim: int) -> None:
    case = Case(T=16384, B=1, H=1, Hkv=1, D=dim, E=dim, strength=0.1)
    check(case, arguments(case, torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("T", [512, 8192])
def test_gradients_of_gates_summed_over_tokens(T: int, dim: int) -> None:
    case = Case(T=T, B=1, H=8, Hkv=8, D=dim, E=dim, state=False)
    draws = (with_time_steps(arguments(case, torch.bfloat16, "cuda")) for _ in range(4))
    check_sums(case, draws, torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_twice(dim: int) -> None:
    case = Case(T=2111, H=4, Hkv=2, D=dim, E=dim)
    given = arguments(case, torch.bfloat16, "cuda")
    for name, first, second in zip(NAMES, by_kernels(case, given), by_kernels(case, given), strict=True):
        assert torch.equal(first, second), name


def test_the_kernels_run() -> None:
    d_out, _, x = arguments(Case(T=130, D=64, E=64), torch.bfloat16, "cuda")
    assert choose_algorithm(x, False) == "decay"
    named = dict(zip(GatedInputs._fields, (y.requires_grad_() for y in x), strict=True))
    out, state = gated_linear(**named)
    assert out.grad_fn is not None
    torch.autograd.grad((out, state), list(named.values()), (d_out, torch.randn_like(state)))
    assert (
        gated_linear(
            **{**named, "q": x.q[:, :1], "k": x.k[:, :1], "v": x.v[:, :1]}
            | {name: named[name][:, :1] for name in ("log_decay", "beta")}
        )[0].shape[1]
        == 1
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    d_out, _, x = arguments(Case(T=130, D=64, E=64), torch.bfloat16, "cuda")

    def run(x: GatedInputs) -> list[torch.Tensor]:
        leaves = [y.detach().requires_grad_() for y in x]
        named = dict(zip(GatedInputs._fields, leaves, strict=True))
        out, state = function(**named, scale=0.7)
        return [out, state, *torch.autograd.grad((out, state), leaves, (d_out[:, : out.shape[1]], x.state))]

    function = gated_linear
    expected, short = run(x), x._replace(**{name: getattr(x, name)[:, :97] for name in GatedInputs._fields[:5]})
    function = torch.compile(gated_linear, fullgraph=True, dynamic=dynamic)
    for ours, theirs in zip(run(x), expected, strict=True):
        assert torch.equal(ours, theirs)
    if dynamic:
        function = gated_linear
        expected = run(short)
        function = torch.compile(gated_linear, fullgraph=True, dynamic=True)
        for ours, theirs in zip(run(short), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_memory() -> None:
    """Peak memory is at most 1.6 times inputs, outputs and gradients."""
    case = replace(Case(), T=8192, B=4, H=16, Hkv=16, D=128, E=128, state=False)
    d_out, _, x = arguments(case, torch.bfloat16, "cuda")
    leaves = [y.requires_grad_() for y in x if y is not None]
    torch.cuda.reset_peak_memory_stats()
    out, _ = gated_linear(x.q, x.k, x.v, log_decay=x.log_decay, beta=x.beta)
    torch.autograd.grad(out, leaves, d_out)
    least = 2 * sum(y.nbytes for y in (*leaves, out))
    assert torch.cuda.max_memory_allocated() <= 1.6 * least


@pytest.mark.parametrize("D", [16, 256])
@pytest.mark.parametrize(("delta", "decay"), [(True, "channel"), (False, "channel"), (True, "head"), (False, "head")])
def test_two_rows_at_once(delta: bool, decay: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 261 tokens rows of β and marks of chunks are not aligned to 16 bytes."""
    case = Case(T=261, B=3, H=D // 4, Hkv=D // 4, D=D, E=D, delta=delta, decay=decay)
    given = arguments(case, torch.bfloat16, "cuda")
    expected = by_kernels(case, given)
    plans.clear()
    for name in ALGORITHMS:
        monkeypatch.setattr(_kernels(name), "rows_at_once", lambda rows, *_: min(rows, 2))
    for _ in range(2):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(by_kernels(case, given), expected, strict=True))
    plans.clear()


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_memory_of_wide_heads(decay: str) -> None:
    case = Case(T=8192, B=4, H=8, Hkv=8, D=256, E=256, delta=True, decay=decay, state=False)
    d_out, _, x = arguments(case, torch.bfloat16, "cuda")
    leaves = [y.requires_grad_() for y in x if y is not None]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = gated_linear(x.q, x.k, x.v, log_decay=x.log_decay, beta=x.beta, delta=True)
    torch.autograd.grad(out, leaves, d_out)
    given = sum(y.nbytes for y in (*leaves, out))
    assert given + torch.cuda.max_memory_allocated() - before <= 1.6 * 2 * given


def test_more_rows_than_a_grid_has_programs_for() -> None:
    x = torch.randn(65537, 3, 1, 16, device="cuda").bfloat16().requires_grad_()
    last = x[-5:].detach().requires_grad_()
    assert choose_algorithm(GatedInputs(x, x, x, None, None, None), False) == "decay"
    (out, state), (expected, after) = gated_linear(x, x, x), gated_linear(last, last, last)
    assert torch.equal(out[-5:], expected)
    assert torch.equal(state[-5:], after)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0][-5:], torch.autograd.grad(expected.sum(), last)[0])
