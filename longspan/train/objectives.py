"""Training objectives: modules around a model that compute the mean loss of a batch in nats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.distributed.context_parallel import ContextParallel
from longspan.layout import Packing
from longspan.models.residual import StackState
from longspan.models.transformer import Classifier, LanguageModel
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.chunked import chunked_loss, chunked_losses
from longspan.train.data.batches import Batch
from longspan.train.data.tasks import SupervisedTask


class Objective(nn.Module):
    """Cross-entropy of a language model: of the next token, or of masked tokens.

    Args:
        model: The model to train.
        context: Length of the longest sequence inside a packed batch.
        chunk_length: Train sequences in chunks of this many tokens (`chunked_loss`); None: whole.
        cp: The ranks over which sequences are divided; every rank gets the whole batch and takes its piece of it.
    """

    def __init__(
        self,
        model: LanguageModel | Classifier,
        context: int,
        chunk_length: int | None = None,
        cp: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.model, self.context, self.chunk_length = model, context, chunk_length
        self.cp = None if cp is None or dist.get_world_size(cp) == 1 else cp

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that share a batch."""
        return 1 if self.cp is None else dist.get_world_size(self.cp)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        offsets: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: StackState | None = None,
    ) -> tuple[Tensor, StackState | None]:
        """Compute the mean loss over the targets that are not IGNORE_INDEX.

        Args:
            tokens: (B, T).
            targets: (B, T).
            offsets: (N + 1,), boundaries of packed sequences.
            key_mask: (B, T), False for padding.
            state: Recurrent state after the preceding tokens.

        Returns:
            The loss and, if `state` was given, the state after these tokens.
        """
        model = self.model
        assert isinstance(model, LanguageModel)
        tokens, targets, key_mask = self._piece(tokens), self._piece(targets), self._piece(key_mask)
        if self.chunk_length is not None:
            size = self.chunk_length
            loss, after = chunked_loss(model, tokens, targets, chunk_length=size, key_mask=key_mask, state=state)
            return loss, None if state is None else after
        run = model if self.cp is None else ContextParallel(model, self.cp)
        if state is None:
            return run.loss(tokens, targets, key_mask=key_mask, packing=self._packing(offsets)), None
        logits, state = run.extend(tokens, state, key_mask=key_mask)
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        mean = total / (targets != IGNORE_INDEX).sum().clamp(min=1)
        if isinstance(run, ContextParallel):
            mean = run.mean(mean, targets)
        return mean, state

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each target, (B, T), 0 where it is IGNORE_INDEX; of those in this rank's piece."""
        model = self.model
        assert isinstance(model, LanguageModel)
        if self.chunk_length is not None and batch.offsets is None:
            size, mask = self.chunk_length, batch.key_mask
            return chunked_losses(model, batch.tokens, batch.targets, chunk_length=size, key_mask=mask)
        run = model if self.cp is None else ContextParallel(model, self.cp)
        tokens, targets, key_mask = self._piece(batch.tokens), self._piece(batch.targets), self._piece(batch.key_mask)
        logits = run(tokens, key_mask=key_mask, packing=self._packing(batch.offsets))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return losses.view_as(targets)

    def _packing(self, offsets: Tensor | None) -> Packing | None:
        return None if offsets is None else Packing(offsets, self.context)

    def _piece(self, x: Any) -> Any:
        """Return this rank's piece of x (B, T); None for None."""
        if x is None or self.cp is None:
            return x
        rank, ranks, length = dist.get_rank(self.cp), self.ranks_per_batch, x.shape[1]
        return x[:, rank * length // ranks : (rank + 1) * length // ranks]


class Classification(Objective):
    """The loss of a supervised task: cross-entropy of classes, or squared error of normalized numbers.

    Args:
        model: The model to train.
        context: Length of the longest sequence.
        task: The task.
        cp: The ranks that each hold a piece of every sequence, if there are several.
    """

    def __init__(
        self, model: LanguageModel | Classifier, context: int, task: SupervisedTask, cp: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, context, cp=cp)
        self.task = task
        if self.cp is not None and (task.per_token or model.config.input_dim is not None):
            raise ValueError(f"--mesh with cp divides sequences of tokens, with one output: not {task.kind} or vectors")

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        offsets: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: StackState | None = None,
    ) -> tuple[Tensor, StackState | None]:
        """Compute the mean loss of `targets`; supervised tasks neither pack nor carry a state."""
        assert offsets is None
        assert state is None
        outputs = self._outputs(tokens, key_mask)
        if self.task.kind == "classify":
            return F.cross_entropy(outputs, targets), None
        losses = self._losses(outputs, targets)
        return losses.sum() / _known(targets, self.task).sum().clamp(min=1), None

    def losses(self, batch: Batch) -> Tensor:
        """Return this rank's share of the loss of each document, (B,), or token, (B, T), 0 where there is no target."""
        return self._losses(self._outputs(batch.tokens, batch.key_mask), batch.targets) / self.ranks_per_batch

    def correct(self, batch: Batch) -> Tensor:
        """Return whether each document or token is classified correctly."""
        outputs = self._outputs(batch.tokens, batch.key_mask)
        if self.task.kind == "multilabel":
            return ((outputs > 0) == (batch.targets > 0.5)).all(1)
        return outputs.argmax(-1) == batch.targets

    def _outputs(self, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
        assert isinstance(self.model, Classifier)
        run = self.model if self.cp is None else ContextParallel(self.model, self.cp)
        logits: Tensor = run(self._piece(tokens), key_mask=self._piece(key_mask))
        return logits.float()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        kind = self.task.kind
        if kind == "classify":
            return F.cross_entropy(outputs, targets, reduction="none")
        if kind == "multilabel":
            return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
        if kind == "tag":
            losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
            return losses.view_as(targets)
        known = _known(targets, self.task)
        errors = (outputs - targets.nan_to_num()).square().mean(-1)
        return errors.masked_fill(~known, 0)


def _known(targets: Tensor, task: SupervisedTask) -> Tensor:
    """Return which documents or tokens have a target."""
    if task.kind == "tag":
        return targets != IGNORE_INDEX
    return ~targets[..., 0].isnan() if targets.ndim > 1 else torch.ones_like(targets, dtype=torch.bool)


def wrap_model(
    model: nn.Module,
    context: int,
    chunk_length: int | None = None,
    cp: dist.ProcessGroup | None = None,
    task: SupervisedTask | None = None,
) -> Objective:
    """Return the objective of a model: `Classification`, of a class unless a task is given, or `Objective`."""
    assert isinstance(model, LanguageModel | Classifier)
    if isinstance(model, Classifier):
        return Classification(model, context, task or SupervisedTask("classify", ()), cp)
    return Objective(model, context, chunk_length, cp)


def mask_tokens(batch: Batch, rate: float, mask_token: int, seeds: Sequence[int]) -> Batch:
    """Return the batch for masked language modeling (Devlin et al. 2018).

    Of the tokens chosen as targets, 80 % become `mask_token`, 10 % a random token, and 10 % remain unchanged.

    Args:
        batch: Tokens to mask.
        rate: Probability of a token to be a target.
        mask_token: Index of the mask token, which is also the number of other tokens.
        seeds: One seed for each of `len(seeds)` equal parts of the batch, so that the masks of a sequence do not
            depend on the other sequences.
    """
    size = batch.tokens.numel() // len(seeds)
    draws = [torch.rand(3, size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    choice, action, replacement = torch.cat(draws, 1).view(3, *batch.tokens.shape)
    chosen = choice < rate
    if batch.key_mask is not None:
        chosen &= batch.key_mask
    tokens = torch.where(chosen & (action < 0.8), mask_token, batch.tokens)
    tokens = torch.where(chosen & (action >= 0.9), (replacement * mask_token).long(), tokens)
    targets = batch.tokens.masked_fill(~chosen, IGNORE_INDEX)
    return Batch(tokens, targets, int(chosen.sum()), batch.offsets, batch.key_mask)
