"""A process's own memory: its peak, a limit to it, and what it has freed but not returned."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Peak growth, in MB, from construction to `stop`: resident memory on the CPU, allocated memory on CUDA."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            self.how = "growth of torch.cuda.max_memory_allocated"
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 1e6
            return
        self._resets = _reset_high_water()
        self.how = (
            "growth of VmHWM, reset before, over VmRSS"
            if self._resets
            else "growth of ru_maxrss, which cannot be reset: too low where an earlier peak was higher"
        )
        self._before = _status_mb("VmRSS") if self._resets else _max_rss_mb()

    def stop(self) -> float:
        """The growth since construction."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 1e6 - self._before
        return (_status_mb("VmHWM") if self._resets else _max_rss_mb()) - self._before


def limit_memory(gigabytes: float, device: str) -> None:
    """Makes allocations fail beyond so many GB more than the process has now."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))
        return
    if _STATUS.exists():
        # Writable private memory; the address space would count reserved memory that nothing ever touches.
        limit = int(_status_mb("VmData") * 1e6 + gigabytes * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def available_gb() -> float | None:
    """Memory that new processes can have, where the system says so."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    return None


def release_freed() -> None:
    """Returns freed memory to the system, so that it is not reused unseen by what is measured next."""
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


def _status_mb(field: str) -> float:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"{_STATUS} has no {field}")


def _max_rss_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
