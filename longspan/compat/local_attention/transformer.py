"""LocalMHA, attention of tokens, and LocalTransformer, a language model of it."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.faithful import resolve_faithful
from longspan.compat.generate import FilterSampler, decode_model, generate, shift_labels, top_k
from longspan.compat.helpers import default as default
from longspan.compat.helpers import exists as exists
from longspan.compat.layers import as_bool
from longspan.compat.local_attention import keys
from longspan.compat.local_attention.hyper_connections import ExpandStreams, HyperConnections, ReduceStreams, Residual
from longspan.compat.local_attention.local_attention import LocalAttention, l2norm
from longspan.compat.local_attention.options import MHAOptions, TransformerOptions
from longspan.compat.local_attention.rotary import apply_rotary_pos_emb
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModel, KeyMapping, rename, rename_layer, with_prefix
from longspan.layout import PaddedSpan, TokenLayout
from longspan.models.checkpoint import Model
from longspan.models.transformer import LanguageModel, Transformer
from longspan.ops.softmax import attend
from longspan.protocol import State


def eval_decorator(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a module to run in eval mode; the mode is restored after it, and after an error."""

    @functools.wraps(fn)
    def inner(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        training = model.training
        model.eval()
        try:
            return fn(model, *args, **kwargs)
        finally:
            model.train(training)

    return inner


class LocalMHA(nn.Module):
    """Multi-head local attention, (b, n, dim) -> (b, n, dim), without a residual connection.

    Other arguments are those of `LocalAttention`.

    Args:
        qk_rmsnorm: Normalize queries and keys, with learned scales, and multiply scores by qk_scale.
        dropout: Of the attention weights; the original, and a faithful layer, ignore it.
        exact_windowsize: By default True.
        faithful: Compute what the original does: padding is attended to or counted where it did, and cached decoding
            rotates keys again at each token. See `longspan.compat.faithful`.
    """

    @init_from(MHAOptions)
    def __init__(self, options: MHAOptions) -> None:
        super().__init__()
        self.faithful = resolve_faithful(options.faithful)
        inner = options.dim_head * options.heads
        self.norm = nn.LayerNorm(options.dim) if options.prenorm else None
        self.heads = options.heads
        self.to_qkv = nn.Linear(options.dim, inner * 3, bias=False)
        self.qk_rmsnorm = options.qk_rmsnorm
        if options.qk_rmsnorm:
            self.q_scale = nn.Parameter(torch.ones(options.dim_head))
            self.k_scale = nn.Parameter(torch.ones(options.dim_head))
        self.causal, self.window_size = options.causal, options.window_size
        self.exact_windowsize = options.exact_windowsize is None or options.exact_windowsize
        self.attn_fn = LocalAttention(
            options.window_size,
            causal=options.causal,
            look_backward=options.look_backward,
            look_forward=options.look_forward,
            dropout=0.0 if self.faithful else options.dropout,
            shared_qk=options.shared_qk,
            dim=options.dim_head,
            autopad=True,
            exact_windowsize=self.exact_windowsize,
            scale=options.qk_scale if options.qk_rmsnorm else None,
            use_rotary_pos_emb=options.use_rotary_pos_emb,
            use_xpos=options.use_xpos,
            xpos_scale_base=options.xpos_scale_base,
            faithful=self.faithful,
        )
        self.to_v_gate = nn.Sequential(nn.Linear(options.dim, options.heads)) if options.gate_values_per_head else None
        self.to_out = nn.Linear(inner, options.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cache: Any = None,
        return_cache: bool = False,
    ) -> Any:
        """Attend to x and the tokens in the cache.

        Args:
            x: (b, n, dim).
            mask: (b, n), True for tokens to attend to.
            attn_bias: (heads, window_size, keys of a window), added to the scores.
            cache: The cache that an earlier call returned, for causal attention.
            return_cache: Whether to return the cache too.

        Returns:
            (b, n, dim), or with return_cache a tuple of it and the cache, None if the attention is not causal.
        """
        if cache is not None and not self.causal:
            raise ValueError("a cache is for causal attention only: omit it, or build the layer with causal=True")
        mask = as_bool(mask)
        if mask is not None and not self.faithful:
            x = TokenLayout.of(x, causal=False, key_mask=mask).zero_fill(x)
        x = x if self.norm is None else self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.to_qkv(x).chunk(3, -1))
        if self.qk_rmsnorm:
            q, k = l2norm(q) * self.q_scale, l2norm(k) * self.k_scale
        attention = self._attend_faithfully if self.faithful else self._attend
        out, cache = attention(q, k, v, mask, attn_bias, cache, return_cache)
        if self.to_v_gate is not None:
            out = out * self.to_v_gate(x).sigmoid()[..., None]
        out = self.to_out(out.flatten(2))
        return (out, cache) if return_cache else out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        attn_bias: Tensor | None,
        state: State | None,
        return_state: bool,
    ) -> tuple[Tensor, State | None]:
        """Attend, q, k and v (b, n, heads, d), and return the state after these tokens if requested."""
        span = None
        if mask is not None and self.causal and q.shape[1]:
            span = PaddedSpan.of(mask)  # padding takes no positions
            q, k, v = span.roll(q, k, v)
            mask = torch.arange(q.shape[1], device=q.device) < span.lengths[:, None]
        if state is None:
            out = self.attn_fn(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask, attn_bias=attn_bias).transpose(1, 2)
        if (state is not None or return_state) and self.causal and isinstance(self.attn_fn, LocalAttention):
            mechanism = self.attn_fn.mechanism(self.heads, q.shape[-1], self._table(attn_bias))
            before = mechanism.new_state(len(q), device=q.device, dtype=q.dtype) if state is None else state.clone()
            layout = TokenLayout.of(q, causal=True, key_mask=mask, start=before.end)
            q, k = self.attn_fn.rotate_to(layout.position, q, k)
            if state is None:
                state = mechanism.write(before, k, v, key_mask=mask)
            else:
                out, state = mechanism.extend(before, q, k, v, key_mask=mask)
        return out if span is None else span.unroll(out), state

    def _table(self, attn_bias: Tensor | None) -> Tensor | None:
        """Return a bias (heads or a divisor of it, …) for each head, window and key."""
        if attn_bias is None:
            return None
        table = attn_bias.expand(-1, self.window_size, (self.attn_fn.look_backward + 1) * self.window_size)
        return table.repeat(self.heads // len(table), 1, 1)

    def _attend_faithfully(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        attn_bias: Tensor | None,
        cache: Tensor | None,
        return_cache: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as the original does. cache: keys and values (2, b, heads, n, d), keys rotated as often as they were
        read.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is None:
            out = self.attn_fn(q, k, v, mask=mask, attn_bias=attn_bias)
            return out.transpose(1, 2), torch.stack([k, v]) if return_cache else None
        if q.shape[2] != 1 or mask is not None:
            raise ValueError(f"a faithful layer with a cache takes one token and no mask, got {q.shape[2]} tokens")
        k, v = (torch.cat([old, new], 2) for old, new in zip(cache, (k, v), strict=True))
        reach = self.attn_fn.look_backward * self.window_size
        first = -(reach + 1 if self.exact_windowsize else reach + k.shape[2] % self.window_size)
        k, v = k[:, :, first:], v[:, :, first:]
        q = q * q.shape[-1] ** -0.5
        if self.attn_fn.rel_pos is not None:
            q, k = apply_rotary_pos_emb(q, k, *self.attn_fn.rel_pos(k))
        bias = None if attn_bias is None else attn_bias[..., -1:, -k.shape[2] :]
        out = attend(q, k, v, None, bias=bias, scale=1.0)
        return out.transpose(1, 2), torch.stack([k, v])


class GEGLU(nn.Module):
    """Multiply the first half of the features by the GELU of the second."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, -1)
        return x * F.gelu(gate)


def FeedForward(dim: int, mult: float = 4, dropout: float = 0.0) -> nn.Sequential:  # noqa: N802
    """Return a layer norm and a gated feed-forward layer, (b, n, dim) -> (b, n, dim), without a residual connection."""
    inner = int(dim * mult * 2 / 3)
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, inner * 2, bias=False),
        GEGLU(),
        nn.Dropout(dropout),
        nn.Linear(inner, dim, bias=False),
    )


class DynamicPositionBias(nn.Module):
    """Learned bias (heads, i, j) of the distances between the last i of j tokens and all j tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, heads))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def forward(self, i: int, j: int) -> Tensor:
        """Return the bias of i queries and j keys."""
        if j < i:
            raise ValueError(f"the number of keys, j, must be at least that of queries, i, got i = {i} and j = {j}")
        position = torch.arange(j, device=self.device)
        by_distance = self.mlp(position.to(next(self.parameters()).dtype)[:, None])  # (j, heads)
        return by_distance.T[:, (position[j - i :, None] - position).abs()]


class Cache(NamedTuple):
    """What a LocalTransformer keeps of earlier tokens for each layer; None if it recomputes all tokens."""

    cache_kv: list[Any] | None
    maybe_cached_attn_bias: Tensor | None = None


class LocalTransformer(CompatModel):
    """Language model of local attention; with num_tokens=None, its layers: (b, n, dim) -> (b, n, dim).

    Other arguments are those of LocalMHA.

    Args:
        global_attn_layer: A module (b, n, dim) -> (b, n, dim), copied before the local attention of some layers.
        layers_insert_global_attn: These layers, counted from 1; all by default.
        num_residual_streams: 1 for an ordinary residual connection.
        faithful: Compute what the original does, as in LocalMHA; padding takes positions, masked labels count in the
            loss, and generation repeats the original's. See `longspan.compat.faithful`.
    """

    @init_from(TransformerOptions)
    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        options.config([{"mechanism": "local", "scale": 1.0}], single=False)  # checks the sizes
        self.faithful = resolve_faithful(options.faithful)
        self.options = replace(options, global_attn_layer=None, faithful=self.faithful)
        self.has_embed_unembed = options.num_tokens is not None
        dim, streams = options.dim, options.num_residual_streams
        if options.num_tokens is not None:
            self.token_emb = nn.Embedding(options.num_tokens, dim)
            self.pos_emb = nn.Embedding(options.max_seq_len, dim)
            for embedding in (self.token_emb, self.pos_emb):
                nn.init.normal_(embedding.weight, std=0.02)
        self.max_seq_len, self.causal, self.ignore_index = options.max_seq_len, options.causal, options.ignore_index
        self.layers = nn.ModuleList()
        self.local_attn_window_size = options.local_attn_window_size
        self.dynamic_pos_bias = None
        if options.use_dynamic_pos_bias:
            self.dynamic_pos_bias = DynamicPositionBias(dim=dim // 2, heads=options.heads)
        single = streams == 1
        self.expand_streams: nn.Module = nn.Identity() if single else ExpandStreams(streams)
        self.reduce_streams: nn.Module = nn.Identity() if single else ReduceStreams(streams)
        self.global_layers = nn.ModuleList()
        count = 0

        def connect(branch: nn.Module) -> nn.Module:
            nonlocal count
            count += 1
            if single:
                return Residual(branch)
            return HyperConnections(streams, dim=dim, branch=branch, layer_index=count - 1)

        for layer in range(1, options.depth + 1):
            has_global = layer in options.global_layers
            inserted = connect(copy.deepcopy(options.global_attn_layer)) if has_global else None  # type: ignore[arg-type]
            self.global_layers.append(inserted)  # type: ignore[arg-type]
            attention = connect(LocalMHA(**replace(options, faithful=self.faithful).attention()))
            self.layers.append(
                nn.ModuleList([attention, connect(FeedForward(dim, options.ff_mult, options.ff_dropout))])
            )
        if options.num_tokens is not None:
            self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, options.num_tokens, bias=False))
        self.record_structure()

    def longspan_model(self) -> Model:
        """Build the longspan model; see `CompatModel.longspan_model`."""
        if self.faithful:
            raise ValueError("a faithful model computes what no longspan model does")
        if any(layer is not None for layer in self.global_layers):
            raise ValueError("a longspan model has no place for global_attn_layer")
        layers: Any = self.layers
        attentions = [layer[0].branch.attn_fn for layer in layers]
        if not all(a.rel_pos is None or a.rel_pos.has_default_frequencies() for a in attentions):
            raise ValueError("inv_freq of its rotary positions was changed")
        config = self.options.config([a.mechanism_spec() for a in attentions], single=self._is_single)
        return LanguageModel(config) if self.has_embed_unembed else Transformer(config)

    def key_mappings(self) -> Iterator[KeyMapping]:
        """Map the keys; see `CompatModel.key_mappings`."""
        prefix, options, biases = "transformer." if self.has_embed_unembed else "", self.options, []
        if self.has_embed_unembed:
            yield rename("token_emb.weight", "embedding.weight")
            yield rename("pos_emb.weight", "positions.table")
            yield from rename_layer("to_logits.0", "transformer.norm")
            yield rename("to_logits.1.weight", "to_logits.weight")
        for i in range(2 * options.depth):
            old, new = f"layers.{i // 2}.{i % 2}.", f"{prefix}stack.branches.{i}."
            if i % 2:
                mappings = keys.feed_forward_keys()
            else:
                inner = options.heads * options.dim_head
                mappings = keys.attention_keys(inner, qk_norm=options.qk_rmsnorm, gates=options.gate_values_per_head)
                biases.append(f"{new}layer.mechanism.bias.")
            yield from with_prefix(mappings, f"{old}branch.", new)
            if not self._is_single:
                yield from with_prefix(keys.HYPER_CONNECTION_KEYS, old, f"{prefix}stack.connections.{i}.")
        if self.dynamic_pos_bias is not None:
            yield from keys.bias_keys("dynamic_pos_bias.", biases)

    def upgrade_key(self, key: str) -> str:
        """Return the current key: releases without residual streams had no `branch`."""
        found = re.fullmatch(r"(layers\.\d+\.[01])\.((?!branch\.|norm\.gamma|static_|dynamic_).*)", key)
        return f"{found[1]}.branch.{found[2]}" if found else key

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        """Replace residual streams by ordinary residual connections if a checkpoint has no weights for streams."""
        missing = {key for key in self.state_dict() if key not in shapes and not key.endswith(".inv_freq")}
        pairs = [(name, module) for name, module in self.named_modules() if isinstance(module, HyperConnections)]
        weights = {f"{name}.{mapping.old[0]}" for name, _ in pairs for mapping in keys.HYPER_CONNECTION_KEYS}
        if not pairs or missing != weights:
            return
        warnings.warn(
            "this checkpoint has no weights for residual streams: the model now has ordinary residual connections, as "
            "with num_residual_streams=1",
            stacklevel=5,
        )
        for name, module in pairs:
            parent, _, child = name.rpartition(".")
            setattr(self.get_submodule(parent), child, Residual(module.branch))
        self.expand_streams, self.reduce_streams = nn.Identity(), nn.Identity()
        self.record_structure()

    @torch.no_grad()
    def generate(
        self,
        prime: Tensor,
        seq_len: int,
        temperature: float = 1.0,
        filter_thres: float = 0.9,
        use_kv_cache: bool = True,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return tokens (b, seq_len) after prime (b, n).

        Args:
            prime: Prompts.
            seq_len: The number of tokens to generate.
            temperature: 0 for the most likely token.
            filter_thres: The share of the vocabulary to exclude.
            use_kv_cache: Whether to decode from a state instead of recomputing all tokens.
            mask: (b, n), True for tokens to attend to.
        """
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: this model cannot generate tokens")
        if temperature < 0:
            raise ValueError(f"temperature must be 0 (the most likely token) or more, got {temperature}")
        sampler = FilterSampler(prime, top_k, filter_thres, temperature)
        if self.faithful and use_kv_cache and self.causal and mask is None:
            return self._generate_faithfully(prime, seq_len, sampler)
        supports_cache = self.causal and all(layer is None for layer in self.global_layers)
        return generate(
            self,
            prime,
            seq_len,
            sampler,
            max_length=self.max_seq_len,
            model=decode_model(self) if use_kv_cache and supports_cache and not self.faithful else None,
            recompute=lambda tokens, mask: self(tokens, mask=None if bool(mask.all()) else mask),
            mask=mask,
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        return_loss: bool = False,
        return_cache: bool = False,
    ) -> Any:
        """Apply the model.

        Args:
            x: Tokens (b, n), or vectors (b, n, dim) with num_tokens=None.
            mask: (b, n), True for tokens to attend to.
            cache: The cache that an earlier call returned; x then contains all tokens so far.
            return_loss: Whether to return the mean cross-entropy of each token given the tokens before it.
            return_cache: Whether to return the cache too.

        Returns:
            Logits (b, n, num_tokens), with a cache those of the last token, or vectors; with return_cache a tuple of
            them and the cache.
        """
        mask = as_bool(mask)
        if return_loss:
            return self._loss(x, mask)
        states = None if cache is None else cache.cache_kv
        if states is not None and mask is not None:
            raise ValueError("mask cannot be combined with a cache: pass it in the call that fills the cache")
        if self.faithful:
            x, start = self._embed(x, None, None), None
            x = x if states is None else x[:, -1:]
        else:
            start = None if states is None else states[0].end
            if start is not None:
                num_new = x.shape[1] - int(start.max())
                if num_new < 1:
                    raise ValueError(
                        f"with a cache, x must contain all tokens so far and new ones: got {x.shape[1]} tokens, the "
                        f"cache contains {int(start.max())}"
                    )
                x = x[:, -num_new:]
            x = self._embed(x, mask, start)
        out, states = self._run_layers(x, mask, states, return_cache)
        out = self.to_logits(out) if self.has_embed_unembed else out
        if cache is not None:
            out = out[:, -1:]
        return (out, Cache(states)) if return_cache else out

    def _embed(self, x: Tensor, mask: Tensor | None, start: Tensor | None) -> Tensor:
        """Return the vectors of tokens at the positions after `start`, zeros for hidden ones."""
        layout = TokenLayout.of(x, causal=self.causal, key_mask=mask, start=start)
        if not self.has_embed_unembed:
            return layout.zero_fill(x)
        if x.ndim != 2 or x.is_floating_point():
            raise ValueError(f"tokens must be (b, n) integers, got {tuple(x.shape)} {x.dtype}")
        longest = x.shape[1]
        if start is not None or (mask is not None and longest > self.max_seq_len):
            longest = int(layout.position.max()) + 1  # padding has no position
        if longest > self.max_seq_len:
            raise ValueError(
                f"{longest} tokens are more than the {self.max_seq_len} positions of this model: shorten the input, or "
                "build the model with a larger max_seq_len"
            )
        x = self.token_emb(x)
        return layout.zero_fill(x + self.pos_emb(layout.position).to(x.dtype))

    def _run_layers(
        self, x: Tensor, mask: Tensor | None, states: list[Any] | None, return_states: bool
    ) -> tuple[Tensor, list[Any] | None]:
        """Apply all layers to x (b, n, dim); the states are None where tokens must be recomputed."""
        attn_bias, batch, after = self._attn_bias(), len(x), []
        x = self.expand_streams(x)
        hidden = None
        if mask is not None and not self.faithful:
            hidden = ~mask.repeat_interleave(len(x) // batch, 0)[..., None]
        pairs: Any = zip(self.layers, self.global_layers, strict=True)
        for i, ((attention, feed_forward), global_layer) in enumerate(pairs):
            if global_layer is not None:
                x = global_layer(x if hidden is None else x.masked_fill(hidden, 0))
            state = None if states is None else states[i]
            out = attention(x, mask=mask, attn_bias=attn_bias, cache=state, return_cache=return_states)
            x, state = out if isinstance(out, tuple) else (out, None)
            after.append(state)
            x = feed_forward(x)
        recomputes = not self.faithful and any(layer is not None for layer in self.global_layers)
        known = not recomputes and all(state is not None for state in after)
        return self.reduce_streams(x), after if known else None

    def _attn_bias(self) -> Tensor | None:
        if self.dynamic_pos_bias is None:
            return None
        attention, size = self.options, self.local_attn_window_size
        back, ahead = attention.look_backward, int(not self.causal)
        if attention.look_forward is not None:
            ahead = attention.look_forward
        if not ahead:
            return self.dynamic_pos_bias(size, (back + 1) * size)
        every = (back + 1 + ahead) * size
        return self.dynamic_pos_bias(every, every)[:, back * size : (back + 1) * size]

    def _loss(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: this model has no loss")
        labels, x = x[:, 1:], x[:, :-1]
        if self.ignore_index < 0:
            x = x.masked_fill(x == self.ignore_index, 0)  # not a token
        if self.faithful:
            mask = None if mask is None else mask[:, : labels.shape[1]]
        else:
            labels, mask = shift_labels(labels, mask, self.ignore_index)
        logits = self(x, mask=mask)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)

    @eval_decorator
    def _generate_faithfully(self, prime: Tensor, seq_len: int, sampler: FilterSampler) -> Tensor:
        """Generate with the original's cache, which the last token of a window of max_seq_len extends."""
        out, cache = prime, None
        for _ in range(seq_len):
            logits, cache = self(out[:, -self.max_seq_len :], cache=cache, return_cache=True)
            out = torch.cat([out, sampler.choose(logits[:, -1])[:, None]], 1)
        return out[:, prime.shape[1] :]

    @property
    def _is_single(self) -> bool:
        return isinstance(self.expand_streams, nn.Identity)
