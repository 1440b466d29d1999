"""Whole layers as subjects: those of the older packages, and longspan's in their place with the same arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.bench.runner import Case, Check, Status, Subject, Work
from longspan.bench.subjects.mechanisms import TOLERANCES, attention_work, relative_error, small, trained
from longspan.bench.subjects.peers import installed_version, not_installed


class Layer(NamedTuple):
    """A class that a package and its stand-in in `longspan.compat` both have.

    not_causal: why it is not measured causally. leaks: whether the future moves the past in the older one when it is
    causal, so that only the last token is right.
    """

    mechanism: str
    package: str
    kind: str
    arguments: Callable[[Case], Mapping[str, Any]]
    not_causal: str = ""
    leaks: bool = False

    def build(self, case: Case, ours: bool) -> nn.Module:
        """Without dropout, in float32, where it is measured: a long table takes seconds to draw on a CPU."""
        module = import_module(("longspan.compat." if ours else "") + self.package.replace("-", "_"))
        with torch.device(case.device):
            return getattr(module, self.kind)(**self.arguments(case)).eval()


def _linear(case: Case) -> dict[str, Any]:
    sizes = {"dim": case.dim, "heads": case.num_heads, "dim_head": case.head_dim, "max_seq_len": case.length}
    return {**sizes, "depth": 1, "causal": case.causal, "blindspot_size": 64 if case.causal else 1}


def _performer(case: Case) -> dict[str, Any]:
    sizes = {"dim": case.dim, "heads": case.num_heads, "dim_head": case.head_dim}
    return {**sizes, "causal": case.causal, "nb_features": 256}


def _local(case: Case) -> dict[str, Any]:
    sizes = {"dim": case.dim, "heads": case.num_heads, "dim_head": case.head_dim}
    return {**sizes, "causal": case.causal, "window_size": 256, "exact_windowsize": True}


def _linformer(case: Case) -> dict[str, Any]:
    sizes = {"dim": case.dim, "heads": case.num_heads, "dim_head": case.head_dim, "seq_len": case.length}
    return {**sizes, "k": 256, "one_kv_head": True, "share_kv": True}


def _linformer_pytorch(case: Case) -> dict[str, Any]:
    sizes = {"channels": case.dim, "nhead": case.num_heads, "dim_d": case.head_dim, "input_size": case.length}
    return {**sizes, "dim_k": 256, "dropout": 0.0, "dropout_ff": 0.0}


LAYERS = {
    "linear-attention-transformer, with feed-forward": Layer(
        "linear", "linear-attention-transformer", "LinearAttentionTransformer", _linear
    ),
    "performer-pytorch, 256 features": Layer("performer", "performer-pytorch", "SelfAttention", _performer, leaks=True),
    "local-attention, 257 keys": Layer("local", "local-attention", "LocalMHA", _local),
    "linformer, k 256, one shared head": Layer(
        "linformer", "linformer", "LinformerSelfAttention", _linformer, "linformer has no causal mode"
    ),
    "linformer-pytorch, k 256, with feed-forward": Layer(
        "linformer",
        "linformer-pytorch",
        "Linformer",
        _linformer_pytorch,
        "linformer-pytorch's causal mode sees the future",
    ),
}


@dataclass(frozen=True)
class OurLayer(Subject):
    """longspan in the place of a layer of `LAYERS`. autocast: half precision by autocast, not of the parameters."""

    layer: str
    compiled: bool = False
    autocast: bool = False

    def unfit(self, case: Case) -> tuple[Status, str] | None:
        reason = LAYERS[self.layer].not_causal
        return ("not supported", reason) if case.causal and reason else None

    def work(self, case: Case) -> Work:
        layer = LAYERS[self.layer].build(case, ours=True)
        return layer_work(case, layer, self.autocast, self.compiled)

    def check(self, case: Case) -> Check:
        """Output and gradients, in the dtype that is measured, against the same in float64."""
        case = small(replace(case, dtype="float32") if self.autocast else case)
        single = LAYERS[self.layer].build(case, ours=True).to(case.device, case.torch_dtype)
        double = copy.deepcopy(single).double()
        x, d = random_vectors(case), random_vectors(case)
        error = relative_error(_results(single, x, d), _results(double, x.double(), d))
        return Check(error, TOLERANCES[case.dtype], "itself in float64")


@dataclass(frozen=True)
class TheirLayer(Subject):
    """A layer of `LAYERS` as its package has it."""

    layer: str
    autocast: bool = False

    @property
    def package(self) -> str:
        return LAYERS[self.layer].package

    def unfit(self, case: Case) -> tuple[Status, str] | None:
        if case.causal and LAYERS[self.layer].not_causal:
            return "not supported", LAYERS[self.layer].not_causal
        if installed_version(self.package) is None:
            return "not installed", not_installed(self.package)
        return None

    def work(self, case: Case) -> Work:
        return layer_work(case, LAYERS[self.layer].build(case, ours=False), self.autocast)

    def check(self, case: Case) -> Check:
        """Output and gradient in float32 against ours in float64, with its weights."""
        case = small(replace(case, dtype="float32"))
        theirs = LAYERS[self.layer].build(case, ours=False)
        ours = LAYERS[self.layer].build(case, ours=True)
        ours.load_state_dict(theirs.state_dict())
        x, d = random_vectors(case), random_vectors(case)
        last = case.causal and LAYERS[self.layer].leaks
        if last:
            d[:, :-1] = 0
        found, truth = _results(theirs.to(case.device), x, d), _results(ours.double().to(case.device), x.double(), d)
        pairs = [[out[:, -1:] if last else out, d_x] for out, d_x, *_ in (found, truth)]
        return Check(relative_error(*pairs), TOLERANCES["float32"], "ours with its weights in float64")


def layers(mechanism: str, compiled: bool, with_peers: bool) -> list[list[Subject]]:
    """For each layer of a mechanism ours and theirs."""
    found: list[list[Subject]] = []
    for name, layer in LAYERS.items():
        if layer.mechanism == mechanism:
            ours: Subject = OurLayer(f"longspan for {name}", name, compiled)
            found.append([ours, TheirLayer(name, name)] if with_peers else [ours])
    return found


def layer_work(case: Case, layer: nn.Module, autocast: bool, compiled: bool = False) -> Work:
    """Vectors through a layer, and gradients of vectors and parameters."""
    parameters = torch.float32 if autocast else case.torch_dtype
    layer = layer.to(case.device, parameters)
    x = random_vectors(case).to(parameters).requires_grad_()
    gradient = torch.randn_like(x).to(case.torch_dtype)
    call: Callable[[Tensor], Tensor] = torch.compile(layer) if compiled else layer

    def forward() -> list[Tensor]:
        with torch.autocast(case.device, case.torch_dtype, enabled=autocast):
            out = call(x)
        return [out.to(gradient.dtype)]

    return attention_work(forward, [x, *trained(layer)], [gradient])


def random_vectors(case: Case) -> Tensor:
    """Standard normal x: (B, T, dim)."""
    return torch.randn(case.batch_size, case.length, case.dim, device=case.device).to(case.torch_dtype)


def _results(layer: nn.Module, x: Tensor, d: Tensor) -> list[Tensor]:
    """The output, the gradient of x, and those of matrices, where d is the gradient of the output.

    PyTorch sums the gradients of a norm in bfloat16 where that is their dtype: they would tell nothing.
    """
    x = x.detach().requires_grad_()
    out, matrices = layer(x), [parameter for parameter in trained(layer) if parameter.ndim > 1]
    return [out, *torch.autograd.grad(out, [x, *matrices], d.to(out.dtype), materialize_grads=True)]
