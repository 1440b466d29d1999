"""What a run is: one frozen description of the training and one of the model, from a preset, a file and flags.

Later wins: the defaults, the preset, the file given with --config, the flags. A flag is a field's name with dashes;
a field of the model has its path before it, as --model.dim or --model.attention.num_heads.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from longspan.models.config import AttentionConfig, ModelConfig
from longspan.train.presets import PRESETS, Values, named_mechanism
from longspan.utils import choose, nearest

OBJECTIVES = ("causal", "masked", "classify")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SWITCHES = ("auto", "on", "off")
DEVICES = ("auto", "cpu", "cuda", "mps")
BIN_DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Everything about a run but its model. What each field means is in its help text."""

    data: tuple[str, ...] = _field((), "A file, folder, glob or weight=path; several times for several sources.")
    out: str = _field("", "The run's folder; a run that is there goes on.")
    preset: str = _field("small", f"Where the other settings start from: {', '.join(PRESETS)}.")
    mechanism: str = _field("split", "A mechanism's name, or its options as JSON; split: local and linear heads.")
    objective: str = _field("causal", f"{', '.join(OBJECTIVES)}: from folders named after classes, or a CSV.")
    context: int = _field(4096, "Tokens in a row.")
    batch_size: int = _field(16, "Rows in a batch, for each process.")
    accumulate: int = _field(1, "Batches whose gradients are added up for one step.")
    steps: int | None = _field(None, "Steps in all.")
    minutes: float | None = _field(None, "Time in all, compiling and scoring not counted; the schedule follows it.")
    lr: float = _field(2e-3, "The highest learning rate.")
    warmup: int = _field(200, "Steps in which the learning rate rises.")
    min_lr: float = _field(0.0, "What the cosine falls to, as a part of lr.")
    weight_decay: float = _field(0.1, "Of matrices; vectors have none.")
    betas: tuple[float, ...] = _field((0.9, 0.95), "AdamW's two averages.")
    clip: float = _field(1.0, "The longest gradient; 0 does not clip.")
    carry_state: bool = _field(False, "Carry each document's memory from one row to the next (truncated BPTT).")
    packing: str = _field("auto", "Documents end to end in a row, without leaks: on, off, or where they are short.")
    mask_rate: float = _field(0.15, "Tokens hidden by the masked objective.")
    tokenizer: str | None = _field(None, "A Hugging Face tokenizer file (tokenizer.json); bytes without.")
    extensions: tuple[str, ...] = _field((), "Extensions taken from folders, as .py,.md; all without.")
    exclude: tuple[str, ...] = _field((), "Names of files and folders inside folders that are not taken, as test,old*.")
    bin_dtype: str = _field("uint16", f"Numbers in .bin files: {', '.join(BIN_DTYPES)}.")
    image_size: int | None = _field(None, "Width and height images are brought to.")
    held_out: float = _field(0.05, "Share of the data that is scored and never trained on, chosen by content.")
    eval_data: tuple[str, ...] = _field((), "Data to score in place of a held-out share.")
    precision: str = _field("auto", f"{', '.join(PRECISIONS)}; auto: bf16 on a GPU that has it.")
    compile: str = _field("auto", "on, off, or on where rows on a GPU are plain.")
    device: str = _field("auto", f"{', '.join(DEVICES)}.")
    seed: int = _field(0, "Decides weights, order and dropout.")
    log_every: int = _field(10, "Steps between lines of metrics.jsonl.")
    eval_every: int = _field(200, "Steps between scores of the held-out data, and samples.")
    eval_tokens: int = _field(65_536, "About how many held-out tokens are scored each time.")
    save_every: int = _field(200, "Steps between checkpoints.")
    divergence: float = _field(3.0, "Stop when ten losses are on average so many times those before; 0 never.")
    prompt: str = _field("", "What samples continue; without, the start of the held-out data.")
    sample_tokens: int = _field(256, "Tokens in a sample; 0 draws none.")
    tensorboard: bool = _field(False, "Write TensorBoard's files to the run's folder too.")

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("there is nothing to train on: give --data, a file, folder or glob")
        if not self.out:
            raise ValueError("give --out, the run's folder")
        for name, allowed in (
            ("preset", tuple(PRESETS)),
            ("objective", OBJECTIVES),
            ("precision", PRECISIONS),
            ("packing", SWITCHES),
            ("compile", SWITCHES),
            ("device", DEVICES),
            ("bin_dtype", BIN_DTYPES),
        ):
            choose(_flag(name), getattr(self, name), allowed)
        for name in ("context", "batch_size", "accumulate", "log_every", "eval_every", "eval_tokens", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "minutes", "image_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{_flag(name)} must be above 0, got {value}")
        for name in ("warmup", "weight_decay", "clip", "divergence", "sample_tokens", "min_lr"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must be 0 or more, got {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"--lr must be above 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas are two numbers in [0, 1), as 0.9,0.95, got {self.betas}")
        if not 0 <= self.held_out < 1 or not 0 < self.mask_rate < 1:
            raise ValueError(
                f"--held-out must be in [0, 1) and --mask-rate in (0, 1), got {self.held_out} and {self.mask_rate}"
            )
        if self.steps is None and self.minutes is None:
            raise ValueError("give --steps or --minutes: how long to train")
        if self.carry_state and self.objective != "causal":
            raise ValueError(f"--carry-state is for --objective causal, got {self.objective}")
        if self.carry_state and self.packing == "on":
            raise ValueError("--carry-state reads one document at a time in each row: leave --packing out")


@dataclass(frozen=True)
class Settings:
    """A run's description. chosen: the dotted names of model fields that were given, and so must not be guessed."""

    train: TrainConfig
    model: Values
    chosen: frozenset[str]

    def complete(self, vocab_size: int, num_classes: int) -> ModelConfig:
        """The model's configuration, once the data is known."""
        values = _merged({}, self.model)
        causal = self.train.objective == "causal"
        guesses = {"causal": causal, "vocab_size": vocab_size + (self.train.objective == "masked")}
        if self.train.objective == "classify":
            guesses["num_classes"] = num_classes
        for name, value in guesses.items():
            if name not in self.chosen:
                values[name] = value
            elif name == "causal" and values[name] != value and self.train.objective != "classify":
                raise ValueError(f"--objective {self.train.objective} needs a model with causal={value}")
            elif name != "causal" and values[name] < value:
                raise ValueError(f"--model.{name} is {values[name]}, and the data needs {value} at least")
        if values.get("positions") in ("learned", "axial") and "max_length" not in self.chosen:
            values["max_length"] = self.train.context
        return ModelConfig.from_dict(values)


def resolve(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """The settings of a run: flags by field name, the model's with `model.` before them, as text or as values."""
    given: Values = {}
    for source, values in (("the file", _file(config)), ("flags", dict(flags))):
        given |= {name: _converted(name, value, source) for name, value in values.items()}
    preset = PRESETS[choose("--preset", given.get("preset", TrainConfig.preset), PRESETS)]
    train_values = {**preset.train, **{k: v for k, v in given.items() if not k.startswith("model.")}}
    if given.get("minutes") is not None and given.get("steps") is None:
        train_values["steps"] = None
    train = TrainConfig(**train_values)
    chosen = {name.removeprefix("model."): value for name, value in given.items() if name.startswith("model.")}
    model = _merged({}, preset.model)
    for name, value in chosen.items():
        _set(model, name, value)
    model["attention"] |= _attention(train, model, given, chosen)
    return Settings(train, model, frozenset(chosen))


def fields_of() -> dict[str, tuple[Any, str]]:
    """Every field by its name here: its type and a line of help."""
    hints = typing.get_type_hints(TrainConfig)
    found = {f.name: (hints[f.name], f.metadata["help"]) for f in dataclasses.fields(TrainConfig)}
    return found | _fields_within(ModelConfig, "model.")


def _fields_within(cls: Any, prefix: str) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        group = next((each for each in _options(hint) if dataclasses.is_dataclass(each)), None)
        if group is None:
            found[prefix + name] = hint, ""
        elif name != "cross":  # There is nothing to attend to here.
            found |= _fields_within(group, f"{prefix}{name}.")
    return found


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def described(settings: Settings, model: ModelConfig) -> Values:
    """The run as plain values, for JSON: what a checkpoint is compared with."""
    return json.loads(json.dumps({"train": dataclasses.asdict(settings.train), "model": model.to_dict()}))


# What may change when a run goes on: none of it alters a step that was already made.
FREE = (
    *("out", "steps", "minutes", "log_every", "eval_every", "eval_tokens", "save_every", "divergence", "prompt"),
    *("sample_tokens", "tensorboard", "compile", "device"),
)


def differences(one: Values, other: Values) -> dict[str, tuple[Any, Any]]:
    """Every field that differs, by dotted name."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**one, **other}:
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= {f"{name}.{inner}": pair for inner, pair in differences(a, b).items()}
        elif a != b:
            found[name] = a, b
    return found


def _attention(train: TrainConfig, model: Values, given: Values, chosen: Values) -> Values:
    if "attention.mechanism" in chosen:
        if "mechanism" in given:
            raise ValueError("--mechanism and --model.attention.mechanism say the same: give one of them")
        return {}
    text = train.mechanism.strip()
    if text.startswith(("{", "[")):
        try:
            return {"mechanism": json.loads(text)}
        except ValueError as error:
            raise ValueError(f"--mechanism is neither a name nor JSON: {error}") from None
    heads = model["attention"].get("num_heads", AttentionConfig.num_heads)
    named = named_mechanism(text, heads, train.context)
    return {name: value for name, value in named.items() if f"attention.{name}" not in chosen}


def _file(path: Path | None) -> Values:
    if path is None:
        return {}
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
    return _flat(values, "")


def _flat(values: Values, prefix: str) -> Values:
    """Dotted names; a mechanism's options are one value."""
    found: Values = {}
    for name, value in values.items():
        if isinstance(value, dict) and name != "mechanism":
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _converted(name: str, value: Any, source: str) -> Any:
    known = fields_of()
    if name not in known:
        names = [_flag(each) for each in known]
        raise ValueError(f"unknown setting {_flag(name)} in {source}{nearest(_flag(name), names)}")
    hint = known[name][0]
    try:
        return _as(value, hint)
    except (TypeError, ValueError):
        raise ValueError(f"{_flag(name)} must be {_say(hint)}, got {value!r}") from None


def _as(value: Any, hint: Any) -> Any:
    """The value, which may be text, as the type of a field."""
    options = _options(hint)
    if type(None) in options and (value is None or value == "none"):
        return None
    kind = options[0]
    if kind is bool:
        answers = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
        if isinstance(value, bool) or (str in options and str(value).lower() not in answers):
            return value
        return answers[str(value).lower()] if str(value).lower() in answers else _no()
    if kind in (int, float):
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            _no()
        return kind(value)
    if len(options) > 1 and type(None) not in options:  # a name or something longer: a mechanism, rotary positions
        if isinstance(value, str) and value[:1] in ("{", "["):
            return json.loads(value)
        return value
    if typing.get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else list(value)
        inner = typing.get_args(kind)[0]
        return tuple(_as(part.strip() if isinstance(part, str) else part, inner) for part in parts if part != "")
    return value if isinstance(value, str) else _no()


def _no() -> Any:
    raise ValueError


def _say(hint: Any) -> str:
    options = _options(hint)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return " or ".join(names.get(o, "a list, as 1,2") for o in options)


def _flag(name: str) -> str:
    return "--" + (name if name.startswith("model.") else name.replace("_", "-"))


def _set(values: Values, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = value


def _merged(one: Values, other: Values) -> Values:
    found = dict(one)
    for name, value in other.items():
        group = isinstance(value, dict) and name != "mechanism"
        found[name] = _merged(found.get(name, {}), value) if group else value
    return found
