"""Hashed n-gram embeddings: what the last few tokens are, before any layer has read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from longspan.layout import TokenLayout
from longspan.models.layers import shift_tokens
from longspan.ops.common.torch_private import is_exporting
from longspan.ops.decode import fused_embedding

# A polynomial hash: products stay below 2⁶³.
_MULTIPLIER, _MODULUS = 1_000_003, 2**31 - 1


class NgramEmbedding(nn.Module):
    """The sum of the embeddings of the n-grams that end at each token: (B, T) -> (B, T, dim).

    Each length has a table, whose rows are addressed by a hash of the n-gram (Pagnoni et al., 2024); n-grams with the
    same hash share a row. Tokens before the first of a sequence count as a token of their own.

    Args:
        dim: Width of the embeddings.
        sizes: Lengths of the n-grams, at least 2.
        buckets: Rows of each table.
    """

    def __init__(self, dim: int, sizes: Sequence[int], buckets: int) -> None:
        super().__init__()
        self.sizes, self.buckets = tuple(sizes), buckets
        self.tables = nn.ModuleList(nn.Embedding(buckets, dim) for _ in self.sizes)
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=0.02)

    @property
    def reach(self) -> int:
        """The number of tokens before a token that its n-grams contain."""
        return max(self.sizes) - 1

    def forward(self, codes: Tensor, layout: TokenLayout, recent: Tensor | None = None) -> Tensor:
        """Embed the n-grams of a sequence.

        Args:
            codes: (B, T, 1), what `encode` returns for the tokens.
            layout: The layout of the tokens.
            recent: (B, reach, 1), the codes before these.
        """
        if layout.shard is not None:
            wide = layout.shard.halo(codes, self.reach, 0, layout, recent)
            recent, codes = wide.split([self.reach, codes.shape[1]], 1)
            layout = replace(layout, shard=None)
        window = [codes, *(shift_tokens(codes, (offset,), layout, recent) for offset in range(1, self.reach + 1))]
        return self._look_up([x[..., 0] for x in window])

    def step(self, tokens: Tensor, recent: Tensor, embedding: nn.Module) -> Tensor:
        """Embed one token (B,) and its n-grams as (B, dim), and append its code to `recent` in place."""
        lengths = sorted(self.sizes)
        tables = [self.tables[self.sizes.index(length)] for length in lengths]
        fused = fused_embedding(tokens, recent, embedding, tables, lengths, (_MULTIPLIER, _MODULUS))
        if fused is not None:
            return fused
        joined = torch.cat([recent, tokens[:, None, None] + 1], 1)
        recent.copy_(joined[:, 1:])
        return embedding(tokens) + self._look_up(list(joined[:, :, 0].flip(1).unbind(1)))

    def encode(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """Return the codes (B, T, 1) of tokens (B, T): 0 for a hidden token."""
        return layout.zero_fill(tokens.long() + 1)[..., None]

    def _look_up(self, window: list[Tensor]) -> Tensor:
        """Return the sum of the embeddings, given the codes of each token, of the one before it, and so on."""
        compiled = torch.compiler.is_compiling() and not is_exporting()
        # An opaque op: inductor would otherwise hash again for every element of the embeddings, in both passes.
        sizes = sorted(self.sizes)
        rows = (_hash_op if compiled else _hash)(window, sizes, self.buckets)
        parts = [self.tables[self.sizes.index(size)](row) for size, row in zip(sizes, rows, strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def _hash(window: Sequence[Tensor], sizes: Sequence[int], buckets: int) -> list[Tensor]:
    """Return the rows of the n-grams of each size, given the codes of each token, of the one before it, and so on."""
    hashed, rows = window[0], {}
    for size, code in enumerate(window[1:], 2):
        hashed = (hashed * _MULTIPLIER + code) % _MODULUS
        rows[size] = hashed % buckets
    return [rows[size] for size in sizes]


@torch.library.custom_op("longspan::hash_ngrams", mutates_args=())
def _hash_op(window: Sequence[Tensor], sizes: Sequence[int], buckets: int) -> list[Tensor]:
    return _hash(window, sizes, buckets)


@_hash_op.register_fake
def _(window: Sequence[Tensor], sizes: Sequence[int], buckets: int) -> list[Tensor]:
    return [torch.empty_like(window[0]) for _ in sizes]
