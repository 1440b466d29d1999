"""Multi-head local attention, the feed-forward layer, and the dynamic position bias."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from longspan.mindspore.local_attention import LocalAttention, normalize
from longspan.mindspore.padding import check_mask, first_token, rotate_left, zero_fill
from longspan.mindspore.precision import cast_for_exp, on_cpu


class LocalMHA(nn.Cell):
    """Multi-head local attention, (B, n, dim) -> (B, n, dim), for any length.

    Other arguments are those of LocalAttention.

    Args:
        exact_windowsize: By default True.
        prenorm: Apply a layer norm to the input.
        qk_rmsnorm: Normalize queries and keys, with learned scales, and multiply scores by qk_scale.
        gate_values_per_head: Multiply each head's output by sigmoid(Linear(x)).
        dropout: Of the attention weights, in training.
    """

    def __init__(
        self,
        *,
        dim: int,
        window_size: int,
        dim_head: int = 64,
        heads: int = 8,
        dropout: float = 0.0,
        causal: bool = False,
        prenorm: bool = False,
        qk_rmsnorm: bool = False,
        qk_scale: float = 8,
        use_xpos: bool = False,
        xpos_scale_base: float | None = None,
        exact_windowsize: bool | None = None,
        gate_values_per_head: bool = False,
        look_backward: int = 1,
        look_forward: int | None = None,
        shared_qk: bool = False,
        use_rotary_pos_emb: bool = True,
    ) -> None:
        super().__init__()
        inner = dim_head * heads
        self.heads, self.dim_head, self.qk_rmsnorm, self.causal = heads, dim_head, qk_rmsnorm, causal
        self.norm = nn.LayerNorm((dim,), epsilon=1e-5) if prenorm else None
        self.to_qkv = nn.Dense(dim, inner * 3, has_bias=False)
        if qk_rmsnorm:
            self.q_scale = Parameter(Tensor(np.ones(dim_head, np.float32)))
            self.k_scale = Parameter(Tensor(np.ones(dim_head, np.float32)))
        self.attn_fn = LocalAttention(
            window_size,
            causal=causal,
            look_backward=look_backward,
            look_forward=look_forward,
            dropout=dropout,
            shared_qk=shared_qk,
            dim=dim_head,
            autopad=True,
            exact_windowsize=True if exact_windowsize is None else exact_windowsize,
            scale=qk_scale if qk_rmsnorm else None,
            use_rotary_pos_emb=use_rotary_pos_emb,
            use_xpos=use_xpos,
            xpos_scale_base=xpos_scale_base,
        )
        self.to_v_gate = nn.SequentialCell(nn.Dense(dim, heads)) if gate_values_per_head else None
        self.to_out = nn.Dense(inner, dim, has_bias=False)

    def construct(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Attend to x (B, n, dim) and the tokens in the cache.

        Args:
            x: The input; with a cache, the one token that follows it.
            mask: (B, n), True for tokens; causal attention counts positions from the first True of a sequence.
            attn_bias: (heads, W, Kw); see LocalAttention.
            cache: The cache that an earlier call returned.
            return_cache: Whether to return the cache too: keys and values, of a constant size, and the number of
                tokens, or None unless causal.
        """
        if mask is None:
            return self.attend(x, None, attn_bias, cache, return_cache)
        if cache is not None or (return_cache and self.causal):
            raise ValueError("a cache cannot be combined with a mask: omit mask, or cache and return_cache")
        mask = check_mask(mask, x)
        if not self.causal:
            return self.attend(x, mask, attn_bias, None, return_cache)
        start = first_token(mask)
        return rotate_left(self.attend(rotate_left(x, start), rotate_left(mask, start), attn_bias), -start)

    def attend(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Attend as `construct`, with positions counted from slot 0 even if it is masked."""
        if mask is not None:
            x = zero_fill(x, mask)  # first, since gradients of the weights sum over all tokens
        if self.norm is not None:
            x = self.norm(x)
        batch, n, _ = x.shape
        qkv = self.to_qkv(x).reshape((batch, n, 3, self.heads, self.dim_head))
        qkv = qkv.transpose((2, 0, 3, 1, 4))  # (3, B, heads, n, D)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if self.qk_rmsnorm:
            q = normalize(q) * self.q_scale.astype(q.dtype)
            k = normalize(k) * self.k_scale.astype(k.dtype)
        new = None
        if cache is not None:
            if n != 1:
                raise ValueError(f"with a cache, x must be the one token that follows it, got {n} tokens")
            kv, length = cache
            out, kv = self.attn_fn.step(q, k, v, kv, length, attn_bias)
            new = (kv, length + 1)
        else:
            out = self.attn_fn(q, k, v, mask=mask, attn_bias=attn_bias)
            if return_cache and self.causal:
                new = (self.attn_fn.first_cache(k, v), ops.full((), n, dtype=ms.int64))
        if self.to_v_gate is not None:
            gates = ops.sigmoid(cast_for_exp(self.to_v_gate(x), self.attn_fn.on_cpu)).astype(out.dtype)  # (B, n, heads)
            out = out * gates.swapaxes(1, 2).expand_dims(-1)
        out = self.to_out(out.swapaxes(1, 2).reshape((batch, n, -1)))
        return (out, new) if return_cache else out


class DynamicPositionBias(nn.Cell):
    """Learned bias (heads, i, j) of the distances between the last i of j tokens and all j tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.mlp = nn.SequentialCell(nn.Dense(1, dim), nn.SiLU(), nn.Dense(dim, dim), nn.SiLU(), nn.Dense(dim, heads))

    def construct(self, i: int, j: int) -> Tensor:
        """Return the bias of i queries and j keys."""
        if j < i:
            raise ValueError(f"the number of keys, j, must be at least that of queries, i, got i={i} and j={j}")
        by_distance = self.mlp(ops.arange(j).astype("float32").expand_dims(-1))  # (j, heads)
        distance = ops.abs((ops.arange(i) + (j - i)).expand_dims(-1) - ops.arange(j))
        return ops.gather(by_distance, distance, 0).transpose((2, 0, 1))


class GEGLU(nn.Cell):
    """Multiply the first half of the features by GELU of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu = on_cpu()

    def construct(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., :half] * ops.gelu(cast_for_exp(x[..., half:], self.on_cpu)).astype(x.dtype)


class FeedForward(nn.SequentialCell):
    """Layer norm and a gated feed-forward layer with 2/3 · mult · dim hidden features."""

    def __init__(self, dim: int, mult: float = 4, dropout: float = 0.0) -> None:
        inner = int(dim * mult * 2 / 3)
        super().__init__(
            nn.LayerNorm((dim,), epsilon=1e-5),
            nn.Dense(dim, inner * 2, has_bias=False),
            GEGLU(),
            nn.Dropout(p=dropout),
            nn.Dense(inner, dim, has_bias=False),
        )
