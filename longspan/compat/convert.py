"""Checkpoints of the older libraries, written as longspan's own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.compat.state_dict import Translated
from longspan.models.checkpoint import Model, save
from longspan.utils import choose

# Each library's module, and the class a configuration means if it names none.
LIBRARIES = {
    "linear-attention-transformer": ("linear_attention_transformer", "LinearAttentionTransformerLM"),
    "linformer-pytorch": ("linformer_pytorch", "LinformerLM"),
    "linformer": ("linformer", "LinformerLM"),
    "performer-pytorch": ("performer_pytorch", "PerformerLM"),
    "local-attention": ("local_attention", "LocalTransformer"),
}
_INSIDE = ("state_dict", "model_state_dict", "model", "net")  # where training scripts put the weights of a checkpoint
_AROUND = ("module.", "net.")  # what wrappers put before every name


def convert_file(checkpoint: Path, folder: Path, library: str, config: Path) -> None:
    """Writes the weights in `checkpoint`, for the model that the JSON in `config` describes, to `folder`."""
    try:
        arguments = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} cannot be read as JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f'{config} must hold {{"argument": value, …}}, got a {type(arguments).__name__}')
    save(converted(read_weights(checkpoint), library, arguments), folder)


def converted(weights: Mapping[str, Tensor], library: str, arguments: Mapping[str, Any]) -> Model:
    """The longspan model of an older library's state dict.

    library: as it is installed, such as "performer-pytorch". arguments: those of the constructor, and under "class" its
    name where that is not the library's language model.
    """
    module_name, usual = LIBRARIES[choose("library", library, LIBRARIES)]
    module = import_module(f"longspan.compat.{module_name}")
    arguments = dict(arguments)
    name = arguments.pop("class", usual)
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Translated)):
        raise ValueError(f"{library} has no model {name!r}; name the class of the model itself, not of a wrapper")
    try:
        older = cls(**arguments)
    except TypeError as error:
        raise ValueError(f"cannot build {name}: {error}") from None
    if not isinstance(older.model, Model):
        raise ValueError(f"a {name} is a layer, not a model: load it with longspan.compat.{module_name}.{name}")
    if older.outside:
        raise ValueError(
            f"cannot convert this {name}: {older.outside}; use longspan.compat.{module_name}.{name} itself"
        )
    try:
        older.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return older.model


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file of torch.save, without running anything in it; wrappers' prefixes are taken off."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, and is not read for safety: save model.state_dict() instead ({error})"
        ) from None
    except OSError:
        raise
    except Exception as error:  # An unpickler stumbles over other bytes in a dozen ways.
        raise ValueError(f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {error})") from None
    for name in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(name), Mapping):
            held = held[name]
    if not isinstance(held, Mapping) or not held or not all(isinstance(x, Tensor) for x in held.values()):
        raise ValueError(f"{path} does not hold a state dict, names and tensors, nor one under {', '.join(_INSIDE)}")
    weights = dict(held)
    while prefix := next((p for p in _AROUND if all(name.startswith(p) for name in weights)), None):
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights
