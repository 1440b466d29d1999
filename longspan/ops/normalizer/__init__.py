"""Queries of causal linear attention, divided by the running sums of the features: φ(q_i)_m / z_im.

    z_im = Σ_{j ≤ i} φ(k_j)_m,    out_i = Σ_m (φ(q_i)_m / z_im) Σ_{j ≤ i} φ(k_j)_m v_j

is then unnormalized linear attention with features that are given. Backward, with d the gradient of φ(q) / z:

    dφ(q_i) = d_i / z_i,    dz_i = −d_i φ(q_i) / z_i²,    dφ(k_j) = Σ_{i ≥ j} dz_i

The kernels sum chunks of tokens, PyTorch computes the sums before each chunk, and a second kernel adds the two and
divides. Nothing but q, k and the sums before each chunk is saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, bfloat16, float32

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, group, lazy_module, refuse_forward_mode
from longspan.ops.common.batches import split_batch

__all__ = ["normalized_features", "why_not_triton"]

_kernels = lazy_module("longspan.ops.normalizer.triton.normalizer")

CHUNK = 64
MAPS = ("identity", "elu", "relu", "softmax")


class NormalizerInputs(NamedTuple):
    """Tensors of `longspan::normalized_features`."""

    q: Tensor
    k: Tensor
    z: Tensor | None
    shift: Tensor | None
    lengths: Tensor | None


class NormalizerProblem(NamedTuple):
    """Options of `longspan::normalized_features`."""

    feature_map: str


class NormalizerSaved(NamedTuple):
    """What its backward pass takes before them. sums: (B, Hkv, chunks + 1, M) z before each chunk. scales: their c."""

    d_query: Tensor | None
    d_f: Tensor | None
    d_z: Tensor | None
    sums: Tensor
    scales: Tensor


def normalized_features(
    q: Tensor,
    k: Tensor,
    z: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    feature_map: str,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return φ(q) / z, φ(k), z after the last token, and the log scales of the keys. Without `why_not_triton` only.

    Args:
        q: Queries (B, T, H, M).
        k: Keys (B, T, Hkv, M).
        z: (B, Hkv, M) in float32, the sum of the features of keys before the first token; None is 0.
        shift: (B, Hkv) in float32, the largest log scale of those keys, by whose exponential z is divided; only of the
            map "softmax".
        feature_map: One of `MAPS`.
        lengths: (B,) number of tokens in each row; the features of the rest are zero.

    Returns:
        φ(q_i) / z_i (B, T, H, M) in the dtype of q, 0 where z is; φ(k) / exp(β) (B, T, Hkv, M); z (B, Hkv, M) in
        float32; β (B, T, Hkv) in float32, None for maps without log scales. z_i is divided by exp of the largest β so
        far, as the sums of `causal_linear` are.
    """

    def run(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _NormalizedFeatures.run(*tensors, feature_map)

    query, f, z, beta = split_batch(run, dispatch.LARGEST_AXIS // k.shape[2], q, k, z, shift, lengths)
    return query, f, z, beta if feature_map == "softmax" else None


def why_not_triton(q: Tensor, k: Tensor, feature_map: str) -> str | None:
    """Return why running sums of these features are computed in eager PyTorch; None if the kernels support them."""
    why = dispatch.unavailable(q)
    if why is None and not q.dtype == k.dtype == bfloat16:
        why = f"q and k are {q.dtype} and {k.dtype}; the kernels take bfloat16"
    if why is None and (feature_map not in MAPS or q.shape[3] > dispatch.LARGEST):
        why = (
            f"{q.shape[3]} features of the map {feature_map!r}; "
            f"the kernels take {dispatch.LARGEST} of {', '.join(MAPS)}"
        )
    if why is None and not (q.numel() and k.numel()):
        why = "an empty tensor"
    if why is None:
        why = dispatch.large_axis(k.shape[2], "key/value heads")
    if dispatch.recording is not None:
        dispatch.record("normalization by feature", "normalizer", why)
    return why


@differentiable_op(
    "longspan::normalized_features",
    (NormalizerInputs, NormalizerProblem),
    (NormalizerSaved,),
    outputs=6,
    grads=3,
    differentiable=3,
)
class _NormalizedFeatures(DifferentiableOp):
    """φ(q) / z, φ(k), z after the last token, β, z before each chunk and its scale."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _kernels().forward(*group(args, NormalizerInputs, NormalizerProblem))

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, ...]:
        x, problem = group(args, NormalizerInputs, NormalizerProblem)
        B, T, Hkv, M = x.k.shape
        sums = x.k.new_empty(B, Hkv, -(-T // CHUNK) + 1, M, dtype=float32)
        beta, scales = sums.new_empty(0), sums.new_empty(0)
        if problem.feature_map == "softmax":
            beta, scales = sums.new_empty(B, T, Hkv), sums.new_empty(sums.shape[:3])
        return x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), sums.new_empty(B, Hkv, M), beta, sums, scales

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs[:4]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.problem = inputs[-1]
        ctx.save_for_backward(*output[4:], *inputs[:-1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def differentiate(
        backward: Any,
        ctx: Any,
        d_query: Tensor | None,
        d_f: Tensor | None = None,
        d_z: Tensor | None = None,
        *_: None,
    ) -> tuple[Tensor | None, ...]:
        sums, scales, *inputs = ctx.saved_tensors
        d_q, d_k, d_start = backward(*refuse_forward_mode(d_query, d_f, d_z, sums, scales, *inputs), ctx.problem)
        return d_q, d_k, None if inputs[2] is None else d_start, None, None, None

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        return _kernels().backward(*group(args, NormalizerSaved, NormalizerInputs, NormalizerProblem))

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        saved, x = group(args, NormalizerSaved, NormalizerInputs)
        sums = saved.sums
        return x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), sums.new_empty(*sums.shape[:2], sums.shape[3])
