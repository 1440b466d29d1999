"""longspan: attention that does not cost n²."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from longspan.mechanism import FeatureMap as FeatureMap
    from longspan.mechanism import Mechanism as Mechanism
    from longspan.mechanism import State as State
    from longspan.mechanisms import build_mechanism as build_mechanism
    from longspan.mechanisms import mechanisms as mechanisms
    from longspan.mechanisms import register_mechanism as register_mechanism
    from longspan.mechanisms.linformer import Projection as Projection
    from longspan.rows import Packing as Packing

# Imported on first use, so that parts of the package that need no torch work without it.
_HOME = {
    "FeatureMap": "longspan.mechanism",
    "Mechanism": "longspan.mechanism",
    "Packing": "longspan.rows",
    "State": "longspan.mechanism",
    "build_mechanism": "longspan.mechanisms",
    "mechanisms": "longspan.mechanisms",
    "register_mechanism": "longspan.mechanisms",
    "Projection": "longspan.mechanisms.linformer",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
