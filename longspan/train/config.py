"""The settings of a training run: a TrainConfig and a ModelConfig, from defaults, a preset and given values."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import UseAppendAction

from longspan.models.checkpoint import find_checkpoint
from longspan.models.config import OF_TOKENS, AttentionConfig, ModelConfig, check_fields
from longspan.train.data.tasks import PER_TOKEN, TASKS
from longspan.train.initial import Initial
from longspan.train.presets import PRESETS, Values, named_mechanism
from longspan.utils import choose, nearest, read_json

Objective = Literal["causal", "masked", "classify", "multilabel", "regress", "tag", "forecast"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
Switch = Literal["auto", "on", "off"]
Optimizer = Literal["adamw", "muon"]
DecayType = Literal["cosine", "linear"]
Device = Literal["auto", "cpu", "cuda", "mps"]
_OUTPUTS = ("num_classes", "pooling", "input_dim")
Format = Literal["auto", "bytes"]
BinDtype = Literal["uint8", "uint16", "int32", "uint32", "int64"]


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of a training run, without its model."""

    data: UseAppendAction[tuple[str, ...]] = ()
    """File, folder, glob or weight=path to train on."""
    out: str = ""
    """Folder of the run."""
    init: str | None = None
    """Checkpoint or run to start from; its model is the default."""
    init_from: str | None = None
    """Older library that wrote --init, such as performer-pytorch."""
    init_config: str | None = None
    """JSON file with the arguments of the model in that library."""
    freeze: tuple[str, ...] = ()
    """Parameters not to train, such as body or *.embedding*."""
    lora_rank: int | None = None
    """Train LoRA matrices of this rank, not the weights of --init."""
    lora_alpha: float | None = None
    """LoRA scale times the rank; 2 · rank by default."""
    lora_dropout: float = 0.0
    """Dropout of the inputs of LoRA."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers with LoRA, such as to_q,to_kv; all by default."""
    preset: str = "small"
    """Defaults of the other options: tiny, small or base."""
    mechanism: str = "split"
    """Name, or options as JSON; split: local and linear heads."""
    objective: Objective = "causal"
    """What to predict: tokens, classes, numbers, next vectors."""
    context: int = 4096
    """Context length."""
    batch_size: int = 16
    """Sequences per batch and process."""
    accumulate: int = 1
    """Batches whose gradients are accumulated for one step."""
    ramp_up: float = 0.0
    """First share of the run, where steps grow to --accumulate."""
    steps: int | None = None
    """Number of training steps."""
    minutes: float | None = None
    """Training time, without compilation and evaluation."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup: int = 200
    """Warmup steps."""
    min_lr: float = 0.0
    """Final learning rate as a fraction of --lr."""
    decay_type: DecayType = "cosine"
    """Decay of the learning rate to --min-lr."""
    decay_ratio: float = 1.0
    """Last share of the run, where it decays; below 1: WSD."""
    optimizer: Optimizer = "adamw"
    """muon: for the matrices of layers, AdamW for the rest."""
    muon_lr: float | None = None
    """Peak learning rate of Muon; --lr by default."""
    embedding_lr: float | None = None
    """Peak learning rate of embeddings, without weight decay; --lr by default."""
    weight_decay: float = 0.1
    """Weight decay (matrices only)."""
    ngram_decay: float = 0.0
    """Decay of n-gram tables per epoch, from the second on."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """AdamW betas."""
    clip: float = 1.0
    """Gradient-norm clipping; 0 disables."""
    carry_state: bool = False
    """Carry states over to the next sequence (truncated BPTT)."""
    chunk_length: int | None = None
    """Train in chunks of N tokens: same gradients, less memory."""
    packing: Switch = "auto"
    """Pack documents into sequences; auto: if they are short."""
    mask_rate: float = 0.15
    """Fraction of tokens that the masked objective hides."""
    tokenizer: str | None = None
    """Hugging Face tokenizer.json; bytes by default."""
    format: Format = "auto"
    """How to read files; bytes: as they are."""
    text_field: str | None = None
    """Column of text, tokens or messages; guessed by default."""
    label_field: tuple[str, ...] = ()
    """Columns of labels in tables, which determine the objective."""
    file_field: str | None = None
    """Column of files to read, relative to the table."""
    extensions: tuple[str, ...] = ()
    """Extensions to read in folders, such as .py,.md."""
    exclude: tuple[str, ...] = ()
    """Files and folders to skip in folders, such as test,old*."""
    bin_dtype: BinDtype = "uint16"
    """Type of the tokens in .bin files."""
    image_size: int | None = None
    """Resize images to this width and height."""
    held_out: float = 0.05
    """Fraction of the data for evaluation."""
    eval_data: UseAppendAction[tuple[str, ...]] = ()
    """Data for evaluation instead of --held-out."""
    precision: Precision = "auto"
    """Precision; auto: bf16 if the GPU has it, else fp32; fp8: products."""
    compile: Switch = "auto"
    """torch.compile; auto: on a GPU, without packing."""
    device: Device = "auto"
    """Device; auto: a GPU if there is one."""
    mesh: str | None = None
    """Processes by axis, as dp=2,fsdp=4,cp=2; -1: the rest."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    log_every: int = 10
    """Steps between records in metrics.jsonl."""
    eval_every: int = 200
    """Steps between evaluations and samples."""
    eval_tokens: int = 65_536
    """Approximate number of tokens per evaluation."""
    save_every: int = 200
    """Steps between checkpoints."""
    divergence: float = 3.0
    """Stop if the mean loss rises by this factor; 0 disables."""
    prompt: str = ""
    """Prompt of the samples; evaluation data by default."""
    sample_tokens: int = 256
    """Tokens per sample; 0 disables samples."""
    tensorboard: bool = False
    """Write TensorBoard files too."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("there is nothing to train on: give --data, a file, folder or glob")
        if not self.out:
            raise ValueError("give --out, the run's folder")
        choose("--preset", self.preset, PRESETS)
        check_fields(self, _flag)
        for name in ("context", "batch_size", "accumulate", "log_every", "eval_every", "eval_tokens", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"--seed must be an integer of 64 bits, got {self.seed}")
        for name in ("steps", "minutes", "image_size", "lr", "muon_lr", "embedding_lr", "chunk_length"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_flag(name)} must be above 0, got {value}")
        for name in ("warmup", "weight_decay", "ngram_decay", "clip", "divergence", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must be 0 or more, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas are two numbers in [0, 1), as 0.9,0.95, got {self.betas}")
        for name in ("min_lr", "ramp_up"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{_flag(name)} must be in [0, 1], got {getattr(self, name)}")
        if not 0 < self.decay_ratio <= 1:
            raise ValueError(f"--decay-ratio must be in (0, 1], got {self.decay_ratio}")
        if self.ramp_up and self.accumulate == 1:
            raise ValueError("--ramp-up grows a step to --accumulate batches: give --accumulate 2 or more")
        if self.muon_lr is not None and self.optimizer != "muon":
            raise ValueError(f"--muon-lr is for --optimizer muon, got {self.optimizer}")
        if not 0 <= self.held_out < 1 or not 0 < self.mask_rate < 1:
            raise ValueError(
                f"--held-out must be in [0, 1) and --mask-rate in (0, 1), got {self.held_out} and {self.mask_rate}"
            )
        if self.precision == "fp8" and self.lora_rank is not None:
            raise ValueError("--precision fp8 is for layers that are trained themselves: use bf16 with --lora-rank")
        if self.steps is None and self.minutes is None:
            raise ValueError("give --steps or --minutes: how long to train")
        self._check_initial()
        if self.carry_state and self.objective != "causal":
            raise ValueError(f"--carry-state is for --objective causal, got {self.objective}")
        if self.label_field and self.objective not in ("classify", "multilabel", "regress", "tag"):
            raise ValueError(f"--label-field is for classes and numbers: leave it out for --objective {self.objective}")
        if self.format == "bytes" and (self.text_field, self.file_field, self.label_field) != (None, None, ()):
            raise ValueError("--format bytes reads no columns: leave --text-field, --file-field and --label-field out")
        if self.carry_state and self.packing == "on":
            raise ValueError("--carry-state reads one document at a time in each sequence: leave --packing out")
        if self.chunk_length is not None:
            for flag, used in (
                (f"--objective {self.objective}", self.objective != "causal"),
                ("--packing on", self.packing == "on"),
                ("--compile on", self.compile == "on"),
            ):
                if used:
                    raise ValueError(f"--chunk-length cannot be combined with {flag}: leave one of them out")

    def _check_initial(self) -> None:
        if (self.init_from is None) != (self.init_config is None) or (self.init_from and not self.init):
            raise ValueError("--init, --init-from and --init-config together describe a checkpoint of an older library")
        given = [name for name in ("lora_alpha", "lora_dropout", "lora_targets") if getattr(self, name)]
        if self.lora_rank is None:
            if given:
                raise ValueError(f"{_flag(given[0])} is for LoRA: give --lora-rank too, such as 8")
            return
        if self.init is None:
            raise ValueError("--lora-rank adapts a trained model: give --init, its checkpoint")
        if self.lora_rank < 1 or (self.lora_alpha is not None and not self.lora_alpha > 0):
            raise ValueError(
                f"--lora-rank must be at least 1 and --lora-alpha above 0, got {self.lora_rank} and {self.lora_alpha}"
            )
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"--lora-dropout must be in [0, 1), got {self.lora_dropout}")
        if self.mesh is not None:
            raise ValueError("--lora-rank cannot be combined with --mesh: leave one of them out")

    @property
    def initial(self) -> Initial | None:
        """The checkpoint of --init."""
        return None if self.init is None else Initial(self.init, self.init_from, self.init_config)


@dataclass(frozen=True)
class Settings:
    """The settings of a run before its data is known.

    Attributes:
        train: The configuration of the training.
        model: Fields of the model's configuration.
        chosen: Dotted names of the fields of the model that were given and must not be inferred from the data.
    """

    train: TrainConfig
    model: Values
    chosen: frozenset[str]

    def complete_for(self, data: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration of the model for data, as `store.json` describes it."""
        outputs = len(data["task"]["names"]) if data.get("task") else len(data["labels"])
        return self.complete(data["vocab_size"], outputs, data.get("channels"))

    def complete(self, vocab_size: int, num_classes: int, channels: int | None = None) -> ModelConfig:
        """Return the configuration of the model for a vocabulary, or vectors, and a number of outputs."""
        values = copy.deepcopy(self.model)
        objective = self.train.objective
        inferred: Values = {"causal": objective in ("causal", "forecast")}
        inferred |= (
            {"vocab_size": vocab_size + (objective == "masked")} if channels is None else {"input_dim": channels}
        )
        if objective in TASKS:
            inferred |= {"num_classes": num_classes, "pooling": "none" if objective in PER_TOKEN else "mean"}
        for name, value in inferred.items():
            if name not in self.chosen:
                values[name] = value
            elif name in ("causal", "pooling", "input_dim"):
                if values[name] != value and not (name == "causal" and objective in TASKS and objective != "forecast"):
                    raise ValueError(f"--objective {objective} needs a model with {name}={value}")
            elif values[name] < value:
                raise ValueError(f"--model.{name} is {values[name]}, and the data needs {value} at least")
        if channels is not None:
            values |= {name: default for name, default in OF_TOKENS.items() if name not in self.chosen}
        if values.get("positions") in ("learned", "axial") and "max_length" not in self.chosen:
            values["max_length"] = self.train.context
        return ModelConfig.from_dict(values)


def resolve(given: Mapping[str, Any]) -> Settings:
    """Return the settings of a run: given values over those of the preset over the defaults.

    Args:
        given: Values by field name; fields of the model have their path, such as "model.attention.num_heads".

    Raises:
        ValueError: If a field does not exist, or a value is not allowed.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in given:
        if name not in names and not name.startswith("model."):
            raise ValueError(f"unknown setting {name}{nearest(name, names)}")
    preset = PRESETS[choose("--preset", given.get("preset", TrainConfig.preset), PRESETS)]
    train = _train_config(_fitting(preset.train, given), given)
    chosen = _model_fields(given)
    model = copy.deepcopy(preset.model) if train.initial is None else _initial_model(train.initial)
    _set_fields(model, chosen)
    named = train.init is None or "mechanism" in given
    if "attention.mechanism" not in chosen and named:
        model["attention"] |= {
            name: value for name, value in _attention(train, model).items() if f"attention.{name}" not in chosen
        }
    elif "mechanism" in given and "attention.mechanism" in chosen:
        raise ValueError("--mechanism and --model.attention.mechanism are the same option: give one of them")
    return Settings(train, model, frozenset(chosen))


def _fitting(values: Values, given: Mapping[str, Any]) -> Values:
    """Leave Muon and its rates of a preset out where another optimizer is given, or a trained model, for AdamW.

    The n-grams of a trained model that are not in the new data would be forgotten: its tables do not decay.
    """
    left = {"ngram_decay"} if given.get("init") else set()
    if given.get("optimizer", "adamw" if given.get("init") else "muon") != "muon":
        left |= {"optimizer", "muon_lr", "embedding_lr"}
    return {name: value for name, value in values.items() if name not in left}


def _initial_model(initial: Initial) -> Values:
    """Return the fields of a saved model's configuration that do not follow from the data and the objective."""
    return {name: x for name, x in initial.model_config().items() if name not in ("causal", "vocab_size", *_OUTPUTS)}


def saved_settings(given: Mapping[str, Any]) -> Settings | None:
    """Return the settings of the run in `out` that is resumed, with given changes; None if a run starts.

    Without `data` the settings are those of the run. With it, a run that has a checkpoint is resumed: what is not given
    is as in the run, even where the defaults are others now, but for what belongs to a machine; what is given is
    compared with the checkpoint later.

    Raises:
        ValueError: `run.json` is damaged, or a field of the model has another value than in the run.
    """
    out = Path(given.get("out") or "")
    path = out / "run.json"
    if not given.get("out") or not path.is_file() or (given.get("data") and find_checkpoint(out) == out):
        return None
    try:
        saved = read_json(path)["settings"]
        values = {name: tuple(x) if isinstance(x, list) else x for name, x in saved["train"].items()}
        before = ModelConfig.from_dict(saved["model"]).to_dict()
    except (AttributeError, KeyError, TypeError, ValueError):
        if given.get("data"):
            return None  # The checkpoint has the settings too, and a damaged file is written again.
        raise ValueError(f"{path} is damaged: give all settings of the run again, --data among them") from None
    if given.get("data"):
        values = {name: value for name, value in values.items() if name not in ("device", "mesh", "compile")}
    fields, model = _model_fields(given), copy.deepcopy(before)
    _set_fields(model, fields)
    if not given.get("data") and json.dumps(ModelConfig.from_dict(model).to_dict()) != json.dumps(before):
        raise ValueError(f"--model.{next(iter(fields))} cannot change in a run that is resumed: leave it out")
    return Settings(_train_config(values, given), model, frozenset(model))


def _model_fields(given: Mapping[str, Any]) -> Values:
    return {name.removeprefix("model."): value for name, value in given.items() if name.startswith("model.")}


def _train_config(defaults: Values, given: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of given values over others; --steps replaces --minutes, and the other way."""
    values = defaults | {name: value for name, value in given.items() if not name.startswith("model.")}
    for name, other in (("steps", "minutes"), ("minutes", "steps")):
        if given.get(name) is not None and given.get(other) is None:
            values[other] = None
    return TrainConfig(**values)


def _set_fields(model: Values, fields: Mapping[str, Any]) -> None:
    """Set fields of a model's configuration, by their dotted names."""
    for name, value in fields.items():
        *path, last = name.split(".")
        group = model
        for part in path:
            group = group.setdefault(part, {})
        group[last] = value


def _attention(train: TrainConfig, model: Values) -> Values:
    """The fields of the attention that follow from --mechanism."""
    text = train.mechanism.strip()
    if text.startswith(("{", "[")):
        try:
            return {"mechanism": json.loads(text)}
        except ValueError as error:
            raise ValueError(f"--mechanism is neither a name nor JSON: {error}") from None
    return named_mechanism(text, model["attention"].get("num_heads", AttentionConfig.num_heads), train.context)


def described(settings: Settings, model: ModelConfig) -> Values:
    """Return a run's settings as JSON values; a checkpoint is compared with them."""
    return json.loads(json.dumps({"train": dataclasses.asdict(settings.train), "model": model.to_dict()}))


# Options that may change when a run is resumed: they do not affect completed steps.
FREE = (
    *("out", "steps", "minutes", "log_every", "eval_every", "eval_tokens", "save_every", "divergence", "prompt"),
    *("sample_tokens", "tensorboard", "compile", "device", "mesh", "chunk_length"),
)


def differences(one: Values, other: Values) -> dict[str, tuple[Any, Any]]:
    """Return every field that differs, by its dotted name."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**one, **other}:
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= {f"{name}.{inner}": pair for inner, pair in differences(a, b).items()}
        elif a != b:
            found[name] = a, b
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
