"""Rows of tokens: how padded and packed inputs become plain rows that start at slot 0, and how answers go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end in one row; the tensors it describes have B == 1.

    offsets: (N + 1,) int32, sequence n occupying slots offsets[n] to offsets[n + 1].
    max_length: the longest of them, a Python int so that launching a kernel never waits for the device.
    """

    offsets: Tensor
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Packing:
        """The packing of sequences of these lengths."""
        if len(lengths) == 0 or min(lengths) < 0:
            raise ValueError(f"lengths must be one or more non-negative integers, got {list(lengths)}")
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return cls(offsets.to(device=device, dtype=torch.int32), max(lengths))

    @property
    def lengths(self) -> Tensor:
        """(N,) int64, the length of each sequence."""
        return self.offsets.diff().long()

    def bounds(self, tokens: int) -> Tensor:
        """(2, tokens) int32: the slots where each token's sequence begins and ends."""
        slot = torch.arange(tokens, device=self.offsets.device, dtype=torch.int32)
        sequence = torch.searchsorted(self.offsets[1:], slot, right=True)
        return torch.stack([self.offsets[sequence], self.offsets[sequence + 1]])


class PaddedSpan(NamedTuple):
    """A causal mask: the one run of real tokens in each row, and how to bring it to slot 0 and back."""

    mask: Tensor
    start: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, key_mask: Tensor) -> PaddedSpan:
        starts = key_mask.clone()
        starts[:, 1:] &= ~key_mask[:, :-1]
        contiguous = (starts.sum(1) <= 1).all()
        message = (
            "with causal, past or write each row of key_mask must be one run of True (left- or right-padded): "
            "drop the tokens in between, or use bidirectional attention"
        )
        if torch.compiler.is_compiling() or key_mask.device.type != "cpu":
            torch._assert_async(contiguous, message)
        elif not contiguous:
            raise ValueError(message)
        return cls(key_mask, key_mask.int().argmax(1), key_mask.sum(1))

    def roll(self, *xs: Tensor) -> tuple[Tensor, ...]:
        slots = torch.arange(self.mask.shape[1], device=self.mask.device)
        index = (self.start[:, None] + slots).clamp(max=len(slots) - 1)
        rolled = [torch.take_along_dim(x, index[:, :, None, None], 1) for x in xs]
        return hide(slots >= self.lengths[:, None], *rolled)

    def unroll(self, out: Tensor) -> Tensor:
        index = torch.arange(self.mask.shape[1], device=self.mask.device) - self.start[:, None]
        out = torch.take_along_dim(out, index.clamp(min=0)[:, :, None, None], 1)
        return out.masked_fill(~self.mask[:, :, None, None], 0)


class LengthBucket(NamedTuple):
    """Packed sequences of about one length, padded to it; one entry of slots and lengths for each packing."""

    sequences: Tensor
    slots: list[Tensor]
    lengths: list[Tensor]

    def visible(self, of: int = 0) -> Tensor:
        return torch.arange(self.slots[of].shape[1], device=self.sequences.device) < self.lengths[of][:, None]

    def take(self, *xs: Tensor, of: int = 0) -> tuple[Tensor, ...]:
        return hide(~self.visible(of), *(x[0][self.slots[of].clamp(max=x.shape[1] - 1)] for x in xs))


def length_buckets(*packings: Packing) -> list[LengthBucket]:
    """Sequences grouped by length to the next power of two, so that padding at most doubles the work.

    Under torch.compile lengths are unknown: one group, padded to max_length.
    """
    classes: dict[tuple[int, ...], list[int]] = {}
    if torch.compiler.is_compiling():
        classes[tuple(p.max_length for p in packings)] = list(range(len(packings[0].offsets) - 1))
    else:
        for n, lengths in enumerate(zip(*(p.lengths.tolist() for p in packings), strict=True)):
            sizes = tuple(
                min(1 << max(length - 1, 0).bit_length(), p.max_length)
                for length, p in zip(lengths, packings, strict=True)
            )
            classes.setdefault(sizes, []).append(n)
    groups = []
    for sizes, members in classes.items():
        sequences = torch.tensor(members, device=packings[0].offsets.device)
        slots = [
            p.offsets[sequences].long()[:, None] + torch.arange(size, device=sequences.device)
            for size, p in zip(sizes, packings, strict=True)
        ]
        groups.append(LengthBucket(sequences, slots, [p.lengths[sequences] for p in packings]))
    return groups


def restore(packing: Packing, groups: list[LengthBucket], pieces: list[Tensor], total: int) -> Tensor:
    """The groups' padded outputs, back in one packed row: (1, total, H, E)."""
    offsets = packing.offsets.long()
    first, base = torch.zeros_like(offsets[1:]), 0
    for group in groups:
        number, size = group.slots[0].shape
        rows = base + size * torch.arange(number, device=offsets.device)
        first, base = first.index_copy(0, group.sequences, rows), base + number * size
    slot = torch.arange(total, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:], slot, right=True)
    flat = torch.cat([piece.flatten(0, 1) for piece in pieces])
    return flat[first[sequence] + slot - offsets[sequence]][None]


def hide(hidden: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    # Filled, not multiplied: padding may hold NaN.
    return tuple(x.masked_fill(hidden[:, :, None, None], 0) for x in xs)


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a batch lie: which are real, where each stands in its sequence, where sequences end.

    position: (B or 1, T) int64, counted from the start of each sequence. last: (B or 1, T) the final position of each
    token's sequence. rotary: cos and sin (B or 1, T, D / 2) by (D, base), computed once for all layers.
    """

    position: Tensor
    last: Tensor
    key_mask: Tensor | None = None
    packing: Packing | None = None
    rotary: Mapping[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        x: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        start: Tensor | None = None,
    ) -> TokenLayout:
        """The rows of x (B, T, ...). start: (B,), or (N,) when packed, tokens that came before each sequence."""
        T = x.shape[1]
        slot = torch.arange(T, device=x.device)
        if key_mask is not None:
            _check_mask(key_mask, x, packing)
        if packing is not None:
            _check_end(packing, T)
            offsets = packing.offsets.long()
            sequence = torch.searchsorted(offsets[1:], slot, right=True)
            position, last = slot - offsets[sequence], packing.lengths[sequence] - 1
            before = 0 if start is None else start[sequence]
            return cls((position + before)[None], (last + before)[None], None, packing)
        before = 0 if start is None else start[:, None]
        if key_mask is not None and causal:
            # Hidden tokens stand at 0: a position after the last may be one that a table does not have.
            position = (key_mask.cumsum(1) - 1 + before).masked_fill(~key_mask, 0)
            last = key_mask.sum(1, keepdim=True) - 1 + before
            return cls(position, last.expand_as(position), key_mask)
        return cls(slot[None] + before, torch.full_like(slot[None], T - 1) + before, key_mask)

    def hide(self, x: Tensor) -> Tensor:
        """x (B, T, ...) with hidden tokens zero: NaN there would reach the gradients of every weight that meets it."""
        if self.key_mask is None:
            return x
        return x.masked_fill(~self.key_mask.reshape(*self.key_mask.shape, *[1] * (x.ndim - 2)), 0)

    def has_neighbor(self, offset: int) -> Tensor:
        """(B or 1, T): whether there is a token `offset` places before (negative: after) in the same sequence."""
        there = self.position - offset
        return (there >= 0) & (there <= self.last)


def _check_end(packing: Packing, T: int) -> None:
    if torch.compiler.is_compiling() or packing.offsets.device.type != "cpu":
        return  # Looking at the values would wait for the device.
    if packing.offsets[-1] != T:
        offsets = packing.offsets.tolist()
        raise ValueError(f"packing.offsets must rise from 0 to the row's length {T}, got {offsets}")


def _check_mask(key_mask: Tensor, x: Tensor, packing: Packing | None) -> None:
    if packing is not None:
        raise ValueError("packing and key_mask exclude each other: a packed row has no padding; leave key_mask out")
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool, True = keep, got {key_mask.dtype}; use key_mask.bool()")
    if key_mask.shape != x.shape[:2]:
        raise ValueError(f"key_mask must be (B, T) = {tuple(x.shape[:2])}, got {tuple(key_mask.shape)}")
