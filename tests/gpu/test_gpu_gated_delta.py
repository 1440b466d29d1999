"""The Triton kernels of the delta rule with one decay per head on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gated_cases import (
    NAMES,
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

from longspan import build_mechanism
from longspan.ops.gated import GatedInputs, choose_algorithm, gated_linear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DELTA = Case(T=517, B=1, H=2, Hkv=2, D=64, E=64, delta=True)

CASES = [
    *(replace(DELTA, T=T, D=16, E=16) for T in (2, 64, 1031)),
    *(replace(DELTA, D=dim, E=dim) for dim in (128, 256)),
    replace(DELTA, T=1031, Hkv=1, E=128, beta=False, state=False),
    replace(DELTA, H=6, D=70, E=40, decay=None),
    replace(DELTA, strided=True, strength=2.0, forgets=(-math.inf, -1e30, -104.0, -20.0, 0.0)),
    replace(DELTA, T=256, B=16, H=8, Hkv=8, state=False),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    check(case, arguments(case, dtype, "cuda"), dtype)


def test_a_long_sequence_of_few_heads() -> None:
    case = replace(DELTA, T=16384, H=1, Hkv=1, D=128, E=128)
    check(case, arguments(case, torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("decay", "noise", "names"),
    [
        (None, 0.3, NAMES),
        (None, 0.05, ["out", "state", "d_v", "d_start"]),
        ("head", 0.1, NAMES),
    ],
)
def test_nearly_parallel_keys_that_reflect(
    decay: str | None, noise: float, names: list[str], dtype: torch.dtype
) -> None:
    case = replace(DELTA, decay=decay, strength=0.1)
    given = arguments(case, dtype, "cuda")
    given = with_keys(given, torch.randn(64) + noise * torch.randn(given[2].k.shape), 2.0)
    found = errors(case, given, dtype)
    within_tolerance([{name: found[name] for name in names if name in found}])


@pytest.mark.parametrize("T", [517, 8192])
def test_some_chunks_of_nearly_parallel_keys(T: int) -> None:
    """Chunks in turn need both halves of bfloat16 numbers and do with single ones, in one segment and in several."""
    case = replace(DELTA, T=T, D=128, E=128, strength=0.05)
    torch.full((1 << 26,), math.nan, device="cuda")  # What kernels do not write holds no number.
    check(case, partly_parallel(case, arguments(case, torch.bfloat16, "cuda")), torch.bfloat16)


@pytest.mark.parametrize("decay", [None, "head"])
def test_chunks_that_are_nearly_mild(decay: str | None) -> None:
    case = replace(DELTA, decay=decay, strength=0.1)
    given = arguments(case, torch.bfloat16, "cuda")
    for size in (2, 3):
        check(case, with_keys(given, grouped_keys(given[2].k.shape, size), 1.0), torch.bfloat16)
    d_out, d_state, x = given
    check(case, (d_out, d_state, x._replace(beta=2 * x.beta)), torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("T", [512, 8192])
def test_gradients_of_gates_summed_over_tokens(T: int, dim: int) -> None:
    case = replace(DELTA, T=T, H=8, Hkv=8, D=dim, E=dim, state=False)
    check_sums(case, (arguments(case, torch.bfloat16, "cuda") for _ in range(4)), torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_same_bits_twice(dim: int) -> None:
    case = replace(DELTA, T=2111, H=4, D=dim, E=dim)
    given = arguments(case, torch.bfloat16, "cuda")
    for name, first, second in zip(NAMES, by_kernels(case, given), by_kernels(case, given), strict=True):
        assert torch.equal(first, second), name


def test_compiled_and_eager_calls_agree() -> None:
    d_out, d_state, x = arguments(replace(DELTA, T=130), torch.bfloat16, "cuda")
    assert choose_algorithm(x, True) == "delta"
    named = dict(zip(GatedInputs._fields, (y.requires_grad_() for y in x), strict=True))
    results = []
    for call in (gated_linear, torch.compile(gated_linear)):
        out, state = call(**named, delta=True)
        results.append((out, state, *torch.autograd.grad((out, state), list(named.values()), (d_out, d_state))))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gate", ["none", "head"])
def test_the_mechanism_runs_on_the_kernels(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops import gated

    used = []
    kernels = gated._kernels
    monkeypatch.setattr(gated, "_kernels", lambda algorithm: used.append(algorithm) or kernels(algorithm))
    mechanism = build_mechanism("delta", 2, 64, gate=gate).cuda()
    q, k, v = torch.randn(3, 1, 130, 2, 64, device="cuda").bfloat16()
    gates = torch.randn(1, 130, 2, mechanism.num_gates, device="cuda").bfloat16()
    out = mechanism(q, k, v, causal=True, gates=gates)
    assert used == ["delta"]
    near = mechanism.cpu()(q.cpu(), k.cpu(), v.cpu(), causal=True, gates=gates.cpu())
    assert (out.cpu() - near).abs().max() <= 0.02 * near.abs().max()
