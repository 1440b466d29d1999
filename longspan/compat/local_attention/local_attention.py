"""LocalAttention: softmax attention over windows of given queries, keys and values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.compat.faithful import resolve_faithful
from longspan.compat.helpers import default as default
from longspan.compat.helpers import exists as exists
from longspan.compat.helpers import max_neg_value
from longspan.compat.local_attention.options import windows_ahead
from longspan.compat.local_attention.rotary import SinusoidalEmbeddings, apply_rotary_pos_emb
from longspan.layout import zero_fill
from longspan.mechanisms import build_mechanism
from longspan.ops.rotary import rotate
from longspan.ops.window import Window, window_attention, xpos_rotate
from longspan.protocol import Mechanism

TOKEN_SELF_ATTN_VALUE = -5e4  # the original's score of a token for itself with shared_qk


def to(t: Tensor) -> dict[str, Any]:
    """Return the keyword arguments that make a tensor of t's device and dtype."""
    return {"device": t.device, "dtype": t.dtype}


def l2norm(tensor: Tensor) -> Tensor:
    """Divide the last dimension by its length; zeros stay zeros, in float16 too."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return F.normalize(tensor.float() if half else tensor, dim=-1).to(tensor.dtype)


def pad_to_multiple(tensor: Tensor, multiple: int, dim: int = -1, value: float = 0) -> tuple[bool, Tensor]:
    """Pad a negative dimension at its end to a multiple; return whether that was needed, and the tensor."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return False, tensor
    return True, F.pad(tensor, (*(0, 0) * (-1 - dim), 0, missing), value=value)


def look_around(x: Tensor, backward: int = 1, forward: int = 0, pad_value: float = -1, dim: int = 2) -> Tensor:
    """Append to each window of x (b, windows, …) those before and after it, along `dim`.

    Args:
        x: Windows in dimension 1.
        backward: The number of windows before each.
        forward: The number of windows after it.
        pad_value: Fills windows before the first and after the last.
        dim: The dimension in which windows are concatenated, 2 if the one before it is to be padded.
    """
    padded = F.pad(x, (*(0, 0) * (x.ndim - dim), backward, forward), value=pad_value)
    count = padded.shape[1] - backward - forward
    pieces = [padded[:, s : s + count] for s in range(backward + forward + 1)]
    return torch.stack(pieces, dim).flatten(dim, dim + 1)


class LocalAttention(nn.Module):
    """Each window of window_size tokens attends to itself, look_backward windows before it and look_forward after it.

    Args:
        dim: The width of a head, for rotary positions; without it or rel_pos_emb_config = (dim, heads) there are none.
        exact_windowsize: Every query attends to itself and to window_size · look_backward tokens before it (and
            window_size · look_forward after it), wherever it is in its window.
        autopad: Without effect unless faithful: any length works.
        faithful: Compute what the original does: queries that see no key average hidden values, and padding by autopad
            is attended to where there is no mask. See `longspan.compat.faithful`.
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
        *,
        faithful: bool | None = None,
    ) -> None:
        super().__init__()
        self.look_backward, self.look_forward = look_backward, windows_ahead(causal, look_forward)
        if window_size < 1 or self.look_backward < 0 or self.look_forward < 0:
            raise ValueError(
                "window_size must be at least 1, look_backward and look_forward at least 0, "
                f"got {window_size}, {self.look_backward} and {self.look_forward}"
            )
        self.faithful = resolve_faithful(faithful)
        self.scale = scale
        self.window_size, self.causal = window_size, causal
        self.autopad, self.exact_windowsize = autopad, exact_windowsize
        self.dropout = nn.Dropout(dropout)
        self.shared_qk, self.use_xpos = shared_qk, use_xpos
        self.rel_pos = None
        dim = dim if rel_pos_emb_config is None else rel_pos_emb_config[0]
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
        leading, n, sequences = q.shape[:-2], q.shape[-2], math.prod(q.shape[:-2])
        for name, x in (("k", k), ("v", v)):
            if x.shape[-2] != n or math.prod(x.shape[:-2]) not in (1, sequences):
                raise ValueError(
                    f"{name} must have as many sequences and tokens as q, got {name} {tuple(x.shape)} and q "
                    f"{tuple(q.shape)}: each window of queries attends to keys at the same positions"
                )
        if k.shape[-1] != q.shape[-1]:
            raise ValueError(f"q and k must have the same number of features, got {q.shape[-1]} and {k.shape[-1]}")
        if 0 in (n, sequences):
            return v.new_zeros(*leading, n, v.shape[-1])
        masks, biases = 1 if mask is None else len(mask), 1 if attn_bias is None else len(attn_bias)
        if sequences % masks or sequences % biases:
            raise ValueError(
                f"the number of query sequences ({sequences}) must be a multiple of the rows of the mask ({masks}) and "
                f"the heads of the bias ({biases})"
            )
        if mask is not None:
            if mask.shape != (masks, n):
                raise ValueError(f"mask must be (b, n) with n = {n}, got {tuple(mask.shape)}")
            mask = mask.bool()
        k, v = (
            x if math.prod(x.shape[:-2]) == sequences else x.reshape(x.shape[-2:]).expand(*leading, -1, -1)
            for x in (k, v)
        )
        if attn_bias is not None:
            attn_bias = attn_bias.expand(-1, size, (self.look_backward + 1 + self.look_forward) * size)
        if self.faithful or not self._has_own_parts:
            return self._attend_by_windows(q, k, v, mask, attn_bias, size)
        return self._attend(q, k, v, mask, attn_bias, size)

    def mechanism(self, num_heads: int, head_dim: int, bias: Tensor | None = None) -> Mechanism:
        """Return the longspan mechanism of this attention, for rotated queries and keys unless it has xPos."""
        options = {name: value for name, value in self.mechanism_spec().items() if name != "mechanism"}
        return build_mechanism("local", num_heads, head_dim, bias=bias, **options).train(self.training)

    def mechanism_spec(self) -> dict[str, Any]:
        """Return the name and the options of the longspan mechanism."""
        spec: dict[str, Any] = {"mechanism": "local", "dropout": self.dropout.p, "shared_qk": self.shared_qk}
        back, ahead, size = self.look_backward, self.look_forward, self.window_size
        if self.exact_windowsize:
            spec["window"] = back * size, ahead * size
        else:
            spec |= {"window": size, "look_back": back, "look_ahead": ahead}
        if self.scale is not None:
            spec["scale"] = self.scale
        if self.rel_pos is not None:
            # The original gives a query the angle of the last window it attends to; checkpoints depend on it.
            spec["query_offset"] = ahead * size
            if self.rel_pos.use_xpos:
                spec["xpos"] = float(self.rel_pos.scale_base)  # type: ignore[arg-type]
        return spec

    def rotate_to(self, position: Tensor, *xs: Tensor) -> list[Tensor]:
        """Rotate each x (B, n, H, d) to positions (B or 1, n); with xPos or without positions, return them as they are.

        The mechanism applies xPos itself.
        """
        if self.rel_pos is None or self.rel_pos.use_xpos:
            return list(xs)
        dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        cos, sin = (x[:, :, None] for x in self.rel_pos.cos_sin(position, dtype))
        return [rotate(x, cos, sin) for x in xs]

    @property
    def _has_own_parts(self) -> bool:
        """Whether `dropout` and `rel_pos` are the constructor's, without hooks; others must be called."""
        parts = [(self.dropout, nn.Dropout), (self.rel_pos, SinusoidalEmbeddings)]
        return all(
            part is None or (type(part) is expected and not part._forward_hooks and not part._forward_pre_hooks)
            for part, expected in parts
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_bias: Tensor | None, size: int
    ) -> Tensor:
        leading, sequences = q.shape[:-2], math.prod(q.shape[:-2])
        masks, biases = 1 if mask is None else len(mask), 1 if attn_bias is None else len(attn_bias)
        if mask is not None and sequences // masks % biases:
            # The heads of one bias have different masks here, so that each head is computed on its own.
            assert attn_bias is not None
            each = mask.repeat_interleave(sequences // masks, 0)
            q, k, v = (x.flatten(0, -3) for x in (q, k, v))
            heads = [
                self._attend(q[h::biases], k[h::biases], v[h::biases], each[h::biases], attn_bias[h : h + 1], size)
                for h in range(biases)
            ]
            return torch.stack(heads, 1).reshape(*leading, *heads[0].shape[1:])
        if mask is not None:
            num_heads = sequences // masks
        else:
            num_heads = leading[-1] if len(leading) > 1 and leading[-1] % biases == 0 else biases
        shape = sequences // num_heads, num_heads
        q, k, v = (x.reshape(*shape, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))  # (B, n, H, d)
        if mask is not None:
            k, v = zero_fill(~mask, k, v)
        k = l2norm(k) if self.shared_qk else k
        bias = None if attn_bias is None else attn_bias.repeat(num_heads // biases, 1, 1)
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
        self._check_features(q)
        # The original gives a query the angle of the last window it attends to; checkpoints depend on it.
        offset = self.look_forward * size
        if self.rel_pos.use_xpos:
            base = self.rel_pos.scale_base
            assert base is not None
            return xpos_rotate(q, torch.tensor([offset], device=q.device), base), k, base
        position = torch.arange(q.shape[1], device=q.device)[None]
        if not offset:
            return *self.rotate_to(position, q, k), None  # type: ignore[return-value]
        return self.rotate_to(position + offset, q)[0], self.rotate_to(position, k)[0], None

    def _check_features(self, q: Tensor) -> None:
        dim = getattr(self.rel_pos, "dim", q.shape[-1])
        if dim != q.shape[-1]:
            raise ValueError(f"dim is {dim}, but q and k have {q.shape[-1]} features")

    def _attend_by_windows(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_bias: Tensor | None, size: int
    ) -> Tensor:
        """Attend as the original does, window by window, with positions that count from the first key of each."""
        leading, n, sequences = q.shape[:-2], q.shape[-2], math.prod(q.shape[:-2])
        self._check_features(q)
        q, k, v = (x.reshape(sequences, n, x.shape[-1]) for x in (q, k, v))
        real = torch.ones(1, n, dtype=torch.bool, device=q.device) if mask is None else mask
        # The original pads keys with zeros, and hides them only if there is a mask.
        visible_padding = self.faithful and self.autopad and mask is None
        if not self.faithful and mask is not None:
            hidden = ~mask.repeat_interleave(sequences // len(mask), 0)[..., None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        k = l2norm(k) if self.shared_qk else k
        q, k, v = (pad_to_multiple(x, size, -2)[1].unflatten(1, (-1, size)) for x in (q, k, v))
        real = pad_to_multiple(real, size, value=visible_padding)[1].unflatten(1, (-1, size))
        i = torch.arange(real[0].numel(), device=q.device).view(1, -1, size)

        def around(x: Tensor, pad_value: float) -> Tensor:
            return look_around(x, self.look_backward, self.look_forward, pad_value)

        k, v, j, real = around(k, 0), around(v, -1), around(i, -1), around(real, False)
        if self.rel_pos is not None:
            freqs, scale = self.rel_pos(k)
            q, k = apply_rotary_pos_emb(q, k, freqs, scale)
        i, j = i[..., None], j[:, :, None]
        visible = (j >= 0) & real[:, :, None]
        if self.causal:
            visible = visible & (j <= i)
        if self.exact_windowsize:
            reach = self.window_size if self.faithful else size
            visible = visible & (i - j <= reach * self.look_backward) & (j - i <= reach * self.look_forward)
        visible = self._window(size).hide_self(visible, i, j)  # (1 or rows of the mask, windows, size, keys)
        visible = visible.repeat_interleave(sequences // len(visible), 0)
        scores = q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale) @ k.mT
        if attn_bias is not None:
            scores = scores + attn_bias.repeat(sequences // len(attn_bias), 1, 1)[:, None]
        weights = scores.masked_fill(~visible, max_neg_value(scores)).softmax(-1)
        if not self.faithful:  # The original averages all values for a query that sees no key.
            weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)
        out = self.dropout(weights) @ v
        return out.flatten(1, 2)[:, :n].reshape(*leading, n, v.shape[-1])
