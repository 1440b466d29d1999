"""Find and read training data: files, folders and globs of text, tables, sequences, images, audio, arrays or tokens."""

from __future__ import annotations

import csv
import glob
import io
import math
import os
import re
import struct
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from longspan.train.data import tables
from longspan.train.data.chat import read_messages
from longspan.train.data.containers import CHUNK, COMPRESSED, Entry, UnreadableError, open_entries, refusal
from longspan.train.data.tasks import read_label

Tokens = NDArray[Any]

FASTA = (".fa", ".fasta", ".fna", ".faa", ".ffn")
FASTQ = (".fq", ".fastq")
CONLL = (".conll", ".conllu", ".iob", ".bio")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_BOMS = (b"\xff\xfe", b"\xfe\xff")
_IMAGE_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")
_MAX_IMAGE = 1 << 28  # bytes of an encoded image
_MAX_AUDIO = 1 << 31  # bytes of a recording


class Chat(NamedTuple):
    """A conversation, which the template of the tokenizer turns into text."""

    messages: list[dict[str, Any]]


class Tagged(NamedTuple):
    """A text with a class for some of its characters: from, to (excluded), and the class."""

    text: str
    spans: list[tuple[int, int, str]]


class DocumentChunk(NamedTuple):
    """A consecutive part of a document; `last` marks the end of the document.

    content: Bytes, tokens (T,), vectors (T, C) as float32, a conversation, or a text with classes.
    label: The label of the document as `read_label` returns it; of vectors, a class for each of them.
    """

    content: bytes | Tokens | Chat | Tagged
    last: bool
    label: Any = None


@dataclass(frozen=True)
class DataSource:
    """The files of one `--data` argument, and its sampling weight (None: proportional to its size)."""

    name: str
    files: tuple[Path, ...]
    weight: float | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How to read files.

    Args:
        extensions: Extensions to read from folders. Empty: all.
        exclude: Patterns of file and folder names to skip inside folders.
        bin_dtype: Integer type of `.bin` files.
        image_size: Width and height to resize images to. None: keep their size.
        labeled: Read a label with each document: the name of its class folder, or a column of a table.
        format: "auto", or "bytes" to read the bytes of every file as they are.
        text_field: Column of a table with the text, the tokens or the messages. None: guess.
        label_field: Columns of a table with the labels. Empty: guess.
        file_field: Column of a table that names files to read, relative to the table. None: rows are documents.
        task: The supervised task, if it is another one than classification.
    """

    extensions: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    bin_dtype: str = "uint16"
    image_size: int | None = None
    labeled: bool = False
    format: str = "auto"
    text_field: str | None = None
    label_field: tuple[str, ...] = ()
    file_field: str | None = None
    task: str | None = None

    @property
    def objective(self) -> str | None:
        """The supervised task."""
        return self.task or ("classify" if self.labeled else None)

    def identity(self) -> dict[str, Any]:
        """Return the options that data is identified by; those that were added later only if they are set."""
        added = ("format", "text_field", "label_field", "file_field", "task")
        defaults = ReadOptions()
        return {name: x for name, x in vars(self).items() if name not in added or x != getattr(defaults, name)}


def find_source(text: str, options: ReadOptions) -> DataSource:
    """Return the files that `path`, `glob` or `weight=path` refers to.

    Raises:
        ValueError: The weight is 0, a folder contains no matching file, or the path is a device, pipe or socket.
        FileNotFoundError: There is no such file or folder, or no file matches the glob.
    """
    match = re.match(r"^(\d+(?:\.\d*)?|\.\d+)=(.+)$", text)
    weight, name = (float(match[1]), match[2]) if match else (None, text)
    if weight is not None and not 0 < weight < math.inf:
        raise ValueError(f"--data {text}: a weight must be above 0 and finite; to leave a source out, remove it")
    if not name or "\0" in name:
        raise ValueError(f"--data {text!r} is not a path: give a file, folder or glob")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"--data {name}: {error}") from None
    if path.is_dir():
        dataset = tables.dataset_files(path)
        files = _files_in(path, options) if dataset is None else dataset
        if not files:
            kind = f" with extension {', '.join(options.extensions)}" if options.extensions else ""
            raise ValueError(f"--data {name}: the folder contains no files{kind}")
    elif path.is_file():
        files = [path]
    elif path.exists():
        raise ValueError(f"--data {name}: this is a device, pipe or socket, not a file: write its content to a file")
    else:
        files = [p for p in sorted(map(Path, glob.glob(str(path), recursive=True))) if p.is_file()]
        if not files:
            problem = "no file matches this pattern" if glob.has_magic(name) else "no such file or folder"
            raise FileNotFoundError(f"--data {name}: {problem}")
    return DataSource(name, tuple(files), weight)


class DocumentReader:
    """Reads the files of a source.

    Args:
        options: How to read files.

    Attributes:
        kinds: What documents were read as, with their number.
        skipped: Why files were not read, one line for each.
        incomplete: How many rows of tables were left out because they have no text or no label.
        label_columns: The columns of labels in the last table.
        channels: The names of the columns that were read as vectors.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.kinds: Counter[str] = Counter()
        self.skipped: list[str] = []
        self.incomplete = 0
        self.label_columns: tuple[str, ...] = ()
        self.channels: tuple[str, ...] = ()

    def read(self, path: Path, root: Path | None) -> Generator[DocumentChunk]:
        """Yield the documents of a file or archive in chunks of at most a few megabytes.

        Args:
            path: The file.
            root: The folder it was found in. The first subfolder below it is the label of a labeled document.

        Raises:
            ValueError: A file is damaged, or a label is missing.
        """
        relative = None if root is None else path.relative_to(root)
        try:
            with closing(open_entries(path, lambda name: _is_included(name, self.options))) as entries:
                for entry in entries:
                    yield from self.read_entry(entry, relative)
        except (FileNotFoundError, PermissionError):
            raise
        except (OSError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def read_entry(self, entry: Entry, relative: Path | None) -> Iterator[DocumentChunk]:
        """Yield the documents of a file or of a member of an archive, as `read` does; what cannot be read is skipped.

        Args:
            entry: The file or member.
            relative: The path of the file or archive in the folder it was found in.

        Raises:
            ValueError: The file is damaged, or a label is missing.
        """
        try:
            table = None if self.options.format == "bytes" else _table_kind(entry)
            kind, chunks = self._read_file(entry) if table is None else self._read_table(entry, table)
            by_folder = self.options.labeled and self.options.objective != "tag"
            for chunk in chunks:
                if by_folder and chunk.label is None:
                    chunk = chunk._replace(label=self._folder_label(entry, relative))
                yield chunk
                self.kinds[kind] += chunk.last
        except UnreadableError as error:
            self.skipped.append(str(error))
        except UnicodeDecodeError as error:
            raise ValueError(f"{entry.name} is not UTF-8 text: {error}") from None

    def _folder_label(self, entry: Entry, relative: Path | None) -> Any:
        label = _folder_label(entry, relative)
        if self.options.objective == "regress":
            return read_label("regress", [label], ["the name of the folder"])
        return (label,) if self.options.objective == "multilabel" else label

    def _read_file(self, entry: Entry) -> tuple[str, Iterator[DocumentChunk]]:
        """Return what a file is, and its documents."""
        options, head, suffix = self.options, entry.head, entry.suffix
        if suffix == ".npz" and options.objective is not None:
            return "arrays", _read_arrays(entry, options)
        if suffix == ".npy" and options.objective is not None and _is_vectors(entry, options):
            return "vectors", _read_vectors(np.load(entry.seekable(), allow_pickle=False), entry.name)
        if suffix in (".npy", ".bin"):
            return "tokens", _read_array(entry) if suffix == ".npy" else _read_bin(entry, options.bin_dtype)
        if suffix in CONLL and options.objective == "tag":
            return "CoNLL", _read_conll(entry)
        if suffix in IMAGES or (head.startswith(_IMAGE_MAGIC) and options.format == "auto"):
            return "images", iter([DocumentChunk(_read_pixels(entry, options.image_size), True)])
        if suffix in FASTA:
            return "FASTA", _read_fasta(entry)
        if options.format == "bytes":
            return "bytes", _read_bytes(entry)
        if suffix in FASTQ:
            return "FASTQ", _read_fastq(entry)
        if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
            return "audio, as 8-bit μ-law samples", iter([DocumentChunk(_read_wav(entry), True)])
        why = refusal(entry)
        if suffix == ".npz":
            why = f"{entry.name} has arrays of vectors, which are for --objective classify, multilabel, regress and tag"
        if why is not None:
            raise UnreadableError(why)
        return "text", _read_utf16(entry) if head.startswith(_BOMS) else _read_bytes(entry)

    def _read_table(self, entry: Entry, kind: str) -> tuple[str, Iterator[DocumentChunk]]:
        options = self.options
        if kind == "JSON":  # It may turn out to be a file of settings, which is text.
            entry = replace(entry, stream=entry.seekable())
        rows = tables.read_rows(entry, kind)
        if options.objective == "forecast":
            return self._read_series(entry, kind, rows, ())
        labels: tuple[str, ...] = ()
        if options.labeled:
            labels, rows = tables.choose_labels(rows, entry.name, options.label_field, required=options.task == "tag")
            self.label_columns = labels
        if options.file_field is not None:
            return f'{kind}, files in field "{options.file_field}"', self._read_files(rows, labels, entry)
        tagged = options.objective == "tag"
        columns, rows = tables.choose_columns(
            rows, entry.name, options.text_field, whole=kind == "JSON", words=tagged, others=labels
        )
        if columns is None and options.objective in ("classify", "multilabel", "regress", "tag"):
            return self._read_series(entry, kind, rows, labels)
        if columns is None and kind == "JSON":
            entry.stream.seek(0)
            return "text", _read_bytes(entry)
        if columns is None:
            raise UnreadableError(
                f"{entry.name} has no field of text, tokens or messages: name it with --text-field, train on the "
                "bytes of the file with --format bytes, or on numbers with --objective forecast"
            )
        classes = None
        if entry.path is not None and len(labels) == 1:
            classes = tables.class_names(entry.path.parent).get(labels[0])
        return f"{kind}, {columns}", self._read_rows(rows, columns, labels, classes, entry.name)

    def _read_series(
        self, entry: Entry, kind: str, rows: Iterator[tables.Row], labels: Sequence[str]
    ) -> tuple[str, Iterator[DocumentChunk]]:
        """Return a table of numbers as one document: a vector in each row."""
        if labels and self.options.objective != "tag":
            raise UnreadableError(
                f"{entry.name} has labels in {', '.join(labels)}, and no text beside them: name it with --text-field, "
                "or the column of files with --file-field"
            )
        channels, rows = tables.choose_channels(rows, entry.name, self.options.text_field, labels)
        self.channels = tuple(channels)
        shown = ", ".join(f'"{name}"' for name in channels[:8]) + (", …" if len(channels) > 8 else "")
        return f"{kind}, vectors of {shown}", _read_series(rows, channels, labels, entry.name)

    def _read_rows(
        self,
        rows: Iterator[tables.Row],
        columns: tables.Columns,
        labels: Sequence[str],
        classes: Sequence[str] | None,
        name: str,
    ) -> Iterator[DocumentChunk]:
        for number, row in enumerate(rows, 1):
            values = [row.get(column) for column in columns.names]
            try:
                empty = any(values[i] in (None, "", []) for i in (0, -1))
                label: Any = None if empty else self._label(row, labels, classes)
                if empty or (labels and label is None):
                    self.incomplete += 1
                    continue
                if self.options.objective == "tag":
                    yield DocumentChunk(_tagged(values[0], label), True, ())
                else:
                    yield DocumentChunk(_row_content(values, columns.kind), True, label)
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{name}, row {number}: {error}") from None

    def contents(self, entry: Entry, kind: str) -> Iterator[tuple[tables.Row, bytes | Tokens | str]] | None:
        """Return the rows of a table with what a model reads of each, labels aside; None for a table of vectors."""
        rows = tables.read_rows(entry, kind)
        if self.options.file_field is not None:
            return self._file_contents(rows, entry)
        others = self.options.label_field
        tagged = self.options.objective == "tag"
        columns, rows = tables.choose_columns(rows, entry.name, self.options.text_field, words=tagged, others=others)
        return None if columns is None else self._row_contents(rows, columns)

    def _row_contents(
        self, rows: Iterator[tables.Row], columns: tables.Columns
    ) -> Iterator[tuple[tables.Row, bytes | Tokens | str]]:
        for row in rows:
            value = row.get(columns.names[0])
            if self.options.objective == "tag":
                yield row, " ".join(value) if isinstance(value, list) else value or ""
            else:
                content = _row_content([value or ""], columns.kind)
                assert isinstance(content, bytes | np.ndarray)
                yield row, content

    def _file_contents(
        self, rows: Iterator[tables.Row], table: Entry
    ) -> Iterator[tuple[tables.Row, bytes | Tokens | str]]:
        for row in rows:
            parts: list[Any] = [chunk.content for chunk in self._read_files(iter([row]), (), table)]
            yield row, b"".join(parts) if parts and isinstance(parts[0], bytes) else np.concatenate(parts)

    def _label(self, row: tables.Row, labels: Sequence[str], classes: Sequence[str] | None = None) -> Any:
        if not labels:
            return None
        values = [row.get(column) for column in labels]
        if classes is not None:
            values = [classes[x] if type(x) is int and 0 <= x < len(classes) else x for x in values]
        return read_label(self.options.objective or "classify", values, labels)

    def _read_files(self, rows: Iterator[tables.Row], labels: Sequence[str], table: Entry) -> Iterator[DocumentChunk]:
        """Yield the documents of the files that a table names."""
        if table.path is None:
            raise ValueError(f"{table.name}: --file-field needs a table outside of archives")
        for number, row in enumerate(rows, 1):
            value = row.get(cast("str", self.options.file_field))
            path = table.path.parent / str(value or "")
            if not path.is_file():
                raise ValueError(f"{table.name}, row {number}: {self.options.file_field} is {value!r}, not a file")
            try:
                label = self._label(row, labels)
            except ValueError as error:
                raise ValueError(f"{table.name}, row {number}: {error}") from None
            with closing(open_entries(path, lambda name: False)) as entries:
                for entry in entries:
                    for chunk in self._read_named(entry):
                        yield chunk._replace(label=label)

    def _read_named(self, entry: Entry) -> Iterator[DocumentChunk]:
        """Yield the document of a file that a table names; a table of numbers is a series of vectors."""
        kind = _table_kind(entry)
        if kind in (None, "JSON", "JSON lines"):
            return self._read_file(entry)[1]
        return self._read_series(entry, str(kind), tables.read_rows(entry, str(kind)), ())[1]


class MappedFile(NamedTuple):
    """A file whose content is tokens as they are: `size` numbers of type `dtype` from byte `offset` on."""

    path: str
    dtype: str
    offset: int
    size: int


def map_file(path: Path, options: ReadOptions, *, text: bool) -> MappedFile | None:
    """Return where the tokens of a file are, if they need not be converted; None if they must be.

    Args:
        path: The file.
        options: How to read it.
        text: Whether the bytes of texts are tokens.
    """
    name = os.path.abspath(path)
    if path.suffix.lower() == ".npy":
        array = load_array(path)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.flags.c_contiguous:
            return None
        return MappedFile(name, array.dtype.str, cast("Any", array).offset, array.size)
    size = path.stat().st_size
    if path.suffix.lower() == ".bin":
        dtype = np.dtype(options.bin_dtype)
        return None if size % dtype.itemsize else MappedFile(name, dtype.str, 0, size // dtype.itemsize)
    with closing(open_entries(path, lambda member: False)) as entries:
        entry = next(entries, None) if text else None
        if entry is None or entry.path is None or entry.head.startswith(_BOMS):
            return None
        plain = entry.suffix not in (*FASTA, *FASTQ, *IMAGES) and not entry.head.startswith((*_IMAGE_MAGIC, b"RIFF"))
        is_text = options.format == "bytes" or (_table_kind(entry) is None and refusal(entry) is None)
        return MappedFile(name, "|u1", 0, size) if plain and is_text else None


def load_array(path: Path) -> Tokens:
    """Map a `.npy` file into memory.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # The header is parsed as Python.
        raise ValueError(f"{path} is not a .npy file that can be read: {error}") from None


def _files_in(folder: Path, options: ReadOptions) -> list[Path]:
    extensions = _extensions(options)

    def included(name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in (".*", "__pycache__", *options.exclude))

    found = []
    seen: set[tuple[int, int]] = set()
    pending = [str(folder)]
    while pending:
        links = []
        for start in pending:
            for parent, folders, files in os.walk(start):
                status = os.stat(parent)
                if (status.st_dev, status.st_ino) in seen:  # Links may lead in circles.
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                folders[:] = filter(included, folders)
                links += [link for name in folders if os.path.islink(link := os.path.join(parent, name))]
                for path in (Path(parent) / name for name in filter(included, files)):
                    if path.is_file() and (not extensions or _suffixes(path) & extensions):
                        found.append(path)
        pending = sorted(links)  # Folders that are reached without links come first.
    return sorted(found)


def _is_included(name: str, options: ReadOptions) -> bool:
    """Return whether to read a member of an archive, by the rules for files in folders."""
    path = PurePosixPath(name)
    if any(
        fnmatch(part, pattern) for part in path.parts for pattern in (".*", "__pycache__", "__MACOSX", *options.exclude)
    ):
        return False
    return not options.extensions or bool(_suffixes(path) & _extensions(options))


def _extensions(options: ReadOptions) -> set[str]:
    return {e.lower() if e.startswith(".") else f".{e.lower()}" for e in options.extensions}


def _suffixes(path: Path | PurePosixPath) -> set[str]:
    """Return the extension of a file, and that without a compression: ".gz" and ".txt" of "a.txt.gz"."""
    suffix = path.suffix.lower()
    return {suffix, PurePosixPath(path.stem).suffix.lower()} if suffix in COMPRESSED else {suffix}


def _table_kind(entry: Entry) -> str | None:
    return (
        None if entry.suffix in (".npy", ".npz", ".bin", *FASTA, *FASTQ, *IMAGES, *CONLL) else tables.table_kind(entry)
    )


def _folder_label(entry: Entry, relative: Path | None) -> str:
    if relative is not None and len(relative.parts) > 1:
        return relative.parts[0]
    if entry.folders:
        return entry.folders[-1]
    raise ValueError(
        f"{entry.name} has no label: classification requires a folder with one subfolder per class, or a table with "
        "the columns text and label"
    )


def _read_bytes(entry: Entry) -> Iterator[DocumentChunk]:
    for block, last in _blocks(entry, CHUNK):
        yield DocumentChunk(block, last)


def _blocks(entry: Entry, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yield the content in blocks of `size` bytes, and whether each is the last."""
    block = entry.stream.read(size)
    while block:
        following = entry.stream.read(size)
        yield block, not following
        block = following


def _read_utf16(entry: Entry) -> Iterator[DocumentChunk]:
    yield DocumentChunk(entry.stream.read().decode("utf-16").encode(), True)


def _tagged(value: Any, labels: Sequence[str]) -> Tagged:
    """Return a text with a class for each word, if it is a list of words or there are as many, or each character."""
    words = value if isinstance(value, list) else value.split() if len(value) != len(labels) else list(value)
    if len(words) != len(labels):
        length = "" if isinstance(value, list) else f" and {len(value)} characters"
        raise ValueError(f"{len(labels)} labels do not fit {len(words)} words{length}")
    spans, text, gap = [], "", "" if isinstance(value, str) and len(value) == len(labels) else " "
    for word, label in zip(words, labels, strict=True):
        text += gap if text else ""
        spans.append((len(text), len(text) + len(word), str(label)))
        text += word
    return Tagged(text, spans)


def _read_conll(entry: Entry) -> Iterator[DocumentChunk]:
    """Yield the sentences of a CoNLL file: a word and its columns in each line, the class last; empty lines between."""
    words: list[str] = []
    labels: list[str] = []
    for line in chain(entry.stream, [b""]):
        parts = line.decode().split()
        if len(parts) > 1 and parts[0] != "-DOCSTART-":
            words.append(parts[0])
            labels.append(parts[-1])
        elif words and not parts:
            yield DocumentChunk(_tagged(words, labels), True, ())
            words, labels = [], []


def _is_vectors(entry: Entry, options: ReadOptions) -> bool:
    """Return whether an array is vectors: of numbers that cannot be tokens, or of more than two dimensions."""
    array: Any = load_array(entry.path) if entry.path is not None else np.load(entry.seekable(), allow_pickle=False)
    if entry.path is None:
        entry.seekable().seek(0)
    return bool(
        array.dtype.kind == "f"
        or array.ndim == 3
        or options.objective == "forecast"
        or (array.size and array.min() < 0)
    )


def _read_vectors(array: Tokens, name: str, labels: Sequence[Any] | None = None) -> Iterator[DocumentChunk]:
    """Yield (N, T, C) as N documents; (T, C) and (T,) as one."""
    if array.ndim not in (1, 2, 3) or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} must be numbers (T, channels) or (documents, T, channels), got {array.dtype} {array.shape}"
        )
    documents = array if array.ndim == 3 else [array if array.ndim == 2 else array[:, None]]
    for i, document in enumerate(documents):
        yield DocumentChunk(np.asarray(document, np.float32), True, None if labels is None else labels[i])


def _read_arrays(entry: Entry, options: ReadOptions) -> Iterator[DocumentChunk]:
    """Yield the documents of an .npz file: x, and their labels: y."""
    with np.load(entry.seekable(), allow_pickle=False) as file:
        names = {name.lower(): name for name in file.files}
        x, y = (
            next((file[names[name]] for name in known if name in names), None)
            for known in (("x", "data", "inputs"), ("y", "labels", "label", "targets"))
        )
    if x is None or x.ndim not in (2, 3):
        raise ValueError(f"{entry.name} must have an array x of shape (documents, T, channels), got {', '.join(names)}")
    labels = None
    if options.labeled:
        count = len(x) if x.ndim == 3 else 1
        if y is None or (len(y) != count and x.ndim == 3):
            raise ValueError(f"{entry.name} must have an array y with a label for each of {count} documents")
        rows = y.tolist() if x.ndim == 3 else [y.tolist()]
        labels = [_array_label(options.objective or "", row) for row in rows]
    yield from _read_vectors(x, entry.name, labels)


def _array_label(kind: str, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if kind == "tag":
        return [str(x) for x in values]
    names = [str(i) for i in range(len(values))]
    return read_label(kind, values if kind in ("regress", "multilabel") and len(values) > 1 else [value], names)


def _read_series(
    rows: Iterator[tables.Row], channels: Sequence[str], labels: Sequence[str], name: str
) -> Iterator[DocumentChunk]:
    block: list[list[float]] = []
    classes: list[str] = []
    waiting = None
    for number, row in enumerate(rows, 1):
        try:
            block.append([float(row[channel]) for channel in channels])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{name}, row {number}: {', '.join(channels)} must be numbers") from None
        classes += [str(row[label]) for label in labels]
        if len(block) == 1 << 16:
            if waiting is not None:
                yield waiting
            waiting = DocumentChunk(np.array(block, np.float32), False, list(classes) if labels else None)
            block, classes = [], []
    if waiting is not None:
        yield waiting._replace(last=not block)
    if block:
        yield DocumentChunk(np.array(block, np.float32), True, list(classes) if labels else None)


def _row_content(values: Sequence[Any], kind: str) -> bytes | Tokens | Chat:
    if kind == "text":
        if not isinstance(values[0], str):
            raise ValueError(f"the field must be text, got {values[0]!r:.40}")
        return values[0].encode("utf-8", "surrogatepass")
    if kind == "tokens":
        return np.array(values[0], np.int64)
    if kind == "pair":
        *prompt, answer = values
        question = "\n\n".join(filter(None, prompt))
        return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return Chat(read_messages(values[0]))


def _read_fastq(entry: Entry) -> Iterator[DocumentChunk]:
    """Yield the sequence of each record; names and qualities are left out."""
    lines = iter(entry.stream)
    for number, header in enumerate(lines):
        if not header.strip():
            continue
        sequence, separator, quality = (next(lines, b"").strip() for _ in range(3))
        if not header.startswith(b"@") or not separator.startswith(b"+") or len(quality) != len(sequence):
            raise ValueError(
                f"{entry.name} is not FASTQ: record {number + 1} is not four lines, @, bases, + and qualities"
            )
        yield DocumentChunk(sequence, True)


def _read_array(entry: Entry) -> Iterator[DocumentChunk]:
    if entry.path is None:
        raise ValueError(f"{entry.name}: .npy files are memory-mapped and cannot be compressed; decompress the file")
    array = load_array(entry.path)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"{entry.name} must be an integer array with 1 dimension, or with 2 (one document per row), "
            f"got {array.dtype} of shape {array.shape}; vectors of numbers are for --objective forecast, classify, "
            "multilabel, regress and tag"
        )
    for document in np.atleast_2d(array) if array.size else ():
        for start in range(0, len(document), CHUNK):
            chunk = np.asarray(document[start : start + CHUNK])
            yield DocumentChunk(chunk, start + CHUNK >= len(document))


def _read_bin(entry: Entry, name: str) -> Iterator[DocumentChunk]:
    dtype = np.dtype(name)
    for block, last in _blocks(entry, CHUNK * dtype.itemsize):
        if len(block) % dtype.itemsize:
            raise ValueError(
                f"the size of {entry.name} is not a multiple of {dtype.itemsize} bytes ({dtype}): "
                "set --bin-dtype to the type it was saved as"
            )
        yield DocumentChunk(np.frombuffer(block, dtype), last)


def _read_wav(entry: Entry) -> bytes:
    """Return 8-bit μ-law samples of one channel, the mean of all."""
    try:
        form, channels, bits, raw = _wav_samples(entry.stream.read(_MAX_AUDIO))
        mono = _wav_numbers(form, bits, raw).reshape(-1, channels).mean(1)
    except (struct.error, ValueError, ZeroDivisionError) as error:
        raise UnreadableError(
            f"{entry.name} is not a recording of plain samples (PCM) that can be read: {error}; convert it with "
            "`ffmpeg -i FILE -c:a pcm_s16le out.wav`"
        ) from None
    mono = np.clip(np.nan_to_num(mono), -1, 1)
    compressed = np.sign(mono) * np.log1p(255 * np.abs(mono)) / math.log(256)
    return np.clip(np.round((compressed + 1) * 127.5), 0, 255).astype(np.uint8).tobytes()


def _wav_samples(content: bytes) -> tuple[int, int, int, bytes]:
    """Return the format of a WAV file (1: integers, 3: floats), its channels, bits per sample and whole frames."""
    described, position = None, 12
    while position + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, position)
        start, position = position + 8, position + 8 + size + size % 2
        if name == b"fmt ":
            form, channels, _, _, frame, bits = struct.unpack_from("<HHIIHH", content, start)
            if form == 0xFFFE:  # extensible: the format is in the first bytes of a GUID
                (form,) = struct.unpack_from("<H", content, start + 24)
            described = form, channels, 8 * frame // channels, frame
        elif name == b"data" and described is not None:
            form, channels, bits, frame = described
            raw = content[start : start + size]
            return form, channels, bits, raw[: len(raw) // frame * frame]
    raise ValueError("it ends before its samples")


def _wav_numbers(form: int, bits: int, raw: bytes) -> NDArray[np.float32]:
    """Return samples as numbers from −1 to 1."""
    if (form, bits) in ((3, 32), (3, 64)):
        return np.frombuffer(raw, f"<f{bits // 8}").astype(np.float32)
    if form != 1 or bits not in (8, 16, 24, 32):
        raise ValueError(f"its format is {form}, with {bits} bits")
    if bits == 8:
        return np.frombuffer(raw, np.uint8).astype(np.float32) / np.float32(128) - np.float32(1)
    if bits == 24:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        return ((parts << np.array([8, 16, 24])).sum(1).astype(np.int32) / 2.0**31).astype(np.float32)
    return np.frombuffer(raw, f"<i{bits // 8}").astype(np.float32) * np.float32(2.0 ** (1 - bits))


def _read_fasta(entry: Entry) -> Iterator[DocumentChunk]:
    """Yield each record as a document: its sequence without header and line ends."""
    sequence = bytearray()
    in_record = in_header = False
    begins_line = True
    while line := entry.stream.readline(CHUNK):
        in_header = line.startswith((b">", b";")) if begins_line else in_header
        if begins_line and line.startswith(b">"):
            if in_record:
                yield DocumentChunk(bytes(sequence), True)
            sequence.clear()
            in_record = True
        elif not in_header:
            if not in_record and line.strip():
                raise ValueError(f"{entry.name} is not FASTA: a record must start with a line that starts with '>'")
            sequence += b"".join(line.split())
            if len(sequence) >= CHUNK:
                yield DocumentChunk(bytes(sequence), False)
                sequence.clear()
        begins_line = line.endswith(b"\n")
    if in_record:
        yield DocumentChunk(bytes(sequence), True)


def _read_pixels(entry: Entry, size: int | None) -> bytes:
    """Return pixels row by row: one byte each for grayscale images, three (RGB) for all others."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"reading {entry.name} requires Pillow: pip install pillow") from None
    encoded = entry.stream.read(_MAX_IMAGE + 1)
    if len(encoded) > _MAX_IMAGE:
        raise ValueError(f"{entry.name} is too large for an image: over {_MAX_IMAGE:,} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Any = Image.open(io.BytesIO(encoded))
            image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except UnidentifiedImageError:
        raise ValueError(f"{entry.name} is not an image in a known format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{entry.name} is too large an image: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # The decoders raise many types for a damaged file.
        raise ValueError(f"{entry.name} is a damaged image: {error}") from error
    return (image if size is None else image.resize((size, size))).tobytes()
