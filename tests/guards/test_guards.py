"""Numbers, names, checkpoints and runs stay what they were; see ``generate.py`` for how they were written."""

from __future__ import annotations

import artifacts
import cases
import golden
import pytest

VALUES, INDEX = golden.read()


def test_every_case_has_golden_values_and_none_is_left_over() -> None:
    assert set(INDEX) == {*cases.CASES, *artifacts.CHECKS}


@pytest.mark.parametrize("case", cases.CASES)
def test_case(case: str) -> None:
    wrong = golden.differences(cases.run(case), VALUES[case], INDEX[case])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", artifacts.CHECKS)
def test_fixture(name: str) -> None:
    # AdamW divides by the size of gradients, so a run spreads the last bits of another machine.
    slack = 100 if name.startswith("run/") else 1
    wrong = golden.differences(artifacts.CHECKS[name](), VALUES[name], INDEX[name], slack)
    assert not wrong, "\n".join(wrong)


def test_a_small_change_is_noticed() -> None:
    case = "mechanism/linear-elu-query/float64"
    result = cases.run(case)
    assert not golden.differences(result, VALUES[case], INDEX[case])
    for name in ("causal.out", "causal.grad.k", "no_grad.state.kv"):
        kept = result.tensors[name]
        result.tensors[name] = kept.clone()
        result.tensors[name].view(-1)[3] += 1e-9 * kept.abs().max()
        assert golden.differences(result, VALUES[case], INDEX[case])
        assert name in golden.changed_bits(result, INDEX[case])
        result.tensors[name] = kept
