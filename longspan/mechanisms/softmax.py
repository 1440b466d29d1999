"""Full softmax attention on PyTorch's SDPA: the baseline, with n² cost and a state that keeps every token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.softmax import attend
from longspan.protocol import Index, Mechanism, State


@dataclass
class SoftmaxState(State):
    """Every key and value so far, token i in slot i. A state made with max_length keeps its size, and a spare slot
    for padding; one without grows with each write.
    """

    k: Tensor  # (B, Hkv, capacity, D)
    v: Tensor  # (B, Hkv, capacity, E)
    max_length: int | None = None

    def put(self, index: Index, rows: SoftmaxState) -> SoftmaxState:
        room = max(self.k.shape[2], rows.k.shape[2]) if isinstance(rows, SoftmaxState) else 0
        return State.put(_grown(self, room), index, _grown(rows, room) if room else rows)


class SoftmaxAttention(Mechanism):
    """softmax(q kᵀ · scale) v, scale 1/√D unless given. dropout: on the weights, in training."""

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

    def new_state(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> SoftmaxState:
        capacity = 0 if max_length is None else max_length + 1
        k, v = (
            torch.zeros(batch_size, self.num_kv_heads, capacity, dim, device=device, dtype=dtype)
            for dim in (self.head_dim, self.value_dim)
        )
        return SoftmaxState(torch.zeros(batch_size, dtype=torch.int64, device=device), k, v, max_length)

    def _state_type(self) -> type[State]:
        return SoftmaxState

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        mask = None if key_mask is None else key_mask[:, None, None]
        return self._sdpa(q, k.transpose(1, 2), v.transpose(1, 2), mask)

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, SoftmaxState)
        if state.k.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], self.value_dim)
        return self._sdpa(q, state.k, state.v, _filled(state)[:, None, None])

    def _write(self, state: State, k: Tensor, v: Tensor, lengths: Tensor | None) -> SoftmaxState:
        assert isinstance(state, SoftmaxState)
        T = k.shape[1]
        length = state.length + (T if lengths is None else lengths)
        slot = state.length[:, None] + torch.arange(T, device=k.device)
        if state.max_length is None:
            state = _grown(state, state.k.shape[2] + T)
        else:
            _check_room(length, state.max_length)
            # Padding goes to the spare slot.
            slot = slot.clamp(max=state.max_length)
        buffers = []
        for buffer, x in ((state.k, k), (state.v, v)):
            index, x = slot[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3]), x.transpose(1, 2)
            consume = state.max_length is not None and not torch.is_grad_enabled()
            buffers.append(buffer.scatter_(2, index, x) if consume else buffer.scatter(2, index, x))
        return replace(state, length=length, k=buffers[0], v=buffers[1])

    def _attend_causal(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        return self._sdpa(q, k.transpose(1, 2), v.transpose(1, 2), None, causal=True)

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, SoftmaxState]:
        assert isinstance(state, SoftmaxState)
        T = q.shape[1]
        new = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
        mask = torch.cat([_filled(state)[:, None].expand(-1, T, -1), new], 2)[:, None]
        keys, values = (torch.cat([old, x.transpose(1, 2)], 2) for old, x in ((state.k, k), (state.v, v)))
        return self._sdpa(q, keys, values, mask), self._write(state, k, v, lengths)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        grouped, q = self.num_heads > self.num_kv_heads, q.transpose(1, 2)
        return attend(q, k, v, mask, causal=causal, grouped=grouped, scale=self.scale, dropout=dropout).transpose(1, 2)


def _filled(state: SoftmaxState) -> Tensor:
    return torch.arange(state.k.shape[2], device=state.k.device) < state.length[:, None]


def _grown(state: SoftmaxState, capacity: int) -> SoftmaxState:
    more = capacity - state.k.shape[2]
    return replace(state, k=F.pad(state.k, (0, 0, 0, more)), v=F.pad(state.v, (0, 0, 0, more)))


def _check_room(length: Tensor, max_length: int) -> None:
    message = (
        f"a state made with max_length={max_length} is full; make it larger, or leave max_length out to let it grow"
    )
    fits = (length <= max_length).all()
    if torch.compiler.is_compiling() or length.device.type != "cpu":
        torch._assert_async(fits, message)
    elif not fits:
        raise ValueError(message)
