"""Speculation: tokens guessed ahead, from the text so far or by a small model, and checked together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.models.transformer import LanguageModel
from longspan.serve.slots import SlotLoop

NGRAM = 3  # tokens that must have occurred before
MAX_GUESS = 16  # tokens guessed at a time
_HISTORY = 1 << 14  # tokens of a prompt that are searched
_DRAFT_CONTEXT = 512  # tokens of a prompt that a draft model reads
_LOSS = 0.02  # fraction of the time that guesses may cost


class Guesser:
    """Guesses the next tokens of one sequence: those that followed the last occurrence of its last tokens.

    Args:
        tokens: The prompt.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the tokens after an n-gram begin
        self._before: dict[tuple[int, ...], int] = {}  # the same of its occurrence before the last one
        self.size = 4  # how many tokens to guess
        self.extend(tokens[-_HISTORY:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._tokens.append(token)
            gram = tuple(self._tokens[-NGRAM:])
            if gram in self._after:
                self._before[gram] = self._after[gram]
            self._after[gram] = len(self._tokens)

    def guess(self, limit: int) -> list[int]:
        """Return up to `limit` tokens, none if the last ones have not occurred before."""
        start = self._before.get(tuple(self._tokens[-NGRAM:]))
        return [] if start is None else self._tokens[start : start + min(limit, self.size)]

    def learn(self, guessed: int, right: int) -> None:
        """Guess more after all guesses were right, fewer otherwise."""
        self.size = min(2 * self.size, MAX_GUESS) if guessed == right else max(2, right + 1)


class Pace:
    """Decides whether guessing is worth its time, from the time that it has saved so far.

    A plain step gives each sequence one token. A round of guesses takes longer and may give more. Rounds are tried as
    long as what they have lost is a small fraction of all the time.
    """

    def __init__(self) -> None:
        self._step: float | None = None  # seconds of a plain step
        self._gain = self._elapsed = 0.0
        self._steps = 0

    @property
    def worthwhile(self) -> bool:
        """Whether to try a round of guesses."""
        return self._steps >= 4 and self._gain >= -_LOSS * self._elapsed

    def add_step(self, seconds: float) -> None:
        """Count a plain step."""
        self._steps += 1
        self._step = seconds if self._step is None else min(seconds, 0.9 * self._step + 0.1 * seconds)
        self._elapsed += seconds

    def add_round(self, seconds: float, tokens: int, sequences: int) -> None:
        """Count a round that gave so many tokens to so many sequences."""
        assert self._step is not None
        self._gain += tokens / sequences * self._step - seconds
        self._elapsed += seconds
        # Time saved long ago does not pay for guesses that are wrong now.
        self._gain = min(self._gain, 8 * seconds)


class Draft:
    """A small model that guesses for all slots. It reads only the end of a prompt; its state follows the tokens.

    Args:
        model: A causal language model with the tokens of the one that it guesses for.
        slots: Number of rows.
        max_length: Capacity of a row.
    """

    def __init__(self, model: LanguageModel, slots: int, max_length: int | None) -> None:
        self.model, self._max_length = model.eval(), max_length
        self.loop = SlotLoop(model, slots, max_length)

    def put(self, row: int, tokens: Tensor, pending: int) -> None:
        """Begin a row after tokens (T,), with a pending one."""
        state = self.model.new_state(1, max_length=self._max_length)
        last = tokens[-_DRAFT_CONTEXT:].to(state.length.device)
        if len(last):
            state = self.model.extend_hidden(last[None], state)[1]
        self.loop.put(row, state, pending)

    def guess(self, number: int) -> Tensor:
        """Return (slots, number) guesses, and leave the state as it was."""
        kept, token = self.loop._state.clone(), self.loop.token.clone()
        guesses = torch.stack([self.loop.step().clone() for _ in range(number)], 1)
        self.loop.restore(kept, token)
        return guesses

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
