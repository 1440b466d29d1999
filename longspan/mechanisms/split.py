"""Heads divided among mechanisms: local heads beside global ones, in one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from longspan.layout import Packing
from longspan.ops.decode import CosSin
from longspan.protocol import Index, Mechanism, State


@dataclass
class SplitState(State):
    """The parts' states, in order."""

    parts: tuple[State, ...]

    def put(self, index: Index, rows: State) -> SplitState:
        if not isinstance(rows, SplitState):
            raise ValueError(f"rows must be a SplitState like the state they go into, got a {type(rows).__name__}")
        # Each part by its own rule: one that keeps every token may have to grow.
        parts = tuple(part.put(index, other) for part, other in zip(self.parts, rows.parts, strict=True))
        return SplitState(State(self.length).put(index, State(rows.length)).length, parts)


class SplitAttention(Mechanism):
    """The first heads to the first mechanism, the next to the second, and so on.

    parts: each {"mechanism": name, "num_heads": heads, **options}. Key/value heads follow their query heads; a single
    key/value head serves all parts, otherwise parts end where groups end.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        parts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        from longspan.mechanisms import build_mechanism

        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        sizes = []
        for part in parts:
            if not isinstance(part, Mapping) or not {"mechanism", "num_heads"} <= set(part):
                raise ValueError(f'a part is {{"mechanism": name, "num_heads": heads, **options}}, got {part!r}')
            sizes.append(part["num_heads"])
        if sum(sizes) != num_heads:
            raise ValueError(f"the parts' heads {sizes} must add up to num_heads ({num_heads})")
        group = num_heads // self.num_kv_heads
        if self.num_kv_heads > 1 and any(size % group for size in sizes):
            raise ValueError(
                f"with {self.num_kv_heads} key/value heads each part must have a multiple of {group} heads, got {sizes}"
            )
        self.sizes = sizes
        self.kv_sizes = [1 if self.num_kv_heads == 1 else size // group for size in sizes]
        built = []
        for part, kv_size in zip(parts, self.kv_sizes, strict=True):
            options = {name: value for name, value in part.items() if name not in ("mechanism", "num_heads")}
            shape = {"num_kv_heads": kv_size, "value_dim": value_dim}
            built.append(build_mechanism(part["mechanism"], part["num_heads"], head_dim, **shape, **options))
        self.parts = nn.ModuleList(built)
        self.heads_alike = False
        self.supports_causal = all(part.supports_causal for part in built)
        self.supports_cross = all(part.supports_cross for part in built)

    def new_state(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> SplitState:
        parts = tuple(
            part.new_state(batch_size, max_length=max_length, device=device, dtype=dtype) for part in self._mechanisms()
        )
        return SplitState(torch.zeros(batch_size, dtype=torch.int64, device=device), parts)

    def advance(self) -> None:
        for part in self._mechanisms():
            part.advance()

    def _state_type(self) -> type[State]:
        return SplitState

    def _check_state(self, state: State, x: Tensor, packing: Packing | None) -> None:
        super()._check_state(state, x, packing)
        assert isinstance(state, SplitState)
        for part, held in zip(self._mechanisms(), state.parts, strict=True):
            part._check_state(held, x, packing)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        parts = zip(self._mechanisms(), self._queries(q), self._keys(k), self._keys(v), strict=True)
        return torch.cat([part._attend(q, k, v, key_mask) for part, q, k, v in parts], 2)

    def _attend_causal(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        parts = zip(self._mechanisms(), self._queries(q), self._keys(k), self._keys(v), strict=True)
        return torch.cat([part._attend_causal(q, k, v, lengths) for part, q, k, v in parts], 2)

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, SplitState]:
        parts = zip(
            self._mechanisms(), self._states(state), self._queries(q), self._keys(k), self._keys(v), strict=True
        )
        outs, after = zip(*(part._extend(held, q, k, v, lengths) for part, held, q, k, v in parts), strict=True)
        return torch.cat(outs, 2), SplitState(after[0].length, after)

    def decode_step(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turn: CosSin | Sequence[CosSin | None] | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        turns = [turn] * len(self.sizes) if turn is None or isinstance(turn, CosSin) else turn
        # On a GPU parts put their answers side by side themselves; elsewhere one call more is less than one a part.
        room = q.new_empty(*q.shape[:3], self.value_dim) if q.is_cuda and out is None else out
        rooms = [None] * len(self.sizes) if room is None else room.split(self.sizes, 2)
        states, outs, after, moved = self._states(state), [], [], False
        given = self._queries(q), self._keys(k), self._keys(v), turns, rooms
        for part, held, *rest in zip(self._mechanisms(), states, *given, strict=True):
            answer, own = part.decode_step(held, *rest)
            moved = moved or own is not held
            outs.append(answer)
            after.append(own)
        found = torch.cat(outs, 2) if room is None else room
        return found, SplitState(state.length, tuple(after)) if moved else state

    def decode_state(self, state: State, dtype: torch.dtype) -> SplitState:
        parts = zip(self._mechanisms(), self._states(state), strict=True)
        return SplitState(state.length, tuple(part.decode_state(held, dtype) for part, held in parts))

    def finish_decode(self, state: State) -> SplitState:
        parts = zip(self._mechanisms(), self._states(state), strict=True)
        return SplitState(state.length, tuple(part.finish_decode(held) for part, held in parts))

    def _write(self, state: State, k: Tensor, v: Tensor, lengths: Tensor | None) -> SplitState:
        parts = zip(self._mechanisms(), self._states(state), self._keys(k), self._keys(v), strict=True)
        after = tuple(part._write(held, k, v, lengths) for part, held, k, v in parts)
        return SplitState(after[0].length, after)

    def _read(self, state: State, q: Tensor) -> Tensor:
        parts = zip(self._mechanisms(), self._states(state), self._queries(q), strict=True)
        return torch.cat([part._read(held, x) for part, held, x in parts], 2)

    def _mechanisms(self) -> list[Mechanism]:
        return cast("list[Mechanism]", list(self.parts))

    def _states(self, state: State) -> Sequence[State]:
        assert isinstance(state, SplitState)
        return state.parts

    def _queries(self, q: Tensor) -> Sequence[Tensor]:
        return q.split_with_sizes(self.sizes, 2)

    def _keys(self, x: Tensor) -> Sequence[Tensor]:
        return [x] * len(self.sizes) if self.num_kv_heads == 1 else x.split_with_sizes(self.kv_sizes, 2)
