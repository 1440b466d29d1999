"""Pairs of layers of one's own, in turn or reversibly."""

from longspan.compat.containers import ReversibleSequence, SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]
