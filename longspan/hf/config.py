"""A transformers configuration that carries longspan's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from longspan import __version__
from longspan.models.checkpoint import FORMAT
from longspan.models.config import ModelConfig


class LongspanConfig(PreTrainedConfig):
    """What `longspan.save` writes to config.json, as transformers reads and writes it.

    model: a `ModelConfig`, or what its `to_dict` gives. encoder: that of the encoder; `model` is then the decoder.
    The keyword arguments are those of every transformers configuration, such as num_labels.
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
            config = _plain(ModelConfig() if model is None else model)
            if encoder is None:
                arguments = {"config": config}
            else:
                both = {"pad_token": pad_token, "tie_embeddings": tie_embeddings}
                arguments = {"encoder": _plain(encoder), "decoder": config, **both}
        elif model is not None or encoder is not None:
            raise ValueError("arguments is what a saved configuration holds; give it or model and encoder, not both")
        self.arguments: dict[str, Any] = {
            name: _plain(value) if isinstance(value, Mapping) else value for name, value in arguments.items()
        }
        self.format, self.longspan = FORMAT, __version__
        options.pop("format", None)
        options.pop("longspan", None)
        options.setdefault("is_encoder_decoder", "encoder" in self.arguments)
        super().__init__(**options)

    @property
    def model(self) -> ModelConfig:
        """The language model's configuration; of an encoder and decoder, the decoder's."""
        return ModelConfig.from_dict(self.arguments["decoder" if self.is_encoder_decoder else "config"])

    @property
    def encoder(self) -> ModelConfig:
        return ModelConfig.from_dict(self.arguments["encoder"])

    @property
    def vocab_size(self) -> int | None:
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.dim

    @property
    def num_hidden_layers(self) -> int:
        return self.model.depth

    @property
    def num_attention_heads(self) -> int:
        return self.model.attention.num_heads


def _plain(config: ModelConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Checked, and as JSON holds it."""
    return (config if isinstance(config, ModelConfig) else ModelConfig.from_dict(config)).to_dict()
