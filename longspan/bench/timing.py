"""Milliseconds of a step, sample by sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

_WARM = 0.2  # seconds
_CACHE = 1 << 28  # bytes: more than any second-level cache holds


def cpu_ms(step: Callable[[], Any]) -> float:
    """One sample; what the step made is dropped after the clock has stopped."""
    begun = time.perf_counter()
    made = step()
    took = time.perf_counter() - begun
    del made
    return took * 1e3


def warm_up(step: Callable[[], Any], *, least: int = 3) -> None:
    """So many calls at least, and so long that the host, too, runs as fast as it does in use."""
    begun, calls = time.perf_counter(), 0
    while calls < least or time.perf_counter() - begun < _WARM:
        step()
        calls += 1
        if calls % 8 == 0:  # The host runs ahead, but not by more than a few calls.
            torch.cuda.synchronize()
    torch.cuda.synchronize()


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


def replayed(step: Callable[[], Any]) -> Callable[[], None]:
    """The same step from a CUDA graph, which leaves the launches out."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def attention_ms(attend: Callable[..., Tensor], given: Sequence[Tensor], repeats: int = 30) -> dict[str, float]:
    """Medians of forward and of forward + backward ("both"), as called and replayed ("…_graph")."""
    d_out = torch.randn_like(given[0])

    def forward() -> None:
        with torch.no_grad():
            attend(*given)

    def both() -> None:
        torch.autograd.grad(attend(*given), given, d_out)

    found = {}
    for name, step in (("forward", forward), ("both", both)):
        warm_up(step)
        found[name] = median(cuda_ms(step, repeats))
        found[f"{name}_graph"] = median(cuda_ms(replayed(step), repeats))
    return found
