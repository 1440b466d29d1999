"""Small stacks that several files of tests build."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from model_cases import shaken
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.transformer import Transformer

B, T, S, DIM = 2, 9, 5, 12
EXECUTIONS = {
    "single": ["keep", "recompute", "recompute_heads"],
    "parallel": ["keep", "recompute", "recompute_heads"],
    "double": ["keep", "recompute", "recompute_heads", "reverse"],
    "hyper": ["keep", "recompute", "recompute_heads"],
}


def tokens(batch: int = B, length: int = T, dim: int = DIM) -> Tensor:
    return torch.randn(batch, length, dim, dtype=torch.float64)


def transformer(topology: str, **options: Any) -> Transformer:
    defaults: dict[str, Any] = {
        "dim": DIM,
        "depth": 2,
        "attention": AttentionConfig(num_heads=3, dropout=0.2, rotary="halves"),
        "cross": AttentionConfig(num_heads=2, mechanism="linear", dropout=0.2),
        "feed_forward": FeedForwardConfig(mult=2, dropout=0.3),
        "token_shift": (0, 1),
        "causal": True,
        "residual": topology,
        "num_streams": 3,
    }
    of_legacy = {f.name for f in fields(LegacyConfig)}
    legacy = LegacyConfig(**{"out_dropout": 0.1, **{k: v for k, v in options.items() if k in of_legacy}})
    rest = {k: v for k, v in options.items() if k not in of_legacy}
    return shaken(Transformer(ModelConfig(**{**defaults, "legacy": legacy, **rest})))


class Live(TorchDispatchMode):
    """Counts the bytes of all storages made since it was entered that are still alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.made += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        return out

    @property
    def bytes(self) -> int:
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(size for _, size in self.storages.values())
