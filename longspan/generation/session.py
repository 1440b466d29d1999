"""A sequence read so far, as a value: to continue, to fork, to save and to take up again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.protocol import State

S = TypeVar("S", bound=State)


@dataclass
class Session:
    """What a language model needs to go on: its state, the next token's logits, and the latest tokens."""

    state: StackState
    logits: Tensor  # (B, V)
    recent: Tensor  # (B, window), −1 where there was no token yet

    def select(self, index: Sequence[int] | Tensor) -> Session:
        """Rows kept, dropped or repeated, as copies: one prompt, many continuations."""
        where = torch.as_tensor(index, device=self.logits.device)
        return Session(self.state.select(where), self.logits[where], self.recent[where])

    @torch.no_grad()
    def read(self, model: LanguageModel, tokens: Sequence[int]) -> Session:
        """The memory after more tokens, the same for every row."""
        more = torch.tensor([list(tokens)] * len(self.logits), device=self.logits.device)
        hidden, state = model.extend_hidden(more, self.state.clone())
        recent = torch.cat([self.recent, more], 1)[:, -self.recent.shape[1] :]
        return Session(state, model.logits(hidden[:, -1:])[:, 0], recent)

    def save(self, path: str | Path) -> None:
        """To a safetensors file: written beside it first, so that a kill leaves the old file or the new one."""
        tensors = {f"state.{name}": x for name, x in self.state.tensors().items()}
        tensors |= {"logits": self.logits, "recent": self.recent}
        plain = {name: json.dumps(value) for name, value in plain_values(self.state, "state").items()}
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            save_file(
                {name: x.contiguous().clone() for name, x in tensors.items()}, beside, {"format": "longspan", **plain}
            )
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, model: LanguageModel) -> Session:
        """What `save` wrote, for the same model."""
        device = next(model.parameters()).device
        try:
            with safe_open(str(path), "pt", device=str(device)) as file:
                values, names = file.metadata() or {}, list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a saved memory: {error}") from None
        if values.get("format") != "longspan" or "logits" not in tensors:
            raise ValueError(f"{path} is a safetensors file, but not a saved memory")
        empty = model.new_state(len(tensors["logits"]))
        state = filled(empty, tensors, {k: json.loads(v) for k, v in values.items() if k != "format"}, "state")
        return cls(state, tensors["logits"], tensors["recent"])


def plain_values(state: State, prefix: str) -> dict[str, Any]:
    """Everything in a state that is neither a tensor nor a state, by dotted name."""
    found: dict[str, Any] = {}
    for field in fields(state):
        value = getattr(state, field.name)
        name = f"{prefix}.{field.name}"
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                found |= plain_values(part, f"{name}.{i}")
        elif value is not None and not isinstance(value, Tensor):
            found[name] = value
    return found


def filled(state: S, tensors: dict[str, Tensor], values: dict[str, Any], prefix: str) -> S:
    """A state of the same kind, with saved contents."""
    changed: dict[str, Any] = {}
    for field in fields(state):
        value, name = getattr(state, field.name), f"{prefix}.{field.name}"
        if isinstance(value, Tensor):
            saved = tensors.get(name)
            if saved is None or saved.ndim != value.ndim or saved.shape[:2] != value.shape[:2]:
                got = "nothing" if saved is None else str(tuple(saved.shape))
                raise ValueError(
                    f"this memory is of another model: {name} should be like {tuple(value.shape)}, got {got}"
                )
            changed[field.name] = saved
        elif isinstance(value, tuple):
            changed[field.name] = tuple(filled(part, tensors, values, f"{name}.{i}") for i, part in enumerate(value))
        elif name in values:
            changed[field.name] = values[name]
    return replace(state, **changed)
