"""Batches as a function of the seed and a position that is saved in checkpoints.

A step reads the same sequences for any number of processes: two processes read what one process with twice the batch
size reads. Losses then agree up to rounding, because sums are taken in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.ops.loss import IGNORE_INDEX
from longspan.train.data.token_store import Segments, TokenStore

Item = TypeVar("Item")  # what a class of batches collates: the spans of a sequence, with its label or state
TokenArray = NDArray[np.int64]
_MASK64 = 0xFFFFFFFFFFFFFFFF


class Span(NamedTuple):
    """`length` tokens of the store from `start` on. `has_next`: the token after the span is its last target."""

    start: int
    length: int
    has_next: bool


@dataclass
class Batch:
    """Tokens and targets of one forward pass.

    Args:
        tokens: (B, T); (1, B · T) if packed; vectors (B, T, C).
        targets: Same shape, the next token, a class or IGNORE_INDEX; (B,) class indices for classification;
            (B, outputs) numbers for regression, 0 and 1 for several classes; (B, T, C) the next vector, NaN for none.
        num_targets: Number of targets that are not IGNORE_INDEX.
        offsets: (N + 1,), boundaries of the packed sequences.
        key_mask: (B, T), True for tokens, False for padding. None: no padding.
        new_document: (B,), True where a sequence starts a document, so that a carried state must be reset.
    """

    tokens: Tensor
    targets: Tensor
    num_targets: int
    offsets: Tensor | None = None
    key_mask: Tensor | None = None
    new_document: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`, copied asynchronously to a GPU."""
        moved: dict[str, Any] = {
            name: (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
            for name, x in vars(self).items()
            if isinstance(x, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a step: `accumulate` micro-batches of `batch_size` sequences of `context` tokens in each process."""

    context: int
    batch_size: int
    accumulate: int = 1
    processes: int = 1
    process: int = 0

    @property
    def num_sequences(self) -> int:
        """The sequences of a step in all processes."""
        return self.batch_size * self.accumulate * self.processes

    def micro_batch(self, index: int) -> slice:
        """Return which sequences of a step are in this process's micro-batch `index`."""
        first = (index * self.processes + self.process) * self.batch_size
        return slice(first, first + self.batch_size)

    def has_spare_batch(self, number: int) -> bool:
        """Return whether this process gets none of the last of `number` batches, assigned in turn.

        It then runs one that does not count: sharded weights need every process for every batch.
        """
        return 0 < number % self.processes <= self.process


class Batches(ABC, Generic[Item]):
    """Infinite training batches. Every process computes the positions of all sequences and collates its own."""

    def __init__(self, store: TokenStore, shape: BatchShape, *, seed: int) -> None:
        self.store, self.shape, self.seed = store, shape, seed

    @property
    def unused_tokens(self) -> int:
        """Training tokens that are never read."""
        return 0

    @property
    @abstractmethod
    def progress(self) -> list[tuple[float, float]]:
        """How much of each source was read, and how much it has: in tokens, sequences or documents."""

    @property
    def epochs(self) -> float:
        """How many times the training data was read."""
        return sum(read for read, _ in self.progress) / sum(size for _, size in self.progress)

    @property
    def repetition(self) -> float:
        """How many times the source of a token was read, on average over the tokens read; 0 until it is repeated."""
        repeated = sum(read * read / size for read, size in self.progress if read > size)
        return repeated / max(1, sum(read for read, _ in self.progress))

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""

    def next_step(self, number: int | None = None) -> list[Batch]:
        """Return this process's micro-batches of the next step: `number` of them, or all."""
        number = self.shape.accumulate if number is None else number
        items = [self._next(index) for index in range(number * self.shape.batch_size * self.shape.processes)]
        return [self._collate(items[self.shape.micro_batch(i)]) for i in range(number)]

    @abstractmethod
    def _next(self, index: int) -> Item: ...

    @abstractmethod
    def _collate(self, items: Sequence[Item]) -> Batch: ...


class ShuffledBatches(Batches[list[Span]]):
    """Independent sequences in shuffled order. Every source is read completely before it is repeated.

    Args:
        store: The tokens.
        shape: Sizes of a step.
        packed: Fill sequences with several documents and record their boundaries. Otherwise every sequence is a
            window of one document, and documents shorter than the context are not read.
        seed: Seed of the order.
    """

    def __init__(self, store: TokenStore, shape: BatchShape, *, packed: bool, seed: int) -> None:
        super().__init__(store, shape, seed=seed)
        self.packed = packed
        kind = _PackedSampler if packed else _WindowSampler
        sources = sorted(set(store.train.source.tolist()))
        made = {s: kind(store.train.of_source(s), shape.context, derive_seed(seed, s)) for s in sources}
        samplers = {s: sampler for s, sampler in made.items() if sampler.count}
        self.samplers = list(samplers.values())
        self.weights = _source_weights(store, list(samplers), [sampler.tokens for sampler in self.samplers])
        self.drawn = [0] * len(self.samplers)

    @property
    def unused_tokens(self) -> int:
        """Training tokens in documents that are too short for a window."""
        return self.store.train.total - sum(sampler.tokens for sampler in self.samplers)

    @property
    def progress(self) -> list[tuple[float, float]]:
        return [(drawn, sampler.count) for drawn, sampler in zip(self.drawn, self.samplers, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = [int(n) for n in state["drawn"]]

    def _next(self, index: int) -> list[Span]:
        source = min(range(len(self.samplers)), key=lambda i: ((self.drawn[i] + 1) / self.weights[i], i))
        sampler, number = self.samplers[source], self.drawn[source]
        self.drawn[source] += 1
        return sampler.sequence(*divmod(number, sampler.count))

    def _collate(self, items: Sequence[list[Span]]) -> Batch:
        spans = [span for sequence in items for span in sequence]
        return packed_batch(self.store, spans) if self.packed else padded_batch(self.store, spans, self.shape.context)


class _WindowSampler:
    """Windows of single documents, at an offset that changes with the epoch."""

    def __init__(self, segments: Segments, context: int, seed: int) -> None:
        long = segments.take(np.flatnonzero(segments.length > context))
        self.start, self.context, self.seed = long.start, context, seed
        windows = (long.length - 1) // context
        windows -= windows >= 8  # Drop a window, so that the offset varies by more than the remainder.
        self.spare = long.length - 1 - windows * context
        self.first = np.concatenate([[0], windows.cumsum()])
        self.count, self.tokens = int(self.first[-1]), long.total

    def sequence(self, epoch: int, index: int) -> list[Span]:
        window = permute_index(index, self.count, derive_seed(self.seed, epoch))
        segment = int(np.searchsorted(self.first, window, side="right")) - 1
        offset = derive_seed(self.seed, epoch, segment) % (int(self.spare[segment]) + 1)
        start = int(self.start[segment]) + offset + (window - int(self.first[segment])) * self.context
        return [Span(start, self.context, True)]


class _PackedSampler:
    """Documents concatenated in a new order each epoch and cut into sequences, which are shuffled too."""

    def __init__(self, segments: Segments, context: int, seed: int) -> None:
        self.segments, self.context, self.seed = segments, context, seed
        self.tokens = segments.total
        self.count = self.tokens // context
        self._shuffle_documents(0)

    def sequence(self, epoch: int, index: int) -> list[Span]:
        if epoch != self.epoch:
            self._shuffle_documents(epoch)
        position = permute_index(index, self.count, derive_seed(self.seed, epoch)) * self.context
        end, spans = position + self.context, []
        document = int(np.searchsorted(self.first, position, side="right")) - 1
        while position < end:
            document_start, document_end = int(self.first[document]), int(self.first[document + 1])
            length = min(document_end, end) - position
            start = int(self.segments.start[self.order[document]]) + position - document_start
            spans.append(Span(start, length, position + length < document_end))
            position, document = position + length, document + 1
        return spans

    def _shuffle_documents(self, epoch: int) -> None:
        rng = np.random.Generator(np.random.Philox(derive_seed(self.seed, epoch)))
        self.epoch, self.order = epoch, rng.permutation(len(self.segments))
        self.first = np.concatenate([[0], self.segments.length[self.order].cumsum()])


class StatefulBatches(Batches[tuple[Span, bool]]):
    """Documents read in order, one chunk per step, for truncated BPTT with a carried recurrent state.

    Each sequence of a step continues the document of the same sequence one step before, and starts another document
    when that ends. The last chunk of a document is padded.
    """

    def __init__(self, store: TokenStore, shape: BatchShape, *, seed: int) -> None:
        super().__init__(store, shape, seed=seed)
        long = store.train.take(np.flatnonzero(store.train.length > 1))
        self.sources = sorted(set(long.source.tolist()))
        self.parts = [long.of_source(s) for s in self.sources]
        self.weights = _source_weights(store, self.sources, [part.total for part in self.parts])
        self.drawn, self.tokens = [0] * len(self.parts), [0] * len(self.parts)
        self.lanes: list[list[int]] = [[0, 0]] * shape.num_sequences  # start of the next chunk, tokens left

    @property
    def unused_tokens(self) -> int:
        """Training tokens in documents of a single token."""
        return self.store.train.total - sum(part.total for part in self.parts)

    @property
    def progress(self) -> list[tuple[float, float]]:
        start, left = np.array(self.lanes).T
        segment = np.searchsorted(self.store.train.start, start, side="right") - 1
        unread = np.bincount(self.store.train.source[segment], left, minlength=self.sources[-1] + 1)
        read = zip(self.sources, self.tokens, self.parts, strict=True)
        return [(number - float(unread[source]), part.total) for source, number, part in read]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "tokens": list(self.tokens), "lanes": [list(lane) for lane in self.lanes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["lanes"]) != self.shape.num_sequences:
            raise ValueError(
                f"the run carries the states of {len(state['lanes'])} sequences, this command has "
                f"{self.shape.num_sequences}: resume with the same --batch-size × --accumulate × processes"
            )
        self.drawn, self.tokens = list(state["drawn"]), list(state["tokens"])
        self.lanes = [list(lane) for lane in state["lanes"]]

    def _next(self, index: int) -> tuple[Span, bool]:
        start, left = self.lanes[index]
        new_document = left < 2  # The last token of a document is a target only.
        if new_document:
            start, left = self._next_document()
        length = min(self.shape.context, left - 1)
        self.lanes[index] = [start + length, left - length]
        return Span(start, length, True), new_document

    def _next_document(self) -> tuple[int, int]:
        source = min(range(len(self.parts)), key=lambda i: (self.tokens[i] / self.weights[i], i))
        part = self.parts[source]
        epoch, index = divmod(self.drawn[source], len(part))
        chosen = permute_index(index, len(part), derive_seed(self.seed, source, epoch))
        start, length = int(part.start[chosen]), int(part.length[chosen])
        self.drawn[source] += 1
        self.tokens[source] += length
        return start, length

    def _collate(self, items: Sequence[tuple[Span, bool]]) -> Batch:
        batch = padded_batch(self.store, [span for span, _ in items], self.shape.context)
        return replace(batch, new_document=torch.tensor([new for _, new in items]))


class LabeledBatches(Batches[tuple[Span, int]]):
    """Documents with their class, cropped at a random position if longer than the context, padded if shorter."""

    def __init__(self, store: TokenStore, shape: BatchShape, *, seed: int) -> None:
        super().__init__(store, shape, seed=seed)
        sources = sorted(set(store.train.source.tolist()))
        weighted = any(store.metadata["sources"][s]["weight"] is not None for s in sources)
        self.parts = [store.train.of_source(s) for s in sources] if weighted else [store.train]
        self.weights = _source_weights(store, sources, []) if weighted else [1.0]
        self.seeds = [derive_seed(seed, s) for s in sources] if weighted else [seed]
        self.drawn = [0] * len(self.parts)

    @property
    def progress(self) -> list[tuple[float, float]]:
        return [(drawn, len(part)) for drawn, part in zip(self.drawn, self.parts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        drawn = state["drawn"]
        if isinstance(drawn, int):  # Earlier versions read all sources as one.
            self.parts, self.weights, self.seeds, drawn = [self.store.train], [1.0], [self.seed], [drawn]
        self.drawn = [int(n) for n in drawn]

    def _next(self, index: int) -> tuple[Span, int]:
        source = min(range(len(self.parts)), key=lambda i: ((self.drawn[i] + 1) / self.weights[i], i))
        segments, seed = self.parts[source], self.seeds[source]
        epoch, position = divmod(self.drawn[source], len(segments))
        self.drawn[source] += 1
        i = permute_index(position, len(segments), derive_seed(seed, epoch))
        length = min(int(segments.length[i]), self.shape.context)
        offset = derive_seed(seed, epoch, i) % (int(segments.length[i]) - length + 1)
        return Span(int(segments.start[i]) + offset, length, False), int(segments.label[i])

    def _collate(self, items: Sequence[tuple[Span, int]]) -> Batch:
        return labeled_batch(self.store, items)


def packed_batch(store: TokenStore, spans: Sequence[Span]) -> Batch:
    """Concatenate spans to one packed sequence."""
    offsets = np.cumsum([0, *(span.length for span in spans)])
    tokens, targets = np.empty(offsets[-1], np.int64), np.full(offsets[-1], IGNORE_INDEX, np.int64)
    for offset, span in zip(offsets, spans, strict=False):
        _copy_span(store, span, tokens[offset:], targets[offset:])
    return _make_batch(tokens[None], targets[None], offsets=torch.from_numpy(offsets.astype(np.int32)))


def padded_batch(store: TokenStore, spans: Sequence[Span], context: int) -> Batch:
    """Put one span into each sequence, padded on the right with zeros."""
    if store.channels is not None:
        return _vector_batch(store, spans, context)
    tokens = np.zeros((len(spans), context), np.int64)
    targets = np.full((len(spans), context), IGNORE_INDEX, np.int64)
    for i, span in enumerate(spans):
        _copy_span(store, span, tokens[i], targets[i])
    mask = np.arange(context) < np.array([[span.length] for span in spans])
    return _make_batch(tokens, targets, key_mask=None if mask.all() else torch.from_numpy(mask))


def labeled_batch(store: TokenStore, items: Sequence[tuple[Span, int]]) -> Batch:
    """Pad spans to the longest of them; the targets are their labels."""
    spans = [span for span, _ in items]
    batch = padded_batch(store, spans, max(span.length for span in spans))
    task = store.task
    if task is not None and task.per_token:
        return batch
    labels: Any = [label for _, label in items]
    if store.values is not None and task is not None:
        values = store.values[labels]
        labels = (
            (values - np.array(task.mean, np.float32)) / np.array(task.std, np.float32)
            if task.kind == "regress"
            else values
        )
    return replace(batch, targets=torch.as_tensor(labels), num_targets=len(items))


def _vector_batch(store: TokenStore, spans: Sequence[Span], context: int) -> Batch:
    """Put one span of vectors into each sequence; targets are classes or the next vectors, normalized."""
    vectors = np.zeros((len(spans), context, store.channels or 0), np.float32)
    labels = np.full((len(spans), context), IGNORE_INDEX, np.int64)
    following = np.full(vectors.shape, np.nan, np.float32)
    task = store.task
    assert task is not None
    for i, (start, length, has_next) in enumerate(spans):
        vectors[i, :length] = store.tokens[start : start + length]
        if store.targets is not None:
            labels[i, :length] = store.targets[start : start + length]
        elif task.kind == "forecast":
            known = length if has_next else length - 1
            following[i, :known] = store.tokens[start + 1 : start + 1 + known]
    mask = np.arange(context) < np.array([[span.length] for span in spans])
    forecast = task.kind == "forecast"
    targets = (following - np.array(task.mean, np.float32)) / np.array(task.std, np.float32) if forecast else labels
    count = int((~np.isnan(targets[..., 0])).sum()) if forecast else int((labels != IGNORE_INDEX).sum())
    key_mask = None if mask.all() else torch.from_numpy(mask)
    return Batch(torch.from_numpy(vectors), torch.from_numpy(targets), count, key_mask=key_mask)


def _copy_span(store: TokenStore, span: Span, tokens: TokenArray, targets: TokenArray) -> None:
    start, length, has_next = span
    known = length if has_next else length - 1
    tokens[:length] = store.tokens[start : start + length]
    if store.targets is not None:
        targets[:length] = store.targets[start : start + length]
        return
    targets[:known] = store.tokens[start + 1 : start + 1 + known]


def _make_batch(tokens: TokenArray, targets: TokenArray, **layout: Tensor | None) -> Batch:
    count = int((targets != IGNORE_INDEX).sum())
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), count, **layout)


def evaluation_batches(store: TokenStore, segments: Segments, shape: BatchShape, limit: int) -> Iterator[Batch]:
    """Yield this process's share of the batches that evaluate `segments`, in windows of the context.

    Every token is a target once. The shorter windows at the ends of documents are packed.

    Args:
        store: The tokens.
        segments: What to evaluate.
        shape: Sizes of a batch.
        limit: Approximate number of tokens. If there are more, windows are taken at equal distances.
    """
    windows: list[Span] = []
    tails: list[Span] = []
    for start, length in zip(segments.start.tolist(), segments.length.tolist(), strict=True):
        number, rest = divmod(length - 1, shape.context)
        windows += [Span(start + i * shape.context, shape.context, True) for i in range(number)]
        if rest:
            tails.append(Span(start + number * shape.context, rest, True))
    share = min(1.0, limit / max(sum(span.length for span in (*windows, *tails)), 1))
    windows, tails = (
        _evenly_spaced(spans, round(share * len(spans)) or min(1, len(spans))) for spans in (windows, tails)
    )
    groups = [windows[i : i + shape.batch_size] for i in range(0, len(windows), shape.batch_size)]
    parts = [*groups, *_pack(tails, shape.batch_size * shape.context)]
    for number in range(shape.process, len(parts), shape.processes):
        windowed = number < len(groups)
        yield padded_batch(store, parts[number], shape.context) if windowed else packed_batch(store, parts[number])
    if parts and shape.has_spare_batch(len(parts)):
        yield _without_targets(packed_batch(store, parts[-1]))


def labeled_evaluation_batches(store: TokenStore, segments: Segments, shape: BatchShape, limit: int) -> Iterator[Batch]:
    """Yield this process's share of the labeled documents, each from its start, at most `limit` tokens in total."""
    task = store.task
    if task is not None and task.per_token:
        segments = _windows(segments, shape.context, 1 if task.kind == "forecast" else 0)
    lengths = np.minimum(segments.length, shape.context)
    number = max(1, int(np.searchsorted(lengths.cumsum(), limit, side="right")))
    columns = segments.start[:number].tolist(), lengths[:number].tolist(), segments.label[:number].tolist()
    items = [(Span(start, length, False), label) for start, length, label in zip(*columns, strict=True)]
    groups = [items[i : i + shape.batch_size] for i in range(0, len(items), shape.batch_size)]
    for group in groups[shape.process :: shape.processes]:
        yield labeled_batch(store, group)
    if shape.has_spare_batch(len(groups)):
        yield _without_targets(labeled_batch(store, groups[-1]))


def _without_targets(batch: Batch) -> Batch:
    return replace(batch, targets=torch.full_like(batch.targets, IGNORE_INDEX), num_targets=0)


def _windows(segments: Segments, context: int, overlap: int) -> Segments:
    """Cut segments into windows of the context; each starts `overlap` tokens before the end of the one before."""
    rows = [
        (begin, min(context, start + length - begin), source, label)
        for start, length, source, label in zip(
            *(column.tolist() for column in (segments.start, segments.length, segments.source, segments.label)),
            strict=True,
        )
        for begin in range(start, max(start + 1, start + length - overlap), max(1, context - overlap))
    ]
    return Segments(*np.array(rows, np.int64).reshape(-1, 4).T)


def permute_index(index: int, count: int, seed: int) -> int:
    """Return where a permutation of 0 … count − 1 maps `index`, by a Feistel network in constant memory."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_ in range(4):
            left, right = right, left ^ (derive_seed(seed, round_, right) & low)
        index = left << half | right
        if index < count:  # The network permutes a power of four; cycle until inside the range.
            return index


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit hash of some integers (splitmix64), to seed an independent generator."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state >> 1


def _source_weights(store: TokenStore, sources: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the weights of sources from --data or, if none has a weight, their sizes."""
    given = [store.metadata["sources"][s] for s in sources]
    if all(source["weight"] is None for source in given):
        return [float(n) for n in tokens]
    for source in given:
        if source["weight"] is None:
            raise ValueError(
                f"--data {source['name']} has no weight, but another source has: give all of them one, as 2=path"
            )
    return [float(source["weight"]) for source in given]


def _evenly_spaced(spans: list[Span], number: int) -> list[Span]:
    return [spans[i * len(spans) // number] for i in range(number)]


def _pack(spans: Sequence[Span], size: int) -> list[list[Span]]:
    """Group consecutive spans of at most `size` tokens in total."""
    packs: list[list[Span]] = []
    total = size
    for span in spans:
        if total + span.length > size:
            packs.append([])
            total = 0
        packs[-1].append(span)
        total += span.length
    return packs
