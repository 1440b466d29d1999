"""The command `longspan predict`: write the predictions of a model as CSV."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import UseAppendAction

from longspan.cli.arguments import check_at_least, parse
from longspan.utils import printable, replace_file


@dataclass(frozen=True)
class PredictFlags:
    """Predict classes, numbers, labels of words or next vectors with a trained model, and write them as CSV.

    Rows of tables keep their columns.
    """

    model: Path
    """Checkpoint folder, or the folder of a run."""
    data: UseAppendAction[tuple[str, ...]] = ()
    """File, folder or glob to predict."""
    out: Path | None = None
    """CSV file for the predictions; standard output by default."""
    text_field: str | None = None
    """Column of text in tables; that of the run, or guessed, by default."""
    file_field: str | None = None
    """Column of files to read, such as images; relative to the table."""
    context: int | None = None
    """Length to cut documents to; that of the training run by default."""
    batch_size: int = 16
    """Documents per batch."""
    image_size: int | None = None
    """Resize images to this width and height; that of the run by default."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""

    def __post_init__(self) -> None:
        check_at_least(1, context=self.context, batch_size=self.batch_size, image_size=self.image_size)
        if not self.data:
            raise ValueError("there is nothing to predict: give --data, a file, folder or glob")


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(PredictFlags, argv, "predict")
    from longspan.train.data.readers import ReadOptions
    from longspan.train.evaluation import run_settings
    from longspan.train.prediction import load_task_model, predict

    found = load_task_model(flags.model, flags.device)
    if found is None:
        raise ValueError(f"{flags.model} is a language model, which longspan generate uses; predict needs a classifier")
    run = run_settings(flags.model)
    size = flags.image_size or run.get("image_size")
    options = ReadOptions(
        image_size=size, text_field=flags.text_field, file_field=flags.file_field or run.get("file_field")
    )
    context = flags.context or run.get("context") or 4096
    if flags.out is None:
        predict(found, flags.data, options, sys.stdout, context=context, batch_size=flags.batch_size)
        return
    with replace_file(flags.out) as partial, open(partial, "w", encoding="utf-8", newline="") as file:
        number = predict(found, flags.data, options, file, context=context, batch_size=flags.batch_size)
    print(f"{number:,} predictions are in {printable(str(flags.out))}", file=sys.stderr)
