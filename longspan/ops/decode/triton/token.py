"""One decoded token as the kernels see it: its queries, key, value and rotary angles; online softmax.

Kernels update the state in place, so that a CUDA graph can capture a decode step. They do not change lengths.
"""

from __future__ import annotations

import os
from collections import namedtuple
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.tiles import padded

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def await_previous(PDL: tl.constexpr):
        """Nothing: the interpreter runs one kernel after the other."""
else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def await_previous(PDL: tl.constexpr):
        """Wait for the kernel before this one, then let the next one begin: it waits in its turn.

        Programmatic dependent launch: what a kernel does before, such as loading weights, overlaps with the one before
        it. Only what no kernel writes may be loaded then.
        """
        if PDL:
            gdc_wait()
            gdc_launch_dependents()


# q, k, v, rotary (cos, sin, interleaved, …) or None, output or None.
Inputs = tuple[Tensor, Tensor, Tensor, tuple[Any, ...] | None, Tensor | None]
Tensors = tuple[Tensor, ...]

# Pointers to q (B, 1, H, D), k, v, cos, sin and the output, with batch and head strides.
Token = namedtuple("Token", "p_q p_k p_v p_cos p_sin p_out q_b q_h k_b k_h v_b v_h angle_b out_b")

# G query heads per key/value head, HKV of them; B*: padded to powers of two.
# ROTARY: 0 none, 1 pairs (i, i + R/2), 2 pairs (2i, 2i + 1) of the first R features.
TokenSizes = namedtuple("TokenSizes", "G HKV D E BG BD BE ROTARY R")


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `await_previous`; devices before Hopper do not have it."""
    possible = x.is_cuda and _has_dependent_launch(x.get_device())
    return {"PDL": possible, "launch_pdl": possible} if possible else {"PDL": False}


@lru_cache
def _has_dependent_launch(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def token_arguments(inputs: Inputs) -> tuple[Tensor, Token, TokenSizes]:
    """Return the output (B, 1, H, E), the pointers and the sizes of one token."""
    q, k, v, rotary, out = inputs
    (H, D), (Hkv, E) = q.shape[2:], v.shape[2:]
    out = q.new_empty(*q.shape[:3], E) if out is None else out
    assert all(x.stride(3) == 1 for x in (q, k, v, out))
    assert out.stride(2) == out.shape[3]
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary[:3]
    angle_b = 0 if cos is None or len(cos) == 1 else cos.stride(0)
    strides = (stride for x in (q, k, v) for stride in (x.stride(0), x.stride(2)))
    blocks = (padded(size, 16) for size in (H // Hkv, D, E))
    rotary_dim = 0 if cos is None else 2 * cos.shape[2]
    sizes = TokenSizes(H // Hkv, Hkv, D, E, *blocks, 0 if cos is None else 2 if interleaved else 1, rotary_dim)
    return out, Token(q, k, v, cos, sin, out, *strides, angle_b, out.stride(0)), sizes


def block_rows(sizes: TokenSizes, rows: int, half_precision: bool) -> int:
    """Return how many keys and values a block holds without spilling registers."""
    few = min(triton.next_power_of_2(rows), 8192 // max(sizes.BD, sizes.BE))
    return max(16, min(few, 64 if half_precision else 32))


def dot_warps(rows: int) -> int:
    """Return the warps for products of `rows` rows.

    Four warps and 64 rows select wgmma, which Triton 3.6 miscompiles where the other factor has fewer than 64 columns.
    """
    return 4 if rows < 64 else 2


@triton.jit
def load_rotated(token, p_x, i_b, i_d, m_x, S: tl.constexpr):
    """Load columns i_d of x in float32, rotated to the positions of batch rows i_b; p_x and i_b may be blocks."""
    b_x = tl.load(p_x + i_d, mask=m_x, other=0.0).to(tl.float32)
    if S.ROTARY > 0:
        if S.ROTARY == 1:
            m_first = i_d < S.R // 2
            i_other = tl.where(m_first, i_d + S.R // 2, i_d - S.R // 2)
            i_angle = tl.where(m_first, i_d, i_d - S.R // 2)
        else:
            m_first = i_d % 2 == 0
            i_other, i_angle = i_d ^ 1, i_d // 2
        b_other = tl.load(p_x + i_other, mask=m_x & (i_d < S.R), other=0.0).to(tl.float32)
        b_cos = tl.load(token.p_cos + i_b * token.angle_b + i_angle, mask=i_d < S.R, other=1.0)
        b_sin = tl.load(token.p_sin + i_b * token.angle_b + i_angle, mask=i_d < S.R, other=0.0)
        b_x = b_x * b_cos + tl.where(m_first, -b_sin, b_sin) * b_other
        # Round as a separate rotary operation would.
        b_x = b_x.to(p_x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def load_key(token, i_b, i_kv, i_d, S: tl.constexpr):
    return load_rotated(token, token.p_k + i_b * token.k_b + i_kv * token.k_h, i_b, i_d, i_d < S.D, S)


@triton.jit
def load_value(token, i_b, i_kv, i_e, S: tl.constexpr):
    p_v = token.p_v + i_b * token.v_b + i_kv * token.v_h
    return tl.load(p_v + i_e, mask=i_e < S.E, other=0.0).to(tl.float32)


@triton.jit
def load_queries(token, i_b, i_kv, i_g, i_d, S: tl.constexpr):
    """Load the query heads (BG, BD) that share a key/value head."""
    p_q = token.p_q + i_b * token.q_b + (i_kv * S.G + i_g)[:, None] * token.q_h
    return load_rotated(token, p_q, i_b, i_d[None, :], (i_g < S.G)[:, None] & (i_d < S.D)[None, :], S)


@triton.jit
def store_output(token, b_out, i_b, i_kv, i_g, i_e, S: tl.constexpr):
    """Store the outputs (BG, BE) of the query heads that share a key/value head."""
    p_out = token.p_out + i_b * token.out_b + (i_kv * S.G + i_g)[:, None] * S.E + i_e[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=(i_g < S.G)[:, None] & (i_e < S.E)[None, :])


@triton.jit
def gather_rows(p_x, i_rows, m_rows, i_d, D: tl.constexpr):
    """Load rows i_rows of a contiguous matrix with D columns; zeros where m_rows is false."""
    return tl.load(p_x + i_rows[:, None] * D + i_d[None, :], mask=m_rows[:, None] & (i_d < D)[None, :], other=0.0)


@triton.jit
def online_softmax(b_s, b_max, b_sum):
    """Update a running softmax with scores (BG, N): their weights, the factor of earlier weights, maximum and sum."""
    b_top = tl.maximum(b_max, tl.max(b_s, 1))
    b_p, b_decay = tl.exp(b_s - b_top[:, None]), tl.exp(b_max - b_top)
    return b_p, b_decay, b_top, b_sum * b_decay + tl.sum(b_p, 1)
