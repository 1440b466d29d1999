"""The Triton kernels of causal linear attention with wide heads under Triton's interpreter, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from kernel_cases import NAMES, Case, arguments, backward, check, forward, kernel_problem

CASES = [
    Case(T=65, B=1, H=2, Hkv=2, D=131, E=70, feature_map="softmax"),
    Case(T=65, B=1, H=2, Hkv=1, D=192, E=192, feature_map="softmax", lengths=(50,)),
    Case(T=130, B=2, H=1, Hkv=1, D=160, E=256, feature_map="softmax", lengths=(0, 129), jump=60.0),
    Case(T=63, B=1, H=1, Hkv=1, D=256, E=192, feature_map="softmax", stateless=True),
    Case(T=130, B=3, H=2, Hkv=1, D=129, E=20, feature_map="softmax", stateless=True),
    Case(T=65, B=1, H=2, Hkv=1, D=70, E=131),
    Case(T=64, B=1, H=1, Hkv=1, D=160, E=64, feature_map="relu", strided=True),
    Case(T=131, B=2, H=2, Hkv=1, D=64, E=160, feature_map="identity", normalize=False, lengths=(65, 130)),
    Case(T=67, B=1, H=1, Hkv=1, D=160, E=20, normalize=False, stateless=True),
    Case(T=67, B=1, H=1, Hkv=1, D=64, E=160, feature_map="identity", lengths=(65,), stateless=True),
]


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case) -> None:
    given = arguments(case, torch.bfloat16, "cpu")
    assert kernel_problem(case, given[2]).algorithm == "tiled_chunk"
    check(case, given, torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("feature_map", ["softmax", "elu"])
def test_segments_of_many_chunks(feature_map: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.linear.triton import tiled_chunk

    monkeypatch.setattr(tiled_chunk, "PROGRAMS", 6)
    case = Case(T=389, B=1, H=1, Hkv=1, D=129, E=31, feature_map=feature_map, size=2)
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_sequences_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.linear.triton import scan, tiled_chunk

    monkeypatch.setattr(scan, "SMALL", 0)
    for name, share in (("READ_SHARE", 2.0), ("QUERIES_SHARE", 2.0), ("KEYS_SHARE", 1.2)):
        monkeypatch.setattr(tiled_chunk, name, share)
    case = Case(T=71, B=1, H=6, Hkv=3, D=129, E=31, feature_map="softmax")
    given = arguments(case, torch.bfloat16, "cpu")
    check(case, given, torch.bfloat16)
    q, k, v, _, _, lengths, kv, shift = given[2]
    problem = kernel_problem(case, given[2])
    x = tiled_chunk.LinearInputs(q, k, v, None, None, lengths, kv, shift)
    saved = tiled_chunk.LinearSaved(given[0], given[1], given[0], None, None, None)
    reading, plan = tiled_chunk.forward_plan(x, problem), tiled_chunk.backward_plan(saved, x, problem)
    found = reading.parts, plan.query_parts, plan.key_parts
    parts = [[launches[2].scalars[3:5] for launches in part] for part in found]
    assert parts == [[(0, 2), (2, 1)], [(0, 2), (2, 1)], [(0, 1), (1, 1), (2, 1)]]


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_backward_leaves_what_is_saved() -> None:
    case = Case(T=67, B=1, H=2, Hkv=1, D=129, E=20, feature_map="softmax", lengths=(50,))
    given = arguments(case, torch.bfloat16, "cpu")
    out, _, _, den, saved = forward(case, given[2])
    before = saved.clone()
    grads = [backward(case, given, out, den, saved) for _ in range(2)]
    for name, x, y in zip(NAMES[4:], *grads, strict=True):
        assert torch.equal(x, y), name
    torch.testing.assert_close(saved, before, rtol=0, atol=0, equal_nan=True)  # It may be needed a second time.
