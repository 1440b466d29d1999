"""Full softmax attention with PyTorch's SDPA: the baseline, with O(n²) cost and a state of every key and value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.softmax import attend
from longspan.protocol import Mechanism, State


@dataclass
class SoftmaxState(State):
    """Every key and value so far, the i-th token in slot i.

    With max_length the buffers have a fixed size and one more slot for padding; without, they grow with each write.
    """

    token_fields: ClassVar[tuple[str, ...]] = ("k", "v")

    k: Tensor  # (B, Hkv, capacity, D)
    v: Tensor  # (B, Hkv, capacity, E)
    max_length: int | None = None

    def _put(self, where: Tensor, rows: SoftmaxState) -> SoftmaxState:
        self._check_same_type(rows, "rows must be")
        capacity = max(self.k.shape[2], rows.k.shape[2])
        return State._put(_grow(self, capacity), where, _grow(rows, capacity))

    def reserve(self, number: int | None) -> SoftmaxState:
        """Return a state that can hold `number` more tokens; see `State.reserve`."""
        if not len(self.length):
            return self
        if number is None:
            longest = int(self.length.max())
            return replace(self, k=self.k[:, :, :longest], v=self.v[:, :, :longest], max_length=None)
        if self.max_length is None:
            return self
        more = max(int(self.length.max()) + number - self.max_length, 0)
        return _grow(replace(self, max_length=self.max_length + more), self.k.shape[2] + more)

    def _merge(self, later: SoftmaxState) -> SoftmaxState:
        capacity = later.k.shape[2] - (later.max_length is not None)
        k, v = later.k[:, :, :capacity], later.v[:, :, :capacity]
        return _append(self, k, v, self.length + later.length, in_place=False)


class SoftmaxAttention(Mechanism):
    """softmax(q kᵀ · scale) v.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        scale: Of the scores, 1/√D unless given.
        dropout: On the weights, in training.
    """

    state_type = SoftmaxState

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.scale, self.dropout = scale, dropout

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> SoftmaxState:
        capacity = 0 if max_length is None else max_length + 1
        k, v = (like.new_zeros(batch_size, self.num_kv_heads, capacity, dim) for dim in (self.head_dim, self.value_dim))
        return SoftmaxState.empty(batch_size, start, like.device, k=k, v=v, max_length=max_length)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        mask = None if key_mask is None else key_mask[:, None, None]
        return self._sdpa(q, k.transpose(1, 2), v.transpose(1, 2), mask)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        return self._sdpa(q, k.transpose(1, 2), v.transpose(1, 2), None, causal=True)

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, SoftmaxState]:
        assert isinstance(state, SoftmaxState)
        T = q.shape[1]
        new = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
        mask = torch.cat([_filled(state)[:, None].expand(-1, T, -1), new], 2)[:, None]
        keys, values = (torch.cat([old, x.transpose(1, 2).to(old.dtype)], 2) for old, x in ((state.k, k), (state.v, v)))
        return self._sdpa(q, keys, values, mask), self._write(state, k, v, gates=None, lengths=lengths)

    def _write(
        self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> SoftmaxState:
        assert isinstance(state, SoftmaxState)
        length = state.length + (k.shape[1] if lengths is None else lengths)
        in_place = state.max_length is not None and not torch.is_grad_enabled()
        return _append(state, k.transpose(1, 2), v.transpose(1, 2), length, in_place=in_place)

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, SoftmaxState)
        if state.k.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], self.value_dim)
        return self._sdpa(q, state.k, state.v, _filled(state)[:, None, None])

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        dropout, given = self.dropout if self.training else 0.0, q.dtype
        grouped, q = self.num_heads > self.num_kv_heads, q.transpose(1, 2).to(k.dtype)
        out = attend(q, k, v, mask, causal=causal, grouped=grouped, scale=self.scale, dropout=dropout)
        return out.transpose(1, 2).to(given)


def _append(state: SoftmaxState, k: Tensor, v: Tensor, length: Tensor, *, in_place: bool) -> SoftmaxState:
    """Write k (B, Hkv, T, D) and v (B, Hkv, T, E) behind the state's tokens, of which there are then `length`."""
    T = k.shape[2]
    slot = state.length[:, None] + torch.arange(T, device=k.device)
    if state.max_length is None:
        state = _grow(state, state.k.shape[2] + T)
    else:
        _check_capacity(length, state.max_length)
        # Padding goes to the spare slot.
        slot = slot.clamp(max=state.max_length)
    buffers = []
    for buffer, x in ((state.k, k), (state.v, v)):
        index, x = slot[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3]), x.to(buffer.dtype)
        buffers.append(buffer.scatter_(2, index, x) if in_place else buffer.scatter(2, index, x))
    return replace(state, length=length, k=buffers[0], v=buffers[1])


def _filled(state: SoftmaxState) -> Tensor:
    return torch.arange(state.k.shape[2], device=state.k.device) < state.length[:, None]


def _grow(state: SoftmaxState, capacity: int) -> SoftmaxState:
    more = capacity - state.k.shape[2]
    return replace(state, k=F.pad(state.k, (0, 0, 0, more)), v=F.pad(state.v, (0, 0, 0, more)))


def _check_capacity(length: Tensor, max_length: int) -> None:
    message = (
        f"a state made with max_length={max_length} is full; make it larger, or leave max_length out to let it grow"
    )
    fits = (length <= max_length).all()
    if torch.compiler.is_compiling() or length.device.type != "cpu":
        torch._assert_async(fits, message)
    elif not fits:
        raise ValueError(message)
