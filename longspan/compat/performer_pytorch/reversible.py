"""Containers for pairs of layers, those of linformer."""

from longspan.compat.linformer.reversible import ReversibleSequence, SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]
