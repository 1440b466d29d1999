"""Local attention: each block of queries attends to its own block of keys and adjacent ones."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from longspan.mindspore.padding import zero_fill
from longspan.mindspore.precision import cast_for_exp, on_cpu
from longspan.mindspore.rotary import Rotary


class LocalAttention(nn.Cell):
    """Softmax attention over nearby keys, in O(n·W) time and memory: q, k, v (..., n, D) -> (..., n, D).

    Scores and sums are float32 for float16 inputs, unless `to_float` makes every operation float16; the output has the
    dtype of v.

    Args:
        window_size: The length W of a block.
        causal: Attend to earlier tokens only.
        look_backward: The number of blocks before its own that a query attends to.
        look_forward: The number of blocks after its own; by default 1 unless causal.
        dropout: Of the attention weights, in training.
        shared_qk: Queries and keys are the same: keys are normalized, and a token attends to itself only if there is no
            other key.
        rel_pos_emb_config: A tuple whose first entry is an alias of dim.
        dim: The width of a head, for rotary positions; without it there are none.
        autopad: Accept any length; otherwise it must be a multiple of window_size.
        exact_windowsize: A query attends to window_size · look_backward keys before it, window_size · look_forward
            after it, and itself, wherever it is in its block.
        scale: Of the scores, by default 1/√D.
        use_rotary_pos_emb: Use rotary positions.
        use_xpos: Use xPos, whose products decay with distance.
        xpos_scale_base: The distance of this decay, by default half the window.
    """

    def __init__(
        self,
        window_size: int,
        causal: bool = False,
        look_backward: int = 1,
        look_forward: int | None = None,
        dropout: float = 0.0,
        shared_qk: bool = False,
        rel_pos_emb_config: tuple[int, ...] | None = None,
        dim: int | None = None,
        autopad: bool = False,
        exact_windowsize: bool = False,
        scale: float | None = None,
        use_rotary_pos_emb: bool = True,
        use_xpos: bool = False,
        xpos_scale_base: float | None = None,
    ) -> None:
        super().__init__()
        if look_forward is None:
            look_forward = 0 if causal else 1
        if window_size < 1 or look_backward < 0 or look_forward < 0:
            raise ValueError(
                "window_size must be at least 1, look_backward and look_forward at least 0, "
                f"got {window_size}, {look_backward} and {look_forward}"
            )
        if causal and look_forward > 0:
            raise ValueError(f"causal attention cannot look forward: look_forward must be 0, got {look_forward}")
        self.window_size, self.causal = window_size, causal
        self.look_backward, self.look_forward = look_backward, look_forward
        self.shared_qk, self.autopad, self.exact_windowsize = shared_qk, autopad, exact_windowsize
        self.scale, self.use_xpos = scale, use_xpos
        self.dropout = nn.Dropout(p=dropout)
        self.on_cpu = on_cpu()
        if rel_pos_emb_config is not None:
            dim = rel_pos_emb_config[0]
        self.rel_pos = None
        if use_rotary_pos_emb and dim is not None:
            base = window_size // 2 if xpos_scale_base is None else xpos_scale_base
            self.rel_pos = Rotary(dim, scale_base=base if use_xpos else None)
        elif use_xpos:
            raise ValueError("use_xpos needs rotary positions: give dim and leave use_rotary_pos_emb=True")

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        input_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        window_size: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries (..., n, D).
            k: Keys (..., n, D).
            v: Values (..., n, D).
            mask: (batch, n), True for tokens; batch divides the product of the leading dimensions.
            input_mask: An alias of mask.
            attn_bias: (heads, W, (look_backward + 1 + look_forward) · W), indexed by the position of a query in its
                block and that of a key in the blocks that the query attends to.
            window_size: Another window size for this call; needs use_xpos.
        """
        if mask is None:
            mask = input_mask
        if window_size is not None and not self.use_xpos:
            raise ValueError(f"another window_size needs use_xpos=True, got {window_size}")
        W = self.window_size if window_size is None else window_size
        shape, n = q.shape, q.shape[-2]
        if n % W != 0 and not self.autopad:
            raise ValueError(f"the length ({n}) must be a multiple of window_size ({W}): pad it, or set autopad=True")
        if k.shape[-2] != n or v.shape[-2] != n:
            raise ValueError(f"q, k and v must have the same length, got {n}, {k.shape[-2]} and {v.shape[-2]}")
        wide = ms.float64 if q.dtype == ms.float64 else ms.float32
        dtype = v.dtype
        q = q.reshape((-1, n, q.shape[-1])).astype(wide)
        k = k.reshape((-1, n, k.shape[-1])).astype(wide)
        v = v.reshape((-1, n, v.shape[-1])).astype(wide)
        B = q.shape[0]
        if mask is not None:
            mask = self._repeat_mask(mask, B, n)
            q, k, v = zero_fill(q, mask), zero_fill(k, mask), zero_fill(v, mask)
        q, k = self._scaled(q), self._key(k)

        blocks = -(-n // W)
        back, ahead = self.look_backward, self.look_forward
        Kw = (back + 1 + ahead) * W
        q = _pad(q, 0, blocks * W - n).reshape((B, blocks, W, -1))
        k = _adjacent_blocks(_pad(k, back * W, (blocks + ahead) * W - n), blocks, W, Kw)  # (B, blocks, Kw, D)
        v = _adjacent_blocks(_pad(v, back * W, (blocks + ahead) * W - n), blocks, W, Kw)
        # The position of a key in the Kw keys of its query; that of the query is back · W plus its index in the block.
        position = ops.arange(Kw)
        if self.rel_pos is not None:
            # Only differences matter; relative to the middle the scales of xPos stay small. The original gives a query
            # the angle of the last block it attends to, and checkpoints depend on it.
            q = self.rel_pos(q, position[Kw - W :] - Kw // 2, 1.0)
            k = self.rel_pos(k, position - Kw // 2, -1.0)
        scores = ops.matmul(q, k.swapaxes(-1, -2))  # (B, blocks, W, Kw)
        if attn_bias is not None:
            scores = self._add_bias(scores, attn_bias)

        i = (ops.arange(W) + back * W).expand_dims(-1)
        j = ops.arange(blocks).reshape((-1, 1, 1)) * W + position - back * W
        visible = ops.logical_and(self._in_window(i - position, W), ops.logical_and(j >= 0, j < n))  # (blocks, W, Kw)
        if mask is not None:
            keep = _adjacent_blocks(
                _pad(mask.expand_dims(-1).astype(ms.int32), back * W, (blocks + ahead) * W - n), blocks, W, Kw
            )
            visible = ops.logical_and(visible, keep.swapaxes(-1, -2) > 0)  # (B, blocks, W, Kw)
        out = self._attend(scores, self._hide_self(visible, i == position), v, mask is not None)
        out = out.reshape((B, blocks * W, -1))[:, :n]
        return out.reshape((*shape[:-1], out.shape[-1])).astype(dtype)

    def first_cache(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the last R = (look_backward + 1) · W keys and values (2, B, H, R, D), position p in slot p mod R."""
        size, n = (self.look_backward + 1) * self.window_size, k.shape[-2]
        kv = ops.stack((self._key(k), v))
        if n <= size:
            return ops.cat((kv, ops.zeros((*kv.shape[:-2], size - n, kv.shape[-1]), kv.dtype)), -2)
        oldest = n % size  # the slot of the oldest token
        kv = kv[..., n - size :, :]
        return ops.cat((kv[..., size - oldest :, :], kv[..., : size - oldest, :]), -2)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, length: Tensor, attn_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from one token, q, k, v (batch, heads, 1, D), to `length` cached ones; return output and cache."""
        W, back, size = self.window_size, self.look_backward, kv.shape[-2]
        slot = ops.arange(size)
        new = ops.stack((self._key(k), v)).astype(kv.dtype)
        kv = ops.where((slot == length % size).expand_dims(-1), new, kv)
        distance = (length - slot) % size  # the distance of each slot's token
        position = length - distance
        if self.exact_windowsize:
            in_window = distance <= back * W
        else:
            in_window = length // W - position // W <= back
        visible = ops.logical_and(in_window, position >= 0).expand_dims(0)  # (1, R)

        wide = ms.float64 if q.dtype == ms.float64 else ms.float32
        q, keys, values = self._scaled(q.astype(wide)), kv[0].astype(wide), kv[1].astype(wide)
        if self.rel_pos is not None:
            q, keys = self.rel_pos(q, ops.zeros(1), 1.0), self.rel_pos(keys, -distance, -1.0)
        scores = ops.matmul(q, keys.swapaxes(-1, -2))  # (batch, heads, 1, R)
        if attn_bias is not None:
            row = ops.gather(attn_bias, length % W, 1)  # (heads, Kw)
            column = position - (length // W - back) * W
            scores = scores + ops.gather(row, ops.clamp(column, 0, row.shape[1] - 1), 1).expand_dims(1)
        out = self._attend(scores, self._hide_self(visible, (distance == 0).expand_dims(0)), values, False)
        return out.astype(v.dtype), kv

    def _repeat_mask(self, mask: Tensor, sequences: int, n: int) -> Tensor:
        """Repeat mask (batch, n) for the heads of each batch element: (sequences, n)."""
        batch, length = mask.shape
        if sequences % batch != 0 or length != n:
            raise ValueError(
                f"mask must be (batch, {n}), True for tokens, where batch divides {sequences}, got {mask.shape}"
            )
        mask = mask.astype(ms.bool_).expand_dims(1)
        return mask.broadcast_to((batch, sequences // batch, n)).reshape((sequences, n))

    def _scaled(self, q: Tensor) -> Tensor:
        return q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def _key(self, k: Tensor) -> Tensor:
        return normalize(k) if self.shared_qk else k

    def _in_window(self, distance: Tensor, W: int) -> Tensor:
        """Return whether a query attends to a key of its blocks at a distance, positive for keys before it."""
        visible = distance >= 0 if self.causal else distance == distance
        if self.exact_windowsize:
            near = ops.logical_and(distance <= self.look_backward * W, distance >= -self.look_forward * W)
            visible = ops.logical_and(visible, near)
        return visible

    def _hide_self(self, visible: Tensor, itself: Tensor) -> Tensor:
        """With shared_qk, hide a token from itself unless no other key is visible. visible: (..., keys)."""
        if not self.shared_qk:
            return visible
        others = ops.logical_and(visible, ops.logical_not(itself))
        no_others = ops.logical_not(others.any(-1, True))
        return ops.logical_or(others, ops.logical_and(visible, no_others))

    def _add_bias(self, scores: Tensor, bias: Tensor) -> Tensor:
        """Add bias (heads, W, Kw) to scores (batch · heads, blocks, W, Kw)."""
        B, blocks, W, Kw = scores.shape
        heads = bias.shape[0]
        if B % heads != 0 or bias.shape[1] not in (1, W) or bias.shape[2] not in (1, Kw):
            raise ValueError(f"attn_bias must be (heads, {W}, {Kw}), where heads divides {B}, got {bias.shape}")
        scores = scores.reshape((-1, heads, blocks, W, Kw)) + bias.astype(scores.dtype).expand_dims(1)
        return scores.reshape((B, blocks, W, Kw))

    def _attend(self, scores: Tensor, visible: Tensor, v: Tensor, masked: bool) -> Tensor:
        """Return softmax(scores) v over visible keys; zeros for a query without any, which a mask can cause."""
        # The offset of hidden keys is finite, so that a query with hidden keys only has finite weights.
        hidden = -3.0e4 if scores.dtype == ms.float16 else -1.0e30
        scores = scores + ops.logical_not(visible).astype(scores.dtype) * hidden
        weights = ops.softmax(cast_for_exp(scores, self.on_cpu), -1).astype(scores.dtype)
        out = ops.matmul(self.dropout(weights), v)
        return ops.where(visible.any(-1, True), out, ops.zeros_like(out)) if masked else out


def normalize(x: Tensor) -> Tensor:
    """Normalize the last dimension: x / |x|."""
    return x * inverse_length(x)


def inverse_length(x: Tensor) -> Tensor:
    """Return 1 / |x| over the last dimension, (..., 1), summed in float32, with a finite gradient at x = 0."""
    wide = x.astype(ms.float32) if x.dtype in (ms.float16, ms.bfloat16) else x
    root = x.shape[-1] ** -0.5
    part = wide * root  # the sum of squares is then a mean, which does not overflow in float16
    square = (part * part).sum(-1, keepdims=True)
    smallest = 1e-7 if square.dtype == ms.float16 else 1e-24
    return (ops.rsqrt(ops.maximum(square, smallest)) * root).astype(x.dtype)


def _pad(x: Tensor, before: int, after: int) -> Tensor:
    """Pad x (B, n, D) with zeros along n."""
    parts = [x]
    if before > 0:
        parts = [ops.zeros((x.shape[0], before, x.shape[2]), x.dtype), *parts]
    if after > 0:
        parts = [*parts, ops.zeros((x.shape[0], after, x.shape[2]), x.dtype)]
    return ops.cat(parts, 1) if len(parts) > 1 else x


def _adjacent_blocks(x: Tensor, blocks: int, W: int, Kw: int) -> Tensor:
    """x (B, (back + blocks + ahead) · W, D) -> (B, blocks, Kw, D): each block with adjacent ones."""
    x = x.reshape((x.shape[0], -1, W, x.shape[2]))
    return ops.cat([x[:, s : s + blocks] for s in range(Kw // W)], 2)
