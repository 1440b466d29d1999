"""longspan: attention that does not cost n²."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from longspan.checkpoint import load as load
    from longspan.checkpoint import save as save
    from longspan.config import AttentionConfig as AttentionConfig
    from longspan.config import FeedForwardConfig as FeedForwardConfig
    from longspan.config import ModelConfig as ModelConfig
    from longspan.generation import Sampling as Sampling
    from longspan.generation import generate as generate
    from longspan.generation import stream as stream
    from longspan.images import ImageAttention as ImageAttention
    from longspan.layers import Attention as Attention
    from longspan.maps import attention_map as attention_map
    from longspan.maps import plot_attention as plot_attention
    from longspan.mechanism import FeatureMap as FeatureMap
    from longspan.mechanism import Mechanism as Mechanism
    from longspan.mechanism import State as State
    from longspan.mechanisms import build_mechanism as build_mechanism
    from longspan.mechanisms import mechanisms as mechanisms
    from longspan.mechanisms import register_mechanism as register_mechanism
    from longspan.mechanisms.linformer import Projection as Projection
    from longspan.models import Classifier as Classifier
    from longspan.models import EncoderDecoder as EncoderDecoder
    from longspan.models import LanguageModel as LanguageModel
    from longspan.models import Transformer as Transformer
    from longspan.rows import Packing as Packing

# Imported on first use, so that parts of the package that need no torch work without it.
_HOME = {
    "FeatureMap": "longspan.mechanism",
    "Mechanism": "longspan.mechanism",
    "Packing": "longspan.rows",
    "State": "longspan.mechanism",
    "build_mechanism": "longspan.mechanisms",
    "mechanisms": "longspan.mechanisms",
    "register_mechanism": "longspan.mechanisms",
    "Projection": "longspan.mechanisms.linformer",
    "AttentionConfig": "longspan.config",
    "FeedForwardConfig": "longspan.config",
    "ModelConfig": "longspan.config",
    "Attention": "longspan.layers",
    "Transformer": "longspan.models",
    "LanguageModel": "longspan.models",
    "EncoderDecoder": "longspan.models",
    "Classifier": "longspan.models",
    "ImageAttention": "longspan.images",
    "Sampling": "longspan.generation",
    "generate": "longspan.generation",
    "stream": "longspan.generation",
    "save": "longspan.checkpoint",
    "load": "longspan.checkpoint",
    "attention_map": "longspan.maps",
    "plot_attention": "longspan.maps",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
