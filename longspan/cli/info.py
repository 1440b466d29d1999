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
from longspan.cli.arguments import parse
from longspan.cli.generate import format_bytes, load_model
from longspan.mechanisms import list_mechanisms, mechanism_options
from longspan.ops.common.dispatch import KERNELS, why_no_triton
from longspan.utils import printable


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
        model = load_model(flags.model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        console.print(f"{printable(str(flags.model))}: {type(model).__name__} with {parameters:,} parameters")
        if model.config.causal:
            console.print(f"state of one sequence: {format_bytes(model.state_size())}")
