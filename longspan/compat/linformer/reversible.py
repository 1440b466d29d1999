"""Containers for pairs of layers; a reversible one returns the sum of its two streams."""

from longspan.compat import containers
from longspan.compat.containers import SequentialSequence

__all__ = ["ReversibleSequence", "SequentialSequence"]


class ReversibleSequence(containers.ReversibleSequence):
    """Apply pairs of layers to two residual streams and return their sum."""

    sum_streams = True
