"""Synthetic tasks that require memory: copy, multi-query associative recall, needle in a haystack, ListOps.

Sequences are generated from a seed. A hash of their content decides whether they are for training or for evaluation,
so that no sequence is in both, whatever the seeds are.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.ops.loss import IGNORE_INDEX

IntArray = NDArray[np.int64]
SPLITS = ("train", "score")
PADDING = 0


@dataclass(frozen=True)
class Examples:
    """A batch of a task.

    Args:
        tokens: (B, T).
        labels: (B, T), the expected output at each token, IGNORE_INDEX where there is none; (B,) classes of the
            sequences for classification.
        key_mask: (B, T), False for padding. None: no padding.
        depth: (B,), position of the answer in the sequence, from 0 (the start) to 1 (directly before the query).
    """

    tokens: Tensor
    labels: Tensor
    key_mask: Tensor | None = None
    depth: Tensor | None = None

    def to(self, device: torch.device) -> Examples:
        """Return the batch on `device`."""
        moved = (x if x is None else x.to(device) for x in (self.tokens, self.labels, self.key_mask, self.depth))
        return Examples(*moved)  # type: ignore[arg-type]


# Tokens (B, T), labels, and the depth of the answer or None.
Draw = tuple[IntArray, IntArray, NDArray[np.float64] | None]


@dataclass(frozen=True)
class Task(ABC):
    """A task with sequences of at most `length` tokens."""

    length: int

    name: ClassVar[str]
    purpose: ClassVar[str]
    vocab_size: ClassVar[int]
    num_classes: ClassVar[int | None] = None  # None: predict tokens
    default_length: ClassVar[int] = 256
    min_length: ClassVar[int]

    def __post_init__(self) -> None:
        if self.length < self.min_length:
            raise ValueError(f"--length {self.length} is too short for {self.name}: use at least {self.min_length}")

    @abstractmethod
    def chance(self, labels: Tensor) -> float:
        """Return the highest accuracy of predictions that do not depend on the sequence."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        """Generate `size` independent sequences."""

    def examples(self, split: str, seed: int, index: int, size: int) -> Examples:
        """Return batch `index` of a stream.

        Args:
            split: "train" or "score".
            seed: Seed of the stream.
            index: Number of the batch.
            size: Number of sequences.
        """
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        draws: list[Draw] = []
        missing = size
        while missing > 0:
            tokens, labels, depth = self.draw(rng, missing)
            selected = np.flatnonzero(in_score_split(tokens, self.length) == (split == "score"))
            draws.append((tokens[selected], labels[selected], None if depth is None else depth[selected]))
            missing -= len(selected)
        all_tokens, all_labels, depths = zip(*draws, strict=True)
        x, y = torch.from_numpy(np.concatenate(all_tokens)), torch.from_numpy(np.concatenate(all_labels))
        z = None if depths[0] is None else torch.from_numpy(np.concatenate(depths))
        if self.num_classes is None:
            return Examples(x, y, depth=z)
        x = x[:, : int((x != PADDING).sum(1).max())].contiguous()
        return Examples(x, y, x != PADDING, z)


def in_score_split(tokens: IntArray, length: int) -> NDArray[np.bool_]:
    """Return whether each sequence of (B, T) is for evaluation, by a hash of its content; about half of them are."""
    weights = np.random.default_rng(length).integers(2**63, size=length, dtype=np.uint64)
    hashes = ((tokens.astype(np.uint64) + np.uint64(1)) * weights[: tokens.shape[1]]).sum(1, dtype=np.uint64)
    return (hashes >> np.uint64(62)) % 2 == 1


class Copy(Task):
    """Repeat n symbols after a separator: 2n tokens, n answers, each n tokens after its source.

    Tokens: 0 separator, 1–16 symbols. From the separator on, the label of a token is the next symbol to repeat.

        tokens  7 3 5 0 7 3
        labels  – – – 7 3 5
    """

    name = "copy"
    purpose = "repeat the first half of the sequence"
    symbols: ClassVar[int] = 16
    vocab_size = symbols + 1
    min_length = 4

    def chance(self, labels: Tensor) -> float:
        return 1 / self.symbols

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        half = self.length // 2
        symbols = rng.integers(1, self.symbols + 1, (size, half))
        tokens = np.concatenate([symbols, np.zeros((size, 1), np.int64), symbols[:, :-1]], 1)
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[:, half:] = symbols
        return tokens, labels, None


class Recall(Task):
    """Multi-query associative recall (Arora et al. 2023): key-value pairs, then queries of all keys.

    Tokens: 0 blank, 1–64 keys, 65–128 values. A sequence of T tokens starts with T/16 pairs (64 at most) of distinct
    keys. Every key is then queried once among blanks, at an even distance 2g with a probability proportional to
    g^−0.99 (the paper fills the blanks with noise). The label of a query is the value of its key, which is not shown
    again.

        tokens  5 70 9 65 0 0 9 0 5 0 0 0
        labels  – –  – –  – – 65 – 70 – – –
    """

    name = "mqar"
    purpose = "recall the values of many keys (multi-query associative recall)"
    keys: ClassVar[int] = 64
    vocab_size = 2 * keys + 1
    min_length = 16

    @property
    def pairs(self) -> int:
        """The number of key-value pairs in a sequence."""
        return min(self.keys, self.length // 16)

    def chance(self, labels: Tensor) -> float:
        return 1 / self.pairs  # any of the values in the sequence

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        pairs = self.pairs
        keys = 1 + rng.random((size, self.keys)).argsort(1)[:, :pairs]
        values = rng.integers(self.keys + 1, 2 * self.keys + 1, (size, pairs))
        tokens = np.zeros((size, self.length), np.int64)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        slots = (self.length - 2 * pairs) // 2
        # Gumbel-top-k: the largest values of log p + noise are a sample without replacement.
        scores = -0.99 * np.log(np.arange(1, slots + 1)) + rng.gumbel(size=(size, slots))
        positions = rng.permuted(2 * pairs + 2 * scores.argsort(1)[:, -pairs:], axis=1)
        labels = np.full_like(tokens, IGNORE_INDEX)
        np.put_along_axis(tokens, positions, keys, 1)
        np.put_along_axis(labels, positions, values, 1)
        return tokens, labels, None


class Needle(Task):
    """Find one marked symbol in noise, at any depth.

    Tokens: 0 marker, 1 query, 2–17 symbols. The last token queries the symbol after the marker; all other tokens are
    random symbols. The depth is the position of the marker divided by the largest possible one.

        tokens  11 7 2 0 9 5 1
        labels  –  – – – – – 9
    """

    name = "needle"
    purpose = "find one marked token in noise, at any depth"
    symbols: ClassVar[int] = 16
    vocab_size = symbols + 2
    min_length = 4

    def chance(self, labels: Tensor) -> float:
        return 1 / self.symbols

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        tokens = rng.integers(2, self.symbols + 2, (size, self.length))
        last = self.length - 3
        position = rng.integers(0, last + 1, size)
        row = np.arange(size)
        tokens[row, position], tokens[:, -1] = 0, 1
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[:, -1] = tokens[row, position + 1]
        return tokens, labels, position / last


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2,
    "[SM": lambda values: sum(values) % 10,
}
WORDS = ("", *"0123456789", *OPERATORS, "]")


class ListOps(Task):
    """Classify nested list operations by their value, as in Long Range Arena (Tay et al. 2021).

    Tokens: 0 padding, 1–10 the digits 0–9, 11–14 [MIN [MAX [MED [SM (median rounded down, sum modulo ten), 15 the
    closing bracket, which Long Range Arena omits although an expression is ambiguous without it. An argument is an
    operation with probability 1/4; operations have 2 to 10 arguments and nest to depth 10. Sequences have length/4 to
    length tokens and are padded on the right.

        [MAX 4 [SM 7 8 ] 2 ]  ->  5
    """

    name = "listops"
    purpose = "evaluate nested operations on digits (Long Range Arena)"
    vocab_size = len(WORDS)
    num_classes = 10
    default_length = 2000
    min_length = 16
    max_depth: ClassVar[int] = 10
    max_arguments: ClassVar[int] = 10
    nesting: ClassVar[float] = 0.25  # probability that an argument is an operation

    def chance(self, labels: Tensor) -> float:
        return float(labels.bincount().max() / len(labels))  # 0 and 9 are the most frequent values

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        # random.Random is much faster than numpy at drawing single numbers.
        source = random.Random(int(rng.integers(2**63)))
        tokens = np.full((size, self.length), PADDING, np.int64)
        labels = np.zeros(size, np.int64)
        for i in range(size):
            expression, labels[i] = self._expression(source)
            tokens[i, : len(expression)] = expression
        return tokens, labels, None

    def _expression(self, source: random.Random) -> tuple[list[int], int]:
        while True:
            tokens: list[int] = []
            value = self._operation(source, tokens, 1)
            if self.length <= 4 * len(tokens) <= 4 * self.length:
                return tokens, value

    def _operation(self, source: random.Random, tokens: list[int], depth: int) -> int:
        """Append an operation to `tokens` and return its value, which is wrong if the tokens exceed the length."""
        name = source.choice(list(OPERATORS))
        tokens.append(WORDS.index(name))
        values = []
        for _ in range(source.randint(2, self.max_arguments)):
            if len(tokens) > self.length:
                break
            if depth + 1 < self.max_depth and source.random() < self.nesting:
                values.append(self._operation(source, tokens, depth + 1))
            else:
                values.append(source.randrange(10))
                tokens.append(1 + values[-1])
        tokens.append(WORDS.index("]"))
        return OPERATORS[name](values) if values else 0


TASKS: dict[str, type[Task]] = {task.name: task for task in (Copy, Recall, Needle, ListOps)}
