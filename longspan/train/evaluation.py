"""Scores: bits per byte and perplexity of data a model has not seen, in all and by position in the context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from longspan.train.config import TrainConfig
from longspan.train.data.batches import IGNORED, Batch, Shape, evaluation, labeled_evaluation, mixed
from longspan.train.data.token_store import Segments, Store
from longspan.train.objectives import Classification, Objective, masked

Record = dict[str, Any]


def evaluate(
    objective: Objective,
    store: Store,
    segments: Segments,
    shape: Shape,
    train: TrainConfig,
    accelerator: Accelerator,
) -> Record:
    """The held-out loss (nats a target) and what follows from it; empty where nothing is held out."""
    if not len(segments):
        return {}
    total, count, right = 0.0, 0, 0
    training = objective.training
    objective.eval()
    classify = isinstance(objective, Classification)
    batches = (labeled_evaluation if classify else evaluation)(store, segments, shape, train.eval_tokens)
    with torch.no_grad(), accelerator.autocast():
        for number, batch in enumerate(batches):
            if train.objective == "masked":
                batch = masked(batch, train.mask_rate, store.vocab_size, [mixed(shape.process, number)])
            batch = batch.to(accelerator.device)
            total += float(objective.losses(batch).double().sum())
            count += batch.count
            if isinstance(objective, Classification):
                right += int(objective.correct(batch).sum())
    objective.train(training)
    sums = torch.tensor([total, count, right], dtype=torch.float64, device=accelerator.device)
    total, count, right = (accelerator.reduce(sums) if shape.processes > 1 else sums).tolist()
    loss = total / count
    found = {"eval_loss": loss, "eval_tokens": int(count)}
    if classify:
        return found | {"eval_accuracy": right / count}
    found["eval_perplexity"] = math.exp(min(loss, 700))
    if train.objective == "causal" and store.bytes_per_token is not None:
        found["eval_bits_per_byte"] = loss / math.log(2) / store.bytes_per_token
    return found


@dataclass(frozen=True)
class ByPosition:
    """Summed losses (nats) and how many there are, at each position in the context: (context,)."""

    total: NDArray[np.float64]
    count: NDArray[np.int64]
    bytes_per_token: float | None

    @property
    def loss(self) -> float:
        return float(self.total.sum() / max(1, self.count.sum()))

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token

    def buckets(self) -> list[Record]:
        """Positions in groups that double: 0, 1, 2–3, 4–7, …, each with its mean loss."""
        found, start, end = [], 0, 1
        while start < len(self.total):
            count = int(self.count[start:end].sum())
            if count:
                loss = float(self.total[start:end].sum()) / count
                bits = None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token
                last = min(end, len(self.total)) - 1
                found.append({"from": start, "to": last, "tokens": count, "loss": loss, "bits_per_byte": bits})
            start, end = end, 2 * end
        return found


def by_position(
    objective: Objective, store: Store, segments: Segments, shape: Shape, limit: int, device: torch.device
) -> ByPosition:
    """Every token of the segments, or about `limit` of them, scored in windows of the context."""
    total, count = np.zeros(shape.context), np.zeros(shape.context, np.int64)
    objective.eval()
    with torch.no_grad():
        for batch in evaluation(store, segments, shape, limit):
            losses = objective.losses(batch.to(device)).double().cpu()
            place, counted = _positions(batch), batch.targets != IGNORED
            total += np.bincount(place[counted].numpy(), losses[counted].numpy(), shape.context)
            count += np.bincount(place[counted].numpy(), minlength=shape.context)
    return ByPosition(total, count, store.bytes_per_token)


def _positions(batch: Batch) -> Tensor:
    slots = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    if batch.offsets is None:
        return slots
    offsets = batch.offsets.long()
    return slots - offsets[torch.searchsorted(offsets[1:], slots.contiguous(), right=True)]
