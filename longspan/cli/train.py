"""`longspan train`, `longspan eval` and `longspan report`."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.train.config import Settings, fields_of, resolve
from longspan.utils import nearest

_OTHER = ("--config", "--dry-run", "--debug", "--help")


def _with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """The function with an option for every field of a run, so that --help lists them all."""
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, (hint, text) in fields_of().items():
        flag = f"--{name}" if name.startswith("model.") else f"--{name.replace('_', '-')}"
        panel = "The model" if name.startswith("model.") else None
        annotation: Any
        if hint is bool and not name.startswith("model."):
            annotation = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text)]
        elif name in ("data", "eval_data"):
            annotation = Annotated[list[str] | None, typer.Option(flag, help=text)]
        else:
            annotation = Annotated[str | None, typer.Option(flag, help=text, metavar="VALUE", rich_help_panel=panel)]
        parameters.append(inspect.Parameter(name.replace(".", "__"), kind, default=None, annotation=annotation))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    # Wrong flags are ours to answer: one line that names the nearest.
    function.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]
    return function


def _train(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings; flags win over it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show size, memory and time, and do nothing.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    **flags: Any,
) -> None:
    """Train a model on files, folders or globs of text, code, DNA, images or tokens.

    A run that was stopped, by whatever, goes on when the same command is given again.
    """
    with plainly(debug):
        _refuse_unknown(ctx.args)
        given = {name.replace("__", "."): value for name, value in flags.items() if value is not None and value != []}
        settings = resolve(given, config)
        _dry_run(settings) if dry_run else _run(settings)


train = _with_flags(_train)
train.__name__ = "train"


def _run(settings: Settings) -> None:
    from longspan.train.loggers import METRICS, Logger, RunLogger, read_records
    from longspan.train.run_checkpoint import check_writable
    from longspan.train.setup import make_accelerator
    from longspan.train.trainer import Trainer

    run = Path(settings.train.out)
    accelerator = make_accelerator(settings.train)
    logger = Logger()
    if accelerator.is_main_process:
        check_writable(run, 0)
        logger = RunLogger(run, tensorboard=settings.train.tensorboard)
    trainer = Trainer(settings, logger, accelerator)
    data, about = trainer.metadata["data"], trainer.metadata
    logger.info(
        f"{about['parameters']:,} parameters; {data['train_tokens']:,} tokens to train on, "
        f"{data['held_out_tokens']:,} held out; {about['device']}, {about['precision']} precision"
    )
    left_out = trainer.batches.unused_tokens
    if left_out:
        logger.info(
            f"{left_out:,} tokens are in documents shorter than the context and not read; --packing on reads them"
        )
    score = trainer.run()
    if accelerator.is_main_process:
        bits, first = score.get("eval_bits_per_byte"), read_records(run / METRICS)[0]["bits_per_byte"]
        if bits is not None:
            logger.info(
                f"bits per byte: {first:.3f} at the first step, {bits:.3f} now on held-out data; "
                f"the unigram baseline is {data['unigram_bits_per_byte']:.3f}"
            )
        logger.info(f"the model is in {run / 'checkpoint'}; longspan report {run} draws its curves")
    accelerator.end_training()


def _dry_run(settings: Settings) -> None:
    from longspan.train.dry_run import estimate
    from longspan.train.loggers import Logger
    from longspan.train.setup import make_accelerator
    from longspan.train.trainer import Trainer

    accelerator = make_accelerator(settings.train)
    with tempfile.TemporaryDirectory() as folder:
        for text in estimate(Trainer(settings, Logger(), accelerator, Path(folder))):
            typer.echo(text)


def evaluate(
    model: Annotated[Path | None, typer.Option(help="A checkpoint folder, or the folder of a run.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files, folders or globs to score, all of them.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens in a window; those of the run without.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows at a time: 4, or 32 of a task.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="About how many tokens to score: 1048576.")] = None,
    extensions: Annotated[str | None, typer.Option(help="Extensions taken from folders, as .py,.md.")] = None,
    task: Annotated[
        str | None, typer.Option(help="In place of a model and data: copy, mqar, needle, listops, or several of them.")
    ] = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="Those to try on a task, as linear,local; all without.")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a task's row: 256, for listops 2000.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train on a task, at most: 400.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of a task's rows and its models' first weights.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures (JSON), and a plot beside them.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Score a language model: bits per byte and perplexity, in all and by position in the context.

    With --task, train a small model of each mechanism on a synthetic task, and score those.
    """
    with plainly(debug):
        of_model = {
            "model": model,
            "data": data,
            "context": context,
            "max-tokens": max_tokens,
            "extensions": extensions,
        }
        if task is not None:
            _refuse_given(of_model, "for scoring a saved model; --task trains models of its own: leave it out")
            from longspan.train.synthetic.evaluation import TrialConfig, print_trials, run_trials

            given = {"steps": steps, "batch_size": batch_size, "seed": seed}
            trial = TrialConfig(**{name: value for name, value in given.items() if value is not None})
            print_trials(
                run_trials(_parts(task), None if mechanisms is None else _parts(mechanisms), length, trial, out, device)
            )
            return
        of_task = {"mechanisms": mechanisms, "length": length, "steps": steps, "seed": seed}
        _refuse_given(of_task, "for training on a synthetic task: give --task too, or leave it out")
        if model is None or not data:
            raise ValueError("give --model and --data to score a saved model, or --task to try mechanisms on a task")
        from longspan.train.evaluation import evaluate_checkpoint, print_evaluation, write_evaluation

        found = evaluate_checkpoint(
            model,
            data,
            context=context,
            batch_size=batch_size or 4,
            max_tokens=max_tokens or 2**20,
            extensions=_parts(extensions or ""),
            device=device,
        )
        print_evaluation(found)
        if out is not None:
            for path in write_evaluation(found, out):
                typer.echo(f"written: {path}", err=True)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _refuse_given(flags: dict[str, Any], why: str) -> None:
    given = [f"--{name}" for name, value in flags.items() if value not in (None, [])]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `longspan train --out` made.")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the first run's folder without.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Draw loss against tokens and time for one run or several, with differences and samples, as one HTML file."""
    with plainly(debug):
        from longspan.train.report import read_run, write_report

        for path in write_report([read_run(run) for run in runs], runs[0] / "report.html" if out is None else out):
            typer.echo(path)


@contextmanager
def plainly(debug: bool) -> Iterator[None]:
    """Errors as one line and a status, unless they are to be looked into."""
    if not debug:
        warnings.simplefilter("ignore")
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Exception as error:
        if debug:
            raise
        from longspan.train.signals import StoppedError

        text = " ".join(str(error).split()) or type(error).__name__
        known = isinstance(error, ValueError | OSError | StoppedError)
        typer.echo(f"longspan: {text if known else f'{type(error).__name__}: {text} (--debug shows where)'}", err=True)
        sys.stderr.flush()
        status = error.status if isinstance(error, StoppedError) else 2 if isinstance(error, ValueError) else 1
        if "RANK" in os.environ:
            os._exit(status)  # The others may be waiting for this process: leave without waiting for them.
        raise typer.Exit(status) from None


def _refuse_unknown(extra: list[str]) -> None:
    if not extra:
        return
    names = [*_OTHER, *(f"--{n}" if n.startswith("model.") else f"--{n.replace('_', '-')}" for n in fields_of())]
    flag = extra[0].split("=")[0]
    if flag.startswith("-"):
        raise ValueError(f"unknown flag {flag}{nearest(flag, names)}; longspan train --help lists them")
    raise ValueError(f"{flag!r} belongs to no flag; data is given with --data {flag}")
