"""Causal linear attention with features that are given, and the logarithm of its normalizer.

    num_i = Σ_{j ≤ i − W} (φ(q_i)·φ(k_j)) v_j,    den_i = Σ_{j ≤ i − W} φ(q_i)·φ(k_j)
    out_i = num_i / den_i,    lse_i = log den_i

Features are positive, such as Hedgehog's, up to 256 of them. `lse` has a gradient, so that the result can be one part
of a softmax (`mixture`); W tokens before a query are left to another part. Backward, with δ = Σ dout ∘ out:

    dnum = dout / den,    dden = (dlse − δ) / den,    dφ(q_i) = S_i dnum_i + z_i dden_i
    dφ(k_j) = dS_j v_j + dz_j,    dv_j = dS_jᵀ φ(k_j)

with S and z the sums of φ(k)vᵀ and φ(k) up to a query, dS and dz those of φ(q)dnumᵀ and φ(q)dden from a key on. All are
computed in chunks of 64 tokens: one kernel sums chunks, the others add the pairs inside a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, bfloat16, float32

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, group, lazy_module, refuse_forward_mode
from longspan.ops.common.batches import split_batch
from longspan.ops.window.torch import BLIND

__all__ = ["BLIND", "feature_attention", "why_not_triton"]

_kernels = lazy_module("longspan.ops.features.triton.features")

# Tokens in a chunk; the largest number of features and of values.
CHUNK, MOST_FEATURES, LARGEST = 64, 256, 128


class FeatureInputs(NamedTuple):
    """Tensors of `longspan::feature_attention`, see `feature_attention`."""

    query: Tensor
    f: Tensor
    v: Tensor
    kv: Tensor | None
    z: Tensor | None


class FeatureProblem(NamedTuple):
    """Options of `longspan::feature_attention`."""

    delay: int


class FeatureSaved(NamedTuple):
    """What its backward pass takes before them. states, states_z: the sums before each chunk."""

    d_out: Tensor
    d_lse: Tensor | None
    d_kv: Tensor | None
    d_z: Tensor | None
    out: Tensor
    lse: Tensor
    states: Tensor
    states_z: Tensor


def feature_attention(
    query: Tensor, f: Tensor, v: Tensor, kv: Tensor | None = None, z: Tensor | None = None, *, delay: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal linear attention and the logarithm of its normalizer. O(T·M·E) time.

    For arguments without `why_not_triton`.

    Args:
        query: Features of the queries (B, T, H, M).
        f: Features of the keys (B, T, Hkv, M), zero where a key is hidden.
        v: Values (B, T, Hkv, E).
        kv: Σφ(k)vᵀ before the first token, (B, Hkv, M, E) in float32; None is 0.
        z: Σφ(k) before the first token, (B, Hkv, M) in float32; None is 0.
        delay: W: query i sees the keys up to i − W. The first W queries see none, the last W keys are not used.

    Returns:
        out (B, T, H, E) and lse (B, H, T) in float32, zero and `BLIND` for queries that see no key; kv and z after the
        last key that is used.
    """

    def run(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _FeatureAttention.run(*tensors, delay)

    out, lse, kv, z = split_batch(run, dispatch.LARGEST_AXIS // query.shape[2], query, f, v, kv, z)
    return out, lse, kv, z


def why_not_triton(q: Tensor, v: Tensor, num_features: int) -> str | None:
    """Return why the kernels do not take features of q and its keys, and values v; None if they do."""
    why = dispatch.unavailable(q)
    if why is None and not q.dtype == v.dtype == bfloat16:
        why = f"queries and values are {q.dtype} and {v.dtype}; the kernels take bfloat16"
    if why is None and (num_features > MOST_FEATURES or v.shape[3] > LARGEST):
        sizes = f"{num_features} features and {v.shape[3]} values"
        why = f"{sizes}; the kernels take up to {MOST_FEATURES} and {LARGEST}"
    if why is None and not (q.numel() and v.numel()):
        why = "an empty tensor"
    if why is None:
        why = dispatch.large_axis(q.shape[2], "heads")
    if dispatch.recording is not None:
        dispatch.record("causal linear attention with given features", "features", why)
    return why


def padded_sizes(M: int, E: int) -> tuple[int, int]:
    """Return the sizes of a state in memory: powers of two, 64 at least."""
    M, E = (max(64, 1 << (int(size) - 1).bit_length()) for size in (M, E))
    return M, E


@differentiable_op(
    "longspan::feature_attention",
    (FeatureInputs, FeatureProblem),
    (FeatureSaved,),
    outputs=6,
    grads=5,
    differentiable=4,
)
class _FeatureAttention(DifferentiableOp):
    """out, lse, the sums after the last key, and those before each chunk."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _kernels().forward(*group(args, FeatureInputs, FeatureProblem))

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, ...]:
        x, problem = group(args, FeatureInputs, FeatureProblem)
        (B, T, H, M), (Hkv, E) = x.query.shape, x.v.shape[2:]
        BM, BE = padded_sizes(M, E)
        chunks = -(-(T - problem.delay) // CHUNK)
        kv = x.v.new_empty(B, Hkv, M, E, dtype=float32)
        states = x.v.new_empty(B, Hkv, chunks, BM, BE), kv.new_empty(B, Hkv, chunks + 1, BM)
        return x.v.new_empty(B, T, H, E), kv.new_empty(B, H, T), kv, kv.new_empty(B, Hkv, M), *states

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs[:4]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.problem = FeatureProblem(*inputs[5:])
        ctx.save_for_backward(*output[:2], *output[4:], *inputs[:5])
        ctx.set_materialize_grads(False)

    @staticmethod
    def differentiate(
        backward: Any,
        ctx: Any,
        d_out: Tensor | None,
        d_lse: Tensor | None = None,
        d_kv: Tensor | None = None,
        d_z: Tensor | None = None,
        *_: None,
    ) -> tuple[Tensor | None, ...]:
        out, lse, states, states_z, *inputs = ctx.saved_tensors
        d_out = out.new_zeros(out.shape) if d_out is None else d_out
        saved = d_out, d_lse, d_kv, d_z, out, lse, states, states_z
        *grads, d_start, d_start_z = backward(*refuse_forward_mode(*saved, *inputs), *ctx.problem)
        return *grads, None if inputs[3] is None else d_start, None if inputs[4] is None else d_start_z, None

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _kernels().backward(*group(args, FeatureSaved, FeatureInputs, FeatureProblem))

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        _, x = group(args, FeatureSaved, FeatureInputs)
        B, _, Hkv, M = x.f.shape
        kv = x.v.new_empty(B, Hkv, M, x.v.shape[3], dtype=float32)
        return *(y.new_empty(y.shape) for y in x[:3]), kv, kv.new_empty(B, Hkv, M)
