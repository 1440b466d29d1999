"""What a run starts from: the configuration and the weights of --init."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.compat.convert import read_converted
from longspan.models.checkpoint import CONFIG, find_checkpoint, read_tensors
from longspan.models.config import ModelConfig
from longspan.models.transformer import Classifier, LanguageModel
from longspan.utils import read_json


@dataclass(frozen=True)
class Initial:
    """A checkpoint to start from.

    Attributes:
        path: Folder of a checkpoint, a run or a `longspan.hf` model, or a file of an older library.
        library: Name of the older library.
        config: JSON file with the arguments of its model's constructor.
    """

    path: str
    library: str | None = None
    config: str | None = None

    def model_config(self) -> dict[str, Any]:
        """Return the fields of the model's configuration.

        Raises:
            ValueError: There is no model that can be trained.
        """
        where = Path(self.path).expanduser()
        try:
            if self.library is not None:
                return self._older().config.to_dict()
            if where.is_file():
                raise ValueError(
                    "it is a file; of an older library, give its name and the arguments of its model too: "
                    "--init-from performer-pytorch --init-config arguments.json"
                )
            described = read_json(find_checkpoint(where) / CONFIG)
            kind = described.get("model_type")
            if kind != "longspan" and "arguments" not in described:
                what = "with swapped attention" if kind == "longspan_swap" else f"of type {kind}"
                raise ValueError(
                    f"it is a transformers model {what}: train it with transformers, or convert a decoder with "
                    "longspan.hf.to_language_model and longspan.save"
                )
            return ModelConfig.from_dict(described["arguments"]["config"]).to_dict()
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
            raise ValueError(f"--init {self.path} is no checkpoint of a model that can be trained: {text}") from None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model by name; a LoRA adapter beside them is merged."""
        if self.library is not None:
            return self._older().state_dict()
        return read_tensors(Path(self.path).expanduser())

    def _older(self) -> LanguageModel | Classifier:
        assert self.library is not None
        assert self.config is not None
        model = read_converted(Path(self.path).expanduser(), self.library, Path(self.config).expanduser())
        if not isinstance(model, LanguageModel | Classifier):
            raise ValueError(f"it is a {type(model).__name__}, and longspan train trains language models")
        return model


@dataclass(frozen=True)
class TakenOver:
    """Which tensors of a new model are those of the checkpoint it starts from.

    Attributes:
        source: The checkpoint.
        taken: Tensors that were copied.
        partly: Tensors of which rows were copied: {name: (rows that were copied, rows of the model)}.
        new: Tensors of the model that the checkpoint lacks, or has in another shape.
        left: Tensors of the checkpoint that the model lacks, or has in another shape.
    """

    source: str
    taken: tuple[str, ...]
    partly: Mapping[str, tuple[int, int]]
    new: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        rows = [f"{name} ({some} of {all_} rows)" for name, (some, all_) in self.partly.items()]
        total = len(self.taken) + len(self.new)
        named = (("in part", rows), ("new", self.new), ("not taken over", self.left))
        lists = [f"; {what}: {', '.join(names)}" for what, names in named if names]
        return f"{len(self.taken)} of {total} tensors are from {self.source}{''.join(lists)}"


def start_from(model: LanguageModel | Classifier, initial: Initial) -> TakenOver:
    """Copy the weights of a checkpoint into a new model, where names and shapes agree.

    The body of a classifier takes the weights of a language model, and the other way. Of embeddings and positions with
    another number of rows, the rows that both have are copied. Tables of n-grams are those of the same length.

    Args:
        model: The new model.
        initial: The checkpoint.

    Raises:
        ValueError: No tensor fits.
    """
    found = _with_names_of(model, initial.tensors())
    before, now = initial.model_config()["ngrams"], model.config.ngrams
    found = {_table_name(name, before, now): tensor for name, tensor in found.items()}
    own, taken, partly = model.state_dict(), [], {}
    with torch.no_grad():
        for name, tensor in own.items():
            other = found.get(name)
            if other is None:
                continue
            if other.shape == tensor.shape:
                tensor.copy_(other)
                taken.append(name)
            elif other.shape[1:] == tensor.shape[1:] and re.search(r"(embedding|to_logits|positions)\b", name):
                rows = min(len(other), len(tensor))
                tensor[:rows].copy_(other[:rows])
                taken.append(name)
                partly[name] = rows, len(tensor)
    if not taken:
        raise ValueError(
            f"--init {initial.path}: no tensor of it fits this model; see longspan info --model {initial.path}"
        )
    new, left = sorted(set(own) - set(taken)), sorted(set(found) - set(taken))
    return TakenOver(initial.path, tuple(taken), partly, tuple(new), tuple(left))


def _with_names_of(model: LanguageModel | Classifier, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that they have in a model of this class."""
    if not any("transformer." in name for name in found):
        found = {f"transformer.{name}": x for name, x in found.items()}
    if isinstance(model, Classifier) and not any(name.startswith("body.") for name in found):
        return {f"body.{name}": x for name, x in found.items()}
    if isinstance(model, LanguageModel):
        return {name.removeprefix("body."): x for name, x in found.items()}
    return dict(found)


def _table_name(name: str, before: Sequence[int], now: Sequence[int]) -> str:
    """Return the name of a tensor, of a table of n-grams where a model with the lengths `now` has that length."""
    match = re.fullmatch(r"(.*ngrams\.tables\.)(\d+)(\.weight)", name)
    if match is None:
        return name
    length = before[int(match[2])]
    return f"{match[1]}{now.index(length) if length in now else f'{length}-grams'}{match[3]}"
