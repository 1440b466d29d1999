"""Presets of `longspan train`, and the options of mechanisms that are given by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """Fields of ModelConfig and TrainConfig."""

    model: Values
    train: Values


def _model(dim: int, depth: int, num_heads: int, **attention: Any) -> Values:
    return {
        "dim": dim,
        "depth": depth,
        "attention": {"num_heads": num_heads, "qk_norm": True, "out_bias": False, **attention},
        "feed_forward": {"mult": 4, "activation": "relu2", "bias": False},
        "norm": "rms",
        "token_shift": [0, 1],
    }


# What `longspan bench quality` found best: docs/benchmarks.md.
_GATED_OUTPUT = {"out_norm": True, "out_gate": "silu"}
_MODEL_RECIPE = {"ngrams": [2, 3, 4], "ngram_buckets": 32_768, "zero_init_residual": True, "residual_in_fp32": False}
_TRAIN_RECIPE = {"optimizer": "muon", "decay_type": "linear", "ngram_decay": 8.0}

PRESETS = {
    "tiny": Preset(
        _model(128, 4, 4, **_GATED_OUTPUT) | _MODEL_RECIPE | {"ngram_buckets": 4096},
        {"context": 512, "batch_size": 8, "steps": 1000, "lr": 3e-3, "warmup": 50, "eval_tokens": 65_536}
        | {"muon_lr": 1e-2, "embedding_lr": 2e-2}
        | _TRAIN_RECIPE,
    ),
    "small": Preset(
        _model(512, 6, 8, **_GATED_OUTPUT) | _MODEL_RECIPE,
        {"context": 4096, "batch_size": 8, "steps": 10_000, "lr": 2e-3, "warmup": 200, "eval_tokens": 524_288}
        | {"muon_lr": 6e-3}
        | _TRAIN_RECIPE,
    ),
    "base": Preset(
        _model(768, 12, 12, **_GATED_OUTPUT) | _MODEL_RECIPE,
        # Rates of `small`, higher for steps of twice the tokens and lower for the width.
        {"context": 8192, "batch_size": 8, "steps": 20_000, "lr": 1.5e-3, "warmup": 300, "eval_tokens": 1_048_576}
        | {"muon_lr": 5e-3}
        | _TRAIN_RECIPE,
    ),
}


def named_mechanism(name: str, num_heads: int, context: int) -> Values:
    """Return the fields of AttentionConfig for a mechanism given by its name.

    "split" has local heads, with rotary embeddings, and as many linear heads, without them: the local heads provide the
    information on positions.

    Args:
        name: The mechanism, or "split".
        num_heads: The number of heads of a layer.
        context: The context length, which limits the window and the rank.
    """
    window = max(2, min(256, context // 4))
    linear = {"mechanism": "linear", "feature_map": "softmax"}
    known: dict[str, Values] = {
        "local": {"mechanism": "local", "window": window},
        "linear": linear,
        "performer": {"mechanism": "performer", "num_features": 256},
        "linformer": {"mechanism": "linformer", "rank": window, "max_length": context, "periodic": True},
        "split": half_local(num_heads, window, linear),
    }
    rotary = {"softmax": "halves", "local": "halves", "split": ["halves", "none"]}.get(name, "none")
    return {"mechanism": known.get(name, {"mechanism": name}), "rotary": rotary}


def half_local(num_heads: int, window: int, other: Values) -> Values:
    """Return the options of a split: half of the heads use a window, the others the mechanism `other`."""
    half = num_heads // 2
    local = {"mechanism": "local", "window": window, "num_heads": half}
    return {"mechanism": "split", "parts": [local, {**other, "num_heads": num_heads - half}]}
