"""Store the tokens of a run in one memory-mapped file, split by content into training and held-out data.

    tokens.bin      the tokens of all documents, concatenated
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.generation.tokenization import load_tokenizer
from longspan.models.checkpoint import CHECKSUMS, replace_folder, verify_checksums, write_checksums
from longspan.train.data.readers import DataSource, ReadOptions, Tokens, file_kind, load_array, read_documents

TOKENS, SEGMENTS, STORE = "tokens.bin", "segments.npy", "store.json"
FORMAT = 1
_BLOCK = 1 << 16  # length of the blocks that a long document is split into
_COUNT_CHUNK = 1 << 22


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
    """

    tokens: Tokens
    train: Segments
    held_out: Segments
    metadata: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.metadata["vocab_size"])

    @property
    def labels(self) -> list[str]:
        return list(self.metadata["labels"])

    @property
    def bytes_per_token(self) -> float | None:
        """Mean length of a token in bytes; None if the data was read as tokens, so that it is unknown."""
        return self.metadata["bytes"] / self.metadata["tokens"] if self.metadata["bytes"] else None

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a mean loss in nats per token; None if the number of bytes is unknown."""
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token


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
    """

    sources: tuple[DataSource, ...]
    eval_sources: tuple[DataSource, ...]
    options: ReadOptions
    tokenizer: Path | None
    context: int
    held_out: float

    def key(self) -> str:
        """Return a hash of everything that the content of the store depends on."""
        files = [
            [str(path), path.stat().st_size, path.stat().st_mtime_ns]
            for source in (*self.sources, *self.eval_sources)
            for path in source.files
        ]
        weights = [[s.name, s.weight] for s in self.sources], [s.name for s in self.eval_sources]
        tokenizer = None if self.tokenizer is None else hashlib.sha256(self.tokenizer.read_bytes()).hexdigest()
        parts = [FORMAT, files, weights, vars(self.options), tokenizer, self.context, self.held_out]
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
        names = (TOKENS, SEGMENTS, STORE, CHECKSUMS)
        with replace_folder(folder, names, mark=STORE, what="a token store") as partial:
            metadata = _build(partial, spec, progress) | {"key": key}
            _check_digest(metadata, sha256)
            (partial / STORE).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
            write_checksums(partial)
    elif verify:
        verify_checksums(folder, (TOKENS, SEGMENTS, STORE), f"remove {folder}, and the data is read again")
    store = _open(folder)
    _check_digest(store.metadata, sha256)
    return store


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
    tokens = np.memmap(folder / TOKENS, dtype=metadata["dtype"], mode="r")
    table = np.load(folder / SEGMENTS, mmap_mode="r")
    held_out = np.asarray(table[:, 4], dtype=bool)
    train, evaluation = (Segments(*(np.array(table[side, i]) for i in range(4))) for side in (~held_out, held_out))
    return TokenStore(tokens, train, evaluation, metadata)


def _build(folder: Path, spec: StoreSpec, progress: Callable[[str], None]) -> dict[str, Any]:
    """Write tokens and segments; return the description of the store."""
    sources = (*spec.sources, *spec.eval_sources)
    encoder = _DocumentEncoder(spec.tokenizer)
    with open(folder / TOKENS, "wb") as file:
        writer = _TokenWriter(file, _token_dtype(spec, encoder.vocab_size))
        for index, source in enumerate(sources):
            root, before = Path(source.name).expanduser(), writer.position
            for count, path in enumerate(source.files, 1):
                if count % 1000 == 0:
                    progress(f"reading {source.name}: {count} of {len(source.files)} files")
                for chunk in read_documents(path, root if root.is_dir() else None, spec.options):
                    writer.add(encoder.encode(path, chunk.content, chunk.last), chunk.last, index, chunk.label)
                    writer.num_bytes += len(chunk.content) if isinstance(chunk.content, bytes) else 0
            if writer.position == before:
                raise ValueError(f"--data {source.name} is empty: 0 bytes in {len(source.files)} files")
    kinds = {file_kind(path) == "tokens" for source in sources for path in source.files}
    if spec.tokenizer is None and kinds == {True, False}:
        raise ValueError(
            "token files (.npy, .bin) and other files are mixed, which assigns two meanings to each token: "
            "give the --tokenizer that the token files were made with, or remove one kind"
        )
    table = _split(np.memmap(folder / TOKENS, dtype=writer.dtype, mode="r"), writer, spec)
    np.save(folder / SEGMENTS, table)
    counts = [int(table[table[:, 2] == i, 1].sum()) for i in range(len(sources))]
    return {
        "format": FORMAT,
        "dtype": str(writer.dtype),
        "vocab_size": encoder.vocab_size or max(writer.largest + 1, 1 if kinds == {True} else 256),
        "labels": list(writer.labels),
        "tokens": writer.position,
        "bytes": 0 if True in kinds else writer.num_bytes,
        "documents": len(writer.documents),
        "sha256": writer.digest.hexdigest(),
        "sources": [
            {"name": source.name, "weight": source.weight, "tokens": count, "files": len(source.files)}
            for source, count in zip(sources, counts, strict=True)
        ],
    }


class _Block(NamedTuple):
    """A document or a block of a long one: the unit that is held out or not."""

    document: int
    start: int
    length: int
    digest: int
    source: int
    label: int


class _TokenWriter:
    """Appends documents to a file and records the position and hash of each."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]) -> None:
        self.file, self.dtype = file, dtype
        self.position = self.num_bytes = self.largest = 0
        self.documents: list[_Block] = []
        self.labels: dict[str, int] = {}
        self.digest = hashlib.sha256()
        self._start, self._hash = 0, hashlib.blake2b(digest_size=8)

    def add(self, tokens: Tokens, last: bool, source: int, label: str | None) -> None:
        if len(tokens):
            smallest, largest, limit = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype).max
            if smallest < 0 or largest > limit:
                raise ValueError(f"tokens must be in the range 0 to {limit}, got {smallest} to {largest}")
            self.largest = max(self.largest, largest)
            raw = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
            self.file.write(raw)
            self._hash.update(raw)
            self.digest.update(raw)
            self.position += len(tokens)
        if last and self.position > self._start:
            digest = int.from_bytes(self._hash.digest(), "big")
            index = -1 if label is None else self.labels.setdefault(label, len(self.labels))
            length = self.position - self._start
            self.documents.append(_Block(len(self.documents), self._start, length, digest, source, index))
            self.digest.update(b"\0end")
            self._start, self._hash = self.position, hashlib.blake2b(digest_size=8)


class _DocumentEncoder:
    """Converts documents to tokens chunk by chunk; with a tokenizer, text is cut at line ends."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.tokenizer = None if path is None else load_tokenizer(path)
        self.vocab_size = None if self.tokenizer is None else int(self.tokenizer.get_vocab_size())
        self._reset()

    def _reset(self) -> None:
        self._text, self._bytes_read = "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def encode(self, path: Path, content: bytes | Tokens, last: bool) -> Tokens:
        if not isinstance(content, bytes):
            return content
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
    if vocab_size is not None:
        return np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
    widest = np.dtype("uint8")
    for path in (path for source in (*spec.sources, *spec.eval_sources) for path in source.files):
        if file_kind(path) == "tokens":
            name = spec.options.bin_dtype
            if path.suffix == ".npy":
                name = str(load_array(path).dtype)
            dtype = np.dtype(name if name in ("uint8", "uint16") else "uint32")
            widest = max(widest, dtype, key=lambda d: d.itemsize)
    return widest


def _split(tokens: Tokens, writer: _TokenWriter, spec: StoreSpec) -> NDArray[np.int64]:
    """Return segments as (N, 5): start, length, source, label, held out."""
    size = max(_BLOCK, 4 * spec.context)
    if len(writer.documents) < 64:  # With few documents, hold out smaller blocks of them.
        size = min(size, max(writer.position // 64, 2 * spec.context))
    blocks: list[_Block] = []
    for document in writer.documents:
        if spec.options.labeled or document.source >= len(spec.sources) or document.length < 2 * size:
            blocks.append(document)
            continue
        end = document.start + document.length
        starts = [document.start + i * size for i in range(document.length // size)]
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            content = hashlib.blake2b(np.ascontiguousarray(tokens[start:stop]).tobytes(), digest_size=8)
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
