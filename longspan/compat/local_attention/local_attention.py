"""LocalAttention: softmax attention over windows of given queries, keys and values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.local_attention.options import windows_ahead
from longspan.compat.local_attention.rotary import SinusoidalEmbeddings
from longspan.layout import zero_fill
from longspan.models.positions import Rotary
from longspan.ops.window import Window, table_bias, window_attention, xpos_rotate


class LocalAttention(nn.Module):
    """Each window of window_size tokens attends to itself, look_backward windows before it and look_forward after it.

    Args:
        dim: The width of a head, for rotary positions; without it or rel_pos_emb_config = (dim, heads) there are none.
        exact_windowsize: Every query attends to itself and to window_size · look_backward tokens before it (and
            window_size · look_forward after it), wherever it is in its window.
        autopad: Without effect: any length works.
    """

    def __init__(
        self,
        window_size: int,
        causal: bool = False,
        look_backward: int = 1,
        look_forward: int | None = None,
        dropout: float = 0.0,
        shared_qk: bool = False,
        rel_pos_emb_config: tuple[int, int] | None = None,
        dim: int | None = None,
        autopad: bool = False,
        exact_windowsize: bool = False,
        scale: float | None = None,
        use_rotary_pos_emb: bool = True,
        use_xpos: bool = False,
        xpos_scale_base: float | None = None,
    ) -> None:
        super().__init__()
        self.window_size, self.causal, self.autopad, self.scale = window_size, causal, autopad, scale
        self.look_backward, self.look_forward = look_backward, windows_ahead(causal, look_forward)
        self.exact_windowsize, self.shared_qk, self.use_xpos = exact_windowsize, shared_qk, use_xpos
        self.dropout = nn.Dropout(dropout)
        dim = dim if rel_pos_emb_config is None else rel_pos_emb_config[0]
        self.rel_pos = None
        if use_rotary_pos_emb and dim is not None:
            base = window_size // 2 if xpos_scale_base is None else xpos_scale_base
            self.rel_pos = SinusoidalEmbeddings(dim, use_xpos=use_xpos, scale_base=base)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        input_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        window_size: int | None = None,
    ) -> Tensor:
        """Map q and k (…, n, d) and v (…, n, e) to (…, n, e).

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            mask: (b, n), True for tokens to attend to; b divides the product of the leading dimensions.
            input_mask: An alias of mask.
            attn_bias: (heads, window_size, keys of a window), added to the scores.
            window_size: Another window size for this call, with xPos.
        """
        if window_size is not None and not self.use_xpos:
            raise ValueError("another window_size needs use_xpos=True: only xPos works with windows of any size")
        size = self.window_size if window_size is None else window_size
        mask = input_mask if mask is None else mask
        leading, sequences = q.shape[:-2], math.prod(q.shape[:-2])
        masks, biases = 1 if mask is None else len(mask), 1 if attn_bias is None else len(attn_bias)
        if sequences % masks or sequences % biases:
            raise ValueError(
                f"the number of query sequences ({sequences}) must be a multiple of the rows of the mask ({masks}) and "
                f"the heads of the bias ({biases})"
            )
        if mask is not None and attn_bias is not None and sequences // masks % biases:
            # The heads of one bias have different masks here, so that each head is computed on its own.
            each = mask.repeat_interleave(sequences // masks, 0)
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
            heads = [
                self(q[h::biases], k[h::biases], v[h::biases], each[h::biases], None, attn_bias[h : h + 1], window_size)
                for h in range(biases)
            ]
            return torch.stack(heads, 1).reshape(*leading, *heads[0].shape[1:])
        num_heads = biases if mask is None else sequences // masks
        shape = sequences // num_heads, num_heads
        q, k, v = (x.reshape(*shape, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))  # (B, n, H, d)
        if mask is not None:
            if mask.shape != (masks, q.shape[1]):
                raise ValueError(f"mask must be (b, n) with n = {q.shape[1]}, got {tuple(mask.shape)}")
            mask = mask.bool()
            k, v = zero_fill(~mask, k, v)
        if self.shared_qk:
            k = F.normalize(k, dim=-1)
        bias = None
        if attn_bias is not None:
            keys = (self.look_backward + 1 + self.look_forward) * size
            table = attn_bias.expand(-1, size, keys).repeat(num_heads // biases, 1, 1)
            bias = table_bias(table, self.look_backward)
        q, k, xpos = self._rotate(q, k, size)
        out = window_attention(
            q,
            k,
            v,
            self._window(size),
            key_mask=mask,
            bias=bias,
            xpos=xpos,
            scale=self.scale,
            dropout=self.dropout.p if self.training else 0.0,
        )
        return out.transpose(1, 2).reshape(*leading, out.shape[1], out.shape[3])

    def _window(self, size: int) -> Window:
        back, ahead = self.look_backward, self.look_forward
        if self.exact_windowsize:
            return Window(0, back * size, ahead * size, self.causal, self.shared_qk)
        return Window(size, back, ahead, self.causal, self.shared_qk)

    def _rotate(self, q: Tensor, k: Tensor, size: int) -> tuple[Tensor, Tensor, float | None]:
        """Return rotated queries and keys, and the scale base if xPos is still to be applied."""
        if self.rel_pos is None:
            return q, k, None
        if self.rel_pos.dim != q.shape[-1]:
            raise ValueError(f"dim is {self.rel_pos.dim}, but q and k have {q.shape[-1]} features")
        # The original gives a query the angle of the last window it attends to; checkpoints depend on it.
        offset = self.look_forward * size
        if self.rel_pos.use_xpos:
            base = self.rel_pos.scale_base
            assert base is not None
            return xpos_rotate(q, torch.tensor([offset], device=q.device), base), k, base
        position, rotary = torch.arange(q.shape[1], device=q.device)[None], Rotary(self.rel_pos.dim)
        return rotary(q, position + offset), rotary(k, position), None
