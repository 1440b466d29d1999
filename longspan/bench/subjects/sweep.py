"""Cells of the sweep: a mechanism with one of its sizes, or a peer, in one case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longspan.bench.subjects.base import Case, Subject
from longspan.bench.subjects.gated import GatedPeerSubject
from longspan.bench.subjects.mechanisms import MechanismSubject, PeerSubject, half_local_parts
from longspan.bench.subjects.peers import SDPA, FlexAttentionPeer, MechanismPeer
from longspan.mechanisms import build_mechanism
from longspan.protocol import Mechanism

# The option of a mechanism that the sweep varies, and its default values on CUDA, the most informative ones first.
SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    "performer": ("num_features", (256, 64, 512, 128, 266, 1024)),
    "local": ("window", (256, 1024, 64, 512)),
    "linformer": ("rank", (256, 64, 128)),
}
FLEX = "FlexAttention"


@dataclass(frozen=True)
class SweepSubject(MechanismSubject):
    """A registered mechanism with default options but for `size`, the value of its option in `SIZES`."""

    size: int | None = None

    def build(self, case: Case) -> Mechanism:
        """Build the mechanism with random weights, in float32 on the case's device."""
        options: dict[str, Any] = {}
        if self.mechanism in SIZES:
            options[SIZES[self.mechanism][0]] = self.size
        if self.mechanism == "linformer":
            options["max_length"] = case.length
        elif self.mechanism == "split":
            options["parts"] = half_local_parts(case)
        with torch.device(case.device):
            return build_mechanism(self.mechanism, case.num_heads, case.head_dim, **options).eval()


@dataclass(frozen=True)
class FlexWindowSubject(PeerSubject):
    """FlexAttention with a sliding window of `window` keys."""

    window: int = 256

    @property
    def peer(self) -> type[MechanismPeer]:
        """The adapter with this window."""
        return type("FlexWindowPeer", (FlexAttentionPeer,), {"options": {"window": self.window}})


def sweep_subjects(mechanism: str, size: int | None, case: Case, with_peers: bool) -> Iterator[Subject]:
    """Yield a mechanism and its peers: full attention for all, and what else computes the same."""
    if with_peers:
        yield PeerSubject(SDPA)
    option = f", {SIZES[mechanism][0]} {size}" if mechanism in SIZES else ""
    yield SweepSubject(f"{mechanism}{option}", mechanism, size)
    if not with_peers or case.device != "cuda":
        return
    if mechanism == "local":
        yield FlexWindowSubject(f"{FLEX}, window {size}", size or 0)
    elif case.causal and mechanism == "linear":
        yield PeerSubject("flash-linear-attention, softmax map")
    elif case.causal and mechanism in ("decay", "delta"):
        variant = f"{mechanism}, gate per head"
        yield GatedPeerSubject(f"flash-linear-attention, {variant}", variant)
