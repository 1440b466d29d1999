"""Replacement for linformer-pytorch 0.19.3."""

from longspan.compat.linformer_pytorch.linformer_pytorch import (
    FeedForward,
    LinearAttentionHead,
    Linformer,
    LinformerEncDec,
    LinformerLM,
    MHAttention,
    PositionalEmbedding,
    get_EF,
)
from longspan.compat.linformer_pytorch.padder import Padder
from longspan.compat.linformer_pytorch.visualizer import Visualizer

__all__ = [
    "FeedForward",
    "LinearAttentionHead",
    "Linformer",
    "LinformerEncDec",
    "LinformerLM",
    "MHAttention",
    "Padder",
    "PositionalEmbedding",
    "Visualizer",
    "get_EF",
]
