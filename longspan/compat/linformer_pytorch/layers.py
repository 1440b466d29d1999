"""The layers of linformer-pytorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from longspan.compat.linformer_pytorch.keys import (
    BASE,
    Use,
    attention_entries,
    feed_forward_entries,
    frequencies,
    mechanism_uses,
    projection_entries,
)
from longspan.compat.linformer_pytorch.options import METHODS, SHARING, draw
from longspan.compat.state_dict import CompatModule, KeyMapping, constant
from longspan.layout import TokenLayout
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.models.config import AttentionConfig, FeedForwardConfig
from longspan.models.layers import Attention
from longspan.models.layers import FeedForward as _FeedForward
from longspan.models.positions import SinusoidalPositions
from longspan.protocol import Mechanism
from longspan.utils import choose


class SequenceProjection(CompatModule):
    """A matrix E or F, or a convolution, that compresses a sequence: (B, d, n) -> (B, d, k)."""

    model: Projection

    def __init__(self, model: Projection) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        rows = self.model.compress(x.mT[:, :, None]).to(x.dtype)  # (B, 1, k, d)
        return (rows if self.model.bias is None else rows + self.model.bias)[:, 0].mT

    def key_mappings(self) -> Iterable[KeyMapping]:
        return projection_entries([Use([""], "", self.model)])


def get_EF(  # noqa: N802 - its name there
    input_size: int, dim: int, method: str = "learnable", head_dim: int | None = None, bias: bool = True
) -> SequenceProjection | Tensor:
    """What compresses input_size tokens to dim rows, to be given to any number of layers; for "no_params" a tensor."""
    choose("method", method, METHODS)
    if method == "no_params":
        return torch.randn(input_size, dim) / dim
    if method == "convolution":
        if head_dim is None:
            raise ValueError('method="convolution" needs head_dim, the width of what it takes')
        kind: dict[str, Any] = {"kind": "convolution", "dim": head_dim, "whole_stretches": True, "bias": True}
        return SequenceProjection(Projection(dim, input_size, **kind))
    return SequenceProjection(Projection(dim, input_size, bias=bias))


def gen_causal_mask(input_size: int, dim_k: int, full_attention: bool = False) -> Tensor:
    """The pattern by which layers are told to be causal: (input_size, dim_k), or square for full attention."""
    return torch.ones(input_size, input_size if full_attention else dim_k, dtype=torch.bool).tril()


class MHAttention(CompatModule):
    """Attention of heads of their own weights: (B, n, channels) -> (B, n, channels).

    E_proj, F_proj: of `get_EF`, used with parameter_sharing="layerwise". causal_mask: None, or the pattern of
    `gen_causal_mask`, which means causal.
    """

    model: Attention

    def __init__(
        self,
        input_size: int,
        dim: int,
        channels: int,
        dim_k: int,
        nhead: int,
        dropout: float,
        checkpoint_level: str,
        parameter_sharing: str,
        E_proj: SequenceProjection | Tensor | None,
        F_proj: SequenceProjection | Tensor | None,
        full_attention: bool,
        causal_mask: Tensor | None,
        w_o_intermediate_dim: int | None = None,
        decoder_mode: bool = False,
        method: str = "learnable",
    ) -> None:
        super().__init__()
        choose("parameter_sharing", parameter_sharing, SHARING)
        choose("checkpoint_level", checkpoint_level, ("C0", "C1", "C2"))
        self.input_size, self.dim_k, self.channels, self.nhead = input_size, dim_k, channels, nhead
        self.causal_mask, self.decoder_mode = causal_mask, decoder_mode
        self.last_seen: dict[str, Any] | None = None
        linformer: LinformerAttention | None
        if parameter_sharing == "layerwise":
            linformer = None if full_attention and E_proj is None else _linformer(nhead, dim, E_proj, F_proj, dropout)
        else:
            choose("method", method, METHODS)
            linformer = LinformerAttention(
                nhead,
                dim,
                rank=dim_k,
                max_length=input_size,
                projection=METHODS[method],
                whole_stretches=method == "convolution",
                bias=method != "no_params",
                per_head=parameter_sharing == "none",
                share_projection=parameter_sharing == "kv",
                dropout=dropout,
            )
            if method == "no_params":
                draw([linformer])
        mechanism: Mechanism
        if full_attention:
            mechanism, self.unused = SoftmaxAttention(nhead, dim, dropout=dropout), linformer
        else:
            assert linformer is not None
            mechanism = linformer
        self.model = Attention(
            channels,
            AttentionConfig(num_heads=nhead, head_dim=dim, dropout=dropout),
            mid_features=w_o_intermediate_dim,
            mechanism=mechanism,
            causal=_is_causal(causal_mask, dim_k, full_attention),
            cross=decoder_mode,
        )
        apart = checkpoint_level == "C2" and not dropout and mechanism.heads_alike
        self.model.set_head_groups(apart)

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """tensor: (B, n, channels). embeddings: (B, m, channels), with decoder_mode. visualize: for `Visualizer`."""
        if self.decoder_mode != (embeddings is not None) or (embeddings is None and embeddings_mask is not None):
            need = "attends to embeddings: pass embeddings=" if self.decoder_mode else "has no use for embeddings"
            raise ValueError(f"this layer {need} (decoder_mode={self.decoder_mode})")
        rows = TokenLayout.of(tensor, causal=self.model.causal and not self.decoder_mode, key_mask=input_mask)
        context_rows = None
        if embeddings is not None:
            context_rows = TokenLayout.of(embeddings, causal=False, key_mask=embeddings_mask)
        if visualize:
            self.last_seen = {"x": tensor.detach(), "rows": rows, "context": embeddings, "context_rows": context_rows}
        return self.model(tensor, rows, embeddings, context_rows=context_rows)

    def key_mappings(self) -> Iterable[KeyMapping]:
        yield from attention_entries(self.model, "", "")
        heads = [f"heads.{h}." for h in range(self.nhead)]
        used = self.model.mechanism if self.unused is None else self.unused
        yield from projection_entries(mechanism_uses(used, heads, "mechanism." if self.unused is None else "unused."))


class LinearAttentionHead(CompatModule):
    """One head without weights of its own: Q, K and V (B, n, dim) -> (B, n, dim). The rest as for `MHAttention`."""

    model: Mechanism

    def __init__(
        self,
        dim: int,
        dropout: float,
        E_proj: SequenceProjection | Tensor | None,
        F_proj: SequenceProjection | Tensor | None,
        causal_mask: Tensor | None,
        full_attention: bool = False,
    ) -> None:
        super().__init__()
        linformer = None if full_attention and E_proj is None else _linformer(1, dim, E_proj, F_proj, dropout)
        if full_attention:
            self.model, self.unused = SoftmaxAttention(1, dim, dropout=dropout), linformer
        else:
            assert linformer is not None
            self.model = linformer
        self.dim, self.full_attention, self.causal_mask = dim, full_attention, causal_mask
        rank = 0 if linformer is None else linformer.rank
        self.causal = _is_causal(causal_mask, rank, full_attention)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, *, input_mask: Tensor | None = None) -> Tensor:
        """input_mask: which of the keys are real."""
        q, k, v = (x[:, :, None] for x in (Q, K, V))
        return self.model(q, k, v, causal=self.causal, key_mask=input_mask)[:, :, 0]

    def key_mappings(self) -> Iterable[KeyMapping]:
        used, new = (self.model, "") if self.unused is None else (self.unused, "unused.")
        return projection_entries(mechanism_uses(used, [""], new))


class FeedForward(CompatModule):
    """activation(x W₁) W₂ with dropout after both: (B, n, input_channels) -> (B, n, output_channels)."""

    model: _FeedForward

    def __init__(
        self, input_channels: int, output_channels: int, ff_dim: int, dropout: float, activation: str | None = "gelu"
    ) -> None:
        super().__init__()
        name: Any = "identity" if activation is None else choose("activation", activation, ("gelu", "relu"))
        config = FeedForwardConfig(hidden=ff_dim, dropout=dropout, activation=name)
        self.model = _FeedForward(input_channels, config, out_features=output_channels, out_dropout=dropout)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.model(tensor)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return feed_forward_entries("", "")


class PositionalEmbedding(CompatModule):
    """Sines, then cosines, of each position: (B, n, …) -> (1, n, channels)."""

    model: SinusoidalPositions

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.model = SinusoidalPositions(channels, BASE)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.model(torch.arange(tensor.shape[1], device=tensor.device)[None])

    def key_mappings(self) -> Iterable[KeyMapping]:
        yield constant("inv_freq", lambda: frequencies(self.model.dim))


def _linformer(
    nhead: int,
    dim: int,
    E_proj: SequenceProjection | Tensor | None,
    F_proj: SequenceProjection | Tensor | None,
    dropout: float,
) -> LinformerAttention:
    """The mechanism of these two projections, which stay whose they are: layers given the same share it."""
    keys, values = _projection("E_proj", E_proj), _projection("F_proj", F_proj)
    values = keys if F_proj is E_proj else values
    if keys.rank != values.rank:
        raise ValueError(f"E_proj and F_proj must give as many rows, got {keys.rank} and {values.rank}")
    mechanism = LinformerAttention(nhead, dim, projection=keys, dropout=dropout)
    mechanism.values = values
    return mechanism


def _projection(name: str, given: Any) -> Projection:
    if isinstance(given, SequenceProjection):
        return given.model
    if isinstance(given, Tensor):
        fixed = Projection(given.shape[1], given.shape[0], kind="random").to(given)
        fixed.table.copy_(given)
        return fixed
    raise ValueError(f"{name} must come from get_EF, so that layers can share it, got a {type(given).__name__}")


def _is_causal(mask: Tensor | None, dim_k: int, full_attention: bool) -> bool:
    if mask is None:
        return False
    if mask.ndim == 2 and torch.equal(mask.cpu(), gen_causal_mask(len(mask), dim_k, full_attention)):
        return True
    raise ValueError(
        f"causal_mask must be None or gen_causal_mask(input_size, dim_k, full_attention), the triangular pattern, got "
        f"another of shape {tuple(mask.shape)}: pass a mask of tokens as input_mask"
    )
