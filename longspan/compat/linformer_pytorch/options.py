"""Translate the arguments of linformer-pytorch to longspan configurations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from longspan.compat.options import encoder_decoder_options, without_prefix
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.config import AttentionConfig, Execution, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.transformer import Transformer
from longspan.utils import choose

Options = TypeVar("Options", bound="ModelOptions")
POSITION_BASE = 100000.0  # of the sinusoidal positions
ACTIVATIONS = ("gelu", "relu")
CHECKPOINT_LEVELS = ("C0", "C1", "C2")
SHARING = ("none", "headwise", "kv", "layerwise")
METHODS = {"learnable": "learned", "convolution": "convolution", "no_params": "random"}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Arguments that all models share, with the defaults of Linformer."""

    input_size: int
    channels: int
    dim_k: int
    dim_ff: int = 256
    dim_d: int | None = None
    dropout_ff: float = 0.15
    nhead: int = 4
    depth: int = 1
    dropout: float = 0.1
    activation: str = "gelu"
    checkpoint_level: str = "C0"
    parameter_sharing: str = "layerwise"
    k_reduce_by_layer: int = 0
    full_attention: bool = False
    include_ff: bool = True
    w_o_intermediate_dim: int | None = None
    decoder_mode: bool = False
    causal: bool = False
    method: str = "learnable"
    ff_intermediate: int | None = None
    faithful: bool | None = None
    """Compute as the original does; see `longspan.compat.faithful`."""
    _constant_rank: bool = False
    """Whether k_reduce_by_layer is ignored, as in the original with layerwise sharing; see `adapt`."""

    def __post_init__(self) -> None:
        choose("activation", self.activation, ACTIVATIONS)
        choose("checkpoint_level", self.checkpoint_level, CHECKPOINT_LEVELS)
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
    def reduces_shared_rank(self) -> bool:
        """Whether the rank decreases with depth where the original shares one projection, and so one rank."""
        reduced = self.parameter_sharing == "layerwise" and self.k_reduce_by_layer > 0
        return reduced and not (self.full_attention or self.faithful or self._constant_rank)

    @property
    def layerwise(self) -> bool:
        """Whether all layers share one projection."""
        return self.parameter_sharing == "layerwise" and not self.reduces_shared_rank

    def adapt(self: Options, shapes: Mapping[str, torch.Size]) -> Options:
        """Adapt the options to a checkpoint whose shapes show that the original ignored k_reduce_by_layer."""
        found = {shape for key, shape in shapes.items() if key.endswith(".E.weight")}
        if not self.reduces_shared_rank or self.depth == 1 or len(found) != 1:
            return self
        warnings.warn(
            "this checkpoint was trained without k_reduce_by_layer, which the original ignores with layerwise sharing: "
            "the model was rebuilt with its shapes",
            stacklevel=6,
        )
        return replace(self, _constant_rank=True)

    def config(self) -> ModelConfig:
        """Return the configuration of the longspan model."""
        activation: Any = self.activation
        changes_width = self.ff_intermediate is not None and self.depth > 1
        attention = self._attention()
        return ModelConfig(
            dim=self.channels,
            depth=self.depth,
            attention=attention,
            cross=attention if self.decoder_mode else None,
            feed_forward=FeedForwardConfig(hidden=self.dim_ff, activation=activation, dropout=self.dropout_ff)
            if self.include_ff
            else None,
            norm_position="post",
            final_norm=False,
            causal=self.causal,
            execution=self.execution,
            legacy=LegacyConfig(
                inner_dim=self.ff_intermediate if changes_width else None,
                resample=changes_width,
                out_dim=self.w_o_intermediate_dim,
                out_dropout=self.dropout_ff if self.include_ff else 0.0,
                position_base=POSITION_BASE,
            ),
        )

    @property
    def execution(self) -> Execution:
        if self.checkpoint_level == "C2" and not self.dropout and self.parameter_sharing != "none":
            return "recompute_heads"
        # Heads with different projections or a common dropout mask are recomputed with their layer.
        return "keep" if self.checkpoint_level == "C0" else "recompute"

    def rank(self, layer: int) -> int:
        """Return dim_k of a layer."""
        return max(1, self.dim_k - (0 if self.layerwise else layer * self.k_reduce_by_layer))

    def linformer(self, layer: int) -> dict[str, Any]:
        """Return the options of the Linformer mechanism in a layer."""
        return linformer_options(self.rank(layer), self.input_size, self.method, self.parameter_sharing)

    def share_projection(self, model: Transformer) -> None:
        """Share one projection among the layers, self- and cross-attention alike, if the options say so."""
        if not self.layerwise or self.full_attention:
            return
        mechanisms = [layer.mechanism for _, layer in model.stack.attention_layers()]
        first = mechanisms[0]
        for mechanism in mechanisms:
            assert isinstance(mechanism, LinformerAttention)
            assert isinstance(first, LinformerAttention)
            mechanism.keys = mechanism.values = first.keys

    def _attention(self) -> AttentionConfig:
        mechanism: Any = {"mechanism": "softmax", "dropout": self.dropout}
        if not self.full_attention:
            layers = [
                {"mechanism": "linformer", **self.linformer(i), "dropout": self.dropout} for i in range(self.depth)
            ]
            mechanism = layers[0] if self.layerwise else layers
        return AttentionConfig(
            num_heads=self.nhead,
            head_dim=self.head_dim,
            mechanism=mechanism,
            dropout=self.dropout,
            share_projection=self.layerwise and not self.full_attention,
        )


@dataclass(frozen=True, kw_only=True)
class LinformerOptions(ModelOptions):
    """Arguments of Linformer."""

    use_pos_emb: bool = False


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(ModelOptions):
    """Arguments of LinformerLM."""

    num_tokens: int
    dim_k: int = 64
    dim_ff: int = 1024
    dropout_ff: float = 0.1
    dropout_tokens: float = 0.1
    depth: int = 2
    dropout: float = 0.05
    emb_dim: int | None = None
    return_emb: bool = False

    def config(self) -> ModelConfig:
        return replace(
            super().config(),
            vocab_size=self.num_tokens,
            embed_dim=self.emb_dim,
            embed_dropout=self.dropout_tokens,
            positions="sinusoidal",
            # Tied embeddings have no output layer, which return_emb would not use.
            tie_embeddings=self.return_emb,
        )


EncoderDecoderOptions = encoder_decoder_options(
    LanguageModelOptions,
    shared=("activation", "checkpoint_level", "faithful"),
    omitted=("decoder_mode", "causal", "dropout_tokens", "return_emb"),
)


def options_with_prefix(options: Any, prefix: str) -> LanguageModelOptions:
    """Return the options of the encoder ("enc_") or the decoder ("dec_") of a LinformerEncDec."""
    decoder = prefix == "dec_"
    return LanguageModelOptions(
        **without_prefix(options, prefix),
        activation=options.activation,
        checkpoint_level=options.checkpoint_level,
        faithful=options.faithful,
        decoder_mode=decoder,
        causal=decoder,
        return_emb=not decoder,
    )


def linformer_options(rank: int, max_length: int, method: str, parameter_sharing: str) -> dict[str, Any]:
    """Return the options of a Linformer mechanism."""
    return {
        "rank": rank,
        "max_length": max_length,
        "projection": METHODS[method],
        "whole_stretches": method == "convolution",
        "bias": method != "no_params",
        "per_head": parameter_sharing == "none",
        "share_projection": parameter_sharing in ("kv", "layerwise"),
        "keep_slots": True,
    }
