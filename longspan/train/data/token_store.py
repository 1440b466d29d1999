"""Store the tokens of a run in one memory-mapped file, split by content into training and held-out data.

    tokens.bin      the tokens of all documents, concatenated; missing where large files are read in place
    targets.bin     int32, what to predict at each token, −100 for nothing; missing where it is the next token
    values.npy      (documents, outputs) float32, the numbers or classes to predict; missing for other tasks
    segments.npy    (N, 5) int64: start, length, source, label, held out; each segment is read as one document
    store.json      description of the store
    SHA256SUMS      digests of these files, verified when a run is resumed

A store is built in a folder of its own and renamed, so that a process that has it open keeps what it reads.

A hash of the content decides what is held out: the hash of the document or, if it is long, of each block of it. Equal
content is therefore on the same side of the split, whatever its file name and however often it occurs.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from longspan.generation.chat_template import ChatTemplate
from longspan.generation.tokenization import load_tokenizer
from longspan.models.checkpoint import CHECKSUMS, replace_folder, verify_checksums, write_checksums
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.data.containers import ARCHIVES, COMPRESSED
from longspan.train.data.readers import (
    Chat,
    DataSource,
    DocumentChunk,
    DocumentReader,
    MappedFile,
    ReadOptions,
    Tagged,
    Tokens,
    load_array,
    map_file,
)
from longspan.train.data.tasks import SupervisedTask, TaskKind, check_classes
from longspan.utils import is_disk_full

TOKENS, TARGETS, VALUES, SEGMENTS, STORE = "tokens.bin", "targets.bin", "values.npy", "segments.npy", "store.json"
FORMAT = 1
_BLOCK = 1 << 16  # length of the blocks that a long document is split into
_COUNT_CHUNK = 1 << 22
_IN_PLACE, _MAX_MAPPED = 1 << 28, 64  # bytes from which files are read in place, and how many files at most
_PROGRESS = 10  # seconds between messages
_CONTAINERS = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", *COMPRESSED, *ARCHIVES)


@dataclass(frozen=True)
class Segments:
    """Contiguous runs of tokens, each from one document.

    Args:
        start: (N,), position of the first token in the store.
        length: (N,), number of tokens.
        source: (N,), index of the data source.
        label: (N,), class of the document; −1 without labels.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    source: NDArray[np.int64]
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        """The number of tokens in all segments."""
        return int(self.length.sum())

    @property
    def longest(self) -> int:
        """The length of the longest segment."""
        return int(self.length.max()) if len(self) else 0

    def of_source(self, source: int) -> Segments:
        """Return the segments of one data source."""
        return self.take(np.flatnonzero(self.source == source))

    def take(self, index: NDArray[np.int64]) -> Segments:
        """Return the segments at these indices."""
        return Segments(self.start[index], self.length[index], self.source[index], self.label[index])


@dataclass(frozen=True)
class TokenStore:
    """Tokens and their split.

    Args:
        tokens: All tokens, memory-mapped.
        train: Segments to train on.
        held_out: Segments to evaluate on.
        metadata: Contents of `store.json`.
        targets: What to predict at each token, memory-mapped. None: the next token.
        values: What to predict for documents, (N, outputs); the label of a segment is its row. None: a class or tokens.
    """

    tokens: Tokens
    train: Segments
    held_out: Segments
    metadata: dict[str, Any]
    targets: Tokens | None = None
    values: NDArray[np.float32] | None = None

    @property
    def task(self) -> SupervisedTask | None:
        """The supervised task; None for a language model."""
        if "task" in self.metadata:
            return SupervisedTask.from_dict(self.metadata["task"])
        return SupervisedTask("classify", tuple(self.labels)) if self.labels else None  # a store of an earlier version

    @property
    def channels(self) -> int | None:
        """The width of vectors; None for tokens."""
        return self.metadata.get("channels")

    @property
    def vocab_size(self) -> int:
        return int(self.metadata["vocab_size"])

    @property
    def labels(self) -> list[str]:
        return list(self.metadata["labels"])

    @property
    def bytes_per_token(self) -> float | None:
        """Mean length of a token to predict in bytes; None if the data was read as tokens, so that it is unknown."""
        number = self.metadata.get("targets") or self.metadata["tokens"]
        return self.metadata["bytes"] / number if self.metadata["bytes"] else None

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a mean loss in nats per token; None if the number of bytes is unknown."""
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token

    def describe_sources(self) -> list[str]:
        """Return a line about each source: what it was taken for, its size, and how its first document starts."""
        lines = []
        for source in self.metadata["sources"]:
            if "kinds" not in source:  # a store of an earlier version
                continue
            kinds = "; ".join(
                name if len(source["kinds"]) == 1 else f"{name} ({n:,})" for name, n in source["kinds"].items()
            )
            line = f"{source['name']}: {kinds}; {source['documents']:,} documents, {source['bytes']:,} bytes"
            if source["skipped"]:
                line += f"; {source['skipped']:,} files skipped: {source['reason']}"
            if source.get("incomplete"):
                line += f"; {source['incomplete']:,} rows without text or label left out"
            lines.append(f"{line}; first: {source['first']!r}")
        return lines


@dataclass(frozen=True)
class StoreSpec:
    """What a store is built from.

    Args:
        sources: Data to train on.
        eval_sources: Data to evaluate on. If there is any, no part of `sources` is held out.
        options: How to read the files.
        tokenizer: A Hugging Face tokenizer file. None: tokens are bytes.
        context: Context length of the run, which sets the smallest block that may be held out.
        held_out: Share of `sources` to hold out.
        labels: Classes that are numbered first, in this order.
    """

    sources: tuple[DataSource, ...]
    eval_sources: tuple[DataSource, ...]
    options: ReadOptions
    tokenizer: Path | None
    context: int
    held_out: float
    labels: tuple[str, ...] = ()

    def key(self) -> str:
        """Return a hash of everything that the content of the store depends on."""
        files = [
            [str(path), path.stat().st_size, path.stat().st_mtime_ns]
            for source in (*self.sources, *self.eval_sources)
            for path in source.files
        ]
        weights = [[s.name, s.weight] for s in self.sources], [s.name for s in self.eval_sources]
        tokenizer = None if self.tokenizer is None else hashlib.sha256(self.tokenizer.read_bytes()).hexdigest()
        parts = [FORMAT, files, weights, self.options.identity(), tokenizer, self.context, self.held_out]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def open_store(
    folder: Path,
    spec: StoreSpec,
    progress: Callable[[str], None] = lambda text: None,
    *,
    sha256: str | None = None,
    verify: bool = True,
) -> TokenStore:
    """Open the store in `folder`, building it if it is missing or was built from something else.

    Args:
        folder: Where the store is.
        spec: What it is built from.
        progress: Called with a message after every thousand files.
        sha256: Digest that the tokens must have. None: any.
        verify: Read an existing store completely to verify its checksums.

    Raises:
        ValueError: The data cannot be read, tokens and bytes are mixed, no part of it can be held out, its digest is
            another one, or a file of the store is damaged.
    """
    key = spec.key()
    if not _is_store(folder, key):
        names = (TOKENS, TARGETS, VALUES, SEGMENTS, STORE, CHECKSUMS)
        with replace_folder(folder, names, mark=STORE, what="a token store") as partial:
            metadata = _build(partial, spec, progress) | {"key": key}
            _check_digest(metadata, sha256)
            (partial / STORE).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
            write_checksums(partial)
    elif verify:
        found = [
            name for name in (TOKENS, TARGETS, VALUES, SEGMENTS, STORE) if name == STORE or (folder / name).exists()
        ]
        verify_checksums(folder, found, f"remove {folder}, and the data is read again")
    store = _open(folder)
    _check_digest(store.metadata, sha256)
    return store


@contextmanager
def temporary_store(spec: StoreSpec) -> Iterator[TokenStore]:
    """Yield a store in a temporary folder, which is removed at the end; see `open_store`."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = open_store(Path(folder) / "data", spec)
        except OSError as error:
            if is_disk_full(error):
                error.filename = folder
            raise
        yield store


def _is_store(folder: Path, key: str) -> bool:
    """Return whether a folder contains a store with this key, and its checksums."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return json.loads((folder / STORE).read_text())["key"] == key and (folder / CHECKSUMS).is_file()
    return False


def _check_digest(metadata: dict[str, Any], sha256: str | None) -> None:
    if sha256 not in (None, metadata["sha256"]):
        raise ValueError("the data has changed since the run started: restore it, or use another --out")


def unigram_bits(store: TokenStore) -> float | None:
    """Return the unigram baseline: bits per byte of the held-out data under the token frequencies of the training data.

    Frequencies are smoothed by adding one to each count. None if nothing is held out or bytes are unknown.
    """
    if not len(store.held_out) or store.bytes_per_token is None:
        return None
    frequencies = 1.0 + _token_counts(store, store.train)
    counts = _token_counts(store, store.held_out)
    bits = -(counts * np.log2(frequencies / frequencies.sum())).sum()
    return float(bits / counts.sum() / store.bytes_per_token)


def _token_counts(store: TokenStore, segments: Segments) -> NDArray[np.int64]:
    counts = np.zeros(store.vocab_size, np.int64)
    for start, end in zip(segments.start.tolist(), (segments.start + segments.length).tolist(), strict=True):
        for begin in range(start, end, _COUNT_CHUNK):
            counts += np.bincount(store.tokens[begin : min(begin + _COUNT_CHUNK, end)], minlength=store.vocab_size)
    return counts


def _open(folder: Path) -> TokenStore:
    metadata = json.loads((folder / STORE).read_text())
    mapped = [MappedFile(*file) for file in metadata.get("mapped", [])]
    tokens: Any = _MappedTokens(mapped) if mapped else np.memmap(folder / TOKENS, dtype=metadata["dtype"], mode="r")
    if metadata.get("channels"):
        tokens = tokens.reshape(-1, metadata["channels"])
    targets = np.memmap(folder / TARGETS, np.int32, mode="r") if (folder / TARGETS).exists() else None
    values = np.load(folder / VALUES) if (folder / VALUES).exists() else None
    table = np.load(folder / SEGMENTS, mmap_mode="r")
    held_out = np.asarray(table[:, 4], dtype=bool)
    train, evaluation = (Segments(*(np.array(table[side, i]) for i in range(4))) for side in (~held_out, held_out))
    return TokenStore(tokens, train, evaluation, metadata, targets, values)


class _MappedTokens:
    """The tokens of several files, concatenated. A slice must not cross the end of a file."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._parts = [np.memmap(f.path, f.dtype, "r", f.offset, (f.size,)) for f in files]
        self._first = np.cumsum([0, *(f.size for f in files)])

    def __getitem__(self, index: slice) -> Tokens:
        part = int(np.searchsorted(self._first, index.start, side="right")) - 1
        first = int(self._first[part])
        return self._parts[part][index.start - first : index.stop - first]


def _build(folder: Path, spec: StoreSpec, progress: Callable[[str], None]) -> dict[str, Any]:
    """Write tokens and segments; return the description of the store."""
    sources = (*spec.sources, *spec.eval_sources)
    mapped, kind = _mapped_files(spec), spec.options.objective
    labels = {name: i for i, name in enumerate(spec.labels)}
    encoder = DocumentEncoder(spec.tokenizer, labels)
    writer = _TokenWriter(folder, _token_dtype(spec, encoder.vocab_size), kind, labels, copy=not mapped)
    with writer:
        described = [_add_source(writer, encoder, spec.options, *pair, progress) for pair in enumerate(sources)]
    kinds = encoder.kinds
    if spec.tokenizer is None and kinds == {True, False}:
        raise ValueError(
            "token files (.npy, .bin) and other files are mixed, which assigns two meanings to each token: "
            "give the --tokenizer that the token files were made with, or remove one kind"
        )
    if kind == "classify":
        check_classes(list(writer.labels))
    tokens: Any = _MappedTokens(mapped) if mapped else np.memmap(folder / TOKENS, dtype=writer.dtype, mode="r")
    tokens = tokens if writer.channels is None else tokens.reshape(-1, writer.channels)
    table = _split(tokens, writer, spec)
    np.save(folder / SEGMENTS, table)
    counts = [int(table[table[:, 2] == i, 1].sum()) for i in range(len(sources))]
    about_task = {} if kind is None else _describe_task(folder, spec, writer, tokens, table, described)
    names = ("label_columns", "channels")
    described = [{name: x for name, x in source.items() if name not in names} for source in described]
    return {
        "format": FORMAT,
        "dtype": str(writer.dtype),
        **({"mapped": mapped} if mapped else {}),
        "vocab_size": encoder.vocab_size or max(writer.largest + 1, 1 if kinds == {True} else 256),
        **about_task,
        "labels": list(writer.labels),
        "tokens": writer.position,
        "bytes": 0 if True in kinds else writer.num_bytes,
        **({} if writer.num_targets is None else {"targets": writer.num_targets}),
        "documents": len(writer.documents),
        "sha256": writer.digest.hexdigest(),
        "sources": [source | {"tokens": count} for source, count in zip(described, counts, strict=True)],
    }


def _add_source(
    writer: _TokenWriter,
    encoder: DocumentEncoder,
    options: ReadOptions,
    index: int,
    source: DataSource,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Write the documents of a source and describe it."""
    root, before, reader = Path(source.name).expanduser(), writer.position, DocumentReader(options)
    documents, size, first, shown = len(writer.documents), 0, None, time.monotonic()
    for count, path in enumerate(source.files, 1):
        with closing(reader.read(path, root if root.is_dir() else None)) as chunks:
            for chunk in chunks:
                for part in encoder.encode(path, chunk):
                    writer.add(part, index, chunk.label)
                    size += part.num_bytes
                    first = _beginning(part) if first is None else first
                if time.monotonic() - shown > _PROGRESS:
                    shown = time.monotonic()
                    progress(f"reading {source.name}: file {count:,} of {len(source.files):,}, {size:,} bytes so far")
    if writer.position == before:
        if reader.skipped:
            raise ValueError(reader.skipped[0])
        if reader.incomplete:
            raise ValueError(f"--data {source.name}: none of its {reader.incomplete:,} rows has both text and label")
        raise ValueError(f"--data {source.name} is empty: 0 bytes in {len(source.files)} files")
    return {
        "name": source.name,
        "weight": source.weight,
        "files": len(source.files),
        "kinds": {_with_template(kind, encoder): number for kind, number in reader.kinds.items()},
        "documents": len(writer.documents) - documents,
        "bytes": size,
        "skipped": len(reader.skipped),
        "reason": reader.skipped[0] if reader.skipped else "",
        "incomplete": reader.incomplete,
        "first": first,
        "label_columns": reader.label_columns,
        "channels": reader.channels,
    }


def _describe_task(
    folder: Path,
    spec: StoreSpec,
    writer: _TokenWriter,
    tokens: Tokens,
    table: NDArray[np.int64],
    sources: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Write the values of documents; return the task and the statistics of vectors."""
    kind, options, found = cast("TaskKind", writer.kind), spec.options, dict[str, Any]()
    names, mean, std = tuple(writer.labels), np.zeros(0), np.zeros(0)
    if writer.values:
        values = np.zeros(
            (len(writer.values), len(names) if kind == "multilabel" else len(writer.values[0])), np.float32
        )
        for row, value in zip(values, writer.values, strict=True):
            if kind == "multilabel":
                row[list(value)] = 1
            else:
                row[:] = value
        np.save(folder / VALUES, values)
        if kind == "regress":
            trained = values[table[(table[:, 4] == 0), 3]].astype(np.float64)
            mean, std = trained.mean(0), trained.std(0)
            columns = options.label_field or sources[0]["label_columns"]
            names = tuple(columns) if len(columns) == len(mean) else tuple(f"output {i}" for i in range(len(mean)))
    if writer.channels is not None:
        first, second = _moments(tokens, table[table[:, 4] == 0])
        deviation = np.sqrt(np.maximum(second - first**2, 0))
        deviation[deviation < 1e-12] = 1
        found = {"channels": writer.channels, "input": {"mean": first.tolist(), "std": deviation.tolist()}}
        if kind == "forecast":
            mean, std = first, deviation
            columns = sources[0]["channels"]
            names = tuple(columns or (f"channel {i}" for i in range(writer.channels)))
    elif kind == "forecast":
        raise ValueError("--objective forecast needs vectors: a table of numbers, or an array (T, channels)")
    std = np.where(std < 1e-12, 1.0, std)
    labels = options.label_field or tuple(sources[0]["label_columns"])
    task = SupervisedTask(kind, names, tuple(mean.tolist()), tuple(std.tolist()), options.text_field, labels)
    return found | {"task": asdict(task)}


def _moments(tokens: Tokens, table: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the means of vectors and of their squares."""
    first, second, count = np.zeros(tokens.shape[1]), np.zeros(tokens.shape[1]), 0
    for start, length in table[:, :2].tolist():
        for begin in range(start, start + length, 1 << 16):
            block = np.asarray(tokens[begin : min(begin + (1 << 16), start + length)], np.float64)
            first, second, count = first + block.sum(0), second + (block**2).sum(0), count + len(block)
    return first / max(count, 1), second / max(count, 1)


def _with_template(kind: str, encoder: DocumentEncoder) -> str:
    is_chat = "conversations in" in kind or "prompts and answers in" in kind
    return f"{kind}, {encoder.template.name}, loss on the answers" if is_chat else kind


def _beginning(part: _Encoded) -> str:
    """Return the first 80 characters of a document, or as many numbers."""
    if part.text is not None:
        return part.text[:320].decode("utf-8", "replace")[:80]
    return " ".join(map(str, part.tokens[:40].tolist()))[:80]


def _mapped_files(spec: StoreSpec) -> list[MappedFile]:
    """Return the files if all of them can be read in place, and are so large that this matters; otherwise nothing."""
    files = [path for source in (*spec.sources, *spec.eval_sources) for path in source.files]
    if len(files) > _MAX_MAPPED or sum(path.stat().st_size for path in files) < _IN_PLACE:
        return []
    found = [map_file(path, spec.options, text=spec.tokenizer is None) for path in files]
    if spec.options.objective in ("tag", "forecast"):
        return []
    return [] if None in found else [file for file in found if file is not None and file.size]


class _Block(NamedTuple):
    """A document or a block of a long one: the unit that is held out or not."""

    document: int
    start: int
    length: int
    digest: int
    source: int
    label: int


class _Encoded(NamedTuple):
    """A consecutive part of a document as tokens."""

    tokens: Tokens
    last: bool
    targets: NDArray[np.int32] | None = None
    num_bytes: int = 0
    num_target_bytes: int = 0
    text: bytes | None = None


class _TokenWriter:
    """Appends documents to a file and records the position and hash of each.

    Args:
        folder: The folder of the store.
        dtype: The type of the tokens.
        kind: The supervised task, if there is one.
        labels: The numbers of classes; new ones are added.
        copy: Write the tokens. False: only record them, because their files are read in place.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], kind: str | None, labels: dict[str, int], *, copy: bool = True
    ) -> None:
        self.folder, self.dtype, self.kind, self.labels = folder, dtype, kind, labels
        self.channels: int | None = None
        self.values: list[tuple[Any, ...]] = []
        self.position = self.num_bytes = self.largest = 0
        self.num_targets: int | None = None
        self.documents: list[_Block] = []
        self.digest = hashlib.sha256()
        self._start, self._hash = 0, hashlib.blake2b(digest_size=8)
        self._file = open(folder / TOKENS, "wb") if copy else None  # noqa: SIM115
        self._targets: Any = None

    def __enter__(self) -> _TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._file, self._targets):
            if file is not None:
                file.close()

    def add(self, part: _Encoded, source: int, label: Any) -> None:
        tokens = part.tokens
        if part.targets is not None and self._targets is None:
            self._start_targets()
        if len(tokens):
            self._check(tokens)
            raw = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
            if self._file is not None:
                self._file.write(raw)
            self._hash.update(raw)
            self.digest.update(raw)
            self.position += len(tokens)
            self.num_bytes += part.num_bytes if part.targets is None else part.num_target_bytes
        if self._targets is not None and len(tokens):
            self._add_targets(part)
        if part.last and self.position > self._start:
            self._end_document(source, label)

    def _check(self, tokens: Tokens) -> None:
        if (self.dtype.kind == "f") != (tokens.ndim == 2):
            raise ValueError("vectors and tokens are mixed: give data of one kind")
        if tokens.ndim == 2:
            self.channels = tokens.shape[1] if self.channels is None else self.channels
            if tokens.shape[1] != self.channels:
                raise ValueError(f"all vectors must have as many channels, got {self.channels} and {tokens.shape[1]}")
            if not np.isfinite(tokens).all():
                raise ValueError("vectors must be finite: fill or drop the values that are missing")
            return
        smallest, largest, limit = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype).max
        if smallest < 0 or largest > limit:
            raise ValueError(f"tokens must be in the range 0 to {limit}, got {smallest} to {largest}")
        self.largest = max(self.largest, largest)

    def _start_targets(self) -> None:
        """Create the file of targets; those of the documents so far are the next tokens."""
        self._targets, self.num_targets = open(self.folder / TARGETS, "w+b"), 0  # noqa: SIM115
        assert self._file is not None
        self._file.flush()
        for block in self.documents:
            tokens = np.memmap(self.folder / TOKENS, self.dtype, "r", block.start * self.dtype.itemsize, block.length)
            self._write_targets(np.append(tokens[1:].astype(np.int32), np.int32(IGNORE_INDEX)))

    def _add_targets(self, part: _Encoded) -> None:
        if part.targets is not None:
            self._write_targets(part.targets)
            self.digest.update(part.targets.tobytes())
            return
        if self.position - len(part.tokens) > self._start:  # The document goes on: its last target is known now.
            self._targets.seek(-4, 2)
            self._write_targets(part.tokens[:1].astype(np.int32))
        self._write_targets(np.append(part.tokens[1:].astype(np.int32), np.int32(IGNORE_INDEX)))

    def _write_targets(self, targets: NDArray[np.int32]) -> None:
        assert self.num_targets is not None
        self._targets.write(np.ascontiguousarray(targets, np.int32).tobytes())
        self.num_targets += int((targets != IGNORE_INDEX).sum())

    def _end_document(self, source: int, label: Any) -> None:
        digest = int.from_bytes(self._hash.digest(), "big")
        index = -1
        if self.kind in ("multilabel", "regress"):
            multiple = self.kind == "multilabel"
            known = [self.labels.setdefault(name, len(self.labels)) for name in label] if multiple else label
            self.values.append(tuple(known))
            index = len(self.values) - 1
            self.digest.update(repr(label).encode())
        elif self.kind == "classify" and label is not None:
            index = self.labels.setdefault(label, len(self.labels))
        length = self.position - self._start
        self.documents.append(_Block(len(self.documents), self._start, length, digest, source, index))
        self.digest.update(b"\0end")
        self._start, self._hash = self.position, hashlib.blake2b(digest_size=8)


class DocumentEncoder:
    """Converts documents to tokens chunk by chunk; with a tokenizer, text is cut at line ends.

    Attributes:
        kinds: Whether documents were tokens, for those seen so far.
    """

    def __init__(self, path: Path | None, labels: dict[str, int] | None = None) -> None:
        self.path, self.labels = path, {} if labels is None else labels
        self.tokenizer = None if path is None else load_tokenizer(path)
        self.vocab_size = None if self.tokenizer is None else int(self.tokenizer.get_vocab_size())
        self.kinds: set[bool] = set()
        self._template: ChatTemplate | None = None
        self._reset()

    @property
    def template(self) -> ChatTemplate:
        """The chat template, loaded on first use."""
        if self._template is None:
            self._template = ChatTemplate(self.path)
        return self._template

    def _reset(self) -> None:
        self._text, self._bytes_read = "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def encode(self, path: Path, chunk: DocumentChunk) -> Iterator[_Encoded]:
        """Yield the tokens of a part of a document; a conversation may become several documents."""
        content = chunk.content
        self.kinds.add(isinstance(content, np.ndarray))
        if isinstance(content, Chat):
            try:
                documents = self.template.documents(content.messages)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            for text, answers in documents:
                yield self._encode_answers(text, answers)
        elif isinstance(content, Tagged):
            yield self._encode_tags(content)
        elif isinstance(content, bytes):
            tokens = self._encode_text(path, content, chunk.last)
            yield _Encoded(tokens, chunk.last, num_bytes=len(content), text=content)
        else:
            targets = None
            if isinstance(chunk.label, list):  # a class for each vector
                if len(chunk.label) != len(content):
                    raise ValueError(f"{path}: {len(chunk.label)} labels do not fit {len(content)} vectors")
                numbers = [self.labels.setdefault(name, len(self.labels)) for name in chunk.label]
                targets = np.array(numbers, np.int32)
            yield _Encoded(content, chunk.last, targets, content.nbytes)

    def _encode_answers(self, text: str, answers: Sequence[tuple[int, int]]) -> _Encoded:
        """Return the tokens of a conversation; targets are the tokens of the answers."""
        raw = text.encode("utf-8", "replace")
        if self.tokenizer is None:
            tokens, spans = np.frombuffer(raw, np.uint8).astype(np.int64), []
            for start, end in answers:
                spans.append((len(text[:start].encode("utf-8", "replace")), len(text[:end].encode("utf-8", "replace"))))
            first = np.arange(len(tokens))
        else:
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            tokens, spans = np.asarray(encoded.ids, np.int64), list(answers)
            first = np.asarray([start for start, _ in encoded.offsets], np.int64)
        answered = np.zeros(len(tokens), bool)
        for start, end in spans:
            answered |= (first >= start) & (first < end)
        targets = np.full(len(tokens), IGNORE_INDEX, np.int32)
        targets[:-1] = np.where(answered[1:], tokens[1:], IGNORE_INDEX)
        size = sum(len(text[start:end].encode("utf-8", "replace")) for start, end in answers)
        return _Encoded(tokens, True, targets, len(raw), size, raw)

    def _encode_tags(self, content: Tagged) -> _Encoded:
        """Return the tokens of a text; targets are the classes of the characters that they start at."""
        raw = content.text.encode("utf-8", "replace")
        classes = np.full(len(content.text) + 1, IGNORE_INDEX, np.int32)
        for start, end, label in content.spans:
            classes[start:end] = self.labels.setdefault(label, len(self.labels))
        tokens, first = self.encode_with_starts(content.text)
        return _Encoded(tokens, True, classes[first], len(raw), len(raw), raw)

    def encode_with_starts(self, text: str) -> tuple[Tokens, NDArray[np.int64]]:
        """Return the tokens of a text, and the character that each starts at, after a space before its word."""
        if self.tokenizer is None:
            sizes = [len(character.encode("utf-8", "replace")) for character in text]
            tokens = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
            return tokens, np.repeat(np.arange(len(text)), sizes).astype(np.int64)
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        first = [min(a + (text[a : a + 1] == " "), b) for a, b in encoded.offsets]
        return np.asarray(encoded.ids, np.int64), np.asarray(first, np.int64)

    def _encode_text(self, path: Path, content: bytes, last: bool) -> Tokens:
        if self.tokenizer is None:
            return np.frombuffer(content, np.uint8)
        try:
            self._text += self._decoder.decode(content, last)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text at byte {self._bytes_read + error.start} "
                f"(0x{error.object[error.start]:02x}), which {self.path} requires: convert the file, or remove "
                "--tokenizer to train on bytes"
            ) from None
        self._bytes_read += len(content)
        end = len(self._text) if last else self._text.rfind("\n") + 1
        text, self._text = self._text[:end], self._text[end:]
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids if text else []
        if last:
            self._reset()
        return np.asarray(ids, dtype=np.int64)


def _token_dtype(spec: StoreSpec, vocab_size: int | None) -> np.dtype[Any]:
    """Return the narrowest type for all tokens; `vocab_size` is that of the tokenizer, if there is one."""
    if vocab_size is not None and spec.options.objective != "forecast":
        return np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
    widest = np.dtype("uint8")
    if spec.options.objective is not None and _first_is(spec.sources[0], spec.options, "f"):
        return np.dtype("float32")
    for path in (path for source in (*spec.sources, *spec.eval_sources) for path in source.files):
        suffix, name = path.suffix.lower(), "uint8"
        if suffix == ".npy":
            name = str(load_array(path).dtype)
        elif ".bin" in path.suffixes[-2:]:
            name = spec.options.bin_dtype
        elif (
            suffix in _CONTAINERS
            and spec.options.format == "auto"
            and _first_is(DataSource(str(path), (path,)), spec.options, "iu")
        ):
            name = "uint32"
        dtype = np.dtype(name if name in ("uint8", "uint16") else "uint32")
        widest = max(widest, dtype, key=lambda d: d.itemsize)
    return widest


def _first_is(source: DataSource, options: ReadOptions, kinds: str) -> bool:
    """Return whether the first document of a source is an array of one of some kinds of numbers."""
    root = Path(source.name).expanduser()
    for path in source.files:
        with closing(DocumentReader(options).read(path, root if root.is_dir() else None)) as documents:
            first = next(documents, None)
        if first is not None:
            return isinstance(first.content, np.ndarray) and first.content.dtype.kind in kinds
    return False


def _split(tokens: Tokens, writer: _TokenWriter, spec: StoreSpec) -> NDArray[np.int64]:
    """Return segments as (N, 5): start, length, source, label, held out."""
    size = max(_BLOCK, 4 * spec.context)
    if len(writer.documents) < 64:  # With few documents, hold out smaller blocks of them.
        size = min(size, max(writer.position // 64, 2 * spec.context))
    blocks: list[_Block] = []
    for document in writer.documents:
        whole = spec.options.labeled and spec.options.objective != "tag"
        if whole or document.source >= len(spec.sources) or document.length < 2 * size:
            blocks.append(document)
            continue
        end = document.start + document.length
        starts = [document.start + i * size for i in range(document.length // size)]
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            content = hashlib.blake2b(np.ascontiguousarray(tokens[start:stop], writer.dtype).tobytes(), digest_size=8)
            digest = int.from_bytes(content.digest(), "big")
            blocks.append(document._replace(start=start, length=stop - start, digest=digest))
    sides = zip(blocks, _held_out(blocks, writer.documents, spec), strict=True)
    segments = []
    for (_, held_out), pairs in groupby(sides, key=lambda pair: (pair[0].document, pair[1])):
        first, *others = (block for block, _ in pairs)
        if held_out is not None:
            length = first.length + sum(block.length for block in others)
            segments.append([first.start, length, first.source, first.label, int(held_out)])
    return np.array(segments, dtype=np.int64).reshape(-1, 5)


def _held_out(blocks: Sequence[_Block], documents: Sequence[_Block], spec: StoreSpec) -> list[bool | None]:
    """Return whether each block is held out; None drops training data that is also in the evaluation data."""
    num_sources = len(spec.sources)
    if spec.eval_sources:
        evaluated = {document.digest for document in documents if document.source >= num_sources}
        return [
            True if block.source >= num_sources else None if documents[block.document].digest in evaluated else False
            for block in blocks
        ]
    if spec.held_out == 0:
        return [False] * len(blocks)
    digests = {block.digest for block in blocks}
    if len(digests) < 2:
        total = sum(block.length for block in blocks)
        if total >= 4 * spec.context:
            raise ValueError(
                f"the data ({total} tokens) repeats one block, so that no part of it can be held out: "
                "add data, or use --held-out 0"
            )
        raise ValueError(
            f"the data is too small to hold out a part of it: {total} tokens with a context of {spec.context}; "
            f"at least {4 * spec.context} are required: lower --context, add data, or use --held-out 0"
        )
    limit = int(spec.held_out * 2**64)
    chosen = {digest for digest in digests if digest < limit} or {min(digests)}
    if chosen == digests:
        chosen.remove(max(chosen))
    return [block.digest in chosen for block in blocks]
