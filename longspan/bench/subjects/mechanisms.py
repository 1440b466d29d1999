"""Attention on q, k and v: longspan's mechanisms in the variants that match their peers, and the peers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
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
    relative_errors,
    small_case,
    trainable,
)
from longspan.bench.subjects.peers import MECHANISM_PEERS, SDPA, MechanismPeer, unavailable
from longspan.mechanisms import build_mechanism
from longspan.protocol import Mechanism
from longspan.train.presets import half_local

# Relative to the largest reference value. The float64 reference gets the inputs rounded to the measured dtype.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


def _softmax_map(case: Case) -> dict[str, Any]:
    if case.causal:
        return {"feature_map": "softmax"}
    return {"feature_map": "softmax", "normalize": "feature", "output_scale": case.head_dim**-0.5}


def half_local_parts(case: Case) -> Any:
    """Return the parts of a split: half of the heads local, half FAVOR+."""
    return half_local(case.num_heads, 256, {"mechanism": "performer", "num_features": 256})["parts"]


# Options by mechanism and name of the variant. Ratios of peers refer to the first variant; None: not in this mode.
VARIANTS: dict[str, dict[str, Callable[[Case], dict[str, Any] | None]]] = {
    "linear": {
        "linear, softmax map": _softmax_map,
        "linear, default map": lambda case: {},
        "linear, softmax map, normalized per query": lambda case: (
            None if case.causal else {"feature_map": "softmax", "normalize": "query"}
        ),
    },
    "performer": {
        "performer, 256 features": lambda case: {"num_features": 256},
        "performer, 256 features, epsilon": lambda case: {"num_features": 256, "epsilon": 1e-4},
    },
    "local": {
        "local, 257 keys": lambda case: {"window": 257},  # as local-attention with window_size=256
        "local, 256 keys": lambda case: {"window": 256},
        "local, blocks of 256": lambda case: {"window": 256, "look_back": 1},
    },
    "linformer": {"linformer, rank 256": lambda case: {"rank": 256, "max_length": case.length}},
    "split": {"split, half local, half performer": lambda case: {"parts": half_local_parts(case)}},
}


@dataclass(frozen=True)
class MechanismSubject(Subject):
    """A registered mechanism in one of its `VARIANTS`, by default with its default options."""

    mechanism: str

    def build(self, case: Case) -> Mechanism:
        """Build the mechanism with random weights, in float32 on the case's device."""
        variant = VARIANTS.get(self.mechanism, {}).get(self.name)
        options = variant(case) if variant is not None else None
        with torch.device(case.device):
            return build_mechanism(self.mechanism, case.num_heads, case.head_dim, **(options or {})).eval()

    def workload(self, case: Case) -> Workload:
        mechanism = self.build(case).to(case.device, case.torch_dtype)
        leaves = [x.requires_grad_() for x in _inputs(mechanism, case)]
        gradient = torch.randn_like(leaves[2])
        return attention_workload(
            lambda: [_attend(mechanism, leaves, case)], [*leaves, *trainable(mechanism)], [gradient]
        )

    def check(self, case: Case) -> AccuracyCheck:
        """Compare output and gradients, in the measured dtype, with the same mechanism in float64."""
        case = small_case(case)
        mechanism = self.build(case).to(case.device, case.torch_dtype)
        inputs, d_out = _inputs(mechanism, case), random_qkv(case)[0]
        results = []
        for each, dtype in ((mechanism, case.torch_dtype), (copy.deepcopy(mechanism).double(), torch.float64)):
            leaves = [x.to(dtype).requires_grad_() for x in inputs]
            out = _attend(each, leaves, case)
            leaves += trainable(each)
            results.append([out, *torch.autograd.grad(out, leaves, d_out.to(dtype), materialize_grads=True)])
        given = ("q", "k", "v", "gates")[: len(inputs)]
        parameters = (name for name, each in mechanism.named_parameters() if each.requires_grad)
        names = ["the output", *(f"the gradient of {name}" for name in (*given, *parameters))]
        errors = relative_errors(*results)
        worst = int(errors.argmax())
        return AccuracyCheck(float(errors[worst]), TOLERANCES[case.dtype], "itself in float64", names[worst])


def _inputs(mechanism: Mechanism, case: Case) -> list[Tensor]:
    """Return standard normal q, k and v, and raw gates where the mechanism has them."""
    inputs = random_qkv(case)
    if mechanism.num_gates:
        inputs.append(torch.randn(*inputs[0].shape[:-1], mechanism.num_gates, device=case.device).to(inputs[0].dtype))
    return inputs


def _attend(mechanism: Mechanism, inputs: Sequence[Tensor], case: Case) -> Tensor:
    q, k, v, *gates = inputs
    return mechanism(q, k, v, causal=case.causal, gates=gates[0] if gates else None)


@dataclass(frozen=True)
class PeerSubject(Subject):
    """A peer by its name in `MECHANISM_PEERS`."""

    @property
    def peer(self) -> type[MechanismPeer]:
        """The adapter of the peer."""
        return MECHANISM_PEERS[self.name]

    @property
    def package(self) -> str:
        return self.peer.package

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        peer = self.peer
        return unavailable(peer.package, case, not_causal=peer.not_causal, not_on_cpu=peer.not_on_cpu)

    def workload(self, case: Case) -> Workload:
        with torch.device(case.device):
            peer = self.peer(case).to(case.torch_dtype)
            leaves = [x.detach().requires_grad_() for x in peer.arrange(*random_qkv(case))]
            gradient = torch.randn(*peer.out_shape(leaves)).to(case.torch_dtype)
        return attention_workload(lambda: [peer(*leaves)], [*leaves, *trainable(peer)], [gradient])

    def check(self, case: Case) -> AccuracyCheck:
        """Compare the output in float32 with the equivalent mechanism in float64, with the peer's weights."""
        case = small_case(replace(case, dtype="float32"))
        peer = self.peer(case)
        mechanism = peer.equivalent().double().eval().to(case.device)
        peer = peer.to(case.device)
        q, k, v = random_qkv(case)
        with torch.no_grad():
            out = peer.restore(peer(*peer.arrange(q, k, v)))
            reference = mechanism(q.double(), k.double(), v.double(), causal=case.causal)
        error = relative_error([peer.compared(out)], [peer.compared(reference)])
        return AccuracyCheck(error, peer.tolerance, f"longspan's {peer.mechanism} in float64")


def mechanism_subjects(mechanism: str, case: Case, with_peers: bool) -> list[Subject]:
    """Return the variants of a mechanism, the one that ratios refer to first, and its peers.

    On CUDA full attention is a peer of every mechanism; on the CPU it would take most of the time.
    """
    variants = VARIANTS.get(mechanism, {mechanism: lambda case: {}})
    subjects: list[Subject] = [
        MechanismSubject(name, mechanism) for name, options in variants.items() if options(case) is not None
    ]
    if with_peers:
        subjects += [
            PeerSubject(name)
            for name, peer in MECHANISM_PEERS.items()
            if (peer.mechanism == mechanism or (name == SDPA and case.device == "cuda"))
            and peer.only_causal in (None, case.causal)
        ]
    return subjects
