"""Padding masks: check them, zero-fill padding, and shift left-padded sequences to slot 0."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops


def check_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Check that mask is (B, n) for x (B, n, …), and convert it to bool; True marks tokens."""
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be (batch, n) = {x.shape[:2]}, True for tokens, got {mask.shape}")
    return mask.astype(ms.bool_)


def zero_fill(x: Tensor, mask: Tensor) -> Tensor:
    """Set masked tokens of x (B, n, D) to zero; a product would keep NaN in the padding."""
    return ops.where(mask.expand_dims(-1), x, ops.zeros_like(x))


def first_token(mask: Tensor) -> Tensor:
    """Return the slot of each sequence's first token, (B,)."""
    return ops.argmax(mask.astype(ms.int32), 1)


def rotate_left(x: Tensor, by: Tensor) -> Tensor:
    """Rotate each sequence of x (B, n, …) to the left by `by` (B,) slots; −by undoes it."""
    B, n = x.shape[:2]
    slot = (ops.arange(n) + by.expand_dims(-1)) % n + ops.arange(B).expand_dims(-1) * n  # (B, n)
    tokens = ops.gather(x.reshape((B * n, -1)), slot.reshape((-1,)), 0)
    return tokens.reshape(x.shape)
