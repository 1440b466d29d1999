"""What a loop's states hold beside their sums: the tokens since those were last written. See `kernels.step_linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.protocol import State

# Slots: sums are written once for so many tokens.
LATE_SUMS = 16
LATE_ROWS = 32  # compressed rows are more to write, their slots less to read


@dataclass
class PendingFeatures(State):
    """Of linear attention: features, each divided by exp of its own log scale, and values."""

    f: Tensor  # (B, Hkv, slots, M) float32
    v: Tensor  # (B, Hkv, slots, E) in the dtype of inputs
    scale: Tensor  # (B, Hkv, slots) float32


@dataclass
class PendingTokens(State):
    """Of Linformer: keys and values, and the compressed rows as they are read."""

    k: Tensor  # (B, Hkv, slots, D) in the dtype of inputs
    v: Tensor  # (B, Hkv, slots, E)
    short_k: Tensor  # (B, Hkv, R, D) in the dtype of inputs; in float32 the rows themselves
    short_v: Tensor

    @classmethod
    def of(cls, length: Tensor, rows_k: Tensor, rows_v: Tensor, dtype: torch.dtype) -> PendingTokens:
        """Beside rows (B, Hkv, R, ·) of `length` tokens: nothing waits."""
        k, v = (x.new_zeros(*x.shape[:2], LATE_ROWS, x.shape[3], dtype=dtype) for x in (rows_k, rows_v))
        return cls(length, k, v, rows_k.to(dtype), rows_v.to(dtype))

    def waiting(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, slots, Hkv, ·) that the rows do not hold, zeros elsewhere, and the first's position."""
        here = waiting(self.length, LATE_ROWS)[:, :, None, None]
        k, v = (x.transpose(1, 2).masked_fill(~here, 0) for x in (self.k, self.v))
        return k, v, self.length - self.length % LATE_ROWS


def waiting(length: Tensor, slots: int) -> Tensor:
    """(B, slots): which of them hold a token that the sums do not, after `length` (B,) tokens."""
    return torch.arange(slots, device=length.device) < (length % slots)[:, None]
