"""Checks that options of benchmarks share, and options from JSON on the command line, which need no tyro."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from longspan.utils import choose

DEVICES = ("cpu", "cuda")


def check_device(device: str) -> None:
    """Check that this is the name of a device, and that there is one."""
    choose("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this PyTorch finds no CUDA device; use device cpu")


def check_positive(options: object, *names: str) -> None:
    """Check that options are positive numbers, tuples of them, or None."""
    for name in names:
        value = getattr(options, name)
        values = value if isinstance(value, tuple) else (value,)
        if any(x is not None and not x > 0 for x in values):
            raise ValueError(f"{name} must be positive, got {', '.join(f'{x:g}' for x in values)}")


def json_argument() -> dict[str, Any]:
    """Return the options that the first argument of this process describes as JSON; none without it."""
    values = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    paths = {name: Path(values[name]) for name in ("out", "cache") if name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()} | paths
