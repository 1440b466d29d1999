"""One run of the recall benchmark: train a model on a task's data sets and score it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.bench.recall.variants import LayerOptions, Recipe, Spec, model_config
from longspan.models.layers import Attention
from longspan.models.transformer import Classifier, LanguageModel
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.synthetic.datasets import Dataset
from longspan.train.synthetic.tasks import accuracy_by_depth

BLOCK = 50  # steps between two reads of the loss
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


def execute(
    runs: Sequence[RecallRun],
    train: Sequence[Dataset],
    score: Dataset,
    device: torch.device,
    deadline: float = math.inf,
) -> Iterator[tuple[RecallRun, dict[str, Any]]]:
    """Train new models, each on a stream of its own, and score them.

    A model of this size leaves most of a GPU idle; the steps of several models run there at the same time.

    Args:
        runs: The models, and how to train them.
        train: The data set of each of the recipe's training tasks, on the device.
        score: The sequences to score, on the device.
        device: Where to train.
        deadline: When runs with a time limit end at the latest, by `time.monotonic`.

    Yields:
        A run that ended, and its accuracy, loss, number of steps, seconds, parameters and size of the state.
    """
    if any(run.recipe.compile for run in runs):
        torch.compiler.reset()  # What was compiled for models before counts towards a limit.
    trainings = [_Training(run, train, device, deadline) for run in runs]
    while trainings:
        for training in list(trainings):
            with torch.cuda.stream(training.stream):
                training.round()
                if training.ended is not None:
                    trainings.remove(training)
                    yield training.run, training.result(score)


class _Training:
    """A model in training.

    Attributes:
        run: The model, and how to train it.
        stream: Where it is trained; None on a CPU.
        ended: Why training ended; None before.
    """

    def __init__(self, run: RecallRun, data: Sequence[Dataset], device: torch.device, deadline: float) -> None:
        self.run, self._data, self._deadline = run, data, deadline
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ended: str | None = None
        config = model_config(run.recipe.score, run.spec, run.layer)
        torch.manual_seed(run.seed)
        self.model = (LanguageModel if config.num_classes is None else Classifier)(config)
        self.model.to(device)
        self._call = _entry(self.model)
        if run.recipe.compile:
            # One graph for all lengths, which shorter sequences and buckets have.
            self._call = torch.compile(self._call, fullgraph=True, dynamic=len(data) > 1)
        self._noise = torch.Generator(device).manual_seed(run.seed)
        if run.recipe.gate_noise:
            _add_noise_to_gates(self.model, run.recipe.gate_noise, self._noise)
        self._lr = torch.tensor(0.0, device=device)
        capturable = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), self._lr, (0.9, 0.98), weight_decay=0.0, fused=True, capturable=capturable
        )
        # A round is a step on each data set; what differs between rounds is in tables on the device.
        self._rounds = -(-run.steps // len(data))
        self._lrs = self._schedule().to(device)
        self._rows = [self._draw(each, run.seed * len(data) + i).to(device) for i, each in enumerate(data)]
        self._index, self._total = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), device=device)
        # From the first step that is not finite, `found_inf` is 1 and the optimizer keeps the weights as they are.
        self._optimizer.found_inf = self._broken = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self._finite, self._not_finite = torch.zeros((), device=device), ""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done, self._mean, self._started = 0, math.nan, time.monotonic()
        self._seconds = 0.0
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def _schedule(self) -> Tensor:
        """The learning rate of each round."""
        return torch.tensor([self.run.lr * _schedule(i, self._rounds) for i in range(self._rounds)])

    def _draw(self, data: Dataset, seed: int) -> Tensor:
        """Random sequences of each round."""
        longest = data.tokens.shape[1] if data.positions is not None else self.run.recipe.score.length
        size = max(1, self.run.recipe.batch_tokens // longest)
        return torch.randint(len(data), (self._rounds, size), generator=torch.Generator().manual_seed(seed))

    def round(self) -> None:
        """Take a step on each data set, from a CUDA graph after the first time; read the loss after each block."""
        if self._graph is not None:
            self._graph.replay()
        elif self.stream is None or self._done == 0:
            self._steps()
        else:
            self._graph = torch.cuda.CUDAGraph()
            self._graph.register_generator_state(self._noise)
            with torch.cuda.graph(self._graph, stream=self.stream):
                self._steps()
            self._graph.replay()
            self._started = time.monotonic()  # Compilation does not count.
        self._done += 1
        block = max(1, BLOCK // len(self._data))
        if self._done % block == 0 or self._done == self._rounds:
            self._read_loss(self._done % block or block)

    def _steps(self) -> None:
        self.model.train()
        self._lr.copy_(self._lrs.index_select(0, self._index)[0])
        for data, rows in zip(self._data, self._rows, strict=True):
            batch = data.select(rows.index_select(0, self._index)[0])
            loss = _loss(self.model, self.run.recipe, batch, self._call)
            self._optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._broken.copy_(torch.maximum(self._broken, ~(norm + loss.detach()).isfinite()))
            self._optimizer.step()
            self._finite.add_(1 - self._broken)
            self._total.add_(loss.detach())
        self._index.add_(1)

    def _read_loss(self, rounds: int) -> None:
        """Read the loss of the last rounds, and decide whether training ends."""
        self._mean = float(self._total) / (rounds * len(self._data))
        self._total.zero_()
        self._seconds = time.monotonic() - self._started
        if self._broken:
            self.ended, self._mean, self._not_finite = "not finite", math.nan, self._explain()
        elif self._mean < self.run.recipe.solved:
            self.ended = "solved"
        elif self._done == self._rounds:
            self.ended = "steps" if len(self._lrs) == self._rounds else "time"
        elif self.run.seconds is not None:
            self._shorten(min(self.run.seconds, self._deadline - self._started))

    def _shorten(self, limit: float) -> None:
        """Take as many rounds as the time limit allows, with a schedule of the learning rate that ends with them."""
        possible = int(self._done * limit / self._seconds)
        self._rounds = min(len(self._lrs), max(self._done + 1, possible))
        self._lrs[: self._rounds].copy_(self._schedule())

    def _explain(self) -> str:
        """Describe what is not finite: the step is computed again, one module after another."""
        done = int(self._finite)
        i_round, i_data = divmod(done, len(self._data))
        data, rows = self._data[i_data], self._rows[i_data][i_round]
        found = first_not_finite(self.model, self.run.recipe, data.select(rows))
        if found is None:
            found = "nothing, computed again" + ("" if self._graph is None else " without a CUDA graph")
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        # At 40, a linear layer's output was not finite on an H200 (PyTorch 2.11), for all mechanisms.
        hint = "" if share == "100" else f"; unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, which is {share}"
        return f"step {done + 1}, {data.tokens.shape[1]} tokens: {found}{hint}"

    def result(self, score: Dataset) -> dict[str, Any]:
        """Return the accuracy of the model, and how it was trained."""
        model = self.model
        return {
            **_score(model, self.run, score),
            "steps": int(self._finite),
            "stopped": self.ended,
            **({"not_finite": self._not_finite} if self._not_finite else {}),
            "train_loss": self._mean if math.isfinite(self._mean) else None,
            "seconds": round(self._seconds, 3),
            "parameters": sum(p.numel() for p in model.parameters()),
            "state_numbers": model.state_size() // 4 if isinstance(model, LanguageModel) else None,
        }


def _add_noise_to_gates(model: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Add noise to what is projected for the gates of mechanisms, in training."""

    def add(layer: nn.Module, _: object, gates: Tensor) -> Tensor:
        if not layer.training:
            return gates
        drawn = torch.randn(gates.shape, generator=generator, device=gates.device, dtype=gates.dtype)
        return gates + deviation * drawn

    for module in model.modules():
        if isinstance(module, Attention) and module.to_mechanism_gates is not None:
            module.to_mechanism_gates.register_forward_hook(add)


def _schedule(step: int, steps: int) -> float:
    """Linear warmup over 5 % of the steps, at most 100, times a cosine that ends at 2 %."""
    warmup = min(1.0, (step + 1) / max(1, min(100, steps // 20)))
    return warmup * max(0.02, (1 + math.cos(math.pi * step / steps)) / 2)


def first_not_finite(model: nn.Module, recipe: Recipe, batch: Dataset) -> str | None:
    """Return the first module whose output is not finite, or else the parameters whose gradients are not; or None."""
    found: list[str] = []

    def check(name: str, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append(f"the output of {name or 'the model'}")

    hooks = [m.register_forward_hook(lambda _, __, out, name=n: check(name, out)) for n, m in model.named_modules()]
    try:
        loss = _loss(model, recipe, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not loss.isfinite():
        found.append("the loss")
    model.zero_grad()
    loss.backward()
    grads = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if grads:  # Gradients are computed from the last parameter to the first.
        found.append(f"{len(grads)} gradients, the first of them that of {grads[-1]}")
    return found[0] if found else None


def _entry(model: nn.Module) -> Callable[..., Tensor]:
    """Return what maps tokens to a language model's hidden vectors, or to a classifier's logits."""
    return model.hidden if isinstance(model, LanguageModel) else model


def _loss(model: nn.Module, recipe: Recipe, batch: Dataset, call: Callable[..., Tensor] | None = None) -> Tensor:
    logits = _logits(model, recipe, batch, call)
    return F.cross_entropy(logits.flatten(0, -2).float(), batch.answers.flatten(), ignore_index=IGNORE_INDEX)


def _logits(model: nn.Module, recipe: Recipe, batch: Dataset, call: Callable[..., Tensor] | None = None) -> Tensor:
    """Return the logits of the answers (B, A, V), or of the classes (B, V).

    Args:
        model: A language model, or a classifier.
        recipe: How it is trained.
        batch: Sequences on its device.
        call: What `_entry` returned, compiled.
    """
    call = _entry(model) if call is None else call
    device = batch.tokens.device.type
    enabled = recipe.precision == "bf16" and device == "cuda"
    with torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False):
        if isinstance(model, LanguageModel):
            assert batch.positions is not None
            hidden = call(batch.tokens)
            index = batch.positions[..., None].expand(-1, -1, hidden.shape[-1])
            logits = model.logits(hidden.gather(1, index))
        else:
            # The mean of 2000 tokens hides the root of a list, the first token, for thousands of steps.
            logits = call(batch.tokens, key_mask=batch.key_mask)[:, 0]
    assert isinstance(logits, Tensor)
    return logits


@torch.no_grad()
def _score(model: nn.Module, run: RecallRun, data: Dataset) -> dict[str, Any]:
    """Return the accuracy; by depth for needles, by length for parity."""
    model.eval()
    size = max(1, 4 * run.recipe.batch_tokens // data.tokens.shape[1])
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
