"""Benchmarks of longspan and its peers in the same run, on the CPU and on GPUs: `longspan bench`.

`run(BenchOptions(...))` measures sections and writes results; `compare` and `measure` measure given subjects. Each
measurement runs in its own process with a memory limit, and checks the accuracy before it times anything.
"""

from longspan.bench.options import BenchOptions, sections
from longspan.bench.runner import SubjectResult, compare, measure
from longspan.bench.suite import failed, run

__all__ = ["BenchOptions", "SubjectResult", "compare", "failed", "measure", "run", "sections"]
