"""The command line. Commands are imported when they are called: `--help` and `run` need neither torch nor tyro."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from longspan.utils import choose

# The module of each command below this package, and a summary.
COMMANDS = {
    "train": ("train", "Train a model on files, folders or globs; resumes interrupted runs."),
    "eval": ("evaluate", "Evaluate a model by position in the context, or mechanisms on synthetic tasks."),
    "report": ("report", "Write an HTML report of one or several training runs."),
    "generate": ("generate", "Generate text with a saved model."),
    "run": ("run", "Run an unmodified script of an older library with longspan in its place."),
    "convert": ("convert", "Convert a checkpoint of an older library."),
    "bench": ("bench", "Benchmark mechanisms, layers and models against other packages."),
    "info": ("info", "Show versions, devices, kernels, mechanisms with their options, and a model's size."),
}

HELP = """usage: longspan COMMAND [OPTIONS]

Sequence mixing in linear time: train, generate, measure.

commands:
{commands}

`longspan COMMAND --help` lists the options of a command. --debug shows the traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        argv: The command and its options; `sys.argv[1:]` by default.

    Raises:
        SystemExit: If the command fails; the status is 2 for wrong input.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        commands = [f"  {name:9} {summary}" for name, (_, summary) in COMMANDS.items()]
        print(HELP.format(commands="\n".join(commands)), end="")
        return
    if words[0] == "--version":
        from longspan import __version__

        print(f"longspan {__version__}")
        return
    name, *rest = words
    if name == "run":
        import_module("longspan.cli.run").main(rest)  # Errors of the script keep their traceback.
        return
    debug = "--debug" in rest
    if not debug and name in ("train", "eval", "report"):
        warnings.simplefilter("ignore")
    try:
        choose("command", name, COMMANDS)
        import_module(f"longspan.cli.{COMMANDS[name][0]}").main([word for word in rest if word != "--debug"])
    except Exception as error:
        if debug:
            raise
        fail(error)


def fail(error: Exception) -> NoReturn:
    """Print an error in one line and leave with its status."""
    text = " ".join(str(error).split()) or type(error).__name__
    status = getattr(error, "status", 2 if isinstance(error, ValueError) else 1)
    if isinstance(error, ModuleNotFoundError):
        text = f"{error.name} is not installed: pip install 'longspan[train]' installs what the commands need"
    elif not isinstance(error, ValueError | OSError) and not hasattr(error, "status"):
        text = f"{type(error).__name__}: {text} (--debug shows the traceback)"
    print(f"longspan: {text}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        os._exit(status)  # Other processes may be waiting in a collective operation: do not wait for them.
    raise SystemExit(status) from None
