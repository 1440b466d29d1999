"""ImageLinearAttention of linear-attention-transformer."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.models.vision import efficient_attention

__all__ = ["ImageLinearAttention"]


class ImageLinearAttention(nn.Module):
    """Linear attention between all pixels of an image, (B, chan, H, W) -> (B, chan_out, H, W).

    Keys of a context are not scaled, as in the original.

    Args:
        norm_queries: Apply a softmax to the features of queries.
    """

    def __init__(
        self,
        chan: int,
        chan_out: int | None = None,
        kernel_size: int = 1,
        padding: int = 0,
        stride: int = 1,
        key_dim: int = 64,
        value_dim: int = 64,
        heads: int = 8,
        norm_queries: bool = True,
    ) -> None:
        super().__init__()
        if min(kernel_size, stride) < 1 or padding < 0:
            sizes = f"got {kernel_size}, {stride}, {padding}"
            raise ValueError(f"kernel_size and stride must be positive and padding at least 0, {sizes}")
        self.chan, self.key_dim, self.value_dim, self.heads = chan, key_dim, value_dim, heads
        self.norm_queries, self.kernel_size, self.padding, self.stride = norm_queries, kernel_size, padding, stride
        # A partial, because a module would be registered.
        self._attend = partial(efficient_attention(heads, key_dim, value_dim, raw_queries=not norm_queries))
        self.to_q = nn.Conv2d(chan, key_dim * heads, kernel_size, stride, padding)
        self.to_k = nn.Conv2d(chan, key_dim * heads, kernel_size, stride, padding)
        self.to_v = nn.Conv2d(chan, value_dim * heads, kernel_size, stride, padding)
        self.to_out = nn.Conv2d(value_dim * heads, chan if chan_out is None else chan_out, kernel_size, padding=padding)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend to x (B, chan, H, W) and, if given, to a context (B, chan, …)."""
        self._check(x, context)
        q = self.to_q(x)
        size = q.shape[2:]
        q, k, v = (self._tokens(pixels) for pixels in (q, self.to_k(x), self.to_v(x)))
        if context is not None:
            line = context.flatten(2)[:, :, None]  # one row of pixels
            more_k, more_v = (self._tokens(self._convolve(layer, line)) for layer in (self.to_k, self.to_v))
            k, v = torch.cat([k, more_k * self.key_dim**0.25], 1), torch.cat([v, more_v], 1)
        return self.to_out(self._attend(q, k, v).flatten(2).mT.unflatten(2, size))

    def _tokens(self, pixels: Tensor) -> Tensor:
        """(B, heads · dim, H, W) -> (B, H · W, heads, dim)."""
        return pixels.flatten(2).mT.unflatten(2, (self.heads, -1))

    def _convolve(self, layer: nn.Module, line: Tensor) -> Tensor:
        """Apply a convolution to a row of pixels (B, chan, 1, S) so that each has an output: (B, ·, 1, S)."""
        if self.stride == 1 and self.kernel_size == 2 * self.padding + 1:
            return layer(line)
        assert isinstance(layer, nn.Conv2d)
        before = (self.kernel_size - 1) // 2
        after = self.kernel_size - 1 - before
        return F.conv2d(F.pad(line, (before, after, before, after)), layer.weight, layer.bias)

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        if x.ndim != 4 or x.shape[1] != self.chan:
            raise ValueError(f"x must be (B, {self.chan}, H, W), got {tuple(x.shape)}")
        sides = list(x.shape[2:])
        for what in ("feature map", "feature map after the stride"):
            if min(sides) + 2 * self.padding < self.kernel_size:
                raise ValueError(
                    f"a {what} of {sides[0]} × {sides[1]} with padding {self.padding} is smaller than the kernel "
                    f"({self.kernel_size}): enlarge the map or the padding"
                )
            sides = [(side + 2 * self.padding - self.kernel_size) // self.stride + 1 for side in sides]
        if context is not None and (context.ndim < 3 or context.shape[:2] != x.shape[:2]):
            raise ValueError(f"context must be ({len(x)}, {self.chan}, …), got {tuple(context.shape)}")
