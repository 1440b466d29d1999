"""A session: the state of a generation as a value to continue, fork, save and load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.protocol import State
from longspan.utils import write_atomically

S = TypeVar("S", bound=State)


@dataclass
class Session:
    """Everything needed to continue B sequences.

    Attributes:
        state: The model's state.
        logits: (B, V), the logits of the next token.
        recent: (B, window) int64, the latest tokens, −1 for none.
    """

    state: StackState
    logits: Tensor
    recent: Tensor

    def select(self, index: Sequence[int] | Tensor) -> Session:
        """Return a copy of the chosen sequences; an index may repeat, to continue one prompt several times."""
        where = torch.as_tensor(index, device=self.logits.device)
        return Session(self.state.select(where), self.logits[where], self.recent[where])

    @torch.no_grad()
    def extend(self, model: LanguageModel, tokens: Sequence[int]) -> Session:
        """Return the session after more tokens, the same for every sequence.

        Args:
            model: The model whose state this is.
            tokens: At least one token.
        """
        more = torch.tensor([list(tokens)] * len(self.logits), device=self.logits.device)
        hidden, state = model.extend_hidden(more, self.state.clone())
        recent = torch.cat([self.recent, more], 1)[:, -self.recent.shape[1] :]
        return Session(state, model.logits(hidden[:, -1:])[:, 0], recent)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically.

        Args:
            path: The file to create or replace.
        """
        tensors = {f"state.{name}": x for name, x in self.state.tensors().items()}
        tensors |= {"logits": self.logits, "recent": self.recent}
        metadata = {name: json.dumps(value) for name, value in state_values(self.state, "state").items()}
        copies = {name: x.contiguous().clone() for name, x in tensors.items()}
        write_atomically(Path(path), save(copies, {"format": "longspan", **metadata}))

    @classmethod
    def load(cls, path: str | Path, model: LanguageModel) -> Session:
        """Read a file that `save` wrote.

        Args:
            path: The file.
            model: The model whose session was saved. The tensors are put on its device.

        Raises:
            ValueError: If the file is not a session, or one of another model.
        """
        device = next(model.parameters()).device
        try:
            with safe_open(str(path), "pt", device=str(device)) as file:
                metadata, names = file.metadata() or {}, list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a saved session: {error}") from None
        if metadata.get("format") != "longspan" or "logits" not in tensors:
            raise ValueError(f"{path} is a safetensors file, but not a saved session")
        values = {name: json.loads(value) for name, value in metadata.items() if name != "format"}
        state = fill_state(model.new_state(len(tensors["logits"])), tensors, values, "state")
        return cls(state, tensors["logits"], tensors["recent"])


def state_values(state: State, prefix: str) -> dict[str, Any]:
    """Return everything in a state that is neither a tensor nor a state.

    Args:
        state: The state.
        prefix: What the names begin with.

    Returns:
        Values by dotted name.
    """
    found: dict[str, Any] = {}
    for field in fields(state):
        value = getattr(state, field.name)
        name = f"{prefix}.{field.name}"
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                found |= state_values(part, f"{name}.{i}")
        elif value is not None and not isinstance(value, Tensor):
            found[name] = value
    return found


def fill_state(state: S, tensors: dict[str, Tensor], values: dict[str, Any], prefix: str) -> S:
    """Return a state of the same type with saved contents.

    Args:
        state: An empty state of the model.
        tensors: Tensors by dotted name, as `State.tensors` gives them, with the prefix.
        values: What `state_values` returned.
        prefix: What the names begin with.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    changed: dict[str, Any] = {}
    for field in fields(state):
        value, name = getattr(state, field.name), f"{prefix}.{field.name}"
        if isinstance(value, Tensor):
            saved = tensors.get(name)
            if saved is None or saved.ndim != value.ndim or saved.shape[:2] != value.shape[:2]:
                got = "nothing" if saved is None else str(tuple(saved.shape))
                raise ValueError(
                    f"this session is of another model: {name} must have the shape {tuple(value.shape)}, got {got}"
                )
            changed[field.name] = saved
        elif isinstance(value, tuple):
            changed[field.name] = tuple(
                fill_state(part, tensors, values, f"{name}.{i}") for i, part in enumerate(value)
            )
        elif name in values:
            changed[field.name] = values[name]
    return replace(state, **changed)
