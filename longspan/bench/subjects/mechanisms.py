"""longspan's own mechanisms as subjects, in the variants that compute what their peers compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.bench.runner import Case, Check, Step, Subject, Work
from longspan.mechanisms import build_mechanism, mechanisms
from longspan.protocol import Mechanism

# Of the largest true value. Halves round what goes in and out, and in float64 the same inputs are not rounded again.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}

Options = Callable[[Case], dict[str, Any]]


def _defaults(case: Case) -> dict[str, Any]:
    return {}


def _softmax_map(case: Case) -> dict[str, Any]:
    if case.causal:
        return {"feature_map": "softmax"}
    return {"feature_map": "softmax", "normalize": "feature", "output_scale": case.head_dim**-0.5}


# The first variant of each mechanism is the one that its peers' ratios refer to.
VARIANTS: dict[str, dict[str, Options]] = {
    "linear": {"linear, softmax map": _softmax_map, "linear, default map": _defaults},
    "performer": {
        "performer, 256 features": lambda case: {"num_features": 256},
        "performer, 256 features, epsilon": lambda case: {"num_features": 256, "epsilon": 1e-4},
    },
    "local": {
        "local, 257 keys": lambda case: {"window": 257},  # what local-attention sees with window_size=256
        "local, 256 keys": lambda case: {"window": 256},
    },
    "linformer": {"linformer, rank 256": lambda case: {"rank": 256, "max_length": case.length}},
    "split": {
        "split, half local, half performer": lambda case: {
            "parts": [
                {"mechanism": "local", "num_heads": case.num_heads // 2, "window": 256},
                {
                    "mechanism": "performer",
                    "num_heads": case.num_heads - case.num_heads // 2,
                    "num_features": 256,
                },
            ]
        }
    },
}


@dataclass(frozen=True)
class Ours(Subject):
    """A registered mechanism in one of its `VARIANTS`, by default with its default options."""

    mechanism: str

    def build(self, case: Case) -> Mechanism:
        """The mechanism, with random weights, in float32, where it is measured."""
        options = VARIANTS.get(self.mechanism, {}).get(self.name, _defaults)
        with torch.device(case.device):
            return build_mechanism(self.mechanism, case.num_heads, case.head_dim, **options(case)).eval()

    def work(self, case: Case) -> Work:
        mechanism = self.build(case).to(case.device, case.torch_dtype)
        leaves = [x.requires_grad_() for x in random_qkv(case)]
        gradient = torch.randn_like(leaves[2])
        return attention_work(
            lambda: [mechanism(*leaves, causal=case.causal)], [*leaves, *trained(mechanism)], [gradient]
        )

    def check(self, case: Case) -> Check:
        """Output and gradients, in the dtype that is measured, against the same mechanism in float64."""
        case = small(case)
        single = self.build(case).to(case.device, case.torch_dtype)
        made, given, d = [], random_qkv(case), random_qkv(case)[0]
        for mechanism in (single, copy.deepcopy(single).double()):
            dtype = case.torch_dtype if mechanism is single else torch.float64
            leaves = [x.to(dtype).requires_grad_() for x in given]
            out = mechanism(*leaves, causal=case.causal)
            wanted = [*leaves, *trained(mechanism)]
            made.append([out, *torch.autograd.grad(out, wanted, d.to(dtype), materialize_grads=True)])
        return Check(relative_error(made[0], made[1]), TOLERANCES[case.dtype], "itself in float64")


def ours(mechanism: str) -> list[Ours]:
    """The variants of a mechanism, the one to compare with first."""
    return [Ours(name, mechanism) for name in VARIANTS.get(mechanism, {mechanism: None})]


def names() -> list[str]:
    """Every mechanism that can be measured."""
    return list(mechanisms())


def small(case: Case) -> Case:
    """The case at the size of a check."""
    # Long enough for two windows, eight buckets and twice the rank; small enough that a check takes no time.
    return replace(case, length=512, batch_size=1, num_heads=2)


def random_qkv(case: Case) -> list[Tensor]:
    """Standard normal q, k and v: (B, T, H, D) each."""
    shape = (case.batch_size, case.length, case.num_heads, case.head_dim)
    return [torch.randn(shape, device=case.device).to(case.torch_dtype) for _ in range(3)]


def trained(module: torch.nn.Module) -> list[Tensor]:
    """The parameters that get gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def attention_work(
    forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Work:
    """Work whose backward starts from given gradients of the outputs and ends in new gradients of the leaves."""

    def forward_backward() -> list[Tensor]:
        out = forward()
        found = torch.autograd.grad(out, leaves, gradients, allow_unused=True)
        return [*out, *(gradient for gradient in found if gradient is not None)]

    return {"forward": Step(forward), "forward_backward": Step(forward_backward, gradients=True)}


def relative_error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The worst, over tensors, of the largest difference relative to the largest true value; NaN if there is one."""
    errors = [
        (x.detach().double() - true.detach()).abs().max() / true.detach().abs().max()
        for x, true in zip(found, truth, strict=True)
    ]
    return float(torch.stack(errors).max())
