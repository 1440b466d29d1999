"""A fixture for tests of what is done with measurements, not of the processes that take them."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig, Subject


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, without a limit of its memory: starting another one takes seconds."""

    def measure(subject: Subject, case: Case, config: MeasurementConfig) -> Measurement:
        unavailable = subject.unavailable(case)
        if unavailable is not None:
            return Measurement(*unavailable)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside peers
            return subject.measure(case, replace(config, memory_limit=None))

    monkeypatch.setattr("longspan.bench.runner.measure", measure)
