"""A model's state as a transformers cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longspan.models.config import ModelConfig
from longspan.models.residual import StackState


class StateCache:
    """A model's state where transformers expects a key-value cache; its size is constant but for softmax layers.

    Attributes:
        config: The configuration of the model whose state this is.
        state: The state.
        seen_tokens: How many tokens per row were given, padding included.
    """

    is_compileable = False

    def __init__(self, config: ModelConfig, state: StackState) -> None:
        self.config, self.state = config, state
        self.seen_tokens = 0

    def check(self, config: ModelConfig, batch_size: int) -> None:
        """Raise ValueError if this is the cache of another model or of another batch size."""
        if config != self.config:
            raise ValueError("past_key_values is the cache of another model: call this model without it")
        if batch_size != len(self.state.length):
            raise ValueError(f"past_key_values holds {len(self.state.length)} rows, the input has {batch_size}")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens per row, padding included."""
        return self.seen_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return −1: there is no maximum."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, for beam search."""
        self.state = self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows."""
        self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        rows = len(self.state.length)
        index = self.state.length.new_tensor([row for row in range(rows) for _ in range(repeats)])
        self.state = self.state.select(index)

    def crop(self, *_: Any) -> None:
        """Raise ValueError: a state cannot drop tokens."""
        raise ValueError("a state cannot return to an earlier token: assisted generation is not supported")
