"""Context parallelism: each rank holds one contiguous piece of every sequence of a batch.

A causal layer writes its piece into an empty state. The states, of constant size for all mechanisms but `softmax`, are
gathered in one collective, those of the earlier ranks are merged (law 11), and the piece continues from them. A
bidirectional layer merges the states of all ranks and reads them; mechanisms that cannot attend to another sequence
gather keys and values instead. Token shifts and short convolutions get a halo of the tokens before the piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longspan.distributed.collectives import all_gather, all_reduce, gather
from longspan.layout import Packing, TokenLayout
from longspan.mechanisms.split import SplitAttention
from longspan.models.layers import merge_latest
from longspan.models.transformer import LanguageModel, Transformer
from longspan.ops.loss import IGNORE_INDEX
from longspan.protocol import Mechanism, State


class ContextParallel(nn.Module):
    """A model whose ranks each run one piece of every sequence, in the order of the ranks.

    Pieces may have different lengths, and be empty. Every rank must make the same calls. Gradients of parameters are
    those of this rank's piece: their sum over the ranks, by `reduce_gradients`, is the gradient.

    Args:
        model: A Transformer or LanguageModel, with equal weights on all ranks.
        group: The ranks, in the order of their pieces: a process group, or a device mesh of one dimension.
    """

    def __init__(self, model: Transformer | LanguageModel, group: dist.ProcessGroup | DeviceMesh) -> None:
        super().__init__()
        group = group.get_group() if isinstance(group, DeviceMesh) else group
        if not isinstance(model, Transformer | LanguageModel):
            raise ValueError(f"context parallelism takes a Transformer or LanguageModel, got a {type(model).__name__}")
        if model.config.cross is not None or model.config.legacy.axial_stride is not None:
            raise ValueError("cross-attention and axial attention cannot be divided over ranks")
        self.model, self.group = model, group

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Run this rank's piece.

        Args:
            x: (B, T) tokens, or (B, T, dim) vectors for a Transformer.
            key_mask: (B, T) bool, True for real tokens of the piece.
            packing: The packing of the whole sequence, equal on all ranks.
        """
        return self.model(x, _layout=self._layout(x, key_mask, packing))

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy over the tokens of all ranks; arguments as for `forward`.

        Args:
            tokens: (B, T) this rank's tokens.
            labels: (B, T), −100 where a label does not count; the next token unless given.
            key_mask: (B, T) bool, True for real tokens of the piece.
            packing: The packing of the whole sequence.
        """
        assert isinstance(self.model, LanguageModel)
        layout = self._layout(tokens, key_mask, packing)
        shard = layout.shard
        assert isinstance(shard, Shard)
        labels = shard.next_tokens(tokens, layout) if labels is None else labels
        count = (labels != IGNORE_INDEX).sum()
        total = count.clone()
        dist.all_reduce(total, group=self.group)
        # The loss of an empty piece is 0, and takes part in the backward pass.
        mean = (
            self.model.loss(tokens, labels, _layout=layout)
            if tokens.shape[1]
            else self.model(tokens, _layout=layout).sum()
        )
        return all_reduce(mean * (count.to(mean.dtype) / total.clamp(min=1)), self.group)

    def reduce_gradients(self) -> None:
        """Add up the gradients of the ranks, in place."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=self.group)

    def _layout(self, x: Tensor, key_mask: Tensor | None, packing: Packing | None) -> TokenLayout:
        return Shard(self.group, x, key_mask, packing).layout(x, key_mask, causal=self.model.config.causal)


def context_parallel(model: Transformer | LanguageModel, group: dist.ProcessGroup | DeviceMesh) -> ContextParallel:
    """Divide the sequences of a model over the ranks of a group; its weights become those of the first rank.

    Args:
        model: A Transformer or LanguageModel.
        group: A process group, or a device mesh of one dimension, such as ``mesh["cp"]``.
    """
    divided = ContextParallel(model, group)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=divided.group, group_src=0)
    return divided


class Shard:
    """One rank's piece of every sequence, and the exchange with the other ranks.

    Args:
        group: The ranks, in the order of their pieces.
        x: (B, T, …) this rank's tokens.
        key_mask: (B, T) bool, True for real tokens.
        packing: The packing of the whole sequence.

    Raises:
        ValueError: On every rank, if the ranks' pieces do not fit together.
    """

    def __init__(
        self, group: dist.ProcessGroup, x: Tensor, key_mask: Tensor | None, packing: Packing | None = None
    ) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        own = torch.tensor([*x.shape[:2], key_mask is not None, 0 if packing is None else int(packing.offsets[-1])])
        batches, lengths, masked, packed = gather(own.to(x.device), group).T.tolist()
        if len(set(batches)) > 1:
            raise ValueError(f"the ranks must hold pieces of the same sequences, got batch sizes {batches}")
        if len(set(packed)) > 1 or (packing is not None and packed[0] != sum(lengths)):
            raise ValueError(f"packing must be that of the whole sequence, of {sum(lengths)} tokens, got {packed}")
        self.lengths, self.masked = lengths, any(masked)
        self.offset, self.packing = sum(lengths[: self.rank]), packing
        real = torch.full(x.shape[:1], x.shape[1], device=x.device) if key_mask is None else key_mask.sum(1)
        self.counts = gather(real, group)  # (P, B) real tokens of each rank

    def layout(self, x: Tensor, key_mask: Tensor | None, *, causal: bool) -> TokenLayout:
        """Return the layout of this rank's tokens, with positions in the whole sequence."""
        slot = torch.arange(self.offset, self.offset + x.shape[1], device=x.device)
        if self.packing is not None:
            offsets = self.packing.offsets.long().to(x.device)
            sequence = torch.searchsorted(offsets[1:], slot, right=True)
            position = (slot - offsets[sequence])[None]
            last = (offsets[sequence + 1] - offsets[sequence] - 1)[None]
            return TokenLayout(position, last, None, self._own_packing(), shard=self)
        if key_mask is not None and causal:
            start = self.counts[: self.rank].sum(0)
            position = (key_mask.cumsum(1) - 1 + start[:, None]).masked_fill(~key_mask, 0)
            last = (self.counts.sum(0)[:, None] - 1).expand_as(position)
            return TokenLayout(position, last, key_mask, shard=self)
        last = torch.full_like(slot[None], sum(self.lengths) - 1)
        return TokenLayout(slot[None], last, key_mask, shard=self)

    def attend(
        self,
        mechanism: Mechanism,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        *,
        causal: bool,
        layout: TokenLayout,
    ) -> Tensor:
        """Compute attention of this rank's queries (B, T, H, D) to the keys of all ranks: (B, T, H, E)."""
        if causal and self.packing is not None:
            return self._attend_packed(mechanism, q, k, v, gates, layout)
        if causal or (mechanism.supports_cross and self.packing is None):
            return self._attend_states(mechanism, q, k, v, gates, layout.key_mask, causal)
        if isinstance(mechanism, SplitAttention):
            parts = zip(mechanism._queries(q), mechanism._divide(k, v, gates), strict=True)
            outs = [self.attend(m, q, k, v, g, causal=causal, layout=layout) for q, (m, k, v, g) in parts]
            return torch.cat(outs, 2)
        return self._attend_gathered(mechanism, q, k, v, gates, layout.key_mask)

    def halo(self, x: Tensor, width: int, layout: TokenLayout) -> Tensor:
        """Return the last tokens before this rank's piece x (B, T, dim), hidden ones zero: (B, width, dim)."""
        end = torch.full(x.shape[:1], x.shape[1], device=x.device)
        if layout.key_mask is not None:
            end = F.pad(layout.key_mask * torch.arange(1, x.shape[1] + 1, device=x.device), (1, 0)).amax(1)
        index = (end[:, None] - width + torch.arange(width, device=x.device))[..., None]
        padded = F.pad(x, (0, 0, width, 0))
        pieces = all_gather(torch.take_along_dim(padded, index + width, 1), self.group)
        recent = torch.zeros_like(pieces[0])
        for piece, held in zip(pieces[: self.rank], self.counts[: self.rank], strict=True):
            recent = merge_latest(recent, piece, held)
        return recent + 0 * pieces[0]  # Every rank takes part in the backward pass.

    def next_tokens(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """Return the token after each (B, T), that of the next piece included; −100 where there is none."""
        whole = self._concatenate(tokens)
        visible = self._concatenate(
            torch.ones_like(tokens, dtype=torch.bool) if layout.key_mask is None else layout.key_mask
        )
        labels = F.pad(whole[:, 1:], (0, 1), value=IGNORE_INDEX)
        labels = labels.masked_fill(~(visible & F.pad(visible[:, 1:], (0, 1))), IGNORE_INDEX)
        labels = labels[:, self.offset : self.offset + tokens.shape[1]]
        return labels if self.packing is None else labels.masked_fill(layout.position == layout.last, IGNORE_INDEX)

    def _attend_states(
        self,
        mechanism: Mechanism,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        key_mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        T, longest = q.shape[1], max(self.lengths)
        if len(set(self.lengths)) > 1 or self.masked:
            # States that hold tokens have one size on all ranks.
            visible = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask
            key_mask = F.pad(visible, (0, longest - T))
            q, k, v, gates = (_pad(x, longest - T) for x in (q, k, v, gates))
        inputs: dict[str, Any] = {"k": k, "v": v, "gates": gates, "key_mask": key_mask}
        starts = self.counts.cumsum(0) - self.counts
        state = _empty(mechanism, k, starts[self.rank], transition=True)
        states = gather_states(mechanism.write(state, **inputs), self.counts, starts, self.group)
        merged = _empty(mechanism, k, torch.zeros_like(starts[0]))
        for other in states[: self.rank] if causal else states:
            merged = merged.merge(other)
        if causal:
            out = mechanism(q, **inputs, causal=True, past=merged)
        else:
            out = mechanism.read(merged, q)
        return out[:, :T] + _nothing(states)

    def _attend_packed(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, layout: TokenLayout
    ) -> Tensor:
        """The last sequence of a piece may go on in the next one: its state is passed on."""
        assert self.packing is not None
        ends = torch.tensor(self.lengths, device=q.device).cumsum(0)
        offsets = self.packing.offsets.long().to(q.device)
        sequence = torch.searchsorted(offsets[1:], (ends - 1).clamp(min=0), right=True)  # of each piece's last token
        begins = torch.maximum(offsets[sequence], F.pad(ends[:-1], (1, 0)))
        counts, starts = (ends - begins).clamp(min=0)[:, None], (begins - offsets[sequence])[:, None]
        T, length, longest = q.shape[1], int(counts[self.rank]), int(counts.max())
        tail: list[Any] = [None if x is None else _pad(x[:, T - length :], longest - length) for x in (k, v, gates)]
        mask = (torch.arange(longest, device=q.device) < length)[None]
        state = _empty(mechanism, k, starts[self.rank], transition=True)
        state = mechanism.write(state, tail[0], tail[1], gates=tail[2], key_mask=mask)
        states = gather_states(state, counts, starts, self.group)
        if T == 0:
            return q.new_zeros(1, 0, mechanism.num_heads, mechanism.value_dim) + _nothing(states)
        own = layout.packing
        assert own is not None
        first = int(layout.position[0, 0])
        past = _empty(mechanism, k, None, rows=len(own.offsets) - 1)
        if first:
            origin = int(torch.searchsorted(ends, self.offset - first, right=True))
            merged = _empty(mechanism, k, torch.zeros_like(starts[0]))
            for other in states[origin : self.rank]:
                merged = merged.merge(other)
            past = past.put([0], merged)
        return mechanism(q, k, v, gates=gates, causal=True, packing=own, past=past) + _nothing(states)

    def _attend_gathered(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        """Gather keys and values of all ranks."""
        keys, values = self._concatenate(k), self._concatenate(v)
        every = None if gates is None else self._concatenate(gates)
        after = keys.shape[1] - self.offset - q.shape[1]
        queries = F.pad(q, (0, 0, 0, 0, self.offset, after))
        mask = None
        if self.masked:
            mask = self._concatenate(
                torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask
            )
        out = mechanism(queries, keys, values, gates=every, key_mask=mask, packing=self.packing)
        return out[:, self.offset : self.offset + q.shape[1]]

    def _concatenate(self, x: Tensor) -> Tensor:
        """Return x (B, T, …) of all ranks, one after the other."""
        pieces = all_gather(F.pad(x, (*[0, 0] * (x.ndim - 2), 0, max(self.lengths) - x.shape[1])), self.group)
        return torch.cat([piece[:, :length] for piece, length in zip(pieces, self.lengths, strict=True)], 1)

    def _own_packing(self) -> Packing:
        """Return the packing of this rank's piece."""
        assert self.packing is not None
        low, high = self.offset, self.offset + self.lengths[self.rank]
        offsets = self.packing.offsets.long().clamp(low, high).unique() - low
        return Packing.from_lengths(offsets.diff().tolist() if high > low else [0])


def gather_states(state: State, counts: Tensor, starts: Tensor, group: dist.ProcessGroup) -> list[State]:
    """Return the states of all ranks, by one collective. counts, starts: (P, B) their lengths and first positions."""
    tensors = [x for x in state.tensors().values() if x.is_floating_point()]
    gathered = all_gather(torch.cat([x.flatten() for x in tensors]), group)
    found = []
    for row, count, start in zip(gathered, counts, starts, strict=True):
        parts = iter(row.split([x.numel() for x in tensors]))

        def fill(x: Tensor, parts: Iterator[Tensor] = parts) -> Tensor:
            return next(parts).view(x.shape) if x.is_floating_point() else x

        found.append(_placed(state._map(fill), count, start))
    return found


def _placed(state: State, length: Tensor, start: Tensor) -> State:
    """Return a state, and the states in it, with these lengths and first positions."""
    changed: dict[str, Any] = {"length": length, "start": start}
    for name, value in vars(state).items():
        if isinstance(value, tuple):
            changed[name] = tuple(_placed(part, length, start) for part in value)
    return replace(state, **changed)


def _empty(
    mechanism: Mechanism, like: Tensor, start: Tensor | None, *, rows: int | None = None, transition: bool = False
) -> State:
    rows = len(like) if rows is None else rows
    return mechanism.new_state(rows, start=start, transition=transition, device=like.device, dtype=like.dtype)


def _pad(x: Any, more: int) -> Any:
    """Pad (B, T, ·, ·) by `more` tokens; None stays None."""
    return None if x is None else F.pad(x, (0, 0, 0, 0, 0, more))


def _nothing(states: list[State]) -> Tensor:
    """Return 0, with a gradient for the states of all ranks: every rank takes part in the backward pass."""
    return sum(x.sum() * 0 for x in states[0].tensors().values() if x.is_floating_point())  # type: ignore[return-value]
