"""Milliseconds of a step, sample by sample."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_CACHE = 1 << 28  # bytes: more than any second-level cache holds


def cpu_ms(step: Callable[[], Any]) -> float:
    """One sample; what the step made is dropped after the clock has stopped."""
    begun = time.perf_counter()
    made = step()
    took = time.perf_counter() - begun
    del made
    return took * 1e3


def cuda_ms(step: Callable[[], Any], repeats: int) -> list[float]:
    """Samples between CUDA events, each after the second-level cache was filled with something else.

    Nothing is waited for in between: the host runs ahead as it does in use, and where it is the slower one, it shows.
    """
    flush = torch.empty(_CACHE, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in events:
        flush.zero_()
        begin.record()
        made = step()
        end.record()
        del made
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]
