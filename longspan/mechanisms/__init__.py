"""The mechanisms and their registry: a new one is a file beside these and a line in `_REGISTRY`."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.mechanisms.split import SplitAttention
from longspan.protocol import Mechanism
from longspan.utils import choose, nearest

_REGISTRY: dict[str, type[Mechanism]] = {
    "softmax": SoftmaxAttention,
    "local": LocalAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "linformer": LinformerAttention,
    "split": SplitAttention,
}


def mechanisms() -> dict[str, type[Mechanism]]:
    """Every mechanism by name."""
    return dict(_REGISTRY)


def register_mechanism(name: str, mechanism: type[Mechanism]) -> None:
    """Makes `mechanism` available to `build_mechanism`, configurations and the command line under `name`."""
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)):
        raise ValueError(f"a mechanism is a subclass of longspan.Mechanism, got {mechanism!r}")
    if _REGISTRY.get(name, mechanism) is not mechanism:
        raise ValueError(f"{name!r} is {_REGISTRY[name].__name__} already; choose another name")
    _REGISTRY[name] = mechanism


def build_mechanism(
    name: str,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> Mechanism:
    """The mechanism called `name`. options: those of its class; a wrong one is answered with a list of them."""
    cls = _REGISTRY[choose("mechanism", name, _REGISTRY)]
    allowed = list(mechanism_options(name))
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"{name} has no option {option!r}; it has {', '.join(allowed) or 'none'}{nearest(option, allowed)}"
            )
    return cls(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim, **options)


def mechanism_options(name: str) -> dict[str, Any]:
    """The options of a mechanism and their defaults."""
    parameters = inspect.signature(_REGISTRY[choose("mechanism", name, _REGISTRY)]).parameters
    shape = ("num_heads", "head_dim", "num_kv_heads", "value_dim")
    return {option: parameter.default for option, parameter in parameters.items() if option not in shape}


class _Package(ModuleType):
    """`longspan.mechanisms` is this package once it is imported, and the function of that name all the same."""

    def __call__(self) -> dict[str, type[Mechanism]]:
        return mechanisms()


sys.modules[__name__].__class__ = _Package
