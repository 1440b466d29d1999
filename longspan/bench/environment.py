"""Describe the machine and software of a benchmark. Nothing recorded identifies a person, a host or a folder."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from longspan import __version__
from longspan.bench.subjects.peers import PACKAGES, installed_version
from longspan.utils import commit


def environment(device: str) -> dict[str, Any]:
    """Return date, machine, versions and commit, as stored in every results file."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
    }


def warn_if_busy(about: dict[str, Any]) -> None:
    """Print a warning if other processes use the machine that `environment` described."""
    load = about["machine"]["load"]
    if load > cores() / 2:
        print(f"this machine is busy (load {load:g} on {cores()} cores): times will be noisy", file=sys.stderr)


def machine(device: str) -> dict[str, Any]:
    """Return processor, cores, load average and memory, and the GPU if `device` is "cuda"."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": cores(),
        "load": round(psutil.getloadavg()[0], 2),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {"name": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
    return facts


def versions() -> dict[str, str | None]:
    """Return the versions of Python, PyTorch, longspan and every peer; None for what is not installed."""
    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "longspan": __version__,
        **{package: installed_version(package) for package in ("triton", *PACKAGES)},
        "torch": torch.__version__,
    }


def cores() -> int:
    """Return the number of processor cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
