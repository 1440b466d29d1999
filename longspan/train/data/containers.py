"""Open files and the members of archives, decompressed, and recognize by their content what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
ARCHIVES = (".tgz", ".txz", ".tbz2", ".tar", ".zip")
CHUNK = 1 << 20
_HEAD = 1 << 13  # bytes by which a file is recognized
_MAX_RATIO = 250  # of a decompressed file to the compressed one; text compresses to a tenth, logs to a hundredth
_MAX_DEPTH = 4  # of archives and compressions inside each other

_COMPRESSION = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2"}
_AS_TEXT = "save it as text, CSV or JSON lines"
_UNPACK = "unpack it and give the folder"
_AS_WAV = "convert it to WAV, as `ffmpeg -i FILE out.wav` does"
_AS_ARRAY = "save its arrays with numpy.save"
# What files start with that cannot be read: what they are, and what to do about it.
_REFUSED = {
    b"%PDF-": ("a PDF", "extract its text, as `pdftotext` does"),
    b"SQLite format 3\0": ("an SQLite database", "export a table as CSV"),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", _AS_ARRAY),
    b"MATLAB 5.0": ("a MATLAB file", _AS_ARRAY),
    b"0       ": ("an EDF recording", _AS_ARRAY),
    b"\xffBIOSEMI": ("a BDF recording", _AS_ARRAY),
    b"\xd0\xcf\x11\xe0": ("an Office document", _AS_TEXT),
    b"{\\rtf": ("an RTF document", _AS_TEXT),
    b"FEA1": ("a Feather file of version 1", "save it as parquet"),
    b"ORC": ("an ORC table", "save it as parquet"),
    b"Obj\x01": ("an Avro table", "save it as parquet"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"Rar!": ("a RAR archive", _UNPACK),
    b"\x04\x22\x4d\x18": ("an LZ4 file", "decompress it"),
    b"\x1f\x9d": ("a file of `compress`", "decompress it"),
    b"fLaC": ("a FLAC recording", _AS_WAV),
    b"OggS": ("an Ogg recording", _AS_WAV),
    b"ID3": ("an MP3 recording", _AS_WAV),
    b"\xff\xfb": ("an MP3 recording", _AS_WAV),
    b"\x1a\x45\xdf\xa3": ("a video", "save its frames as images"),
    b"\x7fELF": ("a program", "leave it out"),
    b"MZ": ("a program", "leave it out"),
    b"\xcf\xfa\xed\xfe": ("a program", "leave it out"),
    b"GGUF": ("a model", "leave it out"),
    b"\x80\x02": ("a pickle", _AS_ARRAY),
    b"\x80\x03": ("a pickle", _AS_ARRAY),
    b"\x80\x04": ("a pickle", _AS_ARRAY),
    b"\x80\x05": ("a pickle", _AS_ARRAY),
}
_BOMS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16 and UTF-32


class UnreadableError(ValueError):
    """A file is of a kind that cannot be read; in folders and archives such files are skipped."""


@dataclass(frozen=True)
class Entry:
    """A file or a member of an archive.

    Args:
        name: For messages: the path, with that of the member in the archive.
        folders: The folders inside the archive that contain it.
        suffix: Its extension, without that of a compression: ".txt" of "a.txt.gz".
        stream: Its decompressed content from the start.
        path: The file, if it is neither compressed nor in an archive.
        refused: Why it cannot be read, if that is known from outside.
    """

    name: str
    folders: tuple[str, ...]
    suffix: str
    stream: Any  # io.BufferedReader
    path: Path | None = None
    refused: str | None = None
    _copies: list[IO[bytes]] = field(default_factory=list)

    @property
    def head(self) -> bytes:
        """The first bytes; the stream is still at the start afterwards."""
        return self.stream.peek(_HEAD)[:_HEAD]

    def seekable(self) -> IO[bytes]:
        """Return the content as a stream that can be repositioned; archive members are copied to a temporary file."""
        if self.path is not None:
            return self.stream
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        self._copies.append(copy)
        shutil.copyfileobj(self.stream, copy, CHUNK)
        copy.seek(0)
        return copy

    def close(self) -> None:
        """Remove temporary files."""
        for copy in self._copies:
            copy.close()


def open_entries(path: Path, included: Callable[[str], bool]) -> Generator[Entry]:
    """Yield a file, or what an archive contains, member by member. Each must be read before the next is requested.

    Args:
        path: The file.
        included: Whether to read the member of an archive with this path.

    Raises:
        ValueError: A compressed file or an archive is damaged, or its content is more than `_MAX_RATIO` times as large
            as itself.
    """
    with open(path, "rb", buffering=CHUNK) as file:
        if path.suffix.lower() == ".bin":  # Tokens of any value, which may look like the start of something else.
            yield Entry(str(path), (), ".bin", file, path)
        else:
            yield from _unpacked(file, str(path), PurePosixPath(path.name), _Budget(path), included, path)


def open_decompressed(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing `.gz`, `.xz`, `.zst` and `.bz2`.

    Reading raises ValueError where the content is more than `_MAX_RATIO` times as large as the compressed file.
    """
    file = open(path, "rb")  # noqa: SIM115
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return file
    return _decompressed(file, suffix, str(path), _Budget(path))


def refusal(entry: Entry) -> str | None:
    """Return why a file cannot be read, and what to do instead; None if it can be."""
    if entry.refused is not None:
        return entry.refused
    head = entry.head
    found = next((why for magic, why in _REFUSED.items() if head.startswith(magic)), None)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        found = _REFUSED[b"\x1a\x45\xdf\xa3"]
    elif head[4:8] == b"ftyp":
        found = ("a video or recording in MP4", _AS_WAV)
    elif head[8:10] == b'{"' and head[2:8] == bytes(6):
        found = ("a safetensors file", "leave it out")
    elif found is None and b"\0" in head and not head.startswith(_BOMS):
        found = ("binary data in an unknown format", _AS_TEXT)
    if found is None:
        return None
    return f"{entry.name} is {found[0]}, which cannot be read: {found[1]}, or train on its bytes with --format bytes"


class _Budget:
    """How many bytes may be decompressed from a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.left = path, _MAX_RATIO * max(path.stat().st_size, 1 << 16)

    def spend(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise ValueError(
                f"{self.path} decompresses to more than {_MAX_RATIO} times its size, as a decompression bomb does: "
                "if it is none, decompress it and give the result"
            )


class _LimitedReader(io.RawIOBase):
    """A stream of at least `size` bytes, and of at most what is left of a budget, if there is one."""

    def __init__(self, file: Any, name: str, budget: _Budget | None, size: int = 0) -> None:
        self._file, self._name, self._budget, self._size, self._read = file, name, budget, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self._file.read(len(buffer))
        except Exception as error:  # Each package has its own for a damaged file.
            raise ValueError(f"{self._name} cannot be read: {error}") from error
        self._read += len(block)
        if not block and self._read < self._size:
            raise ValueError(f"{self._name} cannot be read: it ends after {self._read:,} of {self._size:,} bytes")
        if self._budget is not None:
            self._budget.spend(len(block))
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self._file.close()
        super().close()


def _unpacked(
    stream: Any,
    name: str,
    inner: PurePosixPath,
    budget: _Budget,
    included: Callable[[str], bool],
    path: Path | None,
    depth: int = 0,
) -> Iterator[Entry]:
    entry = Entry(name, inner.parts[:-1], inner.suffix.lower(), stream, path)
    try:
        yield from _members(entry, inner, budget, included, depth)
    finally:
        entry.close()


def _members(
    entry: Entry, inner: PurePosixPath, budget: _Budget, included: Callable[[str], bool], depth: int
) -> Iterator[Entry]:
    head, name = entry.head, entry.name
    compression = next((suffix for magic, suffix in _COMPRESSION.items() if head.startswith(magic)), None)
    if compression is None and entry.suffix in COMPRESSED:
        compression = entry.suffix
    zipped = head.startswith((b"PK\x03\x04", b"PK\x05\x06")) and entry.suffix != ".npz"
    if depth >= _MAX_DEPTH and (compression or zipped):
        yield replace(entry, refused=f"{name} is packed more than {_MAX_DEPTH} times: {_UNPACK}")
    elif compression is not None:
        opened = _decompressed(entry.stream, compression, name, budget)
        shorter = inner.with_suffix("") if entry.suffix in COMPRESSED else inner
        yield from _unpacked(opened, name, shorter, budget, included, None, depth + 1)
    elif zipped or head[257:262] == b"ustar":
        archive = _open_zip(entry) if zipped else None
        why = None if archive is None else _zip_refusal(archive)
        if why is not None:
            yield replace(entry, refused=f"{name} is {why}")
            return
        for member, opened in _tar_members(entry) if archive is None else _zip_members(archive, name, budget):
            if included(member):
                within = f"{name}!/{member}"
                yield from _unpacked(opened, within, PurePosixPath(member), budget, included, None, depth + 1)
    else:
        yield entry


def _open_zip(entry: Entry) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(entry.seekable())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{entry.name} cannot be read: {error}") from None


def _zip_refusal(archive: zipfile.ZipFile) -> str | None:
    """Return what a ZIP archive is, if its members are not files to read."""
    names = archive.namelist()
    if "[Content_Types].xml" in names or "mimetype" in names:
        return f"an Office document or e-book, which cannot be read: {_AS_TEXT}"
    if any(member.endswith("data.pkl") for member in names):
        return f"a file of torch.save, which cannot be read: {_AS_ARRAY}"
    return None


def _zip_members(archive: zipfile.ZipFile, name: str, budget: _Budget) -> Iterator[tuple[str, Any]]:
    for info in archive.infolist():
        if info.is_dir():
            continue
        within = f"{name}!/{info.filename}"
        try:
            opened = archive.open(info)
        except (RuntimeError, zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"{within} cannot be read: {error}") from None
        with io.BufferedReader(_LimitedReader(opened, within, budget), CHUNK) as member:
            yield info.filename, member


def _tar_members(entry: Entry) -> Iterator[tuple[str, Any]]:
    try:
        with tarfile.open(fileobj=entry.stream, mode="r|") as archive:
            for info in archive:
                opened = archive.extractfile(info) if info.isreg() else None
                if opened is not None:  # The size of a compressed archive is limited by its reader.
                    name = f"{entry.name}!/{info.name}"
                    yield info.name, io.BufferedReader(_LimitedReader(opened, name, None, info.size), CHUNK)
    except tarfile.TarError as error:
        raise ValueError(f"{entry.name} cannot be read: {error}") from None


def _decompressed(stream: IO[bytes], suffix: str, name: str, budget: _Budget) -> IO[bytes]:
    size = 0
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"reading {name} requires zstandard: pip install zstandard") from None
        head = stream.peek(18)[:18] if isinstance(stream, io.BufferedReader) else b""
        with suppress(zstandard.ZstdError):  # The decompressor does not report a truncated frame; compare the size.
            size = zstandard.frame_content_size(head)
        opened: Any = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=True)
    else:
        openers: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
        opened = openers[suffix](stream)
    return cast("IO[bytes]", io.BufferedReader(_LimitedReader(opened, name, budget, size), CHUNK))
