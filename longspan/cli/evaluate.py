"""The command `longspan eval`: evaluate a model, or mechanisms on synthetic tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction

from longspan.cli.arguments import check_at_least, parse
from longspan.utils import printable


@dataclass(frozen=True)
class EvalFlags:
    """Evaluate a language model: bits per byte and perplexity, overall and by position in the context.

    Of a classifier: accuracy, F1 and a confusion matrix; of numbers: mean absolute error and R².

    With --task, train a small model of each mechanism on a synthetic task and report its accuracy.
    """

    model: Path | None = None
    """Checkpoint folder, or the folder of a run."""
    data: UseAppendAction[tuple[str, ...]] = ()
    """File, folder or glob to evaluate on."""
    context: int | None = None
    """Context length; that of the training run by default."""
    batch_size: int | None = None
    """Sequences per batch: 4 by default, 32 for tasks."""
    max_tokens: int | None = None
    """Approximate number of tokens to evaluate: 1048576 by default."""
    format: Literal["auto", "bytes"] = "auto"
    """How to read files; bytes: as they are, whatever they contain."""
    text_field: str | None = None
    """Column of text, tokens or messages in tables; guessed by default."""
    label_field: tuple[str, ...] = ()
    """Columns of labels in tables; those of the run, or guessed, by default."""
    file_field: str | None = None
    """Column of files to read, such as images; relative to the table."""
    extensions: tuple[str, ...] = ()
    """Extensions to read in folders, such as .py,.md."""
    task: tuple[str, ...] | None = None
    """Synthetic tasks instead of a model and data: copy, selective-copy, mqar, needle, parity, listops."""
    mechanisms: tuple[str, ...] | None = None
    """Mechanisms to train on the tasks, such as linear,local; all by default."""
    length: int | None = None
    """Sequence length of the tasks: 256 by default, 2000 for listops."""
    steps: int | None = None
    """Maximum number of training steps on a task: 400 by default."""
    seed: int | None = None
    """Seed of a task's sequences and of the initial weights."""
    out: Path | None = None
    """JSON file for the results; a plot is written next to it."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""

    def __post_init__(self) -> None:
        check_at_least(2, context=self.context)
        check_at_least(1, batch_size=self.batch_size, max_tokens=self.max_tokens, length=self.length, steps=self.steps)
        check_at_least(0, seed=self.seed)


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(EvalFlags, argv, "eval")
    if flags.task is not None:
        reason = "for evaluating a saved model; --task trains models of its own: leave it out"
        names = ("model", "data", "context", "max_tokens", "format", "extensions")
        _refuse(flags, (*names, "text_field", "label_field", "file_field"), reason)
        _run_tasks(flags, flags.task)
        return
    reason = "for training on a synthetic task: give --task too, or leave it out"
    _refuse(flags, ("mechanisms", "length", "steps", "seed"), reason)
    if flags.model is None or not flags.data:
        raise ValueError("give --model and --data to evaluate a saved model, or --task to compare mechanisms on a task")
    from longspan.train.data.readers import ReadOptions
    from longspan.train.evaluation import (
        evaluate_checkpoint,
        print_evaluation,
        run_context,
        run_settings,
        write_evaluation,
    )
    from longspan.train.prediction import evaluate_task, load_task_model, print_task, write_task

    run = run_settings(flags.model)
    options = ReadOptions(
        flags.extensions,
        image_size=run.get("image_size"),
        format=flags.format,
        text_field=flags.text_field,
        label_field=flags.label_field,
        file_field=flags.file_field or run.get("file_field"),
    )
    found = load_task_model(flags.model, flags.device)
    if found is not None:
        sizes = {"batch_size": flags.batch_size or 16, "max_tokens": flags.max_tokens or 2**24}
        result = evaluate_task(found, flags.data, options, context=flags.context or run_context(flags.model), **sizes)
        print_task(result)
        _written(write_task(result, flags.out) if flags.out is not None else [])
        return
    if flags.label_field or flags.file_field:
        raise ValueError("--label-field and --file-field are for models that predict labels: leave them out")
    result = evaluate_checkpoint(
        flags.model,
        flags.data,
        context=flags.context,
        batch_size=flags.batch_size or 4,
        max_tokens=flags.max_tokens or 2**20,
        options=options,
        device=flags.device,
    )
    print_evaluation(result)
    _written(write_evaluation(result, flags.out) if flags.out is not None else [])


def _written(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"written: {printable(str(path))}", file=sys.stderr)


def _run_tasks(flags: EvalFlags, tasks: tuple[str, ...]) -> None:
    from longspan.train.synthetic.evaluation import TrialConfig, print_trials, run_trials

    given = {"steps": flags.steps, "batch_size": flags.batch_size, "seed": flags.seed}
    trial = TrialConfig(**{name: value for name, value in given.items() if value is not None})
    print_trials(run_trials(tasks, flags.mechanisms, flags.length, trial, flags.out, flags.device))


def _refuse(flags: EvalFlags, names: Sequence[str], reason: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(flags, name) not in (None, (), "auto")]
    if given:
        raise ValueError(f"{', '.join(given)}: {reason}")
