"""Σ_i e_i x_iᵀ: a sequence compressed to R rows, its sums in float32 whatever the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.ops.common import dispatch

# A product of halves that leaves float32; older releases of PyTorch cannot.
_WIDE = "dtype" in torch.ops.aten.bmm.overloads()

# Tokens that float32 sums at a time on a GPU, at least, and how many such sums there are at most.
_PIECE, _PIECES = 128, 32


def compress(e: Tensor, x: Tensor) -> Tensor:
    """e (B or 1, S, Hkv or 1, R), x (B, S, Hkv, N) -> (B, Hkv, R, N), float32, or float64 of float64."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return _for_all_heads(_product, e, x)
    e = e.to(x.dtype)
    return _halves(e, x) if dispatch.eager_untraced(x) else _for_all_heads(_compress, e, x)


def _for_all_heads(product: Any, e: Tensor, x: Tensor) -> Tensor:
    """One table for all heads takes them as one, so much wider."""
    heads = x.shape[2]
    if heads == e.shape[2]:
        return product(e, x)
    rows = product(e, x.flatten(2).unsqueeze(2))  # (B, 1, R, Hkv·N)
    return rows.squeeze(1).unflatten(2, (heads, -1)).transpose(1, 2)


def _product(e: Tensor, x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    left, right = e.to(dtype).permute(0, 2, 3, 1), x.to(dtype).transpose(1, 2)
    if x.is_cuda and dtype == torch.float32 and not torch.compiler.is_compiling():
        return _in_pieces(left, right)
    return left @ right


def _in_pieces(left: Tensor, right: Tensor) -> Tensor:
    """left (·, S) @ right (S, ·), in pieces along S: a GPU sums it as one chain, whose roundings add up."""
    S = right.shape[2]
    number = min(S // _PIECE, _PIECES)
    if number < 2:
        return left @ right
    whole = S - S % number
    pieces = left[..., :whole].unflatten(3, (number, -1)).transpose(2, 3) @ right[:, :, :whole].unflatten(
        2, (number, -1)
    )
    rows = pieces.sum(2)
    return rows if whole == S else rows + left[..., whole:] @ right[:, :, whole:]


def _forward(e: Tensor, x: Tensor) -> Tensor:
    """e (B or 1, S, G, R) and x (B, S, G, N) of one half precision -> (B, G, R, N) in float32."""
    if not _WIDE or not x.is_cuda:
        return _product(e, x).contiguous()
    B, S, G, N = x.shape
    if B * G == 1:
        # As a single product it is cut along the tokens, too, and fills the device.
        return torch.mm(e.view(S, -1).t(), x.view(S, N), out_dtype=torch.float32)[None, None]
    left, right = e.permute(0, 2, 3, 1).expand(B, -1, -1, -1).flatten(0, 1), x.transpose(1, 2).flatten(0, 1)
    return torch.bmm(left, right, out_dtype=torch.float32).unflatten(0, (B, G))


def _backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
    e, given = ctx.saved_tensors
    x, d, d_e, d_x = given, d.to(given.dtype), None, None
    if e.shape[2] < given.shape[2]:
        x, d = given.flatten(2).unsqueeze(2), d.transpose(1, 2).flatten(2).unsqueeze(1)
    B, S, G, N = x.shape
    one = B * G == 1
    if ctx.needs_input_grad[0]:
        # (B, S, G, R)
        d_e = (x.view(S, N) @ d[0, 0].t())[None, :, None] if one else (x.transpose(1, 2) @ d.mT).transpose(1, 2)
        d_e = d_e if len(e) == len(x) else d_e.sum(0, keepdim=True)
    if ctx.needs_input_grad[1]:
        # (B, S, G, N)
        d_x = (e.view(S, -1) @ d[0, 0])[None, :, None] if one else (e.transpose(1, 2) @ d).transpose(1, 2)
        d_x = d_x.reshape(given.shape)
    return d_e, d_x


class _Halves(torch.autograd.Function):
    """`longspan::compress` for all heads, called at once."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(e, x)
        return _for_all_heads(_forward, e, x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return _backward(ctx, d)


# `Function.apply` looks for transforms of functorch first, as `dispatch.eager_untraced` has done.
_halves: Any = super(torch.autograd.Function, _Halves).apply

_compress = torch.library.custom_op("longspan::compress", _forward, mutates_args=())


@_compress.register_fake
def _(e: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], e.shape[3], x.shape[3], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_compress.register_autograd(_backward, setup_context=_keep)
