"""Layers and transformer of local-attention."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.generate import FilterSampler, generate, shift_labels, top_k
from longspan.compat.layers import as_bool, with_children
from longspan.compat.local_attention import keys
from longspan.compat.local_attention.options import MHAOptions, TransformerOptions, feed_forward_config
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModule, KeyMapping, rename, rename_layer, with_prefix
from longspan.layout import TokenLayout
from longspan.mechanisms import build_mechanism
from longspan.models import layers
from longspan.models.positions import DynamicPositionBias as _DynamicPositionBias
from longspan.models.residual import BranchState, HyperConnection, ResidualBranch, StackState
from longspan.models.transformer import LanguageModel, Transformer

__all__ = ["Cache", "DynamicPositionBias", "FeedForward", "LocalMHA", "LocalTransformer", "top_k"]


class LocalMHA(CompatModule):
    """Multi-head local attention, (b, n, dim) -> (b, n, dim), without a residual connection.

    Other arguments are those of `LocalAttention`.

    Args:
        qk_rmsnorm: Normalize queries and keys, with learned scales, and multiply scores by qk_scale.
        dropout: Of the attention weights.
        exact_windowsize: By default True.
    """

    model: ResidualBranch

    @init_from(MHAOptions)
    def __init__(self, options: MHAOptions) -> None:
        super().__init__()
        self.config = options.attention(options.window_size, options.dropout, rotary=options.use_rotary_pos_emb)
        self.causal, self.window_size, self.heads = options.causal, options.window_size, options.heads
        self.model = ResidualBranch(layers.Attention(options.dim, self.config, causal=options.causal), options.dim)
        if not options.prenorm:
            self.model.norm = None

    def key_mappings(self) -> Iterator[KeyMapping]:
        return keys.attention_keys(self.model, self.config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cache: BranchState | None = None,
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
        branch = self.model if attn_bias is None else self._with_bias(attn_bias)
        start = None if cache is None else cache.inner[0].length
        layout = TokenLayout.of(x, causal=self.causal, key_mask=as_bool(mask), start=start)
        if cache is None and not (return_cache and self.causal):
            out = branch(x, layout, None, None)
            return (out, None) if return_cache else out
        if not self.causal:
            raise ValueError("a cache is for causal attention only: omit it, or build the layer with causal=True")
        if cache is None:
            state = branch.new_state(len(x), max_length=None, device=x.device, dtype=x.dtype)
        else:
            state = cache.clone()  # the caller may use the same cache again
        out, state = branch.extend(x, layout, state)
        return (out, state) if return_cache else out

    def _with_bias(self, table: Tensor) -> ResidualBranch:
        """Return the branch, sharing its weights, with a bias in its mechanism."""
        assert isinstance(self.model.layer, layers.Attention)
        current, spec = self.model.layer.mechanism, self.config.mechanism
        assert isinstance(spec, Mapping)
        options = {name: value for name, value in spec.items() if name != "mechanism"}
        if table.shape[0] != current.num_heads:
            table = table.repeat(current.num_heads // table.shape[0], 1, 1)
        mechanism = build_mechanism("local", current.num_heads, current.head_dim, bias=table, **options)
        layer = with_children(self.model.layer, mechanism=mechanism.train(self.training))
        return with_children(self.model, layer=layer)


class FeedForward(CompatModule):
    """Layer norm and a gated feed-forward layer, without a residual connection."""

    model: ResidualBranch

    def __init__(self, dim: int, mult: float = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = ResidualBranch(layers.FeedForward(dim, feed_forward_config(dim, mult, dropout)), dim)

    def key_mappings(self) -> Iterator[KeyMapping]:
        return keys.feed_forward_keys()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, n, dim) to (b, n, dim)."""
        return self.model(x, TokenLayout.of(x, causal=False), None, None)


class DynamicPositionBias(CompatModule):
    """Learned bias (heads, i, j) of the distances between the last i of j tokens and all j tokens."""

    model: _DynamicPositionBias

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.model = _DynamicPositionBias(heads, dim)

    def key_mappings(self) -> Iterator[KeyMapping]:
        return keys.bias_keys("", [""])

    def forward(self, i: int, j: int) -> Tensor:
        """Return the bias of i queries and j keys."""
        if j < i:
            raise ValueError(f"the number of keys, j, must be at least that of queries, i, got i = {i} and j = {j}")
        position = torch.arange(j, device=next(self.parameters()).device)
        return self.model(position)[:, (position[j - i :, None] - position).abs()]


class Cache(NamedTuple):
    """State of a LocalTransformer after some tokens; None if it recomputes all tokens."""

    cache_kv: StackState | None
    maybe_cached_attn_bias: None = None


class LocalTransformer(CompatModule):
    """Language model of local attention; with num_tokens=None, its layers: (b, n, dim) -> (b, n, dim).

    Other arguments are those of LocalMHA.

    Args:
        global_attn_layer: A module (b, n, dim) -> (b, n, dim), copied before the local attention of some layers.
        layers_insert_global_attn: These layers, counted from 1; all by default.
        num_residual_streams: 1 for an ordinary residual connection.
    """

    model: LanguageModel | Transformer

    @init_from(TransformerOptions)
    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        self.max_seq_len, self.ignore_index, self.causal = options.max_seq_len, options.ignore_index, options.causal
        self.has_embed_unembed = options.num_tokens is not None
        config = options.config()
        self.model = LanguageModel(config) if self.has_embed_unembed else Transformer(config)
        self.global_layers = options.global_layers
        if options.global_attn_layer is not None:
            self._insert(options.global_attn_layer)

    def key_mappings(self) -> Iterator[KeyMapping]:
        prefix = "transformer." if self.has_embed_unembed else ""
        if self.has_embed_unembed:
            yield rename("token_emb.weight", "embedding.weight")
            yield rename("pos_emb.weight", "positions.table")
            yield from rename_layer("to_logits.0", "transformer.norm")
            yield rename("to_logits.1.weight", "to_logits.weight")
        attention, stack, biases = self.model.config.attention, self._transformer.stack, []
        for i, ((old, kind), branch) in enumerate(zip(self._branches(), stack.branches, strict=True)):
            assert isinstance(branch, ResidualBranch)
            if kind == "attention":
                mappings: Iterable[KeyMapping] = keys.attention_keys(branch, attention)
                biases.append(f"{prefix}stack.branches.{i}.layer.mechanism.bias.")
            elif kind == "feed_forward":
                mappings = keys.feed_forward_keys()
            else:
                mappings = [rename(key, f"layer.{key}") for key in branch.layer.state_dict()]
            yield from with_prefix(mappings, f"{old}.branch.", f"{prefix}stack.branches.{i}.")
            if stack.topology == "hyper":
                yield from with_prefix(keys.HYPER_CONNECTION_KEYS, f"{old}.", f"{prefix}stack.connections.{i}.")
        if attention.dynamic_bias:
            yield from keys.bias_keys("dynamic_pos_bias.", biases)

    def upgrade_key(self, key: str) -> str:
        """Return the current key: releases without residual streams had no `branch`."""
        found = re.fullmatch(r"(layers\.\d+\.[01])\.((?!branch\.|norm\.gamma|static_|dynamic_).*)", key)
        return f"{found[1]}.branch.{found[2]}" if found else key

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        stack = self._transformer.stack
        missing = {key for key in self.state_dict() if key not in shapes and not key.endswith(".inv_freq")}
        streams = {f"{old}.{mapping.old[0]}" for old, _ in self._branches() for mapping in keys.HYPER_CONNECTION_KEYS}
        if stack.topology != "hyper" or missing != streams:
            return
        warnings.warn(
            "this checkpoint has no weights for residual streams: the model now has ordinary residual connections, as "
            "with num_residual_streams=1",
            stacklevel=5,
        )
        stack.topology, stack.connections = "single", nn.ModuleList()
        for module in (self.model, self._transformer):
            module.config = replace(module.config, residual="single")

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
        if not isinstance(self.model, LanguageModel):
            raise ValueError("num_tokens is None: this model cannot generate tokens")
        if temperature < 0:
            raise ValueError(f"temperature must be 0 (the most likely token) or more, got {temperature}")
        return generate(
            self,
            prime,
            seq_len,
            FilterSampler(prime, top_k, filter_thres, temperature),
            max_length=self.max_seq_len,
            model=self.model if use_kv_cache and self._supports_cache else None,
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
        state = None if cache is None else cache.cache_kv
        if cache is None and not (return_cache and self._supports_cache):
            out = self.model(x, key_mask=mask)
        elif not self._supports_cache:
            out = self.model(x, key_mask=mask)[:, -1:]
        elif state is None:
            out, state = self.model.extend(x, self.model.new_state(len(x)), key_mask=mask)
        else:
            if mask is not None:
                raise ValueError("mask cannot be combined with a cache: pass it in the call that fills the cache")
            num_new = x.shape[1] - int(state.length.max())
            if num_new < 1:
                raise ValueError(
                    f"with a cache, x must contain all tokens so far and new ones: got {x.shape[1]} tokens, the cache "
                    f"contains {int(state.length.max())}"
                )
            out, state = self.model.extend(x[:, -num_new:], state.clone())  # the caller may use the cache again
            out = out[:, -1:]
        return (out, Cache(state)) if return_cache else out

    def _loss(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: this model has no loss")
        labels, x = x[:, 1:], x[:, :-1]
        if self.ignore_index < 0:
            x = x.masked_fill(x == self.ignore_index, 0)  # not a token
        labels, mask = shift_labels(labels, mask, self.ignore_index)
        logits = self.model(x, key_mask=mask)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)

    @property
    def _transformer(self) -> Transformer:
        return self.model.transformer if isinstance(self.model, LanguageModel) else self.model

    @property
    def _supports_cache(self) -> bool:
        """Whether the model can decode from a state: it is causal and has no user-defined modules."""
        return self.causal and not self.global_layers

    def _branches(self) -> Iterator[tuple[str, str]]:
        """Yield the old prefix and the kind of each branch."""
        for i in range(self.model.config.depth):
            if i + 1 in self.global_layers:
                yield f"global_layers.{i}", "global"
            yield f"layers.{i}.0", "attention"
            yield f"layers.{i}.1", "feed_forward"

    def _insert(self, module: nn.Module) -> None:
        config, stack = self.model.config, self._transformer.stack
        for i, (_, kind) in enumerate(self._branches()):
            if kind == "global":
                branch = ResidualBranch(copy.deepcopy(module), config.dim)
                branch.norm = None
                stack.branches.insert(i, branch)
                if stack.topology == "hyper":
                    stack.connections.insert(i, HyperConnection(config.num_streams, config.dim, i))
