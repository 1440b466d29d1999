"""Modules that save and load state dicts in the format of an older library."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.checkpoint import Model

TensorMap = Callable[[Sequence[Tensor]], Sequence[Tensor]]
UNUSED = "unused."  # the prefix of keys that belong to `CompatModule.unused`


@dataclass(frozen=True)
class KeyMapping:
    """Map entries of an older library's state dict to entries of `CompatModule.model`.

    Attributes:
        old: Keys in the older library's state dict.
        new: Keys in the state dict of `model`, or of `CompatModule.unused` if they start with "unused.". Empty for
            constants, which are saved but not needed for loading.
        to_new: Convert the old tensors to the new ones, which are then reshaped to the shapes in `model`.
        to_old: Convert the new tensors to the old ones.
        aliases: Further keys under which the older library saves the same tensors.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    to_new: TensorMap = tuple
    to_old: TensorMap = tuple
    aliases: tuple[tuple[str, ...], ...] = ()

    def with_prefix(self, old: str, new: str) -> KeyMapping:
        """Return the mapping with a prefix before the old keys and one before the new keys of `model`."""
        return replace(
            self,
            old=tuple(old + key for key in self.old),
            new=tuple(key if key.startswith(UNUSED) else new + key for key in self.new),
            aliases=tuple(tuple(old + key for key in keys) for keys in self.aliases),
        )


def rename(old: str, new: str) -> KeyMapping:
    """Map one tensor to another key."""
    return KeyMapping((old,), (new,))


def rename_layer(old: str, new: str, *names: str) -> list[KeyMapping]:
    """Map the tensors of a layer, by default its weight and bias, to another prefix."""
    return [rename(f"{old}.{name}", f"{new}.{name}") for name in names or ("weight", "bias")]


def reshape(old: str, new: str, shape: Sequence[int]) -> KeyMapping:
    """Map one tensor that has `shape` in the older library."""
    return KeyMapping((old,), (new,), to_old=lambda tensors: [tensors[0].reshape(shape)])


def concatenate(old: Sequence[str], new: str) -> KeyMapping:
    """Map tensors of equal shape to one tensor, concatenated along the first dimension."""
    return KeyMapping(
        tuple(old),
        (new,),
        lambda tensors: [torch.cat(list(tensors), 0)],
        lambda tensors: tensors[0].chunk(len(old), 0),
    )


def constant(old: str, value: Callable[[], Tensor]) -> KeyMapping:
    """Map a tensor that the older library saves and longspan computes."""
    return KeyMapping((old,), (), to_old=lambda _: [value()])


def unsaved(new: Sequence[str], value: Callable[[], Tensor]) -> KeyMapping:
    """Map tensors that the older library does not save; loading sets all of them to `value()`."""
    return KeyMapping((), tuple(new), lambda _: [value()] * len(new), lambda _: [])


def with_prefix(mappings: Iterable[KeyMapping], old: str, new: str) -> Iterator[KeyMapping]:
    """Add prefixes to mappings; see `KeyMapping.with_prefix`."""
    return (mapping.with_prefix(old, new) for mapping in mappings)


class CompatModule(nn.Module):
    """Wrap a longspan module as `model`, with the state-dict keys and shapes of an older library.

    A subclass sets `model` and maps its tensors in `key_mappings`. It can be a submodule of any other module.

    Attributes:
        model: The longspan module that computes the result.
        unused: Tensors that the older library saves and never reads, so that a checkpoint is saved as it was loaded.
        not_in_model: What the wrapper computes beside `model`, for the error if `model` alone is converted.
    """

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.unused: nn.Module | None = None
        self.not_in_model = ""

    def key_mappings(self) -> Iterable[KeyMapping]:
        """Map every tensor of `model` and `unused` to its key in the older library."""
        raise NotImplementedError

    def upgrade_key(self, key: str) -> str:
        """Return the current key for a key from another release of the older library."""
        return key

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        """Adapt the model, before loading, to a checkpoint whose shapes show that the original ignored an option."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state dict in the older library's format; see `torch.nn.Module.state_dict`."""
        tensors = self._tensors(keep_vars)
        destination = OrderedDict() if destination is None else destination
        unmapped = set(tensors)
        for mapping in self.key_mappings():
            unmapped -= set(mapping.new)
            old = mapping.to_old([tensors[key] for key in mapping.new])
            for keys in (mapping.old, *mapping.aliases):
                for key, tensor in zip(keys, old, strict=True):
                    destination[prefix + key] = tensor
        assert not unmapped, f"no key mapping for {sorted(unmapped)}"
        return destination

    def _tensors(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """Return all tensors by their new keys."""
        tensors: dict[str, Tensor] = self.model.state_dict(keep_vars=keep_vars)
        if self.unused is not None:
            tensors |= self.unused.state_dict(prefix=UNUSED, keep_vars=keep_vars)
        return tensors

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Replace the old keys in state_dict by new ones, which the submodules then load."""
        given: dict[str, Tensor] = {}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            given[self.upgrade_key(key[len(prefix) :])] = state_dict.pop(key)
        self.adapt_to_checkpoint({key: tensor.shape for key, tensor in given.items()})
        tensors = self._tensors()
        known: set[str] = set()
        for mapping in self.key_mappings():
            alternatives = (mapping.old, *mapping.aliases)
            known.update(key for keys in alternatives for key in keys)
            if not mapping.new:
                continue
            current = [tensors[key] for key in mapping.new]
            keys = next((keys for keys in alternatives if all(key in given for key in keys)), None)
            if keys is None:
                missing_keys.extend(prefix + key for key in mapping.old if key not in given)
                loaded: Sequence[Tensor] = current
            elif mismatches := [
                f"size mismatch for {prefix + key}: the checkpoint has {tuple(given[key].shape)}, this model "
                f"{tuple(old.shape)}"
                for key, old in zip(keys, mapping.to_old(current), strict=True)
                if given[key].shape != old.shape
            ]:
                error_msgs.extend(mismatches)
                loaded = current
            else:
                loaded = [
                    new.reshape(old.shape)
                    for new, old in zip(mapping.to_new([given[key] for key in keys]), current, strict=True)
                ]
            for key, tensor in zip(mapping.new, loaded, strict=True):
                state_dict[prefix + (key if key.startswith(UNUSED) else f"model.{key}")] = tensor
        if strict:
            unexpected_keys.extend(prefix + key for key in given if key not in known)


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
                new[key] = tensor.reshape(shapes[key])
        model.load_state_dict(new, assign=True)
        return model.train(self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        upgraded = {self.upgrade_key(key[len(prefix) :]): tensor for key, tensor in given.items()}
        self.adapt_to_checkpoint({key: tensor.shape for key, tensor in upgraded.items()})
        state_dict.update({prefix + key: tensor for key, tensor in upgraded.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
