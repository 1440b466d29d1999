"""Layers on x: those of the older packages, and longspan's replacements with the same arguments and weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from longspan.bench.subjects.base import (
    AccuracyCheck,
    Case,
    Status,
    Subject,
    Workload,
    attention_workload,
    relative_error,
    small_case,
    trainable,
)
from longspan.bench.subjects.mechanisms import TOLERANCES
from longspan.bench.subjects.peers import LAYER_PEERS, unavailable


@dataclass(frozen=True)
class LayerSubject(Subject):
    """longspan's replacement of a layer of `LAYER_PEERS`.

    Attributes:
        layer: The name of the layer.
        compile: The mode of `torch.compile`, or "off".
        autocast: Use autocast and float32 parameters instead of half-precision parameters.
    """

    layer: str
    compile: str = "off"
    autocast: bool = False

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        return unavailable("torch", case, not_causal=LAYER_PEERS[self.layer].not_causal)

    def workload(self, case: Case) -> Workload:
        layer = LAYER_PEERS[self.layer].build(case, ours=True)
        return layer_workload(case, layer, self.autocast, self.compile)

    def check(self, case: Case) -> AccuracyCheck:
        """Compare output and gradients, in the measured dtype, with the same layer in float64."""
        case = small_case(replace(case, dtype="float32") if self.autocast else case)
        layer = LAYER_PEERS[self.layer].build(case, ours=True).to(case.device, case.torch_dtype)
        x, d_out = random_x(case), random_x(case)
        reference = _results(copy.deepcopy(layer).double(), x.double(), d_out)
        return AccuracyCheck(
            relative_error(_results(layer, x, d_out), reference), TOLERANCES[case.dtype], "itself in float64"
        )


@dataclass(frozen=True)
class PeerLayerSubject(Subject):
    """A layer of `LAYER_PEERS` as its package provides it."""

    layer: str
    autocast: bool = False

    @property
    def package(self) -> str:
        return LAYER_PEERS[self.layer].package

    def unavailable(self, case: Case) -> tuple[Status, str] | None:
        return unavailable(self.package, case, not_causal=LAYER_PEERS[self.layer].not_causal)

    def workload(self, case: Case) -> Workload:
        return layer_workload(case, LAYER_PEERS[self.layer].build(case, ours=False), self.autocast)

    def check(self, case: Case) -> AccuracyCheck:
        """Compare output and input gradient in float32 with longspan's replacement in float64, with equal weights."""
        case = small_case(replace(case, dtype="float32"))
        original, replacement = (LAYER_PEERS[self.layer].build(case, ours=ours) for ours in (False, True))
        replacement.load_state_dict(original.state_dict())
        x, d_out = random_x(case), random_x(case)
        only_last = case.causal and LAYER_PEERS[self.layer].leaks
        if only_last:
            d_out[:, :-1] = 0
        results = (
            _results(original.to(case.device), x, d_out),
            _results(replacement.double().to(case.device), x.double(), d_out),
        )
        pairs = [[out[:, -1:] if only_last else out, d_x] for out, d_x, *_ in results]
        return AccuracyCheck(relative_error(*pairs), TOLERANCES["float32"], "longspan with its weights in float64")


def layer_subjects(mechanism: str, compile_mode: str, autocast: bool, with_peers: bool) -> list[list[Subject]]:
    """Return, for each layer of a mechanism, longspan's replacement and the original."""
    return [
        [
            LayerSubject(f"longspan for {name}{', autocast' * autocast}", name, compile_mode, autocast),
            *([PeerLayerSubject(f"{name}{', autocast' * autocast}", name, autocast)] * with_peers),
        ]
        for name, layer in LAYER_PEERS.items()
        if layer.mechanism == mechanism
    ]


def layer_workload(case: Case, layer: nn.Module, autocast: bool, compile_mode: str = "off") -> Workload:
    """Return the steps of a layer, with gradients of its input and parameters."""
    parameters = torch.float32 if autocast else case.torch_dtype
    layer = layer.to(case.device, parameters)
    x = random_x(case).to(parameters).requires_grad_()
    gradient = torch.randn_like(x).to(case.torch_dtype)
    call: Callable[[Tensor], Tensor] = layer if compile_mode == "off" else torch.compile(layer, mode=compile_mode)

    def forward() -> list[Tensor]:
        with torch.autocast(case.device, case.torch_dtype, enabled=autocast):
            out = call(x)
        return [out.to(gradient.dtype)]

    return attention_workload(forward, [x, *trainable(layer)], [gradient])


def random_x(case: Case) -> Tensor:
    """Return standard normal x of shape (B, T, dim)."""
    return torch.randn(case.batch_size, case.length, case.dim, device=case.device).to(case.torch_dtype)


def _results(layer: nn.Module, x: Tensor, d_out: Tensor) -> list[Tensor]:
    """The output and the gradients of x and of matrices.

    PyTorch sums the gradients of norms in bfloat16 if that is their dtype; they are left out.
    """
    x = x.detach().requires_grad_()
    out, matrices = layer(x), [parameter for parameter in trainable(layer) if parameter.ndim > 1]
    return [out, *torch.autograd.grad(out, [x, *matrices], d_out.to(out.dtype), materialize_grads=True)]
