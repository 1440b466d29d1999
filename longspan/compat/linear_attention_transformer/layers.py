"""Layers of linear-attention-transformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat import linformer
from longspan.compat.faithful import resolve_faithful
from longspan.compat.helpers import shift
from longspan.compat.layers import Chunk, as_bool, zero_fill
from longspan.compat.linear_attention_transformer.functions import (
    LinearHeads,
    apply_rotory_pos_emb,
    clamped_causal_attn,
    split_at_index,
)
from longspan.compat.local_attention import LocalAttention
from longspan.layout import PaddedSpan
from longspan.ops.rotary import angles


class ProjectInOut(nn.Module):
    """Project x from dim_in to dim_out, apply fn, and project back unless `project_out` is False."""

    def __init__(self, fn: nn.Module, dim_in: int, dim_out: int, project_out: bool = True) -> None:
        super().__init__()
        self.fn = fn
        self.project_in = nn.Linear(dim_in, dim_out)
        self.project_out = nn.Linear(dim_out, dim_in) if project_out else nn.Identity()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Map x (B, T, dim_in), with further arguments of fn."""
        return self.project_out(self.fn(self.project_in(x), **kwargs))


class PreShiftTokens(nn.Module):
    """Shift equal parts of the features by different numbers of tokens, then apply fn.

    Args:
        shifts: The number of tokens for each part; negative ones shift to the left.
        fn: The layer.
        faithful: Let padding move into real tokens, as in the original; see `longspan.compat.faithful`.
    """

    def __init__(self, shifts: Sequence[int], fn: nn.Module, *, faithful: bool | None = None) -> None:
        super().__init__()
        self.fn, self.shifts, self.faithful = fn, tuple(shifts), resolve_faithful(faithful)

    def forward(self, x: Tensor, mask: Tensor | None = None, input_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Map x (B, T, dim).

        Args:
            x: The tokens.
            mask: (B, T), True for tokens to shift; fn gets it too.
            input_mask: As mask, under the name that attention has for it; layers that compute each token on its own do
                not get it.
            **kwargs: Further arguments of fn.
        """
        if mask is not None:
            kwargs["mask"] = mask
        if input_mask is not None and not isinstance(self.fn, Chunk | PKM):
            kwargs["input_mask"] = input_mask
        visible = as_bool(mask if mask is not None or self.faithful else input_mask)
        size = x.shape[-1] // len(self.shifts)
        parts = list(x.split(size, -1))
        parts[: len(self.shifts)] = [
            shift(part, amount, visible) for part, amount in zip(parts, self.shifts, strict=False)
        ]
        return self.fn(torch.cat(parts, -1), **kwargs)


class AbsolutePositionalEmbedding(nn.Module):
    """A learned vector for each of max_seq_len positions."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(max_seq_len, dim)
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors (1, T, dim) of the positions of x (B, T, …)."""
        _check_length(x.shape[1], self.emb.num_embeddings)
        return self.emb(torch.arange(x.shape[1], device=x.device)[None])


class AxialPositionalEmbedding(nn.Module):
    """A grid of positions, each the sum of a learned vector for its row and one for its column."""

    def __init__(self, dim: int, axial_shape: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = self.shape = axial_shape
        self.max_seq_len = rows * columns
        shapes = (1, rows, 1, dim), (1, 1, columns, dim)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors (1, T, dim) of the positions of x (B, T, …)."""
        _check_length(x.shape[1], self.max_seq_len)
        position, columns = torch.arange(x.shape[1], device=x.device)[None], self.shape[1]
        row, column = (table.flatten(0, 2) for table in self.weights)
        return column[position % columns] + row[position // columns]


class FixedPositionalEmbedding(nn.Module):
    """Sines and cosines of the positions, sines first."""

    emb: Tensor

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"sinusoidal positions need an even dimension, got {dim}")
        self.register_buffer("emb", sinusoids(dim, max_seq_len))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}emb")
        if given is None or (given.shape != self.emb.shape and given.shape[1:] == self.emb.shape[1:]):
            state_dict[f"{prefix}emb"] = self.emb  # positions do not depend on how many a checkpoint has
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors (1, T, dim) of the positions of x (B, T, …), in float32 for half-precision models."""
        T, emb = x.shape[1], self.emb
        if len(emb) < T or emb.dtype != torch.float32:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            emb = sinusoids(emb.shape[1], T, emb.device, dtype)
        return emb[None, :T]


def sinusoids(dim: int, length: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return sines and cosines (length, dim) of the first positions."""
    angle = angles(torch.arange(length, device=device), dim, 10000.0, dtype)
    return torch.cat([angle.sin(), angle.cos()], -1)


class SelfAttention(nn.Module):
    """Local and linear attention heads with projections, (B, T, dim) -> (B, T, dim).

    Args:
        receives_context: Attend to a context instead of x.
        faithful: Clamp the denominators of causal linear heads at 0.001, and let left padding of a causal layer take
            positions, as in the original; see `longspan.compat.faithful`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = False,
        dim_head: int | None = None,
        blindspot_size: int = 1,
        n_local_attn_heads: int = 0,
        local_attn_window_size: int = 128,
        receives_context: bool = False,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        *,
        faithful: bool | None = None,
    ) -> None:
        super().__init__()
        if not dim_head and dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads}), or dim_head must be given")
        if not 0 <= n_local_attn_heads <= heads:
            raise ValueError(f"n_local_attn_heads must be from 0 to heads ({heads}), got {n_local_attn_heads}")
        if receives_context and (causal or n_local_attn_heads):
            what = "causal" if causal else "n_local_attn_heads"
            raise ValueError(f"{what} and receives_context exclude each other: attention to a context is not {what}")
        self.heads, self.d_heads, self.receives_context = heads, dim_head or dim // heads, receives_context
        self.kv_heads, self.causal, self.faithful = heads, causal, resolve_faithful(faithful)
        self.local_attn_heads, self.global_attn_heads = n_local_attn_heads, heads - n_local_attn_heads
        self.global_attn_fn: Any = None
        if causal and self.faithful:
            self.global_attn_fn = partial(clamped_causal_attn, bucket_size=max(blindspot_size, 1), eps=1e-3)
        elif self.global_attn_heads:
            self.global_attn_fn = LinearHeads.of(
                self.global_attn_heads, self.d_heads, causal=causal, blindspot_size=blindspot_size
            )
        # Without local heads the size of their window does not matter; some projects give 0.
        window = local_attn_window_size if n_local_attn_heads else max(local_attn_window_size, 1)
        self.local_attn = LocalAttention(window, causal=causal, dropout=attn_dropout, faithful=self.faithful)
        self.to_q = nn.Linear(dim, self.d_heads * heads, bias=False)
        self.to_k = nn.Linear(dim, self.d_heads * heads, bias=False)
        self.to_v = nn.Linear(dim, self.d_heads * heads, bias=False)
        self.to_out = nn.Linear(self.d_heads * heads, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
    ) -> Tensor:
        """Attend to x (B, T, dim), or to a context (B, S, dim) with receives_context.

        Args:
            x: The tokens.
            input_mask: (B, T), True for tokens to attend to.
            context: With receives_context.
            context_mask: (B, S), True for tokens of the context to attend to.
            pos_emb: (1, T, D) from `FixedPositionalEmbedding`, for rotary positions; a context has none.
        """
        if self.receives_context and context is None:
            raise ValueError("this layer attends to a context: pass context=, of shape (B, S, dim)")
        if not self.receives_context and (context is not None or context_mask is not None):
            raise ValueError("a context was given, but this layer attends to x: build it with receives_context=True")
        input_mask, context_mask = as_bool(input_mask), as_bool(context_mask)
        source, kv_mask = (x, input_mask) if context is None else (context, context_mask)
        if not self.faithful:
            x = zero_fill(x, input_mask)
            source = x if context is None else zero_fill(source, context_mask)
        q, k, v = (
            project(tokens).unflatten(2, (self.heads, self.d_heads)).transpose(1, 2)
            for project, tokens in ((self.to_q, x), (self.to_k, source), (self.to_v, source))
        )
        if pos_emb is not None and not self.receives_context:
            if pos_emb.shape[-1] != self.d_heads:  # the heads of axial attention have a width of their own
                pos_emb = sinusoids(self.d_heads, x.shape[1], x.device, pos_emb.dtype)[None]
            q, k = apply_rotory_pos_emb(q, k, pos_emb)
        local, linear = zip(*(split_at_index(1, self.local_attn_heads, t) for t in (q, k, v)), strict=True)
        out = []
        if self.local_attn_heads:
            out.append(self._attend_locally(local, input_mask))
        if self.global_attn_heads:
            out.append(self.global_attn_fn(*linear, kv_mask=kv_mask))
        heads = out[0] if len(out) == 1 else torch.cat(out, 1)
        return self.dropout(self.to_out(heads.transpose(1, 2).flatten(2)))

    def _attend_locally(self, qkv: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        if not qkv[0].shape[2]:
            return qkv[2]
        if mask is None or not self.causal or self.faithful:
            return self.local_attn(*qkv, input_mask=mask)
        rows = AlignedRows(mask)  # windows start at the first real token
        out = self.local_attn(*(rows.align(x.transpose(1, 2)).transpose(1, 2) for x in qkv), input_mask=rows.mask)
        return rows.restore(out.transpose(1, 2)).transpose(1, 2)


class LinformerSelfAttention(linformer.LinformerSelfAttention):
    """Linformer attention that takes the arguments of `SelfAttention`.

    Args:
        layer_dropout: Dropout of the output.
        faithful: Ignore masks and layer_dropout, as in the original; see `longspan.compat.faithful`.
    """

    def __init__(self, *args: Any, layer_dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_dropout = 0.0 if self.faithful else layer_dropout

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
    ) -> Tensor:
        """Attend to x or, if given, to a context; rotary positions have no effect, as in the original."""
        out = super().forward(x, context, as_bool(input_mask), as_bool(context_mask))
        return F.dropout(out, self.layer_dropout, self.training)


class FoldAxially(nn.Module):
    """Apply fn along every axial_dim-th token: token i belongs to row i mod axial_dim."""

    def __init__(self, axial_dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.fn, self.axial_dim = fn, axial_dim

    def forward(
        self, x: Tensor, input_mask: Tensor | None = None, pos_emb: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Map x (B, T, dim); positions pos_emb (1, T, D) are those along a row."""
        if not x.shape[1]:
            return x
        (B, T), mask = x.shape[:2], as_bool(input_mask)
        padding = -T % self.axial_dim
        if padding:
            mask = x.new_ones(B, T, dtype=torch.bool) if mask is None else mask
            x, mask = F.pad(x, (0, 0, 0, padding)), F.pad(mask, (0, padding))
        if mask is not None:
            kwargs["input_mask"] = self._fold(mask[..., None])[..., 0]
        if pos_emb is not None:
            kwargs["pos_emb"] = pos_emb[:, : x.shape[1] // self.axial_dim]
        out = self.fn(self._fold(x), **kwargs)
        return out.unflatten(0, (B, self.axial_dim)).transpose(1, 2).flatten(1, 2)[:, :T]

    def _fold(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.axial_dim)).transpose(1, 2).flatten(0, 1)


class PKM(nn.Module):
    """A product-key memory of num_keys² values (Lample et al., 2019), with the modules of product-key-memory 0.3."""

    def __init__(self, dim: int, heads: int = 4, num_keys: int = 128, topk: int = 32, dim_head: int = 128) -> None:
        super().__init__()
        self.topk, self.heads, self.num_keys = min(topk, num_keys), heads, num_keys
        self.to_queries = nn.Linear(dim, dim_head * heads * 2, bias=False)
        self.pre_layernorm = nn.Identity()
        self.norm = nn.LayerNorm(dim_head)
        self.keys = nn.Parameter(torch.randn(heads, num_keys, 2, dim_head) * dim_head**-0.5)
        self.num_memories = num_keys**2
        self.maybe_concat_combine = nn.Identity()
        self.values = nn.EmbeddingBag(self.num_memories, dim, mode="sum")
        nn.init.normal_(self.values.weight, std=dim**-0.5)
        self.input_dropout, self.query_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.value_dropout, self.attn_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.gate_activation = nn.Softmax(-1)
        self.output_norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim)."""
        queries = self.to_queries(self.input_dropout(self.pre_layernorm(x))).unflatten(-1, (2, self.heads, -1))
        queries = self.query_dropout(self.norm(queries))  # (B, T, 2, H, dim_head)
        scores, index = torch.einsum("btphd,hnpd->btphn", queries, self.keys).topk(self.topk, -1)
        pairs = (scores[:, :, 0, :, :, None] + scores[:, :, 1, :, None]).flatten(-2)
        places = (index[:, :, 0, :, :, None] * self.num_keys + index[:, :, 1, :, None]).flatten(-2)
        scores, chosen = pairs.topk(self.topk, -1)
        places = places.gather(-1, chosen).flatten(-2).flatten(0, 1)  # (B · T, H · topk)
        weights = self.attn_dropout(self.gate_activation(scores)).flatten(-2).flatten(0, 1)
        out = self.values(places, per_sample_weights=weights.to(self.values.weight.dtype))
        out = self.output_norm(self.value_dropout(self.maybe_concat_combine(out)))
        return out.unflatten(0, x.shape[:2])


class AlignedRows:
    """Rows of tokens rotated so that the real tokens of a causal mask (B, T), one run per row, start at slot 0."""

    def __init__(self, mask: Tensor) -> None:
        self._start = PaddedSpan.of(mask).start[:, None]
        self.mask = self.align(mask)

    def align(self, x: Tensor) -> Tensor:
        """Rotate the rows of x (B, T, …)."""
        return self._rotated(x, self._start)

    def restore(self, x: Tensor) -> Tensor:
        """Undo `align`."""
        return self._rotated(x, -self._start)

    @staticmethod
    def _rotated(x: Tensor, amount: Tensor) -> Tensor:
        index = (torch.arange(x.shape[1], device=x.device) + amount) % x.shape[1]
        return torch.take_along_dim(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)


def _check_length(length: int, positions: int) -> None:
    if length > positions:
        raise ValueError(
            f"{length} tokens are more than the {positions} positions of this model: shorten the input, or build the "
            "model with a larger max_seq_len"
        )
