"""States in fewer bytes: how the prefix cache stores them, and what the loss of precision costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longspan.models.residual import StackState
from longspan.utils import choose

STATE_DTYPES = ("exact", "bfloat16", "int8")
_SCALE = "/scale"  # after the name of an int8 tensor: the factors of its rows


class StateCodec:
    """Encodes the tensors of states.

    The large ones, with four dimensions, are stored in fewer bits: memories, keys and values. With int8 each row, the
    last dimension, has its own scale.

    Args:
        kind: "exact", "bfloat16" or "int8".

    Raises:
        ValueError: If there is no such kind.
    """

    def __init__(self, kind: str = "exact") -> None:
        self.kind = choose("state dtype", kind, STATE_DTYPES)

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors as they are stored."""
        stored: dict[str, Tensor] = {}
        for name, x in tensors.items():
            if self.kind == "exact" or x.ndim != 4 or not x.is_floating_point():
                stored[name] = x.clone(memory_format=torch.contiguous_format)
            elif self.kind == "bfloat16":
                stored[name] = x.to(torch.bfloat16, copy=True)
            else:
                scale = x.abs().amax(-1, keepdim=True) / 127
                stored[name] = (x / scale.masked_fill(scale == 0, 1)).round().to(torch.int8)
                stored[name + _SCALE] = scale
        return stored

    def decode(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `encode` stored, rounded."""
        found: dict[str, Tensor] = {}
        for name, x in stored.items():
            if not name.endswith(_SCALE):
                scale = stored.get(name + _SCALE)
                found[name] = x if scale is None else x * scale
        return found

    def round(self, state: StackState) -> None:
        """Round a state in place, as if it had been stored and loaded."""
        if self.kind == "exact":
            return
        tensors = state.tensors()
        for name, x in self.decode(self.encode(tensors)).items():
            tensors[name].copy_(x)
