"""What is learnt: each objective is a module around a model that gives its mean loss over a batch, in nats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import Packing
from longspan.models.config import ModelConfig
from longspan.models.residual import StackState
from longspan.models.transformer import Classifier, LanguageModel
from longspan.train.data.batches import IGNORED, Batch


class Objective(nn.Module):
    """forward(tokens, targets, …) is the mean loss; `losses` keeps one for each target.

    context: the longest sequence there is in a packed row.
    """

    def __init__(self, model: LanguageModel | Classifier, context: int) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        offsets: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: StackState | None = None,
    ) -> Any:
        """The mean over targets that count; with a state, also the state after these tokens."""
        model = self.model
        assert isinstance(model, LanguageModel)
        if state is None:
            return model.loss(tokens, targets, **self._rows(offsets, key_mask))
        logits, after = model.extend(tokens, state, key_mask=key_mask)
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1), after

    def losses(self, batch: Batch) -> Tensor:
        """(B, T) nats, 0 where a target does not count."""
        model = self.model
        assert isinstance(model, LanguageModel)
        logits = model(batch.tokens, **self._rows(batch.offsets, batch.key_mask))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
        return losses.view_as(batch.targets)

    def _rows(self, offsets: Tensor | None, key_mask: Tensor | None) -> dict[str, Any]:
        if offsets is None:
            return {} if key_mask is None else {"key_mask": key_mask}
        return {"packing": Packing(offsets, self.context)}


class Classification(Objective):
    """The label of a document."""

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        offsets: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: StackState | None = None,
    ) -> Tensor:
        return F.cross_entropy(self._logits(tokens, key_mask), targets)

    def losses(self, batch: Batch) -> Tensor:
        """(B,) nats."""
        return F.cross_entropy(self._logits(batch.tokens, batch.key_mask), batch.targets, reduction="none")

    def correct(self, batch: Batch) -> Tensor:
        """(B,) whether the likeliest label is the right one."""
        return self._logits(batch.tokens, batch.key_mask).argmax(1) == batch.targets

    def _logits(self, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
        assert isinstance(self.model, Classifier)
        return self.model(tokens, key_mask=key_mask).float()


def build(kind: str, config: ModelConfig, context: int) -> Objective:
    """The objective with a new model."""
    return wrap(Classifier(config) if kind == "classify" else LanguageModel(config), context)


def wrap(model: nn.Module, context: int) -> Objective:
    """The objective of a model that is there."""
    assert isinstance(model, LanguageModel | Classifier)
    return Classification(model, context) if isinstance(model, Classifier) else Objective(model, context)


def masked(batch: Batch, rate: float, mask_token: int, seeds: Sequence[int]) -> Batch:
    """The batch for a model that reads both ways: some tokens are to be found, and most of those are hidden.

    As Devlin et al. (2018): of the chosen, 8 in 10 become mask_token, 1 another token, 1 stays. seeds: one for each of
    so many equal parts of the batch, so that a row's fate does not depend on the rows beside it.
    """
    size = batch.tokens.numel() // len(seeds)
    draws = [torch.rand(3, size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    choice, fate, other = torch.cat(draws, 1).view(3, *batch.tokens.shape)
    chosen = choice < rate
    if batch.key_mask is not None:
        chosen &= batch.key_mask
    tokens = torch.where(chosen & (fate < 0.8), mask_token, batch.tokens)
    tokens = torch.where(chosen & (fate >= 0.9), (other * mask_token).long(), tokens)
    targets = batch.tokens.masked_fill(~chosen, IGNORED)
    return Batch(tokens, targets, int(chosen.sum()), batch.offsets, batch.key_mask)
