"""From settings to a run that can be stepped: data, model, optimizer, and whatever an earlier run left."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from longspan import __version__
from longspan.mechanisms.performer import PerformerAttention
from longspan.models.config import ModelConfig
from longspan.models.transformer import Classifier, LanguageModel
from longspan.train.config import Settings, TrainConfig, described
from longspan.train.data.batches import Batches, Labeled, Lanes, Rows, Shape, mixed
from longspan.train.data.readers import Reading, find_source
from longspan.train.data.token_store import Plan, Store, open_store, unigram_bits
from longspan.train.fsdp import check_sharding, is_sharded, open_methods
from longspan.train.loggers import Watch
from longspan.train.objectives import Objective, build, wrap
from longspan.train.presets import Values
from longspan.train.run_checkpoint import check_same, read_run

RUN = "run.json"


@dataclass
class Prepared:
    """What the loop works with. objective: the plain module; step through `wrapped`, which accelerate made of it."""

    settings: Settings
    accelerator: Accelerator
    store: Store
    shape: Shape
    batches: Batches
    objective: Objective
    wrapped: Any
    optimizer: Any
    redraws: Redraws
    saved: Values | None
    about: Values

    @property
    def train(self) -> TrainConfig:
        return self.settings.train

    @property
    def model(self) -> LanguageModel | Classifier:
        return self.objective.model

    @property
    def run(self) -> Path:
        return Path(self.train.out)

    @property
    def tokenizer(self) -> Path | None:
        return None if self.train.tokenizer is None else Path(self.train.tokenizer)


class Redraws:
    """Random features, redrawn between steps: the same ones in every process, and outside what is compiled.

    A model redraws by itself, counting its forward passes; here that is switched off and done in its place.
    """

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        self.seed = seed
        self.mechanisms: list[tuple[PerformerAttention, int]] = []
        for module in model.modules():
            if isinstance(module, PerformerAttention) and module.redraw_interval is not None:
                self.mechanisms.append((module, module.redraw_interval))
                module.redraw_interval = None

    def before(self, step: int, accumulate: int) -> bool:
        """Redraws what is due before this step (the first is 0) and says whether anything was."""
        any_due = False
        for number, (mechanism, interval) in enumerate(self.mechanisms):
            due = step * accumulate // interval
            if step and due > (step - 1) * accumulate // interval:
                generator = torch.Generator().manual_seed(mixed(self.seed, due, number))
                mechanism.redraw(generator)
                any_due = True
        return any_due


def make_accelerator(train: TrainConfig) -> Accelerator:
    """Device and precision, as accelerate understands them; what its launcher and its files say is its own affair."""
    cpu = train.device == "cpu"
    if train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable CUDA device; leave --device out, or say cpu")
    if train.device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: this machine has none; leave --device out, or say cpu")
    gpu = torch.cuda.is_available() and not cpu
    precision = train.precision
    if precision == "auto" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        return Accelerator(cpu=cpu)  # Its launcher was told.
    if precision == "auto":
        precision = "bf16" if gpu and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "fp16" and not gpu:
        raise ValueError("--precision fp16 needs a CUDA device; use bf16 or fp32 on a CPU")
    return Accelerator(cpu=cpu, mixed_precision="no" if precision == "fp32" else precision)


def is_compiled(train: TrainConfig, packed: bool, device: torch.device) -> bool:
    """auto: on a GPU, where rows always have the same shape."""
    plain = not packed and not train.carry_state and train.objective != "classify"
    return train.compile == "on" or (train.compile == "auto" and device.type == "cuda" and plain)


def open_data(train: TrainConfig, folder: Path, watch: Watch) -> Store:
    """The run's tokens, checked against what the run needs of them."""
    labeled = train.objective == "classify"
    reading = Reading(train.extensions, train.exclude, train.bin_dtype, train.image_size, labeled)
    sources, scored = (tuple(find_source(text, reading) for text in given) for given in (train.data, train.eval_data))
    tokenizer = None if train.tokenizer is None else Path(train.tokenizer)
    if tokenizer is not None and not tokenizer.is_file():
        raise FileNotFoundError(f"--tokenizer {tokenizer}: there is no such file")
    store = open_store(folder, Plan(sources, scored, reading, tokenizer, train.context, train.held_out), watch.note)
    longest, total = store.train.longest, store.train.total
    if total < 2:
        raise ValueError(f"the data is too small: {total} tokens are left to train on")
    if train.context > longest:
        raise ValueError(
            f"--context {train.context} is longer than any document to train on: the longest has {longest} tokens; "
            f"use --context {longest} or less, or data with longer documents"
        )
    if train.objective == "classify" and len(store.labels) < 2:
        raise ValueError(f"classification needs two labels at least, the data has {store.labels}")
    return store


def is_packed(train: TrainConfig, store: Store) -> bool:
    """Whether rows hold several documents. auto: if over one token in a hundred is in one too short for a plain row."""
    if train.carry_state or train.objective == "classify":
        return False
    lengths = store.train.length
    if train.packing == "auto":
        return float(lengths[lengths <= train.context].sum()) > 0.01 * store.train.total
    if train.packing == "off" and store.train.longest <= train.context:
        raise ValueError(
            f"--packing off needs documents longer than the context ({train.context}), and the longest has "
            f"{store.train.longest} tokens: use --context {store.train.longest - 1}, or leave --packing out"
        )
    return train.packing == "on"


def prepare(settings: Settings, watch: Watch, accelerator: Accelerator, data: Path | None = None) -> Prepared:
    """Everything of a run; an earlier run in the same folder is taken up. data: where the tokens go, if not there."""
    train, run = settings.train, Path(settings.train.out)
    with accelerator.main_process_first():
        store = open_data(train, run / "data" if data is None else data, watch)
    packed = is_packed(train, store)
    config = settings.complete(store.vocab_size, len(store.labels))
    _check_model(train, config)
    about = _about(settings, config, store, accelerator)
    found = read_run(run)
    if found is not None:
        check_same(run, found[1]["about"]["settings"], about["settings"])
        if found[1]["about"]["data"]["sha256"] != about["data"]["sha256"]:
            raise ValueError(f"the data of {run} has changed since it began: restore it, or give another --out")
    torch.manual_seed(train.seed)
    objective = build(train.objective, config, train.context) if found is None else wrap(found[0], train.context)
    about["parameters"] = sum(p.numel() for p in objective.parameters())
    redraws = Redraws(objective.model, train.seed)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    check_sharding(accelerator)
    wrapped, optimizer = accelerator.prepare(objective, make_optimizer(train, parameters))
    if is_sharded(accelerator):
        objective = wrapped
        open_methods(wrapped)
    compiled = is_compiled(train, packed, accelerator.device)
    about["compiled"] = compiled
    processes, process = accelerator.num_processes, accelerator.process_index
    shape = Shape(train.context, train.batch_size, train.accumulate, processes, process)
    return Prepared(
        settings=settings,
        accelerator=accelerator,
        store=store,
        shape=shape,
        batches=make_batches(train, store, shape, packed),
        objective=objective,
        wrapped=_compiled(wrapped, train, accelerator.device) if compiled else wrapped,
        optimizer=optimizer,
        redraws=redraws,
        saved=None if found is None else found[1],
        about=about,
    )


def _compiled(wrapped: Any, train: TrainConfig, device: torch.device) -> Any:
    # Replayed graphs launch a step's kernels at once, but have gradients overwrite those of the batch before.
    graphs = device.type == "cuda" and train.accumulate == 1
    return torch.compile(wrapped, dynamic=False, mode="reduce-overhead" if graphs else None)


def make_batches(train: TrainConfig, store: Store, shape: Shape, packed: bool) -> Batches:
    """The order in which the data is read."""
    if train.objective == "classify":
        return Labeled(store, shape, seed=train.seed)
    if train.carry_state:
        return Lanes(store, shape, seed=train.seed)
    return Rows(store, shape, packed=packed, seed=train.seed)


def make_optimizer(train: TrainConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW, fused; decay for matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (train.betas[0], train.betas[1])
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr, betas=betas, fused=True)


def learning_rate(train: TrainConfig, step: int, done: float) -> float:
    """Of this step (the first is 0): a straight rise, then half a cosine over the whole of the run."""
    rise = (step + 1) / max(1, train.warmup)
    if train.steps is None:  # On a slow machine so many steps may be all there are: a tenth of the time is enough.
        rise = max(rise, done / 0.1)
    rise = min(1.0, rise)
    fall = train.min_lr + (1 - train.min_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2
    return train.lr * rise * fall


def _check_model(train: TrainConfig, config: ModelConfig) -> None:
    if config.cross is not None:
        raise ValueError("a model with cross-attention has nothing to attend to here: leave cross out")
    if train.carry_state and config.execution != "keep":
        raise ValueError(
            f"--carry-state keeps what a chunk computes, and cannot {config.execution} it: "
            "use --model.execution keep, or a shorter --context"
        )
    if config.max_length is not None and config.positions == "learned" and config.max_length < train.context:
        raise ValueError(f"--model.max_length ({config.max_length}) is below --context ({train.context})")


def _about(settings: Settings, config: ModelConfig, store: Store, accelerator: Accelerator) -> Values:
    """What run.json says: settings, data and machine."""
    data = {name: store.about[name] for name in ("tokens", "bytes", "documents", "sha256", "vocab_size", "labels")}
    data |= {"train_tokens": store.train.total, "held_out_tokens": store.held_out.total}
    data |= {"sources": store.about["sources"], "unigram_bits_per_byte": unigram_bits(store)}
    device = accelerator.device
    return {
        "settings": described(settings, config),
        "data": data,
        "longspan": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({_cpu()})",
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision.replace("no", "fp32"),
    }


def _cpu() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"
