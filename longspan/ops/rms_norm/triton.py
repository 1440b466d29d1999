"""RMS norm of heads and the gate of an output in one pass."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import padded, program_index, token_pointer

TOKENS = 32  # per program

# Heads, their dimension, padded, tokens per program, and the activation of the gates.
NormSizes = namedtuple("NormSizes", "H D BD BT ACTIVATION")


def rms_norm_heads(x: Tensor, weight: Tensor, gates: Tensor | None, eps: float, activation: str) -> Tensor:
    """Run `ops.rms_norm.rms_norm_heads`; gates: (B, T, H, D)."""
    x, weight, gates = dense_rows(x), weight.contiguous(), None if gates is None else dense_rows(gates)
    plan = _NormPlan.of((x, weight, gates), (eps, activation))
    out = new_like(x)
    with on_device(x):
        plan.norm(*plan.addresses(x, weight, gates, out))
    return out


class _NormPlan(Plan):
    def __init__(self, device: int, key: Signature, options: tuple[float, str]) -> None:
        super().__init__(device)
        x, _, gates = key
        assert x is not None
        B, T, H, D = x[0]
        sizes = NormSizes(H, D, padded(D, 16), TOKENS, options[1])
        strides = Strides.of(x), Strides(0, 0, 0) if gates is None else Strides.of(gates)
        grid = (B * H * -(-T // TOKENS),)
        self.norm = self.launch(rms_norm_heads_kernel, grid, (T, options[0], *strides), {"W": sizes})


@triton.jit(do_not_specialize=["T", "eps"])
def rms_norm_heads_kernel(p_x, p_weight, p_gates, p_out, T, eps, x, gates, W: tl.constexpr):
    """Some tokens of one head; rounded after the norm, the activation and the gate."""
    i_h, _, i_block, i_b = program_index(tl.cdiv(T, W.BT), W.H)
    i_0 = i_block * W.BT
    i_t, i_d = tl.arange(0, W.BT)[:, None], tl.arange(0, W.BD)[None, :]
    m_x = (i_0 + i_t < T) & (i_d < W.D)
    dtype = p_out.dtype.element_ty
    b_x = tl.load(token_pointer(p_x, x, i_b, i_0, i_h) + i_t * x.t + i_d, mask=m_x, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / W.D + eps)[:, None]
    b_x = (b_x * tl.load(p_weight + i_d, mask=i_d < W.D, other=0.0).to(tl.float32)).to(dtype)
    if p_gates is not None:
        b_raw = tl.load(token_pointer(p_gates, gates, i_b, i_0, i_h) + i_t * gates.t + i_d, mask=m_x, other=0.0)
        b_raw = b_raw.to(tl.float32)
        b_gate = tl.sigmoid(b_raw)
        if W.ACTIVATION == "silu":
            b_gate *= b_raw
        b_x = (b_x.to(tl.float32) * b_gate.to(dtype).to(tl.float32)).to(dtype)
    tl.store(p_out + ((i_b * T + i_0 + i_t) * W.H + i_h) * W.D + i_d, b_x, mask=m_x)
