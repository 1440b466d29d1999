"""Speculative decoding: draft tokens from n-grams of the text so far or a small model, verified together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.models.transformer import LanguageModel
from longspan.serve.slots import SlotLoop, StateLayout

NGRAM, BYTES_NGRAM = 3, 6  # tokens, or bytes, that must have occurred before
FIRST_DRAFT, MAX_DRAFT = 16, 64  # draft tokens at a time: at first, and at most
_HISTORY = 1 << 14  # tokens of a prompt that are searched
_DRAFT_CONTEXT = 512  # tokens of a prompt that a draft model reads
_MOST_NEEDED = 96  # tokens that must have been expected before a draft, after many wrong ones
_LOSS, _CREDIT = 0.01, 4  # fraction of the time that drafts may cost, and the steps that they may cost at first


class NgramProposer:
    """Proposes the next tokens of one sequence: those that followed the last occurrence of its last tokens.

    It proposes tokens only after some came as expected, which costs nothing to see: as many as an n-gram has, and
    twice as many after each draft of which no token was accepted.

    Args:
        tokens: The prompt.
        ngram: How many tokens must have occurred before.
    """

    def __init__(self, tokens: Sequence[int], ngram: int = NGRAM) -> None:
        self._ngram = ngram
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the tokens after an n-gram begin
        self._next: int | None = None  # where the token that is expected next is
        self._right = 0  # tokens in a row that were expected
        self._needed = ngram  # of them, before a draft
        self.size = FIRST_DRAFT  # how many tokens to propose: reading many takes little longer than reading few
        self.extend(tokens[-_HISTORY:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            expected = self._next is not None and self._tokens[self._next] == token
            self._tokens.append(token)
            gram = tuple(self._tokens[-self._ngram :])
            if expected and self._next is not None:
                self._next, self._right = self._next + 1, self._right + 1
            else:
                self._next, self._right = self._after.get(gram), 0
            self._after[gram] = len(self._tokens)

    def propose(self, limit: int) -> list[int]:
        """Return up to `limit` tokens, none if the last ones were not expected."""
        if self._next is None or self._right < self._needed:
            return []
        own, number = self._tokens[self._next :], min(limit, self.size)
        return (own * -(-number // len(own)))[:number]  # Repeat them past the end of the text.

    def adapt(self, proposed: int, accepted: int) -> None:
        """Propose more tokens after all were accepted, fewer otherwise, and less often after none was."""
        self._needed = self._ngram if accepted else min(2 * self._needed, _MOST_NEEDED)
        self.size = min(2 * self.size, MAX_DRAFT) if proposed == accepted else max(4, 2 * accepted)


class SpeculationBudget:
    """Decides whether speculation is worth its time, from the time that it has saved so far.

    A plain step gives each sequence one token. A round of draft tokens takes longer and may give more. Rounds are
    tried as long as what they have lost is a small fraction of all the time.
    """

    def __init__(self) -> None:
        self._step: float | None = None  # seconds of a plain step
        self._gain = self._elapsed = 0.0
        self._steps = 0

    @property
    def worthwhile(self) -> bool:
        """Whether to try a round of draft tokens."""
        if self._step is None or self._steps < 4:
            return False
        return self._gain >= -_LOSS * self._elapsed - _CREDIT * self._step

    def add_step(self, seconds: float) -> None:
        """Count a plain step."""
        self._steps += 1
        self._step = seconds if self._step is None else 0.9 * self._step + 0.1 * seconds
        self._elapsed += seconds

    def add_round(self, seconds: float, tokens: int, sequences: int) -> None:
        """Count the tokens and sequences of a round."""
        assert self._step is not None
        self._gain += tokens / sequences * self._step - seconds
        self._elapsed += seconds
        # Time saved long ago does not pay for drafts that are rejected now.
        self._gain = min(self._gain, 8 * seconds)


class DraftModel:
    """A small model that drafts for all slots. It reads only the end of a prompt; its state follows the tokens.

    Args:
        model: A causal language model with the tokens of the one that it drafts for.
        slots: Number of rows.
        max_length: Capacity of a row.
    """

    def __init__(self, model: LanguageModel, slots: int, max_length: int | None) -> None:
        self.model, self._max_length = model.eval(), max_length
        self.loop = SlotLoop(model, slots, StateLayout(model.new_state(1, max_length=max_length)))

    def put(self, row: int, tokens: Tensor, pending: int) -> None:
        """Begin a row after tokens (T,), with a pending one."""
        state = self.model.new_state(1, max_length=self._max_length)
        last = tokens[-_DRAFT_CONTEXT:].to(state.length.device)
        if len(last):
            state = self.model.extend_hidden(last[None], state)[1]
        self.loop.put([row], [*self.loop.layout.pack(state)], [pending])

    def propose(self, number: int) -> Tensor:
        """Return (slots, number) draft tokens, and leave the state as it was."""
        state, token = self.loop._state.clone(), self.loop.token.clone()
        drafts = torch.stack([self.loop.step().clone() for _ in range(number)], 1)
        self.loop.restore(state, token)
        return drafts

    def follow(self, tokens: Sequence[Sequence[int]]) -> None:
        """Write the pending token of each row and all but the last of these, which is the next pending one."""
        number = torch.tensor([len(own) for own in tokens])
        padded = torch.zeros(len(tokens), int(number.max()), dtype=torch.int64)
        for row, own in enumerate(tokens):
            padded[row, 1 : len(own)] = torch.tensor(own[:-1], dtype=torch.int64)
        device = self.loop.token.device
        padded, number = padded.to(device), number.to(device)
        padded[:, 0] = self.loop.token
        self.loop.follow(padded, number)
        self.loop.token.copy_(torch.tensor([own[-1] for own in tokens]))
