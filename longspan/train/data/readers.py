"""Where data comes from: files, folders, globs, compressed or not, as documents of bytes, tokens or pixels."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import lzma
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]

COMPRESSED = (".gz", ".xz", ".zst")
FASTA = (".fa", ".fasta", ".fna", ".faa", ".ffn")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
ARRAYS = (".npy", ".bin")
_PIECE = 1 << 20


class Piece(NamedTuple):
    """A part of a document, in order; `last` ends it."""

    content: bytes | Tokens
    last: bool
    label: str | None = None


@dataclass(frozen=True)
class Source:
    """One --data: its files in order, and the share of the batches it is to have (None: by its size)."""

    name: str
    files: tuple[Path, ...]
    weight: float | None = None


@dataclass(frozen=True)
class Reading:
    """How files are read. extensions: of the files taken from folders, all if empty. exclude: names, which may be
    patterns, of files and folders inside folders that are not taken. bin_dtype: numbers in .bin files.

    image_size: width and height images are brought to, as they are if None. labeled: documents have a label, the
    name of the folder they are in or a column of a CSV.
    """

    extensions: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    bin_dtype: str = "uint16"
    image_size: int | None = None
    labeled: bool = False


def find_source(text: str, reading: Reading) -> Source:
    """The files that `path`, `glob` or `weight=path` names."""
    match = re.match(r"^(\d+(?:\.\d*)?|\.\d+)=(.+)$", text)
    weight, name = (float(match[1]), match[2]) if match else (None, text)
    if weight == 0:
        raise ValueError(f"--data {text}: a weight must be above 0; leave the source out instead")
    path = Path(name).expanduser()
    if path.is_dir():
        files = _folder(path, reading)
        if not files:
            kind = f" with extension {', '.join(reading.extensions)}" if reading.extensions else ""
            raise ValueError(f"--data {name}: the folder holds no files{kind}")
    elif path.is_file():
        files = [path]
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        files = [p for p in found if p.is_file()]
        if not files:
            what = "no file matches this pattern" if glob.has_magic(name) else "there is no such file or folder"
            raise FileNotFoundError(f"--data {name}: {what}")
    return Source(name, tuple(files), weight)


def kind_of(path: Path) -> str:
    """What a file holds: "tokens", "fasta", "image", "csv" or "bytes"."""
    suffix = _inner(path)
    for kind, suffixes in (("tokens", ARRAYS), ("fasta", FASTA), ("image", IMAGES), ("csv", (".csv", ".tsv"))):
        if suffix in suffixes:
            return kind
    return "bytes"


def documents(path: Path, root: Path | None, reading: Reading) -> Iterator[Piece]:
    """The documents of a file, in pieces that are never larger than a few megabytes.

    root: the folder the file was found in, whose subfolders are labels.
    """
    kind = kind_of(path)
    try:
        if reading.labeled and kind == "csv":
            yield from _rows(path)
            return
        label = _label(path, root) if reading.labeled else None
        if kind == "tokens":
            pieces = _arrays(path, reading)
        elif kind == "image":
            pieces = iter([Piece(_pixels(path, reading.image_size), True)])
        else:
            pieces = _fasta(path) if kind == "fasta" else _bytes(path)
        for piece in pieces:
            yield piece._replace(label=label)
    except (OSError, EOFError, lzma.LZMAError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, "rb"))
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{path} needs zstandard to be read: pip install zstandard") from None
        return cast("IO[bytes]", zstandard.open(path, "rb"))
    return open(path, "rb")


def _folder(folder: Path, reading: Reading) -> list[Path]:
    wanted = {e.lower() if e.startswith(".") else f".{e.lower()}" for e in reading.extensions}

    def taken(name: str) -> bool:
        unwanted = (".*", "__pycache__", *reading.exclude)
        return not any(fnmatch(name, pattern) for pattern in unwanted)

    found = []
    for where, names, files in os.walk(folder, followlinks=True):
        names[:] = sorted(filter(taken, names))
        for path in (Path(where) / name for name in filter(taken, files)):
            if not wanted or {path.suffix.lower(), _inner(path)} & wanted:
                found.append(path)
    return sorted(path for path in found if path.is_file())


def _inner(path: Path) -> str:
    """The extension below a compression's own."""
    return (Path(path.stem).suffix if path.suffix.lower() in COMPRESSED else path.suffix).lower()


def _label(path: Path, root: Path | None) -> str:
    parts = () if root is None else path.relative_to(root).parts
    if len(parts) < 2:
        raise ValueError(
            f"{path} has no label: classification takes a folder with one subfolder for each class, or a CSV with "
            "the columns text and label"
        )
    return parts[0]


def _bytes(path: Path) -> Iterator[Piece]:
    with opened(path) as file:
        block = file.read(_PIECE)
        while block:
            following = file.read(_PIECE)
            yield Piece(block, not following)
            block = following


def _fasta(path: Path) -> Iterator[Piece]:
    """Each record is a document: its letters, without header and line ends."""
    held = bytearray()
    any_record = False
    with opened(path) as file:
        for line in file:
            if line.startswith(b">"):
                if any_record:
                    yield Piece(bytes(held), True)
                held.clear()
                any_record = True
            elif not line.startswith(b";"):
                if not any_record and line.strip():
                    raise ValueError(f"{path} is not FASTA: a record begins with a line that begins with '>'")
                held += b"".join(line.split())
                if len(held) >= _PIECE:
                    yield Piece(bytes(held), False)
                    held.clear()
    if any_record:
        yield Piece(bytes(held), True)


def _arrays(path: Path, reading: Reading) -> Iterator[Piece]:
    if _inner(path) == ".npy":
        if path.suffix.lower() in COMPRESSED:
            raise ValueError(f"{path}: a .npy file is mapped into memory and cannot be compressed: decompress it")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise ValueError(
                f"{path} must hold integers of one dimension, or one document a row, "
                f"got {array.dtype} of shape {array.shape}"
            )
        for row in array if array.ndim == 2 else array[None]:
            yield from _cut(row)
        return
    dtype = np.dtype(reading.bin_dtype)
    with opened(path) as file:
        block = file.read(_PIECE * dtype.itemsize)
        while block:
            following = file.read(_PIECE * dtype.itemsize)
            if len(block) % dtype.itemsize:
                raise ValueError(f"{path} does not hold whole {dtype} numbers: set --bin-dtype to what it was saved as")
            yield Piece(np.frombuffer(block, dtype), not following)
            block = following


def _cut(row: Tokens) -> Iterator[Piece]:
    for start in range(0, len(row), _PIECE):
        yield Piece(np.asarray(row[start : start + _PIECE]), start + _PIECE >= len(row))


def _pixels(path: Path, size: int | None) -> bytes:
    """Row by row, one byte a pixel for gray images and three for all others."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"{path} needs Pillow to be read: pip install pillow") from None
    with opened(path) as file:
        try:
            found = Image.open(io.BytesIO(file.read()))
            image = found.convert("L" if found.mode in ("1", "L") else "RGB")
        except UnidentifiedImageError:
            raise ValueError(f"{path} is not an image that can be read") from None
    if size is not None:
        image = image.resize((size, size))
    return image.tobytes()


def _rows(path: Path) -> Iterator[Piece]:
    with opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        table = csv.DictReader(text, delimiter="\t" if _inner(path) == ".tsv" else ",")
        if not {"text", "label"} <= set(table.fieldnames or ()):
            got = ", ".join(table.fieldnames or ()) or "nothing"
            raise ValueError(f"{path} needs the columns text and label in its first line, got {got}")
        for row in table:
            if row["text"] and row["label"]:
                yield Piece(row["text"].encode(), True, row["label"])
