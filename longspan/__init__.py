"""longspan: sequence mixing in linear time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from longspan.generation.generate import generate as generate
    from longspan.generation.generate import stream as stream
    from longspan.generation.sampling import Sampling as Sampling
    from longspan.layout import Packing as Packing
    from longspan.mechanisms import build_mechanism as build_mechanism
    from longspan.mechanisms import list_mechanisms as list_mechanisms
    from longspan.mechanisms import register_mechanism as register_mechanism
    from longspan.mechanisms.linformer import Projection as Projection
    from longspan.models.attention_maps import attention_map as attention_map
    from longspan.models.attention_maps import plot_attention as plot_attention
    from longspan.models.checkpoint import load as load
    from longspan.models.checkpoint import save as save
    from longspan.models.config import AttentionConfig as AttentionConfig
    from longspan.models.config import FeedForwardConfig as FeedForwardConfig
    from longspan.models.config import LegacyConfig as LegacyConfig
    from longspan.models.config import ModelConfig as ModelConfig
    from longspan.models.explain import explain as explain
    from longspan.models.layers import Attention as Attention
    from longspan.models.transformer import Classifier as Classifier
    from longspan.models.transformer import EncoderDecoder as EncoderDecoder
    from longspan.models.transformer import LanguageModel as LanguageModel
    from longspan.models.transformer import Transformer as Transformer
    from longspan.models.vision import ImageAttention as ImageAttention
    from longspan.protocol import FeatureMap as FeatureMap
    from longspan.protocol import Mechanism as Mechanism
    from longspan.protocol import State as State

# Imported on first use, so that the parts of the package that need no torch work without it.
_NAMES = {
    "generation.generate": "generate stream",
    "generation.sampling": "Sampling",
    "layout": "Packing",
    "mechanisms": "build_mechanism list_mechanisms register_mechanism",
    "mechanisms.linformer": "Projection",
    "models.attention_maps": "attention_map plot_attention",
    "models.checkpoint": "load save",
    "models.config": "AttentionConfig FeedForwardConfig LegacyConfig ModelConfig",
    "models.explain": "explain",
    "models.layers": "Attention",
    "models.transformer": "Classifier EncoderDecoder LanguageModel Transformer",
    "models.vision": "ImageAttention",
    "protocol": "FeatureMap Mechanism State",
}
_MODULES = {name: f"longspan.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
