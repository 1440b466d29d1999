"""Containers for pairs of layers, those of linformer."""

from longspan.compat.linformer.reversible import (
    Deterministic,
    ReversibleBlock,
    ReversibleSequence,
    SequentialSequence,
    _ReversibleFunction,
    route_args,
)

__all__ = [
    "Deterministic",
    "ReversibleBlock",
    "ReversibleSequence",
    "SequentialSequence",
    "_ReversibleFunction",
    "route_args",
]
