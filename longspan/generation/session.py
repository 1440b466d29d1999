"""A session: the state of a generation as a value to continue, fork, save and load."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from longspan.generation.decode import evaluating
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
        model: The model whose state this is. None: unknown, so that the session continues with any model.
    """

    state: StackState
    logits: Tensor
    recent: Tensor
    model: LanguageModel | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def length(self) -> int:
        """The number of tokens that the one sequence has."""
        return int(self.state.length)

    @property
    def recent_tokens(self) -> list[int]:
        """The latest tokens of the one sequence."""
        return [token for token in self.recent[0].tolist() if token >= 0]

    def select(self, index: Sequence[int] | Tensor) -> Session:
        """Return a copy of the chosen sequences; an index may repeat, to continue one prompt several times.

        Raises:
            ValueError: If the index is not (N,) integers from −B to B − 1.
        """
        B = len(self.logits)
        try:
            where = torch.as_tensor(index, device=self.logits.device)
        except (RuntimeError, TypeError, ValueError):
            raise ValueError(f"index must be (N,) integers from {-B} to {B - 1}, got {index!r}") from None
        where = where.long() if where.numel() == 0 else where
        if where.ndim != 1 or where.is_floating_point() or (where.numel() and not -B <= where.min() <= where.max() < B):
            raise ValueError(f"index must be (N,) integers from {-B} to {B - 1}, one for each of {B} sequences")
        return Session(self.state.select(where), self.logits[where], self.recent[where], self.model)

    @torch.no_grad()
    def extend(self, model: LanguageModel, tokens: Sequence[int]) -> Session:
        """Return the session after more tokens, the same for every sequence, in eval mode.

        Args:
            model: The model whose state this is.
            tokens: At least one token.

        Raises:
            TypeError: If the tokens are not integers.
            ValueError: If there is no token, a token is not one of the model's, or the session is another model's.
        """
        self.check_model(model)
        own = to_tokens("tokens", tokens)
        if not len(own):
            raise ValueError("tokens must have at least one token")
        check_tokens("tokens", own, model)
        more = own.to(self.logits.device).expand(len(self.logits), -1)
        with evaluating(model):
            hidden, state = model.extend_hidden(more, self.state.clone().reserve(len(own)))
            logits = model.logits(hidden[:, -1:])[:, 0]
        recent = torch.cat([self.recent, more], 1)[:, -self.recent.shape[1] :]
        return Session(state, logits, recent, model)

    def check_model(self, model: LanguageModel) -> None:
        """Raise ValueError if this session is known to be of another model: equal sizes are not enough."""
        if self.model is not None and self.model is not model and fingerprint(self.model) != fingerprint(model):
            raise ValueError(_OTHER_MODEL)

    def save(self, path: str | Path, *, model_fingerprint: str | None = None) -> None:
        """Write a safetensors file, atomically.

        Args:
            path: The file to create or replace.
            model_fingerprint: The `fingerprint` of the model, where it is known, to save computing it.
        """
        tensors = {f"state.{name}": x for name, x in self.state.tensors().items()}
        tensors |= {"logits": self.logits, "recent": self.recent}
        metadata = {name: json.dumps(value) for name, value in state_values(self.state, "state").items()}
        if self.model is not None:
            metadata["model"] = model_fingerprint or fingerprint(self.model)
        copies = {name: x.contiguous().clone() for name, x in tensors.items()}
        write_atomically(Path(path), save(copies, {"format": "longspan", **metadata}))

    @classmethod
    def load(cls, path: str | Path, model: LanguageModel, *, model_fingerprint: str | None = None) -> Session:
        """Read a file that `save` wrote.

        Args:
            path: The file.
            model: The model whose session was saved. The tensors are put on its device.
            model_fingerprint: The `fingerprint` of the model, where it is known, to save computing it.

        Raises:
            ValueError: If the file is not a session, or one of another model.
        """
        device = next(model.parameters()).device
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{path} is not a saved session: it is not a file")
        try:
            with safe_open(str(path), "pt", device=str(device)) as file:
                metadata, names = file.metadata() or {}, list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a saved session: {error}") from None
        if metadata.get("format") != "longspan" or not {"logits", "recent"} <= set(tensors):
            raise ValueError(f"{path} is a safetensors file, but not a saved session")
        own = model_fingerprint or fingerprint(model)
        if metadata.get("model", own) != own:
            raise ValueError(f"{path}: {_OTHER_MODEL}")
        logits, recent = tensors["logits"], tensors["recent"]
        if logits.ndim != 2 or logits.shape[1] != model.config.vocab_size or not logits.is_floating_point():
            raise ValueError(
                f"this session is of another model: logits must have the shape (B, {model.config.vocab_size}), "
                f"got {tuple(logits.shape)} {logits.dtype}"
            )
        if recent.ndim != 2 or len(recent) != len(logits) or recent.dtype != torch.int64 or not recent.shape[1]:
            raise ValueError(f"{path} is damaged: recent must be ({len(logits)}, window) int64")
        check_tokens("recent", recent.clamp(min=0), model)
        try:
            values = {name: json.loads(value) for name, value in metadata.items() if name.startswith("state.")}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        state = fill_state(model.new_state(len(logits)), tensors, values, "state")
        return cls(state, logits, recent, model)


_OTHER_MODEL = "this session is of another model, whose weights differ: continue it with the model that began it"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the names, shapes and values of a model's parameters, the same on any device."""
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    parameters |= {name: x for name, x in model.named_buffers() if x.dtype == torch.int8}  # quantized weights
    # Sums of integers do not depend on their order.
    sums = [x.contiguous().view(_BITS[x.element_size()]).sum(dtype=torch.int64) for x in parameters.values()]
    values = torch.stack(sums).tolist() if sums else []
    parts = [(name, *x.shape, str(x.dtype), n) for (name, x), n in zip(parameters.items(), values, strict=True)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def to_tokens(name: str, tokens: object) -> Tensor:
    """Return the tokens of one sequence as (T,) int64.

    Args:
        name: The name of the argument, for errors.
        tokens: A tensor, an array, bytes or a sequence of integers.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they are not one-dimensional, or larger than any token.
    """
    if isinstance(tokens, str):
        raise TypeError(f"{name} must be tokens, got text: encode it, for a model of bytes as list(text.encode())")
    if isinstance(tokens, bytes | bytearray):
        return torch.from_numpy(np.frombuffer(tokens, dtype=np.uint8).astype(np.int64))
    try:
        found = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: numbers beyond int64.
        raise TypeError(f"{name} must be integers, as (T,): {error}") from None
    if found.ndim != 1:
        raise ValueError(f"{name} must be one sequence of tokens (T,), got {tuple(found.shape)}")
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise TypeError(f"{name} must be integers, got {found.dtype}")
    return found.long()


def check_tokens(name: str, tokens: Tensor, model: LanguageModel) -> None:
    """Raise ValueError if a token is not one of the model's."""
    size = model.config.vocab_size
    assert size is not None
    found = tokens.cpu().numpy()  # NumPy's own loops: threads of PyTorch take longer to start than this takes.
    if found.size and not 0 <= (worst := int(found.max() if found.min() >= 0 else found.min())) < size:
        raise ValueError(f"{name} has the token {worst}, and this model has the tokens 0 to {size - 1}")


def state_values(state: State, prefix: str) -> dict[str, Any]:
    """Return everything in a state that is neither a tensor nor a state, nor a layer, which is the model's.

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
        elif value is not None and not isinstance(value, Tensor | nn.Module):
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
            # A state may hold more tokens than an empty one, in its second or third dimension; numbers keep their kind.
            if (
                saved is None
                or saved.ndim != value.ndim
                or saved.shape[:2] != value.shape[:2]
                or saved.dtype.is_floating_point != value.dtype.is_floating_point
            ):
                got = "nothing" if saved is None else f"{tuple(saved.shape)} {saved.dtype}"
                raise ValueError(
                    f"this session is of another model: {name} must have the shape {tuple(value.shape)} and the type "
                    f"{value.dtype}, got {got}"
                )
            if not value.dtype.is_floating_point and saved.numel() and saved.min() < value.min().clamp(max=0):
                raise ValueError(f"{name} is damaged: it has the negative number {int(saved.min())}")
            changed[field.name] = saved
        elif isinstance(value, tuple):
            changed[field.name] = tuple(
                fill_state(part, tensors, values, f"{name}.{i}") for i, part in enumerate(value)
            )
        elif name in values:
            changed[field.name] = values[name]
    return replace(state, **changed)
