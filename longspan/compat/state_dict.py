"""Tensors under an older library's names: a module that saves and loads the state dicts of that library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Many = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Entry:
    """Tensors of the older library, and those of `Translated.model` that say the same.

    to_new, to_old: from one to the other; what `to_new` gives is brought to the shape of `new`.
    copies: further names under which the older library holds the same tensors.
    Without `new` the older tensors are constants: written by `to_old`, and not needed when loading.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    to_new: Many = tuple
    to_old: Many = tuple
    copies: tuple[tuple[str, ...], ...] = ()

    def under(self, old: str, new: str) -> Entry:
        """The same with prefixes before the names."""
        return replace(
            self,
            old=tuple(old + name for name in self.old),
            new=tuple(new + name for name in self.new),
            copies=tuple(tuple(old + name for name in names) for names in self.copies),
        )


def same(old: str, new: str) -> Entry:
    """One tensor, with another name."""
    return Entry((old,), (new,))


def layer(old: str, new: str, *names: str) -> list[Entry]:
    """Tensors of a layer that differ in the layer's name only."""
    return [same(f"{old}.{name}", f"{new}.{name}") for name in names]


def shaped(old: str, new: str, shape: Sequence[int]) -> Entry:
    """One tensor that had `shape` there."""
    return Entry((old,), (new,), to_old=lambda tensors: [tensors[0].reshape(shape)])


def stacked(old: Sequence[str], new: str, sizes: Sequence[int] | None = None) -> Entry:
    """Tensors that are one here, one below the other; of equal height unless sizes are given."""

    def apart(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = tensors[0]
        return whole.split(list(sizes), 0) if sizes is not None else whole.chunk(len(old), 0)

    return Entry(tuple(old), (new,), lambda tensors: [torch.cat(list(tensors), 0)], apart)


def constant(old: str, value: Callable[[], Tensor]) -> Entry:
    """A tensor that the older library keeps and longspan computes."""
    return Entry((old,), (), to_old=lambda _: [value()])


class Translated(nn.Module):
    """A module around `model`, whose state dict has the names and shapes of an older library.

    A subclass sets `model` and says in `entries` which tensors are which. It nests in other modules like any other.
    idle: holds tensors that the older library keeps without a use for them, so that a checkpoint goes out as it came
    in; an entry calls them "idle.…". outside: what the module does beside `model`, so that `model` alone is not all.
    """

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.idle: nn.Module | None = None
        self.outside = ""

    def entries(self) -> Iterable[Entry]:
        """What the older library calls each tensor of `model`."""
        raise NotImplementedError

    def renamed(self, name: str) -> str:
        """Today's name of a tensor that another release of the older library named differently."""
        return name

    def settle(self, shapes: Mapping[str, torch.Size]) -> None:
        """Called before loading: where the shapes of a checkpoint show that an option had no effect, undo it."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        held = self._held(keep_vars)
        destination = OrderedDict() if destination is None else destination
        uncovered = set(held)
        for entry in self.entries():
            uncovered -= set(entry.new)
            tensors = entry.to_old([held[name] for name in entry.new])
            for names in (entry.old, *entry.copies):
                for name, tensor in zip(names, tensors, strict=True):
                    destination[prefix + name] = tensor
        assert not uncovered, f"no older names for {sorted(uncovered)}"
        return destination

    def _held(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """Every tensor under the name that entries give it."""
        held: dict[str, Tensor] = self.model.state_dict(keep_vars=keep_vars)
        if self.idle is not None:
            held |= self.idle.state_dict(prefix="idle.", keep_vars=keep_vars)
        return held

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
        """Exchanges the older names in state_dict for new ones, which `model` then loads by itself."""
        given: dict[str, Tensor] = {}
        for name in [name for name in state_dict if name.startswith(prefix)]:
            given[self.renamed(name[len(prefix) :])] = state_dict.pop(name)
        self.settle({name: tensor.shape for name, tensor in given.items()})
        held = self._held()
        known: set[str] = set()
        for entry in self.entries():
            choices = (entry.old, *entry.copies)
            known.update(name for names in choices for name in names)
            if not entry.new:
                continue
            present = [names for names in choices if all(name in given for name in names)]
            now = [held[name] for name in entry.new]
            if not present:
                missing_keys.extend(prefix + name for name in entry.old if name not in given)
                tensors: Sequence[Tensor] = now
            elif wrong := [
                f"size mismatch for {prefix + name}: the checkpoint has {tuple(given[name].shape)}, this model "
                f"{tuple(old.shape)}"
                for name, old in zip(present[0], entry.to_old(now), strict=True)
                if given[name].shape != old.shape
            ]:
                error_msgs.extend(wrong)
                tensors = now
            else:
                tensors = [
                    x.reshape(old.shape)
                    for x, old in zip(entry.to_new([given[name] for name in present[0]]), now, strict=True)
                ]
            for name, tensor in zip(entry.new, tensors, strict=True):
                state_dict[prefix + (name if name.startswith("idle.") else f"model.{name}")] = tensor
        if strict:
            unexpected_keys.extend(prefix + name for name in given if name not in known)
