"""The help of every command: each flag with its type, default and meaning, and examples that parse."""

import shlex
from dataclasses import dataclass
from importlib import import_module

import pytest
from command_help import entries, help_text

from longspan.cli import COMMANDS, main
from longspan.cli.arguments import parse
from longspan.cli.examples import EXAMPLES
from longspan.compat import import_hook

SWITCH = ("default: false", "default: true")


def test_every_command_has_examples():
    assert {command.split()[0] for command in EXAMPLES} == set(COMMANDS)


def lacking(text):
    """The flags of a help text without type, default or meaning."""
    for entry in entries(text):
        typed = entry.kind or not entry.name.startswith("--") or entry.default.lower() in SWITCH
        if not (typed and entry.default and len(entry.meaning.split()) > 1):
            yield entry.name


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_gives_type_default_and_meaning_of_every_flag_and_ends_with_examples(command):
    text = help_text(command)
    assert entries(text)
    assert list(lacking(text)) == []  # a docstring below the field of a dataclass is its help text
    assert text.rstrip().endswith(EXAMPLES[command][-1])


def test_the_help_of_train_is_short():
    lines = help_text("train", brief=True).splitlines()
    assert sum(-(-max(len(line), 1) // 100) for line in lines) <= 100


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
    text = capsys.readouterr().out
    assert [entry.name for entry in entries(text)] == ["--described", "--bare", "--switch", "--described-switch"]
    assert list(lacking(text)) == ["--bare", "--switch"]


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
