"""Models that begin as they are initialized learn what their mechanism can reach, and no more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspan import mechanisms
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.transformer import LanguageModel

Batch = tuple[Tensor, Tensor]  # tokens (B, T), and what follows each of them; −100 where that does not count


def train(model: LanguageModel, batch: Callable[[], Batch], steps: int, lr: float) -> float:
    """Accuracy on fresh batches after at most `steps`, or as soon as it is perfect."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20, 2 - 2 * i / steps))
    for step in range(steps):
        tokens, labels = batch()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 19 and loss < 0.002:
            break
    model.eval()
    with torch.no_grad():
        right = total = 0
        for _ in range(8):
            tokens, labels = batch()
            counts = labels != -100
            right += int(((model(tokens).argmax(-1) == labels) & counts).sum())
            total += int(counts.sum())
    return right / total


def copying(length: int, symbols: int = 8, size: int = 64) -> Batch:
    """Random symbols, a mark, and the symbols again."""
    x = torch.randint(1, symbols + 1, (size, length))
    row = torch.cat([x, torch.zeros(size, 1, dtype=torch.int64), x], 1)
    labels = row[:, 1:].clone()
    labels[:, :length] = -100
    return row[:, :-1], labels


# Each with a length it can reach: all 2n tokens within R for linformer, the source n tokens back within W for local.
LENGTH = 6
COPY: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"mechanism": "local", "window": LENGTH + 2},
    "linear": {},
    "performer": {"mechanism": "performer", "num_features": 32},
    "linformer": {"mechanism": "linformer", "rank": 2 * LENGTH, "max_length": 2 * LENGTH},
    "split": {
        "mechanism": "split",
        "parts": [
            {"mechanism": "local", "num_heads": 2, "window": LENGTH + 2},
            {"mechanism": "linear", "num_heads": 2},
        ],
    },
}


def language_model(mechanism: Any, vocab_size: int, length: int, **options: Any) -> LanguageModel:
    return LanguageModel(
        ModelConfig(
            dim=48,
            depth=2,
            attention=AttentionConfig(num_heads=4, mechanism=mechanism),
            feed_forward=FeedForwardConfig(mult=2),
            positions="learned",
            max_length=length,
            causal=True,
            vocab_size=vocab_size,
            **options,
        )
    )


def test_every_mechanism_has_a_copy_task() -> None:
    assert COPY.keys() == mechanisms().keys()


@pytest.mark.parametrize("name", COPY)
def test_a_copy_is_learnt(name: str) -> None:
    model = language_model(COPY[name] or name, 9, 2 * LENGTH)
    assert train(model, lambda: copying(LENGTH), steps=600, lr=5e-3) >= 0.99


def test_a_copy_out_of_reach_is_not() -> None:
    model = language_model({"mechanism": "local", "window": 3}, 9, 2 * LENGTH)
    assert train(model, lambda: copying(LENGTH), steps=150, lr=5e-3) < 0.5


PAIRS, KEYS, VALUES = 4, 8, 8


def recall(size: int = 64) -> Batch:
    """Pairs of a key and a value, then the keys in another order, each followed by its value."""
    keys = torch.rand(size, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, KEYS + VALUES, (size, PAIRS))
    order = torch.rand(size, PAIRS).argsort(1)
    pairs = torch.stack([keys, values], 2)
    asked = torch.take_along_dim(pairs, order[..., None], 1)
    row = torch.cat([pairs, asked], 1).flatten(1)
    labels = row[:, 1:].clone()
    labels[:, : 2 * PAIRS] = -100
    labels[:, 1::2] = -100
    return row[:, :-1], labels


def test_recall_is_beyond_local_attention_and_within_a_hybrid() -> None:
    window = {"mechanism": "local", "window": 3}
    parts = [{**window, "num_heads": 2}, {"mechanism": "linear", "num_heads": 2}]
    accuracy = {}
    for name, mechanism in (("local", window), ("hybrid", {"mechanism": "split", "parts": parts})):
        model = language_model(mechanism, KEYS + VALUES, 4 * PAIRS, token_shift=(0, 1))
        accuracy[name] = train(model, recall, steps=300, lr=5e-3)
    # A guess among the values that were shown is right once in four times.
    assert accuracy["local"] < 0.5
    assert accuracy["hybrid"] >= 0.99
