"""Rotation of queries and keys, scaled, in one pass; its gradient is the rotation back."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import padded, program_index, token_pointer

TOKENS = 32  # per program

# Heads, their dimension, half of the features that are rotated, padded, the others padded (0: none), tokens per program
# and whether to rotate back.
RotateSizes = namedtuple("RotateSizes", "H D HALF BH BREST BT BACK")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Return x (B, T, H, D), contiguous, with pair (i, i + R/2) multiplied by cos_i ± √−1 sin_i, (T, R/2) each."""
    x, cos, sin = dense_rows(x), cos.contiguous(), sin.contiguous()
    plan = _RotatePlan.of((x, cos, sin), back)
    out = new_like(x)
    with on_device(x):
        plan.rotate(*plan.addresses(x, cos, sin, out))
    return out


class _RotatePlan(Plan):
    def __init__(self, device: int, key: Signature, back: bool) -> None:
        super().__init__(device)
        assert key[0] is not None
        assert key[1] is not None
        (B, T, H, D), half = key[0][0], key[1][0][1]
        rest = padded(D - 2 * half, 16) if 2 * half < D else 0
        sizes = RotateSizes(H, D, half, padded(half, 16), rest, TOKENS, back)
        grid = (B * H * -(-T // TOKENS),)
        self.rotate = self.launch(rotate_kernel, grid, (T, Strides.of(key[0])), {"W": sizes})


@triton.jit(do_not_specialize=["T"])
def rotate_kernel(p_x, p_cos, p_sin, p_out, T, x, W: tl.constexpr):
    """Some tokens of one head."""
    i_h, _, i_block, i_b = program_index(tl.cdiv(T, W.BT), W.H)
    i_0 = i_block * W.BT
    i_t, i_d = tl.arange(0, W.BT)[:, None], tl.arange(0, W.BH)[None, :]
    m_x = (i_0 + i_t < T) & (i_d < W.HALF)
    p_rows = token_pointer(p_x, x, i_b, i_0, i_h) + i_t * x.t
    p_out_rows = p_out + ((i_b * T + i_0 + i_t) * W.H + i_h) * W.D
    p_x, p_out = p_rows + i_d, p_out_rows + i_d
    b_cos = tl.load(p_cos + (i_0 + i_t) * W.HALF + i_d, mask=m_x, other=0.0)
    b_sin = tl.load(p_sin + (i_0 + i_t) * W.HALF + i_d, mask=m_x, other=0.0)
    if W.BACK:
        b_sin = -b_sin
    b_a = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_b = tl.load(p_x + W.HALF, mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_out, (b_a * b_cos - b_b * b_sin).to(p_out.dtype.element_ty), mask=m_x)
    tl.store(p_out + W.HALF, (b_b * b_cos + b_a * b_sin).to(p_out.dtype.element_ty), mask=m_x)
    if W.BREST > 0:
        i_rest = 2 * W.HALF + tl.arange(0, W.BREST)[None, :]
        m_rest = (i_0 + i_t < T) & (i_rest < W.D)
        tl.store(p_out_rows + i_rest, tl.load(p_rows + i_rest, mask=m_rest), mask=m_rest)
