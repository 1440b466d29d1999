"""The help of every command: each flag with its type, default and meaning, and examples that parse."""

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

import pytest

from longspan.cli import COMMANDS, main
from longspan.cli.arguments import parse
from longspan.cli.examples import EXAMPLES
from longspan.compat import import_hook

FLAG = re.compile(r"(?:-h, )?(--[a-z][\w.-]*)(?:, --no-[\w.-]+)?(?: ([A-Z{]\S*(?: [A-Z.]+)?))?(?:  |$)")
SWITCH = ("default: false", "default: true")
HELP = {command: ["--help"] for command in EXAMPLES} | {"train": ["--help-all"]}


def help_of(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with suppress(SystemExit):
        main([*command.split(), *HELP[command]])
    return capsys.readouterr().out


def entries(text):
    """The type and the description of every flag that a help text lists."""
    found = {}
    for line in text.partition("\nexamples:")[0].splitlines():
        line = line.strip("│| ")
        match = FLAG.match(line)
        if match:
            name = match[1]
            found[name] = [match[2], line[match.end() :].strip()]
        elif found and not line.startswith(("╭", "╰", "─", "+", "-")):
            found[name][1] += f" {line}"
    found.pop("--help", None)
    return found


def test_every_command_has_examples():
    assert {command.split()[0] for command in EXAMPLES} == set(COMMANDS)


def lacking(text):
    """The flags of a help text without type, default or meaning."""
    for flag, (kind, description) in entries(text).items():
        known = re.search(r"\((default: \S.*|required|repeatable)\)", description)
        meaning = description.replace(known[0], "") if known else description
        if not known or len(meaning.split()) < 2 or not (kind or known[1].lower() in SWITCH):
            yield flag


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_gives_type_default_and_meaning_of_every_flag_and_ends_with_examples(command, capsys, monkeypatch):
    text = help_of(command, capsys, monkeypatch)
    assert list(lacking(text)) == []  # a docstring below the field of a dataclass is its help text
    assert text.rstrip().endswith(EXAMPLES[command][-1])


@dataclass
class Flags:
    described: int = 3
    """The number of things."""
    bare: int = 5
    switch: bool = False
    described_switch: bool = False
    """Do the thing."""


def test_a_flag_without_help_is_noticed(capsys):
    with pytest.raises(SystemExit):
        parse(Flags, ["--help"], "info")
    assert list(lacking(capsys.readouterr().out)) == ["--bare", "--switch"]


class ParsedError(Exception):
    """A command line was understood."""


@pytest.mark.parametrize(("command", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines])
def test_examples_parse(command, line, monkeypatch):
    def parse_only(*arguments, **options):
        parse(*arguments, **options)
        raise ParsedError

    def run_only(*arguments, **options):
        raise ParsedError

    module = import_module(f"longspan.cli.{COMMANDS[command.split()[0]][0]}")
    monkeypatch.setattr(module, "parse", parse_only, raising=False)
    monkeypatch.setattr(import_hook, "run", run_only)
    program, *words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    assert program == "longspan"
    assert words[: len(command.split())] == command.split()
    with pytest.raises(ParsedError):
        main([words[0], "--debug", *words[1:]] if words[0] != "run" else words)
