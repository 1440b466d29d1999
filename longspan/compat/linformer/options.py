"""Translate the arguments of linformer to longspan configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Arguments of LinformerSelfAttention. share_kv: Use the keys as values too."""

    dim: int
    seq_len: int
    k: int = 256
    heads: int = 8
    dim_head: int | None = None
    one_kv_head: bool = False
    share_kv: bool = False
    dropout: float = 0.0

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
            },
        )


@dataclass(frozen=True, kw_only=True)
class LinformerOptions(AttentionOptions):
    """Arguments of Linformer."""

    depth: int
    reversible: bool = False

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

    def config(self) -> ModelConfig:
        return replace(super().config(), vocab_size=self.num_tokens, positions="learned", max_length=self.seq_len)
