"""Estimate the memory and time of a run: by a formula, then by measuring one short sequence."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

import psutil
import torch
from torch import Tensor

from longspan.models.config import FeedForwardConfig, ModelConfig
from longspan.models.transformer import LanguageModel
from longspan.train.config import TrainConfig
from longspan.train.loggers import format_duration
from longspan.train.setup import batches_per_step
from longspan.train.trainer import Trainer
from longspan.utils import format_bytes

_MAX_ROW = 512  # tokens of the measured sequence
_SHARE = 0.25  # of the free memory that measuring may take


def estimate(trainer: Trainer) -> Iterator[str]:
    """Yield lines of text about data, parameters, state size, memory and time; the measured ones come last."""
    train, data, config = trainer.config, trainer.metadata["data"], trainer.model.config
    batches = _mean_batches(train)
    num_tokens = round(trainer.shape.num_sequences / train.accumulate * batches * train.context)
    yield from trainer.store.describe_sources()
    mechanism = trainer.metadata["settings"]["model"]["attention"]["mechanism"]
    name = mechanism.get("mechanism") if isinstance(mechanism, dict) else mechanism
    yield f"model: {type(trainer.model).__name__}, {trainer.metadata['parameters']:,} parameters, mechanism {name}"
    yield (
        f"data: {data['train_tokens']:,} tokens to train on, {data['held_out_tokens']:,} held out, "
        f"vocabulary {data['vocab_size']}"
    )
    if isinstance(trainer.model, LanguageModel) and config.causal:
        yield f"state of one sequence: {format_bytes(trainer.model.state_size())}"
    fixed = _weights_and_optimizer(trainer)
    width = 4 if trainer.accelerator.mixed_precision == "no" else 2
    per_token = width * activations_per_token(config)
    batch = train.batch_size * train.context
    yield _memory("by formula", fixed, per_token * batch, train.batch_size, train.context)
    free, where = _free_memory(trainer.accelerator.device)
    row = min(train.context, _MAX_ROW)
    alone = trainer.accelerator.num_processes == 1  # Several must run as many sequences of the same length.
    if alone:
        row = max(1, min(row, int(_SHARE * max(0, free - fixed) / per_token)))
    half, _ = _measure(trainer, -(-row // 2), 0)
    whole, seconds = _measure(trainer, row, 1 if alone else 0)
    more = (whole - half) / max(1, row // 2) * (train.context - row)  # A part of what is saved is of constant size.
    saved = train.batch_size * (whole + more)
    seconds *= train.batch_size * batches * train.context / row
    measured = f"from a sequence of {row} tokens"
    yield _memory(measured, fixed, saved, train.batch_size, train.context)
    if fixed + saved > free:
        yield (
            f"this is more than the {format_bytes(free)} that are free {where}: lower --batch-size, and raise "
            "--accumulate by the same factor, or use --model.execution recompute"
        )
    speed = f"{seconds:.3f} s per step of {num_tokens:,} tokens, {num_tokens / seconds:,.0f} tokens/s ({measured})"
    if train.steps is not None:
        steps = float(train.steps)
        yield f"time: {speed}, about {format_duration(seconds * steps)} for {train.steps} steps"
    else:
        assert train.minutes is not None
        steps = 60 * train.minutes / seconds
        yield f"time: {speed}, about {round(steps):,} steps in {train.minutes:g} minutes"
    yield f"epochs: {num_tokens * steps / max(1, data['train_tokens']):.2f}"


def _weights_and_optimizer(trainer: Trainer) -> int:
    """Return the bytes of weights, of gradients, and of the moments of AdamW (two) or Muon (one)."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    trained = sum((2 if group.get("muon") else 3) * size(group["params"]) for group in trainer.optimizer.param_groups)
    return size(trainer.objective.parameters()) + trained


def _mean_batches(train: TrainConfig) -> float:
    """Return the mean number of batches of a step, which --ramp-up lowers."""
    return fmean(batches_per_step(train, i / 1000) for i in range(1000))


def activations_per_token(config: ModelConfig) -> int:
    """Return about how many numbers a model saves for backward per token.

    In each layer these are the inputs of both norms and of the projections, q, k, v and the heads' outputs, the scores
    of windows, and the hidden activations before and after the nonlinearity. With recomputation, one layer and the
    inputs of the others.
    """
    attention = config.attention
    head_dim = attention.head_dim or config.dim // attention.num_heads
    heads = 2 * attention.num_heads + 2 * (attention.num_kv_heads or attention.num_heads)
    layer = 6 * config.dim + heads * head_dim + _scores(attention.mechanism, attention.num_heads)
    if isinstance(config.feed_forward, FeedForwardConfig):
        hidden = config.feed_forward.hidden or int(config.feed_forward.mult * config.dim)
        layer += (3 if config.feed_forward.gated else 2) * hidden
    inputs = {"keep": 0, "reverse": 2 * config.dim}.get(config.execution, config.depth * config.dim)
    return inputs + layer * (config.depth if config.execution == "keep" else 1) + 4 * config.dim


def _scores(mechanism: Any, num_heads: int) -> int:
    """Return about how many numbers per token local attention saves for its scores, by blocks of the window."""
    if isinstance(mechanism, list | tuple):  # one for each layer
        return max(_scores(spec, num_heads) for spec in mechanism)
    if not isinstance(mechanism, Mapping):
        return 0
    if "parts" in mechanism:
        return sum(_scores(part, part.get("num_heads", 1)) for part in mechanism["parts"])
    return 6 * int(mechanism.get("window") or 0) * num_heads


def _memory(how: str, fixed: float, saved: float, batch_size: int, context: int) -> str:
    return (
        f"memory, {how}: {format_bytes(fixed)} for weights, gradients and optimizer, {format_bytes(saved)} for "
        f"activations of {batch_size} sequences of {context} tokens: about {format_bytes(fixed + saved)}"
    )


def _free_memory(device: torch.device) -> tuple[int, str]:
    """Return the free memory of a device in bytes, and where that is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], "on the GPU"
    return psutil.virtual_memory().available, "on this machine"


def _measure(trainer: Trainer, row: int, seconds: float) -> tuple[int, float]:
    """Run one sequence forward and backward.

    Args:
        trainer: The run.
        row: The length of the sequence.
        seconds: How long to repeat it.

    Returns:
        The bytes saved for backward, each storage counted once, and the mean time in seconds.
    """
    sizes: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    batch = trainer.batches.next_step()[0].to(trainer.device)
    tokens = batch.tokens[:1, :row]
    targets = batch.targets[:1] if batch.targets.ndim == 1 else batch.targets[:1, :row]

    def step() -> None:
        with trainer.accelerator.autocast():
            loss, _ = trainer.objective(tokens, targets)
        loss.backward()
        trainer.objective.zero_grad(set_to_none=True)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        step()
    start, steps = time.perf_counter(), 0
    while steps < 1 or time.perf_counter() - start < seconds:
        step()
        steps += 1
    return sum(sizes.values()), (time.perf_counter() - start) / steps
