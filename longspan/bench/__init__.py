"""Benchmarks of longspan and its peers in the same run, on the CPU and on GPUs: `longspan bench`.

`run(BenchOptions(...))` measures whole sections and writes results; `compare` and `measure` take single subjects. Each
measurement has a process of its own, a memory limit and a check of accuracy before anything is timed.
"""

from longspan.bench.options import BenchOptions, sections
from longspan.bench.report import Comparison
from longspan.bench.runner import SubjectResult, compare, measure
from longspan.bench.subjects.base import (
    AccuracyCheck,
    Case,
    Measurement,
    MeasurementConfig,
    Subject,
    TimedStep,
    Workload,
)
from longspan.bench.suite import failed, run

__all__ = [
    "AccuracyCheck",
    "BenchOptions",
    "Case",
    "Comparison",
    "Measurement",
    "MeasurementConfig",
    "Subject",
    "SubjectResult",
    "TimedStep",
    "Workload",
    "compare",
    "failed",
    "measure",
    "run",
    "sections",
]
