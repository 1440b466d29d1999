"""The command `longspan run`. Its options are parsed by hand: what follows the script belongs to the script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longspan.cli import fail
from longspan.cli.examples import examples
from longspan.compat import import_hook
from longspan.utils import nearest

HELP = """usage: longspan run [--device {cpu,cuda}] [--faithful] [--replace] SCRIPT [ARGUMENTS ...]

Run an unmodified script with the five older libraries replaced by longspan. Arguments after SCRIPT are the script's.

options:
  --device {cpu,cuda}  cpu: use the CPU even if there is a GPU; cuda: require a GPU (default: the script's choice)
  --faithful           compute what the older libraries do, known defects included (default: false)
  --replace            replace a project's own copies of the older libraries too, not only installed ones
                       (default: false)
"""
SWITCHES = ("--faithful", "--replace")


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    words, device, switches = list(argv), None, dict.fromkeys(SWITCHES, False)
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        if flag in ("--help", "-h"):
            print(HELP, examples("run"), sep="\n")
            return
        if flag in switches and not equals:
            switches[flag] = True
            continue
        if flag in switches:
            fail(ValueError(f"{flag} takes no value, got {value!r}"))
        if flag != "--device":
            close = nearest(flag, ["--device", *SWITCHES])
            fail(ValueError(f"unknown flag {flag}{close}; longspan run --help lists them"))
        if not equals and not words:
            fail(ValueError("--device needs a value: cpu or cuda"))
        device = value if equals else words.pop(0)
    if not words:
        fail(ValueError("give a script: longspan run SCRIPT [ARGUMENTS ...]"))
    faithful, replace = switches.values()
    try:
        import_hook.run(Path(words[0]), words[1:], device=device, faithful=faithful, replace=replace)
    except import_hook.UsageError as error:
        fail(error)
