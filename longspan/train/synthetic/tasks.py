"""Synthetic tasks that require memory: copying, associative recall, needle in a haystack, parity, ListOps.

Sequences are generated from a seed. A hash of their content decides whether they are for training or for evaluation,
so that no sequence is in both, whatever the seeds are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.ops.loss import IGNORE_INDEX

IntArray = NDArray[np.int64]
SPLITS = ("train", "score")
PADDING = 0
DEPTHS = 8  # number of intervals of the depth of a needle


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
class SyntheticTask(ABC):
    """A task with sequences of at most `length` tokens."""

    length: int

    name: ClassVar[str]
    purpose: ClassVar[str]
    num_classes: ClassVar[int | None] = None  # None: predict tokens
    default_length: ClassVar[int] = 256
    min_length: ClassVar[int]

    def __post_init__(self) -> None:
        if self.length < self.min_length:
            raise ValueError(f"--length {self.length} is too short for {self.name}: use at least {self.min_length}")

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens."""

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
        x, y, depth = self.arrays(split, seed, index, size)
        z = None if depth is None else torch.from_numpy(depth)
        tokens, labels = torch.from_numpy(x), torch.from_numpy(y)
        if self.num_classes is None:
            return Examples(tokens, labels, depth=z)
        tokens = tokens[:, : int((tokens != PADDING).sum(1).max())].contiguous()
        return Examples(tokens, labels, tokens != PADDING, z)

    def arrays(self, split: str, seed: int, index: int, size: int) -> Draw:
        """Return the sequences of `examples` with all their padding, as arrays."""
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        draws: list[Draw] = []
        missing = size
        while missing > 0:
            tokens, labels, depth = self.draw(rng, missing)
            selected = np.flatnonzero(in_score_split(tokens, self.length) == (split == "score"))
            draws.append((tokens[selected], labels[selected], None if depth is None else depth[selected]))
            missing -= len(selected)
        all_tokens, all_labels, depths = zip(*draws, strict=True)
        depth = None if depths[0] is None else np.concatenate(depths)
        return np.concatenate(all_tokens), np.concatenate(all_labels), depth


def in_score_split(tokens: IntArray, length: int) -> NDArray[np.bool_]:
    """Return whether each sequence of (B, T) is for evaluation, by a hash of its content; about half of them are."""
    weights = np.random.default_rng(length).integers(2**63, size=length, dtype=np.uint64)
    hashes = ((tokens.astype(np.uint64) + np.uint64(1)) * weights[: tokens.shape[1]]).sum(1, dtype=np.uint64)
    return (hashes >> np.uint64(62)) % 2 == 1


def accuracy_by_depth(hits: Tensor, depth: Tensor) -> list[dict[str, Any]]:
    """Return the accuracy in each of DEPTHS equal intervals of the depth; hits and depth are (B,)."""
    part = (depth * DEPTHS).long().clamp(max=DEPTHS - 1)
    found = []
    for i in range(DEPTHS):
        inside = hits[part == i]
        accuracy = float(inside.double().mean()) if len(inside) else None
        found.append({"from": i / DEPTHS, "to": (i + 1) / DEPTHS, "rows": len(inside), "accuracy": accuracy})
    return found


class Copy(SyntheticTask):
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


class SelectiveCopy(SyntheticTask):
    """Repeat symbols that lie at random positions among blanks (Jing et al. 2019, Gu and Dao 2023).

    Tokens: 0 blank, 1–16 symbols, 17 query. There are 16 symbols, or a quarter of the length if that is less, and as
    many queries at the end: the label of query i is symbol i.

        tokens  0 7 0 0 3 5 0 17 17 17
        labels  – – – – – – – 7  3  5
    """

    name = "selective-copy"
    purpose = "repeat the symbols among blanks, in order"
    symbols: ClassVar[int] = 16
    vocab_size = symbols + 2
    min_length = 4

    @property
    def copied(self) -> int:
        """The number of symbols in a sequence."""
        return min(self.symbols, self.length // 4)

    def chance(self, labels: Tensor) -> float:
        return 1 / self.symbols

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        copied, blanks = self.copied, self.length - self.copied
        symbols = rng.integers(1, self.symbols + 1, (size, copied))
        tokens = np.zeros((size, self.length), np.int64)
        np.put_along_axis(tokens, np.sort(_distinct(rng, size, blanks, copied), 1), symbols, 1)
        tokens[:, blanks:] = self.symbols + 1
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[:, blanks:] = symbols
        return tokens, labels, None


@dataclass(frozen=True)
class Recall(SyntheticTask):
    """Multi-query associative recall (Arora et al. 2023): key-value pairs, then queries of all keys.

    Tokens: 0 blank, then as many keys as values. A sequence starts with pairs of distinct keys. Every key is then
    queried once among blanks, at an even distance 2g with a probability proportional to g^−0.99 (the paper fills the
    blanks with noise). The label of a query is the value of its key, which is not shown again.

        tokens  5 70 9 65 0 0 9 0 5 0 0 0
        labels  – –  – –  – – 65 – 70 – – –

    Args:
        length: Tokens of a sequence.
        pairs: Key-value pairs of a sequence; one per 16 tokens by default, 64 at most.
        vocabulary: Number of tokens; by default 64 keys and 64 values. The paper has 8192 tokens.
    """

    pairs: int = 0
    vocabulary: int = 129

    name = "mqar"
    purpose = "recall the values of many keys (multi-query associative recall)"
    min_length = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pairs:
            object.__setattr__(self, "pairs", min(64, self.length // 16))
        if not 1 <= self.pairs <= min(self.keys, self.length // 4):
            raise ValueError(
                f"mqar of {self.length} tokens and {self.keys} keys can have 1 to {min(self.keys, self.length // 4)} "
                f"pairs, got {self.pairs}"
            )

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def keys(self) -> int:
        """The number of keys in the vocabulary."""
        return (self.vocabulary - 1) // 2

    def chance(self, labels: Tensor) -> float:
        return 1 / self.pairs  # any of the values in the sequence

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        pairs = self.pairs
        keys = 1 + _distinct(rng, size, self.keys, pairs)
        values = rng.integers(self.keys + 1, self.vocabulary, (size, pairs))
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


def _distinct(rng: np.random.Generator, size: int, limit: int, count: int) -> IntArray:
    """Return `size` rows of `count` distinct integers below `limit`, in random order."""
    if count * count > 4 * limit:
        return rng.random((size, limit)).argsort(1)[:, :count]
    found = rng.integers(0, limit, (size, count))
    while True:  # Few rows have duplicates: draw those again.
        ordered = np.sort(found, 1)
        again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(1))
        if not len(again):
            return found
        found[again] = rng.integers(0, limit, (len(again), count))


@dataclass(frozen=True)
class Parity(SyntheticTask):
    """Predict after every bit whether the number of ones so far is odd.

        tokens  1 0 1 1
        labels  1 1 0 1

    Args:
        length: Bits of a sequence.
        first: The first bit with a label, counted from 1.
    """

    first: int = 1

    name = "parity"
    purpose = "track the parity of the bits so far"
    vocab_size = 2
    min_length = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.first <= self.length:
            raise ValueError(f"the first label of parity is at bit 1 to {self.length}, got {self.first}")

    def chance(self, labels: Tensor) -> float:
        return 0.5

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        tokens = rng.integers(0, 2, (size, self.length))
        labels = tokens.cumsum(1) % 2
        labels[:, : self.first - 1] = IGNORE_INDEX
        return tokens, labels, None


class Needle(SyntheticTask):
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


OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
WORDS = ("", *"0123456789", *OPERATORS, "]")


class ListOps(SyntheticTask):
    """Classify nested list operations by their value, as in Long Range Arena (Tay et al. 2021).

    Tokens: 0 padding, 1–10 the digits 0–9, 11–14 [MIN [MAX [MED [SM (median rounded down, sum modulo ten), 15 the
    closing bracket. An argument is an operation with probability 1/4; operations have 2 to 10 arguments and nest to
    depth 10. Sequences have length/4 to length tokens and are padded on the right.

        [MAX 4 [SM 7 8 ] 2 ]  ->  5
    """

    name = "listops"
    purpose = "evaluate nested operations on digits (Long Range Arena)"
    num_classes = 10
    vocab_size = len(WORDS)
    default_length = 2000
    min_length = 16
    max_depth: ClassVar[int] = 10
    max_arguments: ClassVar[int] = 10
    nesting: ClassVar[float] = 0.25  # probability that an argument is an operation

    def chance(self, labels: Tensor) -> float:
        return float(labels.bincount().max() / len(labels))  # 0 and 9 are the most frequent values

    def draw(self, rng: np.random.Generator, size: int) -> Draw:
        tokens = np.full((size, self.length), PADDING, np.int64)
        labels = np.zeros(size, np.int64)
        found = 0
        while found < size:
            levels = self._levels(rng, 4 * (size - found) + 16)
            lengths = _lengths(levels)[0]
            fits = (4 * lengths >= self.length) & (lengths <= self.length)
            fits &= fits.cumsum() <= size - found
            end = found + int(fits.sum())
            levels = _select(levels, fits)
            labels[found:end] = _values(levels)
            _write(levels, tokens[found:end])
            found = end
        return tokens, labels, None

    def _levels(self, rng: np.random.Generator, size: int) -> list[_Level]:
        """Draw `size` trees, level by level."""
        levels, count = [], size
        for depth in range(1, self.max_depth):
            if count == 0:
                break
            arguments = rng.integers(2, self.max_arguments + 1, count)
            is_operation = rng.random(int(arguments.sum())) < (self.nesting if depth + 1 < self.max_depth else 0)
            digits = rng.integers(0, 10, len(is_operation))
            levels.append(_Level(rng.integers(0, 4, count), arguments, is_operation, digits))
            count = int(is_operation.sum())
        return levels


class _Level(NamedTuple):
    """The operations at one depth of many trees, in order; their arguments lie one after another.

    Attributes:
        operators: (n,), indices of OPERATORS.
        arguments: (n,), the number of arguments of each.
        is_operation: (m,), whether an argument is an operation of the next level, whose order is the same.
        digits: (m,), the value of an argument; of operations, it is computed.
    """

    operators: IntArray
    arguments: IntArray
    is_operation: NDArray[np.bool_]
    digits: IntArray

    @property
    def starts(self) -> IntArray:
        """(n,), the first argument of each operation."""
        return np.cumsum(self.arguments) - self.arguments


def _lengths(levels: list[_Level]) -> list[IntArray]:
    """Return the tokens of the operations of each level; those of the first are the trees."""
    lengths = [np.zeros(0, np.int64)]
    for level in reversed(levels):
        lengths.append(2 + np.add.reduceat(_argument_sizes(level, lengths[-1]), level.starts))
    return lengths[::-1]


def _argument_sizes(level: _Level, lengths: IntArray) -> IntArray:
    """Return the tokens of each argument, given those of the operations of the next level."""
    sizes = np.ones(len(level.digits), np.int64)
    sizes[level.is_operation] = lengths
    return sizes


def _select(levels: list[_Level], chosen: NDArray[np.bool_]) -> list[_Level]:
    """Return some of the trees."""
    selected = []
    for level in levels:
        own = np.repeat(chosen, level.arguments)
        selected.append(
            _Level(level.operators[chosen], level.arguments[chosen], level.is_operation[own], level.digits[own])
        )
        chosen = own[level.is_operation]
    return [level for level in selected if len(level.operators)]


def _values(levels: list[_Level]) -> IntArray:
    """Return the value of each tree."""
    values = np.zeros(0, np.int64)
    for level in reversed(levels):
        arguments = level.digits.copy()
        arguments[level.is_operation] = values
        starts, count = level.starts, level.arguments
        owner = np.repeat(np.arange(len(count)), count)
        ordered = np.sort(10 * owner + arguments) % 10
        median = (ordered[starts + (count - 1) // 2] + ordered[starts + count // 2]) // 2
        total = np.add.reduceat(arguments, starts) % 10
        values = np.choose(level.operators, [ordered[starts], ordered[starts + count - 1], median, total])
    return values


def _write(levels: list[_Level], tokens: IntArray) -> None:
    """Write tree i into row i of the tokens."""
    lengths = _lengths(levels)
    row, first = np.arange(len(tokens)), np.zeros(len(tokens), np.int64)
    for level, own, below in zip(levels, lengths, lengths[1:], strict=False):
        tokens[row, first] = 1 + 10 + level.operators
        tokens[row, first + own - 1] = len(WORDS) - 1
        sizes, starts = _argument_sizes(level, below), level.starts
        before = np.cumsum(sizes) - sizes
        first = np.repeat(first + 1 - before[starts], level.arguments) + before
        row = np.repeat(row, level.arguments)
        digit = ~level.is_operation
        tokens[row[digit], first[digit]] = 1 + level.digits[digit]
        row, first = row[level.is_operation], first[level.is_operation]


TASKS: dict[str, type[SyntheticTask]] = {
    task.name: task for task in (Copy, SelectiveCopy, Recall, Needle, Parity, ListOps)
}
