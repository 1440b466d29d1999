"""The mechanisms and their registry: a new one is a file beside these and a line in `_REGISTRY`.

Packages outside this one register theirs by entry points of the group ``longspan.mechanisms``.
"""

from __future__ import annotations

import inspect
import math
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from longspan.mechanisms.decay import DecayAttention
from longspan.mechanisms.delta import DeltaAttention
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.mechanisms.split import SplitAttention
from longspan.protocol import Mechanism
from longspan.utils import choose, nearest

ENTRY_POINTS = "longspan.mechanisms"

_REGISTRY: dict[str, type[Mechanism]] = {
    "softmax": SoftmaxAttention,
    "local": LocalAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "linformer": LinformerAttention,
    "decay": DecayAttention,
    "delta": DeltaAttention,
    "split": SplitAttention,
    "mixture": MixtureAttention,
}


def list_mechanisms() -> dict[str, type[Mechanism]]:
    """Return every mechanism by name, those of installed plug-ins included.

    A plug-in that cannot be imported is left out with a warning.
    """
    for name in _plugins():
        try:
            find_mechanism(name)
        except ImportError as error:
            warnings.warn(str(error), stacklevel=2)
    return dict(_REGISTRY)


def register_mechanism(name: str, mechanism: type[Mechanism]) -> None:
    """Make a mechanism available to `build_mechanism`, configurations and the command line.

    Args:
        name: The name to register it under.
        mechanism: A subclass of `Mechanism` whose constructor takes num_heads and head_dim, and num_kv_heads, value_dim
            and its options by keyword.

    Raises:
        ValueError: If it is not a mechanism, or the name is that of another one.
    """
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)):
        raise ValueError(f"a mechanism is a subclass of longspan.Mechanism, got {mechanism!r}")
    if _REGISTRY.get(name, mechanism) is not mechanism:
        raise ValueError(f"{name!r} is {_REGISTRY[name].__name__} already; choose another name")
    _REGISTRY[name] = mechanism


def find_mechanism(name: str) -> type[Mechanism]:
    """Return the class registered under a name, importing the plug-in that provides it if need be.

    Raises:
        ValueError: If there is none; the message lists the names.
        ImportError: If the plug-in cannot be imported.
    """
    if name not in _REGISTRY:
        plugin = _plugins()[choose("mechanism", name, {**_REGISTRY, **_plugins()})]
        try:
            register_mechanism(name, plugin.load())
        except Exception as error:
            raise ImportError(f"the plug-in {plugin.value} for mechanism {name!r} cannot be loaded: {error}") from error
    return _REGISTRY[name]


def build_mechanism(
    name: str,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> Mechanism:
    """Build the mechanism registered under a name.

    Args:
        name: Such as "linear"; see `list_mechanisms`.
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv; H unless given.
        value_dim: E; D unless given.
        **options: Those of the class.

    Raises:
        ValueError: If the name or an option is unknown; the message lists the known ones.
    """
    cls, allowed = find_mechanism(name), list(mechanism_options(name))
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(
                f"{name} has no option {option!r}; it has {', '.join(allowed) or 'none'}{nearest(option, allowed)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{option} of {name} must be finite, got {value}")
    given: Any = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads, "value_dim": value_dim}
    for argument, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{argument} must be a positive integer, got {value!r}")
    try:
        return cls(**given, **options)
    except TypeError as error:
        raise TypeError(f"{name} cannot be built with {given | options}: {error}") from error


def mechanism_options(name: str) -> dict[str, Any]:
    """Return the options of a mechanism and their defaults."""
    parameters = inspect.signature(find_mechanism(name)).parameters
    shape = ("num_heads", "head_dim", "num_kv_heads", "value_dim")
    return {option: parameter.default for option, parameter in parameters.items() if option not in shape}


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Return the entry points of other packages by name; built-in names are not theirs to take."""
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for name in [name for name in found if name in _REGISTRY]:
        warnings.warn(f"the plug-in {found.pop(name).value} is ignored: {name!r} is a built-in mechanism", stacklevel=3)
    return found
