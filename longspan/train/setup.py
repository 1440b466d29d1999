"""Build the parts of a run from its settings: accelerator, data, batches, optimizer and schedules."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from longspan import __version__
from longspan.distributed.mesh import Mesh, MeshShape
from longspan.distributed.rendezvous import init_process_group
from longspan.mechanisms.performer import random_feature_mechanisms
from longspan.models.config import ModelConfig
from longspan.models.ngrams import NgramEmbedding
from longspan.models.transformer import Classifier, LanguageModel
from longspan.train.config import Settings, TrainConfig, described, differences
from longspan.train.data.batches import (
    Batches,
    BatchShape,
    LabeledBatches,
    ShuffledBatches,
    StatefulBatches,
    derive_seed,
)
from longspan.train.data.readers import DataSource, ReadOptions, find_source
from longspan.train.data.tasks import PER_TOKEN, TASKS
from longspan.train.data.token_store import StoreSpec, TokenStore, open_store, unigram_bits
from longspan.train.float8 import why_not_float8
from longspan.train.fsdp import uses_fsdp
from longspan.train.loggers import Logger, Record
from longspan.train.muon import MuonAdamW, layer_matrices

T = TypeVar("T")
NGRAMS = "ngrams"  # marks the group of n-gram tables in the optimizer
_MAX_DECAY = 0.5  # of n-gram tables in one step, where an epoch has few
# Files of a run, one of each kind, which a glob must not match.
_WRITTEN = ("run.json", "metrics.jsonl", "data/tokens.bin", "data/segments.npy", "checkpoint/training.pt")


class RedrawSchedule:
    """Redraws random features between steps: the same ones in every process, and outside of compiled code.

    It replaces the counter by which a model redraws its features in `forward`.
    """

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        self.seed = seed
        self.mechanisms = [(m, m.redraw_interval) for m in random_feature_mechanisms(model) if m.redraw_interval]
        for mechanism, _ in self.mechanisms:
            mechanism.redraw_interval = None

    def before_step(self, step: int, accumulate: int) -> bool:
        """Redraw the features that are due before a step (counted from 0); return whether there were any."""
        redrawn = False
        for number, (mechanism, interval) in enumerate(self.mechanisms):
            due = step * accumulate // interval
            if step and due > (step - 1) * accumulate // interval:
                mechanism.redraw(torch.Generator().manual_seed(derive_seed(self.seed, due, number)))
                redrawn = True
        return redrawn


def make_accelerator(device: str, precision: str) -> Accelerator:
    """Create the accelerator for --device and --precision.

    Raises:
        ValueError: The device is not available, or does not support the precision.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    cpu = device == "cpu" or (device == "auto" and launched > 1 and not _has_distributed_accelerator())
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is available; remove --device, or use --device cpu")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: MPS is not available; remove --device, or use --device cpu")
    if device == "mps" and launched > 1:
        raise ValueError(f"--device mps runs one process, and {launched} were started: use --device cpu")
    gpu = torch.cuda.is_available() and not cpu
    if launched > 1 and "TORCHELASTIC_RESTART_COUNT" in os.environ and (cpu or gpu):
        init_process_group("nccl" if gpu else "gloo")
    if precision == "auto" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        return Accelerator(cpu=cpu)  # `accelerate launch` has set the precision.
    if precision == "auto":
        precision = "bf16" if gpu and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "fp16" and not gpu:
        raise ValueError("--precision fp16 needs a CUDA device; use bf16 or fp32 on a CPU")
    accelerator = Accelerator(cpu=cpu, mixed_precision={"fp32": "no", "fp8": "bf16"}.get(precision, precision))
    if precision == "fp8" and (reason := why_not_float8(accelerator.device)) is not None:
        raise ValueError(
            f"--precision fp8 needs an NVIDIA GPU with FP8 products, of compute capability 8.9 or later, and {reason}: "
            "use bf16"
        )
    return accelerator


def _has_distributed_accelerator() -> bool:
    """Return whether there is an accelerator whose processes can communicate."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind is not None and kind.type != "mps"


def make_mesh(train: TrainConfig, accelerator: Accelerator) -> Mesh | None:
    """Create the process groups of --mesh; None without it, and for a single process.

    Raises:
        ValueError: The mesh does not fit the processes or the other settings.
    """
    if train.mesh is None:
        return None
    shape = MeshShape.parse(train.mesh).fit(accelerator.num_processes)
    if uses_fsdp(accelerator):
        raise ValueError("--mesh and accelerate both configure FSDP: use --mesh under torchrun, or accelerate alone")
    if accelerator.mixed_precision == "fp16" and shape.ranks > 1:
        raise ValueError("--mesh cannot be combined with --precision fp16: use bf16 or fp32")
    if shape.cp > train.context:
        raise ValueError(
            f"--mesh {shape} divides sequences over {shape.cp} ranks, more than the {train.context} tokens of "
            f"--context: use a longer --context, or cp={train.context} at most"
        )
    if shape.cp > 1:
        for name, used in (
            ("--chunk-length", train.chunk_length is not None),
            (f"--objective {train.objective}", train.objective in PER_TOKEN),
            ("--compile on", train.compile == "on"),
        ):
            if used:
                raise ValueError(f"{name} cannot be combined with --mesh {shape}: use cp=1")
    return Mesh.create(shape, accelerator.device) if shape.ranks > 1 else None


def check_equal(accelerator: Accelerator, values: Mapping[str, Any], what: str) -> None:
    """Raise a ValueError in every process if these values are not the same in all of them.

    Args:
        accelerator: The processes.
        values: Values by name; mappings are compared field by field.
        what: What the values are, for the error.
    """
    if accelerator.num_processes == 1:
        return
    found = gather_object([dict(values)])
    for process, other in enumerate(found):
        changed = differences(found[0], other)
        if changed:
            shown = "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in list(changed.items())[:4])
            message = f"processes 0 and {process} have different {what} ({shown}): start all of them alike"
            raise _for_main(accelerator, ValueError(message))


def in_every_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Return what `work` returns in each process. If it fails in one, it fails in all, with the first error."""
    error: Exception | None = None
    results: list[T] = []
    try:
        results.append(work())
    except (OSError, ValueError) as caught:
        error = caught
    errors = gather_object([error]) if accelerator.num_processes > 1 else [error]
    for found in errors:
        if found is not None:
            raise _for_main(accelerator, found)
    return results[0]


def _for_main(accelerator: Accelerator, error: Any) -> Exception:
    """Return an error of all processes, for the main one to print."""
    error.quiet = not accelerator.is_main_process
    assert isinstance(error, Exception)
    return error


def main_process_first(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Return what `work` returns in each process. The others wait for the main one, and fail if it fails."""
    errors: list[Exception | None] = [None]
    results: list[T] = []
    if accelerator.is_main_process:
        try:
            results.append(work())
        except (OSError, ValueError) as error:
            errors[0] = error
    if accelerator.num_processes > 1:
        errors = broadcast_object_list(errors)
    if errors[0] is not None:
        raise _for_main(accelerator, errors[0])
    return results[0] if results else work()


def open_data(
    train: TrainConfig, folder: Path, logger: Logger, accelerator: Accelerator, sha256: str | None = None
) -> TokenStore:
    """Open the tokens of a run in `folder`, building the store first if necessary.

    Args:
        train: The settings of the run.
        folder: The folder of the store.
        logger: Receives messages.
        accelerator: The main process builds the store or verifies it.
        sha256: Digest that the tokens must have. None: any.

    Raises:
        ValueError: The data cannot be read, has changed, is too small for the settings, or contains --out.
        FileNotFoundError: A source or the tokenizer file does not exist.
    """
    labeled = train.objective in TASKS
    options = read_options(train)

    def open_first() -> TokenStore:
        sources, eval_sources = (tuple(find_source(text, options) for text in d) for d in (train.data, train.eval_data))
        for source in (*sources, *eval_sources):
            _check_apart(Path(train.out), source)
        tokenizer = None if train.tokenizer is None else Path(train.tokenizer)
        if tokenizer is not None and not tokenizer.is_file():
            raise FileNotFoundError(f"--tokenizer {tokenizer}: no such file")
        spec = StoreSpec(sources, eval_sources, options, tokenizer, train.context, train.held_out)
        return open_store(folder, spec, logger.info, sha256=sha256, verify=accelerator.is_main_process)

    store = main_process_first(accelerator, open_first)
    longest, total = store.train.longest, store.train.total
    if total < 2:
        raise ValueError(f"the data is too small: {total} tokens are left to train on")
    largest = max(store.train.of_source(source).total for source in set(store.train.source.tolist()))
    packable = not train.carry_state and train.packing != "off" and largest >= train.context
    if train.context > longest and not labeled and not packable:
        raise ValueError(
            f"--context {train.context} is longer than any document to train on: the longest has {longest} tokens, all "
            f"have {total}; use --context {longest} or less, or data with longer documents"
        )
    if train.objective in ("classify", "tag") and len(store.labels) < 2:
        raise ValueError(f"classification requires at least two labels, the data has {store.labels}")
    return store


def read_options(train: TrainConfig) -> ReadOptions:
    """Return how the data of a run is read."""
    task = train.objective if train.objective in TASKS and train.objective != "classify" else None
    labeled = train.objective in TASKS and train.objective != "forecast"
    return ReadOptions(
        *(train.extensions, train.exclude, train.bin_dtype, train.image_size, labeled, train.format),
        *(train.text_field, train.label_field, train.file_field, task),
    )


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training.

    Args:
        model: The model.
        patterns: Names of modules or parameters, with * for any text.

    Raises:
        ValueError: A pattern fits no parameter, or none is left to train.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        chosen = [name for name in names if fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*")]
        if not chosen:
            parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise ValueError(f"--freeze {pattern} is no parameter of the model; it has {parts}")
        for name in chosen:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ValueError(f"--freeze {','.join(patterns)} leaves nothing to train")


def make_classifier(config: ModelConfig, store: TokenStore) -> Classifier:
    """Return a new model for a supervised task; vectors are normalized as the training data."""
    model = Classifier(config)
    if model.project is not None:
        statistics = store.metadata["input"]
        model.project.mean.copy_(torch.tensor(statistics["mean"]))
        model.project.std.copy_(torch.tensor(statistics["std"]))
    return model


def _check_apart(out: Path, source: DataSource) -> None:
    """Raise ValueError if files of the run would be read as data."""
    data, run = Path(source.name).expanduser().absolute(), Path(os.path.realpath(out))
    if data.exists():
        inside = Path(os.path.realpath(data)) in (run, *run.parents)
    elif "**" in data.parts:
        inside = Path(*data.parts[: data.parts.index("**")]) in out.absolute().parents
    else:
        inside = any((out.absolute() / name).match(str(data)) for name in _WRITTEN)
    if inside:
        raise ValueError(
            f"--out {out} is inside --data {source.name}, so that the files of the run would be read as data: "
            "choose an --out elsewhere"
        )


def is_packed(train: TrainConfig, store: TokenStore) -> bool:
    """Return whether sequences are packed. auto: if over 1 % of tokens are in documents too short for a window."""
    if train.carry_state or train.chunk_length is not None or train.objective in TASKS:
        return False
    lengths = store.train.length
    if train.packing == "auto":
        return float(lengths[lengths <= train.context].sum()) > 0.01 * store.train.total
    if train.packing == "off" and store.train.longest <= train.context:
        raise ValueError(
            f"--packing off requires documents longer than the context ({train.context}), and the longest has "
            f"{store.train.longest} tokens: use --context {store.train.longest - 1}, or remove --packing"
        )
    return train.packing == "on"


def is_compiled(train: TrainConfig, packed: bool, device: torch.device, mesh: Mesh | None = None) -> bool:
    """Return whether the model is compiled. auto: on a GPU without a mesh, if all batches have the same shape."""
    same_shape = not packed and not train.carry_state and train.chunk_length is None and train.objective not in TASKS
    automatic = device.type == "cuda" and same_shape and mesh is None
    return train.compile == "on" or (train.compile == "auto" and automatic)


def compile_mode(train: TrainConfig, device: torch.device) -> str | None:
    """Return the mode of torch.compile: CUDA graphs on a GPU, which would overwrite gradients that accumulate."""
    return "reduce-overhead" if device.type == "cuda" and train.accumulate == 1 else None


def make_batches(train: TrainConfig, store: TokenStore, shape: BatchShape, packed: bool) -> Batches[Any]:
    """Return the training batches for the objective and --carry-state.

    Raises:
        ValueError: The batches of a step are larger than the memory of the machine.
    """
    required, memory = 16 * shape.num_sequences * shape.context, psutil.virtual_memory().total  # int64, with targets
    if required > memory:
        raise ValueError(
            f"the tokens of a step need {required / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}: "
            f"lower --batch-size ({train.batch_size}), --accumulate ({train.accumulate}) or --context ({train.context})"
        )
    if train.objective in TASKS:
        return LabeledBatches(store, shape, seed=train.seed)
    if train.carry_state:
        return StatefulBatches(store, shape, seed=train.seed)
    return ShuffledBatches(store, shape, packed=packed, seed=train.seed)


def make_optimizer(train: TrainConfig, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return fused AdamW with weight decay on matrices only; with --optimizer muon, Muon for those of the layers.

    A group's `lr_ratio` is its learning rate as a multiple of --lr. Embeddings are a group of their own if they have a
    rate of their own, and do not decay then: rare rows would shrink more between two of their steps than they grow.
    With --ngram-decay tables of n-grams are one too, marked by `NGRAMS`, whose weight decay `ngram_weight_decay` gives.

    Raises:
        ValueError: Muon has nothing to train.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    # Biases and norms of a mechanism's heads are matrices by their shape alone.
    plain = {id(p) for name, p in module.named_parameters() if p.ndim < 2 or name.endswith(("_bias", "_norm"))}
    muon = {id(p) for p in layer_matrices(module)} if train.optimizer == "muon" else set()
    decayed, betas = {"weight_decay": train.weight_decay}, (train.betas[0], train.betas[1])
    tables: set[int] = set()
    if train.ngram_decay:
        tables = {id(p) for m in module.modules() if isinstance(m, NgramEmbedding) for p in m.parameters()}
    embeddings, of_rows = set[int](), decayed
    if train.embedding_lr is not None:
        embeddings = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)} - tables
        of_rows = {"weight_decay": 0.0, "lr_ratio": train.embedding_lr / train.lr}
    apart = muon | tables | embeddings
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) not in plain | apart], **decayed},
        {"params": [p for p in trained if id(p) in plain], "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in embeddings], **of_rows},
        {"params": [p for p in trained if id(p) in tables], **of_rows, NGRAMS: True},
    ]
    if train.optimizer == "adamw":
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr, betas=betas, fused=True)
    ratio = 1.0 if train.muon_lr is None else train.muon_lr / train.lr
    matrices = {"params": [p for p in trained if id(p) in muon], **decayed, "muon": True, "lr_ratio": ratio}
    if not matrices["params"]:
        raise ValueError(
            "--optimizer muon trains matrices of attention and feed-forward layers, and this run trains none: use "
            "--optimizer adamw"
        )
    own = [{"lr_ratio": 1.0, **g} for g in (matrices, *groups) if g["params"]]
    return MuonAdamW(own, lr=train.lr, betas=betas)


def ngram_weight_decay(train: TrainConfig, steps: int, repetition: float) -> float:
    """Return the weight decay of n-gram tables: as without --ngram-decay until data is repeated, then what it asks for.

    A rare n-gram is remembered with the token that followed it, and when the data is read again that memory is right
    every time: the model learns to trust it, which held-out text does not bear out. Rows that decay between two of
    their occurrences keep what several of them have in common.

    Args:
        train: The settings of the run.
        steps: Steps with this one.
        repetition: How many times these steps read the data, if it is repeated; see `Batches.repetition`.
    """
    before, peak = (train.weight_decay, train.lr) if train.embedding_lr is None else (0.0, train.embedding_lr)
    if not repetition:
        return before
    return max(before, min(train.ngram_decay * repetition / steps, _MAX_DECAY) / peak)


def learning_rate(train: TrainConfig, step: int, done: float) -> float:
    """Return the learning rate: linear warmup times a decay over the last --decay-ratio of the run.

    Args:
        train: The settings of the run.
        step: Steps done before this one.
        done: Fraction of the run done, from 0 to 1.
    """
    warmup = (step + 1) / max(1, train.warmup)
    if train.steps is None:  # A slow machine may not reach `warmup` steps: end it after 10 % of the time.
        warmup = max(warmup, done / 0.1)
    warmup = min(1.0, warmup)
    decayed = max(0.0, (min(1.0, done) - (1 - train.decay_ratio)) / train.decay_ratio)
    left = 1 - decayed if train.decay_type == "linear" else (1 + math.cos(math.pi * decayed)) / 2
    return train.lr * warmup * (train.min_lr + (1 - train.min_lr) * left)


def batches_per_step(train: TrainConfig, done: float) -> int:
    """Return the number of batches of a step: from 1 to --accumulate over the first --ramp-up of the run."""
    if done >= train.ramp_up:
        return train.accumulate
    return 1 + int((train.accumulate - 1) * done / train.ramp_up)


def check_model(train: TrainConfig, config: ModelConfig) -> None:
    """Raise ValueError if a model cannot be trained with these settings."""
    if config.cross is not None:
        raise ValueError("training has no context for cross-attention: remove cross from the model")
    if train.carry_state and config.execution != "keep":
        raise ValueError(
            f"--carry-state cannot be combined with --model.execution {config.execution}: "
            "use --model.execution keep, and a shorter --context to save memory"
        )
    if train.chunk_length is not None and config.execution != "keep":
        raise ValueError(
            f"--chunk-length recomputes pieces of the sequence, and --model.execution {config.execution} layers: "
            "use --model.execution keep with it"
        )
    if config.max_length is not None and config.positions == "learned" and config.max_length < train.context:
        raise ValueError(f"--model.max_length ({config.max_length}) is below --context ({train.context})")


def check_documents(model: LanguageModel, store: TokenStore) -> None:
    """Raise ValueError if a document is longer than the positions of a model to which --carry-state gives it."""
    longest = store.train.longest - 1  # The last token is a target only.
    try:
        model.check_length(longest)
    except ValueError as error:
        raise ValueError(
            f"--carry-state continues the positions of a document in each of its sequences, and the longest document "
            f"has {longest + 1} tokens: {error}"
        ) from None


def run_metadata(
    settings: Settings, config: ModelConfig, store: TokenStore, accelerator: Accelerator, shape: BatchShape
) -> Record:
    """Return the contents of run.json: settings, data, versions and hardware."""
    names = ("tokens", "bytes", "documents", "sha256", "vocab_size", "labels", "sources", "task", "channels", "input")
    device = accelerator.device
    cpu = f"{device.type} ({platform.machine()}, {os.cpu_count()} cores)"
    return {
        "settings": described(settings, config),
        "data": {
            **{name: store.metadata[name] for name in names if name in store.metadata},
            "train_tokens": store.train.total,
            "held_out_tokens": store.held_out.total,
            "unigram_bits_per_byte": unigram_bits(store),
        },
        "longspan": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "data_processes": shape.processes,
        "precision": "fp8" if settings.train.precision == "fp8" else accelerator.mixed_precision.replace("no", "fp32"),
    }
