"""Windowed attention in eager PyTorch: tiles of queries with the tiles of keys around them, for any device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.rotary import angles, rotate, xpos_scale
from longspan.ops.softmax import attend

BLIND = -1e30  # log-sum-exp of no scores: finite, so that its gradients are
MAX_TILE = 512  # keeps masks small compared to keys and values
XPOS_TILE = 32  # largest tile of xPos in units of its scale base, whose scales inside a tile are then at most e^20


class Window(NamedTuple):
    """Which keys a query sees, by position.

    Attributes:
        block_size: 0 for an exact window of `back` keys before a query and `ahead` after it. Otherwise the size of the
            blocks of which a query sees its own, `back` before it and `ahead` after it.
        back: Keys or blocks before the query.
        ahead: Keys or blocks after the query.
        causal: Hide keys after the query.
        shared_qk: Shared queries and keys: a query sees itself only if it sees nothing else.
    """

    block_size: int
    back: int
    ahead: int
    causal: bool
    shared_qk: bool

    def reach(self) -> tuple[int, int]:
        """Return the largest distances at which a query may see keys before and after it."""
        back, ahead = self.back, self.ahead
        if self.block_size:
            back, ahead = (back + 1) * self.block_size - 1, (ahead + 1) * self.block_size - 1
        return back, 0 if self.causal else ahead

    def blocks(self, size: int) -> tuple[int, int]:
        """Return the number of blocks of `size` before a query's own, and after it, with keys that it may see."""
        if self.block_size == size:
            return self.back, self.ahead
        back, ahead = self._replace(causal=False).reach()
        return -(-back // size), -(-ahead // size)

    def contains(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the window of a query at position i ≥ 0 contains position j ≥ 0; broadcast."""
        size = self.block_size or 1
        distance = i // size - j // size
        inside = (distance <= self.back) & (distance >= -self.ahead)
        return inside & (j <= i) if self.causal else inside

    def hide_self(self, visible: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return `visible` (..., keys), without the query itself where `shared_qk` hides it."""
        if not self.shared_qk:
            return visible
        others = visible & (i != j)
        return others | (visible & ~others.any(-1, keepdim=True))


def table_bias(table: Tensor, window: Window, i: Tensor, j: Tensor) -> Tensor:
    """Return the bias of queries at positions i (..., T, 1) on keys at j (..., 1, S): (H, ..., T, S).

    table: (H, P, K), by a query's place in its block of P, and by a key's place from the first block that it may see.
    """
    size, last = table.shape[1], table.shape[2] - 1
    return table[:, i % size, (j - (i // size - window.blocks(size)[0]) * size).clamp(0, last)]


def xpos_rotate(x: Tensor, position: Tensor, scale_base: float) -> Tensor:
    """Rotate x (..., L, H, D) to positions (..., L) with the scale of xPos; for keys, scale_base is negative."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = xpos_cos_sin(position, x.shape[-1], scale_base, dtype)
    return rotate(x, cos[..., None, :], sin[..., None, :])


def xpos_cos_sin(position: Tensor, dim: int, scale_base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (..., dim / 2) of rotations to positions, times the scale of xPos."""
    angle = angles(position, dim, 10000.0, dtype)
    scale = xpos_scale(position, dim, scale_base, dtype)
    return angle.cos() * scale, angle.sin() * scale


def tiled_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    key_mask: Tensor | None,
    start: Tensor | None,
    bias: Tensor | None,
    xpos: float | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Compute `ops.window.window_attention` tile by tile."""
    T, S = q.shape[1], k.shape[1]
    offset, given = S - T, q.dtype
    if xpos is not None and given == torch.float16:
        q, k, v = q.float(), k.float(), v.float()  # Scales exceed the range of float16.
    largest = T if xpos is None else max(1, min(T, int(XPOS_TILE * xpos)))
    aligned = bool(window.block_size) and start is None and window.block_size < T and window.block_size <= largest
    tile, before, after = _tiling(window, largest, S, aligned)
    n = -(-T // tile)
    queries = (F.pad(q, (0, 0, 0, 0, 0, n * tile - T)) if n * tile > T else q).unflatten(1, (n, tile))
    pads = (0, 0, 0, 0, before * tile - offset, offset + (n + after) * tile - S)
    keys, values = (_neighbors(F.pad(x, pads).unflatten(1, (-1, tile)), n) for x in (k, v))
    if xpos is not None:
        # Relative to the middle of the queries, so that only keys that a causal query does not see have large scales.
        position = torch.arange(keys.shape[2], device=q.device) - before * tile - tile // 2
        queries = xpos_rotate(queries, position[before * tile : (before + 1) * tile], xpos)
        keys = xpos_rotate(keys, position, -xpos)
    i = offset + torch.arange(n * tile, device=q.device).view(n, tile, 1)
    j = offset + tile * (torch.arange(n, device=q.device)[:, None, None] - before)
    j = j + torch.arange(keys.shape[2], device=q.device)  # (n, 1, Kw)

    def attend_tiles(tiles: slice, interior: bool) -> Tensor:
        """Attend in some tiles. Interior tiles see no key outside the sequence, so that one mask fits all."""
        one = slice(tiles.start, tiles.start + 1) if interior else tiles
        qi, kj = i[one], j[one]
        first = 0 if start is None else start[:, None, None, None]
        visible = window.contains(qi + first, kj + first)
        if not interior:
            visible = visible & (kj >= 0) & (kj < S) & (kj + first >= 0)
            if key_mask is not None:
                visible = visible & key_mask[:, kj.clamp(0, S - 1)]
        visible = window.hide_self(visible, qi, kj)  # ([B,] tiles, tile, Kw)
        added = None
        if bias is not None:
            added = table_bias(bias, window, qi + first, kj + first).movedim(0, -3)  # ([B,] tiles, H, tile, Kw)
        options: dict[str, Any] = {"bias": added, "blind": not interior, "scale": scale, "dropout": dropout}
        return _attend(queries[:, tiles], keys[:, tiles], values[:, tiles], visible, **options)

    tail = 0 if window.causal else after + 1
    # Tiles differ if the blocks of the window or of the bias begin at other places in each of them.
    differ = (window.block_size and not aligned) or (bias is not None and tile % bias.shape[1] != 0)
    if start is not None or key_mask is not None or n <= before + tail + 1 or differ:
        out = attend_tiles(slice(0, n), interior=False)
    else:
        parts = [attend_tiles(slice(0, before), interior=False)] if before else []
        parts.append(attend_tiles(slice(before, n - tail), interior=True))
        out = torch.cat(parts + ([attend_tiles(slice(n - tail, n), interior=False)] if tail else []), 1)
    return out.flatten(1, 2)[:, :T].to(given)


def tiled_window_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, window: Window, *, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `ops.window.window_attention_with_lse` tile by tile."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    (T, H), (S, Hkv), offset = q.shape[1:3], k.shape[1:3], k.shape[1] - q.shape[1]
    tile, before, after = _tiling(window, T, S, aligned=False)
    n = -(-T // tile)
    # Query heads that share a key/value head become rows of one matrix.
    queries = F.pad(q.to(dtype) * scale, (0, 0, 0, 0, 0, n * tile - T)).unflatten(1, (n, tile)).unflatten(3, (Hkv, -1))
    queries = queries.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)  # (B, n, Hkv, G·tile, D)
    pads = (0, 0, 0, 0, before * tile - offset, offset + (n + after) * tile - S)
    keys, values = (
        _neighbors(F.pad(x.to(dtype), pads).unflatten(1, (-1, tile)), n).transpose(2, 3) for x in (k, v)
    )  # (B, n, Hkv, Kw, ·)
    i = offset + torch.arange(n * tile, device=q.device).view(n, tile, 1)
    j = offset + tile * (torch.arange(n, device=q.device)[:, None, None] - before)
    j = j + torch.arange(keys.shape[3], device=q.device)  # (n, 1, Kw)
    visible = window.contains(i, j) & (j >= 0) & (j < S)
    visible = visible if key_mask is None else visible & key_mask[:, j.clamp(0, S - 1)]
    hidden = ~visible.reshape(-1, n, 1, 1, *visible.shape[-2:])  # ([B,] n, Hkv, G, tile, Kw)
    # Added, not filled, and one softmax instead of exp: both are many times faster on a CPU. Limited, so that a hidden
    # score that overflows stays hidden.
    limit = torch.finfo(dtype).max / 4
    bias = torch.zeros(hidden.shape, dtype=dtype, device=q.device).masked_fill_(hidden, -2 * limit)
    scores = (queries @ keys.mT).unflatten(3, (H // Hkv, tile)).clamp(max=limit) + bias
    weights = scores.softmax(-1)
    largest = scores.detach().argmax(-1, keepdim=True)
    lse = (scores.gather(-1, largest) - weights.gather(-1, largest).log()).permute(0, 1, 4, 2, 3, 5)
    out = (weights.flatten(3, 4) @ values).unflatten(3, (H // Hkv, tile)).permute(0, 1, 4, 2, 3, 5)
    if key_mask is not None:  # Without a mask a query sees itself at least.
        blind = hidden.all(-1, keepdim=True).permute(0, 1, 4, 2, 3, 5)
        out, lse = out.masked_fill(blind, 0), lse.masked_fill(blind, BLIND)
    return out.flatten(3, 4).flatten(1, 2)[:, :T], lse.flatten(3).flatten(1, 2)[:, :T]


def _tiling(window: Window, largest: int, S: int, aligned: bool) -> tuple[int, int, int]:
    """Return the tile size, at most `largest`, and how many tiles of keys before and after its own a tile of queries
    reads.
    """
    if aligned:
        return window.block_size, window.back, 0 if window.causal else window.ahead
    # A tile as wide as the window copies each key twice, or three times where queries see keys after them.
    back, ahead = (min(distance, S) for distance in window.reach())
    tile = min(largest, min(-(-max(back, ahead, 1) // 16) * 16, MAX_TILE))
    return tile, -(-back // tile), -(-ahead // tile)


def _neighbors(tiles: Tensor, n: int) -> Tensor:
    """(B, n + extra, tile, H, D) -> (B, n, (extra + 1) · tile, H, D): each tile with those beside it."""
    return torch.cat([tiles[:, s : s + n] for s in range(tiles.shape[1] - n + 1)], 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, bias: Tensor | None, **options: Any) -> Tensor:
    """q: (B, n, tile, H, D), k, v: (B, n, Kw, Hkv, ·), visible: ([B,] n or 1, tile, Kw) -> (B, n, tile, H, E)."""
    B, n, tile, H, _ = q.shape
    Hkv = k.shape[3]
    # Query heads that share a key/value head become rows of one matrix.
    q = q.transpose(2, 3).reshape(B * n, Hkv, -1, q.shape[4])
    k, v = (x.transpose(2, 3).flatten(0, 1) for x in (k, v))

    def per_tile(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if x.ndim == 5 else x.expand(n, -1, -1, -1).repeat(B, 1, 1, 1)

    visible = per_tile(visible.repeat(*[1] * (visible.ndim - 2), H // Hkv, 1)[..., None, :, :])
    bias = None if bias is None else per_tile(bias.unflatten(-3, (Hkv, -1)).flatten(-3, -2))
    return attend(q, k, v, visible, bias=bias, **options).reshape(B, n, H, tile, -1).transpose(2, 3)
