"""Containers for pairs of layers; a reversible one returns the sum of its two streams."""

from longspan.compat import containers
from longspan.compat.containers import (
    Deterministic,
    ReversibleBlock,
    SequentialSequence,
    _ReversibleFunction,
    layer_drop,
    route_args,
)

__all__ = [
    "Deterministic",
    "ReversibleBlock",
    "ReversibleSequence",
    "SequentialSequence",
    "_ReversibleFunction",
    "layer_drop",
    "route_args",
]


class ReversibleSequence(containers.ReversibleSequence):
    """Apply pairs of layers to two residual streams and return their sum."""

    sum_streams = True
