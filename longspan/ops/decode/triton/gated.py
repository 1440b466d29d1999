"""Decode step of gated linear attention and the gated delta rule: activation, decay, write and read in one launch.

A program owns BE columns of a head's state, which no other program reads: S ← Diag(α) S, u = β v, or by the delta rule
u = β (v − Sᵀ k), S ← S + k uᵀ, out = Sᵀ q.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.decode.torch import KEY_EPSILON, GateActivation
from longspan.ops.decode.triton.token import (
    Inputs,
    await_previous,
    dependent_launch,
    load_key,
    load_rotated,
    load_value,
    token_arguments,
)

_COLUMNS = 16  # of the state in a program
_EPSILON = tl.constexpr(KEY_EPSILON)
_LOG_UNDERFLOW = tl.constexpr(-104.0)

# Raw gates (B, 1, HKV, ·) with batch and head strides, and the parameters that activate them.
GatePointers = namedtuple("GatePointers", "p_gates p_A_log p_bias g_b g_h")

# DECAY and WRITE as in `GateActivation`; the gates of α: CHANNELS per head, from column FIRST on.
GateSizes = namedtuple("GateSizes", "DECAY WRITE CHANNELS FIRST DELTA")


def decode_gated(
    inputs: Inputs,
    gates: Tensor | None,
    activation: GateActivation,
    state: tuple[Tensor, Tensor | None],
    delta: bool,
    scale: float,
) -> Tensor:
    """Run `ops.decode.gated_decode_step`."""
    out, token, sizes = token_arguments(inputs)
    sizes = sizes._replace(BE=_COLUMNS)
    strides = (0, 0) if gates is None else (gates.stride(0), gates.stride(2))
    bias = activation.bias
    pointers = GatePointers(gates, activation.A_log, bias, *strides)
    first = 1 if activation.write == "sigmoid" else 0
    options = GateSizes(activation.decay, activation.write, 1 if bias is None else bias.shape[1], first, delta)
    with on_device(out):
        grid = (len(out) * sizes.HKV * -(-sizes.E // _COLUMNS),)
        arguments = token, pointers, *state, scale, activation.strength
        decode_gated_kernel[grid](*arguments, S=sizes, A=options, num_warps=4, **dependent_launch(out))
    return out


@triton.jit
def log1p(x):
    """log(1 + x) with the relative precision of x."""
    one = 1.0 + x
    return tl.where(one == 1.0, x, tl.log(one) * (x / tl.where(one == 1.0, 1.0, one - 1.0)))


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def load_gate(gates, p_gates, i_kv, i_d, m_d, A: tl.constexpr):
    """A raw gate of α plus its bias, for each channel or the same for all."""
    if A.CHANNELS == 1:
        i_d = i_d * 0
    b_x = tl.load(p_gates + A.FIRST + i_d, mask=m_d, other=0.0).to(tl.float32)
    return b_x + tl.load(gates.p_bias + i_kv * A.CHANNELS + i_d, mask=m_d, other=0.0).to(tl.float32)


@triton.jit
def load_gates(gates, i_b, i_kv, i_d, m_d, strength, A: tl.constexpr):
    """Return log α (BD,) and β, as a block."""
    b_log, b_beta = tl.zeros(i_d.shape, tl.float32), tl.full(i_d.shape, 1.0, tl.float32)
    p_gates = gates.p_gates
    if p_gates is not None:
        p_gates += i_b * gates.g_b + i_kv * gates.g_h
    if A.DECAY == "fixed":
        b_log += log1p(-tl.exp2(-5.0 - i_kv.to(tl.float32)))
    if A.DECAY == "time_step":
        b_step = softplus(load_gate(gates, p_gates, i_kv, i_d, m_d, A))
        b_log = -tl.exp(tl.load(gates.p_A_log + i_kv).to(tl.float32)) * b_step
        if A.WRITE == "time_step":
            b_beta = b_step
    if A.DECAY == "sigmoid":
        b_log = -softplus(-load_gate(gates, p_gates, i_kv, i_d, m_d, A)) / 16
    if A.WRITE == "sigmoid":
        b_beta *= strength / (1.0 + tl.exp(-tl.load(p_gates).to(tl.float32)))
    return tl.maximum(b_log, _LOG_UNDERFLOW), b_beta


@triton.jit
def unit_length(b_x, A: tl.constexpr):
    """x divided by its length, with the delta rule."""
    if A.DELTA:
        b_x = b_x * (1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) + _EPSILON))
    return b_x


@triton.jit
def decode_gated_kernel(
    token, gates, p_kv, p_log_decay, scale, strength, S: tl.constexpr, A: tl.constexpr, PDL: tl.constexpr
):
    """One program per batch row, key/value head and BE columns of its state (D, E).

    p_log_decay: Σ log α, one number or one per channel, written by the program of a head's first columns.
    """
    await_previous(PDL)
    WIDTH: tl.constexpr = S.D if A.CHANNELS > 1 else 1
    TILES: tl.constexpr = (S.E + S.BE - 1) // S.BE
    pid = tl.program_id(0)
    i_x = (pid // TILES).to(tl.int64)
    i_b, i_kv = i_x // S.HKV, i_x % S.HKV
    i_d, i_e = tl.arange(0, S.BD), (pid % TILES) * S.BE + tl.arange(0, S.BE)
    m_d, m_e = i_d < S.D, i_e < S.E
    p_tile = p_kv + i_x * (S.D * S.E) + i_d[:, None] * S.E + i_e[None, :]
    m_tile = m_d[:, None] & m_e[None, :]
    b_kv = tl.load(p_tile, mask=m_tile, other=0.0)
    if p_log_decay is not None:
        p_log_decay += i_x * WIDTH + i_d
        b_total = tl.load(p_log_decay, mask=i_d < WIDTH, other=0.0)
    b_k = load_key(token, i_b, i_kv, i_d, S)
    b_v = load_value(token, i_b, i_kv, i_e, S)
    p_heads = token.p_q + i_b * token.q_b + i_kv * S.G * token.q_h
    b_q = load_rotated(token, p_heads, i_b, i_d, m_d, S)
    b_log, b_beta = load_gates(gates, i_b, i_kv, i_d, m_d, strength, A)
    b_k = unit_length(b_k, A)
    b_kv *= tl.exp(b_log)[:, None]
    if A.DELTA:
        b_v -= tl.sum(b_kv * b_k[:, None], 0)
    b_kv += (b_beta * b_k)[:, None] * b_v[None, :]
    tl.store(p_tile, b_kv, mask=m_tile)
    for i_g in range(S.G):
        if S.G > 1:
            b_q = load_rotated(token, p_heads + i_g * token.q_h, i_b, i_d, m_d, S)
        b_out = tl.sum(unit_length(b_q, A)[:, None] * b_kv, 0) * scale
        p_row = token.p_out + i_b * token.out_b + (i_kv * S.G + i_g) * S.E
        tl.store(p_row + i_e, b_out.to(p_row.dtype.element_ty), mask=m_e)
    if p_log_decay is not None:
        if pid % TILES == 0:
            tl.store(p_log_decay, b_total + b_log, mask=i_d < WIDTH)
