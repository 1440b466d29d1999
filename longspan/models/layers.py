"""What a transformer is made of: norms, attention with its projections, feed-forward layers, token shift."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.layout import TokenLayout
from longspan.mechanisms import build_mechanism, mechanisms
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.split import SplitAttention
from longspan.models.config import AttentionConfig, FeedForwardConfig
from longspan.models.positions import Rotary
from longspan.ops.decode import FUSED_ACTIVATIONS, RotaryCache, fused_linear
from longspan.protocol import Mechanism, State

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}


class ScaleNorm(nn.Module):
    """x / ‖x‖ times one learned number (Nguyen & Salazar, 2019)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(dim**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=1e-5) * self.scale.to(x.dtype)


class CenteredNorm(nn.Module):
    """x / rms(x) · (1 + offset): decay draws the weight to one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.offset.shape, 1 + self.offset, 1e-12)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": lambda dim: nn.RMSNorm(dim, eps=1e-6),
    "scale": ScaleNorm,
}


class Attention(nn.Module):
    """Projections around a mechanism: (B, T, dim) -> (B, T, dim).

    mechanism: what to compute, in place of the configuration's name for it. cross: keys and values come from a context,
    context_dim wide where that is not dim. mid_features: width of an extra linear layer before the output projection.
    """

    def __init__(
        self,
        dim: int,
        config: AttentionConfig | None = None,
        *,
        mechanism: Mechanism | None = None,
        causal: bool = False,
        cross: bool = False,
        context_dim: int | None = None,
        mid_features: int | None = None,
        out_features: int | None = None,
    ) -> None:
        super().__init__()
        config = AttentionConfig() if config is None else config
        if mechanism is None:
            if config.share_projection or config.dynamic_bias:
                raise ValueError(
                    "share_projection and dynamic_bias belong to all layers of a model together: "
                    "build a Transformer, or give this layer a mechanism that has them"
                )
            mechanism = mechanism_from(config.mechanism, *head_shape(dim, config))
        if (causal and not mechanism.supports_causal) or (cross and not mechanism.supports_cross):
            raise ValueError(
                f"{type(mechanism).__name__} cannot be used for {'cross' if cross else 'causal'} attention"
            )
        self.mechanism, self.causal, self.cross, self.head_groups = mechanism, causal, cross, 1
        self.shared_kv = config.shared_kv
        if self.shared_kv and mechanism.value_dim != mechanism.head_dim:
            raise ValueError(f"shared_kv needs value_dim ({mechanism.value_dim}) = head_dim ({mechanism.head_dim})")
        inner_q, inner_k = mechanism.num_heads * mechanism.head_dim, mechanism.num_kv_heads * mechanism.head_dim
        inner_v = 0 if self.shared_kv else mechanism.num_kv_heads * mechanism.value_dim
        self.to_q = nn.Linear(dim, inner_q, bias=config.qkv_bias)
        self.to_kv = nn.Linear(context_dim or dim, inner_k + inner_v, bias=config.qkv_bias)
        # So small that a short query is normalized as fully as a long one, and large enough for gradients at zero.
        self.q_norm = nn.RMSNorm(mechanism.head_dim, eps=1e-12) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(mechanism.head_dim, eps=1e-12) if config.qk_norm else None
        self.rotary = nn.ModuleList(_rotary(config, mechanism))
        if cross and self.rotary:
            raise ValueError(f'cross-attention is never rotated: set rotary="none" for it, got {config.rotary!r}')
        self.to_gates = nn.Linear(dim, mechanism.num_heads) if config.value_gates else None
        self.bare_keys = not (config.qkv_bias or config.qk_norm or self.rotary)
        inner_out = mechanism.num_heads * mechanism.value_dim
        self.to_mid = None if mid_features is None else nn.Linear(inner_out, mid_features, bias=config.out_bias)
        self.to_out = nn.Linear(mid_features or inner_out, out_features or dim, bias=config.out_bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rows: TokenLayout | None = None,
        context: Tensor | None = None,
        *,
        context_rows: TokenLayout | None = None,
    ) -> Tensor:
        """x: (B, T, dim) with its masks and packing; for cross-attention a context (B, S, dim) with its own."""
        whole = self._in_one(x, rows)
        if whole is not None:
            return whole
        rows = TokenLayout.of(x, causal=self.causal) if rows is None else rows
        x = rows.hide(x)
        q = self._queries(x, rows)
        source, source_rows = x, rows
        if self.cross:
            if context is None:
                raise ValueError("cross-attention needs a context: pass context=, of shape (B, S, dim)")
            source_rows = TokenLayout.of(context, causal=False) if context_rows is None else context_rows
            source = source_rows.hide(context)
        if self._compresses(q, source, rows.packing is not None or source_rows.packing is not None):
            assert isinstance(self.mechanism, LinformerAttention)
            out = self.mechanism.attend_source(
                q, source, self.to_kv.weight, shared_kv=self.shared_kv, key_mask=source_rows.key_mask
            )
            return self._output(x, out)
        k, v = self._keys(source, None if self.cross else rows)
        key_packing = source_rows.packing if self.cross else None
        out = self._mix(q, k, v, key_mask=source_rows.key_mask, packing=rows.packing, key_packing=key_packing)
        return self._output(x, out)

    def new_state(self, batch_size: int, **options: Any) -> State:
        """The mechanism's empty state; see `Mechanism.new_state`."""
        return self.mechanism.new_state(batch_size, **options)

    def write(self, state: State, context: Tensor, rows: TokenLayout | None = None) -> State:
        """A cross-attention's state after a context: paid once, then read by every step."""
        rows = TokenLayout.of(context, causal=False) if rows is None else rows
        k, v = self._keys(rows.hide(context), None)
        return self.mechanism.write(state, k, v, key_mask=rows.key_mask, packing=rows.packing)

    def extend(self, x: Tensor, state: State, rows: TokenLayout | None = None) -> tuple[Tensor, State]:
        """Any number of new tokens; cross-attention reads its state and leaves it as it is."""
        rows = TokenLayout.of(x, causal=True, start=state.length) if rows is None else rows
        x = rows.hide(x)
        q = self._queries(x, rows)
        if self.cross:
            return self._output(x, self.mechanism.read(state, q)), state
        k, v = self._keys(x, rows)
        if x.shape[1] == 1 and rows.key_mask is None and rows.packing is None:
            out, state = self.mechanism.step(state, q, k, v)
        else:
            out, state = self.mechanism.extend(state, q, k, v, key_mask=rows.key_mask, packing=rows.packing)
        return self._output(x, out), state

    def decode_step(
        self, x: Tensor, state: State, turns: RotaryCache, *, norm: nn.Module | None = None, add: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """One decode step of x (B, 1, dim), in eval mode; see `Mechanism.decode_step`.

        turns: cos and sin for each kind of rotary. norm: applied to x first. add: a residual added to the output.
        """
        if self.to_gates is not None and norm is not None:
            x, norm = norm(x), None
        q, *kv = fused_linear(x, *((self.to_q,) if self.cross else (self.to_q, self.to_kv)), norm=norm)
        mechanism = self.mechanism
        q = q.view(q.shape[0], 1, mechanism.num_heads, mechanism.head_dim)
        q = q if self.q_norm is None else self.q_norm(q)
        if self.cross:
            out = mechanism._read(state, q)
        else:
            k, v = self._heads(kv[0])
            own = [turns[r.kind].paired(r.interleaved) if isinstance(r, Rotary) else None for r in self.rotary]
            out, state = mechanism.decode_step(state, q, k, v, own if len(own) > 1 else own[0] if own else None)
        out = self._gated(x, out).flatten(2)
        out = out if self.to_mid is None else fused_linear(out, self.to_mid)[0]
        return fused_linear(out, self.to_out, residual=add)[0], state

    def set_head_groups(self, apart: bool) -> None:
        """Whether heads are computed group by group, each group made again in the backward pass."""
        if apart and not self.mechanism.heads_alike:
            raise ValueError(
                f"the heads of this {type(self.mechanism).__name__} differ, so they cannot be recomputed by groups: "
                'use execution="recompute"'
            )
        if apart and getattr(self.mechanism, "dropout", False):
            raise ValueError(
                "dropout inside a mechanism draws for all its heads at once, so they cannot be recomputed by groups: "
                'use execution="recompute", or the dropout of AttentionConfig'
            )
        self.head_groups = self.mechanism.num_kv_heads if apart else 1

    @property
    def turns(self) -> set[tuple[int, float]]:
        """The kinds of rotary positions that its queries and keys take."""
        return {turn.kind for turn in self.rotary if isinstance(turn, Rotary)}

    def _queries(self, x: Tensor, rows: TokenLayout) -> Tensor:
        q = self.to_q(x).unflatten(2, (self.mechanism.num_heads, -1))  # (B, T, H, D)
        return self._rotated(q if self.q_norm is None else self.q_norm(q), rows, self.mechanism.num_heads)

    def _keys(self, x: Tensor, rows: TokenLayout | None) -> tuple[Tensor, Tensor]:
        k, v = self._heads(self.to_kv(x))
        return k if rows is None else self._rotated(k, rows, self.mechanism.num_kv_heads), v

    def _heads(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """k (B, S, Hkv, D), not rotated yet, and v (B, S, Hkv, E) of what to_kv gave."""
        mechanism = self.mechanism
        heads, width = mechanism.num_kv_heads, mechanism.num_kv_heads * mechanism.head_dim
        if self.shared_kv:
            k = v = kv.unflatten(2, (heads, -1))
        else:
            k, v = kv.split_with_sizes([width, kv.shape[2] - width], 2)
            k, v = k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))
        return k if self.k_norm is None else self.k_norm(k), v

    def _rotated(self, x: Tensor, rows: TokenLayout, heads: int) -> Tensor:
        parts = len(self.rotary)
        if parts == 0:
            return x
        if parts == 1:
            only = self.rotary[0]
            assert isinstance(only, Rotary)
            return only.at(x, rows)
        sizes = self.mechanism.sizes if heads == self.mechanism.num_heads else self.mechanism.kv_sizes
        pieces = zip(self.rotary, x.split(sizes, 2), strict=True)
        return torch.cat([turn.at(piece, rows) if isinstance(turn, Rotary) else piece for turn, piece in pieces], 2)

    def _compresses(self, q: Tensor, source: Tensor, packed: bool) -> bool:
        """Whether the source is compressed before it is projected: where nothing happens to its keys in between."""
        if not isinstance(self.mechanism, LinformerAttention) or packed or 0 in (*q.shape[:2], source.shape[1]):
            return False
        # A layer put in the place of to_kv is called, not read.
        whole = self.bare_keys and not self.causal and self.head_groups == 1 and type(self.to_kv) is nn.Linear
        return whole and self.mechanism.compresses_first(source.shape[2], self.to_kv.out_features)

    def _in_one(self, x: Tensor, rows: TokenLayout | None) -> Tensor | None:
        """All of it at once, on a GPU: a Linformer's layer that has nothing in it but products and softmax."""
        mechanism = self.mechanism
        if not isinstance(mechanism, LinformerAttention) or not self.bare_keys or self.causal or self.cross:
            return None
        if rows is not None and (rows.key_mask is not None or rows.packing is not None):
            return None
        to_q, to_kv, to_out = self.to_q, self.to_kv, self.to_out
        if self.head_groups > 1 or not (_is_bare(to_q) and _is_bare(to_kv) and _is_bare(to_out)):
            return None
        if self.to_gates is not None or self.to_mid is not None or (self.training and self.dropout.p):
            return None
        weights = to_q.weight, to_kv.weight, to_out.weight
        return mechanism.attend_layer(x, *weights, to_out.bias, shared_kv=self.shared_kv)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        if self.head_groups == 1:
            return self.mechanism(q, k, v, causal=self.causal, **how)
        pieces = []
        kv_size = self.mechanism.num_kv_heads // self.head_groups
        size = self.mechanism.num_heads // self.head_groups
        for g in range(self.head_groups):
            part = copy.copy(self.mechanism)
            part.num_heads, part.num_kv_heads = size, kv_size
            kv = slice(g * kv_size, (g + 1) * kv_size)
            piece = q[:, :, g * size : (g + 1) * size], k[:, :, kv], v[:, :, kv]
            pieces.append(checkpoint(part, *piece, use_reentrant=False, causal=self.causal, **how))
        return torch.cat(pieces, 2)

    def _output(self, x: Tensor, out: Tensor) -> Tensor:
        out = self._gated(x, out).flatten(2)
        out = out if self.to_mid is None else self.to_mid(out)
        return self.dropout(self.to_out(out))

    def _gated(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.to_gates is None else out * self.to_gates(x).sigmoid()[..., None]


def _is_bare(layer: nn.Module) -> bool:
    """Whether a layer is its weight and nothing else: what stands in its place, or hooks onto it, is called."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not any(hooks)


def head_shape(dim: int, config: AttentionConfig) -> tuple[int, int, int]:
    """num_heads, head_dim and num_kv_heads of an attention `dim` wide."""
    if config.head_dim is None and dim % config.num_heads:
        raise ValueError(f"dim ({dim}) must be a multiple of num_heads ({config.num_heads}), or head_dim must be given")
    head_dim = dim // config.num_heads if config.head_dim is None else config.head_dim
    return config.num_heads, head_dim, config.num_heads if config.num_kv_heads is None else config.num_kv_heads


def mechanism_from(spec: Any, num_heads: int, head_dim: int, num_kv_heads: int) -> Mechanism:
    """The mechanism that a name or {"mechanism": name, **options} describes."""
    if isinstance(spec, str):
        return build_mechanism(spec, num_heads, head_dim, num_kv_heads=num_kv_heads)
    if not isinstance(spec, Mapping) or "mechanism" not in spec:
        raise ValueError(f'a mechanism is a name or {{"mechanism": name, **options}}, got {spec!r}')
    options = {option: value for option, value in spec.items() if option != "mechanism"}
    return build_mechanism(spec["mechanism"], num_heads, head_dim, num_kv_heads=num_kv_heads, **options)


def _rotary(config: AttentionConfig, mechanism: Mechanism) -> list[nn.Module]:
    names = [config.rotary] if isinstance(config.rotary, str) else list(config.rotary)
    if isinstance(config.rotary, Mapping):
        parts = mechanism.parts if isinstance(mechanism, SplitAttention) else [mechanism]
        known: dict[type, str] = {kind: name for name, kind in mechanisms().items()}
        names = [config.rotary.get(known.get(type(part), ""), "none") for part in parts]
    if set(names) == {"none"}:
        return []
    if len(names) > 1 and len(names) != len(getattr(mechanism, "sizes", ())):
        raise ValueError(f"rotary names {len(names)} parts, {type(mechanism).__name__} does not have as many")
    if len(set(names)) > 1 and mechanism.num_kv_heads == 1:
        raise ValueError(f"the parts share one key/value head, which is rotated in one way: got rotary {names}")
    if len(set(names)) == 1:
        names = names[:1]
    return [
        nn.Identity()
        if name == "none"
        else Rotary(mechanism.head_dim, config.rotary_base, interleaved=name == "interleaved")
        for name in names
    ]


class FeedForward(nn.Module):
    """activation(x W₁) W₂, or (activation(a) · b) W₂ with (a, b) = x W₁."""

    def __init__(
        self,
        dim: int,
        config: FeedForwardConfig | None = None,
        *,
        out_features: int | None = None,
        out_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        config = FeedForwardConfig() if config is None else config
        hidden = config.hidden or int(dim * config.mult)
        self.activation, self.activation_name = ACTIVATIONS[config.activation], config.activation
        self.gated, self.chunks = config.gated, config.chunks
        self.to_hidden = nn.Linear(dim, hidden * 2 if self.gated else hidden, bias=config.bias)
        self.to_out = nn.Linear(hidden, out_features or dim, bias=config.bias)
        self.dropout, self.out_dropout = nn.Dropout(config.dropout), nn.Dropout(out_dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.chunks == 1:
            return self._piece(x)
        return torch.cat([self._piece(piece) for piece in x.chunk(self.chunks, 1)], 1)

    def decode_step(self, x: Tensor, *, norm: nn.Module | None = None, add: Tensor | None = None) -> Tensor:
        """One token (B, 1, dim) of a loop, in eval mode. norm, add: as in `Attention.decode_step`."""
        fused = not self.gated and self.activation_name in FUSED_ACTIVATIONS
        (hidden,) = fused_linear(x, self.to_hidden, norm=norm, activation=self.activation_name if fused else "identity")
        return fused_linear(hidden if fused else self._activated(hidden), self.to_out, residual=add)[0]

    def _piece(self, x: Tensor) -> Tensor:
        hidden = self._activated(self.to_hidden(x))
        return self.out_dropout(self.to_out(self.dropout(hidden)))

    def _activated(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(hidden)
        hidden, gate = hidden.chunk(2, -1)
        return self.activation(hidden) * gate


class ProductKeyMemory(nn.Module):
    """A large memory of num_keys² values, found by the best pairs of half-keys (Lample et al., 2019)."""

    def __init__(
        self, dim: int, *, num_keys: int = 128, num_heads: int = 4, key_dim: int = 128, best: int = 32
    ) -> None:
        super().__init__()
        self.num_keys, self.num_heads, self.best = num_keys, num_heads, min(best, num_keys)
        self.to_queries = nn.Linear(dim, 2 * num_heads * key_dim, bias=False)
        self.norm = nn.LayerNorm(key_dim)
        self.keys = nn.Parameter(torch.randn(num_heads, num_keys, 2, key_dim) * key_dim**-0.5)
        self.values = nn.Embedding(num_keys**2, dim)
        nn.init.normal_(self.values.weight, std=dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(self.to_queries(x).unflatten(-1, (2, self.num_heads, -1)))  # (B, T, 2, H, key_dim)
        scores, index = torch.einsum("btphd,hnpd->btphn", queries, self.keys).topk(self.best, -1)
        pairs = (scores[:, :, 0, :, :, None] + scores[:, :, 1, :, None]).flatten(-2)
        places = (index[:, :, 0, :, :, None] * self.num_keys + index[:, :, 1, :, None]).flatten(-2)
        scores, chosen = pairs.topk(self.best, -1)
        places = places.gather(-1, chosen).flatten(-2)  # (B, T, H · best)
        weights = scores.softmax(-1).flatten(-2)
        return F.embedding_bag(
            places.flatten(0, 1),
            self.values.weight,
            per_sample_weights=weights.flatten(0, 1).to(self.values.weight.dtype),
            mode="sum",
        ).view(*x.shape[:2], -1)


def shift_tokens(x: Tensor, offsets: Sequence[int], rows: TokenLayout, recent: Tensor | None = None) -> Tensor:
    """Equal parts of the features, each from the token that many places before (negative: after); zeros where none is.

    x: (B, T, dim), hidden tokens zero. recent: (B, max(offsets), dim), the tokens before these.
    """
    size = x.shape[2] // len(offsets)
    parts = list(x.split(size, 2))
    history = 0 if recent is None else recent.shape[1]
    longer = x if recent is None else torch.cat([recent, x], 1)
    for i, offset in enumerate(offsets):
        if offset == 0:
            continue
        piece = longer[..., i * size : (i + 1) * size]
        moved = F.pad(piece, (0, 0, offset, -offset)) if abs(offset) < piece.shape[1] else torch.zeros_like(piece)
        parts[i] = moved[:, history:].masked_fill(~rows.has_neighbor(offset)[..., None], 0)
    return torch.cat(parts, 2)


def shift_token(x: Tensor, offsets: tuple[int, ...], recent: Tensor) -> Tensor:
    """As `shift_tokens` of one token x (B, 1, dim), which `recent` (B, s, dim) then holds too."""
    size = x.shape[2] // len(offsets)
    joined = torch.cat([recent, x], 1)
    parts = list(x.split(size, 2))
    for i, offset in enumerate(offsets):
        # What came before the first token is zero already.
        there = recent.shape[1] - offset
        parts[i] = joined[:, there : there + 1, i * size : (i + 1) * size] if offset else parts[i]
    recent.copy_(joined[:, 1:])
    return torch.cat(parts, 2)


def latest_tokens(recent: Tensor, x: Tensor, rows: TokenLayout) -> Tensor:
    """The last tokens of recent (B, s, dim) and then x (B, T, dim), but for the masked ones at the end."""
    s, T = recent.shape[1], x.shape[1]
    joined = torch.cat([recent, x], 1)
    if rows.key_mask is None:
        return joined[:, T:]
    index = rows.key_mask.sum(1, keepdim=True) + torch.arange(s, device=x.device)
    return torch.take_along_dim(joined, index[..., None], 1)
