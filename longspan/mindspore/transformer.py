"""A transformer over local attention, and its generation."""

from __future__ import annotations

from copy import deepcopy

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal

from longspan.mindspore.layers import DynamicPositionBias, FeedForward, LocalMHA
from longspan.mindspore.padding import checked, filled, first, shifted
from longspan.mindspore.streams import HyperConnections, Residual

Cache = tuple[Tensor, ...]  # every layer's keys and values; the number of tokens seen; the bias, where there is one


class LocalTransformer(nn.Cell):
    """Token ids (B, n) -> logits (B, n, num_tokens); with num_tokens=None vectors (B, n, dim) -> (B, n, dim).

    use_dynamic_pos_bias: a learned bias of the distance instead of rotary positions. global_attn_layer: a cell
    (B, n, dim) -> (B, n, dim), copied before the layers named in layers_insert_global_attn, counted from 1 (all by
    default). num_residual_streams: 1 is the plain residual. attn_dropout and ff_dropout act in training only.
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
            raise ValueError(f"layers_insert_global_attn counts layers from 1 to {depth}, got {chosen}")
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
        # Queries of the middle blocks see look_backward blocks before theirs and look_forward after it.
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
        """mask: (B, n), True = keep; a causal model counts a row's tokens from the first that is kept.

        return_loss: the mean cross entropy of each token from those before it. A mask may then leave out the last
        token; what it hides is neither read nor predicted.
        return_cache: also the cache, or None where there can be none: with a mask, global layers, or not causal. With
        `cache`, only the last token of x is read, as the one that follows it. In graph mode pass it back as
        `mindspore.mutable(cache)`, or every step compiles anew.
        """
        if return_loss:
            return self._loss(x, mask)
        if mask is not None:
            if cache is not None:
                raise ValueError("a cache holds no mask: leave out mask, or read without a cache")
            out, new = self._masked(x, checked(mask, x)), None
        elif cache is not None:
            out, new = self._run(x[:, -1:], None, cache, return_cache)
        else:
            out, new = self._run(x, None, None, return_cache)
        return (out, new) if return_cache else out

    def _masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if not self.causal:
            return self._run(x, mask, None, False)[0]
        start = first(mask)
        return shifted(self._run(shifted(x, start), shifted(mask, start), None, False)[0], -start)

    def _run(
        self, x: Tensor, mask: Tensor | None, cache: Cache | None, return_cache: bool
    ) -> tuple[Tensor, Cache | None]:
        """The layers, of rows that begin at slot 0 and a mask that is one of booleans."""
        n = x.shape[1]
        if self.has_embed_unembed:
            x = self.token_emb(x) + self._positions(n, cache)
        elif mask is not None:
            x = filled(x, mask)
        bias = None
        if self.dynamic_pos_bias is not None:
            if cache is None:
                bias = self.dynamic_pos_bias(self.bias_rows, self.bias_columns)[:, : self.window]
            else:
                bias = cache[2]
        remembers = cache is not None or (return_cache and self.causal and not self.has_global_layers)
        if self.num_streams > 1:
            x = x.expand_dims(2).broadcast_to((x.shape[0], n, self.num_streams, x.shape[2]))
        kvs: tuple[Tensor, ...] = ()
        for layer in range(self.depth):
            if self.has_global_layers:
                x = self.global_layers[layer](x)
            attention, feed_forward = self.layers[layer][0], self.layers[layer][1]
            inner, residual, beta = attention.width(x)
            if remembers:
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
        if not return_cache or not remembers:
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
        """prime: (B, n) ids, n ≥ 1 -> the (B, seq_len) that follow, drawn from the best (1 − filter_thres) of logits.

        temperature 0 takes the best. Past max_seq_len each token is computed from the last max_seq_len: their
        positions shift from one to the next, so that no cache fits them; nor does one fit where there are global
        layers, or where attention is not causal.
        """
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: there are no tokens to generate")
        if temperature < 0:
            raise ValueError(f"temperature must be 0 (the best token) or more, got {temperature}")
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
            # A sequence that outgrew the table goes on at its last place.
            return self.pos_emb(ops.clamp(cache[1], 0, self.max_seq_len - 1).reshape((1,)))
        if n > self.max_seq_len:
            raise ValueError(f"the length ({n}) is over max_seq_len ({self.max_seq_len}), which positions end at")
        return self.pos_emb(ops.arange(n))

    def _loss(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The mean over labels that are not ignore_index, in float32."""
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: there are no tokens to predict; leave out return_loss")
        labels, x = x[:, 1:], x[:, :-1]
        if mask is not None:
            whole = mask.shape[1] > x.shape[1]
            kept = checked(mask[:, :-1] if whole else mask, x)
            if whole:
                known = ops.logical_and(kept, mask[:, 1:].astype(ms.bool_))
                labels = ops.where(known, labels, ops.full_like(labels, self.ignore_index))
            mask = kept
        if self.ignore_index < 0:
            # Not a token: where it stands in the input nothing is learnt from it.
            x = ops.where(x == self.ignore_index, ops.zeros_like(x), x)
        logits = self._run(x, None, None, False)[0] if mask is None else self._masked(x, mask)
        logs = ops.log_softmax(logits.astype(ms.float32), -1)
        counted = labels != self.ignore_index
        index = ops.where(counted, labels, ops.zeros_like(labels)).expand_dims(-1)
        picked = ops.gather_elements(logs, 2, index).squeeze(-1)
        counted = counted.astype(ms.float32)
        return -(picked * counted).sum() / counted.sum()


def sample(logits: Tensor, temperature: float, filter_thres: float) -> Tensor:
    """logits (B, V) -> ids (B, 1), from the best (1 − filter_thres) · V of them, at least one."""
    kept = max(1, int((1 - filter_thres) * logits.shape[-1]))
    best, ids = ops.topk(logits.astype(ms.float32), kept)
    if temperature == 0 or kept == 1:
        return ids[:, :1]
    # Gumbel's trick: the largest of logits plus this noise is a draw from their softmax.
    noise = -ops.log(-ops.log(ops.rand(best.shape) * (1 - 2e-7) + 1e-7))
    place = ops.argmax(best / temperature + noise, -1).expand_dims(-1)
    return ops.gather_elements(ids, 1, place)
