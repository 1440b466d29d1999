"""Layers of performer-pytorch that can be used on their own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.layers import as_bool, sinusoidal_table, with_children
from longspan.compat.options import init_from
from longspan.compat.performer_pytorch import keys
from longspan.compat.performer_pytorch.options import AttentionOptions, FastAttentionOptions
from longspan.compat.state_dict import CompatModule, KeyMapping, unsaved
from longspan.mechanisms.feature_maps import orthogonal_rows
from longspan.mechanisms.performer import PerformerAttention, random_feature_mechanisms
from longspan.mechanisms.split import SplitAttention
from longspan.models.layers import Attention, mechanism_from
from longspan.models.positions import Rotary
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import Transformer

_POSITIONAL = (
    "dim causal heads dim_head local_heads local_window_size nb_features feature_redraw_interval generalized_attention "
    "kernel_fn dropout no_projection qkv_bias attn_out_bias"
)


class FastAttention(CompatModule):
    """Attention by random features for q, k and v (B, H, T, dim_heads) with any number of heads."""

    model: PerformerAttention

    @init_from(
        FastAttentionOptions,
        "dim_heads nb_features ortho_scaling causal generalized_attention kernel_fn no_projection",
    )
    def __init__(self, options: FastAttentionOptions) -> None:
        super().__init__()
        self.dim_heads, self.causal, self.ortho_scaling = options.dim_heads, options.causal, options.ortho_scaling
        self.nb_features = options.num_features(self.dim_heads)
        self.generalized_attention, self.no_projection = options.generalized_attention, options.no_projection
        spec = options.performer(self.dim_heads, causal=self.causal, ortho_scaling=self.ortho_scaling)
        model = mechanism_from(spec, 1, self.dim_heads, 1)
        assert isinstance(model, PerformerAttention)
        self.model = model
        if self.no_projection:
            self.unused = keys.unused_projection(self.nb_features, self.dim_heads)

    @property
    def projection_matrix(self) -> Tensor:
        """The random features (nb_features, dim_heads)."""
        return self.state_dict()["projection_matrix"]

    def redraw_projection_matrix(self, device: Any = None) -> None:
        """Draw new random features, which stay on the device of the module."""
        self.model.redraw()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q (B, H, T, dim_heads), k (B, H, S, dim_heads) and v (B, H, S, E) to (B, H, T, E)."""
        mechanism = copy.copy(self.model)  # shares the features, with the number of heads and width of these values
        mechanism.num_heads, mechanism.num_kv_heads, mechanism.value_dim = q.shape[1], k.shape[1], v.shape[3]
        out = mechanism(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=self.causal)
        return out.transpose(1, 2)

    def key_mappings(self) -> Iterator[KeyMapping]:
        yield from keys.feature_keys(self.model, "", "", "")
        yield unsaved(["counts"], keys.zero_counts)


class _AttentionLayer(CompatModule):
    model: Attention
    cross = False

    @init_from(AttentionOptions, _POSITIONAL)
    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        heads, num_local = options.heads, options.local_heads
        self.heads, self.global_heads = heads, heads - num_local
        if not 0 <= num_local <= heads:
            raise ValueError(f"local_heads must be from 0 to heads ({heads}), got {num_local}")
        if num_local and self.cross:
            raise ValueError(f"local heads cannot attend to a context: local_heads must be 0, got {num_local}")
        mechanism = options.mechanism(num_local, options.dropout, options.feature_redraw_interval)
        config = options.attention(mechanism, {"local": "halves"}, options.dropout)
        self.model = Attention(options.dim, config, causal=options.causal, cross=self.cross)
        keys.initialize(self.model)
        self.unused = keys.unused_tensors(self.model, options.num_features(options.head_dim))

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to x, or to a context in CrossAttention.

        Args:
            x: (B, T, dim).
            pos_emb: The output of FixedPositionalEmbedding(dim_head, …), for rotary positions of self-attention.
            context: (B, S, dim), for CrossAttention only.
            mask: (B, T), True for tokens to attend to.
            context_mask: (B, S), True for tokens of the context to attend to; for self-attention an alias of mask.
        """
        for mechanism in random_feature_mechanisms(self.model):
            mechanism.count_forward()
        mask, context_mask = as_bool(mask), as_bool(context_mask)
        if self.cross:
            if context is None:
                raise ValueError("cross-attention needs a context: pass context=, of shape (B, S, dim)")
            if pos_emb is not None:
                warnings.warn("pos_emb has no effect: cross-attention is not rotated, as in the original", stacklevel=2)
            return self.model(x, key_mask=mask, context=context, context_mask=context_mask)
        if context is not None:
            raise ValueError("self-attention takes no context: use CrossAttention")
        if mask is not None and context_mask is not None:
            raise ValueError("mask and context_mask both mask tokens of x: pass one of them")
        model = self.model if pos_emb is None else _rotate_layer(self.model, pos_emb, x)
        return model(x, key_mask=context_mask if mask is None else mask)

    def key_mappings(self) -> Iterator[KeyMapping]:
        yield from keys.attention_keys(self.model, "attention_0.")
        modules = self.model.named_modules()
        counts = [f"{name}.counts" for name, module in modules if isinstance(module, PerformerAttention)]
        yield unsaved(counts or ["unused.counts"], keys.zero_counts)


class SelfAttention(_AttentionLayer):
    """Self-attention with projections, (B, T, dim) -> (B, T, dim)."""


class CrossAttention(_AttentionLayer):
    """Attention of x (B, T, dim) to a context (B, S, dim), with projections: -> (B, T, dim)."""

    cross = True


class FixedPositionalEmbedding(nn.Module):
    """Sinusoidal positions (1, T, dim) for x (B, T, …)."""

    emb: Tensor

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.register_buffer("emb", sinusoidal_table(dim, max_seq_len))

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings of the positions of x, in its dtype."""
        return self.emb[None, : x.shape[1]].to(x)


def gaussian_orthogonal_random_matrix(
    nb_rows: int, nb_columns: int, scaling: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Draw a matrix (nb_rows, nb_columns) of orthogonal blocks.

    Args:
        nb_rows: The number of rows.
        nb_columns: The number of columns, which is the size of a block.
        scaling: 0 for row norms distributed as those of Gaussian vectors, 1 for norms √nb_columns.
        device: The device of the matrix.
    """
    if scaling not in (0, 1):
        raise ValueError(f"scaling must be 0 or 1, got {scaling}")
    return orthogonal_rows(nb_rows, nb_columns, unit=scaling == 1).to(device)


def with_rotary(model: Transformer, pos_emb: Tensor, x: Tensor) -> Transformer:
    """Return the transformer, sharing its weights, with rotary positions pos_emb in its global self-attention heads."""
    branches = []
    for branch in model.stack.branches:
        assert isinstance(branch, ResidualBranch)
        if isinstance(branch.layer, Attention) and not branch.layer.cross:
            branch = with_children(branch, layer=_rotate_layer(branch.layer, pos_emb, x))
        branches.append(branch)
    return with_children(model, stack=with_children(model.stack, branches=nn.ModuleList(branches)))


def _rotate_layer(attention: Attention, pos_emb: Tensor, x: Tensor) -> Attention:
    head_dim = attention.mechanism.head_dim
    expected = sinusoidal_table(head_dim, x.shape[1], x.device)[None]
    if pos_emb.shape != expected.shape or not torch.allclose(pos_emb.float(), expected, atol=0.01):
        raise ValueError(
            f"pos_emb must be what FixedPositionalEmbedding({head_dim}, …) returns for x, of shape "
            f"{tuple(expected.shape)}, got {tuple(pos_emb.shape)}; add other position embeddings to x instead"
        )
    if not random_feature_mechanisms(attention):
        return attention
    rotary = [Rotary(head_dim, interleaved=True)]
    if isinstance(attention.mechanism, SplitAttention):
        rotary.append(Rotary(head_dim))
    return with_children(attention, rotary=nn.ModuleList(rotary))
