"""Attention over images and other feature maps (B, C, H, W), at a cost linear in the number of pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.mechanisms.feature_maps import softmax_over_keys
from longspan.mechanisms.linear import LinearAttention
from longspan.protocol import FeatureMap, Mechanism


class ImageAttention(nn.Module):
    """Convolutions around a mechanism: (B, channels, H, W) -> (B, out_channels, H″, W″).

    Queries, keys and values are convolutions of the feature map with kernel_size, stride and padding: a stride shrinks
    all three to H′ = ⌊(H + 2·padding − kernel_size) / stride⌋ + 1, W′ likewise, and attention is over H′·W′ pixels. The
    output convolution has the same kernel and padding and no stride: H″ = H′ + 2·padding − kernel_size + 1. With
    kernel_size = 2·padding + 1 only the stride changes the size.

    A mechanism with random features is redrawn by its `count_forward` once per training step, which the caller calls.

    Args:
        channels: Of the input.
        mechanism: Its numbers of heads and their dims are the layer's; it must support cross-attention. None is
            `efficient_attention()`.
        out_channels: Of the output; channels unless given.
        kernel_size: Of all convolutions.
        stride: Of the convolutions of queries, keys and values.
        padding: Of all convolutions.
        context_dim: Width of a context, with projections of its own. None: a context has the input's channels and goes
            through the input's convolutions as one line of pixels with zeros around it.
        context_scale: Factor of a context's keys; linear-attention-transformer does not scale them and has head_dim^¼.

    Raises:
        ValueError: If the mechanism takes gates or does not support cross-attention, or a size is not positive.
    """

    def __init__(
        self,
        channels: int,
        mechanism: Mechanism | None = None,
        *,
        out_channels: int | None = None,
        kernel_size: int = 1,
        stride: int = 1,
        padding: int = 0,
        context_dim: int | None = None,
        context_scale: float = 1.0,
    ) -> None:
        super().__init__()
        mechanism = efficient_attention() if mechanism is None else mechanism
        if not isinstance(mechanism, Mechanism):
            raise ValueError(f"mechanism must be a Mechanism, such as build_mechanism makes, got {mechanism!r}")
        if mechanism.num_gates:
            raise ValueError(f"ImageAttention has no projection for the gates of {type(mechanism).__name__}")
        if not mechanism.supports_cross:
            raise ValueError(
                f"{type(mechanism).__name__} has windows along one line and cannot attend over an image; "
                "use linear, performer, linformer or softmax"
            )
        if kernel_size < 1 or stride < 1 or padding < 0:
            raise ValueError(
                f"kernel_size and stride must be positive, padding 0 or more, got {kernel_size}, {stride}, {padding}"
            )
        self.channels, self.mechanism = channels, mechanism
        self.context_dim, self.context_scale = context_dim, context_scale
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        inner_k = mechanism.num_kv_heads * mechanism.head_dim
        inner_v = mechanism.num_kv_heads * mechanism.value_dim
        inner_q, inner_out = mechanism.num_heads * mechanism.head_dim, mechanism.num_heads * mechanism.value_dim
        self.to_q = nn.Conv2d(channels, inner_q, kernel_size, stride, padding)
        self.to_k = nn.Conv2d(channels, inner_k, kernel_size, stride, padding)
        self.to_v = nn.Conv2d(channels, inner_v, kernel_size, stride, padding)
        self.context_to_k = None if context_dim is None else nn.Linear(context_dim, inner_k)
        self.context_to_v = None if context_dim is None else nn.Linear(context_dim, inner_v)
        self.to_out = nn.Conv2d(inner_out, out_channels or channels, kernel_size, padding=padding)

    def forward(self, x: Tensor, context: Tensor | None = None, *, context_mask: Tensor | None = None) -> Tensor:
        """Compute attention of all pixels.

        Args:
            x: (B, channels, H, W).
            context: (B, S, channels or context_dim), more keys and values.
            context_mask: (B, S) bool, True = keep.

        Returns:
            (B, out_channels, H″, W″).
        """
        self._check(x, context, context_mask)
        q = self.to_q(x)
        size, q = q.shape[2:], _flatten_pixels(q, self.mechanism.num_heads)
        k, v = (_flatten_pixels(project(x), self.mechanism.num_kv_heads) for project in (self.to_k, self.to_v))
        key_mask = None
        if context is not None and context.shape[1]:
            if context_mask is not None:
                # Filled, not multiplied: padding may hold NaN.
                context = context.masked_fill(~context_mask[..., None], 0)
                key_mask = torch.cat([context_mask.new_ones(k.shape[:2]), context_mask], 1)
            more_k, more_v = self._context(context)
            k, v = torch.cat([k, more_k], 1), torch.cat([v, more_v], 1)  # (B, H′·W′ + S, Hkv, ·)
        out = self.mechanism(q, k, v, key_mask=key_mask)
        return self.to_out(out.flatten(2).mT.unflatten(2, size))

    def _context(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Project a context (B, S, channels or context_dim) to k (B, S, Hkv, D) and v (B, S, Hkv, E)."""
        heads = self.mechanism.num_kv_heads
        if self.context_to_k is not None and self.context_to_v is not None:
            k, v = self.context_to_k(context), self.context_to_v(context)
        else:
            # A line of pixels, with zeros above and below, meets the middle row of a kernel only.
            middle = (self.kernel_size - 1) // 2
            line = F.pad(context.mT, (middle, self.kernel_size - 1 - middle))
            k, v = (F.conv1d(line, layer.weight[:, :, middle], layer.bias).mT for layer in (self.to_k, self.to_v))
        return (k * self.context_scale).unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))

    def _check(self, x: Tensor, context: Tensor | None, context_mask: Tensor | None) -> None:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"x must be (B, {self.channels}, H, W), got {tuple(x.shape)}")
        sides = list(x.shape[2:])
        for what in ("feature map", "feature map after the stride"):
            if min(sides) + 2 * self.padding < self.kernel_size:
                raise ValueError(
                    f"a {what} of {sides[0]} × {sides[1]} with padding {self.padding} is smaller than the kernel "
                    f"({self.kernel_size}): enlarge the map or the padding"
                )
            sides = [(side + 2 * self.padding - self.kernel_size) // self.stride + 1 for side in sides]
        if context_mask is not None and context is None:
            raise ValueError("context_mask needs a context: pass context=, of shape (B, S, context_dim)")
        if context is None:
            return
        width = self.channels if self.context_dim is None else self.context_dim
        if context.ndim != 3 or context.shape[0] != x.shape[0] or context.shape[2] != width:
            hint = "; set context_dim for another width" if self.context_dim is None else ""
            raise ValueError(f"context must be (B, S, {width}) with B = {len(x)}, got {tuple(context.shape)}{hint}")
        if context_mask is not None and (context_mask.dtype != torch.bool or context_mask.shape != context.shape[:2]):
            raise ValueError(
                f"context_mask must be (B, S) = {tuple(context.shape[:2])} bool, True = keep, "
                f"got {tuple(context_mask.shape)} {context_mask.dtype}"
            )


class ScaledSoftmax(FeatureMap):
    """φ(q) = softmax(q·D^−¼) over features, φ(k) = exp(k·D^−¼).

    Args:
        raw_queries: Whether φ(q) is q·D^−¼ itself; needs normalize="feature".
    """

    unbounded = True

    def __init__(self, *, raw_queries: bool = False) -> None:
        super().__init__()
        self.raw_queries = raw_queries

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def query(self, q: Tensor) -> Tensor:
        q = q * q.shape[-1] ** -0.25
        return q if self.raw_queries else q.softmax(-1)

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        k = k * k.shape[-1] ** -0.25
        largest = k.detach().amax(-1)
        return (k - largest[..., None]).exp(), largest

    def shares(self, k: Tensor, visible: Tensor | None) -> Tensor:
        return softmax_over_keys(k * k.shape[-1] ** -0.25, visible)


def efficient_attention(
    num_heads: int = 8, key_dim: int = 64, value_dim: int | None = None, *, raw_queries: bool = False
) -> LinearAttention:
    """Return Efficient Attention (Shen et al., 2021): φ(q)·softmax(k over pixels)ᵀ v, with `ScaledSoftmax` features.

    Args:
        num_heads: H.
        key_dim: D.
        value_dim: E; key_dim unless given.
        raw_queries: Whether queries are used without the softmax.
    """
    return LinearAttention(
        num_heads,
        key_dim,
        value_dim=value_dim,
        feature_map=ScaledSoftmax(raw_queries=raw_queries),
        normalize="feature",
    )


def _flatten_pixels(x: Tensor, heads: int) -> Tensor:
    """(B, heads · dim, H, W) -> (B, H · W, heads, dim)."""
    return x.flatten(2).mT.unflatten(2, (heads, -1))
