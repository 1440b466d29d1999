"""Activation of raw gates in one launch, and its gradients in another."""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, on_device
from longspan.ops.common.tiles import padded, program_index, token_pointer, zeros
from longspan.ops.decode.triton.gated import softplus
from longspan.ops.gated.torch import LOG_UNDERFLOW
from longspan.ops.gates import GateInputs, GateOptions

SPAN = 16  # tiles of a program of the backward pass, which adds up gradients of the parameters
_LEAST = tl.constexpr(LOG_UNDERFLOW[torch.float32])

# Heads, gates of a head, those of α: their number, padded, and the first of them; tokens in a tile; the activations.
GateTiles = namedtuple("GateTiles", "H G CHANNELS BD FIRST BT DECAY WRITE")


def forward(x: GateInputs, options: GateOptions) -> tuple[Tensor, Tensor]:
    """Return log α (B, S, H, channels) and β (B, S, H); empty tensors for what is not computed."""
    gates, visible = dense_rows(x.gates), _bytes(x.visible)
    plan = _GateForward.of((gates, x.A_log, x.bias, visible), options)
    log_decay, beta = (gates.new_empty(shape, dtype=torch.float32) for shape in plan.shapes)
    with on_device(gates):
        plan.activate(*plan.addresses(gates, x.A_log, x.bias, visible, log_decay, beta))
    return log_decay, beta


def backward(d_log_decay: Tensor, d_beta: Tensor, x: GateInputs, options: GateOptions) -> tuple[Tensor, ...]:
    """Return the gradients of gates, A_log and bias; empty tensors for those that were not given."""
    gates, visible, d_beta = dense_rows(x.gates), _bytes(x.visible), d_beta.contiguous()
    d_log_decay = dense_rows(d_log_decay) if d_log_decay.ndim == 4 else d_log_decay
    plan = _GateBackward.of((gates, x.A_log, x.bias, visible, d_log_decay, d_beta), options)
    d_gates = gates.new_empty(gates.shape)
    d_A_log, d_bias = (gates.new_empty(shape, dtype=torch.float32) for shape in plan.sums)
    with on_device(gates):
        plan.activate(*plan.addresses(gates, x.A_log, x.bias, visible, d_log_decay, d_beta, d_gates, d_A_log, d_bias))
    given = ((x.A_log, d_A_log), (x.bias, d_bias))
    return d_gates, *(gates.new_empty(0) if y is None else d.sum((0, 1)).to(y.dtype) for y, d in given)


def _bytes(visible: Tensor | None) -> Tensor | None:
    return None if visible is None else visible.contiguous().view(torch.uint8)


class _GatePlan(Plan):
    elements, warps = 2048, 4  # of a tile and of a program

    def __init__(self, device: int, key: Signature, options: GateOptions) -> None:
        super().__init__(device)
        gates, _, bias, _, *rest = key
        assert gates is not None
        (self.B, self.T, self.H, G), channels = gates[0], 0 if bias is None else bias[0][1]
        self.channels, BD = channels, padded(max(channels, 1), 1)
        first = 1 if options.write == "sigmoid" else 0
        tokens = max(1, min(256, self.elements // BD))
        self.sizes = GateTiles(self.H, G, channels, BD, first, tokens, options.decay, options.write)
        d = [x for x in rest[:1] if x is not None]  # the gradient of log α
        self.strides = Strides.of(gates), *(Strides.of(x) if channels else Strides(0, 0, 0) for x in d)
        self.strength = options.strength

    def gate_launch(self, kernel: object, tokens: int) -> None:
        """Create a launch whose programs take this many tokens of a head."""
        self.blocks = -(-self.T // tokens)
        grid, scalars = (self.B * self.H * self.blocks,), (self.T, self.strength, *self.strides)
        self.activate = self.launch(kernel, grid, scalars, {"W": self.sizes, "SPAN": SPAN, "num_warps": self.warps})


class _GateForward(_GatePlan):
    def __init__(self, device: int, key: Signature, options: GateOptions) -> None:
        super().__init__(device, key, options)
        shape: tuple[int, ...] = (self.B, self.T, self.H)
        self.shapes = (*shape, self.channels) if self.channels else (0,), (0,) if options.write == "one" else shape
        self.gate_launch(gates_forward_kernel, self.sizes.BT)


class _GateBackward(_GatePlan):
    elements, warps = 1024, 8

    def __init__(self, device: int, key: Signature, options: GateOptions) -> None:
        super().__init__(device, key, options)
        self.gate_launch(gates_backward_kernel, self.sizes.BT * SPAN)
        parts = self.B, self.blocks, self.H
        self.sums = parts, (*parts, self.channels)


@triton.jit
def _sigmoid(x):
    b_exp = tl.exp(-tl.abs(x))
    return tl.where(x < 0, b_exp, 1.0) / (1.0 + b_exp)


@triton.jit
def _rows(p_visible, i_b, i_0, T, W: tl.constexpr):
    """Which of BT tokens from i_0 on exist, and which are visible."""
    i_t = tl.arange(0, W.BT)
    m_t = i_t < T - i_0
    m_seen = m_t
    if p_visible is not None:
        m_seen = tl.load(p_visible + i_b * T + i_0 + i_t, mask=m_t, other=0) != 0
    return m_t, m_seen


@triton.jit
def _load_gate(p_gates, p_bias, stride, i_h, m_t, W: tl.constexpr):
    """Gates of α plus their bias (BT, BD), the gates' mask, and their columns."""
    i_t, i_d = tl.arange(0, W.BT)[:, None], tl.arange(0, W.BD)[None, :]
    m_x = m_t[:, None] & (i_d < W.CHANNELS)
    b_x = tl.load(p_gates + (i_t * stride + W.FIRST + i_d), mask=m_x, other=0.0).to(tl.float32)
    b_x += tl.load(p_bias + i_h * W.CHANNELS + i_d, mask=i_d < W.CHANNELS, other=0.0).to(tl.float32)
    return b_x, m_x, i_d


@triton.jit(do_not_specialize=["T", "strength"])
def gates_forward_kernel(p_gates, p_A_log, p_bias, p_visible, p_log_decay, p_beta, T, strength, gates, W: tl.constexpr):
    """log α and β of BT tokens of one head."""
    i_h, _, i_block, i_b = program_index(tl.cdiv(T, W.BT), W.H)
    i_0, i_t = i_block * W.BT, tl.arange(0, W.BT)
    m_t, m_seen = _rows(p_visible, i_b, i_0, T, W)
    i_row = (i_b * T + i_0) * W.H + i_h
    p_gates, p_log_decay, p_beta = (
        token_pointer(p_gates, gates, i_b, i_0, i_h),
        p_log_decay + i_row * W.CHANNELS,
        p_beta + i_row,
    )
    if W.CHANNELS > 0:
        b_x, m_x, i_d = _load_gate(p_gates, p_bias, gates.t, i_h, m_t, W)
        if W.DECAY == "time_step":
            b_x = softplus(b_x)
            if W.WRITE == "time_step":
                tl.store(p_beta + i_t * W.H, tl.where(m_seen, tl.sum(b_x, 1), 0.0), mask=m_t)
            b_x *= -tl.exp(tl.load(p_A_log + i_h).to(tl.float32))
        else:
            b_x = softplus(-b_x) / -16
        b_x = tl.where(b_x < _LEAST, _LEAST, b_x)  # NaN stays NaN
        i_out = i_t[:, None] * (W.H * W.CHANNELS) + i_d
        tl.store(p_log_decay + i_out, tl.where(m_seen[:, None], b_x, 0.0), mask=m_x)
    if W.WRITE == "sigmoid":
        b_x = strength * _sigmoid(tl.load(p_gates + i_t * gates.t, mask=m_t, other=0.0).to(tl.float32))
        tl.store(p_beta + i_t * W.H, tl.where(m_seen, b_x, 0.0), mask=m_t)


@triton.jit(do_not_specialize=["T", "strength"])
def gates_backward_kernel(
    p_gates, p_A_log, p_bias, p_visible, p_d_log_decay, p_d_beta, p_d_gates, p_d_A_log, p_d_bias, T, strength,
    gates, d,
    W: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Gradients of the gates of SPAN · BT tokens of one head, and their part of those of A_log and bias."""
    i_h, _, i_block, i_b = program_index(tl.cdiv(T, W.BT * SPAN), W.H)
    i_t = tl.arange(0, W.BT)
    b_d_bias, b_d_A = zeros(W.BT, W.BD), zeros(W.BT, W.BD)  # added up over tokens at the end
    for i in range(SPAN):
        i_0 = (i_block * SPAN + i) * W.BT
        m_t, m_seen = _rows(p_visible, i_b, i_0, T, W)
        i_row = (i_b * T + i_0) * W.H + i_h
        p_rows, p_d_rows = token_pointer(p_gates, gates, i_b, i_0, i_h), p_d_gates + i_row * W.G
        b_d_beta = zeros(W.BT)
        if W.WRITE != "one":
            b_d_beta = tl.load(p_d_beta + i_row + i_t * W.H, mask=m_seen, other=0.0)
        if W.CHANNELS > 0:
            b_x, m_x, i_d = _load_gate(p_rows, p_bias, gates.t, i_h, m_t, W)
            p_d = token_pointer(p_d_log_decay, d, i_b, i_0, i_h) + (i_t[:, None] * d.t + i_d)
            b_d = tl.load(p_d, mask=m_x & m_seen[:, None], other=0.0)
            if W.DECAY == "time_step":
                rate = -tl.exp(tl.load(p_A_log + i_h).to(tl.float32))
                b_log = softplus(b_x) * rate
                m_least = b_log < _LEAST
                b_d_A += tl.where(m_least, 0.0, b_d * b_log)
                b_d = tl.where(m_least, 0.0, b_d * rate)
                if W.WRITE == "time_step":
                    b_d += b_d_beta[:, None]
                b_d *= _sigmoid(b_x)
            else:
                b_d = tl.where(softplus(-b_x) / -16 < _LEAST, 0.0, b_d) * _sigmoid(-b_x) / 16
            b_d_bias += tl.where(m_x, b_d, 0.0)
            i_out = i_t[:, None] * (W.H * W.G) + W.FIRST + i_d
            tl.store(p_d_rows + i_out, b_d.to(p_d_gates.dtype.element_ty), mask=m_x)
        if W.WRITE == "sigmoid":
            b_x = tl.load(p_rows + i_t * gates.t, mask=m_t, other=0.0).to(tl.float32)
            b_d = b_d_beta * (_sigmoid(b_x) * _sigmoid(-b_x) * strength)
            tl.store(p_d_rows + i_t * (W.H * W.G), b_d.to(p_d_gates.dtype.element_ty), mask=m_t)
    i_d = tl.arange(0, W.BD)
    if W.DECAY == "time_step":
        tl.store(p_d_A_log + tl.program_id(0), tl.sum(b_d_A))
    if W.CHANNELS > 0:
        tl.store(p_d_bias + tl.program_id(0) * W.CHANNELS + i_d, tl.sum(b_d_bias, 0), mask=i_d < W.CHANNELS)
