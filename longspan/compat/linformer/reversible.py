"""Pairs of layers of one's own, in turn or reversibly; here the two streams are added."""

from longspan.compat import sequences
from longspan.compat.sequences import SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]


class ReversibleSequence(sequences.ReversibleSequence):
    """Two streams, the answer their sum."""

    summed = True
