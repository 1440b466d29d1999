"""Time a step in milliseconds: by the wall clock on the CPU, by CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# Processor time does not count what other processes take of a busy machine.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
_PROFILED, _MOST_KERNELS = 3, 24  # calls that are profiled, and kernels that are recorded
_L2_FLUSH_BYTES = 1 << 28  # larger than any L2 cache
# On the CPU the call that measures peak memory also warms up.
_WARM_UP_CALLS = {"cpu": 1, "cuda": 3}


def sample_ms(
    step: Callable[[], Any], device: str, repeats: int, seconds: float, warm_up: float = 0.2, clock: str = "wall"
) -> list[float]:
    """Time a step repeatedly, after warm-up.

    Args:
        step: The call to time. Its return value is freed outside the timed region.
        device: "cpu" or "cuda".
        repeats: Number of samples.
        seconds: Time budget: fewer samples are taken when `repeats` would exceed it, but at least one.
        warm_up: Seconds for which the step is called on CUDA first.
        clock: A key of `CLOCKS`, for the CPU.

    Returns:
        The samples in milliseconds.
    """

    def sample(count: int) -> list[float]:
        return cuda_ms(step, count) if device == "cuda" else [cpu_ms(step, clock) for _ in range(count)]

    first, elapsed = time.perf_counter(), 0.0
    for call in range(_WARM_UP_CALLS[device]):
        started = time.perf_counter()
        if call == 0 or started - first < seconds:
            sample(1)
            elapsed = time.perf_counter() - started
    if device == "cuda":
        warm_up_cuda(step, warm_up)
    return sample(max(1, min(repeats, int(seconds / elapsed))))


def cpu_ms(step: Callable[[], Any], clock: str = "wall") -> float:
    """Time one call by one of the `CLOCKS`."""
    now = CLOCKS[clock]
    started = now()
    outputs = step()
    elapsed = now() - started
    del outputs
    return elapsed * 1e3


def warm_up_cuda(step: Callable[[], Any], seconds: float = 0.2) -> None:
    """Call a step for some time, so that GPU clocks and the host reach steady state."""
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        calls += 1
        if calls % 8 == 0:  # bound the launch queue
            torch.cuda.synchronize()
    torch.cuda.synchronize()


def cuda_ms(step: Callable[[], Any], repeats: int) -> list[float]:
    """Time calls by CUDA events, flushing the L2 cache before each.

    The host does not synchronize between samples, so that launches overlap with GPU work as they do in normal use.
    """
    flush = torch.empty(_L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in events:
        flush.zero_()
        begin.record()
        outputs = step()
        end.record()
        del outputs
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def cuda_graph(step: Callable[[], Any]) -> Callable[[], None]:
    """Capture a step in a CUDA graph and return its replay, which has no launch overhead."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def kernel_ms(step: Callable[[], Any]) -> dict[str, list[float]]:
    """Profile a step on the GPU.

    Returns:
        By kernel name [milliseconds, launches] per call, for the kernels that take the most time.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(_PROFILED):
            step()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    return {
        kernel.key[:100]: [round(kernel.self_device_time_total / 1e3 / _PROFILED, 5), kernel.count / _PROFILED]
        for kernel in kernels[:_MOST_KERNELS]
        if kernel.self_device_time_total > 0
    }
