"""Rotary positions, with or without xPos."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.helpers import exists as exists
from longspan.ops.rotary import angles, rotate, xpos_scale


class SinusoidalEmbeddings(nn.Module):
    """Angles (n, dim) of the positions of x (…, n, dim), and the scales (n, dim) of xPos, or 1 without xPos.

    Attributes:
        inv_freq: (dim / 2,) angles of position 1. A checkpoint without it, or with the default values rounded, leaves
            it as it is.
    """

    inv_freq: Tensor
    scale: Tensor

    def __init__(self, dim: int, scale_base: float | None = None, use_xpos: bool = False, theta: float = 10000) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"rotary positions rotate pairs of features and need an even dim, got {dim}")
        if use_xpos and scale_base is None:
            raise ValueError("use_xpos needs scale_base, such as half the window")
        self.dim, self.scale_base, self.use_xpos, self.theta = dim, scale_base, use_xpos, theta
        self.register_buffer("inv_freq", self._exact(torch.ones(())).float())
        self.register_buffer("scale", xpos_scale(torch.ones(()), dim, 1.0, torch.float32), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # In float32 whatever the dtype of the buffer: bfloat16 cannot represent large positions.
        position = torch.arange(x.shape[-2], device=x.device)
        freqs = (position[:, None] * self._frequencies()).float()
        if not self.use_xpos or self.scale_base is None:
            return torch.cat([freqs, freqs], -1), torch.ones(1, device=x.device)
        scale = xpos_scale(position - x.shape[-2] // 2, self.dim, self.scale_base, torch.float32)
        return torch.cat([freqs, freqs], -1), torch.cat([scale, scale], -1)

    def cos_sin(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cos and sin (…, dim / 2) of positions (…)."""
        angle = (position[..., None] * self._frequencies()).remainder(2 * math.pi).to(dtype)
        return angle.cos(), angle.sin()

    def has_default_frequencies(self) -> bool:
        """Return whether inv_freq is what dim and theta make it, but for rounding."""
        return self._is_default(self.inv_freq)

    def _frequencies(self) -> Tensor:
        """Return inv_freq in float64, with the digits that float32 rounds off."""
        exact = self._exact(torch.ones((), device=self.inv_freq.device))
        if self.inv_freq.dtype not in (torch.float32, torch.float64):
            return exact
        return self.inv_freq.to(exact.dtype) + (exact - exact.float())

    def _exact(self, one: Tensor) -> Tensor:
        return angles(one, self.dim, self.theta, torch.float32 if one.device.type == "mps" else torch.float64)

    def _is_default(self, given: Tensor) -> bool:
        tolerance = 1e-5 if given.dtype in (torch.float32, torch.float64) else 1e-2
        expected = self._exact(torch.ones((), device=given.device))
        return given.shape == expected.shape and torch.allclose(given.to(expected.dtype), expected, tolerance, 0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}inv_freq")
        if given is None or self._is_default(given):
            state_dict[f"{prefix}inv_freq"] = self._exact(torch.ones(())).float()
        super()._load_from_state_dict(state_dict, prefix, *args)


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
