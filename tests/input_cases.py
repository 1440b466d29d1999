"""Small mechanisms and inputs that several files of tests build."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan import Mechanism, build_mechanism, list_mechanisms

B, T, S, H, D, E = 2, 17, 19, 3, 5, 7

OPTIONS = {
    "local": {"window": 4},
    "mixture": {"window": 4},
    "linformer": {"rank": 3, "max_length": 41},
    "decay": {"gate": "fixed"},
    "split": {
        "parts": [
            {"mechanism": "local", "num_heads": 1, "window": 4},
            {"mechanism": "linear", "num_heads": 2, "feature_map": "softmax"},
        ]
    },
}


def build(name: str, **options) -> Mechanism:
    return build_mechanism(name, H, D, value_dim=E, **(OPTIONS.get(name, {}) | options)).eval()


# Those that take q, k and v alone; test_gated_mechanisms.py has the others.
UNGATED = [name for name in list_mechanisms() if not build(name).num_gates]
ALL = pytest.mark.parametrize("name", UNGATED)
CROSS = pytest.mark.parametrize("name", [name for name in UNGATED if build(name).supports_cross])


def inputs(batch: int = B, queries: int = T, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    return torch.randn(batch, queries, H, D), torch.randn(batch, keys, H, D), torch.randn(batch, keys, H, E)
