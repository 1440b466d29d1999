"""The kernels of bidirectional linear attention under Triton's interpreter, on the CPU, against the plain path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bidirectional_cases import Case, arguments, by_kernels, check
from interpreter import bfloat16  # noqa: F401

from longspan.ops import backend

# Triton decides when it is imported; this module therefore runs again in a process of its own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_under_the_interpreter starts")

PACKED = (11, 0, 1, 23, 5), (3, 7, 0, 41, 1)
CASES = [
    *(Case(feature_map=map, normalise=n) for map in ("elu", "relu") for n in ("query", "feature", "none")),
    *(Case(feature_map="identity", normalise=n, mask=True) for n in ("query", "feature", "none")),
    *(Case(normalise=n, **how) for n in ("query", "feature") for how in ({}, {"mask": True})),
    *(Case(normalise=n, packed=PACKED, H=2, Hkv=1) for n in ("query", "feature")),
    Case(feature_map="elu", mask=True, H=4, Hkv=2),
    Case(feature_map="elu", packed=PACKED, normalise="feature", H=1, Hkv=1),
    Case(feature_map="favor", num_features=19, H=6, Hkv=2, mask=True),
    Case(feature_map="favor", num_features=19, packed=PACKED, H=1, Hkv=1),
    Case(feature_map="favor", num_features=19, normalise="feature", strided=True),
    Case(feature_map="favor", num_features=19, weight=torch.bfloat16),
    Case(feature_map="favor", num_features=19, exact=True),
    Case(T=1, S=2, B=1),
    Case(T=1, S=1, feature_map="elu", normalise="none"),
    Case(T=3, S=300, B=1, H=2, Hkv=1, D=16, E=16),
    Case(T=3, S=5, B=1, H=1, Hkv=1, D=130, E=70),
    Case(T=5, S=3, B=1, H=2, Hkv=1, D=20, E=140, feature_map="elu", normalise="feature"),
]
# Blocks are padded to 64 there, and slow: all that differs, and every other of the rest.
HALVES = [case for i, case in enumerate(CASES) if i % 2 or case.num_features or case.packed or case.D > 64]


@pytest.mark.skipif(INTERPRETED, reason="already inside")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: longspan[triton]")
def test_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that are then masked
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case: Case) -> None:
    check(case, arguments(case, torch.float32, "cpu"), torch.float32)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_float16(case: Case) -> None:
    check(case, arguments(case, torch.float16, "cpu"), torch.float16)


@inside
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_bfloat16(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@inside
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_weight_that_bfloat16_holds_takes_one_product() -> None:
    case = Case(feature_map="favor", num_features=19, exact=True)
    given = arguments(case, torch.bfloat16, "cpu")
    assert given.weight is not None
    whole = replace(given, weight=given.weight.bfloat16())
    for ours, theirs in zip(by_kernels(case, given), by_kernels(case, whole), strict=True):
        assert torch.equal(ours, theirs)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("normalise", ["query", "feature"])
@pytest.mark.parametrize("feature_map", ["softmax", "favor", "elu"])
def test_large_inputs(feature_map: str, normalise: str) -> None:
    features = 19 if feature_map == "favor" else None
    case = Case(feature_map=feature_map, normalise=normalise, size=50, num_features=features)
    given = arguments(case, torch.float16, "cpu")
    for result in by_kernels(case, given):
        assert result.isfinite().all()


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("feature_map", ["softmax", "favor", "elu", "relu"])
def test_ones_come_back(feature_map: str) -> None:
    features = 19 if feature_map == "favor" else None
    case = Case(feature_map=feature_map, size=10, num_features=features)
    given = arguments(case, torch.float32, "cpu")
    kernels = backend.bidirectional_kernels()
    for normalise in ("query", "feature"):
        if normalise == "feature" and feature_map in ("elu", "relu"):
            continue  # There weights sum to one over keys, not over a query's features.
        tensors = given.q, given.k, torch.ones_like(given.v), given.weight, None, None, None
        out = kernels.bidirectional_linear(*tensors, feature_map, normalise).out
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=1e-5)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("normalise", ["query", "feature"])
def test_one_key_is_the_answer(normalise: str) -> None:
    # Its own gradient is 0, a difference of equal numbers: it is as good as those are.
    given = arguments(Case(S=1, normalise=normalise), torch.float32, "cpu")
    out, d_q, d_k, d_v = by_kernels(Case(normalise=normalise), given)
    torch.testing.assert_close(out, given.v.expand_as(out))
    torch.testing.assert_close(d_v, given.d_out.sum(1, keepdim=True))
    for gradient in (d_q, d_k):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


def test_reasons() -> None:
    q = torch.zeros(1, 4, 2, 8)
    assert backend.why_unsupported_bidirectional(q, q, q, None) is None
    assert "CUDA" in str(backend.why_plain_bidirectional(q, q, q, None))
    assert "float64" in str(backend.why_unsupported_bidirectional(q.double(), q, q, None))
    assert "epsilon (0.1)" in str(backend.why_unsupported_bidirectional(q, q, q, None, 0.1))
    wide = torch.zeros(1, 4, 2, 257)
    assert "over 256" in str(backend.why_unsupported_bidirectional(q, q, wide, None))
    assert "empty" in str(backend.why_unsupported_bidirectional(q[:, :0], q, q, None))
    x, halves = torch.zeros(1, 4, 2, 129), torch.bfloat16
    for inputs, number, weight, fits in (
        (halves, 128, halves, True),
        (halves, 129, halves, False),
        (halves, 128, torch.float32, False),
        (halves, 64, torch.float32, True),
        (torch.float32, 32, torch.float32, True),
        (torch.float32, 33, torch.float32, False),
    ):
        x = x.to(inputs)
        why = backend.why_unsupported_bidirectional(x, x, x, torch.zeros(number, 129, dtype=weight))
        assert (why is None) is fits
        assert fits or "projection" in str(why)
