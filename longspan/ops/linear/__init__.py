"""Linear attention: out_i = φ(q_i)·Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j), in time and memory linear in the sequence.

Causally, keys carry their magnitude as a log scale β, φ(k_j) = f_j exp(β_j), and

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) exp(β_j − c_i) v_j,      c_i = max_{j ≤ i} β_j,

so `exp` never sees a positive argument, and the row reference c_i depends on the past alone. The normalizer den_i is
the same sum over v ≡ 1; c_i cancels in the ratio. Feature maps are applied chunk by chunk: φ(q) and φ(k) are never
stored in full, and only q, k, v and the result are saved for backward. README.md in this folder derives forward and
backward.

`torch` computes this on any device; `triton` on CUDA, by one of four algorithms. Which one runs is decided once per
call, by `choose_algorithm`. This file imports names from PyTorch, because `torch` is a module of this package.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

from torch import Tensor, bfloat16, cat, dtype, einsum, float32, float64, maximum
from torch.autograd import Function

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import (
    DifferentiableOp,
    differentiable_op,
    once_differentiable,
    refuse_forward_mode,
    run_planned,
    without_autocast,
)
from longspan.ops.common.plans import cached, dense_rows, signature
from longspan.ops.common.torch_private import forward_ad_level, is_exporting
from longspan.ops.linear import torch as torch_chunk
from longspan.ops.linear.torch import FLOOR, is_zero, running_max, safe_divide
from longspan.ops.linear.triton import FEATURE_MAPS, FUSED_CHUNK

__all__ = [
    "FLOOR",
    "Sums",
    "accumulate",
    "attend_prefixes",
    "attend_sums",
    "bidirectional_linear",
    "causal_linear",
    "causal_linear_buckets",
    "causal_linear_out",
    "divide",
    "no_sums",
    "sum_dtype",
    "sum_products",
    "why_not_triton",
    "why_not_triton_bidirectional",
]


# Features of a projection that the kernels process in tiles.
MOST_FEATURES = 1024
# Features that one product of many tokens sums over. Products of small matrices on a CPU add them one by one, which is
# less precise than eager PyTorch's sums over the keys where there are several times as many features.
SUMMED_FEATURES = 64


class Sums(NamedTuple):
    """The state of linear attention: kv = Σ φ(k)vᵀ (B, Hkv, M, E) and z = Σ φ(k) (B, Hkv, M), both divided by
    exp(shift), with shift (B, Hkv) the largest log scale so far.
    """

    kv: Tensor
    z: Tensor
    shift: Tensor


class LinearInputs(NamedTuple):
    """Tensors of `longspan::causal_linear`.

    kv: (B, Hkv, M, E), with z as one more column if normalized. total: (B, Hkv, E + 1) Σ[v, 1] before the first token,
    which an epsilon needs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None
    log_scale: Tensor | None
    lengths: Tensor | None
    kv: Tensor | None
    shift: Tensor | None
    total: Tensor | None = None


class LinearProblem(NamedTuple):
    """Options of `longspan::causal_linear` and the algorithm that computes it: "torch" or a module of `triton`.

    epsilon: Added to the features of FAVOR+; only "favor" and "torch" support it.
    """

    feature_map: str
    normalize: bool
    bucket: int
    output_final_state: bool
    algorithm: str
    epsilon: float = 0.0


class LinearSaved(NamedTuple):
    """What `longspan::causal_linear_backward` takes before the inputs. starts: the kernels' workspace, or the sums
    before each span of `torch`, whose references follow. den: None where an eager call has it in the workspace.
    """

    d_out: Tensor
    d_kv: Tensor | None
    out: Tensor | None
    den: Tensor
    starts: Tensor | None
    references: Tensor | None


class BidirectionalInputs(NamedTuple):
    """Tensors of `longspan::bidirectional_linear`."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None
    key_mask: Tensor | None
    offsets: Tensor | None
    key_offsets: Tensor | None


class BidirectionalProblem(NamedTuple):
    """Options of `longspan::bidirectional_linear` and the module of `triton` that computes it."""

    feature_map: str
    normalize: str
    algorithm: str
    epsilon: float = 0.0


class BidirectionalSaved(NamedTuple):
    """What `longspan::bidirectional_linear_backward` takes before the inputs."""

    d_out: Tensor
    out: Tensor | None
    saved: Tensor


def causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "identity",
    weight: Tensor | None = None,
    log_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    sums: Sums | None = None,
    normalize: bool = True,
    bucket: int = 1,
    epsilon: float = 0.0,
    total: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Causal linear attention, num_i / den_i or num_i alone, and the sums after it. O(T·M·E) time.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, T, Hkv, D).
        v: Values (B, T, Hkv, E).
        feature_map: A key of `feature_maps.MAPS`.
        weight: Projection (M, D) of the map "favor", of any dtype.
        log_scale: (B, T, Hkv) log scales of keys that are features already (map "identity").
        lengths: (B,) number of tokens in each row; the rest is padding.
        sums: The state before the first token.
        normalize: Divide by the normalizer.
        bucket: If greater than 1, hide from a query its own bucket of this many tokens and all later ones.
        epsilon: Added to the features of the map "favor", as `feature_maps.Favor` does; needs `normalize`, and no
            `bucket`.
        total: (B, Hkv, E + 1) Σ[v, 1] over the keys before the first token, if there is an epsilon.

    Returns:
        The result (B, T, H, E) in q's dtype, and the state after the last token.
    """
    kv, shift = None, None
    if sums is not None:
        kv, shift = cat([sums.kv, sums.z[..., None]], -1) if normalize else sums.kv, sums.shift
    x = LinearInputs(q, k, v, weight, log_scale, lengths, kv, shift, total)
    algorithm = choose_algorithm(x, feature_map, normalize, bucket, epsilon)
    assert not epsilon or algorithm in ("favor", "torch")
    problem = LinearProblem(feature_map, normalize, bucket, True, algorithm, epsilon)
    if problem.algorithm != "torch" and dispatch.eager_untraced(q):
        out, kv, shift = _CausalLinear.direct(*x, *problem)
    else:
        tensors = x if forward_ad_level() < 0 else refuse_forward_mode(*x)
        out, kv, shift = _traced(problem)(*tensors, *problem)[:3]
    return out, Sums(kv[..., :-1], kv[..., -1], shift) if normalize else Sums(kv, kv[..., 0], shift)


def causal_linear_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "identity",
    weight: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: bool = True,
    bucket: int = 1,
    epsilon: float = 0.0,
    total: Tensor | None = None,
) -> Tensor:
    """`causal_linear` without a state before or after it, which takes less time on the host."""
    if total is None and dispatch.recording is None and dispatch.eager_untraced(q):
        tensors, options = (q, k, v, weight, lengths), (feature_map, normalize, bucket, epsilon)
        key = _Stateless, q.get_device(), signature(*tensors), options
        plan = cached(key, _eager_plan, tensors, *options)
        if plan:
            return run_planned(plan, *tensors)
    x = LinearInputs(q, k, v, weight, None, lengths, None, None, total)
    algorithm = choose_algorithm(x, feature_map, normalize, bucket, epsilon)
    assert not epsilon or algorithm in ("favor", "torch")
    problem = LinearProblem(feature_map, normalize, bucket, False, algorithm, epsilon)
    if problem.algorithm != "torch" and dispatch.eager_untraced(q):
        return _CausalLinear.direct(*x, *problem)
    tensors = x if forward_ad_level() < 0 else refuse_forward_mode(*x)
    return _traced(problem)(*tensors, *problem)[0]


class _Stateless:
    """Eager calls without a state of tensors of one signature, see `EagerPlan`."""

    def __init__(self, x: LinearInputs, problem: LinearProblem) -> None:
        self.problem, self.kernels = problem, _kernels(problem.algorithm)
        if problem.algorithm == "favor" and _kernels("favor_short").takes(x, problem):
            self.kernels = _kernels("favor_short")
        self.read = self.kernels.forward_plan(x, problem)
        self.differentiate: dict[Any, Any] = {}  # by layout: hooks may change that of saved tensors

    def forward(self, q: Any, k: Any, v: Any, weight: Any, lengths: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        out, _, _, den, starts = self.read(LinearInputs(q, k, v, weight, None, lengths, None, None))
        return out, (out, den, starts)

    def backward(self, d_out: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        out, den, starts, q, k, v, weight, lengths = saved
        strides = d_out.stride(), q.stride(), k.stride(), v.stride()
        layout = *strides, d_out.data_ptr() & 15, q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15
        plan = self.differentiate.get(layout)
        if plan is None:
            d_out, q, k, v = map(dense_rows, (d_out, q, k, v))
        x = LinearInputs(q, k, v, weight, None, lengths, None, None)
        found = LinearSaved(d_out, None, out, den, starts, None)
        if plan is None:
            plan = self.kernels.backward_plan(found, x, self.problem)
            if strides == (d_out.stride(), q.stride(), k.stride(), v.stride()):  # Nothing was copied.
                self.differentiate[layout] = plan
        d_q, d_k, d_v, *_ = plan(found, x)
        return d_q, d_k, d_v, None, None


def _eager_plan(
    tensors: tuple[Any, ...], feature_map: str, normalize: bool, bucket: int, epsilon: float
) -> _Stateless | Literal[False]:
    """Return the plan of a call without a state; False if there is none."""
    q, k, v, weight, lengths = tensors
    x = LinearInputs(q, k, v, weight, None, lengths, None, None)
    algorithm = choose_algorithm(x, feature_map, normalize, bucket, epsilon)
    dense = all(dense_rows(y) is y for y in (q, k, v))
    dense = dense and all(y is None or y.is_contiguous() for y in (weight, lengths))
    if algorithm not in ("fused_chunk", "tiled_chunk", "favor") or not dense:
        return False
    return _Stateless(x, LinearProblem(feature_map, normalize, bucket, False, algorithm, epsilon))


def causal_linear_buckets(
    q: Tensor, k: Tensor, v: Tensor, *, bucket: int, feature_map: str, lengths: Tensor | None = None
) -> Tensor:
    """`causal_linear_out` with a blind spot of `bucket` tokens whose first bucket is causal.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, T, Hkv, D).
        v: Values (B, T, Hkv, E).
        bucket: Tokens in a bucket.
        feature_map: A map without a projection.
        lengths: (B,) number of tokens in each row; the rest is padding.

    Returns:
        (B, T, H, E) in the dtype of q.
    """
    x = LinearInputs(q, k, v, None, None, lengths, None, None)
    problem = LinearProblem(feature_map, True, bucket, False, choose_algorithm(x, feature_map, True, bucket))
    few = None if lengths is None else lengths.clamp(max=bucket)
    head = _head(x, bucket, few)
    first = LinearProblem(feature_map, True, 1, False, choose_algorithm(head, feature_map, True, 1))
    direct = "torch" not in (problem.algorithm, first.algorithm) and dispatch.eager_untraced(q)
    if direct and dispatch.recording is None:
        apply: Any = _Buckets.apply
        return apply(x, problem, few, first, q, k, v)
    out = causal_linear_out(q, k, v, feature_map=feature_map, lengths=lengths, bucket=bucket)
    inside = causal_linear_out(*head[:3], feature_map=feature_map, lengths=few)
    return cat([inside, out[:, bucket:]], 1)


class _Buckets(Function):
    """A blind spot by the kernels, and its first bucket by a second call whose results replace, or are added to, those
    of the first: gradients of slices would be as large as the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: LinearInputs, problem: LinearProblem, few: Tensor | None, first: LinearProblem, *_: Tensor
    ) -> Tensor:
        head = _head(x, problem.bucket, few)
        out, _kv, _shift, *saved = _kernels(problem.algorithm).forward(x, problem, zeroed=False)
        inside, _kv, _shift, *more = _kernels(first.algorithm).forward(head, first, zeroed=False)
        out[:, : problem.bucket] = inside
        ctx.problem, ctx.first = problem, first
        ctx.save_for_backward(out, *saved, inside, *more, few, *x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        (d_out,) = d_outs
        assert d_out is not None
        out, den, saved, inside, inside_den, inside_saved, few, *inputs = ctx.saved_tensors
        x, bucket = LinearInputs(*inputs), ctx.problem.bucket
        # Queries of the first bucket see nothing in the first call: whatever their results are, they add nothing.
        found = LinearSaved(d_out, None, out, den, saved, None)
        grads = _kernels(ctx.problem.algorithm).backward(found, x, ctx.problem)[:3]
        found = LinearSaved(d_out[:, :bucket], None, inside, inside_den, inside_saved, None)
        more = _kernels(ctx.first.algorithm).backward(found, _head(x, bucket, few), ctx.first)[:3]
        for d_x, part in zip(grads, more, strict=True):
            d_x[:, :bucket] += part
        return None, None, None, None, *grads


def _head(x: LinearInputs, tokens: int, lengths: Tensor | None) -> LinearInputs:
    """The first tokens of inputs without a state."""
    return x._replace(q=x.q[:, :tokens], k=x.k[:, :tokens], v=x.v[:, :tokens], lengths=lengths)


def _traced(problem: LinearProblem) -> Any:
    """The custom operation; in torch.export PyTorch's own operations, which other runtimes support."""
    return _CausalLinear.forward if problem.algorithm == "torch" and is_exporting() else _CausalLinear.traced


def bidirectional_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    weight: Tensor | None = None,
    key_mask: Tensor | None = None,
    offsets: Tensor | None = None,
    key_offsets: Tensor | None = None,
    normalize: str = "query",
    epsilon: float = 0.0,
) -> Tensor:
    """Linear attention of every query to every key by the Triton kernels. O((T + S)·M·E) time.

    The arguments must pass `why_not_triton_bidirectional`; elsewhere, and for a user's own maps, `LinearAttention`
    computes the same in PyTorch. With bfloat16 inputs a weight that bfloat16 represents exactly takes one product, any
    other takes two. A query without keys returns zeros.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, S, Hkv, D).
        v: Values (B, S, Hkv, E).
        feature_map: One of `triton.FEATURE_MAPS`.
        weight: Projection (M, D) of the map "favor".
        key_mask: (B, S) True = visible. Hidden slots are not read.
        offsets: (N + 1,) int32, where the queries of packed sequences begin.
        key_offsets: The same for keys.
        normalize: "query", "feature" (each feature's weights over the keys sum to one) or "none".
        epsilon: Added to the features of the map "favor", as `feature_maps.Favor` does.

    Returns:
        The result (B, T, H, E) in q's dtype.
    """
    algorithm = bidirectional_algorithm(q, weight, feature_map, epsilon)
    if dispatch.recording is not None:
        dispatch.record("bidirectional linear attention", algorithm, None)
    args = q, k, v, weight, key_mask, offsets, key_offsets, feature_map, normalize, algorithm, epsilon
    if dispatch.eager_untraced(q):
        return _Bidirectional.direct(*args)
    return _Bidirectional.traced(*refuse_forward_mode(*args))[0]


def no_sums(batch_size: int, num_heads: int, num_features: int, value_dim: int, like: Tensor) -> Sums:
    """Return the state before the first key, in the dtype and on the device of `like`."""
    kv = like.new_zeros(batch_size, num_heads, num_features, value_dim)
    return Sums(kv, kv.new_zeros(kv.shape[:3]), kv.new_full(kv.shape[:2], FLOOR))


def accumulate(sums: Sums, f: Tensor, v: Tensor, log_scale: Tensor | None) -> Sums:
    """Return the sums after key features f (B, S, Hkv, M) of log scale (B, S, Hkv) and values v (B, S, Hkv, E)."""
    if log_scale is None:
        return Sums(sums.kv + sum_products(f, v), sums.z + f.sum(1), sums.shift)
    shift = maximum(sums.shift, log_scale.amax(1))
    f = f * (log_scale - shift[:, None]).exp()[..., None]
    decay = (sums.shift - shift).exp()[..., None]
    kv = decay[..., None] * sums.kv + sum_products(f, v)
    return Sums(kv, decay * sums.z + f.sum(1), shift)


def sum_products(f: Tensor, v: Tensor) -> Tensor:
    """Return Σ f vᵀ over the keys, (B, Hkv, M, E), of features f (B, S, Hkv, M) and values v (B, S, Hkv, E)."""
    # In parts, for the gradient of v, which sums over the features.
    parts = f.split(_summed_features(f), -1)
    return cat([einsum("bshm,bshe->bhme", part, v) for part in parts], 2)


def _summed_features(x: Tensor) -> int:
    """Return how many features of x (B, T, ..., M) a product sums over; for one token, calls cost more than sums."""
    return SUMMED_FEATURES if x.shape[1] > 1 else x.shape[-1]


def attend_sums(
    query: Tensor, sums: Sums, normalize: str, constant: Tensor | None = None, log_largest: float = 0.0
) -> Tensor:
    """Read a state: attention of query features (B, T, H, M) to all keys in the sums, (B, T, H, E).

    Args:
        query: Query features.
        sums: The state.
        normalize: "query", "feature" or "none".
        constant: (B, Hkv, E + 1) epsilon·[Σv, count], if every key has a constant added to its features.
        log_largest: Logarithm of the largest feature.
    """
    q = query.unflatten(2, (sums.kv.shape[1], -1))  # (B, T, Hkv, G, M)
    kv = sums.kv
    if normalize == "feature":
        kv = safe_divide(kv, sums.z[..., None])
    elif normalize == "query":
        kv = cat([kv, sums.z[..., None]], -1)
    size = _summed_features(query)
    first, *rest = zip(q.split(size, -1), kv.split(size, 2), strict=True)
    out = einsum("bthgm,bhme->bthge", *first)
    for part in rest:
        out += einsum("bthgm,bhme->bthge", *part)
    if normalize != "query":
        return out.flatten(2, 3)
    if constant is not None:
        out = out + q.sum(-1, keepdim=True) * constant[:, None, :, None]
    return divide(out[..., :-1], out[..., -1], log_largest).flatten(2, 3)


def attend_prefixes(
    query: Tensor,
    f: Tensor,
    v: Tensor,
    log_scale: Tensor | None,
    sums: Sums,
    normalize: str,
    *,
    constant: Tensor | None = None,
    bucket: int = 1,
    pending: Sums | None = None,
    log_largest: float = 0.0,
) -> Tensor:
    """Causal attention from features in full, for any map and normalizer: (B, T, H, E).

    Args:
        query: Query features (B, T, H, M).
        f: Key features (B, T, Hkv, M).
        v: Values (B, T, Hkv, E).
        log_scale: (B, T, Hkv) log scales of the keys.
        sums: The state before the first token.
        normalize: "query", "feature" or "none".
        constant: (B, T, Hkv, E + 1), as in `attend_sums`, one for each token.
        bucket: As in `causal_linear`.
        pending: Sums at the shift of `sums` that all buckets but the first see.
        log_largest: Logarithm of the largest feature.
    """

    def prefixes(query: Tensor, f: Tensor, v: Tensor, kv: Tensor, pending: Tensor | None) -> Tensor:
        before = Sums(kv, kv[..., 0], sums.shift)
        out, _ = causal_linear(query, f, v, log_scale=log_scale, sums=before, normalize=False, bucket=bucket)
        if pending is None:
            return out
        read = attend_sums(query[:, bucket:], Sums(pending, pending[..., 0], sums.shift), "none")
        if log_scale is not None:
            reference = maximum(running_max(log_scale), sums.shift[:, None])[:, bucket:]
            factor = (sums.shift[:, None] - reference).exp().repeat_interleave(query.shape[2] // f.shape[2], 2)
            read = read * factor[..., None]
        return cat([out[:, :bucket], out[:, bucket:] + read], 1)

    if normalize == "none":
        return prefixes(query, f, v, sums.kv, None if pending is None else pending.kv)
    if normalize == "feature":
        ones = f.new_ones(*f.shape[:3], 1)
        z = prefixes(ones, ones, f, sums.z[:, :, None], None if pending is None else pending.z[:, :, None])
        z = z.to(query.dtype).repeat_interleave(query.shape[2] // f.shape[2], 2)
        # In two steps, the second of which divides by z/z = 1: a gradient divided by z² would overflow.
        unit = z.detach()
        query = (safe_divide(query, unit) / (safe_divide(z, unit) + is_zero(unit))).to(f.dtype)
        return prefixes(query, f, v, sums.kv, None if pending is None else pending.kv)
    v = cat([v, v.new_ones(*v.shape[:3], 1)], -1)
    with_z = [None if s is None else cat([s.kv, s.z[..., None]], -1) for s in (sums, pending)]
    assert with_z[0] is not None
    out = prefixes(query, f, v, with_z[0], with_z[1])
    if constant is not None:
        group = query.shape[2] // f.shape[2]
        out = out + query.sum(-1, keepdim=True) * constant.repeat_interleave(group, 2)
    return divide(out[..., :-1], out[..., -1], log_largest)


def sum_dtype(x: Tensor) -> dtype:
    """Return the dtype of sums over a sequence: float32, and float64 for float64 inputs."""
    return float64 if x.dtype == float64 else float32


def divide(num: Tensor, den: Tensor, log_largest: float = 0.0) -> Tensor:
    """Return num (..., E) / den (...); 0 where den is 0, that is, where nothing is visible."""
    return safe_divide(num, den[..., None], log_largest)


def choose_algorithm(x: LinearInputs, feature_map: str, normalize: bool, bucket: int, epsilon: float = 0.0) -> str:
    """Return the algorithm that computes `longspan::causal_linear`: "torch" or a module of `triton`."""
    why = why_not_triton(x, feature_map, bucket, normalize=normalize, epsilon=epsilon)
    algorithm = "torch" if why is not None else triton_algorithm(x, feature_map, normalize)
    if dispatch.recording is not None:
        dispatch.record("causal linear attention", algorithm, why)
    return algorithm


def triton_algorithm(x: LinearInputs, feature_map: str, normalize: bool) -> str:
    """Return the Triton module for inputs that the kernels take."""
    size = max(x.q.shape[3], x.v.shape[3])
    wide = size > 128 and feature_map in ("identity", "elu", "relu")
    if x.q.dtype != bfloat16 or not (normalize or wide) or x.log_scale is not None:
        return "chunk"
    if feature_map == "favor":
        return "favor"
    fits = size <= 64 or (size <= 128 and dispatch.insufficient_shared_memory(x.q, 163) is None)
    return "fused_chunk" if fits else "tiled_chunk"


def why_not_triton(
    x: LinearInputs, feature_map: str, bucket: int, *, normalize: bool = True, epsilon: float = 0.0
) -> str | None:
    """Return why causal linear attention of these inputs runs in eager PyTorch; None if it runs on the kernels."""
    why = dispatch.unavailable(x.q) or why_unsupported(x, feature_map, bucket, normalize=normalize, epsilon=epsilon)
    if why is not None or x.weight is None:
        return why
    return dispatch.insufficient_shared_memory(x.q, _shared_memory(x.q, x.v))


def why_unsupported(
    x: LinearInputs, feature_map: str, bucket: int, *, normalize: bool = True, epsilon: float = 0.0
) -> str | None:
    """Return what the kernels do not support about these inputs, whatever the device."""
    q, v, weight = x.q, x.v, x.weight
    tiled = q.dtype == bfloat16 and normalize
    if epsilon and (why := _unsupported_epsilon(epsilon, q, feature_map)) is not None:
        return why
    if (why := _unsupported_inputs(q, x.k, v, weight, feature_map, tiled=tiled)) is not None:
        return why
    if x.kv is not None and x.kv.dtype != float32:
        return f"the sums are {str(x.kv.dtype).removeprefix('torch.')}; the kernels take float32"
    other = FUSED_CHUNK % bucket and bucket % FUSED_CHUNK
    if bucket > 1 and (other or triton_algorithm(x, feature_map, normalize) != "fused_chunk"):
        return (
            f"a blind spot ({bucket}); the kernels take divisors and multiples of {FUSED_CHUNK}, with queries "
            "normalized, in bfloat16, with heads of up to 128, without a projection"
        )
    if q.shape[1] == 1:
        return "a single token"
    if x.log_scale is not None and feature_map != "identity":
        return f"log scales given beside the feature map {feature_map!r}"
    if (weight is not None and not weight.numel()) or not q.numel() or not v.numel():
        return "an empty tensor"
    # `chunk` holds the whole projection in shared memory, `favor` one tile of it.
    return None if tiled else _large_projection(weight, 16384)


def why_not_triton_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, feature_map: str, epsilon: float = 0.0
) -> str | None:
    """Return why bidirectional linear attention runs in eager PyTorch; None if it runs on the kernels."""
    why = dispatch.unavailable(q) or why_unsupported_bidirectional(q, k, v, weight, feature_map, epsilon)
    wide = q.dtype == bfloat16 and max(q.shape[3], v.shape[3]) > 64
    if why is not None or not (wide or weight is not None):
        return why
    return dispatch.insufficient_shared_memory(q, 163 if weight is None else _shared_memory(q, v))


def bidirectional_algorithm(q: Tensor, weight: Tensor | None, feature_map: str, epsilon: float = 0.0) -> str:
    """Return the Triton module for inputs that the kernels take: "favor_bidirectional" or "bidirectional".

    `bidirectional` holds the projection, padded to powers of two, in shared memory, as two matrices if it is not
    bfloat16; `favor_bidirectional` holds a tile of it, and supports an epsilon.
    """
    if weight is None or feature_map != "favor" or q.dtype != bfloat16:
        return "bidirectional"
    large = len(weight) > dispatch.LARGEST or _large_projection(weight, 32768 if weight.dtype == bfloat16 else 16384)
    tiled = epsilon or large or dispatch.insufficient_shared_memory(q, 227)
    return "favor_bidirectional" if tiled else "bidirectional"


def why_unsupported_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, feature_map: str, epsilon: float = 0.0
) -> str | None:
    """Return what the kernels do not support about these inputs, whatever the device."""
    if epsilon and (why := _unsupported_epsilon(epsilon, q, feature_map)) is not None:
        return why
    tiled = q.dtype == bfloat16
    if (why := _unsupported_inputs(q, k, v, weight, feature_map, tiled=tiled)) is not None:
        return why
    # `bidirectional` holds the projection, padded to powers of two, in shared memory.
    if not tiled and (why := _large_projection(weight, 8192)) is not None:
        return why
    return None if q.numel() and v.numel() else "an empty tensor"


def _unsupported_epsilon(epsilon: float, q: Tensor, feature_map: str) -> str | None:
    """Return a reason if the kernels do not add an epsilon to these features."""
    if feature_map == "favor" and q.dtype == bfloat16:
        return None
    dtype = str(q.dtype).removeprefix("torch.")
    return f"an epsilon ({epsilon}) added to features {feature_map!r} of {dtype}; the kernels take favor and bfloat16"


def _unsupported_inputs(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, feature_map: str, *, tiled: bool
) -> str | None:
    """Return a reason if the kernels do not support the map, the dtypes or the dimensions.

    tiled: Whether the kernels go through the features of a projection in tiles.
    """
    if feature_map not in FEATURE_MAPS:
        return f"the feature map {feature_map!r}; the kernels implement {', '.join(FEATURE_MAPS)}"
    if (why := dispatch.unsupported_dtypes(q, k, v)) is not None:
        return why
    D, E = q.shape[3], v.shape[3]
    if max(D, E) > dispatch.LARGEST:
        return f"head or value dimension ({D}, {E}) is over {dispatch.LARGEST}"
    most = MOST_FEATURES if tiled else dispatch.LARGEST
    if weight is not None and len(weight) > most:
        return f"the number of features ({len(weight)}) is over {most}"
    return None


def _shared_memory(q: Tensor, v: Tensor) -> int:
    """Return the shared memory in KB that programs need with a projection; in bfloat16 they hold one tile of it."""
    size = max(q.shape[3], v.shape[3])
    return 227 if q.dtype != bfloat16 or size > 128 else 163 if size > 64 else 99


def _large_projection(weight: Tensor | None, limit: int) -> str | None:
    """Return a reason if a projection, padded to powers of two, exceeds the limit."""
    if weight is None:
        return None
    M, D = weight.shape
    if limit < 1 << ((int(D) - 1).bit_length() + (int(M) - 1).bit_length()):
        return f"a projection of {M} × {D} elements, padded, is over {limit}"
    return None


@cache
def _kernels(algorithm: str) -> Any:
    """Import a module of `triton`, which need not be installed."""
    return import_module(f"longspan.ops.linear.triton.{algorithm}")


def _saved_size(x: Any, problem: Any) -> int:
    """Return how many numbers the kernels save for the backward pass; none where they are not launched."""
    return 0 if dispatch.recording is not None else _kernels(problem.algorithm).saved_size(x, problem)


def _linear_problem(args: tuple[Any, ...]) -> tuple[LinearInputs, LinearProblem]:
    """Return inputs and options of `longspan::causal_linear`; for `torch` with zeros for a state that was not given.

    The weight gets the dtype of the sums, but for "favor", whose kernels divide one of any dtype into two of bfloat16.
    """
    count = len(LinearInputs._fields)
    x, problem = LinearInputs(*args[:count]), LinearProblem(*args[count:])
    if x.kv is None and problem.algorithm == "torch":
        M = x.k.shape[3] if x.weight is None else len(x.weight)
        like = x.k.new_empty(0, dtype=sum_dtype(x.k))
        before = no_sums(x.q.shape[0], x.k.shape[2], M, x.v.shape[3] + int(problem.normalize), like)
        x = x._replace(kv=before.kv, shift=before.shift)
    if x.weight is not None and problem.algorithm != "favor":
        x = x._replace(weight=x.weight.to(sum_dtype(x.k) if x.kv is None else x.kv.dtype))
    return x, problem


@differentiable_op(
    "longspan::causal_linear",
    (LinearInputs, LinearProblem),
    (LinearSaved,),
    outputs=6,
    grads=5,
    leaves=(0, 1, 2, 6, 8),
    differentiable=2,
)
class _CausalLinear(DifferentiableOp):
    """out, the sums and shift after it, its normalizer, and what is saved for the backward pass."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Any, ...]:
        x, problem = _linear_problem(args)
        if problem.algorithm == "torch":
            out, kv, shift, den, starts, references = torch_chunk.forward(x, problem)
            if not problem.output_final_state:
                kv, shift = kv.new_empty(0), kv.new_empty(0)
            return out, kv, shift, den, starts, references
        results = (*_kernels(problem.algorithm).forward(x, problem, zeroed=traced), None)
        # torch.library takes no None.
        return tuple([results[3].new_empty(0) if y is None else y for y in results]) if traced else results

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, ...]:
        x, problem = _linear_problem(args)
        B, T, H, _ = x.q.shape
        sums = x.k.new_empty(0, dtype=sum_dtype(x.k))
        if problem.algorithm == "torch":
            starts, references = torch_chunk.new_starts(x, problem)
        else:
            starts, references = sums.new_empty(_saved_size(x, problem)), sums.new_empty(0)
        kv, shift = sums.new_empty(0), sums.new_empty(0)
        if problem.output_final_state:
            M = x.k.shape[3] if x.weight is None else len(x.weight)
            kv = sums.new_empty(B, x.k.shape[2], M, x.v.shape[3] + int(problem.normalize))
            shift = sums.new_empty(B, x.k.shape[2])
        den = sums.new_empty(B, T, H if problem.normalize else 0)
        return x.v.new_empty(B, T, H, x.v.shape[3]), kv, shift, den, starts, references

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs[0] if outputs[1] is None or not outputs[1].numel() else outputs[:3]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        count = len(LinearInputs._fields)
        ctx.problem = LinearProblem(*inputs[count:])
        # Only normalizers need the result.
        ctx.save_for_backward(output[0] if ctx.problem.normalize else None, *output[3:], *inputs[:count])
        ctx.set_materialize_grads(False)

    @staticmethod
    def differentiate(
        backward: Any, ctx: Any, d_out: Tensor | None, d_kv: Tensor | None = None, *_: None
    ) -> tuple[Tensor | None, ...]:
        out, den, starts, references, *inputs = ctx.saved_tensors
        x = LinearInputs(*inputs)
        if d_out is None:
            d_out = x.v.new_zeros(*x.q.shape[:3], x.v.shape[3])
        saved = d_out, d_kv, out, den, starts, references, *x
        saved = saved if forward_ad_level() < 0 else refuse_forward_mode(*saved)
        d_q, d_k, d_v, d_start, d_total = backward(*saved, *ctx.problem)
        d_start, d_total = None if x.kv is None else d_start, None if x.total is None else d_total
        return d_q, d_k, d_v, None, None, None, d_start, None, d_total, *[None] * len(ctx.problem)

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Any, ...]:
        """Return the gradients of q, k, v, kv and total."""
        count = len(LinearSaved._fields)
        saved, (x, problem) = LinearSaved(*args[:count]), _linear_problem(args[count:])
        run = torch_chunk.backward if problem.algorithm == "torch" else _kernels(problem.algorithm).backward
        with without_autocast(x.q):
            d_q, d_k, d_v, d_start, *rest = run(saved, x, problem)
        d_total = rest[0] if rest else None
        if traced and args[count + LinearInputs._fields.index("kv")] is None:
            d_start = saved.den.new_empty(0)
        if traced and d_total is None:
            d_total = saved.den.new_empty(0)
        return d_q, d_k, d_v, d_start, d_total

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        count = len(LinearSaved._fields)
        den, x = args[LinearSaved._fields.index("den")], LinearInputs(*args[count : count + len(LinearInputs._fields)])
        d_state = [den.new_empty(0) if y is None else y.new_empty(y.shape) for y in (x.kv, x.total)]
        return x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), x.v.new_empty(x.v.shape), *d_state


@differentiable_op(
    "longspan::bidirectional_linear",
    (BidirectionalInputs, BidirectionalProblem),
    (BidirectionalSaved,),
    outputs=2,
    grads=3,
)
class _Bidirectional(DifferentiableOp):
    """The result, and what is saved for the backward pass."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor]:
        x, problem = _bidirectional_problem(args)
        return _kernels(problem.algorithm).forward(x, problem, zeroed=traced)

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        x, problem = _bidirectional_problem(args)
        size = _saved_size(x, problem)
        return x.v.new_empty(*x.q.shape[:3], x.v.shape[3]), x.q.new_empty(size, dtype=float32)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        count = len(BidirectionalInputs._fields)
        ctx.problem = BidirectionalProblem(*inputs[count:])
        out = output[0] if ctx.problem.algorithm == "favor_bidirectional" else None
        ctx.save_for_backward(out, output[1], *inputs[:count])

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(*refuse_forward_mode(d_out, *ctx.saved_tensors), *ctx.problem), *[None] * 8

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        count = len(BidirectionalSaved._fields)
        saved, (x, problem) = BidirectionalSaved(*args[:count]), _bidirectional_problem(args[count:])
        return _kernels(problem.algorithm).backward(saved, x, problem)

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        count = len(BidirectionalSaved._fields)
        q, k, v = args[count : count + 3]
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _bidirectional_problem(args: tuple[Any, ...]) -> tuple[BidirectionalInputs, BidirectionalProblem]:
    count = len(BidirectionalInputs._fields)
    return BidirectionalInputs(*args[:count]), BidirectionalProblem(*args[count:])
