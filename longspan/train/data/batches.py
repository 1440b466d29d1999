"""Batches, each a function of the seed and a position that fits in a checkpoint.

Rows are `context` tokens long. Plain rows lie inside one document. Packed rows hold documents end to end, with their
boundaries, so that nothing is read across them. Which rows make up a step does not depend on how many processes share
it: two processes read what one with twice the batch reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from longspan.train.data.token_store import Segments, Store

IGNORED = -100  # a target that does not count


class Span(NamedTuple):
    """Tokens start … start + length of the store; `follows`: the token after them may be predicted."""

    start: int
    length: int
    follows: bool


@dataclass
class Batch:
    """tokens, targets: (B, T), or (1, B · T) with offsets (N + 1,) when packed; classification has (B,) targets.

    key_mask: (B, T), True for real tokens; None if all are. fresh: (B,) rows that begin a document, for a carried
    state. count: how many targets count.
    """

    tokens: Tensor
    targets: Tensor
    count: int
    offsets: Tensor | None = None
    key_mask: Tensor | None = None
    fresh: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        def move(x: Tensor | None) -> Tensor | None:
            if x is None or device.type == "cpu":
                return x
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        moved = [move(getattr(self, name)) for name in ("tokens", "targets", "offsets", "key_mask", "fresh")]
        tokens, targets, *rest = moved
        assert tokens is not None
        assert targets is not None
        return Batch(tokens, targets, self.count, *rest)


@dataclass(frozen=True)
class Shape:
    """Of a step: rows of `context` tokens, `batch_size` of them a process and micro-batch, `accumulate` of those."""

    context: int
    batch_size: int
    accumulate: int = 1
    processes: int = 1
    process: int = 0

    @property
    def rows(self) -> int:
        return self.batch_size * self.accumulate * self.processes

    def own(self, micro: int) -> slice:
        """Which of the step's rows are this process's."""
        first = (micro * self.processes + self.process) * self.batch_size
        return slice(first, first + self.batch_size)


class Batches(Protocol):
    """What the loop draws from. `position` goes into checkpoints; setting it continues from there."""

    position: dict[str, Any]

    @property
    def left_out(self) -> int:
        """Training tokens that are never read."""

    def step(self) -> list[Batch]:
        """The micro-batches of the next step, for this process."""


class Rows:
    """Rows in an order that the seed decides; every source is read once through before it begins again."""

    def __init__(self, store: Store, shape: Shape, *, packed: bool, seed: int) -> None:
        self.store, self.shape, self.packed = store, shape, packed
        sources = sorted(set(store.train.source.tolist()))
        parts = [store.train.of_source(s) for s in sources]
        kind = _PackedSource if packed else _PlainSource
        made = [kind(part, shape.context, mixed(seed, s)) for part, s in zip(parts, sources, strict=True)]
        kept = [(source, part) for source, part in zip(sources, made, strict=True) if part.count]
        self.sources = [part for _, part in kept]
        self.weights = _weights(store, [s for s, _ in kept], [part.tokens for part in self.sources])
        self.drawn = [0] * len(self.sources)

    @property
    def left_out(self) -> int:
        """Training tokens that no row holds: those of documents shorter than a plain row."""
        return self.store.train.total - sum(source.tokens for source in self.sources)

    @property
    def position(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn)}

    @position.setter
    def position(self, value: dict[str, Any]) -> None:
        self.drawn = [int(n) for n in value["drawn"]]

    @property
    def epochs(self) -> float:
        """How often the data has been read."""
        return sum(self.drawn) / sum(source.count for source in self.sources)

    def step(self) -> list[Batch]:
        rows = [self._next() for _ in range(self.shape.rows)]
        own = [rows[self.shape.own(micro)] for micro in range(self.shape.accumulate)]
        return [make_batch(self.store, part, self.shape.context, self.packed) for part in own]

    def _next(self) -> list[Span]:
        source = min(range(len(self.sources)), key=lambda i: ((self.drawn[i] + 1) / self.weights[i], i))
        number, self.drawn[source] = self.drawn[source], self.drawn[source] + 1
        return self.sources[source].row(*divmod(number, self.sources[source].count))


class _PlainSource:
    """Windows of one document each; where they begin changes from epoch to epoch."""

    def __init__(self, segments: Segments, context: int, seed: int) -> None:
        long = segments.take(np.flatnonzero(segments.length > context))
        self.start, self.context, self.seed = long.start, context, seed
        windows = (long.length - 1) // context
        windows -= windows >= 8  # room to begin elsewhere each time
        self.spare = long.length - 1 - windows * context
        self.first = np.concatenate([[0], windows.cumsum()])
        self.count, self.tokens = int(self.first[-1]), long.total

    def row(self, epoch: int, index: int) -> list[Span]:
        window = shuffled(index, self.count, mixed(self.seed, epoch))
        segment = int(np.searchsorted(self.first, window, side="right")) - 1
        phase = mixed(self.seed, epoch, segment) % (int(self.spare[segment]) + 1)
        start = int(self.start[segment]) + phase + (window - int(self.first[segment])) * self.context
        return [Span(start, self.context, True)]


class _PackedSource:
    """Documents end to end, in a new order each epoch, cut into rows; the rows are shuffled too."""

    def __init__(self, segments: Segments, context: int, seed: int) -> None:
        self.segments, self.context, self.seed = segments, context, seed
        self.tokens = segments.total
        self.count = self.tokens // context
        self._order(0)

    def row(self, epoch: int, index: int) -> list[Span]:
        if epoch != self.epoch:
            self._order(epoch)
        place = shuffled(index, self.count, mixed(self.seed, epoch)) * self.context
        end, spans = place + self.context, []
        document = int(np.searchsorted(self.first, place, side="right")) - 1
        while place < end:
            begin, finish = int(self.first[document]), int(self.first[document + 1])
            length = min(finish, end) - place
            start = int(self.segments.start[self.order[document]]) + place - begin
            spans.append(Span(start, length, place + length < finish))
            place, document = place + length, document + 1
        return spans

    def _order(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = np.random.Generator(np.random.Philox(mixed(self.seed, epoch))).permutation(len(self.segments))
        self.first = np.concatenate([[0], self.segments.length[self.order].cumsum()])


class Lanes:
    """Documents read in order, chunk after chunk, one document at a time in each lane: for a carried state.

    Every micro-batch has lanes of its own. A document's last chunk is padded.
    """

    def __init__(self, store: Store, shape: Shape, *, seed: int) -> None:
        self.store, self.shape, self.seed = store, shape, seed
        self.sources = sorted(set(store.train.source.tolist()))
        self.parts = [store.train.of_source(s) for s in self.sources]
        self.parts = [part.take(np.flatnonzero(part.length > 1)) for part in self.parts]
        self.weights = _weights(store, self.sources, [part.total for part in self.parts])
        self.drawn, self.tokens = [0] * len(self.parts), [0] * len(self.parts)
        self.lanes: list[list[int]] = [[0, 0]] * shape.rows  # where the next chunk starts, tokens left

    @property
    def left_out(self) -> int:
        """Training tokens that are in no document of two or more."""
        return self.store.train.total - sum(part.total for part in self.parts)

    @property
    def epochs(self) -> float:
        return sum(self.drawn) / max(1, sum(len(part) for part in self.parts))

    @property
    def position(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "tokens": list(self.tokens), "lanes": [list(lane) for lane in self.lanes]}

    @position.setter
    def position(self, value: dict[str, Any]) -> None:
        if len(value["lanes"]) != self.shape.rows:
            raise ValueError(
                f"the run has {len(value['lanes'])} lanes of carried state, this command {self.shape.rows}: resume it "
                "with the same --batch-size × --accumulate × processes"
            )
        self.drawn, self.tokens = list(value["drawn"]), list(value["tokens"])
        self.lanes = [list(lane) for lane in value["lanes"]]

    def step(self) -> list[Batch]:
        chunks = [self._chunk(lane) for lane in range(self.shape.rows)]
        return [self._batch(chunks[self.shape.own(micro)]) for micro in range(self.shape.accumulate)]

    def _chunk(self, lane: int) -> tuple[Span, bool]:
        start, left = self.lanes[lane]
        fresh = left < 2  # The last token of a document is only ever predicted.
        if fresh:
            start, left = self._document()
        length = min(self.shape.context, left - 1)
        self.lanes[lane] = [start + length, left - length]
        return Span(start, length, True), fresh

    def _document(self) -> tuple[int, int]:
        source = min(range(len(self.parts)), key=lambda i: (self.tokens[i] / self.weights[i], i))
        part, number = self.parts[source], self.drawn[source]
        epoch, index = divmod(number, len(part))
        chosen = shuffled(index, len(part), mixed(self.seed, source, epoch))
        self.drawn[source] += 1
        self.tokens[source] += int(part.length[chosen])
        return int(part.start[chosen]), int(part.length[chosen])

    def _batch(self, chunks: Sequence[tuple[Span, bool]]) -> Batch:
        batch = padded_batch(self.store, [span for span, _ in chunks], self.shape.context)
        return replace(batch, fresh=torch.tensor([fresh for _, fresh in chunks]))


class Labeled:
    """Documents with labels, cropped at random if longer than the context, padded if shorter."""

    def __init__(self, store: Store, shape: Shape, *, seed: int) -> None:
        self.store, self.shape, self.seed, self.drawn = store, shape, seed, 0

    @property
    def left_out(self) -> int:
        return 0

    @property
    def epochs(self) -> float:
        return self.drawn / len(self.store.train)

    @property
    def position(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    @position.setter
    def position(self, value: dict[str, Any]) -> None:
        self.drawn = int(value["drawn"])

    def step(self) -> list[Batch]:
        chosen = [self._next() for _ in range(self.shape.rows)]
        own = [chosen[self.shape.own(micro)] for micro in range(self.shape.accumulate)]
        return [labeled_batch(self.store, part, self.shape.context) for part in own]

    def _next(self) -> tuple[Span, int]:
        segments, number = self.store.train, self.drawn
        self.drawn += 1
        epoch, index = divmod(number, len(segments))
        i = shuffled(index, len(segments), mixed(self.seed, epoch))
        length = min(int(segments.length[i]), self.shape.context)
        phase = mixed(self.seed, epoch, i) % (int(segments.length[i]) - length + 1)
        return Span(int(segments.start[i]) + phase, length, False), int(segments.label[i])


def make_batch(store: Store, rows: Sequence[Sequence[Span]], context: int, packed: bool) -> Batch:
    """Rows of spans as a batch."""
    tokens = np.empty(len(rows) * context, np.int64)
    targets = np.full(len(rows) * context, IGNORED, np.int64)
    offsets, place = [0], 0
    for start, length, follows in (span for row in rows for span in row):
        tokens[place : place + length] = store.tokens[start : start + length]
        known = length if follows else length - 1
        targets[place : place + known] = store.tokens[start + 1 : start + 1 + known]
        place += length
        offsets.append(place)
    assert place == len(tokens)
    count = int((targets != IGNORED).sum())
    x, y = torch.from_numpy(tokens), torch.from_numpy(targets)
    if packed:
        return Batch(x[None], y[None], count, torch.tensor(offsets, dtype=torch.int32))
    return Batch(x.view(-1, context), y.view(-1, context), count)


def padded_batch(store: Store, spans: Sequence[Span], context: int) -> Batch:
    """One span a row, zeros after those that are shorter."""
    tokens = np.zeros((len(spans), context), np.int64)
    targets = np.full((len(spans), context), IGNORED, np.int64)
    mask = np.zeros((len(spans), context), bool)
    for row, (start, length, follows) in enumerate(spans):
        known = length if follows else length - 1
        tokens[row, :length] = store.tokens[start : start + length]
        targets[row, :known] = store.tokens[start + 1 : start + 1 + known]
        mask[row, :length] = True
    key_mask = None if mask.all() else torch.from_numpy(mask)
    count = int((targets != IGNORED).sum())
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), count, key_mask=key_mask)


def labeled_batch(store: Store, rows: Sequence[tuple[Span, int]], context: int) -> Batch:
    """Spans with labels, padded to the longest of them."""
    longest = max(span.length for span, _ in rows)
    batch = padded_batch(store, [span for span, _ in rows], min(longest, context))
    return replace(batch, targets=torch.tensor([label for _, label in rows]), count=len(rows))


def evaluation(store: Store, segments: Segments, shape: Shape, limit: int) -> Iterator[Batch]:
    """The process's share of the batches that score `segments`: every token once, in windows of the context.

    limit: about how many tokens; windows are then taken evenly from all of them. The windows that end a document are
    shorter, and packed together.
    """
    whole: list[Span] = []
    ends: list[Span] = []
    for start, length in zip(segments.start.tolist(), segments.length.tolist(), strict=True):
        windows, rest = divmod(length - 1, shape.context)
        whole += [Span(start + i * shape.context, shape.context, True) for i in range(windows)]
        if rest:
            ends.append(Span(start + windows * shape.context, rest, True))
    total = sum(span.length for span in (*whole, *ends))
    keep = min(1.0, limit / max(total, 1))
    whole, ends = (_evenly(spans, round(keep * len(spans)) or min(1, len(spans))) for spans in (whole, ends))
    groups = [whole[i : i + shape.batch_size] for i in range(0, len(whole), shape.batch_size)]
    packs = list(_packs(ends, shape.batch_size * shape.context))
    for number, group in enumerate([*groups, *packs]):
        if number % shape.processes == shape.process:
            if number < len(groups):
                yield make_batch(store, [[span] for span in group], shape.context, False)
            else:
                yield make_batch(store, [group], sum(span.length for span in group), True)


def labeled_evaluation(store: Store, segments: Segments, shape: Shape, limit: int) -> Iterator[Batch]:
    """The process's share of the documents to be scored, from the start of each, at most `limit` tokens."""
    lengths = np.minimum(segments.length, shape.context)
    number = max(1, int(np.searchsorted(lengths.cumsum(), limit, side="right")))
    columns = segments.start[:number].tolist(), lengths[:number].tolist(), segments.label[:number].tolist()
    rows = [(Span(start, length, False), label) for start, length, label in zip(*columns, strict=True)]
    for i in range(0, len(rows), shape.batch_size):
        if i // shape.batch_size % shape.processes == shape.process:
            yield labeled_batch(store, rows[i : i + shape.batch_size], shape.context)


def shuffled(index: int, count: int, seed: int) -> int:
    """Where `index` goes in a permutation of 0 … count − 1: a Feistel network, so that no list of it is needed."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(4):
            left, right = right, left ^ (mixed(seed, turn, right) & low)
        index = left << half | right
        if index < count:  # Otherwise it fell outside, and is sent on until it does not.
            return index


def mixed(*numbers: int) -> int:
    """63 well-mixed bits of some numbers (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _weights(store: Store, sources: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Each source's share: by weight where weights are given, by size otherwise."""
    asked = [store.about["sources"][s]["weight"] for s in sources]
    if all(weight is None for weight in asked):
        return [float(n) for n in tokens]
    missing = [store.about["sources"][s]["name"] for s, weight in zip(sources, asked, strict=True) if weight is None]
    if missing:
        raise ValueError(f"--data {missing[0]} has no weight, and others have: give all of them one, as 2=path")
    return [float(weight) for weight in asked]


def _evenly(spans: list[Span], number: int) -> list[Span]:
    return [spans[i * len(spans) // number] for i in range(number)]


def _packs(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    held: list[Span] = []
    total = 0
    for span in spans:
        if held and total + span.length > size:
            yield held
            held, total = [], 0
        held, total = [*held, span], total + span.length
    if held:
        yield held
