"""Pairs of layers of one's own: linformer's containers, which performer-pytorch has too."""

from longspan.compat.linformer.reversible import ReversibleSequence, SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]
