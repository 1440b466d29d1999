"""What the kernels of one token's step share: the token itself, with the positions it still has to take, and softmax.

A memory is changed where it lies, so that a CUDA graph can hold it. Lengths are left to the caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Token(NamedTuple):
    """q (B, 1, H, D), k, v, the angles of their positions and the answer; steps from row to row, from head to head."""

    p_q: Any
    p_k: Any
    p_v: Any
    p_cos: Any
    p_sin: Any
    p_out: Any
    q_b: int
    q_h: int
    k_b: int
    k_h: int
    v_b: int
    v_h: int
    angle_b: int
    out_b: int


class Sizes(NamedTuple):
    """G queries share each of HKV heads; blocks are powers of two. TURN: 0 none, 1 by halves, 2 interleaved."""

    G: int
    HKV: int
    D: int
    E: int
    BG: int
    BD: int
    BE: int
    TURN: int


@triton.jit
def load_turned(token, p_x, i_b, i_d, m_x, S: tl.constexpr):
    """x at columns i_d, float32, turned by the positions of rows i_b; p_x and i_b may be blocks."""
    b_x = tl.load(p_x + i_d, mask=m_x, other=0.0).to(tl.float32)
    if S.TURN > 0:
        if S.TURN == 1:
            m_first = i_d < S.D // 2
            i_other = tl.where(m_first, i_d + S.D // 2, i_d - S.D // 2)
            i_angle = tl.where(m_first, i_d, i_d - S.D // 2)
        else:
            m_first = i_d % 2 == 0
            i_other, i_angle = i_d ^ 1, i_d // 2
        b_other = tl.load(p_x + i_other, mask=m_x, other=0.0).to(tl.float32)
        b_cos = tl.load(token.p_cos + i_b * token.angle_b + i_angle, mask=i_d < S.D, other=0.0)
        b_sin = tl.load(token.p_sin + i_b * token.angle_b + i_angle, mask=i_d < S.D, other=0.0)
        b_x = b_x * b_cos + tl.where(m_first, -b_sin, b_sin) * b_other
        # Rounded as it is where rotation is a step of its own.
        b_x = b_x.to(p_x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def load_key(token, i_b, i_kv, i_d, S: tl.constexpr):
    return load_turned(token, token.p_k + i_b * token.k_b + i_kv * token.k_h, i_b, i_d, i_d < S.D, S)


@triton.jit
def load_value(token, i_b, i_kv, i_e, S: tl.constexpr):
    p_v = token.p_v + i_b * token.v_b + i_kv * token.v_h
    return tl.load(p_v + i_e, mask=i_e < S.E, other=0.0).to(tl.float32)


@triton.jit
def load_queries(token, i_b, i_kv, i_g, i_d, S: tl.constexpr):
    """(BG, BD): all that share a head."""
    p_q = token.p_q + i_b * token.q_b + (i_kv * S.G + i_g)[:, None] * token.q_h
    return load_turned(token, p_q, i_b, i_d[None, :], (i_g < S.G)[:, None] & (i_d < S.D)[None, :], S)


@triton.jit
def store_answers(token, b_out, i_b, i_kv, i_g, i_e, S: tl.constexpr):
    """(BG, BE), of all that share a head."""
    p_out = token.p_out + i_b * token.out_b + (i_kv * S.G + i_g)[:, None] * S.E + i_e[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=(i_g < S.G)[:, None] & (i_e < S.E)[None, :])


@triton.jit
def load_block(p_x, i_rows, m_rows, i_d, D: tl.constexpr):
    """Rows of D numbers, zeros where m_rows is not."""
    return tl.load(p_x + i_rows[:, None] * D + i_d[None, :], mask=m_rows[:, None] & (i_d < D)[None, :], other=0.0)


@triton.jit
def weighed(b_s, b_max, b_sum):
    """A running softmax after scores (BG, N): their weights, by how much earlier ones shrink, the maximum and sum."""
    b_top = tl.maximum(b_max, tl.max(b_s, 1))
    b_p, b_decay = tl.exp(b_s - b_top[:, None]), tl.exp(b_max - b_top)
    return b_p, b_decay, b_top, b_sum * b_decay + tl.sum(b_p, 1)
