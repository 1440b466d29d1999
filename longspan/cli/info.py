"""`longspan info`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from longspan import __version__
from longspan.cli import worded
from longspan.cli.arguments import parse
from longspan.cli.generate import format_bytes
from longspan.mechanisms import list_mechanisms, mechanism_options
from longspan.models.adapter import ADAPTER_CONFIG, read_adapter
from longspan.models.checkpoint import CONFIG, find_checkpoint, load, read_committed
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel
from longspan.ops.common.dispatch import KERNELS, why_no_triton
from longspan.utils import printable, read_json


@dataclass(frozen=True)
class InfoFlags:
    """Show versions, devices, availability of GPU kernels, mechanisms with their options, and a model's size."""

    model: Path | None = None
    """Checkpoint folder of a model to describe."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(InfoFlags, argv, "info")
    console = Console(markup=False)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    console.print(f"longspan {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    console.print(f"devices: cpu ({torch.get_num_threads()} threads){''.join(f', {name}' for name in gpus)}")
    missing = why_no_triton()
    console.print(f"Triton kernels for {KERNELS}: {'available' if missing is None else f'not available, {missing}'}")
    table = Table("mechanism", "causal", "cross", "options and defaults")
    for name, cls in list_mechanisms().items():
        options = ", ".join(f"{option}={default!r}" for option, default in mechanism_options(name).items())
        table.add_row(name, "yes" if cls.supports_causal else "no", "yes" if cls.supports_cross else "no", options)
    console.print(table)
    if flags.model is not None:
        _describe(flags.model, console)


def _describe(folder: Path, console: Console) -> None:
    """Print the size of a model, and what it reads and predicts."""
    found = find_checkpoint(folder)
    try:
        model = load(found)
        task = read_committed(found, lambda path: read_json(path / CONFIG)).get("task")
        adapter = read_adapter(found) if (found / ADAPTER_CONFIG).exists() else None
    except OSError as error:
        raise ValueError(worded(error)) from None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{printable(str(folder))}: {type(model).__name__} with {parameters:,} parameters")
    if adapter is not None:
        settings, tensors = adapter
        layers, numbers = len(settings["target_modules"]), sum(x.numel() for x in tensors.values())
        console.print(
            f"LoRA of rank {settings['r']} in {layers} layers, {numbers:,} parameters, merged when it is read"
        )
    if isinstance(model, EncoderDecoder):
        sides = model.encoder.config, model.decoder.config
        console.print(f"reads {sides[0].vocab_size} tokens, writes {sides[1].vocab_size}")
        return
    config = model.config
    width = f"vectors of {config.input_dim or config.dim}"
    console.print(f"reads {width if config.vocab_size is None else f'{config.vocab_size} tokens'}")
    if isinstance(model, Classifier):
        names = [] if task is None else [printable(str(name)) for name in task["names"]]
        shown = f": {', '.join(names[:20])}{', …' if len(names) > 20 else ''}" if names else ""
        console.print(f"predicts {config.num_classes} outputs ({'classify' if task is None else task['kind']}){shown}")
    elif config.causal and isinstance(model, LanguageModel):
        console.print(f"state of one sequence: {format_bytes(model.state_size())}")
