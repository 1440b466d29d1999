"""Errors for wrong names: what was given, what exists, what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def choose(what: str, given: str, allowed: Iterable[str]) -> str:
    """`given`, if it is one of `allowed`; otherwise an error that lists them and the nearest."""
    names = list(allowed)
    if given in names:
        return given
    raise ValueError(f"unknown {what} {given!r}; there is {', '.join(names)}{nearest(given, names)}")


def nearest(given: object, names: Iterable[str]) -> str:
    """A question whether the closest of `names` was meant, to end an error with; empty if none is close."""
    close = get_close_matches(str(given), list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
