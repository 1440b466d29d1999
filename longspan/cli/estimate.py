"""The command `longspan estimate`: estimate a training step on many GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longspan.cli.arguments import check_at_least, parse

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class EstimateFlags:
    """Estimate time, memory and traffic of a training step on many GPUs.

    From kernel times measured on one H200 (benchmarks/results) and the speeds of links, by the formulas of
    docs/distributed.md. Without --mesh, the fastest mesh that fits the memory is shown.
    """

    gpus: int = 8
    """Number of GPUs."""
    context: str = "64k"
    """Tokens of a sequence, as 131072, 128k or 1M (powers of 1024)."""
    mesh: str | None = None
    """GPUs by axis, as dp=2,fsdp=4,cp=2; -1: the rest."""
    batch_size: int = 1
    """Sequences of each group of cp ranks in a step."""
    preset: str = "small"
    """Model: tiny, small or base."""
    mechanism: str = "split"
    """Name, or options as JSON; split: local and linear heads."""
    dim: int | None = None
    """Width of the model; that of the preset by default."""
    depth: int | None = None
    """Number of layers; that of the preset by default."""
    num_heads: int | None = None
    """Number of heads; that of the preset by default."""
    vocab_size: int = 256
    """Number of tokens of the vocabulary."""
    execution: Literal["keep", "recompute"] = "keep"
    """Keep activations, or recompute them in the backward pass."""
    chunk_length: str | None = None
    """Train in chunks of this many tokens (`longspan train --chunk-length`); 128k and 1M are understood."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    memory: float = 141.0
    """Memory of a GPU in GB."""
    link: float = 450.0
    """Speed between the GPUs of a node in GB/s, one direction."""
    network: float = 50.0
    """Speed of a GPU to another node in GB/s, one direction."""
    latency: float = 20.0
    """Microseconds to start a collective."""
    figures: Path | None = None
    """Results of `longspan bench` (a folder) instead of those of the H200."""
    json: bool = False
    """Print JSON."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(EstimateFlags, argv, "estimate")
    check_at_least(1, gpus=flags.gpus, batch_size=flags.batch_size, gpus_per_node=flags.gpus_per_node)
    for name in ("memory", "link", "network"):
        if not getattr(flags, name) > 0:
            raise ValueError(f"--{name} must be above 0, got {getattr(flags, name)}")
    if not flags.latency >= 0:
        raise ValueError(f"--latency must be 0 or more, got {flags.latency}")
    from longspan.distributed import estimate
    from longspan.distributed.mesh import MeshShape

    work = _workload(flags)
    hardware = estimate.Hardware(
        flags.gpus_per_node, flags.memory * 1e9, flags.link * 1e9, flags.network * 1e9, flags.latency / 1e6
    )
    figures = estimate.load_figures() if flags.figures is None else estimate.collect(flags.figures)
    if flags.mesh is not None:
        shapes = [MeshShape.parse(flags.mesh).fit(flags.gpus)]
    else:
        shapes = list(estimate.meshes(flags.gpus, work.context))
        if work.chunk_length is not None:
            shapes = [shape for shape in shapes if shape.cp == 1]
    steps = [estimate.estimate(work, shape, hardware, figures) for shape in shapes]
    best = min(steps, key=lambda step: (step.memory > hardware.memory, _seconds_per_token(step), step.memory))
    if flags.json:
        print(json.dumps(_as_json(best), indent=1))
    else:
        print(_as_text(best, work, hardware))
    if best.memory > hardware.memory:
        raise ValueError(
            f"a GPU needs {best.memory / 1e9:,.1f} GB and has {flags.memory:g}: use more --gpus, "
            "--execution recompute, or --chunk-length"
        )


def parse_tokens(flag: str, text: str) -> int:
    """Return the number that a text such as 131072, 128k or 1M stands for."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]?)", text.strip().lower().replace(",", "").replace("_", ""))
    number = float(match[1]) * _SIZES[match[2]] if match else 0.0
    if number < 1 or number != int(number):
        raise ValueError(f"{flag} must be a number of tokens such as 131072, 128k or 1M, got {text!r}")
    return int(number)


def _workload(flags: EstimateFlags) -> Any:
    from longspan.distributed.estimate import TrainingLoad
    from longspan.train.config import resolve

    context = parse_tokens("--context", flags.context)
    given: dict[str, Any] = {"data": ("-",), "out": "-", "preset": flags.preset, "mechanism": flags.mechanism}
    given |= {"context": context, "steps": 1}
    for name, path in (("dim", "dim"), ("depth", "depth"), ("num_heads", "attention.num_heads")):
        if getattr(flags, name) is not None:
            given[f"model.{path}"] = getattr(flags, name)
    config = resolve(given).complete(flags.vocab_size, 0)
    pieces = None if flags.chunk_length is None else parse_tokens("--chunk-length", flags.chunk_length)
    return TrainingLoad(config, context, flags.batch_size, flags.execution == "recompute", pieces)


def _seconds_per_token(step: Any) -> float:
    return float(step.seconds / step.tokens)


def _as_json(step: Any) -> dict[str, Any]:
    values = {name: value for name, value in vars(step).items() if name != "shape"}
    totals = {"seconds": step.seconds, "memory": step.memory, "tokens_per_second": step.tokens / step.seconds}
    return {"mesh": str(step.shape), **totals, **values}


def _as_text(step: Any, work: Any, hardware: Any) -> str:
    gb = {
        name: f"{getattr(step, name) / 1e9:,.2f}" for name in ("weights", "gathered", "activations", "states", "memory")
    }
    mb = {name: f"{getattr(step, name) / 1e6:,.1f}" for name in ("weights_sent", "exchange_sent")}
    ms = {name: f"{getattr(step, name) * 1e3:,.2f}" for name in ("seconds", "compute", "weights_time", "exchange_time")}
    return "\n".join(
        [
            f"mesh {step.shape}: a step reads {step.tokens:,} tokens in sequences of {work.context:,}",
            f"time       {ms['seconds']} ms per step, {step.tokens / step.seconds:,.0f} tokens/s",
            f"           {ms['compute']} kernels, beside them {ms['weights_time']} weights and gradients; "
            f"{ms['exchange_time']} states",
            f"memory     {gb['memory']} GB of {hardware.memory / 1e9:g} per GPU",
            f"           {gb['weights']} weights, gradients and optimizer; {gb['gathered']} gathered weights; "
            f"{gb['activations']} activations; {gb['states']} states",
            f"traffic    a GPU sends {mb['weights_sent']} MB of weights and gradients, {mb['exchange_sent']} MB of "
            "states, keys and values",
        ]
    )
