"""Train on long sequences in pieces: the memory of one piece's activations, and the gradients of the whole sequence.

The forward pass runs the pieces in order and stores the state between them. The backward pass visits them from the
last to the first: each is computed again from its initial state, and the gradient of that state goes to the piece
before. It is context parallelism (`longspan.distributed`) in time, for the cost of a second forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.mechanisms.performer import random_feature_mechanisms
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.ops.common.autograd import recompute
from longspan.ops.loss import IGNORE_INDEX


def chunked_loss(
    model: LanguageModel,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    chunk_length: int,
    key_mask: Tensor | None = None,
    state: StackState | None = None,
) -> tuple[Tensor, StackState]:
    """Compute the mean cross-entropy of `model.loss` in pieces of the sequence, with the same gradients.

    Activations take the memory of `chunk_length` tokens, whatever T. Besides them a state is stored for each piece:
    of constant size for all mechanisms but `softmax`, whose state holds the tokens before it.

    Args:
        model: A causal language model.
        tokens: (B, T) int64; on the CPU, they are copied to the model's device piece by piece.
        labels: (B, T) int64, −100 where a label does not count; the next token unless given.
        chunk_length: The number of tokens in a piece.
        key_mask: (B, T) bool, True for real tokens.
        state: The state after the tokens before these; an empty one unless given. Gradients flow into it.

    Returns:
        The loss, and the state after the last token.

    Raises:
        ValueError: The model is not causal, or `chunk_length` is below 1.
    """
    pieces = _Pieces(model, tokens, chunk_length, state)
    if labels is None:
        labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
        if key_mask is not None:
            labels = labels.masked_fill(~(key_mask & F.pad(key_mask[:, 1:], (0, 1))), IGNORE_INDEX)
    total, state = torch.zeros((), device=pieces.device), pieces.state
    for piece in pieces.slices:
        run: Any = recompute if torch.is_grad_enabled() else _call
        loss, state = run(_piece_loss, model, *pieces.take(piece, tokens, labels, key_mask), state, pieces.device)
        total = total + loss
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1).to(pieces.device), state


def chunked_losses(
    model: LanguageModel, tokens: Tensor, labels: Tensor, *, chunk_length: int, key_mask: Tensor | None = None
) -> Tensor:
    """Compute the loss of each label (B, T), 0 where it is −100, without gradients; arguments as for `chunked_loss`."""
    pieces = _Pieces(model, tokens, chunk_length, None)
    found, state = [], pieces.state
    with torch.no_grad():
        for piece in pieces.slices:
            own, targets, mask = (_to(x, pieces.device) for x in pieces.take(piece, tokens, labels, key_mask))
            assert own is not None
            assert targets is not None
            logits, state = model.extend(own, state, key_mask=mask)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            found.append(losses.view_as(targets))
    return torch.cat(found, 1)


class _Pieces:
    """The pieces of a batch, and the state before the first."""

    def __init__(self, model: LanguageModel, tokens: Tensor, length: int, state: StackState | None) -> None:
        if not model.config.causal:
            raise ValueError("only a causal model can be trained in pieces: build it with causal=True")
        if length < 1:
            raise ValueError(f"chunk_length must be at least 1, got {length}")
        self.device = next(model.parameters()).device
        self.slices = [slice(i, i + length) for i in range(0, max(tokens.shape[1], 1), length)]
        if state is None:
            for mechanism in random_feature_mechanisms(model):
                mechanism.count_forward()  # `model.loss` is one forward pass.
            kind = self.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            state = model.new_state(len(tokens), device=self.device, dtype=dtype)
        self.state = state

    def take(self, piece: slice, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return the piece of tensors (B, T)."""
        return [None if x is None else x[:, piece] for x in tensors]


def _piece_loss(
    model: LanguageModel,
    tokens: Tensor,
    labels: Tensor,
    key_mask: Tensor | None,
    state: StackState,
    device: torch.device,
) -> tuple[Tensor, StackState]:
    """Return the summed loss of a piece, and the state after it."""
    labels = labels.to(device, non_blocking=True)
    hidden, state = model.extend_hidden(
        tokens.to(device, non_blocking=True), state, key_mask=None if key_mask is None else key_mask.to(device)
    )
    return model.hidden_loss(hidden, labels) * (labels != IGNORE_INDEX).sum(), state


def _call(function: Any, *args: Any) -> Any:
    return function(*args)


def _to(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device, non_blocking=True)
