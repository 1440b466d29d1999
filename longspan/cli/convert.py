"""The command `longspan convert`: convert a checkpoint of an older library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from longspan.cli import worded
from longspan.cli.arguments import parse, show


@dataclass(frozen=True)
class ConvertFlags:
    """Convert a checkpoint of an older library to a longspan checkpoint."""

    checkpoint: Annotated[Path, Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """State dict of an older library, written by torch.save."""
    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder for the longspan checkpoint."""
    library: Annotated[str, tyro.conf.arg(name="from")]
    """Name of the library, such as performer-pytorch."""
    config: Path
    """JSON file with the arguments of the model's constructor, and its class."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(ConvertFlags, argv, "convert")
    from longspan.compat.convert import convert_file

    try:
        convert_file(flags.checkpoint, flags.folder, flags.library, flags.config)
    except OSError as error:
        raise ValueError(worded(error)) from None
    print(f"{show(flags.folder)} written; longspan generate --model {show(flags.folder)} reads it")
