"""Attention inside windows: each block of queries sees its own block of keys and those beside it."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from longspan.mindspore.padding import filled
from longspan.mindspore.precision import exact, on_cpu
from longspan.mindspore.rotary import Rotary


class LocalAttention(nn.Cell):
    """Softmax over nearby keys: O(n·W) time and memory. q, k, v: (..., n, D) -> (..., n, D).

    The sequence lies in blocks of window_size. A query sees its own block, look_backward blocks before it and
    look_forward after it (1 unless causal); with exact_windowsize the window_size · look_backward keys before itself
    and window_size · look_forward after it, wherever it stands in its block; itself always.
    shared_qk: queries and keys share a space: keys are normalized, a token sees itself only if it sees nothing else.
    autopad: any length; padding is never seen. Without it the length must be a multiple of window_size.
    dim: of a head, for rotary positions (or rel_pos_emb_config, whose first entry is that); without it there are none.
    use_xpos: positions whose products fade with distance, after xpos_scale_base tokens (half the window by default).
    scale: of the scores, 1/√D by default. dropout: on the weights, in training only.

    Scores and sums are float32 for float16 inputs, unless `to_float` makes every operation float16; the output has the
    dtype of v.
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
        """mask: (batch, n), True = keep; batch divides the leading dimensions, whose first it is. input_mask: the same.

        attn_bias: (heads, W, (look_backward + 1 + look_forward) · W), a query's place in its block by a key's place in
        the blocks it sees. window_size: another than the one trained with; needs use_xpos.
        """
        if mask is None:
            mask = input_mask
        if window_size is not None and not self.use_xpos:
            raise ValueError(f"window_size={window_size} differs from call to call only with use_xpos=True")
        W = self.window_size if window_size is None else window_size
        shape, n = q.shape, q.shape[-2]
        if n % W != 0 and not self.autopad:
            raise ValueError(f"the length ({n}) must be a multiple of window_size ({W}): pad, or set autopad=True")
        wide = ms.float64 if q.dtype == ms.float64 else ms.float32
        dtype = v.dtype
        q = q.reshape((-1, n, q.shape[-1])).astype(wide)
        k = k.reshape((-1, n, k.shape[-1])).astype(wide)
        v = v.reshape((-1, n, v.shape[-1])).astype(wide)
        B = q.shape[0]
        if mask is not None:
            mask = self._rows(mask, B, n)
            q, k, v = filled(q, mask), filled(k, mask), filled(v, mask)
        q, k = self._scaled(q), self._key(k)

        blocks = -(-n // W)
        back, ahead = self.look_backward, self.look_forward
        Kw = (back + 1 + ahead) * W
        q = _padded(q, 0, blocks * W - n).reshape((B, blocks, W, -1))
        k = _around(_padded(k, back * W, (blocks + ahead) * W - n), blocks, W, Kw)  # (B, blocks, Kw, D)
        v = _around(_padded(v, back * W, (blocks + ahead) * W - n), blocks, W, Kw)
        place = ops.arange(Kw)  # of a key in the blocks its query sees; that query's is back · W + its place
        if self.rel_pos is not None:
            # Only differences count: from the middle, so that xPos's scales stay small. A query has the angles of the
            # last block it sees: where it looks ahead, weights trained with local-attention expect that.
            q = self.rel_pos(q, place[Kw - W :] - Kw // 2, 1.0)
            k = self.rel_pos(k, place - Kw // 2, -1.0)
        scores = ops.matmul(q, k.swapaxes(-1, -2))  # (B, blocks, W, Kw)
        if attn_bias is not None:
            scores = self._biased(scores, attn_bias)

        i = (ops.arange(W) + back * W).expand_dims(-1)
        j = ops.arange(blocks).reshape((-1, 1, 1)) * W + place - back * W
        seen = ops.logical_and(self._sees(i - place, W), ops.logical_and(j >= 0, j < n))  # (blocks, W, Kw)
        if mask is not None:
            keep = _around(
                _padded(mask.expand_dims(-1).astype(ms.int32), back * W, (blocks + ahead) * W - n), blocks, W, Kw
            )
            seen = ops.logical_and(seen, keep.swapaxes(-1, -2) > 0)  # (B, blocks, W, Kw)
        out = self._weighed(scores, self._alone(seen, i == place), v, mask is not None)
        out = out.reshape((B, blocks * W, -1))[:, :n]
        return out.reshape((*shape[:-1], out.shape[-1])).astype(dtype)

    def first_cache(self, k: Tensor, v: Tensor) -> Tensor:
        """The last R = (look_backward + 1) · W keys and values, (2, batch, heads, R, D): position p in slot p mod R."""
        size, n = (self.look_backward + 1) * self.window_size, k.shape[-2]
        kv = ops.stack((self._key(k), v))
        if n <= size:
            return ops.cat((kv, ops.zeros((*kv.shape[:-2], size - n, kv.shape[-1]), kv.dtype)), -2)
        oldest = n % size  # the slot of the oldest token kept
        kv = kv[..., n - size :, :]
        return ops.cat((kv[..., size - oldest :, :], kv[..., : size - oldest, :]), -2)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, length: Tensor, attn_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One token, q, k, v: (batch, heads, 1, D), after the `length` tokens of a cache -> its output, the cache."""
        W, back, size = self.window_size, self.look_backward, kv.shape[-2]
        slot = ops.arange(size)
        new = ops.stack((self._key(k), v)).astype(kv.dtype)
        kv = ops.where((slot == length % size).expand_dims(-1), new, kv)
        apart = (length - slot) % size  # how far back each slot's token stands
        position = length - apart
        if self.exact_windowsize:
            near = apart <= back * W
        else:
            near = length // W - position // W <= back
        seen = ops.logical_and(near, position >= 0).expand_dims(0)  # (1, R)

        wide = ms.float64 if q.dtype == ms.float64 else ms.float32
        q, keys, values = self._scaled(q.astype(wide)), kv[0].astype(wide), kv[1].astype(wide)
        if self.rel_pos is not None:
            q, keys = self.rel_pos(q, ops.zeros(1), 1.0), self.rel_pos(keys, -apart, -1.0)
        scores = ops.matmul(q, keys.swapaxes(-1, -2))  # (batch, heads, 1, R)
        if attn_bias is not None:
            row = ops.gather(attn_bias, length % W, 1)  # (heads, Kw)
            column = position - (length // W - back) * W
            scores = scores + ops.gather(row, ops.clamp(column, 0, row.shape[1] - 1), 1).expand_dims(1)
        out = self._weighed(scores, self._alone(seen, (apart == 0).expand_dims(0)), values, False)
        return out.astype(v.dtype), kv

    def _rows(self, mask: Tensor, rows: int, n: int) -> Tensor:
        """mask (batch, n) -> (rows, n): each row of it for as many rows as it has heads."""
        batch, length = mask.shape
        if rows % batch != 0 or length != n:
            raise ValueError(
                f"mask must be (batch, {n}), True = keep, batch dividing the {rows} rows of q; got {mask.shape}"
            )
        mask = mask.astype(ms.bool_).expand_dims(1)
        return mask.broadcast_to((batch, rows // batch, n)).reshape((rows, n))

    def _scaled(self, q: Tensor) -> Tensor:
        return q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def _key(self, k: Tensor) -> Tensor:
        return normalized(k) if self.shared_qk else k

    def _sees(self, apart: Tensor, W: int) -> Tensor:
        """Whether a query sees a key in its blocks, from how far back the key stands."""
        seen = apart >= 0 if self.causal else apart == apart
        if self.exact_windowsize:
            near = ops.logical_and(apart <= self.look_backward * W, apart >= -self.look_forward * W)
            seen = ops.logical_and(seen, near)
        return seen

    def _alone(self, seen: Tensor, itself: Tensor) -> Tensor:
        """`seen` (..., keys), where shared_qk hides a token from itself unless it sees nothing else."""
        if not self.shared_qk:
            return seen
        others = ops.logical_and(seen, ops.logical_not(itself))
        lonely = ops.logical_not(others.any(-1, True))
        return ops.logical_or(others, ops.logical_and(seen, lonely))

    def _biased(self, scores: Tensor, bias: Tensor) -> Tensor:
        """scores (batch · heads, blocks, W, Kw) with bias (heads, W, Kw)."""
        B, blocks, W, Kw = scores.shape
        heads = bias.shape[0]
        if B % heads != 0 or bias.shape[1] not in (1, W) or bias.shape[2] not in (1, Kw):
            raise ValueError(
                f"attn_bias must be (heads, {W}, {Kw}), a query's place in its block by a key's place in the blocks it "
                f"sees, with heads a divisor of {B}; got {bias.shape}"
            )
        scores = scores.reshape((-1, heads, blocks, W, Kw)) + bias.astype(scores.dtype).expand_dims(1)
        return scores.reshape((B, blocks, W, Kw))

    def _weighed(self, scores: Tensor, seen: Tensor, v: Tensor, blind: bool) -> Tensor:
        """blind: whether a query may see nothing; it would get a mean of what is hidden, and gets zeros."""
        # Weights of hidden keys are exactly 0; what makes them so is finite, so that a row of them alone is too.
        hidden = -3.0e4 if scores.dtype == ms.float16 else -1.0e30
        scores = scores + ops.logical_not(seen).astype(scores.dtype) * hidden
        weights = ops.softmax(exact(scores, self.on_cpu), -1).astype(scores.dtype)
        out = ops.matmul(self.dropout(weights), v)
        return ops.where(seen.any(-1, True), out, ops.zeros_like(out)) if blind else out


def normalized(x: Tensor) -> Tensor:
    """x / |x| over the last axis."""
    return x * inverse_length(x)


def inverse_length(x: Tensor) -> Tensor:
    """1 / |x| over the last axis, which stays; summed in float32 at least, with a finite gradient where x is zero."""
    wide = x.astype(ms.float32) if x.dtype in (ms.float16, ms.bfloat16) else x
    root = x.shape[-1] ** -0.5
    part = wide * root  # so that the sum of squares is a mean, which fits into float16 too
    square = (part * part).sum(-1, keepdims=True)
    smallest = 1e-7 if square.dtype == ms.float16 else 1e-24
    return (ops.rsqrt(ops.maximum(square, smallest)) * root).astype(x.dtype)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """x (B, n, D) with zeros around it along n."""
    parts = [x]
    if before > 0:
        parts = [ops.zeros((x.shape[0], before, x.shape[2]), x.dtype), *parts]
    if after > 0:
        parts = [*parts, ops.zeros((x.shape[0], after, x.shape[2]), x.dtype)]
    return ops.cat(parts, 1) if len(parts) > 1 else x


def _around(x: Tensor, blocks: int, W: int, Kw: int) -> Tensor:
    """x (B, (back + blocks + ahead) · W, D) -> (B, blocks, Kw, D): each block with those beside it."""
    x = x.reshape((x.shape[0], -1, W, x.shape[2]))
    return ops.cat([x[:, s : s + blocks] for s in range(Kw // W)], 2)
