"""Gated memories on q, k, v and given gates, causally: longspan's operation, and flash-linear-attention's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.bench.subjects.base import (
    AccuracyCheck,
    Case,
    Status,
    Subject,
    Workload,
    attention_workload,
    random_qkv,
    relative_error,
    small_case,
)
from longspan.bench.subjects.mechanisms import TOLERANCES, PeerSubject
from longspan.bench.subjects.peers import SDPA, FlashLinearAttentionPeer, unavailable
from longspan.ops.gated import gated_linear


class GatedVariant(NamedTuple):
    """A recurrence.

    Attributes:
        mechanism: "decay" or "delta".
        gate: "none", "head" or "channel".
        peer: Module and function of flash-linear-attention that compute it.
    """

    mechanism: str
    gate: str
    peer: tuple[str, str]


VARIANTS = {
    "decay, gate per head": GatedVariant("decay", "head", ("simple_gla", "chunk_simple_gla")),
    "decay, gate per channel": GatedVariant("decay", "channel", ("gla", "chunk_gla")),
    "delta, gate per head": GatedVariant("delta", "head", ("gated_delta_rule", "chunk_gated_delta_rule")),
    "delta, no gate": GatedVariant("delta", "none", ("delta_rule", "chunk_delta_rule")),
    "delta, gate per channel": GatedVariant("delta", "channel", ("kda", "chunk_kda")),
}


@dataclass(frozen=True)
class GatedSubject(Subject):
    """longspan's operation in one of the `VARIANTS`, with gradients of q, k, v and the gates."""

    variant: str

    def attend(self, case: Case) -> Callable[..., Tensor]:
        """Return the function to time, of the tensors of `inputs`."""
        delta = VARIANTS[self.variant].mechanism == "delta"

        def attend(q: Tensor, k: Tensor, v: Tensor, **gates: Tensor) -> Tensor:
            return gated_linear(q, k, v, delta=delta, scale=case.head_dim**-0.5, **gates)[0]

        return attend

    def inputs(self, case: Case) -> dict[str, Tensor]:
        """Return random tensors: keys of norm 1, α from 0.9 to 1, and for the delta rule β from 0 to 1."""
        variant = VARIANTS[self.variant]
        q, k, v = random_qkv(case)
        found = {"q": q, "k": F.normalize(k.float(), dim=-1).to(k.dtype), "v": v}
        dtype = torch.promote_types(q.dtype, torch.float32)
        if variant.gate != "none":
            shape = (*q.shape[:-1], 1 if variant.gate == "head" else case.head_dim)
            found["log_decay"] = torch.empty(shape, device=q.device, dtype=dtype).uniform_(0.9, 1).log()
        if variant.mechanism == "delta":
            found["beta"] = torch.rand(q.shape[:-1], device=q.device, dtype=dtype)
        return found

    def workload(self, case: Case) -> Workload:
        inputs = {name: x.requires_grad_() for name, x in self.inputs(case).items()}
        attend, gradient = self.attend(case), torch.randn_like(inputs["v"])
        return attention_workload(lambda: [attend(**inputs)], list(inputs.values()), [gradient])

    def check(self, case: Case) -> AccuracyCheck:
        """Compare output and gradients, in the measured dtype, with longspan's operation in float64."""
        case = small_case(case)
        inputs = self.inputs(case)
        gradient, results = torch.randn_like(inputs["v"]), []
        for attend, double in ((self.attend(case), False), (GatedSubject(self.name, self.variant).attend(case), True)):
            leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
            out = attend(**leaves)
            results.append([out, *torch.autograd.grad(out, list(leaves.values()), gradient.to(out.dtype))])
        return AccuracyCheck(relative_error(*results), TOLERANCES[case.dtype], "longspan in float64")


@dataclass(frozen=True)
class GatedPeerSubject(GatedSubject):
    """flash-linear-attention's function for one of the `VARIANTS`."""

    @property
    def package(self) -> str:
        return FlashLinearAttentionPeer.package

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        return unavailable(self.package, case, not_on_cpu=FlashLinearAttentionPeer.not_on_cpu)

    def attend(self, case: Case) -> Callable[..., Tensor]:
        module, name = VARIANTS[self.variant].peer
        function = getattr(import_module(f"fla.ops.{module}"), name)
        per_head = VARIANTS[self.variant].gate == "head"

        def attend(q: Tensor, k: Tensor, v: Tensor, **gates: Tensor) -> Tensor:
            if "log_decay" in gates:
                log_decay = gates.pop("log_decay")
                gates["g"] = log_decay[..., 0] if per_head else log_decay
            if "beta" in gates:
                gates["beta"] = gates["beta"].to(v.dtype)
            return function(q, k, v, scale=case.head_dim**-0.5, **gates)[0]

        return attend

    def check(self, case: Case) -> AccuracyCheck:
        """Compare the output in bfloat16, which its kernels are made for, with longspan's in float64."""
        case = small_case(replace(case, dtype="bfloat16"))
        inputs = self.inputs(case)
        with torch.no_grad():
            out = self.attend(case)(**inputs)
            truth = GatedSubject(self.name, self.variant).attend(case)(**{n: x.double() for n, x in inputs.items()})
        return AccuracyCheck(relative_error([out], [truth]), TOLERANCES[case.dtype], "longspan in float64")


def gated_subjects(mechanism: str, case: Case, with_peers: bool) -> list[list[Subject]]:
    """Return the comparisons of "decay" or "delta": each variant with its peer and, on CUDA, full attention."""
    comparisons = []
    for name, variant in VARIANTS.items():
        if variant.mechanism == mechanism:
            peers: list[Subject] = [GatedPeerSubject(f"flash-linear-attention, {name}", name)]
            peers += [PeerSubject(SDPA)] * (case.device == "cuda")
            comparisons.append([GatedSubject(name, name), *peers * with_peers])
    return comparisons
