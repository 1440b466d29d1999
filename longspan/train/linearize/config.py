"""The settings of `longspan linearize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Switch = Literal["auto", "on", "off"]
STAGES = ("transfer", "distill", "long")
# What may differ between a command and the run that it resumes.
FREE = (
    *("out", "minutes", "save_minutes", "tensorboard", "device", "dry_run", "memory_gb", "compile"),
    *("eval_tokens", "report", "report_lengths", "report_batch"),
)
_COUNTS = ("keep", "sampled_tokens")


@dataclass(frozen=True)
class LinearizeConfig:
    """Replace the attention of a pretrained model by mechanisms of linear time, and train it to keep its quality."""

    model: Path
    """Folder of a transformers model with its tokenizer, or a GGUF file."""
    out: Path
    """Folder of the run; its `checkpoint` is the new model."""
    data: tuple[str, ...] = ()
    """Files, folders or globs with text to train on; required but with --sampled-tokens and --eval-data."""
    mechanism: str | Mapping[str, Any] = field(default_factory=lambda: {"mechanism": "mixture", "sink": True})
    """Mechanism of the replaced layers: a name, or JSON such as {"mechanism": "mixture", "window": 32}."""
    keep_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that keep their softmax attention, whose state grows."""
    keep: int = 0
    """Number of layers that keep it: those whose replacement raises the loss most, measured after the first stage."""
    sampled_tokens: int = 0
    """Tokens that the teacher writes before the first stage, to train on beside --data; they take at most half of
    --minutes."""
    sampled_share: float = 0.5
    """Share of the sequences of a step that the teacher wrote, with --sampled-tokens."""
    repeat_share: float = 0.0
    """Share of the sequences in which passages are repeated, from which memories learn to recall."""
    eval_data: tuple[str, ...] = ()
    """Text to evaluate on; by default a share of --data is held out."""
    transfer_steps: int = 300
    """Steps of the first stage: each layer learns to reproduce the output of the teacher's layer. 0 skips it."""
    distill_steps: int = 1200
    """Steps of the second stage: the whole model learns the teacher's logits and the next token. 0 skips it."""
    long_steps: int = 0
    """Steps of the third stage: the second with sequences of --long-context tokens."""
    minutes: float | None = None
    """Training time, divided among the stages in proportion to their steps; by default the steps decide. The first step
    of a stage on a GPU, which compiles kernels, does not count."""
    context: int = 1024
    """Tokens of a sequence; documents are concatenated."""
    long_context: int = 8192
    """Tokens of a sequence of the third stage."""
    batch_size: int = 8
    """Sequences of a step; the third stage has as many tokens in a step."""
    transfer_lr: float = 0.03
    """Learning rate of the first stage, which trains what the mechanisms add."""
    lr: float = 0.0001
    """Learning rate of the second stage."""
    long_lr: float | None = None
    """Learning rate of the third stage; a tenth of --lr unless given."""
    mechanism_lr: float | None = None
    """Learning rate, in the second stage, of what the mechanisms add; --lr unless given. The third stage lowers it as
    --long-lr lowers --lr."""
    train: Literal["all", "lora"] = "all"
    """What the second and third stages train: all weights, or low-rank adapters and what the mechanisms add."""
    lora_rank: int = 8
    """Rank of the adapters."""
    adapters: Literal["merged", "separate"] = "merged"
    """Add the adapters to the weights at the end, or store them apart, in the folder `adapter`."""
    next_token: float = 0.1
    """Weight of the loss of the next token (or of masked tokens, for an encoder), beside that of the logits."""
    attention_rows: float = 1.0
    """Weight of the attention weights in the first stage, beside the layers' outputs; for mixtures and linear."""
    mask_rate: float = 0.15
    """Share of tokens that are masked, for an encoder."""
    memory_gb: float = 8.0
    """Budget for activations: batches are divided so that no more is needed."""
    held_out: float = 0.01
    """Share of --data to hold out where there is no --eval-data."""
    eval_tokens: int = 32768
    """Tokens to evaluate on."""
    report: Literal["full", "quick"] = "full"
    """Measure everything for the report, or only perplexity."""
    report_lengths: tuple[int, ...] = (1024, 2048, 8192, 32768)
    """Context lengths at which speed, memory and retrieval are measured; the longest is that of perplexity."""
    report_batch: int = 64
    """Sequences that are decoded together when throughput is measured."""
    compile: Switch = "auto"
    """torch.compile in the second and third stages, in one process, where nothing is recomputed; auto: on a GPU, in a
    stage of a minute, or of 200 steps without --minutes."""
    save_minutes: float = 5.0
    """Minutes between checkpoints."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""
    seed: int = 0
    """Seed of the order of the data and of new weights."""
    tensorboard: bool = False
    """Write TensorBoard event files too."""
    dry_run: bool = False
    """Describe the run, check data and model, and write nothing."""

    def __post_init__(self) -> None:
        for name in ("context", "long_context", "batch_size", "lora_rank", "eval_tokens", "report_batch"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("transfer_steps", "distill_steps", "long_steps", "next_token", "attention_rows", *_COUNTS):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("transfer_lr", "lr", "memory_gb", "save_minutes"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "positive")
        for name in ("held_out", "mask_rate"):
            _check(name, getattr(self, name), 0 < getattr(self, name) < 1, "between 0 and 1")
        for name in ("sampled_share", "repeat_share"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "from 0 to 1")
        for name in ("minutes", "long_lr", "mechanism_lr"):
            value = getattr(self, name)
            _check(name, value, value is None or value > 0, "positive")
        if self.keep and self.keep_layers:
            raise ValueError("--keep chooses the layers that --keep-layers names: give one of them")
        if not self.data and not (self.sampled_tokens and self.eval_data):
            raise ValueError(
                "--data is missing: give files, folders or globs with text, or --sampled-tokens and --eval-data"
            )
        longest = self.long_context if self.long_steps else self.context
        if not self.data and self.sampled_tokens < longest:
            raise ValueError(f"--sampled-tokens {self.sampled_tokens:,} are fewer than one sequence of {longest:,}")
        if not self.report_lengths or min(self.report_lengths) < 2:
            raise ValueError(f"--report-lengths must be numbers of at least 2, got {self.report_lengths}")
        if self.adapters == "separate" and self.train != "lora":
            raise ValueError("--adapters separate goes with --train lora: all weights are trained otherwise")

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate of each stage."""
        long = self.lr / 10 if self.long_lr is None else self.long_lr
        return {"transfer": self.transfer_lr, "distill": self.lr, "long": long}

    @property
    def steps(self) -> dict[str, int]:
        """The steps of each stage."""
        return {"transfer": self.transfer_steps, "distill": self.distill_steps, "long": self.long_steps}


def _check(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")
