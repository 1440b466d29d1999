"""A small layer of attention that several files of tests build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.config import AttentionConfig
from longspan.models.layers import Attention

B, T, S, DIM = 2, 11, 7, 12


def shaken(module: Any) -> Any:
    """In float64, every parameter random: those that begin at 0 or 1 would hide mistakes."""
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def attention(causal: bool = False, cross: bool = False, **options: Any) -> Attention:
    config = AttentionConfig(**{"num_heads": 3, **options})
    return shaken(Attention(DIM, config, causal=causal, cross=cross))


def tokens(batch: int = B, length: int = T, dim: int = DIM) -> Tensor:
    return torch.randn(batch, length, dim, dtype=torch.float64)
