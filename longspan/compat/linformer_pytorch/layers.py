"""Layers of linformer-pytorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from longspan.compat.linformer_pytorch import keys
from longspan.compat.linformer_pytorch.options import (
    ACTIVATIONS,
    CHECKPOINT_LEVELS,
    METHODS,
    POSITION_BASE,
    SHARING,
    draw_fixed_tables,
    linformer_options,
)
from longspan.compat.state_dict import CompatModule, KeyMapping
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.models.config import AttentionConfig, FeedForwardConfig
from longspan.models.layers import Attention
from longspan.models.layers import FeedForward as _FeedForward
from longspan.models.positions import SinusoidalPositions
from longspan.protocol import Mechanism
from longspan.utils import choose


class SequenceProjection(CompatModule):
    """A projection E or F, by a matrix or a convolution, of the sequence dimension: (B, d, n) -> (B, d, k)."""

    model: Projection

    def __init__(self, model: Projection) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, d, n) to (B, d, k)."""
        compressed = self.model.compress(x.mT[:, :, None]).to(x.dtype)  # (B, 1, k, d)
        return (compressed if self.model.bias is None else compressed + self.model.bias)[:, 0].mT

    def key_mappings(self) -> Iterable[KeyMapping]:
        return keys.projection_keys([keys.ProjectionUse([""], "", self.model)])


def get_EF(  # noqa: N802
    input_size: int, dim: int, method: str = "learnable", head_dim: int | None = None, bias: bool = True
) -> SequenceProjection | Tensor:
    """Return a projection from input_size to dim tokens, which layers can share; a tensor for "no_params"."""
    choose("method", method, METHODS)
    if method == "no_params":
        return torch.randn(input_size, dim) / dim
    if method == "convolution":
        if head_dim is None:
            raise ValueError('method="convolution" needs head_dim, the width of its input')
        convolution = Projection(dim, input_size, kind="convolution", dim=head_dim, whole_stretches=True, bias=True)
        return SequenceProjection(convolution)
    return SequenceProjection(Projection(dim, input_size, bias=bias))


def gen_causal_mask(input_size: int, dim_k: int, full_attention: bool = False) -> Tensor:
    """Return the mask that makes a layer causal: (input_size, dim_k), or square for full attention."""
    return torch.ones(input_size, input_size if full_attention else dim_k, dtype=torch.bool).tril()


class MHAttention(CompatModule):
    """Multi-head Linformer or full attention, (B, n, channels) -> (B, n, channels).

    Args:
        E_proj: The projection of keys from `get_EF`, for parameter_sharing="layerwise".
        F_proj: The projection of values from `get_EF`, for parameter_sharing="layerwise".
        causal_mask: None, or the result of `gen_causal_mask` for causal attention.
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
        choose("checkpoint_level", checkpoint_level, CHECKPOINT_LEVELS)
        self.input_size, self.dim_k, self.channels, self.nhead = input_size, dim_k, channels, nhead
        self.causal_mask, self.decoder_mode = causal_mask, decoder_mode
        self.last_call: tuple[Tensor, dict[str, Any]] | None = None
        linformer: LinformerAttention | None
        if parameter_sharing == "layerwise":
            linformer = None if full_attention and E_proj is None else _linformer(nhead, dim, E_proj, F_proj, dropout)
        else:
            choose("method", method, METHODS)
            options = linformer_options(dim_k, input_size, method, parameter_sharing)
            linformer = LinformerAttention(nhead, dim, dropout=dropout, **options)
            if method == "no_params":
                draw_fixed_tables([linformer])
        mechanism, self.unused = _select_mechanism(nhead, dim, dropout, linformer, full_attention)
        self.model = Attention(
            channels,
            AttentionConfig(num_heads=nhead, head_dim=dim, dropout=dropout),
            mid_features=w_o_intermediate_dim,
            mechanism=mechanism,
            causal=_is_causal(causal_mask, dim_k, full_attention),
            cross=decoder_mode,
        )
        self.model.set_head_groups(checkpoint_level == "C2" and not dropout and mechanism.heads_alike)

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Attend to tensor (B, n, channels), or with decoder_mode to embeddings (B, m, channels).

        Masks are True for tokens to attend to. visualize: Save the arguments for `Visualizer`.
        """
        if self.decoder_mode != (embeddings is not None) or (embeddings is None and embeddings_mask is not None):
            need = "needs embeddings: pass embeddings=" if self.decoder_mode else "takes no embeddings"
            raise ValueError(f"this layer {need} (decoder_mode={self.decoder_mode})")
        if visualize:
            masks = {"input_mask": input_mask, "embeddings_mask": embeddings_mask}
            self.last_call = tensor.detach(), {"embeddings": embeddings, **masks}
        return self.model(tensor, key_mask=input_mask, context=embeddings, context_mask=embeddings_mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        yield from keys.attention_keys(self.model)
        heads = [f"heads.{h}." for h in range(self.nhead)]
        yield from _mechanism_keys(self.model.mechanism, self.unused, heads, "mechanism.")


class LinearAttentionHead(CompatModule):
    """One attention head without projections of Q, K and V: (B, n, dim) -> (B, n, dim); see `MHAttention`."""

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
        self.model, self.unused = _select_mechanism(1, dim, dropout, linformer, full_attention)
        self.dim, self.full_attention, self.causal_mask = dim, full_attention, causal_mask
        rank = 0 if linformer is None else linformer.rank
        self.causal = _is_causal(causal_mask, rank, full_attention)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, *, input_mask: Tensor | None = None) -> Tensor:
        """Attend. input_mask: (B, n), True for keys to attend to."""
        q, k, v = (x[:, :, None] for x in (Q, K, V))
        return self.model(q, k, v, causal=self.causal, key_mask=input_mask)[:, :, 0]

    def key_mappings(self) -> Iterable[KeyMapping]:
        return _mechanism_keys(self.model, self.unused, [""], "")


class FeedForward(CompatModule):
    """Compute activation(x W₁) W₂ with dropout after both: (B, n, input_channels) -> (B, n, output_channels)."""

    model: _FeedForward

    def __init__(
        self, input_channels: int, output_channels: int, ff_dim: int, dropout: float, activation: str | None = "gelu"
    ) -> None:
        super().__init__()
        name: Any = "identity" if activation is None else choose("activation", activation, ACTIVATIONS)
        config = FeedForwardConfig(hidden=ff_dim, dropout=dropout, activation=name)
        self.model = _FeedForward(input_channels, config, out_features=output_channels, out_dropout=dropout)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.model(tensor)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return keys.feed_forward_keys()


class PositionalEmbedding(CompatModule):
    """Sinusoidal positions (1, n, channels), sines first, for a tensor (B, n, …)."""

    model: SinusoidalPositions

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.model = SinusoidalPositions(channels, POSITION_BASE)

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the embeddings of the positions of tensor."""
        return self.model(torch.arange(tensor.shape[1], device=tensor.device)[None])

    def key_mappings(self) -> Iterable[KeyMapping]:
        return [keys.frequency_key("inv_freq", self.model.dim)]


def _select_mechanism(
    num_heads: int, dim: int, dropout: float, linformer: LinformerAttention | None, full_attention: bool
) -> tuple[Mechanism, LinformerAttention | None]:
    """Return the mechanism, and the Linformer that full attention does not use but the original saves."""
    if full_attention:
        return SoftmaxAttention(num_heads, dim, dropout=dropout), linformer
    assert linformer is not None
    return linformer, None


def _mechanism_keys(mechanism: Mechanism, unused: Any, heads: list[str], new: str) -> Iterable[KeyMapping]:
    owner, prefix = (mechanism, new) if unused is None else (unused, "unused.")
    return keys.projection_keys(keys.projection_uses(owner, heads, prefix))


def _linformer(
    nhead: int,
    dim: int,
    E_proj: SequenceProjection | Tensor | None,
    F_proj: SequenceProjection | Tensor | None,
    dropout: float,
) -> LinformerAttention:
    """Return a mechanism that shares two projections with their owner."""
    E = _as_projection("E_proj", E_proj)
    F = E if F_proj is E_proj else _as_projection("F_proj", F_proj)
    if E.rank != F.rank:
        raise ValueError(f"E_proj and F_proj must have the same output length, got {E.rank} and {F.rank}")
    mechanism = LinformerAttention(nhead, dim, projection=E, dropout=dropout)
    mechanism.values = F
    return mechanism


def _as_projection(name: str, given: Any) -> Projection:
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
        "causal_mask must be None or gen_causal_mask(input_size, dim_k, full_attention), a triangular mask, got "
        f"another mask of shape {tuple(mask.shape)}: pass a mask of tokens as input_mask"
    )
