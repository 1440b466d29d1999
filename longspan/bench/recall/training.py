"""One run of the recall benchmark: train a model on a task's data sets and score it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.bench.recall.variants import LayerOptions, Recipe, Spec, model_config
from longspan.models.transformer import Classifier, LanguageModel
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.synthetic.datasets import Dataset
from longspan.train.synthetic.tasks import accuracy_by_depth

BLOCK = 50  # steps between two reads of the loss
_EAGER_STEPS = 2  # of each data set, before its step is captured in a CUDA graph
_SCORED_AT = (40, 64, 96, 128, 192, 256)  # lengths at which parity is reported


@dataclass(frozen=True)
class RecallRun:
    """A model to train on a task.

    Attributes:
        task: Name of the task.
        mechanism: Name of the mechanism.
        spec: Its options.
        stage: "sweep" to choose a learning rate, or "final".
        lr: Peak learning rate.
        seed: Of the weights and of the order of sequences.
        steps: Number of steps.
        layer: Sizes and options of the model.
        recipe: How to train.
        seconds: Training ends after this time; None for no limit.
    """

    task: str
    mechanism: str
    spec: Spec
    stage: str
    lr: float
    seed: int
    steps: int
    layer: LayerOptions
    recipe: Recipe
    seconds: float | None = None


def execute(run: RecallRun, train: Sequence[Dataset], score: Dataset, device: torch.device) -> dict[str, Any]:
    """Train a new model and score it.

    Args:
        run: The model, and how to train it.
        train: The data set of each of the recipe's training tasks, on the device.
        score: The sequences to score, on the device.
        device: Where to train.

    Returns:
        Accuracy, loss, number of steps, seconds, parameters and size of the state.
    """
    config = model_config(run.recipe.score, run.spec, run.layer)
    torch.manual_seed(run.seed)
    model = (LanguageModel if config.num_classes is None else Classifier)(config).to(device)
    started = time.perf_counter()
    steps, loss, why = _train(model, run, train, device)
    seconds = time.perf_counter() - started
    state = model.state_size() // 4 if isinstance(model, LanguageModel) else None
    return {
        **_score(model, run, score),
        "steps": steps,
        "stopped": why,
        "train_loss": loss if math.isfinite(loss) else None,
        "seconds": round(seconds, 3),
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_numbers": state,
        "peak_mb": torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else None,
    }


def _train(model: nn.Module, run: RecallRun, data: Sequence[Dataset], device: torch.device) -> tuple[int, float, str]:
    """Return the number of steps, the mean loss of the last block, and why training ended."""
    model.train()
    total, rate = torch.zeros((), device=device), torch.tensor(0.0, device=device)
    capturable = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True, capturable=capturable
    )

    def step(batch: Dataset) -> None:
        loss = _loss(model, run.recipe, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.add_(loss.detach())

    feeds = [_Feed(each, run, step, seed=run.seed * len(data) + i) for i, each in enumerate(data)]
    rates = torch.tensor([run.lr * _schedule(i, run.steps) for i in range(run.steps)], device=device)
    started, mean = time.perf_counter(), math.nan
    for i in range(run.steps):
        rate.copy_(rates[i])
        feeds[i % len(feeds)].step()
        done = i + 1
        if done % BLOCK and done < run.steps:
            continue
        mean = float(total) / (done % BLOCK or BLOCK)
        total.zero_()
        if not math.isfinite(mean):
            return done, mean, "not finite"
        if mean < run.recipe.solved:
            return done, mean, "solved"
        if run.seconds is not None and time.perf_counter() - started > run.seconds and done < run.steps:
            return done, mean, "time"
    return run.steps, mean, "steps"


class _Feed:
    """Takes training steps on random sequences of one data set, from a CUDA graph after the first ones."""

    def __init__(self, data: Dataset, run: RecallRun, step: Callable[[Dataset], None], seed: int) -> None:
        self._data, self._step = data, step
        self._size = max(1, run.recipe.batch_tokens // data.tokens.shape[1])
        self._random = torch.Generator().manual_seed(seed)
        self._rows = torch.zeros(self._size, dtype=torch.long, device=data.tokens.device)
        self._block = torch.zeros(0, self._size, dtype=torch.long)
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """Draw sequences and take a step."""
        if self._done % BLOCK == 0:
            drawn = torch.randint(len(self._data), (BLOCK, self._size), generator=self._random)
            self._block = drawn.to(self._rows.device)
        self._rows.copy_(self._block[self._done % BLOCK])
        if self._rows.device.type == "cuda" and self._done == _EAGER_STEPS:
            self._capture()
        self._done += 1
        if self._graph is None:
            self._step(self._data.select(self._rows))
        else:
            self._graph.replay()

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(self._data.select(self._rows))


def _schedule(step: int, steps: int) -> float:
    """Linear warmup over 5 % of the steps, at most 100, times a cosine that ends at 2 %."""
    warmup = min(1.0, (step + 1) / max(1, min(100, steps // 20)))
    return warmup * max(0.02, (1 + math.cos(math.pi * step / steps)) / 2)


def _loss(model: nn.Module, recipe: Recipe, batch: Dataset) -> Tensor:
    logits = _logits(model, recipe, batch)
    return F.cross_entropy(logits.flatten(0, -2).float(), batch.answers.flatten(), ignore_index=IGNORE_INDEX)


def _logits(model: nn.Module, recipe: Recipe, batch: Dataset) -> Tensor:
    """Return the logits of the answers (B, A, V), or of the classes (B, V)."""
    device = batch.tokens.device.type
    enabled = recipe.precision == "bf16" and device == "cuda"
    with torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False):
        if isinstance(model, LanguageModel):
            assert batch.positions is not None
            hidden = model.hidden(batch.tokens)
            index = batch.positions[..., None].expand(-1, -1, hidden.shape[-1])
            logits = model.logits(hidden.gather(1, index))
        else:
            logits = model(batch.tokens, key_mask=batch.key_mask)
    assert isinstance(logits, Tensor)
    return logits


@torch.no_grad()
def _score(model: nn.Module, run: RecallRun, data: Dataset) -> dict[str, Any]:
    """Return the accuracy; by depth for needles, by length for parity."""
    model.eval()
    size = max(1, run.recipe.batch_tokens // data.tokens.shape[1])
    hits = []
    for rows in torch.arange(len(data), device=data.tokens.device).split(size):
        batch = data.select(rows)
        hits.append(_logits(model, run.recipe, batch).argmax(-1) == batch.answers)
    right, answers = torch.cat(hits).cpu(), data.answers.cpu()
    asked = answers != IGNORE_INDEX
    task = run.recipe.score
    found: dict[str, Any] = {
        "accuracy": float(right[asked].double().mean()),
        "answers": int(asked.sum()),
        "chance": task.chance(answers[asked].long()),
    }
    if data.depth is not None:
        found["depths"] = accuracy_by_depth(right[:, 0], data.depth.cpu())
    if task.name == "parity":
        assert data.positions is not None
        positions = data.positions[0].tolist()
        shown = [n for n in _SCORED_AT if n - 1 in positions]
        found["lengths"] = {str(n): float(right[:, positions.index(n - 1)].double().mean()) for n in shown}
    return found
