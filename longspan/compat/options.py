"""Constructors whose arguments are the fields of an options dataclass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from inspect import Parameter, Signature
from typing import Any, TypeVar

from longspan.utils import nearest

Options = TypeVar("Options")


def init_from(
    options: type[Options], positional: str = ""
) -> Callable[[Callable[[Any, Options], None]], Callable[..., None]]:
    """Decorate an `__init__` that takes an options object, so that it takes the object's fields as arguments.

    Args:
        options: A keyword-only dataclass. Fields whose names start with an underscore are not arguments.
        positional: Names of fields that can also be passed by position, in this order and separated by spaces; the
            other fields are keyword-only.
    """
    order = positional.split()
    by_name = {f.name: f for f in fields(options) if not f.name.startswith("_")}  # type: ignore[arg-type]

    def parameter(name: str, kind: Any) -> Parameter:
        default = by_name[name].default
        return Parameter(name, kind, default=Parameter.empty if default is MISSING else default)

    signature = Signature(
        [
            Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
            *(parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in order),
            *(parameter(name, Parameter.KEYWORD_ONLY) for name in by_name if name not in order),
        ]
    )

    def decorate(init: Callable[[Any, Options], None]) -> Callable[..., None]:
        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            name = type(self).__name__
            if unknown := [key for key in kwargs if key not in by_name]:
                raise TypeError(
                    f"{name} got an unexpected keyword argument {unknown[0]!r}; its arguments are "
                    f"{', '.join(by_name)}{nearest(unknown[0], by_name)}"
                )
            try:
                arguments = signature.bind(self, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            del arguments["self"]
            init(self, options(**arguments))

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        return __init__

    return decorate


def encoder_decoder_options(
    options: type[Any], shared: Collection[str], omitted: Collection[str] = (), base: type[Any] = object
) -> type[Any]:
    """Make a dataclass with the fields of `options` twice, with the prefixes enc_ and dec_.

    Args:
        options: The options of an encoder or decoder.
        shared: Fields that encoder and decoder share, without a prefix.
        omitted: Fields to leave out.
        base: A dataclass with further fields.
    """
    new = []
    for f in fields(options):
        if f.name not in omitted and not f.name.startswith("_"):
            prefixes = ("",) if f.name in shared else ("enc_", "dec_")
            new += [(prefix + f.name, f.type, field(default=f.default)) for prefix in prefixes]
    return make_dataclass(f"EncoderDecoder{options.__name__}", new, bases=(base,), frozen=True, kw_only=True)


def head_counts(name: str, given: int | Sequence[int], depth: int, heads: int) -> tuple[int, ...]:
    """Return the number of local heads in each layer, for an argument that is one number or one per layer."""
    counts = (given,) * depth if isinstance(given, int) else tuple(given)
    if len(counts) != depth or any(not 0 <= count <= heads for count in counts):
        raise ValueError(
            f"{name} must be one number, or one for each of {depth} layers, from 0 to heads ({heads}), got {given}"
        )
    return counts


def without_prefix(options: Any, prefix: str) -> dict[str, Any]:
    """Return the fields of options that start with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}
