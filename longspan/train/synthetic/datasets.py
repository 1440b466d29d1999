"""Data sets of synthetic tasks: generated once, in parallel, and cached in a folder for many runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.ops.loss import IGNORE_INDEX
from longspan.train.synthetic.tasks import PADDING, Draw, SyntheticTask
from longspan.utils import replace_file

_BLOCK = 512  # sequences of one call of the generator
_FORMAT = 1  # of cached files; increase it where a task's sequences change


@dataclass(frozen=True)
class Dataset:
    """Sequences of a task and their answers.

    Attributes:
        tokens: (N, T), in the narrowest integer type.
        positions: (N, A), the tokens that have an answer; 0 where a sequence has fewer than A. None for classification.
        answers: (N, A), IGNORE_INDEX where there is none; (N,) classes.
        depth: (N,), as in `Examples`.
    """

    tokens: Tensor
    positions: Tensor | None
    answers: Tensor
    depth: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Dataset:
        """Return the data set on `device`."""
        moved = (None if x is None else x.to(device) for x in (self.tokens, self.positions, self.answers, self.depth))
        return Dataset(*moved)  # type: ignore[arg-type]

    def select(self, rows: Tensor) -> Dataset:
        """Return some of the sequences, tokens and positions as int64."""
        tokens = self.tokens.index_select(0, rows).long()
        positions = None if self.positions is None else self.positions.index_select(0, rows).long()
        depth = None if self.depth is None else self.depth.index_select(0, rows)
        return Dataset(tokens, positions, self.answers.index_select(0, rows).long(), depth)

    def by_length(self, buckets: int) -> list[Dataset]:
        """Return as many parts of equal size, from the shortest to the longest sequences, with less padding."""
        if buckets == 1:
            return [self]
        lengths = (self.tokens != PADDING).sum(1)
        parts = []
        for rows in lengths.argsort(stable=True).tensor_split(buckets):
            longest = -(-int(lengths[rows].max()) // 16) * 16  # a multiple that kernels like
            part = self.select(rows)
            parts.append(replace(part, tokens=part.tokens[:, :longest].to(self.tokens.dtype)))
        return parts

    @property
    def key_mask(self) -> Tensor | None:
        """(N, T), False for padding, which only classification has."""
        return self.tokens != PADDING if self.positions is None else None


def make_dataset(task: SyntheticTask, split: str, seed: int, size: int, pool: Executor | None = None) -> Dataset:
    """Generate a data set.

    Args:
        task: The task, with its options.
        split: "train" or "score".
        seed: Seed of the sequences.
        size: Number of sequences.
        pool: Processes to generate with; the sequences do not depend on it.
    """
    blocks = [(task, split, seed, i, min(_BLOCK, size - _BLOCK * i)) for i in range(-(-size // _BLOCK))]
    return _join(map(_block, blocks) if pool is None else pool.map(_block, blocks))


def cached_dataset(
    task: SyntheticTask, split: str, seed: int, size: int, folder: Path, pool: Executor | None = None
) -> Dataset:
    """Return `make_dataset`, stored in a folder: the first call generates it, later ones read it.

    Args:
        task: The task, with its options.
        split: "train" or "score".
        seed: Seed of the sequences.
        size: Number of sequences.
        folder: Where files are stored; it is made if it does not exist.
        pool: Processes to generate with.
    """
    key = hashlib.sha256(f"{_FORMAT} {task!r} {split} {seed} {size}".encode()).hexdigest()[:12]
    path = folder / f"{task.name}-{task.length}-{split}-{seed}-{size}-{key}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = make_dataset(task, split, seed, size, pool)
        with replace_file(path) as partial:
            torch.save(vars(made), partial)
    return Dataset(**torch.load(path, weights_only=True))


def _block(arguments: tuple[SyntheticTask, str, int, int, int]) -> Draw:
    task, split, seed, index, size = arguments
    tokens, labels, depth = task.arrays(split, seed, index, size)
    return _narrow(tokens, task.vocab_size), labels, depth


def _join(blocks: Iterable[Draw]) -> Dataset:
    tokens, labels, depths = zip(*blocks, strict=True)
    depth = None if depths[0] is None else torch.from_numpy(np.concatenate(depths))
    all_tokens, all_labels = np.concatenate(tokens), np.concatenate(labels)
    if all_labels.ndim == 1:
        return Dataset(torch.from_numpy(all_tokens), None, torch.from_numpy(all_labels), depth)
    positions, answers = _answers(all_labels)
    return Dataset(torch.from_numpy(all_tokens), torch.from_numpy(positions), torch.from_numpy(answers), depth)


def _answers(labels: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The positions of labels (N, T), and the labels there."""
    row, position = np.nonzero(labels != IGNORE_INDEX)
    counts = np.bincount(row, minlength=len(labels))
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.zeros((len(labels), int(counts.max())), np.int32)
    answers = np.full(positions.shape, IGNORE_INDEX, np.int32)
    positions[row, rank], answers[row, rank] = position, labels[row, position]
    return positions, answers


def _narrow(values: NDArray[np.int64], limit: int) -> Any:
    """Values below `limit` in a narrow type that torch can index with after a cast."""
    return values.astype(np.uint8 if limit <= 256 else np.int16)
