"""Write buffers of decode states: tokens that the sums do not hold yet, added to them once for many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.protocol import State

FEATURE_SLOTS = 16  # tokens between two writes of linear attention's sums
TOKEN_SLOTS = 32  # of Linformer's compressed keys and values, which cost more to write


@dataclass
class PendingFeatures(State):
    """Pending tokens of linear attention: features, each divided by exp of its own log scale, and values."""

    f: Tensor  # (B, Hkv, slots, M) float32
    v: Tensor  # (B, Hkv, slots, E) in the dtype of inputs
    scale: Tensor  # (B, Hkv, slots) float32


@dataclass
class PendingTokens(State):
    """Pending tokens of Linformer: keys and values, and the compressed keys and values in the dtype of inputs."""

    k: Tensor  # (B, Hkv, slots, D) in the dtype of inputs
    v: Tensor  # (B, Hkv, slots, E)
    short_k: Tensor  # (B, Hkv, R, D) in the dtype of inputs; in float32 the compressed keys themselves
    short_v: Tensor

    @classmethod
    def of(cls, length: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> PendingTokens:
        """Return an empty buffer beside compressed k and v (B, Hkv, R, ·) of `length` tokens."""
        new_k, new_v = (x.new_zeros(*x.shape[:2], TOKEN_SLOTS, x.shape[3], dtype=dtype) for x in (k, v))
        return cls(length, new_k, new_v, k.to(dtype), v.to(dtype))

    def flush(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pending keys and values (B, slots, Hkv, ·), zeros elsewhere, and the first one's position (B,)."""
        pending = pending_slots(self.length, TOKEN_SLOTS)[:, :, None, None]
        k, v = (x.transpose(1, 2).masked_fill(~pending, 0) for x in (self.k, self.v))
        return k, v, self.length - self.length % TOKEN_SLOTS


def pending_slots(length: Tensor, slots: int) -> Tensor:
    """Return which slots hold a pending token after `length` (B,) tokens: (B, slots)."""
    return torch.arange(slots, device=length.device) < (length % slots)[:, None]
