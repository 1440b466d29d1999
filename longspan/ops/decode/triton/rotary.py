"""Rotary angles of decoded tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.decode.triton.token import await_previous, dependent_launch


def decode_rotary(position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (B, 1, D / 2) of positions (B,) times frequencies (D / 2,), which are float64."""
    half = len(frequency)
    cos, sin = (frequency.new_empty((len(position), 1, half), dtype=torch.float32) for _ in range(2))
    with on_device(position):
        constants = {"HALF": half, "BLOCK": triton.next_power_of_2(half), "num_warps": 1}
        constants |= dependent_launch(position)
        decode_rotary_kernel[(len(position),)](position, frequency, cos, sin, **constants)
    return cos, sin


@triton.jit
def decode_rotary_kernel(
    p_position, p_frequency, p_cos, p_sin, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Compute cos and sin (HALF,) of one position, with angles in float64 as in `ops.rotary`."""
    await_previous(PDL)
    i_b = tl.program_id(0)
    i_d = tl.arange(0, BLOCK)
    m_d = i_d < HALF
    b_angle = tl.load(p_position + i_b).to(tl.float64) * tl.load(p_frequency + i_d, mask=m_d, other=0.0)
    TWO_PI: tl.constexpr = 6.283185307179586
    b_angle = (b_angle - tl.floor(b_angle / TWO_PI) * TWO_PI).to(tl.float32)
    tl.store(p_cos + i_b * HALF + i_d, tl.cos(b_angle), mask=m_d)
    tl.store(p_sin + i_b * HALF + i_d, tl.sin(b_angle), mask=m_d)
