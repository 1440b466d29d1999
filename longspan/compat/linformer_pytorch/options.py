"""The arguments of linformer-pytorch's models as a configuration of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longspan.compat.linformer_pytorch.keys import BASE
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.models.config import AttentionConfig, Execution, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import Attention
from longspan.models.transformer import Transformer
from longspan.utils import choose

SHARING = ("none", "headwise", "kv", "layerwise")
METHODS = {"learnable": "learned", "convolution": "convolution", "no_params": "random"}


@dataclass(frozen=True)
class Options:
    """What every model is given. flat: k_reduce_by_layer has no effect, as in the original with layerwise sharing."""

    input_size: int
    channels: int
    dim_k: int
    dim_ff: int
    dim_d: int | None
    dropout_ff: float
    nhead: int
    depth: int
    dropout: float
    activation: str
    checkpoint_level: str
    parameter_sharing: str
    k_reduce_by_layer: int
    full_attention: bool
    include_ff: bool
    w_o_intermediate_dim: int | None
    decoder_mode: bool
    causal: bool
    method: str
    ff_intermediate: int | None
    flat: bool = False

    def __post_init__(self) -> None:
        choose("activation", self.activation, ("gelu", "relu"))
        choose("checkpoint_level", self.checkpoint_level, ("C0", "C1", "C2"))
        choose("parameter_sharing", self.parameter_sharing, SHARING)
        choose("method", self.method, METHODS)
        if self.dim_d is None and self.channels % self.nhead:
            raise ValueError(f"channels ({self.channels}) must be a multiple of nhead ({self.nhead}), or give dim_d")
        if self.ff_intermediate and (self.parameter_sharing == "layerwise" or self.decoder_mode):
            raise ValueError("ff_intermediate needs parameter_sharing other than layerwise, and no decoder_mode")

    @property
    def head_dim(self) -> int:
        return self.channels // self.nhead if self.dim_d is None else self.dim_d

    @property
    def shrinks(self) -> bool:
        """Whether k falls with depth where the original's layers share one projection, and so one k."""
        reduced = self.parameter_sharing == "layerwise" and self.k_reduce_by_layer > 0
        return reduced and not self.full_attention and not self.flat

    @property
    def layerwise(self) -> bool:
        return self.parameter_sharing == "layerwise" and not self.shrinks

    def config(self, **more: Any) -> ModelConfig:
        """more: further fields, those of a language model."""
        widens = self.ff_intermediate is not None and self.depth > 1
        attention = self._attention()
        return ModelConfig(
            dim=self.channels,
            depth=self.depth,
            attention=attention,
            cross=attention if self.decoder_mode else None,
            feed_forward=self._feed_forward() if self.include_ff else None,
            norm_position="post",
            final_norm=False,
            causal=self.causal,
            execution=self.execution,
            legacy=LegacyConfig(
                inner_dim=self.ff_intermediate if widens else None,
                resample=widens,
                out_dim=self.w_o_intermediate_dim,
                out_dropout=self.dropout_ff if self.include_ff else 0.0,
                position_base=BASE,
            ),
            **more,
        )

    @property
    def execution(self) -> Execution:
        if self.checkpoint_level == "C2" and not self.dropout and self.parameter_sharing != "none":
            return "recompute_heads"
        # Heads that differ, or drop weights together, are made again with their whole layer.
        return "keep" if self.checkpoint_level == "C0" else "recompute"

    def spec(self, i: int) -> dict[str, Any]:
        """Linformer's options in layer i."""
        reduced = 0 if self.layerwise else i * self.k_reduce_by_layer
        return {
            "rank": max(1, self.dim_k - reduced),
            "max_length": self.input_size,
            "projection": METHODS[self.method],
            "whole_stretches": self.method == "convolution",
            "bias": self.method != "no_params",
            "per_head": self.parameter_sharing == "none",
            "share_projection": self.parameter_sharing in ("kv", "layerwise"),
        }

    def finish(self, model: Transformer) -> nn.ModuleList | None:
        """Ties and draws what a configuration does not say; gives the projections that full attention leaves idle."""
        mechanisms: list[nn.Module] = [
            branch.layer.mechanism for branch in model.stack.branches if isinstance(branch.layer, Attention)
        ]
        idle = None
        if self.full_attention:
            each = 2 if self.decoder_mode else 1
            places = [i for i in range(self.depth) for _ in range(each)]
            mechanisms = [LinformerAttention(self.nhead, self.head_dim, **self.spec(i)) for i in places]
            idle = nn.ModuleList(mechanisms)
        first = mechanisms[0]
        for mechanism in mechanisms if self.layerwise else ():
            # One projection also for self- and cross-attention.
            assert isinstance(mechanism, LinformerAttention)
            assert isinstance(first, LinformerAttention)
            mechanism.keys = mechanism.values = first.keys
        if self.method == "no_params":
            draw(mechanisms)
        return None if self.method == "no_params" else idle

    def _attention(self) -> AttentionConfig:
        mechanism: Any = {"mechanism": "softmax", "dropout": self.dropout}
        if not self.full_attention:
            each = [{"mechanism": "linformer", **self.spec(i), "dropout": self.dropout} for i in range(self.depth)]
            mechanism = each[0] if self.layerwise else each
        return AttentionConfig(
            num_heads=self.nhead,
            head_dim=self.head_dim,
            mechanism=mechanism,
            dropout=self.dropout,
            share_projection=self.layerwise and not self.full_attention,
        )

    def _feed_forward(self) -> FeedForwardConfig:
        activation: Any = self.activation
        return FeedForwardConfig(hidden=self.dim_ff, activation=activation, dropout=self.dropout_ff)


def draw(mechanisms: list[nn.Module]) -> None:
    """The fixed tables of method="no_params", the same in every model of a shape: old checkpoints do not hold them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for projection in dict.fromkeys(_projections(mechanisms)):
            drawn = torch.randn(projection.table.shape, generator=generator) / projection.rank
            projection.table.copy_(drawn)


def _projections(mechanisms: list[nn.Module]) -> Iterator[Projection]:
    for mechanism in mechanisms:
        assert isinstance(mechanism, LinformerAttention)
        yield from (mechanism.keys, mechanism.values)
