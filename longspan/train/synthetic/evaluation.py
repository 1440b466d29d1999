"""`longspan eval --task`: a small model of every mechanism, trained and scored on synthetic tasks, side by side."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from longspan import __version__
from longspan.mechanisms import mechanisms
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.transformer import Classifier, LanguageModel
from longspan.ops.loss import IGNORED
from longspan.train.synthetic.tasks import TASKS, Examples, Task
from longspan.utils import choose, commit

Model = LanguageModel | Classifier
Record = dict[str, Any]
HEADS = 4
DEPTHS = 8  # equal parts of a row that needles are counted in
SCORED = 512  # rows


@dataclass(frozen=True)
class Effort:
    """How long, and from which numbers, a model is trained.

    steps: at most; a model is done before when its mean loss over the last 20 is below `solved` (nats an answer).
    """

    steps: int = 400
    batch_size: int = 32
    seed: int = 0
    lr: float = 1e-2
    warmup: int = 20
    solved: float = 0.01


class Show:
    """What is said while trials run: a bar for all of them on a terminal, lines elsewhere."""

    def __init__(self, trials: int, steps: int, console: Console | None = None) -> None:
        self.console = Console(stderr=True) if console is None else console
        self.steps, self.finished, self.title = steps, 0, ""
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.line = self.bar.add_task("", total=trials * steps)

    def begin(self, title: str) -> None:
        self.title = title
        self.step(0, math.nan)

    def step(self, done: int, loss: float) -> None:
        said = f"{self.title}: step {done}/{self.steps}" + ("" if math.isnan(loss) else f", loss {loss:.4f}")
        self.bar.update(self.line, completed=self.finished * self.steps + done, description=said)
        if not self.console.is_terminal and done and done % max(1, self.steps // 4) == 0:
            self.say(said)

    def end(self, text: str) -> None:
        self.finished += 1
        self.bar.update(self.line, completed=self.finished * self.steps)
        self.say(f"{self.title}: {text}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def mechanism_for(name: str, length: int) -> Record:
    """What a mechanism is given, as in AttentionConfig: a memory that is short beside the row.

    A window holds an eighth of a row, so that two layers of it do not reach the beginning; linformer keeps a quarter
    as many rows; a split has half of its heads on such a window, half on everything before.
    """
    local = {"mechanism": "local", "window": max(2, length // 8)}
    linear = {"mechanism": "linear", "feature_map": "softmax"}
    half = HEADS // 2
    known: dict[str, Record] = {
        "local": local,
        "linear": linear,
        "linformer": {"mechanism": "linformer", "rank": max(2, length // 4), "max_length": length},
        "split": {"mechanism": "split", "parts": [{**local, "num_heads": half}, {**linear, "num_heads": HEADS - half}]},
    }
    return known.get(name, {"mechanism": name})


def model_for(task: Task, mechanism: Record) -> ModelConfig:
    """The small model that every mechanism gets: two layers of four heads, 64 wide, learned positions, token shift."""
    return ModelConfig(
        dim=64,
        depth=2,
        attention=AttentionConfig(num_heads=HEADS, mechanism=mechanism),
        feed_forward=FeedForwardConfig(mult=2),
        positions="learned",
        max_length=task.length,
        token_shift=(0, 1),
        causal=task.num_classes is None,
        vocab_size=task.vocab_size,
        num_classes=task.num_classes,
    )


def run_trial(task: Task, config: ModelConfig, effort: Effort, device: torch.device, show: Show) -> Record:
    """Trains a model from nothing and scores it: its figures. The caller's random numbers are left alone."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(effort.seed)
        model: Model = (LanguageModel if task.num_classes is None else Classifier)(config)
        model.to(device)
        began = time.perf_counter()
        steps, loss = train(model, task, effort, device, show)
        seconds = time.perf_counter() - began
    found = score(model, task, effort, device)
    show.end(f"{found['accuracy']:.1%} right after {steps} steps, {seconds:.0f} s")
    return {
        "task": task.name,
        "length": task.length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "seconds": round(seconds, 2),
        "train_loss": loss if math.isfinite(loss) else None,
        **found,
        "model": config.to_dict(),
    }


def train(model: Model, task: Task, effort: Effort, device: torch.device, show: Show) -> tuple[int, float]:
    """Steps taken, and the mean loss of the last of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=effort.lr, betas=(0.9, 0.98), weight_decay=0.0)
    recent: deque[float] = deque(maxlen=20)
    model.train()
    for step in range(effort.steps):
        rise, fall = min(1.0, (step + 1) / effort.warmup), (1 + math.cos(math.pi * step / effort.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = effort.lr * rise * max(0.02, fall)
        examples = task.examples("train", effort.seed, step, effort.batch_size).to(device)
        loss = F.cross_entropy(_logits(model, examples).flatten(0, -2), examples.labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        mean = math.fsum(recent) / len(recent)
        show.step(step + 1, mean)
        if len(recent) == recent.maxlen and mean < effort.solved:
            break
    return step + 1, mean


def score(model: Model, task: Task, effort: Effort, device: torch.device) -> Record:
    """The share of answers that are right in rows no model is ever trained on, and where in the row if that differs."""
    right, asked, answers, depths = 0, 0, [], []
    hits = []
    model.eval()
    with torch.no_grad():
        for index, first in enumerate(range(0, SCORED, effort.batch_size)):
            examples = task.examples("score", effort.seed, index, min(effort.batch_size, SCORED - first))
            said = _logits(model, examples.to(device)).argmax(-1).cpu()
            counts = examples.labels != IGNORED
            hit = (said == examples.labels)[counts]
            right, asked = right + int(hit.sum()), asked + int(counts.sum())
            answers.append(examples.labels[counts])
            if examples.depth is not None:
                hits.append(hit)
                depths.append(examples.depth)
    found: Record = {"accuracy": right / asked, "answers": asked, "guess": task.guess(torch.cat(answers))}
    if depths:
        found["depths"] = by_depth(torch.cat(hits), torch.cat(depths))
    return found


def by_depth(hits: Tensor, depth: Tensor) -> list[Record]:
    """hits, depth: (B,), whether a row was answered right, and how deep its answer stood -> the share in each part."""
    part = (depth * DEPTHS).long().clamp(max=DEPTHS - 1)
    found = []
    for i in range(DEPTHS):
        held = hits[part == i]
        accuracy = float(held.double().mean()) if len(held) else None
        found.append({"from": i / DEPTHS, "to": (i + 1) / DEPTHS, "rows": len(held), "accuracy": accuracy})
    return found


def run_trials(
    tasks: Sequence[str],
    names: Sequence[str] | None,
    length: int | None,
    effort: Effort,
    out: Path | None = None,
    device: str | None = None,
) -> Record:
    """Every mechanism, or those named, on every task; `out` has what is found as it comes, and a plot beside it."""
    chosen = [choose("task", name, TASKS) for name in dict.fromkeys(tasks)]
    known = [
        choose("mechanism", name, mechanisms()) for name in dict.fromkeys(mechanisms() if names is None else names)
    ]
    made = [TASKS[name](length or TASKS[name].usual_length) for name in chosen]
    for flag, given, there in (("--task", made, TASKS), ("--mechanisms", known, mechanisms())):
        if not given:
            raise ValueError(f"{flag} names none; there is {', '.join(there)}")
    if device is not None:
        choose("device", device.partition(":")[0], ("cpu", "cuda", "mps"))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable CUDA device; leave --device out, or say cpu")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()  # An hour later would be late to find that it cannot be written.
    found: Record = {**_about(where), "effort": {**asdict(effort), "scored_rows": SCORED}, "trials": []}
    show = Show(len(made) * len(known), effort.steps)
    with show.bar:
        for task in made:
            for name in known:
                show.begin(f"{task.name}, {name}")
                config = model_for(task, mechanism_for(name, task.length))
                found["trials"].append({"mechanism": name, **run_trial(task, config, effort, where, show)})
                if out is not None:
                    _write(out, found)
    if out is not None:
        show.say(f"written: {', '.join(str(path) for path in (out, *_plots(out, found)))}")
    return found


def print_trials(found: Record) -> None:
    """A table over mechanisms for each task, and one more where depths were counted."""
    console = Console(highlight=False)
    for name in dict.fromkeys(trial["task"] for trial in found["trials"]):
        trials = [trial for trial in found["trials"] if trial["task"] == name]
        console.print(f"\n{name}: {TASKS[name].purpose}; rows of {trials[0]['length']} tokens at most", soft_wrap=True)
        table = Table("mechanism", box=None)
        for head in ("right", "training loss", "steps", "seconds", "parameters"):
            table.add_column(head, justify="right")
        for trial in trials:
            loss = "–" if trial["train_loss"] is None else f"{trial['train_loss']:.4f}"
            cells = f"{trial['accuracy']:.1%}", loss, f"{trial['steps']:,}", f"{trial['seconds']:.0f}"
            table.add_row(trial["mechanism"], *cells, f"{trial['parameters']:,}")
        table.add_row("guessing", f"{trials[0]['guess']:.1%}")
        console.print(table)
        if "depths" in trials[0]:
            deep = Table("right, by depth in %", box=None)
            for part in trials[0]["depths"]:
                deep.add_column(f"{100 * part['from']:.0f}–{100 * part['to']:.0f}", justify="right")
            for trial in trials:
                shares = ["–" if p["accuracy"] is None else f"{p['accuracy']:.0%}" for p in trial["depths"]]
                deep.add_row(trial["mechanism"], *shares)
            console.print(deep)


def _logits(model: Model, examples: Examples) -> Tensor:
    logits: Tensor = model(examples.tokens, key_mask=examples.key_mask)
    return logits


def _write(out: Path, found: Record) -> None:
    beside = out.with_name(f".{out.name}")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, out)


def _plots(out: Path, found: Record) -> list[Path]:
    """What was right by depth, where that was counted."""
    counted = [trial for trial in found["trials"] if "depths" in trial]
    if not counted:
        return []
    figure = Figure(figsize=(7, 4.2), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)  # without it a figure would look for a screen
    axes = figure.add_subplot()
    for trial in counted:
        parts = [part for part in trial["depths"] if part["accuracy"] is not None]
        middle = [50 * (part["from"] + part["to"]) for part in parts]
        axes.plot(middle, [100 * part["accuracy"] for part in parts], "o-", markersize=4, label=trial["mechanism"])
    axes.axhline(100 * counted[0]["guess"], color="#777777", linestyle="--", linewidth=1, label="guessing")
    axes.set_xlabel(f"depth of the needle, % of {counted[0]['length']} tokens (100: just before the question)")
    axes.set_ylabel("right, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 102)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    path = out.with_suffix(".png")
    figure.savefig(path, format="png")
    return [path]


def _about(device: torch.device) -> Record:
    """When, with what and on what; nothing that names a person, a host or a folder."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "format": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "longspan": __version__},
        "commit": commit(),
        "device": gpu or f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
    }
