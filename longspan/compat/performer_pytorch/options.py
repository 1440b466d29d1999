"""The arguments of performer-pytorch's models as a configuration of ours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.mechanisms.feature_maps import ACTIVATIONS
from longspan.models.config import (
    AttentionConfig,
    FeedForwardConfig,
    LegacyConfig,
    ModelConfig,
    Norm,
    Positions,
    RotaryStyle,
)
from longspan.utils import choose

Kernel = str | Callable[[Tensor], Tensor]

RELU = nn.ReLU()
EPSILON = 1e-4  # what the original adds to FAVOR+'s features: its weights were trained with it
PHANTOM = 1e-6  # what it adds to the sums of key features, before they are divided by √M, if causal
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ELU: "elu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
}
_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.elu: "elu",
    F.gelu: "gelu",
    F.silu: "silu",
    torch.sigmoid: "sigmoid",
    F.softplus: "softplus",
    torch.exp: "exp",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of PerformerLM, with its defaults; without num_tokens, those of Performer."""

    dim: int
    depth: int
    heads: int
    dim_head: int | None = 64
    local_attn_heads: int | Sequence[int] = 0
    local_window_size: int = 256
    causal: bool = False
    ff_mult: int = 4
    nb_features: int | None = None
    feature_redraw_interval: int | None = 1000
    reversible: bool = False
    ff_chunks: int = 1
    generalized_attention: bool = False
    kernel_fn: Kernel = RELU
    use_scalenorm: bool = False
    use_rezero: bool = False
    ff_glu: bool = False
    ff_dropout: float = 0.0
    attn_dropout: float = 0.0
    cross_attend: bool = False
    no_projection: bool = False
    auto_check_redraw: bool = True
    qkv_bias: bool = False
    attn_out_bias: bool = False
    shift_tokens: bool = False
    num_tokens: int | None = None
    max_seq_len: int | None = None
    emb_dropout: float = 0.0
    tie_embed: bool = False
    rotary_position_emb: bool = False
    axial_position_emb: bool = False
    axial_position_shape: Sequence[int] | None = None

    def config(self) -> ModelConfig:
        mechanisms = [self._heads(local) for local in self.local_heads]
        alike = all(mechanism == mechanisms[0] for mechanism in mechanisms)
        if self.use_scalenorm and self.use_rezero:
            warnings.warn("use_rezero has no effect beside use_scalenorm, as in the original", stacklevel=3)
        norm: Norm = "scale" if self.use_scalenorm else "layer"
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            attention=self._attention(mechanisms[0] if alike else mechanisms, rotary=True),
            cross=self._attention(self._favor(causal=False), rotary=False) if self.cross_attend else None,
            feed_forward=FeedForwardConfig(
                mult=self.ff_mult, gated=self.ff_glu, dropout=self.ff_dropout, chunks=self.ff_chunks
            ),
            norm=norm,
            norm_position="rezero" if self.use_rezero and not self.use_scalenorm else "pre",
            # The last norm is a layer norm whatever the others are.
            final_norm=False if self.num_tokens is None else "layer",
            causal=self.causal,
            token_shift=((0, 1) if self.causal else (-1, 0, 1)) if self.shift_tokens else (),
            residual="double" if self.reversible else "single",
            legacy=LegacyConfig(sum_streams=self.reversible),
            execution="reverse" if self.reversible else "keep",
            positions=self._positions,
            max_length=self.max_seq_len,
            axial_shape=self.axial_shape if self._positions == "axial" else None,
            vocab_size=self.num_tokens,
            tie_embeddings=self.tie_embed,
            embed_dropout=self.emb_dropout,
        )

    @property
    def head_dim(self) -> int:
        return head_dim_of(self.dim, self.heads, self.dim_head)

    @property
    def local_heads(self) -> tuple[int, ...]:
        """Local heads of each layer."""
        given = self.local_attn_heads
        counts = (given,) if isinstance(given, int) else tuple(given)
        counts = counts * self.depth if len(counts) == 1 else counts
        if len(counts) != self.depth or any(not 0 <= count <= self.heads for count in counts):
            raise ValueError(
                f"local_attn_heads must be one number, or one for each of {self.depth} layers, from 0 to heads "
                f"({self.heads}), got {given}"
            )
        return counts

    @property
    def axial_shape(self) -> tuple[int, ...]:
        assert self.max_seq_len is not None
        return tuple(self.axial_position_shape or (math.ceil(self.max_seq_len / 64), 64))

    @property
    def _positions(self) -> Positions:
        if self.num_tokens is None:
            return "none"
        if self.axial_position_emb:
            return "axial"
        return "sinusoidal" if self.rotary_position_emb else "learned"

    def _attention(self, mechanism: Any, *, rotary: bool) -> AttentionConfig:
        far: RotaryStyle = "interleaved" if self.rotary_position_emb else "none"
        return AttentionConfig(
            num_heads=self.heads,
            mechanism=mechanism,
            head_dim=self.head_dim,
            rotary={"performer": far, "local": "halves"} if rotary else "none",
            qkv_bias=self.qkv_bias,
            out_bias=self.attn_out_bias,
            dropout=self.attn_dropout,
        )

    def _heads(self, local: int) -> dict[str, Any]:
        near = window(self.local_window_size, causal=self.causal, dropout=self.attn_dropout)
        return split(self._favor(causal=self.causal), near, self.heads, local)

    def _favor(self, *, causal: bool) -> dict[str, Any]:
        return favor(
            self.head_dim,
            nb_features=self.nb_features,
            causal=causal,
            generalized_attention=self.generalized_attention,
            kernel_fn=self.kernel_fn,
            no_projection=self.no_projection,
            interval=self.feature_redraw_interval if self.auto_check_redraw else None,
        )


def favor(
    head_dim: int,
    *,
    nb_features: int | None,
    causal: bool,
    generalized_attention: bool,
    kernel_fn: Kernel,
    no_projection: bool,
    interval: int | None = None,
    ortho_scaling: int = 0,
) -> dict[str, Any]:
    """FastAttention as a mechanism of ours."""
    if ortho_scaling not in (0, 1):
        raise ValueError(
            f"ortho_scaling must be 0, norms like Gaussian rows', or 1, all √dim_heads, got {ortho_scaling}"
        )
    if no_projection:
        if generalized_attention:
            warnings.warn(
                "no_projection takes the softmax of queries and keys, as in the original: generalized_attention and "
                "kernel_fn have no effect beside it",
                stacklevel=2,
            )
        normalize = "query" if causal else "feature"
        return {"mechanism": "performer", "projection": False, "normalize": normalize, "redraw_interval": None}
    number = features_of(head_dim, nb_features)
    spec: dict[str, Any] = {"mechanism": "performer", "num_features": number, "redraw_interval": redraws(interval)}
    if ortho_scaling:
        spec["row_norms"] = "unit"
    if generalized_attention:
        return spec | {"kernel": kernel_of(kernel_fn), "phantom": PHANTOM if causal else 0.0}
    return spec | {"epsilon": EPSILON, "phantom": PHANTOM * math.sqrt(number) if causal else 0.0}


def window(size: int, *, causal: bool, dropout: float) -> dict[str, Any]:
    """Local heads: their block of `size`, one before and, unless causal, one after it.

    Looking ahead, the original turns queries by a block too much; its weights know no other.
    """
    ahead = int(not causal)
    return {
        "mechanism": "local",
        "window": size,
        "look_back": 1,
        "look_ahead": ahead,
        "query_offset": ahead * size,
        "dropout": dropout,
    }


def split(far: dict[str, Any], near: dict[str, Any], heads: int, local: int) -> dict[str, Any]:
    """The first heads far, the last `local` near."""
    if local in (0, heads):
        return near if local else far
    return {"mechanism": "split", "parts": [{**far, "num_heads": heads - local}, {**near, "num_heads": local}]}


def features_of(head_dim: int, nb_features: int | None) -> int:
    return max(1, int(head_dim * math.log(head_dim))) if nb_features is None else nb_features


def head_dim_of(dim: int, heads: int, dim_head: int | None) -> int:
    if dim_head is None and dim % heads:
        raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads}), or dim_head must be given")
    return dim // heads if dim_head is None else dim_head


def redraws(interval: int | None) -> int | None:
    """feature_redraw_interval as redraw_interval: the original's call that redraws is not one of those it counts."""
    return None if interval is None else interval + 1


def kernel_of(kernel_fn: Kernel) -> Kernel:
    """The name of a kernel that longspan has, so that a model can be saved; any other function stays what it is."""
    if isinstance(kernel_fn, str):
        return choose("kernel_fn", kernel_fn, ACTIVATIONS)
    name = _MODULES.get(type(kernel_fn)) if isinstance(kernel_fn, nn.Module) else _FUNCTIONS.get(kernel_fn)
    if name == "relu" or (
        name and (not isinstance(kernel_fn, nn.Module) or repr(kernel_fn) == repr(type(kernel_fn)()))
    ):
        return name
    if not callable(kernel_fn):
        raise ValueError(f"kernel_fn must be a function or one of {', '.join(ACTIVATIONS)}, got {kernel_fn!r}")
    return kernel_fn
