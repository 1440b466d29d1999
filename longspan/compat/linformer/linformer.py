"""Models and layers of linformer.

Masks are (B, n) bool, True for tokens to attend to; the original has none, and ignores those that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor

from longspan.compat.layers import FeedForward
from longspan.compat.linformer.keys import attention_keys, language_model_keys, stack_keys
from longspan.compat.linformer.options import AttentionOptions, LanguageModelOptions, LinformerOptions
from longspan.compat.options import init_from
from longspan.compat.state_dict import CompatModule, KeyMapping
from longspan.models.layers import Attention
from longspan.models.transformer import LanguageModel, Transformer

__all__ = ["FeedForward", "Linformer", "LinformerLM", "LinformerSelfAttention"]

_MODEL_POSITIONAL = "dim seq_len depth k heads dim_head one_kv_head share_kv reversible dropout"


class LinformerSelfAttention(CompatModule):
    """Attention over k compressed keys and values, (B, n, dim) -> (B, n, dim)."""

    model: Attention

    @init_from(AttentionOptions, "dim seq_len k heads dim_head one_kv_head share_kv dropout")
    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        self.seq_len, self.k = options.seq_len, options.k
        self.model = Attention(options.dim, options.attention())

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from x (B, n, dim) to x or, if given, to a context (B, m, dim)."""
        if context is None and context_mask is not None:
            raise ValueError("context_mask was given without a context: use mask= for a mask of x")
        if context is None:
            return self.model(x, key_mask=mask)
        cross_attention = copy.copy(self.model)
        cross_attention.cross = True
        return cross_attention(x, key_mask=mask, context=context, context_mask=context_mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return attention_keys(self.model)


class Linformer(CompatModule):
    """Transformer of Linformer attention for vectors, (B, n, dim) -> (B, n, dim), with n up to seq_len."""

    model: Transformer

    @init_from(LinformerOptions, _MODEL_POSITIONAL)
    def __init__(self, options: LinformerOptions) -> None:
        super().__init__()
        self.model = Transformer(options.config())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (B, n, dim) to (B, n, dim)."""
        return self.model(x, key_mask=mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return stack_keys(self.model)


class LinformerLM(CompatModule):
    """Bidirectional language model: tokens (B, n) -> logits (B, n, num_tokens), with n up to seq_len."""

    model: LanguageModel

    @init_from(LanguageModelOptions, f"num_tokens {_MODEL_POSITIONAL}")
    def __init__(self, options: LanguageModelOptions) -> None:
        super().__init__()
        self.model = LanguageModel(options.config())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of tokens x (B, n)."""
        return self.model(x, key_mask=mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return language_model_keys(self.model)
