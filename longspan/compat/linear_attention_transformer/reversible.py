"""Containers for pairs of layers."""

from longspan.compat.containers import (
    Deterministic,
    ReversibleBlock,
    ReversibleSequence,
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
