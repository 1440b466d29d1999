"""The memory of a benchmark process: measure its peak, limit it, and release freed memory."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from pathlib import Path

import psutil
import torch


class PeakMemory:
    """Peak growth in MB from construction to `stop`: resident memory on the CPU, allocated memory on CUDA."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            self.method = "growth of torch.cuda.max_memory_allocated"
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 1e6
            return
        self._resets = _reset_high_water()
        self.method = (
            "growth of VmHWM, reset before, over the resident memory"
            if self._resets
            else "growth of ru_maxrss, which cannot be reset: too low if an earlier peak was higher"
        )
        self._before = psutil.Process().memory_info().rss / 1e6 if self._resets else _high_water_mb(resets=False)

    def stop(self) -> float:
        """Return the peak growth since construction."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 1e6 - self._before
        return _high_water_mb(self._resets) - self._before


def limit_memory(gigabytes: float, device: str) -> None:
    """Limit the memory of this process: an allocation fails if the process would grow by more than `gigabytes`."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))
    elif sys.platform == "linux":
        # Private writable memory: the address space would also count reserved memory that is never touched.
        limit = int(psutil.Process().memory_info().data + gigabytes * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def release_freed() -> None:
    """Return freed memory to the system, so that its reuse is counted in the next peak."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mb(resets: bool) -> float:
    if resets:
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
