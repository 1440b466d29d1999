"""Heads divided among mechanisms: local heads beside global ones in one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from longspan.ops.decode import CosSin, CurrentToken, DecodeFunction, RotaryKind
from longspan.protocol import Mechanism, Rotation, State


@dataclass
class SplitState(State):
    """The states of the parts, in order."""

    parts: tuple[State, ...]

    def _merge(self, later: SplitState) -> SplitState:
        parts = zip(self.parts, later.parts, strict=True)
        return replace(self, parts=tuple(part.merge(other) for part, other in parts))


class SplitAttention(Mechanism):
    """The first heads use the first mechanism, the next ones the second, and so on.

    Parts with key/value heads of their own read the first columns of their heads' gates, as many as they need:
    num_gates is the largest number. Parts that share one key/value head have columns of their own, in order: num_gates
    is their sum.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv; H unless given. Key/value heads follow their query heads: a single one serves all parts,
            otherwise parts consist of complete groups.
        value_dim: E; D unless given.
        parts: For each part {"mechanism": name, "num_heads": heads, **options}.
    """

    state_type = SplitState

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
            if options.get("keep_slots"):
                raise ValueError("keep_slots is for a Linformer with all heads: other parts number tokens in order")
            shape = {"num_kv_heads": kv_size, "value_dim": value_dim}
            built.append(build_mechanism(part["mechanism"], part["num_heads"], head_dim, **shape, **options))
        self.parts = nn.ModuleList(built)
        self.heads_alike = False
        gates = [part.num_gates for part in built]
        self.num_gates = sum(gates) if self.num_kv_heads == 1 else max(gates, default=0)
        self.supports_causal = all(part.supports_causal for part in built)
        self.supports_cross = all(part.supports_cross for part in built)

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> SplitState:
        options: dict[str, Any] = {"max_length": max_length, "start": start, "transition": transition}
        options |= {"device": like.device, "dtype": like.dtype}
        parts = tuple(part.new_state(batch_size, **options) for part in self._mechanisms())
        return SplitState.empty(batch_size, start, like.device, parts=parts)

    def check_length(self, length: int) -> None:
        """Raise ValueError if a part cannot hold sequences of `length` tokens."""
        for part in self._mechanisms():
            part.check_length(length)

    def check_state(self, state: State, batch_size: int, dtype: torch.dtype | None = None) -> None:
        """Raise ValueError unless every part can continue from its state."""
        super().check_state(state, batch_size)
        assert isinstance(state, SplitState)
        for part, held in zip(self._mechanisms(), state.parts, strict=True):
            part.check_state(held, batch_size, dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        parts = zip(self._queries(q), self._divide(k, v, gates), strict=True)
        return torch.cat([part._attend(q, k, v, gates=g, key_mask=key_mask) for q, (part, k, v, g) in parts], 2)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        parts = zip(self._queries(q), self._divide(k, v, gates), strict=True)
        return torch.cat([part._attend_causal(q, k, v, gates=g, lengths=lengths) for q, (part, k, v, g) in parts], 2)

    def _defer(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None,
        lengths: Tensor | None,
        start: Tensor | None,
    ) -> Callable[[State], Tensor]:
        parts = zip(self._queries(q), self._divide(k, v, gates), strict=True)
        finishes = [part._defer(q, k, v, gates=g, lengths=lengths, start=start) for q, (part, k, v, g) in parts]

        def finish(past: State) -> Tensor:
            assert isinstance(past, SplitState)
            return torch.cat([end(held) for end, held in zip(finishes, past.parts, strict=True)], 2)

        return finish

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, SplitState]:
        assert isinstance(state, SplitState)
        parts = zip(state.parts, self._queries(q), self._divide(k, v, gates), strict=True)
        done = [part._extend(held, q, k, v, gates=g, lengths=lengths) for held, q, (part, k, v, g) in parts]
        after = tuple(held for _, held in done)
        return torch.cat([out for out, _ in done], 2), replace(state, length=after[0].length, parts=after)

    def _write(self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None) -> SplitState:
        assert isinstance(state, SplitState)
        parts = zip(state.parts, self._divide(k, v, gates), strict=True)
        after = tuple(part._write(held, k, v, gates=g, lengths=lengths) for held, (part, k, v, g) in parts)
        return replace(state, length=after[0].length, parts=after)

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, SplitState)
        parts = zip(self._mechanisms(), state.parts, self._queries(q), strict=True)
        return torch.cat([part._read(held, x) for part, held, x in parts], 2)

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        assert isinstance(state, SplitState)
        rotations = [rotary] * len(self.sizes) if rotary is None or isinstance(rotary, CosSin) else rotary
        # On a GPU the parts write into one buffer; elsewhere one concatenation costs less than a copy per part.
        buffer = q.new_empty(*q.shape[:3], self.value_dim) if q.is_cuda and out is None else out
        buffers = [None] * len(self.sizes) if buffer is None else buffer.split(self.sizes, 2)
        given = zip(state.parts, self._queries(q), self._divide(k, v, gates), rotations, buffers, strict=True)
        done = [part._decode_step(held, q, k, v, g, turn, into) for held, q, (part, k, v, g), turn, into in given]
        found = torch.cat([answer for answer, _ in done], 2) if buffer is None else buffer
        after = tuple(held for _, held in done)
        unchanged = all(new is old for new, old in zip(after, state.parts, strict=True))
        return found, state if unchanged else replace(state, parts=after)

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU; see `Mechanism.decode_function`."""
        assert isinstance(state, SplitState)
        kinds = rotary if len(rotary) > 1 else list(rotary) * len(self.sizes)
        parts = zip(self._mechanisms(), state.parts, kinds, strict=True)
        functions = [part.decode_function(held, [kind]) for part, held, kind in parts]
        if self.num_kv_heads == 1 or any(function is None for function in functions):
            return None
        steps = cast("list[DecodeFunction]", functions)
        sizes, kv_sizes, cat = self.sizes, self.kv_sizes, torch.cat
        widths = [part.num_gates for part in self._mechanisms()]

        def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, token: CurrentToken) -> Tensor:
            own: Sequence[Tensor | None] = [None] * len(steps)
            if gates is not None:
                columns = zip(gates.split_with_sizes(kv_sizes, 1), widths, strict=True)
                own = [x.narrow(2, 0, width) if width else None for x, width in columns]
            heads = q.split_with_sizes(sizes, 1), k.split_with_sizes(kv_sizes, 1), v.split_with_sizes(kv_sizes, 1)
            return cat([f(q, k, v, g, token) for f, q, k, v, g in zip(steps, *heads, own, strict=True)], 1)

        return step

    def decode_state(self, state: State, dtype: torch.dtype) -> SplitState:
        """Return the parts' states as they decode with them."""
        assert isinstance(state, SplitState)
        parts = zip(self._mechanisms(), state.parts, strict=True)
        return replace(state, parts=tuple(part.decode_state(held, dtype) for part, held in parts))

    def finish_decode(self, state: State) -> SplitState:
        """Return the parts' states as everything else takes them."""
        assert isinstance(state, SplitState)
        parts = zip(self._mechanisms(), state.parts, strict=True)
        return replace(state, parts=tuple(part.finish_decode(held) for part, held in parts))

    def _mechanisms(self) -> list[Mechanism]:
        return cast("list[Mechanism]", list(self.parts))

    def _queries(self, q: Tensor) -> Sequence[Tensor]:
        return q.split_with_sizes(self.sizes, 2)

    def _divide(
        self, k: Tensor, v: Tensor, gates: Tensor | None
    ) -> list[tuple[Mechanism, Tensor, Tensor, Tensor | None]]:
        """Return each part with the keys and values of its heads, and its columns of their gates."""
        parts, shared = self._mechanisms(), self.num_kv_heads == 1
        keys, values = ([x] * len(parts) if shared else x.split_with_sizes(self.kv_sizes, 2) for x in (k, v))
        own: list[Tensor | None] = [None] * len(parts)
        if gates is not None:
            numbers = [part.num_gates for part in parts]
            columns = gates.split(numbers, 3) if shared else gates.split_with_sizes(self.kv_sizes, 2)
            own = [x[..., :number] if number else None for x, number in zip(columns, numbers, strict=True)]
        return list(zip(parts, keys, values, own, strict=True))
