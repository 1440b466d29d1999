"""Benchmarks of longspan and its peers in the same run, on the CPU and on GPUs: `longspan bench`.

`run(BenchOptions(...))` measures whole sections and writes results; `compare` and `measure` take single subjects. Each
measurement has a process of its own, a memory limit and a check of accuracy before anything is timed.
"""

from longspan.bench.options import BenchOptions, sections
from longspan.bench.runner import SubjectResult, compare, measure
from longspan.bench.suite import failed, run

__all__ = ["BenchOptions", "SubjectResult", "compare", "failed", "measure", "run", "sections"]
