"""FastAttention, SelfAttention and CrossAttention: layers that people take out of performer-pytorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longspan.compat.performer_pytorch.keys import attention_entries, fast_entries, idle_tensors, initialize
from longspan.compat.performer_pytorch.options import (
    RELU,
    Kernel,
    favor,
    features_of,
    head_dim_of,
    split,
    window,
)
from longspan.compat.performer_pytorch.redrawing import ProjectionUpdater, performers
from longspan.compat.state_dict import CompatModule, KeyMapping
from longspan.layout import TokenLayout
from longspan.mechanisms.performer import PerformerAttention
from longspan.mechanisms.split import SplitAttention
from longspan.models.config import AttentionConfig
from longspan.models.layers import Attention, mechanism_from
from longspan.models.positions import Rotary, SinusoidalPositions
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import Transformer
from longspan.ops.linear.feature_maps import orthogonal_rows

__all__ = [
    "CrossAttention",
    "FastAttention",
    "FixedPositionalEmbedding",
    "ProjectionUpdater",
    "SelfAttention",
    "gaussian_orthogonal_random_matrix",
    "turned",
]
M = TypeVar("M", bound=nn.Module)


class FastAttention(CompatModule):
    """Attention by random features on q, k, v (B, H, T, dim_heads) with any number of heads."""

    model: PerformerAttention

    def __init__(
        self,
        dim_heads: int,
        nb_features: int | None = None,
        ortho_scaling: int = 0,
        causal: bool = False,
        generalized_attention: bool = False,
        kernel_fn: Kernel = RELU,
        no_projection: bool = False,
    ) -> None:
        super().__init__()
        self.dim_heads, self.causal, self.ortho_scaling = dim_heads, causal, ortho_scaling
        self.nb_features = features_of(dim_heads, nb_features)
        self.generalized_attention, self.no_projection = generalized_attention, no_projection
        spec = favor(
            dim_heads,
            nb_features=nb_features,
            causal=causal,
            generalized_attention=generalized_attention,
            kernel_fn=kernel_fn,
            no_projection=no_projection,
            ortho_scaling=ortho_scaling,
        )
        model = mechanism_from(spec, 1, dim_heads, 1)
        assert isinstance(model, PerformerAttention)
        self.model = model
        if no_projection:
            self.unused = nn.Module()
            self.unused.register_buffer("projection", orthogonal_rows(self.nb_features, dim_heads, unit=False))

    @property
    def projection_matrix(self) -> Tensor:
        """(nb_features, dim_heads)"""
        return self.state_dict()["projection_matrix"]

    def redraw_projection_matrix(self, device: Any = None) -> None:
        """New random features; they stay on the module's own device."""
        self.model.redraw()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = copy.copy(self.model)  # The same features, for as many heads and as wide values as these.
        heads.num_heads, heads.num_kv_heads, heads.value_dim = q.shape[1], k.shape[1], v.shape[3]
        out = heads(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=self.causal)
        return out.transpose(1, 2)

    def key_mappings(self) -> Iterator[KeyMapping]:
        yield from fast_entries(self.model, "", "", "")
        yield _uncounted("counts")


class _Attention(CompatModule):
    """What self- and cross-attention share. dim_head: dim / heads if None."""

    model: Attention
    cross = False

    def __init__(
        self,
        dim: int,
        causal: bool = False,
        heads: int = 8,
        dim_head: int | None = 64,
        local_heads: int = 0,
        local_window_size: int = 256,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        generalized_attention: bool = False,
        kernel_fn: Kernel = RELU,
        dropout: float = 0.0,
        no_projection: bool = False,
        qkv_bias: bool = False,
        attn_out_bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.global_heads = heads, heads - local_heads
        head_dim = head_dim_of(dim, heads, dim_head)
        if not 0 <= local_heads <= heads:
            raise ValueError(f"local_heads must be from 0 to heads ({heads}), got {local_heads}")
        if local_heads and self.cross:
            raise ValueError(f"local heads cannot attend to a context: local_heads must be 0, got {local_heads}")
        far = favor(
            head_dim,
            nb_features=nb_features,
            causal=causal,
            generalized_attention=generalized_attention,
            kernel_fn=kernel_fn,
            no_projection=no_projection,
            interval=feature_redraw_interval,
        )
        config = AttentionConfig(
            num_heads=heads,
            mechanism=split(far, window(local_window_size, causal=causal, dropout=dropout), heads, local_heads),
            head_dim=head_dim,
            rotary={"local": "halves"},
            qkv_bias=qkv_bias,
            out_bias=attn_out_bias,
            dropout=dropout,
        )
        self.model = Attention(dim, config, causal=causal, cross=self.cross)
        initialize(self.model)
        self.unused = idle_tensors(self.model, features_of(head_dim, nb_features))

    def key_mappings(self) -> Iterator[KeyMapping]:
        yield from attention_entries(self.model, "attention_0.")
        names = [name for name, module in self.model.named_modules() if isinstance(module, PerformerAttention)]
        yield from (_uncounted(f"{name}.counts") for name in names)
        if not names:
            yield _uncounted("unused.counts")


class SelfAttention(_Attention):
    """(B, T, dim) -> (B, T, dim)."""

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """pos_emb: what FixedPositionalEmbedding(dim_head, …) gives. mask, or context_mask: (B, T), True = keep."""
        if context is not None:
            raise ValueError("self-attention takes no context: use CrossAttention")
        if mask is not None and context_mask is not None:
            raise ValueError("mask and context_mask both hide tokens of x here: pass one of them")
        mask = context_mask if mask is None else mask
        self.model.mechanism.advance()
        model = self.model if pos_emb is None else _turned_layer(self.model, pos_emb, x)
        return model(x, TokenLayout.of(x, causal=model.causal, key_mask=None if mask is None else mask.bool()))


class CrossAttention(_Attention):
    """(B, T, dim) with a context (B, S, dim) -> (B, T, dim)."""

    cross = True

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """mask: (B, T) real tokens of x. context_mask: (B, S), True = keep."""
        if context is None:
            raise ValueError("cross-attention needs a context: pass context=, of shape (B, S, dim)")
        if pos_emb is not None:
            warnings.warn("pos_emb has no effect: cross-attention is not rotated, as in the original", stacklevel=2)
        self.model.mechanism.advance()
        rows = TokenLayout.of(x, causal=False, key_mask=None if mask is None else mask.bool())
        seen = TokenLayout.of(context, causal=False, key_mask=None if context_mask is None else context_mask.bool())
        return self.model(x, rows, context, context_rows=seen)


class FixedPositionalEmbedding(nn.Module):
    """Sines and cosines of positions, (1, T, dim) for x (B, T, …)."""

    emb: Tensor

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.register_buffer("emb", SinusoidalPositions(dim)(torch.arange(max_seq_len)[None])[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.emb[None, : x.shape[1]].to(x)


def gaussian_orthogonal_random_matrix(
    nb_rows: int, nb_columns: int, scaling: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """(nb_rows, nb_columns), orthogonal in blocks; norms like Gaussian rows', or with scaling=1 all √nb_columns."""
    if scaling not in (0, 1):
        raise ValueError(f"scaling must be 0 or 1, got {scaling}")
    return orthogonal_rows(nb_rows, nb_columns, unit=scaling == 1).to(device)


def turned(model: Transformer, pos_emb: Tensor, x: Tensor) -> Transformer:
    """The same transformer, weights and all, with the queries and keys of its global heads turned by pos_emb."""
    twin = _apart(model)
    twin.stack = _apart(model.stack)
    branches = []
    for branch in model.stack.branches:
        assert isinstance(branch, ResidualBranch)
        if isinstance(branch.layer, Attention) and not branch.layer.cross:
            layer = _turned_layer(branch.layer, pos_emb, x)
            branch = _apart(branch)
            branch.layer = layer
        branches.append(branch)
    twin.stack.branches = nn.ModuleList(branches)
    return twin


def _turned_layer(attention: Attention, pos_emb: Tensor, x: Tensor) -> Attention:
    D = attention.mechanism.head_dim
    wanted = SinusoidalPositions(D)(torch.arange(x.shape[1], device=x.device)[None])
    if pos_emb.shape != wanted.shape or not torch.allclose(pos_emb.float(), wanted, atol=0.01):
        raise ValueError(
            f"pos_emb must be what FixedPositionalEmbedding({D}, …) gives for x, of shape {tuple(wanted.shape)}, got "
            f"{tuple(pos_emb.shape)}; positions of another kind are added to x instead"
        )
    if not performers(attention):
        return attention
    twin, turn = _apart(attention), Rotary(D, interleaved=True)
    near = [Rotary(D)] if isinstance(attention.mechanism, SplitAttention) else []
    twin.rotary = nn.ModuleList([turn, *near])
    return twin


def _apart(module: M) -> M:
    """A copy that shares everything, and in which parts can be exchanged."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _uncounted(name: str) -> KeyMapping:
    """A layer by itself never said how often it was called."""
    return KeyMapping((), (name,), lambda _: [torch.zeros(2, dtype=torch.int64)], lambda _: ())
