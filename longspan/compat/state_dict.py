"""Models of modules with the names of an older library, and how their weights become those of longspan models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.checkpoint import Model

TensorMap = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class KeyMapping:
    """Map entries of a compat model's state dict to entries of the longspan model's.

    Attributes:
        old: Keys of the compat model.
        new: Keys of the longspan model.
        to_new: Convert the old tensors to the new ones, which are then reshaped to the shapes in the longspan model.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    to_new: TensorMap = tuple

    def with_prefix(self, old: str, new: str) -> KeyMapping:
        """Return the mapping with a prefix before the old keys and one before the new keys."""
        return replace(self, old=tuple(old + key for key in self.old), new=tuple(new + key for key in self.new))


def rename(old: str, new: str) -> KeyMapping:
    """Map one tensor to another key."""
    return KeyMapping((old,), (new,))


def rename_layer(old: str, new: str, *names: str) -> list[KeyMapping]:
    """Map the tensors of a layer, by default its weight and bias, to another prefix."""
    return [rename(f"{old}.{name}", f"{new}.{name}") for name in names or ("weight", "bias")]


def concatenate(old: Sequence[str], new: str) -> KeyMapping:
    """Map tensors of equal shape to one tensor, concatenated along the first dimension."""
    return KeyMapping(tuple(old), (new,), lambda tensors: [torch.cat(list(tensors), 0)])


def with_prefix(mappings: Iterable[KeyMapping], old: str, new: str) -> Iterator[KeyMapping]:
    """Add prefixes to mappings; see `KeyMapping.with_prefix`."""
    return (mapping.with_prefix(old, new) for mapping in mappings)


class CompatModel(nn.Module):
    """A model of modules with the names of an older library, which has an equivalent longspan model.

    A subclass registers its submodules, calls `record_structure` at the end of its constructor, and maps its
    state-dict keys to those of the longspan model, which generation and `longspan convert` use.
    """

    def longspan_model(self) -> Model:
        """Build a longspan model of the same architecture; its weights are replaced.

        Raises:
            ValueError: If this model computes what no longspan model does.
        """
        raise NotImplementedError

    def key_mappings(self) -> Iterable[KeyMapping]:
        """Map every key of the longspan model, called `new`, to keys of this model's state dict, called `old`."""
        raise NotImplementedError

    def upgrade_key(self, key: str) -> str:
        """Return the current key for a key from another release of the older library."""
        return key

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        """Adapt the model, before loading, to a checkpoint whose shapes show that the original ignored an option."""

    def record_structure(self, part: str = "") -> None:
        """Remember the submodules' types and the parameters' shapes, so that `altered` can tell what was replaced.

        Args:
            part: The name of a submodule that alone is recorded anew.
        """

        def recorded(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
            inside = re.compile(rf"{re.escape(part)}(\.|$)" if part else "")
            return {k: v for k, v in before.items() if not inside.match(k)} | {
                k: now[k] for k in now if inside.match(k)
            }

        types = {name: type(module) for name, module in self.named_modules() if name}
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        self._structure = recorded(getattr(self, "_structure", {}), types)
        self._shapes = recorded(getattr(self, "_shapes", {}), shapes)

    def altered(self) -> str:
        """Return what was replaced or hooked since construction, so that the longspan model would differ, or ""."""
        modules = dict(self.named_modules())
        for name, expected in self._structure.items():
            if type(modules.get(name)) is not expected:
                return f"{name} was replaced"
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        for name in self._shapes | shapes:
            if shapes.get(name) != self._shapes.get(name):
                return f"{name} has another shape than the model was built with"
        for name, module in modules.items():
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                return f"{name or 'the model'} has a hook"
        return ""

    def to_longspan(self) -> Model:
        """Return the equivalent longspan model, which shares the storage of tensors that have the same layout in both.

        Raises:
            ValueError: If a submodule was replaced or has a hook, or its weights have other shapes.
        """
        if altered := self.altered():
            raise ValueError(f"{type(self).__name__} cannot be converted, because {altered}")
        with torch.device("meta"):
            model = self.longspan_model()
        old, shapes = self.state_dict(), {key: tensor.shape for key, tensor in model.state_dict().items()}
        new: dict[str, Tensor] = {}
        for mapping in self.key_mappings():
            tensors = mapping.to_new([old[key] for key in mapping.old])
            for key, tensor in zip(mapping.new, tensors, strict=True):
                if tensor.numel() != shapes[key].numel():
                    raise ValueError(
                        f"{type(self).__name__} cannot be converted, because {', '.join(mapping.old)} has the shape "
                        f"{tuple(tensor.shape)} and not {tuple(shapes[key])}"
                    )
                new[key] = tensor.reshape(shapes[key])
        model.load_state_dict(new, assign=True)
        return model.train(self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        upgraded = {self.upgrade_key(key[len(prefix) :]): tensor for key, tensor in given.items()}
        self.adapt_to_checkpoint({key: tensor.shape for key, tensor in upgraded.items()})
        state_dict.update({prefix + key: tensor for key, tensor in upgraded.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
