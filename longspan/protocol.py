"""The protocol: a mechanism is a memory. Keys and values are written into a state, queries read it.

Shapes: B batch, T queries, S keys, H heads, Hkv key/value heads, D key dim, E value dim, G gates, M features,
R compressed length, W window, N packed sequences, C chunk.

`Mechanism` checks its inputs and resolves masks, padding and packing before it calls a mechanism's hooks: a hook gets
rows whose tokens begin at slot 0, and hidden slots of k, v and gates are zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from longspan.layout import (
    Packing,
    PaddedSpan,
    check_key_mask,
    check_packing,
    close_holes,
    length_buckets,
    repack,
    zero_fill,
)
from longspan.ops.common import dispatch
from longspan.ops.common.autograd import without_autocast
from longspan.ops.common.torch_private import register_pytree
from longspan.ops.decode import CosSin, DecodeFunction, RotaryKind, apply_rotary, copy_out
from longspan.ops.linear.torch import FLOOR, safe_divide

S = TypeVar("S", bound="State")
Index = Tensor | Sequence[int] | slice
Rotation = CosSin | Sequence[CosSin | None] | None


class StateOptions(TypedDict, total=False):
    """The keyword arguments of `Mechanism.new_state`."""

    max_length: int | None
    start: Tensor | int | None
    transition: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


@dataclass
class State:
    """What a mechanism has stored of B sequences: batch-first tensors, a value that is passed in and passed back.

    A state holds only what its own tokens wrote, so that states of consecutive pieces can be merged. Subclasses add
    their tensors as fields, may nest states in tuples, and implement `_merge`.

    Attributes:
        length: (B,) int64, the number of tokens stored. Hidden slots never advance it.
        start: (B,) int64, the position of the first token; None where every row begins at 0.
        draw: Which draw of the mechanism's random features wrote it; a mechanism with another draw refuses it.
        token_fields: Tensors that hold the i-th token in slot i of their third dimension, and so grow with the length.
    """

    token_fields: ClassVar[tuple[str, ...]] = ()

    length: Tensor
    start: Tensor | None = field(default=None, kw_only=True)
    draw: int | None = field(default=0, kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register_pytree(cls, _flatten_state, partial(_unflatten_state, cls))

    @classmethod
    def empty(cls: type[S], batch_size: int, start: Tensor | None, device: torch.device, **contents: Any) -> S:
        """Return a state of no tokens with these other fields, for `Mechanism._new_state`."""
        return cls(torch.zeros(batch_size, dtype=torch.int64, device=device), start=start, **contents)

    @property
    def end(self) -> Tensor:
        """(B,) int64, the position of the next token."""
        return self.length if self.start is None else self.start + self.length

    def select(self: S, index: Index) -> S:
        """Return the rows at `index`, dropped, reordered or repeated, as copies: beams, continuous batching.

        Args:
            index: Row numbers (n,) as a tensor or list, where negative ones count from the end; a bool mask (B,); or a
                slice.

        Raises:
            ValueError: If `index` is something else, or there is no such row.
        """
        where = _as_index(index, self.length)
        return self._map(lambda x: x[where], nested=lambda part: part.select(where))

    def put(self: S, index: Index, rows: S) -> S:
        """Return a state with the rows at `index` replaced by `rows`: a new request in a running batch.

        Args:
            index: As for `select`, each row at most once.
            rows: A state of as many rows, of the same mechanism and dtype.

        Raises:
            ValueError: If `index` is not valid, or `rows` does not fit this state.
        """
        self._check_same_type(rows, "rows must be")
        where = _as_index(index, self.length, repeats=False)
        if len(where) != len(rows.length):
            raise ValueError(f"index names {len(where)} rows, but rows has {len(rows.length)}: they must be as many")
        if (self.start is None) != (rows.start is None):
            self, rows = self._with_start(), rows._with_start()
        return self._map(lambda x, y: _put_rows(x, where, y), rows, nested=lambda part, other: part.put(where, other))

    def merge(self: S, later: S) -> S:
        """Return the state after this one's tokens followed by those of `later`. Merging is associative.

        Args:
            later: A state of the same mechanism whose first token follows this one's last:
                ``mechanism.new_state(batch_size, start=state.end)``, then written or extended.

        Raises:
            ValueError: If the states are of different classes, batch sizes or draws, or if `later` does not begin
                where this state ends.
        """
        self._check_same_type(later, "later must be")
        if len(later.length) != len(self.length):
            raise ValueError(f"states to merge must hold as many rows, got {len(self.length)} and {len(later.length)}")
        if later.draw != self.draw and None not in (self.draw, later.draw):
            raise ValueError(
                f"states to merge must be of one draw of random features, got {self.draw} and {later.draw}"
            )
        follows = (later.end - later.length == self.end).all()
        message = "the later state must begin where the earlier one ends (later.start == start + length)"
        if torch.compiler.is_compiling() or follows.device.type != "cpu":
            torch._assert_async(follows, message)
        elif not follows:
            raise ValueError(
                f"{message}, got start {(later.end - later.length).tolist()} after end {self.end.tolist()}; "
                "make it with new_state(batch_size, start=earlier.end)"
            )
        return replace(self._merge(later), start=self.start, length=self.length + later.length)

    def reserve(self: S, number: int | None) -> S:
        """Return a state that can hold `number` more tokens, None for any number, whatever max_length it was made with.

        A state of constant size is returned as it is.
        """
        changed: dict[str, Any] = {}
        for item in fields(self):
            if isinstance(value := getattr(self, item.name), tuple):
                changed[item.name] = tuple(part.reserve(number) for part in value)
        return replace(self, **changed)

    def clone(self: S) -> S:
        """Return a copy that shares no memory with this state."""
        return self._map(Tensor.clone)

    def detach(self: S) -> S:
        """Return the state without its autograd history: truncated back-propagation through time."""
        return self._map(Tensor.detach)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, those of nested states by dotted names."""
        found: dict[str, Tensor] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                found[item.name] = value
            elif isinstance(value, tuple):
                for i, part in enumerate(value):
                    found |= {f"{item.name}.{i}.{name}": x for name, x in part.tensors().items()}
        return found

    def _merge(self: S, later: S) -> S:
        """Merge the contents; the caller has checked `later` and sets start and length."""
        raise NotImplementedError(f"{type(self).__name__} cannot be merged: it does not implement _merge")

    def _with_start(self: S) -> S:
        return replace(self, start=torch.zeros_like(self.length)) if self.start is None else self

    def _check_same_type(self, other: object, role: str) -> None:
        if type(other) is not type(self):
            raise ValueError(f"{role} a {type(self).__name__} like this state, got {_describe(other)}")

    def _map(self: S, function: Callable[..., Tensor], *others: S, nested: Callable[..., State] | None = None) -> S:
        """Apply a function to the tensors of this state and others; to nested states, `nested` or the same function."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            value, rest = getattr(self, item.name), [getattr(other, item.name) for other in others]
            if isinstance(value, Tensor):
                changed[item.name] = function(value, *rest)
            elif isinstance(value, tuple):
                parts = zip(value, *rest, strict=True)
                changed[item.name] = tuple(
                    part._map(function, *more) if nested is None else nested(part, *more) for part, *more in parts
                )
            elif any(value != other for other in rest):
                raise ValueError(f"these states differ in {item.name}: {value} and {rest[0]}")
        return replace(self, **changed)


def _flatten_state(state: State) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Return tensors and nested states by name, and the other fields."""
    values = {item.name: getattr(state, item.name) for item in fields(state)}
    children = {name: value for name, value in values.items() if isinstance(value, Tensor | tuple)}
    return children, tuple((name, value) for name, value in values.items() if name not in children)


def _unflatten_state(cls: type[S], children: dict[str, Any], rest: tuple[tuple[str, Any], ...]) -> S:
    return cls(**children, **dict(rest))


class FeatureMap(nn.Module, ABC):
    """φ of linear attention: similarity(q, k) = φ(q)·φ(k).

    Attributes:
        epsilon: Added to every key feature after the keys' common scale has been divided out (FAVOR+ of older
            checkpoints).
        unbounded: Whether keys carry a log scale, so that only normalized attention is defined.
        wide: Whether the features of one key may differ by more than the range of float32: causal attention normalized
            by feature, which divides each of them, then sums in float64.
        positive: Whether no feature is negative, so that normalizers of rounded features are near those of exact ones.
        log_largest: Logarithm of the largest feature of `scaled_query`, and of f of `key` where there is a log scale.
            More than 0 keeps products of small features in the range of float32.
    """

    epsilon: float = 0.0
    unbounded: bool = False
    wide: bool = False
    positive: bool = False
    log_largest: float = 0.0

    @abstractmethod
    def num_features(self, head_dim: int) -> int:
        """Return M for a given D."""

    @abstractmethod
    def query(self, q: Tensor) -> Tensor:
        """Map queries (B, T, H, D) to features (B, T, H, M)."""

    def scaled_query(self, q: Tensor) -> Tensor:
        """Map queries as `query` does, up to one factor per query, for attention that is normalized by query."""
        return self.query(q)

    @abstractmethod
    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map keys (B, S, Hkv, D) to f (B, S, Hkv, M) and a log scale β (B, S, Hkv) or None: φ(k) = f · exp(β).

        With f of order one and the magnitude in β, no key overflows. Gradients flow through f only.
        """

    def shares(self, k: Tensor, visible: Tensor | None) -> Tensor:
        """Return each key's share of each feature's sum over the visible keys (B, S): (B, S, Hkv, M)."""
        f, scale = self.key(k)
        if visible is not None:
            f = f.masked_fill(~visible[:, :, None, None], 0)
            scale = None if scale is None else scale.masked_fill(~visible[:, :, None], FLOOR)
        if scale is not None:
            f = f * (scale - scale.amax(1, keepdim=True)).exp()[..., None]
        return safe_divide(f, f.sum(1, keepdim=True))


class AttentionLayer(Protocol):
    """The parts of a layer that `Mechanism.attend_layer` may use; `longspan.Attention` is one.

    Attributes:
        to_q: The projection of queries (H·D).
        to_kv: The projection of keys and values (Hkv·(D + E)), or of keys alone with shared_kv.
        to_out: The output projection.
        shared_kv: Whether values are the keys.
        plain_keys: Whether keys and values are to_kv's product and nothing else (no bias, norm or rotation), and
            to_kv is an nn.Linear.
        plain_output: Whether the output is to_out's product and nothing else (no gates, second projection or dropout).
    """

    to_q: nn.Linear
    to_kv: nn.Linear
    to_out: nn.Linear
    shared_kv: bool

    @property
    def plain_keys(self) -> bool: ...

    @property
    def plain_output(self) -> bool: ...

    def project_queries(self, x: Tensor) -> Tensor:
        """Project x (B, T, dim) to queries (B, T, H, D), without rotation."""

    def project_output(self, x: Tensor, out: Tensor) -> Tensor:
        """Project attention's output (B, T, H, E) for x (B, T, dim) to the layer's output."""


class Mechanism(nn.Module, ABC):
    """Attention as a memory: q (B, T, H, D), k (B, S, Hkv, D), v (B, S, Hkv, E) -> (B, T, H, E).

    A subclass sets `state_type` and implements `_new_state`, `_attend`, `_extend`, `_write` and `_read`. Where it has
    faster forms it also overrides `_attend_causal`, `_attend_ragged`, `attend_layer`, `decode_state`, `_decode_step`,
    `decode_function` and `finish_decode`; where it is limited in length, `check_length`; for sequences divided over
    processes `_defer`, `reach` or `_defer_bidirectional`. Hooks never see a left-padded row, a packed row (but for
    `_attend_ragged`) or a hidden slot that is not zero.

    Without gradients `extend`, `write` and `step` may reuse the memory of the state they are given: continue with the
    one they return.

    Attributes:
        state_type: The class of its states.
        supports_causal: Whether it can be causal.
        supports_cross: Whether queries may attend to another sequence than their own.
        num_gates: Numbers per token and key/value head that it takes beside q, k and v (G). Gates are raw: the layer
            projects them from its input, and the mechanism applies its own activation.
        heads_alike: Whether any subset of the heads can be computed apart from the others, all in the same way.
        sums_directions: Whether bidirectional attention is that of both directions added, so that all it needs of the
            tokens on either side is a state; see `_defer_bidirectional`.
    """

    state_type: ClassVar[type[State]] = State
    supports_causal: bool = True
    supports_cross: bool = True
    num_gates: int = 0
    heads_alike: bool = True
    sums_directions: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A step of its own makes an inherited `decode_function` wrong.
        if "_decode_step" in vars(cls) and "decode_function" not in vars(cls):
            cls.decode_function = Mechanism.decode_function  # type: ignore[method-assign]

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
        gates: Tensor | None = None,
        causal: bool = False,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        key_packing: Packing | None = None,
        past: State | None = None,
    ) -> Tensor:
        """Compute attention of all queries in parallel.

        Args:
            q: (B, T, H, D) queries.
            k: (B, S, Hkv, D) keys.
            v: (B, S, Hkv, E) values.
            gates: (B, S, Hkv, G) raw gates, for a mechanism with num_gates > 0.
            causal: Whether query t sees keys 0 … t only; needs T = S.
            key_mask: (B, S) bool, True = keep. If causal, each row is padded on the left, on the right or on both
                sides, and hidden slots return zeros.
            packing: Sequences concatenated in one row (B = 1).
            key_packing: The keys' packing, where it is not the queries'.
            past: The state before these tokens (causal only); it is not changed.

        Returns:
            (B, T, H, E) in the dtype of q. A query that sees no key gets zeros.

        Raises:
            ValueError: If shapes, dtypes, devices or options do not fit together.
        """
        alone = gates is None and key_mask is None and packing is None and key_packing is None and past is None
        if alone and self._fits(q, k, v, causal):
            with without_autocast(q):
                if causal:
                    return self._attend_causal(q, k, v, gates=None, lengths=None)
                return self._attend(q, k, v, gates=None, key_mask=None)
        self._check_query(q)
        self._check_inputs(q, k, v, gates, key_mask, packing)
        if past is not None and not causal:
            raise ValueError("past means causal attention: pass causal=True, or write a state and read it")
        if causal:
            self._check_causal(q, k, key_packing)
        if past is not None:
            self.check_state(past, _batch_size(q, packing), q.dtype)
        if key_packing is not None:
            _check_key_packing(packing, key_packing, k)
        elif packing is not None and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"queries ({q.shape[1]}) and keys ({k.shape[1]}) are packed differently: pass key_packing for the keys"
            )
        if not self.supports_cross and not causal:
            self._check_self(q, k, key_packing)
        with without_autocast(q):
            if past is not None:
                past = past if torch.is_grad_enabled() else past.clone()
                return self._extend_resolved(past, q, k, v, gates, key_mask, packing)[0]
            if 0 in (*q.shape[:2], k.shape[1]):
                return self._empty_output(q, k, v)
            if key_mask is not None or packing is not None:
                return self._forward_ragged(q, k, v, gates, causal, key_mask, packing, key_packing or packing)
            if causal:
                return self._attend_causal(q, k, v, gates=gates, lengths=None)
            return self._attend(q, k, v, gates=gates, key_mask=None)

    def defer(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None = None,
        key_mask: Tensor | None = None,
        start: Tensor | None = None,
    ) -> Callable[[State], Tensor]:
        """Begin causal attention whose past is not known yet, with all work that does not depend on it.

        Args:
            q: (B, T, H, D) queries.
            k: (B, T, Hkv, D) keys.
            v: (B, T, Hkv, E) values.
            gates: (B, T, Hkv, G) raw gates, for a mechanism with num_gates > 0.
            key_mask: (B, T) bool, True = keep; each row one contiguous span.
            start: (B,) the position of the first token; 0 unless given.

        Returns:
            A function that takes the past, a state that ends at `start`, and returns what `forward` with it does.
        """
        self._check_query(q)
        self._check_inputs(q, k, v, gates, key_mask, None)
        self._check_causal(q, k, None)
        if 0 in q.shape[:2]:
            return lambda past: self._empty_output(q, k, v)
        span, lengths = None, None
        if key_mask is not None:
            span = PaddedSpan.of(key_mask)
            lengths = span.lengths
            q, k, v, gates = span.roll(q, k, v, gates)
        with without_autocast(q):
            finish = self._defer(q, k, v, gates=gates, lengths=lengths, start=start)

        def finished(past: State) -> Tensor:
            self.check_state(past, len(q), q.dtype)
            with without_autocast(q):
                out = finish(past)
            return out if span is None else span.unroll(out)

        return finished

    def extend(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None = None,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, State]:
        """Compute causal attention of any number of new tokens after those of a state, and write them into it.

        Args:
            state: The state before these tokens; with packing, one row for each sequence.
            q: (B, T, H, D) queries.
            k: (B, T, Hkv, D) keys.
            v: (B, T, Hkv, E) values.
            gates: (B, T, Hkv, G) raw gates, for a mechanism with num_gates > 0.
            key_mask: (B, T) bool, True = keep; each row one contiguous span.
            packing: Sequences concatenated in one row.

        Returns:
            The output (B, T, H, E), and the state after these tokens.
        """
        self._check_query(q)
        self._check_inputs(q, k, v, gates, key_mask, packing)
        self._check_causal(q, k, None)
        self.check_state(state, _batch_size(q, packing), q.dtype)
        with without_autocast(q):
            return self._extend_resolved(state, q, k, v, gates, key_mask, packing)

    def write(
        self,
        state: State,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None = None,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> State:
        """Return the state after these keys, values and gates.

        Args:
            state: The state before these tokens; with packing, one row for each sequence.
            k: (B, T, Hkv, D) keys.
            v: (B, T, Hkv, E) values.
            gates: (B, T, Hkv, G) raw gates, for a mechanism with num_gates > 0.
            key_mask: (B, T) bool, True = keep. Visible tokens are written in order; hidden ones between them are
                dropped, or refused by a mechanism without cross-attention, whose states only causal queries read.
            packing: Sequences concatenated in one row.
        """
        self._check_inputs(None, k, v, gates, key_mask, packing)
        self.check_state(state, _batch_size(k, packing), k.dtype)
        with without_autocast(k):
            if 0 in k.shape[:2]:
                return state
            if packing is not None:
                for bucket in length_buckets(packing):
                    kb, vb, gb = bucket.take(k, v, gates)
                    held = state.select(bucket.sequences)
                    state = state.put(bucket.sequences, self._write(held, kb, vb, gates=gb, lengths=bucket.lengths[0]))
                return state
            if key_mask is None:
                return self._write(state, k, v, gates=gates, lengths=None)
            lengths, k, v, gates = self._take_visible(key_mask, k, v, gates)
            return self._write(state, k, v, gates=gates, lengths=lengths)

    def read(self, state: State, q: Tensor) -> Tensor:
        """Compute attention (B, T, H, E) of queries q (B, T, H, D) that are all at the last position of the state."""
        self._check_query(q)
        self.check_state(state, len(q), q.dtype)
        with without_autocast(q):
            return self._read(state, q)

    def step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Extend a state by one token, q (B, 1, H, D): write it, then read with its query."""
        self._check_query(q)
        if q.shape[1] != 1:
            raise ValueError(
                f"step takes one token, q of shape (B, 1, H, D), got {tuple(q.shape)}; use extend for more"
            )
        self._check_inputs(q, k, v, gates, None, None)
        self._check_causal(q, k, None)
        self.check_state(state, len(q), q.dtype)
        with without_autocast(q):
            state = self._write(state, k, v, gates=gates, lengths=None)
            return self._read(state, q), state

    def new_state(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        start: Tensor | int | None = None,
        transition: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Return an empty state for `batch_size` sequences.

        Args:
            batch_size: Number of rows.
            max_length: The most tokens it will ever hold, for mechanisms that store them all.
            start: The position of its first token, (B,) or one for all rows; 0 unless given. Pieces of a sequence that
                are to be merged later start where the piece before them ends.
            transition: Whether the state also carries its transition where merging needs one; mechanisms whose states
                always merge have nothing to add.
            device: Where its tensors are.
            dtype: The widest dtype of the inputs, float32 unless given; sums are float32 at least. Narrower
                inputs are accepted too, and outputs have the inputs' dtype.

        Raises:
            ValueError: If max_length is more than the mechanism can hold, or start does not fit the batch.
        """
        for name, number in (("batch_size", batch_size), ("max_length", 0 if max_length is None else max_length)):
            if not isinstance(number, int | torch.SymInt) or number < 0:
                raise ValueError(f"{name} must be an integer of 0 or more, got {number!r}")
        if max_length is not None:
            self.check_length(max_length)
        like = torch.empty(0, device=device, dtype=dtype)
        first = start_positions(batch_size, start, like.device)
        return replace(self._new_state(batch_size, first, like, max_length, transition), draw=self.draw)

    @property
    def draw(self) -> int | None:
        """Number of redraws of its random features; a state of another draw is refused. None: unknown."""
        return 0

    @property
    def reach(self) -> tuple[int, int] | None:
        """The largest distances at which a bidirectional query sees keys before and after it; None: all of them."""
        return None

    @property
    def position_period(self) -> int:
        """The number of positions by which all tokens of a mechanism with a `reach` may be moved at once."""
        return 1

    def check_length(self, length: int) -> None:
        """Raise ValueError if the mechanism cannot hold sequences of `length` tokens."""

    def check_state(self, state: State, batch_size: int, dtype: torch.dtype | None = None) -> None:
        """Raise ValueError unless the mechanism can continue from this state with `batch_size` rows of this dtype."""
        if type(state) is not self.state_type:
            raise ValueError(
                f"{type(self).__name__} needs a {self.state_type.__name__} from its new_state(), got {_describe(state)}"
            )
        if len(state.length) != batch_size:
            raise ValueError(f"the state holds {len(state.length)} sequences, the input {batch_size}")
        if state.draw != self.draw and None not in (state.draw, self.draw):
            raise ValueError(
                f"this state was written with draw {state.draw} of the random features, the mechanism now has draw "
                f"{self.draw}: start from new_state(), or redraw less often"
            )
        if dtype is None:
            return
        for name, x in state.tensors().items():
            if x.is_floating_point() and torch.promote_types(x.dtype, dtype) != x.dtype:
                raise ValueError(
                    f"inputs of {dtype} would be rounded to this state's {x.dtype} ({name}): make the state with "
                    f"new_state(batch_size, dtype={dtype})"
                )

    def attend_layer(
        self, layer: AttentionLayer, x: Tensor, source: Tensor, *, key_mask: Tensor | None
    ) -> Tensor | None:
        """Compute a whole bidirectional layer (B, T, dim), or return None to leave it to the layer.

        For mechanisms that can save work across the projections: Linformer compresses tokens before projecting them.

        Args:
            layer: The calling layer, with its projections.
            x: (B, T, dim), the queries' tokens.
            source: (B, S, dim), the keys' tokens: x itself, or a context. Hidden tokens are zero.
            key_mask: (B, S) bool, True = keep.
        """
        return None

    def decode_state(self, state: State, dtype: torch.dtype) -> State:
        """Return a state (start 0) in the form that `decode_step` on inputs of this dtype is fastest with."""
        return state

    def decode_step(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None = None,
        rotary: Rotation = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Extend by one token as a decode loop does: unchecked, without gradients, the state updated in place.

        Args:
            state: A state from `decode_state`. Its length is not advanced: the caller advances the one length that all
                layers share.
            q: (B, 1, H, D) query.
            k: (B, 1, Hkv, D) key.
            v: (B, 1, Hkv, E) value.
            gates: (B, 1, Hkv, G) raw gates.
            rotary: The rotation that q and k still need: one for all heads or, for a split, one for each part.
            out: (B, 1, H, E) buffer for the output.

        Returns:
            The output (B, 1, H, E), and the state after the token.
        """
        return self._decode_step(state, q, k, v, gates, rotary, out)

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU, with all that stays the same between tokens looked up.

        Most of a small step on a CPU is the cost of Python between the operations.

        Args:
            state: A state from `decode_state` in the dtype of the inputs, updated in place by each call.
            rotary: How q and k are rotated: one kind for all heads or, for a split, one for each part; None: not.

        Returns:
            The function, or None if there is none for these options: then `decode_step` is called.
        """
        return None

    def finish_decode(self, state: State) -> State:
        """Return a decode loop's state in the form that every other method takes."""
        return state

    @abstractmethod
    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> State:
        """Return an empty state; `like` is an empty tensor with the device and dtype of the inputs."""

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        """Compute bidirectional attention; hidden slots of k, v and gates are zero."""

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        """Compute causal attention from an empty state, without the state after it."""
        state = self.new_state(q.shape[0], device=q.device, dtype=q.dtype)
        return self._extend(state, q, k, v, gates=gates, lengths=lengths)[0]

    def _attend_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None,
        causal: bool,
        key_mask: Tensor | None,
        packing: Packing | None,
        key_packing: Packing | None,
    ) -> Tensor | None:
        """Compute attention of a masked or packed batch as it is, or return None to have it zero-filled and padded."""
        return None

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
        """Begin causal attention of T ≥ 1 tokens as `defer` does; by default everything waits for the past."""

        def finish(past: State) -> Tensor:
            past = past if torch.is_grad_enabled() else past.clone()
            return self._extend(past, q, k, v, gates=gates, lengths=lengths)[0]

        return finish

    def _defer_bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None
    ) -> Callable[[State, State], Tensor]:
        """Begin bidirectional attention of T ≥ 1 tokens that are part of a sequence, for `sums_directions`.

        Returns:
            A function of the states of the tokens before, and of those after, written from the last to the first.
        """
        raise NotImplementedError(f"{type(self).__name__} has sums_directions but not _defer_bidirectional")

    @abstractmethod
    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """Compute causal attention of T ≥ 1 new tokens. Row b holds lengths[b] tokens from slot 0, then zeros."""

    @abstractmethod
    def _write(self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None) -> State:
        """Write tokens as `_extend` does. Use dataclasses.replace on the state, which keeps its start."""

    @abstractmethod
    def _read(self, state: State, q: Tensor) -> Tensor:
        """Compute attention of queries at the last position; rows of length 0 give zeros."""

    def _take_visible(self, key_mask: Tensor, *xs: Tensor | None) -> tuple[Any, ...]:
        """Return the number of tokens (B,) to write of each row, and xs with them from slot 0 on, then zeros."""
        if not self.supports_cross:
            PaddedSpan.of(key_mask)
        return close_holes(key_mask, *xs)

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        """Write a token and read with its query, in place; rotary is applied to q and k."""
        if dispatch.recording is not None:
            dispatch.record("decode step", dispatch.TORCH, self._why_no_decode_kernel(state, q, k, v))
        assert rotary is None or isinstance(rotary, CosSin)
        q, k = apply_rotary(rotary, q, k)
        after = self._write(state, k, v, gates=gates, lengths=None)
        return copy_out(self._read(after, q), out), _copy_into(state, after)

    def _why_no_decode_kernel(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Return why no kernel computes a decode step, for `longspan.explain`."""
        return f"{type(self).__name__} has no kernel for it"

    def _forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        causal: bool,
        key_mask: Tensor | None,
        packing: Packing | None,
        key_packing: Packing | None,
    ) -> Tensor:
        options: dict[str, Any] = {"key_mask": key_mask, "packing": packing, "key_packing": key_packing}
        out = self._attend_ragged(q, k, v, gates=gates, causal=causal, **options)
        if out is not None:
            return out
        if packing is not None and key_packing is not None:
            outputs = []
            for bucket in (buckets := length_buckets(packing, key_packing)):
                (qb,), (kb, vb, gb) = bucket.take(q), bucket.take(k, v, gates, of=1)
                if causal:
                    outputs.append(self._attend_causal(qb, kb, vb, gates=gb, lengths=bucket.lengths[0]))
                else:
                    outputs.append(self._attend(qb, kb, vb, gates=gb, key_mask=bucket.visible(1)))
            return repack(packing, buckets, outputs, q.shape[1])
        assert key_mask is not None
        if not causal:
            k, v, gates = zero_fill(~key_mask, k, v, gates)
            return self._attend(q, k, v, gates=gates, key_mask=key_mask)
        span = PaddedSpan.of(key_mask)
        q, k, v, gates = span.roll(q, k, v, gates)
        return span.unroll(self._attend_causal(q, k, v, gates=gates, lengths=span.lengths))

    def _extend_resolved(
        self,
        state: State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        key_mask: Tensor | None,
        packing: Packing | None,
    ) -> tuple[Tensor, State]:
        if 0 in q.shape[:2]:
            return self._empty_output(q, k, v), state
        if packing is not None:
            outputs = []
            for bucket in (buckets := length_buckets(packing)):
                qb, kb, vb, gb = bucket.take(q, k, v, gates)
                held = state.select(bucket.sequences)
                out, held = self._extend(held, qb, kb, vb, gates=gb, lengths=bucket.lengths[0])
                outputs.append(out)
                state = state.put(bucket.sequences, held)
            return repack(packing, buckets, outputs, q.shape[1]), state
        if key_mask is None:
            return self._extend(state, q, k, v, gates=gates, lengths=None)
        span = PaddedSpan.of(key_mask)
        q, k, v, gates = span.roll(q, k, v, gates)
        out, state = self._extend(state, q, k, v, gates=gates, lengths=span.lengths)
        return span.unroll(out), state

    def _empty_output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return zeros (B, T, H, E) for no queries or no keys, with autograd history."""
        out = q[..., :1].masked_fill(torch.ones_like(q[..., :1], dtype=torch.bool), 0)
        return out + (k.sum() + v.sum()) + q.new_zeros(self.value_dim)

    def _fits(self, q: Any, k: Any, v: Any, causal: bool) -> bool:
        """Whether q, k and v, with no other arguments, are valid: one test in place of all checks, which take time."""
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)) or q.ndim != 4:
            return False
        B, T, heads, dim = q.shape
        return (
            0 not in (B, T)
            and (heads, dim) == (self.num_heads, self.head_dim)
            and k.shape == (B, T, self.num_kv_heads, dim)
            and v.shape == (B, T, self.num_kv_heads, self.value_dim)
            and q.dtype == k.dtype == v.dtype
            and q.device == k.device == v.device
            and q.is_floating_point()
            and not self.num_gates
            and (self.supports_causal or not causal)
        )

    def _check_inputs(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        key_mask: Tensor | None,
        packing: Packing | None,
    ) -> None:
        _check_tensor("k", k, "(B, S, Hkv, D)", self.num_kv_heads, self.head_dim)
        _check_tensor("v", v, "(B, S, Hkv, E)", self.num_kv_heads, self.value_dim)
        if gates is not None or self.num_gates:
            self._check_gates(gates, k)
        first = k if q is None else q
        if gates is not None or not (first.dtype == k.dtype == v.dtype and first.device == k.device == v.device):
            _check_alike(first, {"k": k, "v": v, "gates": gates})
        if k.shape[:2] != v.shape[:2]:
            raise ValueError(
                f"k and v must agree in batch and length, got k {tuple(k.shape[:2])} and v {tuple(v.shape[:2])}"
            )
        if first.shape[0] != k.shape[0]:
            raise ValueError(f"q and k must have one batch size, got {first.shape[0]} and {k.shape[0]}")
        if key_mask is not None:
            check_key_mask(key_mask, k, packing, "(B, S)")
        if packing is not None:
            check_packing(packing, first)

    def _check_query(self, q: Tensor) -> None:
        _check_tensor("q", q, "(B, T, H, D)", self.num_heads, self.head_dim)

    def _check_gates(self, gates: Tensor | None, k: Tensor) -> None:
        name, shape = type(self).__name__, (*k.shape[:3], self.num_gates)
        if not self.num_gates:
            raise ValueError(f"{name} takes no gates (its num_gates is 0), got {_describe(gates)}: leave gates out")
        if gates is None:
            raise ValueError(
                f"{name} needs gates of shape (B, S, Hkv, G) = {shape}, raw numbers to which it applies its own "
                "activation: pass gates=, or use longspan.Attention, which projects them from its input"
            )
        if not isinstance(gates, Tensor) or not gates.is_floating_point() or gates.shape != shape:
            got = f"{tuple(gates.shape)} {gates.dtype}" if isinstance(gates, Tensor) else _describe(gates)
            raise ValueError(f"gates must be floating point of shape (B, S, Hkv, G) = {shape}, got {got}")

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
                f"{type(self).__name__} as built here has a decay, a delta rule, a window, a blind spot or a phantom "
                f"key, and cannot attend to another row (got {q.shape[1]} queries and {k.shape[1]} keys); use linear, "
                "performer, linformer or softmax without these"
            )


def start_positions(batch_size: int, start: Tensor | int | None, device: torch.device) -> Tensor | None:
    """Return the first positions (B,) of an empty state, given one for all rows or (B,); None, for 0, stays None."""
    if start is None:
        return None
    allowed = f"start must be a position, or integers (B,) = ({batch_size},), got"
    if not isinstance(start, Tensor | int | list | tuple | torch.SymInt):
        raise ValueError(f"{allowed} {_describe(start)}")
    if isinstance(start, Tensor) and (start.is_floating_point() or start.is_complex()):
        raise ValueError(f"{allowed} {tuple(start.shape)} {start.dtype}")
    start = torch.as_tensor(start, dtype=torch.int64, device=device)
    if start.ndim > 1 or (start.ndim == 1 and len(start) != batch_size):
        raise ValueError(f"{allowed} {tuple(start.shape)}")
    return start.expand(batch_size).clone()


def _copy_into(state: State, after: State) -> State:
    """Return `after`, but for its length, in the tensors of `state` where they have the same shape."""
    kept: dict[str, Any] = {}
    for item in fields(state):
        old, new = getattr(state, item.name), getattr(after, item.name)
        if isinstance(old, tuple):
            kept[item.name] = tuple(_copy_into(*parts) for parts in zip(old, new, strict=True))
        elif item.name == "length":
            kept[item.name] = old
        elif isinstance(old, Tensor) and old.shape == new.shape and old.dtype == new.dtype:
            kept[item.name] = old if old.data_ptr() == new.data_ptr() else old.copy_(new)
    return replace(after, **kept)


def _batch_size(x: Tensor, packing: Packing | None) -> int:
    return x.shape[0] if packing is None else len(packing.offsets) - 1


def _put_rows(x: Tensor, where: Tensor, rows: Tensor) -> Tensor:
    if (x.shape[1:], x.dtype) != (rows.shape[1:], rows.dtype):
        raise ValueError(
            f"rows must come from a state like this one: it holds {tuple(x.shape[1:])} {x.dtype} where they hold "
            f"{tuple(rows.shape[1:])} {rows.dtype}"
        )
    return x.index_copy(0, where, rows)


def _as_index(index: Index, length: Tensor, *, repeats: bool = True) -> Tensor:
    """Return the rows (n,) int64 ≥ 0 that an index names, in a state with these lengths (B,)."""
    size, device = len(length), length.device
    if isinstance(index, slice):
        return torch.arange(size, device=device)[index]
    try:
        where = torch.as_tensor(index, device=device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"index must be row numbers (n,), a bool mask ({size},) or a slice, got {index!r}") from None
    where = where.long() if where.numel() == 0 and not isinstance(index, Tensor) else where
    if where.ndim != 1 or where.is_floating_point() or where.is_complex():
        raise ValueError(
            f"index must be row numbers (n,), a bool mask ({size},) or a slice, got {where.dtype} {tuple(where.shape)}"
        )
    if where.dtype == torch.bool:
        if len(where) != size:
            raise ValueError(f"a mask of rows must be ({size},), got {tuple(where.shape)}")
        return where.nonzero()[:, 0]
    where = where.long()
    where = torch.where(where < 0, where + size, where)
    if torch.compiler.is_compiling() or device.type != "cpu" or not len(where):
        return where  # Reading the values would synchronize with the device.
    if int(where.min()) < 0 or int(where.max()) >= size:
        raise ValueError(f"index names a row outside a state of {size} rows, got {index}")
    if not repeats and len(where.unique()) < len(where):
        raise ValueError(f"index names a row twice, got {index}: put needs each row at most once")
    return where


def _check_tensor(name: str, x: Tensor, shape: str, heads: int, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {_describe(x)}")
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


def _check_alike(first: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, x in others.items():
        if x is None:
            continue
        if x.dtype != first.dtype:
            raise ValueError(f"q, k, v and gates must have one dtype, got {name} of {x.dtype} beside {first.dtype}")
        if x.device != first.device:
            raise ValueError(f"q, k, v and gates must be on one device, got {name} on {x.device} beside {first.device}")


def _check_key_packing(packing: Packing | None, key_packing: Packing, k: Tensor) -> None:
    if packing is None:
        raise ValueError("key_packing needs packing for the queries too")
    check_packing(key_packing, k, "key_packing")
    if len(key_packing.offsets) != len(packing.offsets):
        raise ValueError(
            f"packing and key_packing must hold as many sequences, got {len(packing.offsets) - 1} "
            f"and {len(key_packing.offsets) - 1}"
        )


def _describe(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
