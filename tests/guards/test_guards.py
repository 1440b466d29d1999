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
    wrong = golden.differences(artifacts.CHECKS[name](), VALUES[name], INDEX[name])
    assert not wrong, "\n".join(wrong)
