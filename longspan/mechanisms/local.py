"""Local attention: softmax over a window, exact or by blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import Packing, take_tokens
from longspan.ops import window as window_op
from longspan.ops.decode import (
    CosSin,
    CurrentToken,
    DecodeFunction,
    RotaryKind,
    StepInputs,
    apply_rotary,
    copy_out,
    why_not_triton,
    window_decode_step,
)
from longspan.ops.softmax import attend
from longspan.ops.window import Window, table_bias, window_attention, xpos_rotate
from longspan.protocol import Mechanism, Rotation, State


@dataclass
class LocalState(State):
    """The last tokens in a ring buffer: position p in slot p modulo its size."""

    k: Tensor  # (B, Hkv, ring, D)
    v: Tensor  # (B, Hkv, ring, E)

    def positions(self) -> Tensor:
        """Return the position of the token in each slot: (B, ring), before the start where there is none."""
        ring, last = self.k.shape[2], self.end[:, None] - 1
        return last - (last - torch.arange(ring, device=last.device)) % ring

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, ring, Hkv, ·) from the oldest to the latest, empty slots first."""
        B, Hkv, ring, _ = self.k.shape
        index = (self.end[:, None] + torch.arange(ring, device=self.k.device)) % ring
        index = index.repeat_interleave(Hkv, 0)
        k, v = (take_tokens(x.flatten(0, 1), index).unflatten(0, (B, Hkv)).transpose(1, 2) for x in (self.k, self.v))
        return k, v

    def _merge(self, later: LocalState) -> LocalState:
        newer = (later.positions() >= self.end[:, None])[:, None, :, None]
        return replace(self, k=torch.where(newer, later.k, self.k), v=torch.where(newer, later.v, self.v))


class LocalAttention(Mechanism):
    """Softmax over nearby keys: O(n·W) time, a state of the last W keys and values (or of the last blocks).

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        window: W keys including the query's own (bidirectional: |i − j| < W), or (back, ahead), the number of keys on
            either side of it. With look_back or look_ahead: the block size.
        look_back: Number of blocks before its own that a query sees; it sees all of its own block.
        look_ahead: Number of blocks after its own; causal attention never looks ahead.
        shared_qk: Whether queries and keys share a space: keys are normalized, and a token sees itself only if it sees
            nothing else.
        bias: Added to the scores: a module that maps distances i − j (n,) to (H, n), or a table
            (H, P, (back + 1 + ahead)·P) indexed by a query's place in its block of P tokens and a key's place in that
            and the neighboring blocks; P is the block size, or any size with an exact window.
        xpos: Scale base of xPos, rotary embedding whose products decay with distance, so that the window may be widened
            after training (`resize`); W / 2 is usual.
        query_offset: Number of positions by which queries are rotated further, by xPos or by rotary embedding without
            interleaving. Only older checkpoints need another value than 0.
        scale: Of the scores, 1/√D unless given.
        dropout: On the weights, in training.
    """

    state_type = LocalState
    supports_cross = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        window: int | tuple[int, int] = 256,
        look_back: int | None = None,
        look_ahead: int | None = None,
        shared_qk: bool = False,
        bias: nn.Module | Tensor | None = None,
        xpos: float | None = None,
        query_offset: int = 0,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.shared_qk, self.scale, self.dropout = shared_qk, scale, dropout
        self.heads_alike = bias is None
        if xpos is not None and (xpos <= 0 or head_dim % 2):
            raise ValueError(f"xpos needs a positive scale base and an even head_dim, got {xpos} and {head_dim}")
        self.xpos = xpos
        if query_offset and head_dim % 2:
            raise ValueError(f"query_offset rotates pairs of features and needs an even head_dim, got {head_dim}")
        self.query_offset = query_offset
        self.window = _window(window, look_back, look_ahead, shared_qk)
        self.bias: nn.Module | Tensor | None
        if bias is not None and not isinstance(bias, nn.Module | Tensor):
            raise ValueError(f"bias must be a module of distances, a tensor or None, got {bias!r}")
        if isinstance(bias, Tensor):
            size = self.window.block_size or (bias.shape[1] if bias.ndim == 3 else 1)
            back, ahead = self.window.blocks(size)
            shape = num_heads, size, (back + 1 + ahead) * size
            if bias.shape != shape:
                raise ValueError(
                    f"a bias table has shape (H, P, (back + 1 + ahead)·P), here {shape}, with P the size of the "
                    f"window's blocks or, where it is exact, any, got {tuple(bias.shape)}"
                )
            if not isinstance(bias, nn.Parameter):
                self.register_buffer("bias", bias)
            else:
                self.bias = bias
        else:
            self.bias = bias

    def resize(self, window: int) -> None:
        """Set another window of the same kind (exact, or blocks of this size); earlier states do not fit it."""
        if isinstance(self.bias, Tensor):
            raise ValueError("a window with a bias table cannot be resized: the table has its size")
        back, ahead = (self.window.back, self.window.ahead) if self.window.block_size else (None, None)
        self.window = _window(window, back, ahead, self.shared_qk)

    def check_state(self, state: State, batch_size: int, dtype: torch.dtype | None = None) -> None:
        """Raise ValueError unless the mechanism can continue from this state, which is as wide as its window."""
        super().check_state(state, batch_size, dtype)
        assert isinstance(state, LocalState)
        if state.k.shape[2] != self._ring:
            raise ValueError(
                f"this state is of a window that reaches {state.k.shape[2] - 1} tokens back, the mechanism's reaches "
                f"{self._ring - 1}: start from new_state()"
            )

    @property
    def reach(self) -> tuple[int, int]:
        """The largest distances at which a bidirectional query sees keys before and after it."""
        return self.window.reach()

    @property
    def position_period(self) -> int:
        """The size of the blocks of the window, or of a bias table."""
        return self.bias.shape[1] if isinstance(self.bias, Tensor) else self.window.block_size or 1

    @property
    def _ring(self) -> int:
        return self.window.reach()[0] + 1

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> LocalState:
        dims = self.head_dim, self.value_dim
        k, v = (like.new_zeros(batch_size, self.num_kv_heads, self._ring, dim) for dim in dims)
        return LocalState.empty(batch_size, start, like.device, k=k, v=v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        return self._windowed(q, self._key(k), v, self.window, key_mask=key_mask)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        return self._windowed(q, self._key(k), v, self.window._replace(causal=True))

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
        if packing is None or self.bias is not None or not self._fused(q, k, v, packed=True):
            return None
        bounds = packing.bounds(q.shape[1])
        return self._windowed(q, self._key(k), v, self.window._replace(causal=causal), bounds=bounds)

    def _why_no_decode_kernel(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> str:
        options = {
            "dropout": self._dropout > 0,
            "query_offset": self.query_offset,
            "a bias": self.bias is not None,
            "xpos": self.xpos is not None,
        }
        assert isinstance(state, LocalState)
        given = ", ".join(name for name, used in options.items() if used)
        why = given or window_op.why_not_triton(q, k, v) or why_not_triton(q, k, v, state.k, state.v)
        return why or super()._why_no_decode_kernel(state, q, k, v)

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        assert isinstance(state, LocalState)
        assert rotary is None or isinstance(rotary, CosSin)
        special = self._dropout or self.query_offset or self.bias is not None or self.xpos is not None
        if special or not self._fused(q, k, v) or why_not_triton(q, k, v, state.k, state.v) is not None:
            if special or self.window.block_size or self.window.shared_qk or q.device.type != "cpu":
                return super()._decode_step(state, q, k, v, gates, rotary, out)
            q, k = apply_rotary(rotary, q, k)
            return copy_out(self._step_exact(state, q, k, v), out), state
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        inputs, ring = StepInputs(q, k, v, rotary, out), (state.k, state.v)
        return window_decode_step(inputs, ring, self.window, length=state.length, scale=scale), state

    def _step_exact(self, state: LocalState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write a token into its slot and attend over the filled slots: an exact window is the whole ring buffer."""
        keys, values, seen = state.k, state.v, None
        B, Hkv, ring, _ = keys.shape
        if B == 1:
            position = int(state.length)
            keys.select(2, position % ring).copy_(k.squeeze(1))
            values.select(2, position % ring).copy_(v.squeeze(1))
            if position < ring - 1:
                keys, values = keys[:, :, : position + 1], values[:, :, : position + 1]
        else:
            slot = (state.length % ring)[:, None, None, None]
            for held, x in ((keys, k), (values, v)):
                held.scatter_(2, slot.expand(-1, Hkv, 1, held.shape[3]), x.transpose(1, 2).to(held.dtype))
            if bool((state.length < ring - 1).any()):
                seen = (torch.arange(ring) <= state.length[:, None])[:, None, None]
        grouped, queries = self.num_heads > self.num_kv_heads, q.transpose(1, 2).to(keys.dtype)
        out = attend(queries, keys, values, seen, blind=False, grouped=grouped, scale=self.scale)
        return out.transpose(1, 2).to(q.dtype)

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU; see `Mechanism.decode_function`."""
        assert isinstance(state, LocalState)
        special = self._dropout or self.query_offset or self.bias is not None or self.xpos is not None
        if special or self.window.block_size or self.window.shared_qk:
            return None
        keys, values, ring, kind, scale = state.k, state.v, state.k.shape[2], rotary[0], self.scale
        grouped, heads = self.num_heads > self.num_kv_heads, self.num_heads

        def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, token: CurrentToken) -> Tensor:
            q, k = token.rotate(kind, q, k)
            slot, seen_keys, seen_values = token.position % ring, keys, values
            keys.select(2, slot).copy_(k)
            values.select(2, slot).copy_(v)
            if token.position < ring - 1:
                seen_keys, seen_values = keys.narrow(2, 0, slot + 1), values.narrow(2, 0, slot + 1)
            out = attend(q.unsqueeze(2), seen_keys, seen_values, None, blind=False, grouped=grouped, scale=scale)
            return out.view(1, heads, -1)

        return step

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, *, packed: bool = False) -> bool:
        """Whether the kernels take these tensors."""
        return window_op.why_not_triton(q, k, v, self.window, xpos=self.xpos, packed=packed) is None

    def _defer(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None, start: Tensor | None
    ) -> Callable[[State], Tensor]:
        ring = self._ring
        if q.shape[1] <= ring:
            return super()._defer(q, k, v, gates=gates, lengths=lengths, start=start)
        # Only the first queries see the past.
        rest = self._windowed(q, self._key(k), v, self.window._replace(causal=True), start=start)[:, ring:]
        few = None if lengths is None else lengths.clamp(max=ring)
        finish = super()._defer(q[:, :ring], k[:, :ring], v[:, :ring], gates=gates, lengths=few, start=start)
        return lambda past: torch.cat([finish(past), rest], 1)

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, LocalState]:
        assert isinstance(state, LocalState)
        ring, given = self._ring, q.dtype
        q, k, v = (x.to(state.k.dtype) for x in (q, k, v))
        recent_k, recent_v = state.ordered()
        keys, values = torch.cat([recent_k, self._key(k)], 1), torch.cat([recent_v, v], 1)
        key_mask = None
        if state.start is not None:  # Slots before the start are empty, though their positions are not negative.
            slot = torch.arange(keys.shape[1], device=q.device)
            key_mask = slot >= ring - state.length[:, None]
        window = self.window._replace(causal=True)
        out = self._windowed(q, keys, values, window, key_mask=key_mask, start=state.end - ring)
        return out.to(given), self._write(state, k, v, gates=None, lengths=lengths)

    def _write(self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None) -> LocalState:
        assert isinstance(state, LocalState)
        k, v = k.to(state.k.dtype), v.to(state.v.dtype)
        T, xs = k.shape[1], (self._key(k).transpose(1, 2), v.transpose(1, 2))
        after = replace(state, length=state.length + (T if lengths is None else lengths))
        if T == 1 and lengths is None:
            slot = (state.end % self._ring)[:, None, None, None]
            write = torch.scatter if torch.is_grad_enabled() else Tensor.scatter_
            k, v = (
                write(old, 2, slot.expand(-1, x.shape[1], 1, x.shape[3]), x)
                for old, x in zip((state.k, state.v), xs, strict=True)
            )
            return replace(after, k=k, v=v)
        new = after.positions() - state.end[:, None]  # (B, ring): which new token each slot now holds
        index = new.clamp(0, T - 1)
        k, v = (
            torch.where((new >= 0)[:, None, :, None], take_tokens(x.transpose(1, 2), index).transpose(1, 2), old)
            for old, x in zip((state.k, state.v), xs, strict=True)
        )
        return replace(after, k=k, v=v)

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, LocalState)
        i = (state.end - 1)[:, None, None]  # (B, 1, 1)
        j = state.positions()[:, None]  # (B, 1, ring)
        first = 0 if state.start is None else state.start[:, None, None]
        window = self.window._replace(causal=True)
        seen = window.hide_self(window.contains(i, j) & (j >= first), i, j)
        table = self._bias_table(q.device)
        added = None if table is None else table_bias(table, window, i, j).movedim(0, 1)  # (B, H, 1, ring)
        given, k, q = q.dtype, state.k, self._offset_queries(q.to(state.k.dtype))
        if self.xpos is not None:
            q = xpos_rotate(q, torch.zeros_like(i[:, :, 0]), self.xpos)
            k = xpos_rotate(k.transpose(1, 2), (j - i)[:, 0].clamp(min=-self._ring), -self.xpos).transpose(1, 2)
        out = attend(
            q.transpose(1, 2),
            k,
            state.v,
            seen[:, None],
            bias=added,
            grouped=self.num_heads > self.num_kv_heads,
            scale=self.scale,
            dropout=self._dropout,
        )
        return out.transpose(1, 2).to(given)

    def _key(self, k: Tensor) -> Tensor:
        if not self.shared_qk:
            return k
        # In float16 the length of a long key overflows, and the epsilon for that of a zero key vanishes.
        return F.normalize(k.float(), dim=-1).half() if k.dtype == torch.float16 else F.normalize(k, dim=-1)

    def _offset_queries(self, q: Tensor) -> Tensor:
        if not self.query_offset:
            return q
        offset = torch.tensor([self.query_offset], device=q.device)
        return xpos_rotate(q, offset, math.inf if self.xpos is None else self.xpos)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _windowed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        *,
        key_mask: Tensor | None = None,
        start: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        return window_attention(
            self._offset_queries(q),
            k,
            v,
            window,
            key_mask=key_mask,
            start=start,
            bounds=bounds,
            bias=self._bias_table(q.device),
            xpos=self.xpos,
            scale=self.scale,
            dropout=self._dropout,
        )

    def _bias_table(self, device: torch.device) -> Tensor | None:
        """Return the bias as a table (H, P, K); one of distances has P = 1."""
        if self.bias is None or isinstance(self.bias, Tensor):
            return self.bias
        back, ahead = self._ring - 1, self.window._replace(causal=False).reach()[1]
        by_distance: Tensor = self.bias(torch.arange(-ahead, back + 1, device=device))
        return by_distance.flip(1)[:, None]


def _window(window: int | tuple[int, int], look_back: int | None, look_ahead: int | None, shared_qk: bool) -> Window:
    if isinstance(window, int):
        if window < 1:
            raise ValueError(f"window counts the query's own key and must be at least 1, got {window}")
        if look_back is None and look_ahead is None:
            return Window(0, window - 1, window - 1, False, shared_qk)
        back, ahead = look_back or 0, look_ahead or 0
        if min(back, ahead) < 0:
            raise ValueError(f"look_back and look_ahead must not be negative, got {look_back} and {look_ahead}")
        return Window(window, back, ahead, False, shared_qk)
    if not isinstance(window, Sequence) or len(window) != 2 or min(window) < 0:
        raise ValueError(f"window must be a number of keys or (back, ahead), neither negative, got {window}")
    if look_back is not None or look_ahead is not None:
        raise ValueError(f"look_back and look_ahead go with a block size: window must be one number, got {window}")
    return Window(0, *window, False, shared_qk)
