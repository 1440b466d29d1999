"""Parse a command line into a dataclass with tyro; the docstrings of its fields are the help texts."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from longspan.utils import choose, nearest

T = TypeVar("T")
BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def parse(cls: type[T], argv: Sequence[str], command: str, default: T | None = None) -> T:
    """Return an instance of a dataclass with the values of a command line.

    Args:
        cls: A dataclass whose fields have docstrings.
        argv: Flags and their values.
        command: The name of the command, for messages.
        default: An instance whose values are the defaults.

    Raises:
        ValueError: If a flag or a value is wrong.
    """
    errors = io.StringIO()
    how: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                cls, prog=f"longspan {command}", args=argv, return_unknown_args=True, registry=REGISTRY, **how
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(_one_line(errors.getvalue())) from None
        raise
    if unknown:
        raise ValueError(_unknown(unknown[0], flags(cls), command))
    return parsed


def flags(cls: Any, prefix: str = "--") -> dict[str, Any]:
    """Return the type of every flag of a dataclass and of the dataclasses in it."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(hints[field.name]):
            found |= flags(hints[field.name], f"{name}.")
        elif hints[field.name] is not type(None):
            found[name] = hints[field.name]
    return found


def check_at_least(minimum: int, **values: int | None) -> None:
    """Raise a ValueError for the first flag with a value below the minimum."""
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def convert(text: str, kind: Any) -> Any:
    """Return the value of type `kind` that a text stands for; lists are separated by commas, mappings are JSON."""
    options = sorted(_options(kind), key=lambda option: _ORDER.index(_category(option)))
    errors = []
    for option in options:
        try:
            return _convert(text, option)
        except ValueError as error:
            errors.append(str(error))
    if len(errors) == 1:
        raise ValueError(errors[0])
    raise ValueError(f"must be {' or '.join(map(_expected, _options(kind)))}, got {text!r}")


def to_text(value: Any) -> str:
    """Return the text that `convert` turns into a value."""
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(isinstance(x, Mapping) for x in value)):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(to_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# Categories of types in the order in which they are tried: any text is a name.
_ORDER = ("none", "mapping", "bool", "choice", "number", "list", "name")


def _category(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return "choice"
    if origin in (tuple, Sequence):
        return "list"
    if origin is Mapping or dataclasses.is_dataclass(origin):
        return "mapping"
    return {type(None): "none", bool: "bool", int: "number", float: "number"}.get(origin, "name")


def _convert(text: str, kind: Any) -> Any:
    category = _category(kind)
    if category == "choice":
        return choose("value", text, typing.get_args(kind))
    if category == "list" and not text.startswith("["):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        # A single name is not a list where both are allowed.
        if typing.get_origin(kind) is tuple or len(parts) > 1:
            return tuple(convert(part, typing.get_args(kind)[0]) for part in parts)
    try:
        if category in ("list", "mapping"):
            return json.loads(text)
        if category in ("none", "bool"):
            return ({"none": None} if category == "none" else BOOLEANS)[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"must be {_expected(kind)}, got {text!r}") from None


def _expected(kind: Any) -> str:
    return {
        "none": "none",
        "mapping": "JSON such as {...}",
        "bool": "true or false",
        "choice": ", ".join(map(str, typing.get_args(kind))),
        "number": "an integer" if kind is int else "a number",
        "list": "a list such as 1,2",
        "name": "a name",
    }[_category(kind)]


def _options(kind: Any) -> Sequence[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _metavar(kind: Any) -> str:
    """The placeholder of a value in the help."""
    found = []
    for option in _options(kind):
        category = _category(option)
        if category == "choice":
            found.append("{" + ",".join(typing.get_args(option)) + "}")
        elif category == "number":
            found.append("INT" if option is int else "FLOAT")
        elif category == "list":
            inner = _metavar(typing.get_args(option)[0])
            found.append(f"{inner},..." if "|" not in inner else "LIST")
        elif category != "none":
            found.append({"mapping": "JSON", "bool": "BOOL"}.get(category, "PATH" if option is Path else "STR"))
    return "|".join(dict.fromkeys(found))


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Values of all types but dataclasses and repeated flags are read by `convert`."""
    several = {tyro.conf.UseAppendAction, tyro.conf.Positional} & info.markers
    if dataclasses.is_dataclass(info.type) or (several and _category(info.type) == "list"):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=_metavar(info.type),
        instance_from_str=lambda words: convert(words[0], info.type),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [to_text(value)],
    )


REGISTRY = ConstructorRegistry()
REGISTRY.primitive_rule(_rule)


def _unknown(word: str, known: Mapping[str, Any], command: str) -> str:
    if not word.startswith("-"):
        hint = f"; data is given with --data {word}" if "--data" in known else ""
        return f"{word!r} belongs to no flag{hint}"
    flag = word.partition("=")[0]
    return f"unknown flag {flag}{nearest(flag, known)}; longspan {command} --help lists them"


def _one_line(text: str) -> str:
    """The message of an error that tyro printed in a box."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│|╭╮╰╯+ ") for line in text.splitlines()[1:]]
    # Rules separate the title, the message and more help.
    parts = [list(group) for rule, group in groupby(lines, lambda line: not line.strip("─-")) if not rule]
    message = parts[0] if parts else [text]
    found = " ".join(" ".join(message).replace("(required)", "").split())
    found = re.sub(r"^Missing from (longspan \w+): (.*)$", r"missing \2 See \1 --help.", found)
    found = re.sub(r"^Error parsing (--[^ :]+): unknown value", r"unknown \1", found)
    return re.sub(r"^Error parsing (?:(--[^ :/]+)[^ :]*|\S+): ", lambda m: f"{m[1]} " if m[1] else "", found)
