"""LoRA adapters in PEFT's format, beside the model that they adapt: W + (alpha / rank) · B A."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longspan.utils import read_json

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model."  # of the names that PEFT gives the modules of a `longspan.hf` model
# Variants of LoRA whose product is not (alpha / rank) · B A: a field of PEFT's configuration that is not empty.
_VARIANTS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens", "fan_in_fan_out")


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of an adapter; names of tensors are those of the model's modules.

    Args:
        folder: A folder with both files, as PEFT writes them.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or the adapter is of another kind than LoRA on linear layers.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        raise ValueError(f"{folder / ADAPTER_CONFIG} does not describe a LoRA adapter")
    used = [name for name in _VARIANTS if config.get(name)]
    if used:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} has {', '.join(used)}: longspan reads plain LoRA adapters; open it with PEFT"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} is damaged: r must be a positive integer and lora_alpha a number, got {rank!r} "
            f"and {alpha!r}; restore it from a copy"
        )
    if not (folder / ADAPTER).is_file():
        raise FileNotFoundError(f"{folder} has an {ADAPTER_CONFIG} and no {ADAPTER}: restore it from a copy")
    try:
        tensors = load_file(folder / ADAPTER)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(f"{folder / ADAPTER} is damaged: {error}; restore it from a copy") from None
    return dict(config), {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def merge_adapter(tensors: dict[str, Tensor], ties: Mapping[str, str], folder: Path) -> None:
    """Add the product of each layer's LoRA matrices to its weight, in place of `tensors`' entry.

    Args:
        tensors: Tensors of the model by name.
        ties: Names of tied tensors, and the names that they are stored under.
        folder: The folder of the adapter.

    Raises:
        ValueError: The adapter does not fit the model.
    """
    config, adapter = read_adapter(folder)
    scale = config["lora_alpha"] / config["r"]
    for name, down in adapter.items():
        module, adapted, kind = name.partition(".lora_A.")
        if not adapted:
            if ".lora_B." not in name:
                tensors[_stored_name(name, tensors, ties, folder)] = down  # a layer that was trained as a whole
            continue
        weight = _stored_name(f"{module}.weight", tensors, ties, folder)
        up = adapter.get(f"{module}.lora_B.{kind}")
        matrices = up is not None and up.ndim == down.ndim == 2 and up.shape[1] == len(down)
        if up is None or not matrices or tensors[weight].shape != (len(up), down.shape[1]):
            raise ValueError(f"the adapter in {folder} does not fit the weight {weight} of its model")
        tensors[weight] = tensors[weight] + (scale * up @ down).to(tensors[weight].dtype)


def _stored_name(name: str, tensors: Mapping[str, Tensor], ties: Mapping[str, str], folder: Path) -> str:
    stored = ties.get(name, name)
    if stored not in tensors:
        raise ValueError(f"the adapter in {folder} is for a model with {name}, which this one does not have")
    return stored
