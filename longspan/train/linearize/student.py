"""The student: the teacher with other attention, and low-rank adapters on its linear layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from longspan.hf.swap import SwappedAttention, swap_attention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.models.adapter import ADAPTER, ADAPTER_CONFIG
from longspan.ops.window.torch import BLIND


def build_student(teacher: Any, mechanism: str | Mapping[str, Any], keep_layers: Sequence[int]) -> Any:
    """Return a copy of a model in which a mechanism has replaced the attention of all layers but `keep_layers`.

    Raises:
        ValueError: If the architecture is not supported, or a layer does not exist.
    """
    depth = teacher.config.get_text_config().num_hidden_layers
    if any(not 0 <= layer < depth for layer in keep_layers):
        raise ValueError(f"--keep-layers must be from 0 to {depth - 1}, got {','.join(map(str, keep_layers))}")
    layers = [layer for layer in range(depth) if layer not in keep_layers]
    if not layers:
        raise ValueError("--keep-layers names every layer: nothing is left to replace")
    return swap_attention(copy.deepcopy(teacher), mechanism, layers).eval()


def swapped_layers(student: nn.Module) -> dict[str, SwappedAttention]:
    """Return the replaced layers by name."""
    return {name: module for name, module in student.named_modules() if isinstance(module, SwappedAttention)}


def added_parameters(student: nn.Module) -> dict[str, nn.Parameter]:
    """Return what the replaced layers have and the teacher does not: the mechanisms' parameters and their gates."""
    found = {}
    for layer, module in swapped_layers(student).items():
        for name, parameter in module.named_parameters():
            if name.startswith(("mechanism.", "to_mechanism_gates.")):
                found[f"{layer}.{name}"] = parameter
    return found


@contextmanager
def without_memory(student: nn.Module) -> Iterator[bool]:
    """Hide the memories of all mixtures inside the block; yields whether there are any."""
    mixtures = [module for module in student.modules() if isinstance(module, MixtureAttention)]
    before = [mixture.mix_bias.detach().clone() for mixture in mixtures]
    try:
        for mixture in mixtures:
            mixture.mix_bias.data.fill_(BLIND)
        yield bool(mixtures)
    finally:
        for mixture, bias in zip(mixtures, before, strict=True):
            mixture.mix_bias.data.copy_(bias)


class LoraLinear(nn.Module):
    """A linear layer W x + b with an adapter (Hu et al., 2022): W x + b + scale · B A x, where B starts at zero.

    Args:
        base: The layer, nn.Linear or the Conv1D of GPT-2.
        rank: Rows of A.
    """

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear | Conv1D)
        weight = base.weight
        outputs, inputs = weight.shape if isinstance(base, nn.Linear) else weight.shape[::-1]
        self.base, self.scale = base, 2.0
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=weight.device).normal_(std=inputs**-0.5))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, without the adapter."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., inputs) to (..., outputs)."""
        added = nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)
        return self.base(x) + self.scale * added

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Return the layer with the adapter added to its weight."""
        delta = self.scale * self.lora_B @ self.lora_A
        self.base.weight.add_(delta if isinstance(self.base, nn.Linear) else delta.T)
        return self.base


def add_adapters(student: nn.Module, rank: int) -> dict[str, LoraLinear]:
    """Put an adapter on each linear layer that the teacher has too, but not on the output embedding."""
    head = student.get_output_embeddings()  # type: ignore[operator]
    names = [
        name
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    added = set(added_parameters(student))
    found = {}
    for name in names:
        if f"{name}.weight" not in added:
            found[name] = LoraLinear(student.get_submodule(name), rank)
            _replace(student, name, found[name])
    return found


def remove_adapters(student: nn.Module, *, merge: bool) -> None:
    """Take the adapters off, after adding them to the weights if `merge`."""
    for name, module in list(student.named_modules()):
        if isinstance(module, LoraLinear):
            _replace(student, name, module.merged() if merge else module.base)


def save_adapters(student: nn.Module, folder: Path, base: Path) -> None:
    """Write the adapters in the form that PEFT loads onto the model in `base`."""
    modules = {name: module for name, module in student.named_modules() if isinstance(module, LoraLinear)}
    tensors = {}
    for name, module in modules.items():
        for part in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{name}.{part}.weight"] = getattr(module, part).detach().cpu().contiguous()
    first = next(iter(modules.values()))
    rank = len(first.lora_A)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": first.scale * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "fan_in_fan_out": isinstance(first.base, Conv1D),
        "bias": "none",
        "inference_mode": True,
    }
    save_file(tensors, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
