"""Transformer of local attention, with generation."""

from __future__ import annotations

from copy import deepcopy

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal

from longspan.mindspore.layers import DynamicPositionBias, FeedForward, LocalMHA
from longspan.mindspore.padding import check_mask, first_token, rotate_left, zero_fill
from longspan.mindspore.streams import HyperConnections, Residual

Cache = tuple[Tensor, ...]  # keys and values of each layer, the number of tokens, and the position bias if there is one


class LocalTransformer(nn.Cell):
    """Language model, tokens (B, n) -> logits (B, n, num_tokens); with num_tokens=None its layers, on (B, n, dim).

    Other arguments are those of LocalMHA.

    Args:
        use_dynamic_pos_bias: Use a learned position bias instead of rotary positions.
        global_attn_layer: A cell (B, n, dim) -> (B, n, dim), copied before the local attention of some layers.
        layers_insert_global_attn: These layers, counted from 1; all by default.
        num_residual_streams: 1 for an ordinary residual connection.
        attn_dropout: Of the attention weights, in training.
        ff_dropout: Of the hidden features of feed-forward layers, in training.
    """

    def __init__(
        self,
        *,
        num_tokens: int | None,
        max_seq_len: int,
        dim: int,
        depth: int,
        causal: bool = True,
        local_attn_window_size: int = 512,
        dim_head: int = 64,
        heads: int = 8,
        ff_mult: float = 4,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        ignore_index: int = -1,
        use_xpos: bool = False,
        xpos_scale_base: float | None = None,
        use_dynamic_pos_bias: bool = False,
        global_attn_layer: nn.Cell | None = None,
        layers_insert_global_attn: tuple[int, ...] | None = None,
        num_residual_streams: int = 4,
        qk_rmsnorm: bool = False,
        qk_scale: float = 8,
        exact_windowsize: bool | None = None,
        gate_values_per_head: bool = False,
        look_backward: int = 1,
        look_forward: int | None = None,
        shared_qk: bool = False,
    ) -> None:
        super().__init__()
        if num_residual_streams < 1:
            raise ValueError(f"num_residual_streams must be at least 1, got {num_residual_streams}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        chosen = tuple(range(1, depth + 1)) if layers_insert_global_attn is None else layers_insert_global_attn
        if not all(0 < layer <= depth for layer in chosen):
            raise ValueError(f"layers_insert_global_attn must be layers from 1 to {depth}, got {chosen}")
        self.has_embed_unembed = num_tokens is not None
        if num_tokens is not None:
            self.token_emb = nn.Embedding(num_tokens, dim, embedding_table=Normal(1.0))
            self.pos_emb = nn.Embedding(max_seq_len, dim, embedding_table=Normal(1.0))
            self.to_logits = nn.SequentialCell(
                nn.LayerNorm((dim,), epsilon=1e-5), nn.Dense(dim, num_tokens, has_bias=False)
            )
        self.max_seq_len, self.depth, self.causal = max_seq_len, depth, causal
        self.window, self.num_streams, self.ignore_index = local_attn_window_size, num_residual_streams, ignore_index
        self.dynamic_pos_bias = DynamicPositionBias(dim // 2, heads) if use_dynamic_pos_bias else None

        def connected(branch: nn.Cell, index: int) -> nn.Cell:
            if num_residual_streams == 1:
                return Residual(branch)
            return HyperConnections(branch, num_residual_streams, dim, index)

        layers, global_layers = [], []
        for index in range(depth):
            attention = LocalMHA(
                dim=dim,
                window_size=local_attn_window_size,
                dim_head=dim_head,
                heads=heads,
                dropout=attn_dropout,
                causal=causal,
                prenorm=True,
                qk_rmsnorm=qk_rmsnorm,
                qk_scale=qk_scale,
                use_xpos=use_xpos,
                xpos_scale_base=xpos_scale_base,
                exact_windowsize=exact_windowsize,
                gate_values_per_head=gate_values_per_head,
                look_backward=look_backward,
                look_forward=look_forward,
                shared_qk=shared_qk,
                use_rotary_pos_emb=not use_dynamic_pos_bias,
            )
            feed_forward = FeedForward(dim, mult=ff_mult, dropout=ff_dropout)
            layers.append(nn.CellList([connected(attention, 2 * index), connected(feed_forward, 2 * index + 1)]))
            has_global = global_attn_layer is not None and index + 1 in chosen
            global_layers.append(connected(deepcopy(global_attn_layer), index) if has_global else nn.Identity())
        self.layers, self.global_layers = nn.CellList(layers), nn.CellList(global_layers)
        self.has_global_layers = global_attn_layer is not None and len(chosen) > 0
        attn = attention.attn_fn
        # The bias of a block of queries between look_backward blocks before it and look_forward after it.
        self.bias_rows = (1 + attn.look_forward) * attn.window_size
        self.bias_columns = self.bias_rows + attn.look_backward * attn.window_size

    def construct(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        return_loss: bool = False,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, Cache | None]:
        """Apply the model.

        In graph mode pass a cache back as `mindspore.mutable(cache)`, or every step compiles again.

        Args:
            x: Tokens (B, n), or vectors (B, n, dim) with num_tokens=None.
            mask: (B, n), True for tokens; a causal model counts positions from the first True of a sequence. With
                return_loss it may omit the last token.
            cache: The cache that an earlier call returned; only the last token of x is read, as the one after it.
            return_loss: Whether to return the mean cross-entropy of each token given the tokens before it; masked
                tokens are neither read nor predicted.
            return_cache: Whether to return the cache too; it is None with a mask, with global layers, or if the model
                is not causal.
        """
        if return_loss:
            return self._loss(x, mask)
        if mask is not None:
            if cache is not None:
                raise ValueError("a cache cannot be combined with a mask: omit mask, or cache")
            out, new = self._masked(x, check_mask(mask, x)), None
        else:
            out, new = self._run(x if cache is None else x[:, -1:], None, cache, return_cache)
        return (out, new) if return_cache else out

    def _masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if not self.causal:
            return self._run(x, mask, None, False)[0]
        start = first_token(mask)
        return rotate_left(self._run(rotate_left(x, start), rotate_left(mask, start), None, False)[0], -start)

    def _run(
        self, x: Tensor, mask: Tensor | None, cache: Cache | None, return_cache: bool
    ) -> tuple[Tensor, Cache | None]:
        """Run the layers on sequences that start at slot 0, with a bool mask."""
        n = x.shape[1]
        if self.has_embed_unembed:
            x = self.token_emb(x) + self._positions(n, cache)
        elif mask is not None:
            x = zero_fill(x, mask)
        bias = None
        if self.dynamic_pos_bias is not None:
            if cache is None:
                bias = self.dynamic_pos_bias(self.bias_rows, self.bias_columns)[:, : self.window]
            else:
                bias = cache[2]
        caches = cache is not None or (return_cache and self.causal and not self.has_global_layers)
        if self.num_streams > 1:
            x = x.expand_dims(2).broadcast_to((x.shape[0], n, self.num_streams, x.shape[2]))
        kvs: tuple[Tensor, ...] = ()
        for layer in range(self.depth):
            if self.has_global_layers:
                x = self.global_layers[layer](x)
            attention, feed_forward = self.layers[layer][0], self.layers[layer][1]
            inner, residual, beta = attention.width(x)
            if caches:
                past = None if cache is None else (cache[0][layer], cache[1])
                out, new = attention.branch.attend(inner, None, bias, past, True)
                kvs = (*kvs, new[0])
            else:
                out = attention.branch.attend(inner, mask, bias)
            x = feed_forward(attention.depth(out, residual, beta))
        if self.num_streams > 1:
            x = x.sum(2)
        if self.has_embed_unembed:
            x = self.to_logits(x)
        if not return_cache or not caches:
            return x, None
        length = ops.full((), n, dtype=ms.int64) if cache is None else cache[1] + 1
        return x, ((kvs, length) if bias is None else (kvs, length, bias))

    def generate(
        self,
        prime: Tensor,
        seq_len: int,
        temperature: float = 1.0,
        filter_thres: float = 0.9,
        use_kv_cache: bool = True,
    ) -> Tensor:
        """Return the (B, seq_len) tokens after prime (B, n), sampled from the top (1 − filter_thres) of the vocabulary.

        Beyond max_seq_len each token is computed from the last max_seq_len tokens, whose positions shift with every
        token, so that no cache applies; nor does one with global layers or attention that is not causal.

        Args:
            prime: Prompts (B, n), n ≥ 1.
            seq_len: The number of tokens to generate.
            temperature: 0 for the most likely token.
            filter_thres: The share of the vocabulary to exclude.
            use_kv_cache: Whether to use a cache where possible.
        """
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: this model cannot generate tokens")
        if temperature < 0:
            raise ValueError(f"temperature must be 0 (the most likely token) or more, got {temperature}")
        if prime.ndim != 2 or prime.shape[1] < 1:
            raise ValueError(f"prime must be (batch, n) token ids with n at least 1, got shape {prime.shape}")
        training = self.training
        self.set_train(False)
        out, cache = prime, None
        for _ in range(seq_len):
            length = out.shape[1]
            if not use_kv_cache or length > self.max_seq_len:
                logits = self(out[:, -self.max_seq_len :])
            elif cache is None:
                logits, cache = self(out, return_cache=True)
            else:
                logits, cache = self(out[:, -1:], cache=ms.mutable(cache), return_cache=True)
            token = sample(logits[:, -1], temperature, filter_thres)
            out = ops.cat((out, token.astype(out.dtype)), 1)
        self.set_train(training)
        return out[:, prime.shape[1] :]

    def _positions(self, n: int, cache: Cache | None) -> Tensor:
        if cache is not None:
            # Beyond the table, use its last position.
            return self.pos_emb(ops.clamp(cache[1], 0, self.max_seq_len - 1).reshape((1,)))
        if n > self.max_seq_len:
            raise ValueError(f"the length ({n}) must be at most max_seq_len ({self.max_seq_len})")
        return self.pos_emb(ops.arange(n))

    def _loss(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mean cross-entropy of labels other than ignore_index, in float32."""
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: this model has no loss; omit return_loss")
        labels, x = x[:, 1:], x[:, :-1]
        if mask is not None:
            with_last = mask.shape[1] > x.shape[1]
            visible = check_mask(mask[:, :-1] if with_last else mask, x)
            if with_last:
                known = ops.logical_and(visible, mask[:, 1:].astype(ms.bool_))
                labels = ops.where(known, labels, ops.full_like(labels, self.ignore_index))
            mask = visible
        if self.ignore_index < 0:
            # ignore_index is not a token.
            x = ops.where(x == self.ignore_index, ops.zeros_like(x), x)
        logits = self._run(x, None, None, False)[0] if mask is None else self._masked(x, mask)
        logs = ops.log_softmax(logits.astype(ms.float32), -1)
        counted = labels != self.ignore_index
        index = ops.where(counted, labels, ops.zeros_like(labels)).expand_dims(-1)
        picked = ops.gather_elements(logs, 2, index).squeeze(-1)
        counted = counted.astype(ms.float32)
        return -(picked * counted).sum() / counted.sum()


def sample(logits: Tensor, temperature: float, filter_thres: float) -> Tensor:
    """Sample tokens (B, 1) from the top (1 − filter_thres) · V logits, at least one. logits: (B, V)."""
    k = max(1, int((1 - filter_thres) * logits.shape[-1]))
    best, ids = ops.topk(logits.astype(ms.float32), k)
    if temperature == 0 or k == 1:
        return ids[:, :1]
    # Gumbel-max trick: the argmax of logits plus this noise is a sample from their softmax.
    noise = -ops.log(-ops.log(ops.rand(best.shape) * (1 - 2e-7) + 1e-7))
    index = ops.argmax(best / temperature + noise, -1).expand_dims(-1)
    return ops.gather_elements(ids, 1, index)
