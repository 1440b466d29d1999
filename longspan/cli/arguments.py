"""Parse a command line into a dataclass with tyro; the docstrings of its fields are the help texts."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from longspan.cli.examples import EXAMPLES, examples
from longspan.utils import choose, nearest, printable

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
        print(examples(command))
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
    readers = [_reader(option) for option in _options(kind)]
    for reader in sorted(readers, key=lambda reader: reader.order):
        try:
            return reader.read(text)
        except (KeyError, ValueError, RecursionError) as error:
            if len(readers) == 1 and reader.explains:
                raise ValueError(str(error)) from None
    raise ValueError(f"must be {' or '.join(reader.expected for reader in readers)}, got {text!r}")


def to_text(value: Any) -> str:
    """Return the text that `convert` turns into a value."""
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(isinstance(x, Mapping) for x in value)):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(to_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def show(path: Path) -> str:
    """Return a path to print: as it is to a file or pipe, without control characters to a terminal."""
    return printable(str(path)) if sys.stdout.isatty() else str(path)


class _Reader(NamedTuple):
    """How values of a type are read.

    order: In a union, lower ones are tried first. explains: The errors of `read` are complete.
    """

    order: int
    metavar: str
    expected: str
    read: Callable[[str], Any]
    explains: bool = False


_READERS: dict[Any, _Reader] = {
    type(None): _Reader(0, "", "none", lambda text: {"none": None}[text.lower()]),
    bool: _Reader(2, "BOOL", "true or false", lambda text: BOOLEANS[text.lower()]),
    int: _Reader(3, "INT", "an integer", int),
    float: _Reader(3, "FLOAT", "a number", float),
    str: _Reader(5, "STR", "text", str),
    Path: _Reader(5, "PATH", "a path", Path),
}


def _reader(kind: Any) -> _Reader:
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        names = ", ".join(arguments)
        return _Reader(2, "{" + ",".join(arguments) + "}", names, lambda x: choose("value", x, arguments), True)
    if origin in (tuple, Sequence):
        metavar = f"{_metavar(arguments[0])},..."
        return _Reader(4, metavar, "a list such as 1,2", lambda x: _read_list(x, arguments[0], origin is tuple), True)
    if origin is Mapping or dataclasses.is_dataclass(origin):
        return _Reader(1, "JSON", "JSON such as {...}", _read_mapping)
    return _READERS[origin]


def _read_mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return found


def _read_list(text: str, kind: Any, may_be_one: bool) -> Any:
    if text.startswith("["):
        return json.loads(text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and not may_be_one:
        raise ValueError(f"{text!r} is not a list")
    return tuple(convert(part, kind) for part in parts)


def _options(kind: Any) -> Sequence[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _metavar(kind: Any) -> str:
    """The placeholder of a value in the help."""
    return "|".join(dict.fromkeys(filter(None, (_reader(option).metavar for option in _options(kind)))))


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Values of all types but dataclasses and repeated flags are read by `convert`."""
    several = {tyro.conf.UseAppendAction, tyro.conf.Positional} & info.markers
    if dataclasses.is_dataclass(info.type) or (several and typing.get_origin(info.type) is tuple):
        return None
    try:
        metavar = _metavar(info.type)
    except KeyError:  # tyro also asks about what is not a type of values.
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
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
    owner = next((name for name, lines in EXAMPLES.items() if any(flag in line.split() for line in lines)), None)
    hint = f" (longspan {owner} takes it)" if owner else nearest(flag, known)
    return f"unknown flag {flag}{hint}; longspan {command} --help lists them"


def _one_line(text: str) -> str:
    """The message of an error that tyro printed in a box."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│|╭╮╰╯+ ") for line in text.splitlines()[1:]]
    # Rules separate the title, the message and more help.
    parts = [list(group) for rule, group in groupby(lines, lambda line: not line.strip("─-")) if not rule]
    message = parts[0] if parts else [text]
    found = " ".join(" ".join(message).replace("(required)", "").split())
    found = re.sub(r"^Missing from (longspan \w+): (.*)$", r"missing \2 See \1 --help.", found)
    found = re.sub(r"^Missing value for argument '([^']+)'.*$", r"\1 needs a value", found)
    found = re.sub(r"^Error parsing (--[^ :]+): unknown value", r"unknown \1", found)
    return re.sub(r"^Error parsing (?:(--[^ :/]+)[^ :]*|\S+): ", lambda m: f"{m[1]} " if m[1] else "", found)
