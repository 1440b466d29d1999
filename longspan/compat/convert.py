"""Convert checkpoints of the older libraries to longspan checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import CompatModel
from longspan.models.checkpoint import Model, save
from longspan.utils import choose, read_json

# For each library its module, and the class that a configuration without "class" describes.
LIBRARIES = {
    "linear-attention-transformer": ("linear_attention_transformer", "LinearAttentionTransformerLM"),
    "linformer-pytorch": ("linformer_pytorch", "LinformerLM"),
    "linformer": ("linformer", "LinformerLM"),
    "performer-pytorch": ("performer_pytorch", "PerformerLM"),
    "local-attention": ("local_attention", "LocalTransformer"),
}
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")  # where training scripts save the weights
_WRAPPER_PREFIXES = ("module.", "net.")


def convert_file(checkpoint: Path, folder: Path, library: str, config: Path) -> None:
    """Convert a file written by `torch.save` to a longspan checkpoint.

    Args:
        checkpoint: The file with the state dict.
        folder: The folder to write.
        library: The name of the older library, such as "performer-pytorch".
        config: A JSON file with the arguments of the model's constructor; see `convert_weights`.

    Raises:
        ValueError: If a file cannot be read or the weights do not fit the model.
    """
    save(read_converted(checkpoint, library, config), folder)


def read_converted(checkpoint: Path, library: str, config: Path) -> Model:
    """Return the longspan model for a file written by `torch.save`; see `convert_file`."""
    arguments = read_json(config, regular=False)
    if not isinstance(arguments, dict):
        raise ValueError(f'{config} must contain {{"argument": value, …}}, got a {type(arguments).__name__}')
    return convert_weights(read_weights(checkpoint), library, arguments)


def convert_weights(weights: Mapping[str, Tensor], library: str, arguments: Mapping[str, Any]) -> Model:
    """Return the longspan model for a state dict of an older library.

    Args:
        weights: The state dict.
        library: The name of the package, such as "performer-pytorch".
        arguments: The arguments of the constructor, and under "class" the name of the class, by default the library's
            language model.

    Raises:
        ValueError: If there is no such library or class, or the arguments or weights do not fit it.
    """
    module_name, default_class = LIBRARIES[choose("library", library, LIBRARIES)]
    module = import_module(f"longspan.compat.{module_name}")
    arguments = dict(arguments)
    name = arguments.pop("class", default_class)
    cls = getattr(module, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, CompatModel)):
        raise ValueError(f"{library} has no model {name!r}; give the class of the model, not of a layer or a wrapper")
    try:
        _check_size(cls, arguments, weights)
        wrapper = cls(**arguments)
    except Exception as error:  # The arguments may be anything.
        raise ValueError(f"cannot build {name}: {error}") from error
    try:
        wrapper.load_state_dict(dict(weights))
        return wrapper.to_longspan()
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{error}; load it with longspan.compat.{module_name}.{name}") from None


def _check_size(cls: type[nn.Module], arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a model is far larger than its weights, before it takes memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        needed = sum(x.numel() for x in cls(**arguments).state_dict().values())
    given = sum(x.numel() for x in weights.values())
    if needed > 4 * given + (1 << 24):
        raise ValueError(f"these arguments describe a model of {needed:,} numbers, and the checkpoint has {given:,}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Load the state dict from a file written by `torch.save`, without executing code from it.

    The state dict may be nested in a training checkpoint, and its keys may have the prefixes of wrappers.

    Raises:
        ValueError: If the file has no state dict, or contains objects other than tensors and containers.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} was not written by torch.save: it is not a file")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} contains objects that are not loaded for safety: save model.state_dict() instead ({error})"
        ) from None
    except OSError:
        raise
    except Exception as error:  # The unpickler raises many types for a file that is not a pickle.
        raise ValueError(f"{path} was not written by torch.save ({type(error).__name__}: {error})") from None
    for key in _STATE_DICT_KEYS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    named = isinstance(loaded, Mapping) and all(isinstance(x, str) and isinstance(y, Tensor) for x, y in loaded.items())
    if not named or not loaded:
        raise ValueError(
            f"{path} has no state dict, keys with tensors, at the top level or under {', '.join(_STATE_DICT_KEYS)}"
        )
    weights = dict(loaded)
    while prefix := next((p for p in _WRAPPER_PREFIXES if all(key.startswith(p) for key in weights)), None):
        weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    return weights
