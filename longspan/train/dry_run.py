"""What a run would take, without running it: sizes, memory by counting, time by a few steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from longspan.models.transformer import LanguageModel
from longspan.train.loggers import Silent, clock
from longspan.train.setup import Prepared
from longspan.train.trainer import Loop


def estimate(prepared: Prepared) -> list[str]:
    """Lines to print: parameters, state, memory, time."""
    p, train = prepared, prepared.train
    loop = Loop(p, Silent())
    loop.done = 0.0
    kept = _Kept()
    with kept:
        loop.advance()
        loop.settle()
    began, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - began < 1:
        loop.advance()
        loop.settle()
        steps += 1
    each = (time.perf_counter() - began) / steps
    number = p.about["parameters"]
    weights = sum(x.numel() * x.element_size() for x in p.objective.parameters())
    fixed = 4 * weights  # the weights, their gradients and AdamW's two averages
    tokens = p.shape.rows * train.context
    mixture = p.about["settings"]["model"]["attention"]["mechanism"]
    name = mixture if isinstance(mixture, str) else mixture.get("mechanism") if isinstance(mixture, dict) else mixture
    data = p.about["data"]
    lines = [
        f"model: {type(p.model).__name__}, {number:,} parameters, mechanism {name}",
        f"data: {data['train_tokens']:,} tokens to train on, {data['held_out_tokens']:,} held out, "
        f"vocabulary {data['vocab_size']}",
    ]
    if isinstance(p.model, LanguageModel) and p.model.config.causal:
        lines.append(f"state of one sequence: {_size(p.model.state_size())}")
    lines.append(
        f"memory: {_size(fixed)} for weights, gradients and optimizer, {_size(kept.bytes)} for activations of "
        f"{train.batch_size} rows of {train.context}: about {_size(fixed + kept.bytes)}"
    )
    if p.accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(p.accelerator.device)
        lines.append(f"measured on {p.about['device']}: {_size(peak)} at most")
    speed = f"{each:.3f} s a step of {tokens:,} tokens, {tokens / each:,.0f} tokens a second"
    if train.steps is not None:
        lines.append(f"time: {speed}, about {clock(each * train.steps)} for {train.steps} steps")
    else:
        assert train.minutes is not None
        lines.append(f"time: {speed}, about {round(60 * train.minutes / each):,} steps in {train.minutes:g} minutes")
    passes = tokens * (train.steps or 60 * (train.minutes or 0) / each) / max(1, data["train_tokens"])
    lines.append(f"the data would be read {passes:.2f} times")
    return lines


class _Kept:
    """Counts the bytes that a backward pass keeps, each memory once."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def _pack(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            storage = x.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return x

    def __enter__(self) -> _Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _size(number: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 2**10:,.1f} KiB"
