"""A fixed number of rows that decode together and begin and end at different times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longspan.generation.decode import DecodeLoop
from longspan.generation.sampling import SlotSampler
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel

REPETITION_WINDOW = 256  # the longest window of a request's repetition penalty


class SlotLoop(DecodeLoop):
    """A decode loop over slots. Every step runs all rows, so that its shapes never change.

    A row begins with the state before the last token of its prompt, which is the pending token: the next step writes it
    and chooses the first token, as every later step does.

    Args:
        model: A causal model in eval mode.
        slots: Number of rows.
        max_length: Capacity of a row, for mechanisms that store all tokens.
    """

    def __init__(self, model: LanguageModel, slots: int, max_length: int | None) -> None:
        weight, size = next(model.parameters()), model.config.vocab_size
        assert size is not None
        self.sampler = SlotSampler(slots, size, REPETITION_WINDOW, weight.dtype, weight.device)
        logits = torch.zeros(slots, size, dtype=weight.dtype, device=weight.device)
        super().__init__(model, model.new_state(slots, max_length=max_length), logits, self.sampler)
        self._pending = True
        self._late: list[tuple[int, StackState, Tensor]] = []

    @property
    def logits(self) -> Tensor:
        """(slots, V), the logits that the last tokens were chosen from. The next step overwrites them."""
        return self._logits

    @torch.inference_mode()
    def put(self, row: int, state: StackState, token: int, logits: Tensor | None = None) -> None:
        """Begin a row. The sampler's row is set apart.

        Args:
            row: The row.
            state: The state of one sequence, before `token`.
            token: The pending token.
            logits: (1, V), if the state already holds the token: the next step chooses from them.
        """
        self.token[row] = token
        if logits is None:
            self._write(row, state)
        else:
            self._late.append((row, state, logits))

    @torch.inference_mode()
    def take(self, row: int) -> tuple[StackState, Tensor]:
        """Return copies of a row's state, without the pending token, and of its logits (1, V)."""
        return self._stack.finish_decode(self._state.select([row])), self._logits[row : row + 1].clone()

    @torch.inference_mode()
    def verify(self, guesses: Mapping[int, Sequence[int]]) -> tuple[list[list[int]], Tensor]:
        """Choose tokens of all rows as steps would, several where guesses turn out to be right.

        The pending tokens and the guesses are read in one `extend`. A token is chosen at each position with the row's
        own random numbers; those up to the first one that differs from the guess are what steps would have chosen.

        Args:
            guesses: Guesses of the next tokens by row.

        Returns:
            The tokens of each row, at least one, and the logits (slots, T, V) that they were chosen from.
        """
        T = 1 + max(map(len, guesses.values()))
        tokens, sizes = (
            torch.zeros(len(self.token), T, dtype=torch.int64),
            torch.ones(len(self.token), dtype=torch.int64),
        )
        for row, own in guesses.items():
            tokens[row, 1 : 1 + len(own)] = torch.tensor(own, dtype=torch.int64)
            sizes[row] += len(own)
        tokens, sizes = tokens.to(self.token.device), sizes.to(self.token.device)
        tokens[:, 0] = self.token
        logits, after = self._extended(tokens, sizes)
        chosen, number = self.sampler.choose_several(logits, tokens, sizes)
        if bool((number == 1).all()):
            self._advance()  # No guess was right: a plain step takes less time than reading one token again.
        else:
            self.follow(tokens, number, after if bool((number == sizes).all()) else None)
        self.token.copy_(chosen.gather(1, number[:, None] - 1)[:, 0])
        return [own[:n] for own, n in zip(chosen.tolist(), number.tolist(), strict=True)], logits

    @torch.inference_mode()
    def follow(self, tokens: Tensor, number: Tensor, after: StackState | None = None) -> None:
        """Write the first `number` (slots,) of tokens (slots, T) to the rows; after: the state, if it is known."""
        after = self._extended(tokens, number)[1] if after is None else after
        if not self._in_place:
            self._state = after
            return
        rows = self._stack.decode_state(after, next(self._model.parameters()).dtype).tensors()
        for name, x in self._state.tensors().items():
            x.copy_(rows[name])

    @torch.inference_mode()
    def restore(self, state: StackState, token: Tensor) -> None:
        """Return to copies of the loop's state and tokens."""
        if self._in_place:
            rows = state.tensors()
            for name, x in self._state.tensors().items():
                x.copy_(rows[name])
        else:
            self._state = state
        self.token.copy_(token)

    def _extended(self, tokens: Tensor, number: Tensor) -> tuple[Tensor, StackState]:
        """Return the logits and the state after the first `number` of tokens, without changing the loop's."""
        state = self._stack.finish_decode(self._state.clone())
        mask = torch.arange(tokens.shape[1], device=tokens.device) < number[:, None]
        return self._model.extend(tokens, state, key_mask=mask)

    def _write(self, row: int, state: StackState) -> None:
        if not self._in_place:
            self._state = self._state.put([row], state)
            return
        rows = self._stack.decode_state(state, next(self._model.parameters()).dtype).tensors()
        for name, x in self._state.tensors().items():
            x[row].copy_(rows[name][0])

    def _sample(self) -> None:
        for row, state, logits in self._late:
            self._write(row, state)
            self._logits[row].copy_(logits[0])
        self._late.clear()
        super()._sample()

    def _check(self) -> None:
        """Lengths are checked when a request is submitted."""


def join_rows(states: list[StackState]) -> StackState:
    """Return one state of the rows of several, in order; a single one is returned as it is."""
    first, *others = states
    return first._map(lambda *xs: torch.cat(xs), *others) if others else first
