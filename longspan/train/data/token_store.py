"""A run's tokens: written once into one file that is mapped into memory, and split by content.

    tokens.bin      every document, end to end
    segments.npy    (N, 5) int64: start, length, source, label, held out; runs of tokens that are read as one document
    store.json      what is in them; written last, so that a store without it is not one

What is held out is chosen by a hash of the content: of the whole document, or, where a document is long, of each block
of it. The same content is therefore on the same side wherever and however often it stands, and whatever its name.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from longspan.generation.tokenization import load_tokenizer
from longspan.train.data.readers import Reading, Source, Tokens, documents, kind_of

TOKENS, SEGMENTS, STORE = "tokens.bin", "segments.npy", "store.json"
FORMAT = 1
_BLOCK = 1 << 16  # tokens of a long document that are held out or trained on together
Note = Callable[[str], None]


@dataclass(frozen=True)
class Segments:
    """Runs of tokens that belong together: start and length in the store, source, label (−1 without), all (N,)."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    source: NDArray[np.int64]
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        return int(self.length.sum())

    @property
    def longest(self) -> int:
        return int(self.length.max()) if len(self) else 0

    def of_source(self, source: int) -> Segments:
        return self.take(np.flatnonzero(self.source == source))

    def take(self, index: NDArray[np.int64]) -> Segments:
        return Segments(self.start[index], self.length[index], self.source[index], self.label[index])


@dataclass(frozen=True)
class Store:
    """tokens: mapped, never loaded whole. about: what store.json says."""

    tokens: Tokens
    train: Segments
    held_out: Segments
    about: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.about["vocab_size"])

    @property
    def labels(self) -> list[str]:
        return list(self.about["labels"])

    @property
    def bytes_per_token(self) -> float | None:
        """None where the data came as tokens, whose bytes nobody knows."""
        return self.about["bytes"] / self.about["tokens"] if self.about["bytes"] else None


@dataclass(frozen=True)
class Plan:
    """What a store is made of. held_out: the share that is not trained on, unless eval_sources say what is scored."""

    sources: tuple[Source, ...]
    eval_sources: tuple[Source, ...]
    reading: Reading
    tokenizer: Path | None
    context: int
    held_out: float

    def key(self) -> str:
        """Changes when anything does that the store depends on."""
        files = [
            [str(path), path.stat().st_size, path.stat().st_mtime_ns]
            for source in (*self.sources, *self.eval_sources)
            for path in source.files
        ]
        weights = [[s.name, s.weight] for s in self.sources], [s.name for s in self.eval_sources]
        tokenizer = None if self.tokenizer is None else hashlib.sha256(self.tokenizer.read_bytes()).hexdigest()
        parts = [FORMAT, files, weights, vars(self.reading), tokenizer, self.context, self.held_out]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def open_store(folder: Path, plan: Plan, note: Note = lambda text: None) -> Store:
    """The store in `folder`, made if it is not there or is of other data."""
    key = plan.key()
    description = folder / STORE
    try:
        if json.loads(description.read_text())["key"] == key:
            return _open(folder)
    except (FileNotFoundError, ValueError, KeyError):
        pass
    folder.mkdir(parents=True, exist_ok=True)
    description.unlink(missing_ok=True)
    about = _write(folder, plan, note) | {"key": key}
    beside = folder / f".{STORE}"
    beside.write_text(json.dumps(about, indent=1) + "\n")
    os.replace(beside, description)
    return _open(folder)


def _open(folder: Path) -> Store:
    about = json.loads((folder / STORE).read_text())
    tokens = np.memmap(folder / TOKENS, dtype=about["dtype"], mode="r")
    table = np.load(folder / SEGMENTS, mmap_mode="r")
    held = np.asarray(table[:, 4], dtype=bool)
    train, held_out = (Segments(*(np.array(table[side, i]) for i in range(4))) for side in (~held, held))
    return Store(tokens, train, held_out, about)


def _write(folder: Path, plan: Plan, note: Note) -> dict[str, Any]:
    sources = (*plan.sources, *plan.eval_sources)
    encode = _encoder(plan)
    with open(folder / TOKENS, "wb") as file:
        writer = _Writer(file, _dtype(plan))
        for number, source in enumerate(sources):
            root, before = Path(source.name).expanduser(), writer.place
            for count, path in enumerate(source.files, 1):
                if count % 1000 == 0:
                    note(f"reading {source.name}: {count} of {len(source.files)} files")
                for piece in documents(path, root if root.is_dir() else None, plan.reading):
                    writer.add(encode(path, piece.content, piece.last), piece.last, number, piece.label)
                    writer.bytes += len(piece.content) if isinstance(piece.content, bytes) else 0
            if writer.place == before:
                raise ValueError(f"--data {source.name} is empty: {len(source.files)} files without a byte")
    kinds = {kind_of(path) == "tokens" for source in sources for path in source.files}
    if plan.tokenizer is None and kinds == {True, False}:
        raise ValueError(
            "files of tokens (.npy, .bin) and files of bytes are mixed: their numbers mean different things; "
            "give --tokenizer, the one the tokens were made with, or leave one kind out"
        )
    table = _split(np.memmap(folder / TOKENS, dtype=writer.dtype, mode="r"), writer, plan)
    np.save(folder / SEGMENTS, table)
    counts = [int(table[table[:, 2] == i, 1].sum()) for i in range(len(sources))]
    vocabulary = getattr(encode, "vocab_size", None) or max(writer.largest + 1, 1 if kinds == {True} else 256)
    return {
        "format": FORMAT,
        "dtype": str(writer.dtype),
        "vocab_size": vocabulary,
        "labels": list(writer.labels),
        "tokens": writer.place,
        "bytes": 0 if True in kinds else writer.bytes,
        "documents": len(writer.documents),
        "sha256": writer.digest.hexdigest(),
        "sources": [
            {"name": source.name, "weight": source.weight, "tokens": count, "files": len(source.files)}
            for source, count in zip(sources, counts, strict=True)
        ],
    }


class _Writer:
    """Documents, end to end into a file: where each lies, and a hash of each."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]) -> None:
        self.dtype, self.file = dtype, file
        self.place = self.bytes = self.largest = 0
        self.documents: list[tuple[int, int, int, int]] = []
        self.hashes: list[int] = []
        self.labels: dict[str, int] = {}
        self.digest = hashlib.sha256()
        self.begun, self.hash = 0, hashlib.blake2b(digest_size=8)

    def add(self, tokens: Tokens, last: bool, source: int, label: str | None) -> None:
        if len(tokens):
            smallest, largest = int(tokens.min()), int(tokens.max())
            if smallest < 0 or largest > np.iinfo(self.dtype).max:
                raise ValueError(f"tokens must lie in 0 … {np.iinfo(self.dtype).max}, got {smallest} … {largest}")
            self.largest = max(self.largest, largest)
            raw = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
            self.file.write(raw)
            self.hash.update(raw)
            self.digest.update(raw)
            self.place += len(tokens)
        if last and self.place > self.begun:
            number = -1 if label is None else self.labels.setdefault(label, len(self.labels))
            self.documents.append((self.begun, self.place - self.begun, source, number))
            self.hashes.append(int.from_bytes(self.hash.digest(), "big"))
            self.digest.update(b"\0end")
            self.begun, self.hash = self.place, hashlib.blake2b(digest_size=8)


def _split(tokens: Tokens, writer: _Writer, plan: Plan) -> NDArray[np.int64]:
    """(N, 5): start, length, source, label, held out."""
    block = max(_BLOCK, 4 * plan.context)
    if len(writer.documents) < 64:  # Too few to choose among: smaller parts of them will do.
        block = min(block, max(writer.place // 64, 2 * plan.context))
    units: list[tuple[int, int, int, int, int]] = []  # document, start, length, hash, source
    for number, ((start, length, source, _), digest) in enumerate(zip(writer.documents, writer.hashes, strict=True)):
        pieces = 1 if plan.reading.labeled or source >= len(plan.sources) else max(1, length // block)
        if pieces == 1 or length < 2 * block:
            units.append((number, start, length, digest, source))
            continue
        for i in range(pieces):
            begin, end = start + i * block, start + (length if i == pieces - 1 else (i + 1) * block)
            content = hashlib.blake2b(np.ascontiguousarray(tokens[begin:end]).tobytes(), digest_size=8)
            units.append((number, begin, end - begin, int.from_bytes(content.digest(), "big"), source))
    held = _held_out(units, writer.hashes, plan)
    rows: list[list[int]] = []
    previous: tuple[int, bool] | None = None
    for (number, start, length, _, source), aside in zip(units, held, strict=True):
        if aside is None:
            previous = None  # Also in the data to be scored: in neither part of the data to be trained on.
            continue
        if previous == (number, aside):
            rows[-1][1] += length
        else:
            rows.append([start, length, source, writer.documents[number][3], int(aside)])
        previous = number, aside
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def _held_out(
    units: Sequence[tuple[int, int, int, int, int]], hashes_of: Sequence[int], plan: Plan
) -> list[bool | None]:
    own = len(plan.sources)
    if plan.eval_sources:
        scored = {hashes_of[number] for number, *_, source in units if source >= own}
        return [
            True if source >= own else (None if hashes_of[number] in scored else False) for number, *_, source in units
        ]
    if plan.held_out == 0:
        return [False] * len(units)
    hashes = {digest for *_, digest, _ in units}
    if len(hashes) < 2:
        total = sum(length for _, _, length, _, _ in units)
        if total >= 4 * plan.context:
            raise ValueError(
                f"the data ({total} tokens) is one thing over and over, and no part of it can be held out: "
                "add data, or use --held-out 0"
            )
        raise ValueError(
            f"the data is too small to hold a part of it out: {total} tokens for a context of {plan.context}; "
            f"it needs {4 * plan.context} at least: lower --context, add data, or use --held-out 0"
        )
    limit = int(plan.held_out * 2**64)
    aside = {digest for digest in hashes if digest < limit} or {min(hashes)}
    if aside == hashes:
        aside.remove(max(aside))
    return [digest in aside for *_, digest, _ in units]


def _dtype(plan: Plan) -> np.dtype[Any]:
    """The narrowest that holds every token; files of tokens say it themselves."""
    if plan.tokenizer is not None:
        return np.dtype("uint16" if load_tokenizer(plan.tokenizer).get_vocab_size() <= 1 << 16 else "uint32")
    found = np.dtype("uint8")
    for source in (*plan.sources, *plan.eval_sources):
        for path in source.files:
            if kind_of(path) == "tokens":
                name = plan.reading.bin_dtype
                if path.suffix == ".npy":
                    name = str(np.load(path, mmap_mode="r", allow_pickle=False).dtype)
                own = np.dtype(name if name in ("uint8", "uint16") else "uint32")
                found = max(found, own, key=lambda d: d.itemsize)
    return found


def _encoder(plan: Plan) -> Callable[[Path, bytes | Tokens, bool], Tokens]:
    if plan.tokenizer is not None:
        return _Encoder(plan.tokenizer)
    return lambda path, content, last: np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content


class _Encoder:
    """Text to tokens, cut at line ends so that a file is never held whole."""

    def __init__(self, tokenizer: Path) -> None:
        self.name, self.tokenizer = tokenizer, load_tokenizer(tokenizer)
        self.vocab_size: int = self.tokenizer.get_vocab_size()
        self.text, self.read, self.decoder = "", 0, _decoder()

    def __call__(self, path: Path, content: bytes | Tokens, last: bool) -> Tokens:
        if not isinstance(content, bytes):
            return content
        try:
            self.text += self.decoder.decode(content, last)
        except UnicodeDecodeError as error:
            where = self.read + error.start
            raise ValueError(
                f"{path} is not UTF-8 text at byte {where} (0x{error.object[error.start]:02x}), which "
                f"{self.name} cannot read: convert the file, or leave --tokenizer out to train on bytes"
            ) from None
        self.read += len(content)
        cut = len(self.text) if last else self.text.rfind("\n") + 1
        text, self.text = self.text[:cut], self.text[cut:]
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids if text else []
        if last:
            self.text, self.read, self.decoder = "", 0, _decoder()
        return np.asarray(ids, dtype=np.int64)


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("strict")


def unigram_bits(store: Store) -> float | None:
    """Bits a byte of the best model that knows how often each token comes and nothing else, scored on what is held out.

    Frequencies are those of the training data, one added to each.
    """
    if not len(store.held_out) or store.bytes_per_token is None:
        return None
    seen = 1.0 + _counts(store, store.train)
    scored = _counts(store, store.held_out)
    bits = -(scored * np.log2(seen / seen.sum())).sum()
    return float(bits / scored.sum() / store.bytes_per_token)


def _counts(store: Store, segments: Segments) -> NDArray[np.int64]:
    counts = np.zeros(store.vocab_size, np.int64)
    for start, length in zip(segments.start, segments.length, strict=True):
        for piece in _pieces(store.tokens, int(start), int(length)):
            counts += np.bincount(piece, minlength=store.vocab_size)
    return counts


def _pieces(tokens: Tokens, start: int, length: int, size: int = 1 << 22) -> Iterator[Tokens]:
    for begin in range(start, start + length, size):
        yield tokens[begin : min(begin + size, start + length)]
