"""Linformer: softmax attention over R compressed keys and values, K̃ = Eᵀk and Ṽ = Fᵀv. O(T·R) time and memory.

The README beside this file derives the operation, its causal form and its gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, autocast, bfloat16, float16, float32, is_autocast_enabled, is_grad_enabled
from torch import dtype as DType

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, group, lazy_module, refuse_forward_mode
from longspan.ops.common.batches import split_batch
from longspan.ops.compressed import fused
from longspan.ops.compressed.fused import CompressedProblem as CompressedProblem
from longspan.ops.compressed.torch import HAS_FLOAT32_RESULTS
from longspan.ops.compressed.torch import compress as compress

_causal_kernels = lazy_module("longspan.ops.compressed.triton.causal")

# The causal kernels: tokens in a chunk, and the largest dimension of a head.
CHUNK, LARGEST_CAUSAL = 64, 128


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

    def run(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor]:
        v = k if v is None else v
        if is_grad_enabled():
            return (fused.attention(q, k, v),)
        return (fused.kernels().forward(q, k, v, q.shape[3] ** -0.5)[0],)

    return split_batch(run, dispatch.LARGEST_AXIS // k.shape[1], q, k, None if v is k else v)[0]


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

    def run(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor]:
        return (fused.projected_attention(q, k, k if v is None else v, e, f),)

    return split_batch(run, dispatch.LARGEST_AXIS // k.shape[2], q, k, None if v is k else v)[0]


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

    def run(x: Tensor) -> tuple[Tensor]:
        return (fused.layer(x, *weights),)

    rows = dispatch.LARGEST_AXIS // problem.num_kv_heads
    if not is_autocast_enabled("cuda"):
        return split_batch(run, rows, x)[0]
    with autocast("cuda", enabled=False):
        return split_batch(run, rows, x)[0]


def why_not_triton(x: Tensor, dtype: DType, problem: CompressedProblem) -> str | None:
    """Return why attention of tokens x (B, T, …) in this dtype runs in eager PyTorch; None if kernels support it."""
    why = _why_not_triton(x, dtype, problem)
    if dispatch.recording is not None:
        dispatch.record("attention to compressed keys", "compressed", why)
    return why


def _why_not_triton(x: Tensor, dtype: DType, problem: CompressedProblem) -> str | None:
    if not dispatch.eager_untraced(x):
        return dispatch.unavailable(x) or "a traced call (torch.compile, torch.func or a tensor subclass)"
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
    if (why := dispatch.large_axis(problem.num_kv_heads, "key/value heads")) is not None:
        return why
    return dispatch.triton_missing(x.device) or dispatch.insufficient_shared_memory(x, 227)


class CausalInputs(NamedTuple):
    """Tensors of `longspan::causal_linformer`: see `causal_linformer`."""

    q: Tensor
    k: Tensor
    v: Tensor
    e: Tensor
    f: Tensor
    start_k: Tensor | None
    start_v: Tensor | None


class CausalSaved(NamedTuple):
    """What its backward pass takes before them. keys, values: the sums before each chunk. pairs: tril(P fᵀ) of each."""

    d_out: Tensor
    d_end_k: Tensor | None
    d_end_v: Tensor | None
    out: Tensor
    lse: Tensor
    keys: Tensor
    values: Tensor
    pairs: Tensor


def causal_linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    start_k: Tensor | None = None,
    start_v: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to each query's own compressed prefix: out_t = softmax(q_t K̃_tᵀ / √D) Ṽ_t, K̃_t = K̃_0 + Σ_{i ≤ t} e_i k_iᵀ.

    O(T·R·(D + E)) time. The scores (T, R) of the forward pass are not stored. For arguments without
    `why_not_triton_causal`.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, T, Hkv, D).
        v: Values (B, T, Hkv, E).
        e: Projection of keys (B or 1, T, Hkv or 1, R), in any dtype.
        f: Projection of values, likewise.
        start_k: K̃_0 (B, Hkv, R, D) in float32; None is 0.
        start_v: Ṽ_0 (B, Hkv, R, E) in float32; None is 0.

    Returns:
        (B, T, H, E), and the compressed keys and values after the last token in float32.
    """
    rows = dispatch.LARGEST_AXIS // q.shape[2]
    out, end_k, end_v = split_batch(_CausalLinformer.run, rows, q, k, v, e, f, start_k, start_v)
    return out, end_k, end_v


def why_not_triton_causal(q: Tensor, k: Tensor, v: Tensor, rank: int) -> str | None:
    """Return why causal attention is computed by two passes of linear attention; None if the kernels support it."""
    if (why := dispatch.unavailable(q)) is not None:
        return why
    if not q.dtype == k.dtype == v.dtype == bfloat16:
        return f"q, k and v are {', '.join(str(x.dtype) for x in (q, k, v))}; the kernels take bfloat16"
    dim = max(q.shape[3], v.shape[3])
    if rank > dispatch.LARGEST or dim > LARGEST_CAUSAL:
        return f"rank {rank} and dimension {dim}; the kernels take up to {dispatch.LARGEST} and {LARGEST_CAUSAL}"
    if not q.numel() or not v.numel():
        return "an empty tensor"
    why = dispatch.large_axis(q.shape[2], "heads")
    return why or dispatch.insufficient_shared_memory(q, 227)


@differentiable_op("longspan::causal_linformer", (CausalInputs,), (CausalSaved,), outputs=7, grads=7, differentiable=3)
class _CausalLinformer(DifferentiableOp):
    """out, the compressed keys and values after it, lse, and those before each chunk."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _causal_kernels().forward(CausalInputs(*args))

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, ...]:
        x = CausalInputs(*args)
        (B, T, H, D), (Hkv, E), R = x.q.shape, x.v.shape[2:], x.e.shape[3]
        ends = [x.q.new_empty(B, Hkv, R, dim, dtype=float32) for dim in (D, E)]
        states = [x.q.new_empty(shape) for shape in states_shapes(B, T, H, Hkv, R, D, E)]
        return x.v.new_empty(B, T, H, E), *ends, x.q.new_empty(B, H, T, dtype=float32), *states

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs[:3]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(output[0], *output[3:], *inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def differentiate(
        backward: Any,
        ctx: Any,
        d_out: Tensor | None,
        d_end_k: Tensor | None = None,
        d_end_v: Tensor | None = None,
        *_: None,
    ) -> tuple[Tensor | None, ...]:
        out, lse, keys, values, pairs, *inputs = ctx.saved_tensors
        d_out = out.new_zeros(out.shape) if d_out is None else d_out
        *grads, d_k, d_v = backward(
            *refuse_forward_mode(d_out, d_end_k, d_end_v, out, lse, keys, values, pairs, *inputs)
        )
        return *grads, None if inputs[5] is None else d_k, None if inputs[6] is None else d_v

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _causal_kernels().backward(*group(args, CausalSaved, CausalInputs))

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        _, x = group(args, CausalSaved, CausalInputs)
        (B, _, Hkv, D), E, R = x.k.shape, x.v.shape[3], x.e.shape[3]
        ends = [x.q.new_empty(B, Hkv, R, dim, dtype=float32) for dim in (D, E)]
        return *(y.new_empty(y.shape) for y in x[:5]), *ends


def states_shapes(B: int, T: int, H: int, Hkv: int, R: int, D: int, E: int) -> list[tuple[int, ...]]:
    """Return the shapes of the compressed keys and values before each chunk, padded, and of pairs of its tokens."""
    R, D, E = (max(64, 1 << (int(size) - 1).bit_length()) for size in (R, D, E))
    chunks = -(-T // CHUNK)
    return [(B, Hkv, chunks, R, D), (B, Hkv, chunks, R, E), (B, H, chunks, CHUNK, CHUNK)]
