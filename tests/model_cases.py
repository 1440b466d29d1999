"""Small models that several files of tests build."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import Attention
from longspan.models.transformer import EncoderDecoder, LanguageModel

B, T, DIM, V = 2, 11, 12, 13

MECHANISMS: dict[str, Any] = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 4},
    "blocks": {"mechanism": "local", "window": 3, "look_back": 1},
    "linear": "linear",
    "blind": {"mechanism": "linear", "feature_map": "softmax", "blind_spot": 3},
    "performer": {"mechanism": "performer", "num_features": 5},
    "linformer": {"mechanism": "linformer", "rank": 3, "max_length": 40},
    "split": {
        "mechanism": "split",
        "parts": [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "linear", "num_heads": 2}],
    },
    "mixed": ({"mechanism": "local", "window": 3}, "linear"),
}


def shaken(module: Any) -> Any:
    """In float64, every parameter random: those that begin at 0 or 1 would hide mistakes."""
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def config(**options: Any) -> ModelConfig:
    """A small causal language model; fields of the attention and of the legacy section are recognized by name."""
    of_attention = {f.name for f in fields(AttentionConfig)} - {"dropout"}
    attention = {"num_heads": 3, **{k: v for k, v in options.items() if k in of_attention}}
    of_legacy = {f.name for f in fields(LegacyConfig)}
    legacy = LegacyConfig(**{k: v for k, v in options.items() if k in of_legacy})
    rest = {k: v for k, v in options.items() if k not in of_attention | of_legacy}
    defaults = {"dim": DIM, "depth": 2, "causal": True, "vocab_size": V, "feed_forward": FeedForwardConfig(mult=1)}
    return ModelConfig(**{**defaults, "attention": AttentionConfig(**attention), "legacy": legacy, **rest})


def tokens(batch: int = B, length: int = T) -> Tensor:
    return torch.randint(V, (batch, length))


def stream(model: LanguageModel, x: Tensor, splits: list[int], **options: Any) -> Tensor:
    state, outs = model.new_state(len(x), **options), []
    for piece in x.split(splits, 1):
        out, state = model.extend(piece, state)
        outs.append(out)
    assert state.length.tolist() == [x.shape[1]] * len(x)
    return torch.cat(outs, 1)


def attentions(model: Any) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


PERFORMER = {"mechanism": "performer", "num_features": 5, "redraw_interval": 1}


def seq2seq(cross_mechanism: Any = "linear", **options: Any) -> EncoderDecoder:
    encoder = config(causal=False, **options)
    decoder = config(cross=AttentionConfig(num_heads=2, mechanism=cross_mechanism), **options)
    return shaken(EncoderDecoder(encoder, decoder))
