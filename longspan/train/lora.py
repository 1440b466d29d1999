"""LoRA by PEFT: small matrices beside the frozen weights of a model are trained, and saved apart from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from longspan.models.adapter import ADAPTER, PREFIX
from longspan.train.config import TrainConfig

_NAME = "default"  # of the adapter in PEFT's layers


def add_lora(model: nn.Module, train: TrainConfig, trained: Iterable[str] = ()) -> str:
    """Put LoRA beside linear layers, in place, and freeze every other parameter.

    Args:
        model: The model.
        train: The settings of the run.
        trained: Names of parameters to train as a whole, such as those of a new head.

    Returns:
        What is trained.

    Raises:
        ValueError: PEFT is not installed, or a target is no linear layer of the model.
    """
    targets = find_targets(model, train.lora_targets)
    whole = set(trained)
    inject_lora(model, _config(train, targets))
    for name, parameter in _base_names(model).items():
        if name in whole:
            parameter.requires_grad_(True)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    also = f" and {', '.join(sorted(whole))}" if whole else ""
    return f"LoRA of rank {train.lora_rank} in {len(targets)} layers{also}: {count:,} of {total:,} parameters trained"


def inject_lora(model: nn.Module, config: Any) -> None:
    """Put LoRA beside the layers that a configuration of PEFT names, in place, and freeze every other parameter."""
    _peft().inject_adapter_in_model(config, model, _NAME)


def find_targets(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the linear layers that names such as to_q select: all but the output layer, unless names are given.

    Raises:
        ValueError: A name selects no linear layer, or the output layer.
    """
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and "transformer." in name]
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    chosen: dict[str, None] = {}
    for target in names:
        found = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not found:
            raise ValueError(f"--lora-targets {target} is no linear layer inside the model; it has {kinds}")
        chosen |= dict.fromkeys(found)
    return list(chosen) or linear


def load_lora(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a saved adapter into the layers that `add_lora` made."""
    found = {name.replace(".weight", f".{_NAME}.weight"): x for name, x in tensors.items() if ".lora_" in name}
    own = {name for name in model.state_dict() if ".lora_" in name}
    if set(found) != own:
        raise ValueError(f"the saved adapter is for other layers: {', '.join(sorted(set(found) ^ own)[:4])}")
    model.load_state_dict(found, strict=False)


def adapter_tensors(model: nn.Module, trained: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of LoRA and of the layers that were trained as a whole.

    Args:
        model: A model that `add_lora` changed.
        trained: What `add_lora` was called with.
    """
    names = _base_names(model)
    return lora_tensors(model) | {name: names[name].detach() for name in trained}


def write_adapter(tensors: Mapping[str, Tensor], train: TrainConfig, trained: Iterable[str], folder: Path) -> None:
    """Write an adapter in PEFT's format.

    Args:
        tensors: What `adapter_tensors` returned.
        train: The settings of the run.
        trained: What `add_lora` was called with.
        folder: An existing folder.
    """
    stored = {PREFIX + name: x.cpu().contiguous().clone() for name, x in tensors.items()}
    save_file(stored, folder / ADAPTER, metadata={"format": "pt"})
    config = _config(train, sorted({name.rpartition(".lora_A.")[0] for name in tensors if ".lora_A." in name}))
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in trained}) or None
    config.save_pretrained(folder)


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Put the frozen layers back in place of those with LoRA; afterwards the latter again."""
    layers = lora_layers(model)
    for name, module in layers.items():
        model.set_submodule(name, module.base_layer)
    try:
        yield
    finally:
        for name, module in layers.items():
            model.set_submodule(name, module)


def remove_lora(model: nn.Module, *, merge: bool) -> None:
    """Put the layers themselves in place of those with LoRA, after adding it to their weights if `merge`."""
    for name, module in lora_layers(model).items():
        if merge:
            module.merge()
        model.set_submodule(name, module.base_layer)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with LoRA by name."""
    return {name: module for name, module in model.named_modules() if _is_lora(module)}


def lora_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of LoRA, by the names that PEFT saves them under."""
    return {n.replace(f".{_NAME}.", "."): x for n, x in model.state_dict().items() if ".lora_" in n}


def _base_names(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters other than LoRA's, by the names that they have without it."""
    return {n.replace(".base_layer.", "."): p for n, p in model.named_parameters() if ".lora_" not in n}


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _config(train: TrainConfig, targets: list[str]) -> Any:
    return lora_config(train.lora_rank or 0, targets, lora_alpha=train.lora_alpha, lora_dropout=train.lora_dropout)


def lora_config(rank: int, targets: list[str], *, lora_alpha: float | None = None, **options: Any) -> Any:
    """Return PEFT's configuration; alpha is twice the rank unless given."""
    alpha = 2 * rank if lora_alpha is None else lora_alpha
    return _peft().LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **options)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError("--lora-rank requires peft: pip install 'longspan[hf]'") from None
    return peft
