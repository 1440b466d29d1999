"""Ranks that die, stop or differ: an error on every rank within the group's timeout."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn_apart

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.distributed import context_parallel
from longspan.mechanisms.linear import LinearAttention

TIMEOUT = 6.0


def build(dim: int = 8, mechanism: str = "linear") -> LanguageModel:
    attention = AttentionConfig(num_heads=2, mechanism=mechanism)
    return LanguageModel(ModelConfig(dim=dim, depth=2, causal=True, vocab_size=11, attention=attention))


def check_differences(rank: int) -> None:
    """Models and calls that do not fit together are refused on every rank, which can go on."""
    with pytest.raises(ValueError, match=r"models with different configurations: ranks \[1\] differ from the others"):
        context_parallel(build(mechanism="softmax" if rank == 1 else "linear"), dist.group.WORLD)
    with pytest.raises(ValueError, match=r"models with different parameters: ranks \[2\] differ"):
        context_parallel(build().to(torch.float64 if rank == 2 else torch.float32), dist.group.WORLD)
    divided, tokens = context_parallel(build(), dist.group.WORLD), torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"the same call: method is \['forward', 'loss', 'forward'\]"):
        divided.loss(tokens) if rank == 1 else divided(tokens)
    with pytest.raises(ValueError, match=r"the same call: labels given is \[1, 0, 0\]"):
        divided.loss(tokens, tokens if rank == 0 else None)
    with torch.set_grad_enabled(rank != 1), pytest.raises(ValueError, match=r"gradients are on is \[1, 0, 1\]"):
        divided(tokens)
    divided.train(rank > 0)
    with pytest.raises(ValueError, match=r"training is \[0, 1, 1\]"):
        divided(tokens)
    divided.train()
    assert torch.isfinite(divided.loss(tokens))


def step(divided: Any) -> None:
    divided.loss(torch.zeros(1, 5, dtype=torch.int64)).backward()
    divided.reduce_gradients()


def stop(rank: int, ranks: int) -> None:
    """After ranks that differ, one sleeps for longer than the timeout."""
    check_differences(rank)
    divided = context_parallel(build(), dist.group.WORLD)
    step(divided)
    if rank == 1:
        time.sleep(1.5 * TIMEOUT)
    step(divided)


def die(rank: int, ranks: int) -> None:
    """A rank ends inside a layer, while states are on their way."""
    divided = context_parallel(build(), dist.group.WORLD)
    step(divided)
    if rank == 1:
        LinearAttention._defer = lambda *_, **__: os._exit(3)  # type: ignore[assignment]
    step(divided)


@pytest.mark.parametrize("function", [stop, die])
def test_every_rank_fails(function: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    answers = spawn_apart(function, 3, tmp_path, timeout=TIMEOUT, limit=60)
    for rank, answer in enumerate(answers):
        if function is die and rank == 1:
            assert answer == "died"
            continue
        last = answer.strip().splitlines()[-1]
        assert "Error" in last, answer
        assert any(word in last for word in ("gloo", "Connection", "Timed out")), answer
    assert time.monotonic() - begin < 60
