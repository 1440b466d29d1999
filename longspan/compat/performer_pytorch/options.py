"""Translate the arguments of performer-pytorch to longspan configurations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.options import encoder_decoder_options, head_counts
from longspan.compat.performer_pytorch.kernels import RELU
from longspan.mechanisms.feature_maps import ACTIVATIONS
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig, Positions, RotaryStyle
from longspan.utils import choose

Kernel = str | Callable[[Tensor], Tensor]

EPSILON = 1e-4  # added to FAVOR+ features by the original, whose checkpoints were trained with it
PHANTOM = 1e-6  # added by the original's causal attention to sums of key features, before division by √M
_KERNEL_MODULES: dict[Any, str] = {
    module: module.__name__.lower() for module in (nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus)
}
_KERNEL_FUNCTIONS: dict[Any, str] = {**{function: name for name, function in ACTIVATIONS.items()}, torch.relu: "relu"}


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Arguments for the features of linear attention, which every class takes."""

    causal: bool = False
    nb_features: int | None = None
    generalized_attention: bool = False
    kernel_fn: Kernel = RELU
    no_projection: bool = False
    faithful: bool | None = None

    def num_features(self, head_dim: int) -> int:
        """Return nb_features, by default head_dim · log(head_dim)."""
        return max(1, int(head_dim * math.log(head_dim))) if self.nb_features is None else self.nb_features

    @property
    def own_kernel(self) -> Callable[[Tensor], Tensor]:
        """The kernel as a function; a model has its own default, whose hooks are not those of other models."""
        if isinstance(self.kernel_fn, str):
            return ACTIVATIONS[choose("kernel_fn", self.kernel_fn, ACTIVATIONS)]
        return nn.ReLU() if self.kernel_fn is RELU else self.kernel_fn

    @property
    def resolved_kernel(self) -> Kernel:
        """The kernel_fn, by name where it has one."""
        return resolve_kernel(self.kernel_fn)

    def performer(
        self, head_dim: int, *, causal: bool, interval: int | None = None, ortho_scaling: int = 0
    ) -> dict[str, Any]:
        """Return FastAttention as a mechanism specification. interval: feature_redraw_interval."""
        if ortho_scaling not in (0, 1):
            raise ValueError(
                "ortho_scaling must be 0 (norms distributed as those of Gaussian vectors) or 1 (norms √dim_heads), got "
                f"{ortho_scaling}"
            )
        if self.no_projection:
            if self.generalized_attention:
                warnings.warn(
                    "no_projection applies a softmax to queries and keys, as in the original: generalized_attention "
                    "and kernel_fn have no effect with it",
                    stacklevel=2,
                )
            normalize = {"normalize": "query", "phantom": PHANTOM} if causal else {"normalize": "feature"}
            return {"mechanism": "performer", "projection": False, "redraw_interval": None, **normalize}
        number = self.num_features(head_dim)
        spec: dict[str, Any] = {"mechanism": "performer", "num_features": number}
        spec["redraw_interval"] = redraw_interval(interval)
        if ortho_scaling:
            spec["row_norms"] = "unit"
        if self.generalized_attention:
            return spec | {"kernel": self.resolved_kernel, "phantom": PHANTOM if causal else 0.0}
        return spec | {"epsilon": EPSILON, "phantom": PHANTOM * math.sqrt(number) if causal else 0.0}


@dataclass(frozen=True, kw_only=True)
class FastAttentionOptions(FeatureOptions):
    """Arguments of FastAttention."""

    dim_heads: int
    ortho_scaling: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadOptions(FeatureOptions):
    """Arguments that attention layers and models share. dim_head: by default dim / heads."""

    dim: int
    heads: int
    dim_head: int | None
    local_window_size: int = 256
    feature_redraw_interval: int | None = 1000
    qkv_bias: bool
    attn_out_bias: bool = True

    @property
    def head_dim(self) -> int:
        if self.dim_head is None and self.dim % self.heads:
            raise ValueError(f"dim ({self.dim}) must be a multiple of heads ({self.heads}), or give dim_head")
        return self.dim // self.heads if self.dim_head is None else self.dim_head

    def attention(self, mechanism: Any, rotary: Any, dropout: float) -> AttentionConfig:
        """Return the configuration of an attention layer."""
        return AttentionConfig(
            num_heads=self.heads,
            mechanism=mechanism,
            head_dim=self.head_dim,
            rotary=rotary,
            qkv_bias=self.qkv_bias,
            out_bias=self.attn_out_bias,
            dropout=dropout,
        )

    def mechanism(self, num_local: int, dropout: float, interval: int | None) -> dict[str, Any]:
        """Return the specification of a layer's heads, of which the last `num_local` are local.

        A local head attends to its own block, the one before it and, unless causal, the one after it.
        """
        ahead = int(not self.causal)
        local: dict[str, Any] = {
            "mechanism": "local",
            "window": self.local_window_size,
            "look_back": 1,
            "look_ahead": ahead,
            # With look_ahead the original rotates queries by one block too much, and checkpoints depend on it.
            "query_offset": ahead * self.local_window_size,
            "dropout": dropout,
        }
        if num_local == self.heads:
            return local
        performer = self.performer(self.head_dim, causal=self.causal, interval=interval)
        if num_local == 0:
            return performer
        parts = [{**performer, "num_heads": self.heads - num_local}, {**local, "num_heads": num_local}]
        return {"mechanism": "split", "parts": parts}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(HeadOptions):
    """Arguments of SelfAttention and CrossAttention."""

    heads: int = 8
    dim_head: int | None = 64
    local_heads: int = 0
    dropout: float = 0.0
    qkv_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class PerformerOptions(HeadOptions):
    """Arguments of Performer."""

    depth: int
    dim_head: int | None = None
    local_attn_heads: int | Sequence[int] = 0
    ff_mult: int = 4
    reversible: bool = False
    ff_chunks: int = 1
    use_scalenorm: bool = False
    use_rezero: bool = False
    ff_glu: bool = False
    ff_dropout: float = 0.0
    attn_dropout: float = 0.0
    cross_attend: bool = False
    auto_check_redraw: bool = True
    qkv_bias: bool = True
    shift_tokens: bool = False

    def config(self) -> ModelConfig:
        """Return the configuration of the longspan model."""
        interval = self.feature_redraw_interval if self.auto_check_redraw else None
        mechanisms = [self.mechanism(number, self.attn_dropout, interval) for number in self.local_heads]
        same = all(mechanism == mechanisms[0] for mechanism in mechanisms)
        cross = None
        if self.cross_attend:
            performer = self.performer(self.head_dim, causal=False, interval=interval)
            cross = self.attention(performer, "none", self.attn_dropout)
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            attention=self.attention(mechanisms[0] if same else mechanisms, self.rotary, self.attn_dropout),
            cross=cross,
            feed_forward=FeedForwardConfig(
                mult=self.ff_mult, gated=self.ff_glu, dropout=self.ff_dropout, chunks=self.ff_chunks
            ),
            norm="scale" if self.use_scalenorm else "layer",
            norm_position="rezero" if self.use_rezero and not self.use_scalenorm else "pre",
            final_norm=False,
            causal=self.causal,
            token_shift=((0, 1) if self.causal else (-1, 0, 1)) if self.shift_tokens else (),
            residual="double" if self.reversible else "single",
            legacy=LegacyConfig(sum_streams=self.reversible),
            execution="reverse" if self.reversible else "keep",
        )

    @property
    def rotary(self) -> dict[str, RotaryStyle]:
        """The rotary positions of each kind of head; those of linear heads are an argument of Performer.forward."""
        return {"performer": "none", "local": "halves"}

    @property
    def local_heads(self) -> tuple[int, ...]:
        """The number of local heads of each layer."""
        given = self.local_attn_heads
        if not isinstance(given, int) and len(given) == 1:
            given = given[0]
        return head_counts("local_attn_heads", given, self.depth, self.heads)


@dataclass(frozen=True, kw_only=True)
class PerformerLMOptions(PerformerOptions):
    """Arguments of PerformerLM. tie_embedding: an alias of tie_embed."""

    num_tokens: int
    max_seq_len: int
    dim_head: int | None = 64
    qkv_bias: bool = False
    attn_out_bias: bool = False
    emb_dropout: float = 0.0
    tie_embed: bool = False
    tie_embedding: bool = False
    rotary_position_emb: bool = True
    axial_position_emb: bool = False
    axial_position_shape: Sequence[int] | None = None

    def config(self) -> ModelConfig:
        positions: Positions = "sinusoidal" if self.rotary_position_emb else "learned"
        return replace(
            super().config(),
            # The original's last norm is a layer norm whatever the other norms are.
            final_norm="layer",
            positions="axial" if self.axial_position_emb else positions,
            max_length=self.max_seq_len,
            axial_shape=self.axial_shape if self.axial_position_emb else None,
            vocab_size=self.num_tokens,
            tie_embeddings=self.tied,
            embed_dropout=self.emb_dropout,
        )

    @property
    def rotary(self) -> dict[str, RotaryStyle]:
        return {"performer": "interleaved" if self.rotary_position_emb else "none", "local": "halves"}

    def of_performer(self) -> dict[str, Any]:
        """Return the arguments of the Performer inside."""
        return {f.name: getattr(self, f.name) for f in fields(PerformerOptions)} | {"dim_head": self.head_dim}

    @property
    def tied(self) -> bool:
        """Whether the logits use the token embedding."""
        return self.tie_embed or self.tie_embedding

    @property
    def axial_shape(self) -> tuple[int, ...]:
        return tuple(self.axial_position_shape or (math.ceil(self.max_seq_len / 64), 64))


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderBase:
    """Arguments of PerformerEncDec except those of its PerformerLMs. tie_token_embed: an alias of tie_token_embeds."""

    ignore_index: int = 0
    pad_value: int = 0
    tie_token_embeds: bool = False
    tie_token_embed: bool = False
    enc_causal: bool = False
    enc_cross_attend: bool = False
    dec_causal: bool = True
    dec_cross_attend: bool = True

    def __post_init__(self) -> None:
        for f in fields(EncoderDecoderBase):
            if f.name.startswith(("enc_", "dec_")) and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"{f.name} must be {f.default}: the encoder is bidirectional, the decoder is causal and attends to "
                    "the encoder"
                )


EncoderDecoderOptions = encoder_decoder_options(
    PerformerLMOptions,
    shared=("dim", "no_projection", "faithful"),
    omitted=("causal", "cross_attend"),
    base=EncoderDecoderBase,
)


def redraw_interval(feature_redraw_interval: int | None) -> int | None:
    """Return the mechanism's redraw_interval: the original does not count the call that redraws."""
    return None if feature_redraw_interval is None else feature_redraw_interval + 1


def resolve_kernel(kernel_fn: Kernel) -> Kernel:
    """Return the name of a kernel that longspan provides, so that a model can be saved, or the function itself."""
    if isinstance(kernel_fn, str):
        return choose("kernel_fn", kernel_fn, ACTIVATIONS)
    if isinstance(kernel_fn, nn.Module):
        name = _KERNEL_MODULES.get(type(kernel_fn))
        # A module with arguments of its own, other than inplace, has no name.
        if name == "relu" or (name and repr(kernel_fn) == repr(type(kernel_fn)())):
            return name
    elif kernel_fn in _KERNEL_FUNCTIONS:
        return _KERNEL_FUNCTIONS[kernel_fn]
    if not callable(kernel_fn):
        raise ValueError(f"kernel_fn must be a function or one of {', '.join(ACTIVATIONS)}, got {kernel_fn!r}")
    return kernel_fn
