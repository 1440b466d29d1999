"""Pairs of layers of one's own, in turn or reversibly; here the two streams are added."""

from longspan.compat import containers
from longspan.compat.containers import SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]


class ReversibleSequence(containers.ReversibleSequence):
    """Two streams, the answer their sum."""

    sum_streams = True
