"""longspan's state where transformers expects a cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan.models.config import ModelConfig
from longspan.models.residual import StackState


class StateCache:
    """What a model remembers of each row of a batch. Its size does not grow with the text."""

    is_compileable = False

    def __init__(self, config: ModelConfig, state: StackState) -> None:
        self.config, self.state = config, state
        self.slots = 0  # tokens given so far, padding counted

    def check(self, config: ModelConfig, batch_size: int) -> None:
        """Refuses the memory of another model, or of another batch."""
        if config != self.config:
            raise ValueError("past_key_values is the memory of another model: start again without it")
        if batch_size != len(self.state.length):
            raise ValueError(f"past_key_values is of {len(self.state.length)} rows, the input has {batch_size}")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = len(self.state.length)
        index = self.state.length.new_tensor([row for row in range(rows) for _ in range(repeats)])
        self.state = self.state.select(index)

    def crop(self, *_: Any) -> None:
        raise ValueError("a state cannot go back to an earlier token: assisted generation is not possible with it")
