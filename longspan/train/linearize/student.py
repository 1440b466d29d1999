"""The student: the teacher with other attention, and LoRA beside its linear layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from longspan.hf.swap import SwappedAttention, swap_attention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.models.adapter import ADAPTER
from longspan.ops.window import BLIND
from longspan.train.lora import inject_lora, lora_config, lora_layers, lora_tensors


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


def set_checkpointing(student: Any, enabled: bool) -> None:
    """Recompute the activations of layers in the backward pass, or save them; no layer drops out.

    transformers recomputes in training mode only.
    """
    # Older versions of transformers name it "gradient".
    name = "activation" if hasattr(student, "activation_checkpointing_enable") else "gradient"
    if enabled:
        getattr(student, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(student, f"{name}_checkpointing_disable")()
    student.train(enabled)
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.eval()


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


def add_adapters(student: Any, rank: int) -> None:
    """Put LoRA beside each linear layer that the teacher has too, but not beside the output embedding."""
    head, added = student.get_output_embeddings(), added_parameters(student)
    linear = {n: m for n, m in student.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    targets = [name for name in linear if f"{name}.weight" not in added]
    transposed = isinstance(linear[targets[0]], Conv1D)
    inject_lora(student, lora_config(rank, targets, fan_in_fan_out=transposed))


def save_adapters(student: nn.Module, rank: int, folder: Path, base: Path) -> None:
    """Write the adapters in the form that PEFT loads onto the model in `base`."""
    layers = lora_layers(student)
    tensors = {f"base_model.model.{name}": x.detach().cpu().contiguous() for name, x in lora_tensors(student).items()}
    save_file(tensors, folder / ADAPTER, {"format": "pt"})
    transposed = isinstance(next(iter(layers.values())).base_layer, Conv1D)
    config = lora_config(rank, sorted(layers), fan_in_fan_out=transposed, task_type="CAUSAL_LM", inference_mode=True)
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)
