"""Read rows of JSON, CSV, parquet and Arrow, and choose the columns that hold text, conversations or labels."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

from longspan.train.data.containers import CHUNK, Entry
from longspan.utils import nearest, read_json

Row = dict[str, Any]
SAMPLE = 100  # rows by which columns are chosen
CHATS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "chosen")
TEXTS = ("text", "content", "document", "body", "article", "sentence", "sequence", "seq", "code", "story", "review")
TOKENS = ("input_ids", "token_ids")
PROMPTS = ("prompt", "instruction", "question", "input")
INPUTS = ("input", "context")  # beside an instruction, what it is about; may be empty
ANSWERS = ("completion", "response", "answer", "output", "chosen")
TIMES = ("", "time", "timestamp", "date", "datetime", "index", "id", "step")
LABELS = ("label", "labels", "class", "target", "category", "y")
_NUMBER = re.compile(r"\s*[-+]?(\d[\d_,]*\.?\d*|\.\d+)([eE][-+]?\d+)?\s*|\s*(nan|inf|true|false)\s*", re.IGNORECASE)
_MAX_VALUE = 1 << 30  # characters of one JSON value


@dataclass(frozen=True)
class Columns:
    """The columns of a table that documents are read from.

    Args:
        kind: What a document is: text, tokens, a chat (a list of messages), or a pair of prompt and answer.
        names: The column, or those of prompt, what it is about if there is one, and answer.
        guessed: Whether they were guessed.
    """

    kind: Literal["text", "tokens", "chat", "pair"]
    names: tuple[str, ...]
    guessed: bool

    def __str__(self) -> str:
        *others, last = (f'"{name}"' for name in self.names)
        names = f"{', '.join(others)} and {last}" if others else last
        what = {"chat": "conversations in ", "pair": "prompts and answers in ", "tokens": "tokens in "}.get(
            self.kind, ""
        )
        return f"{what}{'field' if len(self.names) == 1 else 'fields'} {names}{' (guessed)' if self.guessed else ''}"


def table_kind(entry: Entry) -> str | None:
    """Return the kind of table that a file is, from its content and its name; None if it is none."""
    head = entry.head
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1") or (entry.suffix == ".arrow" and head.startswith(b"\xff\xff\xff\xff")):
        return "Arrow"
    if entry.suffix in (".csv", ".tsv"):
        return "CSV" if entry.suffix == ".csv" else "TSV"
    if entry.suffix in (".jsonl", ".ndjson"):
        return "JSON lines"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if entry.suffix == ".json":
        return "JSON" if start.startswith((b"{", b"[")) else None
    lines = [line for line in start.splitlines()[:3] if line.strip()]
    complete = lines if len(head) < 1 << 12 else lines[:-1]
    return "JSON lines" if len(complete) >= 2 and all(map(_is_object, complete)) else None


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_rows(entry: Entry, kind: str) -> Iterator[Row]:
    """Yield the rows of a table; a JSON text is a row with the column "text".

    Raises:
        ValueError: The file is damaged, or pyarrow is missing.
    """
    if kind in ("CSV", "TSV"):
        return _read_csv(entry, kind)
    if kind in ("parquet", "Arrow"):
        return _read_arrow(entry, kind)
    return _read_json(entry)


def choose_columns(
    rows: Iterator[Row],
    name: str,
    text_field: str | None,
    *,
    whole: bool = False,
    words: bool = False,
    others: Sequence[str] = (),
) -> tuple[Columns | None, Iterator[Row]]:
    """Choose the columns of documents by the first rows.

    Args:
        rows: The rows of a table.
        name: The name of the file, for errors.
        text_field: The column that the user named, if any.
        whole: Whether a single row, without a column of a usual name, is no table.
        words: Whether lists of words are text too.
        others: Columns that are no documents.

    Returns:
        The columns, None if no column holds text, and all rows again.

    Raises:
        ValueError: There is no column `text_field`, or it holds something else.
    """
    first = list(islice(rows, SAMPLE))
    every = chain(first, rows)
    columns = list(dict.fromkeys(column for row in first for column in row if column not in others))
    if text_field is not None:
        if first and text_field not in columns:
            shown = ", ".join(columns) or "none"
            raise ValueError(f"{name} has no field {text_field!r}; it has {shown}{nearest(text_field, columns)}")
        found = _kind([row.get(text_field) for row in first])
        found = "text" if found == "words" and words else found
        if first and found in (None, "words"):
            raise ValueError(f"field {text_field!r} of {name} is neither text, nor tokens, nor a list of messages")
        return Columns(cast("Any", found or "text"), (text_field,), False), every
    if words:
        found = next((c for c in columns if _kind([row.get(c) for row in first]) == "words"), None)
        if found is not None:
            return Columns("text", (found,), True), every
    return _guess(first, columns, any_name=not whole or len(first) > 1), every


def choose_labels(
    rows: Iterator[Row], name: str, given: Sequence[str], *, required: bool
) -> tuple[tuple[str, ...], Iterator[Row]]:
    """Choose the columns of labels by the first row.

    Args:
        rows: The rows of a table.
        name: The name of the file, for errors.
        given: The columns that the user named, if any.
        required: Whether folders cannot be the labels instead.

    Returns:
        The columns, none if there is no column of a usual name, and all rows again.

    Raises:
        ValueError: There is no such column.
    """
    first = list(islice(rows, 1))
    columns = list(first[0]) if first else []
    every = chain(first, rows)
    if not given:
        by_name = {column.lower(): column for column in columns}
        found = next((by_name[known] for known in (*LABELS, "tags", "ner_tags") if known in by_name), None)
        if found is None and (required or "text" in by_name):
            shown = ", ".join(columns) or "nothing"
            raise ValueError(f"{name} has no column of labels among {shown}: name it with --label-field")
        return (() if found is None else (found,)), every
    for column in given:
        if first and column not in columns:
            raise ValueError(f"{name} has no field {column!r}; it has {', '.join(columns)}{nearest(column, columns)}")
    return tuple(given), every


def choose_channels(
    rows: Iterator[Row], name: str, given: str | None, others: Sequence[str]
) -> tuple[list[str], Iterator[Row]]:
    """Choose the columns that are the channels of a series: those named, or all numbers but times and labels.

    Raises:
        ValueError: There is no such column.
    """
    first = list(islice(rows, SAMPLE))
    columns = list(first[0]) if first else []
    if given is not None:
        found = [column.strip() for column in given.split(",")]
        missing = [column for column in found if column not in columns]
        if missing:
            raise ValueError(f"{name} has no field {missing[0]!r}; it has {', '.join(columns)}")
    else:
        found = [
            column
            for column in columns
            if column.lower() not in TIMES
            and column not in others
            and all(_is_numeric(row.get(column)) for row in first)
        ]
    if not found:
        raise ValueError(f"{name} has no column of numbers among {', '.join(columns) or 'nothing'}")
    return found, chain(first, rows)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value != "" and _is_number(value))


def _guess(rows: Sequence[Row], columns: Sequence[str], *, any_name: bool) -> Columns | None:
    kinds = {column: _kind([row.get(column) for row in rows]) for column in columns}
    by_name = {column.lower(): column for column in columns}
    for names, kind in ((CHATS, "chat"), (TEXTS, "text")):
        for column in (by_name[name] for name in names if name in by_name):
            if kinds[column] == kind:
                return Columns(cast("Any", kind), (column,), True)
    prompt, answer = (
        next((by_name[name] for name in names if name in by_name and kinds[by_name[name]] == "text"), None)
        for names in (PROMPTS, ANSWERS)
    )
    if prompt is not None and answer is not None:
        about = [by_name[name] for name in INPUTS if name in by_name and kinds[by_name[name]] == "text"]
        about = about[:1] if prompt.lower() == "instruction" else []
        return Columns("pair", (prompt, *about, answer), True)
    for column in (by_name[name] for name in TOKENS if name in by_name):
        if kinds[column] == "tokens":
            return Columns("tokens", (column,), True)
    texts = [c for c in columns if kinds[c] == "text" and not all(_is_number(row.get(c)) for row in rows)]
    if not texts or not any_name:
        return None
    longest = max(texts, key=lambda column: sum(len(row.get(column) or "") for row in rows))
    return Columns("text", (longest,), True)


def _kind(values: Sequence[Any]) -> str | None:
    """Return what the values of a column are: text, tokens or chats; None if they are something else, or missing."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if all(isinstance(value, str) for value in present):
        return "text"
    if not all(isinstance(value, list) for value in present):
        return None
    items = [item for value in present for item in value]
    if items and all(isinstance(item, dict) for item in items):
        return "chat"
    if items and all(isinstance(item, str) for item in items):
        return "words"
    return "tokens" if items and all(type(item) is int for item in items) else None


def _is_number(value: Any) -> bool:
    return value is None or value == "" or _NUMBER.fullmatch(value) is not None


def _read_csv(entry: Entry, kind: str) -> Iterator[Row]:
    csv.field_size_limit((1 << 31) - 1)  # The default refuses fields over 131,072 characters.
    first = entry.head.split(b"\n")[0]
    counts = {mark: first.count(mark.encode()) for mark in (",", ";", "\t", "|")}
    delimiter = "\t" if kind == "TSV" else max(counts, key=lambda mark: counts[mark])
    text = io.TextIOWrapper(entry.stream, encoding="utf-8-sig", newline="")
    try:
        for row in csv.DictReader(text, delimiter=delimiter):
            row.pop(None, None)  # what is beyond the columns of the first line
            yield row
    finally:
        with suppress(ValueError):  # The stream was closed before.
            text.detach()


def _read_arrow(entry: Entry, kind: str) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"reading {entry.name} requires pyarrow: pip install 'longspan[data]'") from None
    try:
        file = entry.seekable()
        if kind == "parquet":
            batches = pq.ParquetFile(file).iter_batches(batch_size=1024)
        elif entry.head.startswith(b"ARROW1"):
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file))
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{entry.name} cannot be read: {' '.join(str(error).split())}") from None


def _read_json(entry: Entry) -> Iterator[Row]:
    """Yield objects one after another, or the elements of an array, or of the only array in an object."""
    values = _json_values(entry)
    for value in values:
        lists = [x for x in value.values() if isinstance(x, list)] if isinstance(value, dict) else []
        if (
            len(lists) == 1
            and len(lists[0]) > 1
            and all(isinstance(x, dict) for x in lists[0])
            and not _is_chat(lists[0])
        ):
            yield from lists[0]
        elif isinstance(value, dict):
            yield value
        elif isinstance(value, str):
            yield {"text": value}
        elif isinstance(value, list) and _is_chat(value):
            yield {"messages": value}
        else:
            shown = json.dumps(value)[:40]
            raise ValueError(f"{entry.name}: a row must be an object or a text, got {shown}; see --format bytes")


def _is_chat(items: Sequence[Any]) -> bool:
    return all(isinstance(item, dict) and ({"role", "from"} & item.keys()) for item in items)


def _json_values(entry: Entry) -> Iterator[Any]:
    """Yield the values of a JSON file without reading all of it: separated by white space, or in one array."""
    text = codecs.getincrementaldecoder("utf-8-sig")()
    decoder, buffer, start, lines, size = json.JSONDecoder(), "", 0, 1, CHUNK
    in_array, ended = False, False
    while True:
        match = re.compile(r"[\s,]*" if in_array else r"\s*").match(buffer, start)
        assert match is not None
        lines, start = lines + match[0].count("\n"), match.end()
        try:
            if start == len(buffer):
                raise ValueError("the end of the buffer")
            if buffer[start] == "[" and lines == 1 and not in_array and not _ends_line(buffer, start):
                in_array, start = True, start + 1
                continue
            if buffer[start] == "]" and in_array:
                in_array, start = False, start + 1
                continue
            value, end = decoder.raw_decode(buffer, start)
            if end == len(buffer) and not ended:
                raise ValueError("a number may go on")
        except RecursionError:
            raise ValueError(f"{entry.name} cannot be read, line {lines}: its values are nested too deeply") from None
        except ValueError as error:
            if not ended and _may_go_on(error, buffer) and len(buffer) - start < _MAX_VALUE:
                block = entry.stream.read(size)
                buffer, start, ended, size = buffer[start:] + text.decode(block, not block), 0, not block, 2 * size
                continue
            if start == len(buffer):
                if in_array:
                    raise ValueError(f"{entry.name} cannot be read: its array has no end") from None
                return
            raise ValueError(f"{entry.name} is not JSON in line {lines}: {error}") from None
        lines, start, size = lines + buffer.count("\n", start, end), end, CHUNK
        yield value


def _may_go_on(error: ValueError, buffer: str) -> bool:
    """Return whether a value may be one whose end has not been read yet."""
    if not isinstance(error, json.JSONDecodeError):
        return True
    return error.msg.startswith("Unterminated string") or error.pos >= len(buffer) - 10


def _ends_line(buffer: str, start: int) -> bool:
    """Return whether an array is a row: it is complete in the first line, and another line follows."""
    end = buffer.find("\n", start)
    if end < 0 or not buffer[end:].strip():
        return False
    try:
        return isinstance(json.loads(buffer[start:end]), list)
    except (ValueError, RecursionError):
        return False


def dataset_files(folder: Path) -> list[Path] | None:
    """Return the files of a folder that `datasets` saved; None if it is none.

    Of several splits, the one named train is read.

    Raises:
        ValueError: There are several splits, and none is named train.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = list(read_json(folder / "dataset_dict.json").get("splits", []))
        if "train" not in splits:
            shown = ", ".join(f"{folder / split}" for split in splits)
            raise ValueError(f"--data {folder} has no split named train: give one of {shown}")
        return dataset_files(folder / "train")
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    names = [str(file["filename"]) for file in read_json(folder / "state.json").get("_data_files", [])]
    return [folder / Path(name).name for name in names]


def class_names(folder: Path) -> dict[str, list[str]]:
    """Return the names of classes, by column, of a folder that `datasets` saved."""
    try:
        features = read_json(folder / "dataset_info.json").get("features", {})
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
