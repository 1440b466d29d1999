"""How the tokens of a batch are arranged in memory: packing, padding and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.utils import check_torch

check_torch()


@dataclass(frozen=True)
class Packing:
    """Sequences concatenated into one row; the tensors it describes have batch size 1.

    Attributes:
        offsets: (N + 1,) int32; sequence n occupies slots offsets[n] to offsets[n + 1].
        max_length: Length of the longest sequence, a Python int so that launching a kernel needs no synchronization.
    """

    offsets: Tensor
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Packing:
        """Return the packing of sequences of these lengths.

        Raises:
            ValueError: If there is no length, or a negative one.
        """
        try:
            offsets = torch.tensor([0, *lengths]).cumsum(0)
        except (TypeError, RuntimeError):
            raise TypeError(f"lengths must be a sequence of integers, got {lengths!r}") from None
        if len(offsets) == 1 or offsets.dtype != torch.int64 or min(lengths) < 0:
            raise ValueError(f"lengths must be one or more non-negative integers, got {list(lengths)}")
        return cls(offsets.to(device=device, dtype=torch.int32), int(max(lengths)))

    @property
    def lengths(self) -> Tensor:
        """(N,) int64, the length of each sequence."""
        return self.offsets.diff().long()

    def bounds(self, tokens: int) -> Tensor:
        """Return the first slot and the end of each token's sequence: (2, tokens) int32."""
        slot = torch.arange(tokens, device=self.offsets.device, dtype=torch.int32)
        sequence = torch.searchsorted(self.offsets[1:], slot, right=True)
        return torch.stack([self.offsets[sequence], self.offsets[sequence + 1]])


class PaddedSpan(NamedTuple):
    """The contiguous span of real tokens in each row of a causal key_mask; moves it to slot 0 and back.

    Attributes:
        mask: (B, T) bool, True for real tokens.
        start: (B,) the first real slot.
        lengths: (B,) the number of real tokens.
        right_padded: Whether every span is known to be at slot 0 already: nothing moves.
    """

    mask: Tensor
    start: Tensor
    lengths: Tensor
    right_padded: bool

    @classmethod
    def of(cls, key_mask: Tensor) -> PaddedSpan:
        starts = key_mask.clone()
        starts[:, 1:] &= ~key_mask[:, :-1]
        contiguous = (starts.sum(1) <= 1).all()
        message = (
            "with causal or past, and to write what only causal queries read, each row of key_mask must be one run of "
            "True (left- or right-padded): drop the tokens in between, or use bidirectional attention"
        )
        first, right_padded = key_mask.int().argmax(1), False
        if torch.compiler.is_compiling() or key_mask.device.type != "cpu":
            torch._assert_async(contiguous, message)
        elif not contiguous:
            raise ValueError(message)
        else:
            right_padded = not bool(first.any())
        return cls(key_mask, first, key_mask.sum(1), right_padded)

    @property
    def filled(self) -> Tensor:
        """(B, T) bool, which slots hold a token after `roll`."""
        return lengths_to_mask(self.lengths, self.mask.shape[1])

    def roll(self, *xs: Tensor | None) -> tuple[Any, ...]:
        """Move each row's span to slot 0 and zero-fill what follows. xs: (B, T, ...) or None."""
        if self.right_padded:
            return zero_fill(~self.mask, *xs)
        slots = torch.arange(self.mask.shape[1], device=self.mask.device)
        index = (self.start[:, None] + slots).clamp(max=len(slots) - 1)
        return zero_fill(slots >= self.lengths[:, None], *_take_slots(index, *xs))

    def unroll(self, out: Tensor) -> Tensor:
        """Move outputs (B, T, ...) back to the tokens' slots; hidden slots are zero."""
        if not self.right_padded:
            index = torch.arange(self.mask.shape[1], device=self.mask.device) - self.start[:, None]
            (out,) = _take_slots(index.clamp(min=0), out)
        return zero_fill(~self.mask, out)[0]


def _take_slots(index: Tensor, *xs: Tensor | None) -> list[Any]:
    """Return xs (B, T, ...), each row with its slots at index (B, n); None stays None."""
    return [None if x is None else torch.take_along_dim(x, expand_like(index, x), 1) for x in xs]


def expand_like(index: Tensor, x: Tensor) -> Tensor:
    """Return a mask or an index of tokens (B, T) with as many dimensions as x (B, T, ...)."""
    return index.reshape(*index.shape, *[1] * (x.ndim - 2))


def lengths_to_mask(lengths: Tensor, size: int) -> Tensor:
    """Return the mask (B, size) of rows whose first lengths (B,) slots hold a token."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def close_holes(key_mask: Tensor, *xs: Tensor | None) -> tuple[Any, ...]:
    """Move the visible tokens of each row to its front, in order, and zero-fill what follows.

    Args:
        key_mask: (B, S) bool, True for visible tokens.
        *xs: (B, S, ...) or None.

    Returns:
        The number of visible tokens (B,), and xs.
    """
    order, lengths = key_mask.int().argsort(dim=1, descending=True, stable=True), key_mask.sum(1)
    return lengths, *zero_fill(~lengths_to_mask(lengths, key_mask.shape[1]), *_take_slots(order, *xs))


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x (N, T, ...) at index (N, n), as (N, n, ...): whole rows, which a gather copies singly."""
    rows = index + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, index.shape)


class LengthBucket(NamedTuple):
    """Packed sequences of similar length as padded rows; slots and lengths have one entry per packing."""

    sequences: Tensor
    slots: list[Tensor]
    lengths: list[Tensor]

    def visible(self, of: int = 0) -> Tensor:
        """(rows, slots): which slots hold a token."""
        return lengths_to_mask(self.lengths[of], self.slots[of].shape[1])

    def take(self, *xs: Tensor | None, of: int = 0) -> tuple[Any, ...]:
        """Gather the bucket's rows from packed xs (1, T, ...) or None; padding is zero."""
        rows = (None if x is None else x[0][self.slots[of].clamp(max=x.shape[1] - 1)] for x in xs)
        return zero_fill(~self.visible(of), *rows)


def length_buckets(*packings: Packing) -> list[LengthBucket]:
    """Group sequences by their length rounded up to a power of two, so that padding at most doubles the work.

    Under torch.compile lengths are unknown: all sequences form one bucket, padded to max_length.
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
    buckets = []
    for sizes, members in classes.items():
        sequences = torch.tensor(members, device=packings[0].offsets.device)
        slots = [
            p.offsets[sequences].long()[:, None] + torch.arange(size, device=sequences.device)
            for size, p in zip(sizes, packings, strict=True)
        ]
        buckets.append(LengthBucket(sequences, slots, [p.lengths[sequences] for p in packings]))
    return buckets


def repack(packing: Packing, buckets: list[LengthBucket], outputs: list[Tensor], total: int) -> Tensor:
    """Return the buckets' padded outputs (rows, slots, ...) as one packed row (1, total, ...)."""
    offsets = packing.offsets.long()
    first, base = torch.zeros_like(offsets[1:]), 0
    for bucket in buckets:
        number, size = bucket.slots[0].shape
        begins = base + size * torch.arange(number, device=offsets.device)
        first, base = first.index_copy(0, bucket.sequences, begins), base + number * size
    slot = torch.arange(total, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:], slot, right=True)
    flat = torch.cat([output.flatten(0, 1) for output in outputs])
    return flat[first[sequence] + slot - offsets[sequence]][None]


def zero_fill(hidden: Tensor, *xs: Tensor | None) -> tuple[Any, ...]:
    """Return xs (B, T, ...) with the slots in hidden (B, T) set to zero; None stays None."""
    # Filled, not multiplied: padding may hold NaN.
    return tuple(None if x is None else x.masked_fill(expand_like(hidden, x), 0) for x in xs)


class SequenceShard(Protocol):
    """One rank's piece of every sequence, as `longspan.distributed` divides them.

    Attributes:
        counts: (P, B) real tokens of each rank.
    """

    counts: Tensor

    def attend(
        self,
        mechanism: Any,
        queries: Callable[[], Tensor],
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        *,
        causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Compute attention of this rank's queries to the keys of all ranks."""

    def extend(
        self,
        mechanism: Any,
        state: Any,
        queries: Callable[[], Tensor],
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """Compute causal attention after a state, and the state after the tokens of all ranks."""

    def halo(self, x: Tensor, back: int, ahead: int, layout: TokenLayout, recent: Tensor | None = None) -> Tensor:
        """Return x (B, T, dim) with its neighbors of other ranks: (B, back + T + ahead, dim)."""

    def latest(self, recent: Tensor, x: Tensor, layout: TokenLayout) -> Tensor:
        """Return the last tokens of recent (B, s, dim) followed by x (B, T, dim) of all ranks."""

    def share(self, tensors: list[Tensor]) -> None:
        """Set tensors to those of the first rank."""


@dataclass(frozen=True)
class TokenLayout:
    """Which tokens of a batch are real, their positions, and the ends of their sequences.

    Attributes:
        position: (B or 1, T) int64, counted from the start of each sequence.
        last: (B or 1, T) int64, the final position of each token's sequence.
        key_mask: (B, T) bool, True for real tokens; None if all are.
        packing: The packing of the row; None if it holds one sequence.
        rotary: cos and sin (B or 1, T, D / 2) by (D, base), computed once for all layers.
        shard: The exchange with other ranks, if each of them has a piece of every sequence.
        tokens: (B, T) int64, for layers that embed them.
    """

    position: Tensor
    last: Tensor
    key_mask: Tensor | None = None
    packing: Packing | None = None
    rotary: Mapping[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)
    shard: SequenceShard | None = None
    tokens: Tensor | None = None

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
        """Return the layout of x (B, T, ...).

        Args:
            x: The tokens.
            causal: Whether positions count real tokens only, or slots.
            key_mask: (B, T) bool, True = keep.
            packing: The packing of x.
            start: (B,), or (N,) with packing: the position of each sequence's first token; 0 unless given.

        Raises:
            ValueError: If the mask or the packing does not fit x, or both are given.
        """
        T = x.shape[1]
        slot = torch.arange(T, device=x.device)
        if key_mask is not None:
            check_key_mask(key_mask, x, packing)
        if packing is not None:
            check_packing(packing, x)
            offsets = packing.offsets.long()
            sequence = torch.searchsorted(offsets[1:], slot, right=True)
            position, last = slot - offsets[sequence], packing.lengths[sequence] - 1
            before = 0 if start is None else start[sequence]
            return cls((position + before)[None], (last + before)[None], None, packing)
        before = 0 if start is None else start[:, None]
        if key_mask is not None and causal:
            # Hidden tokens get position 0: a position after the last may be outside a table.
            position = (key_mask.cumsum(1) - 1 + before).masked_fill(~key_mask, 0)
            last = key_mask.sum(1, keepdim=True) - 1 + before
            return cls(position, last.expand_as(position), key_mask)
        return cls(slot[None] + before, torch.full_like(slot[None], T - 1) + before, key_mask)

    def zero_fill(self, x: Tensor) -> Tensor:
        """Return x (B, T, ...) with hidden tokens zero: NaN there would reach the gradients of the weights."""
        return x if self.key_mask is None else zero_fill(~self.key_mask, x)[0]

    def count(self) -> int | Tensor:
        """Return the number of real tokens of each row, of all ranks: (B,), or one number for all rows."""
        if self.shard is not None:
            return self.shard.counts.sum(0)
        return self.position.shape[1] if self.key_mask is None else self.key_mask.sum(1)

    def has_neighbor(self, offset: int) -> Tensor:
        """Return whether the token `offset` slots before (negative: after) is in the same sequence: (B or 1, T)."""
        neighbor = self.position - offset
        return (neighbor >= 0) & (neighbor <= self.last)


def check_key_mask(key_mask: Tensor, x: Tensor, packing: Packing | None, shape: str = "(B, T)") -> None:
    """Raise ValueError unless key_mask is a bool mask over the tokens of x (B, T, ...), without packing."""
    if packing is not None:
        raise ValueError("packing and key_mask exclude each other: a packed row has no padding; leave key_mask out")
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"key_mask must be a bool tensor {shape}, got {key_mask!r}")
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool, True = keep, got {key_mask.dtype}; use key_mask.bool()")
    if key_mask.shape != x.shape[:2]:
        hint = "; masks over (T, S) pairs are not supported" if key_mask.ndim > 2 else ""
        raise ValueError(f"key_mask must be {shape} = {tuple(x.shape[:2])}, got {tuple(key_mask.shape)}{hint}")
    if key_mask.device != x.device:
        raise ValueError(f"key_mask must be on the keys' device {x.device}, got {key_mask.device}")


def check_packing(packing: Packing, x: Tensor, name: str = "packing") -> None:
    """Raise ValueError unless packing describes the tokens of x (1, T, ...)."""
    if not isinstance(packing, Packing):
        raise TypeError(f"{name} must be a Packing, got {packing!r}; Packing.from_lengths makes one")
    offsets = packing.offsets
    if x.shape[0] != 1:
        raise ValueError(f"packed sequences share one row: batch size must be 1 with {name}, got {x.shape[0]}")
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype != torch.int32:
        raise ValueError(
            f"{name}.offsets must be (N + 1,) int32, got {tuple(offsets.shape)} {offsets.dtype}; "
            "Packing.from_lengths makes them"
        )
    if offsets.device != x.device:
        raise ValueError(f"{name}.offsets must be on the inputs' device {x.device}, got {offsets.device}")
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        return  # Reading the values would synchronize with the device.
    lengths = packing.lengths
    if offsets[0] != 0 or offsets[-1] != x.shape[1] or bool((lengths < 0).any()):
        raise ValueError(f"{name}.offsets must rise from 0 to the row's length {x.shape[1]}, got {offsets.tolist()}")
    if int(lengths.max()) > packing.max_length:
        raise ValueError(f"{name}.max_length is {packing.max_length}, but a sequence has {int(lengths.max())} tokens")
