"""One rank's piece of every sequence, and what its layers exchange with the other ranks.

A causal layer writes its piece into an empty state. The states, of constant size for all mechanisms but `softmax`, are
gathered in one collective. While it runs, the layer computes what does not depend on other ranks (`Mechanism.defer`);
then the states of the earlier ranks are merged (law 11), and what they add completes the output. A bidirectional layer
merges the states of all ranks and reads them, takes one state from either side, or the tokens in reach of its window.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.distributed.collectives import gather, start_all_to_all, start_gather
from longspan.layout import Packing, TokenLayout, check_key_mask, close_holes, lengths_to_mask, zero_fill
from longspan.mechanisms.split import SplitAttention
from longspan.models.layers import merge_latest
from longspan.ops.loss import IGNORE_INDEX
from longspan.protocol import Mechanism, State

S = TypeVar("S", bound=State)
Queries = Callable[[], Tensor]
METHODS = ("forward", "loss", "extend", "context", "source")


class Run(NamedTuple):
    """Consecutive tokens of one rank's piece, in one sequence or, without packing, in as many as there are rows."""

    slots: slice  # in the piece
    sequence: int  # −1: none, and no tokens
    starts: Tensor  # (rows,) position of the first token
    counts: Tensor  # (rows,) number of real tokens
    bounds: tuple[int, int]  # of the sequence, in slots of all ranks


class _Inputs(NamedTuple):
    """The arguments of `Shard.attend`."""

    mechanism: Mechanism
    queries: Queries
    k: Tensor
    v: Tensor
    gates: Tensor | None
    key_mask: Tensor | None

    def at(self, slots: slice) -> _Inputs:
        """Return those of some of the keys."""
        gates, mask = (None if x is None else x[:, slots] for x in (self.gates, self.key_mask))
        return self._replace(k=self.k[:, slots], v=self.v[:, slots], gates=gates, key_mask=mask)


class Shard:
    """The pieces of a batch, in the order of the ranks, which may have different lengths and be empty.

    Args:
        group: The ranks.
        x: (B, T, …) this rank's tokens.
        key_mask: (B, T) bool, True for real tokens.
        packing: The packing of the whole sequence.
        causal: Whether positions count real tokens only, or slots.
        start: (B,) the position of the first token of all ranks; 0 unless given.
        method: The method that was called, one of `METHODS`.
        call: Further numbers by name that must be equal on all ranks.

    Raises:
        ValueError: On every rank, if the ranks' pieces do not fit together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        x: Tensor,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        *,
        causal: bool,
        start: Tensor | None = None,
        method: str = "forward",
        **call: int,
    ) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.packing, self.causal, self.start = packing, causal, start
        lengths = self._check(x, key_mask, packing, {"method": METHODS.index(method), **call})
        self.ends = torch.tensor(lengths).cumsum(0).tolist()
        self.lows = [end - length for end, length in zip(self.ends, lengths, strict=True)]
        self.lengths, self.offset, self.total = lengths, self.lows[self.rank], self.ends[-1]
        slot = torch.arange(self.offset, self.offset + x.shape[1], device=x.device)
        visible = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        first = F.pad(slot.where(visible, self.total), (0, 1), value=self.total).amin(1)
        last = F.pad(slot.where(visible, -1), (0, 1), value=-1).amax(1)
        self.counts, firsts, lasts = gather(torch.stack([visible.sum(1), first, last]), group).unbind(1)  # (P, B)
        self.first = firsts.amin(0)  # (B,) the slot of the first real token
        if causal and self.masked and bool((self.counts.sum(0) < lasts.amax(0) - self.first + 1).any()):
            raise ValueError(
                "with causal each row of key_mask must be one run of True over all ranks (left- or right-padded)"
            )

    def _check(self, x: Tensor, key_mask: Tensor | None, packing: Packing | None, call: dict[str, int]) -> list[int]:
        """Return the lengths of all pieces, or raise ValueError where the ranks contradict each other."""
        wrong = None
        if key_mask is not None:
            try:
                check_key_mask(key_mask, x, packing)
            except (TypeError, ValueError) as error:  # raised once the other ranks know
                wrong = error
        digest = 0 if packing is None else zlib.crc32(packing.offsets.cpu().numpy().tobytes())
        total = 0 if packing is None else int(packing.offsets[-1])
        own = [*x.shape[:2], key_mask is not None, wrong is not None, total, digest, *call.values()]
        every = gather(torch.tensor(own, device=x.device), self.group).T.tolist()
        batches, lengths, masked, refused, packed, digests, *calls = every
        if wrong is not None:
            raise wrong
        if any(refused):
            others = [rank for rank, number in enumerate(refused) if number]
            raise ValueError(f"key_mask does not fit the pieces of ranks {others}, whose errors say why")
        self.masked = any(masked)
        if len(set(batches)) > 1:
            raise ValueError(f"the ranks must hold pieces of the same sequences, got batch sizes {batches}")
        if len(set(packed)) > 1 or (packing is not None and packed[0] != sum(lengths)):
            raise ValueError(f"packing must be that of the whole sequence, of {sum(lengths)} tokens, got {packed}")
        if len(set(digests)) > 1:
            raise ValueError(f"packing must be equal on all ranks, got offsets with checksums {digests}")
        for name, numbers in zip(call, calls, strict=True):
            if len(set(numbers)) > 1:
                got = [METHODS[number] for number in numbers] if name == "method" else numbers
                raise ValueError(f"the ranks must make the same call: {name.replace('_', ' ')} is {got}")
        return lengths

    def layout(self, x: Tensor, key_mask: Tensor | None) -> TokenLayout:
        """Return the layout of this rank's tokens, with positions in the whole sequence."""
        slot = torch.arange(self.offset, self.offset + x.shape[1], device=x.device)
        if self.packing is not None:
            offsets = self.packing.offsets.long().to(x.device)
            sequence = torch.searchsorted(offsets[1:], slot, right=True)
            position = (slot - offsets[sequence])[None]
            last = (offsets[sequence + 1] - offsets[sequence] - 1)[None]
            return TokenLayout(position, last, None, self._packing_of(0, x.shape[1]), shard=self)
        before = 0 if self.start is None else self.start[:, None]
        if key_mask is not None and self.causal:
            earlier = self.counts[: self.rank].sum(0)[:, None] + before
            position = (key_mask.cumsum(1) - 1 + earlier).masked_fill(~key_mask, 0)
            last = (self.counts.sum(0)[:, None] - 1 + before).expand_as(position)
            return TokenLayout(position, last, key_mask, shard=self)
        last = torch.full_like(slot[None], self.total - 1) + before
        return TokenLayout(slot[None] + before, last, key_mask, shard=self)

    def attend(
        self,
        mechanism: Mechanism,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        *,
        causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Compute attention of this rank's queries to the keys of all ranks.

        Args:
            mechanism: The mechanism.
            queries: Returns q (B, T, H, D); called once the exchange has begun.
            k: (B, S, Hkv, D) this rank's keys.
            v: (B, S, Hkv, E) this rank's values.
            gates: (B, S, Hkv, G) raw gates, or None.
            causal: Whether a query sees earlier keys and its own only.
            key_mask: (B, S) bool, True = keep.
        """
        if self.masked and getattr(mechanism, "keep_slots", False):
            raise ValueError("keep_slots=True with key_mask cannot be divided over ranks: pass rows without padding")
        inputs = _Inputs(mechanism, queries, k, v, gates, key_mask)
        if causal:
            return self._attend_causal(inputs, None)[0]
        if mechanism.supports_cross:
            return self._attend_all(inputs)
        if isinstance(mechanism, SplitAttention):
            parts = zip(mechanism._queries(queries()), mechanism._divide(k, v, gates), strict=True)
            options: dict[str, Any] = {"causal": False, "key_mask": key_mask}
            return torch.cat([self.attend(m, lambda q=q: q, k, v, g, **options) for q, (m, k, v, g) in parts], 2)  # type: ignore[misc]
        if mechanism.reach is not None:
            return self._attend_window(inputs)
        if mechanism.sums_directions:
            return self._attend_both_directions(inputs)
        return self._attend_gathered(inputs)

    def extend(
        self,
        mechanism: Mechanism,
        state: S,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, S]:
        """Compute causal attention as `attend` does, after a state; also return the state after all ranks' tokens."""
        mechanism.check_state(state, len(k), k.dtype)
        out, after = self._attend_causal(_Inputs(mechanism, queries, k, v, gates, key_mask), state)
        assert isinstance(after, type(state))
        return out, after

    def halo(self, x: Tensor, back: int, ahead: int, layout: TokenLayout, recent: Tensor | None = None) -> Tensor:
        """Return x (B, T, dim), hidden tokens zero, with its neighbors of other ranks: (B, back + T + ahead, dim).

        Args:
            x: This rank's tokens.
            back: How many tokens before them; zeros where there are none.
            ahead: How many after them.
            layout: The layout of x.
            recent: (B, s, dim) the tokens before those of the first rank.
        """
        if recent is not None and layout.key_mask is not None:
            x = torch.where(layout.key_mask[..., None], x, self._older(recent, 0, x.shape[1]))
        wide = self._start_halo(x, back, ahead)()
        outside = max(back - self.offset, 0)
        if recent is None or not outside:
            return wide
        older = self._older(recent, -back, outside - back)
        return torch.cat([older, wide[:, outside:]], 1)

    def latest(self, recent: Tensor, x: Tensor, layout: TokenLayout) -> Tensor:
        """Return the last s real tokens of recent (B, s, dim) followed by x (B, T, dim) of all ranks."""
        s, end = recent.shape[1], torch.full(x.shape[:1], x.shape[1], device=x.device)
        if layout.key_mask is not None:
            end = F.pad(layout.key_mask * torch.arange(1, x.shape[1] + 1, device=x.device), (1, 0)).amax(1)
        index = (end[:, None] + torch.arange(s, device=x.device))[..., None]
        pieces = start_gather(torch.take_along_dim(F.pad(x, (0, 0, s, 0)), index, 1), self.group)()
        for piece, held in zip(pieces, self.counts, strict=True):
            recent = merge_latest(recent, piece, held)
        return recent

    def following(self, labels: Tensor) -> Tensor:
        """Return the label after each (B, T), that of the next piece included; −100 after the last."""
        there = torch.ones_like(labels)
        moved = self._start_halo(torch.stack([labels, there], -1), 0, 1)()[:, 1:]
        return moved[..., 0].masked_fill(moved[..., 1] == 0, IGNORE_INDEX)

    def next_tokens(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """Return the token after each (B, T), that of the next piece included; −100 where there is none."""
        if layout.key_mask is None:
            labels = self.following(tokens)
        else:
            labels = self.following(tokens.masked_fill(~layout.key_mask, IGNORE_INDEX))
            labels = labels.masked_fill(~layout.key_mask, IGNORE_INDEX)
        return labels if self.packing is None else labels.masked_fill(layout.position == layout.last, IGNORE_INDEX)

    def share(self, tensors: list[Tensor]) -> None:
        """Set tensors to those of the first rank."""
        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def _attend_causal(self, inputs: _Inputs, past: State | None) -> tuple[Tensor, State | None]:
        """Pass on the state of the last sequence of each piece; in a packed piece only the first one has a past."""
        runs, mechanism = self._tails, inputs.mechanism
        wait = self._start_states([self._write(inputs, runs)], [runs])
        q, mine = inputs.queries(), self._head
        own = inputs.at(mine.slots)
        given = {"gates": own.gates, "start": mine.starts}
        finish = mechanism.defer(q[:, mine.slots], own.k, own.v, key_mask=own.key_mask, **given)
        rest = self._packed(inputs, q, mine.slots.stop, q.shape[1], causal=True)
        (states,), anchor = wait()
        empty = self._empty(inputs, mine.starts.new_zeros(len(mine.starts))) if past is None else past
        before = self._merged(empty, states, runs, mine.sequence, slice(0, self.rank))
        out = torch.cat([finish(before), *rest], 1) + anchor
        after = None if past is None else self._merged(before, states, runs, mine.sequence, slice(self.rank, None))
        return out, after

    def _attend_all(self, inputs: _Inputs) -> Tensor:
        """Merge the states of all ranks and read them."""
        runs, mechanism = self._end_runs, inputs.mechanism
        wait = self._start_states([self._write(inputs, runs)], [runs])
        q = inputs.queries()
        middle = self._middle(inputs, q)
        (states,), anchor = wait()
        outs = []
        for run in runs[self.rank]:
            empty = self._empty(inputs, run.starts.new_zeros(len(run.starts)))
            # Queries of another sequence, the context's reader, have a length of their own.
            mine = q if self.packing is None else q[:, run.slots]
            merged = self._merged(empty, states, runs, run.sequence, slice(None))
            some = 0 not in mine.shape[:2]
            outs.append(mechanism.read(merged, mine) if some else mine.new_zeros(*mine.shape[:3], mechanism.value_dim))
        return torch.cat([outs[0], *middle, *outs[1:]], 1) + anchor

    def _attend_both_directions(self, inputs: _Inputs) -> Tensor:
        """Take a state of the tokens before, and one of those after, written in reverse order."""
        runs, reversed_runs = self._end_runs, self._end_runs_reversed
        written = self._write(inputs, runs, ordered=False)
        written_reversed = self._write(inputs, reversed_runs, ordered=False, reverse=True)
        wait = self._start_states([written, written_reversed], [runs, reversed_runs])
        q = inputs.queries()
        middle = self._middle(inputs, q)
        finishes = [_defer_bidirectional(inputs.at(run.slots), q[:, run.slots]) for run in runs[self.rank]]
        (states, reversed_states), anchor = wait()
        outs = []
        for run, reversed_run, finish in zip(runs[self.rank], reversed_runs[self.rank], finishes, strict=True):
            empty = self._empty(inputs, run.starts.new_zeros(len(run.starts)))
            before = self._merged(empty, states, runs, run.sequence, slice(0, self.rank))
            after = self._merged(
                empty, reversed_states, reversed_runs, reversed_run.sequence, slice(None, self.rank, -1)
            )
            outs.append(finish(before, after))
        return torch.cat([outs[0], *middle, *outs[1:]], 1) + anchor

    def _attend_window(self, inputs: _Inputs) -> Tensor:
        """Take the keys and values in reach of the window, from as many ranks as hold them."""
        mechanism, _, k, v, gates, key_mask = inputs
        assert mechanism.reach is not None
        back, ahead = mechanism.reach
        visible = (torch.ones_like(k[:, :, 0, 0]) if key_mask is None else key_mask.to(k.dtype))[..., None]
        parts = [x for x in (k, v, gates) if x is not None]
        wait = self._start_halo(torch.cat([*(x.flatten(2) for x in parts), visible], 2), back, ahead)
        q = inputs.queries()
        middle = self._middle(inputs, q)
        wide = wait()
        outs = []
        for run in self._end_runs[self.rank]:
            begin, end = run.slots.start, run.slots.stop + back + ahead
            slot = torch.arange(self.offset + begin - back, self.offset + end - back, device=k.device)
            # In front of it hidden slots, so that blocks begin where they do in the whole sequence.
            more = (self.offset + begin - back - run.bounds[0]) % mechanism.position_period
            *found, seen = F.pad(wide[:, begin:end], (0, 0, more, 0)).split(
                [*(x.shape[2] * x.shape[3] for x in parts), 1], 2
            )
            inside = F.pad((slot >= run.bounds[0]) & (slot < run.bounds[1]), (more, 0))
            rows = [x.unflatten(2, like.shape[2:]) for x, like in zip(found, parts, strict=True)]
            mine = F.pad(q[:, run.slots], (0, 0, 0, 0, more + back, ahead))
            options: dict[str, Any] = {"gates": rows[2] if gates is not None else None}
            out = mechanism(mine, rows[0], rows[1], key_mask=(seen[..., 0] > 0) & inside, **options)
            outs.append(out[:, more + back : out.shape[1] - ahead])
        return torch.cat([outs[0], *middle, *outs[1:]], 1) + wide[:0].sum()

    def _attend_gathered(self, inputs: _Inputs) -> Tensor:
        """Gather keys and values of all ranks, for a mechanism that has no other way."""
        mechanism, queries, k, v, gates, key_mask = inputs
        q = queries()
        keys, values = self._concatenate(k), self._concatenate(v)
        every = None if gates is None else self._concatenate(gates)
        after = keys.shape[1] - self.offset - q.shape[1]
        padded = F.pad(q, (0, 0, 0, 0, self.offset, after))
        mask = None
        if self.masked:
            mask = self._concatenate(
                torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask
            )
        out = mechanism(padded, keys, values, gates=every, key_mask=mask, packing=self.packing)
        return out[:, self.offset : self.offset + q.shape[1]]

    def _concatenate(self, x: Tensor) -> Tensor:
        """Return x (B, T, …) of all ranks, one after the other."""
        padded = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, max(self.lengths) - x.shape[1]))
        pieces = gather(padded, self.group) if x.dtype == torch.bool else start_gather(padded, self.group)()
        return torch.cat([piece[:, :length] for piece, length in zip(pieces, self.lengths, strict=True)], 1)

    def _write(self, inputs: _Inputs, runs: list[list[Run]], *, ordered: bool = True, reverse: bool = False) -> State:
        """Return a state with a row for each of this rank's runs, written from the first token or from the last.

        ordered: Whether a mechanism that cannot write rows with holes may refuse them.
        """
        mechanism, _, k, v, gates, key_mask = inputs
        longest = max(run.slots.stop - run.slots.start for there in runs for run in there)
        visible = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        mine = runs[self.rank]

        def rows(x: Tensor) -> Tensor:
            """States that hold tokens have one size on all ranks."""
            parts = [x[:, run.slots].flip(1) if reverse else x[:, run.slots] for run in mine]
            padded = [F.pad(x, (*[0, 0] * (x.ndim - 2), 0, longest - x.shape[1])) for x in parts]
            return padded[0] if len(padded) == 1 else torch.cat(padded)

        mask: Tensor | None = rows(visible)
        keys, values, own = rows(k), rows(v), None if gates is None else rows(gates)
        assert mask is not None
        if key_mask is None and len(mine) == 1 and mine[0].slots.stop - mine[0].slots.start == longest > 0:
            mask = None
        elif not ordered:
            held, keys, values, own = close_holes(mask, keys, values, own)
            mask = lengths_to_mask(held, longest)
        starts = torch.cat([run.starts for run in mine])
        state = self._empty(inputs, starts, transition=True)
        return mechanism.write(state, keys, values, gates=own, key_mask=mask)

    def _start_states(
        self, states: list[State], runs: list[list[list[Run]]]
    ) -> Callable[[], tuple[list[list[State]], Tensor]]:
        """Start to gather states, by one collective.

        Returns:
            A function that waits and returns for each state those of all ranks, and a 0 that every rank adds to its
            output, so that it takes part in the backward pass.
        """
        tensors = [x for state in states for x in state.tensors().values() if x.is_floating_point()]
        wait = start_gather(torch.cat([x.flatten() for x in tensors]), self.group)

        def finish() -> tuple[list[list[State]], Tensor]:
            gathered = wait()
            found: list[list[State]] = [[] for _ in states]
            for rank, row in enumerate(gathered):
                parts = iter(row.split([x.numel() for x in tensors]))
                for i, state in enumerate(states):
                    there = runs[i][rank]
                    counts, starts = torch.cat([run.counts for run in there]), torch.cat([run.starts for run in there])
                    found[i].append(_placed(_filled(state, parts), counts, starts))
            return found, gathered[:0].sum()

        return finish

    def _merged(self, state: State, states: list[State], runs: list[list[Run]], sequence: int, ranks: slice) -> State:
        """Return `state` merged with those of a sequence's runs in some ranks, in the order of the slice."""
        for there, held in list(zip(runs, states, strict=True))[ranks]:
            for i, run in enumerate(there):
                if run.sequence == sequence:
                    state = state.merge(held if len(there) == 1 else held.select([i]))
        return state

    def _start_halo(self, x: Tensor, back: int, ahead: int) -> Callable[[], Tensor]:
        """Start to get the tokens around x (B, T, dim); return a function that waits: (B, back + T + ahead, dim)."""
        rank, size, B = self.rank, x.shape[2:].numel(), len(x)

        def wanted(mine: int, there: int) -> tuple[int, int]:
            """Return the slots of `there` that `mine` needs."""
            low, end = self.lows[there], self.ends[there]
            if mine == there or not self.lengths[mine]:
                return low, low
            if there < mine:
                return max(low, min(end, self.lows[mine] - back)), end
            return low, min(end, max(low, self.ends[mine] + ahead))

        sent = [wanted(other, rank) for other in range(self.ranks)]
        got = [wanted(rank, other) for other in range(self.ranks)]
        parts = [x[:, low - self.offset : end - self.offset] for low, end in sent]
        wait = start_all_to_all(parts, [B * (end - low) * size for low, end in got], self.group)

        def finish() -> Tensor:
            # Empty parts too: every rank takes part in the backward pass.
            there = [part.view(B, end - low, *x.shape[2:]) for part, (low, end) in zip(wait(), got, strict=True)]
            before, after = torch.cat([*there[:rank], x[:, :0]], 1), torch.cat(there[rank:], 1)
            missing = back - before.shape[1], ahead - after.shape[1]
            return F.pad(torch.cat([before, x, after], 1), (*[0, 0] * (x.ndim - 2), *missing))

        return finish

    def _older(self, recent: Tensor, begin: int, end: int) -> Tensor:
        """Return the tokens before a row's first real one at slots begin … end of this piece, zero for any other."""
        s = recent.shape[1]
        slot = self.offset + torch.arange(begin, end, device=recent.device)
        index = s + slot - self.first[:, None]
        found = torch.take_along_dim(recent, index.clamp(0, s - 1)[..., None], 1)
        return found.masked_fill(((index < 0) | (index >= s))[..., None], 0)

    def _middle(self, inputs: _Inputs, q: Tensor) -> list[Tensor]:
        """Compute the sequences of a packed piece that lie inside it, between its first and its last."""
        if self.packing is None:
            return []
        head, tail = self._end_runs[self.rank]
        return self._packed(inputs, q, head.slots.stop, tail.slots.start, causal=False)

    def _packed(self, inputs: _Inputs, q: Tensor, begin: int, end: int, *, causal: bool) -> list[Tensor]:
        """Compute the sequences from slot `begin` to `end` of a packed piece without other ranks."""
        if self.packing is None or begin >= end:
            return []
        slots, packing = slice(begin, end), self._packing_of(begin, end)
        own = inputs.at(slots)
        return [own.mechanism(q[:, slots], own.k, own.v, gates=own.gates, causal=causal, packing=packing)]

    def _packing_of(self, begin: int, end: int) -> Packing:
        """Return the packing of slots begin … end of this rank's piece."""
        assert self.packing is not None
        low, high = self.offset + begin, self.offset + end
        offsets = self.packing.offsets.long().clamp(low, high).unique() - low
        lengths = offsets.diff().tolist() if high > low else [0]
        return Packing.from_lengths(lengths, device=self.packing.offsets.device)

    @cached_property
    def _tails(self) -> list[list[Run]]:
        """The run of each rank's last sequence, or without packing its whole piece."""
        if self.packing is None:
            starts = self.counts.cumsum(0) - self.counts + (0 if self.start is None else self.start)
            return self._whole(starts)
        return [[self._last_run(rank)] for rank in range(self.ranks)]

    @cached_property
    def _head(self) -> Run:
        """The run of this rank's first sequence, or without packing its whole piece."""
        return self._tails[self.rank][0] if self.packing is None else self._first_run(self.rank)

    @cached_property
    def _end_runs(self) -> list[list[Run]]:
        """The runs of each rank's first and last sequence; if they are one, the last has it."""
        if self.packing is None:
            return self._whole(self.counts.cumsum(0) - self.counts)
        found = []
        for rank in range(self.ranks):
            head, tail = self._first_run(rank), self._last_run(rank)
            none = Run(slice(0, 0), -1, torch.zeros_like(head.starts), torch.zeros_like(head.counts), (0, 0))
            found.append([none if head.sequence == tail.sequence else head, tail])
        return found

    @cached_property
    def _end_runs_reversed(self) -> list[list[Run]]:
        """As `_end_runs`, with positions counted from the end."""
        if self.packing is None:
            return self._whole(self.counts.sum(0) - self.counts.cumsum(0))
        return [
            [run._replace(starts=run.bounds[1] - run.bounds[0] - run.starts - run.counts) for run in there]
            for there in self._end_runs
        ]

    def _whole(self, starts: Tensor) -> list[list[Run]]:
        bounds = 0, self.total
        return [
            [Run(slice(0, length), 0, start, count, bounds)]
            for length, start, count in zip(self.lengths, starts, self.counts, strict=True)
        ]

    def _first_run(self, rank: int) -> Run:
        return self._run(rank, self.lows[rank])

    def _last_run(self, rank: int) -> Run:
        return self._run(rank, self.ends[rank] - 1)

    def _run(self, rank: int, slot: int) -> Run:
        """Return the run of the packed sequence that holds a slot, in a rank's piece."""
        low, end, device = self.lows[rank], self.ends[rank], self.counts.device
        if low == end:
            zero = torch.zeros(1, dtype=torch.int64, device=device)
            return Run(slice(0, 0), -1, zero, zero, (0, 0))
        sequence = int(torch.searchsorted(self._offsets[1:], slot, right=True))
        first, last = self._offsets[sequence : sequence + 2].tolist()
        begin, stop = max(first, low), min(last, end)
        starts, counts = torch.tensor([[begin - first], [stop - begin]], device=device)
        return Run(slice(begin - low, stop - low), sequence, starts, counts, (first, last))

    @cached_property
    def _offsets(self) -> Tensor:
        assert self.packing is not None
        return self.packing.offsets.long().cpu()

    def _empty(self, inputs: _Inputs, start: Tensor, *, transition: bool = False) -> State:
        options: dict[str, Any] = {"device": inputs.k.device, "dtype": inputs.k.dtype}
        return inputs.mechanism.new_state(len(start), start=start, transition=transition, **options)


def _defer_bidirectional(inputs: _Inputs, q: Tensor) -> Callable[[State, State], Tensor]:
    mechanism, _, k, v, gates, key_mask = inputs
    if 0 in q.shape[:2]:
        return lambda before, after: mechanism._empty_output(q, k, v)
    if key_mask is not None:
        k, v, gates = zero_fill(~key_mask, k, v, gates)
    with torch.autocast(q.device.type, enabled=False):
        return mechanism._defer_bidirectional(q, k, v, gates=gates, key_mask=key_mask)


def _filled(state: State, parts: Iterator[Tensor]) -> State:
    """Return a state with the next parts as its floating-point tensors."""
    return state._map(lambda x: next(parts).view(x.shape).to(x.dtype) if x.is_floating_point() else x)


def _placed(state: State, length: Tensor, start: Tensor) -> State:
    """Return a state, and the states in it, with these lengths and first positions."""
    changed: dict[str, Any] = {"length": length, "start": start}
    for name, value in vars(state).items():
        if isinstance(value, tuple):
            changed[name] = tuple(_placed(part, length, start) for part in value)
    return replace(state, **changed)
