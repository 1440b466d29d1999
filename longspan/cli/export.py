"""The command `longspan export`: write the model of a run to a folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from longspan.cli.arguments import parse, show
from longspan.utils import read_json


@dataclass(frozen=True)
class ExportFlags:
    """Write the model of a run, whose checkpoint may be sharded, to a safetensors folder or to ONNX graphs."""

    run: Annotated[Path, Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or a checkpoint."""
    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder to write: the model, and the tokenizer if the run has one."""
    format: Literal["safetensors", "onnx"] = "safetensors"
    """safetensors: model.safetensors and config.json; onnx: extend.onnx, step.onnx and the empty state."""
    merge: bool = False
    """Merge the LoRA adapter of the run into the weights; otherwise it is written beside them."""
    chunk: int | None = None
    """Tokens that extend.onnx reads at once; 64 by default."""
    batch_size: int | None = None
    """Sequences of the ONNX graphs; 1 by default."""
    max_length: int | None = None
    """Tokens that the state of softmax layers can hold in the ONNX graphs; 2048 by default."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(ExportFlags, argv, "export")
    from longspan.generation.tokenization import TOKENIZER, TOKENIZER_SETTINGS
    from longspan.models.adapter import ADAPTER, ADAPTER_CONFIG
    from longspan.models.checkpoint import CONFIG, TENSORS, describe, find_checkpoint, load, replace_folder, write
    from longspan.models.hub import LONGSPAN_MAP, STUB, write_stub
    from longspan.models.transformer import Classifier

    if flags.format == "onnx":
        _write_onnx(flags)
        return
    for name in ("chunk", "batch_size", "max_length"):
        if getattr(flags, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --format onnx: leave it out")
    checkpoint = find_checkpoint(flags.run)
    adapter = (checkpoint / ADAPTER_CONFIG).exists()
    if flags.merge and not adapter:
        raise ValueError(f"{show(flags.run)} has no LoRA adapter: leave --merge out")
    model = load(checkpoint, adapter=flags.merge)
    beside = (TOKENIZER, *TOKENIZER_SETTINGS, *(() if flags.merge else (ADAPTER, ADAPTER_CONFIG)))
    more = {n: x for n, x in read_json(checkpoint / CONFIG).items() if n not in (*describe(model), "sha256")}
    if flags.merge:
        more.pop("adapter", None)
    with replace_folder(flags.folder, (TENSORS, CONFIG, STUB, *beside)) as partial:
        write(model, partial, more | {"auto_map": LONGSPAN_MAP})
        write_stub(partial)
        for name in beside:
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, partial / name)
    parameters, name = sum(p.numel() for p in model.parameters()), show(flags.folder)
    command = "predict" if isinstance(model, Classifier) else "generate"
    print(f"{name} written, {parameters:,} parameters; longspan {command} --model {name} reads it")


def _write_onnx(flags: ExportFlags) -> None:
    """Write the two graphs of a language model, with a LoRA adapter merged."""
    from longspan.generation.tokenization import TOKENIZER, TOKENIZER_SETTINGS
    from longspan.models.checkpoint import find_checkpoint, load, replace_folder
    from longspan.models.export import DESCRIPTION, EXTEND, STATE, STEP, write_onnx
    from longspan.models.transformer import LanguageModel

    checkpoint, name = find_checkpoint(flags.run), show(flags.folder)
    model, chunk = load(checkpoint), 64 if flags.chunk is None else flags.chunk
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{show(flags.run)} is a {type(model).__name__}: --format onnx is for causal language models")
    graphs = (EXTEND, STEP, f"{EXTEND}.data", f"{STEP}.data")
    with replace_folder(flags.folder, (*graphs, STATE, DESCRIPTION, TOKENIZER, *TOKENIZER_SETTINGS)) as partial:
        rows = 1 if flags.batch_size is None else flags.batch_size
        longest = 2048 if flags.max_length is None else flags.max_length
        write_onnx(model, partial, chunk=chunk, batch_size=rows, max_length=longest)
        for file in (TOKENIZER, *TOKENIZER_SETTINGS):
            if (checkpoint / file).exists():
                shutil.copyfile(checkpoint / file, partial / file)
    print(f"{name} written: {EXTEND} reads {chunk} tokens, {STEP} one, each with the state in and out")
