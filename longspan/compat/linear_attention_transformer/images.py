"""ImageLinearAttention of linear-attention-transformer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from longspan.compat.state_dict import CompatModule, KeyMapping, rename_layer
from longspan.models.vision import ImageAttention, efficient_attention

__all__ = ["ImageLinearAttention"]


class ImageLinearAttention(CompatModule):
    """Linear attention between all pixels of an image, (B, chan, H, W) -> (B, chan_out, H, W).

    Keys of a context are not scaled, as in the original.

    Args:
        norm_queries: Apply a softmax to the features of queries.
    """

    model: ImageAttention

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
        self.model = ImageAttention(
            chan,
            efficient_attention(heads, key_dim, value_dim, raw_queries=not norm_queries),
            out_channels=chan_out,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            context_scale=key_dim**0.25,
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend to x (B, chan, H, W) and, if given, to a context (B, chan, …)."""
        return self.model(x, None if context is None else context.flatten(2).mT)

    def key_mappings(self) -> Iterable[KeyMapping]:
        for name in ("to_q", "to_k", "to_v", "to_out"):
            yield from rename_layer(name, name)
