"""A transformers configuration that contains longspan's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from longspan import __version__
from longspan.models.checkpoint import FORMAT, committed_folder, find_checkpoint
from longspan.models.config import ModelConfig


class SavedAsStub:
    """A mixin of classes whose code is not copied to saved folders: a stub there imports longspan."""

    @classmethod
    def register_for_auto_class(cls, *_: Any, **__: Any) -> None:
        """Do nothing."""


class LongspanConfig(SavedAsStub, PreTrainedConfig):
    """The configuration of a longspan model in transformers; its config.json is the one that `longspan.save` writes.

    Args:
        model: A `ModelConfig` or the dict that its `to_dict` returns; of an encoder with a decoder, the decoder's.
        encoder: The encoder's configuration, for a sequence-to-sequence model.
        pad_token: The padding token of a sequence-to-sequence model.
        tie_embeddings: Whether encoder and decoder share their embeddings.
        arguments: The constructor's arguments as a saved configuration holds them; excludes model and encoder.
        **options: Fields of every transformers configuration, such as num_labels.

    Raises:
        ValueError: If arguments and model or encoder are given.
    """

    model_type = "longspan"

    def __init__(
        self,
        model: ModelConfig | Mapping[str, Any] | None = None,
        *,
        encoder: ModelConfig | Mapping[str, Any] | None = None,
        pad_token: int = 0,
        tie_embeddings: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if arguments is None:
            config = _to_json(ModelConfig() if model is None else model)
            if encoder is None:
                arguments = {"config": config}
            else:
                both = {"pad_token": pad_token, "tie_embeddings": tie_embeddings}
                arguments = {"encoder": _to_json(encoder), "decoder": config, **both}
        elif model is not None or encoder is not None:
            raise ValueError("arguments is what a saved configuration holds; give it or model and encoder, not both")
        self.arguments: dict[str, Any] = {
            name: _to_json(value) if isinstance(value, Mapping) else value for name, value in arguments.items()
        }
        self.format, self.longspan = FORMAT, __version__
        options.pop("format", None)
        options.pop("longspan", None)
        options.setdefault("is_encoder_decoder", "encoder" in self.arguments)
        super().__init__(**options)

    @property
    def model(self) -> ModelConfig:
        """The language model's configuration; of an encoder with a decoder, the decoder's."""
        return ModelConfig.from_dict(self.arguments["decoder" if self.is_encoder_decoder else "config"])

    @property
    def encoder(self) -> ModelConfig:
        """The encoder's configuration."""
        return ModelConfig.from_dict(self.arguments["encoder"])

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens."""
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        """The model's dim."""
        return self.model.dim

    @property
    def num_hidden_layers(self) -> int:
        """The model's depth."""
        return self.model.depth

    @property
    def num_attention_heads(self) -> int:
        """The number of attention heads."""
        return self.model.attention.num_heads


def checkpoint_of(name: Any) -> Any:
    """Return the last checkpoint if `name` is the folder of a run; anything else as it is."""
    found = None if name is None else find_checkpoint(Path(name))
    return name if found is None or found == Path(name) else str(committed_folder(found.resolve()))


def _to_json(config: ModelConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return a validated configuration as JSON holds it."""
    return (config if isinstance(config, ModelConfig) else ModelConfig.from_dict(config)).to_dict()
