"""Supervised tasks: what a label is, how it is read from a row, and how numbers stand for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TaskKind = Literal["classify", "multilabel", "regress", "tag", "forecast"]
TASKS: tuple[TaskKind, ...] = ("classify", "multilabel", "regress", "tag", "forecast")
PER_TOKEN = ("tag", "forecast")  # an output for each token, not one for a document
PROBLEM_TYPES = {
    "classify": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regress": "regression",
}
_MAX_CLASSES = 100  # distinct integers above which a column is guessed to be numbers
_SAMPLE = 1000  # rows by which a task is guessed


@dataclass(frozen=True)
class SupervisedTask:
    """A supervised task, as it is stored in `store.json` and in the `config.json` of a checkpoint.

    Args:
        kind: What to predict: one class, several classes, numbers, a class for each token, or the next vector.
        names: The classes, or the names of the predicted numbers.
        mean: Mean of each predicted number in the training data; outputs of the model are (y − mean) / std.
        std: Standard deviation of each predicted number.
        text_field: The column of the input, if it was named.
        label_field: The columns of the labels, if they were named.
    """

    kind: TaskKind
    names: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    text_field: str | None = None
    label_field: tuple[str, ...] = ()

    @property
    def per_token(self) -> bool:
        """Whether there is an output for each token."""
        return self.kind in PER_TOKEN

    def description(self) -> dict[str, Any]:
        """Return the entries of `config.json`: the task and, for transformers, problem_type and id2label."""
        found: dict[str, Any] = {"task": asdict(self)}
        if self.kind in PROBLEM_TYPES:
            found["problem_type"] = PROBLEM_TYPES[self.kind]
        if self.kind != "forecast":
            found["id2label"] = {str(i): name for i, name in enumerate(self.names)}
            found["label2id"] = {name: i for i, name in enumerate(self.names)}
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SupervisedTask:
        """Return the task that `asdict` described."""
        given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**given)

    def denormalize(self, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return numbers in the units of the data."""
        return outputs * np.array(self.std) + np.array(self.mean)


def read_label(kind: str, values: Sequence[Any], columns: Sequence[str]) -> Any:
    """Return the label of a row: a class, a tuple of classes, a tuple of numbers, or a class for each token.

    Args:
        kind: The task.
        values: The row's values in the label columns.
        columns: Their names.

    Returns:
        The label; None if it is missing.

    Raises:
        ValueError: A value is not of the kind that the task needs.
    """
    if any(value is None or (value == "" and (kind != "multilabel" or len(values) > 1)) for value in values):
        return None
    if kind == "regress":
        return tuple(map(_number, values, columns))
    if kind == "multilabel":
        if len(columns) > 1:
            return tuple(name for name, value in zip(columns, values, strict=True) if _is_true(value))
        (value,) = values
        return tuple(map(str, value if isinstance(value, list) else filter(None, re.split(r"\s*[|;,]\s*", str(value)))))
    (value,) = values
    if kind == "tag":
        if isinstance(value, str) and value.startswith("["):
            value = json.loads(value)
        return list(map(str, value.split() if isinstance(value, str) and " " in value else value))
    return str(value)


def _number(value: Any, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{column!r} must be a number, got {value!r:.40}; use --objective classify for names"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"{column!r} must be a finite number, got {value!r}")
    return number


def _is_true(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "1.0", "true", "yes"):
        return True
    if text in ("0", "0.0", "false", "no"):
        return False
    raise ValueError(f"several label columns are true or false (1 or 0), got {value!r:.40}")


def guess_task(rows: Iterator[Mapping[str, Any]], columns: Sequence[str]) -> TaskKind:
    """Return what the label columns of a table are for, by its first rows."""
    first = list(islice(rows, _SAMPLE))
    values = [row.get(column) for row in first for column in columns]
    values = [value for value in values if value is not None and value != ""]
    if any(isinstance(value, list) for value in values):
        return "tag" if len(columns) == 1 and _fits_words(first, columns[0]) else "multilabel"
    numbers = [x for x in map(_as_number, values) if x is not None]
    if len(numbers) < len(values) or not numbers:
        return "classify"
    if len(columns) > 1 and set(numbers) <= {0.0, 1.0}:
        return "multilabel"
    fractions = any(isinstance(value, float) or "." in str(value) for value in values)
    return "regress" if fractions or len(columns) > 1 or len(set(numbers)) > _MAX_CLASSES else "classify"


def _fits_words(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    """Return whether the lists of a column are as long as lists of words in another one."""
    others = {name for row in rows for name, value in row.items() if name != column and isinstance(value, list)}
    return any(
        all(
            isinstance(row.get(name), list)
            and len(row[name]) == len(row.get(column) or ())
            and all(isinstance(word, str) for word in row[name])
            for row in rows
        )
        for name in others
    )


def check_classes(names: Sequence[str]) -> None:
    """Raise ValueError if the labels of a classification are fractions, so that each would be a class of its own."""
    numbers = [_as_number(name) for name in names]
    if len(names) > 2 and all(x is not None for x in numbers) and any("." in name for name in names):
        raise ValueError(
            f"the labels are numbers such as {names[0]}, {len(names):,} different ones: use --objective regress"
        )


def _as_number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
