"""Embeddings of a decoded token and of the n-grams that end with it."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.common.tiles import padded, zeros
from longspan.ops.decode.triton.token import await_previous, dependent_launch

# N columns, tables for n-grams of these lengths, their rows, the codes before a token, and the hash.
EmbeddingSizes = namedtuple("EmbeddingSizes", "N BN LENGTHS BUCKETS REACH BR MULTIPLIER MODULUS")


def decode_embedding(
    tokens: Tensor, recent: Tensor, weights: tuple[Tensor, ...], lengths: tuple[int, ...], hashing: tuple[int, int]
) -> Tensor:
    """Run `ops.decode.fused_embedding`."""
    B, (_, N), reach = len(tokens), weights[0].shape, recent.shape[1]
    out = weights[0].new_empty(B, N)
    sizes = EmbeddingSizes(N, padded(N, 16), lengths, len(weights[1]), reach, padded(reach, 1), *hashing)
    with on_device(tokens):
        decode_embedding_kernel[(B,)](
            tokens, recent, weights[0], weights[1:], out, W=sizes, num_warps=4, **dependent_launch(out)
        )
    return out


@triton.jit
def decode_embedding_kernel(p_token, p_recent, p_weight, tables, p_out, W: tl.constexpr, PDL: tl.constexpr):
    """The sum of the embeddings for one token, rounded after each as separate operations would.

    p_recent: (B, REACH) the codes before the token, oldest first; its own is appended and the oldest dropped.
    """
    await_previous(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    i_n, i_r = tl.arange(0, W.BN), tl.arange(0, W.BR)
    m_n = i_n < W.N
    token = tl.load(p_token + i_b)
    p_recent += i_b * W.REACH + i_r
    b_code = tl.load(p_recent, mask=i_r < W.REACH, other=0)
    b_next = tl.load(p_recent + 1, mask=i_r + 1 < W.REACH, other=0)
    dtype = p_out.dtype.element_ty
    b_sum = zeros(W.BN)
    hashed = token + 1
    for length in tl.static_range(2, W.REACH + 2):
        hashed = (hashed * W.MULTIPLIER + tl.sum(tl.where(i_r == W.REACH + 1 - length, b_code, 0))) % W.MODULUS
        for i in tl.static_range(len(W.LENGTHS)):
            if W.LENGTHS[i] == length:
                b_part = tl.load(tables[i] + hashed % W.BUCKETS * W.N + i_n, mask=m_n, other=0.0)
                b_sum = (b_sum + b_part.to(tl.float32)).to(dtype).to(tl.float32)
    b_own = tl.load(p_weight + token * W.N + i_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + i_b * W.N + i_n, (b_own + b_sum).to(dtype), mask=m_n)
    tl.debug_barrier()  # Every warp has loaded the codes.
    tl.store(p_recent, tl.where(i_r == W.REACH - 1, token + 1, b_next), mask=i_r < W.REACH)
