"""`longspan export`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from longspan.cli.arguments import parse, show


@dataclass(frozen=True)
class ExportFlags:
    """Write the model of a run, whose checkpoint may be sharded, to a safetensors folder."""

    run: Annotated[Path, Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or a checkpoint."""
    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder to write: model.safetensors, config.json and the tokenizer, if the run has one."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(ExportFlags, argv, "export")
    from longspan.generation.tokenization import TOKENIZER
    from longspan.models.checkpoint import CONFIG, TENSORS, find_checkpoint, load, replace_folder, write

    checkpoint = find_checkpoint(flags.run)
    model = load(checkpoint)
    with replace_folder(flags.folder, (TENSORS, CONFIG, TOKENIZER)) as partial:
        write(model, partial)
        if (checkpoint / TOKENIZER).exists():
            shutil.copyfile(checkpoint / TOKENIZER, partial / TOKENIZER)
    parameters, name = sum(p.numel() for p in model.parameters()), show(flags.folder)
    print(f"{name} written, {parameters:,} parameters; longspan generate --model {name} reads it")
