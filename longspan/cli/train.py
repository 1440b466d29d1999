"""The command `longspan train`: train a model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Suppress

from longspan.cli.arguments import flags, parse, to_text
from longspan.models.config import FeedForwardConfig, ModelConfig
from longspan.train.config import Settings, TrainConfig, resolve, saved_settings
from longspan.train.presets import PRESETS
from longspan.utils import nearest

REPEATED = ("--data", "--eval-data")


@dataclass(frozen=True)
class ModelFlags(ModelConfig):
    """Causal, vocab_size and num_classes follow from the objective and the data unless given."""

    cross: Annotated[None, Suppress] = None
    feed_forward: FeedForwardConfig = field(default_factory=FeedForwardConfig)
    """Feed-forward layers."""

    def __post_init__(self) -> None:
        """Skip the checks: some fields are inferred from the data."""


@dataclass(frozen=True)
class TrainFlags(TrainConfig):
    """Train a model on text, chats, code, DNA, images, audio or tokens.

    Re-run the same command, or give --out alone, to resume a run. --data, --eval-data: repeat for several sources.
    Defaults are those of --preset small. --help-all also lists the fields of the model, such as --model.dim.
    """

    config: Path | None = None
    """TOML file with options; flags take precedence."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Print size, memory and time estimates, and exit."""
    model: FlagConversionOff[ModelFlags] = field(default_factory=ModelFlags)

    def __post_init__(self) -> None:
        """Skip the checks: values of the preset are missing."""


@dataclass(frozen=True)
class BriefTrainFlags(TrainFlags):
    __doc__ = TrainFlags.__doc__
    model: Suppress[FlagConversionOff[ModelFlags]] = field(default_factory=ModelFlags)


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    settings, dry_run = read_settings(argv)
    _dry_run(settings) if dry_run else _train(settings)


def read_settings(argv: Sequence[str]) -> tuple[Settings, bool]:
    """Return the settings that flags and the file of --config describe, and whether this is a dry run."""
    if "--help-all" in argv or {"--help", "-h"} & set(argv):
        _print_help(brief="--help-all" not in argv)
    words = list(argv)
    config = parse(TrainFlags, words, "train").config
    names = flags(TrainFlags)
    if config is not None:
        words = [*_file_flags(config, names, _given(words, names)), *words]
    parsed = parse(TrainFlags, words, "train")
    given = {}
    for flag in _given(words, names):
        name = flag[2:].replace("-", "_")
        value: Any = parsed
        for part in name.split("."):
            value = getattr(value, part)
        given[name] = value
    for name in ("config", "dry_run"):
        given.pop(name, None)
    saved = saved_settings(given)
    if saved is not None:
        return saved, parsed.dry_run
    if given.get("label_field") and "objective" not in given:
        given["objective"] = _guess_objective(given)
    return resolve(given), parsed.dry_run


def _guess_objective(given: dict[str, Any]) -> str:
    """Return the task that the label columns of the first table are for."""
    from longspan.train.data.containers import open_entries
    from longspan.train.data.readers import ReadOptions, find_source
    from longspan.train.data.tables import read_rows, table_kind
    from longspan.train.data.tasks import guess_task

    for text in given.get("data", ()):
        for path in find_source(text, ReadOptions(given.get("extensions", ()), given.get("exclude", ()))).files:
            with closing(open_entries(path, lambda name: True)) as entries:
                for entry in entries:
                    kind = table_kind(entry)
                    if kind is not None:
                        return guess_task(read_rows(entry, kind), given["label_field"])
    raise ValueError("--label-field is for tables, and there is none in the data: leave it out")


def _print_help(brief: bool) -> None:
    preset = PRESETS[TrainConfig.preset]
    values = vars(ModelConfig.from_dict(preset.model))
    if brief:
        parse(BriefTrainFlags, ["--help"], "train", BriefTrainFlags(**preset.train, model=ModelFlags(**values)))
    parse(TrainFlags, ["--help"], "train", TrainFlags(**preset.train, model=ModelFlags(**values)))


def _given(words: Sequence[str], names: dict[str, Any]) -> dict[str, None]:
    """The flags among the words of a command line."""
    found: dict[str, None] = {}
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        flag = f"--{flag[5:]}" if flag.startswith("--no-") and flag not in names else flag
        if flag in names:
            found[flag] = None
    return found


def _file_flags(path: Path, names: dict[str, Any], given: dict[str, None]) -> list[str]:
    """The options of a TOML file as flags; repeated ones are left out if they are given."""
    try:
        tomllib = import_module("tomllib")
    except ImportError:  # Python 3.10
        tomllib = import_module("tomli")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"--config {path}: there is no such file") from None
    except ValueError as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from None
    words = []
    for flag, value in _flatten(values, "--", names).items():
        if flag not in names:
            raise ValueError(f"unknown setting {flag} in {path}{nearest(flag, names)}")
        if flag in REPEATED:
            each = [value] if isinstance(value, str) else value
            words += [f"{flag}={source}" for source in each if flag not in given]
        elif names[flag] is bool and not flag.startswith("--model.") and isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words.append(f"{flag}={to_text(value)}")
    return words


def _flatten(values: dict[str, Any], prefix: str, names: dict[str, Any]) -> dict[str, Any]:
    """Flags with their values; a mapping that is the value of one option stays as it is."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        flag = prefix + name.replace("_", "-")
        nested = isinstance(value, dict) and flag not in names
        found |= _flatten(value, f"{flag}.", names) if nested else {flag: value}
    return found


def _train(settings: Settings) -> None:
    from longspan.train.loggers import Logger, RunLogger
    from longspan.train.run_folder import check_shared, cleaned, locked
    from longspan.train.setup import check_equal, in_every_process, main_process_first, make_accelerator, make_mesh

    run = Path(settings.train.out)
    accelerator = make_accelerator(settings.train.device, settings.train.precision)
    check_equal(accelerator, {"train": vars(settings.train), "model": settings.model}, "settings")
    mesh = in_every_process(accelerator, lambda: make_mesh(settings.train, accelerator))
    main = accelerator.is_main_process
    logger = RunLogger(run, tensorboard=settings.train.tensorboard) if main else Logger()
    with ExitStack() as stack:
        main_process_first(accelerator, lambda: stack.enter_context(locked(run, logger.info)) if main else None)
        if not main:
            stack.enter_context(cleaned(run))
        if mesh is not None:
            in_every_process(accelerator, lambda: check_shared(run, main))
        _run(settings, run, accelerator, mesh, logger)
    accelerator.end_training()


def _run(settings: Settings, run: Path, accelerator: Any, mesh: Any, logger: Any) -> None:
    from longspan.train.loggers import METRICS, read_records
    from longspan.train.trainer import Trainer

    trainer = Trainer(settings, logger, accelerator, mesh)
    for line in trainer.store.describe_sources():
        logger.info(line)
    data, about = trainer.metadata["data"], trainer.metadata
    logger.info(
        f"{about['parameters']:,} parameters; {data['train_tokens']:,} tokens to train on, "
        f"{data['held_out_tokens']:,} held out; {about['device']}, {about['precision']} precision"
    )
    unused = trainer.batches.unused_tokens
    if unused:
        logger.info(
            f"{unused:,} tokens are in documents shorter than the context and not read; --packing on reads them"
        )
    score = trainer.run()
    bits = score.get("eval_bits_per_byte")
    if bits is not None and accelerator.is_main_process:
        first = next((r["bits_per_byte"] for r in read_records(run / METRICS) if r.get("bits_per_byte")), math.nan)
        logger.info(
            f"bits per byte: {first:.3f} at the first step, {bits:.3f} now on held-out data; "
            f"the unigram baseline is {data['unigram_bits_per_byte']:.3f}"
        )
    logger.info(f"the training data was read {trainer.batches.epochs:.2f} times")
    logger.info(f"the model is in {run / 'checkpoint'}; longspan report {run} draws its curves")


def _dry_run(settings: Settings) -> None:
    from longspan.train.dry_run import estimate
    from longspan.train.loggers import Logger
    from longspan.train.setup import make_accelerator, make_mesh
    from longspan.train.trainer import Trainer

    accelerator = make_accelerator(settings.train.device, settings.train.precision)
    mesh = make_mesh(settings.train, accelerator)
    with tempfile.TemporaryDirectory() as folder:
        for text in estimate(Trainer(settings, Logger(), accelerator, mesh, Path(folder) / "data")):
            if accelerator.is_main_process:
                print(text, flush=True)
