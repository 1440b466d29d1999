"""Translate the arguments of linformer to longspan configurations."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import head_shape


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Arguments of LinformerSelfAttention.

    share_kv: Use the keys as values too. faithful: Compute as the original does; see `longspan.compat.faithful`.
    """

    dim: int
    seq_len: int
    k: int = 256
    heads: int = 8
    dim_head: int | None = None
    one_kv_head: bool = False
    share_kv: bool = False
    dropout: float = 0.0
    faithful: bool | None = None

    @property
    def head_dim(self) -> int:
        """The width of a head.

        Raises:
            ValueError: If it follows from dim, which heads do not divide.
        """
        return head_shape(self.dim, AttentionConfig(num_heads=self.heads, head_dim=self.dim_head))[1]

    def attention(self) -> AttentionConfig:
        """Return the configuration of an attention layer."""
        return AttentionConfig(
            num_heads=self.heads,
            head_dim=self.dim_head,
            num_kv_heads=1 if self.one_kv_head else None,
            shared_kv=self.share_kv,
            mechanism={
                "mechanism": "linformer",
                "rank": self.k,
                "max_length": self.seq_len,
                "share_projection": self.share_kv,
                "dropout": self.dropout,
                "keep_slots": True,
            },
        )


@dataclass(frozen=True, kw_only=True)
class LinformerOptions(AttentionOptions):
    """Arguments of Linformer."""

    depth: int
    reversible: bool = False

    def layer(self) -> dict[str, Any]:
        """Return the arguments of its attention layers."""
        return {field.name: getattr(self, field.name) for field in fields(AttentionOptions)}

    def config(self) -> ModelConfig:
        """Return the configuration of the longspan model."""
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            attention=self.attention(),
            feed_forward=FeedForwardConfig(dropout=self.dropout),
            final_norm=False,
            residual="double" if self.reversible else "single",
            legacy=LegacyConfig(sum_streams=self.reversible),
            execution="reverse" if self.reversible else "keep",
        )


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(LinformerOptions):
    """Arguments of LinformerLM."""

    num_tokens: int

    def body(self) -> dict[str, Any]:
        """Return the arguments of its Linformer."""
        return {field.name: getattr(self, field.name) for field in fields(LinformerOptions)}

    def config(self) -> ModelConfig:
        return replace(super().config(), vocab_size=self.num_tokens, positions="learned", max_length=self.seq_len)
