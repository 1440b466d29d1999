"""Attention layers and a transformer of local windows."""

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

from longspan.compat.generate import FilterSampler, decode, top_k
from longspan.compat.local_attention.keys import (
    CONNECTION,
    attention_config,
    attention_entries,
    bias_entries,
    feed_forward_config,
    feed_forward_entries,
    refuse_unknown,
    with_children,
)
from longspan.compat.state_dict import CompatModule, KeyMapping, rename, rename_layer
from longspan.layout import TokenLayout
from longspan.mechanisms import build_mechanism
from longspan.models import layers
from longspan.models.config import LegacyConfig, ModelConfig
from longspan.models.positions import DynamicPositionBias as Bias
from longspan.models.residual import BranchState, HyperConnection, ResidualBranch, StackState
from longspan.models.transformer import LanguageModel, Transformer

# What LocalMHA hands on to LocalAttention, and LocalTransformer to LocalMHA.
_OF_ATTENTION = ("look_backward", "look_forward", "shared_qk", "rel_pos_emb_config", "use_rotary_pos_emb")
_OF_LAYERS = ("qk_rmsnorm", "qk_scale", "exact_windowsize", "gate_values_per_head", *_OF_ATTENTION[:-1])


class LocalMHA(CompatModule):
    """Multi-head attention over windows: x (b, n, dim) -> (b, n, dim), without a residual.

    qk_rmsnorm: queries and keys of length one, with learned scales, and scores times qk_scale. dropout: on the weights.
    exact_windowsize: by default True. Further arguments are those of LocalAttention.
    """

    model: ResidualBranch

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
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_unknown("LocalMHA", kwargs, _OF_ATTENTION)
        self.config = attention_config(
            dim_head=dim_head,
            heads=heads,
            window_size=window_size,
            causal=causal,
            dropout=dropout,
            qk_rmsnorm=qk_rmsnorm,
            qk_scale=qk_scale,
            use_xpos=use_xpos,
            xpos_scale_base=xpos_scale_base,
            exact_windowsize=exact_windowsize,
            gate_values_per_head=gate_values_per_head,
            **kwargs,
        )
        self.causal, self.window_size, self.heads = causal, window_size, heads
        self.model = ResidualBranch(layers.Attention(dim, self.config, causal=causal), dim)
        if not prenorm:
            self.model.norm = None

    def key_mappings(self) -> Iterator[KeyMapping]:
        return attention_entries(self.model, self.config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cache: BranchState | None = None,
        return_cache: bool = False,
    ) -> Any:
        """(b, n, dim), and with return_cache what a causal layer needs to go on from here: it is its `cache` then.

        mask: (b, n), True = keep. attn_bias: (heads, window_size, all that a window sees).
        """
        branch = self.model if attn_bias is None else self._biased(attn_bias)
        start = None if cache is None else cache.inner[0].length
        rows = TokenLayout.of(x, causal=self.causal, key_mask=None if mask is None else mask.bool(), start=start)
        if cache is None and not (return_cache and self.causal):
            out = branch(x, rows, None, None)
            return (out, None) if return_cache else out
        if not self.causal:
            raise ValueError("a cache is for causal attention only: leave it out, or build the layer with causal=True")
        if cache is None:
            state = branch.new_state(len(x), max_length=None, device=x.device, dtype=x.dtype)
        else:
            state = cache.clone()  # What was given may be used again.
        out, state = branch.extend(x, rows, state)
        return (out, state) if return_cache else out

    def _biased(self, table: Tensor) -> ResidualBranch:
        """The same weights around a mechanism with this bias."""
        assert isinstance(self.model.layer, layers.Attention)
        held, spec = self.model.layer.mechanism, self.config.mechanism
        assert isinstance(spec, Mapping)
        options = {name: value for name, value in spec.items() if name != "mechanism"}
        if table.shape[0] != held.num_heads:
            table = table.repeat(held.num_heads // table.shape[0], 1, 1)
        mechanism = build_mechanism("local", held.num_heads, held.head_dim, bias=table, **options).train(self.training)
        return with_children(self.model, layer=with_children(self.model.layer, mechanism=mechanism))


class FeedForward(CompatModule):
    """LayerNorm and a gated feed-forward layer, without a residual."""

    model: ResidualBranch

    def __init__(self, dim: int, mult: float = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = ResidualBranch(layers.FeedForward(dim, feed_forward_config(dim, mult, dropout)), dim)

    def key_mappings(self) -> Iterator[KeyMapping]:
        return feed_forward_entries()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, TokenLayout.of(x, causal=False), None, None)


class DynamicPositionBias(CompatModule):
    """A bias (heads, i, j) of the distances between the last i of j tokens and all of them."""

    model: Bias

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.model = Bias(heads, dim)

    def key_mappings(self) -> Iterator[KeyMapping]:
        return bias_entries("", [""])

    def forward(self, i: int, j: int) -> Tensor:
        if j < i:
            raise ValueError(f"j, the number of keys, must be at least i, that of queries, got i = {i} and j = {j}")
        place = torch.arange(j, device=next(self.parameters()).device)
        return self.model(place)[:, (place[j - i :, None] - place).abs()]


class Cache(NamedTuple):
    """What a LocalTransformer remembers of the tokens so far; None where it must read them all again."""

    cache_kv: StackState | None
    maybe_cached_attn_bias: None = None


class LocalTransformer(CompatModule):
    """A language model of local attention, or, with num_tokens=None, its layers alone: (b, n, dim) -> (b, n, dim).

    global_attn_layer: a module (b, n, dim) -> (b, n, dim), of which a copy goes before the local attention of the
    layers in layers_insert_global_attn, counted from 1 (None: all). num_residual_streams: 1 is a plain residual.
    Further arguments are those of LocalMHA.
    """

    model: LanguageModel | Transformer

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
        global_attn_layer: nn.Module | None = None,
        layers_insert_global_attn: tuple[int, ...] | None = None,
        num_residual_streams: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse_unknown("LocalTransformer", kwargs, _OF_LAYERS)
        self.max_seq_len, self.ignore_index, self.causal = max_seq_len, ignore_index, causal
        self.has_embed_unembed = num_tokens is not None
        attention = attention_config(
            dim_head=dim_head,
            heads=heads,
            window_size=local_attn_window_size,
            causal=causal,
            dropout=attn_dropout,
            use_xpos=use_xpos,
            xpos_scale_base=xpos_scale_base,
            use_rotary_pos_emb=not use_dynamic_pos_bias,
            dynamic_bias=dim // 2 if use_dynamic_pos_bias else 0,
            **kwargs,
        )
        config = ModelConfig(
            dim=dim,
            depth=depth,
            attention=attention,
            feed_forward=feed_forward_config(dim, ff_mult, ff_dropout),
            final_norm=self.has_embed_unembed,
            positions="learned" if self.has_embed_unembed else "none",
            max_length=max_seq_len,
            causal=causal,
            residual="single" if num_residual_streams == 1 else "hyper",
            num_streams=num_residual_streams,
            vocab_size=num_tokens,
            legacy=LegacyConfig(logits_bias=False),
        )
        self.model = LanguageModel(config) if self.has_embed_unembed else Transformer(config)
        self.global_layers: tuple[int, ...] = ()
        if global_attn_layer is not None:
            chosen = range(1, depth + 1) if layers_insert_global_attn is None else layers_insert_global_attn
            self.global_layers = tuple(sorted(set(chosen)))
            self._insert(global_attn_layer)

    def key_mappings(self) -> Iterator[KeyMapping]:
        inside = "transformer." if self.has_embed_unembed else ""
        if self.has_embed_unembed:
            yield rename("token_emb.weight", "embedding.weight")
            yield rename("pos_emb.weight", "positions.table")
            yield from rename_layer("to_logits.0", "transformer.norm")
            yield rename("to_logits.1.weight", "to_logits.weight")
        attention, stack, biases = self.model.config.attention, self._transformer.stack, []
        for i, ((name, kind), branch) in enumerate(zip(self._places(), stack.branches, strict=True)):
            assert isinstance(branch, ResidualBranch)
            if kind == "attention":
                parts: Iterable[KeyMapping] = attention_entries(branch, attention)
                biases.append(f"{inside}stack.branches.{i}.layer.mechanism.bias.")
            elif kind == "feed_forward":
                parts = feed_forward_entries()
            else:
                parts = [rename(old, f"layer.{old}") for old in branch.layer.state_dict()]
            yield from (part.with_prefix(f"{name}.branch.", f"{inside}stack.branches.{i}.") for part in parts)
            if stack.topology == "hyper":
                yield from (part.with_prefix(f"{name}.", f"{inside}stack.connections.{i}.") for part in CONNECTION)
        if attention.dynamic_bias:
            yield from bias_entries("dynamic_pos_bias.", biases)

    def upgrade_key(self, key: str) -> str:
        """Releases before residual streams had no `branch`."""
        found = re.fullmatch(r"(layers\.\d+\.[01])\.((?!branch\.|norm\.gamma|static_|dynamic_).*)", key)
        return f"{found[1]}.branch.{found[2]}" if found else key

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        stack = self._transformer.stack
        missing = {name for name in self.state_dict() if name not in shapes and not name.endswith(".inv_freq")}
        streams = {f"{place}.{entry.old[0]}" for place, _ in self._places() for entry in CONNECTION}
        if stack.topology != "hyper" or missing != streams:
            return
        warnings.warn(
            "this checkpoint has no weights for residual streams: the model has a plain residual now, as it had; "
            "num_residual_streams=1 builds it so",
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
        **kwargs: Any,
    ) -> Tensor:
        """(b, seq_len) tokens after prime (b, n). use_kv_cache=False reads all tokens again for each. mask: (b, n)."""
        refuse_unknown("generate", kwargs, ("mask",))
        if not isinstance(self.model, LanguageModel):
            raise ValueError("num_tokens is None: this model has no tokens to generate")
        if temperature < 0:
            raise ValueError(f"temperature must be 0 (the likeliest token) or more, got {temperature}")
        before = self.training
        self.eval()
        try:
            return decode(
                prime,
                seq_len,
                FilterSampler(prime, top_k, filter_thres, temperature),
                window=self.max_seq_len,
                mask=kwargs.get("mask"),
                model=self.model if use_kv_cache and self._remembers else None,
                recompute=lambda tokens, mask: self(tokens, mask=None if bool(mask.all()) else mask),
            )
        finally:
            self.train(before)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        return_loss: bool = False,
        return_cache: bool = False,
    ) -> Any:
        """Logits (b, n, num_tokens) of tokens (b, n), or vectors of vectors; with return_loss the mean cross-entropy.

        mask: (b, n), True = keep. return_cache: also what was remembered; `cache`: that again, with all tokens so far,
        for the logits (b, 1, num_tokens) of the last.
        """
        mask = None if mask is None else mask.bool()
        if return_loss:
            return self._loss(x, mask)
        state = None if cache is None else cache.cache_kv
        if cache is None and not (return_cache and self._remembers):
            out = self.model(x, key_mask=mask)
        elif not self._remembers:
            out = self.model(x, key_mask=mask)[:, -1:]
        elif state is None:
            out, state = self.model.extend(x, self.model.new_state(len(x)), key_mask=mask)
        else:
            if mask is not None:
                raise ValueError("with a cache there is no mask: it was for the tokens that the cache holds")
            new = x.shape[1] - int(state.length.max())
            if new < 1:
                raise ValueError(f"with a cache x holds all tokens so far: got {x.shape[1]}, the cache has as many")
            out, state = self.model.extend(x[:, -new:], state.clone())  # What was given may be used again.
            out = out[:, -1:]
        return (out, Cache(state)) if return_cache else out

    def _loss(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.has_embed_unembed:
            raise ValueError("num_tokens is None: this model has no tokens whose loss there could be")
        labels, x = x[:, 1:], x[:, :-1]
        if self.ignore_index < 0:
            x = x.masked_fill(x == self.ignore_index, 0)  # Not a token; where it stands nothing is learnt.
        if mask is not None:
            # Neither padding nor what would follow from padding is learnt.
            kept = mask[:, 1:] & mask[:, :-1] if mask.shape[1] > x.shape[1] else mask
            labels = labels.masked_fill(~kept, self.ignore_index)
            mask = mask[:, : x.shape[1]]
        logits = self.model(x, key_mask=mask)
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.ignore_index)

    @property
    def _transformer(self) -> Transformer:
        return self.model.transformer if isinstance(self.model, LanguageModel) else self.model

    @property
    def _remembers(self) -> bool:
        """Whether tokens can be read once only: causal, and without modules that we do not know."""
        return self.causal and not self.global_layers

    def _places(self) -> Iterator[tuple[str, str]]:
        """The older name of each branch, and what it is."""
        for i in range(self.model.config.depth):
            if i + 1 in self.global_layers:
                yield f"global_layers.{i}", "global"
            yield f"layers.{i}.0", "attention"
            yield f"layers.{i}.1", "feed_forward"

    def _insert(self, module: nn.Module) -> None:
        config, stack = self.model.config, self._transformer.stack
        wrong = [i for i in self.global_layers if not 0 < i <= config.depth]
        if wrong:
            raise ValueError(f"layers_insert_global_attn counts layers from 1 to {config.depth}, got {wrong}")
        for i, (_, kind) in enumerate(self._places()):
            if kind == "global":
                branch = ResidualBranch(copy.deepcopy(module), config.dim)
                branch.norm = None
                stack.branches.insert(i, branch)
                if stack.topology == "hyper":
                    stack.connections.insert(i, HyperConnection(config.num_streams, config.dim, i))
