"""Estimate the memory and time of a run by counting saved tensors and timing a few steps."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from longspan.models.transformer import LanguageModel
from longspan.train.loggers import format_duration
from longspan.train.trainer import Trainer


def estimate(trainer: Trainer) -> list[str]:
    """Return lines of text about parameters, state size, memory and time."""
    train, data = trainer.config, trainer.metadata["data"]
    num_tokens = trainer.shape.num_sequences * train.context
    saved, seconds = _measure(trainer)
    weights = sum(x.numel() * x.element_size() for x in trainer.objective.parameters())
    fixed = 4 * weights  # weights, gradients and two AdamW moments
    mechanism = trainer.metadata["settings"]["model"]["attention"]["mechanism"]
    name = mechanism.get("mechanism") if isinstance(mechanism, dict) else mechanism
    lines = [
        f"model: {type(trainer.model).__name__}, {trainer.metadata['parameters']:,} parameters, mechanism {name}",
        f"data: {data['train_tokens']:,} tokens to train on, {data['held_out_tokens']:,} held out, "
        f"vocabulary {data['vocab_size']}",
    ]
    if isinstance(trainer.model, LanguageModel) and trainer.model.config.causal:
        lines.append(f"state of one sequence: {_format_bytes(trainer.model.state_size())}")
    lines.append(
        f"memory: {_format_bytes(fixed)} for weights, gradients and optimizer, {_format_bytes(saved)} for activations "
        f"of {train.batch_size} sequences of {train.context} tokens: about {_format_bytes(fixed + saved)}"
    )
    if trainer.accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.accelerator.device)
        lines.append(f"measured on {trainer.metadata['device']}: peak of {_format_bytes(peak)}")
    speed = f"{seconds:.3f} s per step of {num_tokens:,} tokens, {num_tokens / seconds:,.0f} tokens/s"
    if train.steps is not None:
        steps = float(train.steps)
        lines.append(f"time: {speed}, about {format_duration(seconds * steps)} for {train.steps} steps")
    else:
        assert train.minutes is not None
        steps = 60 * train.minutes / seconds
        lines.append(f"time: {speed}, about {round(steps):,} steps in {train.minutes:g} minutes")
    lines.append(f"epochs: {num_tokens * steps / max(1, data['train_tokens']):.2f}")
    return lines


def _measure(trainer: Trainer) -> tuple[int, float]:
    """Return the bytes saved for backward, each storage counted once, and the seconds of a step."""
    sizes: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        trainer.train_step()
        trainer.read_loss()
    start, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - start < 1:
        trainer.train_step()
        trainer.read_loss()
        steps += 1
    return sum(sizes.values()), (time.perf_counter() - start) / steps


def _format_bytes(number: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 2**10:,.1f} KiB"
