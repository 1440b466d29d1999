"""Models and layers of linformer.

Masks are (B, n) bool, True for tokens to attend to; the original has none, and its attention ignores those that it is
given, as ours does with faithful=True.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import GELU

from longspan.compat.compressed import attend_compressed, is_identity, is_plain_linear, is_product, zero_fill
from longspan.compat.faithful import resolve_faithful
from longspan.compat.helpers import GELU_
from longspan.compat.layers import FeedForward, PreNorm, initialize_layers
from longspan.compat.linformer.keys import language_model_keys, stack_keys
from longspan.compat.linformer.options import AttentionOptions, LanguageModelOptions, LinformerOptions
from longspan.compat.linformer.reversible import ReversibleSequence, SequentialSequence
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModel, KeyMapping
from longspan.models.transformer import LanguageModel, Transformer
from longspan.ops import compressed
from longspan.ops.compressed import CompressedProblem, compress, linformer_attention, linformer_layer

# `import *` from the original also gives what it imports.
__all__ = [
    "GELU",
    "GELU_",
    "F",
    "FeedForward",
    "Linformer",
    "LinformerLM",
    "LinformerSelfAttention",
    "PreNorm",
    "Residual",
    "ReversibleSequence",
    "SequentialSequence",
    "default",
    "init_",
    "math",
    "nn",
    "torch",
]

_MODEL_POSITIONAL = "dim seq_len depth k heads dim_head one_kv_head share_kv reversible dropout"


def default(val: Any, default_val: Any) -> Any:
    """Return a value, or default_val if it is None."""
    return default_val if val is None else val


def init_(tensor: Tensor) -> Tensor:
    """Fill a tensor with uniform numbers in ±1/√dim, where dim is its last dimension, and return it."""
    bound = 1 / math.sqrt(tensor.shape[-1])
    with torch.no_grad():
        return tensor.uniform_(-bound, bound)


class Residual(nn.Module):
    """Compute x + fn(x)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, n, dim) to (B, n, dim)."""
        return x + self.fn(x)


class LinformerSelfAttention(nn.Module):
    """Attention over k compressed keys and values, (B, n, dim) -> (B, n, dim).

    Args:
        faithful: Whether masks are ignored, as in the original.
    """

    faithful = False  # in layers that were pickled by the original

    @init_from(AttentionOptions, "dim seq_len k heads dim_head one_kv_head share_kv dropout")
    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        self.faithful = resolve_faithful(options.faithful)
        self.seq_len, self.k, self.heads = options.seq_len, options.k, options.heads
        self.dim_head, self.share_kv = options.head_dim, options.share_kv
        inner = self.heads * self.dim_head
        inner_kv = self.dim_head if options.one_kv_head else inner
        self.to_q = nn.Linear(options.dim, inner, bias=False)
        self.to_k = nn.Linear(options.dim, inner_kv, bias=False)
        self.proj_k = self._new_projection()
        if not self.share_kv:
            self.to_v = nn.Linear(options.dim, inner_kv, bias=False)
            self.proj_v = self._new_projection()
        self.dropout = nn.Dropout(options.dropout)
        self.to_out = nn.Linear(inner, options.dim)

    def _new_projection(self) -> nn.Parameter:
        # Scaled by length, not by k: compressed keys have the magnitude of keys however long the sequence.
        return nn.Parameter(torch.randn(self.seq_len, self.k) * self.seq_len**-0.5)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from x (B, n, dim) to x or, if given, to a context (B, m, dim); hidden tokens keep their slots."""
        if context is None and context_mask is not None:
            raise ValueError("context_mask was given without a context: use mask= for a mask of x")
        if self.faithful:
            mask = context_mask = None
        x = zero_fill(x, mask)
        source = x if context is None else zero_fill(context, context_mask)
        if source.shape[1] > len(self.proj_k):
            raise ValueError(
                f"{source.shape[1]} tokens are more than seq_len ({len(self.proj_k)}); build the layer with a larger "
                "seq_len"
            )
        if context is None and (out := self._fused_layer(x)) is not None:
            return out
        q = self.to_q(x).unflatten(2, (self.heads, -1))
        return self.to_out(self._attend(q, source).flatten(2))

    def _attend(self, q: Tensor, source: Tensor) -> Tensor:
        """Attend from queries (B, n, H, D) to a source (B, m, dim), hidden tokens zero."""
        maps = [self.to_k] if self.share_kv else [self.to_k, self.to_v]
        tables = [self.proj_k] if self.share_kv else [self.proj_k, self.proj_v]
        if self._compresses_first(source):
            # Eᵀ(x Wᵀ) = (Eᵀ x) Wᵀ, which is smaller.
            with torch.autocast(source.device.type, enabled=False):
                source = source.to(q.dtype)
                short = [_compressed(source[:, :, None], table)[:, 0] for table in tables]  # (B, k, dim)
                short = [F.linear(x, map.weight.to(x.dtype)) for x, map in zip(short, maps, strict=True)]
                k, *v = (x.unflatten(2, (-1, self.dim_head)).transpose(1, 2) for x in short)
                return attend_compressed(q, k, v[0] if v else k, self.dropout)
        keys, *values = (map(source).unflatten(2, (-1, self.dim_head)) for map in maps)
        problem = self._problem(keys.shape[2])
        if (
            is_identity(self.dropout)
            and q.dtype == keys.dtype
            and compressed.why_not_triton(q, q.dtype, problem) is None
        ):
            return linformer_attention(q, keys, (values or [keys])[0], tables[0][None], tables[-1][None])
        with torch.autocast(q.device.type, enabled=False):
            k, *v = (_compressed(x, table) for x, table in zip([keys, *values], tables, strict=True))
            return attend_compressed(q, k, v[0] if v else k, self.dropout)

    def _fused_layer(self, x: Tensor) -> Tensor | None:
        """Compute self-attention with shared keys and values in one kernel; None where it does not apply."""
        products = is_product(self.to_q) and is_product(self.to_k) and is_plain_linear(self.to_out)
        if not (x.is_cuda and self.share_kv and products and is_identity(self.dropout)):
            return None
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        problem = self._problem(len(self.to_k.weight) // self.dim_head)
        if compressed.why_not_triton(x, dtype, problem) is not None or self._compresses_first(x) or 0 in x.shape:
            return None
        weights = self.to_q.weight, self.to_k.weight, self.proj_k[None], self.to_out.weight, self.to_out.bias
        return linformer_layer(x, *weights, problem, dtype)

    def _problem(self, num_kv_heads: int) -> CompressedProblem:
        return CompressedProblem(
            self.heads, num_kv_heads, self.dim_head, self.dim_head, self.proj_k.shape[1], self.share_kv
        )

    def _compresses_first(self, source: Tensor) -> bool:
        """Whether compressing tokens before projecting them costs less, and the projections are products."""
        maps = [self.to_k] if self.share_kv else [self.to_k, self.to_v]
        if not all(is_product(map) for map in maps) or 0 in source.shape:
            return False
        dim, rank = source.shape[2], self.proj_k.shape[1]
        return len(maps) * rank * dim <= (rank + dim) * sum(len(map.weight) for map in maps)


def _compressed(x: Tensor, table: Tensor) -> Tensor:
    """Compress x (B, m, h, dim) by a table (at least m, k): (B, h, k, dim), in the dtype of the sums."""
    covered = not torch.compiler.is_compiling() and len(table) == x.shape[1]
    table = table if covered else table[: x.shape[1]]
    return compress(table[None, :, None].to(x.dtype), x)


class Linformer(CompatModel):
    """Transformer of Linformer attention for vectors, (B, n, dim) -> (B, n, dim), with n up to seq_len."""

    faithful = False  # in models that were pickled by the original

    @init_from(LinformerOptions, _MODEL_POSITIONAL)
    def __init__(self, options: LinformerOptions) -> None:
        super().__init__()
        self.options, self.faithful = options, resolve_faithful(options.faithful)
        layers, outputs = nn.ModuleList(), []
        for _ in range(options.depth):
            attention = LinformerSelfAttention(**options.layer())
            feed_forward = FeedForward(options.dim, dropout=options.dropout)
            layers.append(nn.ModuleList([PreNorm(options.dim, attention), PreNorm(options.dim, feed_forward)]))
            outputs += [(attention, attention.to_out), (feed_forward, feed_forward.w2)]
        initialize_layers(outputs)
        sequence = ReversibleSequence if options.reversible else SequentialSequence
        self.net = sequence(layers, args_route={"mask": ((True, False),) * options.depth})
        self.record_structure()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (B, n, dim) to (B, n, dim)."""
        if mask is None:
            return self.net(x)
        _refuse_mask(self.faithful)
        return self.net(zero_fill(x, mask), mask=mask)

    def longspan_model(self) -> Transformer:
        return Transformer(self.options.config())

    def key_mappings(self) -> Iterable[KeyMapping]:
        return stack_keys(self.options)


class LinformerLM(CompatModel):
    """Bidirectional language model: tokens (B, n) -> logits (B, n, num_tokens), with n up to seq_len."""

    @init_from(LanguageModelOptions, f"num_tokens {_MODEL_POSITIONAL}")
    def __init__(self, options: LanguageModelOptions) -> None:
        super().__init__()
        self.options, self.faithful = options, resolve_faithful(options.faithful)
        self.token_emb = nn.Embedding(options.num_tokens, options.dim)
        self.pos_emb = nn.Embedding(options.seq_len, options.dim)
        for table in (self.token_emb, self.pos_emb):
            nn.init.normal_(table.weight, std=0.02)
        self.linformer = Linformer(**options.body())
        self.to_logits = nn.Linear(options.dim, options.num_tokens)
        self.record_structure()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of tokens x (B, n)."""
        length, limit = x.shape[1], getattr(self.pos_emb, "num_embeddings", None)
        if limit is not None and length > limit:
            raise ValueError(f"{length} tokens are more than the {limit} positions of this model (seq_len)")
        x = self.token_emb(x)
        x = x + self.pos_emb(torch.arange(length, device=x.device))
        return self.to_logits(self.linformer(x) if mask is None else self.linformer(x, mask=mask))

    def longspan_model(self) -> LanguageModel:
        return LanguageModel(self.options.config())

    def key_mappings(self) -> Iterable[KeyMapping]:
        return language_model_keys(self.options)


def _refuse_mask(faithful: bool) -> None:
    if faithful:
        raise ValueError("the original takes no mask: build the model without faithful=True to hide tokens")
