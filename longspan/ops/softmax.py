"""Softmax attention by PyTorch's kernels. A query that sees no key returns zeros with finite gradients, and float32 is
computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from longspan.ops.common import dispatch

# Attention weights per block of queries where PyTorch would save all; smaller blocks fragment glibc's heap.
MAX_WEIGHTS = 1 << 24

# PyTorch's backward kernels run one program per 64 keys of a head. For few keys, queries are divided among more batch
# rows, for up to 256 programs with at least 512 queries each.
KEYS_PER_PROGRAM, MAX_PROGRAMS, MIN_QUERIES = 64, 256, 512


EXACT = "float32 by products that are exact, because torch.get_float32_matmul_precision() is 'highest'"


class _Options(NamedTuple):
    """Arguments of `attend` beside tensors."""

    blind: bool
    causal: bool
    grouped: bool
    scale: float | None
    dropout: float


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
    """Compute softmax attention with heads before tokens.

    On CUDA, PyTorch's fused kernel computes float32 by three tf32 products, which is less exact than float32. It is
    used only if `torch.set_float32_matmul_precision` allows tf32 for matrix products, when compiling, and with dropout.

    Args:
        q: Queries (B, H, T, D).
        k: Keys (B, Hkv, S, D).
        v: Values (B, Hkv, S, E).
        mask: True for visible keys, broadcast to (B, H, T, S).
        bias: Added to the scores, broadcast to (B, H, T, S).
        blind: Some queries may see no key. An argument, because under torch.compile it cannot be read from the mask.
        causal: Hide keys after the query.
        grouped: Hkv < H. An argument, because under torch.compile sizes may be symbols.
        scale: Scale of the scores, 1/√D by default.
        dropout: Probability of dropping a weight.

    Returns:
        (B, H, T, E).
    """
    options = _Options(blind, causal, grouped, scale, dropout)
    if dispatch.recording is not None:
        exact = _needs_exact_float32(q) and not dropout
        dispatch.record("softmax attention", "sdpa", EXACT if exact else None)
        return q.new_empty(*q.shape[:3], v.shape[3])
    if _needs_exact_float32(q) and not dropout:
        return _exact(q, k, v, mask, bias, options)
    if dropout and not causal and q.device.type == "cpu" and not torch.compiler.is_compiling():
        return _recomputed_dropout(q, k, v, mask, bias, options)
    if mask is not None or bias is not None or causal:
        return _attend(q, k, v, mask, bias, options)
    if not grouped or k.shape[1] > 1:
        return _folded(q, k, v, options)
    # All heads share one key/value head: they become queries of one head.
    B, H, T, D = q.shape
    out = _folded(q.transpose(1, 2).reshape(B, 1, T * H, D), k, v, options._replace(grouped=False))
    return out.reshape(B, T, H, v.shape[3]).transpose(1, 2)


def _needs_exact_float32(q: Tensor) -> bool:
    """Return whether products must be exact float32, which PyTorch's fused kernel does not compute."""
    if not q.is_cuda or q.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return torch.get_float32_matmul_precision() == "highest"


def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, options: _Options) -> Tensor:
    """Attend by matrix products, in blocks of queries that the backward pass recomputes if there are many weights."""
    rows = _rows_per_block(q, k)
    if rows >= q.shape[2]:
        return _math(q, k, v, mask, bias, options, 0)

    def block(q: Tensor, mask: Tensor | None, bias: Tensor | None, i: int) -> Tensor:
        if not torch.is_grad_enabled():
            return _math(q, k, v, mask, bias, options, i)
        return checkpoint(_math, q, k, v, mask, bias, options, i, use_reentrant=False, preserve_rng_state=False)

    return _in_blocks(block, q, mask, bias, rows)


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, options: _Options, first: int
) -> Tensor:
    """Attend by PyTorch's unfused kernel; q begins at position `first`."""
    if options.causal:
        end = first + q.shape[2]
        position = torch.arange(end, device=q.device)
        k, v, mask = k[:, :, :end], v[:, :, :end], position[first:, None] >= position
        options = options._replace(causal=False, blind=False)
    with sdpa_kernel(SDPBackend.MATH):
        return _attend(q, k, v, mask, bias, options)


def _folds(q: Tensor, k: Tensor) -> int:
    """Return into how many batch rows to divide queries (B, H, T, D), for the gradients of keys (B, Hkv, S, D)."""
    if not q.is_cuda or not torch.is_grad_enabled():
        return 1
    programs = q.shape[0] * q.shape[1] * -(-k.shape[2] // KEYS_PER_PROGRAM)
    return max(1, min(MAX_PROGRAMS // programs, q.shape[2] // MIN_QUERIES))


def _folded(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    """Attend to all keys, with the queries of a batch row divided among `_folds` rows."""
    folds = _folds(q, k)
    if folds == 1:
        return _sdpa(q, k, v, None, options)
    B, H, T, D = q.shape
    padded = q if T % folds == 0 else F.pad(q, (0, 0, 0, -T % folds))
    t = padded.shape[2] // folds
    rows = padded.reshape(B, H, folds, t, D).transpose(1, 2).reshape(B * folds, H, t, D)
    shared_kv = k is v
    k = k[:, None].expand(-1, folds, -1, -1, -1).flatten(0, 1)
    v = k if shared_kv else v[:, None].expand(-1, folds, -1, -1, -1).flatten(0, 1)
    out = _sdpa(rows, k, v, None, options)
    out = out.reshape(B, folds, H, t, -1).transpose(1, 2).reshape(B, H, folds * t, -1)
    # Without padding, no slice: its gradient would be copied into zeros.
    return out if padded is q else out[:, :, :T]


def _recomputed_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, options: _Options
) -> Tensor:
    """Attend with dropout on a CPU in blocks of queries, recomputed in the backward pass: PyTorch saves all weights."""
    rows = _rows_per_block(q, k)
    if q.shape[2] <= rows or not torch.is_grad_enabled():
        return _attend(q, k, v, mask, bias, options)

    def block(q: Tensor, mask: Tensor | None, bias: Tensor | None, _: int) -> Tensor:
        return checkpoint(_attend, q, k, v, mask, bias, options, use_reentrant=False)

    return _in_blocks(block, q, mask, bias, rows)


def _rows_per_block(q: Tensor, k: Tensor) -> int:
    return max(1, MAX_WEIGHTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))


def _in_blocks(block: Callable[..., Tensor], q: Tensor, mask: Tensor | None, bias: Tensor | None, rows: int) -> Tensor:
    """Call `block` on `rows` queries at a time, with their mask, their bias and the index of the first."""

    def part(x: Tensor | None, i: int) -> Tensor | None:
        return x if x is None or x.shape[-2] == 1 else x[..., i : i + rows, :]

    blocks = [block(q[:, :, i : i + rows], part(mask, i), part(bias, i), i) for i in range(0, q.shape[2], rows)]
    return torch.cat([x.transpose(1, 2) for x in blocks], 1).transpose(1, 2)  # tokens before heads in memory


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, options: _Options) -> Tensor:
    assert not options.causal or (mask is None and bias is None)
    sees_nothing = None
    if mask is not None and options.blind:
        # Softmax over no key is NaN: such a query sees all keys instead, and its output is replaced by zeros.
        sees_nothing = ~mask.any(-1, keepdim=True)
        mask = mask | sees_nothing
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    out = _sdpa(q, k, v, mask, options)
    return out if sees_nothing is None else torch.where(sees_nothing, 0, out)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    return F.scaled_dot_product_attention(
        *(q, k, v, mask, options.dropout, options.causal), scale=options.scale, enable_gqa=options.grouped
    )
