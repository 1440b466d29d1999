"""Find and read training data: files, folders and globs of text, FASTA, images, CSV or tokens, compressed or not."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import lzma
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import starmap
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]

COMPRESSED = (".gz", ".xz", ".zst")
SUFFIXES = {
    "tokens": (".npy", ".bin"),
    "fasta": (".fa", ".fasta", ".fna", ".faa", ".ffn"),
    "image": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"),
    "csv": (".csv", ".tsv"),
}
_CHUNK = 1 << 20
_MAX_RATIO = 250  # of a decompressed file to the compressed one; text compresses to a tenth, logs to a hundredth
_MAX_IMAGE = 1 << 28  # bytes of an encoded image


class DocumentChunk(NamedTuple):
    """A consecutive part of a document; `last` marks the end of the document."""

    content: bytes | Tokens
    last: bool
    label: str | None = None


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
        labeled: Read a label with each document: the name of its class folder, or a column of a CSV file.
    """

    extensions: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    bin_dtype: str = "uint16"
    image_size: int | None = None
    labeled: bool = False


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
        files = _files_in(path, options)
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


def file_kind(path: Path) -> str:
    """Return what a file contains, from its name: "tokens", "fasta", "image", "csv" or "bytes"."""
    suffix = _inner_suffix(path)
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), "bytes")


def read_documents(path: Path, root: Path | None, options: ReadOptions) -> Iterator[DocumentChunk]:
    """Yield the documents of a file in chunks of at most a few megabytes.

    Args:
        path: The file.
        root: The folder it was found in. The first subfolder below it is the label of a labeled document.
        options: How to read the file.

    Raises:
        ValueError: The file cannot be read as what its name says, or a label is missing.
    """
    kind = file_kind(path)
    try:
        if options.labeled and kind == "csv":
            yield from _read_csv(path)
            return
        label = _folder_label(path, root) if options.labeled else None
        if kind == "tokens":
            chunks = _read_tokens(path, options)
        elif kind == "image":
            chunks = iter([DocumentChunk(_read_pixels(path, options.image_size), True)])
        elif kind == "fasta":
            chunks = _read_fasta(path)
        else:
            chunks = starmap(DocumentChunk, _blocks(path, _CHUNK))
        for chunk in chunks:
            yield chunk._replace(label=label)
    except (FileNotFoundError, PermissionError):
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class _LimitedReader(io.RawIOBase):
    """A decompressed file: at least `size` bytes, and at most `_MAX_RATIO` times as large as the compressed one."""

    def __init__(self, file: IO[bytes], path: Path, size: int = 0) -> None:
        self._file, self._path, self._size, self._read = file, path, size, 0
        self._limit = _MAX_RATIO * max(path.stat().st_size, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self._file.read(len(buffer))
        except Exception as error:  # Each package has its own for a damaged file.
            raise ValueError(f"{self._path} cannot be read: {error}") from error
        self._read += len(block)
        if not block and self._read < self._size:
            raise ValueError(f"{self._path} cannot be read: it ends after {self._read:,} of {self._size:,} bytes")
        if self._read > self._limit:
            raise ValueError(
                f"{self._path} decompresses to more than {_MAX_RATIO} times its size, as a decompression bomb does: "
                "if it is none, decompress it and give the result"
            )
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_decompressed(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing `.gz`, `.xz` and `.zst`.

    Reading raises ValueError where the content is more than `_MAX_RATIO` times as large as the compressed file.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return open(path, "rb")
    size = 0
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"reading {path} requires zstandard: pip install zstandard") from None
        compressed = open(path, "rb")  # noqa: SIM115
        with suppress(zstandard.ZstdError):  # The decompressor does not report a truncated frame; compare the size.
            size = zstandard.frame_content_size(compressed.read(18))
        compressed.seek(0)
        stream: Any = zstandard.ZstdDecompressor().stream_reader(compressed, read_across_frames=True, closefd=True)
    else:
        stream = gzip.open(path, "rb") if suffix == ".gz" else lzma.open(path, "rb")  # noqa: SIM115
    return cast("IO[bytes]", io.BufferedReader(_LimitedReader(stream, path, size), _CHUNK))


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
    extensions = {e.lower() if e.startswith(".") else f".{e.lower()}" for e in options.extensions}

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
                    if path.is_file() and (not extensions or {path.suffix.lower(), _inner_suffix(path)} & extensions):
                        found.append(path)
        pending = sorted(links)  # Folders that are reached without links come first.
    return sorted(found)


def _inner_suffix(path: Path) -> str:
    """Return the extension without that of a compression: ".txt" of "a.txt.gz"."""
    return (Path(path.stem).suffix if path.suffix.lower() in COMPRESSED else path.suffix).lower()


def _folder_label(path: Path, root: Path | None) -> str:
    parts = () if root is None else path.relative_to(root).parts
    if len(parts) < 2:
        raise ValueError(
            f"{path} has no label: classification requires a folder with one subfolder per class, or a CSV file with "
            "the columns text and label"
        )
    return parts[0]


def _blocks(path: Path, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yield the decompressed content in blocks of `size` bytes, and whether each is the last."""
    with open_decompressed(path) as file:
        block = file.read(size)
        while block:
            following = file.read(size)
            yield block, not following
            block = following


def _read_fasta(path: Path) -> Iterator[DocumentChunk]:
    """Yield each record as a document: its sequence without header and line ends."""
    sequence = bytearray()
    in_record = in_header = False
    begins_line = True
    with open_decompressed(path) as file:
        while line := file.readline(_CHUNK):
            in_header = line.startswith((b">", b";")) if begins_line else in_header
            if begins_line and line.startswith(b">"):
                if in_record:
                    yield DocumentChunk(bytes(sequence), True)
                sequence.clear()
                in_record = True
            elif not in_header:
                if not in_record and line.strip():
                    raise ValueError(f"{path} is not FASTA: a record must start with a line that starts with '>'")
                sequence += b"".join(line.split())
                if len(sequence) >= _CHUNK:
                    yield DocumentChunk(bytes(sequence), False)
                    sequence.clear()
            begins_line = line.endswith(b"\n")
    if in_record:
        yield DocumentChunk(bytes(sequence), True)


def _read_tokens(path: Path, options: ReadOptions) -> Iterator[DocumentChunk]:
    if _inner_suffix(path) == ".npy":
        if path.suffix.lower() in COMPRESSED:
            raise ValueError(f"{path}: .npy files are memory-mapped and cannot be compressed; decompress the file")
        array = load_array(path)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise ValueError(
                f"{path} must be an integer array with 1 dimension, or with 2 (one document per row), "
                f"got {array.dtype} of shape {array.shape}"
            )
        for document in np.atleast_2d(array) if array.size else ():
            for start in range(0, len(document), _CHUNK):
                chunk = np.asarray(document[start : start + _CHUNK])
                yield DocumentChunk(chunk, start + _CHUNK >= len(document))
        return
    dtype = np.dtype(options.bin_dtype)
    for block, last in _blocks(path, _CHUNK * dtype.itemsize):
        if len(block) % dtype.itemsize:
            raise ValueError(
                f"the size of {path} is not a multiple of {dtype.itemsize} bytes ({dtype}): "
                "set --bin-dtype to the type it was saved as"
            )
        yield DocumentChunk(np.frombuffer(block, dtype), last)


def _read_pixels(path: Path, size: int | None) -> bytes:
    """Return pixels row by row: one byte each for grayscale images, three (RGB) for all others."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"reading {path} requires Pillow: pip install pillow") from None
    with open_decompressed(path) as file:
        encoded = file.read(_MAX_IMAGE + 1)
    if len(encoded) > _MAX_IMAGE:
        raise ValueError(f"{path} is too large for an image: over {_MAX_IMAGE:,} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Any = Image.open(io.BytesIO(encoded))
            image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not an image in a known format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{path} is too large an image: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # The decoders raise many types for a damaged file.
        raise ValueError(f"{path} is a damaged image: {error}") from error
    return (image if size is None else image.resize((size, size))).tobytes()


def _read_csv(path: Path) -> Iterator[DocumentChunk]:
    csv.field_size_limit((1 << 31) - 1)  # The default refuses fields over 131,072 characters.
    with open_decompressed(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        table = csv.DictReader(text, delimiter="\t" if _inner_suffix(path) == ".tsv" else ",")
        if not {"text", "label"} <= set(table.fieldnames or ()):
            found = ", ".join(table.fieldnames or ()) or "nothing"
            raise ValueError(f"the first line of {path} must name the columns text and label, got {found}")
        for row in table:
            if row["text"] and row["label"]:
                yield DocumentChunk(row["text"].encode(), True, row["label"])
