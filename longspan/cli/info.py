"""The command `longspan info`: show versions, devices, mechanisms and models."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tyro.conf import FlagCreatePairsOff

from longspan import __version__
from longspan.cli import worded
from longspan.cli.arguments import parse
from longspan.cli.generate import is_decoder, load_model
from longspan.mechanisms import list_mechanisms, mechanism_options
from longspan.models.adapter import ADAPTER_CONFIG, read_adapter
from longspan.models.checkpoint import CONFIG, find_checkpoint, load, read_committed
from longspan.models.explain import explain
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel
from longspan.ops.common.dispatch import KERNELS, why_no_triton
from longspan.train.presets import half_local
from longspan.utils import format_bytes, printable, read_json


@dataclass(frozen=True)
class InfoFlags:
    """Show versions, devices, availability of GPU kernels, mechanisms with their options, and a model's size.

    With --why: which implementation runs a call, and why, of each layer of the model or of mechanisms.
    """

    model: Path | None = None
    """Checkpoint folder of a model to describe; also without --model."""
    why: FlagCreatePairsOff[bool] = False
    """Report which implementation runs a call of the following shape, and why. No GPU is needed for --device cuda."""
    mechanisms: tuple[str, ...] = ()
    """Mechanisms to explain. By default all of them."""
    options: str = "{}"
    """Options of a mechanism as JSON, such as {"num_features": 512}."""
    batch: int = 1
    """Batch size."""
    length: int = 8192
    """Number of tokens."""
    heads: int = 8
    """Number of heads of a mechanism."""
    head_dim: int = 64
    """Dimension of a head of a mechanism."""
    causal: FlagCreatePairsOff[bool] = False
    """Causal calls only, of a mechanism that is not part of a model."""
    bidirectional: FlagCreatePairsOff[bool] = False
    """Bidirectional calls only, of a mechanism that is not part of a model."""
    decode: FlagCreatePairsOff[bool] = False
    """Steps of the decode loop only."""
    training: FlagCreatePairsOff[bool] = False
    """Calls in training."""
    padded: FlagCreatePairsOff[bool] = False
    """Calls with a mask of padding."""
    packed: tuple[int, ...] = ()
    """Lengths of sequences packed into one row."""
    dtype: str = "bfloat16"
    """bfloat16, float16, float32 or float64."""
    device: str = "auto"
    """cpu or cuda. By default cuda if this machine has it."""

    def __post_init__(self) -> None:
        if self.causal + self.bidirectional + self.decode > 1:
            raise ValueError("--causal, --bidirectional and --decode exclude each other: give one of them")
        if self.model is not None and (self.mechanisms or self.options != "{}" or self.causal or self.bidirectional):
            raise ValueError("--mechanisms, --options, --causal and --bidirectional are for mechanisms without a model")
        changed = [
            x.name for x in fields(self) if getattr(self, x.name) != x.default and x.name not in ("model", "why")
        ]
        if changed and not self.why:
            flag = f"--{changed[0].replace('_', '-')}"
            raise ValueError(f"{flag} describes a call for --why: give --why too, or leave it out")


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    named = argv[:1] and not argv[0].startswith("-")
    flags = parse(InfoFlags, ["--model", *argv] if named else argv, "info")
    console = Console(markup=False)
    if flags.why:
        for line in _reasons(flags):
            console.print(line, highlight=False, soft_wrap=True)
        return
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


def _reasons(flags: InfoFlags) -> Iterator[str]:
    """Yield the lines of --why."""
    device = flags.device if flags.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    how: dict[str, Any] = {"training": flags.training, "padded": flags.padded, "dtype": flags.dtype, "device": device}
    if flags.packed:
        how["packed"] = flags.packed
    how |= {"batch_size": flags.batch, "length": flags.length}
    if flags.model is not None:
        yield str(explain(_load(flags.model), decode=flags.decode, **how))
        return
    modes: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "bidirectional": {"causal": False}}
    if flags.decode or not (flags.training or flags.padded or flags.packed):
        modes["decode"] = {"decode": True}
    chosen = [mode for mode in modes if getattr(flags, mode)] or list(modes)
    for name in flags.mechanisms or list_mechanisms():
        options = {"num_heads": flags.heads, "head_dim": flags.head_dim, **_mechanism_options(name, flags)}
        for mode in chosen:
            yield f"{name}, {mode}: {explain(name, **how, **modes[mode], **options)}"


def _mechanism_options(name: str, flags: InfoFlags) -> dict[str, Any]:
    """The options of a mechanism, and those without which it cannot be built."""
    try:
        given = json.loads(flags.options)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f'--options takes a JSON object such as {{"window": 512}}, got {flags.options!r}')
    if name == "split" and "parts" not in given:
        given["parts"] = half_local(flags.heads, 256, {"mechanism": "linear"})["parts"]
    if name == "linformer":
        given.setdefault("max_length", sum(flags.packed) or flags.length)
    return given


def _load(folder: Path) -> torch.nn.Module:
    try:
        return load(find_checkpoint(folder))
    except OSError as error:
        raise ValueError(worded(error)) from None


def _describe(folder: Path, console: Console) -> None:
    """Print the size of a model, and what it reads and predicts."""
    found = find_checkpoint(folder)
    try:
        model = load_model(found) if is_decoder(found) else load(found)
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
