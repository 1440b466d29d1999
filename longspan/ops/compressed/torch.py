"""Projection of a sequence to R compressed tokens, X̃ = Eᵀx, summed in float32 whatever the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.torch_private import direct_apply, forward_ad_level

# Products of half-precision matrices with float32 results: PyTorch 2.8 or newer.
HAS_FLOAT32_RESULTS = "dtype" in torch.ops.aten.bmm.overloads()

# On a GPU, float32 sums are split into at most MAX_PARTS partial sums of at least PART_LENGTH tokens.
PART_LENGTH, MAX_PARTS = 128, 32


def compress(e: Tensor, x: Tensor) -> Tensor:
    """Return Σ_i e_i x_iᵀ.

    Args:
        e: Projection (B or 1, S, Hkv or 1, R).
        x: Keys or values (B, S, Hkv, N).

    Returns:
        (B, Hkv, R, N) in float32; in float64 for float64 inputs.
    """
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or forward_ad_level() >= 0:
        return _fold_heads(_product, e, x)
    e = e.to(x.dtype)
    return _compress_direct(e, x) if dispatch.eager_untraced(x) else _fold_heads(_compress, e, x)


def _fold_heads(product: Callable[[Tensor, Tensor], Tensor], e: Tensor, x: Tensor) -> Tensor:
    """Apply `product` with the heads as columns of one matrix where they share a projection."""
    heads = x.shape[2]
    if heads == e.shape[2]:
        return product(e, x)
    folded = product(e, x.flatten(2).unsqueeze(2))  # (B, 1, R, Hkv·N)
    return folded.squeeze(1).unflatten(2, (heads, -1)).transpose(1, 2)


def _product(e: Tensor, x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    left, right = e.to(dtype).permute(0, 2, 3, 1), x.to(dtype).transpose(1, 2)
    if x.is_cuda and dtype == torch.float32 and not torch.compiler.is_compiling():
        return _product_in_parts(left, right)
    return left @ right


def _product_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """Return left (·, S) @ right (S, ·) as a sum of partial products, which round less than one long sum on a GPU."""
    S = right.shape[2]
    parts = min(S // PART_LENGTH, MAX_PARTS)
    if parts < 2:
        return left @ right
    end = S - S % parts
    columns, rows = left[..., :end].unflatten(3, (parts, -1)), right[:, :, :end].unflatten(2, (parts, -1))
    total = (columns.transpose(2, 3) @ rows).sum(2)
    return total if end == S else total + left[..., end:] @ right[:, :, end:]


def _half_precision_forward(e: Tensor, x: Tensor) -> Tensor:
    """e (B or 1, S, G, R) and x (B, S, G, N) of one half-precision dtype -> (B, G, R, N) in float32."""
    if not HAS_FLOAT32_RESULTS or not x.is_cuda:
        return _product(e, x).contiguous()
    B, S, G, N = x.shape
    if B * G == 1:
        # A single matrix product is split along the tokens (split-K), a batched one is not.
        return torch.mm(e.view(S, -1).t(), x.view(S, N), out_dtype=torch.float32)[None, None]
    left, right = e.permute(0, 2, 3, 1).expand(B, -1, -1, -1).flatten(0, 1), x.transpose(1, 2).flatten(0, 1)
    return torch.bmm(left, right, out_dtype=torch.float32).unflatten(0, (B, G))


def _half_precision_backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
    e, inputs = ctx.saved_tensors
    x, d, d_e, d_x = inputs, d.to(inputs.dtype), None, None
    if e.shape[2] < inputs.shape[2]:
        x, d = inputs.flatten(2).unsqueeze(2), d.transpose(1, 2).flatten(2).unsqueeze(1)
    B, S, G, N = x.shape
    single = B * G == 1
    if ctx.needs_input_grad[0]:  # (B, S, G, R)
        d_e = (x.view(S, N) @ d[0, 0].t())[None, :, None] if single else (x.transpose(1, 2) @ d.mT).transpose(1, 2)
        d_e = d_e if len(e) == len(x) else d_e.sum(0, keepdim=True)
    if ctx.needs_input_grad[1]:  # (B, S, G, N)
        d_x = (e.view(S, -1) @ d[0, 0])[None, :, None] if single else (e.transpose(1, 2) @ d).transpose(1, 2)
        d_x = d_x.reshape(inputs.shape)
    return d_e, d_x


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


class _Compress(torch.autograd.Function):
    """`longspan::compress` for all heads without torch.library; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(e, x)
        return _fold_heads(_half_precision_forward, e, x)

    backward = staticmethod(_half_precision_backward)


_compress_direct = direct_apply(_Compress)
_compress = torch.library.custom_op("longspan::compress", _half_precision_forward, mutates_args=())
_compress.register_autograd(_half_precision_backward, setup_context=_save)


@_compress.register_fake
def _(e: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], e.shape[3], x.shape[3], dtype=torch.float32)
