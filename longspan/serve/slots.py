"""A fixed number of rows that decode together and begin and end at different times."""

from __future__ import annotations

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
