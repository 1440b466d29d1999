"""Running sums over chunks, in place: PyTorch's cumsum takes one thread for each column."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.ops.common.tiles import zeros


@triton.jit
def _add(a, b):
    return a + b


@triton.jit(do_not_specialize=["slots"])
def running_sums_kernel(p_x, slots, M: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """x (rows, slots, M) in float32 becomes its running sum over the slots; one program per row."""
    i_n, i_m = tl.arange(0, BLOCK), tl.arange(0, BM)
    p_x += tl.program_id(0).to(tl.int64) * slots * M
    b_last = zeros(BM)
    for n in range(0, slots, BLOCK):
        p_tile = p_x + (n + i_n)[:, None] * M + i_m[None, :]
        m_x = (n + i_n < slots)[:, None] & (i_m < M)[None, :]
        b_x = tl.associative_scan(tl.load(p_tile, mask=m_x, other=0.0), 0, _add) + b_last[None, :]
        tl.store(p_tile, b_x, mask=m_x)
        b_last = tl.sum(tl.where((i_n == BLOCK - 1)[:, None], b_x, 0.0), 0)
