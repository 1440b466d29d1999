"""Replacement for linformer 0.2.3."""

from longspan.compat.linformer.linformer import Linformer, LinformerLM, LinformerSelfAttention

__all__ = ["Linformer", "LinformerLM", "LinformerSelfAttention"]
