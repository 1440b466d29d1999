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
from longspan.utils import read_json


@dataclass(frozen=True)
class ExportFlags:
    """Write the model of a run, whose checkpoint may be sharded, to a safetensors folder."""

    run: Annotated[Path, Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or a checkpoint."""
    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder to write: model.safetensors, config.json and the tokenizer, if the run has one."""
    merge: bool = False
    """Merge the LoRA adapter of the run into the weights; otherwise it is written beside them."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(ExportFlags, argv, "export")
    from longspan.generation.tokenization import TOKENIZER, TOKENIZER_SETTINGS
    from longspan.models.adapter import ADAPTER, ADAPTER_CONFIG
    from longspan.models.checkpoint import CONFIG, TENSORS, describe, find_checkpoint, load, replace_folder, write

    checkpoint = find_checkpoint(flags.run)
    adapter = (checkpoint / ADAPTER_CONFIG).exists()
    if flags.merge and not adapter:
        raise ValueError(f"{show(flags.run)} has no LoRA adapter: leave --merge out")
    model = load(checkpoint, adapter=flags.merge)
    beside = (TOKENIZER, *TOKENIZER_SETTINGS, *(() if flags.merge else (ADAPTER, ADAPTER_CONFIG)))
    more = {n: x for n, x in read_json(checkpoint / CONFIG).items() if n not in (*describe(model), "sha256")}
    if flags.merge:
        more.pop("adapter", None)
    with replace_folder(flags.folder, (TENSORS, CONFIG, *beside)) as partial:
        write(model, partial, more)
        for name in beside:
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, partial / name)
    parameters, name = sum(p.numel() for p in model.parameters()), show(flags.folder)
    print(f"{name} written, {parameters:,} parameters; longspan generate --model {name} reads it")
