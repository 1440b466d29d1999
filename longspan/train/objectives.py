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


class Objective(nn.Module):
    """Cross-entropy of a language model: of the next token, or of masked tokens.

    Args:
        model: The model to train.
        context: Length of the longest sequence inside a packed batch.
        chunk_length: Train sequences in pieces of so many tokens (`chunked_loss`). None: whole.
    """

    def __init__(self, model: LanguageModel | Classifier, context: int, chunk_length: int | None = None) -> None:
        super().__init__()
        self.model, self.context, self.chunk_length = model, context, chunk_length

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
        if self.chunk_length is not None:
            given: dict[str, Any] = {"chunk_length": self.chunk_length, "key_mask": key_mask}
            loss, after = chunked_loss(model, tokens, targets, state=state, **given)
            return loss, None if state is None else after
        if state is None:
            return model.loss(tokens, targets, key_mask=key_mask, packing=self._packing(offsets)), None
        logits, state = model.extend(tokens, state, key_mask=key_mask)
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / (targets != IGNORE_INDEX).sum().clamp(min=1), state

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each target, (B, T), 0 where it is IGNORE_INDEX."""
        model = self.model
        assert isinstance(model, LanguageModel)
        if self.chunk_length is not None and batch.offsets is None:
            given: dict[str, Any] = {"chunk_length": self.chunk_length, "key_mask": batch.key_mask}
            return chunked_losses(model, batch.tokens, batch.targets, **given)
        logits = model(batch.tokens, key_mask=batch.key_mask, packing=self._packing(batch.offsets))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
        return losses.view_as(batch.targets)

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that share a batch."""
        return 1

    def _packing(self, offsets: Tensor | None) -> Packing | None:
        return None if offsets is None else Packing(offsets, self.context)


class ContextParallelObjective(Objective):
    """The objective of a language model whose sequences are divided over ranks; every rank gets the whole batch.

    Args:
        model: The model to train.
        context: Length of the longest sequence inside a packed batch.
        group: The ranks, in the order of their pieces.
    """

    def __init__(self, model: LanguageModel | Classifier, context: int, group: dist.ProcessGroup) -> None:
        super().__init__(model, context)
        self.group = group

    @property
    def ranks_per_batch(self) -> int:
        return dist.get_world_size(self.group)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        offsets: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: StackState | None = None,
    ) -> tuple[Tensor, StackState | None]:
        """Compute the mean loss over the targets of all ranks."""
        assert state is None
        tokens, targets, key_mask = self._piece(tokens, targets, key_mask)
        return self._divided().loss(tokens, targets, key_mask=key_mask, packing=self._packing(offsets)), None

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each target in this rank's piece."""
        tokens, targets, key_mask = self._piece(batch.tokens, batch.targets, batch.key_mask)
        logits = self._divided()(tokens, key_mask=key_mask, packing=self._packing(batch.offsets))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return losses.view_as(targets)

    def _divided(self) -> ContextParallel:
        assert isinstance(self.model, LanguageModel)
        return ContextParallel(self.model, self.group)

    def _piece(self, tokens: Tensor, targets: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        rank, ranks, length = dist.get_rank(self.group), self.ranks_per_batch, tokens.shape[1]
        piece = slice(rank * length // ranks, (rank + 1) * length // ranks)
        return tokens[:, piece], targets[:, piece], None if key_mask is None else key_mask[:, piece]


class Classification(Objective):
    """Cross-entropy of the class of a document."""

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        offsets: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: StackState | None = None,
    ) -> tuple[Tensor, StackState | None]:
        """Compute the mean loss of `targets`, (B,); classification neither packs nor carries a state."""
        assert offsets is None
        assert state is None
        return F.cross_entropy(self._logits(tokens, key_mask), targets), None

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of each document, (B,)."""
        return F.cross_entropy(self._logits(batch.tokens, batch.key_mask), batch.targets, reduction="none")

    def correct(self, batch: Batch) -> Tensor:
        """Return whether each document is classified correctly, (B,)."""
        return self._logits(batch.tokens, batch.key_mask).argmax(1) == batch.targets

    def _logits(self, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
        assert isinstance(self.model, Classifier)
        return self.model(tokens, key_mask=key_mask).float()


def wrap_model(
    model: nn.Module, context: int, cp: dist.ProcessGroup | None = None, chunk_length: int | None = None
) -> Objective:
    """Return the objective of a model: `Classification` for a classifier, otherwise `Objective`.

    Args:
        model: The model.
        context: Length of the longest sequence inside a packed batch.
        cp: The ranks that each hold a piece of every sequence, if there are several.
        chunk_length: Train sequences in pieces of so many tokens.
    """
    assert isinstance(model, LanguageModel | Classifier)
    if cp is not None and dist.get_world_size(cp) > 1:
        return ContextParallelObjective(model, context, cp)
    return Classification(model, context) if isinstance(model, Classifier) else Objective(model, context, chunk_length)


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
