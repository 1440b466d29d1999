"""What tests of serving share."""

from __future__ import annotations

import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig

SPLIT = {
    "mechanism": "split",
    "parts": [
        {"mechanism": "local", "num_heads": 2, "window": 5},
        {"mechanism": "linear", "num_heads": 2},
    ],
}
MECHANISMS = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 5},
    "linear": {"mechanism": "linear", "feature_map": "softmax"},
    "blind spot": {"mechanism": "linear", "blind_spot": 3},
    "performer": "performer",
    "linformer": {"mechanism": "linformer", "rank": 7, "max_length": 97},
    "decay": "decay",
    "delta": "delta",
    "split": SPLIT,
}


def language_model(mechanism=SPLIT, vocab_size=256, dtype=torch.float32, **fields):
    attention = AttentionConfig(num_heads=4, mechanism=mechanism, rotary="none")
    config = ModelConfig(dim=32, depth=2, causal=True, vocab_size=vocab_size, attention=attention, **fields)
    model = LanguageModel(config).to(dtype).eval()
    with torch.no_grad():
        model.to_logits.weight.mul_(4)  # logits that differ enough for a choice to matter
    return model


def answers(choices):
    return [(choice.tokens, choice.log_probabilities, choice.top, choice.finish_reason) for choice in choices]
