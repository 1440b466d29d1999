"""The protocol: a mechanism is a memory. Keys and values are written into it, queries read it.

Shapes, everywhere: B batch, T queries, S keys, H heads, Hkv key/value heads, D key dim, E value dim, M features,
R compressed length, W window, N packed sequences, C chunk.

`Mechanism` checks its inputs, settles masks and packings, and hands each mechanism four plain cases: `_attend`
(bidirectional), `_extend` (causal), `_write` and `_read`. A mechanism therefore never sees a left-padded row, a packed
row or a hidden slot that is not zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longspan.layout import Packing, PaddedSpan, hide, length_buckets, restore
from longspan.ops.decode import CosSin, apply_rotary, copy_out
from longspan.ops.linear.torch_chunk import over

S = TypeVar("S", bound="State")
Index = Tensor | Sequence[int] | slice


@dataclass
class State:
    """What a mechanism remembers of B sequences: batch-first tensors, and how many tokens each has seen.

    length: (B,) int64. Hidden slots never advance it.
    """

    length: Tensor

    def select(self: S, index: Index) -> S:
        """Rows kept, dropped or repeated, as copies: beams, continuous batching."""
        return self._map(lambda x: x[index].clone() if isinstance(index, slice) else x[_as_index(index, x.device)])

    def put(self: S, index: Index, rows: S) -> S:
        """A state with the rows at `index` replaced by `rows`: a new request in a running batch."""
        if type(rows) is not type(self):
            raise ValueError(f"rows must be a {type(self).__name__} like the state they go into, got {describe(rows)}")
        where = _as_index(index, self.length.device, len(self.length))
        return self._map(lambda x, y: x.index_copy(0, where, y), rows)

    def clone(self: S) -> S:
        """A copy that shares no memory with this state."""
        return self._map(Tensor.clone)

    def detach(self: S) -> S:
        """The same numbers without their history: truncated back-propagation through time."""
        return self._map(Tensor.detach)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, nested states by dotted names."""
        found: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                found[field.name] = value
            elif isinstance(value, tuple):
                for i, part in enumerate(value):
                    found |= {f"{field.name}.{i}.{name}": x for name, x in part.tensors().items()}
        return found

    def _map(self: S, function: Callable[..., Tensor], *others: S) -> S:
        changed: dict[str, Any] = {}
        for field in fields(self):
            value, rest = getattr(self, field.name), [getattr(other, field.name) for other in others]
            if isinstance(value, Tensor):
                changed[field.name] = function(value, *rest)
            elif isinstance(value, tuple):
                changed[field.name] = tuple(
                    part._map(function, *parts) for part, *parts in zip(value, *rest, strict=True)
                )
            elif any(value != other for other in rest):
                raise ValueError(f"these states differ in {field.name}: {value} and {rest[0]}")
        return replace(self, **changed)


class FeatureMap(nn.Module, ABC):
    """φ of linear attention: similarity(q, k) = φ(q)·φ(k).

    epsilon: added to every key feature after the keys' common scale has been divided out (FAVOR+ of older checkpoints).
    unbounded: whether keys carry a log scale, so that only normalized attention is defined.
    """

    epsilon: float = 0.0
    unbounded: bool = False

    @abstractmethod
    def num_features(self, head_dim: int) -> int:
        """M for a given D."""

    @abstractmethod
    def query(self, q: Tensor) -> Tensor:
        """q: (B, T, H, D) queries -> (B, T, H, M) features; each query's may be scaled freely if normalized."""

    @abstractmethod
    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """k: (B, S, Hkv, D) keys -> f (B, S, Hkv, M) and a log scale β (B, S, Hkv) or None: φ(k) = f · exp(β).

        With f of order one and the size in β, no key overflows. β is a constant to gradients; f carries them all.
        """

    def shares(self, k: Tensor, visible: Tensor | None) -> Tensor:
        """(B, S, Hkv, M): what part of each feature is each key's, of the keys that `visible` (B, S) keeps."""
        f, scale = self.key(k)
        if scale is not None:
            f = f * (scale - scale.amax(1, keepdim=True)).exp()[..., None]
        if visible is not None:
            f = f.masked_fill(~visible[:, :, None, None], 0)
        return over(f, f.sum(1, keepdim=True))


class Mechanism(nn.Module, ABC):
    """Attention as a memory. q (B, T, H, D), k (B, S, Hkv, D), v (B, S, Hkv, E) -> (B, T, H, E).

    Without gradients `extend`, `write` and `step` may consume the state they are given: use the one they return.
    """

    supports_causal: bool = True
    supports_cross: bool = True
    heads_alike: bool = True  # whether any of the heads could be computed apart from the others, all in the same way

    def __init__(
        self, num_heads: int, head_dim: int, *, num_kv_heads: int | None = None, value_dim: int | None = None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.value_dim = head_dim if value_dim is None else value_dim
        for name in ("num_heads", "head_dim", "num_kv_heads", "value_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        key_packing: Packing | None = None,
        past: State | None = None,
    ) -> Tensor:
        """Attention of every query at once: (B, T, H, E).

        key_mask: (B, S) bool, True = keep. Causal: each row keeps one contiguous run, what lies left or right of it is
        padding, and hidden slots return zeros.
        packing, key_packing: sequences end to end in one row; keys are packed like queries unless key_packing is given.
        past: what was there before these tokens (causal only); it is never changed.
        """
        self._check(q, k, v, key_mask, packing)
        if past is not None and not causal:
            raise ValueError("past means causal attention: pass causal=True, or write a state and read it")
        if causal:
            self._check_causal(q, k, key_packing)
        if past is not None:
            self._check_state(past, q, packing)
        if key_packing is not None:
            check_key_packing(packing, key_packing, k)
        elif packing is not None and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"queries ({q.shape[1]}) and keys ({k.shape[1]}) are packed differently: pass key_packing for the keys"
            )
        if not self.supports_cross and not causal:
            self._check_self(q, k, key_packing)
        with _full_precision(q):
            if past is not None:
                kept = past if torch.is_grad_enabled() else past.clone()
                return self._continue(kept, q, k, v, key_mask, packing)[0]
            if 0 in (*q.shape[:2], k.shape[1]):
                return self._nothing(q, k, v)
            if causal:
                return self._begin(q, k, v, key_mask, packing)
            if packing is not None:
                return self._attend_packed(q, k, v, packing, packing if key_packing is None else key_packing)
            return self._attend(q, k, v, None) if key_mask is None else self._attend_masked(q, k, v, key_mask)

    def extend(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, State]:
        """Causal attention of any number of new tokens, read and written in one pass.

        packing: one row of the state for each packed sequence.
        """
        self._check(q, k, v, key_mask, packing)
        self._check_causal(q, k, None)
        self._check_state(state, q, packing)
        with _full_precision(q):
            return self._continue(state, q, k, v, key_mask, packing)

    def write(
        self, state: State, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, packing: Packing | None = None
    ) -> State:
        """The state after these keys and values."""
        self._check(None, k, v, key_mask, packing)
        self._check_state(state, k, packing)
        with _full_precision(k):
            if 0 in k.shape[:2]:
                return state
            if packing is not None:
                for group in length_buckets(packing):
                    kg, vg = group.take(k, v)
                    rows = self._write(state.select(group.sequences), kg, vg, group.lengths[0])
                    state = state.put(group.sequences, rows)
                return state
            if key_mask is None:
                return self._write(state, k, v, None)
            run = PaddedSpan.of(key_mask)
            k, v = run.roll(k, v)
            return self._write(state, k, v, run.lengths)

    def read(self, state: State, q: Tensor) -> Tensor:
        """Attention of queries that all stand at position length - 1, after everything that was written."""
        self._check_query(q)
        self._check_state(state, q, None)
        with _full_precision(q):
            return self._read(state, q)

    def step(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        """`extend` by one token: it is written, then its own query reads."""
        if q.ndim != 4 or q.shape[1] != 1:
            raise ValueError(
                f"step takes one token, q of shape (B, 1, H, D), got {tuple(q.shape)}; use extend for more"
            )
        self._check(q, k, v, None, None)
        self._check_causal(q, k, None)
        self._check_state(state, q, None)
        with _full_precision(q):
            state = self._write(state, k, v, None)
            return self._read(state, q), state

    def decode_step(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turn: CosSin | Sequence[CosSin | None] | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """`step` as a loop of many takes it: unchecked, without gradients, the state's tensors changed where they lie.

        Its length stays as it was: the caller raises one for all layers. turn: rotary positions that q and k still have
        to take, one for all heads or, for a split, one for each part. out: (B, 1, H, E), where the answer goes.
        """
        assert turn is None or isinstance(turn, CosSin)
        q, k = apply_rotary(turn, q, k)
        after = self._write(state, k, v, None)
        return copy_out(self._read(after, q), out), _kept_in_place(state, after)

    def decode_state(self, state: State, dtype: torch.dtype) -> State:
        """The state as a loop of `decode_step` on inputs of this dtype likes it best; all else takes it settled."""
        return state

    def finish_decode(self, state: State) -> State:
        return state

    def advance(self) -> None:
        """Called by models once before each training forward, outside anything that is recomputed."""

    @abstractmethod
    def new_state(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """An empty memory for `batch_size` sequences.

        max_length: the most tokens it will ever hold, for mechanisms that keep them all. dtype: that of the inputs.
        """

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Bidirectional; hidden keys and values are zero."""

    def _attend_causal(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """As `_extend` from the empty state, where nobody asks for the state after it."""
        return self._extend(self._new_state_like(q, q.shape[0]), q, k, v, lengths)[0]

    @abstractmethod
    def _extend(self, state: State, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, State]:
        """Causal, T ≥ 1. Row b holds lengths[b] tokens from slot 0, then zeros."""

    @abstractmethod
    def _write(self, state: State, k: Tensor, v: Tensor, lengths: Tensor | None) -> State:
        """As `_extend`, without queries."""

    @abstractmethod
    def _read(self, state: State, q: Tensor) -> Tensor:
        """Every query at position length - 1; rows of length 0 give zeros."""

    def _begin(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, packing: Packing | None) -> Tensor:
        if packing is not None:
            groups = length_buckets(packing)
            taken = [(*group.take(q, k, v), group.lengths[0]) for group in groups]
            pieces = [self._attend_causal(*rows) for rows in taken]
            return restore(packing, groups, pieces, q.shape[1])
        if key_mask is None:
            return self._attend_causal(q, k, v, None)
        run = PaddedSpan.of(key_mask)
        q, k, v = run.roll(q, k, v)
        return run.unroll(self._attend_causal(q, k, v, run.lengths))

    def _continue(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, State]:
        if 0 in q.shape[:2]:
            return self._nothing(q, k, v), state
        if packing is not None:
            return self._extend_packed(state, q, k, v, packing)
        if key_mask is None:
            return self._extend(state, q, k, v, None)
        run = PaddedSpan.of(key_mask)
        q, k, v = run.roll(q, k, v)
        out, state = self._extend(state, q, k, v, run.lengths)
        return run.unroll(out), state

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
        k, v = hide(~key_mask, k, v)
        return self._attend(q, k, v, key_mask)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, key_packing: Packing) -> Tensor:
        pieces = []
        for group in (groups := length_buckets(packing, key_packing)):
            (qg,), (kg, vg) = group.take(q), group.take(k, v, of=1)
            pieces.append(self._attend(qg, kg, vg, group.visible(1)))
        return restore(packing, groups, pieces, q.shape[1])

    def _extend_packed(self, state: State, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, State]:
        pieces = []
        for group in (groups := length_buckets(packing)):
            qg, kg, vg = group.take(q, k, v)
            out, rows = self._extend(state.select(group.sequences), qg, kg, vg, group.lengths[0])
            pieces.append(out)
            state = state.put(group.sequences, rows)
        return restore(packing, groups, pieces, q.shape[1]), state

    def _nothing(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Zeros (B, T, H, E) for no queries or no keys; a backward pass goes through them like any other answer."""
        out = q[..., :1].masked_fill(torch.ones_like(q[..., :1], dtype=torch.bool), 0)
        return out + (k.sum() + v.sum()) + q.new_zeros(self.value_dim)

    def _new_state_like(self, q: Tensor, batch_size: int) -> State:
        return self.new_state(batch_size, device=q.device, dtype=q.dtype)

    def _check(self, q: Tensor | None, k: Tensor, v: Tensor, key_mask: Tensor | None, packing: Packing | None) -> None:
        if q is not None:
            self._check_query(q)
        check_tensor("k", k, "(B, S, Hkv, D)", self.num_kv_heads, self.head_dim)
        check_tensor("v", v, "(B, S, Hkv, E)", self.num_kv_heads, self.value_dim)
        first = k if q is None else q
        for name, x in (("k", k), ("v", v)):
            if x.dtype != first.dtype:
                raise ValueError(f"q, k and v must have one dtype, got {name} of {x.dtype} beside {first.dtype}")
            if x.device != first.device:
                raise ValueError(f"q, k and v must be on one device, got {name} on {x.device} beside {first.device}")
        if k.shape[:2] != v.shape[:2]:
            raise ValueError(
                f"k and v must agree in batch and length, got k {tuple(k.shape[:2])} and v {tuple(v.shape[:2])}"
            )
        if first.shape[0] != k.shape[0]:
            raise ValueError(f"q and k must have one batch size, got {first.shape[0]} and {k.shape[0]}")
        if key_mask is not None:
            check_key_mask(key_mask, k, packing)
        if packing is not None:
            check_packing(packing, first)

    def _check_query(self, q: Tensor) -> None:
        check_tensor("q", q, "(B, T, H, D)", self.num_heads, self.head_dim)

    def _check_causal(self, q: Tensor, k: Tensor, key_packing: Packing | None) -> None:
        if not self.supports_causal:
            raise ValueError(f"{type(self).__name__} cannot be causal; use another mechanism or causal=False")
        if key_packing is not None:
            raise ValueError("causal attention has one packing for queries and keys: leave key_packing out")
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"causal attention needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}; "
                "pass what came before as past=state, and only the new tokens as q, k and v"
            )

    def _check_self(self, q: Tensor, k: Tensor, key_packing: Packing | None) -> None:
        if key_packing is not None or q.shape[1] != k.shape[1]:
            raise ValueError(
                f"{type(self).__name__} has windows around a query's own position and cannot attend to another row "
                f"(got {q.shape[1]} queries and {k.shape[1]} keys); use linear, performer, linformer or softmax"
            )

    def _check_state(self, state: State, x: Tensor, packing: Packing | None) -> None:
        expected = self._state_type()
        if type(state) is not expected:
            raise ValueError(
                f"{type(self).__name__} needs a {expected.__name__} from its new_state(), got {describe(state)}"
            )
        rows = x.shape[0] if packing is None else len(packing.offsets) - 1
        if len(state.length) != rows:
            what = "batch rows" if packing is None else "packed sequences"
            raise ValueError(f"the state holds {len(state.length)} sequences, the input {rows} {what}")

    @abstractmethod
    def _state_type(self) -> type[State]:
        """The class of this mechanism's states."""


def _kept_in_place(state: State, after: State) -> State:
    """`after`, all but its length, in the tensors of `state` where they are as large."""
    kept: dict[str, Any] = {}
    for field in fields(state):
        old, new = getattr(state, field.name), getattr(after, field.name)
        if isinstance(old, tuple):
            kept[field.name] = tuple(_kept_in_place(*parts) for parts in zip(old, new, strict=True))
        elif field.name == "length":
            kept[field.name] = old
        elif isinstance(old, Tensor) and old.shape == new.shape and old.dtype == new.dtype:
            kept[field.name] = old if old.data_ptr() == new.data_ptr() else old.copy_(new)
    return replace(after, **kept)


def _full_precision(x: Tensor) -> torch.autocast:
    """Autocast is off inside a mechanism: it would round sums over the sequence."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def _as_index(index: Index, device: torch.device, size: int = 0) -> Tensor:
    if isinstance(index, slice):
        return torch.arange(size, device=device)[index]
    return torch.as_tensor(index, device=device)


def check_tensor(name: str, x: Tensor, shape: str, heads: int, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {describe(x)}")
    if x.ndim != 4:
        raise ValueError(f"{name} must have four dimensions {shape}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if x.shape[2:] != (heads, dim):
        hint = " (are heads and length swapped?)" if x.shape[1] == heads and x.shape[3] == dim else ""
        raise ValueError(
            f"{name} must be {shape} with {heads} heads of {dim}, got {tuple(x.shape)}{hint}; "
            "heads come third, after the sequence"
        )


def check_key_mask(key_mask: Tensor, k: Tensor, packing: Packing | None) -> None:
    if packing is not None:
        raise ValueError("packing and key_mask exclude each other: a packed row has no padding; leave key_mask out")
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool, True = keep, got {key_mask.dtype}; use key_mask.bool()")
    if key_mask.shape != k.shape[:2]:
        hint = "; masks over (T, S) pairs are not supported" if key_mask.ndim > 2 else ""
        raise ValueError(f"key_mask must be (B, S) = {tuple(k.shape[:2])}, got {tuple(key_mask.shape)}{hint}")
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on the keys' device {k.device}, got {key_mask.device}")


def check_packing(packing: Packing, x: Tensor, name: str = "packing") -> None:
    offsets = packing.offsets
    if x.shape[0] != 1:
        raise ValueError(f"packed sequences lie in one row: batch size must be 1 with {name}, got {x.shape[0]}")
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype != torch.int32:
        raise ValueError(
            f"{name}.offsets must be (N + 1,) int32, got {tuple(offsets.shape)} {offsets.dtype}; "
            "Packing.from_lengths makes them"
        )
    if offsets.device != x.device:
        raise ValueError(f"{name}.offsets must be on the inputs' device {x.device}, got {offsets.device}")
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        return  # Looking at the values would wait for the device.
    lengths = packing.lengths
    if offsets[0] != 0 or offsets[-1] != x.shape[1] or bool((lengths < 0).any()):
        raise ValueError(f"{name}.offsets must rise from 0 to the row's length {x.shape[1]}, got {offsets.tolist()}")
    if int(lengths.max()) > packing.max_length:
        raise ValueError(f"{name}.max_length is {packing.max_length}, but a sequence has {int(lengths.max())} tokens")


def check_key_packing(packing: Packing | None, key_packing: Packing, k: Tensor) -> None:
    if packing is None:
        raise ValueError("key_packing needs packing for the queries too")
    check_packing(key_packing, k, "key_packing")
    if len(key_packing.offsets) != len(packing.offsets):
        raise ValueError(
            f"packing and key_packing must hold as many sequences, got {len(packing.offsets) - 1} "
            f"and {len(key_packing.offsets) - 1}"
        )


def describe(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
