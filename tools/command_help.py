"""Read the help of the commands: for the command-line page of the documentation, and for its tests."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from typing import NamedTuple
from unittest.mock import patch

from longspan.cli import main
from longspan.cli.examples import EXAMPLES

FLAG = re.compile(r"(?:-h, )?(--[a-z][\w.-]*)(?:, --no-[\w.-]+)?(?: ([A-Z{]\S*))?(?:  |$)")
ARGUMENT = re.compile(r"([A-Z]+(?: \.\.\.)?)()(?:  |$)")
DEFAULT = re.compile(r" ?\((default: ?[^()]*(?:\([^()]*\))?[^()]*|required|repeatable)\)$")


class Entry(NamedTuple):
    """A flag or positional argument in a help text."""

    name: str
    kind: str
    meaning: str
    default: str


def help_text(command: str, *, brief: bool = False) -> str:
    """Return what `longspan COMMAND --help` prints; of train, what --help-all prints, unless `brief`."""
    flag = "--help-all" if command == "train" and not brief else "--help"
    columns = patch.dict(os.environ, {"COLUMNS": "100"})
    with columns, redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
        main([*command.split(), flag])
    return out.getvalue()


def entries(text: str) -> list[Entry]:
    """Return the flags and positional arguments that a help text lists, but --help."""
    found: list[list[str]] = []
    inside = False  # the lines of an entry; a blank line ends a section
    for line in map(str.strip, text.partition("\nexamples:")[0].splitlines()[1:]):
        match = FLAG.match(line) or ARGUMENT.match(line)
        if match:
            found.append([match[1], match[2] or "", line[match.end() :].strip()])
        elif inside and line:
            found[-1][2] += f" {line}"
        inside = bool(line) and (inside or bool(match))
    return [_entry(*parts) for parts in found if parts[0] != "--help"]


def _entry(name: str, kind: str, description: str) -> Entry:
    default = DEFAULT.search(description.strip())
    return Entry(name, kind, DEFAULT.sub("", description.strip()).strip(), default[1] if default else "")


def command_reference() -> str:
    """Return a section of Markdown for each command: what it does, its arguments and flags, and examples."""
    parts = []
    for command, lines in EXAMPLES.items():
        text = help_text(command)
        about = re.split(r"\n ?(?:options|positional)", text, maxsplit=1)[0].partition("\n\n")[2].strip()
        parts += [f"## {command}", about, "```sh\n" + "\n".join(lines) + "\n```"]
        for entry in entries(text):
            title = f"`{f'{entry.name} {entry.kind}'.strip()}`"
            default = f" <small>({entry.default})</small>" if entry.default else ""
            parts.append(f"{title}{default}\n:   {entry.meaning}")
    return "\n\n".join(parts)
