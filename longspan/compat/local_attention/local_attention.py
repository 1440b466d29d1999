"""Softmax over windows of any queries, keys and values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.local_attention.rotary import SinusoidalEmbeddings
from longspan.layout import zero_fill
from longspan.models.positions import Rotary
from longspan.ops.window import Window, table_bias, window_attention, xpos_rotate


class LocalAttention(nn.Module):
    """Each window of window_size tokens sees itself, look_backward windows before it and look_forward after it.

    dim: of each head, for rotary positions; without it, or rel_pos_emb_config = (dim, heads), there are none.
    exact_windowsize: every query sees as far as the first of its window, window_size · look_backward tokens back (and
    so ahead), itself not counted. autopad: nothing here, any length will do.
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
        """q, k (…, n, d), v (…, n, e) -> (…, n, e).

        mask: (b, n), True = keep, each row for as many of the leading dimensions' rows as there are for it.
        attn_bias: (heads, window_size, all it sees), added to the scores. window_size: another one, with xPos.
        """
        if window_size is not None and not self.use_xpos:
            raise ValueError("another window_size needs use_xpos=True: only xPos carries over to it")
        size = self.window_size if window_size is None else window_size
        mask = input_mask if mask is None else mask
        leading, rows = q.shape[:-2], math.prod(q.shape[:-2])
        masks, biases = 1 if mask is None else len(mask), 1 if attn_bias is None else len(attn_bias)
        if rows % masks or rows % biases:
            raise ValueError(f"{rows} rows of queries cannot share {masks} rows of a mask and {biases} heads of a bias")
        if mask is not None and attn_bias is not None and rows // masks % biases:
            # One mask for several heads of the bias is what we can say at once; here each head has its own.
            each = mask.repeat_interleave(rows // masks, 0)
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
            heads = [
                self(q[h::biases], k[h::biases], v[h::biases], each[h::biases], None, attn_bias[h : h + 1], window_size)
                for h in range(biases)
            ]
            return torch.stack(heads, 1).reshape(*leading, *heads[0].shape[1:])
        number = biases if mask is None else rows // masks
        q, k, v = (x.reshape(rows // number, number, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))  # (B, n, H, d)
        if mask is not None:
            if mask.shape != (masks, q.shape[1]):
                raise ValueError(f"mask must be (b, n) with n = {q.shape[1]}, got {tuple(mask.shape)}")
            mask = mask.bool()
            k, v = zero_fill(~mask, k, v)
        if self.shared_qk:
            k = F.normalize(k, dim=-1)
        bias = None
        if attn_bias is not None:
            seen = (self.look_backward + 1 + self.look_forward) * size
            table = attn_bias.expand(-1, size, seen).repeat(number // biases, 1, 1)
            bias = table_bias(table, self.look_backward)
        q, k, xpos = self._turned(q, k, size)
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

    def _turned(self, q: Tensor, k: Tensor, size: int) -> tuple[Tensor, Tensor, float | None]:
        """Queries and keys with their positions, and the scale base of xPos, which is still to come."""
        if self.rel_pos is None:
            return q, k, None
        if self.rel_pos.dim != q.shape[-1]:
            raise ValueError(f"dim is {self.rel_pos.dim}, but q and k have {q.shape[-1]} features")
        # A query has the angle of the last window that it sees: where it looks ahead, trained weights expect that.
        further = self.look_forward * size
        if self.rel_pos.use_xpos:
            assert self.rel_pos.scale_base is not None
            return (
                xpos_rotate(q, torch.tensor([further], device=q.device), self.rel_pos.scale_base),
                k,
                self.rel_pos.scale_base,
            )
        at, rotary = torch.arange(q.shape[1], device=q.device)[None], Rotary(self.rel_pos.dim)
        return rotary(q, at + further), rotary(k, at), None


def windows_ahead(causal: bool, look_forward: int | None) -> int:
    """look_forward, by default 1 unless causal."""
    if causal and look_forward:
        raise ValueError(f"look_forward is {look_forward}, but causal attention cannot look forward")
    return int(not causal) if look_forward is None else look_forward
