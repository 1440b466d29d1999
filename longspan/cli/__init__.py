"""The command line. A command's module is imported when it is called: `longspan run` works where torch is not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

# Where each command is, and what it is for.
COMMANDS = {
    "train": ("longspan.cli.train:train", "Train a model on files, folders or globs; stopped runs go on."),
    "eval": ("longspan.cli.train:evaluate", "Score a model by position in its context, or mechanisms on small tasks."),
    "report": ("longspan.cli.train:report", "Draw one run or several on one page: curves, differences, samples."),
    "generate": ("longspan.cli.generate:generate", "Continue a text with a saved model, streaming it as it comes."),
    "run": ("longspan.cli.run:run", "Run a script of the older libraries, unchanged, with longspan in their place."),
    "convert": ("longspan.cli.run:convert", "Turn an older library's checkpoint into one of longspan's."),
    "bench": ("longspan.cli.bench:bench", "Time mechanisms beside the older packages, with their peak memory."),
    "info": ("longspan.cli.generate:info", "Versions, devices, kernels, mechanisms and their options, a model's size."),
}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), function)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(cmd_name, context_settings=getattr(command, "context_settings", None))(command)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (_, purpose) in COMMANDS.items()])


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def longspan() -> None:
    """Attention that does not cost n²: train, generate, measure. `longspan COMMAND --help` tells the rest."""
