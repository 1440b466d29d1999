"""Evaluate models of supervised tasks, and write their predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from longspan.generation.tokenization import TOKENIZER
from longspan.models.checkpoint import CONFIG, find_checkpoint, load, read_committed
from longspan.models.transformer import Classifier
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.data import tables
from longspan.train.data.batches import BatchShape, labeled_evaluation_batches
from longspan.train.data.containers import Entry, open_entries
from longspan.train.data.readers import DocumentReader, ReadOptions, Tagged, find_source
from longspan.train.data.tasks import SupervisedTask
from longspan.train.data.token_store import DocumentEncoder, StoreSpec, temporary_store
from longspan.train.loggers import Record
from longspan.utils import choose_device, plot_path, read_json, write_atomically

Array = NDArray[Any]


@dataclass(frozen=True)
class TaskModel:
    """A model of a supervised task with what belongs to it.

    Args:
        model: The model, in eval mode.
        task: Its task.
        tokenizer: Its tokenizer.json. None: tokens are bytes.
        device: Where it is.
    """

    model: Classifier
    task: SupervisedTask
    tokenizer: Path | None
    device: torch.device


def load_task_model(folder: Path, device: str | None = None) -> TaskModel | None:
    """Load the model of a run or checkpoint; None if it is not one of a supervised task.

    Raises:
        ValueError: Its `config.json` does not name the classes, because an earlier version wrote it.
    """
    found, where = find_checkpoint(folder), choose_device(device)
    description = read_committed(found, lambda path: read_json(path / CONFIG))
    if not isinstance(description, dict) or description.get("class") != "Classifier":
        return None
    model = load(found, device=where).eval()
    assert isinstance(model, Classifier)
    outputs = model.config.num_classes or 0
    values = description.get("task") or asdict(SupervisedTask("classify", tuple(map(str, range(outputs)))))
    tokenizer = read_committed(found, lambda path: path / TOKENIZER if (path / TOKENIZER).exists() else None)
    return TaskModel(model, SupervisedTask.from_dict(values), tokenizer, where)


def evaluate_task(
    found: TaskModel, data: Sequence[str], options: ReadOptions, *, context: int, batch_size: int, max_tokens: int
) -> Record:
    """Evaluate a model on labeled data.

    Args:
        found: The model.
        data: Files, folders or globs.
        options: How to read them; columns that are not named are those of the run.
        context: Documents are cut to this length; labels of tokens are predicted in windows of it.
        batch_size: Documents per forward pass.
        max_tokens: Approximate number of tokens to evaluate.

    Returns:
        The metrics of the task.

    Raises:
        ValueError: The data has a class that the model does not have, or other channels.
    """
    task = found.task
    options = task_options(task, options, labeled=task.kind != "forecast")
    classes = task.names if task.kind in ("classify", "multilabel", "tag") else ()
    sources = tuple(find_source(text, options) for text in data)
    with temporary_store(StoreSpec(sources, (), options, found.tokenizer, context, 0.0, classes)) as store:
        unknown = [name for name in store.labels if name not in classes]
        if unknown:
            raise ValueError(f"the model does not know the class {unknown[0]!r}; it knows {', '.join(classes)}")
        if store.channels != found.model.config.input_dim:
            raise ValueError(f"the model reads {found.model.config.input_dim} channels, the data has {store.channels}")
        store = replace(store, metadata=store.metadata | {"task": asdict(task)})
        outputs, targets = [], []
        shape = BatchShape(context, batch_size)
        for batch in labeled_evaluation_batches(store, store.train, shape, max_tokens):
            result = _outputs(found, batch.tokens, batch.key_mask)
            known = _known(task, batch.targets.numpy())
            outputs.append(result[known])
            targets.append(batch.targets.numpy()[known])
        metrics = _metrics(task, np.concatenate(outputs), np.concatenate(targets))
    return {"task": task.kind, "data": list(data), "sha256": store.metadata["sha256"], "context": context, **metrics}


def task_options(task: SupervisedTask, options: ReadOptions, *, labeled: bool) -> ReadOptions:
    """Return how to read data for a task, with the columns of the run where none are named."""
    return replace(
        options,
        labeled=labeled,
        task=task.kind,
        text_field=options.text_field or task.text_field,
        label_field=options.label_field or task.label_field,
    )


def _outputs(found: TaskModel, tokens: torch.Tensor, key_mask: torch.Tensor | None) -> NDArray[np.float64]:
    mask = None if key_mask is None else key_mask.to(found.device)
    with torch.no_grad():
        return found.model(tokens.to(found.device), key_mask=mask).double().cpu().numpy()


def _known(task: SupervisedTask, targets: Array) -> Array:
    if task.kind == "tag":
        return targets != IGNORE_INDEX
    return ~np.isnan(targets[..., 0]) if task.kind == "forecast" else np.ones(len(targets), bool)


def _metrics(task: SupervisedTask, outputs: NDArray[np.float64], targets: Array) -> Record:
    if task.kind in ("classify", "tag"):
        return _class_metrics(task.names, outputs.argmax(1), targets)
    if task.kind == "multilabel":
        return _multilabel_metrics(task.names, outputs > 0, targets > 0.5)
    return _number_metrics(task.names, task.denormalize(outputs), task.denormalize(targets.astype(np.float64)))


def _class_metrics(names: Sequence[str], predicted: Array, actual: Array) -> Record:
    size = len(names)
    confusion = np.bincount(actual * size + predicted, minlength=size * size).reshape(size, size)
    hits = confusion.diagonal()
    scores = _f1(hits, confusion.sum(0), confusion.sum(1))
    present = confusion.sum(1) > 0
    return {
        "count": len(actual),
        "accuracy": float(hits.sum() / max(1, len(actual))),
        "macro_f1": float(scores[present].mean()) if present.any() else 0.0,
        "classes": [
            {"name": name, "count": int(n), "f1": float(f1)}
            for name, n, f1 in zip(names, confusion.sum(1), scores, strict=True)
        ],
        "confusion": confusion.tolist(),
    }


def _multilabel_metrics(names: Sequence[str], predicted: Array, actual: Array) -> Record:
    hits, found, there = (x.sum(0) for x in (predicted & actual, predicted, actual))
    scores = _f1(hits, found, there)
    return {
        "count": len(actual),
        "accuracy": float((predicted == actual).all(1).mean()),
        "micro_f1": float(_f1(hits.sum(), found.sum(), there.sum())),
        "macro_f1": float(scores.mean()),
        "classes": [
            {"name": name, "count": int(n), "f1": float(f1)} for name, n, f1 in zip(names, there, scores, strict=True)
        ],
    }


def _f1(hits: Any, predicted: Any, actual: Any) -> Any:
    return 2 * hits / np.maximum(predicted + actual, 1)


def _number_metrics(names: Sequence[str], predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> Record:
    error = predicted - actual
    mae, squared = np.abs(error).mean(0), (error**2).mean(0)
    variance = actual.var(0)
    r2 = 1 - squared / np.where(variance > 0, variance, np.nan)
    columns = [
        {"name": name, "mae": float(a), "rmse": float(s) ** 0.5, "r2": None if np.isnan(r) else float(r)}
        for name, a, s, r in zip(names, mae, squared, r2, strict=True)
    ]
    known = r2[~np.isnan(r2)]
    return {
        "count": len(actual),
        "mae": float(mae.mean()),
        "rmse": float(squared.mean() ** 0.5),
        "r2": float(known.mean()) if len(known) else None,
        "outputs": columns,
    }


def print_task(result: Record) -> None:
    """Print the metrics of a task: a line for each class or output, and the totals."""
    console = Console(highlight=False)
    rows = result.get("classes") or result["outputs"]
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*(f"{x:.4f}" if isinstance(x, float) else "–" if x is None else f"{x}" for x in row.values()))
    console.print(table)
    totals = [
        name for name in ("accuracy", "macro_f1", "micro_f1", "mae", "rmse", "r2") if result.get(name) is not None
    ]
    console.print(f"{result['count']:,} predictions: " + ", ".join(f"{name} {result[name]:.4f}" for name in totals))


def write_task(result: Record, out: Path) -> list[Path]:
    """Write the metrics as JSON and, for classes, a picture of the confusion matrix beside it; return the paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(result, indent=1) + "\n")
    if "confusion" not in result:
        return [out]
    from longspan.train.plots import plot_confusion

    plot = plot_path(out)
    write_atomically(plot, plot_confusion(result["confusion"], [row["name"] for row in result["classes"]]))
    return [out, plot]


def predict(
    found: TaskModel, data: Sequence[str], options: ReadOptions, file: IO[str], *, context: int, batch_size: int
) -> int:
    """Write the predictions for data as CSV: the columns of tables, or the name of the file, and the predictions.

    Args:
        found: The model.
        data: Files, folders or globs.
        options: How to read them; columns that are not named are those of the run.
        file: Where to write.
        context: Documents are cut to this length; labels of tokens are predicted in windows of it.
        batch_size: Documents per forward pass.

    Returns:
        The number of rows.
    """
    options = task_options(found.task, options, labeled=False)
    files = (path for text in data for path in find_source(text, options).files)
    rows = (row for path in files for row in _rows(found, path, options, context, batch_size))
    writer, number = None, 0
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(file, list(row), extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: json.dumps(x) if isinstance(x, list | dict) else x for name, x in row.items()})
        number += 1
    if number == 0:
        raise ValueError(f"there is nothing to predict in {', '.join(data)}")
    return number


def _rows(found: TaskModel, path: Path, options: ReadOptions, context: int, batch_size: int) -> Iterator[Record]:
    """Yield the rows of the result for one file, or for what an archive contains."""
    encoder, reader, number = DocumentEncoder(found.tokenizer), DocumentReader(options), 0
    with closing(open_entries(path, lambda name: True)) as entries:
        for entry in entries:
            inputs: Iterator[tuple[Record, Any]] | None = None
            kind = None if options.format == "bytes" or found.task.kind == "forecast" else tables.table_kind(entry)
            if kind is not None:
                entry = replace(entry, stream=entry.seekable())
                inputs = reader.contents(entry, kind)
                if inputs is None:
                    entry.stream.seek(0)
            if inputs is not None:
                rows = _batches(found, inputs, encoder, context, batch_size)
            elif kind is not None and found.task.kind == "tag":
                rows = _series_rows(found, entry, kind, options, context)
            else:
                rows = _batches(found, _documents(reader, entry), encoder, context, batch_size)
            for row in rows:
                yield row
                number += 1
    if number == 0 and reader.skipped:
        raise ValueError(reader.skipped[0])


def _documents(reader: DocumentReader, entry: Entry) -> Iterator[tuple[Record, Any]]:
    """Yield the documents of a file, with its name and their number."""
    parts: list[Any] = []
    number = 0
    for chunk in reader.read_entry(entry, None):
        parts.append(chunk.content.text if isinstance(chunk.content, Tagged) else chunk.content)
        if chunk.last:
            content = parts[0]
            if len(parts) > 1:
                content = b"".join(parts) if isinstance(parts[0], bytes) else np.concatenate(parts)
            yield {"file": entry.name, "document": number}, content
            parts, number = [], number + 1


def _series_rows(found: TaskModel, entry: Entry, kind: str, options: ReadOptions, context: int) -> Iterator[Record]:
    """Yield each row of a table of vectors with its own prediction, computed in windows of the context."""
    rows = tables.read_rows(entry, kind)
    channels, rows = tables.choose_channels(rows, entry.name, options.text_field, options.label_field)
    while block := list(islice(rows, context)):
        vectors = torch.tensor([[float(row[channel]) for channel in channels] for row in block])
        _check_channels(found, vectors.shape[1])
        for row, output in zip(block, _outputs(found, vectors[None], None)[0], strict=True):
            yield {**row, "prediction": found.task.names[int(output.argmax())]}


def _check_channels(found: TaskModel, channels: int) -> None:
    expected = found.model.config.input_dim
    if channels != expected:
        raise ValueError(f"the model reads {expected} channels, the data has {channels}")


def _batches(
    found: TaskModel, inputs: Iterator[tuple[Record, Any]], encoder: DocumentEncoder, context: int, batch_size: int
) -> Iterator[Record]:
    while block := list(islice(inputs, batch_size)):
        encoded = [_encode(found, content, encoder) for _, content in block]
        windows = [_windows(found.task, tokens, context) for tokens, _ in encoded]
        flat = [window for each in windows for window in each]
        outputs = iter([x for i in range(0, len(flat), batch_size) for x in _run(found, flat[i : i + batch_size])])
        for (columns, _), (_, units), each in zip(block, encoded, windows, strict=True):
            output = [next(outputs) for _ in each]
            yield {**columns, **_described(found.task, np.concatenate(output) if len(each) > 1 else output[0], units)}


def _windows(task: SupervisedTask, tokens: Array, context: int) -> list[Array]:
    """Return what is read of a document: its start, its end for a forecast, all of it to label tokens."""
    if task.kind == "forecast":
        return [tokens[-context:]]
    stop = max(1, len(tokens)) if task.kind == "tag" else 1
    return [tokens[start : start + context] for start in range(0, stop, context)]


def _run(found: TaskModel, sequences: Sequence[Array]) -> list[NDArray[np.float64]]:
    """Return the outputs of a batch: of each sequence, or of each of its tokens."""
    vectors, longest = found.model.config.input_dim is not None, max(1, *map(len, sequences))
    width = (found.model.config.input_dim or 0,) if vectors else ()
    batch: Array = np.zeros((len(sequences), longest, *width), np.float32 if vectors else np.int64)
    for row, tokens in zip(batch, sequences, strict=True):
        row[: len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in sequences])
    mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
    outputs = _outputs(found, torch.from_numpy(batch), None if bool(mask.all()) else mask)
    return [x[:length] if found.task.per_token else x for x, length in zip(outputs, lengths, strict=True)]


def _encode(found: TaskModel, content: Any, encoder: DocumentEncoder) -> tuple[Array, Array | None]:
    """Return tokens or vectors, and for labels of text the word of each token, −1 for spaces between words."""
    vectors = isinstance(content, np.ndarray) and content.ndim == 2
    if vectors != (found.model.config.input_dim is not None):
        kinds = ("text or tokens", "vectors") if vectors else ("vectors", "text or tokens")
        raise ValueError(f"the model reads {kinds[0]}, and the data is {kinds[1]}: give data as it was trained on")
    if isinstance(content, np.ndarray):
        if vectors:
            _check_channels(found, content.shape[1])
        return content, None
    if found.task.kind != "tag":
        text = content if isinstance(content, str) else content.decode("utf-8", "replace")
        whole = encoder.tokenizer is None and isinstance(content, bytes)
        return (np.frombuffer(content, np.uint8) if whole else encoder.encode_with_starts(text)[0]), None
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    tokens, first = encoder.encode_with_starts(text)
    spaces = np.array([character == " " for character in text] + [True])
    units = np.where(spaces, -1, spaces.cumsum()) if " " in text else np.arange(len(text) + 1)
    return tokens, units[first]


def _described(task: SupervisedTask, output: NDArray[np.float64], units: Array | None) -> Record:
    """Return the columns of a prediction."""
    if task.kind == "classify":
        chances = np.exp(output - output.max())
        best = int(output.argmax())
        return {"prediction": task.names[best], "probability": round(float(chances[best] / chances.sum()), 6)}
    if task.kind == "multilabel":
        chances = 1 / (1 + np.exp(-output))
        pairs = list(zip(task.names, chances.tolist(), strict=True))
        return {"prediction": "|".join(n for n, p in pairs if p > 0.5), **{f"p({n})": round(p, 6) for n, p in pairs}}
    if task.kind in ("regress", "forecast"):
        numbers = task.denormalize(output[-1] if task.kind == "forecast" else output).tolist()
        if len(numbers) == 1:
            return {"prediction": numbers[0]}
        return {f"prediction {name}": number for name, number in zip(task.names, numbers, strict=True)}
    if units is not None:  # A word has the class that its tokens vote for.
        votes = np.zeros((int(units.max(initial=-1)) + 1, output.shape[1]))
        np.add.at(votes, units[units >= 0], output[units >= 0])
        output = votes
    return {"prediction": " ".join(task.names[i] for i in output.argmax(1))}
