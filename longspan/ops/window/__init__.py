"""Attention inside a window, tile by tile: no n × n matrix, and no rule about lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import once_differentiable, refuse_double_backward
from longspan.ops.rotary import angles, rotate, xpos_scale
from longspan.ops.softmax import attend


class Window(NamedTuple):
    """Which keys a query sees, by position.

    size: 0 for an exact window of `back` keys before a query and `ahead` after it; otherwise the size of blocks, of
    which a query sees its own whole, `back` before it and `ahead` after it. causal: nothing after the query itself.
    alone: a query sees itself only if it sees nothing else (shared queries and keys).
    """

    size: int
    back: int
    ahead: int
    causal: bool
    alone: bool

    @property
    def reach(self) -> tuple[int, int]:
        """How far back and ahead a query that stands anywhere in its block may see."""
        back, ahead = self.back, self.ahead
        if self.size:
            back, ahead = (back + 1) * self.size - 1, (ahead + 1) * self.size - 1
        return back, 0 if self.causal else ahead

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether a query at position i sees a key at position j, both ≥ 0; broadcast."""
        if self.size:
            apart = i // self.size - j // self.size
            seen = (apart <= self.back) & (apart >= -self.ahead)
        else:
            seen = (i - j <= self.back) & (j - i <= self.ahead)
        return seen & (j <= i) if self.causal else seen

    def restrict(self, seen: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """`seen` (..., keys), without the query itself where `alone` hides it."""
        if not self.alone:
            return seen
        others = seen & (i != j)
        return others | (seen & ~others.any(-1, keepdim=True))


LARGEST_TILE = 512  # so that masks stay small beside keys and values

Bias = Callable[[Tensor, Tensor], Tensor]  # positions i (..., T, 1) and j (..., 1, S) -> (H, ..., T, S)


def windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    key_mask: Tensor | None = None,
    start: Tensor | None = None,
    bounds: Tensor | None = None,
    bias: Bias | None = None,
    xpos: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q: (B, T, H, D), k: (B, S, Hkv, D), v: (B, S, Hkv, E) -> (B, T, H, E); the queries belong to the last T keys.

    start: (B,) the position of the first key, where rows differ; keys at negative positions are hidden. None is 0.
    bounds: (2, T) int32, where the sequence of each token of a packed row begins and ends; for the kernels alone.
    xpos: the scale base of xPos, measured within each tile: absolute scales would overflow.
    """
    if dispatch.why_not_triton_window(q, k, v, bias=bias is not None, xpos=xpos is not None) is None:
        seed = torch.randint(2**31 - 1, (1,), device=q.device) if dropout else None
        scale = q.shape[3] ** -0.5 if scale is None else scale
        given = q, k, v, key_mask, start, bounds, seed, *window, scale, dropout
        return _local_attention(*given)[0] if torch.compiler.is_compiling() else _LocalAttention.apply(*given)  # type: ignore[no-untyped-call]
    assert bounds is None
    B, T, H, D = q.shape
    S, Hkv = k.shape[1:3]
    offset = S - T
    reach = [min(far, S) for far in window.reach]
    aligned = window.size and start is None and window.size < T
    if aligned:
        tile, before, after = window.size, window.back, 0 if window.causal else window.ahead
    else:
        # As wide as the window: each key is copied twice, or thrice where queries look ahead, and not more.
        tile = min(T, min(-(-max(*reach, 1) // 16) * 16, LARGEST_TILE))
        before, after = -(-reach[0] // tile), -(-reach[1] // tile)
    n = -(-T // tile)
    queries = (F.pad(q, (0, 0, 0, 0, 0, n * tile - T)) if n * tile > T else q).unflatten(1, (n, tile))
    pads = (0, 0, 0, 0, before * tile - offset, offset + (n + after) * tile - S)
    keys, values = (_neighbors(F.pad(x, pads).unflatten(1, (-1, tile)), n) for x in (k, v))
    if xpos is not None:
        place = torch.arange(keys.shape[2], device=q.device) - keys.shape[2] // 2
        queries = turn(queries, place[before * tile : (before + 1) * tile], xpos)
        keys = turn(keys, place, -xpos)
    i = offset + torch.arange(n * tile, device=q.device).view(n, tile, 1)
    j = offset + tile * (torch.arange(n, device=q.device)[:, None, None] - before)
    j = j + torch.arange(keys.shape[2], device=q.device)  # (n, 1, Kw)

    def piece(tiles: slice, uniform: bool) -> Tensor:
        """Attention of some tiles; `uniform` ones lie inside the sequence, share one mask, and see something."""
        one = slice(tiles.start, tiles.start + 1) if uniform else tiles
        qi, kj = i[one], j[one]
        first = 0 if start is None else start[:, None, None, None]
        seen = window.sees(qi + first, kj + first)
        if not uniform:
            seen = seen & (kj >= 0) & (kj < S) & (kj + first >= 0)
            if key_mask is not None:
                seen = seen & key_mask[:, kj.clamp(0, S - 1)]
        seen = window.restrict(seen, qi, kj)  # ([B,] tiles, tile, Kw)
        added = None if bias is None else bias(qi + first, kj + first).movedim(0, -3)  # ([B,] tiles, H, tile, Kw)
        how: dict[str, Any] = {"bias": added, "blind": not uniform, "scale": scale, "dropout": dropout}
        return _attend(queries[:, tiles], keys[:, tiles], values[:, tiles], seen, **how)

    # Tiles at either end see past the sequence; those in between are all alike.
    tail = 0 if window.causal else after + 1
    if start is not None or key_mask is not None or n <= before + tail + 1 or (window.size and not aligned):
        out = piece(slice(0, n), uniform=False)
    else:
        ends = [piece(slice(0, before), uniform=False)] if before else []
        ends.append(piece(slice(before, n - tail), uniform=True))
        out = torch.cat(ends + ([piece(slice(n - tail, n), uniform=False)] if tail else []), 1)
    return out.flatten(1, 2)[:, :T]


def table_bias(table: Tensor, back: int) -> Bias:
    """A table (H, P, K) read by a query's place in its block of P, and a key's place from `back` blocks before it."""
    size, last = table.shape[1], table.shape[2] - 1
    return lambda i, j: table[:, i % size, (j - (i // size - back) * size).clamp(0, last)]


def turn(x: Tensor, position: Tensor, scale_base: float) -> Tensor:
    """x: (..., L, H, D) rotated to position (..., L) with xPos's scale; for keys, scale_base is negative."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    angle = angles(position, x.shape[-1], 10000.0, dtype)[..., None, :]
    scale = xpos_scale(position, x.shape[-1], scale_base, dtype)[..., None, :]
    return rotate(x, angle.cos() * scale, angle.sin() * scale)


def _neighbors(tiles: Tensor, n: int) -> Tensor:
    """(B, n + extra, tile, H, D) -> (B, n, (extra + 1) · tile, H, D): each tile with those beside it."""
    return torch.cat([tiles[:, s : s + n] for s in range(tiles.shape[1] - n + 1)], 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, bias: Tensor | None, **how: Any) -> Tensor:
    """q: (B, n, tile, H, D), k, v: (B, n, Kw, Hkv, ·), seen: ([B,] n or 1, tile, Kw) -> (B, n, tile, H, E)."""
    B, n, tile, H, _ = q.shape
    Hkv = k.shape[3]
    # Query heads that share a key head become rows of one matrix.
    q = q.transpose(2, 3).reshape(B * n, Hkv, -1, q.shape[4])
    k, v = (x.transpose(2, 3).flatten(0, 1) for x in (k, v))
    seen = seen.repeat(*[1] * (seen.ndim - 2), H // Hkv, 1)[..., None, :, :]
    seen = seen.flatten(0, 1) if seen.ndim == 5 else seen.expand(n, -1, -1, -1).repeat(B, 1, 1, 1)
    if bias is not None:
        bias = bias.unflatten(-3, (Hkv, -1)).flatten(-3, -2)
        bias = bias.flatten(0, 1) if bias.ndim == 5 else bias.expand(n, -1, -1, -1).repeat(B, 1, 1, 1)
    out = attend(q, k, v, seen, bias=bias, **how)
    return out.reshape(B, n, H, tile, -1).transpose(2, 3)


@torch.library.custom_op("longspan::local_attention", mutates_args=())
def _local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    start: Tensor | None,
    bounds: Tensor | None,
    seed: Tensor | None,
    size: int,
    back: int,
    ahead: int,
    causal: bool,
    alone: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithms of its sums of weights. seed: (1,) int64, which weights dropout hides."""
    return dispatch.local_kernels().forward(
        q, k, v, key_mask, start, bounds, seed, size, back, ahead, causal, alone, scale, dropout
    )


@_local_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _D = q.shape
    parts = 2 if q.dtype == torch.float32 else 1
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, H, T, parts, dtype=torch.float32)


@torch.library.custom_op("longspan::local_attention_backward", mutates_args=())
def _local_attention_backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    start: Tensor | None,
    bounds: Tensor | None,
    seed: Tensor | None,
    size: int,
    back: int,
    ahead: int,
    causal: bool,
    alone: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.local_kernels().backward(
        d_out, out, lse, q, k, v, key_mask, start, bounds, seed, size, back, ahead, causal, alone, scale, dropout
    )


@_local_attention_backward.register_fake
def _(d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_local_attention_backward.register_autograd(refuse_double_backward)


class _LocalAttention(torch.autograd.Function):
    """The same without a compiler, which has no use for what registering costs at every call."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        out, lse = dispatch.local_kernels().forward(*given)
        _save(ctx, given, (out, lse))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gradients = dispatch.local_kernels().backward(d_out, *ctx.saved_tensors, *ctx.window)
        return *gradients, *[None] * 11


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.window = inputs[7:]


def _differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    d_q, d_k, d_v = _local_attention_backward(d_out, *ctx.saved_tensors, *ctx.window)
    return d_q, d_k, d_v, *[None] * 11


_local_attention.register_autograd(_differentiate, setup_context=_save)
