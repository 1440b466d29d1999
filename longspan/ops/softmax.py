"""Softmax attention by PyTorch's own kernels, with rules added: a query that sees no key gives zeros, its gradient is
finite, and float32 is float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# As many attention weights at a time where PyTorch would keep them all; smaller blocks leave holes in glibc's memory.
_WEIGHTS = 1 << 24

# Gradients of few keys: PyTorch's kernels take one program for each block of so many keys of a head, which should be as
# many programs as fill a large device, each with as many queries as pay for it.
_KEYS, _PROGRAMS, _QUERIES = 64, 256, 512


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None = None,
    blind: bool = True,
    causal: bool = False,
    grouped: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q: (B, H, T, D), k: (B, Hkv, S, D), v: (B, Hkv, S, E), heads first -> (B, H, T, E).

    mask: bool, True = seen, broadcast to (B, H, T, S). bias: added to the scores, broadcast likewise.
    blind: whether there may be queries that see nothing. grouped: whether Hkv < H. Both are said, not found out:
    under torch.compile sizes may be symbols.

    On CUDA PyTorch's fused kernel multiplies float32 as three products of tf32, which is not as near as float32 comes.
    Here it does not, unless `torch.set_float32_matmul_precision` allows tf32 to products of matrices as well; a
    compiler, and dropout, take the fused kernel all the same.
    """
    if _in_full(q) and not dropout:
        return _exact(q, k, v, mask, bias, blind, causal, grouped, scale)
    if dropout and not causal and q.device.type == "cpu" and not torch.compiler.is_compiling():
        return _dropping(q, k, v, mask, bias, blind, grouped, scale, dropout)
    if mask is not None or bias is not None or causal:
        return _attend(q, k, v, mask, bias, blind, causal, grouped, scale, dropout)
    if not grouped or k.shape[1] > 1:
        return _folded(q, k, v, scale, grouped, dropout)
    # All heads read the same keys: they are so many more queries of one head.
    B, H, T, D = q.shape
    out = _folded(q.transpose(1, 2).reshape(B, 1, T * H, D), k, v, scale, False, dropout)
    return out.reshape(B, T, H, v.shape[3]).transpose(1, 2)


def _in_full(q: Tensor) -> bool:
    """Whether products must be those of float32, and PyTorch's fused kernel makes others."""
    if torch.compiler.is_compiling() or not q.is_cuda or q.dtype != torch.float32:
        return False
    return torch.get_float32_matmul_precision() == "highest"


def _exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    blind: bool,
    causal: bool,
    grouped: bool,
    scale: float | None,
) -> Tensor:
    """As products of matrices, in blocks of queries where there are many weights, made again for the backward pass."""
    T = q.shape[2]
    rows = max(1, _WEIGHTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if rows >= T:
        return _products(q, k, v, mask, bias, blind, grouped, scale, 0 if causal else None)

    def block(q: Tensor, mask: Tensor | None, bias: Tensor | None, i: int) -> Tensor:
        given = q, k, v, mask, bias, blind, grouped, scale, i if causal else None
        if not torch.is_grad_enabled():
            return _products(*given)
        return checkpoint(_products, *given, use_reentrant=False, preserve_rng_state=False)

    return _in_blocks(block, q, mask, bias, rows)


def _products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    blind: bool,
    grouped: bool,
    scale: float | None,
    first: int | None,
) -> Tensor:
    """first: where each query sees the keys up to itself, the place of the first one."""
    if first is not None:
        end = first + q.shape[2]
        place = torch.arange(end, device=q.device)
        k, v, mask, blind = k[:, :, :end], v[:, :, :end], place[first:, None] >= place, False
    with sdpa_kernel(SDPBackend.MATH):
        return _attend(q, k, v, mask, bias, blind, False, grouped, scale, 0.0)


def _folds(q: Tensor, k: Tensor) -> int:
    """Into how many rows queries (B, H, T, D) are divided for the sake of the gradients of keys (B, Hkv, S, D)."""
    if not q.is_cuda or not torch.is_grad_enabled():
        return 1
    programs = q.shape[0] * q.shape[1] * -(-k.shape[2] // _KEYS)
    return max(1, min(_PROGRAMS // programs, q.shape[2] // _QUERIES))


def _folded(q: Tensor, k: Tensor, v: Tensor, scale: float | None, grouped: bool, dropout: float) -> Tensor:
    """Every query over all keys, the queries of a row divided among `_folds` rows."""
    folds = _folds(q, k)
    if folds == 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, enable_gqa=grouped)
    B, H, T, D = q.shape
    padded = q if T % folds == 0 else F.pad(q, (0, 0, 0, -T % folds))
    t = padded.shape[2] // folds
    rows = padded.reshape(B, H, folds, t, D).transpose(1, 2).reshape(B * folds, H, t, D)
    shared = k is v
    k = k[:, None].expand(-1, folds, -1, -1, -1).flatten(0, 1)
    v = k if shared else v[:, None].expand(-1, folds, -1, -1, -1).flatten(0, 1)
    out = F.scaled_dot_product_attention(rows, k, v, dropout_p=dropout, scale=scale, enable_gqa=grouped)
    out = out.reshape(B, folds, H, t, -1).transpose(1, 2).reshape(B, H, folds * t, -1)
    # Not a slice of all: its gradient would be copied into zeros.
    return out if padded is q else out[:, :, :T]


def _dropping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    blind: bool,
    grouped: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Dropping weights on the CPU, PyTorch keeps all for the backward pass; here blocks of queries make them again."""
    rows = max(1, _WEIGHTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if q.shape[2] <= rows or not torch.is_grad_enabled():
        return _attend(q, k, v, mask, bias, blind, False, grouped, scale, dropout)

    def block(q: Tensor, mask: Tensor | None, bias: Tensor | None, _: int) -> Tensor:
        given = q, k, v, mask, bias, blind, False, grouped, scale, dropout
        return checkpoint(_attend, *given, use_reentrant=False)

    return _in_blocks(block, q, mask, bias, rows)


def _in_blocks(block: Callable[..., Tensor], q: Tensor, mask: Tensor | None, bias: Tensor | None, rows: int) -> Tensor:
    """`block` of so many queries at a time, with their mask, their bias and the place of the first."""

    def piece(x: Tensor | None, i: int) -> Tensor | None:
        return x if x is None or x.shape[-2] == 1 else x[..., i : i + rows, :]

    blocks = [block(q[:, :, i : i + rows], piece(mask, i), piece(bias, i), i) for i in range(0, q.shape[2], rows)]
    return torch.cat([x.transpose(1, 2) for x in blocks], 1).transpose(1, 2)  # in the order that callers take it


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    blind: bool,
    causal: bool,
    grouped: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    if mask is None and bias is None:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    assert not causal
    sees_nothing = None
    if mask is not None and blind:
        # Softmax over nothing is NaN: such a row looks at everything instead, and its answer is dropped.
        sees_nothing = ~mask.any(-1, keepdim=True)
        mask = mask | sees_nothing
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)
    return out if sees_nothing is None else torch.where(sees_nothing, 0, out)
