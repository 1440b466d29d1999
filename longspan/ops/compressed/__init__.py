"""Linformer: softmax attention over R compressed keys and values, K̃ = Eᵀk and Ṽ = Fᵀv. O(T·R) time and memory.

The README beside this file derives the operation, its causal form and its gradients.
"""

from __future__ import annotations

from torch import Tensor, autocast, bfloat16, float16, is_autocast_enabled, is_grad_enabled
from torch import dtype as DType

from longspan.ops.common import dispatch
from longspan.ops.compressed import fused
from longspan.ops.compressed.fused import CompressedProblem as CompressedProblem
from longspan.ops.compressed.torch import HAS_FLOAT32_RESULTS
from longspan.ops.compressed.torch import compress as compress


def compressed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to compressed keys and values: out = softmax(q k̃ᵀ / √D) ṽ. For arguments without `why_not_triton`.

    Args:
        q: Queries (B, T, H, D) in half precision.
        k: Compressed keys (B, Hkv, R, D), float32 or as q.
        v: Compressed values (B, Hkv, R, E), float32 or as q.

    Returns:
        (B, T, H, E).
    """
    if dispatch.recording is not None:
        return q.new_empty(*q.shape[:3], v.shape[3])
    if is_grad_enabled():
        return fused.attention(q, k, v)
    return fused.kernels().forward(q, k, v, q.shape[3] ** -0.5)[0]


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Compress keys and values and attend to them, bidirectionally. For arguments without `why_not_triton`.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, S, Hkv, D).
        v: Values (B, S, Hkv, E).
        e: Projection of keys (1, at least S, R).
        f: Projection of values (1, at least S, R).

    Returns:
        (B, T, H, E).
    """
    if dispatch.recording is not None:
        return q.new_empty(*q.shape[:3], v.shape[3])
    return fused.projected_attention(q, k, v, e, f)


def linformer_layer(
    x: Tensor,
    w_q: Tensor,
    w_kv: Tensor,
    table: Tensor,
    w_out: Tensor,
    bias: Tensor | None,
    problem: CompressedProblem,
    dtype: DType,
) -> Tensor:
    """Compute a bidirectional self-attention layer from tokens to the output projection, in half precision.

    For arguments without `why_not_triton`.

    Args:
        x: Tokens (B, T, dim).
        w_q: Weight of the query projection (H·D, dim).
        w_kv: Weight of the key and value projections (Hkv·(D + E), dim), or of keys alone if values are the keys.
        table: Projection of keys and values (1, at least T, R).
        w_out: Weight of the output projection (·, H·E).
        bias: Bias of the output projection.
        problem: Heads and dimensions.
        dtype: bfloat16 or float16, in which products are computed.

    Returns:
        (B, T, ·) in `dtype`.
    """
    weights = w_q, w_kv, table, w_out, bias, problem, dtype
    if dispatch.recording is not None:
        return x.new_empty(*x.shape[:2], len(w_out), dtype=dtype)
    if not is_autocast_enabled("cuda"):
        return fused.layer(x, *weights)
    with autocast("cuda", enabled=False):
        return fused.layer(x, *weights)


def why_not_triton(x: Tensor, dtype: DType, problem: CompressedProblem) -> str | None:
    """Return why attention of tokens x (B, T, …) in this dtype runs in eager PyTorch; None if kernels support it."""
    why = _why_not_triton(x, dtype, problem)
    if dispatch.recording is not None:
        dispatch.record("attention to compressed keys", "compressed", why)
    return why


def _why_not_triton(x: Tensor, dtype: DType, problem: CompressedProblem) -> str | None:
    if not dispatch.eager_untraced(x):
        return "the tensors are not on CUDA, or a tracer is active (torch.compile, torch.func, tensor subclass)"
    if dtype not in (bfloat16, float16) or not HAS_FLOAT32_RESULTS:
        return f"{str(dtype).removeprefix('torch.')}; the kernels take bfloat16 and float16, with PyTorch 2.8 or newer"
    dim, group = max(problem.head_dim, problem.value_dim), problem.num_heads / problem.num_kv_heads
    if problem.rank > dispatch.LARGEST or dim > 64 or group > 64:
        return (
            f"rank {problem.rank}, dimension {dim} and {group:g} query heads per key/value head; "
            f"the kernels take up to {dispatch.LARGEST}, 64 and 64"
        )
    if not x.shape[0] or x.shape[1] < 128:
        return f"{x.shape[1]} tokens; the kernels are not faster below 128"
    return dispatch.triton_missing(x.device) or dispatch.insufficient_shared_memory(x, 227)
