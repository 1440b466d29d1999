"""Compare mechanisms on synthetic tasks: train a small model of each and measure its accuracy."""

from __future__ import annotations

import json
import math
import platform
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from longspan import __version__
from longspan.mechanisms import list_mechanisms
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.transformer import Classifier, LanguageModel
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.loggers import Record
from longspan.train.plots import plot_depths
from longspan.train.presets import half_local
from longspan.train.synthetic.tasks import TASKS, Examples, SyntheticTask, accuracy_by_depth
from longspan.utils import choose, choose_device, commit, plot_path, printable, write_atomically

NUM_HEADS = 4
NUM_SCORED = 512  # number of sequences to evaluate


@dataclass(frozen=True)
class TrialConfig:
    """How a model is trained on a task.

    Args:
        steps: Largest number of steps.
        batch_size: Sequences per step.
        seed: Seed of the data and the weights.
        lr: Peak learning rate.
        warmup: Steps of linear warmup.
        solved: Training stops when the mean loss of 20 steps is below this (nats per answer).
    """

    steps: int = 400
    batch_size: int = 32
    seed: int = 0
    lr: float = 1e-2
    warmup: int = 20
    solved: float = 0.01


class TrialProgress:
    """Progress of all trials: a bar on a terminal, lines elsewhere."""

    def __init__(self, trials: int, steps: int, console: Console | None = None) -> None:
        self.console = Console(stderr=True) if console is None else console
        self.steps, self.finished, self.title = steps, 0, ""
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._task = self.bar.add_task("", total=trials * steps)

    def start(self, title: str) -> None:
        """Show the start of a trial."""
        self.title = title
        self.bar.update(self._task, description=title)

    def step(self, done: int, loss: float) -> None:
        """Show a training step."""
        text = f"{self.title}: step {done}/{self.steps}, loss {loss:.4f}"
        self.bar.update(self._task, completed=self.finished * self.steps + done, description=text)
        if not self.console.is_terminal and done % max(1, self.steps // 4) == 0:
            self.print(text)

    def finish(self, text: str) -> None:
        """Show the result of a trial."""
        self.finished += 1
        self.bar.update(self._task, completed=self.finished * self.steps)
        self.print(f"{self.title}: {text}")

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def mechanism_for(name: str, length: int) -> Record:
    """Return the options of a mechanism, as in AttentionConfig, with a state that is small compared to the sequence.

    A window has length/8 tokens, so that two layers do not reach the start of the sequence; linformer has rank
    length/4; half of the heads of a split use such a window, and half are linear.
    """
    window, linear = max(2, length // 8), {"mechanism": "linear", "feature_map": "softmax"}
    options: dict[str, Record] = {
        "local": {"mechanism": "local", "window": window},
        "linear": linear,
        "linformer": {"mechanism": "linformer", "rank": max(2, length // 4), "max_length": length},
        "split": half_local(NUM_HEADS, window, linear),
    }
    return options.get(name, {"mechanism": name})


def model_for(task: SyntheticTask, mechanism: Record) -> ModelConfig:
    """Return the model of all trials: 2 layers, width 64, 4 heads, learned positions, token shift."""
    return ModelConfig(
        dim=64,
        depth=2,
        attention=AttentionConfig(num_heads=NUM_HEADS, mechanism=mechanism),
        feed_forward=FeedForwardConfig(mult=2),
        positions="learned",
        max_length=task.length,
        token_shift=(0, 1),
        causal=task.num_classes is None,
        vocab_size=task.vocab_size,
        num_classes=task.num_classes,
        pooling="none",
    )


def run_trial(
    task: SyntheticTask, config: ModelConfig, trial: TrialConfig, device: torch.device, progress: TrialProgress
) -> Record:
    """Train a new model on a task and evaluate it. The global random state is restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(trial.seed)
        model = (LanguageModel(config) if task.num_classes is None else Classifier(config)).to(device)
        start = time.perf_counter()
        steps, loss = _train(model, task, trial, device, progress)
        seconds = time.perf_counter() - start
    scores = _evaluate(model, task, trial, device)
    progress.finish(f"accuracy {scores['accuracy']:.1%} after {steps} steps, {seconds:.0f} s")
    return {
        "task": task.name,
        "length": task.length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "seconds": round(seconds, 2),
        "train_loss": loss if math.isfinite(loss) else None,
        **scores,
        "model": config.to_dict(),
    }


def _train(
    model: torch.nn.Module, task: SyntheticTask, trial: TrialConfig, device: torch.device, progress: TrialProgress
) -> tuple[int, float]:
    """Return the number of steps, and the mean loss of the last 20."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.lr, betas=(0.9, 0.98), weight_decay=0.0)
    recent: deque[float] = deque(maxlen=20)
    model.train()
    for step in range(trial.steps):
        warmup, cosine = min(1.0, (step + 1) / trial.warmup), (1 + math.cos(math.pi * step / trial.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = trial.lr * warmup * max(0.02, cosine)
        examples = task.examples("train", trial.seed, step, trial.batch_size).to(device)
        logits = _logits(model, examples)
        loss = F.cross_entropy(logits.flatten(0, -2), examples.labels.flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        progress.step(step + 1, fmean(recent))
        if len(recent) == recent.maxlen and fmean(recent) < trial.solved:
            break
    return step + 1, fmean(recent)


def _logits(model: torch.nn.Module, examples: Examples) -> Tensor:
    """Return the logits of all tokens (B, T, V), or of the classes (B, V), read from the first token."""
    logits = model(examples.tokens, key_mask=examples.key_mask)
    assert isinstance(logits, Tensor)
    return logits if examples.labels.ndim > 1 else logits[:, 0]


def _evaluate(model: torch.nn.Module, task: SyntheticTask, trial: TrialConfig, device: torch.device) -> Record:
    """Return the accuracy on the score split, and by depth if the task has depths."""
    answers, correct, depths = [], [], []
    model.eval()
    with torch.no_grad():
        for index, first in enumerate(range(0, NUM_SCORED, trial.batch_size)):
            examples = task.examples("score", trial.seed, index, min(trial.batch_size, NUM_SCORED - first)).to(device)
            predicted = _logits(model, examples).argmax(-1)
            has_label = examples.labels != IGNORE_INDEX
            answers.append(examples.labels[has_label].cpu())
            correct.append((predicted == examples.labels)[has_label].cpu())
            if examples.depth is not None:
                depths.append(examples.depth.cpu())
    hits, labels = torch.cat(correct), torch.cat(answers)
    scores: Record = {"accuracy": int(hits.sum()) / len(hits), "answers": len(hits), "guess": task.chance(labels)}
    return {**scores, "depths": accuracy_by_depth(hits, torch.cat(depths))} if depths else scores


def run_trials(
    tasks: Sequence[str],
    names: Sequence[str] | None,
    length: int | None,
    trial: TrialConfig,
    out: Path | None = None,
    device: str | None = None,
) -> Record:
    """Train and evaluate mechanisms on tasks.

    Args:
        tasks: Names of tasks.
        names: Names of mechanisms. None: all.
        length: Length of sequences. None: the default of each task.
        trial: How to train.
        out: JSON file to update after every trial, with a plot beside it.
        device: Default: "cuda" if available, else "cpu".

    Returns:
        What is written to `out`.

    Raises:
        ValueError: A name is unknown or the device is not available.
    """
    chosen = [choose("task", name, TASKS) for name in dict.fromkeys(tasks)]
    known = list_mechanisms()
    tried = [choose("mechanism", name, known) for name in dict.fromkeys(known if names is None else names)]
    made = [TASKS[name](length or TASKS[name].default_length) for name in chosen]
    for flag, given, allowed in (("--task", made, TASKS), ("--mechanisms", tried, known)):
        if not given:
            raise ValueError(f"{flag} is empty; use {', '.join(allowed)}")
    where = choose_device(device)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()  # Fail now, not after the first trial.
    result: Record = {**_metadata(where), "effort": {**asdict(trial), "scored_rows": NUM_SCORED}, "trials": []}
    progress = TrialProgress(len(made) * len(tried), trial.steps)
    with progress.bar:
        for task in made:
            for name in tried:
                progress.start(f"{task.name}, {name}")
                config = model_for(task, mechanism_for(name, task.length))
                result["trials"].append({"mechanism": name, **run_trial(task, config, trial, where, progress)})
                if out is not None:
                    write_atomically(out, json.dumps(result, indent=1) + "\n")
    if out is not None:
        progress.print(printable(f"written: {', '.join(map(str, [out, *_write_plot(out, result)]))}"))
    return result


def print_trials(result: Record) -> None:
    """Print a table of mechanisms for each task, and the accuracy by depth if the task has depths."""
    console = Console(highlight=False)
    for name in dict.fromkeys(trial["task"] for trial in result["trials"]):
        trials = [trial for trial in result["trials"] if trial["task"] == name]
        length = trials[0]["length"]
        console.print(f"\n{name}: {TASKS[name].purpose}; at most {length} tokens", soft_wrap=True)
        table = Table("mechanism", box=None)
        for heading in ("accuracy", "training loss", "steps", "seconds", "parameters"):
            table.add_column(heading, justify="right")
        for trial in trials:
            loss = "–" if trial["train_loss"] is None else f"{trial['train_loss']:.4f}"
            cells = f"{trial['accuracy']:.1%}", loss, f"{trial['steps']:,}", f"{trial['seconds']:.0f}"
            table.add_row(trial["mechanism"], *cells, f"{trial['parameters']:,}")
        table.add_row("chance", f"{trials[0]['guess']:.1%}")
        console.print(table)
        if "depths" in trials[0]:
            by_depth = Table("accuracy, by depth in %", box=None)
            for part in trials[0]["depths"]:
                by_depth.add_column(f"{100 * part['from']:.0f}–{100 * part['to']:.0f}", justify="right")
            for trial in trials:
                shares = ["–" if p["accuracy"] is None else f"{p['accuracy']:.0%}" for p in trial["depths"]]
                by_depth.add_row(trial["mechanism"], *shares)
            console.print(by_depth)


def _write_plot(out: Path, result: Record) -> list[Path]:
    """Plot the accuracy by depth, if a task has depths."""
    trials = [trial for trial in result["trials"] if "depths" in trial]
    if not trials:
        return []
    depths = {trial["mechanism"]: trial["depths"] for trial in trials}
    path = plot_path(out)
    write_atomically(path, plot_depths(depths, trials[0]["guess"], trials[0]["length"]))
    return [path]


def _metadata(device: torch.device) -> Record:
    """Return date, versions and hardware, without names of people, hosts or folders."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "format": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "longspan": __version__},
        "commit": commit(),
        "device": gpu or f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
    }
