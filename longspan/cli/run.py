"""The commands `longspan run` and `longspan convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from longspan.compat import import_hook


def run(
    script: Annotated[Path, typer.Argument(help="A Python script that uses the older libraries.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script itself is given.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu keeps what asks for CUDA on the CPU.")] = None,
) -> None:
    """Runs an unmodified script with the five older libraries' names served by longspan."""
    try:
        import_hook.run(script, arguments or [], device=device)
    except import_hook.UsageError as error:
        _fail(str(error))


# Everything after the script's name is the script's.
run.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A state dict of an older library, saved by torch.save.")],
    folder: Annotated[Path, typer.Argument(help="Where the longspan checkpoint goes.")],
    library: Annotated[str, typer.Option("--from", help="The library, such as performer-pytorch.")],
    config: Annotated[Path, typer.Option(help="JSON: the arguments of the model's constructor, and its class.")],
) -> None:
    """Writes a checkpoint of an older library as one of longspan's own."""
    from longspan.compat.convert import convert_file

    try:
        convert_file(checkpoint, folder, library, config)
    except (ValueError, OSError) as error:
        _fail(str(error))
    typer.echo(f"{folder} written; longspan generate --model {folder} reads it")


def _fail(message: str) -> NoReturn:
    typer.echo(f"longspan: {message}", err=True)
    raise typer.Exit(2)
