"""Choose between the originals' results and corrected ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_faithful = ContextVar("faithful", default=False)


@contextmanager
def faithful(enabled: bool = True) -> Iterator[None]:
    """Build the older libraries' models inside this block as their originals compute, defects included.

    Models that were built with `faithful=` keep what they were given.

    Args:
        enabled: False restores corrected models inside an outer block.
    """
    token = _faithful.set(enabled)
    try:
        yield
    finally:
        _faithful.reset(token)


def resolve_faithful(given: bool | None) -> bool:
    """Return the value of a constructor's argument `faithful`: what was given, or that of the enclosing block."""
    return _faithful.get() if given is None else given
