"""The process that takes one measurement: a pickled (subject, case, effort) on stdin, a `Run` as JSON on stdout."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from longspan.bench.runner import Case, Effort, Run, Step, Subject, one_line, out_of_memory
from longspan.bench.subjects.memory import PeakMemory, limit_memory, release_freed
from longspan.bench.timing import cpu_ms, cuda_ms, warm_up

_SHORT = 512

# Steps before the first sample of each kind: kernels are compiled and caches filled. On the CPU the step whose memory
# is measured serves as well.
_WARM_UP = {"cpu": 1, "cuda": 3}


def main() -> None:
    """Answers on what was stdout; whatever a package prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # Deprecations inside older packages.
    subject, case, effort = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(effort.threads)
    try:
        run = take(subject, case, effort)
    except Exception as error:
        message = one_line(error)
        run = Run("out of memory" if out_of_memory(message) else "error", message)
    with answer:
        json.dump(asdict(run), answer)


def take(subject: Subject, case: Case, effort: Effort) -> Run:
    """Correctness at a small size, then memory, then times."""
    if effort.memory_limit is not None:
        limit_memory(effort.memory_limit, case.device)
    torch.manual_seed(0)
    check = subject.check(case)
    if check is not None and not check.error <= check.tolerance:
        message = f"error {check.error:.1e} against {check.against}, allowed {check.tolerance:.0e}"
        return Run("wrong", message, check=check._asdict())
    # Code that is loaded and threads that are started on first use are no part of a subject's memory.
    *_, heaviest = subject.work(replace(case, length=min(case.length, _SHORT))).values()
    alone(heaviest)
    work = subject.work(case)
    *_, heaviest = work.values()
    gc.collect()
    release_freed()

    peak = PeakMemory(case.device)
    made = alone(heaviest)
    run = Run("ok", "", peak_mb=peak.stop(), memory=peak.how, check=None if check is None else check._asdict())
    if not all(bool(x.isfinite().all()) for x in made):
        return Run("wrong", "outputs or gradients are not finite", check=run.check)
    del made

    for name, step in work.items():
        run.times[name] = _samples(partial(alone, step), case.device, effort)
        if step.tokens is not None:
            run.tokens[name] = step.tokens
    return run


def alone(step: Step) -> Sequence[Tensor]:
    """The step with gradients as it needs them."""
    with torch.set_grad_enabled(step.gradients):
        return step.call()


def _samples(step: Callable[[], Sequence[Tensor]], device: str, effort: Effort) -> list[float]:
    def some(repeats: int) -> list[float]:
        return cuda_ms(step, repeats) if device == "cuda" else [cpu_ms(step) for _ in range(repeats)]

    begun, took = time.perf_counter(), 0.0
    for number in range(_WARM_UP[device]):
        started = time.perf_counter()
        if number == 0 or started - begun < effort.seconds:
            some(1)
            took = time.perf_counter() - started
    if device == "cuda":
        warm_up(step, least=0)
    return some(max(1, min(effort.repeats, int(effort.seconds / took))))


if __name__ == "__main__":
    main()
