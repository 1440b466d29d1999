"""Rotary positions, with or without xPos."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.ops.rotary import angles, rotate, xpos_scale


class SinusoidalEmbeddings(nn.Module):
    """Angles (n, dim) of the positions of x (…, n, dim), and the scales (n, dim) of xPos, or 1 without xPos."""

    inv_freq: Tensor

    def __init__(self, dim: int, scale_base: float | None = None, use_xpos: bool = False, theta: float = 10000) -> None:
        super().__init__()
        if use_xpos and scale_base is None:
            raise ValueError("use_xpos needs scale_base, such as half the window")
        self.dim, self.scale_base, self.use_xpos, self.theta = dim, scale_base, use_xpos, theta
        self.register_buffer("inv_freq", frequencies(dim, theta))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # In float32 whatever the dtype of the buffer: bfloat16 cannot represent large positions.
        position = torch.arange(x.shape[-2], device=x.device)
        freqs = position[:, None] * frequencies(self.dim, self.theta).to(x.device)
        if not self.use_xpos or self.scale_base is None:
            return torch.cat([freqs, freqs], -1), torch.ones(1, device=x.device)
        scale = xpos_scale(position - x.shape[-2] // 2, self.dim, self.scale_base, torch.float32)
        return torch.cat([freqs, freqs], -1), torch.cat([scale, scale], -1)


def frequencies(dim: int, theta: float = 10000) -> Tensor:
    """Return the angles (dim / 2,) of position 1."""
    return angles(torch.ones(()), dim, theta, torch.float32)


def rotate_half(x: Tensor) -> Tensor:
    """Rotate every pair of features of x (…, D) by 90 degrees."""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, freqs: Tensor, scale: Tensor | float = 1) -> tuple[Tensor, Tensor]:
    """Rotate q (…, n, D) and k (…, m, D) by freqs (m, D); q is at the last n of the m positions."""
    scale = torch.as_tensor(scale, device=freqs.device)
    last = slice(freqs.shape[-2] - q.shape[-2], None)
    return _rotate(q, freqs[..., last, :], scale[last] if scale.ndim == 2 else scale), _rotate(k, freqs, 1 / scale)


def _rotate(x: Tensor, angle: Tensor, scale: Tensor) -> Tensor:
    half = x.shape[-1] // 2  # the second half of the angles repeats the first
    return rotate(x, (angle.cos() * scale)[..., :half], (angle.sin() * scale)[..., :half])
