"""Layers of a transformer: norms, attention with its projections, feed-forward layers, token shift."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import Packing, PaddedSpan, TokenLayout, length_buckets, repack
from longspan.mechanisms import build_mechanism, find_mechanism
from longspan.mechanisms.split import SplitAttention
from longspan.models.config import AttentionConfig, FeedForwardConfig
from longspan.models.positions import Rotary
from longspan.ops.common import dispatch
from longspan.ops.common.autograd import recompute
from longspan.ops.common.torch_private import is_exporting
from longspan.ops.convolution import short_convolution
from longspan.ops.decode import (
    FUSED_ACTIVATIONS,
    CurrentToken,
    RotaryCache,
    TokenShift,
    fused_heads,
    fused_linear,
    gate_heads,
    module_function,
)
from longspan.ops.float8 import Float8Linear, float8_linear
from longspan.ops.heads import divide_heads
from longspan.ops.rms_norm import rms_norm_heads
from longspan.protocol import Mechanism, State, StateOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Maps a token x (1, dim) and a residual (1, dim) to the residual plus a branch's output.
ResidualFunction = Callable[[Tensor, Tensor, CurrentToken], Tensor]


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# Named functions, so that layers can be pickled.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu2": _squared_relu,
    "identity": _identity,
}


class ScaleNorm(nn.Module):
    """x / ‖x‖ times a learned scalar (Nguyen & Salazar, 2019)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(dim**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=1e-5) * self.scale.to(x.dtype)


class CenteredNorm(nn.Module):
    """x / rms(x) · (1 + offset), so that weight decay pulls the weight towards one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.offset.shape, 1 + self.offset, 1e-12)


class ShortConvolution(nn.Module):
    """silu(Σ_j w_j ∘ x_{t−j}) over the last `size` tokens of a sequence, channel by channel.

    Args:
        channels: Width of x.
        size: Number of tokens.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, channels).uniform_(-(size**-0.5), size**-0.5))

    @property
    def size(self) -> int:
        """The number of tokens that an output depends on."""
        return len(self.weight)

    def forward(self, x: Tensor, layout: TokenLayout, recent: Tensor | None = None) -> Tensor:
        """Map x (B, T, channels), hidden tokens zero, after recent (B, size − 1, channels), to (B, T, channels)."""
        if layout.shard is not None:
            wide = layout.shard.halo(x, self.size - 1, 0, layout, recent)
            recent, x = wide.split([self.size - 1, x.shape[1]], 1)
            layout = replace(layout, shard=None)
        if recent is None and layout.packing is None:
            out = short_convolution(x, self.weight)
            if out is not None:
                return layout.zero_fill(out)  # The kernels go on after a sequence's end.
        elif dispatch.recording is not None:
            dispatch.record("short convolution", dispatch.TORCH, "a packed row, or tokens after a state")
        total = x * self.weight[0]
        for offset in range(1, self.size):
            total = total + shift_tokens(x, (offset,), layout, recent) * self.weight[offset]
        return F.silu(total)

    def extend_packed(self, x: Tensor, packing: Packing, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Map packed sequences x (1, T, channels), each after its own row of `recent` (N, size − 1, channels).

        Returns:
            (1, T, channels), and the last tokens of each sequence.
        """
        outputs, after = [], recent
        for bucket in (buckets := length_buckets(packing) if x.shape[1] else []):
            (rows,), before = bucket.take(x), recent[bucket.sequences]
            # Not at the start of a sequence: zeros stand in `recent` where there is no token.
            start = torch.full_like(bucket.sequences, self.size - 1)
            layout = TokenLayout.of(rows, causal=True, key_mask=bucket.visible(), start=start)
            outputs.append(self(rows, layout, before))
            after = after.index_copy(0, bucket.sequences, latest_tokens(before, rows, layout))
        return repack(packing, buckets, outputs, x.shape[1]) if buckets else x, after

    def step(self, x: Tensor, recent: Tensor) -> Tensor:
        """Map one token x (..., 1, channels), and append it to `recent` (..., size − 1, channels) in place."""
        joined = torch.cat([recent, x], -2)
        recent.copy_(joined.narrow(-2, 1, recent.shape[-2]))
        return F.silu(joined.mul_(self.weight.flip(0)).sum(-2, keepdim=True), inplace=True)


@dataclass
class ConvolutionState(State):
    """The state of attention with a short convolution: the tokens it still needs, and the mechanism's state."""

    recent: Tensor  # (B, size − 1, channels)
    inner: tuple[State, ...] = ()

    def _merge(self, later: ConvolutionState) -> ConvolutionState:
        recent = merge_latest(self.recent, later.recent, later.length)
        inner = zip(self.inner, later.inner, strict=True)
        return replace(self, recent=recent, inner=tuple(state.merge(other) for state, other in inner))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": lambda dim: nn.RMSNorm(dim, eps=1e-6),
    "scale": ScaleNorm,
}


class Attention(nn.Module):
    """Projections around a mechanism: (B, T, dim) -> (B, T, out_features).

    Args:
        dim: Width of the input.
        config: Heads, options of the projections, and the mechanism by name.
        mechanism: A mechanism in place of the one that the configuration names.
        causal: Whether tokens see only earlier ones and themselves.
        cross: Whether keys and values come from a context.
        context_dim: Width of the context, dim unless given.
        mid_features: Width of an extra linear layer before the output projection.
        out_features: Width of the output, dim unless given.
        vocab_size: Number of tokens, for value embeddings.

    Raises:
        ValueError: If the mechanism cannot be causal or serve cross-attention, or options contradict each other.
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
        vocab_size: int | None = None,
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
        self.dim, self.mechanism, self.causal, self.cross, self.head_groups = dim, mechanism, causal, cross, 1
        self.shared_kv = config.shared_kv
        if self.shared_kv and mechanism.value_dim != mechanism.head_dim:
            raise ValueError(f"shared_kv needs value_dim ({mechanism.value_dim}) = head_dim ({mechanism.head_dim})")
        if config.num_qk_heads is not None and mechanism.num_heads % config.num_qk_heads:
            raise ValueError(f"{mechanism.num_heads} heads must be a multiple of num_qk_heads ({config.num_qk_heads})")
        # Query and key heads before they are repeated.
        self.num_heads = mechanism.num_heads if config.num_qk_heads is None else config.num_qk_heads
        self.num_kv_heads = mechanism.num_kv_heads if config.num_qk_heads is None else config.num_qk_heads
        inner_q, inner_k = self.num_heads * mechanism.head_dim, self.num_kv_heads * mechanism.head_dim
        inner_v = 0 if self.shared_kv else mechanism.num_kv_heads * mechanism.value_dim
        self.to_q = nn.Linear(dim, inner_q, bias=config.qkv_bias)
        self.to_kv = nn.Linear(context_dim or dim, inner_k + inner_v, bias=config.qkv_bias)
        # An epsilon that normalizes short vectors as fully as long ones, but keeps gradients at zero finite.
        self.q_norm = nn.RMSNorm(mechanism.head_dim, eps=1e-12) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(mechanism.head_dim, eps=1e-12) if config.qk_norm else None
        self.rotary = nn.ModuleList(_rotary(config, mechanism))
        if cross and self.rotary:
            raise ValueError(f'cross-attention is never rotated: set rotary="none" for it, got {config.rotary!r}')
        self.to_gates = nn.Linear(dim, mechanism.num_heads) if config.value_gates else None
        self.value_embedding = None
        if config.value_embedding:
            if vocab_size is None:
                raise ValueError("value_embedding embeds tokens: build a LanguageModel, or set vocab_size")
            self.value_embedding = nn.Embedding(vocab_size, inner_v)
            nn.init.zeros_(self.value_embedding.weight)
        if cross and config.conv_size:
            raise ValueError(f"conv_size ({config.conv_size}) is for self-attention: set it to 0 for cross-attention")
        self.conv = ShortConvolution(inner_q + inner_k + inner_v, config.conv_size) if config.conv_size else None
        inner_out = mechanism.num_heads * mechanism.value_dim
        self.to_mid = None if mid_features is None else nn.Linear(inner_out, mid_features, bias=config.out_bias)
        self.to_out = nn.Linear(mid_features or inner_out, out_features or dim, bias=config.out_bias)
        self.dropout = nn.Dropout(config.dropout)
        self.out_norm = nn.RMSNorm(mechanism.value_dim, eps=1e-6) if config.out_norm else None
        self.out_gate_name = "identity" if config.out_gate == "none" else config.out_gate
        self.out_gate = ACTIVATIONS[self.out_gate_name]
        self.to_out_gate = None if config.out_gate == "none" else nn.Linear(dim, inner_out, bias=False)
        inner_gates = mechanism.num_kv_heads * mechanism.num_gates
        self.to_mechanism_gates = nn.Linear(context_dim or dim, inner_gates) if inner_gates else None

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_packing: Packing | None = None,
        _layouts: tuple[TokenLayout, TokenLayout | None] | None = None,
    ) -> Tensor:
        """Compute attention of all tokens.

        Args:
            x: (B, T, dim) tokens.
            key_mask: (B, T) bool, True for real tokens of x.
            packing: Sequences concatenated in x.
            context: (B, S, context_dim), where keys and values of cross-attention come from.
            context_mask: (B, S) bool, True for real tokens of the context.
            context_packing: Sequences concatenated in the context.

        Returns:
            (B, T, out_features).
        """
        if _layouts is None:
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.dim or not x.is_floating_point():
                got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise ValueError(f"x must be a floating-point tensor (B, T, {self.dim}), got {got}")
            if not self.cross and (context is not None or context_mask is not None or context_packing is not None):
                raise ValueError("self-attention takes no context: build the layer with cross=True")
            if not self.cross and key_mask is None and packing is None:
                # Before the layout, which costs the host more than a fused layer.
                out = self._attend_layer(x, x, None)
                if out is not None:
                    return out
            layout = TokenLayout.of(x, causal=self.causal, key_mask=key_mask, packing=packing)
            context_layout = None
            if context is not None:
                context_layout = TokenLayout.of(context, causal=False, key_mask=context_mask, packing=context_packing)
        else:
            layout, context_layout = _layouts
        x = x if layout.key_mask is None else layout.zero_fill(x)
        source, source_layout = x, layout
        if self.cross:
            if context is None or context_layout is None:
                raise ValueError("cross-attention needs a context: pass context=, of shape (B, S, dim)")
            source, source_layout = context_layout.zero_fill(context), context_layout
        key_mask, packing = source_layout.key_mask, layout.packing
        if packing is None and source_layout.packing is None and source_layout.shard is None:
            out = self._attend_layer(x, source, key_mask)
            if out is not None:
                return out
        if source_layout.shard is not None:
            queries, k, v, gates, _ = self._project_lazily(x, source, layout)
            options: dict[str, Any] = {"causal": self.causal, "key_mask": key_mask}
            return self.project_output(x, source_layout.shard.attend(self.mechanism, queries, k, v, gates, **options))
        if self.cross:
            q, (k, v, gates) = self.project_queries(x, layout), self._project_keys(source, None)
            out = self._mix(q, k, v, gates, key_mask=key_mask, packing=packing, key_packing=source_layout.packing)
            return self.project_output(x, out)
        out = self._attend_parts(x, layout)
        if out is not None:
            return self.project_output(x, out)
        linear = self._linear(x)
        q, k, v, gates, _ = self._project(linear, x, layout, None)
        out = self._mix(q, k, v, gates, key_mask=key_mask, packing=packing, key_packing=None)
        return self._project_output(linear, out)

    def _attend_parts(self, x: Tensor, layout: TokenLayout) -> Tensor | None:
        """Return the mechanism's output for x (B, T, dim), if a kernel prepares the heads of its parts in one pass.

        When compiled for a GPU; None for options that the kernel does not support.
        """
        product = None
        if compiled_for_gpu(x) and layout.key_mask is None and layout.packing is None and self._has_plain_heads:
            product = self._joint(x, "to_q", "to_kv")
        if product is None:
            return None
        mechanism, parts, sizes = self.mechanism, [self.mechanism], [self.mechanism.num_heads]
        if isinstance(mechanism, SplitAttention):
            parts, sizes = cast("list[Mechanism]", list(mechanism.parts)), mechanism.sizes
        rotary = [r if isinstance(r, Rotary) else None for r in self.rotary] or [None]
        rotary = rotary * len(parts) if len(rotary) == 1 else rotary
        kinds = {r.kind for r in rotary if r is not None}
        cached = layout.rotary.get(next(iter(kinds))) if len(kinds) == 1 else None
        if any(r is not None and r.interleaved for r in rotary) or (kinds and (cached is None or len(cached[0]) > 1)):
            return None
        angles = None if cached is None else (cached[0][0], cached[1][0])
        q_norm, k_norm = cast("tuple[nn.RMSNorm, nn.RMSNorm]", (self.q_norm, self.k_norm))
        weights, rotated = (q_norm.weight, k_norm.weight), tuple(r is not None for r in rotary)
        assert q_norm.eps is not None
        found = divide_heads(product, weights, tuple(sizes), rotated, angles, q_norm.eps)
        if found is None:
            return None
        gates = self._project_gates(x)
        own = [None] * len(parts) if gates is None else gates.split_with_sizes(sizes, 2)
        outs = []
        for part, (q, k, v), columns in zip(parts, found, own, strict=True):
            given = columns[..., : part.num_gates] if columns is not None and part.num_gates else None
            outs.append(part(q, k, v, gates=given, causal=self.causal))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    @property
    def _has_plain_heads(self) -> bool:
        """Whether queries, keys and values are alike, and between their projection and rotation are RMS norms alone."""
        mechanism, norms = self.mechanism, (self.q_norm, self.k_norm)
        heads = {self.num_heads, self.num_kv_heads, mechanism.num_heads, mechanism.num_kv_heads}
        alike = len(heads) == 1 and mechanism.value_dim == mechanism.head_dim and not self.shared_kv
        if not alike or self.conv is not None or self.value_embedding is not None:
            return False
        if has_hooks(mechanism) or any(map(has_hooks, self.rotary)):
            return False
        normed = all(norm is not None and is_plain(norm, nn.RMSNorm) and norm.eps is not None for norm in norms)
        return normed and len({norm.eps for norm in norms if norm is not None}) == 1

    def _attend_layer(self, x: Tensor, source: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Return the output if the mechanism computes the whole layer at once; see `Mechanism.attend_layer`."""
        if self.causal or self.head_groups > 1 or self.conv is not None or self.value_embedding is not None:
            return None
        return self.mechanism.attend_layer(self, x, source, key_mask=key_mask)

    def new_state(self, batch_size: int, **options: Unpack[StateOptions]) -> State:
        """Return an empty state; see `Mechanism.new_state`."""
        state = self.mechanism.new_state(batch_size, **options)
        if self.conv is None:
            return state
        shape = batch_size, self.conv.size - 1, self.conv.weight.shape[1]
        recent = torch.zeros(shape, device=state.length.device, dtype=options.get("dtype"))
        return ConvolutionState(state.length, recent, (state,), start=state.start)

    def mechanism_state(self, state: State) -> State:
        """Return the mechanism's part of a layer's state."""
        return state.inner[0] if isinstance(state, ConvolutionState) else state

    def with_mechanism_state(self, state: State, inner: State) -> State:
        """Return a layer's state with another state of the mechanism."""
        return replace(state, inner=(inner,)) if isinstance(state, ConvolutionState) else inner

    def write(
        self, state: State, context: Tensor, *, key_mask: Tensor | None = None, packing: Packing | None = None
    ) -> State:
        """Return the state of cross-attention after a context (B, S, dim), to be read by every `extend`."""
        if not self.cross:
            raise ValueError("self-attention takes no context: use extend, or build the layer with cross=True")
        layout = TokenLayout.of(context, causal=False, key_mask=key_mask, packing=packing)
        k, v, gates = self._project_keys(layout.zero_fill(context), None)
        return self.mechanism.write(state, k, v, gates=gates, key_mask=key_mask, packing=packing)

    def extend(
        self,
        x: Tensor,
        state: State,
        *,
        key_mask: Tensor | None = None,
        packing: Packing | None = None,
        _layout: TokenLayout | None = None,
    ) -> tuple[Tensor, State]:
        """Compute attention of any number of new tokens, and write them into the state.

        Cross-attention reads its state and returns it unchanged.

        Args:
            x: (B, T, dim) tokens.
            state: The state before them; with packing, one row for each sequence.
            key_mask: (B, T) bool, True for real tokens.
            packing: Sequences concatenated in x.

        Returns:
            (B, T, out_features), and the state after these tokens.
        """
        if _layout is None:
            start = None if self.cross else state.end
            _layout = TokenLayout.of(x, causal=True, key_mask=key_mask, packing=packing, start=start)
            if isinstance(state, ConvolutionState) and key_mask is not None and x.shape[1] > 0:
                return self._extend_padded(x, state, PaddedSpan.of(key_mask))
        key_mask, packing = _layout.key_mask, _layout.packing
        x = _layout.zero_fill(x)
        if self.cross:
            return self.project_output(x, self.mechanism.read(state, self.project_queries(x, _layout))), state
        recent, inner = self._check_recent(state), self.mechanism_state(state)
        if _layout.shard is not None:
            queries, k, v, gates, recent = self._project_lazily(x, x, _layout, recent)
            out, inner = _layout.shard.extend(self.mechanism, inner, queries, k, v, gates, key_mask=key_mask)
            return self.project_output(x, out), self._with_recent(inner, recent)
        linear = self._linear(x)
        q, k, v, gates, recent = self._project(linear, x, _layout, recent)
        if x.shape[1] == 1 and key_mask is None and packing is None:
            out, inner = self.mechanism.step(inner, q, k, v, gates=gates)
        else:
            out, inner = self.mechanism.extend(inner, q, k, v, gates=gates, key_mask=key_mask, packing=packing)
        return self._project_output(linear, out), self._with_recent(inner, recent)

    def _extend_padded(self, x: Tensor, state: State, span: PaddedSpan) -> tuple[Tensor, State]:
        """Extend with each row's tokens moved to slot 0, where a short convolution sees those of the state before."""
        (x,) = span.roll(x)
        layout = TokenLayout.of(x, causal=True, key_mask=span.filled, start=state.end)
        out, state = self.extend(x, state, _layout=layout)
        return span.unroll(out), state

    def _check_recent(self, state: State) -> Tensor | None:
        """Return the tokens that a short convolution saw last; raise ValueError if the state is of another layer."""
        recent = state.recent if isinstance(state, ConvolutionState) else None
        held = None if recent is None else tuple(recent.shape[1:])
        needed = None if self.conv is None else (self.conv.size - 1, self.conv.weight.shape[1])
        if held != needed:
            raise ValueError(
                f"the state holds {held} (tokens, channels) for a short convolution, the layer needs {needed}: use "
                "states from its own new_state()"
            )
        return recent

    def _with_recent(self, inner: State, recent: Tensor | None) -> State:
        """Return the layer's state, given that of the mechanism and the tokens that a short convolution sees next."""
        return inner if recent is None else ConvolutionState(inner.length, recent, (inner,), start=inner.start)

    def decode_step(
        self,
        x: Tensor,
        state: State,
        rotary: RotaryCache,
        *,
        norm: nn.Module | None = None,
        add: Tensor | None = None,
        shift: TokenShift | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Extend by one token x (B, 1, dim), in eval mode; see `Mechanism.decode_step`.

        Args:
            x: The token.
            state: A state from `Mechanism.decode_state`.
            rotary: cos and sin for each kind of rotary embedding.
            norm: Applied to x first.
            add: A residual added to the output.
            shift: Token shift of what is normalized.
            tokens: (B, 1), for value embeddings.
        """
        mechanism, own = self.mechanism, (self.to_mechanism_gates, self.to_out_gate, self.to_gates)
        layers = [self.to_q, *([] if self.cross else [self.to_kv]), *(x for x in own if x is not None)]
        found = list(fused_linear(x, *layers, norm=norm, shift=shift))
        q, kv = found.pop(0), None if self.cross else found.pop(0)
        gates, out_gates, head_gates = (None if x is None else found.pop(0) for x in own)
        if kv is None:
            out = mechanism._read(state, self._split_queries(q))
        else:
            q, k, v = self._decode_heads(q, kv, state)
            v = v if self.value_embedding is None else self._embed_values(v, tokens)
            angles = [rotary[r.kind].paired(r.interleaved) if isinstance(r, Rotary) else None for r in self.rotary]
            one = angles if len(angles) > 1 else angles[0] if angles else None
            held = self.mechanism_state(state)
            gates = None if gates is None else gates.unflatten(2, (mechanism.num_kv_heads, -1))
            out, inner = mechanism.decode_step(held, q, k, v, gates=gates, rotary=one)
            state = state if inner is held else self.with_mechanism_state(state, inner)
        if self.out_norm is not None or out_gates is not None or head_gates is not None:
            fused = gate_heads(out, self.out_norm, out_gates, self.out_gate_name, head_gates)
            out = self._apply_gates(out, out_gates, head_gates) if fused is None else fused.view(out.shape)
        out = out.flatten(2)
        out = out if self.to_mid is None else fused_linear(out, self.to_mid)[0]
        return fused_linear(out, self.to_out, residual=add)[0], state

    def decode_function(self, state: State, prepare: Callable[[Tensor], Tensor]) -> ResidualFunction | None:
        """Return add + f(prepare(x)) of one token x and a residual (1, dim); see `Mechanism.decode_function`."""
        mechanism, held = self.mechanism, self.mechanism_state(state)
        widths = self.num_heads * mechanism.head_dim, self.num_kv_heads * mechanism.head_dim
        repeated = (self.num_heads, self.num_kv_heads) != (mechanism.num_heads, mechanism.num_kv_heads)
        interleaved = any(isinstance(r, Rotary) and r.interleaved for r in self.rotary)
        if self.cross or self.shared_kv or repeated or interleaved or self.to_mid is not None:
            return None
        kinds = [r.kind if isinstance(r, Rotary) else None for r in self.rotary]
        attend = mechanism.decode_function(held, kinds or [None])
        if attend is None:
            return None
        layers = self.to_mechanism_gates, self.to_out_gate, self.to_gates, self.q_norm, self.k_norm, self.out_norm
        to_q, to_kv, to_out = (module_function(layer) for layer in (self.to_q, self.to_kv, self.to_out))
        to_own, to_wide, to_narrow, norm_q, norm_k, norm_out = (x and module_function(x) for x in layers)
        recent = state.recent[0] if isinstance(state, ConvolutionState) else None
        conv, out_gate, embedding, heads = self.conv, self.out_gate, self.value_embedding, mechanism.num_heads
        queries, keys = (1, heads, mechanism.head_dim), (1, mechanism.num_kv_heads, -1)
        sizes = [*widths, mechanism.num_kv_heads * mechanism.value_dim]

        def step(x: Tensor, add: Tensor, token: CurrentToken) -> Tensor:
            y = prepare(x)
            if conv is None or recent is None:
                q, (k, v) = to_q(y), to_kv(y).split_with_sizes(sizes[1:], 1)
            else:
                q, k, v = conv.step(torch.cat([to_q(y), to_kv(y)], 1), recent).split_with_sizes(sizes, 1)
            q, k, v = q.view(queries), k.view(keys), v.view(keys)
            q, k = q if norm_q is None else norm_q(q), k if norm_k is None else norm_k(k)
            v = v if embedding is None else v + embedding(token.token).view(v.shape).to(v.dtype)
            out = attend(q, k, v, None if to_own is None else to_own(y).view(keys), token)
            out = out if norm_out is None else norm_out(out)
            out = out if to_wide is None else out * out_gate(to_wide(y)).view(out.shape)
            out = out if to_narrow is None else out * to_narrow(y).sigmoid().unsqueeze(-1)
            return add + to_out(out.view(1, -1))

        return step

    def _decode_heads(self, q: Tensor, kv: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Apply short convolution and norms to the projections of one token, and split them into heads."""
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        if self.conv is None and norms is None:
            return self._split_queries(q), *self._split_heads(kv)
        conv, sizes = self.conv, [q.shape[2], kv.shape[2]]
        recent = state.recent if isinstance(state, ConvolutionState) else None
        mixing = None if conv is None or recent is None else (conv.weight, recent)
        if not self.shared_kv:
            heads = self.num_heads, self.num_kv_heads, self.mechanism.head_dim
            fused = fused_heads(q, kv, heads, mixing, norms)
            if fused is not None:
                q, kv = fused.split(sizes, 2)
                return self._split_queries(q, norm=False), *self._split_heads(kv, norm=False)
        if conv is not None and recent is not None:
            q, kv = conv.step(torch.cat([q, kv], 2), recent).split(sizes, 2)
        return self._split_queries(q), *self._split_heads(kv)

    def set_head_groups(self, apart: bool) -> None:
        """Set whether each group of heads is computed and recomputed in the backward pass apart from the others."""
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
    def rotary_kinds(self) -> list[tuple[int, float]]:
        """The kinds of rotary embedding of its queries and keys, (rotary_dim, base)."""
        return [rotary.kind for rotary in self.rotary if isinstance(rotary, Rotary)]

    @property
    def plain_keys(self) -> bool:
        """Whether keys and values are the product of to_kv and nothing else; see `AttentionLayer`."""
        # A layer put in the place of to_kv is called, not read.
        plain = self.k_norm is None and not self.rotary and self.num_kv_heads == self.mechanism.num_kv_heads
        return plain and type(self.to_kv) is nn.Linear and self.to_kv.bias is None

    @property
    def plain_output(self) -> bool:
        """Whether the output is the product of to_out and nothing else, of projections without hooks."""
        gated = self.to_gates is not None or self.to_out_gate is not None or self.out_norm is not None
        plain = not gated and self.to_mid is None and not (self.training and self.dropout.p)
        return plain and all(_is_plain_linear(layer) for layer in (self.to_q, self.to_kv, self.to_out))

    def project_queries(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Project x (B, T, dim) to queries (B, T, H, D), rotated to the positions of the layout."""
        return self._rotate_queries(self._split_queries(self.to_q(x)), layout)

    def project_output(self, x: Tensor, out: Tensor) -> Tensor:
        """Project the mechanism's output (B, T, H, E) for x (B, T, dim) to (B, T, out_features)."""
        return self._project_output(self._linear(x, joint=False), out)

    def _project_output(self, linear: Callable[[str], Tensor], out: Tensor) -> Tensor:
        names = ("to_out_gate", "to_gates")
        out_gates, head_gates = (None if getattr(self, name) is None else linear(name) for name in names)
        out = self._apply_gates(out, out_gates, head_gates).flatten(2)
        out = out if self.to_mid is None else self.to_mid(out)
        return self.dropout(self.to_out(out))

    def project(
        self, x: Tensor, layout: TokenLayout, recent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Project x (B, T, dim), hidden tokens zero, for self-attention.

        Args:
            x: The tokens.
            layout: The layout of x.
            recent: The tokens that a short convolution saw last.

        Returns:
            q (B, T, H, D), k (B, T, Hkv, D), v (B, T, Hkv, E), gates (B, T, Hkv, G) or None, and the tokens that a
            short convolution sees next, if `recent` was given.
        """
        return self._project(self._linear(x, joint=False), x, layout, recent)

    def _linear(self, x: Tensor, *, joint: bool = True) -> Callable[[str], Tensor]:
        """Return a function from the name of a linear layer to its output for x.

        When compiled for a GPU, `joint` layers without a bias are one matrix product, which reads x once.
        """
        names = [name for name in ("to_q", "to_kv", "to_out_gate") if getattr(self, name) is not None]
        found = self._joint(x, *names) if joint and compiled_for_gpu(x) else None
        if found is None:
            return lambda name: getattr(self, name)(x)
        widths = [getattr(self, name).out_features for name in names]
        outputs = dict(zip(names, found.split(widths, 2), strict=True))
        return lambda name: outputs[name] if name in outputs else getattr(self, name)(x)

    def _joint(self, x: Tensor, *names: str) -> Tensor | None:
        """Return the outputs of linear layers side by side, as one product; None if they are not plain, or biased."""
        kind, layers = type(self.to_q), [getattr(self, name) for name in names]
        if not all(_is_plain_linear(layer, kind) and layer.bias is None for layer in layers):
            return None
        product = float8_linear if kind is Float8Linear and self.training else F.linear
        return product(x, torch.cat([layer.weight for layer in layers]))

    def _project(
        self, linear: Callable[[str], Tensor], x: Tensor, layout: TokenLayout, recent: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        q, kv = linear("to_q"), linear("to_kv")
        if self.conv is None:
            return self._rotate_queries(self._split_queries(q), layout), *self._rotate_keys(kv, x, layout), None
        sizes, joined = (q.shape[2], kv.shape[2]), layout.zero_fill(torch.cat([q, kv], 2))
        if recent is not None and layout.packing is not None:
            mixed, recent = self.conv.extend_packed(joined, layout.packing, recent)
        else:
            mixed = self.conv(joined, layout, recent)
            recent = None if recent is None else latest_tokens(recent, joined, layout)
        mixed = mixed.to(joined.dtype)  # Its weights are not cast by autocast.
        q, kv = mixed.split(sizes, 2)
        k, v, gates = self._rotate_keys(kv, x, layout)
        return self._rotate_queries(self._split_queries(q), layout), k, v, gates, recent

    def _project_lazily(
        self, x: Tensor, source: Tensor, layout: TokenLayout, recent: Tensor | None = None
    ) -> tuple[Callable[[], Tensor], Tensor, Tensor, Tensor | None, Tensor | None]:
        """Project as `project` does, but queries only when the function returned in their place is called."""
        if self.conv is not None:
            q, k, v, gates, recent = self.project(x, layout, recent)
            return lambda: q, k, v, gates, recent
        keys = self._project_keys(source, None if self.cross else layout)
        return lambda: self.project_queries(x, None if self.cross else layout), *keys, None

    def _project_keys(self, x: Tensor, layout: TokenLayout | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Project x (B, S, dim) to k (B, S, Hkv, D), rotated if there is a layout, v (B, S, Hkv, E) and gates."""
        return self._rotate_keys(self.to_kv(x), x, layout)

    def _rotate_keys(self, kv: Tensor, x: Tensor, layout: TokenLayout | None) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v = self._split_heads(kv)
        if self.rotary and layout is not None:
            k = self._rotate(k, layout, self.mechanism.num_kv_heads)
        if self.value_embedding is not None:
            v = self._embed_values(v, None if layout is None else layout.tokens)
        return k, v, None if self.to_mechanism_gates is None else self._project_gates(x)

    def _embed_values(self, v: Tensor, tokens: Tensor | None) -> Tensor:
        """Add the embeddings of tokens (B, T) to v (B, T, Hkv, E)."""
        if tokens is None:
            raise ValueError("value_embedding embeds tokens, and the layer got vectors alone: call a LanguageModel")
        assert self.value_embedding is not None
        return v + self.value_embedding(tokens).view(v.shape).to(v.dtype)

    def _rotate_queries(self, q: Tensor, layout: TokenLayout | None) -> Tensor:
        return self._rotate(q, layout, self.mechanism.num_heads) if self.rotary and layout is not None else q

    def _split_queries(self, q: Tensor, *, norm: bool = True) -> Tensor:
        """Split the output of to_q into heads (B, T, H, D), not yet rotated; norm: they are not normalized yet."""
        q = q.view(*q.shape[:2], self.num_heads, q.shape[2] // self.num_heads)
        q = _norm_heads(self.q_norm, q) if norm and self.q_norm is not None else q
        return self._repeat(q, self.mechanism.num_heads)

    def _repeat(self, x: Tensor, heads: int) -> Tensor:
        """Repeat query or key heads for the value heads that share them."""
        return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)

    def _project_gates(self, x: Tensor) -> Tensor | None:
        """Project x (B, S, dim) to the mechanism's raw gates (B, S, Hkv, G)."""
        if self.to_mechanism_gates is None:
            return None
        return self.to_mechanism_gates(x).unflatten(2, (self.mechanism.num_kv_heads, -1))

    def _split_heads(self, kv: Tensor, *, norm: bool = True) -> tuple[Tensor, Tensor]:
        """Split the output of to_kv into k (B, S, Hkv, D), not yet rotated, and v (B, S, Hkv, E); norm: as above."""
        mechanism = self.mechanism
        heads, width = mechanism.num_kv_heads, self.num_kv_heads * mechanism.head_dim
        if self.shared_kv:
            k = v = kv.unflatten(2, (heads, -1))
        else:
            k, v = kv.split_with_sizes([width, kv.shape[2] - width], 2)
            k, v = k.unflatten(2, (self.num_kv_heads, -1)), v.unflatten(2, (heads, -1))
        k = _norm_heads(self.k_norm, k) if norm and self.k_norm is not None else k
        return self._repeat(k, heads), v

    def _rotate(self, x: Tensor, layout: TokenLayout, heads: int) -> Tensor:
        if len(self.rotary) == 1:
            only = self.rotary[0]
            assert isinstance(only, Rotary)
            return only.at(x, layout)
        sizes = self.mechanism.sizes if heads == self.mechanism.num_heads else self.mechanism.kv_sizes
        parts = zip(self.rotary, x.split(sizes, 2), strict=True)
        return torch.cat([rotary.at(part, layout) if isinstance(rotary, Rotary) else part for rotary, part in parts], 2)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, **layout: Any) -> Tensor:
        if self.head_groups == 1 or torch.compiler.is_compiling():  # A compiled graph recomputes all heads at once.
            return self.mechanism(q, k, v, gates=gates, causal=self.causal, **layout)
        outs = []
        kv_size = self.mechanism.num_kv_heads // self.head_groups
        size = self.mechanism.num_heads // self.head_groups
        for g in range(self.head_groups):
            part = copy.copy(self.mechanism)
            part.num_heads, part.num_kv_heads = size, kv_size
            kv = slice(g * kv_size, (g + 1) * kv_size)
            heads = q[:, :, g * size : (g + 1) * size], k[:, :, kv], v[:, :, kv]
            own = None if gates is None else gates[:, :, kv]
            outs.append(recompute(part, *heads, gates=own, causal=self.causal, **layout))
        return torch.cat(outs, 2)

    def _apply_gates(self, out: Tensor, out_gates: Tensor | None, head_gates: Tensor | None) -> Tensor:
        """Normalize and gate the mechanism's output (B, T, H, E)."""
        if self.out_norm is not None:
            fused = rms_norm_heads(out, self.out_norm, out_gates, self.out_gate_name)
            out, out_gates = (self.out_norm(out), out_gates) if fused is None else (fused, None)
        out = out if out_gates is None else out * self.out_gate(out_gates).view(out.shape)
        return out if head_gates is None else out * head_gates.sigmoid()[..., None]


def _norm_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm to the heads of x (B, T, H, D)."""
    fused = rms_norm_heads(x, norm)
    return norm(x) if fused is None else fused


def compiled_for_gpu(x: Tensor) -> bool:
    """Whether the call is compiled for a GPU."""
    return x.is_cuda and torch.compiler.is_compiling() and not is_exporting()


def _is_plain_linear(layer: nn.Module, kind: type = nn.Linear) -> bool:
    """Whether a linear layer is of this kind and has no hooks, so that its weight can be used in its place."""
    return kind in (nn.Linear, Float8Linear) and is_plain(layer, kind)


def is_plain(layer: nn.Module, kind: type) -> bool:
    """Whether a layer with a weight is of this class and has no hooks."""
    return type(layer) is kind and type(layer.weight) is nn.Parameter and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on a module, which a call of what is inside it would miss."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def head_shape(dim: int, config: AttentionConfig) -> tuple[int, int, int]:
    """Return num_heads, head_dim and num_kv_heads of attention with input width `dim`."""
    if config.head_dim is None and dim % config.num_heads:
        raise ValueError(f"dim ({dim}) must be a multiple of num_heads ({config.num_heads}), or head_dim must be given")
    head_dim = dim // config.num_heads if config.head_dim is None else config.head_dim
    return config.num_heads, head_dim, config.num_heads if config.num_kv_heads is None else config.num_kv_heads


def mechanism_from(spec: Any, num_heads: int, head_dim: int, num_kv_heads: int) -> Mechanism:
    """Build the mechanism that a name or {"mechanism": name, **options} describes."""
    if isinstance(spec, str):
        return build_mechanism(spec, num_heads, head_dim, num_kv_heads=num_kv_heads)
    if not isinstance(spec, Mapping) or "mechanism" not in spec:
        raise ValueError(f'a mechanism is a name or {{"mechanism": name, **options}}, got {spec!r}')
    options = {option: value for option, value in spec.items() if option != "mechanism"}
    return build_mechanism(spec["mechanism"], num_heads, head_dim, num_kv_heads=num_kv_heads, **options)


def _rotary(config: AttentionConfig, mechanism: Mechanism) -> list[nn.Module]:
    names = [config.rotary] if isinstance(config.rotary, str) else list(config.rotary)
    if isinstance(config.rotary, Mapping):
        parts = getattr(mechanism, "parts", [mechanism])
        by_class = {find_mechanism(name): rotary for name, rotary in config.rotary.items()}
        names = [by_class.get(type(part), "none") for part in parts]
    if set(names) == {"none"}:
        return []
    if len(names) > 1 and len(names) != len(getattr(mechanism, "sizes", ())):
        raise ValueError(f"rotary names {len(names)} parts, {type(mechanism).__name__} does not have as many")
    if len(set(names)) > 1 and mechanism.num_kv_heads == 1:
        raise ValueError(
            f"the parts share one key/value head, which is rotated in one way, got rotary {names}: give all parts the "
            "same, or more key/value heads"
        )
    if len(set(names)) == 1:
        names = names[:1]
    rotary_dim = mechanism.head_dim if config.rotary_dim is None else config.rotary_dim
    if rotary_dim > mechanism.head_dim:
        raise ValueError(f"rotary_dim ({rotary_dim}) must be at most head_dim ({mechanism.head_dim})")
    return [
        nn.Identity() if name == "none" else Rotary(rotary_dim, config.rotary_base, interleaved=name == "interleaved")
        for name in names
    ]


class FeedForward(nn.Module):
    """activation(x W₁) W₂, or (activation(a) · b) W₂ with (a, b) = x W₁ if gated.

    Args:
        dim: Width of the input.
        config: Width inside, activation, dropout.
        out_features: Width of the output, dim unless given.
        out_dropout: Dropout of the output.
    """

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
            return self._chunk(x)
        return torch.cat([self._chunk(piece) for piece in x.chunk(self.chunks, 1)], 1)

    def decode_step(
        self, x: Tensor, *, norm: nn.Module | None = None, add: Tensor | None = None, shift: TokenShift | None = None
    ) -> Tensor:
        """Compute one token (B, 1, dim) of a decode loop, in eval mode; the arguments of `Attention.decode_step`."""
        fused = not self.gated and self.activation_name in FUSED_ACTIVATIONS
        activation = self.activation_name if fused else "identity"
        (hidden,) = fused_linear(x, self.to_hidden, norm=norm, activation=activation, shift=shift)
        return fused_linear(hidden if fused else self._activate(hidden), self.to_out, residual=add)[0]

    def decode_function(self, prepare: Callable[[Tensor], Tensor]) -> ResidualFunction:
        """Return add + f(prepare(x)) of one token x and a residual (1, dim); see `Mechanism.decode_function`."""
        to_hidden, to_out = module_function(self.to_hidden), module_function(self.to_out)
        activate = self._activate if self.gated else self.activation

        def step(x: Tensor, add: Tensor, token: CurrentToken) -> Tensor:
            return add + to_out(activate(to_hidden(prepare(x))))

        return step

    def _chunk(self, x: Tensor) -> Tensor:
        hidden = self._activate(self.to_hidden(x))
        return self.out_dropout(self.to_out(self.dropout(hidden)))

    def _activate(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(hidden)
        hidden, gate = hidden.chunk(2, -1)
        return self.activation(hidden) * gate


class ProductKeyMemory(nn.Module):
    """A memory of num_keys² values, addressed by the best pairs of half-keys (Lample et al., 2019)."""

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
        rows = (index[:, :, 0, :, :, None] * self.num_keys + index[:, :, 1, :, None]).flatten(-2)
        scores, chosen = pairs.topk(self.best, -1)
        rows = rows.gather(-1, chosen).flatten(-2)  # (B, T, H · best), of the values
        weights = scores.softmax(-1).flatten(-2)
        return F.embedding_bag(
            rows.flatten(0, 1),
            self.values.weight,
            per_sample_weights=weights.flatten(0, 1).to(self.values.weight.dtype),
            mode="sum",
        ).view(x.shape)


def shift_tokens(x: Tensor, offsets: Sequence[int], layout: TokenLayout, recent: Tensor | None = None) -> Tensor:
    """Replace equal parts of the features by those of earlier tokens (negative offsets: later); zeros if there is none.

    Args:
        x: (B, T, dim), hidden tokens zero.
        offsets: One for each part, in tokens.
        layout: The layout of x.
        recent: (B, max(offsets), dim), the tokens before these.
    """
    size, T = x.shape[2] // len(offsets), x.shape[1]
    parts = list(x.split(size, 2))
    history, wide = 0 if recent is None else recent.shape[1], x
    if layout.shard is not None:
        history = max(0, *offsets)
        wide, recent = layout.shard.halo(x, history, max(0, -min(offsets)), layout, recent), None
    # Before and after a single sequence there are zeros; what is beside packed or hidden tokens must be hidden.
    alone = layout.key_mask is None and layout.packing is None and layout.shard is None
    for i, offset in enumerate(offsets):
        if offset == 0:
            continue
        own = slice(i * size, (i + 1) * size)
        piece = wide[..., own] if recent is None else torch.cat([recent[..., own], wide[..., own]], 1)
        begin = history - offset
        if begin >= 0 and begin + T <= piece.shape[1]:
            moved = piece[:, begin : begin + T]
        elif abs(offset) <= piece.shape[1]:
            moved = F.pad(piece, (0, 0, offset, -offset))[:, history : history + T]
        else:
            moved = torch.zeros_like(piece)[:, history : history + T]
        parts[i] = moved if alone else moved.masked_fill(~layout.has_neighbor(offset)[..., None], 0)
    return torch.cat(parts, 2)


def shift_token(x: Tensor, offsets: tuple[int, ...], recent: Tensor) -> Tensor:
    """Shift one token x (B, 1, dim) as `shift_tokens` does, and append it to `recent` (B, s, dim) in place."""
    size = x.shape[2] // len(offsets)
    joined = torch.cat([recent, x], 1)
    parts = list(x.split(size, 2))
    for i, offset in enumerate(offsets):
        # `recent` is zero before the first token.
        there = recent.shape[1] - offset
        parts[i] = joined[:, there : there + 1, i * size : (i + 1) * size] if offset else parts[i]
    recent.copy_(joined[:, 1:])
    return torch.cat(parts, 2)


def shift_function(offsets: tuple[int, ...], recent: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return `shift_token` of one token x (1, dim) on a CPU, or None unless `recent` (1, s, dim) is the last one."""
    if recent.shape[:2] != (1, 1) or not set(offsets) <= {0, 1}:
        return None
    last, cat, size = recent[0], torch.cat, recent.shape[2] // len(offsets)
    before = {i: last.narrow(1, i * size, size) for i, offset in enumerate(offsets) if offset}

    def shift(x: Tensor) -> Tensor:
        parts = list(x.split(size, 1))
        for i, part in before.items():
            parts[i] = part
        shifted = cat(parts, 1)
        last.copy_(x)
        return shifted

    return shift


def merge_latest(earlier: Tensor, later: Tensor, new: Tensor) -> Tensor:
    """Return the last s tokens of two pieces, given those of each (B, s, dim) and the lengths (B,) of the later one."""
    s = earlier.shape[1]
    slot = torch.arange(s, device=earlier.device)
    new = new.clamp(max=s)[:, None]
    mine = torch.take_along_dim(earlier, (slot + new).clamp(max=s - 1)[..., None], 1)
    return torch.where((slot >= s - new)[..., None], later, mine)


def latest_tokens(recent: Tensor, x: Tensor, layout: TokenLayout) -> Tensor:
    """Return the last s real tokens of recent (B, s, dim) followed by x (B, T, dim), right-padded if masked."""
    if layout.shard is not None:
        return layout.shard.latest(recent, x, layout)
    s, T = recent.shape[1], x.shape[1]
    joined = torch.cat([recent, x], 1)
    if layout.key_mask is None:
        return joined[:, T:]
    index = layout.key_mask.sum(1, keepdim=True) + torch.arange(s, device=x.device)
    return torch.take_along_dim(joined, index[..., None], 1)
