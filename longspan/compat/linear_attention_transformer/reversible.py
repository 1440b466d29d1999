"""Containers for pairs of layers."""

from longspan.compat.containers import ReversibleSequence, SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]
