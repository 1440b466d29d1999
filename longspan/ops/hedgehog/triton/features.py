"""[softmax(Wx), softmax(−Wx)] of a tile of tokens and one head at a time, forward and backward.

A program of the backward pass takes every P-th tile of its head, and adds up its part of dW in registers; the parts are
summed afterwards. Without atomic additions, results are deterministic.

A W of more than 128 rows or columns, and its gradient, do not fit into the registers of a program, and in bfloat16 it
takes less time not to hold smaller ones there: x and W are read in tiles of their columns, W as one or two numbers in
the dtype of x that another kernel writes first. The backward pass stores dy, and a kernel of its own sums dW.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.exp import exact_exp, exp
from longspan.ops.common.launch import Plan, Signature, Strides, dense_rows, new_like, on_device
from longspan.ops.common.tiles import add_product, padded, product, zeros

# Heads, dimensions, padded dimensions, tokens per tile. PRECISION: of products, in float32 but for "bfloat16", where W
# is the sum of two numbers, and of one in the backward pass.
HedgehogSizes = namedtuple("HedgehogSizes", "H D F BD BF BT PRECISION")
PARTS = 64  # programs of a head in the backward pass
# The largest W that a program holds, its rows or columns. In bfloat16 larger ones take less time in tiles.
HELD = {"forward": 128, "backward": 128}
HELD_BF16 = {"forward": 64, "backward": 32}
# As above, for a wide W: BD is a multiple of 64. SPLIT: numbers that add up to an element of W.
WideSizes = namedtuple("WideSizes", "H D F BD BF BT SPLIT PRECISION", defaults=("bfloat16",))
TILE = 64  # columns of x and of W
# Of up to 128 rows and columns, and of up to 256: tokens per program, warps and pipeline stages of the passes.
WIDE = {
    128: {"forward": (64, 4, 2), "backward": (64, 4, 2)},
    256: {"forward": (64, 8, 3), "backward": (64, 8, 2)},
}
PROGRAMS = 512  # programs that sum dW of a wide W, about


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return the features (B, T, H, 2·F)."""
    x, weight = dense_rows(x), weight.contiguous()
    if _is_wide(x, weight, "forward"):
        return WidePlan.of((x, weight)).forward(x, weight)
    plan = HedgehogPlan.of((x, weight))
    out = x.new_empty(*x.shape[:3], 2 * weight.shape[1])
    with on_device(x):
        plan.forward(x, weight, out)
    return out


def backward(d_features: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight, given that of the features."""
    x, weight, d_features = dense_rows(x), weight.contiguous(), dense_rows(d_features)
    if _is_wide(x, weight, "backward"):
        return WidePlan.of((x, weight, d_features)).backward(d_features, x, weight)
    plan, d_x = HedgehogPlan.of((x, weight, d_features)), new_like(x)
    parts = x.new_empty(plan.parts, *weight.shape, dtype=torch.float32)
    with on_device(x):
        plan.backward(x, weight, d_features, None, None, d_x, parts)
    return d_x, parts.sum(0).to(weight.dtype)


def _is_wide(x: Tensor, weight: Tensor, step: str) -> bool:
    return max(weight.shape[1:]) > (HELD_BF16 if x.dtype == torch.bfloat16 else HELD)[step]


class HedgehogPlan(Plan):
    """The launch of the forward pass, or of the backward pass where the signature has the gradient of the features."""

    def __init__(self, device: int, key: Signature, *options: Any) -> None:
        super().__init__(device)
        x, weight, *rest = key
        assert x is not None
        assert weight is not None
        (B, T, H, D), F = x[0], weight[0][1]
        exact, half = x[2] == torch.float32, x[2] == torch.bfloat16
        BD, BF = (padded(size, 64 if half else 16) for size in (D, F))
        BT = 32 if exact or (not half and max(BD, BF) > 64) else 64
        sizes = HedgehogSizes(H, D, F, BD, BF, BT, "ieee" if exact else "bfloat16" if half else "tf32")
        tiles = -(-B * T // BT)
        self.parts = min(PARTS, tiles)
        wide = bool(rest) or max(BD, BF) > 64
        constants = {"S": sizes, "num_warps": 8 if wide else 4, "num_stages": 1 if exact else 2}
        if rest:
            assert rest[0] is not None
            strides = Strides.of(x), Strides.of(rest[0])
            self.backward = self.launch(
                hedgehog_backward_kernel, (self.parts * H,), (B * T, T, self.parts, strides), constants
            )
        else:
            self.forward = self.launch(hedgehog_forward_kernel, (tiles * H,), (B * T, T, Strides.of(x)), constants)


class WidePlan(Plan):
    """The launches of the forward pass of a wide W, or of the backward pass, as `HedgehogPlan`."""

    def __init__(self, device: int, key: Signature, *options: Any) -> None:
        super().__init__(device)
        x, weight, *rest = key
        assert x is not None
        assert weight is not None
        (self.B, self.T, H, D), F = x[0], weight[0][1]
        N, BD, BF = self.B * self.T, -(-D // TILE) * TILE, padded(F)
        tokens, warps, stages = WIDE[128 if max(D, F) <= 128 else 256]["backward" if rest else "forward"]
        self.S = S = WideSizes(H, D, F, BD, BF, tokens, 1 if weight[2] == x[2] else 2)
        constants = {"S": S, "num_warps": warps, "num_stages": stages}
        grid = (H * (BD // TILE) * (BF // TILE),)
        self.split = self.launch(hedgehog_split_kernel, grid, (), {"S": S, "num_warps": 4})
        grid = (-(-N // tokens) * H,)
        if not rest:
            self.read = self.launch(hedgehog_wide_forward_kernel, grid, (N, self.T, Strides.of(x)), constants)
            return
        assert rest[0] is not None
        strides = Strides.of(x), Strides.of(rest[0])
        self.differentiate = self.launch(hedgehog_wide_backward_kernel, grid, (N, self.T, strides), constants)
        tiles = H * (BF // TILE)
        self.parts = max(1, min(-(-PROGRAMS // tiles), -(-N // (8 * tokens))))
        constants = {"S": S, "PD": padded(D), "num_warps": 8, "num_stages": 3}
        scalars = N, self.T, self.parts, Strides.of(x)
        self.sums = self.launch(hedgehog_weight_gradient_kernel, (tiles * self.parts,), scalars, constants)

    def numbers(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return W as numbers in the dtype of x."""
        S = self.S
        w = x.new_empty(S.H, S.SPLIT, S.BF, S.BD)
        self.split(weight, w)
        return w

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Launch; see `forward`."""
        out = x.new_empty(*x.shape[:3], 2 * self.S.F)
        with on_device(x):
            self.read(x, self.numbers(x, weight), out)
        return out

    def backward(self, d_features: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Launch; see `backward`."""
        d_x, d_y = new_like(x), x.new_empty(*x.shape[:3], self.S.F)
        parts = x.new_empty(self.parts, *weight.shape, dtype=torch.float32)
        with on_device(x):
            self.differentiate(x, self.numbers(x, weight), d_features, None, None, d_x, d_y)
            self.sums(x, d_y, parts)
        return d_x, (parts[0] if self.parts == 1 else parts.sum(0)).to(weight.dtype)


@triton.jit
def rows(p_x, strides, i_row, i_h, T):
    """Pointers to tokens i_row (BT,), counted over all sequences, of one head."""
    i_b, i_t = (i_row // T).to(tl.int64), (i_row % T).to(tl.int64)
    return p_x + (i_b * strides.b + i_t * strides.t + i_h * strides.h)


@triton.jit
def load_weight(p_w, i_h, S: tl.constexpr):
    """W of one head, transposed: two (BD, BF) blocks that add up to it, the second 0 but in bfloat16."""
    PRECISION: tl.constexpr = S.PRECISION
    i_d, i_f = tl.arange(0, S.BD), tl.arange(0, S.BF)
    p_w += i_h * (S.F * S.D) + i_f[None, :] * S.D + i_d[:, None]
    b_w = tl.load(p_w, mask=(i_f < S.F)[None, :] & (i_d < S.D)[:, None], other=0.0).to(tl.float32)
    b_low = b_w
    if PRECISION == "bfloat16":
        b_low = (b_w - b_w.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        b_w = b_w.to(tl.bfloat16)
    return b_w, b_low


@triton.jit
def _load(p_x, m_x, S: tl.constexpr):
    """A tile of x in the dtype of products."""
    PRECISION: tl.constexpr = S.PRECISION
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if PRECISION != "bfloat16":
        b_x = b_x.to(tl.float32)
    return b_x


@triton.jit
def _times(b_x, b_w, b_low, S: tl.constexpr):
    """x·w, in bfloat16 the sum of the products with both parts of w."""
    PRECISION: tl.constexpr = S.PRECISION
    if PRECISION == "bfloat16":
        b_y = tl.dot(b_x, b_w, tl.dot(b_x, b_low))
    else:
        b_y = product(b_x, b_w, PRECISION)
    return b_y


@triton.jit
def both_softmaxes(b_x, b_w, b_low, S: tl.constexpr):
    """softmax(y) and softmax(−y) of y = x Wᵀ (BT, BF); zeros in padded columns."""
    return _softmaxes(_times(b_x, b_w, b_low, S), S)


@triton.jit
def _softmaxes(b_y, S: tl.constexpr):
    """softmax(y) and softmax(−y) (BT, BF); zeros in padded columns."""
    PRECISION: tl.constexpr = S.PRECISION
    m_f = (tl.arange(0, S.BF) < S.F)[None, :]
    b_high = b_y - tl.max(tl.where(m_f, b_y, float("-inf")), 1)[:, None]
    b_low = tl.min(tl.where(m_f, b_y, float("inf")), 1)[:, None] - b_y
    if PRECISION == "ieee":
        b_p, b_n = exact_exp(tl.minimum(b_high, 0)), exact_exp(tl.minimum(b_low, 0))
    else:
        b_p, b_n = exp(tl.minimum(b_high, 0)), exp(tl.minimum(b_low, 0))
    b_p, b_n = tl.where(m_f, b_p, 0.0), tl.where(m_f, b_n, 0.0)
    return b_p * tl.div_rn(1.0, tl.sum(b_p, 1))[:, None], b_n * tl.div_rn(1.0, tl.sum(b_n, 1))[:, None]


@triton.jit
def _with_others(b_d_x, p_into, p_more, i_o, m_x):
    """Add other gradients of x to that of the features."""
    if p_into is not None:
        b_d_x += tl.load(p_into + i_o, mask=m_x, other=0.0).to(tl.float32)
    if p_more is not None:
        b_d_x += tl.load(p_more + i_o, mask=m_x, other=0.0).to(tl.float32)
    return b_d_x


@triton.jit(do_not_specialize=["N", "T"])
def hedgehog_forward_kernel(p_x, p_w, p_out, N, T, strides, S: tl.constexpr):
    """Compute the features of BT of N tokens of one head."""
    i_h = (tl.program_id(0) % S.H).to(tl.int64)
    i_row = tl.program_id(0) // S.H * S.BT + tl.arange(0, S.BT)
    i_d, i_f = tl.arange(0, S.BD), tl.arange(0, S.BF)
    m_x = (i_row < N)[:, None] & (i_d < S.D)[None, :]
    b_x = _load(rows(p_x, strides, i_row, i_h, T)[:, None] + i_d[None, :], m_x, S)
    b_w, b_low = load_weight(p_w, i_h, S)
    b_p, b_n = both_softmaxes(b_x, b_w, b_low, S)
    p_out += ((i_row.to(tl.int64) * S.H + i_h) * (2 * S.F))[:, None] + i_f[None, :]
    m_out = (i_row < N)[:, None] & (i_f < S.F)[None, :]
    tl.store(p_out, b_p.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_out + S.F, b_n.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["N", "T", "PARTS"])
def hedgehog_backward_kernel(
    p_x, p_w, p_d_f, p_into, p_more, p_d_x, p_d_w, N, T, PARTS, strides, S: tl.constexpr
):  # fmt: skip
    """Compute dx of every PARTS-th tile of one head, and its part of dW. p_into, p_more: added to dx, or None."""
    PRECISION: tl.constexpr = S.PRECISION
    x, d_f = strides
    i_h, i_part = (tl.program_id(0) % S.H).to(tl.int64), tl.program_id(0) // S.H
    i_d, i_f = tl.arange(0, S.BD), tl.arange(0, S.BF)
    b_w, b_low = load_weight(p_w, i_h, S)
    b_d_w = zeros(S.BD, S.BF)
    for first in range(i_part * S.BT, N, PARTS * S.BT):
        i_row = first + tl.arange(0, S.BT)
        m_x = (i_row < N)[:, None] & (i_d < S.D)[None, :]
        m_f = (i_row < N)[:, None] & (i_f < S.F)[None, :]
        b_x = _load(rows(p_x, x, i_row, i_h, T)[:, None] + i_d[None, :], m_x, S)
        b_p, b_n = both_softmaxes(b_x, b_w, b_low, S)
        p_f = rows(p_d_f, d_f, i_row, i_h, T)[:, None] + i_f[None, :]
        b_d_p = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
        b_d_n = tl.load(p_f + S.F, mask=m_f, other=0.0).to(tl.float32)
        b_d_y = b_p * (b_d_p - tl.sum(b_p * b_d_p, 1)[:, None]) - b_n * (b_d_n - tl.sum(b_n * b_d_n, 1)[:, None])
        if PRECISION == "bfloat16":
            b_d_y = b_d_y.to(b_x.dtype)
            b_d_x = tl.dot(b_d_y, tl.trans(b_w))
            b_d_w = tl.dot(tl.trans(b_x), b_d_y, b_d_w)
        else:
            b_d_x = product(b_d_y, tl.trans(b_w), PRECISION)
            b_d_w = add_product(tl.trans(b_x), b_d_y, b_d_w, PRECISION)
        i_o = ((i_row.to(tl.int64) * S.H + i_h) * S.D)[:, None] + i_d[None, :]
        b_d_x = _with_others(b_d_x, p_into, p_more, i_o, m_x)
        tl.store(p_d_x + i_o, b_d_x.to(p_d_x.dtype.element_ty), mask=m_x)
    p_to = p_d_w + (i_part * S.H + i_h) * (S.F * S.D) + i_f[None, :] * S.D + i_d[:, None]
    tl.store(p_to, b_d_w, mask=(i_f < S.F)[None, :] & (i_d < S.D)[:, None])


@triton.jit
def hedgehog_split_kernel(p_w, p_out, S: tl.constexpr):
    """A tile of W of one head as SPLIT numbers, the smaller one first: (H, SPLIT, BF, BD), zeros in the padding."""
    i_h, tile = tl.program_id(0) % S.H, tl.program_id(0) // S.H
    i_f, i_d = tile // (S.BD // 64) * 64 + tl.arange(0, 64), tile % (S.BD // 64) * 64 + tl.arange(0, 64)
    m_w = (i_f < S.F)[:, None] & (i_d < S.D)[None, :]
    b_w = tl.load(p_w + i_h * (S.F * S.D) + i_f[:, None] * S.D + i_d[None, :], mask=m_w, other=0.0)
    p_out += i_h * (S.SPLIT * S.BF * S.BD) + i_f[:, None] * S.BD + i_d[None, :]
    b_high = b_w.to(p_out.dtype.element_ty)
    if S.SPLIT == 2:
        tl.store(p_out, (b_w - b_high.to(tl.float32)).to(b_high.dtype))
        p_out += S.BF * S.BD
    tl.store(p_out, b_high)


@triton.jit
def _wide_logits(p_x, p_w, m_t, S: tl.constexpr):
    """y = x Wᵀ (BT, BF). p_x: pointers to the tokens (BT,); p_w: to W of the head."""
    TILES: tl.constexpr = S.BD // 64
    i_d, i_f = tl.arange(0, 64), tl.arange(0, S.BF)
    b_y = zeros(S.BT, S.BF)
    for n in range(TILES * S.SPLIT):
        first = n % TILES * 64
        m_x = m_t[:, None]
        if S.D != S.BD:
            m_x = m_x & (first + i_d < S.D)[None, :]
        b_x = tl.load(p_x[:, None] + first + i_d[None, :], mask=m_x, other=0.0)
        b_w = tl.load(p_w + n // TILES * (S.BF * S.BD) + first + i_f[:, None] * S.BD + i_d[None, :])
        b_y = tl.dot(b_x, tl.trans(b_w), b_y)
    return b_y


@triton.jit(do_not_specialize=["N", "T"])
def hedgehog_wide_forward_kernel(p_x, p_w, p_out, N, T, strides, S: tl.constexpr):
    """Compute the features of BT of N tokens of one head. p_w: as `hedgehog_split_kernel` writes it."""
    i_h = (tl.program_id(0) % S.H).to(tl.int64)
    i_row = tl.program_id(0) // S.H * S.BT + tl.arange(0, S.BT)
    i_f, m_t = tl.arange(0, S.BF), i_row < N
    b_y = _wide_logits(rows(p_x, strides, i_row, i_h, T), p_w + i_h * (S.SPLIT * S.BF * S.BD), m_t, S)
    b_p, b_n = _softmaxes(b_y, S)
    p_out += ((i_row.to(tl.int64) * S.H + i_h) * (2 * S.F))[:, None] + i_f[None, :]
    m_out = m_t[:, None] & (i_f < S.F)[None, :]
    tl.store(p_out, b_p.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_out + S.F, b_n.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["N", "T"])
def hedgehog_wide_backward_kernel(
    p_x, p_w, p_d_f, p_into, p_more, p_d_x, p_d_y, N, T, strides, S: tl.constexpr
):  # fmt: skip
    """Compute dy, in the dtype of x, and dx of BT of N tokens of one head, as `hedgehog_backward_kernel`."""
    x, d_f = strides
    i_h = (tl.program_id(0) % S.H).to(tl.int64)
    i_row = tl.program_id(0) // S.H * S.BT + tl.arange(0, S.BT)
    i_d, i_f, m_t = tl.arange(0, 64), tl.arange(0, S.BF), i_row < N
    p_w += i_h * (S.SPLIT * S.BF * S.BD)
    b_p, b_n = _softmaxes(_wide_logits(rows(p_x, x, i_row, i_h, T), p_w, m_t, S), S)
    m_f = m_t[:, None] & (i_f < S.F)[None, :]
    p_f = rows(p_d_f, d_f, i_row, i_h, T)[:, None] + i_f[None, :]
    b_d = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
    b_d_y = b_p * (b_d - tl.sum(b_p * b_d, 1)[:, None])
    b_d = tl.load(p_f + S.F, mask=m_f, other=0.0).to(tl.float32)
    b_d_y = (b_d_y - b_n * (b_d - tl.sum(b_n * b_d, 1)[:, None])).to(p_d_y.dtype.element_ty)
    i_o = (i_row.to(tl.int64) * S.H + i_h)[:, None]
    tl.store(p_d_y + i_o * S.F + i_f[None, :], b_d_y, mask=m_f)
    p_w += (S.SPLIT - 1) * (S.BF * S.BD)
    for first in range(0, S.BD, 64):
        b_w = tl.load(p_w + first + i_f[:, None] * S.BD + i_d[None, :])
        m_x = m_t[:, None] & (first + i_d < S.D)[None, :]
        i_x = i_o * S.D + first + i_d[None, :]
        b_d_x = _with_others(tl.dot(b_d_y, b_w), p_into, p_more, i_x, m_x)
        tl.store(p_d_x + i_x, b_d_x.to(p_d_x.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["N", "T", "PARTS"])
def hedgehog_weight_gradient_kernel(p_x, p_d_y, p_d_w, N, T, PARTS, x, S: tl.constexpr, PD: tl.constexpr):
    """Σ dy xᵀ over every PARTS-th tile of 64 tokens, for 64 rows of W of one head. p_d_w: (PARTS, H, F, D)."""
    i_h, tile = (tl.program_id(0) % S.H).to(tl.int64), tl.program_id(0) // S.H
    i_part, i_f = tile // (S.BF // 64), tile % (S.BF // 64) * 64 + tl.arange(0, 64)
    i_d, i_t = tl.arange(0, PD), tl.arange(0, 64)
    b_d_w = zeros(64, PD)
    for first in range(i_part * 64, N, PARTS * 64):
        i_row = first + i_t
        m_t = (i_row < N)[:, None]
        p_y = p_d_y + ((i_row.to(tl.int64) * S.H + i_h) * S.F)[:, None] + i_f[None, :]
        b_y = tl.load(p_y, mask=m_t & (i_f < S.F)[None, :], other=0.0)
        m_x = m_t & (i_d < S.D)[None, :]
        b_x = tl.load(rows(p_x, x, i_row, i_h, T)[:, None] + i_d[None, :], mask=m_x, other=0.0)
        b_d_w = tl.dot(tl.trans(b_y), b_x, b_d_w)
    p_to = p_d_w + (i_part * S.H + i_h) * (S.F * S.D) + i_f[:, None] * S.D + i_d[None, :]
    tl.store(p_to, b_d_w, mask=(i_f < S.F)[:, None] & (i_d < S.D)[None, :])
