"""What compresses a sequence to R keys and values for Linformer: tables and convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.ops.compressed import compress
from longspan.ops.linear import sum_dtype
from longspan.ops.shift import shift_left, shift_right
from longspan.utils import choose


class Projection(nn.Module):
    """The vectors e_i that compress a sequence; one object may serve keys and values, heads and layers.

    Args:
        rank: R.
        max_length: Number of tokens it covers.
        kind: "learned", a table of (max_length, rank); "random", the same drawn once, not trained but saved;
            "convolution", learned kernels of ⌈max_length / rank⌉ tokens, each of which gives one compressed key from
            its own window.
        num_heads: Number of key/value heads with tables, kernels and biases of their own; None is one for all.
        dim: Width of the input of a convolution.
        whole_stretches: Whether a convolution's kernels take ⌊max_length / rank⌋ tokens, and the tokens after the last
            complete window are dropped.
        periodic: Whether the table repeats after max_length tokens; sums are divided by the number of periods begun.
        bias: Whether a learned constant is added to each compressed key.
    """

    def __init__(
        self,
        rank: int,
        max_length: int,
        *,
        kind: str = "learned",
        num_heads: int | None = None,
        dim: int | None = None,
        whole_stretches: bool = False,
        periodic: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if rank < 1 or max_length < 1:
            raise ValueError(f"rank and max_length must be positive, got {rank} and {max_length}")
        self.kind = choose("projection", kind, ("learned", "random", "convolution"))
        self.rank, self.max_length, self.num_heads, self.periodic = rank, max_length, num_heads, periodic
        self.whole_stretches, self.asked_rank = whole_stretches, rank
        self.stride = 1
        self.is_table = num_heads is None and kind != "convolution"  # one table, whatever it multiplies
        per_head = () if num_heads is None else (num_heads,)
        if whole_stretches and (kind != "convolution" or rank > max_length):
            raise ValueError(
                f"whole_stretches is for a convolution with rank up to max_length ({max_length}), "
                f"got projection {kind!r} and rank {rank}"
            )
        if kind == "convolution":
            if dim is None or periodic:
                raise ValueError("a convolution needs dim, and is not periodic")
            self.stride = max_length // rank if whole_stretches else -(-max_length // rank)
            self.rank = max_length // self.stride if whole_stretches else -(-max_length // self.stride)
            self.kernel = nn.Parameter(torch.randn(*per_head, self.stride, dim, dim) * (self.stride * dim) ** -0.5)
        else:
            heads = 1 if num_heads is None else num_heads
            # Scaled by length, not by rank: compressed keys have the magnitude of keys however long the sequence.
            table = torch.randn(heads, max_length, rank) * max_length**-0.5
            if kind == "learned":
                self.table = nn.Parameter(table)
            else:
                self.register_buffer("table", table)
        width = (self.rank, 1) if dim is None or kind != "convolution" else (1, dim)
        self.bias = nn.Parameter(torch.zeros(*per_head, *width)) if bias else None

    def check_length(self, longest: int) -> None:
        """Raise ValueError if a table that does not repeat covers fewer than `longest` tokens."""
        if longest > self.max_length and not self.periodic:
            raise ValueError(
                f"{longest} tokens are more than this projection's max_length of {self.max_length}; build it with a "
                "larger max_length, or with periodic=True for any length"
            )

    def factors(self, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return e (B or 1, T, Hkv or 1, R) and what it multiplies (B, T, Hkv, dim), for x (B, T, Hkv, dim).

        start: (B,) the position of the first token; None is 0.
        """
        T = x.shape[1]
        if self.kind != "convolution":
            return self.table_from(T, start).to(x.dtype), x
        position = torch.arange(T, device=x.device) + (0 if start is None else start[:, None])
        s = self.stride
        # Positions past the last window (padding, or left over by whole_stretches) belong to none.
        e = F.one_hot((position // s).clamp(max=self.rank), self.rank + 1)[..., :-1].to(x.dtype)
        e = e.reshape(-1, T, 1, self.rank)
        begun = torch.zeros_like(x[:, 0, 0, 0], dtype=torch.int64) if start is None else start % s
        padded = shift_right(x, begun, s - 1 + -(T + s - 1) % s)
        sides = "bnshd,sdc->bnshc" if self.num_heads is None else "bnshd,hsdc->bnshc"
        folded = torch.einsum(sides, padded.unflatten(1, (-1, s)), self.kernel.to(x.dtype))
        return e, shift_left(folded.flatten(1, 2), begun, T)

    def table_from(self, T: int, start: Tensor | None) -> Tensor:
        """Return the table for T tokens from `start`: (B or 1, T, heads, R)."""
        table = self.table.transpose(0, 1)  # (max_length, heads, R)
        if start is not None:
            position = torch.arange(T, device=start.device) + start[:, None]
            return table[position % self.max_length if self.periodic else position.clamp(max=self.max_length - 1)]
        # A slice, not an index, whose gradient would need a sort.
        if self.periodic and self.max_length < T:
            return table.repeat(-(-T // self.max_length), 1, 1)[None, :T]
        covered = not torch.compiler.is_compiling() and len(table) == T
        return (table if covered else table[:T])[None]

    def compress(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """Return Σ e_i x_iᵀ over all tokens, the first at `start`: (B, Hkv, R, dim) in the dtype of the sums."""
        if self.kind == "convolution":
            x = x.to(sum_dtype(x))
        return compress(*self.factors(x, start))

    def constant(self, num_heads: int, dim: int) -> Tensor:
        """Return the bias of the compressed keys that each of num_heads heads reads: (num_heads, R, dim)."""
        assert self.bias is not None
        bias = self.bias.expand(self.num_heads or 1, self.rank, dim)
        return bias.repeat_interleave(num_heads // len(bias), 0)

    def averaged(self, x: Tensor, length: Tensor) -> Tensor:
        """Return x divided by the number of periods of a periodic table that `length` tokens have begun."""
        return x / (-(-length // self.max_length)).clamp(min=1) if self.periodic else x

    def live(self, length: Tensor, start: Tensor | None = None) -> Tensor:
        """Return which compressed keys hold one of `length` (...) tokens, the first at `start` (...): (..., R)."""
        row = torch.arange(self.rank, device=length.device)
        if self.kind != "convolution":
            return length[..., None] > torch.zeros_like(row)
        if start is None:
            return length[..., None] > row * self.stride
        start, end = start[..., None], (start + length)[..., None]
        return (end > row * self.stride) & (start < (row + 1) * self.stride) & (length[..., None] > 0)

    def live_under(self, key_mask: Tensor) -> Tensor:
        """Return which compressed keys hold a token that key_mask (B, S) keeps: (B, R)."""
        if self.kind != "convolution":
            return key_mask.any(1)[:, None].expand(-1, self.rank)
        missing = self.rank * self.stride - key_mask.shape[1]  # negative where tokens are left over
        return F.pad(key_mask, (0, missing)).unflatten(1, (self.rank, self.stride)).any(2)
