"""Synthetic tasks that ask for memory: copy, multi-query associative recall, a needle at a depth, ListOps.

Rows are made on the spot from a seed. Which rows are for training and which for scoring is decided by a hash of their
content, so that no row is ever on both sides, whatever the seeds are.
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

from longspan.ops.loss import IGNORED

Tokens = NDArray[np.int64]
SIDES = ("train", "score")


@dataclass(frozen=True)
class Examples:
    """Rows of one task.

    tokens: (B, T). labels: (B, T), what a model should say after each token, IGNORED where nothing is asked; (B,), a
    class for each row, where the task is to classify. key_mask: (B, T), True = keep, where rows differ in length.
    depth: (B,), how far into the row the answer stands, from 0 (its beginning) to 1 (just before the question).
    """

    tokens: Tensor
    labels: Tensor
    key_mask: Tensor | None = None
    depth: Tensor | None = None

    def to(self, device: torch.device) -> Examples:
        moved = (x if x is None else x.to(device) for x in (self.tokens, self.labels, self.key_mask, self.depth))
        return Examples(*moved)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rows:
    """What a task draws: as `Examples`, on the way to them."""

    tokens: Tokens
    labels: Tokens
    depth: NDArray[np.float64] | None = None

    def take(self, index: NDArray[np.int64] | slice) -> Rows:
        depth = None if self.depth is None else self.depth[index]
        return Rows(self.tokens[index], self.labels[index], depth)


@dataclass(frozen=True)
class Task(ABC):
    """A task at one length: rows of at most so many tokens."""

    length: int

    name: ClassVar[str]
    purpose: ClassVar[str]
    vocab_size: ClassVar[int]
    num_classes: ClassVar[int | None] = None  # of a row; None where tokens are asked for, one after the other
    usual_length: ClassVar[int] = 256
    least_length: ClassVar[int]

    def __post_init__(self) -> None:
        if self.length < self.least_length:
            raise ValueError(f"--length {self.length} is too short for {self.name}: {self.least_length} at least")

    @abstractmethod
    def guess(self, labels: Tensor) -> float:
        """The share of these labels that is right by chance: what a model gets that knows no more than the task."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: int) -> Rows:
        """`size` rows, each by itself."""

    def examples(self, side: str, seed: int, index: int, size: int) -> Examples:
        """Batch `index` of the stream that `seed` makes; the same ones give the same rows."""
        rng = np.random.default_rng([seed, SIDES.index(side), index])
        found: list[Rows] = []
        missing = size
        while missing > 0:
            rows = self.draw(rng, missing)
            rows = rows.take(np.flatnonzero(scored(rows.tokens, self.length) == (side == "score")))
            found.append(rows)
            missing -= len(rows.tokens)
        tokens = np.concatenate([rows.tokens for rows in found])
        labels = torch.from_numpy(np.concatenate([rows.labels for rows in found]))
        depths = [rows.depth for rows in found if rows.depth is not None]
        depth = torch.from_numpy(np.concatenate(depths)) if depths else None
        if self.num_classes is None:
            return Examples(torch.from_numpy(tokens), labels, depth=depth)
        longest = int((tokens != PADDING).sum(1).max())
        cut = torch.from_numpy(tokens[:, :longest].copy())
        return Examples(cut, labels, cut != PADDING, depth)


def scored(tokens: Tokens, length: int) -> NDArray[np.bool_]:
    """(B, T) -> (B,): whether a row is for scoring, by a hash of its content; about half of all rows are."""
    weights = np.random.default_rng(length).integers(2**63, size=length, dtype=np.uint64)
    mixed = ((tokens.astype(np.uint64) + np.uint64(1)) * weights[: tokens.shape[1]]).sum(1, dtype=np.uint64)
    return (mixed >> np.uint64(62)) % 2 == 1


class Copy(Task):
    """n symbols, a mark, and the symbols again: 2n tokens, n answers, each n tokens back.

    Tokens: 0 the mark, 1–16 symbols. After the mark each token's label is the one that follows it.

        tokens  7 3 5 0 7 3
        labels  – – – 7 3 5
    """

    name = "copy"
    purpose = "repeat half a row, token by token"
    symbols: ClassVar[int] = 16
    vocab_size = symbols + 1
    least_length = 4

    def guess(self, labels: Tensor) -> float:
        return 1 / self.symbols

    def draw(self, rng: np.random.Generator, size: int) -> Rows:
        half = self.length // 2
        said = rng.integers(1, self.symbols + 1, (size, half))
        tokens = np.concatenate([said, np.zeros((size, 1), np.int64), said[:, :-1]], 1)
        labels = np.full_like(tokens, IGNORED)
        labels[:, half:] = said
        return Rows(tokens, labels)


class Recall(Task):
    """Multi-query associative recall: pairs of a key and a value, and then the keys again, each to be answered.

    Tokens: 0 a blank, 1–64 keys, 65–128 values. P pairs (a token in eight belongs to one, 64 pairs at most), with
    keys that differ; then blanks, among which every key of the row stands once, on an even place g with a probability
    that falls as g^−0.99: soon after the pairs most often, anywhere at times (Arora et al. 2023, who fill the blanks
    with noise). The label of a key that is asked for is its value; the value itself is not shown again.

        tokens  5 70 9 65 0 0 9 0 5 0 0 0
        labels  – –  – –  – – 65 – 70 – – –
    """

    name = "mqar"
    purpose = "recall the values of many keys (multi-query associative recall)"
    keys: ClassVar[int] = 64
    vocab_size = 2 * keys + 1
    least_length = 16

    @property
    def pairs(self) -> int:
        return min(self.keys, self.length // 16)

    def guess(self, labels: Tensor) -> float:
        return 1 / self.pairs  # one of the values that were shown

    def draw(self, rng: np.random.Generator, size: int) -> Rows:
        pairs = self.pairs
        keys = 1 + rng.random((size, self.keys)).argsort(1)[:, :pairs]
        values = rng.integers(self.keys + 1, 2 * self.keys + 1, (size, pairs))
        tokens = np.zeros((size, self.length), np.int64)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        places = (self.length - 2 * pairs) // 2
        # The largest of log p + Gumbel noise are a draw by p without putting back.
        chances = -0.99 * np.log(np.arange(1, places + 1)) + rng.gumbel(size=(size, places))
        asked = 2 * pairs + 2 * chances.argsort(1)[:, -pairs:]
        asked = rng.permuted(asked, axis=1)
        labels = np.full_like(tokens, IGNORED)
        np.put_along_axis(tokens, asked, keys, 1)
        np.put_along_axis(labels, asked, values, 1)
        return Rows(tokens, labels)


class Needle(Task):
    """One token to be found again, at any depth of a row of noise.

    Tokens: 0 the needle's mark, 1 the question, 2–17 symbols. The symbol after the mark is what the question, the last
    token, asks for; all others are noise of the same symbols. depth: the mark's place over the last it can have.

        tokens  11 7 2 0 9 5 1
        labels  –  – – – – – 9
    """

    name = "needle"
    purpose = "find one token in a row of noise, at any depth"
    symbols: ClassVar[int] = 16
    vocab_size = symbols + 2
    least_length = 4

    def guess(self, labels: Tensor) -> float:
        return 1 / self.symbols

    def draw(self, rng: np.random.Generator, size: int) -> Rows:
        tokens = rng.integers(2, self.symbols + 2, (size, self.length))
        last = self.length - 3
        place = rng.integers(0, last + 1, size)
        row = np.arange(size)
        tokens[row, place], tokens[:, -1] = 0, 1
        labels = np.full_like(tokens, IGNORED)
        labels[:, -1] = tokens[row, place + 1]
        return Rows(tokens, labels, place / last)


PADDING = 0
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2,
    "[SM": lambda values: sum(values) % 10,
}
WORDS = ("", *"0123456789", *OPERATORS, "]")


class ListOps(Task):
    """Nested operations on lists of digits, as in Long Range Arena (Tay et al. 2021): which digit comes out?

    Tokens: 0 padding, 1–10 the digits 0–9, 11–14 [MIN [MAX [MED [SM (median rounded down, sum modulo ten), 15 the
    closing bracket, which is kept: without it an expression has no one value. Every argument is an operation with
    probability 1/4, of 2 to 10 arguments, as far as depth 10; rows are from length/4 to length tokens, 500 to 2000 as
    a rule, shorter ones padded on the right. One label for a row, its value.

        [MAX 4 [SM 7 8 ] 2 ]  ->  5
    """

    name = "listops"
    purpose = "the value of nested operations on digits (Long Range Arena)"
    vocab_size = len(WORDS)
    num_classes = 10
    usual_length = 2000
    least_length = 16
    max_depth: ClassVar[int] = 10
    max_arguments: ClassVar[int] = 10
    operations: ClassVar[float] = 0.25  # the share of arguments that are operations themselves

    def guess(self, labels: Tensor) -> float:
        return float(labels.bincount().max() / len(labels))  # 0 and 9 come out most often

    def draw(self, rng: np.random.Generator, size: int) -> Rows:
        # Python's own generator: a tree is drawn number by number, at which it is far faster.
        source = random.Random(int(rng.integers(2**63)))
        tokens = np.full((size, self.length), PADDING, np.int64)
        labels = np.zeros(size, np.int64)
        for i in range(size):
            row, labels[i] = self._expression(source)
            tokens[i, : len(row)] = row
        return Rows(tokens, labels)

    def _expression(self, source: random.Random) -> tuple[list[int], int]:
        while True:
            row: list[int] = []
            value = self._operation(source, row, 1)
            if self.length <= 4 * len(row) <= 4 * self.length:
                return row, value

    def _operation(self, source: random.Random, row: list[int], depth: int) -> int:
        """Appends an operation to the row and returns its value; cut short, and wrong, in a row that is too long."""
        name = source.choice(list(OPERATORS))
        row.append(WORDS.index(name))
        values = []
        for _ in range(source.randint(2, self.max_arguments)):
            if len(row) > self.length:
                break
            if depth + 1 < self.max_depth and source.random() < self.operations:
                values.append(self._operation(source, row, depth + 1))
            else:
                values.append(source.randrange(10))
                row.append(1 + values[-1])
        row.append(WORDS.index("]"))
        return OPERATORS[name](values) if values else 0


TASKS: dict[str, type[Task]] = {task.name: task for task in (Copy, Recall, Needle, ListOps)}
