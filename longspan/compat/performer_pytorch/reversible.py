"""Containers for pairs of layers; a reversible one returns the sum of its two streams."""

from longspan.compat.containers import Deterministic, ReversibleBlock, SequentialSequence, route_args
from longspan.compat.linformer.reversible import ReversibleSequence

__all__ = ["Deterministic", "ReversibleBlock", "ReversibleSequence", "SequentialSequence", "route_args"]
