"""Where and with what a measurement was taken. Nothing here identifies a person, a host or a folder."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from longspan import __version__
from longspan.bench.subjects.peers import PEERS, installed_version
from longspan.utils import commit as commit


def machine(device: str) -> dict[str, Any]:
    """The processor and how busy it is now (the mean number of running tasks), and the GPU if it is used."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gb": _memory_gb(),
        "gpu": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {"name": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
    return found


def versions() -> dict[str, str | None]:
    """Python, PyTorch, longspan and every peer; None where one is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "longspan": __version__,
    }
    return found | {peer.package: installed_version(peer.package) for peer in PEERS.values() if peer.package != "torch"}


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
