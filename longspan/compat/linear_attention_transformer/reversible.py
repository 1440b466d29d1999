"""Containers for pairs of layers."""

from longspan.compat.containers import (
    Deterministic,
    ReversibleBlock,
    ReversibleSequence,
    SequentialSequence,
    layer_drop,
    route_args,
)

__all__ = [
    "Deterministic",
    "ReversibleBlock",
    "ReversibleSequence",
    "SequentialSequence",
    "layer_drop",
    "route_args",
]
