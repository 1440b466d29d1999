"""Attention layers of performer-pytorch, which can also be used on their own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longspan.compat.faithful import faithful, resolve_faithful
from longspan.compat.layers import as_bool, zero_fill
from longspan.compat.local_attention import LocalAttention
from longspan.compat.options import init_from
from longspan.compat.performer_pytorch.kernels import (
    causal_linear_attention,
    gaussian_orthogonal_random_matrix,
    generalized_kernel,
    linear_attention,
    softmax_kernel,
)
from longspan.compat.performer_pytorch.layers import find_modules
from longspan.compat.performer_pytorch.options import AttentionOptions, FastAttentionOptions
from longspan.compat.performer_pytorch.redraw import count_call
from longspan.layout import PaddedSpan, TokenLayout
from longspan.mechanisms.performer import PerformerAttention
from longspan.models.layers import mechanism_from
from longspan.ops.rotary import rotate

_POSITIONAL = (
    "dim causal heads dim_head local_heads local_window_size nb_features feature_redraw_interval generalized_attention "
    "kernel_fn dropout no_projection qkv_bias attn_out_bias"
)


class FastAttention(nn.Module):
    """Attention by random features for q, k and v (B, H, T, dim_heads) with any number of heads."""

    projection_matrix: Tensor

    @init_from(
        FastAttentionOptions,
        "dim_heads nb_features ortho_scaling causal generalized_attention kernel_fn no_projection",
    )
    def __init__(self, options: FastAttentionOptions) -> None:
        super().__init__()
        self.dim_heads, self.causal, self.ortho_scaling = options.dim_heads, options.causal, options.ortho_scaling
        self.nb_features = options.num_features(self.dim_heads)
        self.faithful = resolve_faithful(options.faithful)
        self.create_projection = partial(
            gaussian_orthogonal_random_matrix,
            nb_rows=self.nb_features,
            nb_columns=self.dim_heads,
            scaling=self.ortho_scaling,
        )
        self.generalized_attention, self.no_projection = options.generalized_attention, options.no_projection
        self.kernel_fn = options.own_kernel
        self._options = options
        # Not a submodule: it has no tensors of its own.
        self._mechanism: list[Any] = [self.kernel_fn, self.nb_features, self._new_mechanism(self.nb_features)]
        self.register_buffer("projection_matrix", self.create_projection())

    @torch.no_grad()
    def redraw_projection_matrix(self, device: Any = None) -> None:
        """Draw new random features. device: where they are drawn; they stay on the device of the module."""
        self.projection_matrix.copy_(self.create_projection(device=device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map q (B, H, T, dim_heads), k (B, H, S, dim_heads) and v (B, H, S, E) to (B, H, T, E).

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            mask: (B, S), True for keys to attend to.
        """
        mask = as_bool(mask)
        if self.faithful:
            v = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0)
            return (causal_linear_attention if self.causal else linear_attention)(*self._features(q, k), v)
        mechanism = self._bound_mechanism(q.shape[1], v.shape[3])
        out = mechanism(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=self.causal, key_mask=mask)
        return out.transpose(1, 2)

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the original's features of queries and keys."""
        if self.no_projection:
            return q.softmax(-1), k.exp() if self.causal else k.softmax(-2)
        if self.generalized_attention:
            kernel = partial(generalized_kernel, projection_matrix=self.projection_matrix, kernel_fn=self.kernel_fn)
            return kernel(q), kernel(k)
        kernel = partial(softmax_kernel, projection_matrix=self.projection_matrix)
        return kernel(q, is_query=True), kernel(k, is_query=False)

    def _bound_mechanism(self, num_heads: int, value_dim: int) -> PerformerAttention:
        """Return the mechanism, with this module's features and the sizes of a call."""
        number = len(self.projection_matrix)
        if not self._mechanism or self._mechanism[0] is not self.kernel_fn or self._mechanism[1] != number:
            self._mechanism = [self.kernel_fn, number, self._new_mechanism(number)]
        mechanism: PerformerAttention = self._mechanism[2]
        if not self.no_projection and mechanism.feature_map.projection is not self.projection_matrix:
            mechanism.feature_map.projection = self.projection_matrix
        if (mechanism.num_heads, mechanism.value_dim) != (num_heads, value_dim):
            mechanism.num_heads = mechanism.num_kv_heads = num_heads
            mechanism.value_dim = value_dim
        return mechanism

    def _new_mechanism(self, nb_features: int) -> PerformerAttention:
        options = replace(self._options, kernel_fn=self.kernel_fn, nb_features=nb_features)
        spec = options.performer(self.dim_heads, causal=self.causal, ortho_scaling=self.ortho_scaling)
        if "kernel" in spec:
            spec["kernel"] = self.kernel_fn  # called, not only named: it may have hooks
        with torch.device("meta"):
            mechanism = mechanism_from(spec, 1, self.dim_heads, 1)
        assert isinstance(mechanism, PerformerAttention)
        return mechanism

    def _replicate_for_data_parallel(self) -> FastAttention:
        # Replicas run in threads, each with the features of its device.
        replica: FastAttention = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._mechanism = []
        return replica


class Attention(nn.Module):
    """Attention with projections, (B, T, dim) -> (B, T, dim): to x itself, or to a context.

    Args:
        feature_redraw_interval: The number of training forward passes between redraws of the random features, for a
            layer that is used on its own; None never redraws.
        faithful: Whether to compute as the original does: masked tokens stay in the normalizer, causal features
            depend on later tokens, and left padding takes positions.
    """

    needs_context: ClassVar[bool] = False

    @init_from(AttentionOptions, _POSITIONAL)
    def __init__(self, options: AttentionOptions) -> None:
        super().__init__()
        heads, num_local, causal = options.heads, options.local_heads, options.causal
        dim_head = options.head_dim
        if not 0 <= num_local <= heads:
            raise ValueError(f"local_heads must be from 0 to heads ({heads}), got {num_local}")
        if num_local and self.needs_context:
            raise ValueError(f"local heads cannot attend to a context: local_heads must be 0, got {num_local}")
        self.faithful, self.causal = resolve_faithful(options.faithful), causal
        with faithful(self.faithful):
            self.fast_attention: nn.Module = FastAttention(
                dim_head,
                options.nb_features,
                causal=causal,
                generalized_attention=options.generalized_attention,
                kernel_fn=options.own_kernel,
                no_projection=options.no_projection,
            )
            self.heads, self.global_heads = heads, heads - num_local
            self.local_attn = None
            if num_local:
                self.local_attn = LocalAttention(
                    window_size=options.local_window_size,
                    causal=causal,
                    autopad=True,
                    dropout=options.dropout,
                    look_forward=int(not causal),
                    rel_pos_emb_config=(dim_head, num_local),
                )
        self.to_q = nn.Linear(options.dim, dim_head * heads, bias=options.qkv_bias)
        self.to_k = nn.Linear(options.dim, dim_head * heads, bias=options.qkv_bias)
        self.to_v = nn.Linear(options.dim, dim_head * heads, bias=options.qkv_bias)
        self.to_out = nn.Linear(dim_head * heads, options.dim, bias=options.attn_out_bias)
        self.dropout = nn.Dropout(options.dropout)
        self.feature_redraw_interval = None if self.faithful else options.feature_redraw_interval
        self._clock = torch.zeros((), dtype=torch.int64, device="cpu"), torch.zeros((), dtype=torch.int64, device="cpu")

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to x, or to a context.

        Args:
            x: (B, T, dim).
            pos_emb: Sines and cosines (1 or B, T, dim_head) that rotate queries and keys of self-attention, such as the
                output of FixedPositionalEmbedding(dim_head, …).
            context: (B, S, dim).
            mask: (B, T), True for tokens to attend to.
            context_mask: (B, S), True for tokens of the context to attend to; for self-attention an alias of mask.
        """
        if self.training and self.feature_redraw_interval is not None:
            count_call(*self._clock, self.feature_redraw_interval, lambda: find_modules(self, FastAttention))
        mask, key_mask = as_bool(mask), as_bool(context_mask)
        if context is None:
            if mask is not None and key_mask is not None and not self.faithful:
                raise ValueError("mask and context_mask both mask tokens of x: pass one of them")
            key_mask = mask if key_mask is None else key_mask
        if not self.faithful:
            mask = key_mask if context is None else mask
            x = zero_fill(x, mask)
            context = None if context is None else zero_fill(context, key_mask)
        source = x if context is None else context
        q, k, v = (
            layer(y).unflatten(2, (self.heads, -1))
            for layer, y in ((self.to_q, x), (self.to_k, source), (self.to_v, source))
        )
        outs, number = [], self.global_heads
        if number:
            heads = q[:, :, :number], k[:, :, :number], v[:, :, :number]
            outs.append(self._attend_globally(*heads, key_mask, pos_emb if context is None else None))
        if self.local_attn is not None:
            if context is not None:
                raise ValueError("local heads cannot attend to a context: build the layer with local_heads=0")
            outs.append(self._attend_locally(q[:, :, number:], k[:, :, number:], v[:, :, number:], mask))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return self.dropout(self.to_out(out.flatten(2)))

    def _attend_globally(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pos_emb: Tensor | None) -> Tensor:
        if pos_emb is not None:
            B, T, _, D = q.shape
            if pos_emb.ndim != 3 or pos_emb.shape[1:] != (T, D) or len(pos_emb) not in (1, B):
                raise ValueError(
                    f"pos_emb must be sines and cosines of shape {(1, T, D)}, such as FixedPositionalEmbedding({D}, …) "
                    f"returns for x, got {tuple(pos_emb.shape)}; add other position embeddings to x instead"
                )
            if mask is not None and self.causal and len(pos_emb) == 1 and not self.faithful:
                pos_emb = at_positions(pos_emb, mask)
            sin, cos = pos_emb[:, :, None].chunk(2, -1)
            q, k = rotate(q, cos, sin, interleaved=True), rotate(k, cos, sin, interleaved=True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mask is None:
            out = self.fast_attention(q, k, v)
        elif isinstance(self.fast_attention, FastAttention):
            out = self.fast_attention(q, k, v, mask)
        else:
            out = self.fast_attention(q, k, v.masked_fill(~mask[:, None, :, None], 0))
        return out.transpose(1, 2)

    def _attend_locally(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert self.local_attn is not None
        # Windows of a causal layer begin at each row's first token.
        span = PaddedSpan.of(mask) if mask is not None and self.causal and not self.faithful else None
        if span is not None:
            q, k, v = span.roll(q, k, v)
            mask = torch.arange(q.shape[1], device=q.device) < span.lengths[:, None]
        out = self.local_attn(*(x.transpose(1, 2) for x in (q, k, v)), input_mask=mask).transpose(1, 2)
        return out if span is None else span.unroll(out)


class SelfAttention(Attention):
    """Self-attention with projections, (B, T, dim) -> (B, T, dim)."""

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to x; see `Attention.forward`. context: must be None."""
        if context is not None:
            raise ValueError("self-attention takes no context: use CrossAttention")
        return super().forward(x, pos_emb, None, mask, context_mask)


class CrossAttention(Attention):
    """Attention of x (B, T, dim) to a context (B, S, dim), with projections: -> (B, T, dim)."""

    needs_context = True

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the context; see `Attention.forward`. pos_emb: without effect."""
        if context is None:
            raise ValueError("cross-attention needs a context: pass context=, of shape (B, S, dim)")
        if pos_emb is not None:
            warnings.warn("pos_emb has no effect: cross-attention is not rotated, as in the original", stacklevel=2)
        return super().forward(x, None, context, mask, context_mask)


def at_positions(table: Tensor, mask: Tensor) -> Tensor:
    """Return a table ([B,] T, dim) of positions by token, so that left padding takes none: (B, T, dim)."""
    position = TokenLayout.of(mask, causal=True, key_mask=mask).position
    return torch.take_along_dim(table.expand(*mask.shape, -1), position[..., None], 1)
